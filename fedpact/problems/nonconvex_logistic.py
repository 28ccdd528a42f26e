"""Logistic regression with a bounded, non-convex regulariser.

    f_i(w) = (1/d_i) Σ_t ln(1+e^{⟨x_t,w⟩}) − b_t⟨x_t,w⟩  +  β Σ_j w_j²/(1 + w_j²)

t²/(1+t²) has second derivatives (2 − 6t²)/(1 + t²)³ in [−1/2, 2]: r_i = λ_max(A_iᵀA_i)/(4d_i) + 2β, and
∇²f_i ⪰ −s_i I with s_i = β/2. An intercept, where asked for, is not penalised.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp

from fedpact.core.contract import Batch
from fedpact.core.errors import is_number, require, require_flags
from fedpact.core.settings import plain_fields
from fedpact.core.vector import Vector
from fedpact.problems.base import largest_eigenvalue
from fedpact.problems.clipping import Clipped
from fedpact.problems.logistic import Logistic, require_two_classes


@dataclass(frozen=True)
class NonconvexLogistic:
    """Two-class logistic regression with the regulariser β Σ w²/(1+w²); labels are 0 and 1."""

    beta: float = 0.1
    intercept: bool = False

    classifies = True  # predictions are probabilities of class 1

    def __post_init__(self) -> None:
        plain_fields(self)
        require(is_number(self.beta) and self.beta >= 0, "beta", "a number of at least 0", self.beta, symbol="β")
        require_flags(self, "intercept")

    @property
    def _loss(self) -> Logistic:
        return Logistic(l2=0.0, divide=False, intercept=self.intercept)

    def check(self, federation: Any) -> None:
        """Labels must be two classes coded 0 and 1."""
        require_two_classes(federation, type(self).__name__)

    def init(self, features: int, dtype: Any, key: Any = None) -> Vector:
        """w = 0."""
        return self._loss.init(features, dtype)

    def value_and_gradient(self, w: Vector, batch: Batch) -> tuple[Any, Vector]:
        """f_i(w) and ∇f_i(w)."""
        value, gradient = self._loss.value_and_gradient(w, batch)
        value = value + self.beta * jnp.sum(w.tree["w"] ** 2 / (1 + w.tree["w"] ** 2))
        return value, gradient + self.public_gradient(w, batch.rows)

    def gradient(self, w: Vector, batch: Batch) -> Vector:
        """∇f_i(w)."""
        return self._loss.gradient(w, batch) + self.public_gradient(w, batch.rows)

    def clipped(self, w: Vector, batch: Batch, clip: Any, norm: int) -> Clipped:
        """Σ_j weight_j ∇ℓ_j, each clipped to norm C."""
        return self._loss.clipped(w, batch, clip, norm)

    def public_gradient(self, w: Vector, rows: Any) -> Vector:
        """The part of ∇f_i that no row enters."""
        slope = Vector({name: jnp.zeros_like(leaf) for name, leaf in w.tree.items()})
        return Vector(slope.tree | {"w": self.beta * 2 * w.tree["w"] / (1 + w.tree["w"] ** 2) ** 2})

    def counts(self, w: Vector, batch: Batch) -> dict[str, Any]:
        """Rows, and rows classified right at threshold ½."""
        return self._loss.counts(w, batch)

    def lipschitz(self, batch: Batch) -> Any:
        """r_i."""
        return largest_eigenvalue(batch, self.intercept) / (4 * batch.rows) + 2 * self.beta

    def weak_convexity(self, batch: Batch) -> Any:
        """s_i: ∇²f_i ⪰ −s_i I."""
        return jnp.asarray(self.beta / 2, batch.weight.dtype)

    def curvature(self, reach: float) -> tuple[float, float]:
        """(s, L) for rows of 2-norm at most R: the regulariser bends by −β/2 to 2β."""
        return self.beta / 2, (reach**2 + self.intercept) / 4 + 2 * self.beta

    def predict(self, w: Vector, x: Any) -> Any:
        """The probability of class 1."""
        return self._loss.predict(w, x)
