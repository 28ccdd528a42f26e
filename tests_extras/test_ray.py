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

import fedpact as fp
from fedpact.core.errors import FedpactError
from fedpact.engines import RayEngine

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


@pytest.mark.parametrize("name", SETTINGS)
def test_it_is_the_local_engine_s_run(name, federation, engine):
    options = {"rounds": 5, "participation": 0.5, "seed": 3}
    same(
        fp.run(SETTINGS[name], PROBLEM, federation, **options),
        fp.run(SETTINGS[name], PROBLEM, federation, engine=engine, **options),
    )


def test_single_precision(federation, engine):
    options = {"rounds": 5, "participation": 0.5, "precision": "single"}
    one = fp.run(SETTINGS["fedadmm"], PROBLEM, federation, **options)
    same(one, fp.run(SETTINGS["fedadmm"], PROBLEM, federation, engine=engine, **options), 1e-5)


def test_features_split_among_parties(engine):
    federation = fp.data.breast_cancer().split_features(clients=3)
    problem, settings = fp.Constrained(fp.Logistic(l2=0)), fp.VerticalSSCA(batch=50)
    one = fp.run(settings, problem, federation, rounds=5)
    same(one, fp.run(settings, problem, federation, rounds=5, engine=engine))


def test_a_private_run(federation, engine):
    settings, private = fp.FedAvg(epochs=1, step=0.5, batch=20), fp.Private(clip=1.0, noise=2.0)
    one = fp.run(settings, PROBLEM, federation, rounds=4, privacy=private)
    same(one, fp.run(settings, PROBLEM, federation, rounds=4, privacy=private, engine=engine))


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


#: How many random moments a worker is killed at; `make drills-network` takes more.
MOMENTS = int(os.environ.get("FEDPACT_MOMENTS", "2"))


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
