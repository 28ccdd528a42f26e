"""A run as one node has it: the experiment, its own rows, and its states on disk.

Its folder, for one run:

    prepare.bin, join.bin what was told at the start, to go on by after a crash
    000002-000000007.bin  the state of client 2 in version 7 (`core.store`): whole or absent
    answer.bin            the last answer to a step, by the digest of its question: asked again, it is given again,
                          so that noise is drawn once and an upload is the same however often it is sent
    opened-step.json, …   of a secure run: over whom vectors were opened, by the purpose of the sum (`masked`)

And the node's own, over all runs:

    ledger.jsonl          of private runs: what left this node, written before it does

A question tells which version of the state to go on from and the digest it must have. A node that has it goes on from
there, whatever it has done since: the server's word on which rounds counts decides. One that has not says so.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import logging
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
import scipy.sparse

from fedpact.core.contract import Batch
from fedpact.core.errors import BudgetSpent, CheckpointError, InvalidArgument
from fedpact.core.files import make_folder, remove_torn, write_atomic, writing
from fedpact.core.loop import Loop
from fedpact.core.store import Store, _name
from fedpact.core.wire import VERSION, Forgotten, Message, Refused, checked, unpack
from fedpact.definition import PRECISIONS, loop_of, private_plan, start_of
from fedpact.engines.flower import FlowerEngine
from fedpact.flower import sources
from fedpact.flower.coding import only_summed
from fedpact.flower.described import Description, experiment_of
from fedpact.flower.masked import Book, Rules
from fedpact.flower.vertical import PartyAtNode
from fedpact.privacy.budget import Budget
from fedpact.privacy.ledger import Ledger

if TYPE_CHECKING:
    from fedpact.flower.node import Node

log = logging.getLogger("fedpact")
#: Who releases, in a node's own ledger: whatever number a run gives it.
WHO = "this node"


class StateLost(CheckpointError):
    """The node has not the state that the server knows it by."""


class RunAtNode:
    """A run as one node has it: the experiment, its own rows, its states on disk."""

    def __init__(self, node: Node, told: Message) -> None:
        self.node, self.client = node, int(told.values["client"])
        description = Description.from_dict(told.values["description"])
        self._check_told(description)
        self.experiment, _ = experiment_of(told.values["experiment"], description)
        e = self.experiment
        e.problem.check(node.own)
        self.private = private_plan(e)
        if "epsilon" in node.config and self.private is None:
            raise InvalidArgument(
                f"experiment must be private for node {node.name!r}, whose configuration grants epsilon = "
                f"{node.config['epsilon']}, got one without [privacy]. Add it, or take epsilon out."
            )
        self.loop: Loop = loop_of(e)
        assert isinstance(e.engine, FlowerEngine)
        self.secure, self.largest = e.engine.secure, e.engine.largest
        self.rules = Rules(str(told.values["run"]), e.engine.bound, e.engine.threshold)
        self.folder = sources.run_folder(node.folder, told.values.get("run"))
        make_folder(self.folder)
        remove_torn(self.folder)
        self.dtype = PRECISIONS[str(e.precision)]
        self.batch = _batch(node.own.client(0), self.client, self.dtype)
        self.aside = _aside(node.own, self.client, self.dtype) if self.loop.scored else None
        self._join, self._step = jax.jit(self.loop._join_one), jax.jit(self.loop._step_one)
        self._measure = jax.jit(self.loop._measure_one)
        self.told = told
        self.joined: Message | None = None
        self._shapes: dict[str, Any] = {}

    def keep(self, session: str) -> None:
        """On the disk: which run it is, and what was told of it."""
        write_atomic(self.folder / "prepare.bin", self.told.pack())
        sources.remember(self.node.folder, session, str(self.told.values["run"]))

    @classmethod
    def again(cls, node: Node) -> RunAtNode | PartyAtNode:
        """After a crash: from what was told before."""
        run_name = sources.remembered(node.folder, node.at.name)
        if run_name is None:
            raise Forgotten(
                "question must come after the node was prepared, got one before it. The node was started again."
            )
        folder = sources.run_folder(node.folder, run_name)
        told = _kept(folder, "prepare")
        if told is None:
            raise Forgotten("prepare.bin of the run must be whole, got none that is. The node's disk was lost.")
        if "layout" in told.values["description"]:
            return PartyAtNode.again(node, told, folder)
        read_rows_again(node, told)
        run = cls(node, told)
        if (joined := _kept(folder, "join")) is not None:
            run._joined(joined)
        return run

    # The start

    def _check_told(self, description: Description) -> None:
        """What the server says of this node's rows is so: by their number a private run reckons what it releases."""
        node, at = self.node, slice(self.client, self.client + 1)
        own, said = int(node.own.sizes[0]), description.sizes[at]
        if sources.mark_of(node.own, node.key) not in description.marks[at]:
            raise InvalidArgument(
                f"rows of node {node.name!r} must be those the run began with, got others. Put them back, and the "
                "node.key by which they are known, or start a new run."
            )
        if said != (own,):
            raise Refused(
                f"rows of node {node.name!r} must be told as the {own} it has, got {said[0]} from the server."
            )

    def _joined(self, message: Message) -> None:
        w0 = start_of(self.experiment)
        shapes = [*jax.tree.leaves(w0), jax.random.key_data(jax.random.key(0))]
        arrays = checked(message, shapes, "the server")
        start = jax.tree.unflatten(jax.tree.structure(w0), [jnp.asarray(a) for a in arrays[:-1]])
        self.shared = (start, jax.random.wrap_key_data(jnp.asarray(arrays[-1])))
        self.joined = message
        self.state_shape, _ = jax.eval_shape(self._join, self.shared, self.batch)

    def join(self, message: Message) -> bytes:
        """The hello, and what states begin as. Told `again`, in a round, the hello is not needed."""
        self._joined(message)
        write_atomic(self.folder / "join.bin", message.pack())
        if message.values.get("again"):
            return Message("join", {"client": self.client}).pack()
        _, hello = self._join(self._begin(), self.batch)
        arrays, told = _arrays(hello), {"client": self.client}
        w0, init = self.shared[0], self.loop.algorithm.init
        summed = only_summed(lambda hellos: init(w0, hellos), hello) if self.secure else []
        if any(summed):
            ours, arrays = ([a for a, one in zip(arrays, summed, strict=True) if one is flag] for flag in (True, False))
            told |= self._put("join", message, ours)
        return Message("join", told, arrays).pack()

    def _put(self, purpose: str, message: Message, arrays: Sequence[np.ndarray], largest: float = math.inf) -> Any:
        """Keep these for a masked sum, and tell what it needs."""
        book = Book(self.folder, purpose, identity(message, "notes"))  # with notes or without, the vector is the same
        return self.node.at.summands.put(self.rules, purpose, message, self.client, arrays, book, largest)

    def _begin(self) -> Any:
        if self.joined is None:
            raise Forgotten("question must come after the join, got one before it. The node was started again.")
        return self.shared

    # States

    def _store(self) -> Store:
        return Store(lambda client: self._join(self._begin(), self.batch)[0], self.folder)

    def _state(self, version: int, digest: str) -> Any:
        """The state in this version, if it is the one that the server knows by this digest."""
        self._begin()  # a node that has forgotten it says so before it says what it holds
        store = self._store()
        if version == 0:
            return jax.tree.map(np.asarray, store.make(self.client))
        path = self.folder / _name(self.client, version)
        found = self._digest_of(path)
        if found is None or (digest and found != digest):
            held = self._held()
            has = f"versions {', '.join(map(str, held))}" if held else "none"
            what = "another state of that version" if found is not None else has
            raise StateLost(f"state of node {self.node.name!r} must be of version {version}, got {what}.")
        store.versions, store.held = {self.client: version}, {self.client: None}
        store.structure = jax.tree.structure(self.state_shape)
        try:
            return store.get(self.client)
        except CheckpointError:
            lost = f"state of node {self.node.name!r} must be of version {version}, got a file of it that is damaged."
            raise StateLost(lost) from None

    def _held(self) -> list[int]:
        """The versions on the disk."""
        return sorted(int(p.stem.split("-")[1]) for p in self.folder.glob(f"{self.client:06d}-*.bin"))

    def _back(self, t: int, version: int, kept: Path) -> dict[str, int]:
        """Tell of a question that goes on from before the last answer, and of which version that left; later versions
        may be of rounds undone then."""
        newest = max(self._held(), default=0)
        if newest <= version or not kept.is_file():
            return {}
        had = unpack(kept.read_bytes().partition(b"\n")[2], "step").values["version"]
        if had <= version:
            return {}
        told = "run %s, round %d, node %r: the state goes back to version %d, which the server counts, from %d"
        log.warning(told, self.rules.run, t, self.node.name, version, had)
        return {"back": had}

    def _digest_of(self, path: Path) -> str | None:
        """What the server knows a state by; in a secure run keyed, so that it cannot try what the state might be."""
        found = _digest_of(path)
        if found is None or not self.secure:
            return found
        return hmac.new(self.node.key, found.encode(), hashlib.sha256).hexdigest()

    # Rounds

    def step(self, message: Message) -> bytes:
        """One round; in a secure run the upload stays here, for a masked sum."""
        body = self._stepped(message)
        if not self.secure:
            return body
        made = unpack(body, "step")
        own, rest = made.arrays[: made.values["own"]], made.arrays[made.values["own"] :]
        return Message("step", {**made.values, **self._put("step", message, own, self.largest)}, rest).pack()

    def _stepped(self, message: Message) -> bytes:
        """One round, or the answer that was given to the same question before."""
        kept, question = self.folder / "answer.bin", identity(message)
        if kept.is_file():
            head, _, body = kept.read_bytes().partition(b"\n")
            if head.decode() == question:
                return body
        values = message.values
        self._mine(values)
        t, version = int(values["round"]), int(values["version"])
        state = self._state(version, str(values["digest"]))
        back = self._back(t, version, kept)
        if self.private is not None:
            self._spend(t, question, bool(values.get("fresh")))
        msg = self._broadcast(message)
        new, upload, notes = jax.device_get(self._step((msg, jnp.asarray(t), self._root()), self.batch, state))
        self._store().put({self.client: new}, t + 1)
        digest = self._digest_of(self.folder / _name(self.client, t + 1))
        told = {"client": self.client, "round": t, "based": version, "version": t + 1, "digest": digest, **back}
        noted = bool(values.get("notes")) and self.private is None
        own = _arrays(upload)
        arrays = own + (_arrays(notes) if noted else [])
        body = Message("step", {**told, "notes": noted, "own": len(own)}, arrays).pack()
        write_atomic(kept, question.encode() + b"\n" + body)
        self._sweep({int(v) for v in values.get("keep", ())}, version)
        return body

    def _mine(self, values: Mapping[str, Any]) -> None:
        if values.get("client") != self.client:
            raise Refused(f"question must be for client {self.client}, got one for {values.get('client')!r}.")

    def _root(self) -> Any:
        """The key of a step's draws: the server's, but of a private run, whose samples and noise nobody else knows."""
        if self.private is None:
            return self._begin()[1]
        key = jax.random.key(int.from_bytes(os.urandom(4)))
        for _ in range(3):
            key = jax.random.fold_in(key, int.from_bytes(os.urandom(4)))
        return key

    def _broadcast(self, message: Message) -> Any:
        if "msg" not in self._shapes:
            self._shapes["msg"] = jax.eval_shape(self._first_broadcast)
        leaves, tree = jax.tree.flatten(self._shapes["msg"])
        arrays = checked(message, leaves, "the server")
        return jax.tree.unflatten(tree, [jnp.asarray(a) for a in arrays])

    def _first_server(self) -> Any:
        algorithm, clients = self.loop.algorithm, len(self.experiment.federation.rows)
        w0, root = self._begin()
        _, hello = self.loop._join_one((w0, root), self.batch)
        return algorithm.init(w0, jax.tree.map(lambda a: jnp.stack([a] * clients), hello))

    def _first_broadcast(self) -> Any:
        return self.loop.algorithm.broadcast(self._first_server())

    def _first_seen(self) -> Any:
        algorithm, server = self.loop.algorithm, self._first_server()
        return (algorithm.observe or algorithm.broadcast)(server), algorithm.model(server)

    def measure(self, message: Message) -> bytes:
        """The telemetry's terms of this client, and the test's sums over the rows it holds out, where they are scored.

        A private run's would tell what noise hides: it has none.
        """
        values = message.values
        self._mine(values)
        if self.private is not None:
            raise Refused('telemetry must be "none" in a private federation, got a question for it.')
        state = self._state(int(values["version"]), str(values["digest"]))
        if "seen" not in self._shapes:
            self._shapes["seen"] = jax.eval_shape(self._first_seen)
        leaves, tree = jax.tree.flatten(self._shapes["seen"])
        arrays = checked(message, leaves, "the server")
        shared = jax.tree.unflatten(tree, [jnp.asarray(a) for a in arrays])
        sums = jax.device_get(self._measure(shared, self.batch, state, self.aside))
        told = {"client": self.client, "round": values["round"], "version": values["version"]}
        if not self.secure:
            return Message("measure", told, _arrays(sums)).pack()
        return Message("measure", {**told, **self._put("measure", message, _arrays(sums))}).pack()

    def _spend(self, t: int, question: str, fresh: bool) -> None:
        """Write into the node's own ledger what the answer to this question releases, if its own budget has room.

        The ledger is of all runs here. Noise is drawn anew for every answer, so each question is a release of its own,
        also of a round that had one: the next attempt. But one that is the ledger's last line and whose answer is not
        kept was never answered, for the answer is written down before it leaves; it is spent. Who is asked to begin
        `fresh` has released in this run: a ledger without a line of it is not the one that was written.
        """
        assert self.private is not None
        config, mark = self.node.config, f"{self.told.values['run']}-{question[:32]}"
        with Ledger(self.node.folder) as ledger:
            if ledger.releases and ledger.releases[-1].output == mark:
                return
            if fresh and not any(r.output.startswith(f"{self.told.values['run']}-") for r in ledger.releases):
                raise Refused(
                    f"ledger of node {self.node.name!r} must have what it released in this run, got nothing of it. Put "
                    "ledger.jsonl and ledger.head back; nothing was released."
                )
            (release,) = self.private.releases(t, np.asarray([self.client]), mark)
            before = [r for r in ledger.releases if (r.round, r.purpose) == (release.round, release.purpose)]
            release = replace(release, who=WHO, attempt=len(before))
            if "epsilon" in config:
                budget = Budget(float(config["epsilon"]), float(config.get("delta", 1e-5)), *self.private.claim)
                if (over := budget.exceeded_by(ledger, [release])) is not None:
                    _, spent, then = over
                    raise BudgetSpent(
                        f"epsilon of node {self.node.name!r} must cover round {t}, got ε = {then:.4g} after it where "
                        f"{budget.epsilon:g} at δ = {budget.delta:g} is granted, and {spent:.4g} is spent over all "
                        "runs. Nothing was released."
                    )
            ledger.spend([release])

    def _sweep(self, keep: set[int], known: int) -> None:
        """Remove versions before the one the server knows, but those to keep. Later ones stay: a question may come
        after its time, when the server has taken a late answer for the state to go on from."""
        with writing(self.folder):
            for path in self.folder.glob(f"{self.client:06d}-*.bin"):
                version = int(path.stem.split("-")[1])
                if version < known and version not in keep:
                    path.unlink(missing_ok=True)


def read_rows_again(node: Node, told: Message) -> None:
    """The own rows, coded as everyone agreed before this was told."""
    source = sources.own_source(node.config, told.values["experiment"])
    source.client = int(told.values["client"])
    description = Description.from_dict(told.values["description"])
    node.at.source, node.at.own = source, source.federation(description.schema, node.name)


def _kept(folder: Path, kind: str) -> Message | None:
    """What was told at the start, if it is there and whole."""
    path = folder / f"{kind}.bin"
    try:
        return unpack(path.read_bytes(), kind) if path.is_file() else None
    except Refused:
        return None


def _batch(rows: tuple[Any, np.ndarray], client: int, dtype: Any) -> Batch:
    x, y = rows
    x = x.toarray() if scipy.sparse.issparse(x) else np.asarray(x)
    x = x if x.dtype == np.uint8 else x.astype(dtype)
    return Batch(jnp.asarray(x), jnp.asarray(y.astype(dtype)), jnp.ones(len(y), dtype), jnp.asarray(client, jnp.int32))


def _aside(own: Any, client: int, dtype: Any) -> Batch:
    """The rows that are held out; where there are none, a row of weight 0."""
    rows = own.test(0)
    if len(rows[1]):
        return _batch(rows, client, dtype)
    x, y = own.client(0)
    one = _batch((x[:1], y[:1]), client, dtype)
    return one._replace(weight=jnp.zeros_like(one.weight))


def _arrays(tree: Any) -> list[np.ndarray]:
    return [np.asarray(leaf) for leaf in jax.tree.leaves(tree)]


def _digest_of(path: Path) -> str | None:
    """The digest of a sealed file, from its first line; None where there is none."""
    if not path.is_file():
        return None
    with path.open("rb") as file:
        first = file.readline().split()
    return first[-1].decode() if len(first) == 3 else None


def identity(question: Message, *but: str) -> str:
    """What a question asks, whatever it adds about which states to keep, and about the sum the answer goes into."""
    values = {
        name: value for name, value in question.values.items() if name not in ("keep", "server", "sum", VERSION, *but)
    }
    text = hashlib.sha256(json.dumps(values, sort_keys=True).encode())
    for array in question.arrays:
        text.update(repr((array.shape, array.dtype.str)).encode() + array.tobytes())
    return text.hexdigest()
