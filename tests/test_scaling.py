"""The cost model: its bytes are those that runs count."""

from __future__ import annotations

import numpy as np
import pytest

import fedpact as fp
from fedpact.algorithms import ALGORITHMS
from fedpact.core.errors import InvalidArgument
from fedpact.scaling import costs

QUICK = ("fedepm", "scaffold", "inexact_admm")
NAMES = [name for name in ALGORITHMS if not ALGORITHMS[name].vertical]


@pytest.mark.parametrize("name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.drill) for n in NAMES])
def test_bytes_are_those_a_run_counts(name):
    clients, rounds = 6, 2
    federation = fp.data.synthetic(rows=60, features=5).split(clients=clients, seed=0)
    problem = fp.Logistic(l2=1e-3)
    run = fp.run(ALGORITHMS[name](), problem, federation, rounds=rounds, participation=0.5)
    found = costs(ALGORITHMS[name](), problem, 5, clients, 0.5, rows=10, dtype=np.float64)
    assert found.cohort == 3
    assert run.history.column("bytes_up").tolist() == [found.start + t * found.bytes_up for t in range(rounds + 1)]
    assert run.history.column("bytes_down").tolist() == [t * found.bytes_down for t in range(rounds + 1)]


@pytest.mark.parametrize("name", NAMES)
def test_a_million_clients_of_large_models_can_be_asked_about(name):
    found = costs(ALGORITHMS[name](), fp.Logistic(l2=1e-3), 10**8, 10**6, 0.01)
    assert found.cohort == 10**4
    assert found.up >= 4 * 10**8
    assert (found.memory > 4 * 10**14) == (found.combine == "each") == (name == "fedepm")


def test_a_sum_needs_the_same_memory_for_any_number_of_clients():
    few, many = (costs(fp.FedADMM(), fp.Logistic(), 1000, m, 0.1) for m in (10**3, 10**6))
    assert few.memory == many.memory
    assert many.touched == 1000 * few.touched


def test_a_server_of_nodes_holds_the_uploads_of_a_round_whatever_it_needs_of_them():
    summed, each = (costs(settings, fp.Logistic(), 1000, 10**4, 0.1) for settings in (fp.FedADMM(), fp.FedEPM()))
    assert summed.memory_flower - summed.memory == (10**3 - 1) * 4 * 1000  # a stream has one of them
    assert each.memory_flower == each.memory


@pytest.mark.parametrize("settings", [fp.FedEPM(), fp.FedPDM(memory=True)], ids=["fedepm", "fedpdm"])
def test_what_needs_every_message_keeps_one_of_each_client(settings):
    found = costs(settings, fp.Logistic(), 1000, 10**4, 0.1)
    assert found.kept == 4 * 1000
    assert found.touched == 1000 * 10**4
    assert found.memory > 10**4 * found.kept


def test_limits_on_every_clients_loss_keep_a_gradient_of_each():
    capped = fp.Constrained(fp.Logistic(l2=0), fp.Loss() + fp.Norm2(), [fp.ClientLoss() <= 1.0])
    found = costs(fp.SSCA(), capped, 50, 7, 1.0, dtype=np.float64)
    assert (found.combine, found.separable, found.kept) == ("each", False, 8 * 50)


def test_data_split_by_features_are_refused():
    with pytest.raises(InvalidArgument, match="settings must be of an algorithm for data split by rows"):
        costs(fp.VerticalSSCA(), fp.Logistic(), 10, 10, 1.0)
