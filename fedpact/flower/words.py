"""Categories and classes of a secure run: which there are over all nodes, from masked sums (`secure.vocabulary`).

    vocabulary   how many words, short and long; a table of the short ones   →  all words, at how many nodes each is

The first table has room for some hundred words of up to 64 bytes: mostly it is the only one. Where it does not peel, or
where there are longer words, the numbers in that sum say how large the next must be. They, and every further table, are
functions of what the server learns anyway.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from fedpact.core.errors import DataError
from fedpact.core.wire import Message, Refused
from fedpact.secure.vocabulary import Table

#: Which words: the columns' categories by column, and the target's values.
Words = tuple[dict[str, set[str]], set[str]]
#: Bytes of UTF-8 that a word may have: in the first table, and at all.
SHORT, LONGEST = 64, 256
#: Bytes before each that say what it is of: the column's place in the question, or for the target their number.
PLACE = 2
#: The words of one node that surely add up within the words of masks (`coding`), and that a table has room for.
MOST = 2**16
TRIES = 4
HINT = "list them for everyone in [data], categories and classes, or drop the column"


def agreed_words(
    add: Callable[[Mapping[int, Message], Sequence[Any]], list[np.ndarray]],
    clients: int,
    columns: Sequence[str],
    target: bool,
) -> Words:
    """The server's side: the categories of these columns, and the target's values if it is to have classes."""
    if not columns and not target:
        return {}, set()
    table = Table.room_for(0, os.urandom(16), PLACE + SHORT)
    for _ in range(TRIES):
        asked = {"columns": list(columns), "target": target, "salt": table.salt.hex()}
        asked |= {"part": table.part, "width": table.width}
        questions = {i: Message("vocabulary", {**asked, "client": i}) for i in range(clients)}
        (short, long), cells = add(questions, (np.zeros(2), np.zeros(table.shape)))
        found = table.words(cells.astype(np.int64), clients)
        if found is not None and not long and sum(found.values()) == short:
            return _read(found, columns)
        room = min(max(int(short + long), 0), MOST)  # what nodes say
        table = Table.room_for(room, os.urandom(16), PLACE + (LONGEST if long else SHORT))
    raise DataError(
        f"categories and classes must be at most {MOST} words over all nodes to be told by a masked sum ({HINT}), got "
        f"sums of {short + long:.0f} that did not tell them in {TRIES} tries."
    )


def _read(found: Mapping[bytes, int], columns: Sequence[str]) -> Words:
    categories: dict[str, set[str]] = {column: set() for column in columns}
    sets = [*categories.values(), set[str]()]
    for x in found:
        try:
            sets[int.from_bytes(x[:PLACE], "big")].add(x[PLACE:].decode())
        except (IndexError, UnicodeDecodeError):
            raise Refused(
                "words of the nodes' masked sum must be of what was asked for, in UTF-8, got others. Install the same "
                "fedpact everywhere."
            ) from None
    return categories, sets[-1]


def words_of(survey: Mapping[str, Any], values: Mapping[str, Any]) -> list[np.ndarray]:
    """A node's side: of what it was asked, how many words it has, short and long, and the table of the short ones."""
    table = _table(values)
    has = [(f"column {column!r}", survey["categories"].get(column, ())) for column in values["columns"]]
    has += [("the target", survey["values"])] if values["target"] else []
    words = {_word(k, name, cell) for k, (name, cells) in enumerate(has) for cell in cells}
    if len(words) > MOST:
        text = f"categories and classes of a node must be at most {MOST} to be told by a masked sum ({HINT})"
        raise DataError(f"{text}, got {len(words)}.")
    short = [x for x in words if len(x) <= table.width]
    return [np.array([len(short), len(words) - len(short)], np.float64), table.of(short)]


def _word(k: int, name: str, cell: str) -> bytes:
    x = cell.encode()
    if len(x) > LONGEST:  # the part before "got" is told to the server
        hint = "list them in [data] classes" if name == "the target" else "list them in [data] categories, or drop it"
        raise DataError(
            f"cells of {name} must be at most {LONGEST} bytes of UTF-8 each to be told by a masked sum ({hint}), got "
            f"one of {len(x)}."
        )
    return k.to_bytes(PLACE, "big") + x


def _table(values: Mapping[str, Any]) -> Table:
    """The table that was asked for, if it is one that a server asks for."""
    largest = Table.room_for(MOST, bytes(16), PLACE + LONGEST)
    try:
        table = Table(bytes.fromhex(values["salt"]), values["part"], values["width"])
        right = table.part <= largest.part and PLACE < table.width <= largest.width
        right = right and isinstance(values["target"], bool) and len(values["columns"]) < 256**PLACE
        right = right and all(isinstance(column, str) for column in values["columns"])
    except (KeyError, TypeError, ValueError):
        right = False
    if not right:
        raise Refused(
            "question for a vocabulary must have columns, target and a table's salt, part and width, got others."
        )
    return table
