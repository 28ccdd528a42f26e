"""Local training: every row once an epoch, padding never, momentum and the added terms by hand."""

from __future__ import annotations

import functools
import operator
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedpact.core.contract import Batch
from fedpact.core.errors import InvalidArgument
from fedpact.core.vector import Vector
from fedpact.problems.training import Plan, check_batches, check_training, drawn, local_epochs, share, shuffled, train


def batch(rows, padding=0):
    """One feature: the row's number from 1 on; −1000 in the padding, which would show."""
    x = np.append(np.arange(1.0, rows + 1), np.full(padding, -1000.0))[:, None]
    weight = np.append(np.ones(rows), np.zeros(padding))
    return Batch(jnp.asarray(x), jnp.asarray(10 * x[:, 0]), jnp.asarray(weight), jnp.asarray(0, jnp.int32))


class Watching:
    """An oracle whose gradient is 0 and whose loss is the batch's mean: it notes which rows it is given."""

    def __init__(self):
        self.seen = []

    def value_and_gradient(self, w, rows):
        real = np.asarray(rows.weight) > 0
        assert np.array_equal(np.asarray(rows.y)[real], 10 * np.asarray(rows.x)[real, 0])
        assert float(jnp.sum(rows.weight)) == pytest.approx(self.rows)  # a batch stands for all of the client's rows
        self.seen.append(np.asarray(rows.x)[real, 0].tolist())
        return jnp.mean(jnp.asarray(self.seen[-1])), 0.0 * w


def watched(rows, padding, size, epochs, seed=0):
    watching = Watching()
    watching.rows = rows
    w = Vector({"w": jnp.zeros(1)})
    done = train(watching, w, batch(rows, padding), jax.random.key(seed), Plan(0.1, 0.0, size), epochs)
    return watching.seen, done


@pytest.mark.parametrize(
    ("size", "lengths", "padding"), [(3, [3, 3, 1], 0), (3, [3, 3, 1], 5), (7, [7], 2), (9, [7], 2)]
)
def test_every_row_once_an_epoch_and_padding_never(size, lengths, padding):
    seen, done = watched(7, padding, size, 2)
    assert [len(rows) for rows in seen] == lengths * 2
    count = len(lengths)
    for e in range(2):
        assert sorted(functools.reduce(operator.iadd, seen[e * count : (e + 1) * count], [])) == [1, 2, 3, 4, 5, 6, 7]
    assert int(done.steps) == 2 * count
    assert float(done.loss) == pytest.approx(np.mean([np.mean(rows) for rows in seen[count:]]))


@pytest.mark.parametrize(("size", "count"), [(3, 3), (7, 7), (9, 7), (None, 7)])
def test_rows_are_drawn_without_replacement_and_stand_for_all(size, count):
    """Seven rows and four of padding, which is never drawn; B rows weigh 7/B each."""
    whole, seen = batch(7, 4), set()
    for seed in range(20):
        rows = drawn(whole, size, jax.random.key(seed))
        real = np.asarray(rows.weight) > 0
        seen.add(tuple(np.asarray(rows.x)[real, 0].tolist()))
        assert len(set(np.asarray(rows.x)[real, 0].tolist())) == count == real.sum()
        np.testing.assert_array_equal(np.asarray(rows.y)[real], 10 * np.asarray(rows.x)[real, 0])
        np.testing.assert_allclose(np.asarray(rows.weight)[real], 7 / count, rtol=1e-15)
        assert float(share(rows, whole)) == pytest.approx(count / 7)
    assert set().union(*seen) == {1, 2, 3, 4, 5, 6, 7}
    assert (len(seen) > 10) == (size is not None)


@pytest.mark.parametrize(
    ("place", "size", "expected"), [(0, 3, [1, 2, 3]), (5, 3, [6, 7, 1]), (6, 9, [7, *range(1, 7)])]
)
def test_rows_of_a_stream_come_in_order(place, size, expected):
    """And each of them once where a batch is larger than a client."""
    rows = drawn(batch(7, 4), size, None, jnp.asarray(place))
    real = np.asarray(rows.weight) > 0
    assert np.asarray(rows.x)[real, 0].tolist() == expected
    np.testing.assert_allclose(np.asarray(rows.weight)[real], 7 / len(expected), rtol=1e-15)


def test_all_rows_are_one_batch_in_their_own_order():
    seen, done = watched(5, 4, None, 2)
    assert seen == [[1, 2, 3, 4, 5]] * 2
    assert int(done.steps) == 2


def test_orders_differ_by_epoch_and_by_key():
    one, again, other = (watched(7, 2, 2, 2, seed)[0] for seed in (0, 0, 1))
    assert one == again
    assert one[:4] != one[4:]
    assert one != other


def test_orders_are_uniform():
    """Where each of 5 rows stands in 4,000 shuffles, with 3 of padding: a fifth each, within five deviations."""
    weight = jnp.asarray([1.0] * 5 + [0.0] * 3)
    with jax.disable_jit(False):
        orders = np.asarray(
            jax.jit(jax.vmap(lambda k: shuffled(k, weight, 3)))(jax.random.split(jax.random.key(0), 4000))
        )
    assert orders.shape == (4000, 9)
    assert np.all(np.sort(orders[:, :5]) == np.arange(5))
    assert np.all(orders[:, 5:8] >= 5)
    assert np.all(orders[:, 8] == -1)
    table = np.array([[np.mean(orders[:, place] == row) for row in range(5)] for place in range(5)])
    np.testing.assert_allclose(table, 0.2, atol=5 * (0.16 / 4000) ** 0.5)


@dataclass(frozen=True)
class Quadratic:
    """∇f = w − (mean of the rows), loss ½ of its square."""

    def value_and_gradient(self, w, rows):
        mean = jnp.sum(rows.weight * rows.x[:, 0]) / rows.rows
        return jnp.sum((w.tree["w"] - mean) ** 2) / 2, w - Vector({"w": mean[None]})


def test_momentum_and_the_added_terms_in_round_numbers():
    """Rows 1, 2, 3: mean 2, all rows a step. γ = ½, β = ½, linear 1, ρ = 2 about 1, from 0.

    g = 0 − 2 + 1 + 2(0 − 1) = −3, m = −3,              w = 1.5
    g = 1.5 − 2 + 1 + 2(.5) = 1.5, m = −1.5 + 1.5 = 0,  w = 1.5
    g = 1.5, m = 1.5,                                   w = .75;   the last loss is ½(1.5 − 2)² = .125
    """
    one = lambda v: Vector({"w": jnp.asarray([v])})
    extra = {"linear": one(1.0), "rho": 2.0, "center": one(1.0)}
    done = train(Quadratic(), one(0.0), batch(3, 2), jax.random.key(0), Plan(0.5, 0.5, None), 3, **extra)
    assert done.w.tree["w"].tolist() == [0.75]
    assert float(done.loss) == 0.125
    plain = train(Quadratic(), one(0.0), batch(3, 2), jax.random.key(0), Plan(0.5, 0.0, None), 2)
    assert plain.w.tree["w"].tolist() == [1.5]  # 0 → 1 → 1.5


def test_momentum_lasts_over_batches_and_epochs():
    one = lambda v: Vector({"w": jnp.asarray([v])})
    seen, _ = watched(4, 1, 2, 2, seed=6)
    w = m = 0.0
    for rows in seen:
        m = 0.9 * m + (w - np.mean(rows))
        w = w - 0.1 * m
    done = train(Quadratic(), one(0.0), batch(4, 1), jax.random.key(6), Plan(0.1, 0.9, 2), 2)
    assert float(done.w.tree["w"][0]) == pytest.approx(w, rel=1e-13)


def test_epochs_are_fixed_or_drawn():
    assert int(local_epochs(jax.random.key(0), 4, False)) == 4
    drawn = {int(local_epochs(jax.random.key(s), 3, True)) for s in range(40)}
    assert drawn == {1, 2, 3}


@dataclass(frozen=True)
class Settings:
    epochs: object = 1
    batch: object = None
    rate: object = 0.1
    momentum: object = 0.0
    vary: object = False
    short: object = False


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"epochs": True}, r"epochs \(E\) must be an integer of at least 1, got True"),
        ({"batch": -3}, r"batch \(B\) must be an integer of at least 1, got -3\. Leave it out for all rows\."),
        ({"rate": "fast"}, r"rate \(γ\) must be above 0, got 'fast'"),
        ({"momentum": -0.1}, r"momentum \(β\) must be in \[0, 1\), got -0\.1"),
    ],
    ids=str,
)
def test_bad_settings(changes, said):
    with pytest.raises(InvalidArgument, match=f"^{said}"):
        check_training(Settings(**changes))


def test_a_batch_larger_than_the_smallest_client():
    sizes = np.array([9, 4, 30])
    check_batches(Settings(batch=4))(sizes)
    check_batches(Settings())(sizes)
    check_batches(Settings(batch=10, short=True))(sizes)
    with pytest.raises(
        InvalidArgument, match=r"^batch \(B\) must be at most the 4 rows of client 1, got 10\. Use a smaller"
    ):
        check_batches(Settings(batch=10))(sizes)
