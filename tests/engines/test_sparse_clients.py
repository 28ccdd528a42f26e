"""Sparse features in the local engine: where they stay sparse, and that a run does not depend on it."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.sparse

import fedpact as fp
from fedpact.core.errors import InvalidArgument
from fedpact.core.sparse import SparseRows
from fedpact.engines import DebugEngine, LocalEngine, local

pytestmark = pytest.mark.drill

SIZES = (5, 12, 3, 9, 9)
FEATURES = 30


@functools.cache
def matrix():
    """A tenth of the places filled, some rows and columns empty."""
    rng, rows, features = np.random.default_rng(0), sum(SIZES), FEATURES
    dense = rng.normal(size=(rows, features)) * (rng.random((rows, features)) < 0.1)
    dense[[0, rows - 1]] = 0
    dense[:, [0, features - 1]] = 0
    return scipy.sparse.csr_array(dense)


@functools.cache
def federation(kind="sparse", seed=0):
    x = matrix()
    y = (x @ np.random.default_rng(9).normal(size=FEATURES) > 0).astype(float)
    dataset = fp.data.from_arrays(x if kind == "sparse" else x.toarray(), y, classes=("0", "1"))
    return dataset.split(how="sizes", sizes=list(SIZES), seed=seed)


# The layout


def dense_of(segments, shape):
    """The entries of a client's segments, added one by one to a matrix."""
    out = np.zeros(shape, segments.value.dtype)
    np.add.at(out, (np.asarray(segments.owner)[:, None], np.asarray(segments.place)), np.asarray(segments.value))
    return out


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_sparse_clients_are_laid_out_as_dense_ones_are(monkeypatch, dtype):
    monkeypatch.setattr(local, "BUCKET_COST", 0)
    loaded = [LocalEngine(buckets=3, sparse=keep).load([federation()], dtype) for keep in (True, False)]
    (order, data), (order_dense, dense) = loaded
    np.testing.assert_array_equal(order, order_dense)
    assert len(data.buckets) == len(dense.buckets) == 3
    for batch, other in zip(data.buckets, dense.buckets, strict=True):
        assert isinstance(batch.x, SparseRows)
        assert batch.x.shape == other.x.shape[1:]
        assert batch.x.dtype == other.x.dtype == dtype
        for a, b in zip(batch[1:], other[1:], strict=True):
            np.testing.assert_array_equal(a, b)
        for slot, client in enumerate(batch.client):
            own = federation().client(int(client))[0].toarray()
            padded = np.pad(own, ((0, batch.y.shape[1] - len(own)), (0, 0))).astype(dtype)
            mine = jax.tree.map(lambda a, slot=slot: np.asarray(a)[slot], batch.x)
            np.testing.assert_array_equal(dense_of(mine.rows, padded.shape), padded)
            np.testing.assert_array_equal(dense_of(mine.columns, padded.shape[::-1]), padded.T)
            np.testing.assert_array_equal(np.asarray(other.x)[slot], padded)


def test_sparse_trials_have_an_axis_of_their_own():
    splits = [federation(seed=0), federation(seed=1)]
    order, ((batch,), _) = LocalEngine(buckets=1, sparse=True).load(splits, np.float64)
    assert {leaf.shape[:2] for leaf in jax.tree.leaves(batch)} == {(2, 5)}
    w = jnp.asarray(np.random.default_rng(0).normal(size=FEATURES))
    got = jax.vmap(jax.vmap(lambda x: x @ w))(batch.x)
    for trial, split in enumerate(splits):
        for slot, client in enumerate(order[trial]):
            own = split.client(int(client))[0] @ np.asarray(w)
            np.testing.assert_allclose(got[trial, slot], np.append(own, np.zeros(12 - len(own))), atol=1e-14)


def column(rows, features):
    """One entry in each row, all in one column: rows·8 numbers by rows, and by columns 16 for every sixteen rows."""
    x = scipy.sparse.csr_array((np.ones(rows), (np.arange(rows), np.zeros(rows, int))), shape=(rows, features))
    return fp.data.from_arrays(x, np.arange(rows) % 2)


def kept(engine, dataset, clients=1):
    _, data = engine.load([dataset.split(clients)], np.float64)
    return all(isinstance(batch.x, SparseRows) for batch in data.buckets)


def test_features_stay_sparse_where_less_than_three_tenths_would_be_stored():
    """20 rows: 20·8 + 2·16 = 192 numbers, which is .3 of 640 = 20·32. At two clients of ten 2·(10·8 + 16) = 192 too."""
    for clients in (1, 2):
        assert not kept(LocalEngine(), column(20, 32), clients)
        assert kept(LocalEngine(), column(20, 33), clients)
        assert kept(LocalEngine(sparse=True), column(20, 32), clients)
        assert not kept(LocalEngine(sparse=False), column(20, 33), clients)


def test_dense_features_are_never_made_sparse():
    dataset = fp.data.from_arrays(column(20, 100).x.toarray(), np.arange(20) % 2)
    for keep in (None, True, False):
        assert not kept(LocalEngine(sparse=keep), dataset)


def test_the_debug_engine_makes_them_dense():
    _, data = DebugEngine().load([federation()], np.float32)
    for batch, i in zip(data, range(5), strict=True):
        assert batch.x.dtype == np.float32
        np.testing.assert_array_equal(batch.x, federation().client(i)[0].toarray().astype(np.float32))


# Whole runs

PROBLEM = fp.Logistic(l2=0.4, intercept=True)
COHORTS = ((0, 2), (1, 3, 4), (), (2,), (0, 1, 2, 3, 4))
BATCHES = fp.FedAvg(steps=2, step=0.4, batch=3, weights="rows")
ALGORITHMS = {
    "fedavg_stale": fp.FedAvgStale(k0=2, a=5.0),
    "inexact_admm": fp.InexactADMM(k0=2),
}


def same(one, other, tolerance=1e-11):
    """Histories but for the clock, and models."""
    assert one.history.columns == other.history.columns
    for name in one.history.columns:
        if name != "seconds":
            got, expected = one.history.column(name), other.history.column(name)
            np.testing.assert_allclose(got, expected, rtol=tolerance, atol=1e-13, err_msg=name)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=tolerance, atol=1e-13), one.model.w, other.model.w)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_run_on_sparse_features_is_the_run_on_dense_ones(name):
    runs = [
        fp.run(
            ALGORITHMS[name],
            PROBLEM,
            federation(kind),
            engine=LocalEngine(buckets=1, sparse=keep),
            participation=COHORTS,
            rounds=len(COHORTS),
        )
        for kind, keep in (("sparse", True), ("dense", None))
    ]
    same(*runs)
    objective = runs[0].history.column("objective")
    assert objective[-1] < objective[0] - 1e-3


def test_trials_on_sparse_features_are_the_trials_on_dense_ones():
    """With batches, whose rows are picked from the sparse ones; each trial has a split and a seed of its own."""
    ends = [
        fp.trials(
            BATCHES,
            PROBLEM,
            [federation(kind, seed) for seed in (0, 1)],
            [3, 4],
            engine=LocalEngine(buckets=1, sparse=keep),
            participation=0.4,
            rounds=3,
        )
        for kind, keep in (("sparse", True), ("dense", None))
    ]
    for one, other in zip(*ends, strict=True):
        same(one, other)
    assert np.all(ends[0][0].history.column("objective")[1:] != ends[0][1].history.column("objective")[1:])


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"memory": "1G"}, r"memory must be a number of bytes above 0, got '1G'\."),
        ({"memory": None}, r"memory must be a number of bytes above 0, got None\."),
        ({"sparse": "yes"}, r"sparse must be True, False or None, got 'yes'\."),
        ({"sparse": 0.3}, r"sparse must be True, False or None, got 0\.3\."),
    ],
)
def test_bad_options_of_sparse_and_memory(options, said):
    with pytest.raises(InvalidArgument, match=f"^{said}$"):
        LocalEngine(**options)
