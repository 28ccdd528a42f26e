"""Data split by features over a link: what a party's node does, and how the parties come to one layout.

    survey   who holds which columns, by the experiment's split or by the files         (`agreed`)
    align    of files: which records all have, without showing ids                      (`joined`)
    coded    each party makes its columns and tells a public key of its own; no row
    prepare  the experiment, the layout and everyone's public key
    join     the closer's hello
    partial, close, block    an exchange (`engines.parties`)

Keys are X25519 (`secure.primitives`). From each pair's secret come, for every exchange, a key that seals and one that
masks; both are bound to the run, the records and ω. Parties other than the closer mask their sums for one another: the
closer's own never leave it, and a mask that it knows would hide nothing from it. The server relays all of it and opens
nothing. It follows the protocol, as docs/secure.md assumes: it hands on the public keys that it was given, and marks
exchanges at another ω by another mark, so that no mask is used for two sums.
"""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import scipy.sparse

from fedpact.core.contract import Batch
from fedpact.core.errors import DataError, InvalidArgument
from fedpact.core.files import make_folder, remove_torn, write_atomic
from fedpact.core.sealed import seal, unseal
from fedpact.core.vector import Vector
from fedpact.core.vertical import Feedback, Layout, Split, block_of, closed, partial, total
from fedpact.core.wire import Forgotten, Message, Refused, checked
from fedpact.data import Dataset, Federation
from fedpact.definition import PRECISIONS, loop_of, start_of
from fedpact.flower import joined, sources
from fedpact.flower.described import Description, experiment_of, schema_told, value_of
from fedpact.problems.vertical import as_vertical, closing
from fedpact.secure import primitives

log = logging.getLogger("fedpact")
#: Everyone's answer to a question, and what is delivered before the next one.
Ask = Callable[[Mapping[int, Message]], dict[int, Message]]
Tell = Callable[[Mapping[int, Message]], None]
FILE = "party.bin"


# The server, before the run


def is_split(surveys: Sequence[Mapping[str, Any]]) -> bool:
    """Whether the nodes hold columns, and not rows."""
    kinds = {"layout" in one or "on" in one for one in surveys}
    if len(kinds) > 1 or len({"layout" in one for one in surveys}) > 1:
        raise DataError("nodes must all hold rows, all a file with ids, or all a part of the experiment's, got others.")
    return kinds == {True}


def agreed(
    values: Mapping[str, Any], names: Sequence[str], surveys: Sequence[Mapping[str, Any]], ask: Ask, tell: Tell
) -> Description:
    """Who holds which columns of which records; every node then has its own, and no other's."""
    primitives.ready()
    everyone = range(len(names))
    files = "on" in surveys[0]
    found = joined.plan(values, names, surveys) if files else None
    unmatched = {} if found is None else joined.align(values, names, found.closer, ask, tell)
    plans = [{} for _ in everyone] if found is None else found.parties
    questions = {i: Message("coded", {"client": i, "schema": {}, "party": plans[i]}) for i in everyone}
    answers = [answer.values for _, answer in sorted(ask(questions).items())]
    every = lambda key, kind: [value_of(one, key, kind, name) for one, name in zip(answers, names, strict=True)]
    counts = every("rows", "a number from 1 to 2³¹−1")
    if len(set(counts)) > 1:
        raise DataError(f"parties must have the same records, got {counts} of them. Align them, or start again.")
    if found is not None:
        schema, layout = joined.schema_of(values, names, found.closer, answers)
        pixels, dataset = False, "+".join(names)
    else:
        made = value_of(surveys[0], "made", "a table", names[0])
        schema, layout = schema_told(made, names[0]), _placed(surveys[0], names)
        pixels, dataset = bool(surveys[0].get("pixels")), str(surveys[0].get("dataset"))
    return Description(
        tuple(names),
        tuple(counts),
        tuple(False for _ in everyone),
        tuple(every("mark", "a word")),
        schema,
        pixels,
        dataset,
        layout,
        tuple(every("public", "64 digits of 0-9 and a-f")),
        unmatched,
    )


def _placed(survey: Mapping[str, Any], names: Sequence[str]) -> Layout:
    """The split's layout, its parties in the nodes' order."""
    columns, closer = value_of(survey, "layout", "everyone's columns and the closer", names[0])
    parties = list(value_of(survey, "names", "a list of texts", names[0]))
    places = [sources.place_among(parties, name, i) for i, name in enumerate(names)]
    if sorted(places) != list(range(len(parties))) or len(parties) != len(columns):
        raise DataError(f"nodes must be the split's parties ({', '.join(parties)}), got {', '.join(names)}.")
    return Layout(tuple(tuple(columns[place]) for place in places), tuple(names), places.index(int(closer)))


# A party's node, before the run


def coded(node: Any, message: Message) -> bytes:
    """Make the own columns as agreed; draw a key; tell how many records there are and the public key."""
    source, plan = node._source(), dict(message.values["party"])
    source.client = int(message.values["client"])
    node.at.own, about = source.columns(node.name, plan)
    private = os.urandom(primitives.KEY_BYTES)
    node.at.party = {"private": private, "plan": plan, "kept": np.asarray(source.kept, np.int64)}
    public = primitives.public_of(private).hex()
    answer = {"rows": node.own.records, "mark": sources.mark_of(node.own, node.key), "public": public, **about}
    return Message("coded", answer).pack()


class Keys:
    """One party's private key, everyone's public ones, and what is sealed and masked with them."""

    def __init__(self, run: str, private: bytes, public: Sequence[bytes], names: Sequence[str], me: int) -> None:
        if len(public) != len(names) or len(set(public)) != len(public):
            raise Refused(f"keys of the parties must be {len(names)}, each its own, got others. Start the run again.")
        if public[me] != primitives.public_of(private):
            raise Refused(f"key of {names[me]} must be the one it made, got another. Start the run again.")
        self.run, self.private, self.public, self.names, self.me = run, private, list(public), list(names), me

    def _key(self, other: int, label: bytes, bound: bytes) -> bytes:
        context = primitives.digest(self.run.encode(), bound)
        return primitives.agree(self.private, self.public[other], label, context, other)

    def sealed(self, to: int, what: str, bound: bytes, plain: bytes) -> np.ndarray:
        """For one party alone."""
        key, about = self._key(to, b"seal", bound), _about(what, self.me, to)
        content = primitives.seal(key, plain, about, os.urandom(primitives.NONCE_BYTES))
        return np.frombuffer(content, np.uint8)

    def opened(self, sender: int, what: str, bound: bytes, content: np.ndarray) -> bytes:
        """What another party sealed for this one, for these records at this ω."""
        key, about = self._key(sender, b"seal", bound), _about(what, sender, self.me)
        plain = primitives.unseal(key, content.tobytes(), about)
        if plain is None:
            raise Refused(
                f"{what} of {self.names[sender]} must be as sealed for {self.names[self.me]}, got bytes that do not "
                "open: they were changed on their way, or are of another exchange. Nothing was computed from them."
            )
        return plain

    def mask(self, words: np.ndarray, others: Sequence[int], bound: bytes) -> None:
        """words ± a stream for each pair, in place, modulo 2⁶⁴: they cancel in the sum over the parties."""
        for other in others:
            if other != self.me:
                primitives.add_stream(words, self._key(other, b"mask", bound), 1 if self.me < other else -1)


def _about(what: str, sender: int, receiver: int) -> bytes:
    return f"{what} {sender} {receiver}".encode()


class PartyAtNode:
    """A run as one party has it: the experiment, its own columns, its keys. It keeps no state from round to round."""

    def __init__(self, node: Any, told: Message) -> None:
        if node.at.party is None:
            raise Forgotten(
                "question must come after the columns were coded, got one before it. The node was started again."
            )
        if "epsilon" in node.config:
            raise InvalidArgument(
                f"experiment must be private for node {node.name!r}, whose configuration grants epsilon = "
                f"{node.config['epsilon']}, got data split by features, which has no (ε, δ). Take epsilon out."
            )
        self.node, self.told, self.client = node, told, int(told.values["client"])
        description = Description.from_dict(told.values["description"])
        self.experiment, _ = experiment_of(told.values["experiment"], description)
        e, run = self.experiment, str(told.values.get("run"))
        self.folder = sources.run_folder(node.folder, run)
        make_folder(self.folder)
        remove_torn(self.folder)
        self.layout: Layout = e.federation.layout
        self.away = [i for i in range(len(self.layout.columns)) if i != self.layout.closer]
        self.names = [f"party {i} ({name})" for i, name in enumerate(self.layout.names)]
        public = [bytes.fromhex(key) for key in description.keys]
        self.keys = Keys(run, node.at.party["private"], public, self.names, self.client)
        self.party, self.own = dict(node.at.party), node.at.own
        self._check_own()
        self.dtype = PRECISIONS[str(e.precision)]
        self.task = as_vertical(e.problem)
        self.split = Split.of(self.task.model)
        start = jax.eval_shape(lambda: start_of(e))
        self.flat, self.width = self.split.flat(start), jax.eval_shape(self.split.first, start).shape[1]
        self.head = self.split.rest(start)
        self.functions = sum(part.estimated for part in self.task.parts)
        self.block_shape = jax.ShapeDtypeStruct((self.own.x.shape[1], self.width), self.dtype)
        self._partial = jax.jit(lambda x, block: partial(self._inputs(x), block, len(self.layout.columns)))
        self._block = jax.jit(lambda x, delta: block_of(self._inputs(x), Feedback(delta)).gradient)
        self._close = jax.jit(self._closed)

    def _check_own(self) -> None:
        """The columns and the labels that the layout says it has; of the closer, labels that the problem can use."""
        e, closes = self.experiment, self.client == self.layout.closer
        columns = len(self.layout.columns[self.client])
        if self.own.x.shape[1] != columns or (self.own.y is not None) != closes:
            raise Refused(f"layout must give node {self.node.name!r} the columns it has, got others.")
        if self.own.y is not None:
            stand_in, y = e.federation.dataset, self.own.y
            x = np.broadcast_to(stand_in.x[:1], (len(y), stand_in.features))
            with_labels = Dataset(stand_in.name, x, y, stand_in.schema)
            e.problem.check(Federation(with_labels, (np.arange(len(y)),)))

    # On the disk

    def keep(self, session: str) -> None:
        """Which run it is, what was told of it, the private key, and the rows that all parties have."""
        party = self.party
        arrays = {"private": np.frombuffer(party["private"], np.uint8), "kept": party["kept"]}
        write_atomic(self.folder / FILE, seal("party", {"plan": party["plan"]}, arrays), mode=0o600)
        write_atomic(self.folder / "prepare.bin", self.told.pack())
        sources.remember(self.node.folder, session, str(self.told.values["run"]))

    @classmethod
    def again(cls, node: Any, told: Message, folder: Path) -> PartyAtNode:
        """After a crash: from what was told before."""
        found = unseal("party", (folder / FILE).read_bytes()) if (folder / FILE).is_file() else None
        if found is None:
            raise Refused(f"{FILE} of node {node.name!r} must be whole, got none. Start the server again.")
        header, arrays = found
        source = sources.own_source(node.config, told.values["experiment"])
        source.client, source.kept = int(told.values["client"]), arrays["kept"].tolist()
        node.at.source, (node.at.own, _) = source, source.columns(node.name, header["plan"])
        description = Description.from_dict(told.values["description"])
        if sources.mark_of(node.own, node.key) != description.marks[int(told.values["client"])]:
            raise InvalidArgument(
                f"columns of node {node.name!r} must be those the run began with, got others. Put them back, or start "
                "a new run."
            )
        node.at.party = {"private": arrays["private"].tobytes(), "plan": header["plan"], "kept": arrays["kept"]}
        return cls(node, told)

    # The exchange

    def join(self, message: Message) -> bytes:
        """The closer's hello."""
        e, loop = self.experiment, loop_of(self.experiment)
        y = self._labels()
        batch = Batch(None, jnp.asarray(y, self.dtype), jnp.ones(len(y), self.dtype), jnp.asarray(0, jnp.int32))
        _, hello = loop._join_one((start_of(e), jax.random.key(e.seed)), batch)
        return Message("join", {"client": self.client}, [np.asarray(a) for a in jax.tree.leaves(hello)]).pack()

    def partial(self, message: Message) -> bytes:
        """h_i, masked for the other parties, sealed to the closer."""
        _, block = self._read(message, [self.block_shape])
        records, bound = self._records(message), _bound(message)
        found, fits = self._partial(self._rows(records), jnp.asarray(block))
        words = np.array(found.h, np.int64).view(np.uint64).ravel()
        self.keys.mask(words, self.away, bound)
        plain = bytes([bool(fits)]) + words.astype("<u8").tobytes()
        return self._answer(message, [self.keys.sealed(self.layout.closer, "partial sums", bound, plain)])

    def close(self, message: Message) -> bytes:
        """Σh, of which the closer knows its own part; values and gradients to the server, δ sealed to each other."""
        y, heads = self._labels(), jax.tree.leaves(self.head)
        records, bound = self._records(message), _bound(message)
        size = primitives.SEAL_BYTES + 1 + 8 * len(records) * self.width
        sealed = [jax.ShapeDtypeStruct((size,), np.uint8)] * len(self.away)
        _, block, *rest = self._read(message, [self.block_shape, *heads, *sealed])
        head, given = rest[: len(heads)], rest[len(heads) :]
        x = self._rows(records)
        own, fits = self._partial(x, jnp.asarray(block))
        sums, beyond = [np.array(own.h, np.int64).view(np.uint64)], [] if bool(fits) else [self.client]
        for i, content in zip(self.away, given, strict=True):
            plain = self.keys.opened(i, "partial sums", bound, content)
            sums.append(np.frombuffer(plain, "<u8", offset=1).astype(np.uint64).reshape(sums[0].shape))
            beyond += [] if plain[0] == 1 else [i]
        for i in beyond:  # the server learns that there is one, not who
            log.warning("partial sums of %s are not finite, or too large to be added up", self.names[i])
        whole = jnp.full(own.h.shape, jnp.nan) if beyond else total([jnp.asarray(one) for one in sums], self.dtype)
        tree = jax.tree.unflatten(jax.tree.structure(self.head), [jnp.asarray(a) for a in head])
        answer, delta, gradient, counts = jax.device_get(
            self._close(tree, whole.astype(self.dtype), x, jnp.asarray(y[records], self.dtype))
        )
        back = [self.keys.sealed(i, "feedback", bound, np.ascontiguousarray(delta).tobytes()) for i in self.away]
        asked = bool(message.values.get("counts")) and len(records) == self.own.records
        counted = [np.asarray(counts[name]) for name in sorted(counts)] if asked else []
        whether = np.asarray(np.isfinite(delta).all())
        return self._answer(message, [*map(np.asarray, jax.tree.leaves(answer)), gradient, *back, whether, *counted])

    def block(self, message: Message) -> bytes:
        """x_iᵀ δ, from what the closer sealed for this party."""
        records, bound = self._records(message), _bound(message)
        shape = (self.functions, len(records), self.width)
        size = primitives.SEAL_BYTES + int(np.prod(shape)) * np.dtype(self.dtype).itemsize
        _, content = self._read(message, [jax.ShapeDtypeStruct((size,), np.uint8)])
        plain = self.keys.opened(self.layout.closer, "feedback", bound, content)
        delta = np.frombuffer(plain, self.dtype).reshape(shape)
        return self._answer(message, [np.asarray(self._block(self._rows(records), jnp.asarray(delta)))])

    def _closed(self, head: Vector, h: Any, x: Any, y: Any) -> tuple[Any, ...]:
        """Closed, δ, the closer's own block, and what it counts."""
        own, batch = closing(self.split, self.task, self.width), self._batch(y)
        tally = self.task.tally(self._batch(jnp.asarray(self._labels(), self.dtype)))
        answer, feedback = closed(self.split, head, h, self.flat, batch, lambda v, b: own.means(v, b, tally))
        counts = own.counts(self.split.unit(head, self.width, self.flat, self.dtype), batch._replace(x=h))
        return answer, feedback.delta, block_of(self._inputs(x), feedback).gradient, counts

    def _batch(self, y: Any) -> Batch:
        """Labels of records that stand for all N."""
        weight = jnp.full(len(y), self.own.records / len(y), self.dtype)
        return Batch(None, y, weight, jnp.asarray(0, jnp.int32))

    def _inputs(self, x: Any) -> Any:
        return self.split.inputs(x, self.dtype)

    def _rows(self, records: np.ndarray) -> Any:
        rows = self.own.x[records]
        rows = rows.toarray() if scipy.sparse.issparse(rows) else rows
        return jnp.asarray(rows if rows.dtype == np.uint8 else rows.astype(self.dtype))

    def _labels(self) -> np.ndarray:
        if self.own.y is None:
            raise Refused(
                f"question must be for the closer, who has the labels, got one for {self.names[self.client]}."
            )
        return self.own.y

    # Questions

    def _records(self, message: Message) -> np.ndarray:
        """The records asked for: a batch of the experiment's size, or all; each once."""
        if message.values.get("client") != self.client:
            raise Refused(
                f"question must be for {self.names[self.client]}, got one for {message.values.get('client')!r}."
            )
        count = self.own.records
        sizes = {getattr(self.experiment.algorithm, "batch", None) or count, count}
        records = np.asarray(message.arrays[0]) if message.arrays else np.empty(0)
        ok = records.ndim == 1 and records.dtype == np.int64 and len(records) in sizes
        inside = ok and records.min() >= 0 and records.max() < count and len(np.unique(records)) == len(records)
        if not inside:
            told = " or ".join(map(str, sorted(sizes)))
            raise Refused(f"records must be {told} of the {count}, each once, got {records.shape} of {records.dtype}.")
        return records

    def _read(self, message: Message, shapes: Sequence[Any]) -> list[np.ndarray]:
        records = jax.ShapeDtypeStruct(np.shape(message.arrays[0]) if message.arrays else (0,), np.int64)
        return checked(message, [records, *shapes], "the server")

    def _answer(self, question: Message, arrays: Sequence[np.ndarray]) -> bytes:
        """With the mark of the exchange that it is of."""
        return Message(question.kind, {"client": self.client, "mark": question.values["mark"]}, arrays).pack()


def _bound(message: Message) -> bytes:
    """What the keys of an exchange are bound to: the server's mark of ω, and the records."""
    records = hashlib.sha256(np.asarray(message.arrays[0]).astype("<i8").tobytes()).digest()
    return primitives.digest(str(message.values["mark"]).encode(), records)
