"""A node's own place: who can look into it, what the server can name in it, and a process that does not start."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import stat
import threading
import time
from pathlib import Path

import pytest
from helpers_nodes import federated, nodes

from fedpact.core.errors import ClientError, OutputError
from fedpact.core.wire import unpack
from fedpact.flower import resident
from fedpact.flower.links import Direct
from fedpact.flower.node import Node
from fedpact.flower.signed import SIGNATURE


def mode(path):
    return stat.S_IMODE(path.stat().st_mode)


def test_the_node_s_folder_is_its_user_s_alone_also_where_it_was_open(tmp_path):
    (tmp_path / "old").mkdir(mode=0o755)
    for name in ("old", "new"):
        Node({"name": name}, tmp_path / name)
        assert mode(tmp_path / name) == 0o700


def test_nor_is_a_folder_closed_that_is_not_the_node_s(tmp_path):
    """A home, say, by a slip of the configuration: with the node's files beside it others would be locked out."""
    (tmp_path / "home").mkdir()
    (tmp_path / "home").chmod(0o755)
    (tmp_path / "home" / "letter").touch()
    with pytest.raises(OutputError, match=r"^state must be a folder of its own, got '.*home', which is open to others"):
        Node({"name": "n"}, tmp_path / "home")
    assert (mode(tmp_path / "home"), os.listdir(tmp_path / "home")) == (0o755, ["letter"])
    (tmp_path / "home").chmod(0o700)
    Node({"name": "n"}, tmp_path / "home")
    (tmp_path / "home").chmod(0o755)  # now it is the node's
    Node({"name": "n"}, tmp_path / "home")
    assert mode(tmp_path / "home") == 0o700


@pytest.mark.parametrize("name", ["x/../../../escaped", "../escaped", "", "0123456789ABCDEF", "0" * 16 + "\n", None, 7])
def test_a_run_s_name_is_no_path(name, tmp_path):
    """A server that names a run writes nothing but into a folder of that run."""

    class Odd(Direct):
        def tell(self, questions):
            super().tell({i: one._replace(values={**one.values, "run": name}) for i, one in questions.items()})

    with pytest.raises(ClientError, match="run must be 16 digits of 0-9 and a-f, got "):
        federated("fedavg", tmp_path, Odd(nodes(tmp_path / "nodes")))
    assert not list(tmp_path.rglob("escaped*"))
    assert not list(tmp_path.rglob("run-*"))


def test_a_run_whose_folder_was_moved_is_the_same_run_to_its_nodes(tmp_path):
    parties = nodes(tmp_path)
    federated("fedavg", tmp_path, Direct(parties), tmp_path / "run", rounds=1)
    (tmp_path / "run").rename(tmp_path / "moved")
    run = federated("fedavg", tmp_path, Direct(parties), tmp_path / "moved", rounds=2)
    assert run.history.column("participants").tolist() == [0, 4, 4]
    assert [len(list(node.folder.glob("run-*"))) for node in parties] == [1] * len(parties)
    (tmp_path / "moved" / "place").unlink()  # as of a folder from before it was written down
    (tmp_path / "moved").rename(tmp_path / "run")
    federated("fedavg", tmp_path, Direct(parties), tmp_path / "run", rounds=3)
    assert (tmp_path / "run" / "place").read_text() == str((tmp_path / "run").resolve())


@pytest.fixture
def at(tmp_path, monkeypatch):
    monkeypatch.setattr(resident.tempfile, "gettempdir", lambda: str(tmp_path))
    return tmp_path


def test_a_process_that_cannot_start_says_why_at_once(at):
    (at / "n").mkdir(mode=0o755)
    (at / "n" / "node.log").write_text("column 'age' must be a number, got 'old'\n")  # of another day
    begun = time.monotonic()
    with pytest.raises(ConnectionError) as told:
        resident.ask({"name": "n", "state": str(at / "n"), "threads": 0}, b"")
    assert "must start, got its end: fedpact.core.errors.InvalidArgument: threads of the node" in str(told.value)
    assert "must be an integer of at least 1, got 0" in str(told.value)
    assert str(at / "n" / "node.log") in str(told.value)
    assert time.monotonic() - begun < resident.START / 2
    assert (at / "n" / "node.log").read_text().count("Traceback") == 1  # not over and over
    assert mode(at / "n") == 0o700


def test_a_process_that_ends_without_a_word_does_not_tell_older_lines(at, monkeypatch):
    (at / "n").mkdir()
    (at / "n" / "node.log").write_text("got 'old'\n")
    start = resident.subprocess.Popen
    monkeypatch.setattr(resident.subprocess, "Popen", lambda command, **more: start(["sh", "-c", "exit 3"], **more))
    with pytest.raises(ConnectionError, match="got its end: exit code 3") as told:
        resident.ask({"name": "n", "state": str(at / "n")}, b"")
    assert "old" not in str(told.value)


def test_a_folder_that_cannot_be_made_says_so(at):
    (at / "file").write_text("")
    with pytest.raises(OSError, match=r"output folder must be writable, got .*file/n"):
        resident.ask({"name": "n", "state": str(at / "file" / "n")}, b"")


def test_a_process_that_was_lost_is_started_again_and_its_log_says_so(tmp_path):
    config = {"name": "n", "state": str(tmp_path / "n")}
    log = tmp_path / "n" / "node.log"
    try:
        first = unpack(resident.ask(config, b"")[SIGNATURE:])
        assert first.kind == "error"
        assert "was lost" not in log.read_text()
        end(tmp_path)
        assert unpack(resident.ask(config, b"")[SIGNATURE:]) == first
        assert log.read_text().count("the node's process was lost; another is started") == 1
    finally:
        end(tmp_path)
        resident._socket_path(tmp_path / "n").unlink(missing_ok=True)


class Dying:
    """At the node's socket: takes connections, closes each before it answers, and is gone after so many."""

    def __init__(self, path, connections):
        self.server, self.connections = socket.socket(socket.AF_UNIX), connections
        self.server.bind(str(path))
        self.server.listen(8)
        self.thread = threading.Thread(target=self.run)
        self.thread.start()

    def run(self):
        for _ in range(self.connections):
            self.server.accept()[0].close()
        self.server.close()


def test_one_that_is_lost_may_be_met_more_than_once_while_it_ends(tmp_path):
    config = {"name": "n", "state": str(tmp_path / "n")}
    lost = Dying(resident._socket_path(tmp_path / "n"), 4)
    try:
        assert unpack(resident.ask(config, b"")[SIGNATURE:]).kind == "error"
        assert (tmp_path / "n" / "node.log").read_text().count("the node's process was lost; another is started") == 1
    finally:
        end(tmp_path)
        lost.thread.join()
        resident._socket_path(tmp_path / "n").unlink(missing_ok=True)


def test_but_not_for_ever(tmp_path, monkeypatch):
    monkeypatch.setattr(resident, "ENDING", 0.2)
    path = resident._socket_path(tmp_path / "n")
    lost = Dying(path, 20)
    try:
        with pytest.raises(ConnectionError):
            resident.ask({"name": "n", "state": str(tmp_path / "n")}, b"")
    finally:
        while lost.thread.is_alive():
            with contextlib.suppress(ConnectionError), socket.socket(socket.AF_UNIX) as left:
                left.connect(str(path))
        path.unlink()


def test_so_does_it_of_one_that_was_killed_while_it_started(tmp_path, monkeypatch):
    config, started = {"name": "n", "state": str(tmp_path / "n")}, []
    start = resident.subprocess.Popen

    def killed_once(command, **more):
        started.append(start(command, **more))
        if len(started) == 1:
            started[0].kill()
        return started[-1]

    monkeypatch.setattr(resident.subprocess, "Popen", killed_once)
    try:
        assert unpack(resident.ask(config, b"")[SIGNATURE:]).kind == "error"
        assert len(started) == 2
        log = (tmp_path / "n" / "node.log").read_text()
        assert log.count("the node's process was lost; another is started") == 1
    finally:
        end(tmp_path)
        resident._socket_path(tmp_path / "n").unlink(missing_ok=True)


def test_a_process_that_was_lost_is_started_again_where_its_log_is_on_a_full_disk(at, monkeypatch, capsys):
    (at / "n").mkdir()
    (at / "n" / "node.log").symlink_to("/dev/full")
    resident._socket_path(at / "n").touch()
    monkeypatch.setattr(resident.subprocess, "Popen", lambda command, **more: "started")
    assert resident._start(at / "n", {"name": "n"}) == "started"
    assert "the node's process was lost; another is started" in capsys.readouterr().err


def end(place):
    """kill -9 of the node's process in this folder."""
    for at in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            command = (at / "cmdline").read_bytes() if at.name.isdigit() else b""
            if b"fedpact.flower.resident" in command and str(place).encode() in command:
                os.kill(int(at.name), signal.SIGKILL)
