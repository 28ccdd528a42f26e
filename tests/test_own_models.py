"""Models and problems of the user's own: what a folder keeps of them, and what is refused by name."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from helpers_experiment import header_of, tree

import fedpact as fp
from fedpact.core.errors import CheckpointError, InvalidArgument
from fedpact.core.vector import Vector
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
        said = "checkpoint must have this run's shapes, got others. Its model or data"
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


def test_what_a_term_of_your_own_closes_over_is_part_of_the_experiment(federation):
    def problem(factor):
        own = fp.PerRow(lambda w, batch: factor * (batch.x @ w.tree["w"]) ** 2)
        return fp.Constrained(fp.Logistic(l2=0), fp.Loss(), [own <= 1.0])

    made = [Experiment(fp.SSCA(), problem(factor), federation) for factor in (1.0, 1.0, 2.0)]
    assert made[0].digest() == made[1].digest() != made[2].digest()


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


def test_bytes_of_your_own_arrays_are_numbers_in_training_and_in_prediction(tmp_path):
    rng = np.random.default_rng(1)
    x, y = rng.integers(0, 256, (20, 4)).astype(np.uint8), np.arange(20) % 2
    run = train(fp.Softmax(inputs=4, classes=2), fp.data.from_arrays(x, y).split(clients=2), folder=tmp_path / "run")
    for model in (run.model, fp.Model.load(tmp_path / "run")):
        np.testing.assert_array_equal(model.predict(x), model.predict(x.astype(float)))


# Trials


@pytest.mark.drill
def test_trials_of_a_column_by_name_are_those_of_their_own_splits():
    rng = np.random.default_rng(2)
    x = rng.normal(size=(60, 2)) * [1, 10] + [0, 5]
    dataset = fp.data.from_arrays(x, (x.sum(axis=1) > 5).astype(int), ["a", "b"], scale="standard")
    splits = [dataset.split(clients=2, seed=seed, holdout=0.3) for seed in (0, 1)]
    problem = fp.Constrained(fp.Logistic(l2=0), fp.Loss(), [fp.Gap("b", above=6.0) <= 0.05])
    options = {"rounds": 2, "participation": 1.0}
    both = fp.trials(fp.SSCA(), problem, splits, [0, 1], **options)
    for seed, run in enumerate(both):
        alone = fp.run(fp.SSCA(), problem, splits[seed], seed=seed, **options)
        for column in set(alone.history.columns) - {"seconds"}:
            np.testing.assert_allclose(
                run.history.column(column), alone.history.column(column), rtol=1e-9, err_msg=column
            )


# What is no model, and what is no problem


@pytest.mark.parametrize(
    ("initial", "said"),
    [
        (lambda: jnp.zeros(4), "initial must take a key and return a tree of arrays, got TypeError: .* takes 0 "),
        (lambda key: 1 / 0, "initial must take a key and return a tree of arrays, got ZeroDivisionError: "),
        (lambda key: "w", "initial must take a key and return a tree of arrays, got TypeError: "),
        (lambda key: {}, r"initial must be a function to a tree with at least one array, got \{\}"),
    ],
    ids=["no key", "raises", "text", "empty"],
)
def test_a_start_that_is_none(federation, initial, said):
    with pytest.raises(InvalidArgument, match=said):
        Experiment(fp.FedSGD(), fp.Network(lambda tree, images: images, initial, (4,), 2), federation)


def test_a_model_is_loaded_with_a_problem_not_its_name(federation, tmp_path):
    path = train(fp.Softmax(4, 2), federation).model.save(tmp_path / "model.bin")
    with pytest.raises(InvalidArgument, match=r"problem must be a problem such as fedpact.TwoLayer\(\), got 'softmax'"):
        fp.Model.load(path, problem="softmax")


def test_what_is_not_installed_is_named(monkeypatch):
    from fedpact.problems.torch import TorchNetwork

    nothing = SimpleNamespace(import_module=lambda name: (_ for _ in ()).throw(ImportError))
    monkeypatch.setattr("fedpact.core.errors.importlib", nothing)
    makers = {
        "torch": lambda: TorchNetwork(lambda: None, shape=(64,)),
        "flax": lambda: fp.from_flax(None, (4,), 2),
        "equinox": lambda: fp.from_equinox(lambda key: None, (4,), 2),
    }
    for name, make in makers.items():
        with pytest.raises(InvalidArgument, match=rf"{name} must be installed .* pip install 'fedpact\[{name}\]'"):
            make()


def test_the_shape_of_an_input_is_a_list(monkeypatch):
    from fedpact.problems.torch import TorchNetwork

    monkeypatch.setattr("fedpact.problems.torch.the_extra", lambda name: None)
    for make in (lambda: TorchNetwork(lambda: None, shape=64), lambda: fp.Network(net, net, shape=64)):
        with pytest.raises(InvalidArgument, match=r"shape must be the sizes of one input, .* got 64\. A row of 64"):
            make()


@dataclass(frozen=True)
class Plain:
    """A whole problem; `changes` replaces methods."""

    changes: Any = ()

    def __getattr__(self, name):
        if name.startswith("__") or name not in METHODS:
            raise AttributeError(name)
        return METHODS[name] if name not in dict(self.changes) else dict(self.changes)[name]

    @property
    def gradient(self):
        return dict(self.changes).get("gradient", LEAST.gradient)


LEAST = fp.LeastSquares()
METHODS = {name: getattr(LEAST, name) for name in ("init", "value_and_gradient", "counts", "predict")}
METHODS["check"] = lambda federation: None


@pytest.mark.parametrize(
    ("method", "instead", "said"),
    [
        ("check", None, "problem must be one with the methods .* got 'Plain'. Plain lacks check: docs/python.md"),
        ("counts", None, "Plain lacks counts"),
        (
            "init",
            lambda n, dtype: {"w": jnp.zeros(n)},
            "init of Plain must be a function that returns a Vector, got 'di",
        ),
        ("init", lambda n, dtype: LEAST.init(n + 1, dtype), r"value_and_gradient of Plain must be .*\(w, batch\)"),
        ("init", lambda n, dtype: Vector({"w": jnp.zeros(n, int)}), "init of Plain must be .* of floating point, got"),
        ("counts", lambda w, batch: {"seen": batch.rows}, r"counts of Plain must be .* with 'rows', got \['seen'\]"),
        (
            "gradient",
            lambda w, batch: Vector({"w": jnp.zeros(())}),
            r"gradient of Plain must be a gradient of the parameters' shapes \{'w': \(4,\)\}, got \{'w': \(\)\}",
        ),
        ("value_and_gradient", lambda w, batch: (batch.y, w), r"whose value is one number, got \(3,\)\. Sum over"),
    ],
)
def test_what_is_no_problem_is_refused_when_an_experiment_is_made(federation, method, instead, said):
    assert Experiment(fp.FedSGD(), Plain(), federation).rounds == 100
    with pytest.raises(InvalidArgument, match=said):
        Experiment(fp.FedSGD(), Plain(((method, instead),)), federation)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"clients": 2, "names": 3}, "names must be a list of names, one per party, got 3"),
        ({"blocks": [[0, [1]], [2, 3]]}, r"block of party '0' must be a list of column numbers, got \[0, \[1\]\]"),
    ],
)
def test_parties_that_are_none(federation, options, said):
    with pytest.raises(InvalidArgument, match=said):
        federation.dataset.split(how="features", **options)
