"""A node checks its own rows for what one node can see; what needs everyone's is no reason to refuse it."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
from helpers_nodes import same_history
from helpers_nodes import values as described

from fedpact.core.errors import InvalidArgument
from fedpact.data.schema import Column, Schema
from fedpact.experiment import build
from fedpact.flower.described import Description, experiment_of
from fedpact.flower.links import Direct
from fedpact.flower.node import Node
from fedpact.flower.server import federate
from fedpact.run import execute

SITES = ("east", "north", "west")
SSCA = {"name": "ssca", "batch": 10}


@pytest.fixture
def files(tmp_path):
    """Nobody is ill in the east and everybody in the north; those of the north are of one sex."""
    rng = np.random.default_rng(3)
    rows = []
    for k, site in enumerate(SITES):
        ill = [np.zeros(20, int), np.ones(25, int), rng.integers(0, 2, 30)][k]
        sex = np.ones(len(ill), int) if site == "north" else rng.integers(0, 2, len(ill))
        age = rng.integers(20, 60, len(ill)) + 20 * ill
        own = [f"{a},{s},{site},{('no', 'yes')[y]}" for a, s, y in zip(age, sex, ill, strict=True)]
        (tmp_path / f"{site}.csv").write_text("\n".join(["age,sex,site,ill", *own]) + "\n")
        rows += own
    (tmp_path / "all.csv").write_text("\n".join(["age,sex,site,ill", *rows]) + "\n")
    return tmp_path


def values(files, problem, algorithm):
    return {
        "data": {"csv": str(files / "all.csv"), "target": "ill"},
        "split": {"how": "column", "column": "site"},
        "problem": problem,
        "algorithm": algorithm,
        "run": {"rounds": 4, "seed": 0},
    }


def over_nodes(files, problem, algorithm):
    given = values(files, problem, algorithm)
    members = [Node({"name": site, "csv": str(files / f"{site}.csv")}, files / "state" / site) for site in SITES]
    return federate({**given, "run": {**given["run"], "engine": {"name": "flower", "notes": True}}}, Direct(members))


def limited(*limits):
    model = {"name": "logistic", "intercept": True}
    return {"name": "constrained", "model": model, "minimize": [{"term": "loss"}], "subject_to": list(limits)}


PROBLEMS = {
    "logistic": ({"name": "logistic", "l2": 1e-2}, {"name": "fedavg"}),
    "nonconvex_logistic": ({"name": "nonconvex_logistic"}, {"name": "fedavg"}),
    "misses": (limited({"term": "misses", "at_most": 0.2}), SSCA),
    "gap": (limited({"term": "gap", "column": "sex", "above": 0.5, "at_most": 0.1}), SSCA),
    "client_loss": (limited({"term": "client_loss", "at_most": 0.4}), SSCA),
    "client_loss, each": (limited({"term": "client_loss", "at_most": [0.4, 0.5, 0.6]}), SSCA),
}


@pytest.mark.parametrize("name", PROBLEMS)
def test_nodes_of_one_class_or_one_group_take_part_as_in_a_simulation(name, files):
    same_history(execute(build(values(files, *PROBLEMS[name]))[0]), over_nodes(files, *PROBLEMS[name]), 1e-9)


def test_limits_for_other_clients_are_refused_before_round_1(files):
    problem = limited({"term": "client_loss", "at_most": [0.4, 0.5]})
    with pytest.raises(InvalidArgument, match=r"limit of ClientLoss \(U_i\) must be a number or one a client \(3\)"):
        over_nodes(files, problem, SSCA)


def test_the_number_of_rows_that_a_node_tells_costs_others_no_memory():
    columns = tuple(Column(f"x{j}", "number") for j in range(100))
    schema = Schema(columns, (1.0,) * 100, (0.0,) * 100, "y", ("no", "yes"))
    sizes = (2**31 - 1, 7)
    told = Description(("lab", "ward"), sizes, (False, False), ("a", "b"), schema)
    experiment_of(described(), told)  # which imports
    tracemalloc.start()
    experiment, _ = experiment_of(described(), told)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 10e6
    assert experiment.federation.sizes.tolist() == list(sizes)
    assert experiment.config()["data"]["rows"] == sum(sizes)
