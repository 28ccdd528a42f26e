"""Gradients clipped row by row: what one row adds to a sum has norm at most C. The base of differential privacy.

    ∇f_i(w) = (1/d_i) Σ_j ∇ℓ_j(w) + public(w, d_i)             a mean over rows, and what no row enters
    total   = Σ_j weight_j ∇ℓ_j(w) · min(1, C/‖∇ℓ_j(w)‖)        ‖·‖ = ‖·‖₂, or ‖·‖₁ for Laplace noise

Without a gradient for each row where they are products (P(a) = Σ_k |a_k|^p, so that ‖a‖ = P(a)^{1/p}, p = 1 or 2):

    linear models    ∇ℓ_j = r_j (x_j, 1)             ‖∇ℓ_j‖ = |r_j| (P(x_j) + 1)^{1/p}           total = Xᵀ (c ∘ r)
    dense layers     ∇_l ℓ_j = (h_jl, 1) δ_jlᵀ        ‖∇ℓ_j‖^p = Σ_l P(δ_jl) (P(h_jl) + 1)      total_l = H_lᵀ (c ∘ Δ_l)

(1 only where there is an intercept or bias.) A problem with `clipped(w, batch, clip, norm)` is asked for it; any other
with `losses(w, batch)` gets the gradient of every row's own loss, some rows at a time.

For a linear model clipping ∇ℓ_j is clipping the number r_j at ±C/‖(x_j, 1)‖. If ℓ is convex, r_j grows with ⟨x_j, w⟩
and so does the clipped r_j: clipped gradients are those of another convex loss (Huber's, of a square). That of δ_j in a
softmax does not stay a gradient.

In floating point
- Norms are bounds from above, by the worst that rounding and underflow can do, and C is taken 8 eps smaller: what a row
  adds is at most C, never C and an ulp. It costs no more than n·eps/4 of C for rows of n numbers (2e-5 of C for 784 in
  float32); rows of more than `NARROW` are added up in float64. The sum over rows rounds as sums do.
- A row is refused, and counts as zero, where its gradient is not finite; where ‖∇ℓ_j‖^p, or a P on the way to it, is
  beyond the largest number of the parameters' type (p = 2, float32: norms above 1.8e19); and where C/‖∇ℓ_j‖ is below
  the smallest normal one. Whether it is depends on no other row.
- Zero means zero: 0·NaN is NaN, so the row itself is put to zero before products see it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from fedpact.core.contract import Batch
from fedpact.core.errors import require
from fedpact.core.sparse import ROW, SparseRows
from fedpact.core.vector import Vector
from fedpact.problems.conformance import is_own
from fedpact.problems.layers import dense

#: Up to so many numbers a row |a|^p is added up in the row's own type.
NARROW = 4096
#: So many numbers are held at once where every row gets its own gradient. (Larger chunks leave the caches, and XLA is
#: slow at a product for each of several rows: a network's go one after the other.)
AT_ONCE = 2**13


class Clipped(NamedTuple):
    """A sum of clipped gradients."""

    total: Vector  # Σ_j weight_j ∇ℓ_j · min(1, C/‖∇ℓ_j‖) over rows of weight above 0
    refused: Any  # how many of those rows count as zero because their gradient is not finite
    loss: Any  # Σ_j weight_j ℓ_j over the others


def clipped_sum(problem: Any, w: Vector, batch: Batch, clip: Any, norm: int = 2) -> Clipped:
    """The sum over rows of gradients, each clipped to norm C; what no row enters is left to `public_gradient`."""
    require(norm in (1, 2), "norm", "1 or 2", norm, symbol="p")
    hint = "Use float('inf') for gradients as they are."
    require(not isinstance(clip, (int, float)) or clip > 0, "clip", "above 0", clip, symbol="C", hint=hint)
    if hasattr(problem, "clipped"):
        return problem.clipped(w, batch, clip, norm)
    return clipped_rows(problem, w, batch, clip, norm)


def public_gradient(problem: Any, w: Vector, rows: Any) -> Vector:
    """∇f_i(w) − (1/d_i) Σ_j ∇ℓ_j(w), the regulariser's: 0 unless the problem has `public_gradient(w, rows)`."""
    return problem.public_gradient(w, rows) if hasattr(problem, "public_gradient") else w.map(jnp.zeros_like)


# Closed forms


def clipped_linear(w: Vector, batch: Batch, losses: Any, residual: Any, clip: Any, norm: int) -> Clipped:
    """For gradients r_j (x_j, 1), r_j = ∂ℓ_j/∂⟨x_j, w⟩; `w` has "w", and "b" where there is an intercept."""
    dtype = w.tree["w"].dtype
    norms = jnp.abs(residual) * _root(row_powers(batch.x, norm, dtype) + ("b" in w.tree), norm)
    sound, share = _shares(norms, batch.weight, clip)
    c = jnp.where(sound, share * residual, 0)
    total = {"w": _without_refused(lambda x: c @ x, batch.x, sound)}
    if "b" in w.tree:
        total["b"] = jnp.sum(c)
    return _result(Vector(total), sound, batch, losses)


def clipped_dense(
    layers: Mapping[str, Any],
    activation: Callable[[Any], Any],
    losses: Callable[[Any], Any],
    inputs: Any,
    batch: Batch,
    clip: Any,
    norm: int,
) -> Clipped:
    """For dense layers, first to last, with an activation in between; `losses` is of the last one's outputs."""
    (*before, last), dtype = layers.values(), inputs.dtype

    def forward(shifts: list[Any]) -> tuple[Any, list[Any]]:
        h = [inputs]
        for layer, shift in zip(before, shifts[:-1], strict=True):
            h.append(activation(dense(h[-1], layer) + shift))
        return losses(dense(h[-1], last) + shifts[-1]), h

    nowhere = [jnp.zeros((inputs.shape[0], layer["w"].shape[1]), dtype) for layer in layers.values()]
    rows, pull, h = jax.vjp(forward, nowhere, has_aux=True)
    # δ_jl is the derivative at the l-th layer's outputs. Norm and product must see the same numbers.
    h, delta = lax.optimization_barrier((h, pull(jnp.ones_like(rows))[0]))
    power = sum(
        row_powers(d, norm, dtype) * (row_powers(a, norm, dtype) + ("b" in layer))
        for layer, a, d in zip(layers.values(), h, delta, strict=True)
    )
    sound, share = _shares(_root(power + float(jnp.finfo(dtype).tiny), norm), batch.weight, clip)
    scaled = [jnp.where(sound[:, None], share[:, None] * d, 0) for d in delta]
    products = lambda h: [a.T @ d for a, d in zip(h, scaled, strict=True)]
    total = {
        name: {"w": g} | ({"b": jnp.sum(d, axis=0)} if "b" in layers[name] else {})
        for name, g, d in zip(layers, _without_refused(products, h, sound), scaled, strict=True)
    }
    return _result(Vector(total), sound, batch, rows)


# Any problem with a loss a row


def clipped_rows(problem: Any, w: Vector, batch: Batch, clip: Any, norm: int) -> Clipped:
    """The gradient of every row's own loss: one row after the other, of small models as many as AT_ONCE numbers hold.

    A row is a batch of its own: a loss that looks at other rows (running means) sees none.
    """
    count, dtype = batch.y.shape[0], jax.tree.leaves(w.tree)[0].dtype
    size = max(1, min(count, AT_ONCE // w.size))
    places = jnp.arange(-(-count // size) * size).reshape(-1, size)

    def one(x: Any, y: Any, weight: Any) -> Clipped:
        row = Batch(x[None], y[None], weight[None], batch.client)
        alone = row._replace(weight=jnp.ones(1, dtype))
        loss, g = lax.optimization_barrier(jax.value_and_grad(lambda v: problem.losses(v, alone)[0])(w))
        power = sum(row_powers(leaf[None], norm, dtype) for leaf in jax.tree.leaves(g))
        sound, share = _shares(_root(power, norm), row.weight, clip)
        total = g.map(lambda a: jnp.where(sound[0], share[0] * a, 0))
        return _result(total, sound, row, loss)

    def some(at: Any) -> Clipped:
        inside = jnp.minimum(at, count - 1)
        rows = batch.x[inside], batch.y[inside], jnp.where(at < count, batch.weight[inside], 0)
        if size == 1:
            return one(*(a[0] for a in rows))
        each = jax.vmap(one)(*rows)  # a product with ones is a sum over rows, a hundred times as fast
        return jax.tree.map(lambda a: jnp.ones(size, a.dtype) @ a.reshape(size, -1), each)

    add = lambda total, at: (jax.tree.map(lambda t, a: t + a.reshape(t.shape), total, some(at)), None)
    zero = Clipped(w.map(jnp.zeros_like), jnp.zeros((), jnp.int32), jnp.zeros((), dtype))
    return lax.scan(add, zero, places)[0]


# Norms and factors


def row_powers(a: Any, norm: int, dtype: Any) -> Any:
    """P of every row, a bound from above: the computed sum over 1 − n·eps/2, and what n underflows lose."""
    sparse = isinstance(a, SparseRows)
    rows, width = a.shape[0], a.longest * ROW if sparse else a.shape[-1] if a.ndim > 1 else 1
    narrow = dtype if width <= NARROW else jnp.float64
    each = lambda values: (jnp.abs if norm == 1 else jnp.square)(values.astype(narrow))
    power = a.row_sums(each) if sparse else jnp.sum(each(a.reshape(rows, -1, width)), axis=-1)
    many = 1 if sparse else a.size // (rows * width)
    if many > 1:
        power = jnp.sum(power.astype(jnp.float64), axis=-1)
    off = width * _eps(narrow) / 2 + many * _eps(jnp.float64)
    return power.reshape(rows).astype(dtype) / (1 - off) + many * width * float(jnp.finfo(dtype).tiny)


def _root(power: Any, norm: int) -> Any:
    return jnp.sqrt(power) if norm == 2 else power


def _eps(dtype: Any) -> float:
    return float(jnp.finfo(dtype).eps)


def _shares(norms: Any, weight: Any, clip: Any) -> tuple[Any, Any]:
    """Which rows are not refused, and weight_j · min(1, C/‖∇ℓ_j‖) of them."""
    limits = jnp.finfo(norms.dtype)
    most = jnp.asarray(clip, norms.dtype) * (1 - 8 * _eps(norms.dtype))
    factor = jnp.minimum(1, most / norms)
    sound = (norms <= limits.max) & (factor >= limits.tiny)
    return sound, jnp.where(sound, weight * factor, 0)


def _without_refused(product: Callable[[Any], Any], rows: Any, sound: Any) -> Any:
    """product(rows) with refused rows put to zero.

    A loop of no turn, or of one where rows are refused: to zero them always costs a copy of the rows, and `lax.cond`
    under vmap does both.
    """
    some = ~jnp.all(sound)
    again = lambda _: (jnp.zeros_like(some), product(_zeroed(rows, sound)))
    return lax.while_loop(lambda carry: carry[0], again, (some, product(rows)))[1]


def _zeroed(rows: Any, sound: Any) -> Any:
    if isinstance(rows, SparseRows):
        return rows.kept(sound)
    return jax.tree.map(lambda a: jnp.where(sound.reshape(-1, *(1,) * (a.ndim - 1)), a, 0), rows)


def _result(total: Vector, sound: Any, batch: Batch, losses: Any) -> Clipped:
    refused = jnp.sum((batch.weight > 0) & ~sound, dtype=jnp.int32)
    kept = (batch.weight > 0) & sound
    return Clipped(total, refused, jnp.sum(jnp.where(kept, batch.weight * losses, 0)))


# What can be clipped


def check_clippable(problem: Any, features: int | None = None, dtype: Any = jnp.float32) -> None:
    """Refuse a problem whose rows' gradients cannot be clipped.

    With `features`, a problem of the user's own must also be its rows' losses and `public_gradient`, on made-up rows.
    """
    from fedpact.problems.constraints import Constrained  # whose terms clip nothing

    name = type(problem).__name__
    jax_s = not getattr(problem, "native", False)
    hint = "Hand the network in as Network, from_flax or from_equinox."
    require(jax_s, "problem", "one of JAX's for gradients clipped by row", name, hint=hint)
    hint = "Its functions are not sums over rows alone; use its model as the problem."
    require(not isinstance(problem, Constrained), "problem", "one loss for gradients clipped by row", name, hint=hint)
    by_row = callable(getattr(problem, "losses", None)) or hasattr(problem, "clipped")
    hint = "Give it losses(w, batch), a number a row, and public_gradient(w, rows) where it has a regulariser."
    require(by_row, "problem", "one with a loss a row for gradients clipped by row", name, hint=hint)
    if features is not None and is_own(problem):
        _check_sum(problem, features, dtype)


def _check_sum(problem: Any, features: int, dtype: Any) -> None:
    """Refuse a problem whose gradient is not the mean of its rows' and `public_gradient`."""
    wave = lambda a, shift: jnp.cos(jnp.arange(a.size, dtype=dtype) ** 2 + shift).reshape(a.shape).astype(a.dtype)
    w = jax.tree.map(lambda a: wave(a, 1) / 2, problem.init(features, dtype))
    ones = jnp.ones(2, dtype)
    batch = Batch(wave(jnp.zeros((2, features), dtype), 2), jnp.arange(2, dtype=dtype), ones, jnp.asarray(0, jnp.int32))

    def compare(w: Vector) -> tuple[Any, Any]:
        whole = problem.gradient(w, batch)
        apart = clipped_sum(problem, w, batch, float("inf")).total / 2 + public_gradient(problem, w, batch.rows)
        return (whole - apart).norm(), whole.norm()

    gap, scale = map(float, jax.jit(compare)(w))
    what = "the mean over rows of that of losses(w, batch), and public_gradient(w, rows)"
    hint = "Give it public_gradient(w, rows): the gradient of what no row enters, such as a regulariser's l2 * w."
    near = not scale < float("inf") or gap <= 1e-3 * scale + 1e-6
    require(near, f"gradient of {type(problem).__name__}", what, f"{gap:.2g} from it", hint=hint)
