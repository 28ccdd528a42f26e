"""Which words clients have between them, and how many clients have each, from a sum of integers: not who has which.

M. T. Goodrich, M. Mitzenmacher, "Invertible Bloom Lookup Tables", Allerton 2011, with cells that are added up over
clients (under masks: `masks`), so that a word of c clients is in the sum c times.

    cell     c, how many words; and of them all, added up: digest, length, bytes; three bytes to a number
    insert   word x: add (1, digest(x), |x|, x) to four cells, one in each quarter of the table, by SHA-256(salt, x)
    sum      cells of all clients, added up: a function of which words there are and how often, and of nothing else
    peel     a cell whose numbers are c times those of one word: that word is in c clients; take it off its four cells;
             until all cells are 0: these are all the words

Peeling ends there but for a chance that falls with the table's size (`Table.room_for`); then it is done again with
another salt. What is no word is taken for one with a chance of 2⁻⁴⁸, and then cells are left over.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from fedpact.core.errors import is_count, require
from fedpact.secure.primitives import digest

Array = np.ndarray[Any, np.dtype[Any]]
#: How many cells a word is in, each in a part of the table of its own.
PLACES = 4
#: Bytes to a number of a cell: 2¹⁶ words in one are still below 2⁴⁰.
PIECE = 3
#: Bytes of a digest, and of a length; they come before the word's.
DIGEST, LENGTH = 6, 3


def _pieces(content: bytes) -> Array:
    parts = np.frombuffer(content, np.uint8).reshape(-1, PIECE).astype(np.int64)
    return parts @ 256 ** np.arange(PIECE)


def _content(pieces: Array) -> bytes:
    return np.stack([pieces >> 8 * k for k in range(PIECE)], axis=1).astype(np.uint8).tobytes()


@dataclass(frozen=True)
class Table:
    """A table of four parts of `part` cells, for words of at most `width` bytes."""

    salt: bytes
    part: int
    width: int

    def __post_init__(self) -> None:
        require(isinstance(self.salt, bytes) and len(self.salt) == 16, "salt", "16 bytes", self.salt)
        require(is_count(self.part, 1), "part", "an integer of at least 1", self.part)
        require(is_count(self.width, 1), "width", "an integer of at least 1", self.width)

    @classmethod
    def room_for(cls, words: int, salt: bytes, width: int) -> Table:
        """One from which this many distinct words peel, but for a chance of less than 1 in 500: 1.6 cells for each,
        where 1.3 are enough for many, and 256 more, for few (tests/secure/test_vocabulary.py)."""
        return cls(salt, 64 + -(-2 * words // 5), width)

    @property
    def shape(self) -> tuple[int, int]:
        """Cells, and numbers of each."""
        return PLACES * self.part, 1 + (DIGEST + LENGTH) // PIECE + -(-self.width // PIECE)

    def _placed(self, x: bytes) -> tuple[list[int], Array]:
        """The cells a word is in, and what it adds to each."""
        found = digest(b"vocabulary", self.salt, x)
        numbers = np.frombuffer(found, "<u4", PLACES).tolist()
        head = found[-DIGEST:] + len(x).to_bytes(LENGTH, "little")
        body = _pieces((head + x).ljust(PIECE * (self.shape[1] - 1), b"\0"))
        return [k * self.part + number % self.part for k, number in enumerate(numbers)], np.array([1, *body])

    def of(self, words: Iterable[bytes]) -> Array:
        """One client's table."""
        cells = np.zeros(self.shape, np.int64)
        for x in set(words):
            require(len(x) <= self.width, "word", f"of at most {self.width} bytes", len(x))
            places, row = self._placed(x)
            cells[places] += row
        return cells

    def words(self, total: Array, clients: int) -> dict[bytes, int] | None:
        """All words in the sum of this many clients' tables, and in how many each is; None if it does not peel."""
        cells, found = total.copy(), dict[bytes, int]()
        waiting = np.flatnonzero(cells[:, 0]).tolist()
        while waiting:
            place = waiting.pop()
            if (one := self._alone(cells[place], place, clients)) is None:
                continue
            x, count, places, row = one
            if x in found:  # the sum of no tables
                return None
            found[x] = count
            cells[places] -= count * row
            waiting += places
        return None if cells.any() else found

    def _alone(self, cell: Array, place: int, clients: int) -> tuple[bytes, int, list[int], Array] | None:
        """The one word that is in this cell, if it is one."""
        count = int(cell[0])
        if not 1 <= count <= clients or (cell % count).any():
            return None
        row = cell // count
        if row.min() < 0 or row.max() >= 256**PIECE:
            return None
        content = _content(row[1:])
        length = int.from_bytes(content[DIGEST : DIGEST + LENGTH], "little")
        x = content[DIGEST + LENGTH :][:length]
        places, again = self._placed(x)
        return (x, count, places, row) if place in places and np.array_equal(row, again) else None
