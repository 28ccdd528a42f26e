"""The Ray engine: a real cluster on this machine gives the local engine's runs, also where workers are killed."""

from __future__ import annotations

import logging
import os
import random
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
import ray
from helpers_listening import LOOPBACK, family, listening

import fedpact as fp
from fedpact.core.errors import ClientError, FedpactError
from fedpact.engines import RayEngine
from fedpact.engines import ray as ray_engine
from fedpact.engines.ray import _loopback

PROBLEM = fp.Logistic(l2=1e-3, intercept=True)
SETTINGS = {
    "fedepm": fp.FedEPM(mu0=10.0, eta=1e-3),
    "fedepm-noise": fp.FedEPM(mu0=10.0, eta=1e-3, epsilon=1.0),
    "inexact_admm": fp.InexactADMM(),
    "fedadmm": fp.FedADMM(rate=0.5, rho=0.1, batch=20),
    "fedavg": fp.FedAvg(),
    "scaffold": fp.Scaffold(rate=0.5),
    "fedpdm": fp.FedPDM(rho=1.0, rate=0.2),
}


@pytest.fixture(scope="module", autouse=True)
def cluster():
    with _loopback():
        ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
    yield
    ray.shutdown()


@pytest.fixture
def federation():
    return fp.data.breast_cancer().split(clients=6, how="dirichlet", alpha=2.0, least=40, seed=0)


@pytest.fixture
def engine():
    made = RayEngine(workers=2)
    yield made
    made.close()


def same(one, other, tolerance=1e-12):
    assert set(one.history.columns) == set(other.history.columns)
    for name in one.history.columns:
        if name not in ("seconds",):
            a, b = (run.history.column(name) for run in (one, other))
            np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance, err_msg=name)
    np.testing.assert_allclose(*(run.model.w.tree["w"] for run in (one, other)), rtol=tolerance, atol=tolerance)


#: How many random moments a worker is killed at; `make drills-network` takes more.
MOMENTS = int(os.environ.get("FEDPACT_MOMENTS", "1"))
#: Of those that the test of parity has, two; `make drills-network` has all.
SOME = SETTINGS if MOMENTS > 1 else ("fedepm-noise", "fedadmm", "scaffold")


@pytest.mark.parametrize("name", SOME)
def test_it_is_the_local_engine_s_run(name, federation, engine):
    options = {"rounds": 5, "participation": 0.5, "seed": 3}
    same(
        fp.run(SETTINGS[name], PROBLEM, federation, **options),
        fp.run(SETTINGS[name], PROBLEM, federation, engine=engine, **options),
    )


@pytest.mark.skipif(MOMENTS == 1, reason="the test of parity has it")
def test_single_precision(federation, engine):
    options = {"rounds": 5, "participation": 0.5, "precision": "single"}
    one = fp.run(SETTINGS["fedadmm"], PROBLEM, federation, **options)
    same(one, fp.run(SETTINGS["fedadmm"], PROBLEM, federation, engine=engine, **options), 1e-6)


def test_features_split_among_parties(engine):
    federation = fp.data.breast_cancer().split_features(clients=3)
    problem, settings = fp.Constrained(fp.Logistic(l2=0)), fp.VerticalSSCA(batch=50)
    one = fp.run(settings, problem, federation, rounds=5)
    same(one, fp.run(settings, problem, federation, rounds=5, engine=engine))


def test_a_private_run(federation, engine):
    settings, private = fp.FedAvg(epochs=1, step=0.5, batch=20), fp.Private(clip=1.0, noise=2.0)
    one = fp.run(settings, PROBLEM, federation, rounds=4, privacy=private)
    same(one, fp.run(settings, PROBLEM, federation, rounds=4, privacy=private, engine=engine))


def test_a_client_that_diverges_is_told_as_by_the_local_engine(federation, engine):
    """With its loss at the model it was sent, which the driver computes: ½ mean y² at w = 0."""
    steep, options = fp.FedAvg(steps=3, step=1e200), {"rounds": 2, "participation": [[2, 4], [0]]}
    one, other = (fp.run(steep, fp.LeastSquares(), federation, **options, **more) for more in ({}, {"engine": engine}))
    loss = np.mean(federation.client(2)[1] ** 2) / 2
    assert one.where == other.where
    assert one.where == f"round 0, client 2: its upload is not finite; at the model it was sent its loss was {loss:.4g}"


def test_a_round_without_anyone(federation, engine):
    rounds = [[0, 3], [], [1]]
    one = fp.run(SETTINGS["fedadmm"], PROBLEM, federation, rounds=3, participation=rounds)
    same(one, fp.run(SETTINGS["fedadmm"], PROBLEM, federation, rounds=3, participation=rounds, engine=engine))


def test_a_dataset_s_test_rows(engine):
    digits = fp.data.digits()
    federation = digits.split(clients=4, seed=0)
    problem = fp.TwoLayer(inputs=64, hidden=8, classes=10)
    settings = fp.FedAvg(epochs=1, step=0.1, batch=50)
    one = fp.run(settings, problem, federation, rounds=3, telemetry="all")
    other = fp.run(settings, problem, federation, rounds=3, telemetry="all", engine=engine)
    assert abs(one.history.last("objective") - other.history.last("objective")) < 1e-5


@pytest.mark.parametrize("moment", range(MOMENTS))
def test_a_worker_that_is_killed_is_started_again_and_nothing_is_lost(moment, federation, engine, caplog):
    options = {"rounds": 12, "participation": 0.5, "seed": 1}
    settings = SETTINGS["fedadmm"]
    undisturbed = fp.run(settings, PROBLEM, federation, **options)
    rng = random.SystemRandom()
    at, delay = rng.randrange(1, 8), rng.uniform(0, 0.1)
    print(f"worker 1 is killed {delay:.3f} s after round {at} began")
    step, killed = RayEngine.step, []

    def killing(self, f, shared, data, clients, cohort, combine, where):
        if int(where[0]) == at:
            killed.append(ray.get(self._running["actors"][1].ready.remote()))
            threading.Timer(delay, os.kill, (killed[0], signal.SIGKILL)).start()
        return step(self, f, shared, data, clients, cohort, combine, where)

    with pytest.MonkeyPatch.context() as patch, caplog.at_level(logging.WARNING, "fedpact"):
        patch.setattr(RayEngine, "step", killing)
        same(undisturbed, fp.run(settings, PROBLEM, federation, engine=engine, **options))
    assert any("worker 1 was lost; started again" in record.message for record in caplog.records)
    assert not os.path.exists(f"/proc/{killed[0]}")


def test_a_worker_killed_before_every_round(federation, engine, caplog):
    """Each round begins with a dead worker: the states come from the files."""
    options = {"rounds": 4, "participation": 1.0, "seed": 1}
    settings = SETTINGS["scaffold"]
    undisturbed = fp.run(settings, PROBLEM, federation, **options)
    step = RayEngine.step

    def killing(self, f, shared, data, clients, cohort, combine, where):
        if "client_step" in self._running["stages"]:
            os.kill(ray.get(self._running["actors"][int(where[0]) % 2].ready.remote()), signal.SIGKILL)
            time.sleep(0.2)
        return step(self, f, shared, data, clients, cohort, combine, where)

    with pytest.MonkeyPatch.context() as patch, caplog.at_level(logging.WARNING, "fedpact"):
        patch.setattr(RayEngine, "step", killing)
        same(undisturbed, fp.run(settings, PROBLEM, federation, engine=engine, **options))
    assert sum("was lost" in record.message for record in caplog.records) >= 3


def test_resumed_is_uninterrupted(federation, engine, tmp_path):
    options = {"participation": 0.5, "seed": 2, "engine": engine}
    settings = SETTINGS["fedadmm"]
    whole = fp.run(settings, PROBLEM, federation, rounds=6, **options)
    fp.run(settings, PROBLEM, federation, rounds=3, folder=tmp_path / "run", **options)
    resumed = fp.run(settings, PROBLEM, federation, rounds=6, folder=tmp_path / "run", resume=True, **options)
    same(whole, resumed, 0)


def test_resumed_on_another_cluster_is_uninterrupted_to_rounding(federation, engine, tmp_path):
    """One worker goes on for two, on another number of cores, with its states in a folder that they had not."""
    options = {"participation": 0.5, "seed": 2}
    settings, run, states = SETTINGS["fedadmm"], tmp_path / "run", tmp_path / "states"
    whole = fp.run(settings, PROBLEM, federation, rounds=6, engine=engine, **options)
    fp.run(settings, PROBLEM, federation, rounds=3, engine=engine, folder=run, **options)
    other = RayEngine(workers=1, threads=None, address="auto", folder=str(states))
    resumed = fp.run(settings, PROBLEM, federation, rounds=6, engine=other, folder=run, resume=True, **options)
    same(whole, resumed)
    assert list(states.iterdir()) == []


def test_what_fails_at_a_client_is_told(federation, engine):
    class Broken(fp.FedAvg):
        def build(self, problem, clients, rate):
            algorithm = super().build(problem, clients, rate)

            def client_step(*_):
                raise ValueError("no such luck")

            return algorithm._replace(client_step=client_step)

    with pytest.raises((FedpactError, ValueError), match="no such luck"):
        fp.run(Broken(), PROBLEM, federation, rounds=2, engine=engine)


def test_bad_settings():
    with pytest.raises(FedpactError, match=r"workers must be an integer of at least 1, got 0\."):
        RayEngine(workers=0)
    with pytest.raises(FedpactError, match="folder must be a word"):
        RayEngine(folder="")


def test_a_run_leaves_no_worker_and_no_state_behind(federation):
    engine, step, seen = RayEngine(workers=2), RayEngine.step, {}

    def looking(self, *arguments):
        seen["pids"] = ray.get([actor.ready.remote() for actor in self._running["actors"].values()])
        seen["folder"] = self._running["folder"]
        return step(self, *arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RayEngine, "step", looking)
        fp.run(fp.FedAvg(), PROBLEM, federation, rounds=1, engine=engine)
    assert len(seen["pids"]) == 2
    for _ in range(100):
        if not any(os.path.exists(f"/proc/{pid}") for pid in seen["pids"]):
            break
        time.sleep(0.1)
    assert not any(os.path.exists(f"/proc/{pid}") for pid in seen["pids"])
    assert not os.path.exists(seen["folder"])


def test_workers_on_another_machine_than_the_states_are_refused_at_the_start(federation, engine, tmp_path):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RayEngine, "_home", lambda self: "another machine")
        with pytest.raises(FedpactError, match="folder must be given on a cluster of several machines, got None"):
            fp.run(fp.FedAvg(), PROBLEM, federation, rounds=1, engine=engine)
    assert engine._home() == ray.get_runtime_context().get_node_id()
    assert RayEngine(folder=str(tmp_path))._home() is None


# What a worker has, and what moves


def test_a_worker_holds_the_rows_of_its_clients_and_what_moves_is_messages(federation, engine):
    """Broadcasts, uploads, notes and sums of telemetry; of a row, neither in what is sent nor in what comes back."""
    ask, held, moved = RayEngine._ask, {}, {}

    def asking(self, method, questions, why):
        found = ask(self, method, questions, why)
        fetched = [ray.get(one) if isinstance(one, ray.ObjectRef) else one for q in questions.values() for one in q]
        moved.setdefault(method, []).append(ray.cloudpickle.dumps((fetched, found)))
        if method == "ready":
            for number, actor in self._running["actors"].items():
                rows = lambda worker: (dict(worker.shard.index), np.asarray(worker.shard.x), np.asarray(worker.shard.y))
                held[number] = ray.get(actor.__ray_call__.remote(rows))
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RayEngine, "_ask", asking)
        fp.run(SETTINGS["fedadmm"], PROBLEM, federation, rounds=3, participation=0.5, engine=engine)

    owned = [set(index) for index, _, _ in held.values()]
    assert owned[0] | owned[1] == set(range(6))
    assert not owned[0] & owned[1]
    for index, x, y in held.values():
        assert len(x) == sum(federation.sizes[client] for client in index)  # this dataset has no test rows
        for client, at in index.items():
            for mine, its in zip((x[at], y[at]), federation.client(client), strict=True):
                np.testing.assert_array_equal(mine, its)

    assert set(moved) == {"ready", "learn", "join", "step", "total"}
    messages = [one for several in moved.values() for one in several]
    cells = {cell.tobytes() for cell in np.asarray(federation.dataset.x)[::5].ravel()}
    assert len(cells) > 1000
    assert not [cell for cell in cells for one in messages if cell in one]
    model = 8 * 31
    assert max(map(len, moved["step"])) < 2 * 10 * model  # of the smallest client the rows alone are 40 · 240 bytes
    assert max(map(len, moved["total"])) < 2 * 10 * model


# A cluster without room


def test_more_workers_than_the_cluster_has_cpus_are_refused_at_the_start(federation):
    with pytest.raises(FedpactError, match=r"workers must be at most 2, the CPUs of the cluster that is up, got 4\."):
        fp.run(fp.FedAvg(), PROBLEM, federation, rounds=1, engine=RayEngine(workers=4))
    two = fp.data.breast_cancer().split(clients=2, seed=0)
    one = fp.run(fp.FedAvg(), PROBLEM, two, rounds=1)
    same(one, fp.run(fp.FedAvg(), PROBLEM, two, rounds=1, engine=RayEngine(workers=4)))  # two have a client


def somebody_else(cpus):
    """Who is on the same cluster, and takes these."""

    class Other:
        def ready(self):
            return True

    return ray.remote(num_cpus=cpus)(Other).remote()


def test_workers_that_others_leave_no_cpu_for_are_not_waited_for_without_end(federation, engine, monkeypatch):
    monkeypatch.setattr(ray_engine, "PLACED", 3.0)
    other = somebody_else(cpus=2)
    try:
        ray.get(other.ready.remote(), timeout=60)
        with pytest.raises(
            ClientError, match=r"start: every worker must be placed within 3 s, got no place for 0, 1\."
        ):
            fp.run(fp.FedAvg(), PROBLEM, federation, rounds=1, engine=engine)
    finally:
        ray.kill(other)


def test_nor_is_one_that_was_lost_and_has_no_place_any_more(federation, engine, monkeypatch):
    """The CPU of a worker that is killed goes to somebody who has waited for it."""
    step, others = RayEngine.step, []

    def killing(self, f, shared, data, clients, cohort, combine, where):
        if int(where[0]) == 1:
            monkeypatch.setattr(ray_engine, "PLACED", 3.0)
            others.append(somebody_else(cpus=1))
            ray.kill(self._running["actors"][1])
            ray.get(others[0].ready.remote(), timeout=60)
        return step(self, f, shared, data, clients, cohort, combine, where)

    monkeypatch.setattr(RayEngine, "step", killing)
    try:
        with pytest.raises(ClientError, match=r"round 1: every worker must be placed within 3 s, got no place for 1\."):
            fp.run(fp.FedAvg(), PROBLEM, federation, rounds=3, engine=engine)
    finally:
        ray.kill(others[0])


# Who can reach it


def test_the_cluster_of_these_tests_listens_on_loopback_alone(engine, federation):
    seen = []

    def looking(self, *arguments):
        seen.append(listening(family()))
        return step(self, *arguments)

    step = RayEngine.step
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RayEngine, "step", looking)
        fp.run(fp.FedAvg(), PROBLEM, federation, rounds=1, engine=engine)
    found = seen[0]
    assert sum(bool(one) for one in found.values()) >= 3
    assert set().union(*found.values()) <= LOOPBACK


ALONE = """
import os
import psutil
from fedpact.core.errors import FedpactError
from fedpact.engines import RayEngine
try:
    RayEngine(address="127.0.0.1:1")._cluster()
except FedpactError as error:
    print(error)
ray = RayEngine()._cluster()
ray.get(ray.remote(lambda: os.getpid()).remote())
mine = [psutil.Process(), *psutil.Process().children(recursive=True)]
open_ = {one.laddr.ip for p in mine for one in p.net_connections() if one.status == "LISTEN"}
print(len(mine), sorted(open_), os.environ.get("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"))
ray.shutdown()
"""


def test_a_cluster_of_its_own_listens_on_loopback_alone_and_an_address_must_answer():
    pytest.importorskip("psutil")
    env = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    done = subprocess.run([sys.executable, "-c", ALONE], capture_output=True, text=True, timeout=120, env=env)
    refused, found = done.stdout.splitlines()[-2:]
    assert refused.startswith("address must be that of a Ray cluster which answers, got '127.0.0.1:1': "), done.stderr
    count, _, rest = found.partition(" ")
    assert int(count) > 4
    assert rest in ("['127.0.0.1', '::ffff:127.0.0.1'] None", "['127.0.0.1'] None")


# Which cluster it is


def test_the_address_of_the_cluster_that_is_up_goes_on(federation):
    up = ray.get_runtime_context().gcs_address
    engine = RayEngine(workers=2, address=up)
    one = fp.run(fp.FedAvg(), PROBLEM, federation, rounds=1)
    same(one, fp.run(fp.FedAvg(), PROBLEM, federation, rounds=1, engine=engine))
    for address in (f"localhost:{up.rpartition(':')[2]}", f"[::1]:{up.rpartition(':')[2]}", "auto"):
        assert RayEngine(address=address)._cluster() is ray


def test_and_another_is_refused_before_anything_is_computed(federation, monkeypatch):
    up = ray.get_runtime_context().gcs_address
    port = up.rpartition(":")[2]
    for address in ("127.0.0.1:1", f"203.0.113.7:{port}", f"nowhere.invalid:{port}", "ray://127.0.0.1:10001", "local"):
        with pytest.raises(FedpactError) as refused:
            fp.run(fp.FedAvg(), PROBLEM, federation, rounds=1, engine=RayEngine(address=address))
        told = f"address must be that of the cluster which this process is on, {up!r}, got {address!r}. Leave it out"
        assert str(refused.value).startswith(told)
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")  # which Ray means by "auto"
    with pytest.raises(FedpactError, match=r"got '127\.0\.0\.1:1'"):
        RayEngine(address="auto")._cluster()


SECOND = """
import sys
from fedpact.core.errors import FedpactError
from fedpact.engines import RayEngine
from fedpact.engines.ray import _loopback

def told(address):
    try:
        return RayEngine(address=address)._cluster().get_runtime_context().gcs_address
    except FedpactError as error:
        return str(error)

first, ray = sys.argv[1], RayEngine()._cluster()
own = ray.get_runtime_context().gcs_address
lines = [told(own) == own, told(first)]
ray.shutdown()
with _loopback():
    lines += [told(first), told(first), told(own)]
print(*lines, sep="\\n")
"""


def test_two_clusters_that_are_up_are_told_apart():
    """A process with a cluster of its own is not on this one; once it has left its own it is, and on no other."""
    up = ray.get_runtime_context().gcs_address
    env = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    done = subprocess.run([sys.executable, "-c", SECOND, up], capture_output=True, text=True, timeout=180, env=env)
    assert done.returncode == 0, done.stderr
    own, refused, reached, again, gone = done.stdout.splitlines()[-5:]
    assert own == "True"
    assert refused.startswith("address must be that of the cluster which this process is on, '127.0.0.1:")
    assert f", got '{up}'. Leave it out to run there, or leave that cluster first with ray.shutdown()." in refused
    assert (reached, again) == (up, up)
    assert gone.startswith(f"address must be that of the cluster which this process is on, '{up}', got ")
