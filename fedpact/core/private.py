"""What an algorithm states about its private modes: by which way, how many releases, how far a record moves one.

    once     one gradient a round, at a point that everyone has, reused by every local step; the upload is noised
    steps    every local gradient is noised; all that follows is computed from what is private already
    convex   several steps on a convex loss, each a contraction; the upload is noised
    client   the whole upload is clipped and noised: it hides all that a client holds, whatever it did

Where the upload is noised (`once`, `convex`) a client's state after the round is `commit(msg, before, released)`: a
function of what was released. `moved(C, d, t)` is the theorem: taking one of d records, whose clipped gradient has
norm at most C, out of the data moves the released vector of round t by at most that; putting another in its place, by
at most twice that. The derivations are in docs/privacy_modes.md.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

#: The ways, and what each hides.
WAYS: Mapping[str, str] = {"once": "record", "steps": "record", "convex": "record", "client": "client"}


class Theorem(NamedTuple):
    """A private mode of an algorithm with its settings; see the module's page."""

    way: str
    moved: Callable[[float, Any, Any], Any] = lambda clip, rows, t: clip  # (C, d_i, round)
    steps: Callable[[int], int] = lambda rows: 1  # releases in a round of a client with d_i rows
    batch: int | None = None  # rows that a release draws; None: all
    copies: int = 1  # vectors of the model's size in a release
    stateless: bool = False  # of way client: whether clients keep nothing from round to round
    about: str = ""  # the bound in a line


class Packing(NamedTuple):
    """An upload as the vector that way `client` clips, measured from what is public; and a sum of such as a sum of
    uploads.
    """

    pack: Callable[[Any, Any], Any]  # (Broadcast, Upload) -> Vector
    unpack: Callable[[Any, Any, Any], Any]  # (Broadcast, Vector, how many it is the sum of, an array) -> Upload
