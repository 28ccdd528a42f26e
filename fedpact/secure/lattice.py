"""Real vectors as integers modulo 2⁶⁴, so that masks cancel exactly and a sum has the same bits in any order.

    encode   k = round(v / g)                    |v| ≤ bound, a multiple of the step g; as a word k mod 2⁶⁴
    sum      Σ k mod 2⁶⁴ = Σ k                   for at most n clients: n · round(bound / g) ≤ 2⁶² < 2⁶³
    decode   g · Σ k

Error: |g·k − v| ≤ g/2, hence n·g/2 for a sum of n, and 2⁻⁵² of the sum for the float it becomes. That is for g a power
of two, which the default is; for any other g dividing and multiplying add 2⁻⁵² |v|. Multiples of g come back as they
were, so that noise drawn on a lattice (`fedpact.privacy.release`) stays on it: give its step.

64 bits are enough for doubles: at the default step a value has 62 − log2(n) bits, and 53 are all a double has up to
n = 512. A bit is left over; of sums whose masks did not cancel, half the coordinates are beyond it and are refused.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from fedpact.core.errors import InvalidArgument, is_number, require, require_positive_int

Array = np.ndarray[Any, np.dtype[Any]]
#: What the sum of all clients' cells may reach.
CELLS_MOST = 2**62


@dataclass(frozen=True)
class Lattice:
    """How n clients' vectors of numbers up to `bound` in size become words; step 0: the finest power of two."""

    bound: float
    clients: int
    step: float = 0.0

    def __post_init__(self) -> None:
        ok = is_number(self.bound) and 2.0**-400 <= self.bound <= 2.0**400
        require(ok, "bound", "a positive number from 2⁻⁴⁰⁰ to 2⁴⁰⁰", self.bound)
        require_positive_int("clients", self.clients, symbol="n")
        require(is_number(self.step) and self.step >= 0, "step", "a positive number, or 0", self.step, symbol="g")
        if self.step == 0:
            object.__setattr__(self, "step", finest(self.bound, self.clients))
        reach = self.bound / self.step * self.clients
        hint = "Lower the bound or raise the step."
        fits = reach < CELLS_MOST and self.cells * self.clients <= CELLS_MOST
        require(fits, "clients · bound / step", "at most 2⁶²", float(f"{reach:.3g}"), symbol="n·bound/g", hint=hint)
        require(self.cells >= 1, "bound", "at least half a step", self.bound)

    @property
    def cells(self) -> int:
        """The most steps one client's number may have."""
        return int(np.rint(self.bound / self.step))

    @property
    def error(self) -> float:
        """The most by which a sum of all clients is off, for a step that is a power of two: n·g/2."""
        return self.clients * self.step / 2

    def encode(self, values: Any) -> Array:
        """The words of a vector; a number beyond the bound is refused, with its place."""
        v = np.asarray(values, np.float64)
        require(v.ndim == 1, "values", "a vector", f"an array of shape {v.shape}")
        bad = np.flatnonzero(~(np.abs(v) <= self.bound))
        if bad.size:
            place, of = int(bad[0]), f" ({bad.size} of {v.size} are)" if bad.size > 1 else ""
            raise InvalidArgument(
                f"values[{place}] must be finite and at most {self.bound:g} in size, got {v[place]:g}{of}. Clip the "
                "vector, or agree on a lattice with a larger bound."
            )
        return np.rint(v / self.step).astype(np.int64).view(np.uint64)

    def decode(self, words: Array, clients: int) -> Array:
        """The sum of this many clients' vectors, from the sum of their words."""
        require(1 <= clients <= self.clients, "clients", f"from 1 to {self.clients}", clients)
        cells = words.view(np.int64)
        beyond = int(np.count_nonzero((cells > clients * self.cells) | (cells < -clients * self.cells)))
        hint = "Masks that did not cancel, or a vector that is none of this lattice."
        require(not beyond, "sum", f"of {clients} vectors of the lattice", f"{beyond} beyond", hint=hint)
        return cells * self.step


def finest(bound: float, clients: int) -> float:
    """The least power of two g with n · round(bound / g) ≤ 2⁶²."""
    _, exponent = math.frexp(bound * clients)  # bound · n < 2^exponent
    step = 2.0 ** (exponent - 62)
    while clients * int(np.rint(bound / step)) > CELLS_MOST:  # where rounding up is too much
        step *= 2
    return step
