"""What a problem is: it owns the model and everything computed from one client's rows."""

from __future__ import annotations

from typing import Any, Protocol

import jax.numpy as jnp
from jax import lax

from fedpact.core.contract import Batch
from fedpact.core.vector import Vector


class Problem(Protocol):
    """A loss over a client's rows with its gradient, and what else is known about it."""

    def init(self, features: int, dtype: Any) -> Vector:
        """The starting parameters."""
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


#: Up to this many features λ_max comes from repeated squaring of AᵀA; beyond it from power iteration on A.
SQUARED_UP_TO = 256


def largest_eigenvalue(batch: Batch, intercept: bool) -> Any:
    """λ_max(AᵀA) of the client's rows, with a column of ones where the model has an intercept.

    Repeated squaring gives the power 2³⁰ of AᵀA, so eigenvalues a millionth apart are told apart, and the Rayleigh
    quotient is exact to rounding. (LAPACK's eigenvalues inside a program vectorised over trials and clients hung on a
    two-core machine.) With many features 500 power iterations stay within a part in a thousand of a clustered top.
    """
    a = jnp.concatenate([batch.x, batch.weight[:, None]], axis=1) if intercept else batch.x
    tiny = jnp.finfo(a.dtype).tiny
    if a.shape[1] > SQUARED_UP_TO:

        def iterate(_: Any, v: Any) -> Any:
            v = a.T @ (a @ v)
            return v / (jnp.linalg.norm(v) + tiny)

        start = jnp.cos(jnp.arange(a.shape[1], dtype=a.dtype) ** 2)  # no structure that rows could cancel
        v = lax.fori_loop(0, 500, iterate, start / jnp.linalg.norm(start))
        return jnp.sum((a @ v) ** 2)
    gram = a.T @ a

    def square(_: Any, power: Any) -> Any:
        power = power @ power
        return power / (jnp.max(jnp.abs(power)) + tiny)

    power = lax.fori_loop(0, 30, square, gram / (jnp.max(jnp.abs(gram)) + tiny))
    v = power[:, jnp.argmax(jnp.diagonal(power))]
    return v @ gram @ v / (v @ v + tiny)
