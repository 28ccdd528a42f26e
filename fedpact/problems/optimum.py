"""The optimum of (1/m) Σ f_i by an independent route: NumPy and SciPy on the pooled rows, no JAX, no rounds."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import scipy.sparse
from scipy.optimize import minimize
from scipy.special import expit

from fedpact.core.errors import InvalidArgument
from fedpact.problems.least_squares import LeastSquares
from fedpact.problems.logistic import Logistic

CHEAP = 1e8  # rows × features² up to which the optimum is a matter of a second


class Optimum(NamedTuple):
    """The minimiser as a flat vector (intercept last), the minimum, and the gradient's norm there."""

    w: np.ndarray
    value: float
    gradient_norm: float


def optimum(problem: Any, federation: Any) -> Optimum:
    """Minimise (1/m) Σ f_i for `LeastSquares` (normal equations) or `Logistic` (Newton with exact Hessians)."""
    if not isinstance(problem, (Logistic, LeastSquares)):
        raise InvalidArgument(f"problem must be Logistic or LeastSquares, got {type(problem).__name__}.")
    parts = [federation.client(i) for i in range(federation.clients)]
    a = np.concatenate([x.toarray() if scipy.sparse.issparse(x) else x for x, _ in parts])
    b = np.concatenate([y for _, y in parts])
    sizes = federation.sizes
    weight = np.repeat(1 / (federation.clients * sizes), sizes)
    l2 = problem.l2 * (np.mean(1 / sizes) if problem.divide else 1.0)
    ridge = np.full(a.shape[1], l2)
    if problem.intercept:
        a = np.column_stack([a, np.ones(len(a))])
        ridge = np.append(ridge, 0.0)
    return _least_squares(a, b, weight, ridge) if isinstance(problem, LeastSquares) else _logistic(a, b, weight, ridge)


def least(problem: Any, federation: Any) -> float | None:
    """The minimum for a report, where the problem is convex, the solution quick and exact; None elsewhere.

    None, too, where rows are at nodes of their own.
    """
    if getattr(federation, "told", None) is not None:
        return None
    if type(problem) not in (Logistic, LeastSquares) or federation.sizes.sum() * federation.features**2 > CHEAP:
        return None
    found = optimum(problem, federation)
    return found.value if found.gradient_norm <= 1e-8 * max(1.0, found.value) else None


def _least_squares(a: np.ndarray, b: np.ndarray, weight: np.ndarray, ridge: np.ndarray) -> Optimum:
    root = np.sqrt(weight)
    stacked = np.vstack([a * root[:, None], np.diag(np.sqrt(ridge))])
    w = np.linalg.lstsq(stacked, np.concatenate([b * root, np.zeros(len(ridge))]), rcond=None)[0]
    residual = a @ w - b
    value = 0.5 * float(weight @ residual**2 + ridge @ w**2)
    return Optimum(w, value, float(np.linalg.norm(a.T @ (weight * residual) + ridge * w)))


def _logistic(a: np.ndarray, b: np.ndarray, weight: np.ndarray, ridge: np.ndarray) -> Optimum:
    def value(w: np.ndarray) -> float:
        z = a @ w
        return float(weight @ (np.logaddexp(0, z) - b * z) + ridge @ w**2 / 2)

    def gradient(w: np.ndarray) -> np.ndarray:
        return a.T @ (weight * (expit(a @ w) - b)) + ridge * w

    def hessian(w: np.ndarray) -> np.ndarray:
        p = expit(a @ w)
        return (a * (weight * p * (1 - p))[:, None]).T @ a + np.diag(ridge)

    w = minimize(
        value, np.zeros(a.shape[1]), jac=gradient, hess=hessian, method="trust-exact", options={"gtol": 1e-10}
    ).x
    for _ in range(3):  # polish: the trust region stops when f no longer changes, Newton goes on
        w = w - np.linalg.lstsq(hessian(w), gradient(w), rcond=None)[0]
    return Optimum(w, value(w), float(np.linalg.norm(gradient(w))))
