"""What a problem is: it owns the model and everything computed from one client's rows."""

from __future__ import annotations

from typing import Any, Protocol

import jax.numpy as jnp
from jax import lax

from fedpact.core.contract import Batch
from fedpact.core.errors import require
from fedpact.core.sparse import SparseRows
from fedpact.core.vector import Vector


class Problem(Protocol):
    """A loss over a client's rows with its gradient, and what else is known about it."""

    classifies: bool  # whether predictions are probabilities of class 1

    def init(self, features: int, dtype: Any, key: Any) -> Vector:
        """The starting parameters, random or not; `key` may be left out where they are not."""
        ...

    def check(self, federation: Any) -> None:
        """Refuse data the problem cannot use, before round 1."""
        ...

    def value_and_gradient(self, w: Vector, batch: Batch) -> tuple[Any, Vector]:
        """f_i(w) and ∇f_i(w)."""
        ...

    def gradient(self, w: Vector, batch: Batch) -> Vector:
        """∇f_i(w)."""
        ...

    def counts(self, w: Vector, batch: Batch) -> dict[str, Any]:
        """`rows`, and `correct` where accuracy means something."""
        ...

    def lipschitz(self, batch: Batch) -> Any:
        """r_i, the Lipschitz constant of ∇f_i."""
        ...

    def predict(self, w: Vector, x: Any) -> Any:
        """Predictions for rows of features."""
        ...


def linear_init(features: int, intercept: bool, dtype: Any) -> Vector:
    """Zero coefficients, and a zero intercept where there is one."""
    coefficients = {"w": jnp.zeros(features, dtype)}
    return Vector(coefficients | {"b": jnp.zeros((), dtype)} if intercept else coefficients)


def scores(w: Vector, x: Any) -> Any:
    """⟨x, w⟩ for every row, plus the intercept where there is one."""
    return x @ w.tree["w"] + w.tree.get("b", 0)


def linear_gradient(w: Vector, batch: Batch, residual: Any, scale: Any, l2: Any) -> Vector:
    """scale·Aᵀr + l2·w, the intercept unpenalised."""
    gradient = {"w": scale * (residual @ batch.x) + l2 * w.tree["w"]}
    if "b" in w.tree:
        gradient["b"] = scale * jnp.sum(residual)
    return Vector(gradient)


def linear_penalty(w: Vector, l2: Any) -> Vector:
    """l2·w, the intercept unpenalised: the part of `linear_gradient` that no row enters."""
    return Vector({name: l2 * leaf if name == "w" else jnp.zeros_like(leaf) for name, leaf in w.tree.items()})


def curvature(problem: Any, reach: float | None) -> tuple[float, float]:
    """(s, L): −s ≤ the curvature of any f_i ≤ L where rows have 2-norm at most R and gradients are clipped by row.

    For losses of one score ⟨x, w⟩ that are convex in it: clipping keeps their gradients monotone (`clipping`).
    """
    if not callable(getattr(problem, "curvature", None)):
        hint = "Use way steps, or Logistic, NonconvexLogistic, LeastSquares or the printed MulticlassLogistic."
        require(False, "problem", "a convex loss of one score for way convex", type(problem).__name__, hint=hint)
    return problem.curvature(float(reach or 0))


#: Up to this many rows or features λ_max comes from repeated squaring; beyond it, or for sparse rows, from Lanczos.
SQUARED_UP_TO = 256
LANCZOS_STEPS = 64


def largest_eigenvalue(batch: Batch, intercept: bool) -> Any:
    """λ_max(AᵀA) of the client's rows, with a column of ones where the model has an intercept.

    Where AᵀA or AAᵀ is small, repeated squaring gives its power 2³⁰, so that eigenvalues a millionth apart are told
    apart and the Rayleigh quotient is exact to rounding. (LAPACK's eigenvalues inside a program vectorised over trials
    and clients hung on a two-core machine.) Elsewhere neither is formed: 64 Lanczos steps with products A v and r A
    give it from below, to rounding unless eigenvalues crowd at the top.
    """
    x, ones = batch.x, batch.weight
    rows, features = x.shape
    if isinstance(x, SparseRows) or min(rows, features + intercept) > SQUARED_UP_TO:
        return _lanczos(x, ones, features, intercept)
    a = jnp.concatenate([x, ones[:, None]], axis=1) if intercept else x
    return _by_squaring(a.T @ a if a.shape[1] <= rows else a @ a.T)


def _by_squaring(gram: Any) -> Any:
    tiny = jnp.finfo(gram.dtype).tiny

    def square(_: Any, power: Any) -> Any:
        power = power @ power
        return power / (jnp.max(jnp.abs(power)) + tiny)

    power = lax.fori_loop(0, 30, square, gram / (jnp.max(jnp.abs(gram)) + tiny))
    v = power[:, jnp.argmax(jnp.diagonal(power))]
    return v @ gram @ v / (v @ v + tiny)


def _lanczos(x: Any, ones: Any, features: int, intercept: bool) -> Any:
    size = features + intercept
    tiny = jnp.finfo(x.dtype).tiny
    steps = min(LANCZOS_STEPS, size)

    def product(v: Any) -> Any:
        r = x @ v[:features] + (v[-1] * ones if intercept else 0)
        return jnp.append(r @ x, r @ ones) if intercept else r @ x

    def step(carry: tuple[Any, Any, Any], _: Any) -> tuple[Any, Any]:
        before, v, beta = carry
        u = product(v) - beta * before
        alpha = u @ v
        u = u - alpha * v
        length = jnp.linalg.norm(u)
        new = jnp.where(length > tiny, u / (length + tiny), 0)
        return (v, new, length), (alpha, length)

    start = jnp.cos(jnp.arange(size, dtype=x.dtype) ** 2)  # no structure that rows could cancel
    start = start / jnp.linalg.norm(start)
    _, (alpha, beta) = lax.scan(step, (0 * start, start, jnp.zeros((), x.dtype)), None, length=steps)
    ritz = jnp.diag(alpha) + jnp.diag(beta[:-1], 1) + jnp.diag(beta[:-1], -1)
    return _by_squaring(ritz)
