"""The audit's statistics, and what it says of every private mode and of runs that are broken on purpose."""

import dataclasses
import math

import numpy as np
import pytest

import fedpact as fp
from fedpact.audit import FAULTS, Case, audit, case_of, cases, lower_bound, worlds
from fedpact.core.errors import FedpactError
from fedpact.privacy import Event, epsilon
from fedpact.privacy.accounting import gaussian_delta, gaussian_epsilon

MODES, BROKEN, PAPERS = ([case for _, case in cases([kind])] for kind in ("modes", "faults", "papers"))
name_of = lambda case: case.name


def gaussians(mu, trials, seed):
    rng = np.random.default_rng(seed)
    return rng.normal(0, 1, trials), rng.normal(mu, 1, trials)


@pytest.mark.parametrize("mu", [0.0, 0.3, 1.0, 3.0])
def test_the_bound_is_below_the_truth_as_often_as_it_says(mu):
    """Two normal distributions mu apart have a known ε; at 80 % confidence at most a fifth of bounds may exceed it."""
    truth = gaussian_epsilon(mu, 1e-5) if mu else 0.0
    found = [lower_bound(*gaussians(mu, 2000, seed), 1e-5, 0.8) for seed in range(60)]
    assert np.mean(np.asarray(found) > truth) <= 0.2
    assert mu == 0 or max(found) > 0.3 * truth


def test_the_bound_grows_with_the_trials_and_falls_with_the_confidence():
    sizes = [lower_bound(*gaussians(1.0, n, 0), 1e-5, 0.95) for n in (1000, 10_000, 100_000)]
    assert sizes == sorted(sizes)
    assert lower_bound(*gaussians(1.0, 10_000, 0), 1e-5, 0.999) < sizes[1]


def test_worlds_that_never_overlap_prove_what_the_trials_can():
    found = lower_bound(np.zeros(10_000), np.ones(10_000), 1e-5, 0.95)
    assert math.log(5000) - 1.6 < found < math.log(5000)


def test_scores_at_one_place_prove_nothing():
    assert lower_bound(np.zeros(1000), np.zeros(1000), 1e-5, 0.95) == 0


def test_the_worlds_are_neighbours():
    for case in (MODES[0], MODES[5], MODES[-1]):
        (x, y), (other_x, other_y) = (federation.client(0) for federation in worlds(case))
        differ = np.flatnonzero(np.any(x != other_x, axis=1) | (y != other_y))
        whole = case.privacy.way == "client"
        assert len(differ) == (len(y) if whole else 1), case.name


def test_what_is_claimed_is_what_the_accountant_says():
    case = Case("one", fp.FedAvg(epochs=1, step=0.1), fp.Private(clip=1.0, noise=3.0), 2)
    found = audit(case, 1000)
    assert found.claimed == epsilon({Event("gaussian", 3.0, relation="replace-one"): 2}, 1e-5).epsilon
    mu = math.sqrt(2) * 2 / 3
    assert abs(gaussian_delta(mu, found.claimed) - 1e-5) < 1e-9


@pytest.mark.parametrize("case", [MODES[0]], ids=name_of)
def test_a_private_mode_stands(case):
    found = audit(case, 20_000)
    assert 0.3 * found.claimed < found.bound < found.claimed


@pytest.mark.parametrize("case", PAPERS[:1], ids=name_of)
def test_what_is_broken_is_found(case):
    assert audit(case, 20_000).broken


@pytest.mark.drill
@pytest.mark.parametrize("case", MODES, ids=name_of)
def test_every_private_mode_stands(case):
    """At 200,000 runs in each world, with 95 % confidence; one Gaussian release reaches half of its claim."""
    found = audit(case)
    assert not found.broken
    assert found.bound > (0.5 if case is MODES[0] else 0.25) * found.claimed


@pytest.mark.drill
@pytest.mark.parametrize("case", [*BROKEN, *PAPERS], ids=name_of)
def test_every_fault_and_paper_s_noise_is_found(case):
    assert audit(case).broken


@pytest.mark.drill
@pytest.mark.parametrize("case", [c for c in BROKEN if c.fault == "remembered"], ids=name_of)
def test_the_same_runs_without_the_fault_stand(case):
    """It is the fault that is found, not the case."""
    assert not audit(dataclasses.replace(case, fault="")).broken


def test_every_fault_has_a_case():
    assert {case.fault for case in BROKEN} == set(FAULTS) - {""}


def test_an_experiment_s_own_mode():
    federation = fp.data.breast_cancer().split(clients=4, seed=0)
    private = fp.Private(clip=0.5, epsilon=2.0)
    experiment = fp.Experiment(fp.FedAvg(epochs=1, step=0.1), fp.Logistic(), federation, rounds=3, privacy=private)
    case = case_of(experiment)
    assert (case.rounds, case.rows, case.privacy.clip) == (3, min(federation.sizes), 0.5)
    assert abs(audit(case, 1000).claimed - 2.0) < 1e-3


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"trials": 10}, r"trials must be at least 1000, got 10\."),
        ({"trials": 0}, r"trials must be an integer of at least 1"),
        ({"confidence": 1.0}, r"confidence must be from 0\.5 to below 1, got 1\.0\."),
    ],
)
def test_bad_input(options, words):
    with pytest.raises(FedpactError, match=words):
        audit(MODES[0], **options)


def test_a_case_without_noise_is_refused():
    with pytest.raises(FedpactError, match="case must be one with noise"):
        Case("none", fp.FedAvg(epochs=1, step=0.1))
    experiment = fp.Experiment(fp.FedEPM(), fp.Logistic(), fp.data.breast_cancer().split(clients=4, seed=0))
    with pytest.raises(FedpactError, match=r"experiment must be private .* \[privacy\]"):
        case_of(experiment)
