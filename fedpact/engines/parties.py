"""The engine of feature-split federations over Flower: every party is a node of its own, with its columns.

The algorithm's own client_step and measure run at the server; where they come to `core.vertical.exchange`, the batch's
columns are `Elsewhere`, and the messages go to the parties and back, in three questions:

    partial   to all but the closer: record numbers, ω_i          → h_i, masked, sealed to the closer
    close     to the closer: record numbers, its ω_i, ω_0, those  → Closed, its Block, δ sealed to each other party, and
                                                                    whether δ is finite
    block     to all but the closer: record numbers, its δ        → Block

An answer bears the mark of the exchange it is of; another's is refused by name. So is a block that is not finite where
Closed and δ are. Where those are not, the run may have diverged, and nobody is named: that is a result.

The server draws the records, as a simulation does, and relays what it cannot open. An exchange on the same records at
the same ω as the one before is not asked for again: with all records in every round, telemetry is the next round's.

A round needs everyone. A party that does not answer within `patience` seconds ends the run with its name, resumable.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from hashlib import sha256
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedpact.core.contract import Batch, Cohort, Stepped
from fedpact.core.errors import ClientError, InvalidArgument, require
from fedpact.core.store import Store
from fedpact.core.vector import Vector
from fedpact.core.vertical import Answered, Block, Close, Closed, Layout, Split, conversation
from fedpact.core.wire import Message, Refused, checked, failed, usable
from fedpact.engines.flower import FlowerEngine, Link
from fedpact.engines.host import collected, stepped

log = logging.getLogger("fedpact")
#: What sealing adds: a nonce and a tag (`secure.primitives`).
SEALED = 12 + 16
#: A yes or no.
WHETHER = jax.ShapeDtypeStruct((), np.bool_)


@dataclass(frozen=True)
class PartiesEngine:
    """Parties are nodes of a federation; `patience` is how many seconds the server waits for each of their answers."""

    patience: float = 600.0
    compiled, eager, first_block = False, False, 1
    loose = ("patience",)
    remote = True  # the columns are not here
    every_round = True  # a checkpoint after each: a round costs seconds
    _running: dict[str, Any] = field(default_factory=dict, init=False, repr=False, compare=False)

    @classmethod
    def of(cls, engine: FlowerEngine) -> PartiesEngine:
        """As an experiment's engine says; what makes no sense where a round needs everyone is refused."""
        usual = FlowerEngine()
        for name in (f.name for f in fields(engine) if f.compare and f.name != "patience"):
            value, wanted = getattr(engine, name), getattr(usual, name)
            if name == "deadline" and value == engine.patience:
                continue  # a round that needs everyone waits for them as long as it waits at all
            hint = "A round needs every party's columns, and its sums are masked always: leave it out."
            require(value == wanted, name, f"{wanted!r} for data split by features", value, hint=hint)
        return cls(engine.patience)

    def over(self, link: Link) -> PartiesEngine:
        """The engine with a link to its parties."""
        self._running.clear()
        self._running.update(link=link, shapes={}, last=("", None, {}))
        return self

    @property
    def link(self) -> Link:
        """The parties."""
        return self._running["link"]

    def name(self, party: int) -> str:
        """What a party is called in sentences."""
        return f"party {party} ({self.link.names[party]})"

    # What the loop asks of an engine

    def load(self, federations: Sequence[Any], dtype: Any) -> tuple[np.ndarray, Records]:
        """Nothing is loaded: the columns are the parties'. Labels that are not there are not numbers."""
        if len(federations) > 1:
            raise InvalidArgument("engine must be 'local' for vectorised trials, got 'flower'. Run them one by one.")
        (federation,) = federations
        layout, names = federation.layout, self.link.names
        require(len(names) == len(layout.columns), "link", f"of {len(layout.columns)} nodes", names)
        for remark in getattr(federation, "remarks", ()):
            log.warning("%s", remark)
        count = int(federation.sizes[0])
        columns = Elsewhere(self, np.arange(count), federation.features)
        nobody, ones = jnp.full(count, jnp.nan, dtype), jnp.ones(count, dtype)
        return np.arange(1)[None], Records(Batch(columns, nobody, ones, jnp.asarray(0, jnp.int32)), layout)

    def clients_of(self, data: Records) -> Any:
        """A round is one, of all parties."""
        return np.arange(1)

    def one_client(self, data: Records) -> Batch:
        """All records."""
        return data.batch

    def one_state(self, clients: Store) -> Any:
        """The state, to learn its shape from."""
        return clients.get(0)

    def capacities(self, data: Any, largest: int, trials: bool) -> None:
        """Everyone takes part."""
        return

    def join(self, f: Callable[..., Any], shared: Any, data: Records, where: tuple[Any, str]) -> tuple[Store, Any]:
        """The closer's hello; the state is the server's, for a party has nothing to keep but its columns."""
        state, hello = f(shared, data.batch)
        leaves, tree = jax.tree.flatten(hello)
        closer = data.layout.closer
        answer = self.ask({closer: Message("join", {"client": closer})}, "join")[closer]
        told = [jnp.asarray(a)[None] for a in self.sound(answer, leaves, closer, "join")]
        return Store(lambda client: state), jax.tree.unflatten(tree, told)

    def step(
        self,
        f: Callable[..., Any],
        shared: Any,
        data: Records,
        clients: Store,
        cohort: Cohort,
        combine: str,
        where: tuple[Any, str],
    ) -> Stepped:
        """f(shared, batch, state) at the server; where it comes to columns, at the parties."""
        out = f(shared, data.asked(f"round {int(where[0])}", counting=False), clients.get(0))
        found = collected([(0, out)], combine)
        return stepped([0], found.states, found, combine)

    def keep(self, clients: Store, rows: Any, cohort: Cohort, t: Any) -> Store:
        """The state after the round; a round that is not kept leaves it as it was."""
        return clients.put(rows, int(t) + 1) if bool(jnp.all(cohort.mask)) else clients

    def total(self, f: Callable[..., Any], shared: Any, data: Records, clients: Store, where: tuple[Any, str]) -> Any:
        """f(shared, batch, state) on all records."""
        found = f(shared, data.asked(f"telemetry after round {int(where[0])}", counting=True), clients.get(0))
        return jax.tree.map(jnp.asarray, found)

    def test(self, f: Callable[..., Any], w: Any, data: Records) -> None:
        """The server has no rows."""
        return

    # Questions

    def ask(self, questions: Mapping[int, Message], where: str) -> dict[int, Message]:
        """Everyone's answer, or the error that names who has none."""
        answers = self.link.ask(questions, self.patience, len(questions), self.patience)
        for party in questions:
            if party not in answers:
                raise ClientError(
                    f"{where}: {self.name(party)} did not answer within {self.patience:g} s, and a round needs every "
                    "party. Start it and resume the run."
                )
            try:
                usable(answers[party])
            except Refused as refused:
                raise failed(f"{where}, {self.name(party)}", refused) from None
        return answers

    def sound(self, answer: Message, shapes: Sequence[Any], party: int, where: str) -> list[np.ndarray]:
        """An answer's arrays, if they are of these shapes and types."""
        try:
            return checked(answer, shapes, self.name(party))
        except Refused as refused:
            raise ClientError(f"{where}: {refused}") from None


class Records:
    """What the server has of the data: how many records there are, and who holds which of their columns."""

    def __init__(self, batch: Batch, layout: Layout) -> None:
        self.batch, self.layout = batch, layout

    def asked(self, where: str, counting: bool) -> Batch:
        """All records, for one use; `where` is told with what goes wrong."""
        x: Elsewhere = self.batch.x
        return self.batch._replace(x=Elsewhere(x.engine, x.records, x.features, where, counting))


class Elsewhere:
    """The columns of some records, at their parties. `counting` asks the closer for counts (right predictions) too."""

    def __init__(
        self, engine: PartiesEngine, records: np.ndarray, features: int, where: str = "", counting: bool = False
    ) -> None:
        self.engine, self.records, self.features = engine, records.astype(np.int64), features
        self.where, self.counting = where, counting
        self._counts: dict[str, Any] = {}

    def __getitem__(self, rows: Any) -> Elsewhere:
        return Elsewhere(self.engine, self.records[np.asarray(rows)], self.features, self.where, self.counting)

    def counts(self) -> dict[str, Any]:
        """What the closer counted, in the exchange before."""
        return dict(self._counts)

    def exchange(self, layout: Layout, split: Split, w: Vector, batch: Batch, close: Close) -> Answered:
        """A round's messages, to the parties and back."""
        running, mark = self.engine._running, _mark(self.records, jax.tree.leaves(w))
        known, said, counts = running["last"]
        if known != mark or (self.counting and not counts):
            asked = Exchange(self, mark, layout, split, w)
            said, counts = asked.run(self._shapes(layout, split, w, batch, close))
            running["last"] = mark, said, counts
        self._counts = counts
        return said

    def _shapes(self, layout: Layout, split: Split, w: Vector, batch: Batch, close: Close) -> Shapes:
        """Of the answers, from a simulation of the round without numbers."""
        known, kind = self.engine._running["shapes"], (len(self.records), self.counting)
        if kind not in known:

            def simulated(w: Vector, x: Any) -> Any:  # as numbers, for pixels are made numbers of first
                counts = split.model.counts(w, batch._replace(x=x)) if self.counting else {}
                return conversation(layout, split, w, batch._replace(x=x), close), counts

            x = jax.ShapeDtypeStruct((len(self.records), self.features), batch.weight.dtype)
            said, counts = jax.eval_shape(simulated, w, x)
            sealed = lambda leaf, flag: _bytes(SEALED + flag + leaf.size * leaf.dtype.itemsize)
            known[kind] = Shapes(
                sealed(said.partials[0].h, 1),
                jax.tree.leaves(said.closed),
                sealed(said.feedback.delta, 0),
                [block.gradient for block in said.blocks],
                counts,
            )
        return known[kind]


class Shapes(NamedTuple):
    """What the answers of an exchange must be like."""

    partial: Any
    closed: list[Any]
    feedback: Any
    blocks: list[Any]
    counts: Mapping[str, Any]


class Exchange:
    """One exchange: its three questions, and what is made of the answers."""

    def __init__(self, columns: Elsewhere, mark: str, layout: Layout, split: Split, w: Vector) -> None:
        self.columns, self.mark, self.closer = columns, mark, layout.closer
        self.parties = range(len(layout.columns))
        self.away = [i for i in self.parties if i != layout.closer]
        first = split.first(w)
        self.own = [first[jnp.asarray(c, jnp.int32)] for c in layout.columns]  # every party's ω_i
        self.head, self.tree = jax.tree.flatten(split.rest(w))

    def run(self, shapes: Shapes) -> tuple[Answered, dict[str, Any]]:
        """Values and gradients; and the counts, where they are asked for."""
        sums = self._ask("partial", {i: [self.own[i]] for i in self.away}, lambda i: [shapes.partial])
        sealed = [array for i in self.away for array in sums[i]]
        to_closer = [self.own[self.closer], *self.head, *sealed]
        parts = [shapes.closed, [shapes.blocks[self.closer]], [shapes.feedback] * len(sealed), [WHETHER]]
        counted = sorted(shapes.counts)
        parts.append([shapes.counts[name] for name in counted])
        told = self._ask("close", {self.closer: to_closer}, lambda i: [shape for part in parts for shape in part])
        (values, *by_head), own, deltas, (whether,), counts = _cut(told[self.closer], map(len, parts))
        sound = bool(whether) and _finite([values, *by_head])
        feedback = {i: [delta] for i, delta in zip(self.away, deltas, strict=True)}
        if sound:
            self._check_finite("close", {self.closer: [*own, *counts]})
        blocks = self._ask("block", feedback, lambda i: [shapes.blocks[i]])
        if sound:
            self._check_finite("block", blocks)
        blocks[self.closer] = own
        gradients = tuple(Block(jnp.asarray(blocks[i][0])) for i in self.parties)
        head = jax.tree.unflatten(self.tree, [jnp.asarray(a) for a in by_head])
        told_counts = {name: jnp.asarray(a) for name, a in zip(counted, counts, strict=True)}
        return Answered(Closed(jnp.asarray(values), head), gradients), told_counts

    def _ask(
        self, kind: str, arrays: Mapping[int, Sequence[Any]], wanted: Callable[[int], list[Any]]
    ) -> dict[int, list[np.ndarray]]:
        """These arrays to these parties, with the records; their answers, if they are as wanted."""
        engine, where = self.columns.engine, f"{self.columns.where}, {kind}"
        told = {"mark": self.mark, "counts": self.columns.counting}
        records = self.columns.records
        questions = {i: Message(kind, {"client": i, **told}, [records, *map(np.asarray, a)]) for i, a in arrays.items()}
        found = engine.ask(questions, where)
        for i, answer in found.items():
            if (answer.values.get("client"), answer.values.get("mark")) != (i, self.mark):
                raise ClientError(
                    f"{where}: {kind} of {engine.name(i)} must be of the exchange that it was asked for, got another's."
                    " Nothing was computed from it. Install the same fedpact everywhere, and resume the run."
                )
        return {i: engine.sound(found[i], wanted(i), i, where) for i in questions}

    def _check_finite(self, kind: str, answers: Mapping[int, Sequence[np.ndarray]]) -> None:
        """What is made of finite numbers is finite, or its party is named."""
        for i, arrays in answers.items():
            if not _finite(arrays):
                raise ClientError(
                    f"{self.columns.where}, {kind}: {kind} of {self.columns.engine.name(i)} must be finite, as all that"
                    " it is made of is, got numbers that are not. Nothing of the round is kept. Mend the node and"
                    " resume the run; columns so large that their products overflow must be scaled, in a new run."
                )


def _finite(arrays: Iterable[np.ndarray]) -> bool:
    return all(bool(np.isfinite(array).all()) for array in arrays)


def _bytes(count: int) -> Any:
    return jax.ShapeDtypeStruct((count,), np.uint8)


def _cut(arrays: Sequence[np.ndarray], lengths: Iterable[int]) -> list[list[np.ndarray]]:
    """The list in parts of these lengths."""
    rest = iter(arrays)
    return [[next(rest) for _ in range(length)] for length in lengths]


def _mark(records: np.ndarray, leaves: Sequence[Any]) -> str:
    """Of the records and ω: what the parties' masks and seals of an exchange are bound to."""
    text = sha256(records.astype("<i8").tobytes())
    for leaf in map(np.asarray, leaves):
        text.update(repr((leaf.shape, leaf.dtype.str)).encode() + leaf.tobytes())
    return text.hexdigest()
