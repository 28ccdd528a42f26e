"""r_i: against NumPy's eigenvalues, and as what it claims to be, a bound on the gradient's growth."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from literal import KINDS, as_batch, as_flat, as_vector, label, rows

from fedpact.problems import LeastSquares, Logistic
from fedpact.problems.base import SQUARED_UP_TO

each = pytest.mark.parametrize("problem", KINDS, ids=label)


def expected(problem, x):
    """(λ_max/4 + β)/d for logistic, (λ_max + β)/d for least squares; β undivided with divide=False."""
    d = len(x)
    a = np.column_stack([x, np.ones(d)]) if problem.intercept else x
    largest = np.linalg.eigvalsh(a.T @ a)[-1]
    curvature = largest / 4 if isinstance(problem, Logistic) else largest
    return curvature / d + problem.l2 / (d if problem.divide else 1)


@each
def test_the_constant_is_the_eigenvalue_s(problem):
    x, y = rows(problem)
    assert float(problem.lipschitz(as_batch(x, y, padding=6))) == pytest.approx(expected(problem, x), rel=1e-10)


@pytest.mark.parametrize(("d", "n", "intercept"), [(3, 12, False), (1, 1, True), (40, 30, True)])
def test_equal_to_numpy_s_eigenvalue(d, n, intercept):
    problem = LeastSquares(intercept=intercept)
    many = [rows(problem, d, n, seed) for seed in range(8)]
    batches = jax.tree.map(lambda *parts: jnp.stack(parts), *(as_batch(x, y, padding=2) for x, y in many))
    with jax.disable_jit(False):  # as the engine calls it
        got = jax.jit(jax.vmap(problem.lipschitz))(batches)
    np.testing.assert_allclose(got, [expected(problem, x) for x, _ in many], rtol=1e-10)


def test_eigenvalues_close_together_or_equal():
    problem = LeastSquares(l2=0.0)
    basis = np.linalg.qr(np.random.default_rng(0).normal(size=(6, 6)))[0]
    for values in ([3, 3, 3, 1, 1, 0], [3, 3 - 1e-6, 2, 1, 1, 1], [1e-8, 1e-9, 0, 0, 0, 0], [1e9, 1e9, 1, 1, 1, 1]):
        x = np.sqrt(np.array(values, float))[:, None] * basis
        got = float(problem.lipschitz(as_batch(x, np.zeros(6))))
        assert got == pytest.approx(max(values) / 6, rel=1e-10)


def test_a_client_of_zeros_has_no_curvature_of_its_own():
    x, y = np.zeros((4, 3)), np.array([0.0, 1, 1, 0])
    assert float(Logistic(l2=0.4).lipschitz(as_batch(x, y))) == pytest.approx(0.1)


def test_many_features_are_within_a_part_in_a_thousand():
    problem, n = LeastSquares(l2=0.1), 300
    assert n > SQUARED_UP_TO
    x, y = rows(problem, 400, n)
    with jax.disable_jit(False):
        got = float(jax.jit(problem.lipschitz)(as_batch(x, y)))
    assert got == pytest.approx(expected(problem, x), rel=1e-3)


def test_many_features_that_cancel():
    """Yes coded 1 and no coded −1, each with a column of its own: every row sums to exactly 0.

    Then the column norms, all 4, are orthogonal to every row, and a power iteration that starts there never leaves 0.
    """
    half = np.sign(np.random.default_rng(0).normal(size=(16, 512)))
    x = np.concatenate([half, -half], axis=1)
    largest = np.linalg.eigvalsh(x @ x.T)[-1]
    assert float(LeastSquares().lipschitz(as_batch(x, np.zeros(16)))) == pytest.approx(largest / 16, rel=1e-3)


@each
def test_it_bounds_the_gradient_s_growth(problem):
    """‖∇f(u) − ∇f(v)‖ ≤ r‖u − v‖ on random pairs, near and far."""
    x, y = rows(problem)
    batch, rng = as_batch(x, y), np.random.default_rng(3)
    r = float(problem.lipschitz(batch))
    u, v = rng.normal(size=(2, 400, 4 + problem.intercept)) * np.repeat([1e-3, 0.1, 1.0, 10.0], 100)[:, None]
    gradients = jax.vmap(lambda flat: jax.tree.leaves(problem.gradient(as_vector(problem, flat), batch)))
    squares = [
        np.sum(np.square(a - b).reshape(400, -1), axis=1) for a, b in zip(gradients(u), gradients(v), strict=True)
    ]
    assert np.all(np.sqrt(sum(squares)) <= r * np.linalg.norm(u - v, axis=1) * (1 + 1e-9))


@each
def test_the_bound_is_reached(problem):
    """Along the top eigenvector: exactly for a quadratic, in the limit at w = 0 for the logistic loss when b = 0."""
    x, y = rows(problem)
    a = np.column_stack([x, np.ones(len(x))]) if problem.intercept else x
    top = np.linalg.eigh(a.T @ a)[1][:, -1] * 1e-5
    batch = as_batch(x, y)
    gap = as_flat(problem.gradient(as_vector(problem, top), batch)) - as_flat(
        problem.gradient(as_vector(problem, 0 * top), batch)
    )
    r = float(problem.lipschitz(batch))
    unpenalised = problem.intercept and problem.l2 > 0
    reached = np.linalg.norm(gap) / 1e-5
    assert reached <= r * (1 + 1e-6)
    if not unpenalised:
        assert reached == pytest.approx(r, rel=1e-5)
