"""The command in Flower's place: real processes, forked, tied to each other, and none left."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

pytest.importorskip("flwr")
pytest.importorskip("cryptography")

from helpers_federation import nothing_left

from fedpact.flower.local import MARK, processes_of
from fedpact.flower.warm import COMMAND, _forked, _given, commands, node

if sys.platform != "linux":
    pytest.skip("forks are for Linux", allow_module_level=True)

#: In SuperExec's place: starts a command for every line that it reads.
STARTER = """
import subprocess, sys
for line in sys.stdin:
    subprocess.Popen(line.rstrip("\\n").split("\\t"))
"""
#: A port of this machine at which nobody answers: a ClientApp tries it for as long as its starter lives.
NOBODY = ("--runtime-api-address", "127.0.0.1:9", "--token", "none", "--insecure", "--parent-pid")

#: How Flower's own command looks.
OWN = f"{sys.executable} {Path(sys.executable).parent / COMMAND}"


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
        arguments = [*arguments, str(self.process.pid)] if arguments == NOBODY else arguments
        print("\t".join([*self.command, *arguments]), file=self.process.stdin, flush=True)

    def of(self, word):
        return [one for one in processes_of(self.folder, "a", word) if one != self.process.pid]

    def warm(self):
        """The warm process, by its parent: a command's, or nobody any more; the forks' parent is the warm one."""
        every = self.of("fedpact.flower.warm --serve")
        return [one for one in every if parent(one) not in every]

    def forks(self):
        every = self.of("fedpact.flower.warm --serve")
        return [one for one in every if parent(one) in every]


def parent(process):
    try:
        return int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0


@pytest.fixture
def starter(tmp_path):
    made = Starter(tmp_path, os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]))
    yield made
    made.process.kill()
    made.process.wait()
    kill(*made.of(OWN))  # Flower's own command, which finds nobody, first waits to try again
    nothing_left(tmp_path, 20)


def until(holds, seconds=60):
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.05)


def warmed(starter):
    """The warm process, which has forked for a command; that one and its fork."""
    starter.start("--help")
    until(lambda: "usage: flwr-clientapp" in starter.log.read_text() and not starter.of(COMMAND))
    until(lambda: _ask(starter))
    seen = []

    def one_of_each():  # a second warm process, of a command that found none, ends when it finds the first
        seen[:] = starter.warm(), starter.of(COMMAND), starter.forks()
        return [len(one) for one in seen] == [1, 1, 1]

    until(one_of_each)
    return [process for (process,) in seen]


def _ask(starter):
    """A command was answered by a fork: without one it becomes Flower's own."""
    starter.start(*NOBODY)
    until(lambda: starter.of(COMMAND))
    end = time.monotonic() + 1
    while time.monotonic() < end:
        if starter.forks():
            return True
        time.sleep(0.02)
    kill(*starter.of(COMMAND))
    until(lambda: not starter.of(COMMAND))
    return False


def kill(*processes):
    for process in processes:
        with contextlib.suppress(ProcessLookupError):  # it has just ended
            os.kill(process, signal.SIGKILL)


def test_the_first_command_is_flower_s_own_and_later_ones_are_forks_that_end_with_theirs(starter):
    warm, command, _ = warmed(starter)
    kill(command)
    until(lambda: starter.forks() == [])
    starter.start(*NOBODY)
    until(starter.forks)
    assert starter.of(OWN) == []
    kill(*starter.forks())
    until(lambda: starter.of(COMMAND) == [])
    assert starter.warm() == [warm]


def test_all_end_with_who_started_them(starter):
    warmed(starter)
    starter.process.kill()
    starter.process.wait()
    until(lambda: processes_of(starter.folder) == [], 20)


def test_a_warm_process_that_is_lost_costs_nothing_but_time(starter):
    warm, command, _ = warmed(starter)
    kill(warm, command)
    until(lambda: starter.of("") == [])
    starter.start(*NOBODY)
    until(lambda: starter.of(OWN))
    until(starter.warm)


def test_one_that_does_not_answer_is_not_waited_for_long(starter):
    warm, command, _ = warmed(starter)
    kill(command)
    until(lambda: starter.forks() == [])
    os.kill(warm, signal.SIGSTOP)
    starter.start(*NOBODY)
    until(lambda: starter.of(OWN), 30)
    os.kill(warm, signal.SIGCONT)
    time.sleep(1)
    assert starter.warm() == [warm]
    assert starter.forks() == []  # the one for a command that has gone on without it has ended


def test_without_flower_s_own_command_it_is_a_sentence(tmp_path):
    starter = Starter(tmp_path, "/nowhere")
    told = f"{COMMAND} must be in PATH, got none beside {tmp_path}/bin/{COMMAND}."
    try:
        starter.start("--help")
        until(lambda: told in starter.log.read_text())
    finally:
        starter.process.kill()
        starter.process.wait()
        nothing_left(tmp_path, 15)


def test_arguments_reach_the_warm_process_whatever_bytes_they_have():
    """A path need not be UTF-8."""
    arguments, address = ["--flwr-dir", os.fsdecode(b"/srv/caf\xe9")], f"\0fedpact-test-{os.getpid()}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as server, ThreadPoolExecutor(1) as pool:
        server.bind(address)
        server.listen(1)
        server.settimeout(20)
        asked = pool.submit(_forked, address, arguments)
        connection, given, ends = _given(server)
        connection.send(b"1")
        connection.close()
        assert given == arguments
        for end in (*ends, asked.result(20)):
            os.close(end)


#: Flower's command in a node's place: it waits as Flower does, and tells for how long. (A test of what Flower calls.)
WAITS = """
import inspect, time
from flwr.supernode import cli, start_client_internal
from fedpact.flower import warm

def waits():
    begun = time.monotonic()
    start_client_internal.time.sleep(3)
    print(time.monotonic() - begun)

assert "time.sleep(" in inspect.getsource(start_client_internal)
cli.flower_supernode = waits
warm.node([])
"""


def test_a_node_on_the_server_s_machine_does_not_wait_as_long_as_flower_does():
    """Where Flower comes to wait in another way, the pauses are its own again, and this fails."""
    told = subprocess.run([sys.executable, "-c", WAITS], capture_output=True, text=True, timeout=120)
    assert told.returncode == 0, told.stderr
    assert 0.5 <= float(told.stdout) < 2.5


def test_a_flower_that_waits_elsewhere_has_its_own_node(monkeypatch):
    from flwr.supernode import cli, start_client_internal

    started = []
    monkeypatch.delattr(start_client_internal, "time")
    monkeypatch.setattr(cli, "flower_supernode", lambda: started.append(sys.argv))
    monkeypatch.setattr(sys, "argv", [])
    node(["--insecure"])
    assert started == [["flower-supernode", "--insecure"]]
    assert not hasattr(start_client_internal, "time")
