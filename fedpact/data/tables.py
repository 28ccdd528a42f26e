"""Your own data: CSV files and arrays."""

from __future__ import annotations

import csv
import os
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import scipy.sparse

from fedpact.core.errors import DataError, require, require_one_of, unknown
from fedpact.data.dataset import Dataset, as_numbers, as_sparse, scaled_dataset
from fedpact.data.schema import Column, code_rows, line_of

CODINGS = ("ordinal", "onehot")
TASKS = ("auto", "classification", "regression")
MOST_CLASSES = 20  # with task="auto", numbers with more distinct values are a regression target


def read_rows(path: str | os.PathLike[str]) -> tuple[list[str], list[list[str]]]:
    """Header and rows of a CSV file (UTF-8, commas), cells stripped of blanks; the file must be a full table."""
    try:
        with open(path, encoding="utf-8-sig", newline="") as file:
            reader = csv.reader(file, skipinitialspace=True, strict=True)
            table = [[cell.strip(" \t") for cell in row] for row in reader]
    except FileNotFoundError:
        raise DataError(f"path must be a CSV file, got {str(path)!r}, which does not exist.") from None
    except UnicodeDecodeError as error:
        text = f"{path} must be UTF-8 text, got byte 0x{error.object[error.start]:02x}. Save it as UTF-8."
        raise DataError(text) from None
    except csv.Error as error:
        raise DataError(f"{path}, line {reader.line_num}, must be a row of a CSV file: {error}. Correct it.") from None
    except OSError as error:
        raise DataError(f"path must be a CSV file that can be read, got {str(path)!r}: {error.strerror}.") from None
    while table and not any(table[-1]):
        table.pop()
    if not table:
        raise DataError(f"{path} must be a header line and rows, got an empty file.")
    header, rows = table[0], table[1:]
    _check_table(str(path), header, rows)
    return header, rows


def _check_table(path: str, header: list[str], rows: list[list[str]]) -> None:
    if len(header) == 1 and (";" in header[0] or "\t" in header[0]):
        raise DataError(f"{path} must be separated by commas, got the header {header[0]!r}. Export it with commas.")
    if "" in header:
        raise DataError(
            f"header of {path} must be a name for every column, got none for column {header.index('') + 1}."
        )
    twice = next((name for name in header if header.count(name) > 1), None)
    if twice is not None:
        raise DataError(f"header of {path} must be distinct names, got {twice!r} twice. Rename one of them.")
    if not rows:
        raise DataError(f"{path} must be a header line and rows, got no rows.")
    for i, row in enumerate(rows):
        if len(row) != len(header):
            text = (
                f"{path}, line {line_of(header, rows, i)}, must be {len(header)} cells like the header, got {len(row)}."
            )
            raise DataError(f"{text} Correct the line.")


def from_csv(
    path: str | os.PathLike[str],
    target: str,
    drop: str | Sequence[str] = (),
    categorical: str | Sequence[str] = (),
    scale: str = "standard",
    task: str = "auto",
    coding: str = "ordinal",
    categories: Mapping[str, Sequence[str]] | None = None,
    classes: Sequence[str] = (),
) -> Dataset:
    """A dataset from a CSV file with a header line.

    Every column but `target` and those in `drop` is a feature: a number, or, if listed in `categorical`, a category.
    coding="ordinal" makes one feature of it, 0, 1, … in alphabetical order; "onehot" a feature for each of its
    categories, 1 where it is the row's and 0 elsewhere, named `column=category`.
    `scale` is "standard" (mean 0, variance 1), "norm" (2-norm 1) or "none".
    Under task="auto" a target of numbers with more than 20 distinct values is a regression target, anything else is
    classes, sorted (numbers by value). Dropped columns remain usable in `split(how="column", column=…)`.
    `categories` lists a column's categories and `classes` the target's, in the order of their codes, where they are
    not to be learned from the rows; a row with another is refused.
    """
    header, rows = read_rows(path)
    lists, names = listed(categories, classes, task)
    drop, categorical = column_names("drop", drop), [*column_names("categorical", categorical), *lists]
    for argument, given in (("target", [target]), ("drop", drop), ("categorical", categorical)):
        for name in given:
            if name not in header:
                raise unknown(argument, name, header)
    require(target not in drop, "drop", "columns other than the target", drop)
    hint = 'task="classification" makes classes of it.'
    require(target not in categorical, "categorical", "columns other than the target", categorical, hint=hint)
    require_one_of("task", task, TASKS)
    require_one_of("coding", coding, CODINGS)

    keep = range(len(rows))
    columns, coded, raw = code_table(header, rows, str(path), keep, {target, *drop}, categorical, coding, lists)
    require(columns, "drop", "fewer columns, so that a feature is left", drop)
    y, names = code_target(target, header, rows, str(path), keep, task, names)
    return scaled_dataset(Path(path).stem, columns, coded, y, scale=scale, target=target, classes=names, raw=raw)


def listed(categories: Any, classes: Any, task: str) -> tuple[dict[str, tuple[str, ...]], tuple[str, ...]]:
    """The categories by column and the classes that users have listed, checked; none where there are none."""
    ok, hint = categories is None or isinstance(categories, Mapping), 'Such as { ward = ["a", "b"] }.'
    require(ok, "categories", "lists of categories by column", categories, hint=hint)
    lists = {str(column): _distinct(f"categories of {column!r}", cells) for column, cells in (categories or {}).items()}
    if isinstance(classes, list | tuple) and not classes:
        return lists, ()
    require(task != "regression", "classes", "left out for a regression target", classes)
    names = _distinct("classes", classes, 2)
    numbers = Column("", "number").code(names)
    distinct = not np.isfinite(numbers).all() or len(np.unique(numbers)) == len(names)
    require(distinct, "classes", "distinct numbers", classes)
    return lists, names


def _distinct(argument: str, given: Any, least: int = 1) -> tuple[str, ...]:
    """Cells as a file has them; whole numbers may be written without quotes."""
    some = list(given) if isinstance(given, list | tuple) else []
    cells = [str(cell) if isinstance(cell, int) and not isinstance(cell, bool) else cell for cell in some]
    ok = all(isinstance(cell, str) and cell and cell == cell.strip(" \t") for cell in cells)
    ok = ok and len(cells) >= least and len(set(cells)) == len(cells)
    require(ok, argument, f"a list of at least {least} distinct cells", given)
    return tuple(cells)


def code_table(
    header: list[str],
    rows: list[list[str]],
    path: str,
    keep: Sequence[int],
    skip: Collection[str],
    categorical: Collection[str],
    coding: str,
    lists: Mapping[str, tuple[str, ...]] = MappingProxyType({}),
) -> tuple[list[Column], np.ndarray, dict[str, np.ndarray]]:
    """Features, their cells (N, n) before scaling, and every column as it was read, of the rows `keep` of a file.

    `lists` are the categories of columns that the rows are not asked for.
    """
    columns = []
    cells = {name: [rows[i][k] for i in keep] for k, name in enumerate(header)}
    for name in header:
        if name in categorical and name not in skip:
            columns += _coded(name, lists.get(name) or tuple(sorted(set(cells[name]) - {""})), coding)
        elif name not in skip:
            columns.append(Column(name, "number"))
    hint = "Add the column to `categorical` to code its values, or to `drop` to leave it out."
    coded = code_rows(columns, header, rows, path, hint, keep)
    numbers = {column.name: coded[:, j] for j, column in enumerate(columns) if column.kind == "number"}
    raw = {name: numbers[name] if name in numbers else np.array(cells[name], dtype=object) for name in header}
    return columns, coded, raw


def column_names(argument: str, given: Any) -> list[str]:
    """Names of columns from what users write: one, or a list."""
    names = [given] if isinstance(given, str) else given
    ok = isinstance(names, Sequence | np.ndarray) and all(isinstance(name, str) for name in names)
    require(ok, argument, "the name of a column, or a list of names", given)
    return list(names)


def _coded(name: str, categories: tuple[str, ...], coding: str) -> list[Column]:
    if coding == "ordinal":
        return [Column(name, "category", categories)]
    return [Column(f"{name}={category}", "indicator", categories, name, category) for category in categories]


def code_target(
    target: str,
    header: list[str],
    rows: list[list[str]],
    path: str,
    keep: Sequence[int],
    task: str,
    classes: tuple[str, ...] = (),
) -> tuple[np.ndarray, tuple[str, ...]]:
    """y and the names of its classes, of the rows `keep` of a file; no names for a regression target.

    `classes` are their names where the rows are not asked for them.
    """
    cells = [rows[i][header.index(target)] for i in keep]
    if classes:
        y = class_codes(cells, classes)
        for i in np.flatnonzero(np.isnan(y)).tolist():
            place = f"{path}, line {line_of(header, rows, keep[i])}"
            raise Column(target, "category", classes).refusal(cells[i], place, "")
        if len(np.unique(y)) < 2:
            raise DataError(f"target {target!r} of {path} must be of at least two classes, got only {cells[0]!r}.")
        return y, classes
    column = Column(target, "number")
    values = column.code(cells)
    number = np.isfinite(values)
    # Text beside numbers is more often a missing value than a class: only task="classification" takes both.
    labels = task == "classification" or (task == "auto" and not number.any())
    bad = [i for i, cell in enumerate(cells) if cell == "" or not (labels or number[i])]
    if bad:
        hint = 'Correct it; task="classification" reads every value as a class.'
        raise column.refusal(cells[bad[0]], f"{path}, line {line_of(header, rows, keep[bad[0]])}", hint)
    if task == "regression" or (not labels and len(np.unique(values)) > MOST_CLASSES):
        return values, ()
    keys = values if number.all() else np.array(cells)
    found, first, y = np.unique(keys, return_index=True, return_inverse=True)
    if len(found) < 2:
        raise DataError(f"target {target!r} of {path} must be of at least two classes, got only {cells[0]!r}.")
    return y.astype(np.float64), tuple(cells[i] for i in first)


def class_codes(cells: Sequence[str], classes: Sequence[str]) -> np.ndarray:
    """0, 1, … by the names of the classes, numbers by value; NaN for a cell that is none of them."""
    numbers = Column("", "number").code(classes)
    if not np.isfinite(numbers).all():
        return Column("", "category", tuple(classes)).code(cells)
    codes = {value: float(code) for code, value in enumerate(numbers.tolist())}
    return np.array([codes.get(value, np.nan) for value in Column("", "number").code(cells).tolist()])


def from_arrays(
    x: Any,
    y: Any,
    feature_names: Sequence[str] | None = None,
    classes: Sequence[str] | None = None,
    name: str = "arrays",
    scale: str = "none",
    extra: Mapping[str, Any] | None = None,
) -> Dataset:
    """A dataset from arrays: x (rows, features), dense or of scipy.sparse, and y (rows,), copied.

    `extra` are columns that are no features (a site, a group), one value per row, to split or group the rows by.
    `classes` are the names of y = 0, 1, …, and () declares a regression target. By default y has classes "0", "1", … if
    its values are exactly 0..K−1 for a K from 2 to 20. y itself is never recoded. Bytes are numbers here like others:
    divide pixels by 255 yourself.
    """
    given = [] if feature_names is None else [str(feature) for feature in feature_names]
    sparse = scipy.sparse.issparse(x)
    what = f"x of dataset {name!r}"
    table: Any = as_sparse(x, what) if sparse else np.array(as_numbers(x, what, given))
    if table.ndim != 2:
        raise DataError(f"x of dataset {name!r} must be of shape (rows, features), got {table.shape}.")
    y = np.array(as_numbers(y, f"y of dataset {name!r}"))
    n = table.shape[1]
    names = [f"x{j}" for j in range(n)] if feature_names is None else given
    require(len(names) == n, "feature_names", f"one per column ({n})", len(names))
    if classes is None:
        found = np.unique(y)
        coded = 2 <= len(found) <= MOST_CLASSES and np.array_equal(found, np.arange(len(found)))
        classes = [str(k) for k in range(len(found))] if coded else []
    columns = [Column(name, "number") for name in names]
    target = "y" if "y" not in names else "target"
    raw = {target: y, **({} if sparse else {feature: table[:, j] for j, feature in enumerate(names)})}
    raw |= _extra(extra, table.shape[0], {target, *names}, name)
    classes = [str(c) for c in classes]
    return scaled_dataset(name, columns, table, y, scale=scale, target=target, classes=classes, raw=raw)


def _extra(extra: Any, rows: int, taken: set[str], name: str) -> dict[str, np.ndarray]:
    """The columns that are no features, as arrays of their own."""
    require(extra is None or isinstance(extra, Mapping), "extra", "columns by name", extra)
    columns = {}
    for column, values in (extra or {}).items():
        hint = "Give the column another name."
        require(column not in taken, "extra", "columns that are neither features nor the target", column, hint=hint)
        what = f"extra[{column!r}] of dataset {name!r} must be one value per row, shape ({rows},)"
        try:
            columns[column] = np.array(values)
        except ValueError:
            raise DataError(f"{what}, got values of different lengths.") from None
        if columns[column].shape != (rows,):
            raise DataError(f"{what}, got {columns[column].shape}.")
    return columns
