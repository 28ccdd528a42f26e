"""λ_max(AᵀA) where AᵀA is not formed, by Lanczos for large or sparse rows and AAᵀ for few: against NumPy."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.sparse

from fedpact.core import sparse
from fedpact.core.contract import Batch
from fedpact.problems.base import LANCZOS_STEPS, SQUARED_UP_TO, largest_eigenvalue

DENSE = (300, 290)
program = jax.jit(largest_eigenvalue, static_argnums=1)


def batch(x, padding=0, dtype=np.float64):
    """Rows as the engine has them, dense or sparse, with rows of weight 0 after them."""
    d = x.shape[0]
    weight = np.append(np.ones(d), np.zeros(padding)).astype(dtype)
    if scipy.sparse.issparse(x):
        rows = jax.tree.map(lambda a: jnp.asarray(a[0]), sparse.stack([x], d + padding, dtype))
    else:
        rows = jnp.asarray(np.pad(x, ((0, padding), (0, 0))), dtype)
    return Batch(rows, jnp.zeros(d + padding, dtype), jnp.asarray(weight), jnp.asarray(0))


def found(x, intercept=False, padding=0, dtype=np.float64):
    with jax.disable_jit(False):
        out = program(batch(x, padding, dtype), intercept)
    assert out.dtype == dtype
    return float(out)


def expected(x, intercept=False):
    a = x.toarray() if scipy.sparse.issparse(x) else x
    a = np.column_stack([a, np.ones(len(a))]) if intercept else a
    return np.linalg.eigvalsh(a.T @ a)[-1] if a.shape[1] <= len(a) else np.linalg.eigvalsh(a @ a.T)[-1]


def turned(values, shape=DENSE, seed=0):
    """A matrix whose AᵀA has these largest eigenvalues, in directions of no structure."""
    rng = np.random.default_rng(seed)
    left, right = (np.linalg.qr(rng.normal(size=(size, len(values))))[0] for size in shape)
    return left * np.sqrt(np.array(values, float)) @ right.T


def thin(rows, features, share, seed=0):
    rng = np.random.default_rng(seed)
    return scipy.sparse.csr_array(rng.normal(size=(rows, features)) * (rng.random((rows, features)) < share))


# Large rows


def test_these_shapes_are_too_large_to_square():
    assert min(DENSE) > SQUARED_UP_TO
    assert min(DENSE) > LANCZOS_STEPS


@pytest.mark.parametrize("intercept", [False, True])
@pytest.mark.parametrize("shift", [0.0, 0.5])
def test_random_matrices(intercept, shift):
    for seed in range(3):
        x = np.random.default_rng(seed).normal(size=DENSE) + shift
        assert found(x, intercept) == pytest.approx(expected(x, intercept), rel=1e-8)


@pytest.mark.parametrize("shape", [(257, 400), (400, 257)])
def test_more_rows_than_features_and_fewer(shape):
    x = np.random.default_rng(0).normal(size=shape) * np.linspace(0.1, 3, shape[1])
    assert found(x) == pytest.approx(expected(x), rel=1e-8)


def test_eigenvalues_that_decay():
    x = turned(0.8 ** np.arange(100))
    assert found(x) == pytest.approx(1.0, rel=1e-12)


@pytest.mark.parametrize(
    "values",
    [
        np.linspace(1.0, 0.99, 100),
        np.append(np.linspace(1.0, 0.999, 50), np.linspace(0.9, 0.1, 200)),
        np.linspace(1.0, 0.01, 290),
        np.append(1 - np.logspace(-12, -2, 60), np.linspace(0.5, 0.1, 100)),
    ],
    ids=["all near the top", "a cluster and the rest", "evenly", "ever nearer"],
)
def test_eigenvalues_that_crowd_at_the_top(values):
    """To a thousandth, and from below."""
    got = found(turned(values))
    assert got == pytest.approx(values.max(), rel=1e-3)
    assert got <= values.max() * (1 + 1e-12)


@pytest.mark.parametrize("count", [1, 2, 290])
def test_equal_eigenvalues(count):
    """Then fewer steps than are taken already say it all, and the rest must not add to it."""
    assert found(turned([7.0] * count)) == pytest.approx(7.0, rel=1e-11)


@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e6])
def test_rank_one_at_any_scale(scale):
    u, v = np.arange(1.0, 301.0), np.cos(np.arange(290.0))
    assert found(scale * np.outer(u, v)) == pytest.approx(scale**2 * (u @ u) * (v @ v), rel=1e-11)


def test_zeros():
    """Without curvature; with an intercept the column of ones is left, whose square is the number of rows."""
    assert found(np.zeros(DENSE)) == 0
    assert found(np.zeros(DENSE), intercept=True) == pytest.approx(300, rel=1e-12)
    assert found(np.zeros(DENSE), intercept=True, padding=5) == pytest.approx(300, rel=1e-12)


def test_padding_and_a_column_of_ones():
    x = np.random.default_rng(4).normal(size=DENSE)
    ones = np.column_stack([x, np.ones(300)])
    assert found(x, intercept=True, padding=40) == pytest.approx(expected(ones), rel=1e-8)


def test_single_precision():
    x = np.random.default_rng(0).normal(size=DENSE)
    assert found(x, dtype=np.float32) == pytest.approx(expected(x), rel=1e-5)


# Sparse rows of any size


@pytest.mark.parametrize("intercept", [False, True])
@pytest.mark.parametrize(
    "x",
    [thin(60, 500, 0.02), thin(500, 60, 0.02), thin(30, 3, 0.5), thin(1, 40, 0.4), thin(40, 1, 0.4), thin(1, 1, 1.0)],
    ids=lambda x: f"{x.shape[0]}x{x.shape[1]}",
)
def test_sparse_matrices(x, intercept):
    assert found(x, intercept, padding=3) == pytest.approx(expected(x, intercept), rel=1e-8)


@pytest.mark.parametrize("top", [0, 1, 36, 39])
def test_a_sparse_matrix_whose_columns_have_no_rows_in_common(top):
    """AᵀA is diagonal: its top is a single column, whichever it is."""
    values = np.linspace(1.0, 2.0, 40)
    values[top] = 9.0
    assert found(scipy.sparse.diags_array(np.sqrt(values)).tocsr()) == pytest.approx(9.0, rel=1e-10)


def test_sparse_zeros():
    empty = scipy.sparse.csr_array((6, 5))
    assert found(empty) == 0
    assert found(empty, intercept=True, padding=2) == pytest.approx(6, rel=1e-13)


def test_sparse_and_dense_rows_agree_in_single_precision():
    x = thin(50, 30, 0.3)
    assert found(x, dtype=np.float32) == pytest.approx(found(x.toarray(), dtype=np.float32), rel=1e-5)


def test_clients_are_vectorised():
    clients = [thin(20, 30, 0.3, seed) for seed in range(4)] + [scipy.sparse.csr_array((20, 30))]
    x = jax.tree.map(jnp.asarray, sparse.stack(clients, 20, np.float64))
    many = Batch(x, jnp.zeros((5, 20)), jnp.ones((5, 20)), jnp.arange(5))
    with jax.disable_jit(False):
        got = jax.jit(jax.vmap(lambda b: largest_eigenvalue(b, True)))(many)
    np.testing.assert_allclose(got, [expected(x, True) for x in clients], rtol=1e-8)


# Few rows of many features


@pytest.mark.parametrize("intercept", [False, True])
@pytest.mark.parametrize("rows", [1, 7, 256])
def test_few_rows_of_many_features(rows, intercept):
    """AAᵀ has the same largest eigenvalue; exactly, as squaring does."""
    x = np.random.default_rng(rows).normal(size=(rows, 400))
    assert found(x, intercept) == pytest.approx(expected(x, intercept), rel=1e-10)
    if rows == 7:
        assert found(x, intercept, padding=5) == pytest.approx(expected(x, intercept), rel=1e-10)


def test_few_rows_with_equal_eigenvalues():
    assert found(turned([3.0] * 5, (5, 400))) == pytest.approx(3.0, rel=1e-12)
    assert found(np.zeros((5, 400))) == 0
    assert found(np.zeros((5, 400)), intercept=True) == pytest.approx(5, rel=1e-13)
