"""The contract of feature-split methods: clients hold columns of the same records, and a round has two exchanges.

    server → client i    Task       the batch's record numbers and ω_i; to the closer ω_0 too
    client i → closer    Partial    h_i = x_i ω_i for every record of the batch, on a lattice, under masks that cancel
                                    in the sum: the closer learns Σ_i h_i and nothing else
    closer → server      Closed     the functions' values on the batch, and their gradients by ω_0
    closer → client i    Feedback   δ_m = ∂F_m/∂(Σh), a row a record
    client i → server    Block      ∂F_m/∂ω_i = x_iᵀ δ_m

The closer is a client, the one that holds the labels; never the server. What clients send one another passes through
the server sealed: only the receiver can open it. `conversation` simulates one round's messages, `exchange` puts their
contents together, `traffic` counts them; masks are numbers modulo 2⁶⁴ that cancel exactly, so the sum without them has
the same bits, and the simulation leaves them out (`masked` has them, and a test compares). Where a batch's columns are
at nodes of their own (its x has an `exchange`), the same messages go there and back: `engines.parties`,
`flower.vertical`.

A model fits if it sees x through x @ first alone: `Split` cuts its parameters into `first`, a row a column of the data,
and the rest, ω_0. To close the loss is then to run the same model with the unit matrix for `first` on Σh.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedpact.core.contract import Batch
from fedpact.core.errors import InvalidArgument
from fedpact.core.sparse import SparseRows
from fedpact.core.vector import Vector

#: Partial sums are whole multiples of this; their sum must stay below 2⁶³ of them.
STEP = 2.0**-40
LARGEST = 2.0**22
#: What sealing a message to its receiver adds: an ephemeral key, a nonce and a tag.
SEAL = 32 + 12 + 16


class Layout(NamedTuple):
    """Who holds which columns, and who holds the labels."""

    columns: tuple[tuple[int, ...], ...]
    names: tuple[str, ...]
    closer: int


class Task(NamedTuple):
    """Record numbers, ω_i, and ω_0 for the closer (None for the others)."""

    records: Any
    block: Any
    head: Any


class Partial(NamedTuple):
    """h_i in steps of the lattice, plus masks modulo 2⁶⁴: (B, H) integers."""

    h: Any


class Closed(NamedTuple):
    """Values (K,), and gradients by ω_0 with a leading axis over the K functions."""

    values: Any
    head: Any


class Feedback(NamedTuple):
    """δ: (K, B, H)."""

    delta: Any


class Block(NamedTuple):
    """Gradients by ω_i: (K, P_i, H)."""

    gradient: Any


class Split(NamedTuple):
    """A model cut after its first product: where `first` is in its tree, and H."""

    model: Any
    path: tuple[str, ...]

    @classmethod
    def of(cls, model: Any) -> Split:
        """The cut of a model that says where its first product is."""
        path = getattr(model, "first", None)
        if path is None:
            raise InvalidArgument(
                f"problem must be one whose first step is a product with the features, got {type(model).__name__}. "
                "Use TwoLayer, Softmax, Logistic or LeastSquares, or give your model a `first`: where its weights are."
            )
        return cls(model, path)

    def width(self, layout: Layout) -> int:
        """H, the numbers a record has after the first product."""
        features = sum(map(len, layout.columns))
        return jax.eval_shape(lambda: self.first(self.model.init(features, jnp.float32))).shape[1]

    def first(self, w: Vector) -> Any:
        """(P, H): a row for every column of the data."""
        leaf = _get(w.tree, self.path)
        return leaf if leaf.ndim == 2 else leaf[:, None]

    def put(self, w: Vector, first: Any) -> Vector:
        """The parameters with another `first`, as flat as theirs is."""
        return Vector(_set(w.tree, self.path, first[:, 0] if self.flat(w) else first))

    def flat(self, w: Vector) -> bool:
        """Whether `first` is a vector, for H = 1."""
        return _get(w.tree, self.path).ndim == 1

    def rest(self, w: Vector) -> Vector:
        """ω_0: everything but `first`."""
        return Vector(_without(w.tree, self.path))

    def whole(self, head: Vector, first: Any, w: Vector) -> Vector:
        """Gradients by ω, along a leading axis, from those by ω_0 and by `first`; as flat as w is."""
        return Vector(_set(head.tree, self.path, first[..., 0] if self.flat(w) else first))

    def unit(self, head: Vector, width: int, flat: bool, dtype: Any) -> Vector:
        """ω of the closing model: ω_0, and the unit matrix for `first`."""
        unit = jnp.eye(width, dtype=dtype)
        return Vector(_set(head.tree, self.path, unit[:, 0] if flat else unit))

    def inputs(self, x: Any, dtype: Any) -> Any:
        """Columns as the model takes them: pixels scaled, numbers as they are."""
        scaled = getattr(self.model, "inputs_of", None)
        return x.astype(dtype) if scaled is None else scaled(x, dtype)

    def closing(self, width: int) -> Any:
        """The model that takes Σh for its features."""
        names = {f.name for f in dataclasses.fields(self.model)}
        return dataclasses.replace(self.model, inputs=width) if "inputs" in names else self.model


def _get(tree: Any, path: Sequence[str]) -> Any:
    for name in path:
        tree = tree[name]
    return tree


def _without(tree: Any, path: Sequence[str]) -> Any:
    name, *rest = path
    return {k: _without(v, rest) if rest and k == name else v for k, v in tree.items() if rest or k != name}


def _set(tree: Any, path: Sequence[str], leaf: Any) -> Any:
    name, *rest = path
    return {**tree, name: _set(tree[name], rest, leaf) if rest else leaf}


def to_lattice(h: Any, clients: int) -> tuple[Any, Any]:
    """h in steps of the lattice, and whether all of it is finite and small enough for the sum."""
    fits = jnp.abs(h) < LARGEST / clients
    return jnp.round(jnp.where(fits, h, 0).astype(jnp.float64) / STEP).astype(jnp.int64), jnp.all(fits)


def overflow(layout: Layout) -> str:
    """What a run that stopped may have met."""
    most = LARGEST / len(layout.columns)
    return f" Partial sums must stay below {most:,.0f} in size to be added up under masks: scale the columns."


def masked(partials: Sequence[Any], key: Any) -> list[Any]:
    """The same with pairwise masks: client i adds r_ij for j > i and subtracts r_ji for j < i, modulo 2⁶⁴."""
    out = [p.astype(jnp.uint64) for p in partials]
    for i in range(len(out)):
        for j in range(i + 1, len(out)):
            mask = jax.random.bits(jax.random.fold_in(jax.random.fold_in(key, i), j), out[i].shape, jnp.uint64)
            out[i], out[j] = out[i] + mask, out[j] - mask
    return out


def total(partials: Sequence[Any], dtype: Any) -> Any:
    """Σ_i h_i, from what the closer received, masked or not."""
    whole = sum((p.astype(jnp.uint64) for p in partials[1:]), partials[0].astype(jnp.uint64))
    return (whole.astype(jnp.int64) * STEP).astype(dtype)


class Conversation(NamedTuple):
    """A round's messages, one a client where they are many."""

    tasks: tuple[Task, ...]
    partials: tuple[Partial, ...]
    closed: Closed
    feedback: Feedback
    blocks: tuple[Block, ...]


class Answered(NamedTuple):
    """What of a round's messages comes to the server."""

    closed: Closed
    blocks: tuple[Block, ...]


Close = Callable[[Vector, Batch], Any]


def partial(x: Any, block: Any, clients: int) -> tuple[Partial, Any]:
    """h_i of a client's own columns, and whether all of it fits the lattice."""
    h, fits = to_lattice(x @ block, clients)
    return Partial(h), fits


def closed(split: Split, head: Vector, h: Any, flat: bool, batch: Batch, close: Close) -> tuple[Closed, Feedback]:
    """What the closer makes of Σh: `close` maps the closing model's ω and the batch with Σh for x to values (K,)."""

    def closing(head: Vector, h: Any) -> Any:
        return close(split.unit(head, h.shape[1], flat, h.dtype), batch._replace(x=h))

    values, pull = jax.vjp(closing, head, h)
    by_head, delta = jax.vmap(pull)(jnp.eye(values.shape[0], dtype=values.dtype))
    return Closed(values, by_head), Feedback(delta)


def block_of(x: Any, feedback: Feedback) -> Block:
    """∂F_m/∂ω_i of a client's own columns."""
    return Block(jnp.einsum("bp,kbh->kph", x, feedback.delta))


def conversation(layout: Layout, split: Split, w: Vector, batch: Batch, close: Close) -> Conversation:
    """A round for a batch of records; they are numbered by their place in it."""
    first, head = split.first(w), split.rest(w)
    dtype, numbers = first.dtype, jnp.arange(batch.y.shape[0])
    columns = [jnp.asarray(c, jnp.int32) for c in layout.columns]
    tasks = [Task(numbers, first[c], head if i == layout.closer else None) for i, c in enumerate(columns)]
    x = batch.x[numbers] if isinstance(batch.x, SparseRows) else batch.x
    held = [split.inputs(x[:, c], dtype) for c in columns]  # each client's own
    sent = [partial(x, task.block, len(columns)) for x, task in zip(held, tasks, strict=True)]
    partials = [one for one, _ in sent]
    h = total([one.h for one in partials], dtype)  # what the closer opens
    h = jnp.where(jnp.stack([fits for _, fits in sent]).all(), h, jnp.nan)
    answer, feedback = closed(split, head, h, split.flat(w), batch, close)
    blocks = [block_of(x, feedback) for x in held]
    return Conversation(tuple(tasks), tuple(partials), answer, feedback, tuple(blocks))


def exchange(layout: Layout, split: Split, w: Vector, batch: Batch, close: Close) -> tuple[Any, Vector]:
    """What the server has after the round: the functions' values, and their gradients along a leading axis."""
    away = getattr(batch.x, "exchange", None)  # of columns that are elsewhere
    said: Answered | Conversation = (away or conversation)(layout, split, w, batch, close)
    first, functions = split.first(w), said.closed.values.shape[0]
    whole = jnp.zeros((functions, *first.shape), first.dtype)
    for c, block in zip(layout.columns, said.blocks, strict=True):
        whole = whole.at[:, jnp.asarray(c, jnp.int32)].set(block.gradient)
    return said.closed.values, split.whole(said.closed.head, whole, w)


class Traffic(NamedTuple):
    """Bytes of one round: what clients send, and what is sent to them; relayed messages count on both ways."""

    up: int
    down: int


def traffic(layout: Layout, split: Split, w: Any, records: int, functions: int, collection: str) -> Traffic:
    """From the messages' types alone. Keys for masks and seals, agreed on once before round 1, are not counted."""
    first = split.first(w)
    closer = layout.closer
    head = sum(leaf.size for leaf in jax.tree.leaves(split.rest(w).tree))
    shape = (functions,)

    def spoken(w: Vector, x: Any) -> Conversation:
        batch = Batch(x, jnp.zeros(records), jnp.ones(records), jnp.asarray(0))
        return conversation(layout, split, w, batch, lambda v, b: jnp.zeros(shape, first.dtype) + 0 * b.x.sum())

    x = jax.ShapeDtypeStruct((records, first.shape[0]), first.dtype)
    said = jax.eval_shape(spoken, w, x)
    if collection == "one-step":  # h_i and x_i up, labels with the first client; the tasks down, without ω_0
        rows = records * (first.shape[0] + len(layout.columns) * first.shape[1] + 1) * first.dtype.itemsize
        return Traffic(up=rows, down=_bytes(said.tasks) - head * first.dtype.itemsize)
    away = [i for i in range(len(layout.columns)) if i != closer]  # the closer sends itself nothing
    relayed = sum(_bytes(said.partials[i]) + _bytes(said.feedback) + 2 * SEAL for i in away)
    return Traffic(up=relayed + _bytes(said.closed) + _bytes(said.blocks), down=_bytes(said.tasks) + relayed)


def _bytes(message: Any) -> int:
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(message))


# What the messages tell


class Coalition(NamedTuple):
    """Who puts their views together: the closer or not, how many other clients; what they hold, and its equations."""

    closer: bool
    others: int
    holds: str
    equations: tuple[str, ...] = ()


#: From one party to two, and the words for it.
COALITIONS = {
    "the server": Coalition(False, 0, "ω, every G_i"),
    "the closer": Coalition(True, 0, "Σh, δ, the labels"),
    "another client": Coalition(False, 1, "δ"),
    "the server and the closer": Coalition(True, 0, "ω, every G_i, Σh, δ, the labels", ("gradients", "sums")),
    "the server and another client": Coalition(False, 1, "ω, every G_i, δ", ("gradients",)),
    "the closer and another client": Coalition(True, 1, "Σh, δ, the labels"),
    "two other clients": Coalition(False, 2, "δ"),
}
#: The heading of the table.
WHO = "What parties can solve for, alone and in pairs"


def solvable(records: int, width: int, functions: int, others: int, equations: Sequence[str], rounds: int = 1) -> bool:
    """Whether equations linear in the others' raw features X of records seen so many times determine all of them.

    "gradients": δᵀX is known, K·H rows of coefficients a round; "sums": X W is known, H columns a round. What they
    leave open is null(δᵀ) ⊗ null(Wᵀ): nothing if the rounds' K·H reach the records, or their H the others' columns.
    """
    by_gradients = "gradients" in equations and records <= rounds * functions * width
    by_sums = "sums" in equations and others <= rounds * width
    return by_gradients or by_sums


class Disclosure(NamedTuple):
    """What a reader must know, in a sentence, and the table behind it."""

    notices: tuple[str, ...]
    table: tuple[dict[str, str], ...]


def disclosure(layout: Layout, width: int, batch: int | None, functions: int, collection: str) -> Disclosure:
    """Whose views determine others' raw features, for everyone alone and in pairs, by linear equations."""
    if collection == "one-step":
        text = "The server receives every client's raw rows of the batch: one-step collection hides nothing from it."
        row = {"who": "the server", "holds": "raw rows, the labels", **_row("yes, it receives them", "has them")}
        return Disclosure((text,), (row,))
    sizes = [len(c) for c in layout.columns]
    told: dict[bool, list[str]] = {True: [], False: []}
    closing, holders, table = sizes[layout.closer], sum(size > 0 for size in sizes), []
    for who, (closer, others, holds, equations) in COALITIONS.items():
        if others >= len(sizes) or others + (closer and closing > 0) == holders:
            continue  # there are not so many, or they hold every column
        foreign = sum(sizes) - closing
        if batch is None:
            found = bool(equations)
            answer = f"yes, once rounds × {width * functions} reach the records" if found else "no"
            answer += f", or rounds × {width} the others' {foreign} columns" if "sums" in equations else ""
        else:
            found = solvable(batch, width, functions, foreign, equations)
            answer = "yes" if found else "no"
            if equations and not found:
                answer = f"not in one round; yes once rounds × {width * functions} reach the records"
                often = -(-foreign // width)
                answer += f", or of a record that was in {often} batches" if "sums" in equations else ""
            if who == "the server" and batch <= functions * width:
                answer = "no, but the space that a batch's rows span"
        if who == "the closer":
            answer = "no, but over rounds with the same records perhaps up to a rotation"
        told[found].append(who)
        labels = "has them" if closer else "by δ" if others else "no, but how many of a batch, where ω_0 has a bias"
        table.append({"who": who, "holds": holds, **_row(answer, labels)})
    if batch is None:
        text = (
            "Every round uses all records: by linear equations nobody alone determines raw features, but the server "
            f"with any client does once rounds × {width * functions} reach the number of records, with the closer once "
            f"rounds × {width} reach the others' columns."
        )
    else:
        sums = f"{width} sum{'s' if width > 1 else ''} a record"
        text = (
            f"Others' raw features of a batch (B = {batch}, {sums}), by linear equations in a round's messages: "
            f"determined for {'; '.join(told[True]) or 'nobody'}; not for {'; '.join(told[False])}. Records that come "
            "back add equations: over enough rounds the server with any client determines them; the table says when. "
            "Equations that are not linear are not counted."
        )
    return Disclosure((f"{text} δ tells every client the labels.",), tuple(table))


def _row(features: str, labels: str) -> dict[str, str]:
    return {"others' raw features, by linear equations": features, "the labels": labels}
