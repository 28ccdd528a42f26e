"""FedEPM: Algorithm 2 of the paper, with the corrections of its module's page."""

from __future__ import annotations

import inspect

import byhand
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from byhand import PROBLEM, built, center, fedepm_local, flat, key_of, parts, phi, play, relative, soft, vector
from scipy.optimize import minimize

import fedpact as fp
from fedpact.algorithms import fedepm
from fedpact.algorithms.fedepm import Broadcast, ClientState, FedEPM, ServerState, Upload, laplace, paper_eta
from fedpact.core.contract import Cohort
from fedpact.core.errors import InvalidArgument
from fedpact.core.keys import JOIN_ROUND, Purpose
from fedpact.core.vector import Vector
from fedpact.engines import LocalEngine, local
from fedpact.problems import optimum

#: η ≥ max r_i, so that (33) promises descent from the first step; c and α large enough for its tail not to drown F.
NUMBERS = {"k0": 3, "eta": 1.5, "lam": 0.05, "mu0": 5.0, "c": 5.0, "alpha": 1.05}
SETTINGS, NOISY = FedEPM(**NUMBERS), FedEPM(**NUMBERS, epsilon=50.0)
COHORTS = ((0, 2, 5), (1, 2, 3, 6), (4,), (), (0, 1, 2, 3, 4, 5, 6), (3, 6))
ONE = LocalEngine(buckets=1)
ZERO = vector(np.zeros(4), intercept=True)


def step(algorithm, problem, msg, client, batch, key=None, grad=None):
    with jax.disable_jit():
        return algorithm.client_step(msg, client, batch, grad or problem.gradient, key or key_of(0, 0, 0))


@pytest.fixture(scope="module")
def moments():
    """Six rounds of partial participation, one of them empty, by the literal loop."""
    return play(built(SETTINGS), PROBLEM, parts(), ZERO, COHORTS)


@pytest.fixture(scope="module")
def noisy():
    return play(built(NOISY), PROBLEM, parts(), ZERO, COHORTS[:3], seed=4)


# (a) one step by hand


def test_one_local_step_in_round_numbers():
    """Rows (1,0)→1 and (0,1)→−3, d = 2, so ∇f(w) = (w − (1,−3))/2; at w = 0 it is g = (−.5, 1.5).

    From w_i = (.5, −1): ‖w_i − w‖² = 1.25, μ = 2 (1 + 1·1.25) 2¹ = 9, μ/d = 4.5.
    4.5 (.5, −1) − g = (2.75, −6); soft by .25: (2.5, −5.75); over η + μ/d = .5 + 4.5 = 5: (.5, −1.15).
    """
    problem = fp.LeastSquares()
    algorithm = built(FedEPM(k0=1, eta=0.5, lam=0.25, mu0=2.0, c=1.0, alpha=2.0), problem, clients=1)
    batch = byhand.batch(np.eye(2), np.array([1.0, -3.0]))
    client = ClientState(vector([0.5, -1.0]), jnp.asarray(0.5))
    new, upload, notes = step(algorithm, problem, Broadcast(vector([0.0, 0.0]), jnp.asarray(0)), client, batch)
    np.testing.assert_allclose(flat(new.w), [0.5, -1.15], rtol=1e-15)
    np.testing.assert_array_equal(flat(upload.z), flat(new.w))
    assert float(notes.gradients) == 1
    assert float(notes.noise_scale) == 0
    assert np.isnan(float(notes.snr))


@pytest.mark.parametrize("k0", [1, 3])
@pytest.mark.parametrize("tau", [0, 4])
@pytest.mark.parametrize("padding", [0, 5])
def test_k0_local_steps_are_the_paper_s(k0, tau, padding):
    """(18) and (20) in NumPy: one gradient at w, then k0 steps from k = τk0 on, with μ_{k+1}/d_i as the prox weight."""
    rng = np.random.default_rng(7)
    w, w_i = rng.normal(size=(2, 4))
    x, y = parts()[1]
    numbers = NUMBERS | {"k0": k0}
    msg = Broadcast(vector(w, True), jnp.asarray(tau))
    client = ClientState(vector(w_i, True), jnp.asarray(1.0))
    batch = byhand.batch(x, y, padding=padding)
    new, upload, _ = step(built(FedEPM(**numbers)), PROBLEM, msg, client, batch)
    expected = fedepm_local(w, w_i, byhand.gradient(PROBLEM, w, x, y), len(y), tau * k0, **numbers)[-1].w
    assert relative(flat(new.w), expected) <= 1e-13
    assert relative(flat(upload.z), expected) <= 1e-13


def test_the_gradient_is_computed_once_a_round_and_at_the_server_s_model():
    seen = []

    def grad(w, batch):
        seen.append(flat(w))
        return PROBLEM.gradient(w, batch)

    msg = Broadcast(vector([0.1, 0.2, 0.3, 0.4], True), jnp.asarray(0))
    x, y = parts()[0]
    step(built(SETTINGS), PROBLEM, msg, ClientState(ZERO, jnp.asarray(1.0)), byhand.batch(x, y), grad=grad)
    np.testing.assert_array_equal(seen, [[0.1, 0.2, 0.3, 0.4]])


def test_noise_is_the_key_s_with_the_scale_of_39(noisy):
    """z_i − ε_i, with ε_i drawn again from (seed, round, client, purpose), is the model without noise.

    The scale is 2‖g_i‖₁/(ε μ_{i,k+1}) with the μ, not μ/d_i, of the round's last step.
    """
    w_own = {i: np.zeros(4) for i in range(7)}
    for t, moment in enumerate(noisy):
        w = flat(moment.msg.w)
        for i in moment.chosen:
            x, y = parts()[i]
            g = byhand.gradient(PROBLEM, w, x, y)
            last = fedepm_local(w, w_own[i], g, len(y), t * 3, **NUMBERS)[-1]
            w_own[i] = last.w
            scale = 2 * np.sum(np.abs(g)) / (50.0 * last.mu)
            draws = jax.random.laplace(key_of(4, t, i)(Purpose.NOISE), (4,), jnp.float64)
            noise = flat(moment.uploads[i].z) - last.w
            assert relative(np.sort(noise), np.sort(scale * np.asarray(draws))) <= 1e-12
            assert relative(flat(moment.clients_after[i].w), last.w) <= 1e-12  # what the client keeps has no noise
            assert float(moment.notes[i].noise_scale) == pytest.approx(scale, rel=1e-12)
            snr = np.log10(np.linalg.norm(last.w) / np.linalg.norm(noise))
            assert float(moment.notes[i].snr) == pytest.approx(snr, rel=1e-9)


def test_the_first_messages_have_noise_of_scale_one_over_mu0():
    algorithm = built(NOISY)
    start = vector([1.0, 2.0, 3.0, 4.0], True)
    state, hello = algorithm.join(start, byhand.batch(*parts()[0]), key_of(4, JOIN_ROUND, 2))
    draws = np.asarray(jax.random.laplace(key_of(4, JOIN_ROUND, 2)(Purpose.NOISE), (4,), jnp.float64)) / 5.0
    np.testing.assert_allclose(np.sort(flat(hello.z) - flat(start)), np.sort(draws), rtol=1e-12, atol=1e-15)
    np.testing.assert_array_equal(flat(state.w), flat(start))
    quiet = built(SETTINGS).join(start, byhand.batch(*parts()[0]), key_of(4, JOIN_ROUND, 2))[1]
    np.testing.assert_array_equal(flat(quiet.z), flat(start))


def test_laplace_noise_has_mean_size_equal_to_its_scale():
    """E|e| = ν and E e² = 2ν², so E φ(e) = n(λν + ην²); (59), the integrals of the printed (25), has 4ν and 16ν²."""
    e = flat(laplace(jax.random.key(0), 0.3, vector(np.zeros(100_000))))
    assert np.mean(np.abs(e)) == pytest.approx(0.3, rel=0.02)
    assert np.mean(e**2) == pytest.approx(2 * 0.09, rel=0.04)
    assert abs(np.mean(e)) < 0.01
    assert phi(e, 0.05, 1.5) / 100_000 == pytest.approx(0.05 * 0.3 + 1.5 * 0.09, rel=0.04)
    assert np.log10(np.std(e) / 0.3) == pytest.approx(np.log10(2) / 2, abs=0.01)  # .15 below deviation ν in SNR


@pytest.mark.parametrize("padding", [0, 5])
def test_a_client_joins_with_its_lipschitz_constant(padding):
    for i, (x, y) in enumerate(parts()):
        with jax.disable_jit():
            state, _ = built(SETTINGS).join(ZERO, byhand.batch(x, y, i, padding), key_of(0, JOIN_ROUND, i))
        assert float(state.r) == pytest.approx(byhand.lipschitz(PROBLEM, x), rel=1e-13)


def test_those_who_do_not_take_part_keep_what_they_have(moments):
    """(22): w_i and z_i stay; (19) is over all m messages, old ones included."""
    z = np.zeros((7, 4))
    for moment in moments:
        assert relative(flat(moment.before.w), center(z, 0.05, 1.5)) <= 1e-13
        for i in range(7):
            if i in moment.chosen:
                z[i] = flat(moment.uploads[i].z)
                assert np.any(flat(moment.clients_after[i].w) != flat(moment.clients_before[i].w))
            else:
                np.testing.assert_array_equal(flat(moment.clients_after[i].w), flat(moment.clients_before[i].w))
        kept = np.column_stack([moment.after.z.tree["w"], moment.after.z.tree["b"]])
        np.testing.assert_array_equal(kept, z)
        assert relative(flat(moment.after.w), center(z, 0.05, 1.5)) <= 1e-13
        spread = np.mean([np.sum((row - flat(moment.after.w)) ** 2) for row in z])
        assert float(moment.info.spread) == pytest.approx(spread, rel=1e-12)
        assert int(moment.after.round) == int(moment.before.round) + 1


def test_a_whole_run_is_the_literal_one_s(moments, run_once):
    """Same rounds through the local engine: model and telemetry, column by column."""
    run = run_once(SETTINGS, ONE, participation=COHORTS, rounds=len(COHORTS))
    assert relative(flat(run.model.w), flat(moments[-1].after.w)) <= 1e-12
    assert run.history.column("participants").tolist() == [0, 3, 4, 1, 0, 7, 2]
    assert run.history.column("gradients").tolist() == [0, 3, 7, 8, 8, 15, 17]
    assert run.history.column("bytes_up").tolist() == [7 * 32 + n * 32 for n in (0, 3, 7, 8, 8, 15, 17)]
    assert run.history.column("bytes_down").tolist() == [n * 40 for n in (0, 3, 7, 8, 8, 15, 17)]  # w and τ


def test_the_paper_s_constants():
    """η = 1e-5 (0.02m + 1)(ρ + 0.1): m = 50, ρ = .5 gives 1.2e-5. λ = η/2."""
    assert paper_eta(50, 0.5) == pytest.approx(1.2e-5, rel=1e-15)
    assert paper_eta(100, 1.0) == pytest.approx(3.3e-5, rel=1e-15)
    assert (FedEPM().k0, FedEPM().mu0, FedEPM().c, FedEPM().alpha) == (12, 0.05, 1e-8, 1.001)
    z = np.random.default_rng(0).normal(size=(50, 3)) * 2
    algorithm = FedEPM().build(fp.LeastSquares(), 50, 0.5)
    with jax.disable_jit():
        server = algorithm.init(vector(np.zeros(3)), fedepm.Hello(Vector({"w": jnp.asarray(z)})))
    assert relative(flat(server.w), center(z, 0.6e-5, 1.2e-5)) <= 1e-13


DEFAULTS = {"k0": 2, "mu0": 0.05, "c": 1e-8, "alpha": 1.001}


def one_round(rho, chosen):
    """A round from 0 with the paper's constants: the models of those chosen, and the server's."""
    eta = 1e-5 * (0.02 * 7 + 1) * (rho + 0.1)
    z = np.zeros((7, 4))
    for i in chosen:
        x, y = parts()[i]
        g = byhand.gradient(PROBLEM, z[i], x, y)
        z[i] = fedepm_local(np.zeros(4), z[i], g, len(y), 0, eta=eta, lam=eta / 2, **DEFAULTS)[-1].w
    return z, center(z, eta / 2, eta)


def test_the_default_eta_has_the_participation_rate():
    """A client's step at ρ = .5 is that of η = 1e-5 (0.02·7 + 1)(.5 + .1), and not that of ρ = 1."""
    msg, client = Broadcast(ZERO, jnp.asarray(0)), ClientState(ZERO, jnp.asarray(1.0))
    for rho, other in ((0.5, 1.0), (1.0, 0.5)):
        upload = step(built(FedEPM(k0=2), rate=rho), PROBLEM, msg, client, byhand.batch(*parts()[1]))[1]
        assert relative(flat(upload.z), one_round(rho, [1])[0][1]) <= 1e-12
        assert relative(flat(upload.z), one_round(other, [1])[0][1]) > 1e-4


def test_a_run_hands_its_participation_rate_to_the_default_eta(run_once):
    """ρ as given, .5, not 1 and not the 4/7 that are drawn."""
    run = run_once(FedEPM(k0=2), ONE, participation=0.5, rounds=1, seed=3)
    chosen = fp.Fraction(0.5).select(3, 0, 7)
    assert len(chosen) == 4
    assert relative(flat(run.model.w), one_round(0.5, chosen)[1]) <= 1e-12
    assert relative(flat(run.model.w), one_round(1.0, chosen)[1]) > 1e-6
    assert relative(flat(run.model.w), one_round(4 / 7, chosen)[1]) > 1e-6


# (b) a certificate


def test_it_reaches_the_optimum_of_the_original_problem():
    """A fixed point has g_i(w) + λu_i + η(w_i − w) = 0, u_i ∈ sgn(w_i − w), and the server's Σ(λu_i + η(w_i − w)) = 0.

    Where no coordinate of w_i − w is 0 the two u_i are the same, so Σ g_i(w) = 0: w is optimal for Σ f_i, not only for
    the penalty model, since the gradient is taken at w. λ is below every |∇f_i(w*)_j|, so none is 0 at the end.
    Bound: f − f* ≤ 1e-12 and ‖w − w*‖ ≤ 1e-6 after 120 rounds with everyone.
    """
    best = optimum(PROBLEM, byhand.federation(parts()))
    assert np.min(np.abs([byhand.gradient(PROBLEM, best.w, x, y) for x, y in parts()])) > 0.01
    rounds = play(built(FedEPM(k0=3, eta=1.0, lam=0.01, mu0=5.0)), PROBLEM, parts(), ZERO, [range(7)] * 120)
    w = flat(rounds[-1].after.w)
    assert abs(np.mean([byhand.value(PROBLEM, w, x, y) for x, y in parts()]) - best.value) <= 1e-12
    assert np.linalg.norm(w - best.w) <= 1e-6


def test_its_own_optimality_residual_vanishes():
    """With λ large enough for kinks: w_i = w − soft(g_i(w), λ)/η at every client, and w their center."""
    algorithm = built(FedEPM(k0=3, eta=1.5, lam=0.1, mu0=5.0, c=0.0, alpha=1.0))
    last = play(algorithm, PROBLEM, parts(), ZERO, [range(7)] * 100)[-1]
    w, own = flat(last.after.w), [flat(client.w) for client in last.clients_after]
    for w_i, (x, y) in zip(own, parts(), strict=True):
        residual = w_i - (w - soft(byhand.gradient(PROBLEM, w, x, y), 0.1) / 1.5)
        assert np.linalg.norm(residual) <= 1e-7
    assert relative(w, center(own, 0.1, 1.5)) <= 1e-13
    assert any(np.any(w_i == w) for w_i in own)  # there are kinks


# (c) the paper's invariants


def test_the_server_s_model_minimises_the_sum_of_penalties(moments):
    """(19): no other w has a smaller Σ φ(z_i − w); tried around it and at every message."""
    rng = np.random.default_rng(0)
    for moment in moments:
        z = np.column_stack([moment.after.z.tree["w"], moment.after.z.tree["b"]])
        w = flat(moment.after.w)
        total = lambda at, z=z: sum(phi(row - at, 0.05, 1.5) for row in z)
        others = [*(w + 10.0**-k * rng.normal(size=4) for k in range(7)), *z, z.mean(axis=0), np.median(z, axis=0)]
        assert all(total(w) <= total(other) + 1e-15 for other in others)


def penalised(w, own):
    """F(w, W) = Σ f_i(w_i) + φ(w_i − w)."""
    return sum(
        byhand.value(PROBLEM, w_i, x, y) + phi(w_i - w, 0.05, 1.5) for w_i, (x, y) in zip(own, parts(), strict=True)
    )


def test_lemma_vi_1(moments):
    """(32) summed over the k0 steps of a round, with μ/d_i as the prox weight and no noise (ζ = 0).

    F(w⁺, W⁺) − F(w, W) ≤ Σ_k Σ_{i∈S} [ r_i² d_i/(2μ_{i,0} c α^{k+1}) − (μ̄_{i,k+1} + η − r_i)/2 ‖Δw_i‖² ] − mη/4 ‖Δw‖².
    On the way its two halves, which are sharper: (68) for the server, and (72) before Young's inequality for a step,
    F_i(w, w_i⁺) − F_i(w, w_i) ≤ ⟨∇f_i(w_i) − g_i, Δw_i⟩ + (r_i − η − 2μ̄)/2 ‖Δw_i‖².
    """
    eta, alpha, mu0, c = 1.5, 1.05, 5.0, 5.0
    checked = 0
    for t in range(1, len(moments)):
        moment = moments[t]
        w_old, w = flat(moments[t - 1].msg.w), flat(moment.msg.w)
        own = [flat(client.w) for client in moment.clients_before]
        moved = np.sum((w - w_old) ** 2)
        sides = [sum(phi(w_i - at, 0.05, eta) for w_i in own) for at in (w, w_old)]
        assert sides[0] - sides[1] <= -7 * eta / 2 * moved + 1e-14  # (68)
        bound = -7 * eta / 4 * moved
        after = list(own)
        for i in moment.chosen:
            x, y = parts()[i]
            d, r, g = len(y), byhand.lipschitz(PROBLEM, x), byhand.gradient(PROBLEM, w, x, y)
            for j, s in enumerate(fedepm_local(w, own[i], g, d, t * 3, **NUMBERS)):
                delta, mu_bar = s.w - s.before, s.mu / d
                change = byhand.value(PROBLEM, s.w, x, y) + phi(s.w - w, 0.05, eta)
                change -= byhand.value(PROBLEM, s.before, x, y) + phi(s.before - w, 0.05, eta)
                pull = (byhand.gradient(PROBLEM, s.before, x, y) - g) @ delta
                assert change <= pull + (r - eta - 2 * mu_bar) / 2 * (delta @ delta) + 1e-14  # (72)
                bound += r**2 * d / (2 * mu0 * c * alpha ** (t * 3 + j + 1))
                bound -= (mu_bar + eta - r) / 2 * (delta @ delta)
                after[i] = s.w
                checked += 1
            assert relative(flat(moment.clients_after[i].w), after[i]) <= 1e-12
        assert penalised(w, after) - penalised(w_old, own) <= bound
    assert checked == 3 * (4 + 1 + 7 + 2)


def test_the_penalty_and_descent_columns_are_f_and_31_by_hand(moments, run_once):
    """penalty is F/m at (w^{τ+1}, W^k); descent adds (1/m) Σ r_i² d_i/(2μ_{i,0} c (α−1) α^k), k = τk0.

    L^k of (31) has F at (w^{τ_k}, W^k), the broadcast before: the columns are half a round further on.
    """
    run = run_once(SETTINGS, ONE, participation=COHORTS, rounds=len(COHORTS))
    weight = [byhand.lipschitz(PROBLEM, x) ** 2 * len(y) / (2 * 5.0 * 5.0 * 0.05) for x, y in parts()]
    states = [(moments[0].before.w, moments[0].clients_before), *((m.after.w, m.clients_after) for m in moments)]
    for t, (w, clients) in enumerate(states):
        f = penalised(flat(w), [flat(client.w) for client in clients]) / 7
        assert run.history.column("penalty")[t] == pytest.approx(f, rel=1e-11)
        assert run.history.column("descent")[t] == pytest.approx(f + np.mean(weight) / 1.05 ** (3 * t), rel=1e-9)


def test_the_descent_column_never_increases_without_noise(run_once):
    """The local steps of (33) with η ≥ max r_i, then the server's (68)."""
    assert max(byhand.lipschitz(PROBLEM, x) for x, _ in parts()) <= 1.5
    run = run_once(SETTINGS, ONE, participation=COHORTS, rounds=len(COHORTS))
    assert np.all(np.diff(run.history.column("descent")) <= 0)
    assert np.ptp(run.history.column("descent")) > 0


def test_with_noise_the_descent_column_can_increase(run_once):
    """The server's model is then the center of the z_i, not of the w_i: (32) adds 2φ(ζ_i), the column does not."""
    run = run_once(FedEPM(**NUMBERS, epsilon=0.05), ONE, participation=COHORTS, rounds=len(COHORTS))
    assert np.max(np.diff(run.history.column("descent"))) > 0


def test_the_penalty_column_falls_as_the_sharp_inequalities_say(moments, run_once):
    """A round changes Σ F_i by at most Σ [⟨∇f_i(w_i) − g_i, Δw_i⟩ + (r_i − η − 2μ̄)/2 ‖Δw_i‖²] − mη/2 ‖Δw‖².

    The sum is over the local steps ((72) before Young's inequality), the last term is the next server step's (68).
    Unlike `descent` there is no tail to hide a wrong step; where the right side is at most 0, `penalty` cannot rise.
    """
    penalty = run_once(SETTINGS, ONE, participation=COHORTS, rounds=len(COHORTS)).history.column("penalty")
    bounds = []
    for t, moment in enumerate(moments):
        w, bound = flat(moment.msg.w), -7 * 1.5 / 2 * np.sum((flat(moment.after.w) - flat(moment.msg.w)) ** 2)
        for i in moment.chosen:
            x, y = parts()[i]
            r, g = byhand.lipschitz(PROBLEM, x), byhand.gradient(PROBLEM, w, x, y)
            for s in fedepm_local(w, flat(moment.clients_before[i].w), g, len(y), t * 3, **NUMBERS):
                delta = s.w - s.before
                bound += (byhand.gradient(PROBLEM, s.before, x, y) - g) @ delta
                bound += (r - 1.5 - 2 * s.mu / len(y)) / 2 * (delta @ delta)
        bounds.append(bound / 7)
        assert penalty[t + 1] - penalty[t] <= bounds[-1] + 1e-14
    falling = np.array(bounds) < 0
    assert falling[[0, 1, 2, 4]].all()
    assert np.all(np.diff(penalty)[falling] < 0)


def alternation(w, x, y, lam, eta):
    """argmin_{w_i} F_i(w, w_i) of (17) by SciPy: w_i − w = p − q with p, q ≥ 0, so that |·| is smooth."""

    def objective(pq):
        v = pq[:4] - pq[4:]
        slope = byhand.gradient(PROBLEM, w + v, x, y) + eta * v
        f = byhand.value(PROBLEM, w + v, x, y) + lam * pq.sum() + eta / 2 * v @ v
        return f, np.concatenate([slope + lam, lam - slope])

    options = {"ftol": 1e-18, "gtol": 1e-12, "maxiter": 5000, "maxfun": 50000}
    found = minimize(objective, np.zeros(8), jac=True, bounds=[(0, None)] * 8, method="L-BFGS-B", options=options).x
    return w + found[:4] - found[4:]


def iterate(algorithm, w, w_i, x, y, times, refresh):
    """`times` client steps at a fixed server model; `refresh` hands the client its gradient at w_i instead of w."""
    batch, msg = byhand.batch(x, y), Broadcast(vector(w, True), jnp.asarray(0))

    @jax.jit
    def once(client):
        grad = (lambda _, b: PROBLEM.gradient(client.w, b)) if refresh else PROBLEM.gradient
        return algorithm.client_step(msg, client, batch, grad, key_of(0, 0, 0))[0]

    client = ClientState(vector(w_i, True), jnp.asarray(1.0))
    for _ in range(times):
        client = once(client)
    return flat(client.w)


def test_many_local_steps_solve_the_linearised_alternation():
    """Which limit of (20) is true: with w fixed, c = 0 and α = 1, v ← soft(μ̄v − g, λ)/(η + μ̄) contracts by μ̄/(η + μ̄),

    and its fixed point solves 0 ∈ g + λ∂|v| + ηv, i.e. min_v ⟨g, v⟩ + φ(v) with g = ∇f_i(w): v = −soft(g, λ)/η. That is
    (17) with f_i replaced by its linearisation at w, whether by k0 → ∞ in one round or by many rounds of k0 = 1 at the
    same w (the gradient is taken at w, so a new round at the same w refreshes nothing).
    """
    rng = np.random.default_rng(1)
    w, w_i = rng.normal(size=(2, 4))
    x, y = parts()[3]
    expected = w - soft(byhand.gradient(PROBLEM, w, x, y), 0.05) / 1.5
    numbers = {"eta": 1.5, "lam": 0.05, "mu0": 6.0, "c": 0.0, "alpha": 1.0}  # μ̄ = .5: a quarter is left at each step
    once = iterate(built(FedEPM(k0=60, **numbers)), w, w_i, x, y, 1, refresh=False)
    often = iterate(built(FedEPM(k0=1, **numbers)), w, w_i, x, y, 60, refresh=False)
    assert relative(once, expected) <= 1e-13
    assert relative(often, expected) <= 1e-13


@pytest.mark.parametrize("eta", [1.0, 4.0, 16.0])
def test_how_far_that_limit_is_from_the_exact_alternation(eta):
    """‖v_lin − v*‖ ≤ (r_i/η) ‖v*‖ where w + v* solves (17): subtract the optimality conditions; ∂φ is η-monotone."""
    w = np.random.default_rng(1).normal(size=4)
    x, y = parts()[3]
    exact = alternation(w, x, y, 0.05, eta) - w
    limit = (
        iterate(built(FedEPM(k0=80, eta=eta, lam=0.05, mu0=4.0, c=0.0, alpha=1.0)), w, w, x, y, 1, refresh=False) - w
    )
    distance = np.linalg.norm(limit - exact)
    assert 1e-3 * np.linalg.norm(exact) / eta < distance <= byhand.lipschitz(PROBLEM, x) / eta * np.linalg.norm(exact)


def test_with_refreshed_gradients_the_local_step_solves_the_exact_alternation():
    """Given ∇f_i(w_i^k) instead of ∇f_i(w), (20) is a proximal gradient step on F_i(w, ·) and tends to (17)'s w_i."""
    rng = np.random.default_rng(1)
    w, w_i = rng.normal(size=(2, 4))
    x, y = parts()[3]
    algorithm = built(FedEPM(k0=1, eta=1.5, lam=0.05, mu0=6.0, c=0.0, alpha=1.0))
    reached = iterate(algorithm, w, w_i, x, y, 150, refresh=True)
    exact = alternation(w, x, y, 0.05, 1.5)
    assert np.linalg.norm(reached - exact) <= 1e-6
    assert (
        np.linalg.norm(iterate(algorithm, w, w_i, x, y, 150, refresh=False) - exact) > 1e-3
    )  # the printed step does not


# (d) degenerate cases


def test_without_lambda_the_server_takes_the_mean():
    moment = play(built(FedEPM(**(NUMBERS | {"lam": 0.0}))), PROBLEM, parts(), ZERO, [range(7)])[-1]
    z = np.array([flat(upload.z) for upload in moment.uploads.values()])
    assert relative(flat(moment.after.w), z.mean(axis=0)) <= 1e-14


def test_one_client_without_lambda_is_gradient_descent():
    """Then w = w_1, and k0 steps move it by −(g/η)(1 − q^{k0}), q = μ̄/(η + μ̄): for k0 = 1 the step is 1/(η + μ̄)."""
    x, y = parts()[1]
    numbers = {"eta": 0.5, "lam": 0.0, "mu0": 9.0, "c": 0.0, "alpha": 1.0}  # μ̄ = 1
    w, q = np.zeros(4), 1.0 / 1.5
    for moment in play(built(FedEPM(k0=4, **numbers), clients=1), PROBLEM, [(x, y)], ZERO, [[0]] * 5):
        w = w - byhand.gradient(PROBLEM, w, x, y) / 0.5 * (1 - q**4)
        assert relative(flat(moment.after.w), w) <= 1e-13
    msg, client = Broadcast(vector(w, True), jnp.asarray(3)), ClientState(vector(w, True), jnp.asarray(1.0))
    upload = step(built(FedEPM(k0=1, **numbers), clients=1), PROBLEM, msg, client, byhand.batch(x, y))[1]
    assert relative(flat(upload.z), w - byhand.gradient(PROBLEM, w, x, y) / 1.5) <= 1e-14


def test_a_large_lambda_stalls():
    """With λ above the threshold (11) all soft-thresholds return 0 and nothing moves from a common start."""
    slopes = [np.abs(byhand.gradient(PROBLEM, np.zeros(4), x, y)).max() for x, y in parts()]
    msg, client = Broadcast(ZERO, jnp.asarray(0)), ClientState(ZERO, jnp.asarray(1.0))
    for factor, moves in ((1.01, False), (0.99, True)):
        algorithm = built(FedEPM(**(NUMBERS | {"lam": factor * max(slopes)})))
        new = [step(algorithm, PROBLEM, msg, client, byhand.batch(x, y))[1] for x, y in parts()]
        assert any(np.any(flat(upload.z) != 0) for upload in new) == moves


# (e) engines and trials; purity and repeatability are in the conformance suite, resuming in test_driver


@pytest.mark.drill
def test_buckets_and_chunks_change_nothing(run_once):
    """One bucket, or four with one client at a time; the debug engine is in the conformance suite."""
    many = LocalEngine(buckets=4, chunk=1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(local, "BUCKET_COST", 0)
        assert [b.client.shape[0] for b in many.load([byhand.federation(parts())], np.float64)[1].buckets] == [
            2,
            2,
            2,
            1,
        ]
    a = run_once(SETTINGS, ONE, participation=COHORTS, rounds=len(COHORTS))
    b = run_once(SETTINGS, many, participation=COHORTS, rounds=len(COHORTS))
    assert relative(flat(b.model.w), flat(a.model.w)) <= 1e-12
    assert a.history.columns == b.history.columns
    for name in a.history.columns:
        if "seconds" not in name:
            np.testing.assert_allclose(b.history.column(name), a.history.column(name), rtol=1e-12, atol=1e-13)


@pytest.mark.drill
def test_trials_are_the_same_runs_one_by_one(run_once):
    """Two seeds in one program; the seed decides cohorts and noise."""
    options = {"participation": 0.4, "rounds": 4}
    together = fp.trials(NOISY, PROBLEM, byhand.federation(parts()), [3, 1], engine=ONE, **options)
    assert len(together) == 2
    for run, seed in zip(together, (3, 1), strict=True):
        alone = run_once(NOISY, ONE, seed=seed, **options)
        assert relative(flat(run.model.w), flat(alone.model.w)) <= 1e-12
        for name in ("objective", "gradient", "participants", "bytes_up", "snr", "noise_scale", "penalty"):
            np.testing.assert_allclose(run.history.column(name), alone.history.column(name), rtol=1e-11, atol=1e-12)
    assert np.all(flat(together[0].model.w) != flat(together[1].model.w))


def test_noise_comes_with_a_warning():
    assert built(SETTINGS).notices == ()
    (notice,) = built(FedEPM(epsilon=0.1)).notices
    assert "ε=0.1: no guarantee" in notice
    assert FedEPM.preset("paper") == FedEPM(epsilon=0.1)
    assert FedEPM.preset("noiseless", k0=4) == FedEPM(k0=4)


def test_the_signal_to_noise_ratio_is_the_least_over_clients(run_once):
    """snr in the history: min over all clients of their last log10(‖w_i‖/‖ε_i‖)."""
    run = run_once(NOISY, ONE, participation=0.4, rounds=4, seed=1)
    schedule = [fp.Fraction(0.4).select(1, t, 7).tolist() for t in range(4)]
    rounds = play(built(NOISY), PROBLEM, parts(), ZERO, schedule, seed=1)
    last = {}
    for t, moment in enumerate(rounds):
        last |= {i: (float(note.snr), float(note.noise_scale)) for i, note in moment.notes.items()}
        assert run.history.column("snr")[t + 1] == pytest.approx(min(s for s, _ in last.values()), rel=1e-9)
        assert run.history.column("noise_scale")[t + 1] == pytest.approx(max(s for _, s in last.values()), rel=1e-9)
    assert relative(flat(run.model.w), flat(rounds[-1].after.w)) <= 1e-12  # slots for three of seven, gathered


# (f) bad arguments


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (
            {"k0": 0},
            r"k0 must be an integer of at least 1, got 0\. It is the number of local steps in a round\.",
        ),
        ({"k0": 2.0}, r"k0 must be an integer of at least 1, got 2\.0\. .+"),
        ({"k0": True}, r"k0 must be an integer of at least 1, got True\. .+"),
        ({"eta": 0}, r"eta \(η\) must be above 0, got 0\. Leave it out for the paper's value\."),
        ({"eta": -1e-5}, r"eta \(η\) must be above 0, got -1e-05\. .+"),
        ({"eta": "small"}, r"eta \(η\) must be above 0, got 'small'\. .+"),
        ({"eta": float("nan")}, r"eta \(η\) must be above 0, got nan\. .+"),
        ({"lam": -1.0}, r"lam \(λ\) must be at least 0, got -1\.0\. Leave it out for η/2\."),
        ({"mu0": 0.0}, r"mu0 \(μ_\{i,0\}\) must be above 0, got 0\.0\."),
        ({"c": -1}, r"c \(c_i\) must be at least 0, got -1\."),
        ({"alpha": 0.999}, r"alpha \(α_i\) must be at least 1, got 0\.999\."),
        ({"epsilon": 0}, r"epsilon \(ε\) must be above 0, got 0\."),
        ({"epsilon": "0.1"}, r"epsilon \(ε\) must be above 0, got '0\.1'\."),
    ],
    ids=str,
)
def test_bad_settings(settings, said):
    with pytest.raises(InvalidArgument, match=f"^{said}$"):
        FedEPM(**settings)


@pytest.mark.parametrize("name", ["eta", "lam", "mu0", "c", "alpha"])
def test_infinite_settings_are_refused(name):
    """They would pass every inequality and end as NaN in round 0."""
    with pytest.raises(InvalidArgument, match=rf"^{name} \(.+\) must be .+, got inf\."):
        FedEPM(**{name: float("inf")})


def test_the_functions_are_called_with_what_the_contract_says():
    """An empty cohort: nothing uploaded, the server keeps its model and counts the round."""
    algorithm = built(SETTINGS)
    z = Vector({"w": jnp.ones((7, 3)), "b": jnp.ones(7)})
    with jax.disable_jit():
        server = ServerState(z, vector(np.ones(4), True), jnp.asarray(5))
        nan = jax.tree.map(lambda a: jnp.full_like(a, jnp.nan), z)
        after, _ = algorithm.server_step(server, Upload(nan), Cohort(None, jnp.zeros(7, bool)))
    np.testing.assert_array_equal(flat(after.w), np.ones(4))
    assert int(after.round) == 6
    assert list(inspect.signature(algorithm.client_step).parameters) == ["msg", "client", "batch", "grad", "key"]
