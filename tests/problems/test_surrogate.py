"""The convex problem of every round of SSCA, against a conic solver and its own optimality conditions."""

import math

import numpy as np
import pytest
from helpers_conic import conic

from fedpact.core.errors import InvalidArgument
from fedpact.problems.constraints import solve_surrogate
from fedpact.problems.surrogate import lemma1


@pytest.fixture(autouse=True)
def operation_by_operation():
    """Compiled here, unlike the other problems: the path is a loop of small steps."""


def phi(row, omega):
    b, a, t, *ell = row
    return b + a @ omega + t * omega @ omega + (ell[0] if ell else 0.0) * np.abs(omega).sum()


def total(objective, constraints, penalty, omega):
    """φ_0 + c Σ max(0, φ_m): what is minimised, with the best slacks."""
    return phi((0.0, *objective), omega) + penalty * sum(max(0.0, phi(row, omega)) for row in constraints)


def residual(objective, constraints, penalty, omega, slacks, nu):
    """The largest violation of the optimality conditions, relative to the size of the terms in each."""
    a0, t0 = objective
    terms = [a0 + 2 * t0 * omega] + [v * (a + 2 * t * omega) for v, (_, a, t) in zip(nu, constraints, strict=True)]
    size = 1 + max(np.abs(term).max() for term in terms)
    stationary = np.abs(sum(terms)).max() / size
    values = np.array([phi(row, omega) for row in constraints])
    scale = 1 + np.abs(values)
    violated = (np.maximum(values - slacks, 0) / scale).max()
    complementary = (nu * np.abs(values - slacks) / (1 + nu)).max()
    at_most = ((penalty - nu) / penalty * slacks).max()
    bounds = max(np.maximum(-nu, 0).max(), np.maximum(nu - penalty, 0).max() / penalty, np.maximum(-slacks, 0).max())
    return max(stationary, violated, complementary, at_most, bounds)


def instance(rng, m, d, kind):
    t0 = rng.uniform(0.05, 2.0)
    objective = (rng.normal(size=d), t0)
    constraints = [(rng.normal(), rng.normal(size=d), rng.uniform(0.01, 1.0)) for _ in range(m)]
    if kind == "linear":
        constraints = [(b, a, 0.0 if k % 2 else t) for k, (b, a, t) in enumerate(constraints)]
    if kind == "infeasible":
        constraints[0] = (5.0 + rng.uniform(), 0.1 * constraints[0][1], constraints[0][2])
    if kind == "tied":
        constraints = [constraints[0]] * m
    if kind == "loose":
        constraints = [(b - 50.0, a, t) for b, a, t in constraints]
    if kind == "opposed":
        a = rng.normal(size=d)
        constraints = [((-1) ** k * 0.5, (-1) ** k * a, 0.0 if k else 0.1) for k in range(m)]
    if kind == "flat":
        objective = (np.zeros(d), t0)
    return objective, constraints


KINDS = ("plain", "linear", "infeasible", "tied", "loose", "opposed", "flat")


def sizes(m, d):
    """Every size has a program of its own: a few in every run of the tests, the others in the drills."""
    return pytest.param(m, d, marks=[] if m <= 3 and d == 3 else [pytest.mark.drill])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("m", "d"), [sizes(m, d) for m in range(1, 9) for d in (1, 3, 20)])
def test_it_agrees_with_a_conic_solver(kind, m, d):
    rng = np.random.default_rng([m, d, KINDS.index(kind)])
    for penalty in (0.3, 10.0, 1e3, 1e5):
        for _ in range(2):
            objective, constraints = instance(rng, m, d, kind)
            omega, slacks, nu = solve_surrogate(objective, constraints, penalty)
            assert residual(objective, constraints, penalty, omega, slacks, nu) <= 1e-8
            witness, _, status = conic(objective, constraints, penalty)
            ours, theirs = (total(objective, constraints, penalty, w) for w in (omega, witness))
            assert ours <= theirs + 1e-6 * max(1.0, abs(theirs)), status
            if status == "Solved":
                assert abs(ours - theirs) <= 1e-6 * max(1.0, abs(theirs))


def test_one_constraint_is_lemma_1():
    rng = np.random.default_rng(0)
    for _ in range(50):
        a, b, tau, c = rng.normal(size=3), rng.normal(), rng.uniform(0.01, 1), 10.0 ** rng.uniform(-2, 5)
        _, _, nu = solve_surrogate((np.zeros(3), 1.0), [(b, a, tau)], c)
        assert nu[0] == pytest.approx(float(lemma1(a @ a, b, tau, c)), rel=1e-8, abs=1e-10)


def test_by_hand():
    """min ω² s.t. 3 − 2ω ≤ 0: ω = 3/2, and 2ω − 2ν = 0; two coordinates more stay 0."""
    omega, slacks, nu = solve_surrogate((np.zeros(3), 1.0), [(3.0, np.array([-2.0, 0, 0]), 0.0)], 100.0)
    assert omega == pytest.approx([1.5, 0, 0])
    assert slacks == pytest.approx([0.0], abs=1e-10)
    assert nu == pytest.approx([1.5])


def test_a_small_penalty_leaves_slack():
    """The same with c = 1: ν = 1, ω = 1, s = 3 − 2 = 1."""
    omega, slacks, nu = solve_surrogate((np.zeros(3), 1.0), [(3.0, np.array([-2.0, 0, 0]), 0.0)], 1.0)
    assert (omega[0], slacks[0], nu[0]) == pytest.approx((1.0, 1.0, 1.0))


@pytest.mark.parametrize(("m", "d"), [sizes(m, d) for m in (1, 2, 5) for d in (1, 3)])
def test_without_an_objective_s_curvature(m, d):
    rng = np.random.default_rng(m)
    for _ in range(2):
        objective = (rng.normal(size=d), 0.0)
        constraints = [(rng.normal(), rng.normal(size=d), rng.uniform(0.1, 1.0) * (k == 0)) for k in range(m)]
        omega, slacks, nu = solve_surrogate(objective, constraints, 10.0)
        assert residual(objective, constraints, 10.0, omega, slacks, nu) <= 1e-8
        witness, _, _ = conic(objective, constraints, 10.0)
        assert total(objective, constraints, 10.0, omega) <= total(objective, constraints, 10.0, witness) + 1e-6


def test_an_l1_term_is_kept_exact():
    """Zero coordinates, and no direction in which the sum of objective and penalties falls."""
    rng = np.random.default_rng(3)
    d = 12
    objective = (rng.normal(size=d), 0.5, 0.7)
    constraints = [(0.4, rng.normal(size=d), 0.2, 0.0), (-1.0, np.zeros(d), 0.0, 1.0)]  # the second: ‖ω‖₁ ≤ 1
    omega, slacks, nu = solve_surrogate(objective, constraints, 50.0)
    assert 0 < np.count_nonzero(omega) < d
    best = total(objective, constraints, 50.0, omega)
    for step in (1e-2, 1e-4, 1e-6):
        for _ in range(500):
            assert total(objective, constraints, 50.0, omega + step * rng.normal(size=d)) >= best - 1e-12
    assert np.all(nu >= 0)
    assert slacks == pytest.approx(np.maximum([phi(row, omega) for row in constraints], 0))


def test_a_hard_bound_holds():
    objective = (np.array([-10.0, 0.0, 0.0]), 0.01)
    ball = (-4.0, np.zeros(3), 1.0)  # ‖ω‖² ≤ 4
    omega, slacks, _ = solve_surrogate(objective, [ball, (1.0, np.array([-1.0, 0.0, 0.0]), 0.0)], [math.inf, 5.0])
    assert omega == pytest.approx([2.0, 0.0, 0.0], abs=1e-7)
    assert slacks[0] == 0.0


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (((np.ones(2), 0.0), [(1.0, np.ones(2), 0.0)], 1.0), "t0 .* must be above 0"),
        (((np.ones(2), -1.0), [(1.0, np.ones(2), 0.0)], 1.0), "t0 must be a finite number of at least 0, got -1.0"),
        (((np.ones(2), 1.0), [], 1.0), "constraints must be a list of at least one"),
        (((np.ones(2), 1.0), [(1.0, np.ones(3), 0.0)], 1.0), "a of constraint 1 must be 2 numbers"),
        (((np.ones(2), 1.0), [(math.nan, np.ones(2), 0.0)], 1.0), "b of constraint 1 must be a finite number"),
        (((np.ones(2), 1.0), [(1.0, np.array([1, np.inf]), 0.0)], 1.0), "a of constraint 1 must be finite"),
        (((np.ones(2), 1.0), [(1.0, np.ones(2), 0.0)], 0.0), r"penalty \(c\) must be above 0"),
        (((np.ones(2), 1.0), [(1.0, np.ones(2))], 1.0), "constraint 1 must be"),
        (((np.ones(2), "x"), [(1.0, np.ones(2), 0.0)], 1.0), "t0 must be real numbers, got 'x'"),
        ((([[1], [2, 3]], 1.0), [(1.0, np.ones(2), 0.0)], 1.0), "a0 must be real numbers"),
        (((np.ones(2), 1.0), [(1.0, np.ones(2) * 1j, 0.0)], 1.0), "a of constraint 1 must be real numbers"),
        (((np.ones(2), 1.0), [(1.0, np.ones(2), 0.0)], "x"), "penalty must be real numbers, got 'x'"),
        (
            ((np.ones(2), 1.0), [(1.0, np.zeros(2), 1.0)], math.inf),
            "constraints must be ones that can be kept together",
        ),
        (
            ((np.ones(1), 1.0), [(1.0, np.ones(1), 0.0), (1.0, -np.ones(1), 0.0)], math.inf),
            "constraints must be ones that can be kept together where their penalty is inf, got a value of ",
        ),
    ],
)
def test_bad_arguments(arguments, sentence):
    with pytest.raises(InvalidArgument, match=sentence):
        solve_surrogate(*arguments)
