"""Sums that a server learns without the summands, though clients may drop out at any step.

K. Bonawitz et al., "Practical Secure Aggregation for Privacy-Preserving Machine Learning", CCS 2017, Figure 4, against
a server that follows the protocol (semi-honest: without the parts that the paper adds for an active one).

    1 keys    client i draws (c_i, C_i) and (s_i, S_i), X25519;                         sends C_i, S_i
              server: U_1 ⊆ clients, |U_1| ≥ t;                                         sends everyone's keys
    2 shares  i draws b_i; t-of-|U_1| shares of b_i and of s_i, those for j sealed with the key of (c_i, C_j);
                                                                                        sends them, and a hash of b_i
              server: U_2 ⊆ U_1, |U_2| ≥ t;                                             sends j what was sealed to it
    3 masked  y_i = x_i + stream(b_i) + Σ_{j ∈ U_2, j > i} stream(s_ij) − Σ_{j ∈ U_2, j < i} stream(s_ij)  mod 2⁶⁴
              s_ij the key of (s_i, S_j);                                               sends y_i
              server: U_3 ⊆ U_2, |U_3| ≥ t;                                             asks who is in U_3 for shares of
    4 reveal  i sends its share of b_j for j ∈ U_3 and of s_k for k ∈ U_2 ∖ U_3, never both of one client, and once
              server: |answers| ≥ t; joins them;  Σ_{U_3} x_i = Σ_{U_3} y_i − Σ_{U_3} stream(b_j) − left-over pairs

paper → code:  c, s → sealing, masking; b → seed; PRG → `primitives.add_stream`; x → a `Lattice`'s words; u → number.

Differs from the paper:
- keys are bound to the terms of the sum and to the roster (HKDF's info, AES-GCM's associated data): two clients who
  were told different things cannot open each other's shares.
- sealed shares are opened before the masked vector is sent, so that a forged one stops a client in time.
- b_i is committed to, and a joined s_k must give S_k: a wrong share is found and the sum refused.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from fedpact.core.errors import InvalidArgument, require
from fedpact.secure import primitives, shamir
from fedpact.secure.messages import (
    Inbox,
    Keys,
    Masked,
    Request,
    Reveal,
    Roster,
    Shares,
    Terms,
    check_enough,
    check_keys,
    check_message,
    check_roster,
)

STEPS = ("advertise", "share", "mask", "reveal")
#: What clients reveal shares of: name, symbol, and how it is known.
SECRETS = {
    "seeds": ("seed", "b", "the one it committed to"),
    "keys": ("mask key", "s", "that of its public key"),
}
#: A sealed pair of shares.
SEALED_BYTES = 2 * shamir.SHARE_BYTES + primitives.SEAL_BYTES


class WrongShare(InvalidArgument):
    """A secret that its shares do not give. Its owner may have given a wrong one out, or who holds it changed it."""

    def __init__(self, sentence: str, owner: int) -> None:
        super().__init__(sentence)
        self.owner = owner


class Total(NamedTuple):
    """The sum, of whom, and in steps of the lattice."""

    values: Any
    clients: tuple[int, ...]
    cells: Any


def _points(roster: Roster) -> dict[int, int]:
    """Where each client's shares are taken: 1, 2, … in the roster's order."""
    return {keys.sender: x for x, keys in enumerate(roster.keys, 1)}


def _context(terms: Terms, roster: Roster) -> bytes:
    return primitives.digest(terms.digest, *(part for k in roster.keys for part in (b"%d" % k.sender, *k[3:])))


def _way(context: bytes, sender: int, receiver: int) -> bytes:
    return primitives.digest(context, b"%d" % sender, b"%d" % receiver)


def _pair_key(private: bytes, public: bytes, context: bytes, i: int, j: int) -> bytes:
    """s_ij, from i's private and j's public key."""
    return primitives.agree(private, public, b"mask", _way(context, min(i, j), max(i, j)), j)


def _seed_key(seed: bytes, context: bytes, i: int) -> bytes:
    return primitives.derive(seed, b"self mask", _way(context, i, i))


class Client:
    """One client in one sum. Each step is taken once, in order; what is refused changes nothing."""

    def __init__(self, terms: Terms, number: int, source: shamir.Source = os.urandom) -> None:
        require(number in terms.clients, "number", f"one of the sum's clients {terms.clients}", number)
        primitives.ready()
        self.terms, self.number, self._source = terms, number, source
        self._at = 0

    def _turn(self, step: str) -> None:
        now = STEPS[self._at] if self._at < len(STEPS) else "none, it is done"
        require(step == now, f"step of client {self.number}", now, step, hint=f"Steps are {', '.join(STEPS)}.")

    def advertise(self) -> Keys:
        """Step 1."""
        self._turn("advertise")
        self._sealing, self._masking = self._source(32), self._source(32)
        public = [primitives.public_of(private) for private in (self._sealing, self._masking)]
        self._keys = Keys(self.terms.session, self.terms.round, self.number, *public)
        self._at += 1
        return self._keys

    def share(self, roster: Roster) -> Shares:
        """Step 2."""
        self._turn("share")
        terms, i = self.terms, self.number
        check_message(terms, roster, Roster, f"to client {i}")
        check_roster(terms, roster, self._keys)
        context, points, seed = _context(terms, roster), _points(roster), self._source(32)
        x = list(points.values())
        of_seed, of_key = (
            dict(zip(points, shamir.split(secret, terms.threshold, x, self._source), strict=True))
            for secret in (seed, self._masking)
        )
        sealed = {}
        for other in roster.keys:
            if (j := other.sender) != i:
                way = _way(context, i, j)
                key = primitives.agree(self._sealing, other.sealing, b"seal", way, j)
                nonce = self._source(primitives.NONCE_BYTES)
                sealed[j] = primitives.seal(key, of_seed[j] + of_key[j], way, nonce)
        self._roster, self._context, self._seed = roster, context, seed
        self._held = {i: (of_seed[i], of_key[i])}  # of b_j and s_j, by j
        self._at += 1
        return Shares(terms.session, terms.round, i, hashlib.sha256(seed).digest(), sealed)

    def mask(self, inbox: Inbox, values: Any) -> Masked:
        """Step 3: `values` are the client's vector."""
        self._turn("mask")
        terms, i = self.terms, self.number
        check_message(terms, inbox, Inbox, f"to client {i}")
        require(inbox.receiver == i, "receiver of Inbox", str(i), inbox.receiver)
        keys = {k.sender: k for k in self._roster.keys if k.sender != i}
        strangers = sorted(set(inbox.sealed) - set(keys))
        require(not strangers, f"senders in the Inbox of client {i}", "in the Roster, and others", strangers)
        check_enough(terms, {i, *inbox.sealed}, f"clients in the Inbox of client {i}, itself included,")
        held = {j: self._open(keys[j], sealed) for j, sealed in inbox.sealed.items()}
        y = terms.lattice.encode(values)
        require(y.size == terms.dimension, "values", f"a vector of {terms.dimension} numbers", f"{y.size}", symbol="d")
        primitives.add_stream(y, _seed_key(self._seed, self._context, i), 1)
        for j in held:
            key = _pair_key(self._masking, keys[j].masking, self._context, i, j)
            primitives.add_stream(y, key, 1 if j > i else -1)
        self._held |= held
        del self._seed, self._masking, self._sealing  # no later step needs them
        self._at += 1
        return Masked(terms.session, terms.round, i, y)

    def _open(self, sender: Keys, sealed: bytes) -> tuple[bytes, bytes]:
        j, way = sender.sender, _way(self._context, sender.sender, self.number)
        name = f"Shares of client {j} for client {self.number}"
        right = isinstance(sealed, bytes) and len(sealed) == SEALED_BYTES
        require(right, name, f"{SEALED_BYTES} bytes", len(sealed) if isinstance(sealed, bytes) else sealed)
        key = primitives.agree(self._sealing, sender.sealing, b"seal", way, j)
        plain = primitives.unseal(key, sealed, way)
        hint = "Forged, of another sum, or sealed for another roster."
        require(plain is not None, name, "sealed by it for this sum", "bytes that do not open", hint=hint)
        assert plain is not None
        return plain[: shamir.SHARE_BYTES], plain[shamir.SHARE_BYTES :]

    def reveal(self, request: Request) -> Reveal:
        """Step 4. Shares of both secrets of one client would open its vector: they are refused, now and later."""
        self._turn("reveal")
        terms, i = self.terms, self.number
        check_message(terms, request, Request, f"to client {i}")
        survivors, dropped = set(request.survivors), set(request.dropped)
        both = sorted(survivors & dropped)
        require(not both, "clients in Request", "survivors or dropped, never both", both, symbol="U_3, U_2∖U_3")
        listed = sorted([*request.survivors, *request.dropped])
        hint = "Each of those whose shares were handed out, once."
        require(listed == sorted(self._held), "clients in Request", f"{sorted(self._held)}", listed, hint=hint)
        require(i in survivors, f"survivors in the Request to client {i}", "it and others", request.survivors)
        check_enough(terms, survivors, "survivors in Request")
        seeds = {j: self._held[j][0] for j in request.survivors}
        keys = {k: self._held[k][1] for k in request.dropped}
        self._held = {}
        self._at += 1
        return Reveal(terms.session, terms.round, i, seeds, keys)


class Server:
    """The server in one sum: `add` takes messages as they come, four methods close a step and tell what to send.

    A step closes with whoever has answered, and is refused with fewer than the threshold; then more may still come.
    """

    def __init__(self, terms: Terms) -> None:
        primitives.ready()
        self.terms = terms
        self._at = 0
        self._came: tuple[dict[int, Any], ...] = ({}, {}, {}, {})
        self._sum = np.zeros(terms.dimension, np.uint64)

    @property
    def waiting(self) -> tuple[int, ...]:
        """Who may still answer in this step."""
        before = self.terms.clients if self._at == 0 else self._came[self._at - 1]
        return tuple(i for i in before if self._at < len(STEPS) and i not in self._came[self._at])

    def add(self, message: Keys | Shares | Masked | Reveal) -> None:
        """Take one client's message of this step. A message is refused by name; the sum goes on without it."""
        require(self._at < len(STEPS), "message", "of a sum under way", "one after its end")
        kind = (Keys, Shares, Masked, Reveal)[self._at]
        sender = getattr(message, "sender", None)
        check_message(self.terms, message, kind, f"from client {sender}")
        came = self._came[self._at]
        asked = self.terms.clients if self._at == 0 else tuple(self._came[self._at - 1])
        require(sender in asked, f"sender of {kind.__name__}", f"one of the step's clients {asked}", sender)
        require(sender not in came, f"{kind.__name__} from client {sender}", "sent once", "another")
        checks: tuple[Any, ...] = (check_keys, self._check_shares, self._check_masked, self._check_reveal)
        checks[self._at](message)
        if isinstance(message, Masked):  # added up as they come: one vector is kept, not one a client
            self._sum += message.words
        came[message.sender] = None if isinstance(message, Masked) else message

    def _close(self, step: str) -> list[int]:
        now = STEPS[self._at] if self._at < len(STEPS) else "none, it is done"
        require(step == now, "step of the server", now, step, hint=f"Steps are {', '.join(STEPS)}.")
        came = self._came[self._at]
        check_enough(self.terms, came, f"clients that answered {step}")
        self._at += 1
        return sorted(came)

    def roster(self) -> Roster:
        """Close step 1: everyone's keys, for all of them."""
        who = self._close("advertise")
        self._roster = Roster(self.terms.session, self.terms.round, tuple(self._came[0][i] for i in who))
        self._context, self._x = _context(self.terms, self._roster), _points(self._roster)
        return self._roster

    def _check_shares(self, message: Shares) -> None:
        name = f"Shares from client {message.sender}"
        right = isinstance(message.commitment, bytes) and len(message.commitment) == 32
        require(right, f"commitment in {name}", "32 bytes", message.commitment)
        wanted = sorted(set(self._x) - {message.sender})
        require(sorted(message.sealed) == wanted, f"receivers in {name}", f"{wanted}", sorted(message.sealed))
        right = all(isinstance(s, bytes) and len(s) == SEALED_BYTES for s in message.sealed.values())
        require(right, name, f"{SEALED_BYTES} bytes a receiver", "others")

    def inboxes(self) -> dict[int, Inbox]:
        """Close step 2: for each client, what the others sealed to it."""
        who, sent = self._close("share"), self._came[1]
        of = lambda j: {i: sent[i].sealed[j] for i in who if i != j}
        return {j: Inbox(self.terms.session, self.terms.round, j, of(j)) for j in who}

    def _check_masked(self, message: Masked) -> None:
        words, d = message.words, self.terms.dimension
        right = isinstance(words, np.ndarray) and words.dtype == np.uint64 and words.shape == (d,)
        got = f"{words.dtype} of shape {words.shape}" if isinstance(words, np.ndarray) else type(words).__name__
        require(right, f"words in Masked from client {message.sender}", f"{d} unsigned words of 64 bits", got)

    def request(self) -> Request:
        """Close step 3: who stayed and who dropped out, for those who stayed."""
        stayed = self._close("mask")
        dropped = sorted(set(self._came[1]) - set(stayed))
        self._request = Request(self.terms.session, self.terms.round, tuple(stayed), tuple(dropped))
        return self._request

    def _check_reveal(self, message: Reveal) -> None:
        asked = self._request
        for field, wanted in (("seeds", asked.survivors), ("keys", asked.dropped)):
            shares: Mapping[int, bytes] = getattr(message, field)
            name = f"{field} in Reveal from client {message.sender}"
            require(sorted(shares) == list(wanted), name, f"of {list(wanted)}", sorted(shares))
            right = all(isinstance(s, bytes) and len(s) == shamir.SHARE_BYTES for s in shares.values())
            require(right, name, f"shares of {shamir.SHARE_BYTES} bytes", "others")

    def total(self) -> Total:
        """Close step 4: take the masks that are left off the sum."""
        self._close("reveal")
        self._at -= 1  # until the shares have been joined
        stayed, words = self._request.survivors, self._sum.copy()
        public = {k.sender: k.masking for k in self._roster.keys}
        for j in stayed:
            seed = self._joined("seeds", j)
            primitives.add_stream(words, _seed_key(seed, self._context, j), -1)
        for k in self._request.dropped:
            private = self._joined("keys", k)
            for j in stayed:  # j added its mask with k, which nobody took off
                key = _pair_key(private, public[j], self._context, k, j)
                primitives.add_stream(words, key, -1 if k > j else 1)
        values = self.terms.lattice.decode(words, len(stayed))
        self._at += 1
        return Total(values, stayed, words.view(np.int64))

    def forget(self, client: int) -> Reveal | None:
        """Take back a client's answer to step 4, for a sum that was refused because somebody's share is wrong."""
        return self._came[3].pop(client, None)

    def _joined(self, field: str, owner: int) -> bytes:
        """A client's secret, if it is the one it committed to, or that of its public key."""
        shares = {self._x[i]: getattr(answer, field)[owner] for i, answer in self._came[3].items()}
        name, symbol, wanted = SECRETS[field]
        name = f"{name} of client {owner}"
        try:
            secret = shamir.join(shares, self.terms.threshold)
        except InvalidArgument as wrong:
            raise WrongShare(f"{name} ({symbol}) could not be joined: {wrong}", owner) from None
        if field == "seeds":
            right = hashlib.sha256(secret).digest() == self._came[1][owner].commitment
        else:
            right = primitives.public_of(secret) == next(k.masking for k in self._roster.keys if k.sender == owner)
        if not right:
            raise WrongShare(f"{name} ({symbol}) must be {wanted}, got another: a share is wrong.", owner)
        return secret
