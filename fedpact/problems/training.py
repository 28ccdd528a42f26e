"""Local training: epochs of SGD over shuffled batches of a client's rows, with the terms that federated methods add.

    m ← β m + ∇f_i(v; batch) + c + ρ (v − θ),   v ← v − γ m

FedAvg has c = 0 and ρ = 0, FedProx c = 0, SCAFFOLD c = c − c_i and ρ = 0, FedADMM c = y_i. An oracle with a `train` of
its own (PyTorch) does the same there.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from fedpact.core.contract import Batch
from fedpact.core.errors import is_number, require, require_flags, require_positive_int
from fedpact.core.private import Theorem
from fedpact.core.settings import check_schedule
from fedpact.core.vector import Vector

EVERY_GRADIENT = "Every local gradient is noised; the rest is computed from them."


class Trained(NamedTuple):
    """The point, the steps taken, and the mean loss of the last epoch's batches."""

    w: Vector
    steps: Any
    loss: Any


class Plan(NamedTuple):
    """How a client trains: γ, β, rows a step (None: all)."""

    rate: Any
    momentum: float
    batch: int | None


def train(
    grad: Any,
    w: Vector,
    batch: Batch,
    key: Any,
    plan: Plan,
    epochs: Any,
    *,
    linear: Vector | None = None,
    rho: Any = None,
    center: Vector | None = None,
) -> Trained:
    """`epochs` passes from w; every pass sees each row once, in an order of its own."""
    if hasattr(grad, "train"):
        return grad.train(w, batch, key, plan, epochs, linear=linear, rho=rho, center=center)
    width = batch.y.shape[0]
    size = width if plan.batch is None else min(plan.batch, width)
    batches = 1 if plan.batch is None else jnp.ceil(batch.rows / size).astype(jnp.int32)

    def direction(v: Vector, rows: Batch) -> tuple[Any, Vector]:
        loss, g = grad.value_and_gradient(v, rows)
        g = g if linear is None else g + linear
        return loss, g if center is None else g + rho * (v - center)

    def step(k: Any, carry: tuple[Any, ...], order: Any) -> tuple[Any, ...]:
        v, m, total = carry
        rows = batch if order is None else _part(batch, order, k, size)
        loss, g = direction(v, rows)
        m = g if m is None else plan.momentum * m + g
        return v - plan.rate * m, (m if plan.momentum else None), total + loss

    def epoch(e: Any, carry: tuple[Any, ...]) -> tuple[Any, ...]:
        v, m, _ = carry
        start = (v, m, jnp.zeros((), jax.tree.leaves(v.tree)[0].dtype))
        if plan.batch is None:
            return step(0, start, None)
        order = shuffled(jax.random.fold_in(key, e), batch.weight, size)
        return lax.fori_loop(0, batches, lambda k, c: step(k, c, order), start)

    momentum = 0.0 * w if plan.momentum else None
    v, _, total = lax.fori_loop(0, epochs, epoch, (w, momentum, jnp.zeros((), jax.tree.leaves(w.tree)[0].dtype)))
    return Trained(v, epochs * batches, total / batches)


def shuffled(key: Any, weight: Any, size: int) -> Any:
    """The real rows in a random order, then the padding, filled up to whole batches with padding."""
    width = weight.shape[0]
    order = jnp.argsort(jnp.where(weight > 0, jax.random.uniform(key, (width,)), 2.0))
    extra = -width % size
    return jnp.concatenate([order, jnp.full(extra, -1, order.dtype)]) if extra else order


def _part(batch: Batch, order: Any, k: Any, size: int) -> Batch:
    """The k-th batch; its rows stand for all d_i, so that a regulariser divided by d_i stays divided by d_i."""
    rows = lax.dynamic_slice(order, (k * size,), (size,))
    weight = jnp.where(rows >= 0, batch.weight[rows], 0)
    return Batch(batch.x[rows], batch.y[rows], weight * (batch.rows / jnp.sum(weight)), batch.client)


def drawn(batch: Batch, size: int | None, key: Any, place: Any = None) -> Batch:
    """`size` rows without replacement, or from `place` on in the order they came; all of them for None.

    They stand for all d_i, as those of `_part` do. Of a client with fewer rows every one is drawn once.
    """
    if size is None or size >= batch.y.shape[0]:
        return batch
    if place is None:
        chance = jnp.where(batch.weight > 0, jax.random.uniform(key, batch.weight.shape, jnp.float32), -1)
        rows = lax.top_k(chance, size)[1]
        weight = batch.weight[rows]
    else:
        rows = (place + jnp.arange(size)) % jnp.maximum(batch.rows.astype(place.dtype), 1)
        weight = jnp.where(jnp.arange(size) < batch.rows, batch.weight[rows], 0)
    return Batch(batch.x[rows], batch.y[rows], weight * (batch.rows / jnp.sum(weight)), batch.client)


def share(rows: Batch, batch: Batch) -> Any:
    """How much of a client's rows those drawn are."""
    return jnp.sum(rows.weight > 0) / jnp.sum(batch.weight > 0)


def local_epochs(key: Any, most: int, vary: bool) -> Any:
    """E_i: E, or drawn from 1, …, E for every client and round."""
    return jax.random.randint(key, (), 1, most + 1) if vary else jnp.asarray(most)


def check_training(settings: Any, *, falling: bool = False) -> None:
    """The constraints of the settings that deep algorithms share; `falling` allows a γ that changes with the rounds."""
    require_positive_int(
        "epochs", settings.epochs, symbol="E", hint="It is the passes over a client's rows in a round."
    )
    if settings.batch is not None:
        require_positive_int("batch", settings.batch, symbol="B", hint="Leave it out for all rows.")
    if falling:
        check_schedule("rate", settings.rate, symbol="γ", above=0.0)
    else:
        require(is_number(settings.rate) and settings.rate > 0, "rate", "above 0", settings.rate, symbol="γ")
    momentum = getattr(settings, "momentum", 0.0)
    require(is_number(momentum) and 0 <= momentum < 1, "momentum", "in [0, 1)", momentum, symbol="β")
    require_flags(settings, "vary", "short")


def noised_steps(settings: Any, **fixed: Any) -> Theorem:
    """The theorem of way `steps`: E epochs of ⌈d_i/B⌉ noised gradients. `fixed` are settings with what they must be."""
    hint = "In a private run no number of steps, step size or penalty may be computed from the data."
    for name, wanted in {"vary": False, **fixed}.items():
        value = getattr(settings, name)
        require(value == wanted, name, f"{wanted!r} in a private run", value, hint=hint)
    size, epochs = settings.batch, settings.epochs
    steps = (lambda rows: epochs) if size is None else (lambda rows: epochs * math.ceil(rows / size))
    return Theorem("steps", steps=steps, batch=size, about=EVERY_GRADIENT)


def whole_upload() -> Theorem:
    """The theorem of way `client`: an upload is clipped to C, whatever it was computed from."""
    return Theorem("client", about="Whole uploads are clipped to C and noised.")


def sampled_gradient(grad: Any, w: Vector, batch: Batch, size: int | None, key: Any) -> tuple[Any, Vector]:
    """Loss and gradient of `size` rows drawn anew; an oracle that draws and noises them itself does so."""
    if hasattr(grad, "sampled"):
        return grad.sampled(w, batch, size, key)
    return grad.value_and_gradient(w, drawn(batch, size, key))


def check_batches(settings: Any) -> Callable[[np.ndarray], None]:
    """The check of clients' numbers of rows against the batch."""

    def check(sizes: np.ndarray) -> None:
        if settings.batch is None or settings.short or settings.batch <= sizes.min():
            return
        client, least = int(sizes.argmin()), int(sizes.min())
        hint = "Use a smaller batch, or short=True to let such clients use all the rows they have."
        name = f"at most the {least} rows of client {client}"
        require(False, "batch", name, settings.batch, symbol="B", hint=hint)

    return check
