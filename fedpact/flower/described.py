"""What everyone knows of everyone's data: names, numbers of rows, columns, classes. And the experiment made of it.

The server and every node build the same `Experiment` from the same description, so that they have the same algorithm,
problem and privacy plan; `digest` tells whether they do. The rows in it are stand-ins: zeros, one row for each class
and the same for everyone, whatever number of rows a node tells.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from hashlib import sha256
from typing import Any

import numpy as np

from fedpact.core.errors import DataError, is_count, is_number, require, unknown
from fedpact.core.vertical import Layout
from fedpact.core.wire import Refused
from fedpact.data import Dataset, Federation
from fedpact.data.features import VerticalFederation
from fedpact.data.schema import Schema, _number
from fedpact.definition import Experiment
from fedpact.engines import ENGINES, FlowerEngine, PartiesEngine
from fedpact.experiment import parts


@dataclass(frozen=True)
class Description:
    """Of every client its name, its number of training rows, whether they are all zeros, and a mark of its data.

    `schema` says how cells become features, for everyone; `pixels` that features are bytes. Of data split by features
    `layout` says who holds which columns, and who the labels; `keys` are the parties' public keys; `unmatched` is what
    they have beyond the records of all (`data.align`).
    """

    names: tuple[str, ...]
    sizes: tuple[int, ...]
    blank: tuple[bool, ...]
    marks: tuple[str, ...]
    schema: Schema
    pixels: bool = False
    dataset: str = "federation"
    layout: Layout | None = None
    keys: tuple[str, ...] = ()
    unmatched: Mapping[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """As plain data, for a message."""
        more: dict[str, Any] = {}
        if self.layout is not None:
            more = {"layout": [list(map(list, self.layout.columns)), self.layout.closer]}
            more |= {"keys": list(self.keys), "unmatched": dict(self.unmatched)}
        return {
            "names": list(self.names),
            "sizes": list(self.sizes),
            "blank": list(self.blank),
            "marks": list(self.marks),
            "schema": self.schema.to_dict(),
            "pixels": self.pixels,
            "dataset": self.dataset,
            **more,
        }

    @staticmethod
    def from_dict(told: Mapping[str, Any]) -> Description:
        """The description that `to_dict` wrote."""
        try:
            names = tuple(map(str, told["names"]))
            layout = None
            if "layout" in told:
                columns, closer = told["layout"]
                layout = Layout(tuple(tuple(map(int, block)) for block in columns), names, int(closer))
            return Description(
                names,
                tuple(map(int, told["sizes"])),
                tuple(map(bool, told["blank"])),
                tuple(map(str, told["marks"])),
                Schema.from_dict(told["schema"]),
                bool(told["pixels"]),
                str(told["dataset"]),
                layout,
                tuple(map(str, told.get("keys", ()))),
                dict(told.get("unmatched", {})),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise DataError(f"description must be whole, got one that is damaged ({error!r}).") from None

    def federation(self, remarks: Sequence[str] = (), scored: bool = False) -> Federation:
        """A federation of stand-ins: everything is told but the rows. `remarks` are for the reader of the run;
        `scored` says that nodes score the rows they hold out.
        """
        features, classes = len(self.schema.columns), len(self.schema.classes)
        rows = np.arange(classes or 1)  # every class there is
        x = np.zeros((len(rows), features), np.uint8 if self.pixels else np.float64)
        dataset = Dataset(self.dataset, x, rows.astype(np.float64), self.schema)
        told = f"{len(self.sizes)} nodes"
        if self.layout is not None:
            everyone, blocks = ("all parties",), tuple(map(np.array, self.layout.columns))
            parts = (blocks, self.names, self.layout.closer, self.unmatched)
            return VerticalStandIn(dataset, (rows,), (), everyone, told, *parts, told=self, remarks=tuple(remarks))
        own = (rows,) * len(self.sizes)
        return StandIn(dataset, own, (), self.names, told, told=self, remarks=tuple(remarks), scored=scored)


@dataclass(frozen=True, eq=False)
class StandIn(Federation):
    """A federation whose rows are elsewhere."""

    told: Any = None
    remarks: tuple[str, ...] = ()
    scored: bool = False
    rows_of = "nobody"

    @property
    def sizes(self) -> np.ndarray:
        """d_i, as the nodes tell it."""
        return np.array(self.told.sizes)

    @cached_property
    def blank(self) -> list[int]:
        """The clients whose training rows are all zeros, as they say."""
        return [i for i, empty in enumerate(self.told.blank) if empty]

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the clients' marks of their data, and of how cells become features."""
        return _digest_of(self.told)


@dataclass(frozen=True, eq=False)
class VerticalStandIn(VerticalFederation):
    """A federation whose columns are elsewhere."""

    told: Any = None
    remarks: tuple[str, ...] = ()
    rows_of = "nobody"

    @property
    def sizes(self) -> np.ndarray:
        """The records, which are the same at all parties."""
        return np.array(self.told.sizes[:1])

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the parties' marks of their columns, of how cells become features, and of who holds which."""
        return sha256(f"{_digest_of(self.told)}:{tuple(self.layout)!r}".encode()).hexdigest()


def _digest_of(told: Description) -> str:
    text = sha256(repr((told.names, told.sizes, told.marks)).encode())
    text.update(repr(told.schema).encode())
    return text.hexdigest()


def experiment_of(
    values: Mapping[str, Any], description: Description, remarks: Sequence[str] = ()
) -> tuple[Experiment, str | None]:
    """The experiment that a file describes, on these nodes; and its name. What the file says of data stays unused."""
    found = parts(values)
    given = found.run.pop("engine", "flower")
    engine: Any = given if isinstance(given, FlowerEngine) else FlowerEngine()
    if found.private is not None:
        hint = "The server's noise would come from the seed, which nodes know. Let the clients add it."
        place = found.private.place
        require(place == "local", "place of [privacy]", '"local" in a federation', place, hint=hint)
    if description.layout is not None:
        how, hint = getattr(found.algorithm, "collection", "two-step"), "Parties send no rows to the server."
        require(how == "two-step", "collection", '"two-step" in a federation', how, hint=hint)
        engine = PartiesEngine.of(engine)
    holdout = values.get("split", {}).get("holdout", 0)
    holdout = holdout if is_number(holdout) and holdout > 0 else 0
    blind = found.private is not None or found.run.get("telemetry") == "none"
    scored = holdout > 0 and description.layout is None and not blind
    federation = description.federation([*_replaced(given), *_held_out(holdout, scored), *remarks], scored)
    options: dict[str, Any] = {"stop": found.stop, "privacy": found.private, "engine": engine, **found.run}
    return Experiment(found.algorithm, found.problem, federation, **options), found.name


def _replaced(engine: Any) -> list[str]:
    """Where the file names an engine of one machine: a sentence."""
    usual = FlowerEngine()
    name = next((name for name, kind in ENGINES.items() if type(engine) is kind), engine)
    if not isinstance(name, str) or name not in ENGINES:
        raise unknown("engine", name, ENGINES)
    if name == "flower":
        return []
    return [
        f'[run] engine = "{name}" is of one machine and was not used: the clients are nodes, and the engine is '
        f'"flower" with its defaults (deadline {usual.deadline:g} s, quorum {usual.quorum:g}).'
    ]


def _held_out(holdout: float, scored: bool) -> list[str]:
    """What becomes of rows that nodes hold out, where they do: a sentence."""
    if not holdout:
        return []
    share = f"[split] holdout = {holdout:g}: nodes do not train on that share of their rows"
    if scored:
        return [
            f"{share} but score it: test_loss and, for classes, test_accuracy are of all these rows. AUC, calibration "
            "and scores by client need predictions, and were left out: they stay at the nodes."
        ]
    return [
        f"{share}, and nothing was scored on it: the rows stay there. Have the nodes score the model, or leave holdout "
        "out to train on all."
    ]


def unused(values: Mapping[str, Any], surveys: Sequence[Mapping[str, Any]]) -> list[str]:
    """What of [data] and [split] is of no use where nodes have rows of their own, as their surveys tell: a sentence."""
    if any("made" in one for one in surveys):
        return []  # parts of the experiment's dataset, as [split] deals them
    joined, files = any("on" in one for one in surveys), any("file" in one for one in surveys)
    data, split = values.get("data", {}), values.get("split", {})
    idle = {"name", "csv"} if joined or files else {"name", "csv", "categorical", "coding"}
    used = {"holdout", "seed", *(["how"] if joined else ["column"] if files else [])}
    found = {"data": [key for key in data if key in idle], "split": [key for key in split if key not in used]}
    if not any(found.values()):
        return []
    what = " and ".join(f"[{table}] {', '.join(keys)}" for table, keys in found.items() if keys)
    was = "was" if sum(map(len, found.values())) == 1 else "were"
    told, clients = f"the clients are the {len(surveys)} nodes, with rows of their own", split.get("clients")
    other = "" if clients in (None, len(surveys)) else f", and not the {clients!r} of [split] clients"
    return [f"{what} {was} not used: {told}{other}."]


def _every(kind: Callable[[Any], Any]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, list | tuple) and all(map(kind, value))


_text = lambda value: isinstance(value, str)
_table = lambda value: isinstance(value, Mapping)
_texts, _counts = _every(_text), _every(is_count)
_layout = lambda value: (
    len(value) == 2 and _every(_counts)(value[0]) and is_count(value[1]) and value[1] < len(value[0])
)
#: What a value that a node tells must be, by what sentences call it.
KINDS: dict[str, Callable[[Any], Any]] = {
    "a word": lambda value: _text(value) and value,
    "true or false": lambda value: isinstance(value, bool),
    "a number from 1 to 2³¹−1": lambda value: is_count(value, 1),
    "a number, or left out": lambda value: value is None or is_count(value),
    "64 digits of 0-9 and a-f": lambda value: _text(value) and re.fullmatch("[0-9a-f]{64}", value),
    "a table": _table,
    "a list of texts": _texts,
    "a list of finite numbers": _every(is_number),
    "a list of finite numbers as texts": _every(lambda value: _text(value) and np.isfinite(_number(value))),
    "a list of tables": _every(_table),
    "a table of lists of texts": lambda value: _table(value) and all(map(_texts, value.values())),
    "everyone's columns and the closer": lambda value: isinstance(value, list | tuple) and _layout(value),
}


def value_of(values: Mapping[str, Any], key: str, kind: str, node: Any) -> Any:
    """What a node told under this key, if it is there and of this kind: whoever joins may tell anything."""
    found = values.get(key)
    hint = "Install the same fedpact at the node as here."
    require(KINDS[kind](found), f"{key} of node {node!r}", kind, found, hint=hint)
    return found


def schema_told(values: Mapping[str, Any], node: Any) -> Schema:
    """The schema that a node told."""
    try:
        return Schema.from_dict(values)
    except Exception as error:
        raise Refused(f"schema of node {node!r} must be whole, got one that is damaged ({error}).") from None


def checked_columns(own: Sequence[str], others: Sequence[str], who: str, first: str) -> None:
    """Refuse nodes whose tables have not the same columns."""
    if set(own) != set(others):
        extra = sorted(set(own) ^ set(others))
        raise DataError(
            f"columns must be the same at every node, got {', '.join(extra)} at only one of {first!r} and {who!r}. "
            "Rename them, or list what is not everyone's in [data] drop."
        )
