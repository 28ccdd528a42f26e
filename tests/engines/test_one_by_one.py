"""Clients of much data step one after the other: who is left out is skipped, and the run is the vectorised one."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedpact as fp
from fedpact.core.contract import Cohort
from fedpact.engines import LocalEngine, local

pytestmark = pytest.mark.drill

SMALL, LARGE = 3, 14  # rows; a client's 5 numbers a row in double precision and its number: 124 and 564 bytes
BETWEEN = 300
PROBLEM = fp.Logistic(l2=0.4, intercept=True)


@functools.cache
def federation(small=3, large=2, seed=0):
    rng = np.random.default_rng(seed)
    truth, parts = rng.normal(size=3), []
    for d in rng.permutation([SMALL] * small + [LARGE] * large):
        x = rng.normal(size=(d, 3)) + rng.normal(size=3) / 2
        target = x @ truth + rng.normal(size=d)
        target[:2] = [9.0, -9.0]
        parts.append((x, (target > 0).astype(float)))
    return fp.data.Federation.from_arrays(parts, classes=["0", "1"])


@pytest.fixture
def engine(monkeypatch):
    """A bucket for small clients and one for large ones."""
    monkeypatch.setattr(local, "BUCKET_COST", 0)
    return LocalEngine(buckets=2)


def loaded(engine, clients=None):
    order, data = engine.load([clients or federation()], np.float64)
    return order[0], data


# Who steps


def traced(engine, cohort, clients=None):
    """The outcome of a map that notes the clients it is really computed for, compiled, and those clients."""
    _, data = loaded(engine, clients)
    seen = []

    def f(batch, row):
        jax.debug.callback(lambda client: seen.append(int(client)), batch.client)
        return {"client": batch.client, "sum": jnp.sum(batch.weight[:, None] * batch.x), "row": row + 1}

    rows = cohort.take(jnp.arange(10.0, 10.0 + sum(len(batch.y) for batch in data.buckets)))
    out = jax.jit(lambda data, rows, cohort: engine.map(f, data, rows, cohort, (0, "test")))(data, rows, cohort)
    jax.block_until_ready(out)
    jax.effects_barrier()
    return out, seen


@pytest.mark.parametrize("mask", [[1, 0, 0, 1, 0], [0, 0, 0, 0, 0], [1, 1, 1, 1, 1]], ids=str)
def test_clients_outside_the_cohort_are_skipped(monkeypatch, engine, mask):
    monkeypatch.setattr(local, "ONE_BY_ONE", 0)
    order, _ = loaded(engine)
    out, seen = traced(engine, Cohort(None, jnp.array(mask, bool)))
    assert sorted(seen) == sorted(client for client, takes_part in zip(order, mask, strict=True) if takes_part)
    for slot, (client, takes_part) in enumerate(zip(order, mask, strict=True)):
        expected = [client, federation().client(int(client))[0].sum(), 11.0 + slot] if takes_part else [0, 0.0, 0.0]
        got = [float(out[name][slot]) for name in ("client", "sum", "row")]
        np.testing.assert_allclose(got, expected, rtol=1e-13)


def test_slots_of_large_clients_are_skipped_where_they_are_empty(monkeypatch, engine):
    """Small clients, positions 0 to 2, are gathered and all three slots computed; of two large slots one is empty."""
    monkeypatch.setattr(local, "ONE_BY_ONE", BETWEEN)
    order, _ = loaded(engine)
    cohort = Cohort((jnp.array([2, 0, 0]), jnp.array([4, 3])), jnp.array([True, False, False, True, False]))
    out, seen = traced(engine, cohort)
    assert sorted(seen) == sorted([order[2], order[0], order[0], order[4]])
    assert out["client"].tolist() == [order[2], order[0], order[0], order[4], 0]
    assert out["row"].tolist() == [13.0, 11.0, 11.0, 15.0, 0.0]


def test_below_the_limit_everyone_is_computed(engine):
    order, _ = loaded(engine)
    _, seen = traced(engine, Cohort(None, jnp.zeros(5, bool)))
    assert sorted(seen) == sorted(order)


def test_room_is_made_for_small_clients_and_for_vectorised_trials(monkeypatch, engine):
    """Where every client can be skipped slots save nothing; vectorised trials compute every slot there is."""
    crowd = federation(30, 8)
    _, data = loaded(engine, crowd)
    _, both = engine.load([crowd, federation(30, 8, seed=1)], np.float64)
    monkeypatch.setattr(local, "ONE_BY_ONE", BETWEEN)
    assert engine.capacities(data, 3, False).sizes.tolist() == [3, 3]
    monkeypatch.setattr(local, "ONE_BY_ONE", 0)
    assert engine.capacities(data, 3, False) is None
    assert engine.capacities(both, 3, True).sizes.tolist() == [3, 3]


# Whole runs

STALE = fp.FedAvgStale(k0=2, a=8.0)  # its clients have states
COHORTS = ((0, 2), (), (1, 3, 4), (2,), (0, 1, 2, 3, 4), ())


def same(one, other):
    """Histories but for the clock, and models."""
    assert one.history.columns == other.history.columns
    for name in one.history.columns:
        if name != "seconds":
            got, expected = one.history.column(name), other.history.column(name)
            np.testing.assert_allclose(got, expected, rtol=1e-12, atol=1e-14, err_msg=name)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-14), one.model.w, other.model.w)


CASES = {
    "partial participation, empty rounds": (0, federation(), {"participation": COHORTS, "rounds": len(COHORTS)}),
    "slots, large clients only": (BETWEEN, federation(30, 8), {"participation": 0.1, "rounds": 12}),
}


@pytest.mark.parametrize("case", CASES)
def test_a_run_one_by_one_is_the_vectorised_run(monkeypatch, engine, case):
    limit, clients, options = CASES[case]
    vectorised = fp.run(STALE, PROBLEM, clients, engine=engine, **options)
    monkeypatch.setattr(local, "ONE_BY_ONE", limit)
    same(fp.run(STALE, PROBLEM, clients, engine=engine, **options), vectorised)
    objective = vectorised.history.column("objective")
    assert objective[-1] < objective[0] - 1e-3


def test_trials_one_by_one_are_the_vectorised_trials(monkeypatch):
    """Each trial draws few clients of a federation of its own."""
    splits = [federation(30, 8, seed=seed) for seed in (0, 1)]
    engine = LocalEngine(buckets=1)
    run = lambda: fp.trials(STALE, PROBLEM, splits, [3, 4], engine=engine, participation=0.1, rounds=3)
    vectorised = run()
    monkeypatch.setattr(local, "ONE_BY_ONE", 0)
    for one, other in zip(run(), vectorised, strict=True):
        same(one, other)
