"""`optimum` against solvers that are not ours."""

from __future__ import annotations

import numpy as np
import pytest
from literal import KINDS, as_batch, as_flat, as_vector, label, value
from sklearn.linear_model import LogisticRegression

import fedpact as fp
from fedpact.core.errors import InvalidArgument
from fedpact.problems import LeastSquares, Logistic, optimum
from fedpact.problems.optimum import least

SIZES = (4, 11, 7, 25)
each = pytest.mark.parametrize("problem", KINDS, ids=label)


def federation(problem, seed=0):
    rng = np.random.default_rng(seed)
    w = rng.normal(size=3)
    parts = []
    for d in SIZES:
        x = rng.normal(size=(d, 3)) + rng.normal(size=3)
        target = x @ w + 1 + 2 * rng.normal(size=d)
        target[:2] = [5, -5]  # both classes at every client, and not separable
        parts.append((x, (target > 0).astype(int) if isinstance(problem, Logistic) else target))
    classes = ["0", "1"] if isinstance(problem, Logistic) else ()
    return fp.data.Federation.from_arrays(parts, classes=classes)


def pieces(fed):
    parts = [fed.client(i) for i in range(fed.clients)]
    x, y = np.concatenate([p[0] for p in parts]), np.concatenate([p[1] for p in parts])
    return x, y, np.concatenate([np.full(d, 1 / (len(SIZES) * d)) for d in SIZES])


@each
def test_the_gradient_vanishes_there(problem):
    fed = federation(problem)
    best = optimum(problem, fed)
    assert best.gradient_norm <= 1e-10
    w = as_vector(problem, best.w)
    batches = [as_batch(*fed.client(i), padding=max(SIZES) - SIZES[i]) for i in range(fed.clients)]
    mean = sum(as_flat(problem.gradient(w, batch)) for batch in batches) / len(batches)
    assert np.linalg.norm(mean) <= 1e-10
    values = [value(problem, best.w, *fed.client(i)) for i in range(fed.clients)]
    assert best.value == pytest.approx(sum(values) / len(values), rel=1e-13)


@each
def test_nothing_near_is_better(problem):
    fed = federation(problem)
    best = optimum(problem, fed)
    for seed in range(20):
        w = best.w + 1e-3 * np.random.default_rng(seed).normal(size=best.w.shape)
        assert np.mean([value(problem, w, *fed.client(i)) for i in range(fed.clients)]) > best.value


@pytest.mark.parametrize("intercept", [False, True])
@pytest.mark.parametrize("divide", [False, True])
def test_logistic_agrees_with_scikit_learn(divide, intercept):
    """Its objective is ½‖w‖² + C Σ s_t loss_t: ours over β̄ when s_t = 1/(m d_i), C = 1/β̄, β̄ = β or β · mean(1/d_i)."""
    problem = Logistic(l2=0.7, divide=divide, intercept=intercept)
    fed = federation(problem)
    x, y, weight = pieces(fed)
    beta = 0.7 * (np.mean([1 / d for d in SIZES]) if divide else 1.0)
    theirs = LogisticRegression(C=1 / beta, fit_intercept=intercept, solver="newton-cholesky", tol=1e-12, max_iter=500)
    theirs.fit(x, y, sample_weight=weight)
    expected = np.append(theirs.coef_[0], theirs.intercept_ if intercept else [])
    np.testing.assert_allclose(optimum(problem, fed).w, expected, rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("problem", [p for p in KINDS if isinstance(p, LeastSquares)], ids=label)
def test_least_squares_agrees_with_the_normal_equations(problem):
    fed = federation(problem)
    x, y, weight = pieces(fed)
    a = np.column_stack([x, np.ones(len(x))]) if problem.intercept else x
    beta = problem.l2 * (np.mean([1 / d for d in SIZES]) if problem.divide else 1.0)
    ridge = np.diag([beta] * 3 + [0.0] * problem.intercept)
    expected = np.linalg.solve(a.T @ (weight[:, None] * a) + ridge, a.T @ (weight * y))
    np.testing.assert_allclose(optimum(problem, fed).w, expected, rtol=1e-10, atol=1e-11)


def test_other_problems_are_refused():
    with pytest.raises(InvalidArgument, match=r"^problem must be Logistic or LeastSquares, got int\.$"):
        optimum(3, None)


def test_the_minimum_for_reports_is_given_only_where_it_is_quickly_found():
    problem = Logistic(l2=1e-2)
    fed = federation(problem)
    assert least(problem, fed) == optimum(problem, fed).value
    assert least(fp.NonconvexLogistic(), fed) is None
    wide = fp.data.from_arrays(np.zeros((2, 9000)), [0, 1], classes=["0", "1"]).split(clients=1)
    assert least(problem, wide) is None, "too many features for a quick Newton step"
