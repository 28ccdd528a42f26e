"""Local solvers for the proximal subproblem of ADMM-like methods.

    min_v  α f_i(v) + ⟨v − w, π⟩ + (σ/2)‖v − w‖²,   residual  φ(v) = α∇f_i(v) + π + σ(v − w)

A solver is a function of the subproblem that returns `Solved`: the point, how many gradients it took beyond the one at
w, which is given, and ‖φ‖² at the point. It stops when ‖φ‖² ≤ ε. Any function of a `Subproblem` that returns a
point is a solver too: what it met is then checked with one more gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.flatten_util import ravel_pytree

from fedpact.core.errors import require
from fedpact.core.vector import Vector


class Subproblem(NamedTuple):
    """One client's subproblem at one local step; α is folded into `gradient`, `gradient_at_w` and `r`."""

    gradient: Callable[[Vector], Vector]  # v ↦ α∇f_i(v)
    gradient_at_w: Vector  # α∇f_i(w)
    w: Vector
    pi: Vector
    sigma: Any
    r: Any  # α r_i
    epsilon: Any  # the residual asked for: ‖φ‖² ≤ ε

    def residual(self, v: Vector, gradient: Vector) -> Vector:
        """φ(v), given α∇f_i(v)."""
        return gradient + self.pi + self.sigma * (v - self.w)

    def step(self, v: Vector, gradient: Vector) -> Vector:
        """(3.12) of inexact ADMM: the minimiser of the model that replaces f_i by its quadratic bound at v."""
        return (self.r * v + self.sigma * self.w - (gradient + self.pi)) / (self.r + self.sigma)


class Solved(NamedTuple):
    """The point, the gradients computed beyond the one at w, ‖φ‖² at the point (NaN: not looked at), L-BFGS's steps."""

    v: Vector
    gradients: Any
    residual: Any
    steps: Any = None


def gradient_steps(sub: Subproblem, most: int) -> Solved:
    """(3.12) from w until ‖φ‖² ≤ ε with the gradient at the new point, at least one step and at most `most`."""

    def improve(carry: tuple[Any, ...]) -> tuple[Any, ...]:
        v, g, steps, _ = carry
        v = sub.step(v, g)
        g = sub.gradient(v)
        return v, g, steps + 1, sub.residual(v, g).norm2()

    first = improve((sub.w, sub.gradient_at_w, jnp.asarray(0), jnp.asarray(jnp.inf)))
    v, _, steps, phi = lax.while_loop(lambda c: (c[3] > sub.epsilon) & (c[2] < most), improve, first)
    return Solved(v, steps, phi)


def recorded_steps(sub: Subproblem, most: int) -> Solved:
    """(3.12) with the stopping test of the authors' released code.

    It tests ‖σw − π − σv⁺ − α∇f_i(v)‖² < ε·n with the gradient of the point *before* the step: a step is one
    gradient cheaper, and the test says little about (3.5). ‖φ‖² at the result is not looked at.
    """
    n = sub.w.size

    def passed(v: Vector, g: Vector) -> Any:
        return sub.residual(v, g).norm2() < sub.epsilon * n

    def improve(carry: tuple[Any, ...]) -> tuple[Any, ...]:
        v, steps, _ = carry
        g = sub.gradient(v)
        v = sub.step(v, g)
        return v, steps + 1, passed(v, g)

    v = sub.step(sub.w, sub.gradient_at_w)
    first = (v, jnp.asarray(1), passed(v, sub.gradient_at_w))
    v, steps, _ = lax.while_loop(lambda c: ~c[2] & (c[1] < most), improve, first)
    return Solved(v, steps - 1, jnp.asarray(jnp.nan))


MEMORY = 8  # pairs that L-BFGS remembers


def lbfgs(sub: Subproblem, most: Any, start: Vector | None = None) -> Solved:
    """L-BFGS from w, or from `start` with its gradient in place of w's, until ‖φ‖² ≤ ε; at most `most` steps.

    A quasi-Newton step that does not bring ‖φ‖ down by a tenth is replaced by a step (3.12), which contracts by
    Theorem 3.1 where σ > αs_i + αr_i/2. No function values are compared: near the solution they no
    longer tell points apart.
    """
    begin = sub.w if start is None else start
    w, unflatten = ravel_pytree(begin)

    def phi(x: Any) -> Any:
        v = unflatten(x)
        return ravel_pytree(sub.residual(v, sub.gradient(v)))[0]

    def plain(x: Any, p: Any) -> Any:
        return x - p / (sub.r + sub.sigma)  # (3.12) in terms of φ

    def improve(carry: tuple[Any, ...]) -> tuple[Any, ...]:
        x, p, pairs, steps, spent = carry
        tried = x - _two_loop(p, pairs, 1 / (sub.r + sub.sigma))
        p_tried = phi(tried)
        good = p_tried @ p_tried <= 0.81 * (p @ p)
        x_new = jnp.where(good, tried, plain(x, p))
        p_new = lax.cond(good, lambda: p_tried, lambda: phi(x_new))
        pairs = _remember(pairs, x_new - x, p_new - p)
        return x_new, p_new, pairs, steps + 1, spent + jnp.where(good, 1, 2)

    x = plain(w, ravel_pytree(sub.residual(begin, sub.gradient_at_w))[0])
    p = phi(x)
    empty = jnp.zeros((MEMORY, w.size), w.dtype)
    first = (x, p, (empty, empty, jnp.zeros(MEMORY, w.dtype)), jnp.asarray(1), jnp.asarray(1))
    x, p, _, steps, spent = lax.while_loop(lambda c: (c[1] @ c[1] > sub.epsilon) & (c[3] < most), improve, first)
    return Solved(unflatten(x), spent, p @ p, steps)


def _remember(pairs: tuple[Any, Any, Any], s: Any, y: Any) -> tuple[Any, Any, Any]:
    """Push a pair (s, y), newest last, if its curvature is positive; 1/⟨s,y⟩ = 0 marks an empty place."""
    curvature = s @ y
    inverse = jnp.where(curvature > 0, 1 / jnp.where(curvature > 0, curvature, 1), 0)
    pushed = tuple(jnp.roll(old, -1, axis=0).at[-1].set(new) for old, new in zip(pairs, (s, y, inverse), strict=True))
    return jax.tree.map(lambda a, b: jnp.where(inverse > 0, a, b), pushed, pairs)


def _two_loop(p: Any, pairs: tuple[Any, Any, Any], scale: Any) -> Any:
    """The L-BFGS direction H p."""
    s, y, inverse = pairs

    def backward(q: Any, pair: Any) -> tuple[Any, Any]:
        s_j, y_j, rho = pair
        a = rho * (s_j @ q)
        return q - a * y_j, a

    q, a = lax.scan(backward, p, (s, y, inverse), reverse=True)
    known = inverse[-1] > 0  # then ⟨s,y⟩/⟨y,y⟩ of the newest pair is the better scale
    q = jnp.where(known, 1 / jnp.where(known, inverse[-1] * (y[-1] @ y[-1]), 1), scale) * q

    def forward(q: Any, pair: Any) -> tuple[Any, None]:
        (s_j, y_j, rho), a_j = pair
        return q + s_j * (a_j - rho * (y_j @ q)), None

    return lax.scan(forward, q, ((s, y, inverse), a))[0]


def exact(sub: Subproblem, most: int) -> Solved:
    """The solution to rounding where ∇f_i is affine (least squares): conjugate gradients on (α∇²f_i + σI) e = −φ(w).

    The system's condition number is at most (αr_i + σ)/σ, so a few dozen products settle it; A_iᵀA_i is not formed.
    `most` does not apply: an exact solver takes what it needs, at most 2n + 50 products.
    """
    most = 2 * sub.w.size + 50

    def product(p: Vector) -> Vector:
        return jax.jvp(sub.gradient, (sub.w,), (p,))[1] + sub.sigma * p

    def improve(carry: tuple[Any, ...]) -> tuple[Any, ...]:
        e, left, p, size, steps = carry
        q = product(p)
        a = size / p.dot(q)
        e, left = e + a * p, left - a * q
        smaller = left.norm2()
        return e, left, left + (smaller / size) * p, smaller, steps + 1

    left = -sub.residual(sub.w, sub.gradient_at_w)
    size = left.norm2()
    tiny = jnp.finfo(size.dtype).eps ** 2 * size
    start = (0.0 * left, left, left, size, jnp.asarray(0))
    e, _, _, _, steps = lax.while_loop(lambda c: (c[3] > tiny) & (c[4] < most), improve, start)
    v = sub.w + e
    return Solved(v, steps + 1, sub.residual(v, sub.gradient(v)).norm2())


POINT = "It gets the subproblem `sub` and returns a point such as sub.w - sub.gradient_at_w / sub.r."


def _shapes(v: Any) -> Any:
    if not isinstance(v, Vector):
        return type(v).__name__
    return jax.tree.map(lambda a: f"{jnp.result_type(a)}{list(jnp.shape(a))}", v.tree)


def checked(solver: Callable[[Subproblem], Vector]) -> Callable[[Subproblem, int], Solved]:
    """A solver of the user's, which returns a point, with its residual looked at."""

    def solve(sub: Subproblem, most: int) -> Solved:
        v = solver(sub)
        wanted, got = _shapes(sub.w), _shapes(v)
        require(got == wanted, "solver", f"a function that returns a point like w, {wanted}", got, hint=POINT)
        return Solved(v, jnp.asarray(1), sub.residual(v, sub.gradient(v)).norm2())

    return solve


#: By the names settings use.
SOLVERS: dict[str, Callable[[Subproblem, int], Solved]] = {
    "gradient": gradient_steps,
    "recorded": recorded_steps,
    "lbfgs": lbfgs,
    "exact": exact,
}
