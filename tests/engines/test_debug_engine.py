"""The debug engine: the same map in plain Python, and errors that say round, client and stage."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from fedpact.core.contract import Cohort
from fedpact.core.errors import ClientError, DataError, InvalidArgument
from fedpact.engines import DebugEngine

ENGINE = DebugEngine()


class Clients:
    clients, features, sizes = 3, 1, np.array([2, 4, 3])

    def client(self, i):
        return np.full((self.sizes[i], 1), 10.0 + i), np.zeros(self.sizes[i])


def load(dtype=np.float64):
    return ENGINE.load([Clients()], dtype)


def numbers(batch, row):
    return {"client": batch.client, "sum": jnp.sum(batch.x), "row": row}


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_rows_are_as_they_are(dtype):
    order, data = load(dtype)
    assert order.tolist() == [[0, 1, 2]]
    assert [batch.x.shape for batch in data] == [(2, 1), (4, 1), (3, 1)]
    assert all(bool(jnp.all(batch.weight == 1)) for batch in data)
    assert {leaf.dtype for batch in data for leaf in (batch.x, batch.y, batch.weight)} == {np.dtype(dtype)}
    assert ENGINE.clients_of(data).tolist() == [0, 1, 2]
    assert ENGINE.capacities(data, 1, False) is None


def test_map_is_a_loop():
    out = ENGINE.map(numbers, load()[1], jnp.array([5.0, 6.0, 7.0]), None, where=(0, "test"))
    assert out["client"].tolist() == [0, 1, 2]
    assert out["sum"].tolist() == [20, 44, 36]
    assert out["row"].tolist() == [5, 6, 7]


def test_those_outside_the_cohort_are_not_called():
    called = []

    def f(batch, row):
        called.append(int(batch.client))
        return numbers(batch, row)

    cohort = Cohort(None, jnp.array([False, True, True]))
    out = ENGINE.map(f, load()[1], jnp.array([5.0, 6.0, 7.0]), cohort, where=(0, "measure"))
    assert called == [1, 2]
    assert out["sum"].tolist() == [0, 44, 36]


def test_nobody_still_has_shapes():
    out = ENGINE.map(numbers, load()[1], jnp.zeros(3), Cohort(None, jnp.zeros(3, bool)), where=(0, "measure"))
    assert out["sum"].tolist() == [0, 0, 0]
    assert out["client"].dtype == jnp.int32


def test_a_failure_says_round_client_and_stage():
    def f(batch, row):
        if int(batch.client) == 1:
            raise ZeroDivisionError("by zero")
        return numbers(batch, row)

    with pytest.raises(ClientError, match=r"^round 4, client 1, measure: ZeroDivisionError: by zero$") as caught:
        ENGINE.map(f, load()[1], jnp.zeros(3), None, where=(4, "measure"))
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


def test_our_own_errors_pass_through():
    def f(batch, row):
        raise DataError("a sentence.")

    with pytest.raises(DataError, match=r"^a sentence\.$"):
        ENGINE.map(f, load()[1], jnp.zeros(3), None, where=(4, "measure"))


@pytest.mark.parametrize("stage", ["client_step", "join"])
def test_the_first_number_that_is_not_finite_is_named(stage):
    """In what a client keeps and what it sends; its notes may hold NaN for 'none'."""

    def f(batch, row, where):
        bad = jnp.where(batch.client == 2, jnp.nan, 1.0)
        fine = jnp.ones(())
        return {0: ({"w": bad}, fine, fine), 1: (fine, {"z": bad}, fine), 2: (fine, fine, bad)}[where]

    for where, name in ((0, "w"), (1, "z")):
        with pytest.raises(ClientError, match=rf"^round 1, client 2, {stage}: .*'{name}'.* is not finite\.$"):
            ENGINE.map(lambda b, r, w=where: f(b, r, w), load()[1], jnp.zeros(3), None, where=(1, stage))
    if stage == "client_step":
        ENGINE.map(lambda b, r: f(b, r, 2), load()[1], jnp.zeros(3), None, where=(1, stage))


def test_trials_are_for_the_local_engine():
    with pytest.raises(InvalidArgument, match=r"^engine must be 'local' for vectorised trials, got 'debug'\. "):
        ENGINE.load([Clients(), Clients()], np.float64)
