"""SGD and momentum SGD with E local steps."""

from __future__ import annotations

import math

import byhand
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from byhand import built, flat, key_of, parts, play, relative, vector

import fedpact as fp
from fedpact.algorithms.local_sgd import LocalSGD
from fedpact.core.errors import InvalidArgument
from fedpact.core.keys import Purpose
from fedpact.engines import LocalEngine
from fedpact.problems import optimum

#: f_0 = ½(w − 2)² on one row, f_1 = ½(w + 4)² on two: N = 3.
TWO = ((np.ones((1, 1)), np.array([2.0])), (np.ones((2, 1)), np.array([-4.0, -4.0])))
SQUARES = fp.LeastSquares()
HALVES = {"rate": 0.5, "rate_power": 1.0}  # r = ½, ¼, …


def two(settings, cohorts=((0, 1), (0, 1))):
    return play(built(settings, SQUARES, 2), SQUARES, TWO, vector([0.0]), cohorts)


def number(w):
    return float(flat(w)[0])


# (a) steps by hand


def test_two_rounds_in_round_numbers():
    """E = 2, from 0, r = ½ then ¼.

    t = 1  w_0 = ½·2 = 1, then 1 + ½·1 = 1.5;   w_1 = −2, then −2 − ½·2 = −3;   w = (1.5 − 2·3)/3 = −1.5
    t = 2  w_0 = −1.5 + ¼·3.5 = −.625, then −.625 + ¼·2.625 = .03125
           w_1 = −1.5 − ¼·2.5 = −2.125, then −2.125 − ¼·1.875 = −2.59375;   w = (.03125 − 5.1875)/3
    """
    one, after = two(LocalSGD(steps=2, **HALVES))
    assert number(one.after.w) == pytest.approx(-1.5, rel=1e-15)
    assert number(after.after.w) == pytest.approx((0.03125 - 5.1875) / 3, rel=1e-14)
    assert one.after.v is None
    assert (float(one.info.rate), float(after.info.rate)) == (0.5, 0.25)
    assert [float(note.gradients) for note in one.notes.values()] == [2.0, 2.0]
    assert float(one.notes[0].train_loss) == 0.5  # ½(1 − 2)², before the last step


def test_momentum_is_averaged_with_the_models():
    """β = ½, E = 2, r = ½, v = 0.

    t = 1  client 0: v = −2, w = 1;  v = −1 − 1 = −2, w = 2.    client 1: v = 4, w = −2;  v = 2 + 2 = 4, w = −4
           w = (2 − 8)/3 = −2,  v = (−2 + 8)/3 = 2
    t = 2  r = ¼; client 1 alone, from w = −2 and v = 2:  v = 1 + 2 = 3, w = −2.75;  v = 1.5 + 1.25, w = −3.4375
    """
    one, after = two(LocalSGD(steps=2, momentum=0.5, **HALVES), [(0, 1), (1,)])
    assert (number(one.after.w), number(one.after.v)) == pytest.approx((-2.0, 2.0), rel=1e-15)
    assert (number(after.after.w), number(after.after.v)) == pytest.approx((-3.4375, 2.75), rel=1e-15)


def test_rounds_are_the_literal_algorithm():
    """Batches of three drawn anew in every step, unequal clients, a regulariser divided by d_i, and who is away."""
    clients, problem = parts(sizes=(4, 9, 6)), fp.Logistic(l2=2.0, intercept=True)
    s = LocalSGD(steps=2, batch=3, rate=0.4, rate_power=0.5, momentum=0.3)
    w, v = np.zeros(4), np.zeros(4)
    cohorts = [(0, 1, 2), (1, 2), (), (0, 2)]
    for t, moment in enumerate(play(built(s, problem, 3), problem, clients, vector(w, True), cohorts, compiled=True)):
        models, momenta = [], []
        for i in cohorts[t]:
            x, y = clients[i]
            own, m = w, v
            for k in range(2):
                key = jax.random.fold_in(key_of(0, t, i)(Purpose.LOCAL), k)
                numbers = np.asarray(jax.random.uniform(key, (12,), jnp.float32))[: len(y)]
                m = 0.3 * m + byhand.batch_gradient(problem, own, x, y, np.argsort(-numbers)[:3])
                own = own - 0.4 / math.sqrt(t + 1) * m
            models.append(own)
            momenta.append(m)
            assert float(moment.notes[i].gradients) == pytest.approx(6 / len(y))
        if cohorts[t]:
            weights = [len(clients[i][1]) for i in cohorts[t]]
            w, v = np.average(models, axis=0, weights=weights), np.average(momenta, axis=0, weights=weights)
        assert relative(flat(moment.after.w), w) <= 1e-12
        assert relative(flat(moment.after.v), v) <= 1e-12
        assert int(moment.after.round) == t + 1


# (b) a certificate


def test_one_step_a_round_on_all_rows_reaches_the_optimum_of_equal_clients():
    """E = 1 is gradient descent on the mean; the optimum is an independent solver's."""
    problem, clients = fp.Logistic(l2=0.5, intercept=True), parts(sizes=(6, 6, 6))
    federation = byhand.federation(clients)
    settings = LocalSGD(rate=0.7, rate_power=0.0, momentum=0.3)
    run = fp.run(settings, problem, federation, rounds=300, engine=LocalEngine(buckets=1))
    assert relative(flat(run.model.w), optimum(problem, federation).w) <= 1e-6
    assert run.history.last("gradient") <= 1e-12


# (c) invariants and (d) degenerate cases


def test_one_client_and_all_rows_is_gradient_descent():
    """E·T steps, whatever the rounds, where the rate is constant; with momentum the heavy ball."""
    pooled = [TWO[1]]
    for beta in (0.0, 0.5):
        w, v = 0.0, 0.0
        for _ in range(6):
            v = beta * v + (w + 4)
            w = w - 0.1 * v
        for steps, rounds in ((1, 6), (3, 2)):
            s = LocalSGD(steps=steps, rate=0.1, rate_power=0.0, momentum=beta)
            moments = play(built(s, SQUARES, 1), SQUARES, pooled, vector([0.0]), [[0]] * rounds)
            assert number(moments[-1].after.w) == pytest.approx(w, rel=1e-14)


def test_on_all_rows_it_is_fedavg_s_gradient_steps():
    """With β = 0 and a constant rate, by the rows."""
    s = LocalSGD(steps=3, rate=0.2, rate_power=0.0)
    a = two(s)
    b = play(built(fp.FedAvg(steps=3, step=0.2, weights="rows"), SQUARES, 2), SQUARES, TWO, vector([0.0]), [(0, 1)] * 2)
    for one, other in zip(a, b, strict=True):
        assert number(one.after.w) == pytest.approx(number(other.after.w), rel=1e-14)


def test_a_round_of_nobody_changes_nothing():
    one, empty = two(LocalSGD(steps=2, momentum=0.5), [(0, 1), ()])
    assert number(empty.after.w) == number(one.after.w)
    assert number(empty.after.v) == number(one.after.v)


def test_momentum_is_sent_only_where_there_is_any():
    (plain,) = two(LocalSGD(), [(0, 1)])
    assert plain.msg.v is plain.uploads[0].v is None
    assert float(plain.uploads[1].weight) == 2.0


# (f) bad arguments


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"steps": 0}, r"^steps \(E\) must be an integer of at least 1, got 0\."),
        ({"batch": 1.5}, r"^batch \(B\) must be an integer of at least 1, got 1\.5\. Leave it out for all rows\."),
        ({"rate": 0}, r"^rate \(ā\) must be above 0, got 0\."),
        ({"rate_power": -1}, r"^rate_power \(ᾱ\) must be at least 0, got -1\."),
        ({"momentum": 1.0}, r"^momentum \(β\) must be in \[0, 1\), got 1\.0\."),
        ({"short": "yes"}, r"^short must be true or false, got 'yes'\."),
    ],
    ids=str,
)
def test_bad_settings_are_refused(settings, message):
    with pytest.raises(InvalidArgument, match=message):
        LocalSGD(**settings)


def test_a_batch_larger_than_a_client_is_refused():
    with pytest.raises(InvalidArgument, match=r"^batch \(B\) must be at most the 1 rows of client 0, got 2\."):
        fp.run(LocalSGD(batch=2), SQUARES, byhand.federation(TWO, ()), rounds=1)
