"""The local engine: JAX, vectorised over clients, in buckets of similar size.

Clients are ordered by their number of rows and cut into a few buckets; within a bucket rows are padded to the longest
and the client axis is vectorised. Four buckets on the paper's random cut points waste a third of the rows where
one would waste seven times their number. A bucket too large for the memory allowance is worked through in chunks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedpact.core.contract import Batch, Cohort
from fedpact.core.errors import require, require_positive_int

#: What one more bucket costs, in padded rows (measured: its kernels' launches against a row's gradient).
BUCKET_COST = 1500
#: Gathering a cohort's rows pays only below this share of everyone's; above it everyone steps and the rest is masked.
WORTH_GATHERING = 0.5


class Capacities(NamedTuple):
    """How many clients of each bucket one round may have (`bounds`: the buckets' positions)."""

    bounds: tuple[tuple[int, int], ...]
    sizes: np.ndarray


@dataclass(frozen=True)
class LocalEngine:
    """Vectorised simulation. `chunk` clients at a time at most (None: as many as `memory` bytes allow)."""

    chunk: int | None = None
    memory: int = 512 * 2**20
    buckets: int = 6
    compiled = True

    def __post_init__(self) -> None:
        if self.chunk is not None:
            require_positive_int("chunk", self.chunk)
        require_positive_int("buckets", self.buckets)
        require(self.memory > 0, "memory", "a number of bytes above 0", self.memory)

    def load(self, federations: Sequence[Any], dtype: Any) -> tuple[np.ndarray, Any]:
        """Lay the clients' rows out. Returns each trial's order of clients, (trials, m), and the data.

        With one federation the data have no trials axis; with several, every array has one in front.
        """
        sizes = np.stack([f.sizes for f in federations])
        order = np.argsort(sizes, axis=1, kind="stable")
        widths = np.take_along_axis(sizes, order, axis=1).max(axis=0)
        data = tuple(
            Batch(*(jnp.asarray(np.stack(a)) for a in zip(*parts, strict=True)))
            for lo, hi in bucket_bounds(widths, self.buckets)
            for parts in [[_pad(f, o[lo:hi], widths[hi - 1], dtype) for f, o in zip(federations, order, strict=True)]]
        )
        return order, data if len(federations) > 1 else jax.tree.map(lambda a: a[0], data)

    def clients_of(self, data: Any) -> Any:
        """The client numbers by position."""
        return jnp.concatenate([batch.client for batch in data])

    def one_client(self, data: Any) -> Batch:
        """The rows of the first client, to learn a message's shape from."""
        return jax.tree.map(lambda a: a[0], data[0])

    def map(self, f: Callable[..., Any], data: Any, rows: Any, cohort: Cohort | None, where: tuple[Any, str]) -> Any:
        """f(batch, row) for every client of the cohort (None: everyone), stacked in the cohort's order."""
        outs, begin, first = [], 0, 0
        for b, batch in enumerate(data):
            length = batch.client.shape[0]
            if cohort is not None and cohort.slots is not None:
                inside = cohort.slots[b] - first
                batch = jax.tree.map(lambda a, s=inside: a[s], batch)
            size = batch.client.shape[0]
            mine = jax.tree.map(lambda a, b=begin, s=size: a[b : b + s], rows)
            outs.append(self._vectorised(f, batch, mine))
            begin, first = begin + size, first + length
        return jax.tree.map(lambda *parts: jnp.concatenate(parts), *outs) if len(outs) > 1 else outs[0]

    def _vectorised(self, f: Callable[..., Any], batch: Batch, rows: Any) -> Any:
        size = batch.client.shape[0]
        bytes_each = 3 * sum(a.size // max(size, 1) * a.dtype.itemsize for a in jax.tree.leaves(batch))
        chunk = self.chunk or max(1, self.memory // max(bytes_each, 1))
        if size <= chunk:
            return jax.vmap(f)(batch, rows)
        return jax.lax.map(lambda pair: f(*pair), (batch, rows), batch_size=chunk)

    def capacities(self, data: Any, largest: int, trials: bool) -> Capacities | None:
        """Room for a round of `largest` clients in each bucket, or None when stepping everyone is as cheap.

        The room is eight deviations above the mean of a random draw; a block with a round that needs more is run
        with everyone's slots instead.
        """
        axis = 1 if trials else 0
        whole = np.array([batch.client.shape[axis] for batch in data])
        widths = np.array([batch.y.shape[axis + 1] for batch in data])
        mean = whole * largest / whole.sum()
        sizes = np.minimum(np.ceil(mean + 8 * np.sqrt(mean) + 4).astype(int), np.minimum(whole, largest))
        if np.sum(sizes * widths) > WORTH_GATHERING * np.sum(whole * widths):
            return None
        ends = np.cumsum(whole).tolist()
        return Capacities(tuple(zip([0, *ends[:-1]], ends, strict=True)), sizes)


def _pad(federation: Any, clients: np.ndarray, width: int, dtype: Any) -> Batch:
    """The rows of some clients, padded with zeros to one width."""
    x = np.zeros((len(clients), width, federation.features), dtype)
    y = np.zeros((len(clients), width), dtype)
    weight = np.zeros((len(clients), width), dtype)
    for slot, client in enumerate(clients):
        own_x, own_y = federation.client(int(client))
        x[slot, : len(own_y)], y[slot, : len(own_y)], weight[slot, : len(own_y)] = own_x, own_y, 1
    return Batch(x, y, weight, clients.astype(np.int32))


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
