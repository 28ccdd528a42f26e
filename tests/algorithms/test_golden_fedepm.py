"""FedEPM against the trajectory recorded from the authors' own code: m = 50, k0 = 12, everyone, no noise, UCI Adult."""

from __future__ import annotations

import os
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from byhand import flat
from scipy.io import loadmat

import fedpact as fp
from fedpact.algorithms.fedepm import Hello
from fedpact.core.driver import drive
from fedpact.core.loop import Loop
from fedpact.core.participation import Everyone
from fedpact.core.stop import Target
from fedpact.core.vector import Vector
from fedpact.engines import LocalEngine

SHARED = Path(__file__).resolve().parents[3] / "shared"


@pytest.fixture(scope="module")
def recorded():
    path = Path(os.environ.get("FEDPACT_GOLDEN") or SHARED / "golden") / "fedepm_m50_k12.mat"
    if not path.is_file():
        pytest.skip(f"no recorded run at {path}: set FEDPACT_GOLDEN")
    return {name: value.squeeze() for name, value in loadmat(path).items() if not name.startswith("_")}


@pytest.fixture(scope="module")
def federation(recorded):
    folder = Path(os.environ.get("FEDPACT_DATA") or SHARED / "data")
    if not (folder / "adult" / "adult.data").is_file():
        pytest.skip(f"no Adult data in {folder}: set FEDPACT_DATA")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FEDPACT_DATA", str(folder))
        adult = fp.data.adult()
    sizes = recorded["di"].astype(int)
    rows = np.split(recorded["perm"].astype(int) - 1, np.cumsum(sizes)[:-1])
    return fp.data.Federation(adult, tuple(rows))


@pytest.fixture(scope="module")
def replay(recorded, federation):
    """The same run, its first messages replaced by the recorded ones (w_i⁰ = 0 all the same)."""
    problem, first = fp.Logistic(l2=1e-3), jnp.asarray(recorded["Z0"].T)
    algorithm = fp.FedEPM(k0=int(recorded["k0"])).build(problem, federation.clients, 1.0)

    def join(w0, batch, key):
        return algorithm.join(w0, batch, key)[0], Hello(Vector({"w": first[batch.client]}))

    never, rounds = Target("objective", -np.inf), int(recorded["cr"])
    loop = Loop(algorithm._replace(join=join), problem.gradient, LocalEngine(buckets=2), never, 1, False)
    (end,) = drive(loop, [federation], problem.init(14, np.float64), Everyone(), [0], rounds, np.float64)
    return end


def test_the_objective_of_every_round(recorded, replay):
    """obj[t] = Σ f_i at w = ENS(z) before the clients of round t step: row t of the history, times m."""
    ours = replay.history.column("objective")
    assert len(ours) == len(recorded["obj"]) == int(recorded["cr"]) + 1
    np.testing.assert_allclose(ours, recorded["obj"] / 50, rtol=0, atol=1e-12)


def test_the_anchors(replay):
    anchors = [0.692714, 0.654566, 0.569512, 0.560644, 0.550031, 0.547204, 0.544797, 0.544019, 0.543535]
    np.testing.assert_allclose(replay.history.column("objective")[: len(anchors)], anchors, atol=5e-7)


def test_the_model_at_the_end(recorded, replay):
    np.testing.assert_allclose(
        flat(replay.model), recorded["sol"], rtol=1e-9, atol=1e-11 * np.abs(recorded["sol"]).max()
    )


def test_the_optimum(federation):
    assert fp.optimum(fp.Logistic(l2=1e-3), federation).value == pytest.approx(0.54308842, abs=5e-9)
