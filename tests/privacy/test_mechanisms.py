"""Noise by name, its sources, and what rounding to a lattice does to the sensitivity."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.stats import chisquare, kstest

from fedpact.core.errors import InvalidArgument, UnknownName
from fedpact.privacy.events import ADVERSARIES, SAMPLINGS, UNITS, Event
from fedpact.privacy.mechanisms import MECHANISMS, PLACES, Secure, Simulated, lattice_sensitivity, noise, release


def simulated(seed=0):
    return Simulated(np.random.default_rng(seed))


@pytest.mark.parametrize("source", [simulated(), Secure()], ids=["simulated", "secure"])
@pytest.mark.parametrize(("mechanism", "law"), [("gaussian", "norm"), ("laplace", "laplace")])
def test_floating_noise_has_its_law_and_scale(mechanism, law, source):
    draws = noise(mechanism, 2.5, 100_000, source)
    assert kstest(draws, law, args=(0, 2.5)).pvalue > 1e-6
    assert kstest(draws, law, args=(0, 2.8)).pvalue < 1e-6


@pytest.mark.parametrize("bound", [1, 2, 3, 10, 2**32 + 1, 2**61 + 7])
def test_the_secure_source_is_uniform_below_its_bound(bound):
    draws = Secure().below(bound, 20_000)
    assert draws.min() >= 0
    assert int(draws.max()) < bound
    cells = min(bound, 10)
    counts = np.bincount((draws.astype(object) * cells // bound).astype(int), minlength=cells)
    if cells > 1:
        assert chisquare(counts).pvalue > 1e-6


@pytest.mark.parametrize("norm", [1, 2])
def test_no_pair_of_neighbours_is_further_apart_on_the_lattice_than_stated(norm):
    rng = np.random.default_rng(norm)
    nearest = 0.0
    for _ in range(2000):
        d = int(rng.integers(1, 40))
        step = float(10 ** rng.uniform(-3, 0.5))
        x = rng.normal(size=d) * 10 ** rng.uniform(-2, 6)
        move = rng.normal(size=d) * (rng.random(d) < rng.uniform(0.1, 1))
        if rng.random() < 0.5:  # all coordinates just across a boundary of cells
            x = (np.floor(x / step) + 0.5 - 1e-9) * step
            move = np.full(d, 2e-9 * step)
        moved = float(np.linalg.norm(move, norm))
        cells = [np.rint(v / step) for v in (x, x + move)]
        apart = step * float(np.linalg.norm(cells[1] - cells[0], norm))
        bound = lattice_sensitivity(moved, step, d, norm)
        assert apart <= bound
        nearest = max(nearest, apart / bound)
    assert nearest > 0.99  # the bound is reached


def test_the_event_of_a_release_states_that_bound():
    scale, clip, steps, d = 3.0, 1.5, 64, 25
    event = Event("discrete_gaussian", scale / clip, steps=steps, dimension=d)
    assert event.sensitivity * clip == pytest.approx(lattice_sensitivity(clip, scale / steps, d, 2))


@pytest.mark.parametrize("mechanism", ["discrete_gaussian", "discrete_laplace"])
def test_a_release_is_the_rounded_values_plus_noise_of_its_scale(mechanism):
    values = np.random.default_rng(1).normal(size=(300, 200)) * 5
    scale, steps = 2.0, 64
    out = release(mechanism, values, scale, steps, simulated())
    assert out.shape == values.shape
    cells = out / (scale / steps)
    assert np.array_equal(cells, np.rint(cells))
    variance = scale**2 * (1 if mechanism == "discrete_gaussian" else 2)
    assert np.var(out - values) == pytest.approx(variance, rel=0.03)
    assert abs(np.mean(out - values)) < 0.05
    assert not np.array_equal(out, release(mechanism, values, scale, steps, Secure()))


@pytest.mark.parametrize("bad", [np.nan, np.inf, 1e300])
def test_values_that_do_not_fit_the_lattice_are_refused(bad):
    with pytest.raises(InvalidArgument, match="values must be finite and below 2⁴⁰ lattice steps"):
        release("discrete_gaussian", np.asarray([0.0, bad]), 1.0, 16, simulated())


def test_bad_arguments():
    with pytest.raises(UnknownName, match="mechanism must be one of gaussian, laplace"):
        noise("discrete_gaussian", 1.0, 3, simulated())
    with pytest.raises(UnknownName, match="mechanism must be one of discrete_gaussian, discrete_laplace"):
        release("gaussian", np.zeros(2), 1.0, 4, simulated())
    with pytest.raises(InvalidArgument, match="scale must be a positive number, got 0"):
        noise("gaussian", 0, 3, simulated())
    with pytest.raises(InvalidArgument, match="steps must be an integer from 1 to 4194304, got 0"):
        release("discrete_laplace", np.zeros(2), 1.0, 0, simulated())


def test_names_have_sentences():
    assert set(PLACES) == {"central", "local", "distributed"}
    for table in (PLACES, SAMPLINGS, UNITS, ADVERSARIES):
        assert all(len(sentence) > 15 for sentence in table.values())
    assert {(kind.norm, kind.lattice) for kind in MECHANISMS.values()} == {(1, False), (1, True), (2, False), (2, True)}
