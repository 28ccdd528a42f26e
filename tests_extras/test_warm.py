"""The command in Flower's place: real processes, forked, tied to each other, and none left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("flwr")
pytest.importorskip("cryptography")

from fedpact.flower.local import MARK, processes_of
from fedpact.flower.warm import COMMAND, commands

if sys.platform != "linux":
    pytest.skip("forks are for Linux", allow_module_level=True)

#: In SuperExec's place: starts a command for every line that it reads.
STARTER = """
import subprocess, sys
for line in sys.stdin:
    subprocess.Popen(line.rstrip("\\n").split("\\t"))
"""
#: A port of this machine at which nobody answers: a ClientApp tries it for as long as it lives.
NOBODY = ["--runtime-api-address", "127.0.0.1:9", "--token", "none", "--insecure"]


class Starter:
    """Starts commands, all marked; ends with the test."""

    def __init__(self, folder, path):
        self.folder, self.log, self.command = folder, folder / "log", [str(Path(commands(folder)) / COMMAND)]
        env = {**os.environ, MARK: f"{folder}:a", "PATH": path, "FLWR_HOME": str(folder)}
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-c", STARTER], stdin=subprocess.PIPE, stdout=log, stderr=log, text=True, env=env
            )

    def start(self, *arguments):
        print("\t".join([*self.command, *arguments]), file=self.process.stdin, flush=True)

    def of(self, word):
        return [one for one in processes_of(self.folder, "a", word) if one != self.process.pid]

    def warm(self):
        return self.of("fedpact.flower.warm --serve")


@pytest.fixture
def starter(tmp_path):
    made = Starter(tmp_path, os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]))
    yield made
    made.process.kill()
    made.process.wait()
    until(lambda: processes_of(tmp_path) == [], 10)


def until(holds, seconds=60):
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.05)


def warmed(starter):
    """The warm process, once it has forked for a command."""
    starter.start("--help")
    until(starter.warm)
    (warm,) = starter.warm()
    until(lambda: _ask(starter), 60)
    return warm


def _ask(starter):
    """A command was answered by a fork: without one it becomes Flower's own."""
    starter.start(*NOBODY)
    until(lambda: starter.of(COMMAND))
    end = time.monotonic() + 5
    while time.monotonic() < end:
        if len(starter.warm()) > 1:
            return True
        time.sleep(0.02)
    for process in starter.of(COMMAND):
        os.kill(process, signal.SIGKILL)
    until(lambda: not starter.of(COMMAND))
    return False


def test_the_first_command_is_flower_s_own_and_later_ones_are_forks_that_end_with_theirs(starter):
    warm = warmed(starter)
    assert "usage: flwr-clientapp" in starter.log.read_text()
    (command,), (fork,) = starter.of(COMMAND), set(starter.warm()) - {warm}
    os.kill(command, signal.SIGKILL)
    until(lambda: starter.warm() == [warm])
    before = time.monotonic()
    starter.start(*NOBODY)
    until(lambda: len(starter.warm()) == 2)
    assert time.monotonic() - before < 1.5  # Flower's own takes two seconds and more here
    (fork,) = set(starter.warm()) - {warm}
    os.kill(fork, signal.SIGKILL)
    until(lambda: starter.of(COMMAND) == [])
    assert starter.warm() == [warm]


def test_all_end_with_who_started_them(starter):
    warmed(starter)
    starter.process.kill()
    until(lambda: processes_of(starter.folder) == [], 15)


def test_a_warm_process_that_is_lost_costs_nothing_but_time(starter):
    warm = warmed(starter)
    for process in starter.of(COMMAND):
        os.kill(process, signal.SIGKILL)
    until(lambda: starter.warm() == [warm])
    os.kill(warm, signal.SIGKILL)
    until(lambda: starter.warm() == [])
    starter.start(*NOBODY)
    until(lambda: starter.of(f"{sys.executable} {Path(sys.executable).parent / COMMAND}"))
    until(lambda: len(starter.warm()) == 1)


def test_one_that_does_not_answer_is_not_waited_for_long(starter):
    warm = warmed(starter)
    for process in starter.of(COMMAND):
        os.kill(process, signal.SIGKILL)
    until(lambda: starter.warm() == [warm])
    os.kill(warm, signal.SIGSTOP)
    starter.start(*NOBODY)
    until(lambda: starter.of(f"{sys.executable} {Path(sys.executable).parent / COMMAND}"), 30)
    os.kill(warm, signal.SIGCONT)
    time.sleep(1)
    assert starter.warm() == [warm]  # the fork for a command that went on without it has ended


def test_without_flower_s_own_command_it_is_a_sentence(tmp_path):
    told = subprocess.run([f"{commands(tmp_path)}/{COMMAND}"], env={"PATH": "/nowhere"}, capture_output=True, text=True)
    assert told.returncode == 1
    assert told.stderr.startswith(f"{COMMAND} must be in PATH, got none beside {tmp_path}/bin/{COMMAND}.")
    until(lambda: not [p for p in Path("/proc").iterdir() if _serves(p, os.getpid())], 10)


def _serves(place, starter):
    try:
        return f"--serve\0{starter}\0" in (place / "cmdline").read_text()
    except OSError:
        return False
