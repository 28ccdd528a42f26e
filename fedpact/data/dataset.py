"""Rows and labels in memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from hashlib import sha256
from typing import TYPE_CHECKING, Any

import numpy as np
import scipy.sparse
import scipy.sparse.linalg

from fedpact.core.errors import DataError, require, require_one_of
from fedpact.data.schema import Column, Schema

if TYPE_CHECKING:
    from fedpact.data.features import VerticalFederation
    from fedpact.data.federation import Federation

__all__ = ["Column", "Dataset", "Schema"]

SCALES = ("standard", "norm", "none")


@dataclass(frozen=True, eq=False)
class Dataset:
    """Features x (N, n), targets y (N,), and how they were read.

    x is a NumPy array, or a SciPy CSR array where most features are 0. y holds class codes 0..K−1, or the regression
    target. `raw` maps column names to their values before coding, features or not, so that a federation can be split
    by any of them. `scale` is how the columns were scaled; `split` does it again where it holds rows out. Pixels stay
    bytes (uint8). `test` are the rows that the owners of the data set aside for testing: no client is given them.
    """

    name: str
    x: Any
    y: np.ndarray
    schema: Schema
    raw: Mapping[str, np.ndarray] = field(default_factory=dict)
    scale: str = "none"
    test: Any = ()

    def __post_init__(self) -> None:
        where = f"of dataset {self.name!r}"
        names = [column.name for column in self.schema.columns]
        sparse = scipy.sparse.issparse(self.x)
        pixels = isinstance(self.x, np.ndarray) and self.x.dtype == np.uint8
        x: Any = self.x.view() if pixels else None
        if x is None:
            x = as_sparse(self.x, f"x {where}") if sparse else as_numbers(self.x, f"x {where}", names).view()
        y = as_numbers(self.y, f"y {where}").view()
        if x.ndim != 2 or x.shape[1] != len(names):
            raise DataError(f"x {where} must be of shape (rows, {len(names)}), got {x.shape}.")
        if y.shape != x.shape[:1]:
            raise DataError(f"y {where} must be one number per row, shape ({x.shape[0]},), got {y.shape}.")
        if x.shape[0] == 0:
            raise DataError(f"dataset {self.name!r} must be of at least one row, got none.")
        if not (sparse or pixels):
            require_finite(x, f"x {where}", names)
        require_finite(y, f"y {where}")
        count = len(self.schema.classes)
        bad = np.flatnonzero((y != np.floor(y)) | (y < 0) | (y >= count))
        if count and bad.size:
            text = f"y {where} must be class codes 0..{count - 1}, got {y[bad[0]]:g} at row {bad[0]}."
            raise DataError(f"{text} np.unique(y, return_inverse=True) gives names and codes.")
        for column, values in self.raw.items():
            if len(values) != len(y):
                raise DataError(f"raw[{column!r}] {where} must be one value per row ({len(y)}), got {len(values)}.")
        for array in (x.data, x.indices, x.indptr, y) if scipy.sparse.issparse(x) else (x, y):
            array.flags.writeable = False  # the digest is computed once
        test = require_rows(self.test, len(y), f"test {where}")
        require(len(np.unique(test)) == len(test), f"test {where}", "distinct row numbers", self.test)
        if len(test) == len(y):
            raise DataError(f"test {where} must leave rows to train on, got all {len(y)} rows.")
        object.__setattr__(self, "x", x)
        object.__setattr__(self, "y", y)
        object.__setattr__(self, "test", test)

    def __repr__(self) -> str:
        kind = f"{len(self.classes)} classes" if self.classes else "regression"
        sparse = ", sparse" if scipy.sparse.issparse(self.x) else ""
        return f"Dataset({self.name!r}: {self.rows} rows, {self.features} features, {kind}{sparse})"

    @property
    def rows(self) -> int:
        """N."""
        return len(self.y)

    @property
    def features(self) -> int:
        """n."""
        return self.x.shape[1]

    @property
    def classes(self) -> tuple[str, ...]:
        """Names of the classes y = 0, 1, …; empty for regression."""
        return self.schema.classes

    @cached_property
    def filled(self) -> np.ndarray:
        """For every row, whether any of its features differs from 0."""
        return np.diff(self.x.indptr) > 0 if scipy.sparse.issparse(self.x) else self.x.any(axis=1)

    @cached_property
    def digest(self) -> str:
        """SHA-256 of x and y with their shape, and of the columns' and classes' names, whatever the dataset's name."""
        text = sha256(repr((self.x.shape, self.schema.columns, self.classes)).encode())
        x = (self.x.data, self.x.indices, self.x.indptr) if scipy.sparse.issparse(self.x) else (self.x,)
        for array in (*x, self.y, *([self.test] if len(self.test) else [])):
            text.update(np.ascontiguousarray(array if array.dtype == np.uint8 else array.astype("<f8")).data)
        return text.hexdigest()

    def take(self, rows: Any) -> Dataset:
        """The dataset of these rows only: indices, or one boolean per row."""
        index = np.asarray(rows)
        if index.dtype == bool:
            require(index.shape == (self.rows,), "rows", f"one boolean per row ({self.rows})", index.shape)
            index = np.flatnonzero(index)
        index = require_rows(index, self.rows, "rows")
        raw, test = {k: v[index] for k, v in self.raw.items()}, np.flatnonzero(np.isin(index, self.test))
        return Dataset(self.name, self.x[index], self.y[index], self.schema, raw, self.scale, test)

    def split(
        self, clients: int | None = None, how: str = "iid", seed: int = 0, holdout: float = 0.0, **options: Any
    ) -> Federation:
        """Deal the rows to clients; `how` is one of the functions of `fedpact.data.partition`, `options` its own.

        iid; cuts; sizes (sizes=); shards (shards=2); imbalanced; dirichlet (alpha=, least=1); column (column=). With
        how="features" it is `split_features`.
        `holdout` is the fraction of each client's rows that is set aside for testing; the columns are then scaled
        by the training rows of all clients together.
        """
        from fedpact.data.federation import split  # a federation holds a dataset: the import runs the other way

        return split(self, clients, how, seed, holdout, options)

    def split_features(
        self,
        clients: int | None = None,
        blocks: Sequence[Any] | None = None,
        names: Sequence[str] | None = None,
        closer: int = 0,
        holdout: float = 0.0,
        seed: int = 0,
    ) -> VerticalFederation:
        """Deal the columns to parties that share the records: in equal runs (`clients`), or as `blocks` says.

        A block is a list of column numbers or names. Party number `closer` has the labels. `holdout` is the fraction of
        the records that is set aside for testing; the columns are then scaled by the others.
        """
        from fedpact.data.features import split_features

        return split_features(self, clients, blocks, names, closer, holdout, seed)


def as_sparse(values: Any, what: str) -> Any:
    """A sparse matrix as a CSR array of finite doubles, without duplicates and stored zeros, in its own memory."""
    if values.dtype.kind not in "biuf":
        raise DataError(f"{what} must be numbers, got {values.dtype}. Code it as numbers.")
    matrix = scipy.sparse.csr_array(values, dtype=np.float64, copy=True)
    matrix.sum_duplicates()
    matrix.eliminate_zeros()
    bad = np.flatnonzero(~np.isfinite(matrix.data))
    if bad.size:
        row = int(np.searchsorted(matrix.indptr, bad[0], side="right")) - 1
        column = int(matrix.indices[bad[0]])
        place = f"row {row}, column {column}"
        raise DataError(f"{what} must be finite, got {matrix.data[bad[0]]} at {place}. Fill it or remove the row.")
    return matrix


def as_numbers(values: Any, what: str, names: Sequence[str] = ()) -> np.ndarray:
    """The values as doubles; text and other objects raise `DataError`, which names the row and the column."""
    try:
        array = np.asarray(values)
    except ValueError:
        raise DataError(f"{what} must be an array of numbers, got rows of different lengths.") from None
    if array.dtype.kind in "biuf":
        return array.astype(np.float64, copy=False)
    array = np.asarray(values, dtype=object)
    for index, cell in np.ndenumerate(array):
        if not isinstance(cell, bool | int | float | np.bool_ | np.integer | np.floating):
            named = len(index) == 2 and index[1] < len(names)
            place = f" at row {index[0]}" if index else ""
            place += f", column {names[index[1]]!r}" if named else "".join(f", column {j}" for j in index[1:])
            raise DataError(f"{what} must be numbers, got {cell!r}{place}. Code it as a number or leave it out.")
    return array.astype(np.float64)


def require_finite(values: np.ndarray, what: str, names: Sequence[str] = ()) -> None:
    """Raise `DataError` at the first cell that is not a finite number, naming its row and, with `names`, its column."""
    bad = np.argwhere(~np.isfinite(values))
    if len(bad):
        place = f"row {bad[0][0]}" + (f", column {names[bad[0][1]]!r}" if names else "")
        raise DataError(f"{what} must be finite, got {values[tuple(bad[0])]} at {place}. Fill it or remove the row.")


def require_rows(index: Any, rows: int, name: str, kind: str = "row") -> np.ndarray:
    """The indices as 64-bit integers, if each is a row (or column) number from 0 to rows − 1."""
    try:
        array = np.asarray(index)
    except ValueError:  # lists in it, of different lengths
        array = np.empty((0, 0))
    whole = array.ndim == 1 and (array.dtype.kind in "iu" or array.size == 0)
    require(whole, name, f"a list of {kind} numbers", index)
    outside = array[(array < 0) | (array >= rows)]
    require(outside.size == 0, name, f"{kind} numbers from 0 to {rows - 1}", outside[:1].tolist())
    return array.astype(np.int64)


def scaled_dataset(
    name: str,
    columns: Sequence[Column],
    coded: Any,
    y: np.ndarray,
    *,
    scale: str,
    target: str,
    classes: Sequence[str],
    raw: Mapping[str, np.ndarray],
) -> Dataset:
    """The dataset of coded cells after scaling: to mean 0 and variance 1, to 2-norm 1, or not at all.

    A column that this would divide by 0 (constant, or all zeros) is divided by 1.
    """
    require_one_of("scale", scale, SCALES)
    if scipy.sparse.issparse(coded):
        hint = 'Use "norm" or "none": subtracting means would fill the zeros.'
        require(scale != "standard", "scale", "'norm' or 'none' for sparse features", scale, hint=hint)
    else:
        require_finite(coded, f"x of dataset {name!r}", [column.name for column in columns])
    shift, divisor = _fit(coded, scale, [column.name for column in columns])
    schema = Schema(tuple(columns), tuple(divisor.tolist()), tuple(shift.tolist()), target, tuple(classes))
    return Dataset(name, _scaled(coded, shift, divisor), y, schema, raw, scale)


def fitted_on(dataset: Dataset, rows: np.ndarray) -> Dataset:
    """The dataset with its columns scaled by what these rows say alone: those held out must not decide the features."""
    if dataset.scale == "none":
        return dataset
    old = dataset.schema
    shift, divisor = _fit(dataset.x[rows], dataset.scale, [column.name for column in old.columns])
    shifts = np.array(old.shift) + np.array(old.scale) * shift  # of the two scalings, one after the other
    scales = np.array(old.scale) * divisor
    schema = replace(old, scale=tuple(scales.tolist()), shift=tuple(shifts.tolist()))
    return replace(dataset, x=_scaled(dataset.x, shift, divisor), schema=schema)


def _fit(x: Any, scale: str, names: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
    """What to subtract from every column, and what to divide it by."""
    shift, divisor = np.zeros(x.shape[1]), np.ones(x.shape[1])
    with np.errstate(over="ignore", invalid="ignore"):  # told below, by its column
        if scale == "standard" and x.shape[0]:
            varies = np.ptp(x, axis=0) > 0  # rounding leaves a constant column a tiny deviation
            shift, divisor = x.mean(axis=0), np.where(varies, x.std(axis=0), 1.0)
        if scale == "norm":
            norm = (scipy.sparse.linalg if scipy.sparse.issparse(x) else np.linalg).norm(x, axis=0)
            divisor = np.where(norm > 0, norm, 1.0)
    for j in np.flatnonzero(~np.isfinite(shift + divisor)).tolist():
        largest = abs(x[:, [j]]).max()
        raise DataError(
            f"column {names[j]!r} must be small enough to be squared, got a value of size {largest:g}. Correct it, or "
            'take scale="none".'
        )
    return shift, divisor


def _scaled(x: Any, shift: np.ndarray, divisor: np.ndarray) -> Any:
    if scipy.sparse.issparse(x):
        return scipy.sparse.csr_array((x.data / divisor[x.indices], x.indices, x.indptr), shape=x.shape)
    return (x - shift) / divisor
