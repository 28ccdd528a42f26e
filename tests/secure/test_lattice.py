"""Numbers as words modulo 2⁶⁴ and back."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedpact.core.errors import InvalidArgument
from fedpact.secure.lattice import CELLS_MOST, Lattice


def test_by_hand():
    lattice = Lattice(bound=2.0, clients=3, step=0.5)
    words = lattice.encode([0.0, 0.5, -0.5, 1.2, -2.0])
    assert words.tolist() == [0, 1, 2**64 - 1, 2, 2**64 - 4]
    assert lattice.cells == 4
    assert lattice.decode(words + words, 2).tolist() == [0.0, 1.0, -1.0, 2.0, -4.0]


@given(st.floats(1e-9, 1e9), st.integers(1, 5000), st.integers(0, 2**32))
def test_a_sum_comes_back_within_the_stated_error(bound, clients, seed):
    lattice, rng = Lattice(bound, clients), np.random.default_rng(seed)
    many = min(clients, 7)
    x = rng.uniform(-bound, bound, (many, 5))
    x[0], x[1 % many] = bound, -bound
    total = lattice.decode(np.sum([lattice.encode(v) for v in x], axis=0, dtype=np.uint64), many)
    for k in range(5):
        exact = sum(Fraction(v) for v in x[:, k].tolist())
        allowed = Fraction(lattice.step) * many / 2 + abs(exact) * Fraction(2) ** -52
        assert abs(Fraction(float(total[k])) - exact) <= allowed
    assert lattice.step == 2.0 ** round(np.log2(lattice.step))
    assert lattice.cells * clients <= CELLS_MOST < 4 * lattice.cells * clients + 4 * clients


def test_the_sum_of_all_clients_at_the_bound_fits():
    lattice = Lattice(3.0, 1000)
    total = lattice.encode([3.0]) * np.uint64(1000)
    assert lattice.decode(total, 1000)[0] == pytest.approx(3000.0, rel=1e-15)
    assert lattice.decode(np.uint64(0) - total, 1000)[0] == pytest.approx(-3000.0, rel=1e-15)


def test_multiples_of_a_given_step_come_back_as_they_were():
    step = 0.1 / 1024
    cells = np.random.default_rng(0).integers(-(2**40), 2**40, 1000)
    lattice = Lattice(bound=2.0**40 * step * 1.01, clients=100, step=step)
    assert np.array_equal(lattice.encode(cells * step).view(np.int64), cells)


@pytest.mark.parametrize("value", [1.0000001, -5.0, np.nan, np.inf, -np.inf])
def test_a_number_beyond_the_range_is_refused_with_its_place(value):
    with pytest.raises(InvalidArgument, match=r"^values\[2\] must be finite and at most 1 in size, got .+ Clip"):
        Lattice(1.0, 5).encode([0.5, -1.0, value, 0.0])


def test_sums_that_no_vectors_give_are_refused():
    lattice = Lattice(1.0, 4)
    words = np.random.default_rng(0).integers(0, 2**64, 100, dtype=np.uint64)
    with pytest.raises(InvalidArgument, match=r"^sum must be of 2 vectors of the lattice, got '\d+ beyond"):
        lattice.decode(words, 2)
    with pytest.raises(InvalidArgument, match=r"^clients must be from 1 to 4, got 5"):
        lattice.decode(words, 5)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ((0.0, 3), "bound must be a positive number"),
        ((np.inf, 3), "bound must be a positive number"),
        ((1.0, 0), r"clients \(n\) must be an integer of at least 1"),
        ((1.0, 3, -1.0), r"step \(g\) must be a positive number, or 0"),
        ((1.0, 3, 1e-19), r"clients · bound / step \(n·bound/g\) must be at most 2⁶², got 3e\+19"),
        ((1.0, 3, 4.0), "bound must be at least half a step"),
    ],
)
def test_bad_arguments(arguments, text):
    with pytest.raises(InvalidArgument, match=f"^{text}"):
        Lattice(*arguments)


def test_only_vectors():
    with pytest.raises(InvalidArgument, match=r"^values must be a vector, got 'an array of shape \(2, 2\)'"):
        Lattice(1.0, 3).encode(np.zeros((2, 2)))
