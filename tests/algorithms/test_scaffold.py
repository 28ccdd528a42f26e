"""SCAFFOLD."""

from __future__ import annotations

import byhand
import jax
import numpy as np
import pytest
from byhand import PROBLEM, built, flat, key_of, parts, play, relative, sgd, shuffles, vector

import fedpact as fp
from fedpact.algorithms.scaffold import Scaffold
from fedpact.core.errors import InvalidArgument
from fedpact.core.keys import Purpose
from fedpact.engines import LocalEngine
from fedpact.problems import optimum

ZERO = vector(np.zeros(4), intercept=True)
COHORTS = ((0, 2, 5), (1, 2, 3, 6), (2,), (), (0, 1, 4))


# (a) one step by hand


def test_two_rounds_in_round_numbers():
    """f_0 = ½(w − 2)², f_1 = ½(w + 4)², η_l = ¼, two steps on all rows, x = c = 0. N = 3: a third client never comes.

    Round 0.  y = ½, ½ + ¼·1.5 = .875;    c_0 = (0 − .875)/(2·¼) = −1.75
              y = −1, −1 − ¼·3 = −1.75;   c_1 = 1.75/½ = 3.5
              x = (.875 − 1.75)/2 = −.4375,   c = (−1.75 + 3.5)/3 = 7/12
    Round 1, client 0 alone: its steps add c − c_0 = 7/12 + 7/4 = 7/3.
              y = −.4375 − ¼(−2.4375 + 7/3) = −.4114583…,   y − ¼(y − 2 + 7/3) = .75y − 1/12 = −.3919270…
              c_0⁺ = −7/3 + (x − y)/½ = −2.4244791…,   x = y,   c = 7/12 + (c_0⁺ + 7/4)/3
    """
    clients = [
        (np.ones((1, 1)), np.array([2.0])),
        (np.ones((2, 1)), np.array([-4.0, -4.0])),
        (np.ones((1, 1)), np.ones(1)),
    ]
    algorithm = built(Scaffold(epochs=2, rate=0.25), fp.LeastSquares(), 3)
    one, two = play(algorithm, fp.LeastSquares(), clients, vector([0.0]), [[0, 1], [0]])
    np.testing.assert_allclose([flat(c.c)[0] for c in one.clients_after], [-1.75, 3.5, 0], rtol=1e-14)
    np.testing.assert_allclose([flat(one.after.x)[0], flat(one.after.c)[0]], [-0.4375, 7 / 12], rtol=1e-14)
    y = 0.75 * (-0.4375 - (-2.4375 + 7 / 3) / 4) - 1 / 12
    c_0 = -7 / 3 + (-0.4375 - y) / 0.5
    np.testing.assert_allclose(flat(two.after.x), [y], rtol=1e-14)
    np.testing.assert_allclose(flat(two.clients_after[0].c), [c_0], rtol=1e-14)
    np.testing.assert_allclose(flat(two.after.c), [7 / 12 + (c_0 + 1.75) / 3], rtol=1e-14)
    assert float(two.info.control) == pytest.approx(abs(7 / 12 + (c_0 + 1.75) / 3))


def test_rounds_are_algorithm_1_literally():
    """Shuffled batches; K is the number of steps really taken, which differs between clients of 4, 6, 9 and 12 rows."""
    s = Scaffold(epochs=2, vary=True, batch=4, rate=0.2, eta=0.8)
    x, c, own = np.zeros(4), np.zeros(4), np.zeros((7, 4))
    steps = set()
    for t, moment in enumerate(play(built(s), PROBLEM, parts(), ZERO, COHORTS)):
        moves, changes = [], []
        for i in moment.chosen:
            rows, labels = parts()[i]
            epochs = int(jax.random.randint(jax.random.fold_in(key_of(0, t, i)(Purpose.LOCAL), 0), (), 1, 3))
            orders = list(shuffles(0, t, i, len(labels), epochs, 4))
            k = sum(map(len, orders))
            y = sgd(PROBLEM, x, rows, labels, orders, rate=0.2, linear=c - own[i])
            new = own[i] - c + (x - y) / (k * 0.2)
            moves.append(y - x)
            changes.append(new - own[i])
            own[i] = new
            steps.add((len(labels), k))
            assert relative(flat(moment.clients_after[i].c), new) <= 1e-12
            assert float(moment.notes[i].gradients) == epochs
        x = x + 0.8 * np.mean(moves, axis=0) if moves else x
        c = c + np.sum(changes, axis=0) / 7 if moves else c
        assert relative(flat(moment.after.x), x) <= 1e-12
        assert relative(flat(moment.after.c), c) <= 1e-12
    assert len({k for _, k in steps}) >= 3


# (b) certificates


def test_control_variates_remove_the_drift():
    """Many local steps and half of the clients: FedAvg settles away from the optimum, SCAFFOLD reaches it."""
    federation = byhand.federation(parts())
    best = optimum(PROBLEM, federation)
    options = {"rounds": 600, "participation": 0.5, "engine": LocalEngine(buckets=1)}
    far = fp.run(fp.FedAvg(epochs=5, step=0.2), PROBLEM, federation, **options)
    near = fp.run(Scaffold(epochs=5, rate=0.2), PROBLEM, federation, **options)
    assert np.linalg.norm(flat(near.model.w) - best.w) <= 1e-6
    assert np.linalg.norm(flat(far.model.w) - best.w) > 1e-2
    assert near.history.last("control") <= 1e-6  # c is the mean gradient in the end


# (c) invariants


@pytest.mark.parametrize("eta", [1.0, 0.3])
def test_c_is_the_mean_of_all_controls_whoever_takes_part(eta):
    s = Scaffold(epochs=2, batch=3, rate=0.2, eta=eta)
    for moment in play(built(s), PROBLEM, parts(), ZERO, COHORTS):
        assert relative(flat(moment.after.c), np.mean([flat(c.c) for c in moment.clients_after], axis=0)) <= 1e-14
    assert np.linalg.norm(flat(moment.after.c)) > 0.05


def test_with_full_steps_a_control_is_the_mean_gradient_along_the_way():
    """(4), option II: c_i⁺ is the mean of the gradients at the points the client went through."""
    (moment,) = play(built(Scaffold(epochs=3, rate=0.2)), PROBLEM, parts(), ZERO, [(1, 4)])
    for i in (1, 4):
        w, seen = np.zeros(4), []
        for _ in range(3):
            seen.append(byhand.gradient(PROBLEM, w, *parts()[i]))
            w = w - 0.2 * seen[-1]
        assert relative(flat(moment.clients_after[i].c), np.mean(seen, axis=0)) <= 1e-12


# (d) degenerate cases


def test_one_client_is_gradient_descent():
    """m = 1: c = c_1, so the correction is zero; E full steps a round."""
    x, y = parts()[3]
    w = np.zeros(4)
    for moment in play(built(Scaffold(epochs=2, rate=0.3), PROBLEM, 1), PROBLEM, [(x, y)], ZERO, [[0]] * 3):
        for _ in range(2):
            w = w - 0.3 * byhand.gradient(PROBLEM, w, x, y)
        assert relative(flat(moment.after.x), w) <= 1e-12
        assert relative(flat(moment.after.c), flat(moment.clients_after[0].c)) <= 1e-14


def test_its_first_round_is_fedavg_s():
    a = play(built(Scaffold(epochs=2, batch=3, rate=0.2)), PROBLEM, parts(), ZERO, COHORTS[:1])[0]
    b = play(built(fp.FedAvg(epochs=2, batch=3, step=0.2)), PROBLEM, parts(), ZERO, COHORTS[:1])[0]
    assert relative(flat(a.after.x), flat(b.after.w)) <= 1e-14


# (f) bad arguments


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"epochs": 0}, r"^epochs \(E\) must be an integer of at least 1, got 0\."),
        ({"vary": 1}, r"^vary must be true or false, got 1\."),
        ({"batch": 2.5}, r"^batch \(B\) must be an integer of at least 1, got 2\.5\."),
        ({"short": "no"}, r"^short must be true or false"),
        ({"rate": -0.1}, r"^rate \(γ\) must be above 0, got -0\.1\."),
        ({"eta": 0}, r"^eta \(η_g\) must be above 0, got 0\."),
    ],
    ids=str,
)
def test_bad_settings_are_refused(settings, message):
    with pytest.raises(InvalidArgument, match=message):
        Scaffold(**settings)


def test_a_batch_larger_than_a_client_is_refused():
    with pytest.raises(InvalidArgument, match=r"^batch \(B\) must be at most the 4 rows of client 0, got 6\."):
        fp.run(Scaffold(batch=6), PROBLEM, byhand.federation(parts()), rounds=1)
