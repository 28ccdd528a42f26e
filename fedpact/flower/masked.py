"""Masked sums over a link: nodes keep their vectors, and all that the server learns is the sum (`secure.masks`).

    question of the server                          answer of the node                        step of the protocol
    step, measure, join, …: an invitation        →  two public keys; its vector stays          1 advertise
    mask_shares, with everyone's keys            →  shares of its secrets, sealed to others    2 share
    mask_words, with what was sealed to it       →  its vector under masks                     3 mask
    mask_reveal, with who stayed and who did not →  shares of what is left to take off         4 reveal

With the last answer go keys for the node's next sum. Where the server has everyone's, they are in the invitation, and
its answer is step 2: three exchanges a sum. A node that has lost its keys says so, and everyone is asked for new ones.

Who does not answer, or not rightly, is named in the log and left out; after `mask_words` it is in the sum whether it
answers or not. Terms are made by both sides from what they know (run, purpose, round, settings) and the sum's nonce;
keys serve once. Secrets are in memory alone: a node that starts again has dropped out of the sum under way. Where too
few stay without it, all who were in the sum are asked for another one, of the same vectors.

Sums of the same vectors over different clients would differ by somebody's vector. A vector that is asked for again, in
such a case or by a run that was resumed, is one of these: a node writes down over whom it gave shares to open it, gives
them over nobody else, and tells the server, which takes the same clients again, all of them. One node's word is enough:
those who work with the server may have the other shares.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fedpact.core.errors import ClientError, InvalidArgument, StartedAgain, require
from fedpact.core.files import write_atomic
from fedpact.core.wire import ANEW, Enough, Forgotten, Message, Refused, usable
from fedpact.flower.coding import CODINGS, Digits, Fixed, check_summable, flat, only_summed, size_of, unflat
from fedpact.secure import Client, Server, Terms, Total, WrongShare, primitives
from fedpact.secure.messages import Inbox, Keys, Masked, Request, Reveal, Roster, Shares

log = logging.getLogger("fedpact")
#: A sum of one is that one's vector.
LEAST = 2
#: Sums that a node remembers to have opened, for each purpose: a resumed run goes back by two checkpoints at most.
REMEMBERED = 4
#: Sums before a run: everyone must stay, and who was started again is asked anew with everyone.
BEFORE = ("vocabulary", "moments", "join")
#: How often a sum is begun where too few stay in it because nodes were started again.
TRIES = 5
HINTS = {
    "step": "Raise the engine's bound.",
    "moments": "Scale the column, or drop it.",
}


class KeysLost(Refused):
    """A node was invited by keys that it has not: it was started again."""


@dataclass(frozen=True)
class Rules:
    """What both sides know of all sums of a run: which run, the bound of uploads, what fraction must stay."""

    run: str
    bound: float = 1.0
    threshold: float = 1.0

    def coding(self, purpose: str) -> Fixed | Digits:
        """What numbers become."""
        return Fixed(self.bound) if purpose == "step" else CODINGS[purpose]

    def terms(self, purpose: str, t: int, told: Mapping[str, Any], size: int) -> Terms:
        """The terms of one sum of vectors of this size; `told` are its nonce and whom it invites."""
        try:
            nonce, clients = bytes.fromhex(told["nonce"]), tuple(map(int, told["clients"]))
        except (KeyError, TypeError, ValueError):
            raise Refused("invitation to a sum must have a nonce and clients, got another.") from None
        require(len(nonce) == 16, "nonce of a sum", "16 bytes", len(nonce))
        session = primitives.digest(b"fedpact federation", self.run.encode(), purpose.encode(), nonce)
        n, coding = len(clients), self.coding(purpose)
        stay = max(math.ceil(self.threshold * n - 1e-9), n // 2 + 1)
        return Terms(session, t, clients, size * coding.words, coding.lattice(max(n, 1)), stay)


def rules_of(values: Mapping[str, Any]) -> Rules | None:
    """Those of the agreement before a run, in which everyone must stay; None where nothing is to be masked."""
    run = values.get("run")
    engine = run.get("engine") if isinstance(run, Mapping) else None
    if not (isinstance(engine, Mapping) and engine.get("secure") is True):
        return None
    return Rules(hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest())


def _hex(table: Mapping[int, bytes]) -> dict[str, str]:
    return {str(i): content.hex() for i, content in table.items()}


def _unhex(values: Mapping[str, Any], name: str) -> dict[int, bytes]:
    try:
        return {int(i): bytes.fromhex(content) for i, content in values[name].items()}
    except (KeyError, TypeError, ValueError, AttributeError):
        raise Refused(f"{name} of a masked sum must be bytes by client, got another.") from None


# The server


class Sums:
    """The server's side: starts sums over the nodes of a link. `init` is how the algorithm starts from hellos."""

    def __init__(
        self, link: Any, rules: Rules, deadline: float, patience: float, init: Callable[[Any], Any] | None = None
    ) -> None:
        self.link, self.rules, self.deadline, self.patience, self.init = link, rules, deadline, patience, init
        self.ahead: dict[int, tuple[bytes, ...]] = {}  # keys for a client's next sum
        self._probe = os.urandom(32)
        self._begun: dict[str, int] = {}  # sums so far, by their purpose

    def start(self, purpose: str, t: int, clients: Sequence[int], leaves: Sequence[Any]) -> Sum:
        """A sum of arrays like these over these clients, or those of them who stay."""
        if len(clients) < LEAST:
            raise ClientError(
                f"round {t}, {purpose}: clients of a masked sum must be at least {LEAST}, got {len(clients)}: a sum of "
                "one is its upload. Draw more clients a round, or start the missing nodes."
            )
        check_summable(leaves, purpose)
        self._begun[purpose] = self._begun.get(purpose, 0) + 1
        return Sum(self, purpose, t, tuple(sorted(clients)), leaves, self._begun[purpose] <= 1 + REMEMBERED)

    def summed(self, hello: Any) -> list[bool]:
        """Which arrays of a hello are asked for as sums."""
        return [] if self.init is None else only_summed(self.init, hello)

    def keys(self, i: int, values: Mapping[str, Any], taken: Sequence[bytes]) -> tuple[bytes, ...]:
        """A client's keys, if they are two, its own, and would stop nobody."""
        found = _unhex(values, "keys")
        require(sorted(found) == [0, 1], "keys of a masked sum", "two", len(found))
        require(found[0] != found[1], "keys of a masked sum", "distinct", "one of them twice")
        for key in found.values():
            require(len(key) == primitives.KEY_BYTES, "keys of a masked sum", "of 32 bytes", len(key))
            require(key not in taken, "keys of a masked sum", "its own", "another client's")
            primitives.agree(self._probe, key, b"seal", b"", i)  # refuses points of small order
        return found[0], found[1]


class Sum:
    """One sum: `ask` invites with a question, `add` takes each answer to it, `total` does the rest.

    `least` is how many must stay; `refused` says what clients were left out for whose answers were not right, `left`
    why others were that had answered the invitation. `early`: it is among the first sums since the server's start,
    which are all that a run before that may have opened. Of later ones, at their first try, nobody's word that they
    were opened is taken: who always says so would decide who else counts.
    """

    def __init__(
        self, sums: Sums, purpose: str, t: int, clients: tuple[int, ...], leaves: Sequence[Any], early: bool
    ) -> None:
        self._sums, self.purpose, self.t, self.clients, self.leaves = sums, purpose, t, clients, leaves
        self._believes = early
        self.refused: dict[int, str] = {}
        self.left: dict[int, str] = {}
        self._before: dict[tuple[int, ...], set[int]] = {}  # over whom these were to be opened: who knows of it
        self._questions: dict[int, Message] = {}
        self._begin(all(i in sums.ahead for i in clients))
        self.least = self.terms.threshold

    def _begin(self, ahead: bool) -> None:
        """The terms; `ahead`: with everyone's keys, as they were sent with the sum before."""
        told: dict[str, Any] = {"nonce": os.urandom(16).hex(), "clients": list(self.clients)}
        self.terms = self._sums.rules.terms(self.purpose, self.t, told, size_of(self.leaves))
        self._server, self._ahead = Server(self.terms), ahead
        self._added: dict[int, Keys | Shares] = {}
        if ahead:
            for i in self.clients:
                self._server.add(Keys(self.terms.session, self.terms.round, i, *self._sums.ahead.pop(i)))
            told |= _told(self._server.roster())
        self._told = told

    def ask(self, questions: Mapping[int, Message], deadline: float, enough: Enough, patience: float) -> dict[int, Any]:
        """The link's answers to these questions, which invite to the sum."""
        invite = lambda: {i: q._replace(values={**q.values, "sum": self._told}) for i, q in questions.items()}
        answers = self._sums.link.ask(invite(), deadline, enough, patience)
        first = not self._questions
        if first:
            self._waits = (deadline, enough, patience)
        self._questions |= questions
        why = [a.values.get("why") for a in answers.values() if isinstance(a, Message) and a.kind == "error"]
        lost = {"keys", "state"} if self.purpose in BEFORE else {"keys", "state", ANEW}
        if self._ahead and first and lost & set(why):
            log.info("round %d, %s: a node was started again; everyone is asked for new keys", self.t, self.purpose)
            self._begin(ahead=False)
            answers = self._sums.link.ask(invite(), deadline, enough, patience)
        return answers

    def add(self, i: int, message: Message) -> bool:
        """Take what a node's answer has for the sum. False: its vector is not finite, and stays out."""
        values = message.values
        if values.get("finite") is False:
            return False
        if self._ahead:
            self._added[i] = self._shares(i, message)
        else:
            taken = [key for found in self._added.values() if isinstance(found, Keys) for key in found[3:]]
            self._added[i] = Keys(self.terms.session, self.terms.round, i, *self._sums.keys(i, values, taken))
        before = values.get("summed") if self._believes else None
        known = range(len(self._sums.link.names))
        if isinstance(before, list) and i in before and all(isinstance(j, int) and j in known for j in before):
            self._before.setdefault(tuple(sorted(set(before))), set()).add(i)
        return True

    def total(self, enough: int = 0) -> tuple[list[np.ndarray], list[int]]:
        """The sum and who is in it. At least `enough` must stay until their words are there, and always `least`."""
        for tried in range(1, TRIES):
            try:
                return self._tried(enough)
            except StartedAgain:
                if self.purpose in BEFORE:
                    raise
            what = "a node was started again, and too few stay without it; all are asked again"
            log.warning("round %d, %s: %s (%d of %d)", self.t, self.purpose, what, tried + 1, TRIES)
            self._again()
        try:
            return self._tried(enough)
        except StartedAgain as lost:
            raise ClientError(str(lost)) from None

    def _again(self) -> None:
        """Invite those who had answered to another sum. What they tell beside is what they have told."""
        deadline, enough, patience = self._waits
        self._believes = True
        questions = {i: self._questions[i] for i in self._added}
        self._begin(ahead=False)
        enough = enough if callable(enough) else min(enough, len(questions))
        answers = self.ask(questions, deadline, enough, patience)
        for i in questions:
            if i not in answers:
                self._log(i, "", "no answer by the deadline; left out")
                self.left[i] = "the sum was opened without it: no answer when all were asked again"
                continue
            try:
                self.add(i, usable(answers[i]))
                self.refused.pop(i, None)
            except InvalidArgument as refused:
                self._log(i, "", f"refused: {refused}")
                self.refused[i] = str(refused)

    def _tried(self, enough: int) -> tuple[list[np.ndarray], list[int]]:
        server, before = self._server, self._opened_before()
        enough = max(enough, self.least, len(before))
        self._take({i: self._added[i] for i in before or sorted(self._added)}, lambda _, one: one, enough, "")
        if not self._ahead:
            roster = server.roster()
            keys = _told(roster)
            self._asked("mask_shares", {k.sender: keys for k in roster.keys}, self._shares, enough)
        boxes = {i: {"sealed": _hex(box.sealed)} for i, box in server.inboxes().items()}
        self._asked("mask_words", boxes, self._masked, enough)
        request = server.request()
        self._before[request.survivors] = set(request.survivors)
        who = {"survivors": list(request.survivors), "dropped": list(request.dropped)}
        self._asked("mask_reveal", dict.fromkeys(request.survivors, who), self._reveal, self.least)
        total = self._opened(request)
        return unflat(self._sums.rules.coding(self.purpose).gathered(total), self.leaves), list(total.clients)

    def _opened_before(self) -> tuple[int, ...]:
        """Over whom these vectors may have been opened before: all of them must be there again. Else nobody."""
        names = lambda some: ", ".join(self._sums.link.names[i] for i in sorted(some))
        for who, said in sorted(self._before.items(), key=lambda one: -len(one[1])):
            if len(who) < self.least:  # no sum has so few
                continue
            if missing := set(who) - set(self._added):
                raise ClientError(
                    f"round {self.t}, {self.purpose}: sum must be over clients {list(who)}, over whom it may have been "
                    f"opened before (known to {names(said)}), got one without {names(missing)}. "
                    "Start those that are missing, and resume."
                )
            for i in sorted(set(self._added) - set(who)):
                self.left[i] = "the sum was opened without it, before it was asked for again"
                self._log(i, "", f"left out: {self.left[i]}.")
            return who
        return ()

    def _log(self, i: int, kind: str, text: str) -> None:
        where = ", ".join(filter(None, (self.purpose, kind)))
        log.warning("round %d, client %d (%s), %s: %s", self.t, i, self._sums.link.names[i], where, text)

    def _asked(
        self, kind: str, told: Mapping[int, Mapping[str, Any]], read: Callable[[int, Message], Any], enough: int
    ) -> None:
        """One exchange of the protocol."""
        sums, session = self._sums, {"session": self.terms.session.hex()}
        questions = {i: Message(kind, {**session, **values}) for i, values in told.items()}
        answers = sums.link.ask(questions, sums.deadline, min(enough, len(questions)), sums.patience)
        for i in questions:
            if i not in answers and kind == "mask_reveal":
                self._log(i, kind, "no answer by the deadline; it is in the sum")
            elif i not in answers:
                self._log(i, kind, "no answer by the deadline; left out")
                self.left[i] = f"the sum was opened without it: no answer to {kind} by the deadline"
        came = {i: answers[i] for i in questions if i in answers}
        self._take(came, lambda i, answer: read(i, usable(answer)), enough, kind)

    def _take(self, answers: Mapping[int, Any], read: Callable[[int, Any], Any], enough: int, kind: str) -> None:
        """Give the protocol what is right of the answers, and go on if they are enough."""
        came, failure = 0, ClientError
        for i, one in answers.items():
            try:
                self._server.add(read(i, one))
                came += 1
            except InvalidArgument as refused:
                self._log(i, kind, f"refused: {refused}")
                self.refused[i] = str(refused)
                if isinstance(refused, Forgotten):
                    failure = StartedAgain
                    self._sums.ahead.pop(i, None)  # it has lost those of an earlier sum too
        if came < enough:
            told = "".join(f" {self._sums.link.names[i]}: {why}" for i, why in self.refused.items())
            raise failure(
                f"round {self.t}, {self.purpose}: at least {enough} of {len(self.clients)} clients must stay in a "
                f"masked sum, got {came} at {kind or self.purpose}.{told} Start the missing nodes and resume."
            )

    def _shares(self, i: int, message: Message) -> Shares:
        commitment = _unhex(message.values, "commitment").get(i, b"")
        return Shares(self.terms.session, self.terms.round, i, commitment, _unhex(message.values, "sealed"))

    def _masked(self, i: int, message: Message) -> Masked:
        words = message.arrays[0] if len(message.arrays) == 1 else None
        return Masked(self.terms.session, self.terms.round, i, words)

    def _reveal(self, i: int, message: Message) -> Reveal:
        ahead = self._sums.ahead
        ahead.pop(i, None)
        ahead[i] = self._sums.keys(i, message.values, [key for pair in ahead.values() for key in pair])
        seeds, masking = _unhex(message.values, "seeds"), _unhex(message.values, "masking")
        return Reveal(self.terms.session, self.terms.round, i, seeds, masking)

    def _opened(self, request: Request) -> Total:
        """The sum; where shares of a secret do not fit, without those that one client holds, among which the wrong one
        then is. Its owner may have given it out so."""
        try:
            return self._server.total()
        except WrongShare as error:
            refused, owner = error, self._sums.link.names[error.owner]
        except InvalidArgument as error:  # of the sum itself
            raise ClientError(f"round {self.t}, {self.purpose}: masked sum could not be opened: {error}") from None
        for i in request.survivors:
            if (kept := self._server.forget(i)) is None:
                continue
            try:
                total = self._server.total()
            except InvalidArgument:
                self._server.add(kept)
                continue
            self._log(i, "mask_reveal", f"the share of {owner} that it holds is wrong; it was not used: {refused}")
            return total
        raise ClientError(
            f"round {self.t}, {self.purpose}: masked sum could not be opened: {refused} Several clients hold wrong "
            f"shares of {owner}'s, or it is one of too few: look at {owner}, start it again, and resume."
        )


def _told(roster: Roster) -> dict[str, Any]:
    return {name: _hex({k.sender: getattr(k, name) for k in roster.keys}) for name in ("sealing", "masking")}


# The node


class Summands:
    """A node's side: the vector it has put up for the sum under way, with the secrets of its masks. In memory alone."""

    def __init__(self) -> None:
        self._now: _Summand | None = None
        self._drawn: list[bytes] = []  # private keys for the next sum

    def put(
        self,
        rules: Rules,
        purpose: str,
        message: Message,
        number: int,
        arrays: Sequence[np.ndarray],
        book: Book | None = None,
        largest: float = math.inf,
    ) -> dict[str, Any]:
        """Take part, by a question that invites to a sum: what to answer. Asked again, the answer is the same.

        What the server cannot see is refused here: numbers beyond the bound, a norm above `largest`. How large is not
        told. Of a vector that is not finite, that is told.
        """
        if not isinstance(told := message.values.get("sum"), Mapping):
            raise Refused(f"question for {purpose} must invite to a masked sum in a secure run, got one that does not.")
        check_summable(arrays, purpose)
        vector, coding = flat(arrays), rules.coding(purpose)
        if not np.isfinite(vector).all():
            return {"finite": False}
        if np.abs(vector).max(initial=0.0) > coding.bound:
            hint = HINTS.get(purpose, "The run has left all bounds: lower its step sizes.")
            raise Refused(f"numbers of {purpose} must be at most {coding.bound:g} in size, got a larger one. {hint}")
        if largest < math.inf and float(np.linalg.norm(vector)) > largest:
            raise Refused(f"upload must be of norm at most {largest:g}, got a longer one; it was not sent.")
        terms = rules.terms(purpose, int(message.values.get("round", 0)), told, vector.size)
        if self._now is None or self._now.client.terms != terms:
            drawn = self._own(told, number) if "sealing" in told else []
            self._now = _Summand(terms, number, coding.spread(vector), book, drawn)
        before = None if book is None else book.found()
        answer = self._now.first(told)
        return {"finite": True, **answer, **({} if before is None else {"summed": before})}

    def _own(self, told: Mapping[str, Any], number: int) -> list[bytes]:
        """The private keys to those in the invitation; they serve once."""
        drawn, self._drawn = self._drawn, []
        public = [_unhex(told, name).get(number) for name in ("sealing", "masking")]
        if not drawn or [primitives.public_of(key) for key in drawn] != public:
            raise KeysLost(
                "keys in an invitation must be those this node sent ahead, got others. It was started again."
            )
        return drawn

    def answer(self, message: Message) -> bytes:
        """Steps 2 to 4, each to the same question with the same answer."""
        now, session = self._now, message.values.get("session")
        if now is None or session != now.client.terms.session.hex():
            raise Forgotten("question must be of the masked sum under way, got one of another. Was the node restarted?")
        question = message.pack()
        if question != now.last[0]:
            now.last = (question, self._answered(now, message).pack())
        return now.last[1]

    def _answered(self, now: _Summand, message: Message) -> Message:
        if message.kind == "mask_shares":
            return Message(message.kind, now.share(message.values))
        if message.kind == "mask_words":
            return Message(message.kind, {}, [now.mask(message.values)])
        made = now.reveal(message.values)
        self._drawn = [os.urandom(32), os.urandom(32)]
        keys = {k: primitives.public_of(key) for k, key in enumerate(self._drawn)}
        return Message(message.kind, {**made, "keys": _hex(keys)})


class _Summand:
    """A vector and its masks."""

    def __init__(self, terms: Terms, number: int, vector: np.ndarray, book: Book | None, drawn: list[bytes]) -> None:
        source = lambda size: drawn.pop(0) if drawn else os.urandom(size)
        self.client, self.vector, self.book = Client(terms, number, source), vector, book
        self.keys = self.client.advertise()
        self.last = (b"", b"")  # a question and its answer
        self._first: dict[str, Any] = {}

    def first(self, told: Mapping[str, Any]) -> dict[str, Any]:
        """The answer to the invitation: keys, or shares if everyone's keys are in it."""
        if not self._first:
            keys = {0: self.keys.sealing, 1: self.keys.masking}
            self._first = self.share(told) if "sealing" in told else {"keys": _hex(keys)}
        return self._first

    def share(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Step 2."""
        terms, (sealing, masking) = self.client.terms, (_unhex(values, name) for name in ("sealing", "masking"))
        require(sealing.keys() == masking.keys(), "keys of a masked sum", "two a client", "others")
        keys = (Keys(terms.session, terms.round, i, sealing[i], masking[i]) for i in sorted(sealing))
        made = self.client.share(Roster(terms.session, terms.round, tuple(keys)))
        return {"commitment": _hex({made.sender: made.commitment}), "sealed": _hex(made.sealed)}

    def mask(self, values: Mapping[str, Any]) -> np.ndarray:
        """Step 3."""
        terms, number = self.client.terms, self.client.number
        return self.client.mask(Inbox(terms.session, terms.round, number, _unhex(values, "sealed")), self.vector).words

    def reveal(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Step 4; over whom is written down before it is sent."""
        terms = self.client.terms
        try:
            survivors, dropped = (tuple(map(int, values[name])) for name in ("survivors", "dropped"))
        except (KeyError, TypeError, ValueError):
            raise Refused("request of a masked sum must say who stayed and who did not, got another.") from None
        if self.book is not None:
            self.book.check(survivors)
        made = self.client.reveal(Request(terms.session, terms.round, survivors, dropped))
        if self.book is not None:
            self.book.write(survivors)
        return {"seeds": _hex(made.seeds), "masking": _hex(made.keys)}


class Book:
    """A node's memory, on disk, of the clients over which it let a vector be opened. `mark` names the vector."""

    def __init__(self, folder: Path, purpose: str, mark: str) -> None:
        self.path, self.mark = folder / f"opened-{purpose}.json", mark

    def _read(self) -> dict[str, list[int]]:
        return json.loads(self.path.read_text()) if self.path.is_file() else {}

    def found(self) -> list[int] | None:
        """Over whom this vector was opened, if it was."""
        return self._read().get(self.mark)

    def check(self, survivors: Sequence[int]) -> None:
        """Refuse to open a vector over other clients than before."""
        before = self.found()
        if before is not None and sorted(survivors) != before:
            raise Refused(
                f"sum must be over clients {before}, over whom this vector was opened before, got one over "
                f"{sorted(survivors)}. Start those that are missing."
            )

    def write(self, survivors: Sequence[int]) -> None:
        """Before the shares leave. The first is never forgotten: a resumed run measures where it began once more."""
        first, *rest = {**self._read(), self.mark: sorted(survivors)}.items()  # one that is there keeps its place
        write_atomic(self.path, json.dumps(dict([first, *rest[-REMEMBERED:]])).encode())
