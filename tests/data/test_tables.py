import csv
import json

import numpy as np
import pytest

from fedpact.core.errors import DataError, InvalidArgument, UnknownName
from fedpact.data import Schema, from_arrays, from_csv
from fedpact.data.tables import read_rows

PEOPLE = "age,sex,site,sick\n30,m,A,no\n50, f ,B,yes\n40,f,A,no\n\n"


def read(path, **options):
    return from_csv(path, "sick", **{"categorical": ["sex"], "drop": ["site"], **options})


def test_csv_by_hand(csv_file):
    dataset = read(csv_file(PEOPLE), scale="none")
    assert (dataset.name, dataset.classes, dataset.schema.target) == ("people", ("no", "yes"), "sick")
    assert dataset.x.tolist() == [[30, 1], [50, 0], [40, 0]]
    assert dataset.y.tolist() == [0, 1, 0]
    assert dataset.schema.columns[1].categories == ("f", "m")
    assert dataset.raw["sex"].tolist() == ["m", "f", "f"]
    assert dataset.raw["sick"].tolist() == ["no", "yes", "no"]
    assert dataset.raw["age"].tolist() == [30, 50, 40]


def test_scales(csv_file):
    standard, norm = read(csv_file(PEOPLE)), read(csv_file(PEOPLE), scale="norm")
    root = np.sqrt(200 / 3)  # ages 30, 50, 40: mean 40, variance (100 + 100 + 0)/3
    np.testing.assert_allclose(standard.x[:, 0], [-10 / root, 10 / root, 0])
    np.testing.assert_allclose(norm.x[:, 0], np.array([30, 50, 40]) / np.sqrt(900 + 2500 + 1600))
    assert norm.schema.shift == (0.0, 0.0)


def test_constant_and_zero_columns_are_not_divided(csv_file):
    path = csv_file("a,b,sick\n0.1,0,1\n0.1,0,0\n0.1,0,1\n")
    for scale in ("standard", "norm"):
        dataset = from_csv(path, "sick", scale=scale)
        assert dataset.schema.scale[1] == 1
        assert np.abs(dataset.x[:, 1]).max() == 0
    assert from_csv(path, "sick").schema.scale[0] == 1


def test_a_dropped_column_can_be_split_by(csv_file):
    federation = read(csv_file(PEOPLE)).split(how="column", column="site")
    assert federation.names == ("A", "B")
    assert [r.tolist() for r in federation.rows] == [[0, 2], [1]]


@pytest.mark.parametrize("scale", ["standard", "norm", "none"])
def test_encode_equals_from_csv_on_the_same_file(csv_file, scale):
    path = csv_file(PEOPLE)
    dataset = read(path, scale=scale)
    assert np.array_equal(dataset.schema.encode(*read_rows(path), str(path)), dataset.x)


def test_encode_needs_neither_the_target_nor_the_order(csv_file):
    dataset = read(csv_file(PEOPLE), scale="none")
    new = csv_file("sex,age\nf,33\n", "new.csv")
    assert dataset.schema.encode(*read_rows(new), "new.csv").tolist() == [[33, 0]]


def test_unseen_category_at_prediction(csv_file):
    schema = read(csv_file(PEOPLE)).schema
    new = csv_file("age,sex\n33,f\n34,x\n", "new.csv")
    with pytest.raises(DataError, match=r"column 'sex' \(.*new\.csv, line 3\) must be one of f, m, got 'x'\."):
        schema.encode(*read_rows(new), str(new))


def test_one_feature_per_category(csv_file):
    text = "age,sex,ward,sick\n30,m,b,no\n50,f,c,yes\n40,f,a,no\n"
    dataset = from_csv(csv_file(text), "sick", categorical=["sex", "ward"], scale="none", coding="onehot")
    assert [column.name for column in dataset.schema.columns] == ["age", "sex=f", "sex=m", "ward=a", "ward=b", "ward=c"]
    assert dataset.x.tolist() == [[30, 0, 1, 0, 1, 0], [50, 1, 0, 0, 0, 1], [40, 1, 0, 1, 0, 0]]
    assert dataset.raw["ward"].tolist() == ["b", "c", "a"]
    again = Schema.from_dict(json.loads(json.dumps(dataset.schema.to_dict())))
    assert again == dataset.schema
    assert again.encode(["ward", "sex", "age"], [["a", "f", "7"]], "new").tolist() == [[7, 1, 0, 1, 0, 0]]
    with pytest.raises(DataError, match=r"column 'ward' \(new, line 2\) must be one of a, b, c, got 'd'\."):
        again.encode(["ward", "sex", "age"], [["d", "f", "7"]], "new")
    with pytest.raises(UnknownName, match=r"new must have the column 'ward', which .+, got only sex, age\."):
        again.encode(["sex", "age"], [["f", "7"]], "new")
    with pytest.raises(UnknownName, match=r"coding must be one of onehot, ordinal, got 'hot'\."):
        from_csv(csv_file(text), "sick", categorical=["sex"], coding="hot")
    with pytest.raises(InvalidArgument, match=r"column names must be distinct, got \['sex=f'\]"):
        from_csv(csv_file("sex,sex=f,sick\nf,1,0\nm,2,1\n"), "sick", categorical="sex", coding="onehot")


def test_numbers_survive_the_round_trip(tmp_path):
    x, y = np.random.default_rng(0).standard_normal((50, 3)), np.random.default_rng(1).standard_normal(50)
    with open(tmp_path / "numbers.csv", "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["a", "b", "c", "t"])
        writer.writerows([*map(float, row), float(t)] for row, t in zip(x, y, strict=True))
    dataset = from_csv(tmp_path / "numbers.csv", "t", scale="none")
    assert np.array_equal(dataset.x, x)
    assert np.array_equal(dataset.y, y)
    assert dataset.classes == ()
    assert dataset.digest == from_arrays(x, y, ["a", "b", "c"]).digest
    assert dataset.digest != from_arrays(x, y).digest  # of the same numbers under other names


def column(values):
    return "a,t\n" + "".join(f"{i},{value}\n" for i, value in enumerate(values))


@pytest.mark.parametrize(
    ("values", "task", "classes", "y"),
    [
        (["10", "9", "10.0"], "auto", ("9", "10"), [1, 0, 1]),
        (["b", "a", "b"], "auto", ("a", "b"), [1, 0, 1]),
        (["1", "2", "x"], "classification", ("1", "2", "x"), [0, 1, 2]),
        (["3", "1", "2"], "regression", (), [3, 1, 2]),
        ([str(i) for i in range(20)], "auto", tuple(map(str, range(20))), list(range(20))),
        ([str(i) for i in range(5, 26)], "auto", (), list(range(5, 26))),
        ([str(i) for i in range(5, 26)], "classification", tuple(map(str, range(5, 26))), list(range(21))),
    ],
)
def test_targets(csv_file, values, task, classes, y):
    dataset = from_csv(csv_file(column(values)), "t", task=task)
    assert dataset.classes == classes
    assert dataset.y.tolist() == y


@pytest.mark.parametrize(
    ("values", "task", "sentence"),
    [
        (["1", "NA", "2"], "auto", r"column 't' \(.*people\.csv, line 3\) must be a finite number, got 'NA'\. Fill it"),
        (["1", "low", "2"], "auto", r"column 't' \(.*, line 3\) must be a finite number, got 'low'\. .*classification"),
        (["low", "high"], "regression", r"column 't' \(.*, line 2\) must be a finite number, got 'low'\."),
        (["1", "", "2"], "auto", r"column 't' \(.*, line 3\) must be filled in every row, got an empty cell\."),
        (["a", "", "b"], "auto", r"column 't' \(.*, line 3\) must be filled in every row, got an empty cell\."),
        (["a", "", "b"], "classification", r"column 't' \(.*, line 3\) must be filled in every row"),
        (["a", "a"], "auto", r"target 't' of .* must be of at least two classes, got only 'a'\."),
    ],
)
def test_targets_that_cannot_be_used(csv_file, values, task, sentence):
    with pytest.raises(DataError, match=sentence):
        from_csv(csv_file(column(values)), "t", task=task)


FILES = [
    (
        PEOPLE,
        {"categorical": []},
        r"column 'sex' \(.*people\.csv, line 2\) must be .*, got 'm'\. Add the column to `cat",
    ),
    (PEOPLE.replace("40", "?"), {}, r"column 'age' \(.*people\.csv, line 4\) must be .*, got '\?'\. Fill it or remove"),
    (
        PEOPLE.replace("40", "NaN"),
        {},
        r"column 'age' \(.*people\.csv, line 4\) must be .*, got 'NaN'\. Fill it or remove",
    ),
    (PEOPLE.replace("40", ""), {}, r"column 'age' \(.*people\.csv, line 4\) must be filled in every row, got an empty"),
    (PEOPLE.replace("30,m", "30,"), {}, r"column 'sex' \(.*people\.csv, line 2\) must be filled in every row, got an"),
    ("age,age\n1,2\n", {}, r"header of .*people\.csv must be distinct names, got 'age' twice\. Rename"),
    ("age,,sick\n1,2,3\n", {}, r"header of .*people\.csv must be a name for every column, got none for column 2\."),
    ("age,sick\n1,2\n1\n", {}, r"people\.csv, line 3, must be 2 cells like the header, got 1\. Correct the line\."),
    ("age,sick\n1,2\n\n1,2\n", {}, r"people\.csv, line 3, must be 2 cells like the header, got 0\."),
    ('age,sick\n"1\n2\n3",2\n1,2,3\n', {}, r"people\.csv, line 5, must be 2 cells like the header, got 3\."),
    ('age,sick\n"1,2\n', {}, r"people\.csv, line 2, must be a row of a CSV file: .*\. Correct it\."),
    ("age;sick\n1;2\n", {}, r"people\.csv must be separated by commas, got the header 'age;sick'\."),
    ("", {}, r"people\.csv must be a header line and rows, got an empty file\."),
    ("\n\n", {}, r"people\.csv must be a header line and rows, got an empty file\."),
    ("age,sick\n", {}, r"people\.csv must be a header line and rows, got no rows\."),
]


@pytest.mark.parametrize(("text", "options", "sentence"), FILES)
def test_files_that_cannot_be_used(csv_file, text, options, sentence):
    with pytest.raises(DataError, match=sentence):
        read(csv_file(text), **options)


def test_file_that_is_not_there(tmp_path):
    with pytest.raises(DataError, match=r"path must be a CSV file, got '.*none\.csv', which does not exist\."):
        read(tmp_path / "none.csv")
    with pytest.raises(DataError, match=r"path must be a CSV file that can be read, got .*: Is a directory\."):
        read(tmp_path)


def test_encodings(csv_file):
    with pytest.raises(DataError, match=r"people\.csv must be UTF-8 text, got byte 0xe9\. Save it as UTF-8\."):
        read(csv_file(PEOPLE.replace("m,", "é,"), encoding="latin-1"))
    assert read(csv_file(PEOPLE, encoding="utf-8-sig")).schema.columns[0].name == "age"  # Excel writes a BOM
    assert read(csv_file(PEOPLE.replace("\n", "\r\n"))).digest == read(csv_file(PEOPLE)).digest


ARGUMENTS = [
    ({"target": "sic"}, UnknownName, r"target must be one of age, sex, sick, site, got 'sic'\. Did you mean 'sick'\?"),
    ({"drop": "sight"}, UnknownName, r"drop must be one of .*, got 'sight'\. Did you mean 'site'\?"),
    ({"categorical": ["sexe"]}, UnknownName, r"categorical must be one of .*, got 'sexe'\. Did you mean 'sex'\?"),
    ({"scale": "standrad"}, UnknownName, r"scale must be one of none, norm, standard, got 'standrad'\. Did you mean"),
    (
        {"task": "classify"},
        UnknownName,
        r"task must be one of auto, .*, got 'classify'\. Did you mean 'classification'",
    ),
    ({"drop": ["sick"]}, InvalidArgument, r"drop must be columns other than the target, got \['sick'\]\."),
    ({"categorical": "sick"}, InvalidArgument, r"categorical must be columns other than the target, .* task="),
    ({"drop": ["age", "sex", "site"]}, InvalidArgument, r"drop must be fewer columns, so that a feature is left, got"),
]


@pytest.mark.parametrize(("options", "error", "sentence"), ARGUMENTS)
def test_arguments_that_cannot_be_used(csv_file, options, error, sentence):
    with pytest.raises(error, match=sentence):
        from_csv(csv_file(PEOPLE), **{"target": "sick", "categorical": ["sex"], "drop": "site", **options})


def test_arrays_are_taken_as_they_are():
    dataset = from_arrays([[1, 2], [3, 4], [5, 7]], [0, 1, 1])
    assert dataset.x.tolist() == [[1, 2], [3, 4], [5, 7]]
    assert [c.name for c in dataset.schema.columns] == ["x0", "x1"]
    assert (dataset.name, dataset.classes) == ("arrays", ("0", "1"))
    named = from_arrays([[1], [2]], [True, False], feature_names=["a"], classes=["no", "yes"], name="mine")
    assert (named.name, named.classes, named.y.tolist()) == ("mine", ("no", "yes"), [1, 0])
    assert from_arrays(np.eye(3), [0, 1, 1], scale="standard").x.std(axis=0) == pytest.approx(1)


@pytest.mark.parametrize("y", [[-1, 1, 1], [0, 2, 2], [0.0, 0.5, 1.0], [0, 0, 0]])
def test_numbers_that_are_not_class_codes_stay_as_they_are(y):
    dataset = from_arrays(np.eye(3), y)
    assert dataset.classes == ()
    assert dataset.y.tolist() == y


@pytest.mark.parametrize(
    ("x", "y", "options", "sentence"),
    [
        (np.eye(2).astype(str), [0, 1], {}, r"x of dataset 'arrays' must be numbers, got '1\.0' at row 0, column 0\."),
        ([[1, 2], [3, "k"]], [0, 1], {"feature_names": ["a", "b"]}, r"must be numbers, got 'k' at row 1, column 'b'\."),
        ([[1, 2], [3, "k"]], [0, 1], {"feature_names": ["a"]}, r"must be numbers, got 'k' at row 1, column 1\."),
        ([[1, 2], [None, 3]], [0, 1], {}, r"x of dataset 'arrays' must be numbers, got None at row 1, column 0\."),
        ([[1, 2], [3, np.nan]], [0, 1], {}, r"x of dataset 'arrays' must be finite, got nan at row 1, column 'x1'\."),
        (np.eye(2) * 1j, [0, 1], {}, r"x of dataset 'arrays' must be numbers, got"),
        ([1, 2], [0, 1], {}, r"x of dataset 'arrays' must be of shape \(rows, features\), got \(2,\)\."),
        (np.eye(2), ["a", "b"], {}, r"y of dataset 'arrays' must be numbers, got 'a' at row 0\."),
        (np.eye(2), [0, np.nan], {}, r"y of dataset 'arrays' must be finite, got nan at row 1\."),
        (np.eye(2), [0, 1], {"feature_names": ["a"]}, r"feature_names must be one per column \(2\), got 1\."),
        (np.eye(2), [0, 1], {"scale": "unit"}, r"scale must be one of none, norm, standard, got 'unit'\."),
    ],
)
def test_arrays_that_cannot_be_used(x, y, options, sentence):
    with pytest.raises((DataError, InvalidArgument, UnknownName), match=sentence):
        from_arrays(x, y, **options)
