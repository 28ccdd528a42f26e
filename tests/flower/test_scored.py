"""Rows that nodes hold out are scored there: the columns `test_loss` and `test_accuracy`, from sums over nodes."""

from __future__ import annotations

import dataclasses
import logging

import numpy as np
import pytest
from helpers_masked import BASE, nodes, same, shared_programs
from helpers_nodes import Faulty

from fedpact.core import driver
from fedpact.core.errors import UnknownName
from fedpact.core.stop import Outcome
from fedpact.data import Federation
from fedpact.engines import FlowerEngine
from fedpact.experiment import build
from fedpact.flower.described import Description
from fedpact.flower.links import Direct
from fedpact.flower.run_at_node import RunAtNode
from fedpact.flower.server import federate
from fedpact.run import Run, execute

SCORES = ["test_loss", "test_accuracy"]
#: The sums that go with a node's telemetry, as they are sorted among it.
SUMS = ["test_correct", "test_endless", "test_loss", "test_rows"]


REGRESSION = {"data": {"name": "diabetes"}, "problem": {"name": "least_squares", "l2": 1e-2}}


@pytest.fixture(autouse=True)
def plain_runs(monkeypatch):
    monkeypatch.setattr(RunAtNode, "__init__", shared_programs)
    monkeypatch.setattr(driver, "BLOCK_SECONDS", 0.0)
    monkeypatch.setattr(logging.getLogger("fedpact"), "propagate", True)
    monkeypatch.setattr(Run, "report", lambda self, folder: None)


def asked(algorithm="fedavg", holdout=0.2, flower=None, rounds=3, **run):
    return {
        **BASE,
        "split": {**BASE["split"], **({} if holdout is None else {"holdout": holdout})},
        "algorithm": {"name": algorithm} if isinstance(algorithm, str) else algorithm,
        "run": {"rounds": rounds, "engine": {"name": "flower", "notes": True, **(flower or {})}, **run},
    }


def alone(described):
    """The same experiment in a simulation."""
    return {**described, "run": {name: value for name, value in described["run"].items() if name != "engine"}}


def witness(described, clients=None):
    """The simulation, whose dataset has as its own test set the rows that these clients hold out, or all."""
    e = build(alone(described))[0]
    of = e.federation
    tested = dataclasses.replace(
        of.dataset, test=np.concatenate([of.held_out[i] for i in clients or range(of.clients)])
    )
    return execute(dataclasses.replace(e, federation=Federation(tested, of.rows, (), of.names)))


def scores_of(run):
    return np.stack([run.history.column(name) for name in SCORES])


def lost(who):
    return lambda i, question, answer: None if i == who and question.kind == "measure" else answer


# The same columns as a simulation


@pytest.mark.parametrize(
    ("algorithm", "precision", "tolerance"), [("fedavg", "double", 1e-12), ("fedadmm", "single", 1e-6)]
)
def test_a_run_over_nodes_is_scored_as_a_simulation_is(algorithm, precision, tolerance, tmp_path):
    described = asked(algorithm, precision=precision)
    run, simulated = federate(described, Direct(nodes(tmp_path))), witness(described)
    same(simulated, run)
    np.testing.assert_allclose(scores_of(run), scores_of(simulated), rtol=tolerance)
    assert len(set(scores_of(run)[0])) == 4
    assert run.summary["test_accuracy"] == run.history.last("test_accuracy")


@pytest.mark.parametrize(("precision", "tolerance"), [("double", 1e-12), ("single", 1e-6)])
def test_under_masks_too(precision, tolerance, tmp_path):
    pytest.importorskip("cryptography")
    described = asked(flower={"secure": True, "bound": 100.0}, precision=precision)
    heard = []

    def listen(i, question, answer):
        heard.extend(answer.arrays if question.kind == "measure" else ())
        return answer

    run = federate(described, Faulty(nodes(tmp_path), listen))
    assert heard == []  # what a node answers has no numbers in it
    np.testing.assert_allclose(scores_of(run), scores_of(witness(described)), rtol=tolerance, atol=1e-12)


def test_they_are_the_pooled_scores_of_the_same_file_simulated(tmp_path):
    """Another way to compute them: predictions for every held-out row, on the final model."""
    run = federate(asked(), Direct(nodes(tmp_path)))
    pooled = execute(build(alone(asked()))[0]).metrics["pooled"]
    assert run.history.last("test_loss") == pytest.approx(pooled["log_loss"], rel=1e-12)
    assert run.history.last("test_accuracy") == pytest.approx(pooled["accuracy"], rel=1e-12)
    assert run.metrics is None


def test_where_there_are_no_classes_there_is_a_loss_alone(tmp_path):
    described = asked() | REGRESSION
    run, simulated = federate(described, Direct(nodes(tmp_path))), witness(described)
    assert "test_accuracy" not in run.history.columns
    one, other = (r.history.column("test_loss") for r in (run, simulated))
    np.testing.assert_allclose(one, other, rtol=1e-12)


def test_a_node_may_have_no_rows_to_hold_out(tmp_path):
    split = {"how": "sizes", "sizes": [2, 110, 165, 165], "holdout": 0.2}
    described = asked() | REGRESSION | {"split": split}
    assert [len(part) for part in build(alone(described))[0].federation.held_out] == [0, 22, 33, 33]
    run, simulated = federate(described, Direct(nodes(tmp_path, 4))), witness(described)
    one, other = (r.history.column("test_loss") for r in (run, simulated))
    np.testing.assert_allclose(one, other, rtol=1e-12)


# Nodes that do not answer


@pytest.mark.parametrize("secure", [False, True])
def test_without_a_node_the_scores_are_those_of_the_others_rows(secure, tmp_path):
    if secure:
        pytest.importorskip("cryptography")
    described = asked(flower={"quorum": 0.5, "secure": secure})
    run = federate(described, Faulty(nodes(tmp_path), lost(1)))
    assert run.history.column("measured").tolist() == [pytest.approx(5 / 6)] * 4
    np.testing.assert_allclose(scores_of(run), scores_of(witness(described, [0, 2, 3, 4, 5])), rtol=1e-9)
    assert np.all(scores_of(run)[0, 1:] != scores_of(witness(described))[0, 1:])


@pytest.mark.parametrize("secure", [False, True])
def test_a_held_out_row_beyond_all_numbers_ends_nothing(secure, tmp_path):
    if secure:
        pytest.importorskip("cryptography")
    members = nodes(tmp_path)

    def before(i, question):
        if i == 2 and question.kind == "measure" and question.values["round"] == 2:
            (run,) = [session.run for session in members[i].sessions.values()]
            run.aside = run.aside._replace(x=run.aside.x.at[0].set(np.inf))

    described = asked(flower={"secure": secure})
    run, simulated = federate(described, Faulty(members, before=before)), witness(described)
    assert np.isfinite(scores_of(run)[0]).tolist() == [True, True, False, False]
    assert np.isinf(run.history.last("test_loss"))
    assert run.outcome_kind is Outcome.ROUNDS
    assert run.history.column("measured").tolist() == [1.0] * 4
    np.testing.assert_allclose(run.history.column("objective"), simulated.history.column("objective"), rtol=1e-9)


# When they are measured


def test_in_the_rounds_that_are_measured_and_the_last(tmp_path):
    described = asked(rounds=3, evaluate_every=2)
    run = federate(described, Direct(nodes(tmp_path)), folder=tmp_path / "run")
    assert np.isnan(scores_of(run)).tolist() == [[False, True, False, False]] * 2
    np.testing.assert_allclose(scores_of(run), scores_of(witness(described)), rtol=1e-12)


def test_a_rule_may_stop_the_run_by_them(tmp_path):
    losses = scores_of(federate(asked(), Direct(nodes(tmp_path / "a"))))[0]
    described = asked() | {"stop": {"target": {"column": "test_loss", "value": float(losses[2])}}}
    run = federate(described, Direct(nodes(tmp_path / "b")))
    assert (run.outcome_kind, run.history.rounds) == (Outcome.STOPPED, 2)
    del described["split"]["holdout"]
    with pytest.raises(UnknownName, match=r"column of the stop rule must be one of .*, got 'test_loss'"):
        federate(described, Direct(nodes(tmp_path / "c")))


@pytest.mark.parametrize("holdout", [None, 0])
def test_without_holdout_nothing_changes(holdout, tmp_path):
    def told(which):
        numbers = []

        def listen(i, question, answer):
            numbers.extend([len(answer.arrays)] if question.kind == "measure" else [])
            return answer

        run = federate(asked(holdout=which, rounds=1), Faulty(nodes(tmp_path / str(which)), listen))
        return set(numbers), set(SCORES) <= set(run.history.columns)

    (without,), scored = told(holdout)
    assert not scored
    assert told(0.2) == ({without + len(SUMS)}, True)


@pytest.mark.parametrize("blind", [{"telemetry": "none"}, {"privacy": {"clip": 1.0, "noise": 2.0}}])
def test_where_nothing_is_measured_nothing_is_scored(blind, tmp_path):
    described = asked({"name": "fedavg", "epochs": 1, "step": 0.5}, rounds=1)
    described["run"] |= {k: v for k, v in blind.items() if k == "telemetry"}
    described |= {k: v for k, v in blind.items() if k == "privacy"}
    described["run"]["engine"]["notes"] = False  # a private run's nodes have none
    kinds = []

    def listen(i, question, answer):
        kinds.append(question.kind)
        return answer

    run = federate(described, Faulty(nodes(tmp_path), listen))
    assert "measure" not in kinds
    assert not set(SCORES) & set(run.history.columns)
    assert any("nothing was scored" in notice for notice in run.notices)


# Resumed runs


def test_a_run_that_is_resumed_has_the_scores_of_one_that_was_not(tmp_path):
    whole = federate(asked(rounds=4), Direct(nodes(tmp_path / "a")))
    federate(asked(rounds=2), Direct(nodes(tmp_path / "b")), folder=tmp_path / "run")
    run = federate(asked(rounds=4), Direct(nodes(tmp_path / "b")), folder=tmp_path / "run", resume=True)
    np.testing.assert_array_equal(scores_of(run), scores_of(whole))


def test_a_folder_from_before_these_columns_goes_on_with_those_it_has(tmp_path, monkeypatch):
    federation, folder = Description.federation, tmp_path / "run"
    with monkeypatch.context() as before:
        before.setattr(Description, "federation", lambda self, remarks, scored: federation(self, remarks))
        federate(asked(rounds=2, evaluate_every=2), Direct(nodes(tmp_path)), folder=folder)
    described = asked(rounds=5, evaluate_every=2)
    run = federate(described, Direct(nodes(tmp_path)), folder=folder, resume=True)
    assert not set(SCORES) & set(run.history.columns)
    same(run, witness(described), but=("measured", *FlowerEngine.told))
