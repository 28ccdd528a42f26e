"""Logistic regression with the bounded regulariser: against NumPy, and its two curvature constants against Hessians."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from literal import as_batch, as_flat, as_vector, rows

import fedpact as fp
from fedpact.core.errors import DataError, InvalidArgument, UnknownName
from fedpact.experiment import build, read
from fedpact.problems import PROBLEMS, Logistic, NonconvexLogistic, optimum

KINDS = [NonconvexLogistic(0.7), NonconvexLogistic(0.7, intercept=True), NonconvexLogistic(0.0)]
each = pytest.mark.parametrize("problem", KINDS, ids=str)


def client(d=9, n=4, seed=0):
    return rows(Logistic(), d, n, seed)


def point(problem, seed=1, scale=1.0, n=4):
    return scale * np.random.default_rng(seed).normal(size=n + problem.intercept)


def value(problem, flat, x, y):
    """(1/d) Σ ln(1 + e^z) − bz, plus β Σ w²/(1 + w²) over the coefficients alone."""
    w, b = (flat[:-1], flat[-1]) if problem.intercept else (flat, 0.0)
    z = x @ w + b
    return np.mean(np.log(1 + np.exp(z)) - y * z) + problem.beta * np.sum(w**2 / (1 + w**2))


def with_ones(problem, x):
    return np.column_stack([x, np.ones(len(x))]) if problem.intercept else x


def gradient(problem, flat, x, y):
    """The derivative of t²/(1 + t²) is 2t/(1 + t²)²."""
    a = with_ones(problem, x)
    slope = 2 * flat / (1 + flat**2) ** 2
    slope[4:] = 0
    return a.T @ (1 / (1 + np.exp(-a @ flat)) - y) / len(y) + problem.beta * slope


def hessian(problem, flat, x):
    """Its second derivative is (2 − 6t²)/(1 + t²)³."""
    a = with_ones(problem, x)
    p = 1 / (1 + np.exp(-a @ flat))
    bend = (2 - 6 * flat**2) / (1 + flat**2) ** 3
    bend[4:] = 0
    return (a.T * (p * (1 - p))) @ a / len(x) + problem.beta * np.diag(bend)


@each
def test_value_and_gradient(problem):
    x, y = client()
    batch = as_batch(x, y)
    for seed in range(3):
        flat = point(problem, seed)
        w = as_vector(problem, flat)
        f, g = problem.value_and_gradient(w, batch)
        assert float(f) == pytest.approx(value(problem, flat, x, y), rel=1e-13)
        for got in (g, problem.gradient(w, batch)):
            np.testing.assert_allclose(as_flat(got), gradient(problem, flat, x, y), rtol=1e-12, atol=1e-14)


@each
def test_the_derivatives_by_hand_are_those_of_the_value(problem):
    """Central differences of value and gradient, so that the witnesses above are not wrong themselves."""
    x, y = client()
    flat, h = point(problem, 2), 1e-5
    steps = h * np.eye(len(flat))
    slopes = [(value(problem, flat + s, x, y) - value(problem, flat - s, x, y)) / (2 * h) for s in steps]
    np.testing.assert_allclose(gradient(problem, flat, x, y), slopes, rtol=1e-7, atol=1e-9)
    bends = [(gradient(problem, flat + s, x, y) - gradient(problem, flat - s, x, y)) / (2 * h) for s in steps]
    np.testing.assert_allclose(hessian(problem, flat, x), bends, rtol=1e-6, atol=1e-8)


@each
@pytest.mark.parametrize("junk", [0.0, 5.0])
def test_padding_changes_nothing(problem, junk):
    x, y = client()
    w = as_vector(problem, point(problem))
    bare, padded = as_batch(x, y), as_batch(x, y, padding=6, junk=junk)
    (f, g), (f_padded, g_padded) = (problem.value_and_gradient(w, batch) for batch in (bare, padded))
    assert float(f_padded) == pytest.approx(float(f), rel=1e-14)
    for got in (g_padded, problem.gradient(w, padded)):
        np.testing.assert_allclose(as_flat(got), as_flat(g), rtol=1e-13, atol=1e-15)
    assert float(problem.lipschitz(padded)) == pytest.approx(float(problem.lipschitz(bare)), rel=1e-13)
    for name, count in problem.counts(w, bare).items():
        assert float(problem.counts(w, padded)[name]) == float(count)


def test_the_regulariser_is_not_divided_by_the_rows():
    """Twice the same rows: the same f."""
    problem, (x, y) = NonconvexLogistic(0.7), client()
    w = as_vector(problem, point(problem))
    once, twice = as_batch(x, y), as_batch(np.concatenate([x, x]), np.append(y, y))
    assert float(problem.value_and_gradient(w, twice)[0]) == pytest.approx(
        float(problem.value_and_gradient(w, once)[0]), rel=1e-14
    )


def test_the_intercept_is_not_penalised():
    """With w = 0 the regulariser vanishes whatever b is, in the value and in the gradient."""
    x, y = client()
    light, heavy = NonconvexLogistic(0.0, intercept=True), NonconvexLogistic(1e6, intercept=True)
    w, batch = as_vector(light, np.array([0, 0, 0, 0, 3.0])), as_batch(x, y)
    assert float(light.value_and_gradient(w, batch)[0]) == float(heavy.value_and_gradient(w, batch)[0])
    np.testing.assert_array_equal(as_flat(light.gradient(w, batch)), as_flat(heavy.gradient(w, batch)))


def test_the_regulariser_is_bounded():
    """β per coefficient at most, and flat far out: (1 + 1e150²)² is not finite, the slope is."""
    problem, batch = NonconvexLogistic(0.7), as_batch(np.zeros((2, 3)), np.array([0.0, 1.0]))
    f, g = problem.value_and_gradient(as_vector(problem, np.array([1e150, -1e9, 0.0])), batch)
    assert float(f) == pytest.approx(np.log(2) + 1.4, rel=1e-12)
    np.testing.assert_allclose(as_flat(g), 0, atol=1e-20)


# Curvature


@each
def test_the_constants_bound_the_eigenvalues_of_hessians(problem):
    x, y = client()
    batch = as_batch(x, y, padding=2)
    r, s = float(problem.lipschitz(batch)), float(problem.weak_convexity(batch))
    for seed in range(60):
        found = np.linalg.eigvalsh(hessian(problem, point(problem, seed, 10.0 ** (seed % 3 - 1)), x))
        assert -s * (1 + 1e-12) <= found[0] + 1e-14
        assert found[-1] <= r * (1 + 1e-12)


@pytest.mark.parametrize("beta", [0.7, 0.1])
def test_the_largest_curvature_is_reached_at_0(beta):
    """There p(1 − p) = 1/4 and the regulariser bends by 2β in every direction."""
    problem, (x, y) = NonconvexLogistic(beta), client()
    top = np.linalg.eigvalsh(hessian(problem, np.zeros(4), x))[-1]
    assert top == pytest.approx(np.linalg.eigvalsh(x.T @ x)[-1] / 36 + 2 * beta, rel=1e-12)
    assert float(problem.lipschitz(as_batch(x, y))) == pytest.approx(top, rel=1e-12)


@pytest.mark.parametrize("beta", [0.7, 0.1])
def test_the_least_curvature_is_reached_at_1(beta):
    """(2 − 6)/2³ = −1/2. Rows along one direction leave the others to the regulariser alone."""
    problem = NonconvexLogistic(beta)
    x, y = np.outer(np.arange(1.0, 4.0), [1.0, 0, 0, 0]), np.array([0.0, 1, 1])
    s = float(problem.weak_convexity(as_batch(x, y)))
    assert s == pytest.approx(beta / 2, rel=1e-15)
    least = np.linalg.eigvalsh(hessian(problem, np.ones(4), x))[0]
    assert least == pytest.approx(-s, rel=1e-12)
    batch, h = as_batch(x, y), 1e-5
    ends = [as_flat(problem.gradient(as_vector(problem, np.array([1.0, 1 + t, 1, 1])), batch))[1] for t in (h, -h)]
    assert (ends[0] - ends[1]) / (2 * h) == pytest.approx(-s, rel=1e-6), "of the code's own gradient too"


# The rest of the contract


@each
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_it_stays_in_its_precision(problem, dtype):
    w = problem.init(4, dtype)
    np.testing.assert_array_equal(as_flat(w), np.zeros(4 + problem.intercept))
    batch = jax.tree.map(lambda a: a.astype(dtype), as_batch(*client()))
    out = jax.eval_shape(
        lambda: (w, problem.value_and_gradient(w, batch), problem.lipschitz(batch), problem.weak_convexity(batch))
    )
    assert {leaf.dtype for leaf in jax.tree.leaves(out)} == {np.dtype(dtype)}


def test_counts_and_predictions():
    """Scores 1, −1, 2, 0 against labels 1, 1, 0, 0: right are the first and, at the threshold, the last."""
    problem = NonconvexLogistic()
    x = np.array([[1.0], [-1.0], [2.0], [0.0]])
    w = as_vector(problem, np.array([1.0]))
    counts = problem.counts(w, as_batch(x, np.array([1.0, 1.0, 0.0, 0.0]), padding=3))
    assert {name: float(v) for name, v in counts.items()} == {"rows": 4, "correct": 2}
    np.testing.assert_allclose(problem.predict(w, x), 1 / (1 + np.exp(-x[:, 0])), rtol=1e-14)
    assert problem.classifies


@pytest.mark.parametrize("beta", [-1e-9, float("nan"), float("inf"), "small", None, True])
def test_bad_weights_are_refused(beta):
    with pytest.raises(InvalidArgument, match=r"^beta \(β\) must be a number of at least 0, got .+\.$"):
        NonconvexLogistic(beta)
    with pytest.raises(InvalidArgument, match=r"^intercept must be true or false, got 1\.$"):
        NonconvexLogistic(intercept=1)


def test_it_wants_two_classes():
    x = np.arange(6.0).reshape(3, 2)
    numeric = fp.data.Federation.from_arrays([(x, np.array([0.1, 0.2, 0.3]))], classes=())
    with pytest.raises(DataError, match=r"^labels must be two classes for NonconvexLogistic, got a numeric target\."):
        NonconvexLogistic().check(numeric)
    NonconvexLogistic().check(fp.data.Federation.from_arrays([(x, np.array([0, 1, 1]))], classes=["a", "b"]))


def test_the_optimum_of_a_problem_that_is_not_convex_is_not_claimed():
    with pytest.raises(InvalidArgument, match=r"^problem must be Logistic or LeastSquares, got NonconvexLogistic\.$"):
        optimum(NonconvexLogistic(), None)


# Runs


def test_it_is_trained_saved_and_loaded(tmp_path):
    """Gradient descent in NumPy is FedAvg of one step with everyone; then the model's file."""
    parts = [client(seed=seed) for seed in range(3)]
    federation = fp.data.Federation.from_arrays(parts, classes=["0", "1"])
    problem = NonconvexLogistic(0.2, intercept=True)
    with jax.disable_jit(False):
        run = fp.run(fp.FedAvg(steps=1, step=0.5), problem, federation, rounds=5)
    w = np.zeros(5)
    for t in range(6):
        f = np.mean([value(problem, w, x, y) for x, y in parts])
        assert run.history.column("objective")[t] == pytest.approx(f, rel=1e-12)
        end, w = w, w - 0.5 * np.mean([gradient(problem, w, x, y) for x, y in parts], axis=0)
    np.testing.assert_allclose(as_flat(run.model.w), end, rtol=1e-12)
    assert run.config["problem"] == {"name": "nonconvex_logistic", "beta": 0.2, "intercept": True}
    run.model.save(tmp_path / "model.bin")
    again = fp.Model.load(tmp_path / "model.bin")
    assert again.problem == problem
    x = parts[0][0]
    np.testing.assert_array_equal(again.predict(x), run.model.predict(x))
    np.testing.assert_allclose(again.predict(x), 1 / (1 + np.exp(-(x @ end[:4] + end[4]))), rtol=1e-12)


FILE = """
[data]
name = "synthetic"
rows = 20
features = 3
[split]
clients = 2
[problem]
name = "nonconvex_logistic"
beta = 0.3
intercept = true
[algorithm]
name = "fedavg"
"""


def test_experiment_files_know_it(tmp_path):
    assert PROBLEMS["nonconvex_logistic"] is NonconvexLogistic is fp.NonconvexLogistic
    path = tmp_path / "experiment.toml"
    path.write_text(FILE)
    experiment, _ = build(read(path))
    assert experiment.problem == NonconvexLogistic(0.3, intercept=True)
    path.write_text(FILE.replace("beta", "l2"))
    with pytest.raises(UnknownName, match=r"^key of \[problem\] must be one of beta, intercept, got 'l2'\."):
        build(read(path))
