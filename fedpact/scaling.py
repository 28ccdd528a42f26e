"""What a round costs with many clients: bytes, the server's memory and the numbers it touches.

Nothing here is run: sizes are those of the algorithm's own messages and states, by their types, so that 10⁶ clients
of 10⁸ parameters cost nothing to ask about. Seconds are these numbers at rates that `benchmarks/scaling.py` measures
([docs/scaling.md](../docs/scaling.md)).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedpact.core.contract import Batch, Oracle, wire_bytes
from fedpact.core.errors import require
from fedpact.core.keys import client_key
from fedpact.core.shards import SHARD
from fedpact.core.vector import Vector


class Costs(NamedTuple):
    """Of one client: bytes of its first message, a broadcast, an upload, its state, what the server keeps of it.

    `server` is the rest of the server's state; `numbers` are those of an upload; `clients` m, `cohort` |S| of a round.
    """

    combine: str
    separable: bool
    hello: int
    down: int
    up: int
    state: int
    kept: int
    server: int
    numbers: int
    clients: int
    cohort: int

    @property
    def bytes_up(self) -> int:
        """Of a round, to the server."""
        return self.cohort * self.up

    @property
    def bytes_down(self) -> int:
        """Of a round, from the server."""
        return self.cohort * self.down

    @property
    def start(self) -> int:
        """Of all first messages, which the server holds together."""
        return self.clients * self.hello

    @property
    def memory(self) -> int:
        """The server's in a round: its state before and after, and the uploads.

        Where a sum will do they are added up as they come in: the sum and the one at hand (`host` and the workers of
        `ray`; nodes: `memory_flower`). Else: what is kept of all clients, the cohort's uploads with what will be kept
        of them, and a shard's messages with the step's copies.
        """
        if self.combine == "sum":
            return 2 * self.server + 2 * self.up
        shard = min(SHARD, self.clients * self.kept) if self.separable else self.clients * self.kept
        return 2 * self.server + self.clients * self.kept + self.cohort * (self.up + self.kept) + COPIES * shard

    @property
    def memory_flower(self) -> int:
        """The server's of a federation in a round: the engine `flower` holds all uploads until the round closes.

        They come in any order and are added in the clients', so that a run has the same bits whoever is first.
        """
        return self.memory + ((self.cohort - 1) * self.up if self.combine == "sum" else 0)

    @property
    def touched(self) -> int:
        """Numbers the server's step goes through: the uploads', or everyone's."""
        return self.numbers * (self.cohort if self.combine == "sum" else self.clients)


#: Arrays of a shard's size that a step has at one time (fitted to the measurements of benchmarks/scaling.py).
COPIES = 10


def costs(
    settings: Any, problem: Any, features: int, clients: int, rate: float, *, rows: int = 1, dtype: Any = np.float32
) -> Costs:
    """The costs of an algorithm on a problem with so many features, for m clients of which a fraction takes part."""
    require(not settings.vertical, "settings", "of an algorithm for data split by rows", settings.name)
    algorithm = settings.build(problem, clients, rate)
    kind = lambda *shape: jax.ShapeDtypeStruct(shape, dtype)
    batch = Batch(kind(rows, features), kind(rows), kind(rows), jax.ShapeDtypeStruct((), jnp.int32))

    def parts(batch: Batch) -> tuple[Any, ...]:
        w0, key = problem.init(features, dtype), client_key(jax.random.key(0), 0, 0)
        state, hello = algorithm.join(w0, batch, key)
        everyone = jax.tree.map(lambda a: jnp.broadcast_to(a, (clients, *a.shape)), hello)
        server = algorithm.init(w0, everyone)
        msg = algorithm.broadcast(server)
        upload = algorithm.client_step(msg, state, batch, Oracle(problem), key)[1]
        return w0, hello, msg, upload, state, server

    w0, hello, msg, upload, state, server = jax.eval_shape(parts, batch)
    kept = _kept(server, w0, clients) if algorithm.combine == "each" else 0
    return Costs(
        combine=algorithm.combine,
        separable=algorithm.separable is not None,
        hello=wire_bytes(hello),
        down=wire_bytes(msg),
        up=wire_bytes(upload),
        state=wire_bytes(state),
        kept=kept // clients,
        server=wire_bytes(server) - kept,
        numbers=sum(leaf.size for leaf in jax.tree.leaves(upload)),
        clients=clients,
        cohort=max(1, round(rate * clients)),
    )


def _kept(server: Any, w0: Vector, clients: int) -> int:
    """Bytes of the server's vectors that have one row for every client."""
    deep = [leaf.ndim for leaf in jax.tree.leaves(w0)]
    is_vector = lambda node: isinstance(node, Vector)
    vectors = [jax.tree.leaves(v) for v in jax.tree.leaves(server, is_leaf=is_vector) if is_vector(v)]
    stacked = lambda leaves: all(a.ndim > d and a.shape[0] == clients for a, d in zip(leaves, deep, strict=True))
    return sum(wire_bytes(leaves) for leaves in vectors if stacked(leaves))
