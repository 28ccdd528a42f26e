"""Exact draws of discrete Gaussian and discrete Laplace noise, after Canonne, Kamath and Steinke (2020).

The discrete Laplace of scale s has P(x) ∝ exp(−|x|/s), the discrete Gaussian P(x) ∝ exp(−x²/2s²), on all integers. The
scale is an integer, so every probability used is a ratio of integers and every comparison is one of integers: no float.

    Bernoulli(exp(−n/m)), n ≤ m   the first K with a failure of Bernoulli(n/(mK)) is odd           (their Algorithm 1)
    discrete Laplace              u uniform below s kept with exp(−u/s), v geometric with exp(−1): |x| = u + s·v,
                                  a fair sign, and "−0" is drawn again                              (their Algorithm 2)
    discrete Gaussian             y discrete Laplace of scale s, kept with exp(−(|y|−s)²/2s²)       (their Algorithm 3)

All draws of a call are made together on NumPy integers; those still undecided go on. Times depend on what is drawn, so
draw before the request that uses them arrives.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]
#: The largest scale in lattice steps: (|y|−s)² and 2s²K below stay within 63 bits.
STEPS_MOST = 2**22
# v ≥ 200 has probability e⁻²⁰⁰ as a proposal; capping it there keeps all integers within 63 bits.
_GEOMETRIC_MOST = 200


def _bernoulli_exp(n: Array, m: int, source: Any) -> Array:
    """Whether Bernoulli(exp(−n_i/m)) came up, for each n_i ≥ 0."""
    alive = np.ones(n.shape, bool)
    whole, part = n // m, n % m
    left = np.flatnonzero(whole > 0)
    while left.size:  # exp(−n/m) = exp(−1) … exp(−1) · exp(−part/m): all of them must come up
        up = _bernoulli_exp_below_one(np.full(left.shape, m, np.int64), m, source)
        alive[left[~up]] = False
        whole[left] -= 1
        left = left[up & (whole[left] > 0)]
    last = np.flatnonzero(alive)
    alive[last] = _bernoulli_exp_below_one(part[last], m, source)
    return alive


def _bernoulli_exp_below_one(n: Array, m: int, source: Any) -> Array:
    odd = np.zeros(n.shape, bool)
    going, k = np.arange(n.size), 1
    while going.size:
        success = source.below(m * k, going.size) < n[going]  # Bernoulli(n/(mk))
        odd[going[~success]] = k % 2 == 1
        going, k = going[success], k + 1
    return odd


def _laplace_once(s: int, size: int, source: Any) -> tuple[Array, Array]:
    """Proposals, and which of them are draws."""
    u = source.below(s, size)
    kept = np.flatnonzero(_bernoulli_exp(u, s, source))
    v = np.zeros(kept.size, np.int64)
    going = np.arange(kept.size)
    for _ in range(_GEOMETRIC_MOST):
        one = np.ones(going.size, np.int64)
        going = going[_bernoulli_exp_below_one(one, 1, source)]
        if not going.size:
            break
        v[going] += 1
    size_of = u[kept] + s * v
    negative = source.below(2, kept.size) == 1
    good = ~(negative & (size_of == 0))
    values, valid = np.zeros(size, np.int64), np.zeros(size, bool)
    values[kept], valid[kept] = np.where(negative, -size_of, size_of), good
    return values, valid


def _gaussian_once(s: int, size: int, source: Any) -> tuple[Array, Array]:
    values, valid = _laplace_once(s, size, source)
    kept = np.flatnonzero(valid)
    away = np.abs(values[kept]) - s
    valid[kept] = _bernoulli_exp(away * away, 2 * s * s, source)
    return values, valid


def _until_all(once: Callable[[int, int, Any], tuple[Array, Array]], s: int, size: int, source: Any) -> Array:
    found, missing = np.empty(size, np.int64), np.arange(size)
    while missing.size:
        values, valid = once(s, missing.size, source)
        found[missing[valid]] = values[valid]
        missing = missing[~valid]
    return found


def discrete_laplace(steps: int, size: int, source: Any) -> Array:
    """`size` integers with P(x) ∝ exp(−|x|/steps)."""
    return _until_all(_laplace_once, steps, size, source)


def discrete_gaussian(steps: int, size: int, source: Any) -> Array:
    """`size` integers with P(x) ∝ exp(−x²/2steps²)."""
    return _until_all(_gaussian_once, steps, size, source)
