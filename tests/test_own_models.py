"""Models and problems of the user's own: what a folder keeps of them, and what is refused by name."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from helpers_experiment import header_of, tree

import fedpact as fp
from fedpact.core.errors import CheckpointError, InvalidArgument
from fedpact.run import Experiment


@pytest.fixture(autouse=True)
def no_plots(monkeypatch):
    """Drawing takes longer than these runs do."""
    monkeypatch.setattr("fedpact.report.html.plots_section", lambda *_: "")


@pytest.fixture(scope="module")
def federation():
    rng = np.random.default_rng(0)
    return fp.data.from_arrays(rng.normal(size=(24, 4)), np.arange(24) % 2).split(clients=2)


def net(hidden=4, factor=1.0):
    """Networks whose functions have the same names."""
    return fp.Network(
        lambda tree, images: factor * (images @ tree["a"] @ tree["b"]),
        lambda key: {"a": jnp.ones((4, hidden)), "b": jnp.zeros((hidden, 2))},
        shape=(4,),
        classes=2,
    )


def train(problem, federation, **options):
    return fp.run(fp.FedSGD(), problem, federation, **{"rounds": 1, "engine": "local"} | options)


# Resuming


@pytest.mark.parametrize("told_apart", [True, False])
def test_a_refused_resume_changes_nothing(federation, tmp_path, monkeypatch, told_apart):
    train(net(4), federation, folder=tmp_path)
    before = tree(tmp_path)
    said = r"checkpoint must come from the same .*: fingerprints.problem.initial was .* and is .*\. Resume with"
    if not told_apart:  # shapes are compared too, when the checkpoint is put back
        settings = header_of(tmp_path / "checkpoint-000000001.bin")["settings"]
        monkeypatch.setattr(Experiment, "digest", lambda self: settings)
        said = "checkpoint must have this run's shapes, got others: its model or data"
    with pytest.raises(CheckpointError, match=said):
        train(net(8), federation, folder=tmp_path, resume=True, rounds=2)
    assert tree(tmp_path) == before


def test_a_resume_that_fails_in_its_first_round_leaves_the_end_of_before(federation, tmp_path, monkeypatch):
    train(net(), federation, folder=tmp_path)
    before = tree(tmp_path)
    monkeypatch.setattr("fedpact.core.driver._compiled", lambda *_: (_ for _ in ()).throw(MemoryError))
    with pytest.raises(MemoryError):
        train(net(), federation, folder=tmp_path, resume=True, rounds=2)
    after = tree(tmp_path)
    assert {name for name in before if before[name] != after[name]} == {"config.json"}  # it says: 2 rounds


def test_other_data_without_a_checkpoint_are_refused(federation, tmp_path):
    train(net(), federation, folder=tmp_path)
    (tmp_path / "checkpoint-000000001.bin").unlink()
    (tmp_path / "checkpoint-000000000.bin").unlink(missing_ok=True)
    before = tree(tmp_path)
    with pytest.raises(CheckpointError, match="folder must be of a run on the same data, got "):
        train(net(), federation.dataset.split(clients=3), folder=tmp_path, resume=True)
    assert tree(tmp_path) == before
    train(net(), federation, folder=tmp_path, resume=True)


def test_settings_that_differ_are_named(federation, tmp_path):
    train(net(), federation, folder=tmp_path)
    with pytest.raises(CheckpointError, match=r"of others: run.seed was 0 and is 5\. Resume with"):
        train(net(), federation, folder=tmp_path, resume=True, seed=5)


def digest(problem, federation):
    return Experiment(fp.FedSGD(), problem, federation, engine="local").digest()


def test_what_a_function_closes_over_is_part_of_the_experiment(federation, tmp_path):
    same, other = digest(net(), federation), digest(net(factor=2.0), federation)
    assert digest(net(), federation) == same != other
    train(net(), federation, folder=tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert set(config["fingerprints"]) == {"problem.apply", "problem.initial"}
    assert "net.<locals>.<lambda>" in config["problem"]["apply"]


@dataclass(frozen=True)
class Weighted(fp.Logistic):
    """A loss that is not its parent's."""

    weights: Any = field(default_factory=lambda: np.ones(5000))
    l2: float = 0.1


def test_one_number_of_a_long_array_is_part_of_the_experiment(federation):
    one = np.ones(5000)
    one[2500] = 2
    assert digest(Weighted(), federation) == digest(Weighted(), federation) != digest(Weighted(weights=one), federation)


def test_plain_problems_have_no_fingerprints(federation):
    assert "fingerprints" not in Experiment(fp.FedSGD(), fp.Logistic(), federation).config()


# Saving


def test_a_subclass_is_not_saved_as_its_parent(federation, tmp_path):
    assert Experiment(fp.FedSGD(), Weighted(), federation).config()["problem"]["name"] == "Weighted"
    with pytest.raises(InvalidArgument, match=r"problem must be one of .+ to be saved, got Weighted\. Give it a name"):
        train(Weighted(), federation, folder=tmp_path / "run")


@pytest.mark.parametrize(
    "initial",
    [lambda key: jnp.zeros((4, 2)), lambda key: [jnp.zeros((4, 2))], lambda key: {"w": jnp.zeros(8)}],
    ids=["array", "list", "flat"],
)
def test_models_whose_parameters_are_no_table_of_coefficients(federation, tmp_path, initial):
    def apply(tree, images):
        w = tree if hasattr(tree, "shape") else tree[0] if isinstance(tree, list) else tree["w"]
        return images @ w.reshape(4, 2)

    problem = fp.Network(apply, initial, shape=(4,), classes=2)
    run = train(problem, federation, folder=tmp_path / "run")
    assert run.coefficients == []
    x = federation.dataset.x
    np.testing.assert_array_equal(fp.Model.load(tmp_path / "run", problem).predict(x), run.model.predict(x))
