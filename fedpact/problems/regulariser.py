"""Regularisers h that need not be smooth: each knows its value and its proximal operator.

    prox_{h/ρ}(w) = argmin_x  h(x) + (ρ/2)‖x − w‖²

    l1            γ‖x‖₁                                              soft(w, γ/ρ)
    elastic_net   γ‖x‖₁ + (l2/2)‖x‖²                                 ρ soft(w, γ/ρ) / (ρ + l2)
    group_l1      γ Σ_g ‖x_g‖₂                                       w_g max(0, 1 − γ/(ρ‖w_g‖₂))
    mcp           Σ γ|x| − x²/(2θ) up to |x| = γθ, then γ²θ/2        soft(w, γ/ρ)/(1 − 1/(ρθ)) up to |w| = γθ, then w
    box           0 where low ≤ x ≤ high, ∞ elsewhere                w, cut off at low and high

soft(w, a) = sign(w) max(|w| − a, 0). All parameters count, an intercept too. The groups of `group_l1` are the columns
(or the rows) of every parameter that is a matrix; any other number is a group of its own. mcp needs ρθ > 1: else what
is minimised is not convex, and there is no one minimiser.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from fedpact.core.errors import is_number, require, require_one_of, unknown
from fedpact.core.settings import called, plain_fields
from fedpact.core.vector import Vector


def soft(w: Any, a: Any) -> Any:
    """sign(w) max(|w| − a, 0), number by number."""
    return jnp.sign(w) * jnp.maximum(jnp.abs(w) - a, 0)


def total(w: Vector, f: Any) -> Any:
    """The sum of f over all parameters."""
    return sum(jax.tree.leaves(w.map(lambda a: jnp.sum(f(a))).tree))


class Regulariser:
    """What they share: a value, a proximal operator, and what they need of its weight."""

    separable: ClassVar[bool] = True  # whether prox goes coordinate by coordinate

    def value(self, w: Vector) -> Any:
        """h(w)."""
        raise NotImplementedError

    def prox(self, w: Vector, weight: Any) -> Vector:
        """argmin_x h(x) + (weight/2)‖x − w‖²."""
        raise NotImplementedError

    def check(self, weight: float) -> None:
        """Refuse a weight for which that has no one minimiser."""

    def start(self, w: Vector) -> Vector:
        """Where to begin instead of w: a point with a finite value."""
        return w


def _check_gamma(h: Any) -> None:
    plain_fields(h)
    require(is_number(h.gamma) and h.gamma >= 0, "gamma", "a number of at least 0", h.gamma, symbol="γ")


@dataclass(frozen=True)
class L1(Regulariser):
    """γ‖x‖₁: parameters that matter little become 0."""

    gamma: float

    def __post_init__(self) -> None:
        _check_gamma(self)

    def value(self, w: Vector) -> Any:
        """γ‖w‖₁."""
        return self.gamma * w.norm1()

    def prox(self, w: Vector, weight: Any) -> Vector:
        """soft(w, γ/weight)."""
        return w.map(lambda a: soft(a, self.gamma / weight))


@dataclass(frozen=True)
class ElasticNet(Regulariser):
    """γ‖x‖₁ + (l2/2)‖x‖²."""

    gamma: float
    l2: float

    def __post_init__(self) -> None:
        _check_gamma(self)
        require(is_number(self.l2) and self.l2 >= 0, "l2", "a number of at least 0", self.l2)

    def value(self, w: Vector) -> Any:
        """γ‖w‖₁ + (l2/2)‖w‖²."""
        return self.gamma * w.norm1() + self.l2 / 2 * w.norm2()

    def prox(self, w: Vector, weight: Any) -> Vector:
        """soft(w, γ/weight), shrunk by l2."""
        return w.map(lambda a: soft(a, self.gamma / weight) * (weight / (weight + self.l2)))


@dataclass(frozen=True)
class GroupL1(Regulariser):
    """γ Σ_g ‖x_g‖₂: whole groups become 0, such as all classes' coefficients of a feature."""

    gamma: float
    groups: str = "columns"  # or "rows": of every parameter that is a matrix
    separable: ClassVar[bool] = False

    def __post_init__(self) -> None:
        _check_gamma(self)
        require_one_of("groups", self.groups, ("columns", "rows"))

    def _norms(self, a: Any) -> Any:
        """The norm of every number's group, broadcast along it."""
        if a.ndim != 2:
            return jnp.abs(a)
        return jnp.linalg.norm(a, axis=0 if self.groups == "columns" else 1, keepdims=True)

    def value(self, w: Vector) -> Any:
        """γ Σ_g ‖w_g‖₂."""
        return self.gamma * total(w, self._norms)

    def prox(self, w: Vector, weight: Any) -> Vector:
        """w_g max(0, 1 − γ/(weight‖w_g‖₂))."""

        def shrink(a: Any) -> Any:
            norms = self._norms(a)
            return a * (jnp.maximum(norms - self.gamma / weight, 0) / jnp.where(norms > 0, norms, 1))

        return w.map(shrink)


@dataclass(frozen=True)
class MCP(Regulariser):
    """The minimax concave penalty (Zhang 2010): as γ‖x‖₁ near 0, and constant beyond |x| = γθ."""

    gamma: float
    theta: float

    def __post_init__(self) -> None:
        _check_gamma(self)
        require(is_number(self.theta) and self.theta > 0, "theta", "above 0", self.theta, symbol="θ")

    def check(self, weight: float) -> None:
        """weight·θ > 1."""
        name, hint = (
            f"above 1/ρ = {1 / weight:.4g} for mcp",
            "Raise theta or rho: ρθ > 1 makes the server's step convex.",
        )
        require(weight * self.theta > 1, "theta", name, self.theta, symbol="θ", hint=hint)

    def value(self, w: Vector) -> Any:
        """Σ γ|w| − w²/(2θ) up to |w| = γθ, then γ²θ/2."""
        edge = self.gamma * self.theta

        def each(a: Any) -> Any:
            t = jnp.minimum(jnp.abs(a), edge)
            return self.gamma * t - t**2 / (2 * self.theta)

        return total(w, each)

    def prox(self, w: Vector, weight: Any) -> Vector:
        """soft(w, γ/weight)/(1 − 1/(weight·θ)) up to |w| = γθ, then w."""
        edge, stretch = self.gamma * self.theta, 1 - 1 / (weight * self.theta)
        return w.map(lambda a: jnp.where(jnp.abs(a) <= edge, soft(a, self.gamma / weight) / stretch, a))


@dataclass(frozen=True)
class Box(Regulariser):
    """Parameters between low and high; a run begins at the nearest such point."""

    low: float
    high: float

    def __post_init__(self) -> None:
        plain_fields(self)
        for name in ("low", "high"):
            require(is_number(getattr(self, name)), name, "a number", getattr(self, name))
        require(self.low <= self.high, "low", f"at most high, {self.high:g}", self.low)

    def value(self, w: Vector) -> Any:
        """0 inside, ∞ outside."""
        return total(w, lambda a: jnp.where((a < self.low) | (a > self.high), jnp.inf, 0.0).astype(a.dtype))

    def prox(self, w: Vector, weight: Any) -> Vector:
        """The nearest point in the box, whatever the weight."""
        return w.map(lambda a: jnp.clip(a, self.low, self.high))

    def start(self, w: Vector) -> Vector:
        """The nearest point in the box."""
        return self.prox(w, 1.0)


#: By the names that settings and experiment files use.
REGULARISERS: dict[str, type[Regulariser]] = {
    "l1": L1,
    "elastic_net": ElasticNet,
    "group_l1": GroupL1,
    "mcp": MCP,
    "box": Box,
}


def read_regulariser(given: Any) -> Regulariser | None:
    """A regulariser from { name = "l1", gamma = 1e-4 }; one that is made, or None, as it is."""
    if given is None or isinstance(given, Regulariser):
        return given
    options = dict(given) if isinstance(given, Mapping) else {"name": given}
    name = options.pop("name", None)
    if not isinstance(name, str) or name not in REGULARISERS:
        raise unknown("regulariser", name, REGULARISERS, hint='Write { name = "l1", gamma = 1e-4 }.')
    return called(f"regulariser {name!r}", REGULARISERS[name], options, also=["name"])


def plain_regulariser(h: Regulariser | None) -> dict[str, Any] | None:
    """A regulariser as `read_regulariser` takes it."""
    if h is None:
        return None
    name = next((name for name, cls in REGULARISERS.items() if type(h) is cls), type(h).__name__)
    return {"name": name, **dataclasses.asdict(h)}  # type: ignore[call-overload]
