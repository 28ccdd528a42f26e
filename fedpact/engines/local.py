"""The local engine: JAX, vectorised over clients, in buckets of similar size.

Clients are ordered by their number of rows and cut into a few buckets; within a bucket rows are padded to the longest
and the client axis is vectorised. Four buckets on the paper's random cut points waste a third of the rows where
one would waste seven times their number. A bucket too large for the memory allowance is worked through in chunks.
Clients with much data step one after the other, straight from their place in memory, and those that do not take part
are skipped: vectorising gains nothing there, and gathering a cohort's rows costs more than its gradients. Sparse
features stay sparse where that is faster (`core.sparse`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import scipy.sparse

from fedpact.core import sparse
from fedpact.core.contract import Batch, Cohort
from fedpact.core.errors import is_number, require, require_positive_int
from fedpact.core.settings import plain_fields
from fedpact.engines.stacked import Stacked, kept_dtype

#: What one more bucket costs, in padded rows (measured: its kernels' launches against a row's gradient).
BUCKET_COST = 1500
#: Clients of at least this many bytes step one after the other (measured: the kernels' launches against their work).
ONE_BY_ONE = 2**20
#: Test rows that are looked at together.
TEST_ROWS = 500
#: Gathering a cohort's rows pays only below this share of everyone's; above it everyone steps and the rest is masked.
WORTH_GATHERING = 0.5


class Data(NamedTuple):
    """The clients' rows in buckets of like sizes, and the dataset's own test rows in blocks, where it has any."""

    buckets: tuple[Batch, ...]
    test: Batch | None


class Capacities(NamedTuple):
    """How many clients of each bucket one round may have (`bounds`: the buckets' positions)."""

    bounds: tuple[tuple[int, int], ...]
    sizes: np.ndarray


@dataclass(frozen=True)
class LocalEngine(Stacked):
    """Vectorised simulation. `chunk` clients at a time at most (None: as many as `memory` bytes allow).

    `sparse`: whether sparse features stay sparse (None: where that is faster). `one_by_one`: whether clients step one
    after the other (None: where they are large; false suits those who draw a few of many rows).
    """

    chunk: int | None = None
    memory: int = 512 * 2**20
    buckets: int = 6
    sparse: bool | None = None
    one_by_one: bool | None = None
    compiled, eager, first_block = True, False, 2

    def __post_init__(self) -> None:
        plain_fields(self)
        if self.chunk is not None:
            require_positive_int("chunk", self.chunk)
        require_positive_int("buckets", self.buckets)
        require(is_number(self.memory) and self.memory > 0, "memory", "a number of bytes above 0", self.memory)
        for name in ("sparse", "one_by_one"):
            require(getattr(self, name) in (None, True, False), name, "True, False or None", getattr(self, name))

    def load(self, federations: Sequence[Any], dtype: Any) -> tuple[np.ndarray, Any]:
        """Lay the clients' rows out. Returns each trial's order of clients, (trials, m), and the data.

        With one federation the data have no trials axis; with several, every array has one in front.
        """
        sizes = np.stack([f.sizes for f in federations])
        order = np.argsort(sizes, axis=1, kind="stable")
        widths = np.take_along_axis(sizes, order, axis=1).max(axis=0)
        keep = self._sparse(federations[0])
        buckets = tuple(
            _bucket(federations, order[:, lo:hi], widths[hi - 1], dtype, keep)
            for lo, hi in bucket_bounds(widths, self.buckets)
        )
        data = Data(buckets, _tested(federations, dtype))
        return order, data if len(federations) > 1 else jax.tree.map(lambda a: a[0], data)

    def _sparse(self, federation: Any) -> bool:
        """Whether the features are sparse and worth keeping so."""
        if self.sparse is False or not scipy.sparse.issparse(federation.client(0)[0]):
            return False
        if self.sparse:
            return True
        parts = [federation.client(i)[0] for i in range(federation.clients)]
        return sum(map(sparse.stored, parts)) < sparse.WORTH * sum(part.shape[0] * part.shape[1] for part in parts)

    def clients_of(self, data: Any) -> Any:
        """The client numbers by position."""
        return jnp.concatenate([batch.client for batch in data.buckets])

    def one_client(self, data: Any, position: int = 0) -> Batch:
        """The rows of one client."""
        ends = np.cumsum([batch.client.shape[0] for batch in data.buckets])
        bucket = int(np.searchsorted(ends, position, side="right"))
        place = position - int(ends[bucket])  # from the bucket's end
        return jax.tree.map(lambda a: a[place], data.buckets[bucket])

    def map(self, f: Callable[..., Any], data: Any, rows: Any, cohort: Cohort | None, where: tuple[Any, str]) -> Any:
        """f(batch, row) for every client of the cohort (None: everyone), stacked in the cohort's order."""
        outs, begin, first = [], 0, 0
        for b, batch in enumerate(data.buckets):
            length = batch.client.shape[0]
            inside = None if cohort is None or cohort.slots is None else cohort.slots[b] - first
            size = length if inside is None else inside.shape[0]
            mine = jax.tree.map(lambda a, b=begin, s=size: a[b : b + s], rows)
            if cohort is not None and self._alone(batch):
                outs.append(_one_by_one(f, batch, mine, inside, cohort.mask[begin : begin + size]))
            else:
                batch = batch if inside is None else jax.tree.map(lambda a, s=inside: a[s], batch)
                outs.append(self._vectorised(f, batch, mine))
            begin, first = begin + size, first + length
        return jax.tree.map(lambda *parts: jnp.concatenate(parts), *outs) if len(outs) > 1 else outs[0]

    def _alone(self, batch: Batch) -> bool:
        return _bytes_each(batch) >= ONE_BY_ONE if self.one_by_one is None else self.one_by_one

    def _vectorised(self, f: Callable[..., Any], batch: Batch, rows: Any) -> Any:
        size = batch.client.shape[0]
        chunk = self.chunk or max(1, int(self.memory // max(3 * _bytes_each(batch), 1)))
        if size <= chunk:
            return jax.vmap(f)(batch, rows)
        return jax.lax.map(lambda pair: f(*pair), (batch, rows), batch_size=chunk)

    def test(self, f: Callable[..., Any], w: Any, data: Any) -> Any:
        """The sums of f(w, batch) over the dataset's own test rows, a block at a time; None where it has none."""
        if data.test is None:
            return None
        return jax.tree.map(lambda a: jnp.sum(a, axis=0), jax.lax.map(lambda batch: f(w, batch), data.test))

    def capacities(self, data: Any, largest: int, trials: bool) -> Capacities | None:
        """Room for a round of `largest` clients in each bucket, or None when stepping everyone is as cheap.

        The room is eight deviations above the mean of a random draw; a block with a round that needs more is run
        with everyone's slots instead.
        """
        axis = 1 if trials else 0
        if not trials and all(self._alone(batch) for batch in data.buckets):
            return None  # who does not take part is skipped; where trials are vectorised nobody can be
        whole = np.array([batch.client.shape[axis] for batch in data.buckets])
        widths = np.array([batch.y.shape[axis + 1] for batch in data.buckets])
        mean = whole * largest / whole.sum()
        sizes = np.minimum(np.ceil(mean + 8 * np.sqrt(mean) + 4).astype(int), np.minimum(whole, largest))
        if np.sum(sizes * widths) > WORTH_GATHERING * np.sum(whole * widths):
            return None
        ends = np.cumsum(whole).tolist()
        return Capacities(tuple(zip([0, *ends[:-1]], ends, strict=True)), sizes)


def _bytes_each(batch: Batch) -> int:
    """Bytes of one client of a bucket."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(batch)) // max(1, batch.client.shape[0])


def _one_by_one(f: Callable[..., Any], batch: Batch, rows: Any, slots: Any, mask: Any) -> Any:
    """f for one client after the other; what a client that does not take part returns is zeros."""
    shapes = jax.eval_shape(f, *jax.tree.map(lambda a: a[0], (batch, rows)))
    zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)
    slots = jnp.arange(mask.shape[0]) if slots is None else slots

    def one(client: tuple[Any, Any, Any]) -> Any:
        slot, row, takes_part = client
        return jax.lax.cond(takes_part, lambda: f(jax.tree.map(lambda a: a[slot], batch), row), lambda: zeros)

    return jax.lax.map(one, (slots, rows, mask))


def _bucket(federations: Sequence[Any], order: np.ndarray, width: int, dtype: Any, keep_sparse: bool) -> Batch:
    """The rows of some clients of every federation, (trials, clients, width, …), padded with zeros to one width."""
    shape = (*order.shape, width)
    y, weight = np.zeros(shape, dtype), np.zeros(shape, dtype)
    x = None if keep_sparse else np.zeros((*shape, federations[0].features), kept_dtype(federations[0], dtype))
    matrices = []
    for trial, federation in enumerate(federations):
        for slot, client in enumerate(order[trial]):
            own_x, own_y = federation.client(int(client))
            y[trial, slot, : len(own_y)], weight[trial, slot, : len(own_y)] = own_y, 1
            if x is None:
                matrices.append(own_x)
            else:
                x[trial, slot, : len(own_y)] = own_x.toarray() if scipy.sparse.issparse(own_x) else own_x
    features: Any = x
    if keep_sparse:
        stacked = sparse.stack(matrices, width, dtype)
        features = jax.tree.map(lambda a: a.reshape(*order.shape, *a.shape[1:]), stacked)
    return jax.tree.map(jnp.asarray, Batch(features, y, weight, order.astype(np.int32)))


def _tested(federations: Sequence[Any], dtype: Any) -> Batch | None:
    """The datasets' test rows, (trials, blocks, TEST_ROWS, …), filled up with rows of weight 0."""
    if not all(len(federation.dataset.test) for federation in federations):
        return None
    blocks = -(-max(len(federation.dataset.test) for federation in federations) // TEST_ROWS)
    parts = []
    for federation in federations:
        dataset, rows = federation.dataset, federation.dataset.test
        own = dataset.x[rows].toarray() if scipy.sparse.issparse(dataset.x) else dataset.x[rows]

        def filled(values: Any, kind: Any) -> np.ndarray:
            out = np.zeros((blocks * TEST_ROWS, *values.shape[1:]), kind)
            out[: len(values)] = values
            return out.reshape(blocks, TEST_ROWS, *values.shape[1:])

        y, weight = filled(dataset.y[rows], dtype), filled(np.ones(len(rows)), dtype)
        parts.append(Batch(filled(own, kept_dtype(federation, dtype)), y, weight, np.zeros(blocks, np.int32)))
    return jax.tree.map(lambda *each: jnp.asarray(np.stack(each)), *parts)


def bucket_bounds(widths: np.ndarray, most: int) -> list[tuple[int, int]]:
    """Cut clients, ordered by width, into at most `most` buckets so that padded rows and bucket costs are least."""
    grid = np.unique(np.linspace(0, len(widths), min(len(widths), 48) + 1).astype(int))
    best: dict[int, tuple[float, tuple[tuple[int, int], ...]]] = {0: (0.0, ())}  # cut -> (cost, bounds so far)
    for _ in range(most):
        step = dict(best)
        for i, (cost, bounds) in best.items():
            for hi in grid[grid > i]:
                total = cost + (hi - i) * int(widths[hi - 1]) + BUCKET_COST
                if total < step.get(int(hi), (np.inf, ()))[0]:
                    step[int(hi)] = (total, (*bounds, (i, int(hi))))
        best = step
    return list(best[len(widths)][1])
