"""The problems written out row by row, straight from their definitions: slow, and independent of fedpact."""

from __future__ import annotations

import math

import jax.numpy as jnp
import numpy as np

from fedpact.core.contract import Batch
from fedpact.core.vector import Vector
from fedpact.problems import LeastSquares, Logistic

KINDS = [
    kind(l2=l2, divide=divide, intercept=intercept)
    for kind in (Logistic, LeastSquares)
    for l2, divide, intercept in ((0.7, True, False), (0.7, False, False), (0.7, True, True))
]


def label(problem):
    yes = [name for name in ("divide", "intercept") if getattr(problem, name)]
    return "-".join([type(problem).__name__, f"l2={problem.l2}", *yes])


def rows(problem, d=9, n=4, seed=0):
    """A client's rows, of unequal scales."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(d, n)) * np.linspace(0.3, 2.0, n)
    y = rng.normal(size=d) * 2
    return x, (y > 0).astype(float) if isinstance(problem, Logistic) else y


def as_batch(x, y, padding=0, junk=0.0):
    """Rows as a batch, with `padding` rows of weight 0 after them (their features are zero, their label `junk`)."""
    y = np.asarray(y, float)
    weight = np.concatenate([np.ones(len(y)), np.zeros(padding)])
    x = np.concatenate([x, np.zeros((padding, x.shape[1]))])
    return Batch(jnp.asarray(x), jnp.asarray(np.append(y, np.full(padding, junk))), jnp.asarray(weight), jnp.asarray(0))


def as_vector(problem, flat):
    """A flat array, intercept last, as the problem's parameters."""
    if not problem.intercept:
        return Vector({"w": jnp.asarray(flat)})
    return Vector({"w": jnp.asarray(flat[:-1]), "b": jnp.asarray(flat[-1])})


def as_flat(w):
    return np.append(np.asarray(w.tree["w"]), np.asarray(w.tree["b"]).reshape(-1) if "b" in w.tree else [])


def value(problem, flat, x, y):
    """f_i by the sums of the definition."""
    coefficients = flat[:-1] if problem.intercept else flat
    intercept = flat[-1] if problem.intercept else 0.0
    d, total = len(y), 0.0
    for row, target in zip(x, y, strict=True):
        z = sum(a * c for a, c in zip(row, coefficients, strict=True)) + intercept
        total += math.log(1 + math.exp(z)) - target * z if isinstance(problem, Logistic) else 0.5 * (z - target) ** 2
    square = sum(c * c for c in coefficients)
    return total / d + problem.l2 / 2 * square / (d if problem.divide else 1)


def traceable(problem, flat, x, y):
    """The same for jax.grad: one expression per row."""
    coefficients = flat[:-1] if problem.intercept else flat
    intercept = flat[-1] if problem.intercept else 0.0
    total = 0.0
    for row, target in zip(x, y, strict=True):
        z = jnp.dot(jnp.asarray(row), coefficients) + intercept
        total += jnp.log(1 + jnp.exp(z)) - target * z if isinstance(problem, Logistic) else 0.5 * (z - target) ** 2
    return total / len(y) + problem.l2 / 2 * jnp.dot(coefficients, coefficients) / (len(y) if problem.divide else 1)
