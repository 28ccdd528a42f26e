"""A CSV file at each party, joined by ids that nobody shows: private set intersection over the link.

    survey   the file's header                                 →  who has the target, how columns are named
    align    a session, then sets that go round (`secure.psi`) →  each party has its rows that all hold, one order
    coded    each party codes and scales its own columns       →  columns and scaling, for the model's schema; no row

With K parties this takes 2K questions to each, all at the same time. The server is the matcher: it learns the sizes of
the parties' sets and of their intersections, and no id; `secure.psi` says who learns what. The records are in the
closer's order, as `data.align` has them: a run over nodes draws the same batches as a simulation of the same files.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fedpact.core.errors import DataError, InvalidArgument, require_one_of
from fedpact.core.vertical import Layout
from fedpact.core.wire import Forgotten, Message, Refused
from fedpact.data.alignment import _closer, _picked, _prefixed, _read, _Table
from fedpact.data.dataset import SCALES, fitted_on, scaled_dataset
from fedpact.data.federation import set_aside
from fedpact.data.schema import Column, Schema
from fedpact.data.tables import CODINGS, TASKS, code_table, code_target
from fedpact.flower.described import KINDS, schema_told, value_of
from fedpact.flower.sources import Columns, Source, Survey
from fedpact.secure import psi

log = logging.getLogger("fedpact")
Ask = Callable[[Mapping[int, Message]], dict[int, Message]]
Tell = Callable[[Mapping[int, Message]], None]
#: What a party tells of its columns, and of what kind.
PARTY = {
    "columns": "a list of tables",
    **dict.fromkeys(("scale", "shift"), "a list of finite numbers"),
    "classes": "a list of texts",
}


# The server


class Plan(NamedTuple):
    """Who has the target, and what each party makes of its file."""

    closer: int
    parties: list[dict[str, Any]]


def plan(values: Mapping[str, Any], names: Sequence[str], surveys: Sequence[Mapping[str, Any]]) -> Plan:
    """From the files' headers, as `data.align` names and picks columns."""
    table = values.get("data", {})
    on, target = str(table["on"]), table.get("target")
    if not isinstance(target, str):
        raise InvalidArgument("[data] must have 'target' for CSV files at nodes, got none. Name the column.")
    scale, task, coding = (table.get(k, v) for k, v in (("scale", "standard"), ("task", "auto"), ("coding", "ordinal")))
    for name, value, known in (("scale", scale, SCALES), ("task", task, TASKS), ("coding", coding, CODINGS)):
        require_one_of(name, value, known)
    tables = [
        _Table(name, f"the file of {name!r}", list(value_of(s, "header", "a list of texts", name)), [], {})
        for name, s in zip(names, surveys, strict=True)
    ]
    closer = _closer(tables, on, target)
    tables, aliases = _prefixed(tables, on)
    skip = {on, target} | _picked("drop", table.get("drop", ()), aliases, on, target)
    categories = _picked("categorical", table.get("categorical", ()), aliases, on, target)
    own = lambda picked, header: sorted(picked & set(header))
    parties = [
        {
            "header": one.header,
            "skip": own(skip, one.header),
            "categorical": own(categories, one.header),
            "target": target if i == closer else None,
            **{"scale": scale, "task": task, "coding": coding},
        }
        for i, one in enumerate(tables)
    ]
    return Plan(closer, parties)


def align(values: Mapping[str, Any], names: Sequence[str], closer: int, ask: Ask, tell: Tell) -> dict[str, Any]:
    """Let the parties find the records that all have. Returns what they have beyond them, by party, if anything."""
    unmatched = values.get("data", {}).get("unmatched", "refuse")
    require_one_of("unmatched", unmatched, ("refuse", "drop"))
    session, everyone = os.urandom(16), range(len(names))
    base = {"session": session.hex(), "parties": list(names)}

    def asked(step: str, messages: Mapping[int, Any]) -> dict[int, Message]:
        return ask({i: _packed(step, i, base, one) for i, one in messages.items()})

    sets = {i: _blinded(one, session, names[i]) for i, one in asked("begin", dict.fromkeys(everyone)).items()}
    for hop in range(1, len(names)):  # the set of party i is with party i + hop
        holders = {(i + hop) % len(names): i for i in everyone}
        passed = asked("blind", {j: sets[i] for j, i in holders.items()})
        sets = {i: _blinded(passed[j], session, names[j]) for j, i in holders.items()}
    places = psi.match(session, names, list(sets.values()))
    kept = len(places[names[0]].places)
    report = _report(names, {i: len(one.points) // psi.POINT_BYTES for i, one in sets.items()}, kept, unmatched)
    for hop in range(len(names) - 1, 0, -1):
        owners = {(i + hop) % len(names): names[i] for i in everyone}
        passed = asked("unwind", {j: places[name] for j, name in owners.items()})
        places = {name: _places(passed[j], session, names[j]) for j, name in owners.items()}
    ends = asked("finish", {i: places[name] for i, name in enumerate(names)})
    order = psi.Order(session, names[closer], _array(ends[closer], np.int64, names[closer]))
    tell({i: _packed("arrange", i, base, order) for i in everyone})
    return report


def _report(names: Sequence[str], sizes: Mapping[int, int], kept: int, unmatched: str) -> dict[str, Any]:
    """By party, how many records others lack; refused where that is not allowed."""
    if not kept:
        raise DataError("files must share ids, got none that all parties have. Compare how ids are written.")
    if all(size == kept for size in sizes.values()):
        return {}
    said = "; ".join(f"{name} {sizes[i] - kept} of {sizes[i]}" for i, name in enumerate(names))
    if unmatched == "refuse":
        text = f"files must have the same ids, got ids that others lack: {said}"
        raise DataError(f'{text}. Correct the files, or keep the {kept} that all have with unmatched = "drop".')
    about = lambda size: {"records": size, "kept": kept, "missing": size - kept, "examples": []}
    return {name: about(sizes[i]) for i, name in enumerate(names)}


def schema_of(
    values: Mapping[str, Any], names: Sequence[str], closer: int, answers: Sequence[Mapping[str, Any]]
) -> tuple[Schema, Layout]:
    """The parties' columns one after the other, and who holds which."""
    target = str(values["data"]["target"])
    for one, name in zip(answers, names, strict=True):
        for key, kind in PARTY.items():
            value_of(one, key, kind, name)
        if one["columns"]:
            schema_told({**one, "target": target}, name)
    sizes = [len(one["columns"]) for one in answers]
    ends = np.cumsum(sizes)
    blocks = [tuple(range(end - size, end)) for size, end in zip(sizes, ends.tolist(), strict=True)]
    for name, size, i in zip(names, sizes, range(len(names)), strict=True):
        if not size and i != closer:  # who has the labels may have nothing else
            text = f"file of {name!r} must have a feature, got none besides the id, the target and dropped columns"
            raise DataError(f"{text}. Leave the party out, or drop fewer columns.")
    joined: dict[str, list[Any]] = {k: [v for one in answers for v in one[k]] for k in ("columns", "scale", "shift")}
    schema = Schema.from_dict({**joined, "target": target, "classes": tuple(answers[closer]["classes"])})
    return schema, Layout(tuple(blocks), tuple(names), closer)


# Messages


def _packed(step: str, party: int, base: Mapping[str, Any], what: Any) -> Message:
    """A question of the alignment, with a message of `secure.psi` in it."""
    values = {**base, "step": step, "client": party}
    if what is None:
        return Message("align", values)
    values |= {"owner": what.owner, "path": list(getattr(what, "path", ()))}
    blinded = isinstance(what, psi.Blinded)
    return Message("align", values, [np.frombuffer(what.points, np.uint8) if blinded else np.asarray(what.places)])


def _array(message: Message, dtype: Any, who: str = "the server") -> np.ndarray:
    ok = len(message.arrays) == 1 and message.arrays[0].dtype == dtype and message.arrays[0].ndim == 1
    if not ok:
        found = [(array.shape, str(array.dtype)) for array in message.arrays]
        raise Refused(f"{who}'s message of the alignment must hold one list of {np.dtype(dtype)}, got {found}.")
    return message.arrays[0]


def _blinded(message: Message, session: bytes, who: str = "the server") -> psi.Blinded:
    return psi.Blinded(session, *_route(message, who), _array(message, np.uint8, who).tobytes())


def _places(message: Message, session: bytes, who: str = "the server") -> psi.Places:
    return psi.Places(session, *_route(message, who), _array(message, np.int64, who))


def _route(message: Message, who: str) -> tuple[str, tuple[str, ...]]:
    """Whose set it is, and with whom it has been."""
    owner, path = message.values.get("owner"), message.values.get("path")
    if not (KINDS["a word"](owner) and KINDS["a list of texts"](path)):
        raise Refused(f"{who}'s message of the alignment must name an owner and a path, got {owner!r} and {path!r}.")
    return str(owner), tuple(path or ())


# A party's node


class Joined(Source):
    """A CSV file with a header and a column of ids; which of its rows all parties have, once they are aligned."""

    def __init__(self, path: str, table: Mapping[str, Any], split: Mapping[str, Any]) -> None:
        self.split = dict(split)
        try:
            self.table = _read(Path(path).stem, path, str(table["on"]))
        except DataError as error:  # which may have an id in it, and goes to the server
            log.error("%s", error)
            raise DataError(
                "ids must be in every row of the file, each once, got others. See the node's log."
            ) from None
        self.orders = table.get("target") in self.table.header  # the closer's order of records is everyone's
        self.kept: Sequence[int] = ()
        self.party: psi.Party | None = None

    def survey(self) -> Survey:
        """The header."""
        return Survey(on=True, header=self.table.header)

    def align(self, name: str, message: Message) -> bytes:
        """A step of the alignment."""
        values, step = message.values, message.values["step"]
        session = bytes.fromhex(values["session"])
        if step == "begin":
            self.party = psi.Party(session, name, values["parties"], list(self.table.ids))
            return _packed("begin", 0, {}, self.party.begin()).pack()
        if self.party is None:
            raise Forgotten(
                "question must come after the alignment began, got one before it. The node was started again."
            )
        if step == "blind":
            return _packed("blind", 0, {}, self.party.blind(_blinded(message, session))).pack()
        if step == "unwind":
            return _packed("unwind", 0, {}, self.party.unwind(_places(message, session))).pack()
        if step == "finish":
            self.party.finish(_places(message, session))
            return (_packed("finish", 0, {}, self.party.order()) if self.orders else Message("align", {})).pack()
        order = psi.Order(session, str(values["owner"]), _array(message, np.int64))
        rows = list(self.table.ids.values())
        self.kept = [rows[k] for k in self.party.arrange(order)]
        self.party = None  # its key with it
        return Message("align", {}).pack()

    def columns(self, name: str, plan: Mapping[str, Any]) -> tuple[Columns, dict[str, Any]]:
        """The own columns of the common records that are trained on, coded and scaled; and how."""
        _, path, _, cells, _ = self.table
        header, kept, target = list(plan["header"]), list(map(int, self.kept)), plan["target"]
        skip, categories = set(plan["skip"]), set(plan["categorical"])
        columns, coded, _ = code_table(header, cells, path, kept, skip, categories, str(plan["coding"]))
        y, classes = np.zeros(len(kept)), tuple[str, ...]()
        if target is not None:
            y, classes = code_target(target, header, cells, path, kept, str(plan["task"]))
        holdout, seed = self.split.get("holdout", 0.0), self.split.get("seed", 0)
        rows, aside = set_aside(np.arange(len(kept)), holdout, seed, 0)
        labels = y[rows] if target is not None else None
        if not columns:
            return Columns(np.zeros((len(rows), 0)), labels), _about((), (), (), classes)
        dataset = scaled_dataset(name, columns, coded, y, scale=str(plan["scale"]), target="y", classes=classes, raw={})
        dataset = fitted_on(dataset, rows) if len(aside) else dataset
        schema = dataset.schema
        return Columns(dataset.x[rows], labels), _about(schema.columns, schema.scale, schema.shift, classes)


def _about(
    columns: Sequence[Column], scale: Sequence[float], shift: Sequence[float], classes: Sequence[str]
) -> dict[str, Any]:
    plain = Schema(tuple(columns), tuple(scale), tuple(shift), "y").to_dict()["columns"] if columns else []
    return {"columns": plain, "scale": list(scale), "shift": list(shift), "classes": list(classes)}
