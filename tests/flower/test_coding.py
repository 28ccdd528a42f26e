"""Numbers as words: sums are exact where they can be, and what cannot be added up is refused."""

from __future__ import annotations

from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedpact as fp
from fedpact.algorithms import ALGORITHMS
from fedpact.core.contract import Batch
from fedpact.core.errors import InvalidArgument
from fedpact.core.keys import client_key
from fedpact.flower.coding import CODINGS, Digits, Fixed, check_summable, flat, only_summed, unflat
from fedpact.secure import Total


def summed(coding, rows):
    lattice = coding.lattice(len(rows))
    words = sum(lattice.encode(coding.spread(row)) for row in rows)
    return coding.gathered(Total(lattice.decode(words, len(rows)), tuple(range(len(rows))), words.view(np.int64)))


@pytest.mark.parametrize("coding", [*CODINGS.values(), Digits(2, 40)], ids=str)
def test_digits_add_up_to_the_last_bit_that_they_have(coding):
    rng = np.random.default_rng(0)
    least = coding.top - 40 * coding.words
    scale = 2.0 ** rng.uniform(least, coding.top, 300)
    rows = rng.uniform(-1, 1, (7, 300)) * scale
    rows[1, :100] = -rows[0, :100]  # where much cancels
    rows[:, 0], rows[:, 1] = coding.bound, -coding.bound
    found = summed(coding, rows)
    for k in range(300):
        exact = sum(Fraction(v) for v in rows[:, k])
        assert abs(Fraction(found[k]) - exact) <= 7 * Fraction(2) ** least / 2 + abs(exact) * Fraction(2, 2**52)


def test_digits_of_every_double_in_reach_are_exact():
    coding = CODINGS["moments"]
    v = np.array([1.0, -1e100, 1e-100, np.pi, 1e300, 2.0**1000, -(2.0**-947), 0.1])
    np.testing.assert_array_equal(summed(coding, [v]), v)


def test_one_word_is_off_by_half_a_step():
    coding, rng = Fixed(1e6), np.random.default_rng(0)
    rows = rng.uniform(-1e6, 1e6, (10, 50))
    step = coding.lattice(10).step
    assert step <= 1e6 * 10 / 2**61
    np.testing.assert_allclose(summed(coding, rows), rows.sum(axis=0), rtol=1e-15, atol=10 * step)


def test_arrays_come_back_in_their_shapes_and_types():
    leaves = [
        np.ones((2, 3)),
        np.float32(2.5),
        np.arange(4, dtype=np.int32),
        np.zeros((0, 3)),
        jnp.ones(2, jnp.bfloat16),
    ]
    leaves = [np.asarray(leaf) for leaf in leaves]
    check_summable(leaves, "step")
    vector = flat(leaves)
    assert (vector.dtype, vector.size) == (np.float64, 13)
    for a, b in zip(leaves, unflat(vector + 1e-9, leaves), strict=True):
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        np.testing.assert_allclose(np.asarray(a, float), np.asarray(b, float), atol=1e-6)


@pytest.mark.parametrize("leaf", [np.array([True]), np.array([1j])])
def test_what_is_no_number_is_refused(leaf):
    with pytest.raises(
        InvalidArgument, match=r"^array 1 of step must be of real numbers or integers under masks, got '"
    ):
        check_summable([np.ones(1), leaf], "step")


HELLOS = {
    "inexact_admm": {"sigma": False, "z": True},  # Σσ_i² is needed too
    "sfedavg": {"z": True},
    "ssca": {"tally": True},
}


@pytest.mark.parametrize("name", HELLOS)
@pytest.mark.parametrize("dtype", [np.float64, np.float32])
def test_of_which_hellos_the_sum_is_enough(name, dtype):
    problem = fp.Logistic(l2=0.0 if name == "ssca" else 0.01)
    algorithm = ALGORITHMS[name]().build(problem, 4, 1.0)
    w0 = problem.init(3, dtype)
    batch = Batch(np.ones((8, 3), dtype), np.ones(8, dtype), np.ones(8, dtype), np.asarray(0))
    hello = jax.eval_shape(lambda b: algorithm.join(w0, b, client_key(jax.random.key(0), 0, 0))[1], batch)
    found = only_summed(lambda hellos: algorithm.init(w0, hellos), hello)
    names = [path[0].name for path, _ in jax.tree_util.tree_leaves_with_path(hello)]
    assert dict(zip(names, found, strict=True)) == HELLOS[name]


@pytest.mark.parametrize(
    ("init", "enough"),
    [(jnp.sum, True), (jnp.mean, True), (jnp.max, False), (lambda a: jnp.sum(a**2), False), (lambda a: a, False)],
)
def test_the_trial_tells_sums_from_others(init, enough):
    assert only_summed(init, jax.ShapeDtypeStruct((), np.float64)) == [enough]
