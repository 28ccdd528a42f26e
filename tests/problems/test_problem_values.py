"""Values and gradients of the problems, against the definitions written out row by row."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from literal import KINDS, as_batch, as_flat, as_vector, label, rows, traceable, value

import fedpact as fp
from fedpact.core.errors import DataError, InvalidArgument
from fedpact.problems import LeastSquares, Logistic

each = pytest.mark.parametrize("problem", KINDS, ids=label)


def point(problem, seed=1, n=4):
    return np.random.default_rng(seed).normal(size=n + problem.intercept)


@each
def test_value_is_the_definition_s(problem):
    x, y = rows(problem)
    for seed in range(3):
        flat = point(problem, seed)
        got = problem.value_and_gradient(as_vector(problem, flat), as_batch(x, y))[0]
        assert float(got) == pytest.approx(value(problem, flat, x, y), rel=1e-13)


@each
def test_gradient_is_the_definition_s_derivative(problem):
    x, y = rows(problem)
    flat = point(problem)
    expected = np.asarray(jax.grad(lambda v: traceable(problem, v, x, y))(jnp.asarray(flat)))
    w, batch = as_vector(problem, flat), as_batch(x, y)
    for got in (problem.gradient(w, batch), problem.value_and_gradient(w, batch)[1]):
        np.testing.assert_allclose(as_flat(got), expected, rtol=1e-12, atol=1e-13)


@each
def test_gradient_agrees_with_finite_differences(problem):
    x, y = rows(problem)
    flat, h = point(problem, 2), 1e-6
    steps = np.eye(len(flat)) * h
    slopes = [(value(problem, flat + s, x, y) - value(problem, flat - s, x, y)) / (2 * h) for s in steps]
    got = as_flat(problem.gradient(as_vector(problem, flat), as_batch(x, y)))
    np.testing.assert_allclose(got, slopes, rtol=1e-7, atol=1e-8)


@each
def test_the_loss_of_rows_that_are_tested_is_the_same_in_parts(problem):
    """Without the penalty, which every part would have."""
    x, y = rows(problem)
    w, cut = as_vector(problem, point(problem)), len(y) // 3
    parts = [as_batch(x[:cut], y[:cut]), as_batch(x[cut:], y[cut:])]
    total = sum(float(problem.test_value(w, part) * part.rows) for part in parts)
    free = dataclasses.replace(problem, l2=0.0)
    assert total / len(y) == pytest.approx(value(free, point(problem), x, y), rel=1e-13)


@pytest.mark.parametrize("kind", [Logistic, LeastSquares])
@pytest.mark.parametrize("size", [0.0, 0.5, 300.0])
def test_the_mean_of_the_losses_is_the_loss_and_so_is_its_derivative(kind, size):
    """At w = 0, where every score is 0, a loss written with |z| would have no derivative; nor may large scores."""
    problem = kind(l2=0, intercept=True)
    x, y = rows(problem)
    w, batch = as_vector(problem, size * point(problem)), as_batch(x, y)
    mean, slope = jax.value_and_grad(lambda v: jnp.mean(problem.losses(v, batch)))(w)
    expected, gradient = problem.value_and_gradient(w, batch)
    assert float(mean) == pytest.approx(float(expected), rel=1e-13)
    np.testing.assert_allclose(as_flat(slope), as_flat(gradient), rtol=1e-12, atol=1e-13)


@each
@pytest.mark.parametrize("junk", [0.0, 5.0])
def test_padding_changes_nothing(problem, junk):
    x, y = rows(problem)
    w = as_vector(problem, point(problem))
    bare, padded = as_batch(x, y), as_batch(x, y, padding=6, junk=junk)
    a, b = problem.value_and_gradient(w, bare), problem.value_and_gradient(w, padded)
    assert float(a[0]) == pytest.approx(float(b[0]), rel=1e-14)
    np.testing.assert_allclose(as_flat(a[1]), as_flat(b[1]), rtol=1e-13, atol=1e-15)
    np.testing.assert_allclose(as_flat(problem.gradient(w, padded)), as_flat(a[1]), rtol=1e-13, atol=1e-15)
    assert float(problem.lipschitz(bare)) == pytest.approx(float(problem.lipschitz(padded)), rel=1e-13)
    assert {k: float(v) for k, v in problem.counts(w, bare).items()} == {
        k: float(v) for k, v in problem.counts(w, padded).items()
    }


@pytest.mark.parametrize("kind", [Logistic, LeastSquares])
def test_divide_moves_the_regulariser_by_the_number_of_rows(kind):
    x, y = rows(kind())
    flat = point(kind())
    plain = value(kind(l2=0.0), flat, x, y)
    w, batch = as_vector(kind(), flat), as_batch(x, y)
    full = float(kind(l2=0.8, divide=False).value_and_gradient(w, batch)[0]) - plain
    divided = float(kind(l2=0.8, divide=True).value_and_gradient(w, batch)[0]) - plain
    assert full == pytest.approx(0.4 * float(flat @ flat), rel=1e-12)
    assert divided == pytest.approx(full / 9, rel=1e-12)


@pytest.mark.parametrize("kind", [Logistic, LeastSquares])
def test_the_intercept_is_not_penalised(kind):
    """With w = 0 the regulariser vanishes whatever b is, in the value and in the gradient."""
    x, y = rows(kind())
    flat = np.array([0, 0, 0, 0, 3.0])
    light, heavy = kind(l2=0.0, intercept=True), kind(l2=1e6, intercept=True)
    w, batch = as_vector(light, flat), as_batch(x, y)
    assert float(light.value_and_gradient(w, batch)[0]) == float(heavy.value_and_gradient(w, batch)[0])
    np.testing.assert_array_equal(as_flat(light.gradient(w, batch)), as_flat(heavy.gradient(w, batch)))


def test_large_scores_stay_finite():
    x, y = np.array([[1000.0], [-1000.0]]), np.array([0.0, 1.0])
    w, batch = as_vector(Logistic(), np.array([2.0])), as_batch(x, y)
    f, g = Logistic(l2=0.0).value_and_gradient(w, batch)
    assert float(f) == pytest.approx(2000)
    np.testing.assert_allclose(as_flat(g), [1000.0])


def test_counts_by_hand():
    """Scores 1, −1, 2, 0 against labels 1, 1, 0, 0: right are the first and, at the threshold, the last."""
    batch = as_batch(np.array([[1.0], [-1.0], [2.0], [0.0]]), np.array([1.0, 1.0, 0.0, 0.0]), padding=3)
    counts = Logistic().counts(as_vector(Logistic(), np.array([1.0])), batch)
    assert {name: float(v) for name, v in counts.items()} == {"rows": 4, "correct": 2}
    assert list(LeastSquares().counts(as_vector(LeastSquares(), np.array([1.0])), batch)) == ["rows"]


@each
def test_predictions(problem):
    x, y = rows(problem)
    flat = point(problem)
    z = x @ (flat[:-1] if problem.intercept else flat) + (flat[-1] if problem.intercept else 0)
    expected = 1 / (1 + np.exp(-z)) if isinstance(problem, Logistic) else z
    np.testing.assert_allclose(problem.predict(as_vector(problem, flat), x), expected, rtol=1e-13)
    assert len(y) == len(expected)


@each
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_the_start_is_zero_in_the_precision_asked_for(problem, dtype):
    w = problem.init(4, dtype)
    np.testing.assert_array_equal(as_flat(w), np.zeros(4 + problem.intercept))
    assert {leaf.dtype for leaf in jax.tree.leaves(w)} == {np.dtype(dtype)}
    batch = jax.tree.map(lambda a: a.astype(dtype), as_batch(*rows(problem)))
    out = jax.eval_shape(
        lambda: (problem.value_and_gradient(w, batch), problem.gradient(w, batch), problem.lipschitz(batch))
    )
    assert {leaf.dtype for leaf in jax.tree.leaves(out)} == {np.dtype(dtype)}


@pytest.mark.parametrize("kind", [Logistic, LeastSquares])
@pytest.mark.parametrize("l2", [-1e-9, float("nan"), "small", None, True])
def test_bad_weights_are_refused(kind, l2):
    with pytest.raises(InvalidArgument, match=r"^l2 \(β\) must be a number of at least 0, got .+\.$"):
        kind(l2=l2)


def test_logistic_wants_two_classes():
    x = np.arange(6.0).reshape(3, 2)
    numeric = fp.data.Federation.from_arrays([(x, np.array([0.1, 0.2, 0.3]))], classes=())
    three = fp.data.Federation.from_arrays([(x, np.array([0, 1, 2]))], classes=["a", "b", "c"])
    two = fp.data.Federation.from_arrays([(x, np.array([0, 1, 1]))], classes=["a", "b"])
    with pytest.raises(DataError, match=r"numeric target"):
        Logistic().check(numeric)
    with pytest.raises(DataError, match=r"3 classes"):
        Logistic().check(three)
    Logistic().check(two)
    LeastSquares().check(numeric)
