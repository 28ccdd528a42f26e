"""A node's rows: from a CSV file, from a function, or a part of the experiment's own dataset.

What a source tells before the run is what everyone's features need: `survey` names its columns, the categories in them
and the values of its target; `moments` adds up its columns. `federation` makes of it the rows to train on, as agreed.
"""

from __future__ import annotations

import hashlib
import hmac
import importlib
import inspect
import os
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import scipy.sparse

from fedpact import data
from fedpact.core.errors import DataError, InvalidArgument, require, unknown
from fedpact.core.files import make_folder, write_atomic
from fedpact.core.wire import Refused
from fedpact.data import Dataset, Federation
from fedpact.data.federation import OwnRows, set_aside
from fedpact.data.schema import Column, Schema, code_rows, line_of
from fedpact.data.tables import MOST_CLASSES, class_codes, column_names, listed, read_rows
from fedpact.experiment import check_rows, federation_of

#: Keys of a node's configuration.
KEYS = ("name", "client", "csv", "loader", "state", "threads", "epsilon", "delta")
#: The folder, in a node's own, that says which run a server's session is of.
KEPT = "sessions"


#: A column whose cells are all this close to its mean, relatively, is constant: a sum of equal numbers is not exact.
ROUNDING = 1e-12


class Survey(dict[str, Any]):
    """What a source tells, as plain data."""

    def without_words(self) -> Survey:
        """What it tells where words are told by masked sums alone: of which columns it has some, not which."""
        hidden: dict[str, Any] = {"categories": dict.fromkeys(self.get("categories", ()), ()), "values": ()}
        return Survey({key: hidden.get(key, value) for key, value in self.items()})


def own_source(config: Mapping[str, Any], values: Mapping[str, Any]) -> Source:
    """The source that a node's configuration names."""
    for key in config:
        if key not in KEYS:
            raise unknown("key of the node's configuration", key, KEYS)
    check_rows(values)  # a server that did not would have a misspelt scale = "none" ask for sums
    hint = "Without epsilon the node bounds nothing: give it, or leave delta out."
    alone = "delta" in config and "epsilon" not in config
    require(not alone, "delta of the node's configuration", "given with epsilon", config.get("delta"), hint=hint)
    both = "csv" in config and "loader" in config
    require(not both, "node configuration", "with csv or loader, not both", "both", hint="Leave one out.")
    table, split = dict(values.get("data", {})), dict(values.get("split", {}))
    if "csv" in config and "on" in table:  # columns of records that others have too
        from fedpact.flower.joined import Joined  # which is a source

        return Joined(str(config["csv"]), table, split)
    if "csv" in config:
        return Table(str(config["csv"]), table, split)
    if "loader" in config:
        return Loaded(str(config["loader"]), table, split)
    return Part(values)


class Columns(NamedTuple):
    """A party's own columns of the records that are trained on, and the labels where it has them: nobody else's."""

    x: Any
    y: np.ndarray | None

    @property
    def records(self) -> int:
        """N."""
        return self.x.shape[0]

    @property
    def digest(self) -> str:
        """SHA-256 of the numbers."""
        x = (self.x.data, self.x.indices, self.x.indptr) if scipy.sparse.issparse(self.x) else (self.x,)
        text = hashlib.sha256(repr((self.x.shape, self.x.dtype.str, self.y is None)).encode())
        for array in (*x, *(() if self.y is None else (self.y,))):
            text.update(np.ascontiguousarray(array).tobytes())
        return text.hexdigest()


def place_among(parties: Sequence[str], name: str, client: int) -> int:
    """Which of a split's parties a node is: by its name, or by its number."""
    return list(parties).index(name) if name in parties else client


class Source:
    """A node's rows before anything is agreed; `client` is its number, once it has one.

    Of data split by features `kept` are the rows of its file that all parties have, in their common order.
    """

    client = 0
    kept: Sequence[int] = ()

    def survey(self) -> Survey:
        """Columns, categories, values of the target."""
        raise NotImplementedError

    def moments(self, columns: Sequence[Column], mean: np.ndarray | None) -> list[np.ndarray]:
        """Of every column over the training rows: their number, sum and squares; given the mean, the squares about it
        and whether anything in it differs from it by more than rounding.
        """
        x = self.coded(columns)[self.rows()[0]]
        if mean is None:
            return [np.asarray(float(len(x))), x.sum(axis=0), np.sum(x**2, axis=0)]
        varies = np.any(np.abs(x - mean) > ROUNDING * np.abs(mean), axis=0)
        return [np.sum((x - mean) ** 2, axis=0), varies.astype(np.float64)]

    def coded(self, columns: Sequence[Column]) -> np.ndarray:
        """All rows as numbers, before scaling."""
        raise NotImplementedError

    def rows(self) -> tuple[np.ndarray, np.ndarray]:
        """Which rows are trained on, and which are held out."""
        raise NotImplementedError

    def federation(self, schema: Schema, name: str) -> Federation:
        """One client's federation, of its real rows."""
        raise NotImplementedError

    def columns(self, name: str, plan: Mapping[str, Any]) -> tuple[Columns, dict[str, Any]]:
        """Of data split by features: the party's own columns, and what of them goes into everyone's schema."""
        raise InvalidArgument("rows of a node must have ids to be joined with others' columns, got none. Give it csv.")


class _Raw(Source):
    """Cells or numbers that have to be made features of, with everyone."""

    name, path = "rows", ""
    table: dict[str, Any]
    split: dict[str, Any]

    def _count(self) -> int:
        raise NotImplementedError

    def rows(self) -> tuple[np.ndarray, np.ndarray]:
        """By [split] holdout and seed, as a simulation of the same clients would draw them."""
        holdout, seed = self.split.get("holdout", 0.0), self.split.get("seed", 0)
        return set_aside(np.arange(self._count()), holdout, seed, self.client)

    def labels(self, schema: Schema) -> np.ndarray:
        """y, by the classes that were agreed on."""
        raise NotImplementedError

    def federation(self, schema: Schema, name: str) -> Federation:
        """The rows, coded and scaled as agreed."""
        x = schema.scaled(self.coded(schema.columns))
        dataset = Dataset(self.name, x, self.labels(schema), schema)
        rows, aside = self.rows()
        return OwnRows(dataset, (rows,), (aside,), (name,), "rows of one node")


class Table(_Raw):
    """A CSV file with a header, read by the experiment's [data]: target, drop, categorical, scale, task, coding; and
    categories and classes, which the node then does not tell.
    """

    def __init__(self, path: str, table: dict[str, Any], split: dict[str, Any]) -> None:
        self.path, self.table, self.split = path, table, split
        self.name = Path(path).stem
        if "target" not in table:
            raise InvalidArgument("[data] must have 'target' for CSV files at nodes, got none. Name the column.")
        self.target = str(table["target"])
        self.header, self.cells = read_rows(path)
        self.lists, self.classes = listed(table.get("categories"), table.get("classes", ()), table.get("task", "auto"))
        self.categorical = [*column_names("categorical", table.get("categorical", ())), *self.lists]
        self.drop = column_names("drop", table.get("drop", ()))
        if "column" in split and split["column"] not in (*self.drop, *self.categorical):
            self.drop.append(str(split["column"]))  # says whose a row is: no feature
        for argument, names in (("target", [self.target]), ("categorical", self.categorical)):
            for name in names:
                if name not in self.header:
                    raise unknown(f"{argument} in {path}", name, self.header)

    def _count(self) -> int:
        return len(self.cells)

    def _column(self, name: str) -> list[str]:
        k = self.header.index(name)
        return [row[k] for row in self.cells]

    def survey(self) -> Survey:
        """Columns in the file's order, every category's values, and what the target holds."""
        features = [name for name in self.header if name != self.target and name not in self.drop]
        require(features, "drop", "fewer columns, so that a feature is left", self.drop)
        cells = self._column(self.target)
        values = Column(self.target, "number").code(cells)
        distinct, many = sorted(set(cells)), len(np.unique(values)) > MOST_CLASSES
        numbers, none = bool(np.isfinite(values).all()), not bool(np.isfinite(values).any())
        task = self.table.get("task", "auto")
        hidden = task == "regression" or (task == "auto" and numbers and many)  # numbers, not classes: cells
        told = [name for name in self.categorical if name in features and name not in self.lists]
        if self.classes:
            numbers, none, many, hidden = False, True, False, True  # whatever it holds
        return Survey(
            columns=features,
            categories={name: sorted(set(self._column(name)) - {""}) for name in told},
            numbers=numbers,
            none=none,
            many=many,
            values=[] if hidden or len(distinct) > 10 * MOST_CLASSES else distinct,
            file=True,
        )

    def coded(self, columns: Sequence[Column]) -> np.ndarray:
        """All rows as numbers; a cell that cannot be read is named with its line."""
        hint = "Add the column to `categorical` to code its values, or to `drop` to leave it out."
        return code_rows(columns, self.header, self.cells, self.path, hint)

    def labels(self, schema: Schema) -> np.ndarray:
        """Class codes, or the numbers themselves."""
        cells = self._column(self.target)
        column = Column(self.target, "number")
        y = class_codes(cells, schema.classes) if schema.classes else column.code(cells)
        if self.classes:
            column = Column(self.target, "category", schema.classes)
        bad = np.flatnonzero(~np.isfinite(y))
        if bad.size:
            place = f"{self.path}, line {line_of(self.header, self.cells, int(bad[0]))}"
            hint = 'Correct it; task="classification" reads every value as a class.'
            raise column.refusal(cells[bad[0]], place, hint)
        return y


class Loaded(_Raw):
    """What a function `module:name` returns: (x, y), arrays of numbers. The module may lie in the node's folder."""

    def __init__(self, place: str, table: dict[str, Any], split: dict[str, Any]) -> None:
        self.table, self.split, self.name, self.path = table, split, place, place
        module, colon, name = place.partition(":")
        if not colon or not name:
            raise InvalidArgument(f"loader must be module:function, got {place!r}. Such as wards:load.")
        try:
            if os.getcwd() not in sys.path:
                sys.path.insert(0, os.getcwd())
            function = getattr(importlib.import_module(module), name)
            given = function(**({"table": table} if "table" in inspect.signature(function).parameters else {}))
        except (ImportError, AttributeError) as error:
            raise InvalidArgument(f"loader must be a function that can be imported, got {place!r}: {error}.") from None
        except Exception as error:
            raise DataError(f"loader {place!r} must return (x, y), got {type(error).__name__}: {error}.") from None
        pair = isinstance(given, tuple) and len(given) == 2
        made = (
            given if isinstance(given, Dataset) else data.from_arrays(given[0], given[1], classes=()) if pair else None
        )
        if made is None:
            raise DataError(f"loader {place!r} must return (x, y) or a Dataset, got {type(given).__name__}.")
        self.dataset = made

    def _count(self) -> int:
        return self.dataset.rows

    def survey(self) -> Survey:
        """Columns by name, but those to drop, and the target's values, where the experiment does not list them."""
        y = self.dataset.y
        found = np.unique(y)
        classes = listed(None, self.table.get("classes", ()), self.table.get("task", "auto"))[1]
        drop = column_names("drop", self.table.get("drop", ()))
        return Survey(
            columns=[column.name for column in self.dataset.schema.columns if column.name not in drop],
            categories={},
            numbers=True,
            none=False,
            many=not classes and len(found) > MOST_CLASSES,
            values=[]
            if classes or self.table.get("task") == "regression" or len(found) > MOST_CLASSES
            else [_exact(v) for v in found],
        )

    def coded(self, columns: Sequence[Column]) -> np.ndarray:
        """The numbers as they are, in everyone's order of the columns."""
        own = [column.name for column in self.dataset.schema.columns]
        for column in columns:
            if column.kind != "number" or column.name not in own:
                text = (
                    f"column {column.read_from!r} must hold numbers where a node has a loader, got categories of others"
                )
                raise DataError(f"{text}. Code them in the loader, or give every node a CSV file.")
        x = self.dataset.x[:, [own.index(column.name) for column in columns]]
        return x.toarray() if scipy.sparse.issparse(x) else np.asarray(x, np.float64)

    def labels(self, schema: Schema) -> np.ndarray:
        """Class codes, or the numbers themselves."""
        y = self.dataset.y
        if not schema.classes:
            return y
        codes = {_number(name): float(k) for k, name in enumerate(schema.classes)}
        coded = np.array([codes.get(float(v), np.nan) for v in y])
        if not np.isfinite(coded).all():
            odd = float(y[np.flatnonzero(~np.isfinite(coded))[0]])
            raise DataError(
                f"y of loader {self.path!r} must be among the classes, {', '.join(schema.classes)}, got {odd!r}."
            )
        return coded


class Part(Source):
    """The node's share of the experiment's own dataset, for demonstrations and tests: everyone could load it all."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self.whole: Any = federation_of(values)

    def survey(self) -> Survey:
        """The schema is the dataset's: there is nothing to agree on."""
        dataset = self.whole.dataset
        layout = getattr(self.whole, "layout", None)
        more = {} if layout is None else {"layout": [list(map(list, layout.columns)), layout.closer]}
        names = list(self.whole.names if layout is None else layout.names)
        pixels = bool(dataset.x.dtype == np.uint8)
        return Survey(made=dataset.schema.to_dict(), pixels=pixels, dataset=dataset.name, names=names, **more)

    def federation(self, schema: Schema, name: str) -> Federation:
        """The rows of client number `client`."""
        whole = self.whole
        ok = self.client < whole.clients
        require(ok, "client", f"a number below the split's {whole.clients} clients", self.client)
        rows, aside = whole.rows[self.client], whole.held_out[self.client]
        both = whole.dataset.take(np.concatenate([rows, aside]))
        own, rest = np.arange(len(rows)), np.arange(len(rows), len(rows) + len(aside))
        return OwnRows(both, (own,), (rest,), (name,), "a part of the experiment's data")

    def columns(self, name: str, plan: Mapping[str, Any]) -> tuple[Columns, dict[str, Any]]:
        """The columns that the split gives this party; nothing else of the dataset is kept."""
        layout, dataset, (rows,) = self.whole.layout, self.whole.dataset, self.whole.rows
        place = place_among(layout.names, name, self.client)
        ok = place < len(layout.columns)
        require(ok, "client", f"a number below the split's {len(layout.columns)} parties", self.client)
        x = dataset.x[rows][:, list(layout.columns[place])]
        y = dataset.y[rows] if place == layout.closer else None
        self.whole = None
        return Columns(x, y), {}


def _session_file(folder: Path, session: str) -> Path:
    """Names come from the network: hashed, they are no paths."""
    return folder / KEPT / hashlib.sha256(session.encode()).hexdigest()[:32]


def _is_run(run: Any) -> bool:
    return isinstance(run, str) and re.fullmatch("[0-9a-f]{16}", run) is not None


def run_folder(folder: Path, run: Any) -> Path:
    """Where a node keeps a run, by the name that the server gives it: digits of a hash, and no path."""
    if not _is_run(run):
        raise Refused(f"run must be 16 digits of 0-9 and a-f, got {run!r}. Nothing was written.")
    return folder / f"run-{run}"


def remember(folder: Path, session: str, run: str) -> None:
    """Write down, at a node, which run a server's session is of."""
    make_folder(folder / KEPT)
    write_atomic(_session_file(folder, session), run.encode())


def remembered(folder: Path, session: str) -> str | None:
    """Which run it is, after a crash; None where that is not there, or torn."""
    path = _session_file(folder, session)
    run = path.read_text(errors="replace") if path.is_file() else ""
    return run if _is_run(run) else None


def mark_of(federation: Federation | Columns, key: bytes) -> str:
    """A mark of a node's data that tells others only whether they are the same as before: keyed, so nobody can try."""
    return hmac.new(key, federation.digest.encode(), hashlib.sha256).hexdigest()[:32]


def _exact(value: float) -> str:
    """A class as text that gives the same number back: whole ones without a point, as simulations call them."""
    return repr(int(value)) if float(value).is_integer() and abs(value) < 2**53 else repr(float(value))


def _number(cell: str) -> float | None:
    try:
        return None if "_" in cell else float(cell)
    except ValueError:
        return None
