"""FedSGD."""

from __future__ import annotations

import byhand
import numpy as np
import pytest
from byhand import PROBLEM, built, flat, parts, play, relative, vector

import fedpact as fp
from fedpact.algorithms.fedsgd import FedSGD
from fedpact.core.errors import InvalidArgument, UnknownName
from fedpact.problems import optimum

ZERO = vector(np.zeros(4), intercept=True)
COHORTS = ((0, 2, 5), (1, 3, 4, 6), (), (2,))


def test_one_round_in_round_numbers():
    """f_0 = ½(w − 2)² of one row, f_1 = ½(w + 4)² of two, at 0: gradients −2 and 4.

    The mean is 1, by rows (−2 + 2·4)/3 = 2: w = −¼ and −½ with η = ¼.
    """
    clients = [(np.ones((1, 1)), np.array([2.0])), (np.ones((2, 1)), np.array([-4.0, -4.0]))]
    for weights, expected in (("uniform", -0.25), ("rows", -0.5)):
        algorithm = built(FedSGD(rate=0.25, weights=weights), fp.LeastSquares(), 2)
        (moment,) = play(algorithm, fp.LeastSquares(), clients, vector([0.0]), [[0, 1]])
        np.testing.assert_allclose(flat(moment.after.w), [expected], rtol=1e-15)
        assert [float(moment.notes[i].train_loss) for i in (0, 1)] == [2.0, 8.0]
        assert float(moment.notes[1].gradients) == 1


@pytest.mark.parametrize("weights", ["uniform", "rows"])
def test_it_is_fedavg_with_one_step_on_all_rows(weights):
    ways = (
        FedSGD(rate=0.3, weights=weights),
        fp.FedAvg(epochs=1, step=0.3, weights=weights),
        fp.FedAvg(steps=1, step=0.3, weights=weights),
    )
    for moments in zip(*(play(built(s), PROBLEM, parts(), ZERO, COHORTS) for s in ways), strict=True):
        for other in moments[1:]:
            assert relative(flat(moments[0].after.w), flat(other.after.w)) <= 1e-14


def test_what_is_sent_is_the_gradient():
    (moment,) = play(built(FedSGD(weights="rows")), PROBLEM, parts(), ZERO, [(1, 3)])
    for i in (1, 3):
        x, y = parts()[i]
        assert relative(flat(moment.uploads[i].weighted), len(y) * byhand.gradient(PROBLEM, np.zeros(4), x, y)) <= 1e-13
        assert float(moment.uploads[i].weight) == len(y)


def test_everyone_s_gradients_lead_to_the_optimum():
    best = optimum(PROBLEM, byhand.federation(parts()))
    rounds = play(built(FedSGD(rate=1.5)), PROBLEM, parts(), ZERO, [range(7)] * 250)
    assert np.linalg.norm(flat(rounds[-1].after.w) - best.w) <= 1e-6


def test_a_round_without_anyone_changes_nothing():
    moments = play(built(FedSGD(rate=0.3)), PROBLEM, parts(), ZERO, COHORTS)
    np.testing.assert_array_equal(flat(moments[2].after.w), flat(moments[1].after.w))


def test_bad_settings():
    for rate in (0, -1.0, None, float("inf")):
        with pytest.raises(InvalidArgument, match=r"^rate \(η\) must be above 0, got "):
            FedSGD(rate=rate)
    with pytest.raises(
        UnknownName, match=r"^weights must be one of rows, uniform, got 'by rows'\. Did you mean 'rows'"
    ):
        FedSGD(weights="by rows")
