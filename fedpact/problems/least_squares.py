"""Least squares with ℓ2.

    f_i(w) = (1/(2d_i)) [ ‖A_i w − b_i‖² + β‖w‖² ]        divide=True
    f_i(w) = (1/(2d_i))   ‖A_i w − b_i‖² + (β/2)‖w‖²      divide=False

An intercept, where asked for, is not penalised. r_i = (λ_max(A_iᵀA_i) + β)/d_i, or λ_max/d_i + β.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp

from fedpact.core.contract import Batch
from fedpact.core.errors import is_number, require, require_flags
from fedpact.core.settings import plain_fields
from fedpact.core.vector import Vector
from fedpact.problems.base import largest_eigenvalue, linear_gradient, linear_init, linear_penalty, scores
from fedpact.problems.clipping import Clipped, clipped_linear


@dataclass(frozen=True)
class LeastSquares:
    """Linear regression on a numeric target."""

    l2: float = 0.0
    divide: bool = True
    intercept: bool = False

    classifies = False
    first = ("w",)  # where the weights are that meet the features
    quadratic = True  # ∇f_i is affine: exact local solvers apply

    def __post_init__(self) -> None:
        plain_fields(self)
        require(is_number(self.l2) and self.l2 >= 0, "l2", "a number of at least 0", self.l2, symbol="β")
        require_flags(self, "divide", "intercept")

    def check(self, federation: Any) -> None:
        """Any finite target will do; the dataset has checked that."""

    def init(self, features: int, dtype: Any, key: Any = None) -> Vector:
        """w = 0."""
        return linear_init(features, self.intercept, dtype)

    def _penalty(self, rows: Any) -> Any:
        return self.l2 / rows if self.divide else self.l2

    def losses(self, w: Vector, batch: Batch) -> Any:
        """Half the squared error of every row."""
        return (scores(w, batch.x) - batch.y) ** 2 / 2

    def test_value(self, w: Vector, batch: Batch) -> Any:
        """The mean loss: a penalty that is divided by the rows would count once for every part they are summed in."""
        return jnp.sum(batch.weight * self.losses(w, batch)) / batch.rows

    def value_and_gradient(self, w: Vector, batch: Batch) -> tuple[Any, Vector]:
        """f_i(w) and ∇f_i(w)."""
        d = batch.rows
        error = scores(w, batch.x) - batch.y
        residual = batch.weight * error
        value = jnp.sum(residual * error) / (2 * d) + self._penalty(d) / 2 * jnp.sum(w.tree["w"] ** 2)
        return value, linear_gradient(w, batch, residual, 1 / d, self._penalty(d))

    def gradient(self, w: Vector, batch: Batch) -> Vector:
        """∇f_i(w)."""
        return self.value_and_gradient(w, batch)[1]

    def clipped(self, w: Vector, batch: Batch, clip: Any, norm: int) -> Clipped:
        """Σ_j weight_j ∇ℓ_j, each clipped to norm C."""
        error = scores(w, batch.x) - batch.y
        return clipped_linear(w, batch, error**2 / 2, error, clip, norm)

    def public_gradient(self, w: Vector, rows: Any) -> Vector:
        """The part of ∇f_i that no row enters."""
        return linear_penalty(w, self._penalty(rows))

    def counts(self, w: Vector, batch: Batch) -> dict[str, Any]:
        """Rows; accuracy means nothing here."""
        return {"rows": batch.rows}

    def curvature(self, reach: float) -> tuple[float, float]:
        """(0, L) for rows of 2-norm at most R."""
        return 0.0, reach**2 + self.intercept + self.l2

    def lipschitz(self, batch: Batch) -> Any:
        """r_i."""
        d = batch.rows
        return largest_eigenvalue(batch, self.intercept) / d + self._penalty(d)

    def predict(self, w: Vector, x: Any) -> Any:
        """⟨x, w⟩."""
        return scores(w, x)
