"""The contract between an algorithm and the round loop.

    join(w0, batch, key)                          -> ClientState, Hello     before a client's first round
    init(w0, hellos)                              -> ServerState            hellos stacked over the clients
    broadcast(ServerState)                        -> Broadcast              everything the server sends
    client_step(Broadcast, ClientState, batch, grad, key) -> ClientState, Upload, Notes
    commit(Broadcast, ClientState, released)      -> ClientState            private runs: from the state before a round
    server_step(ServerState, uploads, Cohort)     -> ServerState, Info      uploads stacked over the cohort
    measure(Broadcast, ClientState, batch)        -> dict of sums           telemetry; off the round's bill

All are pure. What crosses the wire is exactly Hello, Broadcast and Upload: bytes are counted from these types and
privacy has one place to stand. Notes stay with the client in a real federation; Info and Notes are for people.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedpact.core.errors import DataError, InvalidArgument


class Batch(NamedTuple):
    """One client's rows. Every sum over rows is weighted by `weight`: 1 for a row, 0 for padding, and d_i/B for each of
    B rows drawn, so that the sum's mean is that over all rows.
    """

    x: Any
    y: Any
    weight: Any
    client: Any

    @property
    def rows(self) -> Any:
        """d_i, the number of real rows."""
        return jnp.sum(self.weight)


class Cohort(NamedTuple):
    """Who takes part in a round: fixed capacity, possibly nobody.

    `slots` are positions in the stacked client axis, in one array per bucket of the engine, or None when every
    position has a slot (then `put` and `take` are free); `mask` says which slots are real.
    """

    slots: Any
    mask: Any

    @property
    def count(self) -> Any:
        """|S|, how many take part."""
        return jnp.sum(self.mask)

    @property
    def positions(self) -> Any:
        """The slots' positions in one array."""
        return jnp.arange(self.mask.shape[0]) if self.slots is None else jnp.concatenate(self.slots)

    def _where(self, new: Any, old: Any) -> Any:
        return jax.tree.map(
            lambda a, b: jnp.where(self.mask.reshape(self.mask.shape + (1,) * (a.ndim - 1)), a, b), new, old
        )

    def take(self, stacked: Any) -> Any:
        """The cohort's rows of something stacked over all clients."""
        if self.slots is None:
            return stacked
        positions = self.positions
        return jax.tree.map(lambda a: a[positions], stacked)

    def put(self, stacked: Any, rows: Any) -> Any:
        """`stacked` with the cohort's rows replaced; everyone else keeps theirs."""
        if self.slots is None:
            return self._where(rows, stacked)
        size = jax.tree.leaves(stacked)[0].shape[0]
        slots = jnp.where(self.mask, self.positions, size)  # masked slots fall off the end and are dropped
        return jax.tree.map(lambda a, r: a.at[slots].set(r.astype(a.dtype), mode="drop"), stacked, rows)

    def sum(self, rows: Any) -> Any:
        """Sum over the clients that take part."""
        zeros = jax.tree.map(jnp.zeros_like, rows)
        return jax.tree.map(lambda a: jnp.sum(a, axis=0), self._where(rows, zeros))

    def mean(self, rows: Any, otherwise: Any) -> Any:
        """Mean over the clients that take part, or `otherwise` when nobody does."""
        count = self.count
        total = self.sum(rows)
        return jax.tree.map(lambda a, b: jnp.where(count > 0, a / jnp.maximum(count, 1), b), total, otherwise)


class Streamed(NamedTuple):
    """The cohort of uploads that were added up as they came in: for algorithms with combine="sum"."""

    count: Any

    def sum(self, total: Any) -> Any:
        """It is the sum."""
        return total

    def mean(self, total: Any, otherwise: Any) -> Any:
        """The sum over |S|, or `otherwise` when nobody took part."""
        return jax.tree.map(lambda a, b: jnp.where(self.count > 0, a / jnp.maximum(self.count, 1), b), total, otherwise)


class Stepped(NamedTuple):
    """What an engine returns of a round: the cohort's new states, uploads and notes, and which uploads are finite.

    `gathered` is what `server_step` sees the uploads as: the cohort, or `Streamed` where they are a sum already.
    `told` are the engine's own columns of the round, those it names in its `told`.
    """

    rows: Any
    uploads: Any
    notes: Any
    sound: Any
    cohort: Cohort
    gathered: Any
    told: Mapping[str, Any] = {}


class Oracle:
    """The gradient as `client_step` gets it: grad(w, batch), and with the loss where a client wants to know it."""

    def __init__(self, problem: Any) -> None:
        self.problem = problem

    def __call__(self, w: Any, batch: Batch) -> Any:
        """∇f_i(w) on these rows."""
        return self.problem.gradient(w, batch)

    def value_and_gradient(self, w: Any, batch: Batch) -> tuple[Any, Any]:
        """f_i(w) and ∇f_i(w) on these rows."""
        return self.problem.value_and_gradient(w, batch)


def column_mean(rows: Any) -> Any:
    """The mean over the first axis, added up in pairs: to the same bits whatever the other axes are cut into."""
    total, count = rows, rows.shape[0]
    while (size := total.shape[0]) > 1:
        half = size // 2
        total = jnp.concatenate([total[:half] + total[half : 2 * half], total[2 * half :]])
    return total[0] / count


def finite_rows(tree: Any) -> Any:
    """For something stacked over the cohort: which rows are finite throughout."""
    flags = [
        jnp.all(jnp.isfinite(leaf).reshape(leaf.shape[0], -1), axis=1)
        for leaf in jax.tree.leaves(tree)
        if jnp.issubdtype(leaf.dtype, jnp.floating)
    ]
    return jnp.stack(flags).all(axis=0)


#: How a measure, summed over all m clients, becomes a column.
READS: dict[str, Callable[[Any, int], Any]] = {
    "mean": lambda total, clients: total / clients,
    "sum": lambda total, clients: total,
    "root": lambda total, clients: jnp.sqrt(total),
    "norm": lambda total, clients: total.norm(),
    "optimality": lambda total, clients: total[0].norm2() + total[1],  # of a vector and a number
    "largest": lambda total, clients: jnp.max(total / clients),
    "kkt": lambda total, clients: _kkt(**jax.tree.map(lambda a: a / clients, total)),
}


def _kkt(slope: Any, w: Any, l1: Any, values: Any, nu: Any) -> Any:
    """‖∇L‖ + Σ max(0, F_m) + Σ ν_m |F_m|, `slope` being ∇L without its term l1·‖ω‖₁: 0 exactly at a KKT point."""
    least = lambda g, v: jnp.where(v != 0, g + l1 * jnp.sign(v), jnp.sign(g) * jnp.maximum(jnp.abs(g) - l1, 0))
    return slope.map(least, w).norm() + jnp.sum(jnp.maximum(values, 0)) + jnp.sum(nu * jnp.abs(values))


class Algorithm(NamedTuple):
    """A bundle of pure functions (see the module's page) and what it declares about them."""

    name: str
    join: Callable[..., tuple[Any, Any]]
    init: Callable[..., Any]
    broadcast: Callable[..., Any]
    client_step: Callable[..., tuple[Any, Any, Any]]
    server_step: Callable[..., tuple[Any, Any]]
    measure: Callable[..., dict[str, Any]]
    model: Callable[[Any], Any]  # ServerState -> the parameters a user takes home
    combine: str = (
        "each"  # "sum": linear in the uploads, so it can be streamed, masked, encrypted; "each": needs every message
    )
    differences: bool = False  # uploads are changes of what a client sent before: one that forgot cannot begin again
    separable: tuple[str, ...] | None = None  # where the server goes coordinate by coordinate: Info's sums over them
    info: tuple[str, ...] = ()  # the fields of Info
    notes: Mapping[str, str] = {}  # how each field of Notes is read over clients: "sum", "min", "max" or "mean"
    reads: Mapping[str, Any] = {}  # of each measure, how its sum is read: "mean", a key of READS, or such a function
    observe: Callable[[Any], Any] | None = None  # what `measure` sees of the server where that is not the broadcast
    wire: Callable[..., Any] | None = None  # (w, rows): bytes up and down of a round where messages are not those three
    commit: Callable[..., Any] | None = None  # where the upload is noised: the state, from what was released only
    packing: Any = None  # core.private.Packing, where the whole upload can be clipped
    admit: Callable[..., None] | None = None  # (hellos on the host, client numbers): raises for one it cannot work with
    rows: Callable[..., None] | None = None  # (every client's number of rows): raises for what it cannot work with
    coverage: str = ""  # the theorem that needs everyone to take part again and again, where there is one
    needs: frozenset[str] = frozenset()
    inverts: bool = False  # whether it divides by r_i, which must then be above 0
    notices: tuple[str, ...] = ()  # sentences the reader of a report must see
    tables: Mapping[str, Sequence[Mapping[str, str]]] = {}  # tables by heading that belong in a report
    breakdown: str = ""  # what else a number that is not finite may mean
    verdict: Callable[[Any], list[str]] | None = None  # such sentences that only the finished history can tell


def check_needs(algorithm: Algorithm, problem: Any) -> None:
    """Refuse, before round 1, a problem that lacks what the algorithm declares it needs."""
    for need in sorted(algorithm.needs):
        if getattr(problem, need, None) is None:
            raise InvalidArgument(
                f"problem must be one that has {need!r} for {algorithm.name}, got {type(problem).__name__}. "
                f"Choose another algorithm or give the problem a {need} method."
            )


def check_flat(algorithm: Algorithm, problem: Any, federation: Any) -> None:
    """Refuse, before round 1, a client of r_i = 0 (its rows are all zeros) where steps are 1/r_i."""
    for i in federation.blank if algorithm.inverts else ():
        x, y = federation.client(i)
        x = x.toarray() if hasattr(x, "toarray") else x
        r = float(problem.lipschitz(Batch(jnp.asarray(x), jnp.asarray(y), jnp.ones(len(y)), jnp.asarray(i))))
        if not r > 0:
            raise DataError(
                f"r_i of client {i} must be above 0 for steps of 1/r_i, got {r:g}: its rows leave the loss flat. Give "
                "it rows that are not all zeros, take it out, or give the problem an l2 above 0."
            )


def wire_bytes(message: Any) -> int:
    """Bytes of one message on the wire, from its types alone."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(message))


def standard_measures(problem: Any, w: Any, batch: Batch) -> dict[str, Any]:
    """f_i and its gradient at `w`, and the counts the problem's accuracy needs: what every algorithm reports."""
    value, gradient = problem.value_and_gradient(w, batch)
    more = problem.more(w, batch) if hasattr(problem, "more") else {}
    return {"objective": value, "gradient": gradient, **problem.counts(w, batch), **more}
