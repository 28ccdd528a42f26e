"""Deep runs end to end: telemetry on the test set, stop rules, experiment files, metrics."""

from __future__ import annotations

import numpy as np
import pytest

import fedpact as fp
from fedpact.core.errors import InvalidArgument, UnknownName
from fedpact.data.dataset import Column, Schema
from fedpact.engines import HostEngine, LocalEngine
from fedpact.experiment import build

PROBLEM = fp.TwoLayer(inputs=4, hidden=4, classes=2, mean=0.5, std=0.25)


def dataset(test=True):
    rng = np.random.default_rng(0)
    x = rng.integers(0, 256, (120, 4)).astype(np.uint8)
    y = (x[:, 0] > x[:, 1]).astype(float)
    schema = Schema(tuple(Column(f"p{i}", "number") for i in range(4)), (1.0,) * 4, (0.0,) * 4, "class", ("no", "yes"))
    return fp.data.Dataset("tiny", x, y, schema, {}, "none", np.arange(80, 120) if test else ())


@pytest.fixture(scope="module")
def federation():
    return dataset().split(clients=4)


@pytest.fixture(scope="module")
def tested(federation):
    """What a network gets without asking: the host engine, single precision, the test set after every round."""
    return fp.run(fp.FedSGD(rate=1.0), PROBLEM, federation, rounds=30)


def by_hand(model, data):
    """The loss and the share of right answers on the test rows, in NumPy."""
    x, y = (data.x[data.test] / 255 - 0.5) / 0.25, data.y[data.test].astype(int)
    tree = model.w.tree
    z = np.maximum(x @ tree["hidden"]["w"] + tree["hidden"]["b"], 0) @ tree["output"]["w"] + tree["output"]["b"]
    loss = np.log(np.exp(z).sum(axis=1)) - z[np.arange(len(y)), y]
    return loss.mean(), np.mean(z.argmax(axis=1) == y)


def test_the_test_set_is_measured_after_every_round(tested):
    loss, accuracy = by_hand(tested.model, dataset())
    assert tested.history.last("test_loss") == pytest.approx(loss, rel=1e-5)
    assert tested.history.last("test_accuracy") == pytest.approx(accuracy, rel=1e-6)
    assert not {"objective", "gradient", "accuracy"} & set(tested.history.columns)
    assert np.all(np.isfinite(tested.history.column("test_loss")))
    assert accuracy > 0.8
    assert tested.summary["test_accuracy"] == pytest.approx(accuracy, rel=1e-6)
    assert "test loss" in repr(tested)
    assert tested.config["run"]["telemetry"] == "test"
    assert tested.config["run"]["precision"] == "single"
    assert tested.metrics["pooled"]["accuracy"] == pytest.approx(accuracy, rel=1e-6)
    assert tested.metrics["pooled"]["rows"] == 40


def test_all_measures_the_clients_as_well(federation, tested):
    run = fp.run(fp.FedSGD(rate=1.0), PROBLEM, federation, rounds=2, telemetry="all")
    assert {"objective", "gradient", "accuracy", "test_loss", "test_accuracy"} <= set(run.history.columns)
    np.testing.assert_array_equal(run.history.column("test_loss"), tested.history.column("test_loss")[:3])


def test_a_run_stops_at_an_accuracy_on_the_test_set(federation, tested):
    accuracy = tested.history.column("test_accuracy")
    rule = fp.stop.Target("test_accuracy", 0.75, above=True)
    expected = next(t for t in range(1, 31) if accuracy[t] >= 0.75)
    run = fp.run(fp.FedSGD(rate=1.0), PROBLEM, federation, rounds=30, stop=rule)
    assert run.outcome_kind is fp.stop.Outcome.STOPPED
    assert run.history.rounds == expected
    assert run.where == f"round {expected}, test_accuracy ≥ 0.75"


def test_a_loss_that_rose_is_said(federation):
    run = fp.run(fp.FedSGD(rate=300.0), PROBLEM, federation, rounds=1)
    assert any(notice.startswith("The test loss ended above its start: ") for notice in run.notices)


def test_rules_on_columns_that_are_not_measured_are_refused(federation):
    with pytest.raises(
        UnknownName, match=r"^column of the stop rule must be one of .*test_accuracy.*, got 'objective'"
    ):
        fp.run(fp.FedSGD(), PROBLEM, federation, rounds=1, stop=fp.stop.Target("objective", 0.1))
    plain = dataset(test=False).split(clients=4)
    with pytest.raises(UnknownName, match=r", got 'test_accuracy'"):
        fp.run(fp.FedSGD(), PROBLEM, plain, rounds=1, stop=fp.stop.Target("test_accuracy", 0.9, above=True))
    with pytest.raises(
        UnknownName, match=r"^telemetry must be one of all, none, test, got 'tests'\. Did you mean 'test'\?"
    ):
        fp.run(fp.FedSGD(), PROBLEM, federation, rounds=1, telemetry="tests")
    for options in ({"engine": "debug"}, {}):
        where = federation if options else plain
        with pytest.raises(
            InvalidArgument, match=r"^telemetry must be \"all\" or \"none\" here, got 'test'\. It needs another engine"
        ):
            fp.run(fp.FedSGD(), PROBLEM, where, rounds=1, telemetry="test", **options)


def test_defaults_follow_from_the_problem(federation):
    deep = fp.Experiment(fp.FedSGD(), PROBLEM, federation)
    assert (type(deep.engine), deep.precision, deep.telemetry) == (HostEngine, "single", "test")
    without = fp.Experiment(fp.FedSGD(), PROBLEM, dataset(test=False).split(clients=4))
    assert without.telemetry == "all"
    convex = fp.Experiment(fp.FedSGD(), fp.Logistic(), fp.data.breast_cancer().split(clients=4))
    assert (type(convex.engine), convex.precision, convex.telemetry) == (LocalEngine, "double", "all")


# Experiment files


def tables(**changes):
    out = {
        "data": {"name": "digits"},
        "split": {"clients": 20, "how": "shards"},
        "problem": {"name": "two_layer", "inputs": 64, "hidden": 8, "softmax": False},
        "algorithm": {"name": "fedadmm", "preset": "paper", "batch": 20, "rho": [[0, 0.01], [5, 0.1]]},
        "run": {
            "rounds": 3,
            "participation": {"scheme": "independent", "probabilities": [0.2] * 20},
            "engine": {"name": "host", "at_once": 2, "spill": True},
            "telemetry": "all",
        },
        "stop": {"target": {"column": "accuracy", "value": 0.9, "above": True}},
    }
    return {name: {**table, **changes.get(name, {})} for name, table in out.items()}


def test_a_file_describes_a_deep_experiment():
    experiment, _ = build(tables())
    assert experiment.engine == HostEngine(at_once=2, spill=True)
    assert experiment.problem == fp.TwoLayer(inputs=64, hidden=8)
    assert experiment.participation == fp.Independent([0.2] * 20)
    assert experiment.algorithm.momentum == 0.5
    assert experiment.algorithm.rho == [[0, 0.01], [5, 0.1]]
    assert experiment.telemetry == "all"


@pytest.mark.parametrize("name", ["cnn1", "cnn2"])
def test_the_cnns_have_names(name):
    said = f"x of dataset 'digits' must be {784 if name == 'cnn1' else 3072} numbers a row"
    with pytest.raises(fp.DataError, match=said):
        build(tables() | {"problem": {"name": name, "hidden": 16, "softmax": True}})


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"run": {"engine": {"name": "hots"}}},
            r"^engine must be one of debug, flower, host, local, ray, got 'hots'\. Did you mean 'host'",
        ),
        (
            {"run": {"engine": {"name": "host", "at_ones": 1}}},
            r"^key of engine must be one of at_once, devices, spill, got 'at_on",
        ),
        ({"run": {"engine": {"at_once": 1}}}, r"must have a 'name', got None"),
        ({"run": {"participation": {"scheme": "independent"}}}, r"^participation must have 'probabilities'"),
        ({"algorithm": {"rho": [[5, 0.1]]}}, r"^rho \(ρ\) must be pairs"),
        ({"algorithm": {"batch": 500}}, r"^batch \(B\) must be at most the \d+ rows of client \d+, got 500\."),
    ],
    ids=str,
)
def test_what_a_file_gets_wrong_is_said(changes, said):
    with pytest.raises(fp.FedpactError, match=said):
        build(tables(**changes))
