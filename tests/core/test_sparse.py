"""Sparse rows against SciPy and NumPy, which store them in other ways."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.sparse

from fedpact.core.sparse import COLUMN, ROW, SparseRows, stack, stored

PRECISIONS = {np.float32: 2e-6, np.float64: 1e-14}
precisions = pytest.mark.parametrize("dtype", PRECISIONS)


def matrix(rows, features, share, seed=0):
    """Normal numbers in a share of the places, without duplicates."""
    rng = np.random.default_rng(seed)
    return scipy.sparse.csr_array(rng.normal(size=(rows, features)) * (rng.random((rows, features)) < share))


def without(a, rows=(), columns=()):
    dense = a.toarray()
    dense[list(rows)] = 0
    dense[:, list(columns)] = 0
    return scipy.sparse.csr_array(dense)


def one(number):
    """A row with as many entries as there are features."""
    return scipy.sparse.csr_array(np.arange(1.0, number + 1)[None])


KINDS = {
    "random": matrix(23, 40, 0.2),
    "full": matrix(19, 33, 1.0),
    "empty rows": without(matrix(9, 20, 0.5), rows=(0, 4, 8)),
    "empty columns": without(matrix(9, 20, 0.5), columns=(0, 7, 19)),
    "first row alone": without(matrix(9, 20, 0.9), rows=range(1, 9)),
    "last row alone": without(matrix(9, 20, 0.9), rows=range(8)),
    "zero": scipy.sparse.csr_array((5, 6)),
    "one row": one(11),
    "one column": scipy.sparse.csr_array(one(50).T),
    "one number": one(1),
    "a segment's width": one(ROW),
    "a segment and one": one(ROW + 1),
}
kinds = pytest.mark.parametrize("kind", KINDS)


def alone(a, dtype=np.float64, rows=None):
    """One matrix as the engine has it."""
    stacked = stack([a], a.shape[0] if rows is None else rows, dtype)
    return jax.tree.map(lambda leaf: jnp.asarray(leaf[0]), stacked)


def vectors(a, dtype, seed=7):
    rng = np.random.default_rng(seed)
    return rng.normal(size=a.shape[1]).astype(dtype), rng.normal(size=a.shape[0]).astype(dtype)


@jax.jit
def used(x, w, r, rows):
    """What algorithms do with a client's rows."""
    return x @ w, r @ x, x[rows]


def near(got, expected, dtype):
    assert got.dtype == dtype
    np.testing.assert_allclose(got, expected, rtol=0, atol=PRECISIONS[dtype] * max(1.0, np.max(np.abs(expected))))


@kinds
@precisions
def test_products_and_rows_are_those_of_the_dense_matrix(kind, dtype):
    a, padding = KINDS[kind], 3
    x, (w, r) = alone(a, dtype, a.shape[0] + padding), vectors(a, dtype)
    dense, r = np.pad(a.toarray(), ((0, padding), (0, 0))).astype(dtype), np.append(r, np.full(padding, dtype(5)))
    assert (x.shape, x.dtype) == (dense.shape, dtype)
    rows = np.array([0, len(dense) - 1, a.shape[0] // 2, 0, *range(len(dense))])  # repeated, unsorted, of padding
    left, right, some = used(x, w, r, rows)
    near(left, dense.astype(np.float64) @ w, dtype)
    near(right, r.astype(np.float64) @ dense, dtype)
    np.testing.assert_array_equal(some, dense[rows])


def test_scipy_s_other_formats_are_stacked_too():
    a = KINDS["random"]
    for other in (a.tocsc(), a.tocoo(), scipy.sparse.csr_matrix(a), a.tolil()):
        jax.tree.map(np.testing.assert_array_equal, stack([other], 23, np.float64), stack([a], 23, np.float64))


@kinds
def test_every_entry_is_in_both_directions_once(kind):
    """Owner, place and value of the segments, written into a matrix one by one."""
    a = KINDS[kind]
    x = stack([a], a.shape[0], np.float64)
    for segments, shape, width in ((x.rows, a.shape, ROW), (x.columns, a.shape[::-1], COLUMN)):
        owner, place, value = segments.owner[0], segments.place[0], segments.value[0]
        assert place.shape == value.shape == (len(owner), width)
        rebuilt, filled = np.zeros(shape), 0
        for i, p, v in zip(owner, place, value, strict=True):
            for j, number in zip(p, v, strict=True):
                rebuilt[i, j] += number
                filled += number != 0
        np.testing.assert_array_equal(rebuilt, a.toarray() if shape == a.shape else a.toarray().T)
        assert filled == a.nnz


def test_clients_of_unlike_fullness_are_vectorised():
    """Segments are padded to the fullest client's, rows to the longest's; a client of zeros is among them."""
    many = [matrix(4, 21, 0.9, 1), scipy.sparse.csr_array((6, 21)), matrix(7, 21, 0.1, 2), matrix(1, 21, 1.0, 3)]
    dense = np.stack([np.pad(a.toarray(), ((0, 7 - a.shape[0]), (0, 0))) for a in many])
    rng = np.random.default_rng(0)
    w, r, rows = rng.normal(size=(4, 21)), rng.normal(size=(4, 7)), rng.integers(0, 7, (4, 5))
    x = jax.tree.map(jnp.asarray, stack(many, 7, np.float64))
    assert isinstance(x, SparseRows)

    left, right, some = jax.vmap(used)(x, w, r, rows)
    np.testing.assert_allclose(left, np.einsum("cij,cj->ci", dense, w), atol=1e-13)
    np.testing.assert_allclose(right, np.einsum("ci,cij->cj", r, dense), atol=1e-13)
    np.testing.assert_array_equal(some, np.take_along_axis(dense, rows[:, :, None], axis=1))


def test_inside_a_program_vectors_of_numpy_will_do():
    a = KINDS["random"]
    x, (w, r) = alone(a), vectors(a, np.float64)
    left, right, some = jax.jit(lambda x: (x @ w, r @ x, x[np.array([3, 3, 0])]))(x)
    np.testing.assert_allclose(left, a @ w, atol=1e-13)
    np.testing.assert_allclose(right, r @ a, atol=1e-13)
    np.testing.assert_array_equal(some, a.toarray()[[3, 3, 0]])


def test_it_is_a_tree_of_arrays():
    a = KINDS["random"]
    x = alone(a)
    leaves, treedef = jax.tree.flatten(x)
    assert {leaf.dtype for leaf in leaves} == {np.dtype(np.int32), np.dtype(np.float64)}
    again = jax.tree.unflatten(treedef, leaves)
    assert (again.shape, again.longest) == (x.shape, x.longest) == ((23, 40), x.longest)
    np.testing.assert_array_equal(again[np.arange(23)], a.toarray())
    assert treedef == jax.tree.structure(alone(2.0 * a)), "the same places are the same program"
    doubled = jax.tree.map(lambda leaf: 2 * leaf if leaf.dtype == np.float64 else leaf, x)
    np.testing.assert_array_equal(doubled[np.arange(23)], 2 * a.toarray())


def test_products_have_derivatives():
    a = KINDS["random"]
    x, (w, r) = alone(a), vectors(a, np.float64)
    np.testing.assert_allclose(jax.grad(lambda w: r @ (x @ w))(jnp.asarray(w)), r @ a, atol=1e-13)
    np.testing.assert_allclose(jax.grad(lambda r: (r @ x) @ w)(jnp.asarray(r)), a @ w, atol=1e-13)


def test_what_is_stored_by_a_count_by_hand():
    """Rows of 9, 1, 0 and 8 entries are 2, 1, 0 and 1 segments of 8; their nine columns, at most 3 full, 9 of 16."""
    a = scipy.sparse.csr_array(np.array([[1.0] * 9, [1.0] + [0.0] * 8, [0.0] * 9, [0.0] + [1.0] * 8]))
    assert (ROW, COLUMN) == (8, 16)
    assert stored(a) == 4 * 8 + 9 * 16
    tall = scipy.sparse.csr_array(np.ones((17, 1)))  # 17 segments of 8, and 2 of 16
    assert stored(tall) == 17 * 8 + 2 * 16
    assert stored(scipy.sparse.csr_array((5, 6))) == 0


@kinds
def test_what_is_stored_is_what_the_arrays_hold(kind):
    a = KINDS[kind]
    x = stack([a], a.shape[0], np.float64)
    assert stored(a) == (x.rows.value.size + x.columns.value.size if a.nnz else 0)
