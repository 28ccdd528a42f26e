"""What arrays become to be summed under masks: one vector of doubles, and words of a lattice for each of its numbers.

step            one word a number on a lattice up to the engine's `bound`; off by half a step of it
measure, join   words of 40 bits, from 2⁸⁰ to 2⁻⁴⁰, of a hello to 2⁻⁸⁰
moments         fifty of them, from 2¹⁰⁰⁰ to 2⁻¹⁰⁰⁰: what unit a column has is anybody's guess
vocabulary      one of them: integers up to 2⁴⁰, as they are
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from fedpact.core.errors import require
from fedpact.secure import Lattice, Total


@dataclass(frozen=True)
class Fixed:
    """One word a number: a multiple of the lattice's step."""

    bound: float
    words: ClassVar[int] = 1

    def lattice(self, clients: int) -> Lattice:
        """Of the words."""
        return Lattice(self.bound, clients)

    def spread(self, v: np.ndarray) -> np.ndarray:
        """The numbers that are put on it."""
        return v

    def gathered(self, total: Total) -> np.ndarray:
        """The sum."""
        return total.values


@dataclass(frozen=True)
class Digits:
    """Some words a number, each a digit of 40 bits, from 2^top down: exact for every double within their reach."""

    words: int
    top: int
    WIDTH: ClassVar[int] = 40

    @property
    def bound(self) -> float:
        """What a number may reach."""
        return 2.0**self.top

    def lattice(self, clients: int) -> Lattice:
        """Of the digits, which are integers."""
        return Lattice(2.0**self.WIDTH, clients, 1.0)

    def _exponents(self) -> list[int]:
        return [self.top - self.WIDTH * (k + 1) for k in range(self.words)]

    def spread(self, v: np.ndarray) -> np.ndarray:
        """Every number's first digit, then every number's second, …; nothing is rounded but the last."""
        digits = []
        for e in self._exponents():
            digits.append(np.rint(np.ldexp(v, -e)))
            v = v - np.ldexp(digits[-1], e)
        return np.concatenate(digits)

    def gathered(self, total: Total) -> np.ndarray:
        """The sum: carried into the digits before, then added from the least."""
        digits = total.cells.reshape(self.words, -1).copy()
        for k in range(self.words - 1, 0, -1):
            carry = (digits[k] + 2 ** (self.WIDTH - 1)) >> self.WIDTH
            digits[k] -= carry << self.WIDTH
            digits[k - 1] += carry
        value = np.zeros(digits.shape[1])
        for k, e in reversed(list(enumerate(self._exponents()))):
            value += np.ldexp(digits[k].astype(np.float64), e)
        return value


CODINGS = {
    "join": Digits(4, 80),
    "measure": Digits(3, 80),
    "moments": Digits(50, 1000),
    "vocabulary": Digits(1, 40),
}


def check_summable(leaves: Sequence[Any], what: str) -> None:
    """Refuse what cannot be added up as numbers."""
    for k, leaf in enumerate(leaves):
        ok = jnp.issubdtype(leaf.dtype, np.floating) or jnp.issubdtype(leaf.dtype, np.integer)
        hint = "Send numbers, or leave secure out."
        require(ok, f"array {k} of {what}", "of real numbers or integers under masks", str(leaf.dtype), hint=hint)


def size_of(leaves: Sequence[Any]) -> int:
    """How many numbers they have."""
    return sum(math.prod(leaf.shape) for leaf in leaves)


def flat(arrays: Sequence[np.ndarray]) -> np.ndarray:
    """One vector of doubles."""
    return np.concatenate([np.zeros(0), *(np.asarray(a, np.float64).ravel() for a in arrays)])


def unflat(vector: np.ndarray, leaves: Sequence[Any]) -> list[np.ndarray]:
    """The arrays again, in their shapes and types."""
    out, start = [], 0
    for leaf in leaves:
        part = vector[start : start + math.prod(leaf.shape)].reshape(leaf.shape)
        start += part.size
        out.append((np.rint(part) if jnp.issubdtype(leaf.dtype, np.integer) else part).astype(leaf.dtype))
    return out


def only_summed(init: Callable[[Any], Any], hello: Any) -> list[bool]:
    """Of which arrays of a hello the server's start needs the sum alone: two clients' are as good as their sum and 0.

    Tried out, on numbers from 1 to 9; `hello` has the shapes. What else is needed of each client, as the largest
    Lipschitz constant, goes to the server as it is.
    """
    shapes, tree = jax.tree.flatten(hello)
    random = np.random.default_rng(0)
    drawn = [random.uniform(1, 9, (2, *s.shape)).astype(s.dtype) for s in shapes]
    begun = lambda arrays: jax.tree.leaves(init(jax.tree.unflatten(tree, [jnp.asarray(a) for a in arrays])))
    found, out = begun(drawn), []
    for k, a in enumerate(drawn):
        other = begun([*drawn[:k], np.stack([a[0] + a[1], 0 * a[1]]), *drawn[k + 1 :]])
        out.append(all(np.allclose(x, y, rtol=1e-4, atol=0, equal_nan=True) for x, y in zip(found, other, strict=True)))
    return out
