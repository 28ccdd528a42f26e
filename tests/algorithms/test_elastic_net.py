"""The server step of FedEPM: argmin_w Σ λ|w − z_i| + (η/2)(w − z_i)², against a minimiser in exact fractions."""

from __future__ import annotations

import subprocess
import sys
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from byhand import elastic_center
from hypothesis import given, settings
from hypothesis import strategies as st

from fedpact.algorithms.fedepm import elastic_net_center, soft
from fedpact.core.errors import InvalidArgument
from fedpact.core.vector import Vector

RATIOS = (1e-9, 1e-3, 0.25, 0.5, 1.0, 3.0, 1e3, 1e9)
COLUMNS = 12


def families(m, rng):
    """Messages of m clients, `COLUMNS` of each kind: apart, tied, all the same, in two heaps, far out, on kinks."""
    shape = (m, COLUMNS)
    heaps = rng.integers(0, 2, shape) * 7.0
    return {
        "apart": rng.normal(size=shape),
        "tied": rng.integers(-2, 3, shape) / 2,
        "the same": np.broadcast_to(rng.normal(size=COLUMNS), shape),
        "two heaps": heaps + 1e-3 * rng.normal(size=shape),
        "two values": heaps,
        "far out": 1e9 + rng.normal(size=shape),
        "large": 1e12 * rng.normal(size=shape),
        "small": 1e-12 * rng.normal(size=shape),
        "heavy tails": rng.standard_cauchy(size=shape) ** 3,
        "symmetric": np.sort(rng.integers(1, 4, shape), axis=0) * np.where(np.arange(m) % 2, 1.0, -1.0)[:, None],
    }


def device(z, lam, eta):
    """The path of JAX arrays, step by step; always 120 columns wide, so that operations are compiled once for an m."""
    wide = np.resize(z.T, (120, z.shape[0])).T
    with jax.disable_jit():
        out = elastic_net_center(jnp.asarray(wide), lam, eta)
    assert isinstance(out, jax.Array)
    return np.asarray(out)[: z.shape[1]]


def host(z, lam, eta):
    out = elastic_net_center(z, lam, eta)
    assert isinstance(out, np.ndarray)
    return out


both = pytest.mark.parametrize("center", [host, device])


def error(got, z, lam, eta):
    """|got − w*| over max(1, max|z|), the worst column."""
    exact = [elastic_center(column, lam, eta) for column in z.T]
    off = [abs(Fraction(float(g)) - w) for g, w in zip(np.asarray(got), exact, strict=True)]
    scale = np.maximum(1, np.abs(z).max(axis=0))
    return max(float(o) / s for o, s in zip(off, scale, strict=True))


@pytest.mark.parametrize("m", [1, 2, 3, 4, 5, 8, 21])
def test_it_is_the_minimiser(m):
    """Both paths, eight ratios λ/η from 1e-9 to 1e9, ten families of messages: 960 columns for each m."""
    z = np.concatenate(list(families(m, np.random.default_rng(m)).values()), axis=1)
    for ratio in RATIOS:
        lam, eta = ratio * 0.3, 0.3
        exact = np.array([float(elastic_center(column, lam, eta)) for column in z.T])
        scale = np.maximum(1, np.abs(z).max(axis=0))
        np.testing.assert_array_less(np.abs(host(z, lam, eta) - exact) / scale, 1e-12, f"NumPy, λ/η={ratio}")
        np.testing.assert_array_less(np.abs(device(z, lam, eta) - exact) / scale, 1e-12, f"JAX, λ/η={ratio}")


@both
def test_by_hand(center):
    """z = 0, 1, 5, η = 1. Slope at w: 3w − 6 + λ(below − above). λ = 1: on (1, 5) it is 3w − 6 + 1, zero at 5/3.

    λ = 3: on (1, 5) 3w − 6 + 3 vanishes at 1, its edge; on (0, 1) 3w − 6 − 3 < 0. The answer is the kink 1.
    λ = 10: from −3 − 10 below 1 to −3 + 10 above it: the kink 1. λ = 0.3: 3w − 6 + .3 on (1, 5): 1.9.
    """
    z = np.array([[0.0], [1.0], [5.0]])
    for lam, expected in ((1.0, 5 / 3), (3.0, 1.0), (10.0, 1.0), (0.3, 1.9), (0.0, 2.0)):
        np.testing.assert_allclose(center(z, lam, 1.0), [expected], rtol=1e-15)


def test_the_compiled_search_is_the_same():
    z = np.concatenate(list(families(5, np.random.default_rng(0)).values()), axis=1)
    got = jax.jit(lambda a: elastic_net_center(a, 0.15, 0.3))(jnp.asarray(z))
    assert error(got, z, 0.15, 0.3) <= 1e-12
    trials = jax.jit(jax.vmap(lambda a: elastic_net_center(a, 0.15, 0.3)))(jnp.asarray(np.stack([z, z[::-1], 2 * z])))
    assert error(trials[1], z, 0.15, 0.3) <= 1e-12
    assert error(trials[2], 2 * z, 0.15, 0.3) <= 1e-12


@both
@pytest.mark.parametrize("m", [1, 2, 5, 8])
def test_without_lambda_it_is_the_mean_and_without_eta_the_median(m, center):
    z = np.random.default_rng(m).normal(size=(m, 7))
    np.testing.assert_allclose(center(z, 0.0, 2.0), z.mean(axis=0), rtol=1e-14, atol=1e-15)
    np.testing.assert_array_equal(center(z, 2.0, 0.0), np.median(z, axis=0))


@both
@pytest.mark.parametrize("m", [3, 4])
def test_the_limits_are_approached_as_the_weights_are(m, center):
    """λ/η → 0: within λ/η of the mean. η/λ → 0: the middle message (odd m), between the middle two (even m)."""
    z = np.random.default_rng(m).normal(size=(m, 50))
    middle = np.sort(z, axis=0)[[(m - 1) // 2, m // 2]]
    for ratio in (1e-2, 1e-5, 1e-8):
        near = center(z, ratio, 1.0)
        assert np.all(np.abs(near - z.mean(axis=0)) <= ratio + 1e-15)
        assert np.any(np.abs(near - z.mean(axis=0)) >= ratio / m - 1e-15)
        near = center(z, 1.0, ratio)
        assert np.all((near >= middle[0]) & (near <= middle[1]))


@both
@pytest.mark.parametrize("ratio", RATIOS)
def test_one_message_is_its_own_center(ratio, center):
    z = np.array([[0.1, -3.0, 1e12, 0.0]])
    np.testing.assert_array_equal(center(z, ratio, 1.0), z[0])


@both
@pytest.mark.parametrize("ratio", RATIOS)
def test_two_messages_meet_in_the_middle(ratio, center):
    z = np.array([[0.25, -3.0, 1.0], [0.75, 5.0, 1.0]])
    np.testing.assert_allclose(center(z, ratio, 1.0), [0.5, 1.0, 1.0], rtol=1e-15)


@both
def test_the_order_of_the_messages_does_not_matter(center):
    rng = np.random.default_rng(5)
    z = rng.normal(size=(8, 40))
    a, b = center(z, 0.3, 1.0), center(z[rng.permutation(8)], 0.3, 1.0)
    np.testing.assert_allclose(a, b, rtol=0, atol=1e-15)


number = st.floats(-1000, 1000, width=16)
weight = st.floats(1e-4, 1e4)


def slope(w: Fraction, z, lam, eta):
    """An element of ∂ at w, exactly."""
    signs = sum((w > v) - (w < v) for v in z)
    return Fraction(eta) * (len(z) * w - sum(z)) + Fraction(lam) * signs


def check_optimal(got, z, lam, eta):
    """0 ∈ ∂ up to rounding: a hair below the answer the slope is not positive, a hair above not negative."""
    exact = [Fraction(v) for v in z]
    hair = Fraction(1, 10**12) * max(1, *(abs(v) for v in exact), 1)
    assert slope(Fraction(float(got)) - hair, exact, lam, eta) <= 0
    assert slope(Fraction(float(got)) + hair, exact, lam, eta) >= 0


@given(st.lists(number, min_size=1, max_size=9), weight, weight)
@settings(max_examples=300, deadline=None)
def test_zero_is_a_subgradient_at_the_answer(z, lam, eta):
    check_optimal(elastic_net_center(np.array(z)[:, None], lam, eta)[0], z, lam, eta)


@given(st.lists(number, min_size=5, max_size=5), weight, weight)
@settings(max_examples=60, deadline=None)
def test_zero_is_a_subgradient_at_the_compiled_answer(z, lam, eta):
    check_optimal(device(np.array(z)[:, None], lam, eta)[0], z, lam, eta)


SEARCHES = """
import jax, jax.numpy as jnp, numpy as np, fedpact
from fedpact.algorithms.fedepm import elastic_net_center
e, f = 2.0**-52, np.float32(2.0**-23)
cases = {
    "neighbouring doubles": np.array([1 + e, 1 + 2 * e, 1 + 3 * e]),
    "neighbouring doubles and others": np.array([-4.0, 1 + e, 1 + 2 * e, 1 + 3 * e, 9.0]),
    "neighbouring singles": np.array([1 + f, 1 + 2 * f, 1 + 3 * f], np.float32),
    "the smallest doubles": np.array([5e-324, 1e-323, 1.5e-323]),
    "the largest doubles": np.array([-1.5e308, 0.0, 1.5e308]),
}
for name, z in cases.items():
    print("CASE", name, flush=True)
    got = elastic_net_center(jnp.asarray(z)[:, None], 10.0, 1e-3)
    assert abs(float(got[0]) - float(np.median(z))) <= 1e-300 + 1e-12 * abs(float(np.median(z))), (name, got)
print("DONE", flush=True)
"""


@pytest.mark.drill
def test_the_search_ends_on_neighbouring_numbers():
    """Clients that agree up to the last bit are what convergence looks like: the search must not run for ever.

    In a process of its own, since a loop that does not end cannot be interrupted.
    """
    try:
        run = subprocess.run([sys.executable, "-c", SEARCHES], capture_output=True, text=True, timeout=60, check=False)
    except subprocess.TimeoutExpired as late:
        seen = (late.stdout or b"").decode().strip().splitlines()
        pytest.fail(f"elastic_net_center on a JAX array did not end in 60 s: {seen[-1] if seen else 'at the start'}")
    assert run.stdout.endswith("DONE\n"), run.stdout + run.stderr


def test_precision_and_types():
    z = np.random.default_rng(0).normal(size=(5, 6))
    single = z.astype(np.float32)
    assert elastic_net_center(single, 0.3, 1.0).dtype == np.float32
    assert jax.eval_shape(lambda a: elastic_net_center(a, 0.3, 1.0), jnp.asarray(single)).dtype == jnp.float32
    np.testing.assert_allclose(elastic_net_center(single, 0.3, 1.0), elastic_net_center(z, 0.3, 1.0), atol=1e-6)
    np.testing.assert_array_equal(elastic_net_center(np.array([[0], [1], [5]]), 10.0, 1.0), [1.0])


def test_the_messages_are_left_as_they_are():
    z = np.random.default_rng(0).normal(size=(5, 6))
    before = z.copy()
    out = elastic_net_center(z, 0.3, 1.0)
    np.testing.assert_array_equal(z, before)
    assert out.base is None


@pytest.mark.parametrize(
    ("messages", "lam", "eta", "said"),
    [
        (np.ones((2, 2)), -1.0, 1.0, r"lam \(λ\) must be a number of at least 0, got -1\.0\."),
        (np.ones((2, 2)), float("nan"), 1.0, r"lam \(λ\) must be a number of at least 0, got nan\."),
        (np.ones((2, 2)), "1", 1.0, r"lam \(λ\) must be a number of at least 0, got '1'\."),
        (np.ones((2, 2)), 1.0, -1e-9, r"eta \(η\) must be a number of at least 0, got -1e-09\."),
        (np.ones((2, 2)), 0, 0.0, r"lam and eta \(λ, η\) must be not both 0, got \(0, 0\.0\)\."),
        (np.ones(3), 1.0, 1.0, r"messages must be an \(m, n\) array with m at least 1, got \(3,\)\."),
        (np.ones((0, 3)), 1.0, 1.0, r"messages must be an \(m, n\) array with m at least 1, got \(0, 3\)\."),
        (jnp.ones(3), 1.0, 1.0, r"messages must be an \(m, n\) array with m at least 1, got \(3,\)\."),
    ],
)
def test_bad_arguments(messages, lam, eta, said):
    with pytest.raises(InvalidArgument, match=f"^{said}$"):
        elastic_net_center(messages, lam, eta)


def test_soft_thresholding_by_hand():
    """|t| ≤ a gives 0, otherwise t moves a towards 0; argmin ½(z − t)² + a|z|."""
    v = Vector({"w": jnp.array([3.0, -3.0, 0.5, -0.5, 1.0, -1.0, 0.0]), "b": jnp.asarray(-1.25)})
    out = soft(v, 1.0)
    np.testing.assert_array_equal(out.tree["w"], [2.0, -2.0, 0.0, 0.0, 0.0, 0.0, 0.0])
    assert float(out.tree["b"]) == -0.25
    np.testing.assert_array_equal(soft(v, 0.0).tree["w"], v.tree["w"])
    grid = np.linspace(-6, 6, 24001)
    for t in (-2.3, -0.4, 0.9, 3.7):
        best = grid[np.argmin((grid - t) ** 2 / 2 + 1.3 * np.abs(grid))]
        assert float(soft(Vector({"w": jnp.array([t])}), 1.3).tree["w"][0]) == pytest.approx(best, abs=1e-3)
