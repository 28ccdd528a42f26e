"""Every process of a real federation is killed while it runs; the run ends as an undisturbed one."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import sqlite3
import threading
import time

import pytest

pytest.importorskip("flwr")
pytest.importorskip("cryptography")

from helpers_federation import flower, same, simulated, text

from fedpact.flower.local import Local
from fedpact.run import Run

# Faults: each at a random moment of the run


def kill_node(federation):
    """kill -9 of a SuperNode and all that it started."""
    _kill(federation.processes_of("a"))


def kill_resident(federation):
    _kill(federation.processes_of("a", "fedpact.flower.resident"))


def kill_relay(federation):
    """kill -9 of the process that Flower starts for a message: the message is lost with it, and the node stays."""
    _kill(_relay(federation))


def kill_node_unseen(federation):
    """kill -9 of a SuperNode with a question, and nobody looks while it is gone: Flower never tells of the loss."""
    _relay(federation)
    _kill(federation.processes_of("a"))
    server = federation.processes_of("superlink", "flwr-serverapp")
    with contextlib.closing(sqlite3.connect(f"file:{federation.folder}/superlink.db?mode=ro", uri=True)) as database:
        known = lambda: dict(database.execute("select node_id, online_until from node"))
        wait(lambda: min(known().values()) < time.time() + 1, 90)  # the other one's is put off every half a minute
        node, before = min(known().items(), key=lambda pair: pair[1])
        _signal(server, signal.SIGSTOP)
        wait(lambda: known()[node] > before, 25)  # it is back; Flower gives a server app up after thirty seconds
    _signal(server, signal.SIGCONT)


def _relay(federation):
    """The process that carries a message to node a, when there is one."""
    wait(lambda: federation.processes_of("a", "flwr-clientapp"), 60)
    return federation.processes_of("a", "flwr-clientapp")


def wait(holds, seconds):
    until = time.monotonic() + seconds
    while not holds() and time.monotonic() < until:
        time.sleep(0.05)


def kill_superlink(federation):
    _kill([federation.processes["superlink"].pid])


def kill_server_app(federation):
    _kill(federation.processes_of("superlink", "flwr-serverapp"))


def hang_node(federation):
    """It stops in the middle of whatever it does, and goes on twenty seconds later."""
    stopped = federation.processes_of("a", "fedpact.flower.resident")
    _signal(stopped, signal.SIGSTOP)
    time.sleep(20)
    _signal(stopped, signal.SIGCONT)


def _kill(processes):
    _signal(processes, signal.SIGKILL)


def _signal(processes, number):
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, number)


FAULTS = (kill_node, kill_resident, kill_relay, kill_node_unseen, kill_superlink, kill_server_app, hang_node)
#: How many moments of each fault `make drills-network` takes; without it one run meets them all, one after the other.
MOMENTS = int(os.environ.get("FEDPACT_MOMENTS", "0"))


def harmed(faults, folder, rounds, seconds, rng, say):
    """A run with these faults, the k-th at a random moment after round k."""
    path, run = folder / "drill.toml", folder / "run"
    path.write_text(text("fedadmm", flower(), rounds=rounds))
    with Local(folder / "federation", {"a": {"client": 0}, "b": {"client": 1}}) as federation:

        def harm():
            for k, fault in enumerate(faults, 1):
                while not (run / "history.csv").exists() or len((run / "history.csv").read_text().splitlines()) < k + 2:
                    time.sleep(0.1)
                    if (run / "result.json").is_file():
                        return
                delay = rng.uniform(0, 10)
                time.sleep(delay)
                say(f"{fault.__name__}, {delay:.1f} s after round {k}")
                fault(federation)

        thread = threading.Thread(target=harm, daemon=True)
        thread.start()
        federation.finish(path, run, seconds, say)
        thread.join()
    assert federation.processes_of() == []
    with contextlib.closing(sqlite3.connect(federation.folder / "superlink.db")) as database:
        for (lines,) in database.execute("select log from task_logs"):
            for line in lines.splitlines():
                if "WARNING fedpact:" in line:
                    say(f"in the run's log: {line}")
    if kill_resident in faults:
        assert (
            "the node's process was lost; another is started"
            in (federation.folder / "state" / "a" / "node.log").read_text()
        )
    one = simulated("fedadmm", folder, rounds=rounds)
    found = Run.load(run)
    assert abs(found.history.end("objective") - one.history.end("objective")) < 1e-6
    same(found, one, 1e-12)


def test_one_fault_of_each_kind_in_one_run_and_it_ends_as_an_undisturbed_one(tmp_path):
    seed = random.SystemRandom().randrange(2**32)
    rng, said = random.Random(seed), []
    say = lambda line: (said.append(line), print(f"{time.strftime('%H:%M:%S')} {line}", flush=True))
    say(f"seed {seed}")
    harmed(rng.sample(FAULTS, len(FAULTS)), tmp_path, len(FAULTS) + 2, 1500, rng, say)
    assert sum(line.startswith(f"{fault.__name__},") for line in said for fault in FAULTS) == len(FAULTS)
    assert any("superlink was lost" in line for line in said)
    assert any("a was lost" in line for line in said)
    assert any("the server app was lost" in line for line in said)


@pytest.mark.parametrize("moment", range(MOMENTS))
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_whatever_is_killed_the_run_ends_as_an_undisturbed_one(fault, moment, tmp_path):
    seed = random.SystemRandom().randrange(2**32)
    say = lambda line: print(f"{time.strftime('%H:%M:%S')} {line}", flush=True)
    say(f"seed {seed}")
    harmed([fault], tmp_path, 3, 600, random.Random(seed), say)


def test_a_node_that_hangs_is_left_out_by_the_deadline_and_the_run_goes_on(tmp_path):
    """A deadline of fifteen seconds and a quorum of one: who is stopped for good is missing, and said to be."""
    path = tmp_path / "drill.toml"
    path.write_text(text("fedavg", flower(deadline=15, quorum=0.5), rounds=3))
    with Local(tmp_path / "federation", {"a": {"client": 0}, "b": {"client": 1}}) as federation:

        def harm():
            while not (tmp_path / "run" / "history.csv").exists():
                time.sleep(0.1)
            _signal(federation.processes_of("a"), signal.SIGSTOP)

        thread = threading.Thread(target=harm, daemon=True)
        thread.start()
        federation.finish(path, tmp_path / "run", 400, print)
        thread.join()
    history = Run.load(tmp_path / "run").history
    assert history.rounds == 3
    assert history.column("missing")[-1] == 1
    assert history.column("participants")[-1] == 1
    assert history.column("measured")[-1] == 0.5
