"""A run cut anywhere and resumed has the uninterrupted run's bits; what cannot be resumed is refused by name."""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path

import numpy as np
import pytest
from helpers_experiment import (
    experiment,
    header_of,
    history_cells,
    patients,
    same_bits,
    tree,
    whole,
    write_csv,
    write_toml,
)

import fedpact as fp
from fedpact import stop
from fedpact.core.errors import CheckpointError, OutputError
from fedpact.core.stop import Outcome

pytestmark = pytest.mark.drill

PROBLEM = fp.Logistic(l2=0.01, intercept=True)  # as in helpers_experiment, so that the command's programs serve
SETTINGS = fp.FedAvg(steps=3, step=0.1, batch=4)
NOISY = fp.FedEPM(k0=3, epsilon=0.5, eta=0.01, mu0=10.0)


@pytest.fixture(autouse=True)
def no_plots(monkeypatch):
    """Drawing takes longer than these runs do."""
    monkeypatch.setattr("fedpact.report.html.plots_section", lambda *_: "")


@pytest.fixture(scope="module")
def federation(tmp_path_factory):
    path = write_csv(tmp_path_factory.mktemp("resume") / "people.csv")
    dataset = fp.data.from_csv(path, "outcome", drop=["id", "site"], categorical="sex")
    return dataset.split(how="column", column="site", holdout=0.25)


def train(federation, folder, rounds, *, settings=SETTINGS, resume=False, **options):
    options = {"participation": 0.5, "seed": 3} | options
    return fp.run(settings, PROBLEM, federation, rounds=rounds, folder=folder, resume=resume, name="x", **options)


# The same bits, in Python


@pytest.mark.parametrize(
    ("settings", "options"),
    [
        (SETTINGS, {}),
        (NOISY, {}),
        (SETTINGS, {"precision": "single"}),
        (SETTINGS, {"evaluate_every": 3}),
        (SETTINGS, {"participation": fp.Poisson(0.3)}),
    ],
    ids=["plain", "noise", "single", "every third", "poisson"],
)
def test_resumed_equals_uninterrupted(federation, tmp_path, settings, options):
    train(federation, tmp_path / "whole", 12, settings=settings, **options)
    cut = train(federation, tmp_path / "cut", 5, settings=settings, **options)
    assert cut.history.rounds == 5
    end = train(federation, tmp_path / "cut", 12, settings=settings, resume=True, **options)
    assert end.history.rounds == 12
    same_bits(tmp_path / "cut", tmp_path / "whole")
    whole(tmp_path / "cut")


def test_a_resumed_run_did_not_start_again(federation, tmp_path):
    """Without this, a `resume` that ignored the checkpoint would pass every test above."""
    first = train(federation, tmp_path / "run", 5)
    clock = first.history.column("seconds")
    second = train(federation, tmp_path / "run", 12, resume=True)
    assert np.array_equal(second.history.column("seconds")[:6], clock)
    assert np.all(np.diff(second.history.column("seconds")) > 0)


def flat_stretch(federation) -> tuple[float, int]:
    """A tolerance of the variance rule that the plain run meets first at some round of its middle, and that round."""
    f = train(federation, None, 24).history.column("objective")
    spread = {t: np.var(f[t - 3 : t + 1], ddof=1) * (1 + abs(f[t])) for t in range(3, 25)}
    tolerance = min(value for t, value in spread.items() if 9 <= t <= 20) * 1.0000001
    return tolerance, min(t for t, value in spread.items() if value <= tolerance)


def test_stop_rules_look_back_across_the_cut_and_stay_met(federation, tmp_path):
    tolerance, expected = flat_stretch(federation)
    assert expected >= 4
    rule = stop.Variance(tolerance) | stop.GradientNorm(1e-300)
    straight = train(federation, tmp_path / "whole", 24, stop=rule)
    assert straight.outcome_kind is Outcome.STOPPED
    assert straight.where.startswith(f"round {expected}, variance of the last 4 objectives ≤ ")
    assert straight.history.rounds == expected
    train(federation, tmp_path / "cut", expected - 2, stop=rule)  # the window of four lies on both sides of the cut
    end = train(federation, tmp_path / "cut", 24, stop=rule, resume=True)
    assert end.outcome_kind is Outcome.STOPPED
    same_bits(tmp_path / "cut", tmp_path / "whole")
    again = train(federation, tmp_path / "cut", 50, stop=rule, resume=True)
    assert again.outcome_kind is Outcome.STOPPED
    assert again.outcome == end.outcome == straight.outcome
    same_bits(tmp_path / "cut", tmp_path / "whole")


def test_where_a_run_is_cut_does_not_decide_how_its_rounds_are_computed(tmp_path):
    """One crowded round makes its whole block take everyone's slots; a cut moves the block, and must not move bits."""
    rng = np.random.default_rng(0)
    sizes = [1] * 800 + [40] * 200
    parts = [(rng.standard_normal((size, 3)), rng.standard_normal(size)) for size in sizes]
    federation = fp.data.Federation.from_arrays(parts, classes=())
    rounds = [rng.choice(1000, 150, replace=False).tolist() for _ in range(20)]
    rounds[5] = list(range(850, 1000))  # all of them large clients: more than their bucket has slots for

    def crowd(folder, count, resume=False):
        settings = fp.FedAvg(steps=2, step=0.1)
        participation = fp.Schedule(tuple(map(tuple, rounds)))
        options = {"participation": participation, "rounds": count, "folder": folder, "resume": resume}
        return fp.run(settings, fp.LeastSquares(), federation, **options)

    crowd(tmp_path / "whole", 20)  # rounds 0-1 and 2-19, the second block with everyone's slots
    crowd(tmp_path / "cut", 10)
    crowd(tmp_path / "cut", 20, resume=True)  # rounds 10-19 fit their slots
    same_bits(tmp_path / "cut", tmp_path / "whole")


# Ctrl-C


def test_ctrl_c_keeps_what_is_done_and_says_how_to_go_on(zygote, command, people, tmp_path):
    process = zygote.start("run", people, "--out", "run", "--set", "run.rounds=2000000", cwd=tmp_path)
    folder = tmp_path / "run"
    while not list(folder.glob("checkpoint-*.bin")) and process.poll() is None:
        time.sleep(0.005)
    time.sleep(0.2)
    process.send(signal.SIGINT)
    cut = process.wait()
    assert cut.code == 130, cut.err
    assert "fedpact resume run" in cut.err
    assert "Traceback" not in cut.err
    assert "interrupted" in cut.out
    whole(folder)
    done = len(history_cells(folder)) - 1
    assert 0 < done < 2000000
    assert json.loads((folder / "result.json").read_text())["outcome"].startswith("interrupted")

    assert command("resume", "run", "--rounds", done + 10).code == 0
    assert command("run", people, "--out", "straight", "--set", f"run.rounds={done + 10}").code == 0
    same_bits(folder, tmp_path / "straight")
    assert json.loads((folder / "result.json").read_text())["outcome"] == "all rounds were run"


def test_ctrl_c_before_the_first_round_ends_quietly_too(zygote, command, people, tmp_path):
    cold = {"JAX_COMPILATION_CACHE_DIR": str(tmp_path / "cold")}
    process = zygote.start("run", people, "--out", "run", cwd=tmp_path, env=cold)
    while not (tmp_path / "run" / "environment.json").exists() and process.poll() is None:
        time.sleep(0.002)
    process.send(signal.SIGINT)  # it compiles now, with a cache that is empty
    cut = process.wait()
    assert cut.code == 130, cut.err
    assert "Traceback" not in cut.err
    assert "fedpact resume run" in cut.err
    whole(tmp_path / "run")
    assert command("resume", "run").code == 0


# On the command


def test_resume_rounds_extends_a_finished_run(command, finished, people, tmp_path):
    plain = command("resume", finished, "--json")
    assert "had ended after 6 rounds: all rounds were run. Extend it with: fedpact resume" in plain.err
    assert json.loads(plain.out)["summary"]["rounds"] == 6
    extended = command("resume", finished, "--rounds", 11, "--json")
    assert "had ended" not in extended.err
    assert extended.code == 0, extended.err
    assert json.loads(extended.out)["summary"]["rounds"] == 11
    assert command("run", people, "--out", "straight", "--set", "run.rounds=11").code == 0
    same_bits(finished, tmp_path / "straight")
    assert json.loads((finished / "config.json").read_text())["run"]["rounds"] == 11


def test_an_extension_that_was_cut_is_remembered(command, finished):
    """`resume --rounds 11` was killed at round 8: a plain `resume` goes on to 11, not to the file's 6."""
    assert command("resume", finished, "--rounds", 8).code == 0
    assert command("resume", finished).code == 0
    assert json.loads((finished / "config.json").read_text())["run"]["rounds"] == 8


def test_fewer_rounds_than_are_done_are_refused(command, finished):
    before = tree(finished)
    refused = command("resume", finished, "--rounds", 3)
    assert refused.code == 1, "config.json now says 3 rounds where history.csv has 6"
    assert "rounds must be" in refused.err
    assert tree(finished) == before


def test_resuming_a_finished_run_changes_nothing(command, finished):
    before = tree(finished)
    again = command("resume", finished, "--json")
    assert again.code == 0, again.err
    result = json.loads(again.out)
    assert result["outcome"] == "all rounds were run"
    assert result["summary"] == json.loads(before["result.json"])["summary"]
    after = tree(finished)
    assert after == before


def edited(path: Path, *keys: str, value: object) -> None:
    content = json.loads(path.read_text())
    table = content
    for key in keys[:-1]:
        table = table[key]
    table[keys[-1]] = value
    path.write_text(json.dumps(content))


@pytest.mark.parametrize(
    ("keys", "value"),
    [
        (("algorithm", "steps"), 4),
        (("algorithm", "step"), 0.2),
        (("problem", "l2"), 0.02),
        (("run", "seed"), 1),
        (("run", "participation"), 0.6),
        (("run", "precision"), "single"),
        (("run", "evaluate_every"), 2),
        (("split", "holdout"), 0.5),
        (("stop",), {"gradient": 1e-3}),
    ],
    ids=lambda value: ".".join(value) if isinstance(value, tuple) else str(value),
)
def test_a_checkpoint_of_other_settings_is_refused(command, finished, keys, value):
    edited(finished / "experiment.json", *keys, value=value)
    before = tree(finished)
    refused = command("resume", finished, "--rounds", 9)
    assert refused.code == 1
    assert "checkpoint must come from the same settings and data, got " in refused.err
    assert "checkpoint-000000006.bin" in refused.err
    assert "choose a new folder" in refused.err
    assert "Traceback" not in refused.err
    assert tree(finished) == before


def test_k0_edited_in_experiment_json_is_refused(command, tmp_path):
    write_csv(tmp_path / "people.csv")
    tables = experiment(run={"rounds": 3})
    tables["algorithm"] = {"name": "fedepm", "k0": 3, "epsilon": 0.5, "eta": 0.01, "mu0": 10.0}
    write_toml(tmp_path / "fedepm.toml", tables)
    assert command("run", "fedepm.toml", "--out", "run").code == 0
    edited(tmp_path / "run" / "experiment.json", "algorithm", "k0", value=4)
    refused = command("resume", "run", "--rounds", 9)
    assert refused.code == 1
    assert "checkpoint must come from the same settings and data, got " in refused.err


def test_other_data_of_the_same_shape_are_refused(command, finished, finished_once):
    rows = patients()
    rows[0]["age"] += 0.1
    source = write_csv(finished.parent / "other.csv", rows)
    edited(finished / "experiment.json", "data", "csv", value=str(source))
    refused = command("resume", finished, "--rounds", 9)
    assert refused.code == 1
    assert "checkpoint must come from the same settings and data, got " in refused.err


def damages(content: bytes) -> dict[str, bytes]:
    flipped = bytearray(content)
    flipped[-100] ^= 1
    return {"cut": content[: len(content) // 2], "empty": b"", "flipped": bytes(flipped), "text": b"hello\n"}


@pytest.mark.parametrize("how", ["cut", "empty", "flipped", "text"])
def test_a_damaged_checkpoint_is_refused_with_what_to_do(command, finished, finished_once, how):
    newest, other = finished / "checkpoint-000000006.bin", finished / "checkpoint-000000002.bin"
    assert other.exists()
    newest.write_bytes(damages(newest.read_bytes())[how])
    before = tree(finished)
    refused = command("resume", finished)
    assert refused.code == 1
    assert refused.err.startswith("fedpact: checkpoint must be whole, got a damaged file ")
    assert f"{newest}. Delete it to resume from {other.name}." in refused.err
    assert "Traceback" not in refused.err
    assert tree(finished) == before
    newest.unlink()  # as it says
    assert command("resume", finished).code == 0
    same_bits(finished, finished_once)


def test_the_only_checkpoint_damaged_starts_again_once_deleted(command, finished, finished_once):
    for path in finished.glob("checkpoint-*.bin"):
        path.write_bytes(b"")
    (finished / "checkpoint-000000002.bin").unlink()
    refused = command("resume", finished)
    assert refused.code == 1
    assert "Delete it to start the run again." in refused.err
    (finished / "checkpoint-000000006.bin").unlink()
    assert command("resume", finished).code == 0
    same_bits(finished, finished_once)


def test_damage_to_a_checkpoints_header_is_found(command, finished):
    """The sha256 must cover the header too: a wrong history_bytes would cut history.csv at the wrong place."""
    newest = finished / "checkpoint-000000006.bin"
    size = header_of(newest)["history_bytes"]
    shorter = tree(finished)["history.csv"].rindex(b"\n", 0, size - 1) + 1  # one row less
    newest.write_bytes(
        newest.read_bytes().replace(f'"history_bytes": {size}'.encode(), f'"history_bytes": {shorter}'.encode())
    )
    before = tree(finished)
    refused = command("resume", finished, "--rounds", 9)
    assert refused.code == 1, "it resumed with a row missing from its history"
    assert "checkpoint must be whole" in refused.err
    assert tree(finished) == before


@pytest.mark.parametrize("how", ["missing", "short", "empty"])
def test_a_history_shorter_than_the_checkpoint_says_is_refused(command, finished, how):
    history = finished / "history.csv"
    if how == "missing":
        history.unlink()
    else:
        history.write_bytes(history.read_bytes()[:-30] if how == "short" else b"")
    before = tree(finished)
    refused = command("resume", finished, "--rounds", 9)
    assert refused.code == 1
    assert f"{history} must be as long as the checkpoint says, got " in refused.err
    assert "Traceback" not in refused.err
    assert tree(finished) == before


def test_a_history_with_a_cell_that_is_no_number_is_refused(command, finished):
    history = finished / "history.csv"
    content = bytearray(history.read_bytes())
    content[-3] = ord("x")
    history.write_bytes(content)
    before = tree(finished)
    refused = command("resume", finished, "--rounds", 9)
    assert refused.code == 1
    assert "Traceback" not in refused.err
    assert str(history) in refused.err
    assert tree(finished) == before


@pytest.mark.parametrize(
    ("old", "new"), [(b"\n6,", b"\n5,"), (b"objective", b"objectivf"), (b",0.", b",1.")], ids=["round", "name", "digit"]
)
def test_a_history_that_was_edited_is_refused(command, finished, old, new):
    """As long as the run wrote it, but not what it wrote: rounds to come would be built on it."""
    history = finished / "history.csv"
    content = history.read_bytes()
    history.write_bytes(content.replace(old, new, 1))
    assert history.read_bytes() != content
    before = tree(finished)
    refused = command("resume", finished, "--rounds", 9)
    assert refused.code == 1
    assert "Traceback" not in refused.err
    assert f"{history} must be as the run wrote it, got one that was edited." in refused.err
    assert tree(finished) == before


def test_an_edit_before_the_newest_checkpoint_of_two_is_refused_too(federation, tmp_path):
    train(federation, tmp_path / "run", 4)
    train(federation, tmp_path / "run", 8, resume=True)  # its digest goes on from the rows it found
    whole(tmp_path / "run")
    history = tmp_path / "run" / "history.csv"
    lines = history.read_bytes().splitlines(keepends=True)
    lines[2], lines[3] = lines[3], lines[2]
    history.write_bytes(b"".join(lines))
    with pytest.raises(CheckpointError, match="got one that was edited"):
        train(federation, tmp_path / "run", 9, resume=True)


def test_a_checkpoint_that_is_a_folder_is_refused(command, finished):
    newest = finished / "checkpoint-000000006.bin"
    newest.unlink()
    newest.mkdir()
    refused = command("resume", finished)
    assert refused.code == 1
    assert "checkpoint must be whole, got a damaged file" in refused.err


@pytest.mark.parametrize("content", ["{", "[]", "5", '{"run": 5}', '{"run": {}, "data": {}}'])
def test_a_damaged_experiment_json_is_refused(command, finished, content):
    (finished / "experiment.json").write_text(content)
    before = tree(finished)
    refused = command("resume", finished, "--rounds", 9)
    assert refused.code == 1
    assert "Traceback" not in refused.err
    assert " must " in refused.err
    assert tree(finished) == before


def test_resume_needs_a_folder_that_run_made(command, tmp_path):
    (tmp_path / "empty").mkdir()
    for name in ("empty", "nowhere"):
        refused = command("resume", name)
        assert refused.code == 1
        assert (
            f"folder must be of a run that 'fedpact run' started, got '{name}' without experiment.json" in refused.err
        )
    assert not (tmp_path / "nowhere").exists()


def test_running_into_a_folder_with_something_in_it_is_refused(command, people, finished):
    before = tree(finished)
    refused = command("run", people, "--out", finished)
    assert refused.code == 1
    assert f"output folder must be new or empty, got '{finished}'" in refused.err
    assert f"fedpact resume {finished}" in refused.err
    assert tree(finished) == before


# The same refusals in Python


def test_python_refuses_what_the_command_refuses(federation, tmp_path):
    folder = tmp_path / "run"
    train(federation, folder, 4)
    before = tree(folder)
    with pytest.raises(OutputError, match="output folder must be new or empty, got "):
        train(federation, folder, 4)
    with pytest.raises(CheckpointError, match="checkpoint must come from the same settings and data, got "):
        train(federation, folder, 8, settings=fp.FedAvg(steps=4, step=0.1, batch=4), resume=True)
    assert tree(folder) == before
    newest = folder / "checkpoint-000000004.bin"
    newest.write_bytes(newest.read_bytes()[:-1])
    with pytest.raises(
        CheckpointError, match=r"checkpoint must be whole, got a damaged file .*Delete it to resume from"
    ):
        train(federation, folder, 8, resume=True)
    newest.unlink()
    (folder / "history.csv").unlink()
    with pytest.raises(CheckpointError, match=r"history.csv must be as long as the checkpoint says, got "):
        train(federation, folder, 8, resume=True)


def test_resume_of_a_folder_that_is_not_there_is_a_run(federation, tmp_path):
    train(federation, tmp_path / "new", 4, resume=True)
    train(federation, tmp_path / "plain", 4)
    same_bits(tmp_path / "new", tmp_path / "plain")
