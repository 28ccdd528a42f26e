"""Public datasets against their owners' descriptions and other readers of the same files."""

import bz2
import io
import os
import zipfile
from pathlib import Path

import numpy as np
import pytest
import scipy.sparse
from sklearn.datasets import load_svmlight_file

import fedpact.data as data
from fedpact.core.errors import DataError, DatasetMissing
from fedpact.data import public


def official(*parts):
    path = Path(os.environ.get("FEDPACT_DATA", ""), *parts)
    if not path.is_file():
        pytest.skip(f"FEDPACT_DATA has no {'/'.join(parts)}")
    return path


def test_qsar():
    path = official("qsar_oral_toxicity", "qsar_oral_toxicity.zip")
    dataset = data.load("qsar")
    assert (dataset.name, dataset.rows, dataset.features) == ("qsar", 8992, 1024)
    assert dataset.classes == ("negative", "positive")
    assert dataset.y.sum() == 741
    assert scipy.sparse.issparse(dataset.x)
    assert np.unique(dataset.x.data).tolist() == [1.0]
    with zipfile.ZipFile(path) as archive:
        text = archive.read("qsar_oral_toxicity.csv")
    assert dataset.x.nnz == text.count(b"1;")  # every cell but the label is a 0 or a 1 and a semicolon
    lines = text.decode().split()
    for i in (0, 4000, 8991):
        np.testing.assert_array_equal(dataset.take([i]).x.toarray()[0], np.array(lines[i].split(";")[:-1], float))
    np.testing.assert_array_equal(dataset.y, [line.endswith(";positive") for line in lines])


def test_w8a():
    """Against scikit-learn's reader."""
    path = official("w8a", "w8a.bz2")
    dataset = data.load("w8a")
    assert (dataset.name, dataset.rows, dataset.features) == ("w8a", 49749, 300)
    assert dataset.y.sum() == 1479
    assert scipy.sparse.issparse(dataset.x)
    assert dataset.x.nnz == 579586
    x, y = load_svmlight_file(io.BytesIO(bz2.decompress(path.read_bytes())), n_features=300)
    assert abs(scipy.sparse.csr_array(x) - dataset.x).nnz == 0
    np.testing.assert_array_equal(dataset.y, y == 1)


@pytest.mark.drill
def test_covtype():
    """The first row of covtype.data: 2596,51,3,258,0,510,…, class 5; 283,301 rows are of class 2."""
    official("covtype", "covtype.data.xz")
    dataset = data.load("covtype")
    assert (dataset.name, dataset.rows, dataset.features) == ("covtype", 581012, 54)
    assert dataset.classes == ("other", "lodgepole pine")
    assert dataset.y.sum() == 283301
    assert dataset.y[0] == 0
    assert [dataset.raw[f"x{j}"][0] for j in range(6)] == [2596, 51, 3, 258, 0, 510]
    kinds = np.column_stack([dataset.raw[f"x{j}"] for j in range(10, 54)])
    assert np.all(kinds[:, :4].sum(axis=1) == 1), "one wilderness area"
    assert np.all(kinds[:, 4:].sum(axis=1) == 1), "one type of soil"
    np.testing.assert_allclose(dataset.x.mean(axis=0), 0, atol=1e-9)
    np.testing.assert_allclose(dataset.x.std(axis=0), 1, rtol=1e-9)


@pytest.mark.parametrize(
    ("name", "site", "address", "first"),
    [
        ("qsar", "UCI", "00508/qsar_oral_toxicity.zip", "qsar_oral_toxicity.zip of dataset 'qsar_oral_toxicity'"),
        ("covtype", "UCI", "covtype/covtype.data.gz", "covtype.data.xz of dataset 'covtype'"),
        ("w8a", "LIBSVM", "w8a", "w8a.bz2 of dataset 'w8a'"),
    ],
)
def test_where_it_is_looked_for(tmp_path, monkeypatch, name, site, address, first):
    assert public.UCI == "https://archive.ics.uci.edu/ml/machine-learning-databases/"
    assert public.LIBSVM == "https://www.csie.ntu.edu.tw/~cjlin/libsvmtools/datasets/binary/"
    monkeypatch.setenv("FEDPACT_DATA", str(tmp_path))
    monkeypatch.setenv("FEDPACT_CACHE", str(tmp_path))
    monkeypatch.setattr(public, site, "http://127.0.0.1:9/")
    with pytest.raises(DatasetMissing, match=rf"^{first} must be in one of .*; http://127.0.0.1:9/{address} failed \("):
        data.load(name)


# Santander's file needs an account: these have its columns, fewer of them

HEADER = "ID_code,target,var_0,var_1,var_2\n"
ROWS = "train_0,0,1.5,-2.0,7\ntrain_1,1,2.5,4.0,7\ntrain_2,0,3.5,1.0,7\n"


@pytest.fixture(params=["FEDPACT_DATA", "FEDPACT_CACHE"])
def train(request, tmp_path, monkeypatch):
    """Writes santander/train.csv under the folder of one of the variables, the other one not set."""
    for variable in ("FEDPACT_DATA", "FEDPACT_CACHE"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv(request.param, str(tmp_path))
    (tmp_path / "santander").mkdir()

    def write(text, encoding="utf-8"):
        (tmp_path / "santander" / "train.csv").write_bytes(text.encode(encoding))
        return data.load("santander")

    return write


@pytest.mark.parametrize("text", [HEADER + ROWS, (HEADER + ROWS).replace("\n", "\r\n"), (HEADER + ROWS)[:-1]])
def test_santander(train, text):
    """Columns of mean 2.5, 1 and 7 with variances 2/3, 6 and 0; the identifier is no feature."""
    dataset = train(text)
    assert (dataset.name, dataset.classes) == ("santander", ("0", "1"))
    assert [column.name for column in dataset.schema.columns] == ["var_0", "var_1", "var_2"]
    assert dataset.y.tolist() == [0, 1, 0]
    expected = np.column_stack([np.array([-1, 0, 1]) / (2 / 3) ** 0.5, np.array([-3, 3, 0]) / 6**0.5, np.zeros(3)])
    np.testing.assert_allclose(dataset.x, expected, atol=1e-15)
    assert dataset.raw["var_1"].tolist() == [-2.0, 4.0, 1.0]


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", r"train\.csv must start with ID_code,target,var_0,…, got \[''\]\. Give Kaggle's train\.csv\."),
        ("ID_code,var_0,var_1\ntest_0,1,2\n", r"must start with .*, got \['ID_code', 'var_0', 'var_1'\]\."),
        ("ID_code,target\na,1\n", r"must start with .*, got \['ID_code', 'target'\]\."),
        ("ID_code,target,var_0,age\na,1,2,3\n", r"must start with ID_code,target,var_0,…"),
        ("id;target;var_0\nx;y;z\n", r"must start with .*, got \['id;target;var_0'\]\."),
        (HEADER, r"train\.csv must be a header line and rows, got no rows\."),
        (HEADER + ROWS.replace("4.0", "four"), r"line 3, must be numbers after its first cell, got: .*'four'\. Cor"),
        (HEADER + ROWS.replace("4.0", ""), r"line 3, must be numbers after its first cell, got: .*''\. Correct"),
        (HEADER + ROWS.replace(",1,2.5", ",yes,2.5"), r"line 3, must be numbers after its first cell, got: .*'yes'"),
        (
            HEADER + ROWS.replace("4.0", "nan"),
            r"x of dataset 'santander' must be finite, got nan at row 1, column 'var",
        ),
        (HEADER + ROWS.replace(",1,2.5", ",2,2.5"), r"y of dataset 'santander' must be class codes 0\.\.1, got 2 at r"),
        (HEADER + ROWS.replace(",4.0", ""), r"line 3, must be 5 cells like the header, got 4\. Correct the line\."),
        (HEADER + ROWS.replace("4.0", "4.0,9"), r"line 3, must be 5 cells like the header, got 6\."),
        (HEADER + ROWS.replace("\ntrain_2", "\n\ntrain_2"), r"line 4, must be 5 cells like the header, got 1\."),
    ],
)
def test_a_train_csv_that_cannot_be_used(train, text, sentence):
    with pytest.raises(DataError, match=sentence):
        train(text)


def test_a_train_csv_in_another_encoding(train):
    with pytest.raises(DataError, match=r"train\.csv must be UTF-8 text, got byte 0xe9\. Give Kaggle's train\.csv\."):
        train(HEADER + ROWS.replace("train_1", "é"), encoding="latin-1")


def test_santander_that_is_nowhere(tmp_path, monkeypatch):
    monkeypatch.setenv("FEDPACT_DATA", str(tmp_path / "mine"))
    monkeypatch.setenv("FEDPACT_CACHE", str(tmp_path / "cache"))
    with pytest.raises(DatasetMissing) as caught:
        data.load("santander")
    looked = ", ".join(str(tmp_path / folder / "santander" / "train.csv") for folder in ("mine", "cache"))
    said = str(caught.value)
    assert said.startswith(
        "train.csv of dataset 'santander' must be in santander/ under $FEDPACT_DATA or $FEDPACT_CACHE"
    )
    assert f", got none ({looked}). It needs a Kaggle account" in said
    for variable in ("FEDPACT_DATA", "FEDPACT_CACHE"):
        monkeypatch.delenv(variable)
    with pytest.raises(DatasetMissing, match=r", got none \(nowhere: neither is set\)\."):
        data.load("santander")
