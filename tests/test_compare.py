"""Comparing runs: what each needed to reach the same target, from files and from folders."""

from __future__ import annotations

import json
import math
from types import SimpleNamespace

import numpy as np
import pytest
from helpers_experiment import experiment, history_cells, write_csv, write_toml
from helpers_refused import refused

import fedpact
import fedpact as fp
from fedpact.cli import main
from fedpact.core.errors import CheckpointError, DataError, InvalidArgument, OutputError, UnknownName
from fedpact.core.history import History
from fedpact.core.stop import Outcome
from fedpact.race import gather, never_improved, race
from fedpact.run import Runs


def fake(name: str, objective: list[float], digest: str = "d", **columns: list[float]) -> SimpleNamespace:
    """A finished run with a history of these columns; the costs of round t are 1000t up, 10t down, 7t, t/4 s."""
    t = np.arange(len(objective), dtype=float)
    costs = {"round": t, "bytes_up": 1000 * t, "bytes_down": 10 * t, "gradients": 7 * t, "seconds": t / 4}
    values = costs | {"objective": np.array(objective)} | {k: np.array(v, float) for k, v in columns.items()}
    history = History(values)
    history.extend(values)
    config = {"data": {"digest": digest, "dataset": "x", "split": "y"}}
    return SimpleNamespace(name=name, history=history, config=config)


def test_a_target_is_reached_in_the_first_round_that_meets_it():
    rows, target = race([fake("a", [9, 5, 3, 4, 2]), fake("b", [9, 8, 7, 6, 3])], "objective", 3.0, False)
    assert target == 3.0
    a, b = rows
    assert a == {"run": "a", "rounds": 2, "megabytes": 2020 / 1e6, "gradients": 14.0, "seconds": 0.5, "best": 2.0}
    assert b == {"run": "b", "rounds": 4, "megabytes": 4040 / 1e6, "gradients": 28.0, "seconds": 1.0, "best": 3.0}


def test_a_target_that_is_not_reached():
    rows, _ = race([fake("a", [9, 5, 3]), fake("b", [9, 8, 7])], "objective", 5.0, False)
    assert rows[0]["rounds"] == 1
    assert rows[1] == {"run": "b", "rounds": "> 2", "megabytes": None, "gradients": None, "seconds": None, "best": 7.0}


def test_without_a_target_it_is_the_best_value_that_all_reach():
    rows, target = race([fake("a", [9, 2, 1]), fake("b", [9, 6, 4, 5])], "objective", None, False)
    assert target == 4.0  # b's best; a's best is better
    assert [row["rounds"] for row in rows] == [1, 2]


def test_above_turns_the_race_round():
    a = fake("a", [1, 1, 1], accuracy=[0.5, 0.7, 0.9])
    b = fake("b", [1, 1, 1], accuracy=[0.5, 0.8, 0.75])
    rows, target = race([a, b], "accuracy", None, True)
    assert target == 0.8  # the best that b reaches
    assert [row["rounds"] for row in rows] == [2, 1]
    assert [row["best"] for row in rows] == [0.9, 0.8]
    rows, _ = race([a, b], "accuracy", 0.7, True)
    assert [row["rounds"] for row in rows] == [1, 1]


def test_a_run_that_never_improves_sets_no_target():
    """b's best is its start: as the target of all it would be met by everyone in round 0."""
    runs = [fake("a", [9, 2, 1]), fake("b", [9, 20, 30]), fake("c", [9, 4, 3])]
    rows, target = race(runs, "objective", None, False)
    assert target == 3.0
    assert [row["rounds"] for row in rows] == [1, "> 2", 2]
    assert never_improved(runs, "objective", False) == ["b"]
    with pytest.raises(
        InvalidArgument, match=r"target must be given where no run improves on its start, got none: .+ b "
    ):
        race(runs[1:2], "objective", None, False)
    assert race(runs[1:2], "objective", 5.0, False)[1] == 5.0


def test_rounds_that_were_not_measured_reach_nothing():
    rows, _ = race([fake("a", [9, math.nan, 3, math.nan])], "objective", 5.0, False)
    assert rows[0]["rounds"] == 2
    assert rows[0]["best"] == 3.0


def test_the_start_can_be_the_target():
    rows, _ = race([fake("a", [9, 5])], "objective", 10.0, False)
    assert (rows[0]["rounds"], rows[0]["megabytes"]) == (0, 0.0)


def test_a_column_that_was_never_measured_is_refused():
    with pytest.raises((InvalidArgument, DataError), match="snr"):
        race([fake("a", [9, 5], snr=[math.nan, math.nan])], "snr", None, False)


def test_runs_of_other_data_are_refused():
    runs = [fake("a", [1.0]), fake("b", [1.0], digest="other")]
    with pytest.raises(
        InvalidArgument, match=r"runs must be of the same data and split to be compared, got 2 different"
    ):
        race(runs, "objective", None, False)


def test_an_unknown_column_is_refused():
    with pytest.raises(UnknownName, match=r"column must be one of .* got 'objectiv'. Did you mean 'objective'"):
        race([fake("a", [1.0])], "objectiv", None, False)


# Folders and files


def test_the_function_of_the_same_name_is_still_there():
    """Importing the module fedpact.compare (as above, and as the command does) must not hide fedpact.compare(…)."""
    assert callable(fedpact.compare)


def test_a_loaded_run_is_the_run(finished):
    run = fedpact.Run.load(finished)
    result = json.loads((finished / "result.json").read_text())
    assert run.name == "patients"
    assert run.outcome_kind is Outcome.ROUNDS
    assert run.outcome == result["outcome"]
    assert run.summary == result["summary"]
    assert run.metrics == result["metrics"]
    assert run.config == json.loads((finished / "config.json").read_text())
    assert [float(row["objective"]) for row in history_cells(finished)] == run.history.column("objective").tolist()


@pytest.mark.parametrize("kind", Outcome)
def test_the_outcome_is_kept_by_its_name(finished, kind):
    """Its sentence may be worded anew, or hold a colon."""
    result = json.loads((finished / "result.json").read_text())
    changed = {"outcome": "other words: here: there", "outcome_kind": kind.name, "where": "here: there"}
    (finished / "result.json").write_text(json.dumps(result | changed))
    run = fedpact.Run.load(finished)
    assert (run.outcome_kind, run.where) == (kind, "here: there")
    assert run.outcome == f"{kind.value}: here: there"


@pytest.mark.parametrize(
    ("name", "keys"), [("result.json", {"outcome_kind": "DONE"}), ("result.json", None), ("config.json", None)]
)
def test_a_folder_that_lacks_what_a_run_needs_is_refused(finished, name, keys):
    content = {} if keys is None else json.loads((finished / name).read_text()) | keys
    (finished / name).write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match=rf"^{name} must have .+ got a damaged file .+ Resume the run to have it"):
        fedpact.Run.load(finished)


def test_two_folders_of_one_name_are_told_apart(finished):
    assert [run.name for run in gather([str(finished), str(finished), str(finished)])] == [
        "patients",
        "patients (2)",
        "patients (3)",
    ]


def test_an_unfinished_folder_is_refused(finished):
    (finished / "result.json").unlink()
    with pytest.raises(
        DataError, match=r"folder must be of a finished run, got .* without result.json.*fedpact resume"
    ):
        fedpact.Run.load(finished)


def test_folders_on_the_command(command, finished, tmp_path):
    objective = [float(row["objective"]) for row in history_cells(finished)]
    target = sorted(objective)[2]
    expected = next(t for t, f in enumerate(objective) if f <= target)
    done = command("compare", finished, finished, "--target", repr(target), "--json", "--out", "page")
    assert done.code == 0, done.err
    result = json.loads(done.out)
    assert result["column"] == "objective"
    assert result["target"] == target
    assert [row["run"] for row in result["runs"]] == ["patients", "patients (2)"]
    for row in result["runs"]:
        assert row["rounds"] == expected
        assert row["best"] == min(objective)
    assert (tmp_path / result["report"]).is_file()
    assert "patients (2)" in (tmp_path / result["report"]).read_text(encoding="utf-8")
    words = command("compare", finished, "--column", "accuracy", "--target", "2")
    assert words.code == 0
    assert "to reach accuracy ≥ 2" in words.out
    assert "> 6" in words.out


def test_files_on_the_command(command, people, tmp_path):
    write_toml(tmp_path / "long.toml", experiment(algorithm={"scale": 2.0}) | {"name": "long steps"})
    done = command("compare", people, "long.toml", "--set", "run.rounds=4", "--json")
    assert done.code == 0, done.err
    result = json.loads(done.out)
    assert [row["run"] for row in result["runs"]] == ["patients", "long steps"]
    assert result["target"] == max(row["best"] for row in result["runs"])
    assert all(isinstance(row["rounds"], int) and row["rounds"] <= 4 for row in result["runs"])
    assert sorted(p.name for p in tmp_path.iterdir()) == ["long.toml", "people.csv", "people.toml"]


def test_the_notices_of_a_run_are_in_the_report_that_compares_its_folder(command, tmp_path):
    """The README promises that every report of a run with the paper's noise says that it is no guarantee."""
    write_csv(tmp_path / "people.csv")
    tables = experiment(run={"rounds": 2})
    tables["algorithm"] = {"name": "fedepm", "k0": 3, "epsilon": 0.5, "eta": 0.01, "mu0": 10.0}
    write_toml(tmp_path / "noisy.toml", tables)
    done = command("run", "noisy.toml", "--out", "noisy", "--json")
    assert done.code == 0, done.err
    assert any("no guarantee" in notice for notice in json.loads(done.out)["notices"])
    assert "no guarantee" in (tmp_path / "noisy" / "report.html").read_text(encoding="utf-8")
    assert command("compare", "noisy", "--out", "page").code == 0
    assert "no guarantee" in (tmp_path / "page" / "report.html").read_text(encoding="utf-8")


# What cannot be compared


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


# Ctrl-C, and what is checked before the first run


@pytest.fixture
def interrupted(monkeypatch):
    """Ctrl-C comes in the first block of every run."""
    monkeypatch.setattr("fedpact.core.driver._Interrupt.asked", True)


@pytest.fixture
def small():
    return fp.data.synthetic(rows=40, features=3).split(clients=4)


TWO = [fp.FedAvg(), fp.FedAvg(steps=2)]


def test_ctrl_c_ends_a_comparison_and_resume_goes_on_with_it(small, tmp_path, monkeypatch):
    monkeypatch.setattr("fedpact.report.html.plots_section", lambda *_: "")
    whole = fp.compare(TWO, fp.Logistic(), small, rounds=3)
    with monkeypatch.context() as patch:
        patch.setattr("fedpact.core.driver._Interrupt.asked", True)
        with pytest.raises(KeyboardInterrupt, match=r"interrupted in FedAvg, after 0 rounds. Go on with resume=True."):
            fp.compare(TWO, fp.Logistic(), small, rounds=3, folder=tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["01-fedavg"]  # the second did not begin
    runs = fp.compare(TWO, fp.Logistic(), small, rounds=3, folder=tmp_path, resume=True)
    assert [run.outcome_kind for run in runs] == [Outcome.ROUNDS] * 2
    for one, other in zip(runs, whole, strict=True):
        assert np.array_equal(one.history.column("objective"), other.history.column("objective"))


def test_ctrl_c_ends_trials(small, interrupted):
    with pytest.raises(KeyboardInterrupt, match="Trials 0 and later were not kept"):
        fp.trials(fp.FedAvg(), fp.Logistic(), small, [0, 1, 2], rounds=3, at_once=2)


def test_ctrl_c_ends_every_command_of_several_runs(people, interrupted, capsys, tmp_path):
    for arguments, said in (
        (["compare", people, people], "compare their folders"),
        (["tune", people, "--grid", "steps=1,2", "--rounds", 3], "0 trials were done before it"),
        (["demo", "--out", tmp_path / "demo", "--rounds", 3], "No report was written"),
    ):
        assert main([*map(str, arguments), "--json"]) == 130
        out, err = capsys.readouterr()
        assert out == ""
        assert err.startswith("fedpact: interrupted in ")
        assert said in err
    assert not (tmp_path / "demo").exists()


@pytest.mark.parametrize("arguments", [["compare", "people.toml"], ["demo"]])
def test_a_folder_that_cannot_be_written_is_refused_before_the_first_run(people, monkeypatch, capsys, arguments):
    monkeypatch.chdir(people.parent)
    monkeypatch.setattr("fedpact.core.driver.drive", lambda *_, **__: pytest.fail("it ran"))
    for folder in ("/proc/x", "people.toml"):
        assert main([*arguments, "--out", folder]) == 1
        assert capsys.readouterr().err.startswith("fedpact: output folder must be writable, got ")


def test_the_table_is_printed_where_the_report_cannot_be_written(people, monkeypatch, capsys, tmp_path):
    def fail(*_, **__):
        raise OutputError("output folder must be writable, got 'x': the disk is full.")

    monkeypatch.setattr(Runs, "report", fail)
    assert main(["compare", str(people), "--out", str(tmp_path / "report")]) == 1
    out, err = capsys.readouterr()
    assert out.startswith("to reach objective ≤ ")
    assert "the disk is full" in err
    assert main(["compare", str(people), "--out", str(tmp_path / "report"), "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["report"] is None
    assert not (tmp_path / "report").exists()


def test_a_target_that_is_no_number_is_refused(command, finished):
    for target in ("nan", "inf"):
        refused(command("compare", finished, "--target", target), "target must be a finite number, got ")


def test_changes_to_nothing_but_folders_are_refused(command, finished, people):
    done = command("compare", finished, "--set", "run.rounds=3")
    refused(done, "--set must be left out where only folders are compared, got ['run.rounds=3']")
    assert command("compare", finished, people, "--set", "run.rounds=3").code == 0


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("config.json", {"algorithm": {}, "data": {}, "run": {}}),
        ("config.json", {"algorithm": 1, "data": None, "run": 3}),
        ("result.json", {"name": 5, "outcome_kind": ["x"], "where": 1, "summary": 2, "metrics": 3, "notices": 4}),
    ],
)
def test_odd_contents_are_damage(finished, name, content):
    (finished / name).write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match=f"{name} must have .*, got a damaged file"):
        fp.Run.load(finished)


@pytest.mark.parametrize("content", ["round,objective\n", "round\n1\n"])
def test_a_history_without_its_columns_is_damage(finished, content):
    (finished / "history.csv").write_text(content)
    with pytest.raises(CheckpointError, match=r"history.csv must have its columns and a row"):
        fp.Run.load(finished)


# Before the first run


@pytest.fixture
def no_run(monkeypatch):
    """Nothing may be run."""

    def refuse(*_, **__):
        raise AssertionError("it was run")

    monkeypatch.setattr("fedpact.race.execute", refuse)
    monkeypatch.setitem(fedpact.compare.__globals__, "execute", refuse)


def test_files_of_other_data_are_refused_before_any_runs(people, tmp_path, no_run):
    other = write_toml(tmp_path / "other.toml", experiment(split={"holdout": 0.5}))
    with pytest.raises(InvalidArgument, match="runs must be of the same data and split to be compared, got 2 diff"):
        gather([str(people), str(other)])


def test_a_column_that_no_file_has_is_refused_before_any_runs(people, no_run):
    with pytest.raises(UnknownName, match=r"column .*must be one of .* got 'kk'"):
        gather([str(people), str(people)], column="kk")


def test_settings_that_do_not_fit_are_refused_before_any_runs(tmp_path, no_run):
    federation = fp.data.synthetic(kind="least_squares", rows=20, features=2).split(clients=2)
    with pytest.raises(InvalidArgument, match=r"batch \(B\) must be at most the 10 rows of client 0, got 9999"):
        fp.compare([fp.FedAvg(), fp.SSCA(batch=9999)], fp.LeastSquares(), federation, folder=tmp_path / "runs")
    assert not (tmp_path / "runs").exists()


# Two objectives


@pytest.mark.parametrize(("sizes", "differ"), [([4, 16], True), ([10, 10], False)])
def test_means_over_rows_and_over_clients_are_told_apart(sizes, differ):
    federation = fp.data.synthetic(kind="least_squares", rows=20, features=2).split(how="sizes", sizes=sizes)
    names = ["a", "b", "c"]
    kinds = [fp.FedSGD(), fp.SSCA(), fp.FedAvg()]
    runs = fp.compare(kinds, fp.LeastSquares(), federation, rounds=1, names=names)
    assert (runs[0].history.column("objective")[0] != pytest.approx(runs[1].history.column("objective")[0])) == differ
    said = "The objective of b is a mean over all rows, that of a, c a mean over clients"
    assert [any(said in notice for notice in run.notices) for run in runs] == [False, differ, False]
    assert [run.least is None for run in runs] == [False, differ, False]
