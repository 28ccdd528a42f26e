"""Layers that are fast inside a compiled training loop on a CPU.

XLA's convolution inside a loop is some fifty times slower than outside, so a convolution is a sum of products: for each
row of the kernel, the images' horizontal neighbourhoods times that row's weights. Its gradients are products too.
Whole patches would be 25 times as large as the images; for a batch of 200 even the rows' five times leave the caches,
which costs more than the products. `block` therefore takes CHUNK images through convolution, pooling and activation
before the next ones, forward and backward, and makes the neighbourhoods again on the way back. CNN1 at batch 200, CPU
ms a step: 566 with patches all at once, 255 with patches by tens, some 235 by rows; the products alone are some 190.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

#: Images that go through a block together (measured: 2, 5, 10, 20, 25).
CHUNK = 10
#: From so many channels on a row of the kernel is a product of its own.
LEAST_CHANNELS = 16


def dense(a: Any, layer: Any) -> Any:
    """a W + b, or without the b where the layer has none."""
    return a @ layer["w"] + layer["b"] if "b" in layer else a @ layer["w"]


def neighbourhoods(images: Any, size: int) -> Any:
    """Every pixel's size×size neighbourhood, zeros beyond the edge, cut into products' left sides: (B·H·W, columns).

    One of them for each row of the kernel, which is the others' shifted down; a single one where images have few
    channels, for a product needs columns enough.
    """
    _, height, width, channels = images.shape
    r = size // 2
    padded = jnp.pad(images, ((0, 0), (r, r), (r, r), (0, 0)))
    wide = jnp.concatenate([padded[:, :, j : j + width] for j in range(size)], axis=-1)
    rows = [wide[:, i : i + height] for i in range(size)]
    parts = rows if channels >= LEAST_CHANNELS else [jnp.concatenate(rows, axis=-1)]
    return [part.reshape(-1, part.shape[-1]) for part in parts]


def convolve(images: Any, layer: Any) -> Any:
    """A convolution of odd size that keeps the images' size: (B, H, W, C) by (k, k, C, O), plus b."""
    weights = layer["w"]
    size, _, _, outputs = weights.shape
    parts = neighbourhoods(images, size)
    cut = weights.reshape(len(parts), -1, outputs)
    return sum(a @ w for a, w in zip(parts, cut, strict=True)).reshape(*images.shape[:3], outputs) + layer["b"]


def pool(images: Any) -> Any:
    """The largest of every 2×2 pixels."""
    return jnp.max(_quarters(images), axis=0)


def _quarters(images: Any) -> Any:
    return jnp.stack([images[:, i::2, j::2] for i in (0, 1) for j in (0, 1)])


def block(images: Any, layer: Any, relu: bool, first: bool = False) -> Any:
    """pool(relu(convolve(images))), or without the relu; of the `first` layer nobody wants the images' gradient."""
    return _block(relu, first, images, layer["w"], layer["b"])


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _block(relu: bool, first: bool, images: Any, w: Any, b: Any) -> Any:
    return _forward(relu, first, images, w, b)[0]


def _forward(relu: bool, first: bool, images: Any, w: Any, b: Any) -> tuple[Any, Any]:
    def some(images: Any) -> tuple[Any, Any]:
        z = _quarters(convolve(images, {"w": w, "b": 0}))
        upper, lower = jnp.maximum(z[0], z[1]), jnp.maximum(z[2], z[3])
        a = jnp.maximum(upper, lower) + b
        place = jnp.where(lower > upper, 2 + (z[3] > z[2]), z[1] > z[0]).astype(jnp.int8)  # the first of the largest
        if relu:
            place = jnp.where(a > 0, place, 4)  # nowhere
        return (jax.nn.relu(a) if relu else a), place

    a, place = _by_chunks(some, images)
    return a, (images, place, w)


def _backward(relu: bool, first: bool, kept: tuple[Any, ...], g: Any) -> tuple[Any, Any, Any]:
    images, place, w = kept
    size, _, inputs, outputs = w.shape

    def some(images: Any, place: Any, g: Any) -> tuple[Any, ...]:
        batch, height, width, _ = images.shape
        parts = jnp.stack([jnp.where(place == k, g, 0) for k in range(4)]).reshape(2, 2, *g.shape)
        by_z = parts.transpose(2, 3, 0, 4, 1, 5).reshape(batch * height * width, outputs)
        by_w = jnp.stack([a.T @ by_z for a in neighbourhoods(images, size)])
        if first:
            return by_w, ()
        rows: Any = 0  # the neighbourhoods' gradients, added up where they came from
        for i in range(size):
            product = by_z @ w[i].reshape(-1, outputs).T
            own = product.reshape(batch, height, width, size * inputs)
            rows = rows + jnp.pad(own, ((0, 0), (i, size - 1 - i), (0, 0), (0, 0)))
        r, whole = size // 2, jnp.zeros((), g.dtype)
        rows = rows[:, r : r + height]
        for j in range(size):
            own = rows[..., j * inputs : (j + 1) * inputs]
            whole = whole + jnp.pad(own, ((0, 0), (0, 0), (j, size - 1 - j), (0, 0)))
        return by_w, whole[:, :, r : r + width]

    by_w, by_images = _by_chunks(some, images, place, g, summed=1)
    by_images = jnp.zeros_like(images) if first else by_images
    return by_images, by_w.reshape(w.shape), jnp.sum(jnp.where(place < 4, g, 0), (0, 1, 2))


_block.defvjp(_forward, _backward)


def _by_chunks(f: Callable[..., tuple[Any, Any]], *stacked: Any, summed: int = 0) -> tuple[Any, Any]:
    """f over CHUNK images at a time, and what is left over; the first result is added up if `summed`, else joined."""
    batch = stacked[0].shape[0]
    many = batch // CHUNK
    if many <= 1:
        return f(*stacked)
    cut = tuple(a[: many * CHUNK].reshape(many, CHUNK, *a.shape[1:]) for a in stacked)
    whole = lambda tree: jax.tree.map(lambda a: a.reshape(many * CHUNK, *a.shape[2:]), tree)
    if summed:
        zero = jnp.zeros(jax.eval_shape(f, *(a[0] for a in cut))[0].shape, stacked[0].dtype)

        def add(total: Any, part: Any) -> tuple[Any, Any]:
            own, rest = f(*part)
            return total + own, rest

        total, rest = lax.scan(add, zero, cut)
        out = total, whole(rest)
    else:
        out = whole(lax.map(lambda part: f(*part), cut))
    if batch == many * CHUNK:
        return out
    left = f(*(a[many * CHUNK :] for a in stacked))
    join = partial(jax.tree.map, lambda a, b: jnp.concatenate([a, b]))
    return (out[0] + left[0] if summed else join(out[0], left[0])), join(out[1], left[1])
