"""A whole secure sum in one process: who drops out where, and all that the server saw."""

from __future__ import annotations

import hashlib
import itertools
import os
from typing import Any, NamedTuple

import numpy as np

from fedpact.secure import Client, Lattice, Server, Terms, Total

SESSION = bytes(range(16))


class View(NamedTuple):
    """What clients sent, by step and client, and what came of it."""

    sent: dict[str, dict[int, Any]]
    server: Server
    clients: dict[int, Client]
    total: Total | None


def terms(n: int = 9, d: int = 50, bound: float = 10.0, **changes: Any) -> Terms:
    given = {"session": SESSION, "round": 3, "clients": tuple(range(n)), "dimension": d, "lattice": Lattice(bound, n)}
    return Terms(**{**given, **changes})


def counted(seed: int):
    """Repeatable bytes: SHA-256 of a counter."""
    numbers = itertools.count()

    def source(size: int) -> bytes:
        blocks = [hashlib.sha256(b"%d %d" % (seed, next(numbers))).digest() for _ in range(-(-size // 32))]
        return b"".join(blocks)[:size]

    return source


SOURCES = {
    "system": lambda seed: os.urandom,
    "generator": lambda seed: np.random.default_rng(seed).bytes,
    "hash": counted,
}


def conversation(agreed: Terms, x: Any, drops: Any = None, source: Any = None, until: str = "total") -> View:
    """Drops: by step (advertise, share, mask, reveal), who is not heard of from this step on. Stops before `until`."""
    gone: set[int] = set()
    clients = {i: Client(agreed, i, source(i) if source else os.urandom) for i in agreed.clients}
    server = Server(agreed)
    sent: dict[str, dict[int, Any]] = {}

    def step(name: str, act: Any) -> bool:
        if name == until:
            return False
        gone.update((drops or {}).get(name, ()))
        here = [i for i in server.waiting if i not in gone]
        sent[name] = {i: act(clients[i]) for i in here}
        for i in reversed(here):  # the order is nobody's business
            server.add(sent[name][i])
        return True

    total = None
    if step("advertise", lambda c: c.advertise()):
        roster = server.roster()
        if step("share", lambda c: c.share(roster)):
            boxes = server.inboxes()
            if step("mask", lambda c: c.mask(boxes[c.number], x[agreed.clients.index(c.number)])):
                request = server.request()
                if step("reveal", lambda c: c.reveal(request)):
                    total = server.total()
    return View(sent, server, clients, total)
