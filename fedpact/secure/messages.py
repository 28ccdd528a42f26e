"""What clients and server of a secure sum agree on, and what they send one another (`masks` is the protocol).

    client → server    Keys, Shares, Masked, Reveal
    server → client    Roster, Inbox, Request

Every message names its session and round. Who sent it is for the transport to authenticate: `sender` is checked against
the step's list, not proven.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from fedpact.core.errors import InvalidArgument, is_count, require, require_positive_int
from fedpact.secure.lattice import Lattice
from fedpact.secure.primitives import KEY_BYTES, digest

#: A client is named by an integer, a node id of 64 bits if need be.
CLIENT_MOST = 2**64


@dataclass(frozen=True)
class Terms:
    """What a sum is agreed to be: who is invited, how many must stay, how long the vectors are, on which lattice."""

    session: bytes  # drawn at random, and anew where a round's sum is started again
    round: int
    clients: tuple[int, ...]
    dimension: int  # d
    lattice: Lattice
    threshold: int = 0  # t, of n; 0: ⌈2n/3⌉

    def __post_init__(self) -> None:
        ok = isinstance(self.session, bytes) and 16 <= len(self.session) <= 64
        require(ok, "session", "16 to 64 bytes", self.session, hint="Draw it: os.urandom(16).")
        require(is_count(self.round), "round", "an integer of at least 0", self.round)
        require(isinstance(self.clients, tuple), "clients", "a tuple", self.clients)
        who, n = self.clients, len(self.clients)
        ok = all(isinstance(i, int) and 0 <= i < CLIENT_MOST for i in who) and list(who) == sorted(set(who))
        require(ok and n >= 2, "clients", "two or more distinct integers of at most 64 bits, in order", who)
        require_positive_int("dimension", self.dimension, symbol="d")
        require(self.lattice.clients >= n, "lattice", f"one for at least {n} clients", self.lattice.clients)
        if self.threshold == 0:
            object.__setattr__(self, "threshold", max(-(-2 * n // 3), n // 2 + 1))
        ok = is_count(self.threshold) and n < 2 * self.threshold <= 2 * n
        hint = "With half of them or fewer, two halves could be asked for different secrets."
        require(ok, "threshold", f"above {n}/2 and at most {n}", self.threshold, symbol="t", hint=hint)

    @cached_property
    def digest(self) -> bytes:
        """All of it in 32 bytes: what every key of the sum is bound to."""
        grid = (self.lattice.bound.hex(), self.lattice.clients, self.lattice.step.hex())
        words = (self.round, self.dimension, self.threshold, *grid, *self.clients)
        return digest(b"fedpact secure sum 1", self.session, *(str(word).encode() for word in words))


class Keys(NamedTuple):
    """Step 1: a client's public keys, one to seal shares with, one to agree on masks."""

    session: bytes
    round: int
    sender: int
    sealing: bytes
    masking: bytes


class Roster(NamedTuple):
    """U_1: the keys of those who advertised, in the order of their numbers."""

    session: bytes
    round: int
    keys: tuple[Keys, ...]


class Shares(NamedTuple):
    """Step 2: a hash of b_i, and for each other client its shares of b_i and of the mask key, sealed to it."""

    session: bytes
    round: int
    sender: int
    commitment: bytes
    sealed: Mapping[int, bytes]  # by receiver


class Inbox(NamedTuple):
    """U_2 without the receiver, and what they sealed to it."""

    session: bytes
    round: int
    receiver: int
    sealed: Mapping[int, bytes]  # by sender


class Masked(NamedTuple):
    """Step 3: the vector on the lattice plus all masks, modulo 2⁶⁴."""

    session: bytes
    round: int
    sender: int
    words: Any


class Request(NamedTuple):
    """U_3, whose self masks are to go, and U_2 without U_3, whose pairwise masks are."""

    session: bytes
    round: int
    survivors: tuple[int, ...]
    dropped: tuple[int, ...]


class Reveal(NamedTuple):
    """Step 4: shares of b_j by survivor j, and of the mask key by dropped client k."""

    session: bytes
    round: int
    sender: int
    seeds: Mapping[int, bytes]
    keys: Mapping[int, bytes]


def check_message(terms: Terms, message: Any, kind: type, who: str) -> None:
    """Refuse what is no such message, or one of another session or round."""
    title = kind.__name__
    require(isinstance(message, kind), f"message {who}", title, type(message).__name__)
    same = message.session == terms.session
    require(same, f"session of {title} {who}", terms.session.hex(), message.session)
    require(message.round == terms.round, f"round of {title} {who}", str(terms.round), message.round)


def check_roster(terms: Terms, roster: Roster, own: Keys) -> None:
    """Refuse a roster that is too short, has a stranger, keys of a wrong size or twice, or others for oneself."""
    who = [keys.sender for keys in roster.keys]
    for keys in roster.keys:
        check_message(terms, keys, Keys, f"of client {keys.sender} in Roster")
        check_keys(keys)
    ok = set(who) <= set(terms.clients) and who == sorted(set(who))
    require(ok, "clients in Roster", f"some of {terms.clients}, each once, in order", who)
    check_enough(terms, who, "clients in Roster")
    require(own in roster.keys, f"Roster's keys of client {own.sender}", "its own", "others, or none")
    public = [key for keys in roster.keys for key in keys[3:]]
    require(len(set(public)) == len(public), "public keys in Roster", "distinct", "one of them twice")


def check_keys(keys: Keys) -> None:
    """Refuse public keys of a wrong size."""
    sizes = [len(key) if isinstance(key, bytes) else None for key in keys[3:]]
    require(sizes == [KEY_BYTES] * 2, f"keys of client {keys.sender}", "two of 32 bytes", sizes)


def check_enough(terms: Terms, who: Any, name: str) -> None:
    """Refuse to go on with fewer clients than the threshold."""
    n, t = len(terms.clients), terms.threshold
    if len(who) < t:
        raise InvalidArgument(
            f"{name} must be at least {t} of {n} (the threshold), got {len(who)}. Wait for more, or start the "
            "sum again with those who are there."
        )
