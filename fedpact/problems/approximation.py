"""Convex approximations that learn from batches: what the sample-based and the feature-based SSCA share.

Every smooth function F_m has an estimate built from the values v and gradients g that batches gave at the points ω^(t):

    b ← (1−ρ) b + ρ (v − g·ω + τ‖ω‖²),   a ← (1−ρ) a + ρ (g − 2τ ω),   κ ← (1−ρ) κ + ρ            (3), (9), (14)
    F̄_m(ω) = (b + a·ω)/κ + τ‖ω‖² + exact norms − limit                                             (8), (15)

`Approximation.minimise` solves Problem 2 or 5 with them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedpact.core.errors import is_number, require, require_one_of, require_positive_int
from fedpact.core.vector import Vector
from fedpact.problems.constraints import Part
from fedpact.problems.surrogate import Quadratics, lemma1, solve


class Estimates(NamedTuple):
    """b (doubles) and a (a leading axis over the functions) and κ (a double)."""

    b: Any
    a: Vector
    kappa: Any


class Minimum(NamedTuple):
    """ω̄, ν and s."""

    w: Vector
    multipliers: Any
    slacks: Any


def none_yet(w: Vector, functions: int) -> Estimates:
    """The estimates before the first batch."""
    return Estimates(
        jnp.zeros(functions, jnp.float64),
        w.map(lambda v: jnp.zeros((functions, *v.shape), v.dtype)),
        jnp.zeros((), jnp.float64),
    )


def update(old: Estimates, values: Any, gradients: Vector, w: Vector, rho: Any, tau: float) -> Estimates:
    """(9) and (14) with the newest values and gradients at ω; ρ may differ from function to function."""
    each = lambda g, v: jnp.sum((g * v).astype(jnp.float64), tuple(range(1, g.ndim)))
    inner = sum(jax.tree.leaves(gradients.map(each, w).tree))
    along = lambda a: (rho.reshape(rho.shape + (1,) * (a.ndim - 1)) if jnp.ndim(rho) else rho).astype(a.dtype)
    b = (1 - rho) * old.b + rho * (values - inner + tau * norm2(w))
    a = old.a.map(lambda a, g, v: (1 - along(a)) * a + along(a) * (g - 2 * tau * v), gradients, w)
    return Estimates(b, a, (1 - rho) * old.kappa + rho)


def norm2(w: Vector) -> Any:
    """‖ω‖², added up in doubles: b is a difference of numbers of this size."""
    return sum(jax.tree.leaves(w.map(lambda v: jnp.sum(jnp.square(v).astype(jnp.float64))).tree))


class Approximation(NamedTuple):
    """F_0 and the constraints that all clients share, the limits of clients' own losses, τ, and ‖ω‖'s bound."""

    parts: tuple[Part, ...]
    caps: Any
    tau: float
    bound: float | None

    @property
    def estimated(self) -> int:
        """How many of the shared functions are approximated."""
        return sum(part.estimated for part in self.parts)

    def update(self, old: Estimates, means: Any, gradients: Vector, w: Vector, rho: Any) -> Estimates:
        """The shared functions' estimates; the server adds the norms that are not kept exact, for it knows ω."""
        squares = jnp.asarray([part.square for part in self.parts if part.estimated], means.dtype)
        values = means + squares * norm2(w)
        slopes = gradients.map(lambda g, v: g + 2 * squares.reshape((-1,) + (1,) * v.ndim).astype(v.dtype) * v, w)
        return update(old, values, slopes, w, rho, self.tau)

    @property
    def constraints(self) -> int:
        """M."""
        return len(self.parts) - 1 + (0 if self.caps is None else len(self.caps))

    @property
    def multipliers(self) -> int:
        """M, and one more for a bound on ‖ω‖ beside constraints."""
        return self.constraints + (self.constraints > 0 and self.bound is not None)

    def minimise(self, w: Vector, shared: Estimates, own: Estimates | None, penalty: Any) -> Minimum:
        """ω̄, with ν and s: closed forms where there are, else the dual."""
        if self.constraints == 0:
            return Minimum(self._free(shared), jnp.zeros(0), jnp.zeros(0))
        return self._lemma1(shared, penalty) if self._is_lemma1 else self._general(w, shared, own, penalty)

    def _free(self, shared: Estimates) -> Vector:
        """(10), with the norms kept exact; a bound on ‖ω‖ scales it."""
        goal = self.parts[0]
        t = self.tau + goal.norm2
        total = shared.a.map(lambda a: a[0] / shared.kappa.astype(a.dtype))
        if goal.norm1:
            total = total.map(lambda a: jnp.sign(a) * jnp.maximum(jnp.abs(a) - goal.norm1, 0))
        out = total * (-1 / (2 * t))
        if self.bound is None:
            return out
        size = out.norm()
        return out * jnp.minimum(1, self.bound / jnp.maximum(size, jnp.finfo(size.dtype).tiny))

    @property
    def _is_lemma1(self) -> bool:
        """min t_0‖ω‖² s.t. one smooth function below its limit."""
        if len(self.parts) != 2 or self.caps is not None or self.bound is not None:
            return False
        goal, limit = self.parts
        return not goal.estimated and limit.estimated and not goal.norm1 and not limit.norm1

    def _lemma1(self, shared: Estimates, penalty: Any) -> Minimum:
        goal, limit = self.parts
        t0, tau = goal.norm2, self.tau + limit.norm2
        a = shared.a.map(lambda a: a[0] / shared.kappa.astype(a.dtype))
        b, q = shared.b[0] / shared.kappa - limit.limit, norm2(a)
        nu = t0 * lemma1(q, b, tau, penalty / t0)
        scale = -nu / (2 * (t0 + nu * tau))  # ω̄ = scale · a
        slack = jnp.where(nu < penalty, 0.0, jnp.maximum(b + scale * q + tau * scale**2 * q, 0))
        return Minimum(a.map(lambda v: scale.astype(v.dtype) * v), nu[None], slack[None])

    def _general(self, w: Vector, shared: Estimates, own: Estimates | None, penalty: Any) -> Minimum:
        d = w.size
        rows, estimates, place = [], flat(shared.a) / shared.kappa, 0
        offsets, t, ell = [], [], []
        for part in self.parts:
            rows.append(estimates[place] if part.estimated else jnp.zeros(d))
            offsets.append((shared.b[place] / shared.kappa if part.estimated else 0.0) - part.limit)
            t.append((self.tau if part.estimated else 0.0) + part.norm2)
            ell.append(part.norm1)
            place += part.estimated
        a, b = jnp.stack(rows), jnp.stack([jnp.asarray(v, jnp.float64) for v in offsets])
        if own is not None:
            seen = own.kappa > 0  # a client that never took part limits nothing yet
            kappa = jnp.where(seen, own.kappa, 1)
            a = jnp.concatenate([a, flat(own.a) / kappa[:, None]])
            b = jnp.concatenate([b, jnp.where(seen, own.b / kappa - jnp.asarray(self.caps), -1.0)])
            t, ell = t + list(jnp.where(seen, self.tau, 0.0)), ell + [0.0] * len(self.caps)
        m = self.constraints
        c = jnp.full(m, penalty, jnp.float64)
        if self.bound is not None:
            a, b = jnp.concatenate([a, jnp.zeros((1, d))]), jnp.append(b, -(self.bound**2))
            t, ell, c = [*t, 1.0], [*ell, 0.0], jnp.append(c, jnp.inf)
        phi = Quadratics(b, a, jnp.asarray(t, jnp.float64), jnp.asarray(ell, jnp.float64) if any(ell) else None)
        found = solve(phi, c)
        return Minimum(unflat(found.omega, w), found.multipliers, found.slacks)

    def values(self, means: Any, w: Vector) -> list[Any]:
        """F_0, and F_m minus its limit, from the means over rows at ω."""
        square = w.norm2() if any(part.norm2 or part.square for part in self.parts) else 0.0
        norm1 = w.norm1() if any(part.norm1 for part in self.parts) else 0.0
        found = iter(list(means))
        return [
            (next(found) if part.estimated else 0.0)
            + (part.norm2 + part.square) * square
            + part.norm1 * norm1
            - part.limit
            for part in self.parts
        ]

    def weighted(self, weights: Sequence[Any], gradients: Vector, w: Vector) -> tuple[Vector, Any]:
        """Σ_m weight_m ∇F_m without the ℓ1 terms, and the coefficient that ‖ω‖₁ has in that sum."""
        parts = list(zip(weights, self.parts, strict=True))
        square = sum(2 * v * (part.norm2 + part.square) for v, part in parts)
        total = w.map(lambda v: jnp.asarray(square, v.dtype) * v)
        if self.estimated:
            dtype = jax.tree.leaves(gradients.tree)[0].dtype
            each = jnp.stack([jnp.asarray(v, dtype) for v, part in parts if part.estimated])
            total = total + gradients.map(lambda g: jnp.tensordot(each, g, 1))
        return total, sum(v * part.norm1 for v, part in parts)


def flat(a: Vector) -> Any:
    """A stack of trees as a matrix of doubles, one row each."""
    leaves = jax.tree.leaves(a.tree)
    rows = [leaf.reshape(leaf.shape[0], math.prod(leaf.shape[1:])) for leaf in leaves]  # there may be none of them
    return jnp.concatenate(rows, axis=1).astype(jnp.float64)


def unflat(row: Any, like: Vector) -> Vector:
    """A row of such a matrix as a tree."""
    leaves, structure = jax.tree.flatten(like)
    parts, at = [], 0
    for leaf in leaves:
        parts.append(row[at : at + leaf.size].reshape(leaf.shape).astype(leaf.dtype))
        at += leaf.size
    return jax.tree.unflatten(structure, parts)


def info_of(model: Approximation) -> Any:
    """Info, whose fields depend on the constraints: slacks one by one where there are several."""
    fields, titles = ["rho", "gamma"], [part.title for part in model.parts[1:]]
    clients = ["clients"] if model.caps is not None else []
    if model.constraints:
        fields += ["penalty", "slack", *(f"multiplier_{title}" for title in [*titles, *clients])]
    if len(titles) + len(clients) > 1:
        fields += [f"slack_{title}" for title in [*titles, *clients]]
    return NamedTuple("Info", [(name, Any) for name in fields])  # type: ignore[misc]


def told(model: Approximation, price: Price, multipliers: Any, slacks: Any) -> list[Any]:
    """Those fields' values after ρ and γ; of clients' own limits the largest."""
    if not model.constraints:
        return []
    shared, m = len(model.parts) - 1, model.constraints
    brief = lambda values: [*values[:shared], *([] if model.caps is None else [jnp.max(values[shared:m])])]
    each = brief(slacks)
    return [price.penalty, jnp.sum(slacks[:m]), *brief(multipliers), *(each if len(each) > 1 else [])]


# Step sizes and the price of slack


def check_order(settings: Any) -> None:
    """Streams need batches."""
    require_one_of("order", settings.order, ("random", "stream"))
    ok = settings.order == "random" or settings.batch is not None
    require(ok, "batch", 'a number for order="stream"', settings.batch, symbol="B", hint="Say how many rows a round.")


def check_steps(settings: Any) -> None:
    """The constraints of the settings that both methods have."""
    for name, symbol in (("tau", "τ"), ("rho", "ρ"), ("gamma", "γ"), ("penalty", "c")):
        value = getattr(settings, name)
        require(is_number(value) and value > 0, name, "above 0", value, symbol=symbol)
    for name, symbol, least in (("rho_power", "α", 0), ("gamma_power", "α", 0), ("growth", "c_{j+1}/c_j", 1)):
        value = getattr(settings, name)
        require(is_number(value) and value >= least, name, f"at least {least}", value, symbol=symbol)
    require_positive_int("patience", settings.patience)
    bound = settings.bound
    require(bound is None or (is_number(bound) and bound > 0), "bound", "above 0, or left out", bound, symbol="‖ω‖")


def step_sizes(settings: Any, t: Any, w: Vector) -> tuple[Any, Any]:
    """ρ^(t) and γ^(t) for t = 1, 2, …, of ω's precision."""
    dtype = jax.tree.leaves(w.tree)[0].dtype
    size = lambda a, power: jnp.minimum(1.0, a / jnp.asarray(t, jnp.float64) ** power).astype(dtype)
    return size(settings.rho, settings.rho_power), size(settings.gamma, settings.gamma_power)


class Price(NamedTuple):
    """c, and the largest slack when c was last looked at."""

    penalty: Any
    slack: Any


def first_price(settings: Any) -> Price:
    """c_1; no slack has been looked at."""
    return Price(jnp.asarray(settings.penalty, jnp.float64), jnp.zeros(()))


def next_price(settings: Any, price: Price, slacks: Any, t: Any) -> Price:
    """Theorem 2's c_j ↑: every `patience` rounds in which a slack is left that has not halved, up to 1e12."""
    slack = jnp.max(slacks, initial=0.0).astype(price.slack.dtype)
    look = t % settings.patience == 0
    due = look & (slack > SLACK) & (slack > price.slack / 2)
    grown = jnp.maximum(jnp.minimum(settings.growth * price.penalty, MOST_PENALTY), price.penalty)
    penalty = jnp.where(due, grown, price.penalty)
    return Price(penalty, jnp.where(look, slack, price.slack))


#: A slack of so little is none.
SLACK = 1e-6
MOST_PENALTY = 1e12


def notices(settings: Any) -> tuple[str, ...]:
    """What the reader must know where the steps are not those of the theorems, (4) and (6)."""
    a, b = settings.rho_power, settings.gamma_power
    if 0.5 < a < b <= 1:
        return ()
    return (
        f"The steps ρ ~ t^−{a:g} and γ ~ t^−{b:g} break the conditions (4) and (6) of the theorems, which powers with "
        "½ < ρ's < γ's ≤ 1 meet: convergence is not guaranteed.",
    )


def verdict(history: Any, titles: Sequence[str]) -> list[str]:
    """What the finished run says of its constraints: which are broken at the end, and how close they ever came."""
    out = []
    for title in titles:
        last = history.end(title)
        if math.isnan(last):
            out.append(f"{title} has no value at the end: on some rows it is not a number.")
        if not last > VIOLATION:
            continue
        column = history.column(title)
        best = int(np.nanargmin(column))
        text = f"{title} ends {last:.4g} above its limit (least {column[best]:.4g}, after round {best})"
        held = "slack" in history.columns and history.end("slack") > SLACK
        cause = "tau may be too large, c too small, or the limit out of the model's reach"
        cause = cause if held else "more rounds may close it"
        out.append(f"{text}: {cause}.")
    return out


#: A constraint broken by less is kept, in a report's words.
VIOLATION = 1e-3
