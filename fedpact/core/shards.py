"""The server's step in shards over coordinates, for algorithms that need every client's message.

Where the server computes each coordinate from that coordinate of the messages alone (`Algorithm.separable`), a stretch
of coordinates is a server step of its own. The device then holds the m messages of one shard, never m × n numbers:

    for each shard:       z ← its kept messages;  step on z and its part of the uploads  →  its part of w
    the round is kept:    the cohort's new messages are written over their old ones

Kept messages are on the host, coordinate after coordinate, so that a shard is one stretch of memory, or of a mapped
file where they are too many for memory. How the coordinates are cut does not change a bit of the state; sums over
coordinates (`Info`) are added up shard by shard.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedpact.core.contract import Algorithm
from fedpact.core.vector import Vector

#: Bytes of one shard's kept messages. The step's own arrays are a few times as much.
SHARD = 2**24


@jax.tree_util.register_pytree_node_class
class Kept:
    """One array of the model's for every client, on the host: (coordinates, clients). `new` waits to be written."""

    def __init__(self, array: Any, new: tuple[np.ndarray, np.ndarray] | None = None) -> None:
        self.array, self.new = array, new

    def settled(self) -> Kept:
        """With the new messages written over the old ones: the round is kept."""
        if self.new is not None:
            clients, rows = self.new
            size, many = self.array.shape
            for lo, hi in _cuts(size, many, self.array.dtype):
                self.array[lo:hi, clients] = rows[lo:hi]
        return Kept(self.array)

    def tree_flatten(self) -> tuple[tuple[Any], None]:
        """For JAX: the one child is the array."""
        return (self.array,), None

    @classmethod
    def tree_unflatten(cls, _: None, children: tuple[Any]) -> Kept:
        """For JAX: the inverse of `tree_flatten`."""
        return cls(*children)


def is_kept(node: Any) -> bool:
    """For the walks over a tree that must not touch kept messages."""
    return isinstance(node, Kept)


def settled(server: Any) -> Any:
    """The server's state with every kept array's new messages written."""
    return jax.tree.map(lambda node: node.settled() if is_kept(node) else node, server, is_leaf=is_kept)


class Shard(NamedTuple):
    """Coordinates lo to hi of the model's array number `layer`."""

    layer: int
    lo: int
    hi: int


def _cuts(size: int, clients: int, dtype: Any) -> Iterator[tuple[int, int]]:
    width = max(1, SHARD // (max(clients, 1) * np.dtype(dtype).itemsize))
    return ((lo, min(lo + width, size)) for lo in range(0, size, width))


def _is_vector(node: Any) -> bool:
    return isinstance(node, Vector)


class Shards:
    """`init` and `server_step` of a separable algorithm, a shard at a time. `room(shape, dtype)` makes kept arrays."""

    def __init__(self, algorithm: Algorithm, clients: int, room: Callable[..., np.ndarray] = np.empty) -> None:
        self.algorithm, self.clients, self.room = algorithm, clients, room
        self._init, self._step = jax.jit(algorithm.init), jax.jit(algorithm.server_step)

    def init(self, w0: Vector, hellos: Any) -> Any:
        """The server's state, its stacked vectors as `Kept`."""
        shapes = jax.eval_shape(self.algorithm.init, w0, hellos)
        into = [self._made(v, w0) if _is_vector(v) else None for v in shapes]
        first = None
        for shard in self._shards(w0):
            part = self._init(*self._cut((w0, hellos), w0, shard))
            first = part if first is None else first
            self._put(into, part, shard)
        return self._joined(into, first, w0)

    def step(self, server: Any, uploads: Any, cohort: Any) -> tuple[Any, Any]:
        """The server's step; the cohort's new messages are with the `Kept`, not yet written."""
        w = self.algorithm.model(server)
        server = jax.tree.map(lambda node: self._held(node) if is_kept(node) else node, server, is_leaf=is_kept)
        here = np.flatnonzero(np.asarray(cohort.mask))
        who = np.asarray(cohort.positions)[here]
        into = [self._fresh(v, who) if _is_vector(v) else None for v in server]
        first, infos = None, []
        for shard in self._shards(w):
            part, info = self._step(*self._cut((server, uploads), w, shard), cohort)
            first = part if first is None else first
            infos.append(info)
            self._put(into, part, shard)
        summed = {name: sum(getattr(info, name) for info in infos) for name in self.algorithm.separable or ()}
        return self._joined(into, first, w), infos[0]._replace(**summed)

    # Vectors, cut and put together

    def _shards(self, w: Vector) -> Iterator[Shard]:
        for layer, leaf in enumerate(jax.tree.leaves(w.tree)):
            for lo, hi in _cuts(leaf.size, self.clients, leaf.dtype):
                yield Shard(layer, lo, hi)

    def _cut(self, tree: Any, w: Vector, shard: Shard) -> Any:
        """Every vector of a tree as its part in the shard, one flat array; with the clients in front where stacked."""
        like = jax.tree.leaves(w.tree)[shard.layer]

        def part(v: Any) -> Any:
            if not _is_vector(v):
                return v
            leaf = jax.tree.leaves(v.tree, is_leaf=is_kept)[shard.layer]
            if is_kept(leaf):
                return Vector(jnp.asarray(leaf.array[shard.lo : shard.hi].T))
            front = leaf.shape[: leaf.ndim - like.ndim]
            return Vector(jnp.asarray(leaf.reshape(*front, like.size)[..., shard.lo : shard.hi]))

        return jax.tree.map(part, tree, is_leaf=_is_vector)

    def _held(self, kept: Kept) -> Kept:
        """A kept array where it can be written to: one from a checkpoint is moved there."""
        if isinstance(kept.array, np.ndarray) and kept.array.flags.writeable:
            return kept
        array = self.room(kept.array.shape, kept.array.dtype)
        array[...] = kept.array
        return Kept(array)

    def _made(self, v: Vector, w: Vector) -> list[Any]:
        """Room for a vector: for a stacked one kept arrays, else flat arrays."""
        pairs = zip(jax.tree.leaves(v.tree), jax.tree.leaves(w.tree), strict=True)
        return [
            Kept(self.room((like.size, leaf.shape[0]), leaf.dtype))
            if leaf.ndim > like.ndim
            else np.empty(leaf.size, leaf.dtype)
            for leaf, like in pairs
        ]

    def _fresh(self, v: Vector, who: np.ndarray) -> list[Any]:
        """Room for the next state's vector: for a kept one the cohort's messages alone."""
        return [
            Kept(leaf.array, (who, np.empty((leaf.array.shape[0], len(who)), leaf.array.dtype)))
            if is_kept(leaf)
            else np.empty(leaf.size, leaf.dtype)
            for leaf in jax.tree.leaves(v.tree, is_leaf=is_kept)
        ]

    def _put(self, into: list[Any], part: Any, shard: Shard) -> None:
        for place, v in zip(into, part, strict=True):
            if not _is_vector(v):
                continue
            target, values = place[shard.layer], jax.tree.leaves(v.tree)[0]
            if not is_kept(target):
                target[shard.lo : shard.hi] = values
            elif target.new is None:
                target.array[shard.lo : shard.hi] = np.asarray(values).T
            else:
                clients, rows = target.new
                rows[shard.lo : shard.hi] = np.asarray(values[clients]).T

    def _joined(self, into: list[Any], first: Any, w: Vector) -> Any:
        """The state: vectors from all shards in the model's own shapes, the rest from the first shard."""
        likes, structure = jax.tree.flatten(w.tree)

        def whole(place: Any, v: Any) -> Any:
            if not _is_vector(v):
                return v
            leaves = [a if is_kept(a) else jnp.asarray(a.reshape(b.shape)) for a, b in zip(place, likes, strict=True)]
            return Vector(jax.tree.unflatten(structure, leaves))

        return type(first)(*(whole(place, v) for place, v in zip(into, first, strict=True)))
