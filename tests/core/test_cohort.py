"""Cohort: rows of those who take part, whatever stands in the rows of those who do not."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedpact.core.contract import Batch, Cohort, check_needs, wire_bytes
from fedpact.core.errors import InvalidArgument
from fedpact.core.vector import Vector

NAN = np.nan


def stacked(seed=0):
    rng = np.random.default_rng(seed)
    return {"w": Vector({"w": jnp.asarray(rng.normal(size=(5, 2)))}), "r": jnp.asarray(rng.normal(size=5))}


def gathered():
    """Clients 1 and 4 take part; two slots are empty and point at clients that exist."""
    return Cohort((jnp.array([1, 3]), jnp.array([4, 4])), jnp.array([True, False, True, False]))


def rows(*values):
    """A row per slot: value v gives w = (v, 10v) and r = −v."""
    v = np.array(values, float)
    return {"w": Vector({"w": jnp.asarray(np.stack([v, 10 * v], axis=1))}), "r": jnp.asarray(-v)}


def arrays(tree):
    return [np.asarray(leaf) for leaf in jax.tree.leaves(tree)]


def same(a, b):
    for x, y in zip(arrays(a), arrays(b), strict=True):
        np.testing.assert_array_equal(x, y)


def test_take_gives_the_rows_at_the_slots():
    data = stacked()
    taken = gathered().take(data)
    np.testing.assert_array_equal(taken["r"], np.asarray(data["r"])[[1, 3, 4, 4]])
    np.testing.assert_array_equal(taken["w"].tree["w"], np.asarray(data["w"].tree["w"])[[1, 3, 4, 4]])
    np.testing.assert_array_equal(gathered().positions, [1, 3, 4, 4])
    assert int(gathered().count) == 2


def test_put_replaces_those_who_take_part_and_nobody_else():
    data = stacked()
    new = gathered().put(data, rows(7, NAN, 8, NAN))  # the last empty slot also points at client 4
    expected_r, expected_w = np.array(data["r"]), np.array(data["w"].tree["w"])
    expected_r[[1, 4]] = [-7, -8]
    expected_w[[1, 4]] = [[7, 70], [8, 80]]
    np.testing.assert_array_equal(new["r"], expected_r)
    np.testing.assert_array_equal(new["w"].tree["w"], expected_w)
    same(data, stacked())  # and the old ones are as they were


def test_sums_and_means_leave_out_the_empty_slots():
    values = rows(7, NAN, 8, NAN)
    total = gathered().sum(values)
    np.testing.assert_array_equal(total["w"].tree["w"], [15, 150])
    assert float(total["r"]) == -15
    mean = gathered().mean(values, rows(99, 99, 99, 99))
    np.testing.assert_array_equal(mean["w"].tree["w"], [[7.5, 75]] * 4)  # broadcast against `otherwise`
    otherwise = jax.tree.map(lambda a: a[0], rows(99))
    mean = gathered().mean(values, otherwise)
    np.testing.assert_array_equal(mean["w"].tree["w"], [7.5, 75])
    assert float(mean["r"]) == -7.5


@pytest.mark.parametrize("slots", [None, (jnp.arange(3), jnp.arange(3, 5))], ids=["everyone", "slots"])
def test_nobody_takes_part(slots):
    empty = Cohort(slots, jnp.zeros(5, bool))
    data, other = rows(*[NAN] * 5), jax.tree.map(lambda a: a[0], rows(3))
    assert int(empty.count) == 0
    same(empty.sum(data), jax.tree.map(jnp.zeros_like, other))
    same(empty.mean(data, other), other)
    same(empty.put(stacked(), data), stacked())


@pytest.mark.parametrize("mask", [[1, 0, 1, 1, 0], [1, 1, 1, 1, 1], [0, 0, 0, 0, 1]])
def test_a_slot_for_everyone_is_the_same_written_out(mask):
    mask = jnp.array(mask, bool)
    short, long = Cohort(None, mask), Cohort((jnp.array([0, 1]), jnp.array([2, 3, 4])), mask)
    new = jax.tree.map(lambda a: jnp.where(mask.reshape(-1, *[1] * (a.ndim - 1)), a, NAN), stacked(1))
    other = jax.tree.map(lambda a: a[0], stacked(2))
    np.testing.assert_array_equal(short.positions, long.positions)
    same(short.take(stacked()), long.take(stacked()))
    same(short.put(stacked(), new), long.put(stacked(), new))
    same(short.sum(new), long.sum(new))
    same(short.mean(new, other), long.mean(new, other))


def test_in_a_compiled_program_over_trials_it_is_the_same():
    masks = jnp.array([[True, False, True, False], [False, True, True, True]])
    slots = (jnp.array([[1, 3], [0, 2]]), jnp.array([[4, 4], [3, 4]]))
    both = jax.jit(jax.vmap(lambda s, m: Cohort(s, m).put(stacked(), rows(1, 2, 3, 4))))(slots, masks)
    np.testing.assert_array_equal(both["r"][0], np.asarray(stacked()["r"]) * [1, 0, 1, 1, 0] - [0, 1, 0, 0, 3])
    np.testing.assert_array_equal(both["r"][1], np.asarray(stacked()["r"]) * [1, 1, 0, 0, 0] - [0, 0, 2, 3, 4])


def test_put_keeps_the_precision_of_what_is_stored():
    store = {"r": jnp.zeros(5, jnp.float32)}
    new = gathered().put(store, {"r": jnp.arange(4.0)})
    assert new["r"].dtype == jnp.float32
    single = Cohort(None, jnp.array([True, True, False])).mean(jnp.ones(3, jnp.float32), jnp.zeros((), jnp.float32))
    assert single.dtype == jnp.float32


def test_rows_of_a_batch_are_the_weighted_ones():
    batch = Batch(jnp.ones((5, 2)), jnp.ones(5), jnp.array([1.0, 1, 1, 0, 0]), jnp.asarray(0))
    assert float(batch.rows) == 3


def test_bytes_of_a_message_come_from_its_types():
    message = (jnp.zeros((3, 2), jnp.float32), {"a": jnp.zeros(5, jnp.float64), "b": jnp.zeros((), jnp.int64)})
    assert wire_bytes(message) == 6 * 4 + 5 * 8 + 8
    assert wire_bytes(jax.eval_shape(lambda: message)) == 72
    assert wire_bytes(()) == 0


def test_a_problem_without_what_the_algorithm_needs_is_refused():
    class Bare:
        lipschitz = None

    class Declared:
        name, needs = "fedfoo", frozenset({"lipschitz"})

    with pytest.raises(InvalidArgument, match=r"^problem must be one that has 'lipschitz' for fedfoo, got Bare\. "):
        check_needs(Declared, Bare())
    Bare.lipschitz = staticmethod(lambda batch: 1.0)
    check_needs(Declared, Bare())
