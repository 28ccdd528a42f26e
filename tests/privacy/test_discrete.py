"""Exact discrete noise: its distribution against the mass function, and a slow literal version beside it."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from scipy.stats import chisquare, norm

from fedpact.privacy.discrete import STEPS_MOST, discrete_gaussian, discrete_laplace
from fedpact.privacy.mechanisms import Secure, Simulated

DRAWS = {"gaussian": discrete_gaussian, "laplace": discrete_laplace}


def mass(kind: str, steps: float, values: np.ndarray) -> np.ndarray:
    """P(x), normalised by a sum over all integers that matter."""

    def weight(x):
        return np.exp(-(x**2) / (2 * steps**2)) if kind == "gaussian" else np.exp(-np.abs(x) / steps)

    return weight(values) / weight(np.arange(-int(60 * steps) - 60, int(60 * steps) + 61)).sum()


def fits(kind: str, steps: int, draws: np.ndarray) -> float:
    """The p-value of a chi-square test over cells of at least 20 expected draws; the tails are one cell each."""
    reach = 1
    while len(draws) * mass(kind, steps, np.asarray([reach + 1.0]))[0] >= 20:
        reach += 1
    values = np.arange(-reach, reach + 1.0)
    expected = mass(kind, steps, values)
    tail = (1 - expected.sum()) / 2
    counts = [np.sum(draws < -reach), *(np.sum(draws == x) for x in values), np.sum(draws > reach)]
    return chisquare(counts, len(draws) * np.concatenate([[tail], expected, [tail]])).pvalue


@pytest.mark.parametrize("kind", DRAWS)
@pytest.mark.parametrize("steps", [1, 2, 7, 40])
def test_the_distribution_is_exact(kind, steps):
    draws = DRAWS[kind](steps, 200_000, Simulated(np.random.default_rng(steps)))
    assert fits(kind, steps, draws) > 1e-3
    other = "laplace" if kind == "gaussian" else "gaussian"
    assert fits(other, steps, draws) < 1e-9  # the test can tell
    if steps > 2:
        assert fits(kind, steps, draws + 1 + steps // 10) < 1e-9
        scaled = DRAWS[kind](round(1.15 * steps), 200_000, Simulated(np.random.default_rng(steps)))
        assert fits(kind, steps, scaled) < 1e-9


@pytest.mark.parametrize("kind", DRAWS)
def test_the_secure_source_gives_the_same_distribution(kind):
    assert fits(kind, 3, DRAWS[kind](3, 100_000, Secure())) > 1e-6


@pytest.mark.parametrize("steps", [5, 1000, STEPS_MOST])
def test_variance_and_tails(steps):
    size = 400_000
    gauss = discrete_gaussian(steps, size, Simulated(np.random.default_rng(1))) / steps
    assert np.mean(gauss**2) == pytest.approx(1.0, abs=5 * np.sqrt(2 / size))
    assert abs(np.mean(gauss)) < 5 / np.sqrt(size)
    for reach in (2, 3, 4):
        at = (np.ceil(reach * steps) - 0.5) / steps  # half a step below: the lattice's own tail, nearly
        expected = 2 * norm.sf(at) if steps > 5 else 2 * mass("gaussian", 5, np.arange(5 * reach, 300)).sum()
        assert np.mean(np.abs(gauss) >= reach) == pytest.approx(expected, abs=5 * np.sqrt(expected / size))
    lap = discrete_laplace(steps, size, Simulated(np.random.default_rng(2)))
    r = np.exp(-1 / steps)
    assert np.mean((lap / steps) ** 2) == pytest.approx(2 * r / (1 - r) ** 2 / steps**2, rel=5 * np.sqrt(5 / size))
    for reach in (3, 8):
        expected = 2 * r ** (reach * steps) / (1 + r)
        assert np.mean(np.abs(lap) >= reach * steps) == pytest.approx(expected, abs=5 * np.sqrt(expected / size))


# The literal version: one draw at a time, the paper's three algorithms word for word, rational numbers only.


def uniform_below(n, rng):
    return int(rng.integers(0, n))


def bernoulli(p: Fraction, rng) -> bool:
    return uniform_below(p.denominator, rng) < p.numerator


def bernoulli_exp(gamma: Fraction, rng) -> bool:
    while gamma > 1:
        if not bernoulli_exp(Fraction(1), rng):
            return False
        gamma -= 1
    k = 1
    while bernoulli(gamma / k, rng):
        k += 1
    return k % 2 == 1


def literal_laplace(t: int, rng) -> int:
    while True:
        u = uniform_below(t, rng)
        if not bernoulli_exp(Fraction(u, t), rng):
            continue
        v = 0
        while bernoulli_exp(Fraction(1), rng):
            v += 1
        sign, x = bernoulli(Fraction(1, 2), rng), u + t * v
        if sign and x == 0:
            continue
        return -x if sign else x


def literal_gaussian(s: int, rng) -> int:
    while True:
        y = literal_laplace(s, rng)
        if bernoulli_exp(Fraction((abs(y) - s) ** 2, 2 * s * s), rng):
            return y


@pytest.mark.parametrize("kind", DRAWS)
def test_the_literal_version_has_the_same_distribution(kind):
    rng = np.random.default_rng(3)
    slow = np.asarray([(literal_gaussian if kind == "gaussian" else literal_laplace)(3, rng) for _ in range(10_000)])
    assert fits(kind, 3, slow) > 1e-3


def test_a_generator_repeats_its_draws_and_the_secure_source_does_not():
    one, two = (discrete_gaussian(50, 100, Simulated(np.random.default_rng(0))) for _ in range(2))
    assert np.array_equal(one, two)
    assert not np.array_equal(discrete_gaussian(50, 100, Secure()), discrete_gaussian(50, 100, Secure()))


def test_no_draws_is_no_trouble():
    assert discrete_gaussian(5, 0, Secure()).shape == (0,)


def test_draws_of_one_call_are_independent():
    draws = discrete_gaussian(20, 200_000, Simulated(np.random.default_rng(5))).astype(float)
    for lag in (1, 2, 3):
        assert abs(np.corrcoef(draws[:-lag], draws[lag:])[0, 1]) < 5 / np.sqrt(draws.size)
