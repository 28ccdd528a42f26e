"""Regularisers: every proximal operator against a search on a grid, values by hand, and what is refused."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedpact as fp
from fedpact.core.errors import InvalidArgument, UnknownName
from fedpact.core.vector import Vector
from fedpact.problems.regulariser import REGULARISERS, plain_regulariser, read_regulariser

GAMMA, L2, THETA = 0.7, 0.4, 1.3
#: h of one number, from its definition.
SCALAR = {
    fp.L1(GAMMA): lambda x: GAMMA * np.abs(x),
    fp.ElasticNet(GAMMA, L2): lambda x: GAMMA * np.abs(x) + L2 / 2 * x**2,
    fp.GroupL1(GAMMA): lambda x: GAMMA * np.abs(x),
    fp.MCP(GAMMA, THETA): lambda x: np.where(
        np.abs(x) <= GAMMA * THETA, GAMMA * np.abs(x) - x**2 / (2 * THETA), GAMMA**2 * THETA / 2
    ),
    fp.Box(-0.5, 0.8): lambda x: np.where((x < -0.5) | (x > 0.8), np.inf, 0.0),
}
each = pytest.mark.parametrize("h", SCALAR, ids=repr)


def vector(*numbers):
    return Vector({"w": jnp.asarray(numbers)})


@each
@pytest.mark.parametrize("weight", [0.9, 4.0])
def test_the_proximal_operator_is_the_best_of_a_grid(h, weight):
    """x over a grid of 2e-4 that holds every kink: no other x has a smaller h(x) + (weight/2)(x − w)²."""
    grid = np.arange(-15_000, 15_001) * 2e-4
    points = np.array([-2.9, -1.3, -0.91, -0.6, -0.2, 0.0, 0.1, 0.174, 0.8, 0.95, 1.7, 2.6])
    found = np.asarray(h.prox(vector(*points), weight).tree["w"])
    for w, x in zip(points, found, strict=True):
        cost = SCALAR[h](grid) + weight / 2 * (grid - w) ** 2
        assert abs(x - grid[np.argmin(cost)]) <= 2e-4
        assert SCALAR[h](x) + weight / 2 * (x - w) ** 2 <= cost.min() + 1e-12


@each
def test_values_are_sums_over_all_parameters(h):
    w = Vector({"w": jnp.asarray([0.3, -0.4, 0.0, 0.7]), "b": jnp.asarray(0.5)})
    assert float(h.value(w)) == pytest.approx(sum(float(SCALAR[h](x)) for x in (0.3, -0.4, 0, 0.7, 0.5)), abs=1e-14)


def test_by_hand():
    """ρ = 2. l1, γ = 1: 3 − ½.  With l2 = 2: 2.5·2/4.  mcp, θ = 2, γ = 1: edge 2, (1.5 − .5)/(1 − ¼), and 3 stays."""
    w = vector(3.0, -1.5, 0.4)
    np.testing.assert_allclose(fp.L1(1.0).prox(w, 2.0).tree["w"], [2.5, -1, 0])
    np.testing.assert_allclose(fp.ElasticNet(1.0, 2.0).prox(w, 2.0).tree["w"], [1.25, -0.5, 0])
    np.testing.assert_allclose(fp.MCP(1.0, 2.0).prox(w, 2.0).tree["w"], [3, -4 / 3, 0])
    np.testing.assert_allclose(fp.Box(-1, 2).prox(w, 2.0).tree["w"], [2, -1, 0.4])
    assert float(fp.MCP(1.0, 2.0).value(w)) == pytest.approx(1 + (1.5 - 2.25 / 4) + (0.4 - 0.04))


@pytest.mark.parametrize(("groups", "axis"), [("columns", 0), ("rows", 1)])
def test_groups_are_columns_or_rows_of_matrices(groups, axis):
    """(3, 4) has norm 5: with γ/ρ = 1 it is shrunk by 4/5; the group of norm ½ is 0, and numbers go one by one."""
    matrix = np.array([[3.0, 0.3], [4.0, -0.4]])
    w = Vector({"w": jnp.asarray(matrix if axis == 0 else matrix.T), "b": jnp.asarray([2.0, -0.5])})
    h = fp.GroupL1(2.0, groups)
    out = h.prox(w, 2.0).tree
    want = np.array([[2.4, 0.0], [3.2, 0.0]])
    np.testing.assert_allclose(out["w"], want if axis == 0 else want.T, rtol=1e-15)
    np.testing.assert_allclose(out["b"], [1.0, 0.0])
    assert float(h.value(w)) == pytest.approx(2 * (5 + 0.5 + 2.5))


def test_a_group_is_the_minimiser():
    """Optimality in two numbers: ρ(x − w) + γ x/‖x‖ = 0 where x is not 0, ‖ρw‖ ≤ γ where it is."""
    h, weight = fp.GroupL1(0.7), 1.6
    for column in ([0.9, -0.5], [0.1, 0.2], [0.0, 0.0]):
        w = np.array(column)[:, None]
        x = np.asarray(h.prox(Vector({"w": jnp.asarray(w)}), weight).tree["w"])
        if np.any(x):
            np.testing.assert_allclose(weight * (x - w) + 0.7 * x / np.linalg.norm(x), 0, atol=1e-14)
        else:
            assert np.linalg.norm(weight * w) <= 0.7


def test_a_box_begins_inside():
    w = vector(-3.0, 0.2, 4.0)
    assert float(fp.Box(-1, 1).value(w)) == np.inf
    np.testing.assert_array_equal(fp.Box(-1, 1).start(w).tree["w"], [-1, 0.2, 1])
    assert float(fp.Box(-1, 1).value(fp.Box(-1, 1).start(w))) == 0
    assert fp.L1(1.0).start(w) is w


@each
def test_single_precision_stays_single(h):
    w = Vector({"w": jnp.asarray([[0.3, 2.0]], jnp.float32)})
    assert h.prox(w, jnp.asarray(3.0, jnp.float32)).tree["w"].dtype == np.float32
    assert h.value(w).dtype == np.float32
    assert jax.jit(lambda w, p: h.prox(w, p))(w, jnp.float32(3)).tree["w"].dtype == np.float32


@each
def test_to_plain_data_and_back(h):
    plain = plain_regulariser(h)
    assert plain["name"] in REGULARISERS
    assert read_regulariser(plain) == h
    assert hash(read_regulariser(plain)) == hash(h)
    assert read_regulariser(h) is h
    assert read_regulariser(None) is None is plain_regulariser(None)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: fp.L1(-1.0), "gamma (γ) must be a number of at least 0, got -1.0."),
        (lambda: fp.ElasticNet(1.0, -2.0), "l2 must be a number of at least 0, got -2.0."),
        (lambda: fp.MCP(1.0, 0.0), "theta (θ) must be above 0, got 0.0."),
        (lambda: fp.MCP(1.0, 0.1).check(10.0), "theta (θ) must be above 1/ρ = 0.1 for mcp, got 0.1. Raise theta or"),
        (lambda: fp.Box(2.0, 1.0), "low must be at most high, 1, got 2.0."),
        (lambda: fp.Box(0.0, float("nan")), "high must be a number, got nan."),
        (lambda: read_regulariser({"name": "l1"}), "regulariser 'l1' must have 'gamma', got only nothing. Add it."),
    ],
)
def test_what_is_refused(make, says):
    with pytest.raises(InvalidArgument) as caught:
        make()
    assert str(caught.value).startswith(says)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ("l2", "regulariser must be one of box, elastic_net, group_l1, l1, mcp, got 'l2'."),
        (3.0, "regulariser must be one of box, elastic_net, group_l1, l1, mcp, got 3.0."),
        ({"gamma": 1.0}, "regulariser must be one of box, elastic_net, group_l1, l1, mcp, got None."),
        ({"name": "l1", "gama": 1.0}, "key of regulariser 'l1' must be one of gamma, name, got 'gama'. Did you mean"),
        ({"name": "group_l1", "gamma": 1.0, "groups": "row"}, "groups must be one of columns, rows, got 'row'."),
    ],
)
def test_unknown_names(given, says):
    with pytest.raises(UnknownName) as caught:
        read_regulariser(given)
    assert str(caught.value).startswith(says)
