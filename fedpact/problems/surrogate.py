"""The convex problem that successive convex approximation solves in every round.

    min_{ω,s}  φ_0(ω) + Σ_m c_m s_m    s.t.  φ_m(ω) ≤ s_m,  s_m ≥ 0,       φ_m(ω) = b_m + a_m·ω + t_m‖ω‖² + l_m‖ω‖₁

(b_0 = 0; c_m = ∞ makes constraint m hard.) Quadratic terms are multiples of the identity, so the minimiser is known for
given multipliers ν, and only a concave problem in M unknowns is left:

    ω(ν) = −soft(A, L)/(2T),    A = a_0 + Σν_m a_m,   T = t_0 + Σν_m t_m,   L = l_0 + Σν_m l_m
    max_{0≤ν≤c}  g(ν),          ∂g/∂ν_m = φ_m(ω(ν)),   ∂²g/∂ν_m∂ν_k = −⟨γ_m, γ_k⟩/(2T),
                                γ_m = a_m + 2t_m ω + l_m sign ω on the coordinates where ω ≠ 0

with r_m = s_m − φ_m(ω) ≥ 0 the multiplier of ν_m ≥ 0, and s_m that of ν_m ≤ c_m. `dual` follows the path νr = μ,
(c−ν)s = μ to μ → 0 by Newton's steps (primal-dual), each checked by the barrier's decrease. Without ℓ1 terms the
vectors a_m are first replaced by their M+1 coordinates in the space they span, so that the path costs nothing that
grows with the model.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from fedpact.core.errors import InvalidArgument, require

#: Newton's steps at most; some 20 to 40 are taken.
STEPS = 200
#: The path ends at νr = μ of this size, in units where the functions' coefficients are at most 1.
LEAST = 1e-15
#: Added to the unit diagonal of Newton's matrix, so that equal constraints do not make it singular.
RIDGE = 1e-13


class Quadratics(NamedTuple):
    """φ_m for m = 0, …, M in rows: b (M+1), a (M+1, d), t (M+1), and l (M+1) or None where there is no ℓ1 term."""

    b: Any
    a: Any
    t: Any
    ell: Any = None


class Solution(NamedTuple):
    """ω, s and ν."""

    omega: Any
    slacks: Any
    multipliers: Any


class _Point(NamedTuple):
    omega: Any
    values: Any  # φ_1, …, φ_M
    hessian: Any  # ⟨γ_m, γ_k⟩/(2T)
    dual: Any  # g(ν)


def minimiser(phi: Quadratics, nu: Any) -> Any:
    """ω(ν)."""
    weights = jnp.concatenate([jnp.ones(1, nu.dtype), nu])
    total, curvature = weights @ phi.a, weights @ phi.t
    if phi.ell is not None:
        total = jnp.sign(total) * jnp.maximum(jnp.abs(total) - weights @ phi.ell, 0)
    return -total / (2 * curvature)


def values(phi: Quadratics, omega: Any) -> Any:
    """φ_0, …, φ_M at ω."""
    out = phi.b + phi.a @ omega + phi.t * (omega @ omega)
    return out if phi.ell is None else out + phi.ell * jnp.sum(jnp.abs(omega))


def lemma1(q: Any, b: Any, tau: Any, penalty: Any) -> Any:
    """ν of min ‖ω‖² + c s, s.t. b + a·ω + τ‖ω‖² ≤ s, s ≥ 0, with q = ‖a‖² (Lemma 1; its U − C is −b, its b is q)."""
    room = q - 4 * tau * b
    inside = (jnp.sqrt(q / jnp.where(room > 0, room, 1)) - 1) / tau
    return jnp.where(room > 0, jnp.clip(inside, 0, penalty), penalty)


def dual(phi: Quadratics, penalty: Any) -> Any:
    """The multipliers ν, for t_0 > 0; compiled, any M ≥ 1."""
    kept = phi
    if phi.ell is None and phi.a.shape[1] > phi.a.shape[0]:
        kept = phi._replace(a=_coordinates(phi.a))
    unit = jnp.maximum(jnp.maximum(jnp.abs(kept.b), jnp.max(jnp.abs(kept.a), axis=1)), kept.t)
    unit = unit if kept.ell is None else jnp.maximum(unit, kept.ell)
    unit = jnp.where(unit > 0, unit, 1)
    scaled = Quadratics(
        kept.b / unit, kept.a / unit[:, None], kept.t / unit, None if kept.ell is None else kept.ell / unit
    )
    ratio = unit[1:] / unit[0]
    return _path(scaled, jnp.broadcast_to(penalty, ratio.shape) * ratio) / ratio


def _coordinates(a: Any) -> Any:
    """The rows of a in an orthonormal basis of their span: Gram–Schmidt, twice for each row."""
    k, d = a.shape

    def add(j: Any, carry: tuple[Any, Any]) -> tuple[Any, Any]:
        basis, rows = carry
        first = basis @ a[j]
        rest = a[j] - first @ basis
        second = basis @ rest
        rest = rest - second @ basis
        length = jnp.sqrt(rest @ rest)
        new = length > 1e-14 * jnp.sqrt(a[j] @ a[j])
        basis = basis.at[j].set(jnp.where(new, rest / jnp.where(new, length, 1), 0))
        return basis, rows.at[j].set((first + second).at[j].set(jnp.where(new, length, 0)))

    return lax.fori_loop(0, k, add, (jnp.zeros((k, d), a.dtype), jnp.zeros((k, k), a.dtype)))[1]


def _point(phi: Quadratics, nu: Any) -> _Point:
    omega = minimiser(phi, nu)
    all_values = values(phi, omega)
    slopes = phi.a[1:] + 2 * phi.t[1:, None] * omega
    if phi.ell is not None:
        slopes = jnp.where(omega != 0, slopes + phi.ell[1:, None] * jnp.sign(omega), 0)
    curvature = phi.t[0] + nu @ phi.t[1:]
    return _Point(omega, all_values[1:], slopes @ slopes.T / (2 * curvature), all_values[0] + nu @ all_values[1:])


def _solve(matrix: Any, right: Any) -> Any:
    """Symmetric, positive definite up to rounding (two constraints may be the same), a few rows: Gauss–Jordan."""
    scale = 1 / jnp.sqrt(jnp.diagonal(matrix))
    unit = matrix * scale[:, None] * scale + RIDGE * jnp.eye(len(scale))
    whole = jnp.concatenate([unit, (right * scale)[:, None]], axis=1)

    def eliminate(k: Any, whole: Any) -> Any:
        row = whole[k] / whole[k, k]
        return (whole - whole[:, k][:, None] * row).at[k].set(row)

    return lax.fori_loop(0, matrix.shape[0], eliminate, whole)[:, -1] * scale


class _Path(NamedTuple):
    nu: Any
    r: Any
    s: Any
    mu: Any
    steps: Any


def _path(phi: Quadratics, most: Any) -> Any:
    soft = jnp.isfinite(most)
    room = lambda nu: jnp.where(soft, most - nu, 1)  # c − ν; hard constraints have no such bound

    def barrier(nu: Any, value: Any, mu: Any) -> Any:
        logs = jnp.sum(jnp.log(nu)) + jnp.sum(jnp.where(soft, jnp.log(room(nu)), 0))
        return -value - mu * logs

    def gaps(p: _Path, at: _Point) -> Any:
        """How far from the path, in units of μ."""
        feasible = jnp.max(jnp.abs(at.values + p.r - p.s) / (1 + jnp.abs(at.values)))
        central = jnp.max(jnp.abs(p.nu * p.r - p.mu))
        upper = jnp.max(jnp.where(soft, jnp.abs(room(p.nu) * p.s - p.mu), 0))
        return jnp.maximum(feasible, jnp.maximum(central, upper))

    def step(p: _Path) -> _Path:
        at = _point(phi, p.nu)
        mu = jnp.where(gaps(p, at) <= 10 * p.mu, jnp.maximum(jnp.minimum(0.1 * p.mu, p.mu**1.5), LEAST), p.mu)
        upper = jnp.where(soft, p.s / room(p.nu), 0)
        slope = at.values + mu / p.nu - jnp.where(soft, mu / room(p.nu), 0)
        matrix = at.hessian + jnp.diag(p.r / p.nu + upper)
        d_nu = _solve(matrix, slope)
        d_r = (mu - p.nu * p.r - p.r * d_nu) / p.nu
        d_s = jnp.where(soft, (mu - room(p.nu) * p.s + p.s * d_nu) / room(p.nu), 0)
        inside = jnp.maximum(0.995, 1 - mu)
        reach = lambda x, d: jnp.min(jnp.where(d < 0, -inside * x / jnp.where(d < 0, d, -1), 1.0))
        longest = jnp.minimum(reach(p.nu, d_nu), reach(room(p.nu), jnp.where(soft, -d_nu, 0)))
        begun, gain = barrier(p.nu, at.dual, mu), slope @ d_nu

        def value(alpha: Any) -> Any:
            nu = p.nu + alpha * d_nu
            omega = minimiser(phi, nu)
            return barrier(nu, values(phi, omega) @ jnp.concatenate([jnp.ones(1, nu.dtype), nu]), mu)

        worse = lambda alpha: value(alpha) > begun - 1e-4 * alpha * gain + 1e-13 * (1 + jnp.abs(begun))
        alpha = lax.while_loop(lambda x: worse(x) & (x > 1e-10 * longest), lambda x: x / 2, longest)
        nu = p.nu + alpha * d_nu
        r = p.r + reach(p.r, d_r) * d_r
        s = p.s + reach(p.s, d_s) * d_s
        near = lambda x, by: jnp.clip(x, mu / (1e10 * by), 1e10 * mu / by)
        return _Path(nu, near(r, nu), jnp.where(soft, near(s, room(nu)), 0), mu, p.steps + 1)

    def going(p: _Path) -> Any:
        return (p.steps < STEPS) & ((p.mu > LEAST) | (gaps(p, _point(phi, p.nu)) > 10 * LEAST))

    nu = jnp.where(soft, jnp.minimum(most / 2, 1), 1)
    ones = jnp.ones_like(nu)
    start = _Path(nu, ones, jnp.where(soft, ones, 0), jnp.asarray(1.0, nu.dtype), jnp.asarray(0))
    return lax.while_loop(going, step, start).nu


def solve(phi: Quadratics, penalty: Any) -> Solution:
    """ω, s and ν for t_0 > 0; compiled. `penalty` is c, one for all or one a constraint, ∞ where it is hard."""
    nu = dual(phi, penalty)
    omega = minimiser(phi, nu)
    hard = jnp.isinf(jnp.broadcast_to(penalty, nu.shape))
    return Solution(omega, jnp.where(hard, 0, jnp.maximum(values(phi, omega)[1:], 0)), nu)


_solve_compiled = jax.jit(solve)


def solve_surrogate(
    objective: tuple[Any, Any] | tuple[Any, Any, Any],
    constraints: Sequence[tuple[Any, ...]],
    penalty: Any,
) -> Solution:
    """Minimise a_0·ω + t_0‖ω‖² + c Σ s_m subject to b_m + a_m·ω + t_m‖ω‖² ≤ s_m and s_m ≥ 0.

    `objective` is (a_0, t_0), each of `constraints` (b, a, t), with t ≥ 0 throughout; a last number more is the
    coefficient of ‖ω‖₁. `penalty` is c > 0, or one for every constraint, math.inf where its slack is to be 0. Returns
    (omega, slacks, multipliers) as float64 arrays. With t_0 = 0 at least one t_m must be above 0, or the problem may
    have no minimum.
    """
    phi, c = _checked(objective, constraints, penalty)
    found = Solution(*map(np.asarray, _solve_compiled(phi, c))) if phi.t[0] > 0 else _proximal(phi, c)
    size = 1.0 + np.abs(phi.b) + np.abs(phi.a).max(axis=1)
    over = (phi.b + phi.a @ found.omega + phi.t * np.sum(found.omega**2)) / size
    if phi.ell is not None:
        over = over + phi.ell * np.sum(np.abs(found.omega)) / size
    broken = np.flatnonzero(np.isinf(c) & ~(over[1:] <= 1e-6)) + 1
    if broken.size:
        raise InvalidArgument(
            f"constraints must be ones that can be kept together where their penalty is inf, got a value of "
            f"{(over * size)[broken[0]]:.3g} above 0 for constraint {broken[0]}. Give it a finite penalty to get slack."
        )
    return found


def _checked(objective: Any, constraints: Any, penalty: Any) -> tuple[Quadratics, np.ndarray]:
    ok = isinstance(objective, (tuple, list)) and len(objective) in (2, 3)
    require(ok, "objective", "(a0, t0), or (a0, t0, l0) with a coefficient of ‖ω‖₁", objective)
    ok = isinstance(constraints, (tuple, list)) and len(constraints) > 0
    hint = "Without constraints the minimiser is −a0/(2 t0)."
    require(ok, "constraints", "a list of at least one (b, a, t)", constraints, hint=hint)
    rows = [(0.0, *objective), *constraints]
    for m, row in enumerate(rows):
        ok = isinstance(row, (tuple, list)) and len(row) in (3, 4)
        require(ok, f"constraint {m}", "(b, a, t), or (b, a, t, l) with a coefficient of ‖ω‖₁", row)
    whose = lambda name, m: f"{name}0" if m == 0 else f"{name} of constraint {m}"
    vectors = [_numbers(whose("a", m), row[1]) for m, row in enumerate(rows)]
    shape = vectors[0].shape
    require(len(shape) == 1 and shape[0] > 0, "a0", "a vector", vectors[0])
    for m, vector in enumerate(vectors):
        require(vector.shape == shape, f"a of constraint {m}", f"{shape[0]} numbers, as a0 has", vector.shape)
        require(np.isfinite(vector).all(), "a0" if m == 0 else f"a of constraint {m}", "finite", vector)
    numbers = {"b": [row[0] for row in rows], "t": [row[2] for row in rows], "l": [(*row, 0.0)[3] for row in rows]}
    for name, column in numbers.items():
        for m, value in enumerate(column):
            number = _numbers(whose(name, m), value)
            ok = number.ndim == 0 and bool(np.isfinite(number)) and (name == "b" or float(number) >= 0)
            wanted = "a finite number" + ("" if name == "b" else " of at least 0")
            require(ok, whose(name, m), wanted, value)
    b, t, ell = (np.array(column, np.float64) for column in numbers.values())
    c = _numbers("penalty", penalty)
    ok = c.shape in ((), (len(constraints),)) and bool((c > 0).all())  # which NaN is not
    require(ok, "penalty", "above 0, one for all or one for every constraint", penalty, symbol="c")
    if not t.any():
        raise InvalidArgument(
            "t0 + Σ ν_m t_m must be above 0 for some multipliers, got t = 0 throughout: the problem may have no "
            "minimum. Give the objective or a constraint a quadratic term."
        )
    return Quadratics(b, np.stack(vectors), t, ell if ell.any() else None), np.broadcast_to(c, (len(constraints),))


def _numbers(name: str, value: Any) -> np.ndarray:
    try:
        got = np.asarray(value)
        ok = got.dtype.kind in "fiu"
    except ValueError:  # ragged
        ok = False
    require(ok, name, "real numbers", value)
    return got.astype(np.float64)


def _proximal(phi: Quadratics, c: np.ndarray) -> Solution:
    """t_0 = 0: the minimiser of φ + κ‖ω − ω_k‖² is the next ω_k; its stationarity is off by 2κ‖ω_{k+1} − ω_k‖."""
    kappa, omega = 1e-2 * phi.t.max(), np.zeros(phi.a.shape[1])
    size = max(1.0, np.abs(phi.a).max())
    for _ in range(60):
        near = phi._replace(a=phi.a - np.outer(np.arange(len(phi.t)) == 0, 2 * kappa * omega))
        near = near._replace(t=np.where(np.arange(len(phi.t)) == 0, kappa, phi.t))
        found = _solve_compiled(near, c)
        moved, omega = np.abs(np.asarray(found.omega) - omega).max(), np.asarray(found.omega)
        if 2 * kappa * moved <= 1e-13 * size:
            break
        kappa = max(kappa / 10, 1e-9 * phi.t.max())
    return Solution(omega, *map(np.asarray, found[1:]))
