"""One CSV file per party, joined by ids into a feature-split federation."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fedpact.core.errors import DataError, UnknownName, nearest, require, require_one_of, unknown
from fedpact.data.dataset import SCALES, scaled_dataset
from fedpact.data.features import VerticalFederation, split_features
from fedpact.data.schema import Column, line_of
from fedpact.data.tables import CODINGS, TASKS, code_table, code_target, column_names, read_rows

EXAMPLES = 3  # ids that are shown of those that others lack

Files = Mapping[str, str | os.PathLike[str]] | Sequence[str | os.PathLike[str]]


class _Table(NamedTuple):
    party: str
    path: str
    header: list[str]
    rows: list[list[str]]
    ids: dict[str, int]  # and the row of each


def align(
    files: Files,
    on: str,
    target: str,
    drop: str | Sequence[str] = (),
    categorical: str | Sequence[str] = (),
    scale: str = "standard",
    task: str = "auto",
    coding: str = "ordinal",
    unmatched: str = "refuse",
    holdout: float = 0.0,
    seed: int = 0,
) -> VerticalFederation:
    """A federation of one CSV file per party, joined by the ids in their column `on`, compared as text.

    `files` are paths, or paths by the parties' names (default: the files' names without ending). The party whose file
    has the column `target` closes the loss, and the records are in its order. `drop`, `categorical`, `scale`, `task`
    and `coding` are those of `from_csv`. A column that several parties have becomes `party.column`; its old name then
    means all of them. Records that some party lacks are refused, or left out by unmatched="drop" (see `alignment`).

    The ids are joined in the clear: this simulates the parties on one machine. `fedpact.secure.psi` finds the same rows
    without showing ids.
    """
    require_one_of("scale", scale, SCALES)
    require_one_of("task", task, TASKS)
    require_one_of("coding", coding, CODINGS)
    require_one_of("unmatched", unmatched, ("refuse", "drop"))
    tables = [_read(party, path, on) for party, path in _paths(files)]
    closer = _closer(tables, on, target)
    kept, report = _matched(tables, on, closer, unmatched)
    tables, aliases = _prefixed(tables, on)
    skip = {on, target} | _picked("drop", drop, aliases, on, target)
    categories = _picked("categorical", categorical, aliases, on, target)

    keep = [[table.ids[key] for key in kept] for table in tables]
    coded = [
        code_table(table.header, table.rows, table.path, rows, skip, categories, coding)
        for table, rows in zip(tables, keep, strict=True)
    ]
    for i, (table, (own, _, _)) in enumerate(zip(tables, coded, strict=True)):
        if not own and i != closer:  # who has the labels may have nothing else
            text = f"{table.path} must have a feature, got none besides the id, the target and dropped columns"
            raise DataError(f"{text}. Leave the party out, or drop fewer columns.")
    columns = [column for own, _, _ in coded for column in own]
    blocks = np.split(np.arange(len(columns)), np.cumsum([len(own) for own, _, _ in coded])[:-1])
    raw = {name: values for _, _, own in coded for name, values in own.items()}
    _, path, header, rows, _ = tables[closer]
    y, classes = code_target(target, header, rows, path, keep[closer], task)
    x, parties = np.concatenate([cells for _, cells, _ in coded], axis=1), [table.party for table in tables]
    dataset = scaled_dataset("+".join(parties), columns, x, y, scale=scale, target=target, classes=classes, raw=raw)
    federation = split_features(dataset, None, blocks, parties, closer, holdout, seed)
    return replace(federation, unmatched=report, description=f"{federation.description}, aligned on {on!r}")


def _paths(files: Any) -> list[tuple[str, str | os.PathLike[str]]]:
    """The paths and the names of their parties."""
    listed = isinstance(files, Mapping | list | tuple)
    paths = list(files.values() if isinstance(files, Mapping) else files) if listed else []
    ok = len(paths) >= 2 and all(isinstance(path, str | os.PathLike) for path in paths)
    require(ok, "files", "at least two paths, one per party", files)
    names = [str(name) for name in files] if isinstance(files, Mapping) else [Path(path).stem for path in paths]
    hint = "Give the paths by name, as {name: path}."
    require(len(set(names)) == len(names), "names of the parties", "distinct", names, hint=hint)
    return list(zip(names, paths, strict=True))


def _read(party: str, path: str | os.PathLike[str], on: str) -> _Table:
    header, rows = read_rows(path)
    if on not in header:
        got = f"{', '.join(header)}.{nearest(on, header)}"
        raise UnknownName(f"{path} must have the id column {on!r}, got only {got}")
    ids: dict[str, int] = {}
    k = header.index(on)
    for i, row in enumerate(rows):
        if row[k] == "":
            raise Column(on, "category").refusal("", f"{path}, line {line_of(header, rows, i)}", "")
        if row[k] in ids:
            first, second = (line_of(header, rows, j) for j in (ids[row[k]], i))
            text = f"id {row[k]!r} of {path} must occur once, got it on lines {first} and {second}"
            raise DataError(f"{text}. Remove one of them.")
        ids[row[k]] = i
    return _Table(party, str(path), header, rows, ids)


def _closer(tables: Sequence[_Table], on: str, target: str) -> int:
    """The number of the one party that has the target."""
    require(target != on, "target", "another column than the id", target)
    having = [i for i, table in enumerate(tables) if target in table.header]
    if not having:
        raise unknown("target", target, {name for table in tables for name in table.header} - {on})
    if len(having) > 1:
        text = (
            f"target {target!r} must be in one party's file, got it in {' and '.join(tables[i].path for i in having)}"
        )
        raise DataError(f"{text}. Remove it from the others.")
    return having[0]


def _matched(tables: Sequence[_Table], on: str, closer: int, unmatched: str) -> tuple[list[str], dict[str, Any]]:
    """The ids that every party has, in the closer's order, and what the parties have beyond them, if anything."""
    kept = [key for key in tables[closer].ids if all(key in table.ids for table in tables)]
    if not kept:
        first = ", ".join(f"{table.path} begins with {next(iter(table.ids))!r}" for table in tables)
        raise DataError(f"files must share ids in column {on!r}, got none that all have: {first}. Compare their ids.")
    if all(len(table.ids) == len(kept) for table in tables):
        return kept, {}
    common, report, said = set(kept), {}, []
    for table in tables:
        extra = [key for key in table.ids if key not in common]
        counts = {"records": len(table.ids), "kept": len(kept), "missing": len(extra)}
        report[table.party] = {**counts, "examples": tuple(extra[:EXAMPLES])}
        such = ", ".join(map(repr, extra[:EXAMPLES])) + (", …" if len(extra) > EXAMPLES else "")
        said.append(f"{table.path} {len(extra)} of {len(table.ids)}" + (f" ({such})" if such else ""))
    if unmatched == "refuse":
        text = f"files must have the same ids in column {on!r}, got ids that others lack: {'; '.join(said)}"
        raise DataError(f'{text}. Correct the files, or keep the {len(kept)} that all have with unmatched="drop".')
    return kept, report


def _prefixed(tables: Sequence[_Table], on: str) -> tuple[list[_Table], dict[str, set[str]]]:
    """The tables with distinct column names, and the columns that every name, in the files or new, means."""
    count = Counter(name for table in tables for name in table.header if name != on)
    renamed: list[_Table] = []
    aliases: dict[str, set[str]] = {}
    for table in tables:
        header = [f"{table.party}.{name}" if count[name] > 1 else name for name in table.header]
        for old, new in zip(table.header, header, strict=True):
            for name in (old, new):
                aliases.setdefault(name, set()).add(new)
        renamed.append(table._replace(header=header))
    return renamed, aliases


def _picked(argument: str, given: Any, aliases: Mapping[str, set[str]], on: str, target: str) -> set[str]:
    """The columns that the names in an argument mean."""
    names = column_names(argument, given)
    for name in names:
        if name not in aliases:
            raise unknown(argument, name, aliases)
        require(name not in (on, target), argument, "columns other than the id and the target", names)
    return {column for name in names for column in aliases[name]}
