"""Masked sums over a link: nodes keep their vectors, and all that the server learns is the sum (`secure.masks`).

    question of the server                          answer of the node                        step of the protocol
    step, measure, moments, with who is invited  →  two public keys; its vector stays          1 advertise
    mask_shares, with everyone's keys            →  shares of its secrets, sealed to others    2 share
    mask_words, with what was sealed to it       →  its vector under masks                     3 mask
    mask_reveal, with who stayed and who did not →  shares of what is left to take off         4 reveal

Four exchanges a sum. Who does not answer, or not rightly, is named in the log and left out; after `mask_words` it is in
the sum whether it answers or not. Terms are made by both sides from what they know (run, purpose, round, settings) and
the sum's nonce, so that no two sums have the same keys; secrets are in memory alone: a node that starts again has
dropped out.

Sums of the same vectors over different clients would differ by somebody's vector. A round that is asked for again, by a
run that was resumed, is such a case: a node writes down over whom it let a vector be opened, opens it over nobody else,
and tells the server, which takes the same clients again.

    step      one word a number on a lattice up to `bound`; beyond it the node refuses
    measure   three words of 40 bits, from 2⁸⁰ to 2⁻⁴⁰
    moments   twenty, from 2⁴⁰⁰ to 2⁻⁴⁰⁰: a column's unit is anybody's
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import jax.numpy as jnp
import numpy as np

from fedpact.core.errors import ClientError, InvalidArgument, require
from fedpact.core.files import write_atomic
from fedpact.core.wire import Message, Refused
from fedpact.secure import Client, Lattice, Server, Terms, Total, primitives
from fedpact.secure.messages import Inbox, Keys, Masked, Request, Reveal, Roster, Shares

log = logging.getLogger("fedpact")
#: A sum of one is that one's vector.
LEAST = 2
#: Sums that a node remembers to have opened, for each purpose: a resumed run goes back by two checkpoints at most.
REMEMBERED = 4


# What numbers become


@dataclass(frozen=True)
class Fixed:
    """One word a number: a multiple of the lattice's step, off by half of it."""

    bound: float
    words: ClassVar[int] = 1

    def lattice(self, clients: int) -> Lattice:
        """Of the words."""
        return Lattice(self.bound, clients)

    def spread(self, v: np.ndarray) -> np.ndarray:
        """The numbers that are put on it."""
        return v

    def gathered(self, total: Total) -> np.ndarray:
        """The sum."""
        return total.values


@dataclass(frozen=True)
class Digits:
    """Some words a number, each a digit of 40 bits, from 2^top down: exact for every double within their reach."""

    words: int
    top: int
    WIDTH: ClassVar[int] = 40

    @property
    def bound(self) -> float:
        """What a number may reach."""
        return 2.0**self.top

    def lattice(self, clients: int) -> Lattice:
        """Of the digits, which are integers."""
        return Lattice(2.0**self.WIDTH, clients, 1.0)

    def _exponents(self) -> list[int]:
        return [self.top - self.WIDTH * (k + 1) for k in range(self.words)]

    def spread(self, v: np.ndarray) -> np.ndarray:
        """Every number's first digit, then every number's second, …; no step rounds but the last."""
        digits = []
        for e in self._exponents():
            digits.append(np.rint(np.ldexp(v, -e)))
            v = v - np.ldexp(digits[-1], e)
        return np.concatenate(digits)

    def gathered(self, total: Total) -> np.ndarray:
        """The sum: carried into the digits before, then added from the least."""
        digits = total.cells.reshape(self.words, -1).copy()
        for k in range(self.words - 1, 0, -1):
            carry = (digits[k] + 2 ** (self.WIDTH - 1)) >> self.WIDTH
            digits[k] -= carry << self.WIDTH
            digits[k - 1] += carry
        value = np.zeros(digits.shape[1])
        for k, e in reversed(list(enumerate(self._exponents()))):
            value += np.ldexp(digits[k].astype(np.float64), e)
        return value


CODINGS = {"measure": Digits(3, 80), "moments": Digits(20, 400)}
HINTS = {
    "step": "Raise the engine's bound.",
    "measure": "The run has left all bounds: lower its step sizes.",
    "moments": "Scale the column, or drop it.",
}


@dataclass(frozen=True)
class Rules:
    """What both sides know of all sums of a run: which run, the bound of uploads, what fraction must stay."""

    run: str
    bound: float = 1.0
    threshold: float = 1.0

    def coding(self, purpose: str) -> Fixed | Digits:
        """How numbers travel."""
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
        t_of_n = max(math.ceil(self.threshold * n - 1e-9), n // 2 + 1)
        return Terms(session, t, clients, size * coding.words, coding.lattice(max(n, 1)), t_of_n)


def rules_of(values: Mapping[str, Any]) -> Rules | None:
    """Those of the agreement before a run, in which everyone must stay; None where sums are not to be masked."""
    run = values.get("run")
    engine = run.get("engine") if isinstance(run, Mapping) else None
    if not (isinstance(engine, Mapping) and engine.get("secure") is True):
        return None
    return Rules(hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest())


def check_summable(leaves: Sequence[Any], what: str) -> None:
    """Refuse what cannot be added up as numbers."""
    for k, leaf in enumerate(leaves):
        ok = jnp.issubdtype(leaf.dtype, np.floating) or jnp.issubdtype(leaf.dtype, np.integer)
        hint = "Send numbers, or leave secure out."
        require(ok, f"array {k} of {what}", "of real numbers or integers under masks", str(leaf.dtype), hint=hint)


def flat(arrays: Sequence[np.ndarray]) -> np.ndarray:
    """One vector of doubles."""
    return np.concatenate([np.zeros(0), *(np.asarray(a, np.float64).ravel() for a in arrays)])


def unflat(vector: np.ndarray, leaves: Sequence[Any]) -> list[np.ndarray]:
    """The arrays again, in their shapes and types."""
    sizes = [math.prod(leaf.shape) for leaf in leaves]
    parts = np.split(vector, np.cumsum(sizes)[:-1])
    whole = [jnp.issubdtype(leaf.dtype, np.integer) for leaf in leaves]
    rounded = [np.rint(part) if w else part for part, w in zip(parts, whole, strict=True)]
    return [part.reshape(leaf.shape).astype(leaf.dtype) for part, leaf in zip(rounded, leaves, strict=True)]


def _hex(table: Mapping[int, bytes]) -> dict[str, str]:
    return {str(i): content.hex() for i, content in table.items()}


def _unhex(values: Mapping[str, Any], name: str) -> dict[int, bytes]:
    try:
        return {int(i): bytes.fromhex(content) for i, content in values[name].items()}
    except (KeyError, TypeError, ValueError, AttributeError):
        raise Refused(f"{name} of a masked sum must be bytes by client, got another.") from None


# The server


class Sums:
    """The server's side: starts sums over the nodes of a link."""

    def __init__(self, link: Any, rules: Rules, deadline: float, patience: float) -> None:
        self.link, self.rules, self.deadline, self.patience = link, rules, deadline, patience

    def start(self, purpose: str, t: int, clients: Sequence[int], leaves: Sequence[Any]) -> Sum:
        """A sum of trees with these leaves over these clients, or those of them who stay."""
        if len(clients) < LEAST:
            raise ClientError(
                f"round {t}, {purpose}: clients of a masked sum must be at least {LEAST}, got {len(clients)}: a sum of "
                "one is its upload. Draw more clients a round, or start the missing nodes."
            )
        check_summable(leaves, purpose)
        return Sum(self, purpose, t, tuple(sorted(clients)), leaves)


class Sum:
    """One sum. `told` goes with the question, `add` takes each answer to it, `total` does the rest.

    `least` is how many must stay; `missing` are the clients that did not answer, `refused` has what the others are
    left out for.
    """

    def __init__(self, sums: Sums, purpose: str, t: int, clients: tuple[int, ...], leaves: Sequence[Any]) -> None:
        self._sums, self.purpose, self.t, self.leaves = sums, purpose, t, leaves
        self.told = {"nonce": os.urandom(16).hex(), "clients": list(clients)}
        self.terms = sums.rules.terms(purpose, t, self.told, sum(math.prod(leaf.shape) for leaf in leaves))
        self.least = self.terms.threshold
        self.missing: set[int] = set()
        self.refused: dict[int, str] = {}
        self._server = Server(self.terms)
        self._keys: dict[int, Keys] = {}
        self._before: Counter[tuple[int, ...]] = Counter()
        self._probe = os.urandom(32)

    def add(self, i: int, message: Message) -> bool:
        """Take what a node's answer has for the sum. False: its vector is not finite, and stays out."""
        if message.values.get("finite") is False:
            return False
        keys = _unhex(message.values, "keys")
        require(sorted(keys) == [0, 1], "keys of a masked sum", "two", len(keys))
        for key in keys.values():
            require(len(key) == primitives.KEY_BYTES, "keys of a masked sum", "of 32 bytes", len(key))
            primitives.agree(self._probe, key, b"seal", b"", i)  # refuses a point that would stop everyone
            taken = any(key in found[3:] for found in self._keys.values())
            require(not taken, "keys of a masked sum", "its own", "another client's")
        before = message.values.get("summed")
        if isinstance(before, list) and all(isinstance(j, int) for j in before):
            self._before[tuple(before)] += 1
        self._keys[i] = Keys(self.terms.session, self.terms.round, i, keys[0], keys[1])
        return True

    def total(self, enough: int = 0) -> tuple[list[np.ndarray], list[int]]:
        """The sum and who is in it. At least `enough` must stay until their words are there, and always `least`."""
        enough, session = max(enough, self.least), {"session": self.terms.session.hex()}
        ask = lambda kind, told: {i: Message(kind, {**session, **values}) for i, values in told.items()}
        server = self._server
        invited = self._invited()
        self._enough(len(invited), enough, "keys")
        for i in invited:
            server.add(self._keys[i])
        roster = server.roster()
        keys = {name: _hex({k.sender: getattr(k, name) for k in roster.keys}) for name in ("sealing", "masking")}
        self._asked(ask("mask_shares", {k.sender: keys for k in roster.keys}), self._shares, enough)
        boxes = {i: {"sealed": _hex(box.sealed)} for i, box in server.inboxes().items()}
        self._asked(ask("mask_words", boxes), self._masked, enough)
        request = server.request()
        who = {"survivors": list(request.survivors), "dropped": list(request.dropped)}
        self._asked(ask("mask_reveal", dict.fromkeys(request.survivors, who)), self._reveal, self.least)
        total = self._opened(request)
        return unflat(self._sums.rules.coding(self.purpose).gathered(total), self.leaves), list(total.clients)

    def _invited(self) -> list[int]:
        """Who has sent keys; of a vector that was opened before, those it was opened over, if all are there."""
        here = sorted(self._keys)
        for who, _ in self._before.most_common():
            if set(who) <= set(here):
                for i in set(here) - set(who):
                    self._lose(i, "its sum was opened without it, before the run was resumed.", missing=True)
                return sorted(who)
        return here

    def _lose(self, i: int, why: str, missing: bool = False, kind: str = "") -> None:
        where = f"{self.purpose}, {kind}" if kind else self.purpose
        log.warning("round %d, client %d (%s), %s: left out: %s", self.t, i, self._sums.link.names[i], where, why)
        if missing:
            self.missing.add(i)
        else:
            self.refused[i] = why

    def _asked(self, questions: Mapping[int, Message], read: Callable[[int, Message], Any], enough: int) -> None:
        sums = self._sums
        kind = next(iter(questions.values())).kind
        answers = sums.link.ask(questions, sums.deadline, min(enough, len(questions)), sums.patience)
        came = 0
        for i in questions:
            if i not in answers:
                self._lose(i, "no answer by the deadline.", True, kind)
                continue
            try:
                found = answers[i]
                if isinstance(found, Refused):
                    raise found
                if found.kind == "error":
                    raise Refused(str(found.values.get("sentence", "the node failed")))
                self._server.add(read(i, found))
                came += 1
            except InvalidArgument as refused:
                self._lose(i, str(refused), False, kind)
        self._enough(came, enough, kind)

    def _enough(self, came: int, enough: int, kind: str) -> None:
        if came >= enough:
            return
        names = self._sums.link.names
        told = "".join(f" {names[i]}: {why}" for i, why in self.refused.items())
        raise ClientError(
            f"round {self.t}, {self.purpose}: at least {enough} of {len(self.terms.clients)} clients must stay in a "
            f"masked sum, got {came} ({kind}).{told} Start the missing nodes and resume."
        )

    def _shares(self, i: int, message: Message) -> Shares:
        sealed = _unhex(message.values, "sealed")
        commitment = _unhex(message.values, "commitment").get(i, b"")
        return Shares(self.terms.session, self.terms.round, i, commitment, sealed)

    def _masked(self, i: int, message: Message) -> Masked:
        words = message.arrays[0] if len(message.arrays) == 1 else None
        return Masked(self.terms.session, self.terms.round, i, words)

    def _reveal(self, i: int, message: Message) -> Reveal:
        seeds, keys = _unhex(message.values, "seeds"), _unhex(message.values, "keys")
        return Reveal(self.terms.session, self.terms.round, i, seeds, keys)

    def _opened(self, request: Request) -> Total:
        """The sum; where shares do not fit, without one client's whose shares are then wrong."""
        try:
            return self._server.total()
        except InvalidArgument as error:
            refused = error
        for i in request.survivors:
            if (kept := self._server.forget(i)) is None:
                continue
            try:
                total = self._server.total()
            except InvalidArgument:
                self._server.add(kept)
                continue
            log.warning(
                "round %d, client %d (%s), %s, mask_reveal: its shares are wrong and were not used: %s",
                *(self.t, i, self._sums.link.names[i], self.purpose, refused),
            )
            return total
        raise ClientError(f"round {self.t}, {self.purpose}: masked sum could not be opened: {refused}")


# The node


class Summands:
    """A node's side: the vector it has put up for the sum under way, with the secrets of its masks. In memory alone."""

    def __init__(self) -> None:
        self._now: _Summand | None = None

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
            text = f"numbers of {purpose} must be at most {coding.bound:g} in size under masks, got a larger one"
            raise Refused(f"{text}. {HINTS[purpose]}")
        if float(np.linalg.norm(vector)) > largest:
            raise Refused(f"upload must be of norm at most {largest:g}, got a longer one; it was not sent.")
        terms = rules.terms(purpose, int(message.values.get("round", 0)), told, vector.size)
        if self._now is None or self._now.client.terms != terms:
            self._now = _Summand(terms, number, coding.spread(vector), book)
        before = None if book is None else book.found()
        keys = {0: self._now.keys.sealing, 1: self._now.keys.masking}
        return {"finite": True, "keys": _hex(keys), **({} if before is None else {"summed": before})}

    def answer(self, message: Message) -> bytes:
        """Steps 2 to 4."""
        session = message.values.get("session")
        if self._now is None or session != self._now.client.terms.session.hex():
            raise Refused("question must be of the masked sum under way, got one of another. Was the node restarted?")
        return self._now.answer(message)


class _Summand:
    def __init__(self, terms: Terms, number: int, vector: np.ndarray, book: Book | None) -> None:
        self.client, self.vector, self.book = Client(terms, number), vector, book
        self.keys = self.client.advertise()
        self._last: tuple[bytes, bytes] = (b"", b"")  # a question and its answer, for when that was lost

    def answer(self, message: Message) -> bytes:
        question = message.pack()
        if question != self._last[0]:
            steps = {"mask_shares": self._share, "mask_words": self._mask, "mask_reveal": self._reveal}
            self._last = (question, steps[message.kind](message.values).pack())
        return self._last[1]

    def _share(self, values: Mapping[str, Any]) -> Message:
        terms, (sealing, masking) = self.client.terms, (_unhex(values, name) for name in ("sealing", "masking"))
        require(sealing.keys() == masking.keys(), "keys of a masked sum", "two a client", "others")
        keys = (Keys(terms.session, terms.round, i, sealing[i], masking[i]) for i in sorted(sealing))
        made = self.client.share(Roster(terms.session, terms.round, tuple(keys)))
        return Message("mask_shares", {"commitment": _hex({made.sender: made.commitment}), "sealed": _hex(made.sealed)})

    def _mask(self, values: Mapping[str, Any]) -> Message:
        terms = self.client.terms
        inbox = Inbox(terms.session, terms.round, self.client.number, _unhex(values, "sealed"))
        return Message("mask_words", {}, [self.client.mask(inbox, self.vector).words])

    def _reveal(self, values: Mapping[str, Any]) -> Message:
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
        return Message("mask_reveal", {"seeds": _hex(made.seeds), "keys": _hex(made.keys)})


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
        """Refuse to open a vector over other clients than before: the difference of the sums would be theirs."""
        before = self.found()
        if before is not None and sorted(survivors) != before:
            raise Refused(
                f"sum must be over clients {before}, over whom this vector was opened before, got one over "
                f"{sorted(survivors)}. Start those that are missing."
            )

    def write(self, survivors: Sequence[int]) -> None:
        """Before the shares leave."""
        others = [line for line in self._read().items() if line[0] != self.mark]
        lines = [*others, (self.mark, sorted(survivors))][-REMEMBERED:]
        write_atomic(self.path, json.dumps(dict(lines)).encode())
