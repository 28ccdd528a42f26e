"""Any two of (ε, δ), noise and rounds give the third, on the safe side and close to the edge."""

from __future__ import annotations

import dataclasses

import pytest

from fedpact.core.errors import InvalidArgument
from fedpact.privacy.calibration import ROUNDS_MOST, TOLERANCE, cost, noise_for, rounds_for
from fedpact.privacy.events import Event

DELTA = 1e-5
POISSON = {"mechanism": "gaussian", "sampling": "poisson"}


@pytest.mark.parametrize(
    ("epsilon", "rounds", "kind", "noise"),
    [
        (8, 100, {"mechanism": "gaussian"}, 6.002),
        (2, 300, POISSON | {"rate": 0.05}, 1.946),
        (1, 300, POISSON | {"rate": 0.01}, 1.028),
        (24.3816, 100, {"mechanism": "gaussian", "relation": "replace-one"}, 5.0),
        (4.2203, 100, {"mechanism": "laplace"}, 10.0),
    ],
)
def test_noise_for_a_reference_value(epsilon, rounds, kind, noise):
    found = noise_for(epsilon, DELTA, rounds, **kind)
    assert found == pytest.approx(noise, rel=0.002)
    event = Event(noise=found, **kind)
    assert cost(event, rounds, DELTA).epsilon <= epsilon
    less = dataclasses.replace(event, noise=found * (1 - 20 * TOLERANCE))
    assert cost(less, rounds, DELTA).epsilon > epsilon


@pytest.mark.parametrize(
    ("epsilon", "event"),
    [
        (8.0, Event("gaussian", 6.0)),
        (2.0, Event("gaussian", 1.9, "poisson", 0.05)),
        (1.0, Event("laplace", 10)),
        (3.0, Event("gaussian", 2, "fixed", 0.01, "replace-one")),
        (3.0, Event("gaussian", 1, "truncated", 0.05, records=1000, cap=80)),
    ],
)
def test_one_round_more_would_not_fit(epsilon, event):
    rounds = rounds_for(epsilon, DELTA, event)
    assert cost(event, rounds, DELTA).epsilon <= epsilon < cost(event, rounds + 1, DELTA).epsilon


def test_noise_and_rounds_undo_each_other():
    noise = noise_for(8, DELTA, 100, mechanism="gaussian")
    assert rounds_for(8, DELTA, Event("gaussian", noise)) == 100


def test_the_search_for_rounds_ends():
    assert rounds_for(1.0, DELTA, Event("gaussian", 1e5, "poisson", 1e-6)) == ROUNDS_MOST


def test_what_cannot_be_reached_is_said():
    with pytest.raises(InvalidArgument, match=r"noise \(z\) must be large enough for one round, got 0.5: one costs"):
        rounds_for(0.1, DELTA, Event("gaussian", 0.5))
    with pytest.raises(InvalidArgument, match=r"epsilon \(ε\) must be reachable.*on a lattice, for more steps"):
        noise_for(0.1, DELTA, 100, mechanism="discrete_gaussian", steps=2, dimension=10_000)
    with pytest.raises(InvalidArgument, match=r"epsilon \(ε\) must be below what noise of 0.001 C costs"):
        noise_for(10_000, 0.5, 1, mechanism="laplace")


@pytest.mark.parametrize("epsilon", [0.0, -1.0, float("inf"), 1e9, "8"])
def test_an_epsilon_out_of_range_is_refused(epsilon):
    with pytest.raises(InvalidArgument, match=r"epsilon \(ε\) must be a number from 0.001 to 10000"):
        noise_for(epsilon, DELTA, 10, mechanism="gaussian")


@pytest.mark.parametrize("rounds", [0, -3, 2.5, True])
def test_rounds_out_of_range_are_refused(rounds):
    with pytest.raises(InvalidArgument, match=r"rounds \(T\)"):
        noise_for(1, DELTA, rounds, mechanism="gaussian")
