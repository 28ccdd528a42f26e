"""How the cells of a table become numbers."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np

from fedpact.core.errors import DataError, UnknownName, nearest, require, unknown


@dataclass(frozen=True)
class Column:
    """One feature: a number, a category, or whether a category is one of them (1) or not (0).

    A category is coded 0, 1, … in the (alphabetical) order of `categories`. An indicator looks at the column `source`
    of the file for `category`.
    """

    name: str
    kind: Literal["number", "category", "indicator"]
    categories: tuple[str, ...] = ()
    source: str = ""
    category: str = ""

    @property
    def read_from(self) -> str:
        """The name of the file's column."""
        return self.source or self.name

    def code(self, cells: Sequence[str]) -> np.ndarray:
        """The cells as numbers, not finite where a cell is neither a finite number nor a known category."""
        if self.kind == "number":
            return np.array([_number(cell) for cell in cells], dtype=np.float64)
        codes = {category: float(code) for code, category in enumerate(self.categories)}
        if self.kind == "indicator":
            codes = {category: float(category == self.category) for category in self.categories}
        return np.array([codes.get(cell, np.nan) for cell in cells], dtype=np.float64)

    def refusal(self, cell: str, place: str, hint: str) -> DataError:
        """The error for a cell that `code` could not read; `hint` is for text among numbers."""
        what = f"column {self.read_from!r} ({place})"
        if cell == "":
            return DataError(f"{what} must be filled in every row, got an empty cell. Fill it or remove the row.")
        if self.kind != "number":
            return DataError(str(unknown(what, cell, self.categories)))
        missing = cell.lower().lstrip("+-") in ("nan", "inf", "infinity", "na", "n/a", "?", "null", "none")
        return DataError(
            f"{what} must be a finite number, got {cell!r}. {'Fill it or remove the row.' if missing else hint}"
        )


def _number(cell: str) -> float:
    try:
        return np.nan if "_" in cell else float(cell)  # Python reads 1_000 as a number; a CSV file does not mean it
    except ValueError:
        return np.nan


def line_of(header: Sequence[str], rows: Sequence[Sequence[str]], index: int) -> int:
    """The line of the file on which rows[index] starts, counting line breaks inside quoted cells."""
    before = [header, *rows[:index]]
    return 1 + len(before) + sum(len(re.findall(r"\r\n|\r|\n", cell)) for row in before for cell in row)


def code_rows(
    columns: Sequence[Column],
    header: Sequence[str],
    rows: Sequence[Sequence[str]],
    where: str,
    hint: str,
    keep: Sequence[int] | None = None,
) -> np.ndarray:
    """The columns (N, n) before scaling, of the rows `keep` (default: all); other columns of the file are ignored."""
    keep = range(len(rows)) if keep is None else keep
    coded = np.empty((len(keep), len(columns)))
    for j, column in enumerate(columns):
        if column.read_from not in header:
            raise UnknownName(
                f"{where} must have the column {column.read_from!r}, which the model was trained on, got only "
                f"{', '.join(header)}.{nearest(column.read_from, header)}"
            )
        k = header.index(column.read_from)
        coded[:, j] = column.code([rows[i][k] for i in keep])
        bad = np.flatnonzero(~np.isfinite(coded[:, j]))
        if bad.size:
            i = keep[bad[0]]
            raise column.refusal(rows[i][k], f"{where}, line {line_of(header, rows, i)}", hint)
    return coded


@dataclass(frozen=True)
class Schema:
    """How raw rows became x and y; saved with a model so that new files are read the same way.

    A cell is coded by its column, then `shift` is subtracted, then the result is divided by `scale`.
    `classes` are the names of y = 0, 1, …; empty for regression.
    """

    columns: tuple[Column, ...]
    scale: tuple[float, ...]
    shift: tuple[float, ...]
    target: str
    classes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        names = [column.name for column in self.columns]
        require(names, "columns", "at least one feature", names)
        twice = sorted({name for name in names if names.count(name) > 1})
        require(not twice, "column names", "distinct", twice, hint="Rename one of them.")
        for name, values in (("scale", self.scale), ("shift", self.shift)):
            require(len(values) == len(names), name, f"one number per column ({len(names)})", len(values))
            require(np.isfinite(values).all(), name, "finite", values)
        require(0 not in self.scale, "scale", "different from 0", self.scale)

    def scaled(self, coded: np.ndarray) -> np.ndarray:
        """(coded − shift) / scale, column by column."""
        return (coded - np.array(self.shift)) / np.array(self.scale)

    def encode(self, header: Sequence[str], rows: Sequence[Sequence[str]], where: str) -> np.ndarray:
        """Features (N, n) of the rows of a file called `where`; columns are found by name, others are ignored."""
        hint = "The model was trained on numbers in this column."
        return self.scaled(code_rows(self.columns, header, rows, where, hint))

    def to_dict(self) -> dict[str, Any]:
        """The schema as plain tuples, strings and numbers, for JSON."""
        return asdict(self)

    @staticmethod
    def from_dict(saved: Mapping[str, Any]) -> Schema:
        """The schema that `to_dict` wrote."""
        try:
            columns = [Column(**{**c, "categories": tuple(c["categories"])}) for c in saved["columns"]]
            scale, shift = tuple(map(float, saved["scale"])), tuple(map(float, saved["shift"]))
            return Schema(tuple(columns), scale, shift, saved["target"], tuple(saved["classes"]))
        except (KeyError, TypeError) as error:
            text = "schema must be a mapping with columns, scale, shift, target and classes, got one that is damaged"
            raise DataError(f"{text} ({error!r}). Save the model again.") from error
