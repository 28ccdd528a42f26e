"""Messages between a server and nodes that share nothing but a network: a kind, a table of plain values, arrays.

A message is sealed as files are (`core.sealed`): a checksum, JSON, arrays without pickles. The receiver knows which
arrays it expects, by shape and type, from the algorithm itself; a message never says what to make of it. Arrays that
are equal travel once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from hashlib import sha256
from typing import Any, NamedTuple

import numpy as np

from fedpact.core.errors import ClientError, InvalidArgument, StartedAgain
from fedpact.core.sealed import seal, unseal

#: Of the messages' form: their fields, and what these mean. Both sides must have the same.
SCHEMA = 1
#: In the values of every question and of the answer to a hello: the sender's version of fedpact.
VERSION = "fedpact"
#: What an error answer calls its reason where the node has forgotten what was agreed on.
ANEW = "anew"


#: How many answers a question needs that are no errors; or whether these suffice, by client, where more must be right.
Enough = int | Callable[[Mapping[int, Any]], bool]


class Refused(InvalidArgument):
    """A message that must not be used; the sentence names what is wrong with it."""


class Forgotten(Refused):
    """A question that goes on from what the node has not: it was started again, and is to be asked anew."""


class Message(NamedTuple):
    """What is asked or answered: `kind` names it, `values` are plain, `arrays` in an order that both sides know."""

    kind: str
    values: Mapping[str, Any]
    arrays: Sequence[np.ndarray] = ()

    def pack(self) -> bytes:
        """The message as bytes."""
        kept: dict[str, np.ndarray] = {}
        places: dict[Any, str] = {}
        order: list[int] = []
        for array in map(np.asarray, self.arrays):
            mark = (array.shape, array.dtype.str, sha256(array.tobytes()).digest())
            if mark not in places:
                places[mark] = f"{len(places):06d}"
                kept[places[mark]] = array
            order.append(int(places[mark]))
        header = {"schema": SCHEMA, "kind": self.kind, "values": dict(self.values), "order": order}
        return seal("message", header, kept)


def unpack(content: bytes, kind: str | None = None) -> Message:
    """The message in these bytes, of this kind where one is given."""
    try:
        found = unseal("message", content)
    except Exception:  # the checksum is no signature: whoever sends can seal anything
        found = None
    if found is None:
        raise Refused("message must be whole, got bytes that are damaged or no message of fedpact.")
    header, arrays = found
    if not (isinstance(header, dict) and isinstance(header.get("values"), dict)):
        raise Refused("header of a message must be a table with values, got another.")
    if header.get("schema") != SCHEMA:
        raise Refused(
            f"schema of a message must be {SCHEMA}, got {header.get('schema')!r}. Install the same fedpact everywhere."
        )
    told = header.get("kind")
    if not isinstance(told, str) or (kind is not None and told not in (kind, "error")):
        raise Refused(f"message must be of kind {kind!r}, got {told!r}.")
    try:
        ordered = [arrays[f"{number:06d}"] for number in header["order"]]
    except (KeyError, TypeError, ValueError):
        raise Refused("message must list the arrays it has, got others.") from None
    return Message(told, header["values"], ordered)


def same_version(server: Any, node: Any, name: Any) -> None:
    """Refuse a node whose fedpact is not the server's: from messages of one form it may compute something else."""
    if server != node:
        told = "one that does not tell its version" if node is None else node
        raise Refused(
            f"fedpact of node {name!r} must be {server}, as the server's, got {told}. Install fedpact {server} at the "
            "node, or the node's at the server, and start again what was changed."
        )


def usable(answer: Message | Refused) -> Message:
    """An answer that can be looked at: none, or one that tells of a failure, is raised with its sentence."""
    if isinstance(answer, Refused):
        raise answer
    if answer.kind == "error":
        refused = Forgotten if answer.values.get("why") == ANEW else Refused
        raise refused(str(answer.values.get("sentence", "the node failed")))
    return answer


def suffice(answers: Mapping[int, Any], enough: Enough) -> bool:
    """Whether these answers are enough to go on without the others."""
    if callable(enough):
        return enough(answers)
    return sum(isinstance(one, Message) and one.kind != "error" for one in answers.values()) >= enough


def failed(where: str, refused: Refused) -> ClientError:
    """The error that an answer which cannot be used becomes where everyone's is needed."""
    return (StartedAgain if isinstance(refused, Forgotten) else ClientError)(f"{where}: {refused}")


def checked(message: Message, shapes: Sequence[Any], who: str) -> list[np.ndarray]:
    """The arrays, if they are of these shapes and types. `shapes` have `shape` and `dtype`."""
    arrays = list(message.arrays)
    if len(arrays) != len(shapes):
        raise Refused(f"{message.kind} of {who} must hold {len(shapes)} arrays, got {len(arrays)}.")
    for number, (array, wanted) in enumerate(zip(arrays, shapes, strict=True)):
        if tuple(array.shape) != tuple(wanted.shape):
            raise Refused(
                f"array {number} of {who}'s {message.kind} must be of shape {tuple(wanted.shape)}, got {array.shape}."
            )
        if array.dtype != np.dtype(wanted.dtype):
            raise Refused(
                f"array {number} of {who}'s {message.kind} must be of {np.dtype(wanted.dtype)}, got {array.dtype}."
            )
    return arrays
