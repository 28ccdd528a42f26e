"""Rows of features of which most are 0, in a layout that XLA's CPU backend multiplies fast.

The entries of every row are cut into segments of `ROW` numbers, and once more those of every column into segments of
`COLUMN`: `x @ w` gathers from w along the rows, `r @ x` gathers from r along the columns, and only one number per
segment is scattered. (On w8a, 4 % full, a gradient takes 8.5 ms so, 24 ms dense, and 22 ms with a scatter of every
entry as the coordinate formats do.)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

ROW, COLUMN = 8, 16
#: Sparse is faster while its stored numbers, padding included, are fewer than this share of the dense ones.
WORTH = 0.3


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Segments:
    """Segments of one direction: whose each is, and the places and values of its numbers (0 where there are fewer)."""

    owner: Any  # (segments,)
    place: Any  # (segments, width)
    value: Any  # (segments, width)

    def products(self, v: Any, length: int) -> Any:
        """Σ value·v[place] per owner."""
        sums = jnp.sum(self.value * jnp.asarray(v)[self.place], axis=-1)
        return jnp.zeros(length, sums.dtype).at[self.owner].add(sums)


@jax.tree_util.register_pytree_node_class
class SparseRows:
    """One client's (rows, features) matrix; `x @ w`, `r @ x` and `x[rows]` (dense) are what algorithms use."""

    __array_ufunc__ = None  # NumPy arrays on the left defer to __rmatmul__

    def __init__(self, rows: Segments, columns: Segments, start: Any, shape: tuple[int, int], longest: int) -> None:
        self.rows, self.columns, self.start = rows, columns, start
        self.shape, self.longest = shape, longest

    @property
    def dtype(self) -> Any:
        """Of the values."""
        return self.rows.value.dtype

    def __matmul__(self, w: Any) -> Any:
        return self.rows.products(w, self.shape[0])

    def __rmatmul__(self, r: Any) -> Any:
        return self.columns.products(r, self.shape[1])

    def __getitem__(self, rows: Any) -> Any:
        """Some of the rows, as a dense array."""
        rows = jnp.asarray(rows)
        segment = self.start[rows][:, None] + jnp.arange(self.longest)
        inside = jnp.minimum(segment, self.rows.owner.shape[0] - 1)
        mine = (self.rows.owner[inside] == rows[:, None]) & (segment == inside)
        values = jnp.where(mine[..., None], self.rows.value[inside], 0)
        out = jnp.zeros((len(rows), self.shape[1]), self.dtype)
        return out.at[jnp.arange(len(rows))[:, None, None], self.rows.place[inside]].add(values)

    def row_sums(self, f: Callable[[Any], Any]) -> Any:
        """Σ f(value) over the entries of every row, f(0) being 0."""
        sums = jnp.sum(f(self.rows.value), axis=-1)
        return jnp.zeros(self.shape[0], sums.dtype).at[self.rows.owner].add(sums)

    def kept(self, keep: Any) -> SparseRows:
        """The same with zeros for rows that are not kept, whatever they hold."""
        zeroed = lambda s, rows: replace(s, value=jnp.where(keep[rows], s.value, 0))
        rows, columns = zeroed(self.rows, self.rows.owner[:, None]), zeroed(self.columns, self.columns.place)
        return SparseRows(rows, columns, self.start, self.shape, self.longest)

    def tree_flatten(self) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        """For JAX: the arrays, and what is fixed."""
        return (self.rows, self.columns, self.start), (self.shape, self.longest)

    @classmethod
    def tree_unflatten(cls, fixed: tuple[Any, ...], arrays: tuple[Any, ...]) -> SparseRows:
        """For JAX: the inverse of `tree_flatten`."""
        return cls(*arrays, *fixed)


def _cut(matrix: Any, width: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The segments of a CSR matrix: owners, places and values."""
    counts = np.diff(matrix.indptr)
    pieces = -(-counts // width)
    owner = np.repeat(np.arange(len(counts)), pieces)
    first = np.concatenate([[0], np.cumsum(pieces)])[:-1]
    entry_row = np.repeat(np.arange(len(counts)), counts)
    within = np.arange(len(matrix.indices)) - np.repeat(matrix.indptr[:-1], counts)
    segment = first[entry_row] + within // width
    place = np.zeros((len(owner), width), np.int32)
    value = np.zeros((len(owner), width), matrix.data.dtype)
    place[segment, within % width] = matrix.indices
    value[segment, within % width] = matrix.data
    return owner.astype(np.int32), place, value


def _stacked(cut: Sequence[tuple[np.ndarray, ...]], width: int, dtype: Any) -> Segments:
    """Segments of several matrices in one set of arrays; what is padded belongs to owner 0 and is 0."""
    most = max(1, *(len(owner) for owner, _, _ in cut)) if cut else 1
    owner = np.zeros((len(cut), most), np.int32)
    place = np.zeros((len(cut), most, width), np.int32)
    value = np.zeros((len(cut), most, width), dtype)
    for i, (o, p, v) in enumerate(cut):
        owner[i, : len(o)], place[i, : len(o)], value[i, : len(o)] = o, p, v
    return Segments(owner, place, value)


def stack(matrices: Sequence[Any], rows: int, dtype: Any) -> SparseRows:
    """CSR matrices of one width as one `SparseRows` with a leading axis, each padded to `rows` rows."""
    features = matrices[0].shape[1]
    by_row = [_cut(matrix.tocsr(), ROW) for matrix in matrices]
    by_column = [_cut(matrix.tocsc().T.tocsr(), COLUMN) for matrix in matrices]
    start = np.full((len(matrices), rows), np.iinfo(np.int32).max // 2, np.int32)  # of an empty row: beyond the end
    longest = 1
    for i, (owner, _, _) in enumerate(by_row):
        found, first, count = np.unique(owner, return_index=True, return_counts=True)
        start[i, found] = first
        longest = max(longest, *count.tolist()) if len(count) else longest
    segments = _stacked(by_row, ROW, dtype), _stacked(by_column, COLUMN, dtype)
    return SparseRows(*segments, start, (rows, features), longest)


def stored(matrix: Any) -> int:
    """How many numbers the two sets of segments of a CSR matrix hold, padding included."""
    rows, columns = np.diff(matrix.indptr), np.bincount(matrix.indices, minlength=matrix.shape[1])
    return int(np.sum(-(-rows // ROW)) * ROW + np.sum(-(-columns // COLUMN)) * COLUMN)
