"""A real federation on this machine: SuperLink, SuperNodes, TLS, keys. Everything ends with the test."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("flwr")
pytest.importorskip("cryptography")

from helpers_wire import Wire
from sklearn.datasets import load_breast_cancer

import fedpact as fp
from fedpact.experiment import build, read
from fedpact.flower.local import MARK, NAME, Local, make_certificates, make_node_key, processes_of
from fedpact.flower.operators import write_all
from fedpact.run import Run, execute

ALGORITHMS = {
    "fedepm": 'name = "fedepm"',
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
clients = 2
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
FLOWER = 'engine = {{ name = "flower", notes = true, deadline = {deadline}, patience = 300, quorum = {quorum} }}'


def text(name, engine="", precision="double", rounds=5):
    vertical = name.startswith("vertical")
    how, l2 = ("features", "l2 = 0.0\n") if vertical else ("iid", "l2 = 1e-2\n")
    return TEXT.format(how=how, l2=l2, algorithm=ALGORITHMS[name], rounds=rounds, precision=precision, engine=engine)


def flower(deadline=200, quorum=1.0):
    return FLOWER.format(deadline=deadline, quorum=quorum)


#: A round of parties needs all of them: there is nothing to choose but how long it waits.
PARTIES = 'engine = { name = "flower", patience = 300 }'


@pytest.fixture(scope="module")
def federation(tmp_path_factory):
    """Two nodes that talk to the SuperLink through `wire`, which keeps what crosses."""
    made = Local(tmp_path_factory.mktemp("federation"), {"a": {"client": 0}, "b": {"client": 1}})
    made.wire = Wire(made.folder, made.port)
    made.address = made.wire.address
    with made:
        yield made
    made.wire.close()
    assert made.processes_of() == []


def wait_for(paths, seconds, failures):
    until = time.monotonic() + seconds
    while missing := [path for path in paths if not (path / "result.json").is_file()]:
        for path in failures:
            assert not path.is_file(), path.read_text()
        assert time.monotonic() < until, f"not finished: {missing}"
        time.sleep(1)


def same(one, other, tolerance, skip=("seconds", "local_seconds")):
    shared = [c for c in one.history.columns if c in other.history.columns and c not in skip]
    assert {"objective", "gradient", "participants"} <= set(shared)
    for column in shared:
        a, b = one.history.column(column), other.history.column(column)
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance, equal_nan=True, err_msg=column)


def simulated(name, folder, engine="", precision="double", rounds=5):
    path = folder / f"{name}-{precision}.toml"
    path.write_text(text(name, engine, precision, rounds))
    return execute(build(read(path))[0])


CASES = [(name, "double") for name in ALGORITHMS] + [("fedadmm", "single")]
#: Flower starts a server app anew that has not reported within 30 s: eight at once, on two cores, become sixty.
AT_ONCE = 3


def test_the_same_experiment_on_local_ray_and_flower_has_the_same_history(federation, tmp_path):
    """Three at a time in one federation: nodes take part in several runs, each with a state of its own."""
    local = {case: simulated(case[0], tmp_path, "", case[1]) for case in CASES}
    runs = {(name, precision): tmp_path / f"{name}-{precision}" for name, precision in CASES}
    errors = [Path(f"{path}.error") for path in runs.values()]
    for first in range(0, len(CASES), AT_ONCE):
        wave = CASES[first : first + AT_ONCE]
        for name, precision in wave:
            path = tmp_path / f"{name}-{precision}-flower.toml"
            path.write_text(text(name, PARTIES if name.startswith("vertical") else flower(), precision))
            federation.submit(path, runs[name, precision])
        wait_for([runs[case] for case in wave], 900, errors)
    for case, path in runs.items():
        same(Run.load(path), local[case], _tolerance(case))
    _nothing_of_a_row_crossed(federation, [Run.load(runs[name, "double"]) for name in ("fedavg", "fedpdm")])
    ray = pytest.importorskip("ray")
    for case in CASES:
        same(simulated(case[0], tmp_path, 'engine = "ray"', case[1]), local[case], _tolerance(case))
    ray.shutdown()


def _nothing_of_a_row_crossed(federation, runs):
    """Neither on the wire, TLS taken off, nor in the SuperLink's database; models did, which the same search finds."""
    heard = [bytes(one) for one in federation.wire.heard]
    for run in runs:
        assert any(np.asarray(run.model.w.tree["w"]).tobytes() in one for one in heard)
    kept = [path.read_bytes() for path in federation.folder.glob("superlink.db*")]
    for x in (load_breast_cancer().data, np.asarray(fp.data.breast_cancer().x)):
        cells = {cell.tobytes() for cell in x[::30].ravel() if cell}
        pairs = {
            row[k : k + 2].tobytes() for row in x[::30].astype(np.float32) for k in range(29) if row[k : k + 2].all()
        }
        assert len(cells) > 300
        assert not [part for part in cells | pairs for one in kept + heard if part in one]


def _tolerance(case):
    return 1e-12 if case[1] == "double" else 1e-6


# Who may join


def test_a_node_without_a_registered_key_cannot_join(federation):
    make_node_key(federation.folder, "stranger")
    federation.configs["stranger"] = {"client": 9}
    federation.ports["stranger"] = _free()
    try:
        federation.start_node("stranger")
        federation.processes["stranger"].wait(60)
        log = (federation.folder / "logs" / "stranger.log").read_text(errors="replace")
        assert "Failed to activate SuperNode" in log, log[-2000:]
        listed = federation.flwr("supernode", "list", NAME, "--format", "json").stdout
        online = [node for node in json.loads(listed[listed.index("{") :])["nodes"] if node["status"] == "online"]
        assert len(online) == 2
    finally:
        federation.kill("stranger")
        del federation.configs["stranger"]


def test_nor_one_that_trusts_another_authority(federation, tmp_path):
    make_certificates(tmp_path, ["localhost"])
    key, log = federation.folder / "nodes" / "a.key", federation.folder / "logs" / "astray.log"
    trusts = ("--root-certificates", str(tmp_path / "ca.pem"), "--auth-supernode-private-key", str(key))
    where = ("--superlink", federation.address, "--host", "127.0.0.1", "--port", str(_free()))
    federation._launch("astray", ["flower-supernode", *where, *trusts])
    try:
        until = time.monotonic() + 60
        while not log.is_file() or "certificate verify failed" not in log.read_text(errors="replace").lower():
            assert time.monotonic() < until, log.read_text(errors="replace")[-2000:]
            time.sleep(0.2)
    finally:
        federation.kill("astray")
    context = ssl.create_default_context(cafile=str(tmp_path / "ca.pem"))
    with (
        socket.create_connection(("127.0.0.1", federation.port)) as plain,
        pytest.raises(ssl.SSLCertVerificationError),
        context.wrap_socket(plain, server_hostname="localhost"),
    ):
        pass
    right = ssl.create_default_context(cafile=str(federation.folder / "ca.pem"))
    with (
        socket.create_connection(("127.0.0.1", federation.port)) as plain,
        right.wrap_socket(plain, server_hostname="localhost") as secure,
    ):
        assert secure.version() in ("TLSv1.2", "TLSv1.3")


def _free():
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


# Faults: each at a random moment of the run


def kill_node(federation):
    """kill -9 of a SuperNode and all that it started."""
    _kill(federation.processes_of("a"))


def kill_resident(federation):
    _kill(federation.processes_of("a", "fedpact.flower.resident"))


def kill_superlink(federation):
    _kill([federation.processes["superlink"].pid])


def kill_server_app(federation):
    _kill(federation.processes_of("superlink", "flwr-serverapp"))


def hang_node(federation):
    """It stops in the middle of whatever it does, and goes on twenty seconds later."""
    stopped = federation.processes_of("a", "fedpact.flower.resident")
    for process in stopped:
        os.kill(process, signal.SIGSTOP)
    time.sleep(20)
    for process in stopped:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, signal.SIGCONT)


def _kill(processes):
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)


FAULTS = (kill_node, kill_resident, kill_superlink, kill_server_app, hang_node)
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
    assert sum(fault.__name__ in line for line in said for fault in FAULTS) == len(FAULTS)
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
            for process in federation.processes_of("a"):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process, signal.SIGSTOP)

        thread = threading.Thread(target=harm, daemon=True)
        thread.start()
        federation.finish(path, tmp_path / "run", 400, print)
        thread.join()
    history = Run.load(tmp_path / "run").history
    assert history.rounds == 3
    assert history.column("missing")[-1] == 1
    assert history.column("participants")[-1] == 1
    assert history.column("measured")[-1] == 0.5


def test_the_files_that_init_writes_make_a_federation(tmp_path):
    """As its README says: server.sh, a node.sh at each node, run.sh; nodes come before their keys are let in."""
    experiment, folder = tmp_path / "experiment.toml", tmp_path / "a place" / "federation"
    experiment.write_text(
        '[data]\ntarget = "outcome"\n[problem]\nname = "logistic"\n[algorithm]\nname = "fedavg"\n'
        '[run]\nrounds = 1\nengine = { name = "flower" }\n'
    )
    write_all(folder, experiment, "localhost", _free(), ["lab", "ward"])
    server = folder / "server.sh"
    server.write_text(server.read_text().replace("0.0.0.0", "127.0.0.1"))
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    everyone = {**os.environ, "PATH": path, MARK: f"{folder}:"}
    logs = {name: tmp_path / f"{name}.log" for name in ("server", "lab", "ward")}
    started = []
    try:
        for name, log in logs.items():
            at = folder / "nodes" / name
            if name != "server":
                ages = np.random.default_rng(len(name)).integers(20, 80, 40)
                rows = [f"{age},{'ill' if age > 50 else 'well'}" for age in ages]
                (at / "rows.csv").write_text("\n".join(["age,outcome", *rows]))
            script = server if name == "server" else at / "node.sh"
            with log.open("wb") as file:
                own = {**everyone, "PORT": str(_free())}
                started.append(subprocess.Popen(["sh", str(script)], stdout=file, stderr=file, env=own))
        _until(lambda: all("was not let in" in logs[name].read_text() for name in ("lab", "ward")), 90)
        run = ["sh", str(folder / "run.sh")]
        told = subprocess.run(run, env=everyone, capture_output=True, text=True, timeout=300)
        assert Run.load(folder / "run").history.rounds == 1, told.stdout + told.stderr
    finally:
        for process in reversed(started):
            process.terminate()
    _until(lambda: processes_of(folder) == [], 60)
    assert [process.wait(1) for process in started][1:] == [143, 143]


def _until(holds, seconds):
    until = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < until
        time.sleep(0.5)
