"""How the nodes come to the same features: questions to everyone, before the run.

    hello       columns, categories and the target's values, but   →  the server joins them: vocabularies, classes
                those that [data] lists for everyone
    moments     n and Σx of every column                           →  means
    moments     Σ(x − mean)², and whether the column varies        →  deviations
    coded       the schema: how cells become features              →  every node codes and scales its own rows

In a secure run categories, classes (`words`, asked for after the hello) and moments are masked sums (`masked`): the
server learns them over all nodes; of a category and a class, and of a column that varies, at how many of them it is or
does. Of each node it learns whether its target is numbers, and whether many of them.

A simulation of the same files scales by the same numbers, to rounding (`data.dataset`). What nodes tell here is told
to the server: names of columns and categories, sums over a node's rows; never a row.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from fedpact.core.errors import DataError, require_one_of
from fedpact.core.wire import Message, checked
from fedpact.data.dataset import SCALES
from fedpact.data.schema import Column, Schema
from fedpact.data.tables import CODINGS, TASKS, _coded, listed
from fedpact.flower.described import KINDS, checked_columns, schema_told, value_of
from fedpact.flower.words import Words, agreed_words

log = logging.getLogger("fedpact")
#: What a survey of rows must have, and of what kind.
SURVEY = {
    "columns": "a list of texts",
    "categories": "a table of lists of texts",
    **dict.fromkeys(("numbers", "none", "many"), "true or false"),
    "values": "a list of texts",
}
#: Everyone's answer to a question: client → message.
Ask = Callable[[Mapping[int, Message]], dict[int, Message]]
#: Of a secure run: the sum of everyone's answers to such questions, of arrays of these shapes.
Add = Callable[[Mapping[int, Message], Sequence[Any]], list[np.ndarray]]


def agreed_schema(
    values: Mapping[str, Any],
    surveys: Sequence[Mapping[str, Any]],
    names: Sequence[str],
    ask: Ask,
    add: Add | None = None,
) -> Schema:
    """The schema for everyone's rows. `surveys` are what the nodes told; `add` is there if sums are to be masked."""
    made = [survey.get("made") for survey in surveys]
    if any(made):
        if any(one != made[0] for one in made):
            raise DataError("nodes must all have rows of their own or all a part of the experiment's, got both kinds.")
        return schema_told(value_of(surveys[0], "made", "a table", names[0]), names[0])
    for survey, name in zip(surveys, names, strict=True):
        for key, kind in SURVEY.items():
            value_of(survey, key, kind, name)
        if survey["numbers"]:
            value_of(survey, "values", "a list of finite numbers as texts", name)
    table = values.get("data", {})
    lists, listed_classes = listed(table.get("categories"), table.get("classes", ()), table.get("task", "auto"))
    wanted = _wanted(surveys, names, lists)
    target = not listed_classes and not _regression(table, surveys, names)
    if add is None:
        words = _joined(surveys, wanted)
    else:
        words = agreed_words(add, len(names), wanted, target)
        _say_what_was_told(wanted, target)
    columns = _columns(table, surveys[0]["columns"], {**words[0], **lists})
    classes = listed_classes or (_classes(table, surveys, words[1]) if target else ())
    scale = table.get(
        "scale", "standard" if any(survey["categories"] for survey in surveys) or _files(surveys) else "none"
    )
    require_one_of("scale", scale, SCALES)
    shift, divisor = _scaling(scale, columns, len(names), ask, add)
    return Schema(tuple(columns), tuple(divisor.tolist()), tuple(shift.tolist()), _target(table, columns), classes)


def _files(surveys: Sequence[Mapping[str, Any]]) -> bool:
    return any(survey.get("file") for survey in surveys)


def _target(table: Mapping[str, Any], columns: Sequence[Column]) -> str:
    taken = {column.name for column in columns}
    return str(table.get("target", "y" if "y" not in taken else "target"))


def _wanted(
    surveys: Sequence[Mapping[str, Any]], names: Sequence[str], lists: Mapping[str, tuple[str, ...]]
) -> list[str]:
    """The columns whose categories are to be learned from the nodes, in the first node's order."""
    first = surveys[0]["columns"]
    for survey, name in zip(surveys, names, strict=True):
        checked_columns(survey["columns"], first, name, names[0])
    return [c for c in first if c not in lists and any(c in survey["categories"] for survey in surveys)]


def _joined(surveys: Sequence[Mapping[str, Any]], wanted: Sequence[str]) -> Words:
    """What the nodes have told, over all of them."""
    join = lambda parts: set[str]().union(*parts)
    categories = {column: join(survey["categories"].get(column, ()) for survey in surveys) for column in wanted}
    return categories, join(survey["values"] for survey in surveys)


def _say_what_was_told(wanted: Sequence[str], target: bool) -> None:
    """Of a secure run: which of the nodes' cells the server has seen."""
    told = [f"categories of {column!r}" for column in wanted] + ["values of the target"] * target
    if told:
        log.info(
            "secure: the server was told which %s there are over all nodes and how many nodes have each, not which "
            "nodes. List them for everyone in [data], categories and classes, and nodes tell none.",
            ", ".join(told),
        )


def _columns(table: Mapping[str, Any], names: Sequence[str], categories: Mapping[str, Iterable[str]]) -> list[Column]:
    """The features in this order; categories in the order that a list has, and else sorted."""
    coding = table.get("coding", "ordinal")
    require_one_of("coding", coding, CODINGS)
    out: list[Column] = []
    for name in names:
        if name in categories:
            found = categories[name]
            out += _coded(name, tuple(sorted(found) if isinstance(found, set) else found), coding)
        else:
            out.append(Column(name, "number"))
    return out


def _regression(table: Mapping[str, Any], surveys: Sequence[Mapping[str, Any]], names: Sequence[str]) -> bool:
    """Whether the target has no classes, whatever its values over all nodes."""
    task = table.get("task", "auto")
    require_one_of("task", task, TASKS)
    numbers, none = all(s["numbers"] for s in surveys), all(s["none"] for s in surveys)
    if task == "auto" and not numbers and not none:
        mixed = [name for name, s in zip(names, surveys, strict=True) if not s["numbers"]]
        raise DataError(
            f"target must be numbers at every node or at none, got text at {', '.join(map(repr, mixed))}. "
            'Correct it; task="classification" reads every value as a class.'
        )
    return task == "regression" or (task == "auto" and not none and any(s["many"] for s in surveys))


def _classes(table: Mapping[str, Any], surveys: Sequence[Mapping[str, Any]], values: set[str]) -> tuple[str, ...]:
    """The names of the classes, from the target's values over all nodes; none for a regression target."""
    if not all(s["numbers"] for s in surveys):
        return tuple(sorted(values))
    if not KINDS["a list of finite numbers as texts"](sorted(values)):  # of one node they are checked in its survey
        raise DataError(
            "values of the target must be finite numbers, as the nodes say, got others in their masked sum."
        )
    if table.get("task", "auto") == "auto" and _many(values):
        return ()
    by_value: dict[float, str] = {}
    for value in sorted(values):
        by_value.setdefault(float(value), value)
    return tuple(by_value[v] for v in sorted(by_value))


def _many(values: set[str]) -> bool:
    from fedpact.data.tables import MOST_CLASSES

    return len({float(value) for value in values}) > MOST_CLASSES


def _scaling(
    scale: str, columns: Sequence[Column], clients: int, ask: Ask, add: Add | None
) -> tuple[np.ndarray, np.ndarray]:
    """What to subtract from every column and what to divide it by, from sums over the nodes' training rows."""
    shift, divisor = np.zeros(len(columns)), np.ones(len(columns))
    if scale == "none":
        return shift, divisor
    asked = {"columns": [_plain(column) for column in columns]}
    line = np.zeros(len(columns))
    sums = _asked(ask, add, clients, asked, (), (np.zeros(()), line, line))
    count = sum(float(one[0]) for one in sums)
    if scale == "norm":
        norm = np.sqrt(np.sum([one[2] for one in sums], axis=0))
        return shift, np.where(norm > 0, norm, 1.0)
    mean = np.sum([one[1] for one in sums], axis=0) / count
    squares = _asked(ask, add, clients, asked, (mean,), (line, line))
    varies = np.sum([one[1] for one in squares], axis=0) > 0
    return mean, np.where(varies, np.sqrt(np.sum([one[0] for one in squares], axis=0) / count), 1.0)


def _asked(
    ask: Ask,
    add: Add | None,
    clients: int,
    values: dict[str, Any],
    arrays: Sequence[np.ndarray],
    shapes: Sequence[np.ndarray],
) -> list[list[np.ndarray]]:
    """Every node's sums; or one list, of all nodes', under masks."""
    questions = {i: Message("moments", {**values, "client": i}, arrays) for i in range(clients)}
    if add is not None:
        return [add(questions, shapes)]
    answers = ask(questions)
    out = []
    for i in range(clients):
        found = checked(answers[i], shapes, f"node {i}")
        if not all(np.isfinite(a).all() for a in found):
            raise DataError(f"sums of node {i} must be finite, got others. A column is too large to be squared.")
        out.append(found)
    return out


def _plain(column: Column) -> dict[str, Any]:
    return {
        "name": column.name,
        "kind": column.kind,
        "categories": list(column.categories),
        "source": column.source,
        "category": column.category,
    }
