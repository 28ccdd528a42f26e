"""Participation schemes: sizes, frequencies, coverage, and dependence on (seed, round) alone."""

from __future__ import annotations

import fractions
import math

import numpy as np
import pytest

from fedpact.core.errors import FedpactError, InvalidArgument
from fedpact.core.participation import (
    Covering,
    Everyone,
    Fraction,
    Independent,
    Participation,
    Poisson,
    Schedule,
    as_participation,
)

OWN = Independent([0.1, 0.9, 0.5, 1.0, 0.02, 0.3, 0.3, 0.7, 0.25, 0.6])
SCHEMES = [Everyone(), Fraction(0.3), Poisson(0.4), OWN, Covering(0.3, 4), Schedule([[1, 0], [], [9, 3, 4]] * 20)]


def drawn(scheme, seed, rounds, clients=10):
    return [scheme.select(seed, t, clients).tolist() for t in range(rounds)]


@pytest.mark.parametrize("scheme", SCHEMES, ids=lambda s: type(s).__name__)
def test_a_round_is_a_sorted_set_of_clients_within_the_capacity(scheme):
    for seed in range(5):
        for chosen in drawn(scheme, seed, 60):
            assert chosen == sorted(set(chosen))
            assert all(0 <= i < 10 for i in chosen)
            assert len(chosen) <= scheme.capacity(10)


@pytest.mark.parametrize("scheme", SCHEMES, ids=lambda s: type(s).__name__)
def test_a_round_depends_on_seed_and_round_only(scheme):
    forward = drawn(scheme, 3, 20)
    np.random.default_rng(0).random(7)
    backward = [scheme.select(3, t, 10).tolist() for t in reversed(range(20))][::-1]
    assert forward == backward == drawn(scheme, 3, 20)


@pytest.mark.parametrize("scheme", [Fraction(0.3), Poisson(0.4), OWN, Covering(0.3, 4)], ids=lambda s: type(s).__name__)
def test_other_seeds_and_other_rounds_give_other_draws(scheme):
    runs = {tuple(map(tuple, drawn(scheme, seed, 20))) for seed in range(30)}
    assert len(runs) == 30
    assert len({tuple(chosen) for chosen in drawn(scheme, 0, 40)}) > 20  # of 120 subsets of three of ten


@pytest.mark.parametrize(
    ("rho", "clients"),
    [(0.1, 30), (0.5, 50), (0.5, 5), (0.29, 100), (0.07, 100), (0.1, 1), (1.0, 7), (0.01, 3), (0.7, 10), (0.3, 10)],
)
def test_the_size_of_a_round_is_the_ceiling_of_what_is_written(rho, clients):
    """ρ is the decimal a user wrote: 0.1 · 30 is 3, and 0.07 · 100 is 7 though doubles say 7.000000000000001."""
    size = math.ceil(fractions.Fraction(str(rho)) * clients)
    assert Fraction(rho).capacity(clients) == size
    assert len(Fraction(rho).select(0, 0, clients)) == size
    assert Covering(rho, 1000).capacity(clients) == size


def test_the_smallest_share_is_still_one_client():
    """⌈ρm⌉ ≥ 1 for every ρ > 0: a scheme that never selects anybody is no scheme."""
    assert Fraction(1e-12).capacity(10) == 1
    assert len(Fraction(1e-12).select(0, 0, 10)) == 1
    assert len(Covering(1e-12, 10).select(0, 0, 10)) == 1


def counts(scheme, rounds, clients=10, seed=1):
    chosen = np.zeros((rounds, clients))
    for t in range(rounds):
        chosen[t, scheme.select(seed, t, clients)] = 1
    return chosen


def test_fractions_are_uniform_subsets():
    """Each client with frequency k/m and each pair with k(k−1)/(m(m−1)), within five deviations."""
    chosen = counts(Fraction(0.3), 4000)
    assert np.all(chosen.sum(axis=1) == 3)
    np.testing.assert_allclose(chosen.mean(axis=0), 0.3, atol=5 * math.sqrt(0.3 * 0.7 / 4000))
    pairs = (chosen.T @ chosen / 4000)[np.triu_indices(10, 1)]
    p = 3 * 2 / (10 * 9)
    np.testing.assert_allclose(pairs, p, atol=5 * math.sqrt(p * (1 - p) / 4000))


def test_poisson_clients_are_independent_and_rounds_may_be_empty():
    chosen = counts(Poisson(0.2), 4000, clients=6)
    np.testing.assert_allclose(chosen.mean(axis=0), 0.2, atol=5 * math.sqrt(0.2 * 0.8 / 4000))
    pairs = (chosen.T @ chosen / 4000)[np.triu_indices(6, 1)]
    np.testing.assert_allclose(pairs, 0.04, atol=5 * math.sqrt(0.04 * 0.96 / 4000))
    empty = np.mean(chosen.sum(axis=1) == 0)
    assert empty == pytest.approx(0.8**6, abs=5 * math.sqrt(0.8**6 * (1 - 0.8**6) / 4000))


def test_poisson_keeps_room_for_eight_deviations_and_not_for_everyone():
    """m=1000, ρ=0.05: mean 50, deviation √47.5 = 6.89, 50 + 55.1 + 4 → 110. Few clients have room for all."""
    assert Poisson(0.05).capacity(1000) == 110
    assert Poisson(0.2).capacity(6) == 6
    assert Poisson(1.0).capacity(9) == 9
    sizes = [len(Poisson(0.05).select(seed, t, 1000)) for seed in range(20) for t in range(50)]
    assert 65 < max(sizes) < 90


@pytest.mark.parametrize("scheme", SCHEMES, ids=lambda s: type(s).__name__)
def test_every_scheme_is_a_participation(scheme):
    assert isinstance(scheme, Participation)
    scheme.check(0, 10, 10)
    assert scheme.describe().startswith(f"{type(scheme).__name__}(")


def test_schemes_that_differ_are_described_differently():
    """The text enters the digest that a checkpoint is refused by."""
    schemes = [Everyone(), Fraction(0.3), Fraction(0.4), Poisson(0.3), Covering(0.3, 4), Covering(0.3, 5)]
    schedules = [Schedule([[0], [1]]), Schedule([[0, 1]]), Schedule([[1], [0]])]
    texts = [scheme.describe() for scheme in (*schemes, *schedules)]
    assert len(set(texts)) == len(texts)
    assert Schedule([[0], [1]]).describe() == Schedule(((np.int64(0),), (1,))).describe()


def test_a_run_that_a_scheme_cannot_serve_is_refused():
    with pytest.raises(InvalidArgument, match=r"^rounds must be at most 2, the schedule's length, got 3\. Run fewer"):
        Schedule([[0], [1]]).check(0, 3, 5)
    with pytest.raises(InvalidArgument, match=r"^schedule of round 1 must be below 5, got \[5\]\. Clients are counted"):
        Schedule([[0], [5]]).check(0, 2, 5)
    Schedule([[0], [5]]).check(0, 1, 5)  # as far as the run goes
    with pytest.raises(InvalidArgument, match=r"^covering \(s0\) must be at least 4 "):
        Covering(0.3, 3).check(0, 1, 10)


@pytest.mark.parametrize(
    ("rho", "s0", "clients"), [(0.3, 4, 10), (0.5, 2, 7), (0.1, 10, 30), (0.34, 3, 9), (1.0, 1, 5), (0.2, 9, 13)]
)
def test_covering_reaches_everyone_in_every_group_of_s0_rounds(rho, s0, clients):
    """(29): S^{τ+1} ∪ … ∪ S^{τ+s0} = [m] for τ = 0, s0, 2s0, …, with ⌈ρm⌉ clients in every round."""
    scheme = Covering(rho, s0)
    size = math.ceil(fractions.Fraction(str(rho)) * clients)
    for seed in range(20):
        rounds = drawn(scheme, seed, 5 * s0, clients)
        assert all(len(chosen) == size for chosen in rounds)
        for group in range(5):
            assert set().union(*rounds[group * s0 : (group + 1) * s0]) == set(range(clients))


def test_covering_is_random_beyond_its_duty():
    chosen = counts(Covering(0.5, 4), 4000)
    np.testing.assert_allclose(chosen.mean(axis=0), 0.5, atol=5 * math.sqrt(0.25 / 4000))
    together = {tuple(np.flatnonzero(row)) for row in chosen}
    assert len(together) > 200  # of 252 subsets of five of ten


def test_rates_are_as_given():
    assert Everyone().rate(7) == 1
    assert Fraction(0.3).rate(7) == Poisson(0.3).rate(7) == Covering(0.3, 4).rate(7) == 0.3
    assert Schedule([[0, 1, 2], [1]]).rate(6) == 0.5
    assert Schedule([[], [1]]).rate(4) == 0.25
    assert Schedule([[0, 1, 2], [1]]).capacity(6) == 3
    assert Everyone().capacity(9) == 9


def test_a_schedule_is_followed_and_ends():
    schedule = Schedule([[2, 0], [], [1]])
    assert drawn(schedule, 5, 3, clients=3) == [[0, 2], [], [1]]
    with pytest.raises(InvalidArgument, match=r"^rounds must be at most 3, the schedule's length, got 4\. Run fewer"):
        schedule.select(0, 3, 3)
    with pytest.raises(InvalidArgument, match=r"^schedule of round 0 must be below 2, got \[0, 2\]\. Clients are"):
        schedule.select(0, 0, 2)


def test_what_users_write_becomes_a_scheme():
    assert as_participation(1) == as_participation(1.0) == Everyone()
    assert as_participation(0.25) == Fraction(0.25)
    schedule = as_participation([[0], [2, 1]])
    assert isinstance(schedule, Schedule)
    assert drawn(schedule, 0, 2) == [[0], [1, 2]]
    scheme = Poisson(0.5)
    assert as_participation(scheme) is scheme


@pytest.mark.parametrize("make", [Fraction, Poisson, lambda rho: Covering(rho, 3), as_participation])
@pytest.mark.parametrize("rho", [0, -0.5, 1.5, math.nan, math.inf])
def test_rates_outside_their_range_are_refused(make, rho):
    with pytest.raises(
        InvalidArgument, match=r"^participation \(ρ\) must be in \(0, 1\], got [^ ]+\. It is the share .+\.$"
    ):
        make(rho)


@pytest.mark.parametrize("value", [True, "half", None, {1: 2}, Poisson])
def test_what_is_no_scheme_is_refused(value):
    with pytest.raises(
        FedpactError, match=r"^participation must be a number in \(0, 1\], a scheme or a list of rounds"
    ):
        as_participation(value)


def test_a_cover_that_cannot_cover_says_what_would():
    with pytest.raises(InvalidArgument, match=r"^covering \(s0\) must be at least 4 .+ got 3\. Raise s0 or ρ\.$"):
        Covering(0.3, 3).select(0, 0, 10)
    with pytest.raises(
        InvalidArgument, match=r"^covering \(s0\) must be an integer of at least 1, got 0\. In every s0 "
    ):
        Covering(0.3, 0)


@pytest.mark.parametrize("rounds", [[[0, 0]], [[-1]], [[0.5]], [[[0]]], [["a"]]])
def test_bad_schedules_name_their_round(rounds):
    with pytest.raises(InvalidArgument, match=r"^schedule of round 1 must be "):
        Schedule([[0], *rounds])


# Probabilities of one's own


def test_each_client_comes_with_its_own_probability_and_on_its_own():
    """4,000 rounds: every frequency within five deviations of p_i, and no two clients come together beyond chance."""
    rounds = 4000
    came = np.zeros((rounds, 10))
    for t in range(rounds):
        came[t, OWN.select(3, t, 10)] = 1
    p = np.array(OWN.probabilities)
    assert np.all(np.abs(came.mean(axis=0) - p) <= 5 * np.sqrt(p * (1 - p) / rounds) + 1e-12)
    some = [i for i in range(10) if p[i] < 1]
    together = np.corrcoef(came[:, some].T) - np.eye(len(some))
    assert np.abs(together).max() <= 5 / np.sqrt(rounds)


def test_independent_has_the_mean_as_its_rate_and_room_for_its_rounds():
    assert OWN.rate(10) == pytest.approx(0.467)
    assert OWN.capacity(10) == 10
    many = Independent([0.05] * 1000)
    assert 50 < many.capacity(1000) < 150
    assert max(len(many.select(0, t, 1000)) for t in range(200)) <= many.capacity(1000)
    assert [len(Independent([1.0, 1.0]).select(0, t, 2)) for t in range(5)] == [2] * 5


def test_independent_lists_are_described_by_a_digest():
    same = Independent(np.array(OWN.probabilities))
    assert same == OWN
    assert same.describe() == OWN.describe()
    assert Independent([0.1] * 10).describe() != OWN.describe()
    assert as_participation(OWN) is OWN


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ([], r"probabilities \(p_i\) must be a list of numbers, one per client, got \[\]\. Write \[0\.1, 0\.5, 1\.0\]"),
        ("0.5", r"probabilities \(p_i\) must be a list of numbers"),
        (0.5, r"probabilities \(p_i\) must be a list of numbers"),
        ([0.5, 0.0], r"probability of client 1 \(p_i\) must be in \(0, 1\], got 0\.0\."),
        ([1.5], r"probability of client 0 \(p_i\) must be in \(0, 1\], got 1\.5\."),
        ([0.5, None], r"probability of client 1 \(p_i\) must be in \(0, 1\], got None\."),
    ],
    ids=str,
)
def test_bad_probabilities(given, said):
    with pytest.raises(InvalidArgument, match=f"^{said}"):
        Independent(given)


def test_there_is_one_probability_per_client():
    OWN.check(0, 5, 10)
    with pytest.raises(InvalidArgument, match=r"^probabilities \(p_i\) must be one per client \(12\), got 10\."):
        OWN.check(0, 5, 12)
