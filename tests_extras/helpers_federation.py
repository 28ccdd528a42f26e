"""Small experiments that run on every engine, and what it means that two histories are the same."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import sqlite3
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from fedpact.experiment import build, read
from fedpact.flower.local import Local, processes_of
from fedpact.run import execute

#: In how many runs faults strike, each at other moments; `make drills-network` has three.
MOMENTS = int(os.environ.get("FEDPACT_MOMENTS", "1"))
#: FedEPM with the demo's η and μ: by the paper's, which are small, engines differ by up to 2.6e-6 in single precision.
ALGORITHMS = {
    "fedepm": 'name = "fedepm"\neta = 1e-3\nmu0 = 10.0',
    "inexact_admm": 'name = "inexact_admm"\npreset = "paper"',
    "fedadmm": 'name = "fedadmm"\nbatch = 20',
    "fedavg": 'name = "fedavg"',
    "scaffold": 'name = "scaffold"\nbatch = 20',
    "fedpdm": 'name = "fedpdm"',
    "vertical_ssca": 'name = "vertical_ssca"\nbatch = 50',
}
TEXT = """
[data]
name = "breast_cancer"

[split]
how = "{how}"
clients = {clients}
seed = 0

[problem]
name = "logistic"
{l2}intercept = true

[algorithm]
{algorithm}

[run]
rounds = {rounds}
seed = 0
precision = "{precision}"
{engine}
"""
FLOWER = 'engine = {{ name = "flower", notes = true, deadline = {deadline}, patience = 600, quorum = {quorum} }}'


def text(name, engine="", precision="double", rounds=5, clients=2):
    vertical = name.startswith("vertical")
    how, l2 = ("features", "l2 = 0.0\n") if vertical else ("iid", "l2 = 1e-2\n")
    about = {"how": how, "l2": l2, "algorithm": ALGORITHMS[name], "clients": clients}
    return TEXT.format(**about, rounds=rounds, precision=precision, engine=engine)


def flower(deadline=200, quorum=1.0):
    return FLOWER.format(deadline=deadline, quorum=quorum)


#: A round of parties needs all of them: there is nothing to choose but how long it waits.
PARTIES = 'engine = { name = "flower", patience = 600 }'


def same(one, other, tolerance, skip=("seconds", "local_seconds", "rolled_back")):
    """Every column of the other's history, but the clock's, is in this one's too."""
    assert {"objective", "gradient", "participants"} <= set(other.history.columns) <= set(one.history.columns)
    for column in other.history.columns:
        if column in skip:
            continue
        a, b = one.history.column(column), other.history.column(column)
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance, equal_nan=True, err_msg=column)


def simulated(name, folder, engine="", precision="double", rounds=5, clients=2):
    path = folder / f"{name}-{precision}.toml"
    path.write_text(text(name, engine, precision, rounds, clients))
    return execute(build(read(path))[0])


# Drills

#: FedADMM, whose clients keep a state, on a problem so well conditioned that what a round has missed no longer counts
#: at the end: with η = |S|/m the model stays the mean of what everyone sent last, and a few rounds of everyone bring
#: the objective within 1e-6 of an undisturbed run's.
CALM = """
[data]
name = "breast_cancer"

[split]
how = "iid"
clients = 2
seed = 0

[problem]
name = "logistic"
l2 = 3.0
divide = false
intercept = false

[algorithm]
name = "fedadmm"
solver = "gd"
rate = 0.2
epochs = 20
vary = false
rho = 0.2
eta = "participation"
start = "local"
message = "augmented"

[run]
rounds = {rounds}
seed = 0
precision = "double"
evaluate_every = {every}
{more}
"""


def calm(rounds, every, more=""):
    return CALM.format(rounds=rounds, every=every, more=more)


def simulated_calm(rounds, folder, every, more=""):
    path = folder / "simulated.toml"
    path.write_text(calm(rounds, every, more))
    return execute(build(read(path))[0])


def begun():
    """Random moments, by a seed that is told, and a way to tell what happens when."""
    seed = random.SystemRandom().randrange(2**32)
    say = lambda line: print(f"{time.strftime('%H:%M:%S')} {line}", flush=True)
    say(f"seed {seed}")
    return random.Random(seed), say


def harmed(experiment, folder, seconds, say, harm):
    """Run an experiment over nodes a and b, to folder/run, while `harm(federation, ended)` strikes in a thread of its
    own; `ended` is set once the run has ended. The federation, of which no process is left.
    """
    path, ended = folder / "drill.toml", threading.Event()
    path.write_text(experiment)
    with ThreadPoolExecutor(1) as pool:
        with Local(folder / "federation", {"a": {"client": 0}, "b": {"client": 1}}) as federation:
            harming = pool.submit(harm, federation, ended)
            try:
                federation.finish(path, folder / "run", seconds, say)
            finally:
                ended.set()
        harming.result()
    assert federation.processes_of() == []
    return federation


def nothing_left(folder, seconds=60):
    """Wait until nothing runs for a federation's folder; what is there after that is killed, and the test fails."""
    until = time.monotonic() + seconds
    while left := processes_of(folder):
        if time.monotonic() > until:
            for process in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)
            raise AssertionError(f"processes must have ended after {seconds} s, got {left}, which were killed")
        time.sleep(0.2)


def lines_of(path):
    return path.read_text(errors="replace").splitlines() if path.is_file() else []


def warned(federation):
    """The warnings of the runs' own log, which Flower keeps in its database."""
    with contextlib.closing(sqlite3.connect(federation.folder / "superlink.db")) as database:
        logs = [lines for (lines,) in database.execute("select log from task_logs")]
    return [line for one in logs for line in one.splitlines() if "WARNING fedpact:" in line]
