import json

import numpy as np
import pytest

import fedpact.data as data
from fedpact.core.errors import DataError, InvalidArgument, UnknownName
from fedpact.data import Dataset, Schema, from_arrays
from fedpact.data.dataset import Column

SCHEMA = Schema(
    (Column("age", "number"), Column("sex", "category", ("f", "m"))), (2.0, 1.0), (10.0, 0.0), "sick", ("no", "yes")
)


def test_encode_by_hand():
    # (30 − 10)/2 = 10 and (20 − 10)/2 = 5; m is the second category; columns are found by name.
    x = SCHEMA.encode(["sex", "id", "age"], [["m", "?", "30"], ["f", "", "20"]], "new.csv")
    assert x.tolist() == [[10.0, 1.0], [5.0, 0.0]]


@pytest.mark.parametrize(
    ("header", "row", "error", "sentence"),
    [
        (
            ["age", "sex"],
            ["x", "m"],
            DataError,
            r"column 'age' \(new.csv, line 3\) must be a finite number, got 'x'\. The",
        ),
        (["age", "sex"], ["nan", "m"], DataError, r"column 'age' \(new.csv, line 3\) must be .*, got 'nan'\. Fill it"),
        (
            ["age", "sex"],
            ["1e999", "m"],
            DataError,
            r"column 'age' \(new.csv, line 3\) must be a finite .* got '1e999'",
        ),
        (
            ["age", "sex"],
            ["1_000", "m"],
            DataError,
            r"column 'age' \(new.csv, line 3\) must be a finite .* got '1_000'",
        ),
        (
            ["age", "sex"],
            ["", "m"],
            DataError,
            r"column 'age' \(new.csv, line 3\) must be filled in every row, got an em",
        ),
        (
            ["age", "sex"],
            ["1", ""],
            DataError,
            r"column 'sex' \(new.csv, line 3\) must be filled in every row, got an em",
        ),
        (
            ["age", "sex"],
            ["1", "M"],
            DataError,
            r"column 'sex' \(new.csv, line 3\) must be one of f, m, got 'M'\. Did yo",
        ),
        (
            ["Age", "sex"],
            ["1", "m"],
            UnknownName,
            r"new.csv must have the column 'age', which .+, got only Age, sex\. Did you mean 'Age'\?",
        ),
    ],
)
def test_encode_errors_name_file_line_column_and_value(header, row, error, sentence):
    with pytest.raises(error, match=sentence):
        SCHEMA.encode(header, [["1", "f"], row], "new.csv")


def test_schema_survives_json():
    assert Schema.from_dict(json.loads(json.dumps(SCHEMA.to_dict()))) == SCHEMA
    wine = data.wine().schema
    assert Schema.from_dict(json.loads(json.dumps(wine.to_dict()))) == wine


@pytest.mark.parametrize("saved", [{}, {**SCHEMA.to_dict(), "scale": None}, {"columns": [{"name": "a"}]}])
def test_damaged_schema(saved):
    with pytest.raises(DataError, match=r"schema must be a mapping with columns, .* Save the model again\."):
        Schema.from_dict(saved)


@pytest.mark.parametrize(
    ("columns", "scale", "shift", "sentence"),
    [
        ((), (), (), r"columns must be at least one feature, got \[\]\."),
        (("a", "a"), (1.0, 1.0), (0.0, 0.0), r"column names must be distinct, got \['a'\]\. Rename"),
        (("a", "b"), (1.0,), (0.0, 0.0), r"scale must be one number per column \(2\), got 1\."),
        (("a", "b"), (1.0, 1.0), (0.0,), r"shift must be one number per column \(2\), got 1\."),
        (("a",), (0.0,), (0.0,), r"scale must be different from 0, got \(0\.0,\)\."),
        (("a",), (1.0,), (np.inf,), r"shift must be finite, got \(inf,\)\."),
    ],
)
def test_schema_that_makes_no_sense(columns, scale, shift, sentence):
    with pytest.raises(InvalidArgument, match=sentence):
        Schema(tuple(Column(c, "number") for c in columns), scale, shift, "y")


X, Y = [[1.0, 0.0], [2.0, 1.0]], [0, 1]


@pytest.mark.parametrize(
    ("x", "y", "raw", "sentence"),
    [
        ([1.0, 2.0], Y, {}, r"x of dataset 'd' must be of shape \(rows, 2\), got \(2,\)\."),
        ([[1.0]], [0], {}, r"x of dataset 'd' must be of shape \(rows, 2\), got \(1, 1\)\."),
        ([[1.0, 2.0], [1.0]], Y, {}, r"x of dataset 'd' must be an array of numbers, got rows of different lengths\."),
        (X, [0], {}, r"y of dataset 'd' must be one number per row, shape \(2,\), got \(1,\)\."),
        (X, [[0], [1]], {}, r"y of dataset 'd' must be one number per row, shape \(2,\), got \(2, 1\)\."),
        (np.empty((0, 2)), [], {}, r"dataset 'd' must be of at least one row, got none\."),
        ([[1.0, 2.0], [3.0, np.nan]], Y, {}, r"x of dataset 'd' must be finite, got nan at row 1, column 'sex'\."),
        ([[1.0, 2.0], [-np.inf, np.nan]], Y, {}, r"x of dataset 'd' must be finite, got -inf at row 1, column 'age'\."),
        ([[1.0, 2.0], ["a", 3.0]], Y, {}, r"x of dataset 'd' must be numbers, got 'a' at row 1, column 'age'\."),
        (X, [0, np.nan], {}, r"y of dataset 'd' must be finite, got nan at row 1\."),
        (X, [0, "yes"], {}, r"y of dataset 'd' must be numbers, got 'yes' at row 1\."),
        (X, [0, None], {}, r"y of dataset 'd' must be numbers, got None at row 1\."),
        (X, [0, 2], {}, r"y of dataset 'd' must be class codes 0\.\.1, got 2 at row 1\. np\.unique"),
        (X, [-1, 1], {}, r"y of dataset 'd' must be class codes 0\.\.1, got -1 at row 0\."),
        (X, [0, 0.5], {}, r"y of dataset 'd' must be class codes 0\.\.1, got 0\.5 at row 1\."),
        (X, Y, {"site": np.array(["a"])}, r"raw\['site'\] of dataset 'd' must be one value per row \(2\), got 1\."),
    ],
)
def test_rows_that_cannot_be_used(x, y, raw, sentence):
    with pytest.raises(DataError, match=sentence):
        Dataset("d", x, y, SCHEMA, raw)


def test_digest_is_of_the_numbers_not_the_name():
    one = Dataset("one", X, Y, SCHEMA)
    assert one.digest == Dataset("two", np.array(X), np.array(Y, dtype=float), SCHEMA).digest
    assert one.digest != Dataset("one", X, [1, 1], SCHEMA).digest
    assert one.digest != Dataset("one", [[1.0, 0.0], [2.0, 1.0 + 2e-16]], Y, SCHEMA).digest
    flat = from_arrays(np.zeros((2, 3)), np.zeros(2)), from_arrays(np.zeros((4, 1)), np.zeros(4))
    assert flat[0].digest != flat[1].digest  # both are eight zeros
    assert len(one.digest) == 64


def test_numbers_are_doubles_that_cannot_be_changed():
    mine = np.array(X)
    dataset = Dataset("d", mine, Y, SCHEMA)
    assert dataset.x.dtype == dataset.y.dtype == np.float64
    with pytest.raises(ValueError, match="read-only"):
        dataset.x[0, 0] = 3
    mine[0, 0] = 1.0  # the caller's own array stays writable


def test_take_keeps_schema_and_raw_columns():
    dataset = data.iris()
    part = dataset.take([149, 0])
    assert np.array_equal(part.x, dataset.x[[149, 0]])
    assert part.raw["species"].tolist() == ["virginica", "setosa"]
    assert part.schema == dataset.schema
    assert part.digest == dataset.take(np.array([149, 0])).digest
    assert dataset.take(dataset.y == 1).rows == 50


@pytest.mark.parametrize(
    ("rows", "error", "sentence"),
    [
        ([150], InvalidArgument, r"rows must be row numbers from 0 to 149, got \[150\]\."),
        ([-1], InvalidArgument, r"rows must be row numbers from 0 to 149, got \[-1\]\."),
        ([0.0], InvalidArgument, r"rows must be a list of row numbers, got"),
        ([True], InvalidArgument, r"rows must be one boolean per row \(150\), got \(1,\)\."),
        ([], DataError, r"dataset 'iris' must be of at least one row, got none\."),
    ],
)
def test_take_rows_that_do_not_exist(rows, error, sentence):
    with pytest.raises(error, match=sentence):
        data.iris().take(rows)
