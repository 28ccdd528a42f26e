"""Logistic regression with ℓ2 over two classes.

    f_i(w) = (1/d_i) [ Σ_t ln(1+e^{⟨x_t,w⟩}) − b_t⟨x_t,w⟩ + (β/2)‖w‖² ]      divide=True, as in FedEPM's experiments
    f_i(w) = (1/d_i)   Σ_t ln(1+e^{⟨x_t,w⟩}) − b_t⟨x_t,w⟩ + (β/2)‖w‖²        divide=False

An intercept, where asked for, is not penalised. r_i = (λ_max(A_iᵀA_i)/4 + β)/d_i, or λ_max/(4d_i) + β.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedpact.core.contract import Batch
from fedpact.core.errors import DataError, is_number, require, require_flags
from fedpact.core.settings import plain_fields
from fedpact.core.vector import Vector
from fedpact.problems.base import largest_eigenvalue, linear_gradient, linear_init, linear_penalty, scores
from fedpact.problems.clipping import Clipped, clipped_linear


@dataclass(frozen=True)
class Logistic:
    """Two-class logistic regression; labels are 0 and 1."""

    l2: float = 1e-3
    divide: bool = True
    intercept: bool = False

    classifies = True  # predictions are probabilities of class 1
    first = ("w",)  # where the weights are that meet the features

    def __post_init__(self) -> None:
        plain_fields(self)
        require(is_number(self.l2) and self.l2 >= 0, "l2", "a number of at least 0", self.l2, symbol="β")
        require_flags(self, "divide", "intercept")

    def check(self, federation: Any) -> None:
        """Labels must be two classes coded 0 and 1."""
        require_two_classes(federation, type(self).__name__)

    def init(self, features: int, dtype: Any, key: Any = None) -> Vector:
        """w = 0."""
        return linear_init(features, self.intercept, dtype)

    def _penalty(self, rows: Any) -> Any:
        return self.l2 / rows if self.divide else self.l2

    def losses(self, w: Vector, batch: Batch) -> Any:
        """ln(1+e^z) − b z of every row."""
        z = scores(w, batch.x)
        return jax.nn.softplus(z) - batch.y * z  # whose derivative is σ(z) − b at z = 0 too

    def test_value(self, w: Vector, batch: Batch) -> Any:
        """The mean loss: a penalty that is divided by the rows would count once for every part they are summed in."""
        return jnp.sum(batch.weight * self.losses(w, batch)) / batch.rows

    def value_and_gradient(self, w: Vector, batch: Batch) -> tuple[Any, Vector]:
        """f_i(w) and ∇f_i(w)."""
        d, z = batch.rows, scores(w, batch.x)
        loss = jnp.sum(batch.weight * (_softplus(z) - batch.y * z)) / d
        value = loss + self._penalty(d) / 2 * jnp.sum(w.tree["w"] ** 2)
        residual = batch.weight * (jax.nn.sigmoid(z) - batch.y)
        return value, linear_gradient(w, batch, residual, 1 / d, self._penalty(d))

    def gradient(self, w: Vector, batch: Batch) -> Vector:
        """∇f_i(w)."""
        d = batch.rows
        residual = batch.weight * (jax.nn.sigmoid(scores(w, batch.x)) - batch.y)
        return linear_gradient(w, batch, residual, 1 / d, self._penalty(d))

    def clipped(self, w: Vector, batch: Batch, clip: Any, norm: int) -> Clipped:
        """Σ_j weight_j ∇ℓ_j, each clipped to norm C."""
        z = scores(w, batch.x)
        losses = _softplus(z) - batch.y * z
        return clipped_linear(w, batch, losses, jax.nn.sigmoid(z) - batch.y, clip, norm)

    def public_gradient(self, w: Vector, rows: Any) -> Vector:
        """The part of ∇f_i that no row enters."""
        return linear_penalty(w, self._penalty(rows))

    def counts(self, w: Vector, batch: Batch) -> dict[str, Any]:
        """Rows, and rows classified right at threshold ½."""
        right = (scores(w, batch.x) > 0) == (batch.y > 0.5)
        return {"rows": batch.rows, "correct": jnp.sum(batch.weight * right)}

    def lipschitz(self, batch: Batch) -> Any:
        """r_i."""
        d = batch.rows
        return largest_eigenvalue(batch, self.intercept) / (4 * d) + self._penalty(d)

    def curvature(self, reach: float) -> tuple[float, float]:
        """(0, L) for rows of 2-norm at most R."""
        return 0.0, (reach**2 + self.intercept) / 4 + self.l2

    def predict(self, w: Vector, x: Any) -> Any:
        """The probability of class 1."""
        return jax.nn.sigmoid(scores(w, x))


def _softplus(z: Any) -> Any:
    """ln(1+e^z), twice as fast as jax.nn.softplus."""
    return jnp.maximum(z, 0) + jnp.log1p(jnp.exp(-jnp.abs(z)))


def require_two_classes(federation: Any, problem: str) -> None:
    """Raise unless the labels are two classes coded 0 and 1, with rows of both among everyone's."""
    classes = federation.dataset.classes
    if len(classes) != 2:
        shown = ", ".join(classes[:5]) + ("…" if len(classes) > 5 else "")
        got = f"{len(classes)} classes ({shown})" if classes else "a numeric target"
        instead = f"Softmax(inputs={federation.features}, classes={len(classes)})" if classes else "LeastSquares"
        raise DataError(f"labels must be two classes for {problem}, got {got}. Choose two classes, or use {instead}.")
    labels = np.unique(federation.dataset.y)
    if federation.rows_of == "everyone" and set(labels.tolist()) != {0.0, 1.0}:
        got = labels[:5].tolist()
        raise DataError(f"labels must be two classes for {problem}, got {got}. Code them 0 and 1; have rows of both.")
