"""FedADMM."""

from __future__ import annotations

import dataclasses
import functools
from itertools import accumulate

import byhand
import jax
import numpy as np
import pytest
from byhand import PROBLEM, built, flat, key_of, parts, play, relative, sgd, shuffles, vector

import fedpact as fp
from fedpact.algorithms.fedadmm import FedADMM, theorem_rho
from fedpact.algorithms.fedavg import FedAvg
from fedpact.algorithms.fedprox import FedProx
from fedpact.core.contract import READS
from fedpact.core.errors import InvalidArgument, UnknownName
from fedpact.core.keys import Purpose
from fedpact.core.participation import Fraction
from fedpact.core.settings import scheduled
from fedpact.engines import LocalEngine
from fedpact.problems import optimum
from fedpact.problems.training import local_epochs

ZERO = vector(np.zeros(4), intercept=True)
COHORTS = ((0, 2, 5), (1, 2, 3, 6), (2,), (), (0, 1, 4))
LINEAR = fp.LeastSquares()
ONE = LocalEngine(buckets=1)
EACH = (1e-2, 1e-8, 1e-4, 1e-3, 1e-6, 1e-5, 1e-7)
#: Local problems solved to rounding, so that Theorem 1's ε is 0: γ = 1/(L + ρ) contracts by a quarter or better.
EXACT = {"solver": "gd", "epochs": 40, "vary": False, "rate": 0.15}


@functools.cache
def ran(settings, **options):
    return fp.run(settings, PROBLEM, byhand.federation(parts()), engine=ONE, **options)


def largest_lipschitz():
    return max(byhand.lipschitz(PROBLEM, x) for x, _ in parts())


# (a) one step by hand


@pytest.mark.parametrize(
    ("settings", "first", "second"),
    [
        ({}, -0.75, -0.65625),
        ({"message": "augmented"}, -0.75, -1.03125),
        ({"start": "local"}, -0.75, -0.46875),
        ({"start": "local", "message": "augmented"}, -0.75, -0.84375),
        ({"duals": False}, -0.75, -0.9375),
        ({"duals": False, "message": "augmented"}, -0.375, -0.609375),
        ({"eta": "participation"}, -0.75, -0.65625),
        ({"eta": 0.5}, -0.375, None),
        ({"momentum": 0.5}, -1.0, None),
        ({"weights": "rows"}, -49 / 36, None),
    ],
    ids=str,
)
def test_two_rounds_in_round_numbers(settings, first, second):
    """f_0 = ½(w − 2)², f_1 = ½(w + 4)² of two rows; ρ = 1, γ = ¼, two steps on all rows, θ⁰ = 0.

    Round 0.  client 0:  0 + ¼·2 = ½,  ½ − ¼(−1.5 + .5) = ¾;       y = ¾,    Δ = ¾ + ¾ = 2·¾ = 1.5
              client 1:  0 − ¼·4 = −1, −1 − ¼(3 − 1) = −1.5;       y = −1.5, Δ = −3          θ = (1.5 − 3)/2 = −.75
    β = ½:    m = −2, −1 − 1 = −2: ½, 1, Δ = 2;  m = 4, 2 + 2 = 4: −1, −2, Δ = −4            θ = −1
    by rows:  α = 2/3: 1/3, 1/3 + ¼(10/9 − 1/3) = 19/36;  α = 4/3: −4/3, −4/3 − ¼(32/9 − 4/3) = −17/9; θ is their sum
    Round 1 at θ = −.75, y = ¾ and −1.5.
    from θ:   −.75 − ¼(−2.75 + ¾) = −¼,       −¼ − ¼(−2.25 + ¾ + ½) = 0;                     y = 1.5
              −.75 − ¼(3.25 − 1.5) = −1.1875, −1.1875 − ¼(2.8125 − 1.5 − .4375) = −1.40625;  y = −2.15625
              double 1.5, −1.3125;  augmented 1.5 − 1.5 = 0, −3.5625 + 3 = −.5625
    from w_i: ¾ − ¼(−1.25 + ¾ + 1.5) = ½,     ½ − ¼(−1.5 + ¾ + 1.25) = .375;                 y = 1.875
              −1.5 − ¼(2.5 − 1.5 − ¾) = −1.5625, −1.5625 − ¼(2.4375 − 1.5 − .8125) = −1.59375; y = −2.34375
              double 2.25, −1.6875;  augmented 2.25 − 1.5 = .75, −3.9375 + 3 = −.9375
    no duals: −.0625, .28125 and −1.5625, −1.96875: double 2.0625, −2.4375
              (4) is w_i⁺ − w_i: ¾ and −1.5, θ = −.375;  .21875, .515625 and −1.28125, −1.734375: −.234375 both
    """
    clients = [(np.ones((1, 1)), np.array([2.0])), (np.ones((2, 1)), np.array([-4.0, -4.0]))]
    plain = {"epochs": 2, "vary": False, "rate": 0.25, "rho": 1.0, "message": "double"}
    moments = play(built(FedADMM(**plain | settings), LINEAR, 2), LINEAR, clients, vector([0.0]), [[0, 1], [0, 1]])
    np.testing.assert_allclose(flat(moments[0].after.theta), [first], rtol=1e-14)
    if second is not None:
        np.testing.assert_allclose(flat(moments[1].after.theta), [second], rtol=1e-14)


@pytest.mark.parametrize(
    "settings",
    [
        FedADMM(rho=0.7, rate=0.3, epochs=2, vary=False, batch=4, short=True, momentum=0.5, weights="rows"),
        FedADMM(rho=0.7, rate=0.3, epochs=3, batch=5, short=True, start="local", message="augmented", eta=0.8),
        FedADMM(rho=0.7, rate=0.3, batch=5, short=True, start="local", message="augmented", newcomer="global"),
        FedADMM(rho=0.7, rate=0.3, batch=5, short=True, start="global", message="augmented", newcomer="global"),
        FedADMM(rho=0.7, rate=((0, 0.3), (1, 0.2), (2, 0.05)), batch=4, short=True, weights="rows"),
    ],
    ids=["global-double", "local-augmented", "newcomers from θ", "newcomers, all from θ", "falling γ"],
)
def test_rounds_are_algorithm_1_literally(settings):
    """Shuffled batches with a shorter last one, E_i drawn, α_i = m n_i/n: every w_i, y_i, Δ_i and θ from NumPy."""
    m, s = 7, settings
    sizes = np.array([len(y) for _, y in parts()])
    theta, w, y, seen = np.zeros(4), np.zeros((m, 4)), np.zeros((m, 4)), set()
    for t, moment in enumerate(play(built(s), PROBLEM, parts(), ZERO, COHORTS[:3])):
        sent = []
        for i in moment.chosen:
            alpha = m * sizes[i] / sizes.sum() if s.weights == "rows" else 1.0
            key = jax.random.fold_in(key_of(0, t, i)(Purpose.LOCAL), 0)
            epochs = int(jax.random.randint(key, (), 1, s.epochs + 1)) if s.vary else s.epochs
            orders = shuffles(0, t, i, sizes[i], epochs, s.batch)
            if s.newcomer == "global" and i not in seen:
                w[i] = theta
            seen.add(i)
            begin = theta if s.start == "global" else w[i]
            extra = {"alpha": alpha, "linear": y[i], "rho": s.rho, "center": theta, "momentum": s.momentum}
            new = sgd(PROBLEM, begin, *parts()[i], orders, rate=float(scheduled(s.rate, t)), **extra)
            dual = y[i] + s.rho * (new - theta)
            old = w[i] + y[i] / s.rho
            sent.append(2 * (new - theta) if s.message == "double" else new + dual / s.rho - old)
            w[i], y[i] = new, dual
            assert relative(flat(moment.clients_after[i].w), new) <= 1e-12
            assert relative(flat(moment.clients_after[i].y), dual) <= 1e-12
            assert relative(flat(moment.uploads[i].delta), sent[-1]) <= 1e-12
            assert float(moment.notes[i].epochs) == float(moment.notes[i].gradients) == epochs
        theta = theta + s.eta * np.mean(sent, axis=0) if sent else theta
        assert relative(flat(moment.after.theta), theta) <= 1e-12


# (b) certificates


@functools.cache
def theory(participation=1.0, rounds=1500, **changes):
    return ran(FedADMM.preset("theory", **EXACT | changes), participation=participation, rounds=rounds)


@pytest.mark.drill
@pytest.mark.parametrize("participation", [1.0, pytest.param(0.5, marks=pytest.mark.drill)])
def test_under_theorem_1_v_goes_to_zero_and_theta_to_the_optimum(participation):
    history = theory(participation).history
    best = optimum(PROBLEM, byhand.federation(parts()))
    assert history.last("v") <= 1e-12 * history.column("v")[0]
    assert np.linalg.norm(flat(theory(participation).model.w) - best.w) <= 1e-6
    assert history.last("dual_sum") <= 1e-6
    assert history.column("rho")[-1] == pytest.approx(theorem_rho(largest_lipschitz()), rel=1e-9)
    assert history.column("rho")[-1] > (1 + 5**0.5) * largest_lipschitz()


def test_weights_by_rows_have_a_rho_of_the_largest_weighted_constant():
    """L = max α_i r_i with α_i = m n_i/n, which is neither max r_i nor that times a weight of its own."""
    sizes = np.array([len(y) for _, y in parts()])
    each = np.array([byhand.lipschitz(PROBLEM, x) for x, _ in parts()])
    weighted = np.max(7 * sizes / sizes.sum() * each)
    assert abs(weighted / each.max() - 1) > 0.05
    (moment,) = play(built(FedADMM.preset("theory", weights="rows", epochs=1)), PROBLEM, parts(), ZERO, [(1,)])
    assert float(moment.msg.rho) == pytest.approx(1.01 * (1 + 5**0.5) * weighted, rel=1e-9)


@pytest.mark.drill
def test_weights_by_rows_lead_to_the_optimum_of_all_rows():
    """Σ_i m (n_i/n) f_i = (m/n)(Σ losses + m (β/2)‖w‖²): one client with everyone's rows and seven times the β."""
    everyone = [tuple(np.concatenate(part) for part in zip(*parts(), strict=True))]
    best = optimum(dataclasses.replace(PROBLEM, l2=7 * PROBLEM.l2), byhand.federation(everyone))
    assert np.linalg.norm(flat(theory(weights="rows").model.w) - best.w) <= 1e-6


@pytest.mark.parametrize(
    ("solver", "accuracy", "weights"),
    [
        ("sgd", 1e-3, "uniform"),
        ("gd", EACH, "rows"),
        ("lbfgs", 1e-9, "uniform"),
        ("lbfgs", EACH, "rows"),
    ],
    ids=["sgd-one", "gd-each", "lbfgs-one", "lbfgs-each"],
)
def test_residual_6_is_met(solver, accuracy, weights):
    """‖α_i ∇f_i(w_i⁺) + y_i + ρ(w_i⁺ − θ)‖² ≤ ε_i, from NumPy, and no more epochs than that takes."""
    s = FedADMM(rho=2.0, rate=0.2, epochs=500, vary=False, solver=solver, accuracy=accuracy, weights=weights)
    moments = play(built(s), PROBLEM, parts(), ZERO, [(0, 1, 4, 6), (1, 4)])
    each, sizes = np.broadcast_to(accuracy, 7), np.array([len(y) for _, y in parts()])
    alpha = 7 * sizes / sizes.sum() if weights == "rows" else np.ones(7)
    for moment in moments:
        for i in moment.chosen:
            w, y, theta = flat(moment.clients_after[i].w), flat(moment.clients_before[i].y), flat(moment.msg.theta)
            slope = lambda v, i=i, y=y, theta=theta: (
                alpha[i] * byhand.gradient(PROBLEM, v, *parts()[i]) + y + s.rho * (v - theta)
            )
            gap = np.sum(slope(w) ** 2)
            assert gap <= each[i]
            assert float(moment.notes[i].accuracy_met) == pytest.approx(gap, rel=1e-9)
            done, passes = float(moment.notes[i].epochs), float(moment.notes[i].gradients)
            if solver == "lbfgs":
                assert 1 <= done <= passes - 2 <= 2 * done < 60  # a step takes one or two, and a look before and after
                continue
            assert passes == 2 * done + 1  # an epoch each, and a look before them and after every one
            if done == 0:
                continue
            before = sgd(
                PROBLEM,
                theta,
                *parts()[i],
                [[np.arange(len(parts()[i][1]))]] * int(done - 1),
                rate=s.rate * alpha[i],
                linear=y / alpha[i],
                rho=s.rho / alpha[i],
                center=theta,
            )
            assert np.sum(slope(before) ** 2) > each[i]


def test_a_client_that_meets_6_at_its_start_does_no_epoch():
    s = FedADMM(accuracy=1e6, epochs=5, rate=0.2)
    (moment,) = play(built(s), PROBLEM, parts(), ZERO, [(1,)])
    assert float(moment.notes[1].epochs) == 0
    assert float(moment.notes[1].gradients) == 1
    assert float(moment.notes[1].train_loss) == pytest.approx(byhand.value(PROBLEM, np.zeros(4), *parts()[1]))
    assert not np.any(flat(moment.uploads[1].delta))


def test_a_residual_that_is_no_number_does_not_meet_6():
    """A client whose rows are not finite trains on, and what it sends is seen not to be: the run ends with its name."""
    broken = [(np.where(i == 1, np.nan, x), y) for i, (x, y) in enumerate(parts())]
    s = FedADMM(accuracy=1e-3, epochs=5, vary=False, rate=0.2)
    (moment,) = play(built(s), PROBLEM, broken, ZERO, [(0, 1)])
    assert float(moment.notes[1].epochs) == 5
    assert not np.isfinite(flat(moment.uploads[1].delta)).any()
    assert np.isfinite(flat(moment.uploads[0].delta)).all()


@pytest.mark.parametrize(("solver", "least"), [("gd", 0), ("lbfgs", 1)])
def test_work_until_6_in_single_precision_several_clients_at_once(solver, least):
    """On a network, compiled, with an ε of each client's own: 1, 3 and 4 meet theirs before any work; L-BFGS takes
    one step all the same."""
    rng = np.random.default_rng(2)
    x = rng.normal(size=(60, 4))
    federation = fp.data.from_arrays(x, (x[:, 0] * x[:, 1] > 0).astype(float)).split(clients=5, how="iid", seed=0)
    settings = FedADMM(epochs=30, vary=False, rho=0.5, rate=0.2, accuracy=(1e-3, 1e9, 1e-3, 1e9, 1e9), solver=solver)
    net, options = fp.TwoLayer(inputs=4, hidden=3, classes=2), {"rounds": 4, "telemetry": "all"}
    options["participation"] = [[1, 3, 4], [0, 2], [0, 1, 2, 3, 4], [4]]
    one, some = (fp.run(settings, net, federation, engine=fp.HostEngine(at_once=n), **options) for n in (1, 2))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-4), one.model.w.tree, some.model.w.tree)
    assert jax.tree.leaves(one.model.w.tree)[0].dtype == np.float32
    for run in (one, some):
        epochs = run.history.column("epochs")[1:]
        assert (epochs[0], epochs[3]) == (least, least)
        assert least < epochs[1] < 30
        assert least < epochs[2] < 30
        assert run.history.last("objective") < run.history.column("objective")[0]


# (c) invariants


@pytest.mark.parametrize("solver", ["sgd", "lbfgs"])
def test_theta_is_the_mean_of_the_augmented_models(solver):
    """With (4) and η = |S|/m: θ = (1/m) Σ (w_i + y_i/ρ) over all m after every round, whoever took part."""
    batch = 4 if solver == "sgd" else None
    s = FedADMM.preset("printed", rho=0.8, eta="participation", rate=0.3, epochs=2, batch=batch, short=True)
    s = dataclasses.replace(s, solver=solver)
    for moment in play(built(s), PROBLEM, parts(), ZERO, COHORTS):
        mean = np.mean([flat(c.w) + flat(c.y) / 0.8 for c in moment.clients_after], axis=0)
        assert relative(flat(moment.after.theta), mean) <= 1e-13
        assert float(moment.info.eta) == len(moment.chosen) / 7
    assert np.linalg.norm(flat(moment.after.theta)) > 0.05


def total(bundle, server, states, clients, name):
    """A column as the loop reads it: the clients' measures at the server's θ, added up."""
    msg = bundle.broadcast(server)
    each = [bundle.measure(msg, c, byhand.batch(*clients[i], i))[name] for i, c in enumerate(states)]
    return float(READS[bundle.reads[name]](jax.tree.map(lambda *a: sum(a), *each), len(clients)))


def literal_v(theta, clients, rho, alpha):
    """(7): ‖∇_θ L‖² + Σ (‖∇_{w_i} L‖² + ‖w_i − θ‖²)."""
    by_theta, total = np.zeros(4), 0.0
    for (w, y), (x, labels), a in zip(clients, parts(), alpha, strict=True):
        by_theta -= y + rho * (w - theta)
        total += np.sum((a * byhand.gradient(PROBLEM, w, x, labels) + y + rho * (w - theta)) ** 2)
        total += np.sum((w - theta) ** 2)
    return by_theta @ by_theta + total


@pytest.mark.drill
@pytest.mark.parametrize("weights", ["uniform", "rows"])
def test_the_column_v_is_7(weights):
    """As the loop reads it: the clients' measures at the new θ, added up. With it the Lagrangian (3)."""
    s = FedADMM(rho=0.7, rate=0.3, epochs=1, vary=False, weights=weights)
    sizes = np.array([len(y) for _, y in parts()])
    alpha = 7 * sizes / sizes.sum() if weights == "rows" else np.ones(7)
    bundle = built(s)
    for moment in play(bundle, PROBLEM, parts(), ZERO, COHORTS[:2]):
        v, lagrangian = (
            total(bundle, moment.after, moment.clients_after, parts(), name) for name in ("v", "lagrangian")
        )
        pairs = [(flat(c.w), flat(c.y)) for c in moment.clients_after]
        theta = flat(moment.after.theta)
        assert v == pytest.approx(literal_v(theta, pairs, 0.7, alpha), rel=1e-11)
        terms = [
            a * byhand.value(PROBLEM, w, x, labels) + y @ (w - theta) + 0.35 * np.sum((w - theta) ** 2)
            for (w, y), (x, labels), a in zip(pairs, parts(), alpha, strict=True)
        ]
        assert lagrangian == pytest.approx(sum(terms), rel=1e-11)


def all_came(participation, m=7, seed=0):
    """The round by which every client has come."""
    cohorts = (set(Fraction(participation).select(seed, t, m).tolist()) for t in range(100))
    union = accumulate(cohorts, set.union)
    return next(t for t, who in enumerate(union, start=1) if len(who) == m)


def constants(lip, rho):
    """c1 and c2 of (8) with p_min = 1."""
    return (rho - 2 * lip) / 2 - 2 * lip**2 / rho, 3 * (lip**2 + rho**2) + 2 * (1 + 2 * lip**2 / rho**2)


def test_under_theorem_1_the_lagrangian_falls_once_everyone_has_come():
    """(16): it falls by at least (mρ/2)‖θ⁺ − θ‖² plus a multiple of Σ ‖w_i⁺ − w_i‖² where ε = 0."""
    first = all_came(0.5)
    assert 1 < first < 20
    fallen = np.diff(theory(0.5).history.column("lagrangian")[first:])
    assert np.all(fallen[:60] < 0)
    assert np.all(fallen <= 1e-12)


def test_the_bound_of_theorem_1_holds_once_everyone_has_come():
    """(8) with ε = 0 and p_min = 1, from round 1 on: the mean of V^t/m is at most (c2/c1)(L¹ − f*)/(mT)."""
    history, m = theory(1.0).history, 7
    lip = largest_lipschitz()
    c1, c2 = constants(lip, theorem_rho(lip))
    least = m * optimum(PROBLEM, byhand.federation(parts())).value
    v, lagrangian = history.column("v")[1:], history.column("lagrangian")[1]
    for rounds in (1, 5, 50, 1499):
        assert np.sum(v[:rounds]) / (m * rounds) <= c2 / c1 * (lagrangian - least) / (m * rounds)


def test_theorem_1_as_printed_fails_in_the_first_round_of_two_clients():
    """f_i = ½(w ∓ 2)², θ⁰ = 0, so L⁰ = f* = 4 and (8) says V⁰ ≤ 0; but V⁰ = 2² + 2², and the Lagrangian rises.

    w_i = ±2/(1 + ρ), y_i = ±2ρ/(1 + ρ), θ stays 0; with a = 1/(1 + ρ) then w_i = ±(2 − 2ρa)a = ±2a², y_i = ±2(1 − a²).
    L = Σ ½(w − 2)² + y w + (ρ/2) w²: round 1 has w = 2a, y = 2 − 2a: 2(2(1 − a)² + 4a(1 − a) + 2ρa²) = 4(1 − a² + ρa²).
    """
    clients = [(np.ones((1, 1)), np.array([2.0])), (np.ones((1, 1)), np.array([-2.0]))]
    bundle = built(FedADMM.preset("theory", **EXACT), LINEAR, 2)
    moments = play(bundle, LINEAR, clients, vector([0.0]), [[0, 1]] * 8)
    states = [(moments[0].before, moments[0].clients_before), *((one.after, one.clients_after) for one in moments)]
    lagrangian, v = (
        np.array([total(bundle, *state, clients, name) for state in states]) for name in ("lagrangian", "v")
    )
    rho = theorem_rho(1.0)
    a = 1 / (1 + rho)
    assert float(moments[0].msg.rho) == pytest.approx(rho, rel=1e-12)
    assert (lagrangian[0], v[0]) == pytest.approx((4.0, 8.0), rel=1e-12)
    assert lagrangian[1] == pytest.approx(4 * (1 + (rho - 1) * a**2), rel=1e-9)
    assert lagrangian[1:4] == pytest.approx([4.4980, 4.0273, 4.0015], abs=1e-4)
    assert np.all(np.diff(lagrangian[1:]) < 0)  # from the round on by which both have come
    c1, c2 = constants(1.0, rho)
    assert all(np.sum(v[1 : 1 + rounds]) <= c2 / c1 * (lagrangian[1] - 4) for rounds in range(1, 9))


# (d) degenerate cases


@pytest.mark.parametrize("mu", [0.4, 0.0])
@pytest.mark.parametrize("batch", [3, None])
def test_without_duals_it_is_fedprox_and_without_rho_fedavg(mu, batch):
    """y ≡ 0, from θ, 2(w_i − θ), η = ½: θ + (1/2|S|) Σ 2(w_i − θ) is the mean of the w_i."""
    local = {"epochs": 3, "vary": True, "batch": batch, "short": batch is not None, "momentum": 0.5}
    a = FedADMM(rho=mu, eta=0.5, duals=False, start="global", message="double", rate=0.2, **local)
    b = FedProx(mu=mu, step=0.2, **local) if mu else FedAvg(step=0.2, **local)
    cohorts = COHORTS[1:3]
    for one, other in zip(*(play(built(s), PROBLEM, parts(), ZERO, cohorts, seed=4) for s in (a, b)), strict=True):
        assert relative(flat(one.after.theta), flat(other.after.w)) <= 1e-14
        for i in one.chosen:
            assert float(one.notes[i].train_loss) == pytest.approx(float(other.notes[i].train_loss), rel=1e-12)


def test_one_client_solved_exactly_is_the_method_of_multipliers():
    """m = 1, (4), η = 1: θ = w + y/ρ, and y = −∇f(w) after a solve, so w⁺ solves ∇f(w⁺) + y + ρ(w⁺ − θ) = 0."""
    (client,) = parts(sizes=(9,))
    s = FedADMM.preset("printed", rho=1.5, solver="lbfgs", epochs=60, vary=False, accuracy=1e-26)
    for moment in play(built(s, PROBLEM, 1), PROBLEM, [client], ZERO, [[0]] * 3):
        (state,) = moment.clients_after
        assert relative(flat(moment.after.theta), flat(state.w) + flat(state.y) / 1.5) <= 1e-13
        assert relative(flat(state.y), -byhand.gradient(PROBLEM, flat(state.w), *client)) <= 1e-12


# (e) schedules, and the drawn epochs


def test_rho_and_eta_change_in_the_round_they_say():
    s = FedADMM(rho=((0, 0.5), (3, 2.0)), eta=((0, 1.0), (2, 0.25), (4, 0.5)), epochs=1, vary=False, rate=0.2)
    moments = play(built(s), PROBLEM, parts(), ZERO, [(1,)] * 6)
    assert [float(m.msg.rho) for m in moments] == [float(m.info.rho) for m in moments] == [0.5, 0.5, 0.5, 2, 2, 2]
    assert [float(m.info.eta) for m in moments] == [1, 1, 0.25, 0.25, 0.5, 0.5]
    assert [float(scheduled([[0, 0.5], [3, 2.0]], t)) for t in (0, 2, 3, 99)] == [0.5, 0.5, 2.0, 2.0]
    for moment in moments:  # the ρ that was sent is the ρ of line 20
        new, old, theta = flat(moment.clients_after[1].y), flat(moment.clients_before[1].y), flat(moment.msg.theta)
        assert relative(new - old, float(moment.msg.rho) * (flat(moment.clients_after[1].w) - theta)) <= 1e-14


def test_message_4_has_both_duals_over_the_rho_of_the_round():
    """Δ = w⁺ + y⁺/ρ_t − (w + y/ρ_t) where ρ rises: with y over the ρ it was made with it would be another."""
    s = FedADMM.preset("printed", rho=((0, 0.5), (1, 2.0)), epochs=2, vary=False, rate=0.2)
    first, second = play(built(s), PROBLEM, parts(), ZERO, [(1, 4)] * 2)
    for moment in (first, second):
        rho = float(moment.msg.rho)
        for i in moment.chosen:
            (w, y), (new, dual) = ((flat(c[i].w), flat(c[i].y)) for c in (moment.clients_before, moment.clients_after))
            sent = flat(moment.uploads[i].delta)
            assert relative(sent, new + dual / rho - (w + y / rho)) <= 1e-12
            assert relative(new, (sent + w + flat(moment.msg.theta)) / 2) <= 1e-12  # what a server can work out
    assert relative(sent, new + dual / 2.0 - (w + y / 0.5)) > 0.01


def test_epochs_are_uniform_over_clients_and_rounds():
    """E_i ~ U{1..5}: 100 clients in 100 rounds, each share within five deviations of a fifth."""
    root = jax.random.key(3)

    def drawn(t, client):
        key = fp.core.keys.client_key(root, t, client)(Purpose.LOCAL)
        return local_epochs(jax.random.fold_in(key, 0), 5, True)

    t, client = np.divmod(np.arange(10_000), 100)
    table = np.asarray(jax.jit(jax.vmap(drawn))(t, client)).reshape(100, 100)
    counts = np.bincount(table.ravel(), minlength=6)
    assert counts[0] == 0
    np.testing.assert_allclose(counts[1:] / 1e4, 0.2, atol=5 * (0.16 / 1e4) ** 0.5)
    assert abs(np.corrcoef(table[:, :-1].ravel(), table[:, 1:].ravel())[0, 1]) < 0.05
    assert abs(np.corrcoef(table[:-1].ravel(), table[1:].ravel())[0, 1]) < 0.05


def test_a_client_draws_the_same_whoever_else_takes_part_and_in_any_order():
    s = FedADMM(epochs=4, batch=3, short=True, rate=0.2)
    one, other = (play(built(s), PROBLEM, parts(), ZERO, [chosen])[0] for chosen in ((0, 3, 5), (5, 3, 1)))
    for i in (3, 5):
        assert float(one.notes[i].epochs) == float(other.notes[i].epochs)
        np.testing.assert_array_equal(flat(one.uploads[i].delta), flat(other.uploads[i].delta))


# (f) bad arguments, and what the reader is told


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rho": -1.0}, r"^rho \(ρ\) must be at least 0, got -1\.0\. Write 0\.01, or \[\[0, 0\.01\], \[60, 0\.1\]\]"),
        ({"rho": "lipshitz"}, r'^rho \(ρ\) must be at least 0, got \'lipshitz\'.* or "lipschitz"\.$'),
        ({"rho": 0, "message": "augmented"}, r"^rho \(ρ\) must be above 0 for message \"augmented\", got 0\."),
        ({"rho": [[0, 1], [5, 0]], "message": "augmented"}, r"^rho \(ρ\) must be above 0 for message \"augmented\""),
        ({"rho": [[1, 0.1]]}, r"^rho \(ρ\) must be pairs \[round, value\] with rising rounds from 0 on, got \[\[1, 0"),
        ({"rho": [[0, 0.1], [0, 0.2]]}, r"^rho \(ρ\) must be pairs"),
        ({"rho": []}, r"^rho \(ρ\) must be pairs"),
        ({"rho": [[0, 0.1], [7, -1]]}, r"^rho from round 7 \(ρ\) must be at least 0, got -1\."),
        ({"eta": 0}, r"^eta \(η\) must be above 0, got 0\."),
        ({"eta": [[0, 1], [60, 0]]}, r"^eta from round 60 \(η\) must be above 0, got 0\."),
        ({"eta": "all"}, r'^eta \(η\) must be above 0, got \'all\'.* or "participation"\.$'),
        ({"duals": 1}, r"^duals must be true or false, got 1\."),
        ({"epochs": 0}, r"^epochs \(E\) must be an integer of at least 1, got 0\."),
        ({"vary": "yes"}, r"^vary must be true or false"),
        ({"batch": 0}, r"^batch \(B\) must be an integer of at least 1, got 0\."),
        ({"short": None}, r"^short must be true or false"),
        ({"rate": 0.0}, r"^rate \(γ\) must be above 0, got 0\.0\."),
        ({"rate": [[0, 0.1], [5, 0]]}, r"^rate from round 5 \(γ\) must be above 0, got 0\."),
        ({"rate": [[2, 0.1]]}, r"^rate \(γ\) must be pairs \[round, value\] with rising rounds from 0 on"),
        ({"rate": float("nan")}, r"^rate \(γ\) must be above 0, got nan\."),
        ({"momentum": 1.0}, r"^momentum \(β\) must be in \[0, 1\), got 1\.0\."),
        ({"solver": "gd", "batch": 10}, r"^batch \(B\) must be left out for solver 'gd', got 10\. It uses all rows\.$"),
        (
            {"accuracy": 1e-3, "momentum": 0.5},
            r"^momentum \(β\) must be 0 for accuracy on all rows, got 0\.5\. It begins",
        ),
        ({"solver": "lbfgs", "momentum": 0.5}, r"^momentum \(β\) must be 0 for solver 'lbfgs', got 0\.5\. It has no"),
        ({"accuracy": -1}, r"^accuracy \(ε_i\) must be at least 0, one number or one per client, got -1\."),
        ({"accuracy": [1e-3, "x"]}, r"^accuracy \(ε_i\) must be at least 0, one number or one per client"),
    ],
    ids=str,
)
def test_bad_settings_are_refused(settings, message):
    with pytest.raises(InvalidArgument, match=message):
        FedADMM(**settings)


@pytest.mark.parametrize(
    ("settings", "nearest"),
    [
        ({"start": "globl"}, "global"),
        ({"message": "doubled"}, "double"),
        ({"solver": "lbgfs"}, "lbfgs"),
        ({"weights": "row"}, "rows"),
    ],
    ids=str,
)
def test_unknown_words_come_with_the_nearest(settings, nearest):
    with pytest.raises(UnknownName, match=rf"^{next(iter(settings))} must be one of .+ Did you mean '{nearest}'\?"):
        FedADMM(**settings)


def test_what_does_not_fit_the_clients_is_refused_before_round_1():
    federation = byhand.federation(parts())
    with pytest.raises(InvalidArgument, match=r"^accuracy \(ε_i\) must be one per client \(7\), got 3\."):
        fp.run(FedADMM(accuracy=(1, 1, 1)), PROBLEM, federation, rounds=1)
    with pytest.raises(InvalidArgument, match=r"^batch \(B\) must be at most the 4 rows of client 0, got 5\. Use a sm"):
        fp.run(FedADMM(batch=5), PROBLEM, federation, rounds=1)
    network = fp.TwoLayer(inputs=3, hidden=2, classes=2)
    with pytest.raises(InvalidArgument, match=r"^problem must be one that has 'lipschitz' for fedadmm, got TwoLayer"):
        fp.run(FedADMM.preset("theory"), network, federation, rounds=1)


def test_the_reader_is_told_where_theorem_1_does_not_apply():
    (said,) = built(FedADMM(), rate=0.5).notices
    parts = ("η = |S|/m, and it is 1.0", "ρ > (1+√5)L, not checked for ρ = 0.01", "2(w_i − θ) is sent", "(6) met")
    for part in parts:
        assert part in said, part
    (said,) = built(FedADMM.preset("theory")).notices
    assert said == "Theorem 1 does not apply: it needs (6) met at every client, and it is not looked at."
    (said,) = built(FedADMM.preset("theory", accuracy=1e-3, duals=False)).notices
    assert said == "Theorem 1 does not apply: it needs the duals of l. 20, and y_i stays 0."
    (said,) = built(FedADMM.preset("theory", accuracy=1e-3, rho=((0, 0.1), (3, 1.0)))).notices
    assert said.startswith("Theorem 1 does not apply: it needs a constant ρ, and it is ")
    (said,) = built(FedADMM.preset("theory", accuracy=1e-3, newcomer="global")).notices
    first = "w_i = θ⁰ at first, and it is θ of a client's first round"
    assert said == f"Theorem 1 does not apply: it needs {first}."


def test_theorem_1_is_said_to_apply_where_6_is_met():
    come = "from the round on by which every client has come"
    met = "where accuracy_met is at most ε = 0.001: epochs may end before."
    (said,) = built(FedADMM.preset("theory", accuracy=1e-3)).notices
    assert said == f"Theorem 1 applies only {come}; {met}"
    (said,) = built(FedADMM.preset("theory", accuracy=1e-3, rho=5.0)).notices
    assert said == f"Theorem 1 applies only {come}; with ρ > (1+√5)L, not checked for ρ = 5.0; {met}"


def test_with_everyone_in_every_round_a_server_step_of_1_is_theorem_1_s():
    settings = FedADMM.preset("theory", accuracy=1e-3, eta=1.0)
    said = [settings.build(PROBLEM, 7, rate).notices[0] for rate in (1.0, 0.5)]
    assert [text.startswith("Theorem 1 applies only from") for text in said] == [True, False]
    assert said[1] == "Theorem 1 does not apply: it needs η = |S|/m, and it is 1.0."
