"""SIGKILL at any moment: what is on the disk is whole, and the resumed run ends with the uninterrupted run's bits."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import time
from pathlib import Path

import numpy as np
import pytest
from helpers_experiment import experiment, header_of, same_bits, tree, whole, write_csv, write_toml

import fedpact as fp
from fedpact.core.errors import DataError

pytestmark = pytest.mark.drill

CHECKPOINT_SECONDS = 0.02  # of computing; the command's own 5 s would leave one checkpoint to hit
KILLS = 10  # of each experiment; there are two
ROUNDS = 4000
MOMENTS = ("early", "writing", "checkpoint", "rewriting", "writing")


def fedepm(evaluate_every: int) -> dict:
    tables = experiment(run={"rounds": ROUNDS, "participation": 0.5, "evaluate_every": evaluate_every})
    tables["algorithm"] = {"name": "fedepm", "k0": 3, "epsilon": 0.5, "eta": 0.01, "mu0": 10.0}
    return tables


def newest(folder: Path) -> str:
    return max((path.name for path in folder.glob("checkpoint-*.bin")), default="")


def start(zygote, folder: Path):
    """Resume the run; start it again where it was killed before it had left its experiment.json."""
    arguments = ["resume", folder.name]
    if not (folder / "experiment.json").exists():
        shutil.rmtree(folder, ignore_errors=True)
        arguments = ["run", "fedepm.toml", "--out", folder.name]
    return zygote.start(*arguments, cwd=folder.parent, checkpoint_seconds=CHECKPOINT_SECONDS)


def names(folder: Path) -> set[str]:
    return set(os.listdir(folder)) if folder.exists() else set()


def stamp(path: Path) -> tuple[int, int] | None:
    try:
        found = path.stat()
    except FileNotFoundError:
        return None
    return found.st_mtime_ns, found.st_size


def patience(process, folder: Path, moment: str, rng) -> None:
    """Wait for a moment worth killing at."""
    if moment == "early":  # while it reads, builds, compiles
        time.sleep(rng.uniform(0, 1.5))
        return
    watched = {
        "rewriting": lambda: stamp(folder / "config.json"),  # a file of every life is being replaced
        "writing": lambda: {name for name in names(folder) if "checkpoint" in name},  # also under a temporary name
        "checkpoint": lambda: newest(folder),  # rounds are being run
    }[moment]
    looks = 0
    for _ in range(
        rng.integers(1, 12) if moment == "writing" else 1
    ):  # a temporary name, the rename, an old one gone, …
        before = watched()
        while watched() == before and (looks % 100 or process.poll() is None):
            looks += 1
            time.sleep(0 if moment != "checkpoint" else 0.002)
    if moment == "checkpoint":
        time.sleep(rng.uniform(0, 0.15))


def kill(process, folder: Path) -> bool:
    """Kill it, and say whether it was still alive; either way what it leaves must be whole."""
    if process.code is None:
        with contextlib.suppress(ProcessLookupError):
            process.send(signal.SIGKILL)
    ended = process.wait()
    assert ended.code in (0, -signal.SIGKILL), ended.err
    if folder.exists():
        whole(folder)
    return ended.code == -signal.SIGKILL


@pytest.mark.parametrize("evaluate_every", [1, 3])
def test_a_run_killed_ten_times_ends_with_the_same_bits(zygote, tmp_path, evaluate_every):
    rng = np.random.default_rng()  # other moments every time
    write_csv(tmp_path / "people.csv")
    write_toml(tmp_path / "fedepm.toml", fedepm(evaluate_every))
    reference = tmp_path / "reference"
    assert zygote.start("run", "fedepm.toml", "--out", "reference", cwd=tmp_path).wait().code == 0

    killed, chains, rounds_seen = 0, 0, set()
    while killed < KILLS:  # a chain of lives, and another one if it ends before there are enough kills
        chains += 1
        folder = tmp_path / f"chain-{chains}"
        while killed < KILLS and not (folder / "result.json").exists():
            process = start(zygote, folder)
            patience(process, folder, MOMENTS[killed % len(MOMENTS)], rng)
            killed += kill(process, folder)
            rounds_seen.add(newest(folder))
        process = start(zygote, folder)
        assert process.wait().code == 0
        whole(folder)
        same_bits(folder, reference)
    assert len(rounds_seen) >= 3, f"the kills came at too few different rounds: {sorted(rounds_seen)}"
    assert header_of(folder / newest(folder))["round"] == ROUNDS
    assert len(tree(folder)["history.csv"].splitlines()) == ROUNDS + 2


def test_a_run_killed_while_it_writes_its_end_is_finished_by_resuming(zygote, tmp_path, finished):
    before = tree(finished)
    rng = np.random.default_rng()
    for _ in range(3):
        for name in ("model.bin", "result.json", "report.html"):
            (finished / name).unlink(missing_ok=True)
        process = zygote.start("resume", finished, cwd=tmp_path)
        while not (finished / "model.bin").exists() and process.poll() is None:
            time.sleep(0.001)
        time.sleep(rng.uniform(0, 0.03))
        kill(process, finished)
    assert zygote.start("resume", finished, cwd=tmp_path).wait().code == 0
    after = tree(finished)
    for name in ("history.csv", "model.bin", "result.json", "report.html"):
        assert after[name] == before[name], name


def test_an_extension_that_is_killed_goes_on_to_its_own_end(zygote, command, people, finished, tmp_path):
    """The finished run has 6 rounds; `resume --rounds` is killed on its way, and a plain `resume` has to know it."""
    process = zygote.start("resume", finished, "--rounds", ROUNDS, cwd=tmp_path, checkpoint_seconds=CHECKPOINT_SECONDS)
    while newest(finished) <= "checkpoint-000000006.bin" and process.poll() is None:
        time.sleep(0.002)
    assert kill(process, finished), "it ended before it was killed"
    assert 6 < header_of(finished / newest(finished))["round"] < ROUNDS
    with pytest.raises(DataError, match="folder must be of a finished run, got "):
        fp.Run.load(finished)  # not the 6 rounds of before, with the history of more
    assert not (finished / "model.bin").exists()
    plain = command("resume", finished)
    assert plain.code == 0, plain.err
    assert command("run", people, "--out", "straight", "--set", f"run.rounds={ROUNDS}").code == 0
    same_bits(finished, tmp_path / "straight")


def test_killed_before_experiment_json_was_renamed_the_command_can_be_given_again(command, people, tmp_path):
    """A kill inside the very first write leaves a folder with nothing but a temporary file."""
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / ".experiment.json.4242.tmp").write_bytes(b'{"na')
    assert command("resume", folder).code == 1  # there is nothing to resume from
    done = command("run", people, "--out", folder)
    assert done.code == 0, done.err


def test_what_killed_lives_left_under_temporary_names_is_gone_after_a_resume(command, finished):
    for name in (".checkpoint-000000004.bin.4242.tmp", ".model.bin.4242.tmp", ".config.json.4242.tmp"):
        (finished / name).write_bytes(b"half")
    assert command("resume", finished).code == 0
    assert [path.name for path in finished.rglob("*.tmp")] == []
