"""Folders that cannot be written, or no longer: what is there is whole, and nothing is left of what never began."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest
from helpers_experiment import experiment, same_bits, tree, whole, write_csv, write_toml
from helpers_refused import refused

import fedpact as fp
from fedpact.core import checkpoint
from fedpact.core.errors import ClientError, InvalidArgument, OutputError
from fedpact.experiment import build, read
from fedpact.problems import PROBLEMS


def test_an_output_folder_that_is_a_file(command, people, tmp_path):
    (tmp_path / "file").write_text("mine")
    before = tree(tmp_path)
    refused(
        command("run", people, "--out", "file"),
        "output folder must be new or empty, got 'file', which is a file. Choose",
    )
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


# One process at a time


@pytest.mark.parametrize("second", ["resume", "run"])
def test_a_folder_in_which_another_process_is_running_is_refused(zygote, command, people, tmp_path, second):
    folder = tmp_path / "run"
    first = zygote.start("run", people, "--out", folder, "--set", "run.rounds=1000000", cwd=tmp_path)
    while not list(folder.glob("checkpoint-*.bin")):
        assert first.poll(0.01) is None
    done = command("resume", folder) if second == "resume" else command("run", people, "--out", folder)
    refused(done, f"output folder must be free, got '{folder}', in which another process is running.")
    assert first.poll() is None
    first.send(signal.SIGKILL)  # no stale lock: the system lets go of it
    first.wait()
    rounds = len((folder / "history.csv").read_bytes().splitlines()) + 10
    resumed = command("resume", folder, "--rounds", rounds)
    assert resumed.code == 0, resumed.err
    whole(folder)


def test_the_lock_is_let_go_of_in_the_same_process(people, tmp_path, monkeypatch):
    experiment, _ = build(read(people))

    def train(rounds, **options):
        parts = (experiment.algorithm, experiment.problem, experiment.federation)
        return fp.run(*parts, rounds=rounds, folder=tmp_path / "run", participation=0.5, **options)

    monkeypatch.setattr("fedpact.report.html.plots_section", lambda *_: "")
    train(2)
    with pytest.raises(InvalidArgument, match="rounds must be at least 2"):
        train(1, resume=True)
    with monkeypatch.context() as patch:
        patch.setattr("fedpact.folder.record", lambda _: 1 / 0)
        with pytest.raises(ZeroDivisionError) as kept:  # its frames stay alive
            train(3, resume=True)
    assert train(4, resume=True).history.rounds == 4
    assert kept


@dataclass(frozen=True)
class Failing(fp.Logistic):
    def lipschitz(self, batch):
        raise RuntimeError("no r_i today")


@pytest.mark.parametrize("engine", ["local", "debug"])
def test_a_failure_of_any_kind_before_the_first_round_leaves_nothing(people, tmp_path, monkeypatch, engine):
    experiment, _ = build(read(people))
    kind, text = (
        (ClientError, "round 0, client 0, join: RuntimeError: no r_i") if engine == "debug" else (RuntimeError, "no")
    )
    monkeypatch.setitem(PROBLEMS, "failing", Failing)
    with pytest.raises(kind, match=text):
        fp.run(fp.FedAvg(), Failing(), experiment.federation, rounds=2, folder=tmp_path / "run", engine=engine)
    assert not (tmp_path / "run").exists()


def test_checkpoints_that_take_long_are_further_apart(tmp_path, monkeypatch):
    """One after every block of rounds; where that costs too much the first and the end."""
    save, found = checkpoint.save, {}
    federation = fp.data.breast_cancer().split(clients=2)
    monkeypatch.setattr("fedpact.folder.CHECKPOINT_SECONDS", 1e-6)
    for cheap in (1e9, 1e-9):
        times = found.setdefault(cheap, [])
        record = lambda *given, times=times: (save(*given), times.append(given[3]))
        monkeypatch.setattr("fedpact.folder.checkpoint.save", record)
        monkeypatch.setattr("fedpact.folder.CHECKPOINT_COST", cheap)
        folder = tmp_path / f"{cheap:g}"
        fp.run(fp.FedAvg(), fp.Logistic(), federation, rounds=9, engine="debug", folder=folder, report=False)
    assert len(found[1e9]) > len(found[1e-9]) == 2


def test_a_report_that_is_not_asked_for_is_left_out_and_can_be_drawn_later(tmp_path):
    federation, folder = fp.data.breast_cancer().split(clients=2), tmp_path / "run"
    options = {"rounds": 2, "folder": folder}
    with pytest.raises(InvalidArgument, match=r"^report must be True or False, got 'no'"):
        fp.run(fp.FedAvg(), fp.Logistic(), federation, report="no", **options)
    assert not folder.exists()
    fp.run(fp.FedAvg(), fp.Logistic(), federation, report=False, **options)
    without = set(tree(folder))
    fp.Run.load(folder).report(folder)
    more = set(tree(folder)) - without
    assert "report.html" in more
    assert {name.partition("/")[0] for name in more} == {"report.html", "plots"}
    fp.compare([fp.FedAvg()], fp.Logistic(), federation, rounds=1, folder=tmp_path / "several", report=False)
    assert (tmp_path / "several" / "01-fedavg" / "result.json").is_file()
    assert not list((tmp_path / "several").rglob("report.html"))
