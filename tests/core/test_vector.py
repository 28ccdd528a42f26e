"""Vector: the arithmetic of one flat array, over a tree."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedpact.core.vector import Vector


def numbers(seed):
    return np.random.default_rng(seed).normal(size=11)


def nested(flat, dtype=np.float64):
    """Eleven numbers as a tree of a matrix, a scalar and, deeper, two arrays."""
    a = [jnp.asarray(part, dtype) for part in (flat[:4].reshape(2, 2), flat[4], flat[5:8], flat[8:])]
    return Vector({"layer": a[0], "bias": a[1], "deep": {"one": (a[2],), "two": [a[3]]}})


def flat(v):
    t = v.tree
    parts = (t["layer"], t["bias"], t["deep"]["one"][0], t["deep"]["two"][0])
    return np.concatenate([np.asarray(p).reshape(-1) for p in parts])


def test_sums_differences_and_signs_are_those_of_the_numbers():
    a, b = numbers(0), numbers(1)
    v, u = nested(a), nested(b)
    np.testing.assert_array_equal(flat(v + u), a + b)
    np.testing.assert_array_equal(flat(v - u), a - b)
    np.testing.assert_array_equal(flat(-v), -a)


@pytest.mark.parametrize(
    "scalar",
    [3, -0.25, np.float64(0.3), np.float32(0.5), np.int64(7), np.array(1.5), jnp.asarray(0.7), jnp.asarray(2)],
    ids=lambda s: f"{type(s).__name__}-{s}",
)
def test_scalars_of_every_kind_from_either_side(scalar):
    a = numbers(2)
    v = nested(a)
    for product in (scalar * v, v * scalar):
        assert isinstance(product, Vector)
        np.testing.assert_array_equal(flat(product), a * float(scalar))
    np.testing.assert_allclose(flat(v / scalar), a / float(scalar), rtol=1e-15)


def test_a_line_of_the_paper_reads_as_itself():
    w, g, y, theta = (numbers(s) for s in range(4))
    eta, rho = np.float64(0.1), 2.5
    out = nested(w) - eta * (nested(g) + nested(y) + rho * (nested(w) - nested(theta)))
    np.testing.assert_allclose(flat(out), w - 0.1 * (g + y + 2.5 * (w - theta)), rtol=1e-15, atol=1e-15)


def test_products_and_norms_cover_every_leaf():
    a, b = numbers(4), numbers(5)
    v, u = nested(a), nested(b)
    assert float(v.dot(u)) == pytest.approx(sum(x * y for x, y in zip(a, b, strict=True)), rel=1e-14)
    assert float(v.norm2()) == pytest.approx(sum(x * x for x in a), rel=1e-14)
    assert float(v.norm()) == pytest.approx(sum(x * x for x in a) ** 0.5, rel=1e-14)
    assert float(v.norm1()) == pytest.approx(sum(abs(x) for x in a), rel=1e-14)
    assert v.size == 11


def test_map_takes_matching_leaves_together():
    a, b, c = numbers(6), numbers(7), numbers(8)
    out = nested(a).map(lambda x, y, z: x + 2 * y - z, nested(b), nested(c))
    np.testing.assert_allclose(flat(out), a + 2 * b - c, rtol=1e-15, atol=1e-15)


def test_arithmetic_leaves_its_operands_alone():
    a, b = numbers(9), numbers(10)
    v, u = nested(a), nested(b)
    _ = (v + u, v - u, 2 * v, v / 2, -v, v.dot(u))
    np.testing.assert_array_equal(flat(v), a)
    np.testing.assert_array_equal(flat(u), b)


def test_compiled_and_vectorised_it_is_the_same():
    a, b = numbers(11), numbers(12)
    v, u = nested(a), nested(b)
    f = lambda v, u: 2.0 * v - u / 3
    np.testing.assert_allclose(flat(jax.jit(f)(v, u)), 2 * a - b / 3, rtol=1e-14, atol=1e-15)
    stacked = jax.tree.map(lambda *rows: jnp.stack(rows), v, u)
    norms = jax.vmap(lambda row: row.norm2())(stacked)
    np.testing.assert_allclose(norms, [a @ a, b @ b], rtol=1e-14)


def test_single_precision_stays_single():
    v = nested(numbers(13), np.float32)
    for out in (v + v, v - v, 0.5 * v, v / 3, -v, 2 * v):
        assert {leaf.dtype for leaf in jax.tree.leaves(out)} == {np.dtype(np.float32)}
    assert v.norm().dtype == np.float32


def test_vectors_of_different_trees_do_not_mix():
    with pytest.raises(ValueError, match=r"(?i)dict|structure|key"):
        Vector({"w": jnp.ones(2)}) + Vector({"v": jnp.ones(2)})
