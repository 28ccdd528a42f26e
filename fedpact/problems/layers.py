"""Layers that are fast inside a compiled training loop on a CPU.

XLA's convolution inside a loop is some fifty times slower than outside, so a convolution is a product of patches with
the weights; its gradients are products too.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp


def dense(a: Any, layer: Any) -> Any:
    """a W + b."""
    return a @ layer["w"] + layer["b"]


def convolve(images: Any, layer: Any) -> Any:
    """A convolution of odd size that keeps the images' size: (B, H, W, C) by (k, k, C, O), plus b."""
    weights = layer["w"]
    size, _, _, outputs = weights.shape
    batch, height, width, _ = images.shape
    columns = patches(images, size).reshape(batch * height * width, -1)
    return (columns @ weights.reshape(-1, outputs)).reshape(batch, height, width, outputs) + layer["b"]


def patches(images: Any, size: int) -> Any:
    """Every pixel's size×size neighbourhood, zeros beyond the edge: (B, H, W, size²·C)."""
    _, height, width, _ = images.shape
    r = size // 2
    padded = jnp.pad(images, ((0, 0), (r, r), (r, r), (0, 0)))
    shifted = [padded[:, i : i + height, j : j + width] for i in range(size) for j in range(size)]
    return jnp.concatenate(shifted, axis=-1)


@jax.custom_vjp
def pool(images: Any) -> Any:
    """The largest of every 2×2 pixels."""
    return jnp.max(_quarters(images), axis=0)


def _quarters(images: Any) -> Any:
    return jnp.stack([images[:, i::2, j::2] for i in (0, 1) for j in (0, 1)])


def _pool_forward(images: Any) -> tuple[Any, Any]:
    quarters = _quarters(images)
    return jnp.max(quarters, axis=0), jnp.argmax(quarters, axis=0).astype(jnp.int8)


def _pool_backward(first: Any, g: Any) -> tuple[Any]:
    """The gradient goes to the first of the largest."""
    batch, height, width, channels = g.shape
    parts = [jnp.where(first == k, g, 0) for k in range(4)]
    rows = [jnp.stack(parts[2 * i : 2 * i + 2], axis=3) for i in (0, 1)]  # (B, H, W, 2, C): the two of a row of pixels
    return (jnp.stack(rows, axis=2).reshape(batch, 2 * height, 2 * width, channels),)


pool.defvjp(_pool_forward, _pool_backward)
