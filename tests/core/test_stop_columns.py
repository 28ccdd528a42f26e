"""Stop rules read the columns of the history, by their names and with their values."""

from __future__ import annotations

import numpy as np
import pytest

import fedpact as fp
from fedpact.core.errors import FedpactError
from fedpact.core.stop import Outcome


def run(stop, rounds=4, **options):
    rng = np.random.default_rng(0)
    parts = [(rng.normal(size=(6, 2)), np.array([0, 1, 0, 1, 1, 0])) for _ in range(3)]
    federation = fp.data.Federation.from_arrays(parts, classes=["0", "1"])
    return fp.run(fp.FedAvg(steps=2), fp.Logistic(), federation, rounds=rounds, stop=stop, engine="debug", **options)


def test_a_column_that_does_not_exist_is_refused_with_the_nearest():
    """It must not count as 0, which would meet the target at the start."""
    with pytest.raises(FedpactError, match=r"got 'objectve'\. Did you mean 'objective'\?"):
        run(fp.stop.Target("objectve", 0.1))


def test_a_target_on_a_cumulative_column_is_on_the_cumulative_numbers():
    """`gradients` in the history: 3 clients × 2 steps a round make 6, 12, 18, 24."""
    out = run(fp.stop.Target("gradients", 18, above=True))
    assert out.outcome_kind is Outcome.STOPPED
    assert out.history.column("gradients").tolist() == [0, 6, 12, 18]


def test_a_target_on_accuracy():
    out = run(fp.stop.Target("accuracy", 0.0, above=True))
    assert out.history.rounds == 0
