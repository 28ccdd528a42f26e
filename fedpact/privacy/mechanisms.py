"""Noise: the mechanisms by name, where their randomness comes from, and where in the federation the noise is added.

    gaussian, laplace              floating-point noise: for simulation; its last bits are attackable in a real release
    discrete_gaussian, -_laplace   integers on a lattice, drawn exactly (`discrete`): for a real federation

A release on the lattice of step g is g·(round(v/g) + X) with X an integer. Rounding moves every coordinate by at most
g/2, on both of two neighbours, hence the sensitivity grows by g√d in the ℓ2 norm and by g·d in the ℓ1 norm, and a
thousandth of that for the float division by g (`lattice_sensitivity`). The noise scale is a whole number of steps s,
so that g = scale/s and no float enters the sampler.
"""

from __future__ import annotations

import math
import os
from typing import Any, NamedTuple, Protocol

import numpy as np
from scipy.special import ndtri

from fedpact.core.errors import is_count, is_number, require, require_one_of
from fedpact.privacy.discrete import STEPS_MOST, discrete_gaussian, discrete_laplace

Array = np.ndarray[Any, np.dtype[Any]]


class Mechanism(NamedTuple):
    """What a mechanism is: its sentence, the norm in which contributions are clipped, and whether it has a lattice."""

    about: str
    norm: int
    lattice: bool


MECHANISMS = {
    "gaussian": Mechanism("normal noise of deviation σ, for contributions clipped in the ℓ2 norm", 2, False),
    "laplace": Mechanism("Laplace noise of scale b, for contributions clipped in the ℓ1 norm", 1, False),
    "discrete_gaussian": Mechanism("discrete normal noise on an integer lattice, ℓ2 norm, drawn exactly", 2, True),
    "discrete_laplace": Mechanism("discrete Laplace noise on an integer lattice, ℓ1 norm, drawn exactly", 1, True),
}
#: Where the noise is added, and against whom it therefore protects.
PLACES = {
    "central": "the server adds the noise to the sum; it protects against those who see the released models only",
    "local": "every client adds all the noise to its own upload; it protects against the server too",
    "distributed": "every client adds a share, and only the masked sum is seen; it needs secure sums to protect anyone",
}


class Source(Protocol):
    """Where random integers come from."""

    def below(self, bound: int, size: int) -> Array:
        """`size` independent integers, uniform on 0 … bound−1, for bound ≤ 2⁶²."""


class Simulated:
    """Randomness of a NumPy generator: repeatable, for simulation only."""

    def __init__(self, generator: np.random.Generator) -> None:
        self.generator = generator

    def below(self, bound: int, size: int) -> Array:
        """`size` integers, uniform on 0 … bound−1."""
        return self.generator.integers(0, bound, size, dtype=np.int64)


class Secure:
    """Randomness of the operating system's secure source: never repeatable, for a real federation."""

    def below(self, bound: int, size: int) -> Array:
        """`size` integers, uniform on 0 … bound−1, by rejecting words of as many bits as bound−1 has."""
        found = np.empty(size, np.int64)
        mask, missing = np.uint64((1 << max(1, (bound - 1).bit_length())) - 1), np.arange(size)
        while missing.size:
            words = np.frombuffer(os.urandom(8 * missing.size), np.uint64) & mask
            good = words < np.uint64(bound)
            found[missing[good]] = words[good].astype(np.int64)
            missing = missing[~good]
        return found


def lattice_sensitivity(moved: float, step: float, dimension: int, norm: int) -> float:
    """The most by which neighbours differ once both are rounded to a lattice: moved + g√d (ℓ2) or moved + g·d (ℓ1).

    v/g is a float: below 2⁴⁰ cells it is off by at most 2⁻¹² of a cell, so a coordinate moves by g(½ + 2⁻¹²) at most.
    """
    return moved + step * (1 + 2.0**-10) * (math.sqrt(dimension) if norm == 2 else dimension)


def noise(mechanism: str, scale: float, size: int, source: Source) -> Array:
    """`size` draws of floating-point noise of this scale (σ or b), from 53-bit uniforms of the source.

    The last bits of such numbers tell more than the accountant counts: release on a lattice (`release`) where they
    leave the machine.
    """
    require_one_of("mechanism", mechanism, [name for name, kind in MECHANISMS.items() if not kind.lattice])
    require(is_number(scale) and scale > 0, "scale", "a positive number", scale)
    require(is_count(size), "size", "an integer of at least 0", size)
    half = (source.below(1 << 53, size) + 0.5) * 2.0**-54  # in (0, ½)
    tail = -ndtri(half) if mechanism == "gaussian" else -np.log(2 * half)
    return np.asarray(scale * tail * (1 - 2 * source.below(2, size)))


def release(mechanism: str, values: Array, scale: float, steps: int, source: Source) -> Array:
    """The values as released on the lattice of step scale/steps: rounded, plus exact discrete noise of `steps` steps.

    Account it as an `Event` with these steps and this dimension. Values must be finite and below 2⁴⁰ steps in size.
    """
    require_one_of("mechanism", mechanism, [name for name, kind in MECHANISMS.items() if kind.lattice])
    require(is_number(scale) and scale > 0, "scale", "a positive number", scale)
    require(is_count(steps, 1) and steps <= STEPS_MOST, "steps", f"an integer from 1 to {STEPS_MOST}", steps)
    flat = np.asarray(values, np.float64).ravel()
    step = scale / steps
    with np.errstate(all="ignore"):
        cells = np.rint(flat / step)
    fits = bool(np.all(np.abs(cells) < 2.0**40))
    require(fits, "values", "finite and below 2⁴⁰ lattice steps", "others", hint="Clip them first, or use fewer steps.")
    draw = discrete_gaussian if mechanism == "discrete_gaussian" else discrete_laplace
    return ((cells.astype(np.int64) + draw(steps, flat.size, source)) * step).reshape(np.shape(values))
