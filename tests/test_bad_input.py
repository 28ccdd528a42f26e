"""Whatever is wrong with what a user gives: one sentence, exit code 1 (2 from argparse), nothing half-written.

The sentence is '<name> (<symbol>) must be <constraint>, got <value>.' and then what to do.
"""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
from helpers_experiment import experiment, history_cells, patients, same_bits, toml, tree, whole, write_csv, write_toml

import fedpact as fp
from fedpact.algorithms import algorithm
from fedpact.core.errors import CheckpointError, DataError, FedpactError, InvalidArgument, OutputError, UnknownName
from fedpact.experiment import build, read
from fedpact.run import Experiment
from fedpact.tune import tune

SENTENCE = re.compile(r"\S.* must (be|have|come|name) .+,? got .+", re.DOTALL)


def sentence(text: str) -> str:
    """Check the form of an error's text; its first line is all of it."""
    assert "\n" not in text.strip(), text
    assert SENTENCE.fullmatch(text.strip()), text
    return text.strip()


def refused(done, *parts: str, code: int = 1) -> str:
    """The sentence with which a command ended."""
    assert "Traceback" not in done.err, done.err
    assert done.code == code, f"exit code {done.code}: {done.out}{done.err}"
    assert done.err.startswith("fedpact: "), done.err
    text = sentence(done.err.removeprefix("fedpact: "))
    for part in parts:
        assert part in text, text
    return text


# One setting of an experiment file


SETTINGS = {  # what --set is given: the parts of the sentence
    # names that do not exist: the valid ones are listed and the nearest is suggested
    "algorithm.name=fedagv": ("algorithm must be one of ", "got 'fedagv'. Did you mean 'fedavg'?"),
    'data={name="breast_cancr"}': ("dataset must be one of ", "got 'breast_cancr'. Did you mean 'breast_cancer'?"),
    "problem.name=logistc": ("problem must be one of ", "got 'logistc'. Did you mean 'logistic'?"),
    "split.how=colum": ("how must be one of ", "got 'colum'. Did you mean 'column'?"),
    "algorithm.preset=lipshitz": ("fedavg preset must be one of ", "got 'lipshitz'. Did you mean 'lipschitz'?"),
    "run.engine=locl": ("engine must be one of debug, local, got 'locl'. Did you mean 'local'?",),
    "run.precision=half": ("precision must be one of double, single, got 'half'.",),
    'run.participation={scheme="poison",rho=0.5}': ("must be one of ", "got 'poison'. Did you mean 'poisson'?"),
    # keys that do not exist, at the top and in every table
    "algoritm.name=fedavg": ("key of the experiment must be one of ", "got 'algoritm'. Did you mean 'algorithm'?"),
    "nam=x": ("key of the experiment must be one of ", "got 'nam'. Did you mean 'name'?"),
    "data.targt=x": ("key of [data] must be one of ", "got 'targt'. Did you mean 'target'?"),
    "split.holdot=0.1": ("must be one of ", "got 'holdot'. Did you mean 'holdout'?"),
    "split.colum=site": ("must be one of ", "got 'colum'. Did you mean 'column'?"),
    "problem.intersept=true": ("key of [problem] must be one of ", "got 'intersept'. Did you mean 'intercept'?"),
    "algorithm.stepps=3": ("setting of fedavg must be one of ", "got 'stepps'. Did you mean 'steps'?"),
    "run.round=3": ("key of [run] must be one of ", "got 'round'. Did you mean 'rounds'?"),
    "stop.gradiant=1": ("key of [stop] must be one of ", "got 'gradiant'. Did you mean 'gradient'?"),
    'stop.target={colum="objective",value=1}': ("must be one of ", "got 'colum'. Did you mean 'column'?"),
    'run.participation={scheme="poisson",roh=0.5}': ("must be one of ", "got 'roh'. Did you mean 'rho'?"),
    # values
    "run.rounds=0": ("rounds must be an integer of at least 1, got 0.",),
    "run.rounds=1.5": ("rounds must be an integer of at least 1, got 1.5.",),
    "run.rounds=": ("rounds must be an integer of at least 1, got ''.",),
    "run.seed=-1": ("seed must be an integer from 0 to ", "got -1."),
    "run.evaluate_every=0": ("evaluate_every must be an integer of at least 1, got 0.",),
    "run.participation=0": ("participation (ρ) must be in (0, 1], got 0.",),
    "run.participation=1.5": ("participation (ρ) must be in (0, 1], got 1.5.",),
    "run.participation=-1": ("participation (ρ) must be in (0, 1], got -1.",),
    "run.participation=half": ("participation must be a number in (0, 1], a scheme or a list of rounds, got 'half'.",),
    'run.participation={scheme="covering",rho=0.2,s0=2}': ("covering (s0) must be at least 5 ", "got 2."),
    "algorithm.steps=0": ("steps must be an integer of at least 1, got 0.",),
    "algorithm.step=0": ("step (γ) must be above 0, got 0.",),
    "algorithm.batch=0": ("batch (B) must be an integer of at least 1, got 0.",),
    "problem.l2=-1": ("l2 (β) must be a number of at least 0, got -1.",),
    "split.holdout=1.5": ("holdout must be a fraction in [0, 1), got 1.5.",),
    "split.seed=-1": ("seed must be an integer of at least 0, got -1.",),
    'split={how="iid",clients=61}': ("clients (m) must be at most the number of rows, 60, got 61.",),
    'split={how="iid",clients=0}': ("clients (m) must be an integer of at least 1, got 0.",),
    'split={how="sizes",sizes=[30,0]}': ("sizes (d_i) must be at least 1 each, got 0.",),
    "split.clients=4": ("clients (m) must be 5, as column says, or left out, got 4.",),
    "stop.gradient=0": ("tolerance must be a number above 0, got 0.",),
    "stop.seconds=-1": ("seconds must be a number above 0, got -1.",),
    'stop.target={column="objective"}': ("[stop] target must have 'value', got only column.",),
    # kinds
    "algorithm=5": ("[algorithm] must be a table, got 5.",),
    "data=5": ("[data] must be a table, got 5.",),
    'data="csv"': ("[data] must be a table, got 'csv'.",),
    "data={}": ("experiment must have a table [data], got none.",),
    "data.target=5": ("target must be one of ", "got 5."),
    "run.engine=5": ("engine must be ", "got 5."),
    'run.precision=["double"]': ("precision must be ", "got ['double']."),
    'run.timing="no"': ("timing must be ", "got 'no'."),
    'problem.intercept="no"': ("intercept must be ", "got 'no'."),
    'problem.divide="no"': ("divide must be ", "got 'no'."),
    'split.how=["iid"]': ("how must be ", "got ['iid']."),
    'algorithm.preset=["a"]': ("preset must be ", "got ['a']."),
    "run.participation=[0,1]": ("must be ", "got "),
    'run.participation={scheme="schedule",rounds=5}': ("must be ", "got 5."),
    'run.participation={scheme=["poisson"]}': ("must be ", "got ['poisson']."),
    'run.participation={scheme="schedule",rounds=[[0],[[1,2],[3]]]}': ("must be ", "got "),
    "stop.target=5": ("[stop] target must be a table, got 5.",),
    "name=[1]": ("name must be ", "got [1]."),
    # schedules
    'run.participation={scheme="schedule",rounds=[[0],[1]]}': (
        "rounds must be at most 2, the schedule's length, got 6.",
    ),
    "run.participation=[[0],[1],[2]]": ("rounds must be at most 3, the schedule's length, got 6.",),
    "run.participation=[[5],[0],[0],[0],[0],[0]]": ("schedule of round 0 must be below 5, got [5].",),
    "run.participation=[[0],[0],[0],[0],[2,5],[0]]": ("schedule of round 4 must be below 5, got [2, 5].",),
    "run.participation=[[0],[0],[0],[0],[2,2],[0]]": ("schedule of round 4 must be without repetition, got ",),
    "run.participation=[[0],[0],[0],[-1],[2],[0]]": ("schedule of round 3 must be a list of client numbers ", "got "),
    # columns that no rule can read
    'stop.target={column="objectiv",value=1}': ("must be one of ", "got 'objectiv'. Did you mean 'objective'?"),
    'stop.target={column="bytes_up",value=1,above=true}': ("must be one of ", "got 'bytes_up'."),
    # --set itself
    "rounds": ("--set must be key=value such as run.rounds=50, got 'rounds'.",),
    "=3": ("--set must be key=value such as run.rounds=50, got '=3'.",),
    "run..rounds=3": ("--set must be key=value such as run.rounds=50, got 'run..rounds=3'.",),
    "run.rounds.x=3": ("--set must name a key inside a table, got 'run.rounds.x=3'.",),
}


@pytest.mark.parametrize("change", SETTINGS)
def test_a_wrong_setting_is_refused_and_leaves_nothing(command, people, tmp_path, change):
    before = tree(tmp_path)
    refused(command("run", people, "--out", "run", "--set", change), *SETTINGS[change])
    assert not (tmp_path / "run").exists()
    assert tree(tmp_path) == before


@pytest.mark.parametrize("change", [c for c in SETTINGS if "=" in c.strip("=") and not c.startswith(("=", "run.."))])
def test_a_wrong_setting_is_refused_in_python_too(people, change):
    with pytest.raises(FedpactError) as caught:
        build(read(people, [change]))
    text = sentence(str(caught.value))
    for part in SETTINGS[change]:
        assert part in text


@pytest.mark.parametrize("arguments", [("tune", "--grid", "scale=1"), ("compare",)], ids=["tune", "compare"])
def test_set_is_checked_by_every_command_that_takes_it(command, people, arguments):
    name, *more = arguments
    refused(command(name, people, "--set", "run.round=3", *more), "got 'round'. Did you mean 'rounds'?")
    refused(command(name, people, "--set", "rounds", *more), "--set must be key=value")


ALGORITHMS = {
    ("fedepm", "k0", 0): "k0 (k0) must be an integer of at least 1, got 0.",
    ("fedepm", "k0", 1.5): "k0 (k0) must be an integer of at least 1, got 1.5.",
    ("fedepm", "k0", True): "k0 (k0) must be an integer of at least 1, got True.",
    ("fedepm", "lam", -0.1): "lam (λ) must be at least 0, got -0.1.",
    ("fedepm", "lam", math.inf): "lam (λ) must be ",
    ("fedepm", "eta", 0): "eta (η) must be above 0, got 0.",
    ("fedepm", "eta", -1e-3): "eta (η) must be above 0, got -0.001.",
    ("fedepm", "eta", math.nan): "eta (η) must be above 0, got nan.",
    ("fedepm", "eta", math.inf): "eta (η) must be ",
    ("fedepm", "eta", "big"): "eta (η) must be above 0, got 'big'.",
    ("fedepm", "epsilon", 0): "epsilon (ε) must be above 0, got 0.",
    ("fedepm", "epsilon", -1): "epsilon (ε) must be above 0, got -1.",
    ("fedepm", "mu0", 0): "mu0 (μ_{i,0}) must be above 0, got 0.",
    ("fedepm", "mu0", math.inf): "mu0 (μ_{i,0}) must be ",
    ("fedepm", "c", -1): "c (c_i) must be at least 0, got -1.",
    ("fedepm", "alpha", 0.5): "alpha (α_i) must be at least 1, got 0.5.",
    ("sfedavg", "k0", 0): "k0 (k0) must be an integer of at least 1, got 0.",
    ("sfedavg", "step", "big"): "step must be one of lipschitz, paper, got 'big'.",
    ("sfedavg", "epsilon", 0): "epsilon (ε) must be above 0, got 0.",
    ("sfedprox", "inner", 0): "inner (ℓ) must be an integer of at least 1, got 0.",
    ("sfedprox", "mu", -1): "mu (μ) must be at least 0, got -1.",
    ("fedprox", "mu", -1): "mu (μ) must be at least 0, got -1.",
    ("fedavg", "step", -1): "step (γ) must be above 0, got -1.",
    (
        "fedavg",
        "step",
        "lipshitz",
    ): "step must be one of a number, lipschitz, got 'lipshitz'. Did you mean 'lipschitz'?",
    ("fedavg", "step", math.inf): "step (γ) must be ",
    ("fedavg", "scale", 0): "scale must be above 0, got 0.",
    ("fedavg", "weights", "row"): "weights must be one of rows, uniform, got 'row'. Did you mean 'rows'?",
}


@pytest.mark.parametrize(("name", "setting", "value"), ALGORITHMS)
def test_an_algorithms_settings_are_checked_when_it_is_made(command, tmp_path, name, setting, value):
    expected = ALGORITHMS[name, setting, value]
    with pytest.raises(FedpactError) as caught:
        algorithm(name)(**{setting: value})
    assert expected in sentence(str(caught.value))
    write_csv(tmp_path / "people.csv")
    tables = experiment()
    tables["algorithm"] = {"name": name, setting: value}
    write_toml(tmp_path / "wrong.toml", tables)
    refused(command("run", "wrong.toml", "--out", "run"), expected)
    assert not (tmp_path / "run").exists()


# The experiment file itself


FILES = {
    "not TOML": (b"[run\nrounds = 3\n", "experiment must be valid TOML, got "),
    "a key twice": (b"name = 1\nname = 2\n", "experiment must be valid TOML, got "),
    "not UTF-8": (b'name = "caf\xe9"\n', "experiment must be a TOML file, got "),
    "empty": (b"", "experiment must have a table [data], got none."),
    "no algorithm": (b'[data]\nname = "iris"\n', "experiment must have a table [algorithm], got none."),
    "a word for a table": (b'data = "iris"\n[algorithm]\nname = "fedavg"\n', "[data] must be a table, got 'iris'."),
    "a number for a table": (b'data = 5\n[algorithm]\nname = "fedavg"\n', "[data] must be a table, got 5."),
    "a list for a table": (b'data = ["csv"]\n[algorithm]\nname = "fedavg"\n', "[data] must be a table, got ['csv']."),
    "no name": (b'[data]\nrows = 5\n[algorithm]\nname = "fedavg"\n', "[data] must have 'name' "),
}


@pytest.mark.parametrize("kind", FILES)
def test_a_file_that_is_no_experiment(command, tmp_path, kind):
    content, expected = FILES[kind]
    (tmp_path / "wrong.toml").write_bytes(content)
    for arguments in (("run", "wrong.toml"), ("tune", "wrong.toml", "--grid", "scale=1"), ("compare", "wrong.toml")):
        refused(command(*arguments), expected)
    with pytest.raises(FedpactError) as caught:
        build(read(tmp_path / "wrong.toml"))
    assert expected in sentence(str(caught.value))
    assert list(tree(tmp_path)) == ["wrong.toml"]


def test_an_experiment_file_that_cannot_be_read(command, tmp_path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_text("")
    for name in ("nowhere.toml", "folder", "file/x.toml", "x" * 300 + ".toml"):
        refused(command("run", name), f"experiment must be a TOML file, got '{name}'")
        with pytest.raises(DataError, match="experiment must be a TOML file, got "):
            read(tmp_path / name)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file", "folder"]


# Data


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


def test_a_schedule_longer_than_the_run_is_used_as_far_as_it_goes(command, people, tmp_path):
    schedule = [[0], [1, 2], [0, 1, 2, 3, 4], [3], [4], [0, 4], [2], [1]]
    write_toml(people, experiment(run={"participation": schedule, "rounds": 6}))
    assert command("run", people, "--out", "run").code == 0
    counts = [int(row["participants"]) for row in history_cells(tmp_path / "run")]
    assert counts == [0, 1, 2, 5, 1, 1, 2]


# Models


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
    refused(command("predict", model, new, "--out", "out.csv"), "column of ", "new.csv must be one of ", "got 'dose'.")
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


# Folders


def test_an_output_folder_that_is_a_file(command, people, tmp_path):
    (tmp_path / "file").write_text("mine")
    before = tree(tmp_path)
    refused(command("run", people, "--out", "file"), "output folder must be new or empty, got 'file'.")
    refused(
        command("run", people, "--out", "file/below"), "output folder must be writable, got 'file/below': Not a dir"
    )
    experiment, _ = build(read(people))
    options = {"rounds": 1, "participation": 0.5}
    for folder, form in (
        ("file", "output folder must be new or empty, got "),
        ("file/below", "output folder must be "),
    ):
        with pytest.raises(OutputError, match=form):
            fp.run(experiment.algorithm, experiment.problem, experiment.federation, folder=tmp_path / folder, **options)
    assert tree(tmp_path) == before


def test_a_folder_that_cannot_be_made(command, people):
    done = command("run", people, "--out", "/proc/fedpact")
    refused(done, "output folder must be writable, got '/proc/fedpact': ")
    assert not Path("/proc/fedpact").exists()


def test_predictions_that_cannot_be_written(command, model, people, tmp_path):
    before = tree(tmp_path)
    for out in ("nowhere/x.csv", "people.csv/x", "finished"):
        refused(command("predict", model, "people.csv", "--out", out), "output folder must be writable, got ")
    assert tree(tmp_path) == before


@pytest.fixture
def mounted(tmp_path):
    """mounted("size=200k") makes a small file system in tmp_path; skips where mounting is not permitted."""
    places = []

    def mount(name: str, options: str) -> Path:
        place = tmp_path / name
        place.mkdir()
        if os.geteuid() != 0 or shutil.which("mount") is None:
            pytest.skip("mounting a small file system needs root")
        done = subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", place], capture_output=True, text=True)
        if done.returncode != 0:
            pytest.skip(f"mounting a small file system is not permitted: {done.stderr.strip()}")
        places.append(place)
        return place

    yield mount
    for place in places:
        subprocess.run(["umount", place], check=True)


def test_a_file_system_that_is_read_only(command, people, mounted):
    place = mounted("readonly", "size=200k,ro")
    refused(command("run", people, "--out", place / "run"), "output folder must be writable, got ", "Read-only")
    refused(command("run", people, "--out", place), "output folder must be writable, got ", "Read-only")
    assert list(place.iterdir()) == []


LONG = "run.rounds=2000"  # some 300 kB of history


@pytest.fixture(scope="module")
def straight(zygote, tmp_path_factory):
    """The folder of the long run, uninterrupted."""
    folder = tmp_path_factory.mktemp("straight")
    write_csv(folder / "people.csv")
    write_toml(folder / "people.toml", experiment())
    done = zygote.start("run", "people.toml", "--out", "run", "--set", LONG, cwd=folder).wait()
    assert done.code == 0, done.err
    return folder / "run"


def test_a_full_disk_in_the_middle_of_a_run(command, people, mounted, straight):
    place = mounted("small", "size=160k")
    folder = place / "run"
    done = command("run", people, "--out", folder, "--set", LONG, checkpoint_seconds=0.0)
    refused(done, "output folder must be writable, got ", "the disk is full", "what was written before is whole")
    rounds = len((folder / "history.csv").read_bytes().splitlines())
    assert 100 < rounds < 2000
    whole(folder)
    assert list(folder.glob("checkpoint-*.bin"))
    assert list(folder.glob(".*.tmp")) == []

    subprocess.run(["mount", "-o", "remount,size=4m", place], check=True)  # some room is made
    resumed = command("resume", folder)
    assert resumed.code == 0, resumed.err
    same_bits(folder, straight)


@pytest.mark.parametrize("limit", [1500, 60_000], ids=["first files", "history"])
def test_a_write_that_fails_in_the_middle_of_a_run(command, people, straight, tmp_path, limit):
    """The same without root: no file may grow beyond a limit."""
    done = command("run", people, "--out", "run", "--set", LONG, file_limit=limit, checkpoint_seconds=0.0)
    refused(done, "output folder must be writable, got ", "File too large", "what was written before is whole")
    folder = tmp_path / "run"
    whole(folder)
    assert list(folder.glob(".*.tmp")) == []
    resumed = command("resume", folder)
    assert resumed.code == 0, resumed.err
    same_bits(folder, straight)


# A run that diverges


def test_a_step_that_is_too_long(command, people, tmp_path):
    tables = experiment(
        data={"scale": "none"},
        problem={"name": "least_squares", "l2": 0.0},
        algorithm={"step": 1e6},
        run={"rounds": 100},
    )
    write_toml(people, tables)
    done = command("run", people, "--out", "run")
    assert done.code == 1
    assert "Traceback" not in done.err
    found = re.search(r"a number was not finite.*: (round (\d+), (client \d+|the server).* not finite)", done.out)
    assert found, done.out
    folder = tmp_path / "run"
    whole(folder)
    assert found[1] in (folder / "report.html").read_text(encoding="utf-8")
    assert found[1] in json.loads((folder / "result.json").read_text())["outcome"]
    rows = history_cells(folder)
    assert 0 < int(rows[-1]["round"]) == int(found[2]) < 100
    assert all(math.isfinite(float(row["objective"])) for row in rows)
    assert all(np.all(np.isfinite(leaf)) for leaf in fp.Model.load(folder / "model.bin").w.tree.values())


@pytest.fixture
def outlier(people, tmp_path):
    """Client 4 (west) has features that overflow in its second local step; it takes part in round 3 first."""
    rows = [row | {"dose": 1e120} if row["site"] == "west" else row for row in patients()]
    write_csv(tmp_path / "people.csv", rows)
    tables = experiment(
        data={"scale": "none"},
        problem={"name": "least_squares", "l2": 0.0},
        algorithm={"step": 1e-4},
        run={"participation": [[0], [1], [0, 2], [1, 3, 4], [0]], "rounds": 5},
    )
    return write_toml(people, tables)


def test_the_client_that_diverges_is_named_and_the_last_good_state_kept(command, outlier, tmp_path):
    done = command("run", outlier, "--out", "run")
    assert done.code == 1
    assert "Traceback" not in done.err
    where = "round 3, client 4: its upload is not finite"
    assert f"a number was not finite; the last good state is kept: {where}." in done.out
    folder = tmp_path / "run"
    whole(folder)
    assert where in (folder / "report.html").read_text(encoding="utf-8")
    assert where in json.loads((folder / "result.json").read_text())["outcome"]

    good = command("run", outlier, "--out", "good", "--set", "run.rounds=3")  # the same run, ended in time
    assert good.code == 0, good.err
    same_bits(folder, tmp_path / "good")

    before = tree(folder)
    again = command("resume", folder)
    assert again.code == 1
    assert where in again.out
    assert tree(folder)["history.csv"] == before["history.csv"]
    assert tree(folder)["model.bin"] == before["model.bin"]


def test_divergence_in_python_is_a_result(outlier):
    experiment, _ = build(read(outlier))
    participation, rounds = experiment.participation, experiment.rounds
    setup = (experiment.algorithm, experiment.problem, experiment.federation)
    run = fp.run(*setup, participation=participation, rounds=rounds)
    assert run.outcome.startswith("a number was not finite; the last good state is kept: ")
    assert run.where == "round 3, client 4: its upload is not finite"
    assert run.history.rounds == 3
    assert np.all(np.isfinite(run.model.w.tree["w"]))
    assert any("round 3, client 4" in notice for notice in run.notices)


def test_the_debug_engine_names_the_stage_too(command, outlier, tmp_path):
    done = command("run", outlier, "--out", "run", "--set", "run.engine=debug")
    assert done.code == 1
    assert "Traceback" not in done.err
    assert done.err.startswith("fedpact: round 3, client 4, client_step: ")
    assert "not finite" in done.err
    whole(tmp_path / "run")


# Tuning and comparing


TUNE = {
    (
        "--grid",
        "scal=1,2",
    ): "setting of fedavg must be one of batch, scale, step, steps, weights, got 'scal'. Did you mean",
    ("--grid", "scale"): "--grid must be setting=value,value,… got 'scale'.",
    ("--grid", "scale="): "--grid must be setting=value,value,… got 'scale='.",
    ("--grid", "scale=0,1"): "scale must be above 0, got 0.",
    ("--grid", "scale=a,b"): "scale must be above 0, got 'a'.",
    (
        "--grid",
        "scale=1,2",
        "--method",
        "halvin",
    ): "method must be one of grid, halving, got 'halvin'. Did you mean 'halving'?",
    ("--grid", "scale=1,2", "--rounds", "0"): "rounds must be an integer of at least 1, got 0.",
    (
        "--grid",
        "scale=1,2,3",
        "--rounds",
        "9",
        "--budget",
        "17",
    ): "budget must be at least 18 rounds for 3 candidates, got 17.",
    ("--grid", "scale=1", "--rounds", "1", "--metric", "objectiv"): "metric must be one of ",
    ("--grid", "scale=1", "--rounds", "1", "--metric", "held_out.auk"): "held-out metric must be one of ",
    ("--grid", "scale=1", "--rounds", "1", "--metric", "held_out"): "metric must be one of ",
}


@pytest.mark.parametrize("arguments", TUNE, ids=" ".join)
def test_a_tuning_that_cannot_be(command, people, tmp_path, arguments):
    before = tree(tmp_path)
    refused(command("tune", people, *arguments), TUNE[arguments])
    assert tree(tmp_path) == before


def test_a_tuning_that_cannot_be_in_python(people):
    experiment, _ = build(read(people))
    common = (experiment.algorithm, experiment.problem, experiment.federation)
    with pytest.raises(InvalidArgument, match="budget must be at least 18 rounds for 3 candidates, got 17"):
        tune(*common, {"scale": [1, 2, 3]}, rounds=9, budget=17)
    for grid in ({}, {"scale": []}):
        with pytest.raises(InvalidArgument, match="grid must be values for at least one setting, got "):
            tune(*common, grid)
    with pytest.raises(UnknownName, match="method must be one of"):
        tune(*common, {"scale": [1]}, method="random")
    with pytest.raises(UnknownName, match=r"metric must be one of .* Did you mean 'objective'"):
        tune(*common, {"scale": [1]}, rounds=1, metric="objectve")


def test_a_comparison_that_cannot_be(command, finished, finished_once, tmp_path):
    refused(
        command("compare", finished, finished, "--column", "objectiv"),
        "column must be one of ",
        "Did you mean 'objective'?",
    )
    refused(command("compare", finished, "nowhere.toml"), "experiment must be a TOML file, got 'nowhere.toml'")
    (tmp_path / "empty").mkdir()
    refused(
        command("compare", finished, "empty"), "folder must be of a finished run, got 'empty' without result.json, "
    )
    config = json.loads((finished / "config.json").read_text())
    config["data"] |= {"digest": "0" * 64, "split": "another"}
    (finished / "config.json").write_text(json.dumps(config))
    refused(command("compare", finished_once, finished), "runs must be of the same data and split", "people, another")


@pytest.mark.parametrize("name", ["result.json", "config.json", "history.csv", "model.bin"])
@pytest.mark.parametrize("content", [b"", b"{", b"[]"], ids=["empty", "half", "another kind"])
def test_comparing_a_damaged_folder(command, finished, name, content):
    (finished / name).write_bytes(content)
    refused(command("compare", finished), name)


# Names on the command line


def test_names_on_the_command_line(command):
    refused(command("show", "fedemp"), "algorithm must be one of ", "got 'fedemp'. Did you mean 'fedepm'?")
    refused(command("paper", "fedemp", "fig3"), "paper must be one of ", "got 'fedemp'. Did you mean 'fedepm'?")
    refused(command("paper", "fedepm", "fig99"), "figure of fedepm must be one of ", "got 'fig99'.")
    refused(command("paper", "fedepm"), "figure of fedepm must be one of ", "got None.")


USAGE = [
    (),
    ("rnu",),
    ("run",),
    ("run", "x.toml", "--rounds", "3"),
    ("demo", "--rounds", "many"),
    ("resume", "x", "--rounds", "1.5"),
    ("tune", "x.toml"),
    ("verify", "silver", "x.mat"),
]


@pytest.mark.parametrize("arguments", USAGE, ids=" ".join)
def test_wrong_usage_exits_with_2(command, arguments):
    done = command(*arguments)
    assert done.code == 2
    assert done.err.startswith("usage: fedpact")
    assert "Traceback" not in done.err
    assert done.out == ""


def test_demo_of_no_rounds(command, tmp_path):
    done = command("demo", "--rounds", "0")
    refused(done, "rounds must be an integer of at least 1, got 0.")
    assert list(tmp_path.iterdir()) == []


# Python arguments that have no key in a file


def test_python_arguments(people):
    experiment, _ = build(read(people))
    problem, federation = experiment.problem, experiment.federation
    with pytest.raises(InvalidArgument, match=r"algorithm must be settings such as fedpact.FedEPM\(\), got 'fedepm'"):
        fp.run("fedepm", problem, federation)
    with pytest.raises(InvalidArgument, match=r"stop must be a rule of fedpact\.stop, got 'soon'"):
        fp.run(fp.FedAvg(), problem, federation, stop="soon")
    with pytest.raises(InvalidArgument, match="names must be 1 names, one per algorithm, got "):
        fp.compare([fp.FedAvg()], problem, federation, names=["a", "b"])
    with pytest.raises(UnknownName, match="fedavg preset must be one of lipschitz, rows, got 'papr'"):
        fp.FedAvg.preset("papr")
    with pytest.raises(UnknownName, match=r"dataset must be one of .* Did you mean 'iris'"):
        fp.data.load("irs")
    with pytest.raises(UnknownName, match="how must be one of"):
        federation.dataset.split(clients=3, how="random")
    with pytest.raises(InvalidArgument, match=r"clients \(m\) must be at most the number of rows, 60, got 61"):
        federation.dataset.split(clients=61)
    assert toml({"a": 1}) == "a = 1\n"
