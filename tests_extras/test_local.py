"""Flower's own tools on what fedpact writes for them, a federation's folder, and how it ends."""

from __future__ import annotations

import contextlib
import select
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest

pytest.importorskip("flwr")
pytest.importorskip("cryptography")

from helpers_federation import nothing_left

from fedpact.cli import main
from fedpact.core.errors import ClientError, InvalidArgument, OutputError
from fedpact.flower import local, resident
from fedpact.flower.local import Local, processes_of, quiet_environment
from fedpact.flower.operators import write_all
from fedpact.folder import is_run

EXPERIMENT = '[data]\nname = "breast_cancer"\n[problem]\nname = "logistic"\n[algorithm]\nname = "fedavg"\n'


@pytest.fixture(autouse=True)
def handlers():
    """Commands leave theirs, which pytest is not to end by."""
    before = {one: signal.getsignal(one) for one in (signal.SIGHUP, signal.SIGTERM)}
    yield
    for one, handler in before.items():
        signal.signal(one, handler)


@pytest.fixture
def experiment(tmp_path):
    path = tmp_path / "experiment.toml"
    path.write_text(EXPERIMENT)
    return path


@pytest.fixture
def federation(tmp_path):
    made = Local(tmp_path / "federation", {"a": {"client": 0}})
    yield made
    made.stop()


def test_flwr_reads_the_connection_that_run_sh_writes_wherever_the_folder_is(experiment, tmp_path, monkeypatch):
    from flwr.cli.flower_config import read_superlink_connection

    write_all(tmp_path / "f", experiment, "learn.example", 8123, ["lab"])
    moved = tmp_path / "moved here"
    shutil.copytree(tmp_path / "f", moved)
    (moved / "part.sh").write_text((moved / "run.sh").read_text().partition("for key in")[0])
    subprocess.run(["sh", str(moved / "part.sh")], check=True, cwd=tmp_path)
    monkeypatch.setenv("FLWR_HOME", str(moved / "flower"))
    found = read_superlink_connection("fedpact")
    assert found.address == "localhost:8123"
    assert found.root_certificates == str(moved / "ca.pem")


def test_and_the_one_of_a_federation_on_this_machine(federation, monkeypatch):
    from flwr.cli.flower_config import read_superlink_connection

    monkeypatch.setenv("FLWR_HOME", str(federation.folder / "flower"))
    assert read_superlink_connection("fedpact").address == federation.address


def test_a_folder_has_one_federation_at_a_time(federation, experiment, capsys):
    connection = (federation.folder / "flower" / "config.toml").read_text()
    experiment.write_text(f"{EXPERIMENT}[split]\nclients = 1\n")
    with pytest.raises(OutputError, match=r"output folder must be free, got .*in which another process is running"):
        Local(federation.folder, {"a": {"client": 0}})
    assert main(["federation", "run", str(experiment), "--nodes", "1", "--folder", str(federation.folder)]) != 0
    assert "in which another process is running" in capsys.readouterr().err
    assert (federation.folder / "flower" / "config.toml").read_text() == connection
    federation.stop()
    Local(federation.folder, {"a": {"client": 0}}).stop()


def test_the_end_signals_nobody_who_has_the_number_of_a_process_that_ended(federation, monkeypatch):
    federation.processes["a"] = subprocess.Popen(["true"])
    federation.processes["a"].wait()
    killed = []
    monkeypatch.setattr(local.os, "kill", lambda *given: killed.append(given))
    federation.stop()
    assert killed == []


def test_the_end_leaves_no_socket_that_would_tell_of_a_lost_process(federation, tmp_path):
    path = resident._socket_path(federation.folder / "state" / "a")
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(path))
    assert path.exists()
    federation.stop()
    assert not path.exists()


def test_a_node_is_not_called_as_the_superlink_is(tmp_path):
    with pytest.raises(InvalidArgument, match="name of a node must be another than the SuperLink's, got 'superlink'"):
        Local(tmp_path / "f", {"superlink": {"client": 0}})
    assert not (tmp_path / "f").exists()


def test_flwr_that_does_not_end_is_a_sentence(federation, monkeypatch):
    monkeypatch.setattr(local.subprocess, "run", hung)
    with pytest.raises(ClientError, match=r"flwr run .* must end within 7 s, got no end\. .*superlink\.log"):
        federation.flwr("run", "app", timeout=7)
    assert federation.status(1) == "unknown"


def hung(command, timeout, **_):
    raise subprocess.TimeoutExpired(command, timeout)


@pytest.mark.parametrize("told", ["", "no table", '{"success": tr'])
def test_an_answer_of_flwr_run_without_a_number_is_a_sentence(told, federation, experiment, monkeypatch, tmp_path):
    monkeypatch.setattr(Local, "flwr", lambda *_, **__: SimpleNamespace(stdout=told))
    with pytest.raises(ClientError, match="flwr run must tell the number of the run, got"):
        federation.submit(experiment, tmp_path / "run")


def test_what_run_prints(experiment, tmp_path, monkeypatch, capsys):
    """`federation run --json`, with a run that is there already in the place of processes."""
    import json

    import fedpact as fp

    def finish(self, file, out, seconds, say):
        say("round 1")
        fp.run(fp.FedAvg(), fp.Logistic(), fp.data.breast_cancer().split(clients=2), rounds=1, folder=out)

    monkeypatch.setattr(Local, "start", lambda self: None)
    monkeypatch.setattr(Local, "finish", finish)
    folder = str(tmp_path / "f")
    experiment.write_text(f"{EXPERIMENT}[split]\nclients = 2\n")
    assert main(["federation", "run", str(experiment), "--nodes", "2", "--folder", folder, "--json"]) == 0
    told = capsys.readouterr()
    assert json.loads(told.out)["rounds"] == 1
    assert told.err.splitlines()[0].startswith("2 nodes at 127.0.0.1:")
    assert "round 1" in told.err


def test_up_tells_where_it_is_and_ends_with_the_terminal(tmp_path):
    """As a process of its own, without Flower's: its terminal is closed, and it goes through its end."""
    code = (
        "import os, signal, threading\n"
        "signal.signal(signal.SIGHUP, signal.SIG_DFL)\n"
        "from fedpact.cli import main\n"
        "from fedpact.flower.local import Local\n"
        "Local.start = lambda self: threading.Timer(1, os.kill, (os.getpid(), signal.SIGHUP)).start()\n"
        "stop = Local.stop\n"
        "Local.stop = lambda self: (stop(self), print('stopped', flush=True))\n"
        f"raise SystemExit(main(['federation', 'up', '--nodes', '2', '--folder', {str(tmp_path / 'f')!r}]))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    first, *_, last = done.stdout.splitlines()
    assert "nodes: node-0, node-1" in first
    assert last == "stopped"
    assert done.returncode == 130


def printed_by_up(monkeypatch, capsys, *arguments):
    """The lines that `federation up` prints, without a federation."""

    def end(self):
        raise KeyboardInterrupt

    monkeypatch.setattr(Local, "start", lambda self: None)
    monkeypatch.setattr(Local, "mend", end)
    assert main(["federation", "up", "--nodes", "2", *arguments]) == 130
    return capsys.readouterr().out


def test_the_command_that_up_prints_works_as_printed(experiment, tmp_path, monkeypatch, capsys):
    """Up to where it would meet the SuperLink, which is not there."""
    from flwr.cli.config_utils import load_and_validate

    folder = tmp_path / "its folder"
    experiment.write_text(f"{EXPERIMENT}[split]\nclients = 2\n")
    _, command, _ = printed_by_up(monkeypatch, capsys, str(experiment), "--folder", str(folder)).splitlines()
    env = quiet_environment(tmp_path)
    del env["FLWR_HOME"]
    done = subprocess.run(["sh", "-c", command], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120)
    assert "Connection to the SuperLink is unavailable" in done.stdout + done.stderr
    config, _ = load_and_validate(folder / "app" / "pyproject.toml")
    told = {"experiment": str(experiment), "folder": str(folder / "run"), "nodes": 2, "wait": 600}
    assert config["tool"]["flwr"]["app"]["config"] == told
    built = subprocess.run(["flwr", "build", "--app", str(folder / "app")], cwd=tmp_path, env=env, timeout=120)
    assert built.returncode == 0


def test_and_without_an_experiment_it_says_where_its_path_goes(tmp_path, monkeypatch, capsys):
    import json

    from flwr.common.config import parse_config_args

    told = json.loads(printed_by_up(monkeypatch, capsys, "--folder", str(tmp_path / "f"), "--json"))
    *_, option, blank = shlex.split(told["run"])
    assert (option, parse_config_args([blank])) == ("--run-config", {"experiment": "FILE"})
    assert (tmp_path / "f" / "app" / "pyproject.toml").is_file()


def test_up_starts_nothing_for_an_experiment_that_is_none(tmp_path, capsys):
    assert main(["federation", "up", str(tmp_path / "e.toml"), "--folder", str(tmp_path / "f")]) == 1
    assert "which does not exist" in capsys.readouterr().err
    assert not (tmp_path / "f").exists()


def test_kill_9_of_up_ends_what_it_started(tmp_path):
    """As an operator's terminal that is torn away: nothing could be cleaned up, and nothing stays."""
    folder = tmp_path / "f"
    command = [sys.executable, "-m", "fedpact", "federation", "up", "--nodes", "1", "--folder", str(folder)]
    with started(folder, command, stdout=subprocess.PIPE, text=True) as up:
        assert select.select([up.stdout], [], [], 240)[0]
        assert "node-0" in up.stdout.readline()
        assert len(processes_of(folder)) >= 2


def test_kill_9_of_run_ends_what_it_started_in_the_middle_of_a_round(experiment, tmp_path):
    """The server app too, which waits for answers that cannot come any more."""
    experiment.write_text(f"{EXPERIMENT}[split]\nclients = 1\n[run]\nrounds = 1000\n")
    out, folder = tmp_path / "run", tmp_path / "f"
    command = [sys.executable, "-m", "fedpact", "federation", "run", str(experiment), "--nodes", "1"]
    with started(folder, [*command, "--folder", str(folder), "--out", str(out)], stderr=subprocess.DEVNULL) as one:
        until = time.monotonic() + 240
        while not (out / "history.csv").is_file():
            assert one.poll() is None
            assert time.monotonic() < until
            time.sleep(0.2)
        assert processes_of(folder, "superlink", "flwr-serverapp")
    assert is_run(out)


@contextlib.contextmanager
def started(folder, command, **options):
    """A process with a federation in this folder. It is killed, also where the test fails, and nothing of it stays."""
    with contextlib.ExitStack() as end:
        end.callback(nothing_left, folder)
        process = end.enter_context(subprocess.Popen(command, **options))
        end.callback(process.kill)
        yield process
