"""Every process of a real federation is killed while it runs; the run ends as an undisturbed one."""

from __future__ import annotations

import contextlib
import csv
import os
import re
import signal
import sqlite3
import subprocess
import time
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("flwr")
pytest.importorskip("cryptography")

from helpers_federation import (
    MOMENTS,
    begun,
    calm,
    flower,
    harmed,
    lines_of,
    same,
    simulated,
    simulated_calm,
    text,
    warned,
)

from fedpact.flower.links import SILENCE
from fedpact.run import Run

#: Seconds that a fault waits for a process to strike.
PATIENCE = 180.0

# Faults: each at a random moment of the run; it returns what it did, or fails where there was nothing to do it to


def kill_node(federation):
    """kill -9 of a SuperNode and all that it started."""
    return _hit(lambda: federation.processes_of("a"))


def kill_resident(federation):
    return _hit(lambda: _resident(federation))


def kill_relay(federation):
    """kill -9 of the process that Flower starts for a message, while it waits for the node's answer: the message is
    lost with it, and the node stays."""
    with _stopped(lambda: _serving(federation)):
        return _hit(lambda: _asking(federation))


def kill_node_unseen(federation):
    """kill -9 of a SuperNode with a question, and nobody looks while it is gone: Flower never tells of the loss."""
    with _stopped(lambda: _serving(federation)):
        wait(lambda: _asking(federation), PATIENCE)
        done = _hit(lambda: federation.processes_of("a"))
    server = lambda: federation.processes_of("superlink", "flwr-serverapp")
    with contextlib.closing(sqlite3.connect(f"file:{federation.folder}/superlink.db?mode=ro", uri=True)) as database:
        known = lambda: dict(database.execute("select node_id, online_until from node"))
        wait(lambda: min(known().values()) < time.time() + 1, 90)  # the other one's is put off every half a minute
        node, before = min(known().items(), key=lambda pair: pair[1])
        with _stopped(server), contextlib.suppress(AssertionError):
            wait(lambda: known()[node] > before, 25)  # it is back; Flower gives a server app up after thirty seconds
    return done


def kill_superlink(federation):
    return _hit(lambda: [federation.processes["superlink"].pid])


def kill_server_app(federation):
    return _hit(lambda: federation.processes_of("superlink", "flwr-serverapp"))


def hang_node(federation):
    """It stops in the middle of whatever it does, and goes on when it has been silent long enough to be asked again."""
    with _stopped(lambda: _serving(federation)):
        begun = time.monotonic()
        wait(lambda: _asking(federation), PATIENCE)
        time.sleep(SILENCE + 10)
        assert _asking(federation)
        return f"a question waited, and it was stopped for {time.monotonic() - begun:.0f} s"


def _resident(federation):
    return federation.processes_of("a", "fedpact.flower.resident")


def _serving(federation):
    """The node's process, once it listens: one that is stopped before that is asked nothing."""
    return [process for process in _resident(federation) if _has_socket(process, lambda line: line[3] == "00010000")]


def _asking(federation):
    """The processes that have carried a message to node a and wait for its answer: each has a socket open to it.

    Flower's own, or a fork of the warm one. That socket is a stream; those by which a command asks for a fork are not.
    """
    relays = federation.processes_of("a", "flwr-clientapp") + federation.processes_of(
        "a", "fedpact.flower.warm --serve"
    )
    return [process for process in relays if _has_socket(process, lambda line: line[4:6] == ["0001", "03"])]


def _has_socket(process, like):
    """Whether a process has a socket of this machine's that is like this, by its line in /proc/net/unix."""
    lines = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()[1:]]
    wanted = {f"socket:[{line[6]}]" for line in lines if like(line)}
    with contextlib.suppress(OSError):
        return any(os.readlink(one.path) in wanted for one in os.scandir(f"/proc/{process}/fd"))
    return False


def wait(holds, seconds):
    until = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < until, f"there was nothing to strike within {seconds:g} s"
        time.sleep(0.05)


@contextlib.contextmanager
def _stopped(find):
    _hit(find, signal.SIGSTOP)
    try:
        yield
    finally:
        for process in find():
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGCONT)


def _hit(find, number=signal.SIGKILL):
    """Signal the processes that are found, waiting for one where there is none, and see that it did what it does."""
    reached = []

    def sent():
        for process in find():
            with contextlib.suppress(ProcessLookupError):
                if _state(process) != "Z":
                    os.kill(process, number)
                    reached.append(process)
        return reached

    wait(sent, PATIENCE)
    wait(lambda: all(_state(process) in ("", "Z" if number == signal.SIGKILL else "T") for process in reached), 10)
    return f"{signal.Signals(number).name} reached {len(reached)} of its processes"


def _state(process):
    """R, S, D, T or Z; empty where there is no such process."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    return ""


#: What is said of each fault between it and the next one: by the federation, the run's log or the node's log.
SAID = {
    kill_node: "a was lost and started again",
    kill_resident: "in the node's log: the node's process was lost; another is started",
    kill_relay: "in the run's log: node '(a|\\d+)' (did not answer|is silent)",
    kill_node_unseen: "in the run's log: node '(a|\\d+)' (did not answer|is silent)",
    kill_superlink: "superlink was lost and started again",
    kill_server_app: "the server app was lost; the run is resumed",
    # Flower may give up the process that carried the question (its error 8) before the server has waited for a minute.
    hang_node: "in the run's log: node '(a|\\d+)' (did not answer|is silent for 60 s; it is asked again)",
}
FAULTS = tuple(SAID)
#: Those that may strike before round 1, while nodes are gathered and agree on their features.
EARLY = (kill_node, kill_resident, kill_relay, kill_superlink, kill_server_app)


#: Telemetry, which is an exchange of its own, in every other round.
EVERY = "evaluate_every = 2"
#: Seconds of a round that is not disturbed, at the most; the shortest that was seen counts, if it is less. A fault
#: strikes within two of them after a whole round, which is there for what is said of the fault before, so that it
#: needs four rounds, or five.
SLOWEST, ROUNDS = 5.0, 6


def drilled(faults, folder, rounds, seconds, rng, say):
    """A run with these faults, each at a random moment after a whole round since the last one.

    The first strikes before round 1, once a node is asked anything: nodes are gathered, and agree on their features.
    """
    run, told = folder / "run", Told(say)

    def harm(federation, ended):
        done = lambda: max(len(lines_of(run / "history.csv")) - 2, 0)
        pace = SLOWEST
        for k, fault in enumerate(faults):
            before, since = done(), time.monotonic()
            while not (done() > before + 1 if k else federation.processes_of("a", "flwr-clientapp")):
                assert not ended.wait(0.05), f"the run ended before {fault.__name__}"
            after = done()
            pace = min(pace, (time.monotonic() - since) / 2) if k else pace
            delay = rng.uniform(0, 2 * pace)
            assert not ended.wait(delay), f"the run ended before {fault.__name__}"
            told.strike(fault, f"{delay:.1f} s after {f'round {after}' if k else 'the start'}")
            told(f"{fault.__name__}: {fault(federation)}")

    experiment = text("fedadmm", f"{flower()}\n{EVERY}", rounds=rounds)
    federation = harmed(experiment, folder, seconds, told, harm)
    for line in warned(federation):
        told.at(line[:8], f"in the run's log: {line.partition('fedpact: ')[2]}")
    for line in lines_of(federation.folder / "state" / "a" / "node.log"):
        if "was lost" in line:
            told.at(line[11:19], f"in the node's log: {line[20:]}")
    for fault in faults:
        assert any(re.search(SAID[fault], line) for line in told.after(fault)), fault.__name__
    one = simulated("fedadmm", folder, EVERY, rounds=rounds)
    found = Run.load(run)
    assert abs(found.history.end("objective") - one.history.end("objective")) < 1e-6
    same(found, one, 1e-12)


class Told:
    """What was said when, in seconds since the start; and when each fault struck."""

    def __init__(self, say):
        self.say, self.begun, self.said, self.strikes = say, int(time.time()), [], {}

    def __call__(self, line):
        self.said.append((time.time() - self.begun, line))
        self.say(line)

    def strike(self, fault, when):
        self.strikes[fault] = int(time.time()) - self.begun  # logs have whole seconds
        self(f"{fault.__name__}, {when}")

    def at(self, clock, line):
        """A line of a log, by its HH:MM:SS."""
        hours, minutes, seconds = map(int, clock.split(":"))
        start = time.localtime(self.begun)
        passed = 3600 * hours + 60 * minutes + seconds - (3600 * start.tm_hour + 60 * start.tm_min + start.tm_sec)
        self.said.append((passed % 86400, line))
        self.say(f"{line} ({clock})")

    def after(self, fault):
        """What was said from a fault on, until the next one."""
        since = self.strikes[fault]
        until = min((other for other in self.strikes.values() if other > since), default=float("inf"))
        return [line for when, line in self.said if since <= when <= until]


@pytest.mark.parametrize("moment", range(MOMENTS))
def test_one_fault_of_each_kind_in_one_run_and_it_ends_as_an_undisturbed_one(moment, tmp_path):
    rng, say = begun()
    early = rng.choice(EARLY)
    faults = [early, *rng.sample([fault for fault in FAULTS if fault is not early], len(FAULTS) - 1)]
    drilled(faults, tmp_path, ROUNDS * len(FAULTS), 1800, rng, say)


#: Seconds of the deadline that a node hangs past: well above an exchange on a busy machine (25 s were seen), or a node
#: that goes on would be late with every answer.
DEADLINE = 60


@pytest.mark.parametrize("moment", range(MOMENTS))
def test_a_node_that_hangs_is_left_out_by_the_deadline_and_takes_part_again_once_it_goes_on(moment, tmp_path):
    """With a quorum of one of two: who is stopped is missing, and said to be; once it goes on it takes part again.

    The run is that of a schedule without it in the rounds it missed, wherever everyone's telemetry was there; and its
    objective ends within 1e-6 of an undisturbed one's.
    """
    (rng, say), rounds, run = begun(), 16, tmp_path / "run"
    missing = lambda: sum(float(row["missing"] or 0) for row in csv.DictReader(lines_of(run / "history.csv")))

    def harm(federation, ended):
        after, delay, longer = rng.randrange(3), rng.uniform(0, 5), rng.uniform(0, 10)
        while len(lines_of(run / "history.csv")) < after + 2:
            assert not ended.wait(0.1), "the run ended before node a was stopped"
        time.sleep(delay)
        with _stopped(lambda: federation.processes_of("a")):
            say(f"node a is stopped, {delay:.1f} s after round {after}")
            before = missing()
            while missing() == before:
                assert not ended.wait(0.1), "the run ended, and node a was not missing"
            time.sleep(longer)
        say(f"node a goes on, {longer:.1f} s after a round went on without it")

    federation = harmed(calm(rounds, 1, flower(deadline=DEADLINE, quorum=0.5)), tmp_path, 900, say, harm)
    lines = warned(federation)
    for line in lines:
        say(f"in the run's log: {line}")
    history = Run.load(run).history
    out = [re.search(r"round (\d+), client (\d) \(.\): no answer by the deadline; left out", line) for line in lines]
    left = [(int(one[1]), int(one[2])) for one in out if one]
    assert history.column("missing")[1:].tolist() == [sum(t == r for t, _ in left) for r in range(rounds)]
    assert any(client == 0 for _, client in left)
    assert history.column("participants")[-1] == 2
    drawn = [[client for client in (0, 1) if (t, client) not in left] for t in range(rounds)]
    more = f'participation = {{ scheme = "schedule", rounds = {drawn} }}'
    expected, whole = simulated_calm(rounds, tmp_path, 1, more).history, history.column("measured") == 1
    assert whole[-1]
    assert not whole.all()
    for column in ("objective", "gradient", "participants"):
        np.testing.assert_allclose(
            history.column(column)[whole], expected.column(column)[whole], rtol=1e-12, atol=1e-12
        )
    undisturbed = simulated_calm(rounds, tmp_path, 1).history
    assert abs(history.end("objective") - undisturbed.end("objective")) < 1e-6


def test_a_fault_that_finds_nobody_fails(monkeypatch):
    """A process that has ended counts for none, one that is there is seen to stop and to end."""
    monkeypatch.setitem(globals(), "PATIENCE", 0.2)
    with subprocess.Popen(["sleep", "60"]) as process:
        alone = lambda: [process.pid]
        with _stopped(alone):
            assert _state(process.pid) == "T"
        assert _hit(alone) == "SIGKILL reached 1 of its processes"
        with pytest.raises(AssertionError, match=r"nothing to strike within 0\.2 s"):
            _hit(alone)
