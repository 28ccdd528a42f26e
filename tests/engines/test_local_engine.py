"""The local engine: layout, padding, buckets, chunks and slots; always the clients' own order and numbers."""

from __future__ import annotations

import dataclasses
import itertools
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.sparse

import fedpact as fp
from fedpact.core.contract import Cohort
from fedpact.core.errors import FedpactError, InvalidArgument, UnknownName
from fedpact.core.loop import draw
from fedpact.core.participation import Fraction, Poisson, Schedule
from fedpact.engines import DebugEngine, LocalEngine, as_engine, local

SIZES = (5, 2, 7, 2, 4, 7, 1)
ORDER = [6, 1, 3, 4, 0, 2, 5]  # by size, ties by number


class Clients:
    """Client i's features are 100 i + row, its labels the row."""

    def __init__(self, sizes=SIZES):
        self.sizes, self.clients, self.features = np.array(sizes), len(sizes), 2
        self.dataset = SimpleNamespace(test=())

    def client(self, i):
        rows = np.arange(float(self.sizes[i]))
        return np.stack([100 * i + rows, -rows], axis=1), rows


@pytest.fixture
def cheap_buckets(monkeypatch):
    monkeypatch.setattr(local, "BUCKET_COST", 0)


def test_one_bucket_holds_everyone_by_size(cheap_buckets):
    order, data = LocalEngine(buckets=1).load([Clients()], np.float64)
    assert order.tolist() == [ORDER]
    (batch,) = data.buckets
    assert batch.x.shape == (7, 7, 2)
    assert batch.client.tolist() == ORDER
    for slot, i in enumerate(ORDER):
        d = SIZES[i]
        x, y = Clients().client(i)
        np.testing.assert_array_equal(batch.x[slot, :d], x)
        np.testing.assert_array_equal(batch.y[slot, :d], y)
        np.testing.assert_array_equal(batch.weight[slot], [1.0] * d + [0.0] * (7 - d))
        assert not np.any(batch.x[slot, d:])
        assert not np.any(batch.y[slot, d:])


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_four_buckets_waste_less(cheap_buckets, dtype):
    order, data = LocalEngine(buckets=4).load([Clients()], dtype)
    assert [batch.client.tolist() for batch in data.buckets] == [[6], [1, 3], [4, 0], [2, 5]]
    assert [batch.y.shape[1] for batch in data.buckets] == [1, 2, 5, 7]
    assert {leaf.dtype for batch in data.buckets for leaf in (batch.x, batch.y, batch.weight)} == {np.dtype(dtype)}
    engine = LocalEngine(buckets=4)
    assert engine.clients_of(data).tolist() == order[0].tolist() == ORDER
    for position, i in enumerate(ORDER):
        one = engine.one_client(data, position)
        assert int(one.client) == i
        np.testing.assert_array_equal(one.x[: SIZES[i]], Clients().client(i)[0])


def test_several_trials_have_an_axis_of_their_own(cheap_buckets):
    other = Clients((2, 2, 7, 9, 4, 1, 1))
    order, data = LocalEngine(buckets=2).load([Clients(), other], np.float64)
    assert order.tolist() == [ORDER, [5, 6, 0, 1, 4, 2, 3]]
    assert [batch.client.shape[0] for batch in data.buckets] == [2, 2]
    widths = np.maximum(np.sort(SIZES), np.sort(other.sizes))
    ends = np.cumsum([batch.client.shape[1] for batch in data.buckets]) - 1
    assert [batch.y.shape[2] for batch in data.buckets] == widths[ends].tolist()
    for t, clients in enumerate((Clients(), other)):
        rows = np.concatenate([np.asarray(batch.weight[t]).sum(axis=1) for batch in data.buckets])
        np.testing.assert_array_equal(rows, clients.sizes[order[t]])


@pytest.mark.parametrize("cost", [0, 3, 10])
@pytest.mark.parametrize("most", [1, 2, 3, 4])
def test_bounds_are_the_cheapest_of_all_cuts(monkeypatch, cost, most):
    monkeypatch.setattr(local, "BUCKET_COST", cost)
    for seed in range(10):
        widths = np.sort(np.random.default_rng(seed).integers(1, 30, 8))
        bounds = local.bucket_bounds(widths, most)
        assert bounds[0][0] == 0
        assert bounds[-1][1] == 8
        assert all(a[1] == b[0] for a, b in itertools.pairwise(bounds))
        assert len(bounds) <= most
        price = lambda cuts, widths=widths: sum((hi - lo) * int(widths[hi - 1]) + cost for lo, hi in cuts)
        every = (
            list(itertools.pairwise((0, *inner, 8)))
            for count in range(most)
            for inner in itertools.combinations(range(1, 8), count)
        )
        assert price(bounds) == min(price(cuts) for cuts in every)


def total(batch, row):
    """Of client i: its number, the sum of its rows and what was handed in."""
    return {"client": batch.client, "sum": jnp.sum(batch.weight[:, None] * batch.x), "row": 2 * row}


def expected(positions):
    sums = {i: float(Clients().client(i)[0].sum()) for i in range(7)}
    own = [ORDER[p] for p in positions]
    return {"client": own, "sum": [sums[i] for i in own], "row": [2.0 * p for p in positions]}


ENGINES = {
    "one": LocalEngine(buckets=1),
    "four": LocalEngine(buckets=4),
    "chunks of 3": LocalEngine(buckets=1, chunk=3),
    "little memory": LocalEngine(buckets=1, memory=1000),
}


@pytest.mark.parametrize("name", ENGINES)
def test_map_keeps_the_order(cheap_buckets, name):
    engine = ENGINES[name]
    _, data = engine.load([Clients()], np.float64)
    rows = jnp.arange(7.0)
    for cohort in (None, Cohort(None, jnp.array([True, False] * 3 + [True]))):
        out = engine.map(total, data, rows, cohort, where=(0, "test"))
        for key, values in expected(range(7)).items():
            np.testing.assert_array_equal(out[key], values)


def test_map_over_slots_steps_only_the_cohort(cheap_buckets):
    """Slots are positions by size; each bucket has its own, and an empty one repeats the bucket's first client."""
    engine = LocalEngine(buckets=4)
    _, data = engine.load([Clients()], np.float64)
    slots = (jnp.array([0]), jnp.array([2]), jnp.array([4, 3]), jnp.array([5, 5]))
    cohort = Cohort(slots, jnp.array([False, True, True, False, True, False]))
    positions = [0, 2, 4, 3, 5, 5]
    out = engine.map(total, data, cohort.take(jnp.arange(7.0)), cohort, where=(0, "test"))
    for key, values in expected(positions).items():
        np.testing.assert_array_equal(out[key], values)
    assert out["client"].shape == (6,)


def test_slots_are_made_only_where_they_save_work():
    engine = LocalEngine(buckets=1)
    _, data = engine.load([Clients((3,) * 20)], np.float64)
    few, many = engine.capacities(data, 4, False), engine.capacities(data, 11, False)
    assert few.bounds == ((0, 20),)
    assert few.sizes.tolist() == [4]
    assert many is None


def test_cohorts_are_drawn_as_positions_and_masks(cheap_buckets):
    """Clients 2, 4 and 6 stand at positions 5, 3 and 0."""
    schedule, order = Schedule([[2, 4, 6], [], [1]]), np.array(ORDER)
    drawn = draw(schedule, 0, 0, 3, 5, order, None)
    assert drawn.participants.tolist() == [3, 0, 1]
    assert drawn.cohorts.slots is None
    assert np.argwhere(drawn.cohorts.mask).tolist() == [[0, 0], [0, 3], [0, 5], [2, 1]]
    assert drawn.cohorts.mask.shape == (5, 7)
    bounds = ((0, 3), (3, 7))
    tight = draw(schedule, 0, 0, 3, 5, order, local.Capacities(bounds, np.array([1, 2]))).cohorts
    assert [s.shape for s in tight.slots] == [(5, 1), (5, 2)]
    for t, positions in enumerate([[0, 3, 5], [], [1], [], []]):
        cohort = jax.tree.map(lambda a, t=t: a[t], tight)
        chosen = np.concatenate([np.asarray(s) for s in cohort.slots])[cohort.mask]
        assert sorted(chosen.tolist()) == positions
        assert int(cohort.mask.sum()) == len(positions)


def test_a_block_that_does_not_fit_its_slots_takes_everyone_s(cheap_buckets):
    order = np.array(ORDER)
    room = local.Capacities(((0, 3), (3, 7)), np.array([1, 2]))
    crowded = Schedule([[2], [6, 1]])  # positions 0 and 1, both in the first bucket
    assert draw(crowded, 0, 0, 1, 4, order, room).cohorts.slots is not None
    drawn = draw(crowded, 0, 0, 2, 4, order, room)
    assert drawn.cohorts.slots is None
    assert np.argwhere(drawn.cohorts.mask).tolist() == [[0, 5], [1, 0], [1, 1]]


def test_random_rounds_fit_the_room_made_for_them():
    sizes = np.random.default_rng(0).integers(1, 60, 200)
    engine = LocalEngine(buckets=3)
    order, data = engine.load([Clients(sizes)], np.float64)
    scheme = Fraction(0.05)
    room = engine.capacities(data, scheme.capacity(200), False)
    assert room is not None
    drawn = draw(scheme, 1, 0, 50, 50, order[0], room)
    assert drawn.cohorts.slots is not None
    assert np.all(drawn.cohorts.mask.sum(axis=1) == 10)
    for t in range(50):
        chosen = np.concatenate([s[t] for s in drawn.cohorts.slots])[drawn.cohorts.mask[t]]
        assert sorted(order[0][chosen].tolist()) == scheme.select(1, t, 200).tolist()


@pytest.fixture(scope="module")
def crowd():
    """300 clients of few rows."""
    rng = np.random.default_rng(3)
    parts = [(rng.standard_normal((d, 3)), rng.standard_normal(d)) for d in rng.integers(1, 9, 300)]
    return fp.data.Federation.from_arrays(parts, classes=())


def run_crowd(crowd, participation):
    settings = fp.FedAvg(steps=2, step=0.1)
    run = fp.run(settings, fp.LeastSquares(), crowd, participation=participation, rounds=20, seed=2)
    return {name: run.history.column(name) for name in ("objective", "gradient", "participants", "bytes_up")}


def test_poisson_rounds_step_a_few_clients_to_the_numbers_of_stepping_everyone(crowd, monkeypatch):
    """A schedule of the same draws gives every client a slot, as `Poisson` did before it kept less room."""
    slots = []
    plain = LocalEngine.map

    def spy(self, f, data, rows, cohort, where):
        if where[1] == "client_step":
            slots.append(cohort.mask.shape[0])
        return plain(self, f, data, rows, cohort, where)

    monkeypatch.setattr(LocalEngine, "map", spy)
    tight = run_crowd(crowd, Poisson(0.04))
    assert max(slots) < 100
    everyone = run_crowd(crowd, Schedule([Poisson(0.04).select(2, t, 300).tolist() for t in range(20)]))
    assert max(slots) == 300
    assert len(set(tight["participants"])) > 3
    for name in ("participants", "bytes_up"):
        np.testing.assert_array_equal(tight[name], everyone[name])
    for name in ("objective", "gradient"):
        np.testing.assert_allclose(tight[name], everyone[name], rtol=1e-12)


def test_poisson_rounds_beyond_their_room_take_everyone_s_slots(crowd, monkeypatch):
    roomy = run_crowd(crowd, Poisson(0.04))
    monkeypatch.setattr(Poisson, "capacity", lambda self, clients: 1)
    assert max(roomy["participants"]) > 1
    for name, values in run_crowd(crowd, Poisson(0.04)).items():
        np.testing.assert_allclose(values, roomy[name], rtol=1e-12)


@pytest.mark.parametrize("sparse", [False, True])
def test_the_dataset_s_test_rows_are_looked_at_in_blocks(monkeypatch, sparse):
    """Ten rows in blocks of four, two of them padding."""
    monkeypatch.setattr(local, "TEST_ROWS", 4)
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(30, 3)), rng.normal(size=30)
    dataset = fp.data.from_arrays(scipy.sparse.csr_array(x) if sparse else x, y, classes=())
    dataset = dataclasses.replace(dataset, test=np.arange(20, 30))
    engine = LocalEngine()
    _, data = engine.load([dataset.split(clients=4)], np.float64)
    assert data.test.y.shape == (3, 4)
    got = engine.test(lambda w, b: {"rows": b.rows, "sum": jnp.sum(b.weight * (b.x @ w + b.y))}, jnp.ones(3), data)
    assert float(got["rows"]) == 10
    assert float(got["sum"]) == pytest.approx(x[20:].sum() + y[20:].sum(), rel=1e-12)
    assert engine.test(None, None, engine.load([Clients()], np.float64)[1]) is None


def test_engines_by_name():
    assert as_engine("local") == LocalEngine()
    assert as_engine("debug") == DebugEngine()
    own = LocalEngine(chunk=2)
    assert as_engine(own) is own
    with pytest.raises(
        UnknownName,
        match=r"^engine must be one of debug, flower, host, local, ray, got 'locl'\. Did you mean 'local'\?$",
    ):
        as_engine("locl")


def test_what_is_no_engine_is_refused():
    with pytest.raises(FedpactError, match=r"^engine must be .+, got 5\."):
        as_engine(5)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"chunk": 0}, r"chunk must be an integer of at least 1, got 0\."),
        ({"buckets": 0}, r"buckets must be an integer of at least 1, got 0\."),
        ({"memory": 0}, r"memory must be a number of bytes above 0, got 0\."),
    ],
)
def test_bad_options(options, said):
    with pytest.raises(InvalidArgument, match=f"^{said}$"):
        LocalEngine(**options)
