"""The Flower engine: every client is a node of its own, somewhere else, with its rows and its state.

A round is a question to each node of the cohort and its answer (`core.wire`):

    server   step(t, broadcast, the version and digest of the node's state)   →  node
    node     loads that version, steps, writes version t+1, whole, to its disk
             answer(t, version t+1, its digest, upload)                        →  server, who checks it before use
    server   keep(t): these nodes now have version t+1; a checkpoint holds everyone's version and digest

An answer counts if it comes within `deadline` seconds; the round goes on once all have answered, or then with `quorum`
of them. Who is left out keeps what it had: its state, and at the server its last message, as in a round it was not
drawn for. Too few, and the round waits for them, up to `patience`. An upload of the wrong shape, type, round or
version, one that is not finite or longer than `largest` is refused and named, and the round goes on without it.

`late` says what becomes of answers after the deadline: "drop", or "use" in the next round that the node is not asked
in. `stale` says what becomes of a node that has lost the state the server knows it by: "refuse" leaves it out,
"restart" gives it the state of one that joins; so it is, whatever the rule, where states carry nothing from round to
round. Every decision is a line of the log, a number of the history, and an event: a line of the run's events.jsonl,
with who and why.

With `secure` uploads and telemetry stay with the nodes, and what comes is their sum under masks: `Sums`, which are
passed in with the link. Who drops out on the way is left out as one who is late. `largest` and finiteness are then
checked by the node, which refuses to send; the server cannot.

The transport is a `link`: Flower's grid, or, in tests, nodes of the same process. The engine knows neither.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.interpreters.partial_eval import dce_jaxpr

from fedpact.core.contract import Batch, Cohort, Stepped, Streamed
from fedpact.core.errors import ClientError, InvalidArgument, is_number, require, require_flags, require_one_of
from fedpact.core.settings import plain_fields
from fedpact.core.store import Store
from fedpact.core.wire import Enough, Message, Refused, checked, failed, usable
from fedpact.engines.flower_round import Round, after_time, nothing

log = logging.getLogger("fedpact")
STALE, LATE = ("refuse", "restart"), ("drop", "use")


class Link(Protocol):
    """How questions reach nodes. `ask` returns once all have answered, or by `deadline` with at least `enough`, or
    after `patience` with what there is; `late` returns what has come since for rounds that had gone on.
    """

    names: list[str]

    def tell(self, questions: Mapping[int, Message]) -> None:
        """To be delivered before each node's next question. A failure is then the answer to that one."""
        ...

    def anew(self) -> None:
        """Begin again: nodes forget what they were asked over this link, and what was told is not delivered."""
        ...

    def ask(self, questions: Mapping[int, Message], deadline: float, enough: Enough, patience: float) -> dict[int, Any]:
        """Client → its answer, a `Message`; or the `Refused` that says why there is none.

        It goes on without the others after `deadline` seconds if those that came are `enough`, else after `patience`.
        """
        ...

    def late(self) -> Sequence[tuple[int, Any]]:
        """Clients and their answers to steps that came after the question was given up, in the order they came."""
        ...


class Sum(Protocol):
    """One sum that is to come (`flower.masked`)."""

    @property
    def least(self) -> int:
        """How many must stay in it."""
        ...

    @property
    def refused(self) -> dict[int, str]:
        """Who is left out for an answer that is not right, and why."""
        ...

    @property
    def left(self) -> dict[int, str]:
        """Who had answered and is left out though nothing of its was refused, and why."""
        ...

    def ask(self, questions: Mapping[int, Message], deadline: float, enough: Enough, patience: float) -> dict[int, Any]:
        """The link's answers to these questions, which invite to the sum."""
        ...

    def add(self, i: int, message: Message) -> bool:
        """Take an answer; False if its numbers are not finite."""
        ...

    def total(self, enough: int = 0) -> tuple[list[np.ndarray], list[int]]:
        """The arrays' sums, and over whom: those added who stayed, at least `enough`."""
        ...


class Sums(Protocol):
    """How sums are made without their summands."""

    def start(self, purpose: str, t: int, clients: Sequence[int], leaves: Sequence[Any]) -> Sum:
        """A sum over these clients, of arrays like these."""
        ...

    def summed(self, hello: Any) -> list[bool]:
        """Of which arrays of a hello the sum is enough."""
        ...


@dataclass(frozen=True)
class FlowerEngine:
    """Clients are nodes of a federation; this is how long a round waits for them and what it takes from them.

    `deadline` is in seconds; `quorum` the fraction of those asked that a round needs; `patience` how long it waits for
    them beyond, before the run ends, resumable. `largest` bounds the 2-norm of an upload. `notes` asks nodes for their
    notes (gradients computed, inner steps), which stay with them otherwise.

    `secure` masks uploads and telemetry, so that the server sees sums. `threshold` is then the fraction of those asked
    who must stay in a sum, above a half; `bound` what a number of an upload may reach: the lattice that uploads are
    rounded to has steps of bound · clients / 2⁶¹ at most.
    """

    deadline: float = 300.0
    quorum: float = 1.0
    patience: float = 600.0
    late: str = "drop"
    stale: str = "refuse"
    largest: float = math.inf
    notes: bool = False
    secure: bool = False
    threshold: float = 2 / 3
    bound: float = 1e6
    compiled, eager, first_block = False, False, 1
    remote = True  # the rows are not here
    every_round = True  # a checkpoint after each: what nodes have released is not asked for again but in that one
    told = ("missing", "refused_uploads", "late", "late_dropped", "restarted", "rolled_back")
    #: What may change when a run is resumed.
    loose = ("deadline", "quorum", "patience", "late", "stale", "largest", "notes")
    _running: dict[str, Any] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        plain_fields(self)
        for name in ("deadline", "patience"):
            value = getattr(self, name)
            require(is_number(value) and value > 0, name, "a number of seconds above 0", value)
        hint = "A round waits for everyone until the deadline, and for the quorum until patience ends."
        at_least = f"at least the deadline, {self.deadline:g} s"
        require(self.patience >= self.deadline, "patience", at_least, self.patience, hint=hint)
        require(is_number(self.quorum) and 0 < self.quorum <= 1, "quorum", "a fraction in (0, 1]", self.quorum)
        ok = isinstance(self.largest, float | int) and not isinstance(self.largest, bool) and self.largest > 0
        require(ok, "largest", "above 0", self.largest)
        require_one_of("late", self.late, LATE)
        require_one_of("stale", self.stale, STALE)
        require_flags(self, "notes", "secure")
        ok = is_number(self.threshold) and 0.5 < self.threshold <= 1
        hint = "With half of them or fewer, two halves could be asked for different secrets."
        require(ok, "threshold", "a fraction above 1/2 and at most 1", self.threshold, hint=hint)
        ok = is_number(self.bound) and 2.0**-40 <= self.bound <= 2.0**40
        require(ok, "bound", "a number from 2⁻⁴⁰ to 2⁴⁰", self.bound)
        for name in ("threshold", "bound"):
            usual, value = getattr(FlowerEngine, name), getattr(self, name)
            hint = "It is of masked sums: leave it out, or ask for them."
            require(self.secure or value == usual, name, "left out without secure = true", value, hint=hint)
        hint = "An upload that comes late has no masks to be added under."
        require(not (self.secure and self.late == "use"), "late", '"drop" with secure = true', self.late, hint=hint)

    def over(self, link: Link, sums: Sums | None = None, begun: Mapping[int, Message] | None = None) -> FlowerEngine:
        """The engine with a link to its nodes, and with what makes its sums if it is secure.

        `begun` is what each node was told of the run: who has lost its disk is told again.
        """
        hint = "Masked sums are for data split by rows."
        require(sums is not None or not self.secure, "secure", "false here", self.secure, hint=hint)
        self._running.clear()
        self._running.update(link=link, sums=sums if self.secure else None, durable=[], out=set(), begun=[begun or {}])
        return self

    @property
    def link(self) -> Link:
        """The nodes."""
        if "link" not in self._running:
            raise InvalidArgument(
                'engine must be one of this machine here, got "flower". Start a federation: '
                "fedpact federation run FILE, or flwr run; docs/how-to-federate.md."
            )
        return self._running["link"]

    def name(self, client: int) -> str:
        """What a client is called in sentences."""
        return f"client {client} ({self.link.names[client]})"

    # What the loop asks of an engine

    def load(self, federations: Sequence[Any], dtype: Any) -> tuple[np.ndarray, Remote]:
        """Nothing is loaded: the rows are the nodes'."""
        if len(federations) > 1:
            raise InvalidArgument("engine must be 'local' for vectorised trials, got 'flower'. Run them one by one.")
        (federation,) = federations
        require(len(self.link.names) == federation.clients, "link", f"of {federation.clients} nodes", self.link.names)
        for remark in getattr(federation, "remarks", ()):
            log.warning("%s", remark)
        rows, pixels = int(federation.sizes[0]), federation.dataset.x.dtype == np.uint8
        x = jax.ShapeDtypeStruct((rows, federation.features), np.uint8 if pixels else np.dtype(dtype))
        line = jax.ShapeDtypeStruct((rows,), np.dtype(dtype))
        first = Batch(x, line, line, jax.ShapeDtypeStruct((), np.int32))
        return np.arange(federation.clients)[None], Remote(federation.clients, first)

    def clients_of(self, data: Remote) -> Any:
        """The client numbers by position."""
        return np.arange(data.clients)

    def one_client(self, data: Remote) -> Batch:
        """The shapes of the first client's rows, to learn a message's shape from."""
        return data.first

    def one_state(self, clients: Any) -> Any:
        """The shapes of a client's state, to learn a message's shape from."""
        return clients.make(0)

    def capacities(self, data: Any, largest: int, trials: bool) -> None:
        """Nodes step who take part and nobody else."""
        return

    def join(self, f: Callable[..., Any], shared: Any, data: Remote, where: tuple[Any, str]) -> tuple[Away, Any]:
        """Everyone is told where the run starts and sends its hello. All must be there."""
        state, hello = jax.eval_shape(f, shared, data.first)
        leaves, tree = jax.tree.flatten(hello)
        w0, root = shared
        sent = _arrays((w0, jax.random.key_data(root)))
        everyone = range(data.clients)
        questions = {i: Message("join", {"client": i, "clients": data.clients}, sent) for i in everyone}
        self._running["begun"] = [self._running["begun"][0], questions]
        sums = self._running["sums"]
        summed = [False] * len(leaves) if sums is None else sums.summed(hello)
        if sums is not None:
            _say_what_is_shown(hello, summed)
        pick = lambda flag: [leaf for leaf, one in zip(leaves, summed, strict=True) if one is flag]
        masked = self._sum("join", 0, everyone, pick(True)) if any(summed) else None
        answers = self._all(questions, "join", masked)
        total = [] if masked is None else self._summed(masked, answers)
        rows = []  # which may hold nothing
        for i in everyone:
            own = iter(checked(answers[i], pick(False), self.name(i)))
            first = iter(total if i == 0 else map(np.zeros_like, total))  # the sum is all that is asked of them
            rows.append(jax.tree.unflatten(tree, [next(first if one else own) for one in summed]))
        store = Away(lambda client: state, self._running)
        stack = lambda *parts: jnp.asarray(np.stack(parts))
        return store, jax.tree.map(stack, *rows) if leaves else rows[0]

    def step(
        self,
        f: Callable[..., Any],
        shared: Any,
        data: Remote,
        clients: Away,
        cohort: Cohort,
        combine: str,
        where: tuple[Any, str],
    ) -> Stepped:
        """f(shared, batch, state) at the nodes of the cohort."""
        msg, t = shared[0], int(shared[1])
        given = (_sent(msg), t, shared[2]), data.first, clients.make(0)
        _, upload, notes = jax.eval_shape(f, *given)
        ids = [int(i) for i in np.flatnonzero(np.asarray(cohort.mask))]
        asked = [i for i in ids if i not in self._running["out"]]
        round_ = Round(self, clients, upload, notes, t, self._sum("step", t, asked, upload), lambda: carries(f, *given))
        round_.late(set(asked))
        round_.ask(asked, _arrays(msg), len(ids))
        sound = round_.sound()
        total = round_.masked(sound, len(ids))
        came = sorted(sound or round_.came)
        decided = round_.decisions(ids)
        for what, whom in decided.items():
            self._decided(t + 1, what, whom)
        counts = {name: jnp.asarray(float(len(decided[name]))) for name in self.told}
        if not came:
            return _nobody(upload, notes, combine, counts)
        parts = [round_.came[i] for i in came]
        exact = Cohort((jnp.asarray(came, jnp.int32),), jnp.ones(len(came), bool))
        stack = lambda trees: jax.tree.map(lambda *a: jnp.asarray(np.stack(a)), *trees)
        add = lambda trees: jax.tree.map(lambda *a: jnp.asarray(sum(a[1:], a[0])), *trees)
        uploads = [part.upload for part in parts] if total is None else [total]
        gathered: Any = Streamed(jnp.asarray(len(came))) if combine == "sum" else exact
        return Stepped(
            {i: (round_.came[i].version, round_.came[i].digest) for i in came},
            add(uploads) if combine == "sum" else stack(uploads),
            stack([part.notes for part in parts]),
            jnp.asarray([i in sound for i in came]),
            exact,
            gathered,
            counts,
        )

    def keep(self, clients: Away, rows: Any, cohort: Cohort, t: Any) -> Away:
        """The versions with those of the cohort; a round that is not kept leaves them as they were."""
        if not bool(jnp.all(cohort.mask)):
            return clients
        new = Away(clients.make, self._running)
        new.versions = {**clients.versions, **{i: version for i, (version, _) in rows.items()}}
        new.digests = {**clients.digests, **{i: digest for i, (_, digest) in rows.items()}}
        return new

    def total(self, f: Callable[..., Any], shared: Any, data: Remote, clients: Away, where: tuple[Any, str]) -> Any:
        """The sum of f(shared, batch, state) over all clients: m times the mean over those who answer."""
        t = int(where[0])
        wanted = jax.eval_shape(f, _sent(shared), data.first, clients.make(0))
        leaves, tree = jax.tree.flatten(wanted)
        sent = _arrays(shared)
        everyone = [i for i in range(data.clients) if i not in self._running["out"]]
        masked = self._sum("measure", t, everyone, wanted)
        questions = {i: Message("measure", self._told_of(clients, i, t), sent) for i in everyone}
        enough = max(1 if masked is None else masked.least, math.ceil(self.quorum * len(everyone)))
        answers = (masked or self.link).ask(questions, self.deadline, enough, self.patience)
        total: list[np.ndarray] | None = None
        who: list[int] = []
        why = dict.fromkeys(set(range(data.clients)) - set(everyone), "its state was lost in an earlier round")
        endless: dict[int, list[np.ndarray]] = {}  # what is not finite is left out where others' is; alone, it counts
        for i in sorted(answers):
            try:
                message = usable(answers[i])
                _answers(message, questions[i], self.name(i))
                if masked is not None:
                    if masked.add(i, message):
                        who.append(i)
                    else:
                        endless[i] = nothing(leaves)
                    continue
                one = checked(message, leaves, self.name(i))
                if not all(np.isfinite(a).all() for a in one):
                    endless[i] = one
                    continue
            except InvalidArgument as refused:
                log.warning("round %d, %s, measure: %s", t, self.name(i), refused)
                why[i] = str(refused)
                if masked is not None:
                    masked.refused[i] = str(refused)
                continue
            total = one if total is None else [a + b for a, b in zip(total, one, strict=True)]
            who.append(i)
        for i in endless:
            log.warning("round %d, %s, measure: its numbers are not finite", t, self.name(i))
            why[i] = "its numbers are not finite"
        some = len(who) >= (1 if masked is None else masked.least)  # of fewer no masked sum is opened
        if endless and not some:
            total = [np.asarray(sum(a[1:], a[0])) for a in zip(*endless.values(), strict=True)]
            who = sorted({*who, *endless})
        elif masked is not None:
            total, who = masked.total()
            why |= masked.left | masked.refused
        count = len(who)
        if total is None:
            raise ClientError(f"round {t}, measure: nobody answered within {self.patience:g} s. Resume the run.")
        if count < data.clients:
            without = [i for i in range(data.clients) if i not in who]
            names = ", ".join(map(self.name, without))
            log.warning("round %d: telemetry is of %d of %d clients; without %s", t, count, data.clients, names)
            self._decided(t, "unmeasured", [(i, why.get(i, "no answer by the deadline")) for i in without])
        parts = total if count == data.clients else [np.asarray(a * (data.clients / count), a.dtype) for a in total]
        return {**jax.tree.unflatten(tree, [jnp.asarray(a) for a in parts]), "measured": jnp.asarray(float(count))}

    def test(self, f: Callable[..., Any], w: Any, data: Remote) -> None:
        """The server has no rows; the sums of those that nodes hold out come with the telemetry."""
        return

    # What is told of a run

    def _decided(self, row: int, what: str, clients: Sequence[tuple[int, str]]) -> None:
        """Events of the round that makes this row of the history: of whom, and why."""
        names = self.link.names
        events = [{"round": row, "client": i, "name": names[i], "what": what, "why": why} for i, why in clients]
        self._running.setdefault("events", []).extend(events)

    def events(self) -> list[dict[str, Any]]:
        """The decisions since this was asked last: round of the history, client, its name, what, and why."""
        return self._running.pop("events", [])

    def ended(self, rounds: int) -> None:
        """Look once for uploads that came after the last round: whatever the rule, they are dropped, and told of."""
        for i, answer in self.link.late():
            log.warning("after round %d, the last, %s: a late upload was dropped", rounds, self.name(i))
            self._decided(rounds, "after_end", [(i, after_time(answer, "the run had ended"))])

    # Questions

    def _sum(self, purpose: str, t: int, clients: Sequence[int], tree: Any) -> Sum | None:
        """A sum to come, in a secure run; of nobody there is none."""
        sums = self._running["sums"]
        return None if sums is None or not clients else sums.start(purpose, t, clients, jax.tree.leaves(tree))

    def _summed(self, masked: Sum, answers: Mapping[int, Message]) -> list[np.ndarray]:
        """Everyone's, added up."""
        for i, answer in answers.items():
            try:
                if not masked.add(i, answer):
                    raise Refused("its first message is not finite. Scale its rows, or take it out.")
            except InvalidArgument as refused:
                raise ClientError(f"join: {self.name(i)}: {refused}") from None
        return masked.total(len(answers))[0]

    def remind(self, clients: Sequence[int]) -> None:
        """With their next question tell these of the run again, and of where it started."""
        for told in self._running["begun"]:
            again = {i: told[i]._replace(values={**told[i].values, "again": True}) for i in clients if i in told}
            self.link.tell(again)

    def _told_of(self, clients: Away, client: int, t: int) -> dict[str, Any]:
        """What a node is told of its own state: the version to go on from, and those it must keep for a resume."""
        version = clients.versions.get(client, 0)
        kept = sorted({table.get(client, 0) for table in self._running["durable"]} | {version})
        return {
            "round": t,
            "client": client,
            "version": version,
            "digest": clients.digests.get(client, ""),
            "keep": kept,
        }

    def _all(self, questions: Mapping[int, Message], stage: str, masked: Sum | None = None) -> dict[int, Message]:
        """Everyone's answer, or the error that names who has none."""
        answers = (masked or self.link).ask(questions, self.patience, len(questions), self.patience)
        for i in questions:
            if i not in answers:
                raise ClientError(f"{stage}: {self.name(i)} did not answer within {self.patience:g} s. Is it running?")
            try:
                usable(answers[i])
            except Refused as refused:
                raise failed(f"{stage}: {self.name(i)}", refused) from None
        return answers


def _say_what_is_shown(hello: Any, summed: Sequence[bool]) -> None:
    """Of a secure run: which arrays of every node's first message the server sees as they are."""
    named = jax.tree_util.tree_leaves_with_path(hello)
    each = [jax.tree_util.keystr(path, simple=True, separator=".") for path, _ in named]
    shown = [name for name, one in zip(each, summed, strict=True) if not one]
    if shown:
        log.warning(
            "secure masks sums alone: the server is told each node's own %s in its first message, for the algorithm "
            "starts from more of it than the sum.",
            ", ".join(shown),
        )


def _answers(message: Message, question: Message, who: str) -> None:
    """Refuse telemetry of another client, round or state than the question is of."""
    asked, told = question.values, message.values
    if told.get("client") != asked["client"]:
        raise Refused(f"answer of {who} must be its own, got one of client {told.get('client')!r}.")
    if told.get("round") != asked["round"]:
        raise Refused(f"answer of {who} must be of round {asked['round']}, got one of round {told.get('round')!r}.")
    if told.get("version") != asked["version"]:
        raise Refused(f"answer of {who} must be of version {asked['version']}, got {told.get('version')!r}.")


def carries(f: Callable[..., Any], shared: Any, batch: Batch, state: Any) -> bool:
    """Whether anything that a step changes in a client's state enters an upload: else it is as `join` has made it."""
    program, count = jax.make_jaxpr(f)(shared, batch, state).jaxpr, len(jax.tree.leaves(state))
    came, left = program.invars[len(program.invars) - count :], program.outvars[:count]
    changed = [a is not b for a, b in zip(came, left, strict=True)]
    needed = [not one for one in changed] + [True] * (len(program.outvars) - count)
    _, used = dce_jaxpr(program, needed)
    return any(one and enters for one, enters in zip(changed, used[len(used) - count :], strict=True))


class Remote:
    """What the server has of the data: the number of clients, and shapes."""

    def __init__(self, clients: int, first: Batch) -> None:
        self.clients, self.first = clients, first


@jax.tree_util.register_pytree_node_class
class Away(Store):
    """Client → version and digest of a state that the client keeps. `make` tells a state's shapes."""

    def __init__(self, make: Callable[[int], Any], running: dict[str, Any]) -> None:
        super().__init__(make)
        self.running = running

    def save(self, folder: Path) -> None:
        """A checkpoint is being written: nodes must keep these versions, and those of the one before it."""
        self.running["durable"] = [*self.running["durable"][-1:], dict(self.versions)]

    def load(self, folder: Path, versions: Mapping[int, int], digests: Mapping[int, str] | None = None) -> Away:
        """The states that a checkpoint belongs to."""
        new = Away(self.make, self.running)
        new.versions, new.digests = dict(versions), dict(digests or {})
        self.running["durable"] = [dict(versions)]
        return new


def _nobody(upload: Any, notes: Any, combine: str, counts: dict[str, Any]) -> Stepped:
    """A round without anyone: the shapes of one client's answer, masked."""
    zero = lambda tree: jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), tree)
    one = Cohort((jnp.zeros(1, jnp.int32),), jnp.zeros(1, bool))
    stack = lambda tree: jax.tree.map(lambda a: a[None], zero(tree))
    gathered: Any = Streamed(jnp.asarray(0)) if combine == "sum" else one
    sent = zero(upload) if combine == "sum" else stack(upload)
    return Stepped({}, sent, stack(notes), jnp.ones(1, bool), one, gathered, counts)


def _sent(tree: Any) -> Any:
    """As nodes get it: a plain number is an array of its type there, which decides what it is multiplied to."""
    return jax.tree.map(lambda leaf: jnp.asarray(np.asarray(leaf)), tree)


def _arrays(tree: Any) -> list[np.ndarray]:
    return [np.asarray(leaf) for leaf in jax.tree.leaves(tree)]
