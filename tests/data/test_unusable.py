"""Rows, labels and files that cannot be used: refused with the place, before anything is written."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from helpers_experiment import patients, write_csv
from helpers_refused import refused, sentence

import fedpact as fp
from fedpact.core.errors import DataError, FedpactError
from fedpact.experiment import build, read
from fedpact.run import Experiment


def csv_with(tmp_path: Path, **cells: object) -> Path:
    """people.csv with other cells in its fourth row (line 5 of the file)."""
    rows = patients()
    rows[3] |= cells
    return write_csv(tmp_path / "people.csv", rows)


DATA = {
    "NaN": ({"age": "nan"}, "column 'age' (", "line 5) must be a finite number, got 'nan'. Fill it or remove the row."),
    "infinite": ({"age": "1e999"}, "column 'age' (", "line 5) must be a finite number, got '1e999'."),
    "text": ({"dose": "two"}, "column 'dose' (", "line 5) must be a finite number, got 'two'."),
    "empty": ({"dose": ""}, "column 'dose' (", "line 5) must be filled in every row, got an empty cell."),
    "empty site": ({"site": ""}, "column 'site' must be filled in every row, got nothing at row 3."),
    "three classes": ({"outcome": "dead"}, "labels must be two classes for Logistic, got 3 classes (dead, sick, well"),
}


@pytest.mark.parametrize("kind", DATA)
def test_rows_that_cannot_be_used(command, people, tmp_path, kind):
    cells, *expected = DATA[kind]
    csv_with(tmp_path, **cells)
    refused(command("run", people, "--out", "run"), *expected)
    with pytest.raises(DataError) as caught:
        build(read(people))
    for part in expected:
        assert part in sentence(str(caught.value))
    assert not (tmp_path / "run").exists()


def test_labels_of_one_class(command, people, tmp_path):
    write_csv(tmp_path / "people.csv", [row | {"outcome": "sick"} for row in patients()])
    refused(command("run", people, "--out", "run"), "must be of at least two classes, got only 'sick'.")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("classes", [None, ("well", "sick")], ids=["unnamed", "named"])
def test_labels_of_one_class_in_python(classes):
    federation = fp.data.from_arrays(np.eye(6), np.zeros(6), classes=classes).split(clients=2)
    with pytest.raises(DataError) as caught:
        fp.run(fp.FedAvg(step=0.1), fp.Logistic(), federation, rounds=1)
    assert "labels must be two classes for Logistic, got " in sentence(str(caught.value))


@pytest.mark.parametrize("labels", [[0, 1, 2] * 2, [-1, 1] * 3, [0.5, 1] * 3], ids=["three", "signs", "fractions"])
def test_labels_that_are_not_two_classes_in_python(labels):
    federation = fp.data.from_arrays(np.eye(6), labels).split(clients=2)
    with pytest.raises(DataError) as caught:
        Experiment(fp.FedAvg(step=0.1), fp.Logistic(), federation)
    assert "labels must be " in sentence(str(caught.value))


def test_a_client_without_rows_in_python():
    dataset = fp.data.from_arrays(np.eye(4), [0, 1, 0, 1])
    with pytest.raises(DataError) as caught:
        fp.data.Federation(dataset, (np.array([0, 1]), np.array([], int)))
    assert sentence(str(caught.value)) == (
        "client '1' must be given at least one row, got none. Remove it or give it rows."
    )
    with pytest.raises(FedpactError) as caught:
        fp.data.Federation.from_arrays([(np.eye(2), [0, 1]), (np.empty((0, 2)), [])])
    assert "at least one row, got none" in sentence(str(caught.value))


@pytest.mark.parametrize("bad", [np.nan, np.inf, "x"], ids=str)
def test_features_that_are_no_numbers_in_python(bad):
    x = np.ones((4, 2), dtype=object)
    x[2, 1] = bad
    with pytest.raises(DataError) as caught:
        fp.data.from_arrays(x, [0, 1, 0, 1])
    assert "row 2, column 'x1'" in sentence(str(caught.value)).replace("column 1", "column 'x1'")


def test_a_csv_file_that_is_none(command, people, tmp_path):
    (tmp_path / "people.csv").unlink()
    refused(command("run", people), "path must be a CSV file, got ", "which does not exist")
    (tmp_path / "people.csv").write_bytes(b"age,outcome\n1,\xff\n")
    refused(command("run", people), "must be UTF-8 text, got byte 0xff.")
    (tmp_path / "people.csv").write_bytes(b"")
    refused(command("run", people), "must be a header line and rows, got an empty file.")
    (tmp_path / "people.csv").unlink()
    (tmp_path / "people.csv").mkdir()
    refused(command("run", people), "path must be a CSV file that can be read, got ")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["people.csv", "people.toml"]


def test_a_dataset_that_is_nowhere(command, people, tmp_path):
    places = {
        "FEDPACT_DATA": str(tmp_path),
        "FEDPACT_CACHE": str(tmp_path / "cache"),
        "https_proxy": "http://127.0.0.1:9",
    }
    done = command("run", people, "--set", 'data={name="adult"}', "--set", "split={clients=5}", env=places)
    refused(done, "adult.test of dataset 'adult' must be in one of three places, got none: ")
    assert not (tmp_path / "runs").exists()
