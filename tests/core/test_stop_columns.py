"""Stop rules read the columns of the history, by their names and with their values."""

from __future__ import annotations

import numpy as np
import pytest

import fedpact as fp
from fedpact.core.errors import FedpactError


def run(stop, rounds=4, **options):
    rng = np.random.default_rng(0)
    parts = [(rng.normal(size=(6, 2)), np.array([0, 1, 0, 1, 1, 0])) for _ in range(3)]
    federation = fp.data.Federation.from_arrays(parts, classes=["0", "1"])
    return fp.run(fp.FedAvg(steps=2), fp.Logistic(), federation, rounds=rounds, stop=stop, engine="debug", **options)


def test_a_column_that_does_not_exist_is_refused_with_the_nearest():
    """It must not count as 0, which would meet the target at the start."""
    with pytest.raises(FedpactError, match=r"got 'objectve'\. Did you mean 'objective'\?"):
        run(fp.stop.Target("objectve", 0.1))


def test_a_target_on_a_count_that_only_the_host_keeps_is_refused():
    """A round knows its own gradients, the history their sum: a rule must not mistake one for the other."""
    with pytest.raises(FedpactError, match=r"column of the stop rule must be one of .+, got 'gradients'\."):
        run(fp.stop.Target("gradients", 18, above=True))


def test_a_target_on_accuracy():
    out = run(fp.stop.Target("accuracy", 0.0, above=True))
    assert out.history.rounds == 1


@pytest.mark.drill
def test_residuals_that_are_0_before_the_first_round_stop_nothing_there():
    """Inexact ADMM starts in consensus: the rule waits for a round, in a run and in trials."""
    federation = fp.data.breast_cancer().split(clients=4, seed=0)
    rule = fp.stop.Target("primal_residual", 1e9)
    setup = (fp.InexactADMM(), fp.Logistic(l2=1e-2), federation)
    alone = fp.run(*setup, rounds=5, stop=rule)
    assert alone.history.column("primal_residual")[0] == 0
    assert alone.history.rounds == 1
    assert [one.history.rounds for one in fp.trials(*setup, [0, 1], rounds=5, stop=rule)] == [1, 1]
