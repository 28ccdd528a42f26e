"""Costs against reference values, against integrals that know nothing of the accountants, and against each other."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy.special import logsumexp
from scipy.stats import laplace, norm

from fedpact.core.errors import InvalidArgument, UnknownName
from fedpact.privacy.accounting import ORDERS, epsilon, gaussian_epsilon, rdp, rdp_epsilon, track
from fedpact.privacy.events import Event

DELTA = 1e-5


def poisson(noise, rate, relation="add-remove", mechanism="gaussian"):
    return Event(mechanism, noise, "poisson", rate, relation)


def by_rdp(counts, delta=DELTA):
    return rdp_epsilon(sum(count * rdp(event) for event, count in counts.items()), delta)


GRID = np.linspace(-40, 40, 400_001)


def hockey_stick(p, q, loss):
    """∫ max(p − e^ε q, 0): δ at ε = `loss`, by quadrature."""
    return np.trapezoid(np.maximum(p(GRID) - math.exp(loss) * q(GRID), 0.0), GRID)


@pytest.mark.parametrize(
    ("event", "rounds", "value", "method"),
    [
        (poisson(1, 0.01), 300, 1.068, "PLD"),
        (poisson(2, 0.05), 300, 1.929, "PLD"),
        (poisson(0.5, 0.01), 100, 6.48, "PLD"),
        (poisson(1, 0.05), 100, 3.50, "PLD"),
        (Event("gaussian", 5), 300, 20.125, "closed form"),
        (Event("laplace", 10), 100, 4.220, "PLD"),
        (Event("gaussian", 5, relation="replace-one"), 100, 24.38, "closed form"),
        (poisson(1, 0.05, "replace-one"), 100, 4.89, "PLD"),
        (Event("gaussian", 1, "fixed", 0.05, "replace-one"), 100, 34.3, "RDP"),
        (Event("gaussian", 1, "truncated", 0.05, "replace-one", records=1000, cap=80), 100, 4.91, "PLD"),
    ],
)
def test_reference_values(event, rounds, value, method):
    cost = epsilon({event: rounds}, DELTA)
    assert cost.epsilon == pytest.approx(value, rel=0.005)
    assert cost.method == method


@pytest.mark.parametrize(
    ("event", "rounds", "value"),
    [
        (poisson(1, 0.01), 300, 1.451),
        (poisson(0.5, 0.01), 100, 8.03),
        (Event("gaussian", 5), 300, 21.44),
        (Event("laplace", 10), 100, 4.533),
    ],
)
def test_reference_values_of_rdp(event, rounds, value):
    assert by_rdp({event: rounds}) == pytest.approx(value, rel=0.005)


# The closed form


@pytest.mark.parametrize("mu", [0.05, 0.7, 4.0])
@pytest.mark.parametrize("delta", [1e-3, 1e-6])
def test_the_closed_form_solves_the_integral(mu, delta):
    found = gaussian_epsilon(mu, delta)
    p, q = norm(mu).pdf, norm(0).pdf
    assert hockey_stick(p, q, found) == pytest.approx(delta, rel=1e-5)
    assert hockey_stick(p, q, 0.999 * found) > delta * 1.001


def test_gaussians_of_different_noise_add_their_inverse_variances():
    mixed = epsilon({Event("gaussian", 3): 2, Event("gaussian", 4): 5}, DELTA)
    one = epsilon({Event("gaussian", (2 / 9 + 5 / 16) ** -0.5): 1}, DELTA)
    assert mixed.epsilon == pytest.approx(one.epsilon, rel=1e-9)
    assert mixed.method == "closed form"


def test_noise_so_large_that_nothing_is_told_costs_nothing():
    assert epsilon({Event("gaussian", 1e6): 1}, 1e-3).epsilon == 0.0
    assert epsilon({}, DELTA).epsilon == 0.0


# Never below the truth


@pytest.mark.parametrize("delta", [1e-3, 1e-6, 1e-10])
@pytest.mark.parametrize("rounds", [1, 30, 3000, 100_000])
def test_a_pld_of_nearly_everyone_lies_just_above_the_exact_value(rounds, delta):
    noise = max(1.0, math.sqrt(rounds) / 2)
    sampled = epsilon({poisson(noise, 1 - 1e-9): rounds}, delta)
    exact = epsilon({Event("gaussian", noise): rounds}, delta).epsilon
    assert sampled.method == "PLD"
    assert exact * (1 - 1e-7) <= sampled.epsilon <= exact * 1.002


def mixture(density, rate, centre, noise):
    return lambda x: (1 - rate) * density(x, 0, noise) + rate * density(x, centre, noise)


@pytest.mark.parametrize(("name", "density"), [("gaussian", norm.pdf), ("laplace", laplace.pdf)])
@pytest.mark.parametrize("relation", ["add-remove", "replace-one"])
@pytest.mark.parametrize(("rate", "noise"), [(0.05, 0.8), (0.4, 1.5)])
def test_one_sampled_release_by_quadrature(name, density, relation, rate, noise):
    delta = 1e-3
    claimed = epsilon({poisson(noise, rate, relation, name): 1}, delta).epsilon
    other = mixture(density, rate, -1, noise) if relation == "replace-one" else mixture(density, 0, 0, noise)
    pair = mixture(density, rate, 1, noise), other
    truth = max(hockey_stick(*pair, claimed), hockey_stick(*pair[::-1], claimed))
    assert truth <= delta * (1 + 1e-6)
    if name == "gaussian" or relation == "add-remove":  # tight, so that a factor too much is found as well
        sooner = 0.98 * claimed - 2e-3
        assert max(hockey_stick(*pair, sooner), hockey_stick(*pair[::-1], sooner)) > delta


@pytest.mark.parametrize("parts", [2, 5, 50])
def test_laplace_noise_is_worst_when_one_coordinate_moves(parts):
    """The ℓ1 sensitivity may be spread over coordinates, each with its share and its own noise."""
    for delta in (1e-6, 1e-3, 1e-1):
        spread = epsilon({Event("laplace", 0.7 * parts): parts}, delta).epsilon
        assert spread <= epsilon({Event("laplace", 0.7): 1}, delta).epsilon * 1.001


def renyi(p, q, order):
    inside = np.exp(order * np.log(p(GRID)) + (1 - order) * np.log(q(GRID)))
    return math.log(np.trapezoid(inside, GRID)) / (order - 1)


@pytest.mark.parametrize("order", [2.0, 3.0, 8.0, 2.5])
def test_sampled_laplace_divergences_by_quadrature(order):
    rate, noise = 0.05, 1.3
    pair = mixture(laplace.pdf, rate, 1, noise), mixture(laplace.pdf, 0, 0, noise)
    truth = max(renyi(*pair, order), renyi(*pair[::-1], order))
    bound = rdp(poisson(noise, rate, mechanism="laplace"))[ORDERS.index(order)]
    assert truth * (1 - 1e-5) <= bound <= (1.6 if order <= 3 else 6) * truth


@pytest.mark.parametrize("order", [1.5, 2.0, 8.0])
def test_laplace_divergences_by_quadrature(order):
    pair = mixture(laplace.pdf, 1, 1, 0.8), mixture(laplace.pdf, 0, 0, 0.8)
    assert rdp(Event("laplace", 0.8))[ORDERS.index(order)] == pytest.approx(renyi(*pair, order), rel=1e-6)


@pytest.mark.parametrize(
    "event", [poisson(1, 0.01), poisson(1.5, 0.2, "replace-one"), poisson(2, 0.1, mechanism="laplace")]
)
def test_rdp_is_above_pld(event):
    cost = epsilon({event: 200}, DELTA)
    assert cost.method == "PLD"
    assert cost.epsilon < by_rdp({event: 200})


def test_below_the_precision_of_a_pld_rdp_is_reported():
    assert epsilon({poisson(1, 0.01): 10}, 1e-12).method == "RDP"


# Replace-one


@pytest.mark.parametrize("mechanism", ["gaussian", "laplace"])
def test_replacing_without_sampling_is_adding_at_half_the_noise(mechanism):
    replacing = epsilon({Event(mechanism, 6, relation="replace-one"): 20}, DELTA).epsilon
    assert replacing == pytest.approx(epsilon({Event(mechanism, 3): 20}, DELTA).epsilon, rel=1e-3)


def test_the_librarys_rdp_forgets_to_double_the_sensitivity_and_we_do_not():
    import dp_accounting as dp

    theirs = dp.rdp.RdpAccountant(ORDERS, dp.NeighboringRelation.REPLACE_ONE).compose(dp.GaussianDpEvent(5), 100)
    assert theirs.get_epsilon(DELTA) == pytest.approx(10.73, rel=0.005)  # if this fails, it was mended
    event = Event("gaussian", 5, relation="replace-one")
    assert by_rdp({event: 100}) > epsilon({event: 100}, DELTA).epsilon > 24


@pytest.mark.parametrize("mechanism", ["gaussian", "laplace"])
def test_replacing_on_a_poisson_sample_costs_no_more_than_adding_at_half_the_noise(mechanism):
    replacing = epsilon({poisson(2, 0.1, "replace-one", mechanism): 30}, DELTA).epsilon
    adding = epsilon({poisson(2, 0.1, mechanism=mechanism): 30}, DELTA).epsilon
    half = epsilon({poisson(1, 0.1, mechanism=mechanism): 30}, DELTA).epsilon
    assert adding < replacing <= half * 1.001


# Fixed-size samples


@pytest.mark.parametrize("order", [2, 4, 8])
def test_the_fixed_size_bound_needs_half_the_noise(order):
    """Where others contribute nothing the pair is a Poisson sample's: the library's bound at z is below its truth."""
    import dp_accounting as dp

    rate, noise = 0.9, 3.0
    pair = mixture(norm.pdf, rate, 1, noise), mixture(norm.pdf, rate, -1, noise)
    truth = renyi(*pair, order)
    event = dp.SampledWithoutReplacementDpEvent(10, 9, dp.GaussianDpEvent(noise))
    at_z = dp.rdp.RdpAccountant([order], dp.NeighboringRelation.REPLACE_ONE).compose(event).rdp[0]
    ours = rdp(Event("gaussian", noise, "fixed", rate, "replace-one"))[ORDERS.index(order)]
    assert at_z < truth
    assert ours >= truth
    half = dp.SampledWithoutReplacementDpEvent(10, 9, dp.GaussianDpEvent(noise / 2))
    at_half = dp.rdp.RdpAccountant([order], dp.NeighboringRelation.REPLACE_ONE).compose(half).rdp[0]
    assert ours == pytest.approx(at_half, rel=1e-6)


def test_a_fixed_sample_of_everyone_is_no_sample():
    everyone = epsilon({Event("gaussian", 5, "fixed", 1.0, "replace-one"): 7}, DELTA)
    assert everyone == epsilon({Event("gaussian", 5, relation="replace-one"): 7}, DELTA)


# Truncated samples


@pytest.mark.parametrize("relation", ["add-remove", "replace-one"])
def test_a_cap_that_is_never_met_costs_nothing_and_a_low_one_does(relation):
    free = epsilon({poisson(1, 0.05, relation): 50}, DELTA).epsilon
    costs = [
        epsilon({Event("gaussian", 1, "truncated", 0.05, relation, records=1000, cap=cap): 50}, DELTA).epsilon
        for cap in (1000, 80, 60, 40)
    ]
    assert costs[0] == pytest.approx(free, rel=1e-3)
    assert costs == sorted(costs)
    assert costs[-1] > 1.2 * free


def test_truncated_sampling_has_no_bound_at_a_tiny_delta():
    with pytest.raises(InvalidArgument, match=r"delta .* at least 1e-10 for truncated"):
        epsilon({Event("gaussian", 1, "truncated", 0.05, records=1000, cap=80): 5}, 1e-12)


# Different releases together


def test_a_list_in_any_order_is_its_counts():
    a, b = poisson(1, 0.1), Event("laplace", 4)
    assert epsilon([a, b, a, a, b], DELTA) == epsilon([b, a, b, a, a], DELTA) == epsilon({a: 3, b: 2}, DELTA)


def test_splitting_one_kind_into_nearly_equal_kinds_changes_nothing():
    whole = epsilon({poisson(1, 0.05): 90}, DELTA).epsilon
    parts = epsilon({poisson(1, 0.05): 30, poisson(1 + 1e-7, 0.05): 30, poisson(1 - 1e-7, 0.05): 30}, DELTA).epsilon
    assert parts == pytest.approx(whole, rel=1e-3)


def test_every_kind_of_release_counts():
    kinds = {
        poisson(1, 0.05): 20,
        Event("laplace", 5): 3,
        Event("gaussian", 4): 2,
        poisson(3, 0.5, mechanism="laplace"): 4,
    }
    whole = epsilon(kinds, DELTA)
    assert whole.method == "PLD"
    for left_out in kinds:
        assert epsilon({k: v for k, v in kinds.items() if k != left_out}, DELTA).epsilon < 0.97 * whole.epsilon
    assert whole.epsilon < by_rdp(kinds)


def test_what_no_one_bound_can_take_is_split():
    fixed = Event("gaussian", 2, "fixed", 0.05, "replace-one")
    truncated = Event("gaussian", 1, "truncated", 0.05, "replace-one", records=1000, cap=80)
    cost = epsilon({fixed: 10, truncated: 20}, DELTA)
    assert cost.method == "PLD + RDP"
    parts = [epsilon({fixed: 10}, DELTA / 2).epsilon, epsilon({truncated: 20}, DELTA / 2).epsilon]
    assert cost.epsilon == pytest.approx(sum(parts), rel=1e-9)


def test_relations_do_not_mix():
    with pytest.raises(InvalidArgument, match="share their neighbouring relation, got add-remove and replace-one"):
        epsilon([Event("gaussian", 1), Event("gaussian", 1, relation="replace-one")], DELTA)


def test_tracking_rises_round_by_round_and_stays_above_the_figure():
    events = [poisson(1, 0.05)] * 5 + [Event("laplace", 5)] * 2
    tracked = track(events, DELTA)
    assert np.all(np.diff(tracked) > 0)
    for t in (1, 5, 7):
        assert tracked[t - 1] == pytest.approx(by_rdp({e: events[:t].count(e) for e in events[:t]}))
        assert tracked[t - 1] >= epsilon(events[:t], DELTA).epsilon


# On a lattice


def test_rounding_enters_the_sensitivity_in_the_mechanisms_norm():
    gaussian = Event("discrete_gaussian", 4, relation="replace-one", steps=20, dimension=100)
    assert gaussian.sensitivity == pytest.approx(2 + 0.2 * 10, rel=2e-3)
    laplacian = Event("discrete_laplace", 4, steps=20, dimension=100)
    assert laplacian.sensitivity == pytest.approx(1 + 0.2 * 100, rel=2e-3)
    assert rdp(gaussian)[ORDERS.index(2.0)] == pytest.approx((gaussian.sensitivity / 4) ** 2)


@pytest.mark.parametrize("order", [1.5, 2.0, 10.0])
@pytest.mark.parametrize("shift", [(3, 4), (5, 0), (0, 5)])
def test_discrete_gaussian_divergences_by_enumeration(order, shift):
    steps, reach = 4, 90
    axis = np.arange(-reach, reach + 1)
    log_mass = -np.add.outer(axis**2, axis**2) / (2 * steps**2)
    q = log_mass - logsumexp(log_mass)
    p = np.roll(q, shift, axis=(0, 1))
    inside = slice(5, -5)
    truth = logsumexp((order * p + (1 - order) * q)[inside, inside]) / (order - 1)
    assert truth <= order * 25 / (2 * steps**2) * (1 + 1e-9)
    assert truth == pytest.approx(order * 25 / (2 * steps**2), rel=1e-3)


def test_discrete_laplace_by_enumeration():
    """Neighbours that differ by the sensitivity in one coordinate, at a lattice so fine that rounding adds little."""
    steps, moved, delta = 50, 60, 1e-2
    mass = np.exp(-np.abs(np.arange(-4000, 4001)) / steps)
    q = mass / mass.sum()
    p = np.roll(q, moved)
    event = Event("discrete_laplace", steps / (moved - 1.01), steps=steps, dimension=1)
    assert event.sensitivity * event.steps / event.noise == pytest.approx(moved, rel=1e-3)
    claimed = epsilon({event: 1}, delta).epsilon
    assert np.maximum(p - math.exp(claimed) * q, 0).sum() <= delta
    assert claimed <= moved / steps * 1.001


def test_a_fine_lattice_costs_little_and_a_coarse_one_much():
    costs = [
        epsilon({Event("discrete_gaussian", 5, steps=steps, dimension=10_000): 10}, DELTA).epsilon
        for steps in (2**22, 2**10, 2**6)
    ]
    plain = by_rdp({Event("gaussian", 5): 10})
    assert plain <= costs[0] <= 1.001 * plain
    assert costs[1] < costs[2]
    assert costs[2] > 3 * plain


def test_sampled_discrete_noise_is_above_the_gaussians_and_below_the_unsampled():
    sampled = epsilon({Event("discrete_gaussian", 2, "poisson", 0.05, steps=2**22, dimension=1): 50}, DELTA)
    assert sampled.method == "RDP"
    assert by_rdp({poisson(2, 0.05): 50}) <= sampled.epsilon < by_rdp({Event("gaussian", 2): 50}) / 3
    laplacian = epsilon({Event("discrete_laplace", 2, "poisson", 0.05, steps=2**22, dimension=1): 50}, DELTA).epsilon
    assert laplacian >= epsilon({poisson(2, 0.05, mechanism="laplace"): 50}, DELTA).epsilon


# Refused


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"sampling": "fixed", "rate": 0.1}, "fixed' of gaussian under add-remove. A set of fixed size tells"),
        ({"mechanism": "laplace", "sampling": "fixed", "rate": 0.1, "relation": "replace-one"}, "gaussian noise alone"),
        (
            {"mechanism": "laplace", "sampling": "truncated", "rate": 0.1, "records": 9, "cap": 3},
            "gaussian noise alone",
        ),
        (
            {"mechanism": "discrete_gaussian", "sampling": "poisson", "rate": 0.1, "relation": "replace-one"}
            | {"steps": 10, "dimension": 1},
            "No bound is known",
        ),
        ({"noise": 0.0}, r"noise \(z\) must be a number from 0.001 to 1e\+06, got 0.0"),
        ({"noise": math.nan}, r"noise \(z\)"),
        ({"noise": True}, r"noise \(z\)"),
        ({"sampling": "poisson", "rate": 1.5}, r"rate \(q\) must be a number from 1e-06 to 1, got 1.5"),
        ({"sampling": "poisson", "rate": 0.0}, r"rate \(q\)"),
        ({"rate": 0.5}, r"rate \(q\) must be 1 where sampling is full"),
        ({"sampling": "truncated", "rate": 0.1}, "records must be an integer of at least 1"),
        ({"records": 5}, "records must be absent"),
        ({"steps": 5}, "steps must be absent for gaussian"),
        ({"mechanism": "discrete_gaussian", "dimension": 3}, "steps must be an integer from 1 to 4194304"),
    ],
)
def test_events_without_a_bound_are_refused(fields, sentence):
    with pytest.raises(InvalidArgument, match=sentence):
        Event(**({"mechanism": "gaussian", "noise": 1.0} | fields))


def test_unknown_names_are_refused_with_the_nearest():
    with pytest.raises(UnknownName, match=r"mechanism must be one of .*Did you mean 'gaussian'"):
        Event("gausian", 1)
    with pytest.raises(UnknownName, match="relation must be one of add-remove, replace-one"):
        Event("gaussian", 1, relation="bounded")


@pytest.mark.parametrize("delta", [0.0, 1.0, -1e-5, math.nan, "1e-5", 1e-200])
def test_a_delta_out_of_range_is_refused(delta):
    with pytest.raises(InvalidArgument, match=r"delta \(δ\) must be a number from 1e-100 to below 1"):
        epsilon({Event("gaussian", 1): 1}, delta)


def test_an_epsilon_in_the_thousands_is_told_at_once():
    mixed = epsilon({Event("gaussian", 0.05): 100_000, poisson(1, 0.1): 1}, DELTA)
    assert mixed.method == "RDP"
    assert mixed.epsilon > epsilon({Event("gaussian", 0.05): 100_000}, DELTA).epsilon > 1e7


@pytest.mark.parametrize(("rate", "value"), [(1.0, 3 / 9), (0.5, 3 * math.log(0.5 + 0.5 * math.exp(1 / 9)))])
def test_few_laplace_releases_cost_the_sum_of_their_pure_epsilons(rate, value):
    cost = epsilon({poisson(9, rate, mechanism="laplace"): 3}, 1e-9)
    assert cost.epsilon == pytest.approx(value, rel=1e-12)
    assert cost.method == "pure"
    assert epsilon({poisson(9, rate, mechanism="laplace"): 3}, 1e-3).epsilon < value


@pytest.mark.parametrize("rate", [0.05, 0.5])
@pytest.mark.parametrize("size", [0.5, 2.0])
def test_replacing_on_a_poisson_sample_is_worst_by_the_opposite(rate, size):
    """The Gaussian PLD takes a record and its opposite for the worst pair: attacked in the plane."""
    axis = np.linspace(-8, 8, 401)
    x, y = np.meshgrid(axis, axis, indexing="ij")

    def mixed(a, b):
        return (1 - rate) * np.exp(-(x**2 + y**2) / 2) + rate * np.exp(-((x - a) ** 2 + (y - b) ** 2) / 2)

    p, opposite = mixed(size, 0), mixed(-size, 0)
    for angle in np.linspace(0, np.pi, 9):
        for length in (0.5, 1.0):
            q = mixed(length * size * np.cos(angle), length * size * np.sin(angle))
            for loss in (0.0, 0.1, 0.5, 2.0):
                claimed = np.maximum(p - math.exp(loss) * opposite, 0).sum()
                assert np.maximum(p - math.exp(loss) * q, 0).sum() <= claimed * (1 + 1e-5) + 1e-9
                assert np.maximum(q - math.exp(loss) * p, 0).sum() <= claimed * (1 + 2e-3) + 1e-9  # askew on the grid


@pytest.mark.parametrize("order", [2.0, 3.0, 6.0])
def test_sampled_discrete_gaussian_divergences_by_enumeration(order):
    steps, moved, rate = 4, 5, 0.1
    log_mass = -(np.arange(-120, 121) ** 2) / (2 * steps**2)
    q = log_mass - logsumexp(log_mass)
    p = np.logaddexp(math.log1p(-rate) + q, math.log(rate) + np.roll(q, moved))
    inside = slice(10, -10)
    truth = max(logsumexp((order * a + (1 - order) * b)[inside]) / (order - 1) for a, b in ((p, q), (q, p)))
    noise = steps / moved  # σ over sensitivity, with rounding that adds next to nothing
    bound = rdp(Event("discrete_gaussian", noise, "poisson", rate, steps=2**22, dimension=1))[ORDERS.index(order)]
    assert truth * (1 - 1e-6) <= bound <= 3 * truth


@pytest.mark.parametrize("relation", ["add-remove", "replace-one"])
def test_gaussians_beside_a_release_that_tells_nothing_cost_what_they_cost_alone(relation):
    alone = epsilon({Event("gaussian", 6, relation=relation): 20}, DELTA)
    beside = epsilon({Event("gaussian", 6, relation=relation): 20, poisson(1000, 0.01, relation): 1}, DELTA)
    assert (alone.method, beside.method) == ("closed form", "PLD")
    assert alone.epsilon <= beside.epsilon <= alone.epsilon * 1.003
