"""Which records all parties hold, and in which common order, without showing anyone the others' other ids.

C. Meadows, IEEE S&P 1986; B. Huberman, M. Franklin and T. Hogg, EC 1999: two parties. Here sets go round a ring.

    party i   a_i uniform below q;  its set is  { a_i · H(id) }, sorted                              begin
    party j   multiplies every point of another's set by a_j, sorts, remembers the permutation       blind
              … until each set has been with every party: id is now  a_1 ⋯ a_K · H(id), whoever had it
    matcher   the points that all sets have, in their order; for each set, where they are            match
    party j   maps these places back through its permutation, the last visited first                 unwind
    party i   has the rows of its own that all parties hold, in the common order                     finish

The curve is P-256: its order q is prime, so there is no small subgroup, and every point that arrives is checked to be
on it. H tries SHA-256(session, id, 0), … as an x-coordinate until one is on the curve. Points travel as x-coordinates
(32 bytes): ±P are one, and a·(±P) have one x. Sorting hides the order: without a_i nobody can tell the points from
random ones (decisional Diffie-Hellman on P-256, H a random oracle). The common order is a random one.

Who learns what: every party the size of each set and of the intersection, and its own rows in it; the matcher, the
server or a party, the sizes of the intersections of any of the sets, and no id. Parties follow the protocol: one that
puts ids it does not hold into its set learns which of them the others share. H takes a time that depends on the id, and
is computed before anything is sent.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from fedpact.core.errors import DataError, InvalidArgument, require, the_extra
from fedpact.secure.primitives import digest
from fedpact.secure.shamir import Source

Array = np.ndarray[Any, np.dtype[Any]]
POINT_BYTES = 32
#: q, the order of P-256.
ORDER = 0xFFFFFFFF00000000FFFFFFFFFFFFFFFFBCE6FAADA7179E84F3B9CAC2FC632551


class Blinded(NamedTuple):
    """A party's set under the keys of those it has been with: x-coordinates of 32 bytes, sorted."""

    session: bytes
    owner: str
    path: tuple[str, ...]
    points: bytes


class Places(NamedTuple):
    """Where the common records are in `owner`'s set, as the last on the path left it."""

    session: bytes
    owner: str
    path: tuple[str, ...]
    places: Any


class Order(NamedTuple):
    """How to rearrange the common order, so that records come as `owner` has them."""

    session: bytes
    owner: str
    places: Any


def _curve() -> tuple[Callable[[bytes], Any], Callable[[Any, Any], bytes], Callable[[int], Any]]:
    """A point from its x (ValueError: there is none), the x of a multiple, and a key from its number."""
    the_extra("cryptography", "secure")
    from cryptography.hazmat.primitives.asymmetric import ec

    curve, product = ec.SECP256R1(), ec.ECDH()
    point = lambda x: ec.EllipticCurvePublicKey.from_encoded_point(curve, b"\x02" + x)
    return point, lambda key, p: key.exchange(product, p), lambda number: ec.derive_private_key(number, curve)


def _sorted(points: list[bytes]) -> tuple[bytes, Array]:
    """The points in order, and where each was."""
    order = sorted(range(len(points)), key=points.__getitem__)
    return b"".join(points[k] for k in order), np.asarray(order, np.int64)


def _cut(points: bytes) -> list[bytes]:
    return [points[k : k + POINT_BYTES] for k in range(0, len(points), POINT_BYTES)]


class Party:
    """One holder of records, by the ids of its rows. A session is drawn at random, and never used twice."""

    def __init__(
        self, session: bytes, name: str, parties: Sequence[str], ids: Sequence[str], source: Source = os.urandom
    ) -> None:
        ok = isinstance(session, bytes) and 16 <= len(session) <= 64
        require(ok, "session", "16 to 64 bytes", session, hint="Draw it: os.urandom(16).")
        require(len(set(parties)) == len(parties) >= 2, "parties", "two or more distinct names", parties)
        require(name in parties, "name", f"one of {', '.join(parties)}", name)
        _check_ids(name, ids)
        self.session, self.name, self.parties = session, name, tuple(parties)
        self._ids = list(ids)
        self._point, self._times, key = _curve()
        number = 0
        while not 0 < number < ORDER:
            number = int.from_bytes(source(POINT_BYTES), "big")
        self._key = key(number)
        self._orders: dict[str, Array] = {}  # by owner: where each point of its set was before
        self._unwound: set[str] = set()
        self._rows: Array | None = None

    def _hashed(self, text: str) -> Any:
        name, k = text.encode(), 0
        while True:
            try:
                return self._point(hashlib.sha256(digest(b"fedpact psi 1", self.session, name, b"%d" % k)).digest())
            except ValueError:  # not on the curve, for one of two
                k += 1

    def begin(self) -> Blinded:
        """Its own set under its own key, for the next party."""
        require(self.name not in self._orders, f"begin of {self.name}", "called once", "another call")
        points, self._orders[self.name] = _sorted([self._times(self._key, self._hashed(one)) for one in self._ids])
        return Blinded(self.session, self.name, (self.name,), points)

    def blind(self, message: Blinded) -> Blinded:
        """Another's set under one key more, for the next party or the matcher."""
        name = f"set of {message.owner!r}"
        check_set(message, self.session, self.parties)
        ok = self.name not in message.path and message.owner not in self._orders
        require(ok, f"path of the {name}", f"one without {self.name}", message.path)
        blinded = []
        for place, x in enumerate(_cut(message.points)):
            try:
                blinded.append(self._times(self._key, self._point(x)))
            except ValueError:
                text = f"point {place} of the {name} must be the x of a point of P-256, got {x.hex()}"
                raise InvalidArgument(f"{text}. It was damaged or forged on its way.") from None
        points, self._orders[message.owner] = _sorted(blinded)
        return message._replace(path=(*message.path, self.name), points=points)

    def unwind(self, message: Places) -> Places:
        """The places as the party before left them; those of its own set are for `finish`."""
        places = self._back(message)
        require(message.owner != self.name, "owner of Places", "another party", message.owner)
        self._unwound.add(message.owner)
        return message._replace(path=message.path[:-1], places=places)

    def finish(self, message: Places) -> list[int]:
        """The rows of its own that all parties hold, in the common order."""
        places = self._back(message)
        require(message.path == (self.name,), "path of Places", f"({self.name!r},)", message.path)
        self._unwound.add(self.name)
        self._rows = places
        return places.tolist()

    def _back(self, message: Places) -> Array:
        """The places before this party's permutation, which it undoes once for each set."""
        name = f"Places of {message.owner!r}"
        require(message.session == self.session, f"session of {name}", self.session.hex(), message.session)
        known = message.owner in self._orders and message.path[-1:] == (self.name,)
        require(known, f"path of {name}", f"one that ends with {self.name}", message.path)
        require(message.owner not in self._unwound, name, f"sent to {self.name} once", "another")
        order, places = self._orders[message.owner], np.asarray(message.places, np.int64)
        ok = places.ndim == 1 and len(np.unique(places)) == places.size
        require(ok and np.all((places >= 0) & (places < order.size)), name, f"distinct, below {order.size}", places)
        return order[places]

    def order(self) -> Order:
        """What makes its own order the common one; it tells the others how its rows are ordered."""
        require(self._rows is not None, f"order of {self.name}", "asked for after finish", "a call before it")
        assert self._rows is not None
        return Order(self.session, self.name, np.argsort(self._rows))

    def arrange(self, message: Order) -> list[int]:
        """Its rows in another's order."""
        require(message.session == self.session, "session of Order", self.session.hex(), message.session)
        rows = np.empty(0) if self._rows is None else self._rows
        ok = np.array_equal(np.sort(message.places), np.arange(rows.size))
        require(ok, f"Order of {message.owner!r}", f"a permutation of {rows.size} records", message.places)
        return rows[message.places].tolist()


def _check_ids(name: str, ids: Sequence[str]) -> None:
    ok = not isinstance(ids, str) and len(ids) > 0 and all(isinstance(one, str) and one for one in ids)
    require(ok, f"ids of {name!r}", "texts that are not empty, at least one", ids)
    seen: dict[str, int] = {}
    for row, one in enumerate(ids):
        if one in seen:
            text = f"id {one!r} of {name!r} must occur once, got it in rows {seen[one]} and {row}"
            raise DataError(f"{text}. Remove one of them.")
        seen[one] = row


def check_set(message: Blinded, session: bytes, parties: Sequence[str]) -> None:
    """Refuse a set of another session, of strangers, of a wrong size, out of order, or with a point twice."""
    name = f"set of {message.owner!r}"
    require(message.session == session, f"session of the {name}", session.hex(), message.session)
    path = message.path
    ok = path[:1] == (message.owner,) and set(path) <= set(parties) and len(set(path)) == len(path)
    require(ok, f"path of the {name}", f"its owner, then others of {', '.join(parties)}, each once", path)
    size = len(message.points)
    require(size and size % POINT_BYTES == 0, f"{name}", "points of 32 bytes", f"{size} bytes")
    points = _cut(message.points)
    rising = all(a < b for a, b in pairwise(points))
    require(rising, f"{name}", "sorted, with each point once", "others")


def match(session: bytes, parties: Sequence[str], sets: Sequence[Blinded]) -> dict[str, Places]:
    """Where the records that all hold are in each set; send them back along the sets' paths, to all or to one owner."""
    for one in sets:
        check_set(one, session, parties)
        require(set(one.path) == set(parties), f"path of the set of {one.owner!r}", "all parties", one.path)
    owners = [one.owner for one in sets]
    require(sorted(owners) == sorted(parties), "sets", f"one of each of {', '.join(parties)}", owners)
    found = [{point: k for k, point in enumerate(_cut(one.points))} for one in sets]
    common = sorted(set.intersection(*(set(places) for places in found)))
    return {
        one.owner: Places(session, one.owner, one.path, np.asarray([places[point] for point in common], np.int64))
        for one, places in zip(sets, found, strict=True)
    }


def intersect(ids: Mapping[str, Sequence[str]], closer: str | None = None) -> dict[str, list[int]]:
    """Each party's rows of the ids that all have, in one order: the closer's, or a random one.

    It is what `fedpact.data.align` does in the clear, by the messages of a real alignment; all on one machine.
    """
    names, session = list(ids), os.urandom(16)
    parties = {name: Party(session, name, names, own) for name, own in ids.items()}
    require(closer is None or closer in names, "closer", f"one of {', '.join(names)}", closer)
    sets = []
    for i, name in enumerate(names):
        passed = parties[name].begin()
        for other in names[i + 1 :] + names[:i]:
            passed = parties[other].blind(passed)
        sets.append(passed)
    rows = {}
    for name, places in match(session, names, sets).items():
        while places.path != (name,):
            places = parties[places.path[-1]].unwind(places)
        rows[name] = parties[name].finish(places)
    if closer is None:
        return rows
    order = parties[closer].order()
    return {name: party.arrange(order) for name, party in parties.items()}
