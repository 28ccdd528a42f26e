"""Logistic regression over several classes with a bounded, non-convex regulariser: the loss of FedPDM's experiments.

    f_i(X) = (1/d_i) Σ_t ℓ(X a_t, y_t)  +  β Σ_{jk} X_jk²/(1 + X_jk²)         X has a row a class, z = X a the scores

    loss="printed"       ℓ = ln(1 + e^{−z_y})                   (25) as printed: only the row of the true class enters
    loss="one_vs_rest"   ℓ = Σ_k ln(1 + e^{−s_k z_k})           s_k = 1 for k = y, else −1
    loss="softmax"       ℓ = ln Σ_k e^{z_k} − z_y

With intercept=True every row has a constant 1 as its last feature, whose coefficients are regularised as all are:
n = 785 for MNIST. Bytes are pixels: they are divided by 255. Nothing in (25) asks a class's scores to be small on rows
of the others, so that the class with the largest score (26) is right for some 80 % of MNIST only.

r_i = c λ_max(A_iᵀA_i)/d_i + 2β with c = 1/4, for softmax 1/2; ∇²f_i ⪰ −s_i I with s_i = β/2.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from fedpact.core.contract import Batch
from fedpact.core.errors import is_number, require, require_flags, require_one_of, require_positive_int
from fedpact.core.settings import plain_fields
from fedpact.core.vector import Vector
from fedpact.problems.base import largest_eigenvalue
from fedpact.problems.clipping import Clipped, clipped_dense
from fedpact.problems.network import check_rows

LOSSES = ("printed", "one_vs_rest", "softmax")


@dataclass(frozen=True)
class MulticlassLogistic:
    """Logistic regression over several classes with the regulariser β Σ X²/(1+X²); labels are 0, 1, …. Starts at 0."""

    inputs: int = 784
    classes: int = 10
    loss: str = "softmax"
    beta: float = 0.01
    intercept: bool = False

    classifies = True
    multiclass = True

    def __post_init__(self) -> None:
        plain_fields(self)
        require_positive_int("inputs", self.inputs)
        require_positive_int("classes", self.classes)
        require_one_of("loss", self.loss, LOSSES)
        require(is_number(self.beta) and self.beta >= 0, "beta", "a number of at least 0", self.beta, symbol="β")
        require_flags(self, "intercept")

    @property
    def shape(self) -> tuple[int, ...]:
        """Rows as they are."""
        return (self.inputs,)

    def check(self, federation: Any) -> None:
        """Rows of `inputs` numbers, labels among the classes."""
        check_rows(self, federation)

    def init(self, features: int, dtype: Any, key: Any = None) -> Vector:
        """X = 0."""
        return Vector({"w": jnp.zeros((self.classes, self.inputs + self.intercept), dtype)})

    def _inputs(self, x: Any, dtype: Any) -> Any:
        return x.astype(dtype) / 255 if x.dtype == jnp.uint8 else x.astype(dtype)

    def scores(self, w: Vector, x: Any) -> Any:
        """z = X a for every row."""
        weights = w.tree["w"]
        z = self._inputs(x, weights.dtype) @ weights[:, : self.inputs].T
        return z + weights[:, self.inputs] if self.intercept else z

    def _right(self, batch: Batch, dtype: Any) -> Any:
        """1 for a row's class, 0 for the others."""
        return jax.nn.one_hot(batch.y.astype(jnp.int32), self.classes, dtype=dtype)

    def losses(self, w: Vector, batch: Batch) -> Any:
        """ℓ of every row."""
        return self._losses(self.scores(w, batch.x), batch)

    def _losses(self, z: Any, batch: Batch) -> Any:
        right = self._right(batch, z.dtype)
        if self.loss == "printed":
            return jax.nn.softplus(-jnp.sum(right * z, axis=1))
        if self.loss == "one_vs_rest":
            return jnp.sum(jax.nn.softplus(z) - right * z, axis=1)  # ln(1 + e^{−z}) = ln(1 + e^z) − z
        return jax.nn.logsumexp(z, axis=1) - jnp.sum(right * z, axis=1)

    def _slopes(self, z: Any, batch: Batch) -> Any:
        """∂ℓ/∂z of every row."""
        right = self._right(batch, z.dtype)
        if self.loss == "printed":
            return -right * jax.nn.sigmoid(-z)
        return (jax.nn.sigmoid(z) if self.loss == "one_vs_rest" else jax.nn.softmax(z, axis=1)) - right

    def value(self, w: Vector, batch: Batch) -> Any:
        """f_i(X)."""
        return self._value(w, self.scores(w, batch.x), batch)

    test_value = value  # without the gradient

    def _value(self, w: Vector, z: Any, batch: Batch) -> Any:
        square = w.tree["w"] ** 2
        return jnp.sum(batch.weight * self._losses(z, batch)) / batch.rows + self.beta * jnp.sum(square / (1 + square))

    def _gradient(self, w: Vector, z: Any, batch: Batch) -> Vector:
        weights = w.tree["w"]
        slopes = batch.weight[:, None] * self._slopes(z, batch) / batch.rows
        gradient = slopes.T @ self._inputs(batch.x, weights.dtype)
        if self.intercept:
            gradient = jnp.concatenate([gradient, jnp.sum(slopes, axis=0)[:, None]], axis=1)
        return Vector({"w": gradient + self.beta * 2 * weights / (1 + weights**2) ** 2})

    def value_and_gradient(self, w: Vector, batch: Batch) -> tuple[Any, Vector]:
        """f_i(X) and ∇f_i(X)."""
        z = self.scores(w, batch.x)
        return self._value(w, z, batch), self._gradient(w, z, batch)

    def gradient(self, w: Vector, batch: Batch) -> Vector:
        """∇f_i(X)."""
        return self._gradient(w, self.scores(w, batch.x), batch)

    def clipped(self, w: Vector, batch: Batch, clip: Any, norm: int) -> Clipped:
        """Σ_j weight_j ∇ℓ_j, each clipped to norm C: a row's gradient is ∂ℓ/∂z (a, 1)ᵀ, a dense layer's."""
        weights = w.tree["w"]
        rows = self._inputs(batch.x, weights.dtype)
        layer = {"w": weights[:, : self.inputs].T} | ({"b": weights[:, self.inputs]} if self.intercept else {})
        found = clipped_dense({"x": layer}, lambda z: z, lambda z: self._losses(z, batch), rows, batch, clip, norm)
        total = found.total.tree["x"]
        both = [total["w"].T, total["b"][:, None]] if self.intercept else [total["w"].T]
        return found._replace(total=Vector({"w": jnp.concatenate(both, axis=1)}))

    def public_gradient(self, w: Vector, rows: Any) -> Vector:
        """The part of ∇f_i that no row enters."""
        return w.map(lambda a: self.beta * 2 * a / (1 + a**2) ** 2)

    def curvature(self, reach: float) -> tuple[float, float]:
        """(s, L) of the printed loss, the only one of a single score, for rows of 2-norm at most R."""
        hint = 'Use loss="printed", or way steps.'
        require(self.loss == "printed", "loss", '"printed" for way convex', self.loss, hint=hint)
        return self.beta / 2, (reach**2 + self.intercept) / 4 + 2 * self.beta

    def counts(self, w: Vector, batch: Batch) -> dict[str, Any]:
        """Rows, and rows whose class has the largest score (26)."""
        right = jnp.argmax(self.scores(w, batch.x), axis=1) == batch.y.astype(jnp.int32)
        return {"rows": batch.rows, "correct": jnp.sum(batch.weight * right)}

    def lipschitz(self, batch: Batch) -> Any:
        """r_i."""
        seen = batch._replace(x=self._inputs(batch.x, batch.weight.dtype))
        share = 2 if self.loss == "softmax" else 4
        return largest_eigenvalue(seen, self.intercept) / (share * batch.rows) + 2 * self.beta

    def weak_convexity(self, batch: Batch) -> Any:
        """s_i: ∇²f_i ⪰ −s_i I."""
        return jnp.asarray(self.beta / 2, batch.weight.dtype)

    def predict(self, w: Vector, x: Any) -> Any:
        """z_k of (26), the softmax of the scores: (N, classes)."""
        return jax.nn.softmax(self.scores(w, x), axis=1)
