"""Model files: damaged, absent, or applied to rows that they cannot read."""

from __future__ import annotations

import numpy as np
import pytest
from helpers_experiment import patients, tree, write_csv
from helpers_refused import refused, sentence

import fedpact as fp
from fedpact.core.errors import CheckpointError, DataError, InvalidArgument, UnknownName


@pytest.fixture
def model(finished):
    return finished / "model.bin"


def test_a_damaged_model_is_refused(command, model):
    content = model.read_bytes()
    flipped = bytearray(content)
    flipped[-80] ^= 1
    for damaged in (b"", b"hello", content[:-1], content[: len(content) // 2], bytes(flipped), b"x" + content):
        model.write_bytes(damaged)
        wrote = f"model must be a file that fedpact wrote, got '{model}', "
        refused(command("predict", model, "people.csv"), wrote, "damaged or of another kind")
        with pytest.raises(CheckpointError, match="model must be a file that fedpact wrote, got "):
            fp.Model.load(model)


@pytest.mark.parametrize("key", ["intercept", "scale", "shift", "classes", "problem", "columns"])
def test_damage_to_a_models_header_is_found(model, key):
    """Prediction depends on every one of these, so the sha256 must cover them."""
    magic, header, payload = model.read_bytes().split(b"\n", 2)
    at = header.index(b'"' + key.encode() + b'"') + len(key) + 3
    changed = bytearray(header)
    place = next(i for i in range(at, len(header)) if header[i : i + 1].isalnum())
    changed[place] = ord("7") if header[place : place + 1].isdigit() and header[place] != ord("7") else ord("1")
    model.write_bytes(b"\n".join([magic, bytes(changed), payload]))
    with pytest.raises(CheckpointError, match="model must be a file that fedpact wrote, got "):
        fp.Model.load(model)


def test_a_model_that_is_not_there(command, people, tmp_path):
    for path in ("nowhere.bin", ".", "people.csv/x"):
        refused(command("predict", path, "people.csv"), f"model must be a file that fedpact wrote, got '{path}'")
    refused(command("predict", "people.csv", "people.csv"), "damaged or of another kind")


def test_a_csv_file_that_the_model_cannot_read(command, model, tmp_path):
    rows = patients(8)
    new = tmp_path / "new.csv"
    write_csv(new, [{k: v for k, v in row.items() if k != "dose"} for row in rows])
    refused(command("predict", model, new, "--out", "out.csv"), "new.csv must have the column 'dose', which ")
    write_csv(new, [*rows[:3], rows[3] | {"sex": "x"}])
    refused(
        command("predict", model, new, "--out", "out.csv"), "column 'sex' (", "line 5) must be one of f, m, got 'x'."
    )
    write_csv(new, [*rows[:3], rows[3] | {"age": "old"}])
    refused(command("predict", model, new, "--out", "out.csv"), "column 'age' (", "must be a finite number, got 'old'.")
    refused(
        command("predict", model, "nowhere.csv"), "path must be a CSV file, got 'nowhere.csv', which does not exist"
    )
    for kind in (DataError, UnknownName):
        write_csv(new, [rows[0] | {"sex": "x"}] if kind is DataError else [{"age": 3}])
        with pytest.raises(kind):
            fp.Model.load(model).predict_csv(new)
    assert not (tmp_path / "out.csv").exists()


def test_features_of_another_width(model):
    with pytest.raises(InvalidArgument) as caught:
        fp.Model.load(model).predict(np.zeros((2, 7)))
    assert sentence(str(caught.value)) == "x must be an (N, 3) array, got (2, 7)."


def test_predictions_that_cannot_be_written(command, model, people, tmp_path):
    before = tree(tmp_path)
    for out in ("nowhere/x.csv", "people.csv/x", "finished"):
        refused(command("predict", model, "people.csv", "--out", out), "output folder must be writable, got ")
    assert tree(tmp_path) == before
