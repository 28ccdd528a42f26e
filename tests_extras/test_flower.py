"""A real federation on this machine: SuperLink, SuperNodes, TLS, keys. Everything ends with the test."""

from __future__ import annotations

import json
import os
import socket
import ssl
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("flwr")
pytest.importorskip("cryptography")

from helpers_federation import ALGORITHMS, MOMENTS, PARTIES, flower, nothing_left, same, simulated, text
from helpers_listening import LOOPBACK, listening
from helpers_wire import Wire
from sklearn.datasets import load_breast_cancer

import fedpact as fp
from fedpact.flower.local import MARK, NAME, Local, make_certificates, make_node_key
from fedpact.flower.operators import write_all
from fedpact.run import Run


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


#: In single precision one of them over Flower, where a run takes minutes; `make drills-network` has all.
SINGLE = ALGORITHMS if MOMENTS > 1 else ("fedadmm",)
CASES = [(name, "double") for name in ALGORITHMS] + [(name, "single") for name in SINGLE]
#: Flower starts a server app anew that has not reported within 30 s: eight at once, on two cores, become sixty.
AT_ONCE = 3


def test_the_same_experiment_on_local_ray_and_flower_has_the_same_history(federation, tmp_path):
    """Three at a time in one federation: nodes take part in several runs, each with a state of its own."""
    everywhere = [(name, precision) for name in ALGORITHMS for precision in ("double", "single")]
    local = {case: simulated(case[0], tmp_path, "", case[1]) for case in everywhere}
    runs = {(name, precision): tmp_path / f"{name}-{precision}" for name, precision in CASES}
    errors = [Path(f"{path}.error") for path in runs.values()]
    for first in range(0, len(CASES), AT_ONCE):
        wave = CASES[first : first + AT_ONCE]
        for name, precision in wave:
            path = tmp_path / f"{name}-{precision}-flower.toml"
            path.write_text(text(name, PARTIES if name.startswith("vertical") else flower(), precision))
            federation.submit(path, runs[name, precision])
        wait_for([runs[case] for case in wave], 900, errors)
    _listens_on_loopback_alone(federation)
    for case, path in runs.items():
        same(Run.load(path), local[case], _tolerance(case))
    _nothing_of_a_row_crossed(federation, [Run.load(runs[name, "double"]) for name in ("fedavg", "fedpdm")])
    ray = pytest.importorskip("ray")
    for case in everywhere:
        same(simulated(case[0], tmp_path, 'engine = "ray"', case[1]), local[case], _tolerance(case))
    ray.shutdown()


def _listens_on_loopback_alone(federation):
    """The SuperLink and both SuperNodes listen; no process of the federation does on an address that others reach."""
    found = listening(federation.processes_of())
    assert sum(bool(one) for one in found.values()) >= 3
    assert set().union(*found.values()) <= LOOPBACK


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


LOADER = """
from pathlib import Path

import numpy as np

from fedpact.data import from_arrays


def load():
    age, outcome = np.loadtxt(Path(__file__).with_name("rows.csv"), delimiter=",", skiprows=1).T
    return from_arrays(age[:, None], outcome, ["age"], classes=())
"""


def test_the_files_that_init_writes_make_a_federation(tmp_path):
    """As its README says: server.sh, a node.sh at each node, run.sh; nodes come before their keys are let in.

    The lab has a table, the ward a loader, in a module beside its script. What the nodes and the server tell each other
    from the first survey to the last telemetry is listened to: no cell is in it.
    """
    experiment, folder = tmp_path / "experiment.toml", tmp_path / "a place" / "federation"
    experiment.write_text(
        '[data]\ntarget = "outcome"\n[problem]\nname = "logistic"\n[algorithm]\nname = "fedavg"\n'
        '[run]\nrounds = 1\nengine = { name = "flower" }\n'
    )
    write_all(folder, experiment, "localhost", port := _free(), ["lab", "ward"])
    wire, cells = Wire(folder, port), []
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
                script = at / "node.sh"
                script.write_text(script.read_text().replace(f"localhost:{port}", wire.address))
                ages = np.random.default_rng(len(name)).uniform(20, 80, 40)
                cells += ages.tolist()
                rows = [f"{age},{int(age > 50)}" for age in ages]
                (at / "rows.csv").write_text("\n".join(["age,outcome", *rows]))
                (at / "wards.py").write_text(LOADER)
            script = [str(server)] if name == "server" else [str(at / "node.sh"), "threads=1"]
            with log.open("wb") as file:
                own = {**everyone, "PORT": str(_free()), **({"LOADER": "wards:load"} if name == "ward" else {})}
                started.append(subprocess.Popen(["sh", *script], stdout=file, stderr=file, env=own))
        _until(lambda: all("was not let in" in logs[name].read_text() for name in ("lab", "ward")), 90)
        run = ["sh", str(folder / "run.sh")]
        told = subprocess.run(run, env=everyone, capture_output=True, text=True, timeout=300)
        assert Run.load(folder / "run").history.rounds == 1, told.stdout + told.stderr
        assert Run.load(folder / "run").model.schema.classes == ("0", "1")
    finally:
        for process in reversed(started):
            process.terminate()
        nothing_left(folder)
        wire.close()
    assert [process.wait(1) for process in started][1:] == [143, 143]
    heard = b"".join(map(bytes, wire.heard))
    assert all(told.encode() in heard for told in ("age", "outcome", "moments"))
    for age in cells:
        for form in (str(age).encode(), np.float64(age).tobytes(), np.float32(age).tobytes()):
            assert form not in heard


def _until(holds, seconds):
    until = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < until
        time.sleep(0.5)
