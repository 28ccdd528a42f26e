"""Inexact ADMM."""

from __future__ import annotations

from itertools import pairwise

import byhand
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.io
from byhand import PROBLEM, built, flat, parts, play, relative, vector
from scipy.optimize import minimize

import fedpact as fp
from fedpact.algorithms.inexact_admm import InexactADMM, inner_bound, lyapunov_weight
from fedpact.core.errors import DataError, InvalidArgument, UnknownName
from fedpact.problems import optimum
from fedpact.problems.solvers import SOLVERS, Subproblem, gradient_steps, lbfgs, recorded_steps
from fedpact.run import Experiment

COHORTS = ((0, 2, 5), (1, 3, 4, 6), (), (2,), (0, 1, 2, 3, 4, 5, 6), (2, 6))
LINEAR = fp.LeastSquares(l2=0.3)
ZERO = vector(np.zeros(4), intercept=True)


def scalar(epsilon, pi=0.0):
    """α∇f(v) = v − 4, w = 0, σ = 1, and r = 3 where 1 would do: v ← v/2 + 1, φ(v) = 2v − 4, solution 2."""
    g = lambda v: v - vector([4.0])
    zero = vector([0.0])
    return Subproblem(g, g(zero), zero, vector([pi]), jnp.asarray(1.0), jnp.asarray(3.0), jnp.asarray(epsilon))


def plain(out):
    return float(flat(out.v)[0]), int(out.gradients)


# (a) steps by hand


@pytest.mark.parametrize(("k0", "expected"), [(1, -5 / 3), (2, -20 / 9)])
def test_one_round_in_round_numbers(k0, expected):
    """f_i = ½(w − b_i)², b = 2 and −4, α_i = ½, α_i r_i = ½, σ_i = .1, from 0 with π = 0.

    One local step: g = ∓1, 2; w_i = 1/.6 = 5/3 and −10/3; π_i = 1/6, −1/3; z_i = 1/3, −2/3; w = −(1/3)/.2 = −5/3.
    The second restarts at 0: w_1 = (1 − 1/6)/.6 = 25/18, π_1 = 1/6 + 5/36 = 11/36, z_1 = 4/9; w = (4/9 − 8/9)/.2.
    """
    clients = [(np.ones((1, 1)), np.array([2.0])), (np.ones((2, 1)), np.array([-4.0, -4.0]))]
    problem = fp.LeastSquares()
    (moment,) = play(built(InexactADMM(k0=k0), problem, 2), problem, clients, vector([0.0]), [[0, 1]])
    np.testing.assert_allclose(flat(moment.after.w), [expected], rtol=1e-14)


@pytest.mark.parametrize(("epsilon", "steps", "v"), [(4.0, 1, 1.0), (1.5, 2, 1.5), (0.3, 3, 1.75), (0.01, 3, 1.75)])
def test_inner_steps_until_the_residual_at_the_new_point_is_small(epsilon, steps, v):
    """φ is −2, −1, −½ after one, two, three steps; at most three are taken."""
    out = gradient_steps(scalar(epsilon), 3)
    assert plain(out) == (v, steps)
    assert float(out.residual) == (2 * v - 4) ** 2


@pytest.mark.parametrize(("epsilon", "steps", "v"), [(9.1, 1, 1.0), (9.0, 2, 1.5), (2.0, 3, 1.75), (0.1, 3, 1.75)])
def test_the_recorded_test_uses_the_gradient_before_the_step(epsilon, steps, v):
    """‖σv⁺ + g(v)‖² is (1−4)² = 9, (1.5−3)² = 2.25, (1.75−2.5)² = .5625; strictly below ε·n ends it, n = 1."""
    assert plain(recorded_steps(scalar(epsilon), 3)) == (v, steps - 1)


def test_the_recorded_test_counts_the_features():
    """Two equal coordinates double ‖·‖² and n: ε·n = 2ε decides as for one."""
    g = lambda v: v - vector([4.0, 4.0])
    zero = vector([0.0, 0.0])
    sub = Subproblem(g, g(zero), zero, zero, jnp.asarray(1.0), jnp.asarray(3.0), jnp.asarray(9.1))
    assert int(recorded_steps(sub, 3).gradients) == 0


def literal(problem, clients, cohorts, *, k0, sigma, nu, epsilon, most=3, recorded=True):
    """Algorithm 1 in NumPy, from 0 with π_i⁰ = −g_i⁰, every z_i kept by the server: w after each round."""
    m = len(clients)
    r = [byhand.lipschitz(problem, x) / m for x, _ in clients]
    s = [sigma * r_i for r_i in r]
    g = lambda i, v: byhand.gradient(problem, v, *clients[i]) / m
    n = clients[0][0].shape[1] + problem.intercept
    w_i = [np.zeros(n) for _ in clients]
    pi = [-g(i, w_i[i]) for i in range(m)]
    eps = [epsilon] * m
    z = [s[i] * w_i[i] + pi[i] for i in range(m)]
    models = [sum(z) / sum(s)]
    for chosen in cohorts:
        w = models[-1]
        for i in chosen:
            for _ in range(k0):
                eps[i] = nu * eps[i]
                v, steps = w, 0
                while True:
                    before = g(i, v)
                    v = (r[i] * v + s[i] * w - before - pi[i]) / (r[i] + s[i])
                    steps += 1
                    used = before if recorded else g(i, v)
                    size = np.sum((used + pi[i] + s[i] * (v - w)) ** 2)
                    if steps == most or (size < eps[i] * n if recorded else size <= eps[i]):
                        break
                w_i[i] = v
                pi[i] = pi[i] + s[i] * (v - w)
            z[i] = s[i] * w_i[i] + pi[i]
        models.append(sum(z) / sum(s))
    return models


@pytest.mark.parametrize("problem", [PROBLEM, LINEAR], ids=["logistic", "least squares"])
@pytest.mark.parametrize("recorded", [True, False])
def test_the_run_is_the_literal_algorithm(problem, recorded):
    """With ε so small that the inner loop takes one, two and three steps."""
    logistic = problem is PROBLEM
    clients = parts("logistic" if logistic else "least_squares")
    values = {"k0": 2, "sigma": 0.9, "nu": 0.6, "epsilon": 1e-4}
    solver = "recorded" if recorded else "gradient"
    algorithm = built(InexactADMM(duals="gradient", solver=solver, **values), problem)
    moments = play(algorithm, problem, clients, ZERO if logistic else vector(np.zeros(3)), COHORTS)
    models = literal(problem, clients, COHORTS, recorded=recorded, **values)
    spent = [float(n.gradients) for moment in moments for n in moment.notes.values()]
    assert max(spent) > min(spent), "the case must need different numbers of inner steps"
    for moment, expected in zip(moments, models[1:], strict=True):
        assert relative(flat(moment.after.w), expected) <= 1e-11


def test_epsilon_starts_at_k0_squared_falls_by_nu_and_stops_at_its_floor():
    clients = parts()
    settings = InexactADMM(k0=2, nu=0.5, floor=0.9)
    state, _ = built(settings).join(ZERO, byhand.batch(*clients[3], 3), None)
    g = byhand.gradient(PROBLEM, np.zeros(4), *clients[3]) / 7
    assert float(state.epsilon) == 4
    assert float(state.floor) == pytest.approx(0.81 * max(1, g @ g), rel=1e-13)
    moments = play(built(settings), PROBLEM, clients, ZERO, [range(7)] * 3)
    assert [float(moment.notes[3].epsilon) for moment in moments] == pytest.approx([1.0, 0.81, 0.81], rel=1e-13)


def test_the_first_message_carries_sigma_and_z():
    """σ_i = sigma·r_i/m; z_i⁰ = σ_i w⁰ + π_i⁰ with π⁰ = 0 or −g_i⁰."""
    clients, w0 = parts(), np.array([0.1, -0.2, 0.3, 0.4])
    x, y = clients[1]
    r, g = byhand.lipschitz(PROBLEM, x) / 7, byhand.gradient(PROBLEM, w0, x, y) / 7
    for duals, pi in (("zero", 0 * g), ("gradient", -g)):
        algorithm = built(InexactADMM(sigma=0.4, duals=duals))
        state, hello = algorithm.join(vector(w0, True), byhand.batch(x, y, 1, padding=3), None)
        assert float(hello.sigma) == pytest.approx(0.4 * r, rel=1e-10)
        assert relative(flat(hello.z), 0.4 * r * w0 + pi) <= 1e-12
        assert relative(flat(state.pi), pi) <= 1e-13
        assert float(state.r) == pytest.approx(r, rel=1e-10)


# (b) certificates


def example(rho, rounds):
    """The theory setting on Example 5.1, until the gap to an independent solver's optimum is 1e-10."""
    federation = fp.data.mixture(clients=64).split(how="column", column="client")
    return _to_gap(fp.LeastSquares(), federation, rho, rounds)


def recording(golden_folder, rho, rounds):
    """The same on the recorded logistic data."""
    kept = scipy.io.loadmat(golden_folder / "inexact_admm_logistic_half.mat")
    rows = np.split(np.arange(len(kept["A"])), np.cumsum(kept["dim"].ravel().astype(int))[:-1])
    data = fp.data.from_arrays(kept["A"], kept["b"].ravel(), classes=("0", "1"))
    return _to_gap(fp.Logistic(), fp.data.Federation(data, tuple(rows)), rho, rounds)


def _to_gap(problem, federation, rho, rounds):
    best = optimum(problem, federation)
    assert best.gradient_norm < 1e-12
    stop = fp.stop.Target("objective", best.value + 1e-10)
    done = fp.run(
        InexactADMM.preset("theory"), problem, federation, participation=rho, rounds=rounds, stop=stop, seed=1
    )
    assert done.outcome_kind is fp.stop.Outcome.STOPPED, f"gap {done.history.last('objective') - best.value:.2e}"
    return done.history


def never_rises(history):
    """The Lyapunov value, up to the rounding of its own sum."""
    value = history.column("lyapunov")
    assert np.max(np.diff(value) / (1 + np.abs(value[1:]))) <= 1e-14
    assert np.nanmax(history.column("violations")) == 0


@pytest.mark.parametrize(("rho", "rounds"), [(1.0, 5000), pytest.param(0.2, 30000, marks=pytest.mark.drill)])
def test_theory_reaches_the_optimum_of_example_5_1(rho, rounds):
    never_rises(example(rho, rounds))


@pytest.mark.drill
@pytest.mark.parametrize(("rho", "rounds"), [(1.0, 5000), (0.2, 30000)])
def test_theory_reaches_the_optimum_of_the_recorded_logistic_data(golden_folder, rho, rounds):
    never_rises(recording(golden_folder, rho, rounds))


@pytest.mark.drill
@pytest.mark.parametrize("solver", ["gradient", pytest.param("lbfgs", marks=pytest.mark.drill)])
def test_on_a_nonconvex_problem_the_lyapunov_value_falls_to_a_stationary_point(solver):
    """s_i = β/2 is known: σ_i = 2.6 r_i/m is above α_i(s_i + r_i/2), so Theorem 3.1 holds too."""
    problem = fp.NonconvexLogistic(beta=0.4)
    federation = fp.data.breast_cancer().split(clients=8, how="dirichlet", alpha=0.5, seed=3)
    settings = InexactADMM.preset("theory", k0=3, solver=solver)
    done = fp.run(settings, problem, federation, participation=0.5, rounds=400)
    never_rises(done.history)
    assert done.history.last("gradient") < 1e-9
    assert done.history.last("lyapunov") < done.history.column("objective")[0]


def test_the_lemma_s_decrease_is_met_with_its_constants():
    """L̃^k − L̃^{k+1} ≥ (σ/2)‖Δw‖² + (c/4)Σ‖Δw_i‖², c = min (σ_i + α_i r_i)(2σ_i − 5α_i r_i)/σ_i, for k0 = 1."""
    clients, nu = parts(), 0.7
    settings = InexactADMM.preset("theory", k0=1, nu=nu, epsilon=1e-12)
    moments = play(built(settings), PROBLEM, clients, ZERO, COHORTS[:2] * 5)

    def lyapunov(w, states):
        total = 0.0
        for state, (x, y) in zip(states, clients, strict=True):
            w_i, gap = flat(state.w), flat(state.w) - w
            total += byhand.value(PROBLEM, w_i, x, y) / 7 + gap @ flat(state.pi) + state.sigma / 2 * gap @ gap
            weight = nu / ((1 - nu) * state.r) + 10 * (1 + nu) / (state.sigma * (1 - nu))
            assert float(lyapunov_weight(nu, state.r, state.sigma)) == pytest.approx(float(weight), rel=1e-12)
            total += weight * state.epsilon
        return float(total)

    sigma = sum(float(s.sigma) for s in moments[0].clients_before)
    c = min(float((s.sigma + s.r) * (2 * s.sigma - 5 * s.r) / s.sigma) for s in moments[0].clients_before)
    assert c > 0
    for first, second in pairwise(moments):
        w_old, w_new = flat(first.msg.w), flat(second.msg.w)  # w^{τ_k}, w^{τ_{k+1}}
        moved = sum(
            np.sum((flat(a.w) - flat(b.w)) ** 2)
            for a, b in zip(second.clients_after, second.clients_before, strict=True)
        )
        drop = lyapunov(w_old, second.clients_before) - lyapunov(w_new, second.clients_after)
        assert drop >= sigma / 2 * np.sum((w_new - w_old) ** 2) + c / 4 * moved - 1e-13


@pytest.mark.parametrize("seed", range(6))
def test_theorem_3_1_bounds_the_inner_steps(seed):
    """v* by SciPy; r_i is inflated at random so that the bound is not met in the first step."""
    rng = np.random.default_rng(seed)
    clients, i = parts(), seed % 7
    x, y = clients[i]
    r = byhand.lipschitz(PROBLEM, x) / 7 * rng.uniform(1, 5)
    sigma, w, pi = r * rng.uniform(0.55, 3), rng.normal(size=4), rng.normal(size=4) / 7
    objective = lambda v: byhand.value(PROBLEM, v, x, y) / 7 + (v - w) @ pi + sigma / 2 * np.sum((v - w) ** 2)
    slope = lambda v: byhand.gradient(PROBLEM, v, x, y) / 7 + pi + sigma * (v - w)
    best = minimize(objective, w, jac=slope, method="BFGS", options={"gtol": 1e-13}).x
    assert np.linalg.norm(slope(best)) < 1e-7
    g = lambda v: PROBLEM.gradient(v, byhand.batch(x, y)) / 7
    for epsilon in (1e-1, 1e-4, 1e-8):
        start = vector(w, True)
        sub = Subproblem(g, g(start), start, vector(pi, True), jnp.asarray(sigma), jnp.asarray(r), jnp.asarray(epsilon))
        out = gradient_steps(sub, 1000)
        assert int(out.gradients) <= inner_bound(sigma, r, 0.0, float(np.sum((w - best) ** 2)), epsilon)
        assert np.sum(slope(flat(out.v)) ** 2) <= epsilon


def test_the_bound_of_theorem_3_1_in_round_numbers():
    """σ = 4, αr = 2: ϱ = 4, 2(4 + 16)·‖·‖²/ε = 40·1.6/1 = 64 = 4³. With αs = 2: ϱ = 2, 64 = 2⁶."""
    assert inner_bound(4.0, 2.0, 0.0, 1.6, 1.0) == 3
    assert inner_bound(4.0, 2.0, 2.0, 1.6, 1.0) == 6
    assert inner_bound(4.0, 2.0, 0.0, 1.7, 1.0) == 4
    assert inner_bound(4.0, 2.0, 0.0, 0.0, 1.0) == 1
    with pytest.raises(InvalidArgument, match=r"^sigma \(σ_i\) must be above α_i s_i \+ α_i r_i/2 = 3"):
        inner_bound(3.0, 2.0, 2.0, 1.0, 1.0)


# (c) invariants


@pytest.mark.parametrize("preset", ["paper", "theory"])
def test_the_server_s_sum_is_everyone_s_z(preset):
    """total = Σ(σ_i w_i + π_i), hence (7.5): Σ σ_i(w_i − w) + π_i = 0; clients outside keep everything (3.8)."""
    for moment in play(built(InexactADMM.preset(preset)), PROBLEM, parts(), ZERO, COHORTS):
        z = [float(s.sigma) * flat(s.w) + flat(s.pi) for s in moment.clients_after]
        assert relative(flat(moment.after.total), sum(z)) <= 1e-13
        w = flat(moment.after.w)
        left = sum(float(s.sigma) * (flat(s.w) - w) + flat(s.pi) for s in moment.clients_after)
        assert np.max(np.abs(left)) <= 1e-13
        for i, (before, after) in enumerate(zip(moment.clients_before, moment.clients_after, strict=True)):
            if i not in moment.chosen:
                assert before is after


def test_theory_meets_the_residual_at_every_state():
    """(7.6): ‖g_i(w_i) + π_i‖² ≤ ε_i for every client after every round, from the start on."""
    clients = parts()
    moments = play(built(InexactADMM.preset("theory", k0=3)), PROBLEM, clients, ZERO, COHORTS)
    for states in (moments[0].clients_before, *(moment.clients_after for moment in moments)):
        for state, (x, y) in zip(states, clients, strict=True):
            phi = byhand.gradient(PROBLEM, flat(state.w), x, y) / 7 + flat(state.pi)
            assert phi @ phi <= float(state.epsilon) * (1 + 1e-12)


def test_the_telemetry_is_what_it_says():
    """Every column against NumPy, on the states the literal loop ends with."""
    clients, settings = parts(), InexactADMM(k0=2)
    moments = play(built(settings), PROBLEM, clients, ZERO, COHORTS)
    history = fp.run(settings, PROBLEM, byhand.federation(clients), participation=COHORTS, rounds=len(COHORTS)).history
    for t, moment in enumerate(moments):
        w, states = flat(moment.after.w), moment.clients_after
        gaps = [flat(s.w) - w for s in states]
        pis = [flat(s.pi) for s in states]
        f = [byhand.value(PROBLEM, flat(s.w), x, y) / 7 for s, (x, y) in zip(states, clients, strict=True)]
        g = [byhand.gradient(PROBLEM, flat(s.w), x, y) / 7 for s, (x, y) in zip(states, clients, strict=True)]
        sigmas = np.array([float(s.sigma) for s in states])
        lagrangian = sum(a + b @ p + s / 2 * b @ b for a, b, p, s in zip(f, gaps, pis, sigmas, strict=True))
        weights = [0.95 / (0.05 * float(s.r)) + 10 * 1.95 / (float(s.sigma) * 0.05) for s in states]
        expected = {
            "lagrangian": lagrangian,
            "lyapunov": lagrangian + sum(a * float(s.epsilon) for a, s in zip(weights, states, strict=True)),
            "primal_residual": np.sqrt(sum(b @ b for b in gaps)),
            "stationarity": np.sqrt(sum(np.sum((a + p) ** 2) for a, p in zip(g, pis, strict=True))),
            "dual_sum": np.linalg.norm(sum(pis)),
            "dual_residual": np.sqrt(np.sum(sigmas**2)) * np.linalg.norm(w - flat(moment.before.w)),
        }
        for name, value in expected.items():
            assert history.column(name)[t + 1] == pytest.approx(value, rel=1e-9, abs=1e-13), name


def test_the_share_of_local_steps_that_break_the_residual_is_reported():
    """By hand: redo the local steps and count ‖g_i(w_i) + π_i‖² > ε_i."""
    clients, settings = parts(), InexactADMM(k0=3, epsilon=2e-4, inner=1)
    (moment,) = play(built(settings), PROBLEM, clients, ZERO, [range(7)])
    broken = []
    for i, (x, y) in enumerate(clients):
        state = moment.clients_before[i]
        r, sigma, pi, epsilon, w = float(state.r), float(state.sigma), np.zeros(4), 2e-4, flat(moment.msg.w)
        for _ in range(3):
            epsilon *= 0.95
            v = (r * w + sigma * w - byhand.gradient(PROBLEM, w, x, y) / 7 - pi) / (r + sigma)
            phi = byhand.gradient(PROBLEM, v, x, y) / 7 + pi + sigma * (v - w)
            broken.append(phi @ phi > epsilon)
            pi = pi + sigma * (v - w)
        assert float(moment.notes[i].violations) == pytest.approx(np.mean(broken[-3:]))
        assert float(moment.notes[i].gradients) == 1
    assert 0 < np.mean(broken) < 1, "the case must have both"
    quiet = play(built(InexactADMM(k0=3, audit=False)), PROBLEM, clients, ZERO, [range(7)])
    assert np.isnan(float(quiet[0].notes[0].violations))


# (d) other solvers, and exact ADMM


@pytest.mark.drill
def test_with_exact_local_solves_it_is_exact_admm():
    """(3.10) in NumPy with a direct solver: w, w_i and π_i for twelve rounds."""
    clients, m = parts("least_squares"), 7
    settings = InexactADMM(k0=1, sigma=0.7, duals="gradient", solver="exact")
    moments = play(built(settings, LINEAR), LINEAR, clients, vector(np.zeros(3)), [range(7)] * 12)
    hessian = [(x.T @ x + 0.3 * np.eye(3)) / (m * len(y)) for x, y in clients]
    linear = [x.T @ y / (m * len(y)) for x, y in clients]
    sigma = np.array([0.7 * byhand.lipschitz(LINEAR, x) / m for x, _ in clients])
    w_i, pi = np.zeros((m, 3)), np.array(linear)  # −g_i(0)
    for moment in moments:
        w = sum(s * v + p for s, v, p in zip(sigma, w_i, pi, strict=True)) / sigma.sum()
        assert relative(flat(moment.msg.w), w) <= 1e-12
        for i in range(m):
            w_i[i] = np.linalg.solve(hessian[i] + sigma[i] * np.eye(3), linear[i] + sigma[i] * w - pi[i])
            pi[i] = pi[i] + sigma[i] * (w_i[i] - w)
            assert relative(flat(moment.clients_after[i].w), w_i[i]) <= 1e-12
            assert relative(flat(moment.clients_after[i].pi), pi[i]) <= 1e-12


def subproblem(problem, i, epsilon, seed=0):
    clients = parts("logistic" if problem is PROBLEM else "least_squares")
    x, y = clients[i]
    size = 4 if problem is PROBLEM else 3
    rng = np.random.default_rng(seed)
    w, pi = vector(rng.normal(size=size), problem is PROBLEM), vector(rng.normal(size=size), problem is PROBLEM)
    r = byhand.lipschitz(problem, x)
    g = lambda v: problem.gradient(v, byhand.batch(x, y))
    return Subproblem(g, g(w), w, pi, jnp.asarray(0.3 * r), jnp.asarray(r), jnp.asarray(epsilon))


@pytest.mark.parametrize("solver", [gradient_steps, lbfgs])
@pytest.mark.parametrize("epsilon", [1e-2, 1e-12, 1e-26])
def test_solvers_meet_the_residual_they_are_asked_for(solver, epsilon):
    for i in range(7):
        sub = subproblem(PROBLEM, i, epsilon, seed=i)
        out = solver(sub, 1000)
        phi = sub.residual(out.v, sub.gradient(out.v))
        assert float(phi.norm2()) <= epsilon
        assert float(out.residual) == pytest.approx(float(phi.norm2()), rel=1e-2)


def test_lbfgs_needs_fewer_gradients_than_gradient_steps():
    spent = {
        s: sum(int(s(subproblem(PROBLEM, i, 1e-20), 1000).gradients) for i in range(7)) for s in (gradient_steps, lbfgs)
    }
    assert spent[lbfgs] < spent[gradient_steps] / 2


def test_solvers_stop_at_their_cap():
    for solver in (gradient_steps, lbfgs):
        sub = subproblem(LINEAR, 1, 0.0)
        out = solver(sub, 2)
        assert int(out.gradients) <= 4
        assert np.isfinite(float(out.residual))


@pytest.mark.drill
def test_a_solver_of_the_user_s_is_plugged_in():
    """Newton's method on one client's subproblem; the run is that of the exact solver."""

    def newton(sub):
        (basis,) = (jax.jacfwd(lambda a: sub.gradient(vector_of(a)).tree["w"])(sub.w.tree["w"]),)
        step = jnp.linalg.solve(basis + sub.sigma * jnp.eye(3), sub.residual(sub.w, sub.gradient_at_w).tree["w"])
        return vector_of(sub.w.tree["w"] - step)

    def vector_of(a):
        return fp.core.vector.Vector({"w": a})

    clients = parts("least_squares")
    both = [
        play(built(InexactADMM(k0=2, solver=solver), LINEAR), LINEAR, clients, vector(np.zeros(3)), COHORTS)
        for solver in (newton, "exact")
    ]
    for a, b in zip(*both, strict=True):
        assert relative(flat(a.after.w), flat(b.after.w)) <= 1e-11
    settings = InexactADMM(solver=newton)
    assert settings.to_dict()["solver"].endswith("newton")


def test_one_client_with_an_exact_solver_is_the_proximal_point_method():
    """m = 1: w⁺ = w_i + π_i/σ, and π_i = −g_i(w_i) after a solve: a gradient step of length 1/σ from w_i."""
    (client,) = parts("least_squares", sizes=(9,))
    algorithm = built(InexactADMM(k0=1, sigma=1.5, duals="gradient", solver="exact"), LINEAR, 1)
    for moment in play(algorithm, LINEAR, [client], vector(np.zeros(3)), [[0]] * 4):
        (state,) = moment.clients_after
        w_i, sigma = flat(state.w), float(state.sigma)
        assert relative(flat(moment.after.w), w_i - byhand.gradient(LINEAR, w_i, *client) / sigma) <= 1e-11


# (f) bad arguments, and what the reader is told


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"k0": 0}, r"^k0 must be .*, got 0\."),
        ({"sigma": 0}, r"^sigma \(σ_i m/r_i\) must be above 0, got 0\."),
        ({"sigma": -1.0}, r"must be above 0, got -1\.0"),
        ({"nu": 0.4}, r"^nu \(ν_i\) must be in \[1/2, 1\), got 0\.4"),
        ({"nu": 1.0}, r"^nu \(ν_i\) must be in \[1/2, 1\), got 1\.0"),
        ({"epsilon": 0.0}, r"^epsilon \(ε_i⁰\) must be above 0, got 0\.0"),
        ({"floor": -1.0}, r"^floor must be at least 0"),
        ({"inner": 0}, r"^inner \(κ\+1\) must be "),
        ({"audit": "yes"}, r"^audit must be true or false"),
    ],
)
def test_bad_settings_are_refused(settings, message):
    with pytest.raises(InvalidArgument, match=message):
        InexactADMM(**settings)


def test_unknown_words_come_with_the_nearest():
    with pytest.raises(UnknownName, match=r"Did you mean 'gradient'\?"):
        InexactADMM(solver="gradients")
    with pytest.raises(UnknownName, match=r"duals must be one of"):
        InexactADMM(duals="minus")
    assert set(SOLVERS) == {"gradient", "recorded", "lbfgs", "exact"}


def test_the_exact_solver_needs_a_quadratic():
    with pytest.raises(
        InvalidArgument, match=r"problem must be one that has 'quadratic' for inexact_admm, got Logistic"
    ):
        fp.run(InexactADMM(solver="exact"), PROBLEM, byhand.federation(parts()), rounds=1)


@pytest.mark.parametrize("engine", ["local", pytest.param("debug", marks=pytest.mark.drill)])
def test_a_client_with_a_flat_loss_is_named(engine):
    """All zeros and no ℓ2: r_i = 0, so σ_i = 0."""
    clients = list(parts("least_squares"))
    clients[4] = (np.zeros((9, 3)), np.ones(9))
    federation = byhand.federation(clients, classes=())
    with pytest.raises(DataError, match=r"^r_i of client 4 must be above 0, got σ_i = 0"):
        fp.run(InexactADMM(), fp.LeastSquares(), federation, rounds=1, engine=engine)
    fp.run(InexactADMM(), fp.LeastSquares(l2=0.1), federation, rounds=1, engine=engine)


def test_a_schedule_that_leaves_a_client_out_is_said():
    federation = byhand.federation(parts())
    settings = InexactADMM.preset("theory")
    done = fp.run(settings, PROBLEM, federation, participation=[[0, 1, 2, 5], [0, 3, 6]], rounds=2)
    (said,) = done.notices
    assert said.startswith("The schedule never selects client 4: Scheme 4.1")
    assert not fp.run(settings, PROBLEM, federation, participation=[[0, 1, 2, 4, 5], [3, 6]], rounds=2).notices


def test_the_command_says_that_the_theorems_do_not_apply():
    federation = byhand.federation(parts())
    (said,) = fp.run(InexactADMM(), PROBLEM, federation, rounds=1).notices
    assert "do not apply" in said
    assert "σ_i above 2.5 r_i/m, and it is 0.2 r_i/m" in said
    assert not fp.run(InexactADMM.preset("theory"), PROBLEM, federation, rounds=1).notices
    (said,) = built(InexactADMM.preset("theory", sigma=2.5)).notices
    assert "π_i⁰" not in said
    (said,) = built(InexactADMM.preset("theory", floor=1e-3)).notices
    assert "its floor of 0.001 is above 1e-14" in said


def test_a_run_whose_steps_broke_the_residual_says_so():
    """One inner step is not enough here, and only the finished history can tell."""
    federation = byhand.federation(parts())
    settings = InexactADMM.preset("theory", inner=1, epsilon=1e-12)
    assert not built(settings).notices
    (said,) = fp.run(settings, PROBLEM, federation, rounds=2).notices
    assert said.startswith("Up to 100% of a round's local steps broke (3.5)")


@pytest.mark.drill
def test_single_precision_has_a_floor_it_can_meet():
    history = fp.run(
        InexactADMM.preset("theory", nu=0.5), PROBLEM, byhand.federation(parts()), rounds=40, precision="single"
    ).history
    assert np.nanmax(history.column("violations")) == 0
    assert history.last("epsilon") == pytest.approx((1e-14 * 2**29) ** 2, rel=1e-3)


def test_an_upload_that_is_not_finite_is_refused_and_its_client_named():
    """Client 2's solver breaks down in its second round: the state before that round is kept."""

    def broken(sub):
        return sub.step(sub.w, sub.gradient_at_w) * jnp.where(sub.epsilon < 0.6, jnp.nan, 1.0)

    settings = InexactADMM(k0=1, nu=0.7, solver=broken)
    cohorts = ((0, 1), (2, 3), (0, 5, 2), (6,))
    federation = byhand.federation(parts())
    done = fp.run(settings, PROBLEM, federation, participation=cohorts, rounds=4)
    assert done.outcome_kind is fp.stop.Outcome.NONFINITE
    assert "client 0" in done.where
    assert done.history.rounds == 2
    good = fp.run(settings, PROBLEM, federation, participation=cohorts[:2], rounds=2)
    np.testing.assert_array_equal(flat(done.model.w), flat(good.model.w))


@pytest.mark.drill
def test_columns_of_the_telemetry_are_stop_rules():
    federation = byhand.federation(parts())
    for column in ("primal_residual", "dual_residual", "dual_sum", "lagrangian", "lyapunov"):
        Experiment(InexactADMM(), PROBLEM, federation, stop=fp.stop.Target(column, 1.0))
    done = fp.run(InexactADMM(), PROBLEM, federation, rounds=50, stop=fp.stop.Target("stationarity", 0.05))
    assert done.outcome_kind is fp.stop.Outcome.STOPPED
    assert done.history.last("stationarity") <= 0.05 < done.history.column("stationarity")[-2]
