"""What a client does in a real federation: answer the server's questions, with rows and a state that it keeps.

    hello, vocabulary, moments, come to the same features and the same experiment as everyone (`agreement`)
    coded, prepare
    join(w0, root)              → hello
    step(t, version, broadcast) → load that version of the state, step, write version t+1, then answer
    measure(version, model)     → telemetry; with it the test's sums over the rows that are held out
    mask_shares, mask_words, mask_reveal    of a secure run: what stayed here goes into a sum (`masked`)

The rounds are those of `run_at_node`.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

from fedpact import __version__
from fedpact.core.errors import BudgetSpent, DataError, FedpactError, is_count, require
from fedpact.core.files import own_folder, remove_torn, write_atomic
from fedpact.core.wire import ANEW, VERSION, Forgotten, Message, Refused, same_version, unpack
from fedpact.data.schema import Column
from fedpact.flower import sources
from fedpact.flower.joined import Joined
from fedpact.flower.masked import KeysLost, Rules, Summands, rules_of
from fedpact.flower.resident import BESIDE, ITS
from fedpact.flower.run_at_node import RunAtNode, StateLost, identity, read_rows_again
from fedpact.flower.signed import PUBLIC, Signer
from fedpact.flower.vertical import PartyAtNode, coded
from fedpact.flower.words import words_of

log = logging.getLogger("fedpact")
KEY = "node.key"
#: How many runs a node has in memory at most; the others are on its disk.
SESSIONS = 8
#: What makes something new before a run, a key or blinded records: asked again, the first answer is given again.
ONCE = ("hello", "align", "coded")
#: What an error answer calls its reason, where the server acts on it.
WHY: dict[type[Exception], str] = {StateLost: "state", KeysLost: "keys", BudgetSpent: "budget", Forgotten: ANEW}


def _told(error: FedpactError) -> str:
    """The sentence for the server. One about rows does not say what was found in them: that stays in the log."""
    sentence = str(error)
    if not isinstance(error, DataError):
        return sentence
    return f"{sentence.partition(', got')[0]}; what was found is in the node's own log."


class Session:
    """What a node has of one server's run: several may be under way."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.source: sources.Source | None = None
        self.own: Any = None  # a Federation of one client, with its real rows; or a party's columns
        self.run: Any = None  # RunAtNode, or PartyAtNode of data split by features
        self.party: dict[str, Any] | None = None
        self.summands = Summands()  # of masked sums under way
        self.rules: Rules | None = None  # of masked sums before the run
        self.once: dict[tuple[str, str], bytes] = {}  # answers to questions of ONCE


class Node:
    """One client: its configuration, its folder, and the runs it takes part in."""

    def __init__(self, config: Mapping[str, Any], folder: Path) -> None:
        self.config, self.folder = dict(config), Path(folder)
        own_folder(self.folder, ITS, BESIDE)
        for place in (self.folder, self.folder / sources.KEPT):
            remove_torn(place)
        self.key = self._own_key()
        self.sessions: dict[str, Session] = {}
        self.at = Session("")  # whose question is being answered

    def _own_key(self) -> bytes:
        """A secret of the node's own: marks of its data are keyed by it."""
        path = self.folder / KEY
        if not path.is_file():
            write_atomic(path, secrets.token_bytes(32), mode=0o600)
        return path.read_bytes()

    @property
    def name(self) -> str:
        """What the node is called: as its configuration says."""
        given = self.config.get("name", self.config.get("client"))
        return str(given) if given is not None else Path(str(self.config.get("csv", self.folder))).stem

    @cached_property
    def signer(self) -> Signer:
        """What its answers are signed by."""
        return Signer(self.key)

    def signed(self, content: bytes) -> bytes:
        """The answer as it leaves the node."""
        return self.signer.sign(content, self.answer(content))

    def answer(self, content: bytes) -> bytes:
        """The answer to a question, as bytes; a failure is an answer too, a sentence."""
        try:
            message = unpack(content)
            # of every question: a server may be resumed, or a node go on, with another version than it began with
            same_version(message.values.get(VERSION, __version__), __version__, self.name)
            self.at = self._session(str(message.values.get("server", "")))
            handler = getattr(self, f"on_{message.kind}", None)
            if handler is None:
                raise Refused(f"question must be one that a node answers, got {message.kind!r}.")
            return self._once(handler, message) if message.kind in ONCE else handler(message)
        except FedpactError as error:
            why = next((word for kind, word in WHY.items() if isinstance(error, kind)), "refused")
            log.warning("%s", error)
            return Message("error", {"why": why, "sentence": _told(error)}).pack()
        except Exception as error:  # a defect, of fedpact's or of the user's model
            log.exception("a question could not be answered")
            sentence = f"{type(error).__name__}; the log at node {self.name!r} has the rest."
            return Message("error", {"why": "failed", "sentence": sentence}).pack()

    def _once(self, handler: Callable[[Message], bytes], message: Message) -> bytes:
        """The answer, or the one that was given to the same question before."""
        asked = (message.kind, identity(message))
        if asked not in self.at.once:
            self.at.once[asked] = handler(message)
        return self.at.once[asked]

    def _session(self, name: str) -> Session:
        found = self.sessions.pop(name, None) or Session(name)
        self.sessions[name] = found  # the newest last
        while len(self.sessions) > SESSIONS:
            del self.sessions[next(iter(self.sessions))]
        return found

    @property
    def own(self) -> Any:
        """The rows, as this session has agreed on them."""
        return self.at.own

    # Before the run

    def on_several(self, message: Message) -> bytes:
        """Questions in a row: the answer to the last, or the first failure."""
        answer = b""
        for content in message.arrays:
            answer = self.answer(content.tobytes())
            if unpack(answer).kind == "error":
                break
        return answer

    def on_forget(self, message: Message) -> bytes:
        """Drop a session that another takes the place of, and its rows."""
        self.sessions.pop(str(message.values.get("session", "")), None)
        return Message("forget", {}).pack()

    def on_hello(self, message: Message) -> bytes:
        """Who it is; and, read from its rows, what everyone's features need of them."""
        client = self.config.get("client")
        whose, hint = (
            f"client of node {self.name!r}'s configuration",
            "Number the nodes, or leave it out at all of them.",
        )
        ok = client is None or is_count(client)
        require(ok, whose, "a whole number from 0, or left out", client, hint=hint)
        told: dict[str, Any] = {"name": self.name, "client": client, VERSION: __version__, PUBLIC: self.signer.public}
        if "experiment" in message.values:
            self.at.source = sources.own_source(self.config, message.values["experiment"])
            self.at.rules = rules_of(message.values["experiment"])
            survey = self.at.source.survey()
            told["survey"] = dict(survey if self.at.rules is None else survey.without_words())
        return Message("hello", told).pack()

    def on_vocabulary(self, message: Message) -> bytes:
        """Of a secure run: which categories and classes there are, for a masked sum."""
        client = self._source().client = int(message.values["client"])
        if self.at.rules is None:
            raise Refused("question for a vocabulary must be of a secure run, got one of another.")
        arrays = words_of(self._source().survey(), message.values)
        return Message("vocabulary", self.at.summands.put(self.at.rules, "vocabulary", message, client, arrays)).pack()

    def on_moments(self, message: Message) -> bytes:
        """Sums of the columns over the training rows."""
        client = self._source().client = int(message.values["client"])
        columns = [Column(**{**c, "categories": tuple(c["categories"])}) for c in message.values["columns"]]
        mean = message.arrays[0] if message.arrays else None
        sums = self._source().moments(columns, mean)
        if self.at.rules is not None:
            return Message("moments", self.at.summands.put(self.at.rules, "moments", message, client, sums)).pack()
        return Message("moments", {}, sums).pack()

    def _source(self) -> sources.Source:
        if self.at.source is None:
            raise Forgotten("question must come after a hello, got one before it. The node was started again.")
        return self.at.source

    def on_coded(self, message: Message) -> bytes:
        """Code and scale the rows as agreed, and tell what of them everyone must know."""
        if "party" in message.values:
            return coded(self, message)
        from fedpact.data.schema import Schema

        source = self._source()
        source.client = int(message.values["client"])
        own = source.federation(Schema.from_dict(message.values["schema"]), self.name)
        self.at.own = own
        size, blank = int(own.sizes[0]), bool(own.blank)
        return Message("coded", {"rows": size, "blank": blank, "mark": sources.mark_of(own, self.key)}).pack()

    def on_prepare(self, message: Message) -> bytes:
        """The whole experiment: make it, check it with the own rows, and be ready for its rounds.

        Told `again`, in a round, it goes on from what the others have: a node that lost its disk agrees on nothing.
        """
        if message.values.get("again"):
            if self.at.run is not None:
                return Message("prepare", {}).pack()
            read_rows_again(self, message)
        if self.at.own is None:
            raise Forgotten(
                "question must come after the rows were coded, got one before it. The node was started again."
            )
        run = (PartyAtNode if "layout" in message.values["description"] else RunAtNode)(self, message)
        if run.experiment.digest() != message.values["digest"]:
            raise Refused(
                f"experiment made by node {self.name!r} must be the server's, got another. Install the same version of "
                "fedpact everywhere."
            )
        run.keep(self.at.name)
        self.at.run = run
        self.at.once.clear()
        return Message("prepare", {}).pack()

    # Rounds

    def _run(self) -> Any:
        if self.at.run is None:
            self.at.run = RunAtNode.again(self)
        return self.at.run

    def on_join(self, message: Message) -> bytes:
        """Where the run starts; the hello."""
        return self._run().join(message)

    def on_step(self, message: Message) -> bytes:
        """A round."""
        return self._run().step(message)

    def on_measure(self, message: Message) -> bytes:
        """Telemetry at the server's model."""
        return self._run().measure(message)

    def on_mask_shares(self, message: Message) -> bytes:
        """A masked sum goes on: shares of this node's secrets."""
        return self.at.summands.answer(message)

    def on_mask_words(self, message: Message) -> bytes:
        """Its vector, under masks."""
        return self.at.summands.answer(message)

    def on_mask_reveal(self, message: Message) -> bytes:
        """Shares that open the sum."""
        return self.at.summands.answer(message)

    # Data split by features

    def on_align(self, message: Message) -> bytes:
        """A step of finding the records that all parties have."""
        source = self._source()
        if not isinstance(source, Joined):
            raise Refused(f"node {self.name!r} must have a CSV file with ids to be aligned, got another source.")
        return source.align(self.name, message)

    def on_partial(self, message: Message) -> bytes:
        """Partial sums."""
        return self._run().partial(message)

    def on_close(self, message: Message) -> bytes:
        """The closer's part of an exchange."""
        return self._run().close(message)

    def on_block(self, message: Message) -> bytes:
        """The own block of the gradient."""
        return self._run().block(message)
