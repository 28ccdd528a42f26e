"""The command from end to end: help, lists, a run's folder, predictions, the demo."""

from __future__ import annotations

import csv
import dataclasses
import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from helpers_experiment import experiment, history_cells, patients, whole, write_csv, write_toml

import fedpact as fp
from fedpact import data
from fedpact.algorithms import ALGORITHMS
from fedpact.cli import parser
from fedpact.core.vertical import Layout
from fedpact.data.partition import SPLITS
from fedpact.experiment import SEE
from fedpact.problems import PROBLEMS

ROOT = Path(__file__).resolve().parents[1]
(GROUP,) = [action for action in parser()._actions if getattr(action, "choices", None)]
COMMANDS = GROUP.choices
DEMO = ("FedEPM", "SFedAvg", "SFedProx", "FedAvg (1/r)", "FedAvg (batches of 8)", "FedProx", "Inexact ADMM")


@pytest.fixture(scope="session")
def script():
    """The installed command itself."""
    path = Path(sys.executable).with_name("fedpact")
    if not path.is_file():
        pytest.skip("the command is not installed beside this Python")
    return path


# Help


def test_the_version(command):
    done = command("--version")
    assert (done.code, done.out) == (0, f"fedpact {fp.__version__}\n")


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help(command, name):
    done = command(name, "--help")
    assert done.code == 0
    assert done.err == ""
    assert done.out.startswith(f"usage: fedpact {name} ")
    for action in COMMANDS[name]._actions:
        for option in action.option_strings:
            assert option in done.out


@pytest.mark.parametrize("name", COMMANDS)
def test_every_option_and_command_says_what_it_does(name):
    for action in COMMANDS[name]._actions:
        assert action.help, f"{name}: {action.dest}"
    assert COMMANDS[name].description
    (choice,) = [choice for choice in GROUP._choices_actions if choice.dest == name]
    assert choice.help


def test_the_top_help_lists_every_command(command):
    done = command("--help")
    assert done.code == 0
    for name in COMMANDS:
        assert re.search(rf"^    {name}\b", done.out, re.MULTILINE), name


# Lists


def test_list_is_complete(command):
    groups = json.loads(command("list", "--json").out)
    assert set(groups["algorithms"]) == set(ALGORITHMS)
    assert set(groups["problems"]) == set(PROBLEMS)
    assert set(groups["datasets"]) == set(data.names())
    assert set(groups["splits"]) == set(SPLITS)
    words = command("list").out
    for group, names in groups.items():
        assert f"\n{group}\n" in f"\n{words}"
        for name in names:
            assert re.search(rf"^  {name}\b", words, re.MULTILINE), name


@pytest.mark.parametrize("group", ["algorithms", "problems", "datasets", "splits"])
def test_every_name_in_the_list_is_explained(command, group):
    names = json.loads(command("list", "--json").out)[group]
    assert [name for name, text in names.items() if not text] == []
    assert len(set(names.values())) == len(names), "no two are told in the same words"


@pytest.mark.parametrize("name", ALGORITHMS)
def test_show_is_complete(command, name):
    cls = ALGORITHMS[name]
    shown = json.loads(command("show", name, "--json").out)
    assert shown["name"] == name
    assert [row["setting"] for row in shown["settings"]] == [f.name for f in dataclasses.fields(cls)]
    for row, field in zip(shown["settings"], dataclasses.fields(cls), strict=True):
        assert row["default"] == field.default
    assert shown["presets"] == {preset: dict(values) for preset, values in cls.presets.items()}
    clients = Layout(((1,), (0, 2)), ("0", "1"), 1) if cls.vertical else 3
    built = {preset: cls.preset(preset).build(fp.Logistic(l2=0), clients, 0.5) for preset in cls.presets}
    assert shown["needs"] == {preset: sorted(algorithm.needs) for preset, algorithm in built.items()}
    words = command("show", name).out
    for preset, needs in shown["needs"].items():
        assert re.search(rf"^  {preset}\s+{', '.join(needs) or 'a gradient alone'}$", words, re.MULTILINE)
    assert shown["box"].splitlines()[0] in words
    for part in (*(row["setting"] for row in shown["settings"]), *shown["presets"], "Differs from the paper"):
        assert part in words


@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_setting_has_a_meaning(command, name):
    shown = json.loads(command("show", name, "--json").out)
    missing = [row["setting"] for row in shown["settings"] if not row["meaning"].strip()]
    assert missing == []
    only_source = [row["setting"] for row in shown["settings"] if re.fullmatch(r"Section [\w.]+", row["meaning"])]
    assert only_source == [], "a source is no meaning"


def test_paper_list(command):
    done = command("paper", "list", "--json")
    assert done.code == 0, done.err
    papers = json.loads(done.out)
    assert "fedepm" in papers
    assert all(text for figures in papers.values() for text in figures.values())
    words = command("paper", "list").out
    for name, figures in papers.items():
        for figure in figures:
            assert re.search(rf"^{name}\s+{figure}\s+\S", words, re.MULTILINE)


# A run's folder


@pytest.fixture(scope="module")
def ran(zygote, tmp_path_factory):
    """A run with all its plots: its folder and what it printed with --json."""
    folder = tmp_path_factory.mktemp("ran")
    write_csv(folder / "people.csv")
    write_toml(folder / "people.toml", experiment())
    done = zygote.start("run", "people.toml", "--out", "run", "--json", cwd=folder, plots=True).wait()
    assert done.code == 0, done.err
    assert done.err == ""
    return folder / "run", json.loads(done.out)


def test_a_run_leaves_all_its_files(ran):
    folder, _ = ran
    names = {path.name for path in folder.iterdir()}
    files = {
        ".lock",
        "config.json",
        "environment.json",
        "experiment.json",
        "history.csv",
        "model.bin",
        "report.html",
        "result.json",
    }
    assert names == files | {"checkpoint-000000002.bin", "checkpoint-000000006.bin", "plots"}
    whole(folder)
    plots = {path.name for path in (folder / "plots").iterdir()}
    assert len(plots) >= 6
    assert {name.removesuffix(".svg") for name in plots if name.endswith(".svg")} == {
        name.removesuffix(".png") for name in plots if name.endswith(".png")
    }


def test_what_it_prints_is_what_is_in_the_folder(ran):
    folder, printed = ran
    result = json.loads((folder / "result.json").read_text())
    assert printed == result | {"folder": "run", "report": "run/report.html"}
    assert result["outcome_kind"] == "ROUNDS"
    assert printed["outcome"] == "all rounds were run"
    rows = history_cells(folder)
    assert [int(row["round"]) for row in rows] == list(range(7))
    assert [int(row["participants"]) for row in rows] == [0] + [3] * 6  # ⌈5/2⌉
    assert printed["summary"]["objective"] == float(rows[-1]["objective"])
    assert printed["summary"]["megabytes_up"] == int(rows[-1]["bytes_up"]) / 1e6
    page = (folder / "report.html").read_text(encoding="utf-8")
    assert "patients" in page
    assert page.count("<svg") >= 3


def test_coefficients_have_their_features_names(ran):
    folder, printed = ran
    rows = {row["feature"]: row for row in printed["coefficients"]}
    assert list(rows) == ["age", "dose", "sex", "(intercept)"]
    model = fp.Model.load(folder)
    assert [rows[name]["coefficient"] for name in ("age", "dose", "sex")] == model.w.tree["w"].tolist()
    line = sum(rows[name]["per_unit"] * value for name, value in {"age": 50.0, "dose": 2.0, "sex": 1.0}.items())
    probability = 1 / (1 + np.exp(-line - rows["(intercept)"]["per_unit"]))
    x = model.schema.encode(["age", "dose", "sex"], [["50", "2", "m"]], "by hand")
    assert model.predict(x)[0] == pytest.approx(probability, rel=1e-12), "in the columns' own units"
    page = (folder / "report.html").read_text(encoding="utf-8")
    assert "per unit of its column" in page
    assert "<td>dose</td>" in page


def test_the_console_has_every_clients_scores(command, finished):
    done = command("resume", finished)
    table = done.out.split("held-out rows\n")[1].split("\n\n")[0].splitlines()
    assert table[0].split() == ["client", "rows", "accuracy", "AUC", "log", "loss", "calibration", "error"]
    assert [line.split()[0] for line in table[2:]] == ["all", "centre", "east", "north", "south", "west"]
    assert "training accuracy" in done.out


def test_bytes_are_those_of_the_messages(ran):
    """Down: w and b, four doubles. Up: p·w, p·b and p, five doubles. Three clients a round, no hello."""
    rows = history_cells(ran[0])
    assert [int(row["bytes_down"]) for row in rows] == [3 * 4 * 8 * t for t in range(7)]
    assert [int(row["bytes_up"]) for row in rows] == [3 * 5 * 8 * t for t in range(7)]


def test_config_and_environment_say_what_was_run(ran):
    folder, _ = ran
    config = json.loads((folder / "config.json").read_text())
    assert config["algorithm"] == {
        "name": "fedavg", "steps": 3, "step": 0.1, "scale": 1.0, "batch": 4, "weights": "uniform",
        "epochs": None, "momentum": 0.0, "vary": False, "short": False
    }  # fmt: skip
    assert config["problem"] == {"name": "logistic", "l2": 0.01, "divide": True, "intercept": True}
    assert config["data"]["clients"] == 5
    assert config["data"]["rows"] == 45  # 12 rows a site, 3 of them held out
    assert config["run"]["rounds"] == 6
    environment = json.loads((folder / "environment.json").read_text())
    assert environment["packages"]["fedpact"] == fp.__version__
    assert environment["python"] == sys.version.split()[0]
    again = json.loads((folder / "experiment.json").read_text())
    assert again["algorithm"] == experiment()["algorithm"]
    assert Path(again["data"]["csv"]).is_absolute(), "resume must find the data from anywhere"


def test_a_run_from_another_folder_finds_its_csv(command, people, tmp_path):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    done = command("run", people, "--set", "run.rounds=1", cwd=elsewhere)
    assert done.code == 0, done.err
    (folder,) = (elsewhere / "runs").iterdir()
    assert re.fullmatch(r"patients-\d{8}-\d{6}", folder.name)
    assert f"report: runs/{folder.name}/report.html" in done.out


def test_the_python_call_and_the_command_give_the_same_bits(ran):
    folder, _ = ran
    dataset = data.from_csv(folder.parent / "people.csv", "outcome", drop=["id", "site"], categorical="sex")
    federation = dataset.split(how="column", column="site", holdout=0.25)
    settings = fp.FedAvg(steps=3, step=0.1, batch=4)
    run = fp.run(settings, fp.Logistic(l2=0.01, intercept=True), federation, rounds=6, participation=0.5)
    assert [float(row["objective"]) for row in history_cells(folder)] == run.history.column("objective").tolist()
    assert np.array_equal(fp.Model.load(folder / "model.bin").w.tree["w"], run.model.w.tree["w"])
    least = fp.optimum(fp.Logistic(l2=0.01, intercept=True), federation).value
    assert json.loads((folder / "result.json").read_text())["least"] == fp.Run.load(folder).least == least
    assert f"the least objective, {least:.10g};" in (folder / "report.html").read_text(encoding="utf-8")


# Predictions


def by_hand(model: Path) -> list[float]:
    """The probabilities of the training rows from the bytes of model.bin: standardise, weigh, squash."""
    with np.load(io.BytesIO(model.read_bytes().split(b"\n", 2)[2])) as arrays:
        w, b = arrays["w"], arrays["b"]
    x = np.array([[row["age"], row["dose"], row["sex"] == "m"] for row in patients()], dtype=float)
    dataset = data.from_csv(model.parents[1] / "people.csv", "outcome", drop=["id", "site"], categorical="sex")
    kept = x[np.concatenate(dataset.split(how="column", column="site", holdout=0.25).rows)]  # the rows trained on
    z = (x - kept.mean(axis=0)) / kept.std(axis=0) @ w + b
    return (1 / (1 + np.exp(-z))).tolist()


def test_predict_on_the_training_file_reproduces_the_probabilities(command, ran, tmp_path):
    folder, _ = ran
    source = folder.parent / "people.csv"
    expected = by_hand(folder / "model.bin")
    words = command("predict", folder / "model.bin", source)
    assert words.code == 0, words.err
    assert command("predict", folder, source).out == words.out, "the run's folder stands for its model"
    header, *rows = csv.reader(words.out.splitlines())
    assert header == ["probability of well", "label"]
    assert [float(row[0]) for row in rows] == pytest.approx(expected, rel=1e-12)
    assert [row[1] for row in rows] == ["well" if p > 0.5 else "sick" for p in expected]
    assert len({row[1] for row in rows}) == 2

    result = json.loads(command("predict", folder / "model.bin", source, "--json").out)
    assert result["predictions"] == [float(row[0]) for row in rows]
    assert result["classes"] == ["sick", "well"]
    assert result["labels"] == [row[1] for row in rows]

    quiet = command("predict", folder / "model.bin", source, "--out", "guesses.csv")
    assert (quiet.code, quiet.out) == (0, "")
    assert (tmp_path / "guesses.csv").read_text(encoding="utf-8") == words.out


def test_predict_a_number(command, tmp_path):
    w = fp.core.vector.Vector({"w": np.array([2.0, -1.0])})
    dataset = data.from_arrays([[0.0, 1.0], [2.0, 5.0]], [0.1, 0.2], classes=(), feature_names=["a", "b"])
    fp.Model(fp.LeastSquares(), w, dataset.schema).save(tmp_path / "model.bin")
    (tmp_path / "new.csv").write_text("b,a\n1,3\n0,-1\n")
    assert command("predict", "model.bin", "new.csv").out == "prediction\n5.0\n-2.0\n"
    assert json.loads(command("predict", "model.bin", "new.csv", "--json").out) == {"predictions": [5.0, -2.0]}


# The demo


def test_demo(command, tmp_path):
    done = command("demo", "--rounds", "3", "--out", "page", timeout=300)
    assert done.code == 0, done.err
    page = (tmp_path / "page" / "report.html").read_text(encoding="utf-8")
    for name in DEMO:
        assert name in done.out
        assert name in page
    assert done.out.rstrip().endswith("report: page/report.html")
    assert re.search(r"least possible objective: 0\.06\d+", done.out)
    assert [path.name for path in tmp_path.iterdir()] == ["page"]
    folders = sorted(path.name for path in (tmp_path / "page" / "runs").iterdir())
    six = ["01-fedepm", "02-sfedavg", "03-sfedprox", "04-fedavg", "05-fedavg", "06-fedprox"]
    assert folders == [*six, "07-inexact_admm"]
    said = "six algorithms in seven runs"  # by the help, and by the README
    assert (len({name[3:] for name in folders}), len(folders)) == (6, 7)
    assert said in COMMANDS["demo"].description
    assert (ROOT / "README.md").read_text(encoding="utf-8").count(said) == 2
    for folder in folders:
        assert len(history_cells(tmp_path / "page" / "runs" / folder)) == 4
        fp.Model.load(tmp_path / "page" / "runs" / folder / "model.bin")


# The installed script


@pytest.mark.parametrize("module", ["fedpact", "fedpact.cli"])
def test_the_module_is_the_command(module):
    done = subprocess.run([sys.executable, "-m", module, "--help"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("usage: fedpact ")


def test_the_installed_command_refuses_in_one_sentence(script, tmp_path):
    done = subprocess.run([script, "run", "nowhere.toml"], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr == f"fedpact: experiment must be a TOML file, got 'nowhere.toml', which does not exist. {SEE}\n"


def test_a_closed_pipe_is_silent(script):
    """`fedpact list | head -1`, and a reader that is gone before the first byte."""
    env = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}  # as a terminal has it
    piped = subprocess.run(
        f"'{script}' list | head -1; exit ${{PIPESTATUS[0]}}",
        shell=True, executable="/bin/bash", capture_output=True, text=True, timeout=60, env=env,
    )  # fmt: skip
    assert piped.stdout == "algorithms\n"
    assert piped.stderr == ""
    assert piped.returncode == 0
    reading, writing = os.pipe()
    os.close(reading)
    gone = subprocess.run([script, "list"], stdout=writing, stderr=subprocess.PIPE, text=True, timeout=60, env=env)
    os.close(writing)
    assert gone.stderr == ""
    assert gone.returncode == 0


def test_the_split_s_column_is_no_feature_unless_it_is_asked_for(command, tmp_path):
    rows = "".join(f"{'north' if i % 2 else 'south'},{i % 7},{int(i % 3 > 0)}\n" for i in range(40))
    (tmp_path / "p.csv").write_text("hospital,age,sick\n" + rows)
    text = '[data]\ncsv = "p.csv"\ntarget = "sick"\n%s\n[split]\nhow = "column"\ncolumn = "hospital"\n'
    text += '[algorithm]\nname = "fedavg"\nsteps = 1\n[run]\nrounds = 1\n'
    for extra, features in (("", 1), ('categorical = ["hospital"]', 2), ('drop = "hospital"', 1)):
        (tmp_path / "p.toml").write_text(text % extra)
        done = command("run", "p.toml", "--json", "--out", f"run{features}{len(extra)}")
        assert done.code == 0, done.err
        config = json.loads((tmp_path / f"run{features}{len(extra)}" / "config.json").read_text())
        assert config["data"]["features"] == features
