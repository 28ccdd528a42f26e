"""SGD and momentum SGD for data split by features."""

from __future__ import annotations

import math

import byhand
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from byhand import built, flat, key_of, parts, play, relative, vector

import fedpact as fp
from fedpact import Constrained, Loss, Norm1, Norm2
from fedpact.algorithms.vertical_sgd import VerticalSGD
from fedpact.core.errors import InvalidArgument
from fedpact.core.keys import Purpose
from fedpact.core.vertical import Layout

#: Two records, a column with each of two parties: F = ¼((w_1 − 2)² + (w_1 + 2w_2 + 4)²).
RECORDS = (np.array([[1.0, 0.0], [1.0, 2.0]]), np.array([2.0, -4.0]))
APART = Layout(((1,), (0,)), ("0", "1"), 0)
SQUARES = fp.LeastSquares()
HALVES = {"rate": 0.5, "rate_power": 1.0}  # r = ½, ¼, …
LOGISTIC = fp.Logistic(l2=0, intercept=True)
THREE = Layout(((2,), (0,), (1,)), ("0", "1", "2"), 1)


def rounds(settings, problem=SQUARES, count=2, cohorts=None):
    algorithm = built(settings, problem, APART)
    return play(algorithm, problem, [RECORDS], vector([0.0, 0.0]), cohorts or [[0]] * count)


# (a) steps by hand


def test_two_rounds_in_round_numbers():
    """r = ½ then ¼, β = ½, from 0.

    t = 1  x w = (0, 0), δ = (−2, 4)/2,  g = xᵀδ = (−1 + 2, 2·2) = (1, 4),  v = g,  w = (−½, −2)
    t = 2  x w = (−½, −4½), δ = (−2½, −½)/2,  g = (−1½, −½),  v = ½(1, 4) + g = (−1, 1½),  w = (−¼, −2⅜)
    """
    one, two = rounds(VerticalSGD(momentum=0.5, **HALVES))
    np.testing.assert_allclose(flat(one.after.w), [-0.5, -2.0], rtol=1e-12)
    np.testing.assert_allclose(flat(two.after.w), [-0.25, -2.375], rtol=1e-12)
    np.testing.assert_allclose(flat(two.after.v), [-1.0, 1.5], rtol=1e-12)
    assert (float(one.info.rate), float(two.info.rate)) == (0.5, 0.25)
    assert float(one.notes[0].train_loss) == pytest.approx(5.0, rel=1e-12)  # ½(4 + 16)/2
    assert int(two.after.round) == 2


def test_norms_are_the_server_s():
    """+ ½‖w‖², exact or not: after the same first step g = (−1½, −½) + w, w = (−½, −2) − ¼g."""
    for norm in (Norm2(), Norm2(exact=False)):
        _, two = rounds(VerticalSGD(**HALVES), Constrained(SQUARES, minimize=Loss() + 0.5 * norm))
        np.testing.assert_allclose(flat(two.after.w), [-0.5 + 0.25 * 2.0, -2.0 + 0.25 * 2.5], atol=1e-12)


def test_rounds_are_the_literal_algorithm():
    """Batches of five records drawn anew, momentum, and a round of nobody."""
    (x, y), s = parts()[3], VerticalSGD(batch=5, rate=0.4, rate_power=0.5, momentum=0.3)
    w, v, cohorts = np.zeros(4), np.zeros(4), [[0], [0], [], [0]]
    moments = play(built(s, LOGISTIC, THREE), LOGISTIC, [(x, y)], vector(w, True), cohorts, compiled=True)
    for t, moment in enumerate(moments):
        if cohorts[t]:
            numbers = np.asarray(jax.random.uniform(key_of(0, t, 0)(Purpose.LOCAL), (12,), jnp.float32))
            rows = np.argsort(-numbers)[:5]
            v = 0.3 * v + byhand.gradient(LOGISTIC, w, x[rows], y[rows])
            w = w - 0.4 / math.sqrt(t + 1) * v
            assert float(moment.notes[0].gradients) == pytest.approx(5 / 12)
        assert relative(flat(moment.after.w), w) <= 1e-11
        assert relative(flat(moment.after.v), v) <= 1e-11
        assert int(moment.after.round) == t + 1


# (b) a certificate, (d) a degenerate case


def test_on_all_records_it_is_gradient_descent_to_the_least_squares_solution():
    """F is 0 at (2, −3), which solves w_1 = 2 and w_1 + 2w_2 = −4."""
    federation = fp.data.from_arrays(*RECORDS, classes=()).split_features(blocks=[[1], [0]])
    settings = VerticalSGD(rate=0.4, rate_power=0.0, momentum=0.6)
    run = fp.run(settings, SQUARES, federation, rounds=200)
    np.testing.assert_allclose(flat(run.model.w), [2.0, -3.0], atol=1e-8)
    assert run.history.last("objective") <= 1e-15
    w, v, f = np.zeros(2), np.zeros(2), []
    for _ in range(6):
        f.append(byhand.value(SQUARES, w, *RECORDS))
        v = 0.6 * v + byhand.gradient(SQUARES, w, *RECORDS)
        w = w - 0.4 * v
    np.testing.assert_allclose(run.history.column("objective")[:6], f, rtol=1e-9)


# (f) bad arguments


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"batch": 1},
            r"^batch \(B\) must be at least 2, got 1\. From one record's gradients its features can be read",
        ),
        ({"rate": -0.1}, r"^rate \(ā\) must be above 0, got -0\.1\."),
        ({"rate_power": "slow"}, r"^rate_power \(ᾱ\) must be at least 0, got 'slow'\."),
        ({"momentum": -0.5}, r"^momentum \(β\) must be in \[0, 1\), got -0\.5\."),
        ({"collection": "one-step"}, r"^collection must be \"two-step\", got 'one-step'\. It sends every raw row"),
        ({"reveal_rows": "yes"}, r"^reveal_rows must be true or false, got 'yes'\."),
    ],
    ids=str,
)
def test_bad_settings_are_refused(settings, message):
    with pytest.raises(InvalidArgument, match=message):
        VerticalSGD(**settings)


@pytest.mark.parametrize(
    ("problem", "message"),
    [
        (
            Constrained(LOGISTIC, minimize=Loss() + Norm1()),
            r"^minimize must be smooth for vertical_sgd, got Loss\(\) \+ ",
        ),
        (
            Constrained(LOGISTIC, subject_to=[Norm2() <= 1.0]),
            r"^subject_to must be empty for vertical_sgd, got .*Constraints need vertical_ssca\.",
        ),
        (fp.Logistic(), r"^l2 of Logistic must be 0 for feature-split data, got 0\.001\."),
    ],
)
def test_problems_that_do_not_fit_are_refused(problem, message):
    with pytest.raises(InvalidArgument, match=message):
        VerticalSGD().build(problem, APART, 1.0)


def test_rows_are_no_columns():
    federation = fp.data.from_arrays(*RECORDS, classes=()).split(clients=2)
    with pytest.raises(
        InvalidArgument, match=r"^federation must be split by features for vertical_sgd, got 'Federation'"
    ):
        fp.run(VerticalSGD(), SQUARES, federation, rounds=1)


def test_it_says_what_the_messages_tell():
    (said,) = built(VerticalSGD(batch=5), LOGISTIC, THREE).notices
    assert "(B = 5, 1 sum a record)" in said
    assert "determined for nobody; not for the server; the closer; another client" in said
