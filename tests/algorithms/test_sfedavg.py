"""SFedAvg and SFedProx: Algorithms 3 and 4 of the FedEPM paper."""

from __future__ import annotations

import math

import byhand
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from byhand import PROBLEM, built, flat, key_of, parts, play, relative, vector

import fedpact as fp
from fedpact.algorithms.fedavg import FedAvg
from fedpact.algorithms.fedprox import FedProx
from fedpact.algorithms.sfedavg import Broadcast, ClientState, SFedAvg, SFedProx, paper_step
from fedpact.core.contract import check_needs
from fedpact.core.errors import FedpactError, InvalidArgument, UnknownName
from fedpact.core.keys import Purpose
from fedpact.core.settings import Settings
from fedpact.problems import optimum

ZERO = vector(np.zeros(4), intercept=True)
COHORTS = ((0, 2, 5), (1, 3, 4, 6), (), (2,))


def gamma(d, k, k0):
    """(38) with the ceiling, in whole numbers."""
    return 2 * d / math.sqrt(2 * k0 + -(-k // k0))


def local(w, x, y, tau, *, k0, mu=0.0, inner=1, scale=1.0, r=None):
    """(35), or (36) by Algorithm 4: the round's model, and the model its last step k started from."""
    v = w.copy()
    for k in range(tau * k0, (tau + 1) * k0):
        before = v
        step = scale * (1 / r if r else gamma(len(y), k, k0))
        for _ in range(inner):
            v = v - step * (byhand.gradient(PROBLEM, v, x, y) + mu * (v - w))
    return v, before


def step(algorithm, w, tau, x, y, r=0.0, seed=0, client=0):
    with jax.disable_jit():
        return algorithm.client_step(
            Broadcast(vector(w, True), jnp.asarray(tau)),
            ClientState(jnp.asarray(r)),
            byhand.batch(x, y, client),
            PROBLEM.gradient,
            key_of(seed, tau, client),
        )


# (a) one step by hand


def test_the_step_size_has_the_ceiling():
    """k0 = 3: k = 0, 1, 2, 3, 4, 6, 7 have ⌈k/k0⌉ = 0, 1, 1, 1, 2, 2, 3."""
    for k, up in ((0, 0), (1, 1), (2, 1), (3, 1), (4, 2), (6, 2), (7, 3)):
        assert float(paper_step(jnp.asarray(10.0), jnp.asarray(k), 3)) == pytest.approx(
            20 / math.sqrt(6 + up), rel=1e-15
        )


def test_one_step_in_round_numbers():
    """Rows (1,0)→1, (0,1)→−3 (d = 2) from w = 0: g = (−.5, 1.5). k0 = 2, τ = 0: γ_0 = 4/√4 = 2, γ_1 = 4/√5.

    v = −2g = (1, −3), where the gradient is 0: it stays. With scale ¼: γ_0 = .5, v = (.25, −.75), its gradient is
    (−.375, 1.125), γ_1 = 1/√5, so w_i = (.25 + .375/√5, −.75 − 1.125/√5).
    """
    problem, x, y = fp.LeastSquares(), np.eye(2), np.array([1.0, -3.0])
    for scale, expected in ((1.0, [1.0, -3.0]), (0.25, [0.25 + 0.375 / 5**0.5, -0.75 - 1.125 / 5**0.5])):
        algorithm = SFedAvg(k0=2, scale=scale).build(problem, 1, 1.0)
        with jax.disable_jit():
            _, upload, notes = algorithm.client_step(
                Broadcast(vector([0.0, 0.0]), jnp.asarray(0)),
                ClientState(jnp.asarray(0.0)),
                byhand.batch(x, y),
                problem.gradient,
                key_of(0, 0, 0),
            )
        np.testing.assert_allclose(flat(upload.z), expected, rtol=1e-14)
        assert float(notes.gradients) == 2


@pytest.mark.parametrize("tau", [0, 5])
@pytest.mark.parametrize(
    ("settings", "numbers"),
    [
        (SFedAvg(k0=1, scale=0.02), {"k0": 1, "scale": 0.02}),
        (SFedAvg(k0=3, scale=0.02), {"k0": 3, "scale": 0.02}),
        (SFedAvg(k0=3, step="lipschitz", scale=0.5), {"k0": 3, "scale": 0.5, "r": 0.8}),
        (SFedProx(k0=2, mu=0.3, inner=3, scale=0.02), {"k0": 2, "mu": 0.3, "inner": 3, "scale": 0.02}),
        (SFedProx(k0=1, mu=0.3, inner=2, step="lipschitz"), {"k0": 1, "mu": 0.3, "inner": 2, "r": 0.8}),
    ],
    ids=lambda v: v.label if isinstance(v, Settings) else "",
)
def test_a_round_of_local_steps(settings, numbers, tau):
    w = np.random.default_rng(3).normal(size=4)
    x, y = parts()[1]
    _, upload, notes = step(built(settings), w, tau, x, y, r=0.8)
    assert relative(flat(upload.z), local(w, x, y, tau, **numbers)[0]) <= 1e-13
    assert float(notes.gradients) == numbers["k0"] * numbers.get("inner", 1)
    assert float(notes.noise_scale) == 0


@pytest.mark.parametrize("settings", [SFedAvg(k0=3, scale=0.02), SFedProx(k0=2, mu=0.3, inner=3, scale=0.02)])
def test_noise_has_the_scale_of_39(settings):
    """2‖g_i‖₁/(ε μ_{i,0}(1 + c‖w_i^k − w‖²) α^{k+1}): the round's first gradient, its last step k = τk0 + k0 − 1."""
    numbers = {"k0": settings.k0, "scale": 0.02} | ({"mu": 0.3, "inner": 3} if isinstance(settings, SFedProx) else {})
    loud = type(settings).from_dict(settings.to_dict() | {"epsilon": 0.5, "mu0": 2.0, "c": 4.0, "alpha": 1.1})
    w, tau = np.random.default_rng(3).normal(size=4), 2
    x, y = parts()[1]
    _, upload, notes = step(built(loud), w, tau, x, y, seed=9, client=1)
    clean, before = local(w, x, y, tau, **numbers)
    mu = 2.0 * (1 + 4.0 * np.sum((before - w) ** 2)) * 1.1 ** ((tau + 1) * settings.k0)
    scale = 2 * np.sum(np.abs(byhand.gradient(PROBLEM, w, x, y))) / (0.5 * mu)
    draws = np.asarray(jax.random.laplace(key_of(9, tau, 1)(Purpose.NOISE), (4,), jnp.float64))
    noise = flat(upload.z) - clean
    assert float(notes.noise_scale) == pytest.approx(scale, rel=1e-12)
    assert relative(np.sort(noise), np.sort(scale * draws)) <= 1e-12
    assert float(notes.snr) == pytest.approx(np.log10(np.linalg.norm(clean) / np.linalg.norm(noise)), rel=1e-9)


def test_the_server_averages_those_who_have_just_uploaded():
    """(34), over S and divided by |S|; an empty round leaves the model; τ counts every round."""
    rounds = play(built(SFedAvg(k0=2, scale=0.02)), PROBLEM, parts(), ZERO, COHORTS)
    w = np.zeros(4)
    for t, moment in enumerate(rounds):
        sent = [local(w, *parts()[i], t, k0=2, scale=0.02)[0] for i in moment.chosen]
        w = sum(sent) / len(sent) if sent else w
        assert relative(flat(moment.after.w), w) <= 1e-13
        assert int(moment.after.round) == t + 1


def test_the_start_is_the_mean_of_the_first_messages():
    algorithm = built(SFedAvg(k0=1, epsilon=0.5, mu0=2.0))
    hellos = [algorithm.join(ZERO, byhand.batch(*parts()[i]), key_of(0, 7, i))[1] for i in range(3)]
    server = algorithm.init(ZERO, byhand.stack(hellos))
    draws = [np.asarray(jax.random.laplace(key_of(0, 7, i)(Purpose.NOISE), (4,), jnp.float64)) / 2.0 for i in range(3)]
    sent = [flat(hello.z) for hello in hellos]
    assert all(relative(np.sort(a), np.sort(b)) <= 1e-13 for a, b in zip(sent, draws, strict=True))
    assert relative(flat(server.w), np.mean(sent, axis=0)) <= 1e-14


NOISE = {"mu0": 0.05, "c": 1e-8, "alpha": 1.001}  # Section VII.B


def test_the_paper_s_constants():
    """Section VII.B: μ = 1e-5 and ℓ = 3 of Algorithm 4, the step (38), the constants of (39); k0 = 12 of Figure 4."""
    common = {"k0": 12, "step": "paper", "scale": 1.0, "epsilon": None, **NOISE}
    assert SFedAvg().to_dict() == common
    assert SFedProx().to_dict() == common | {"mu": 1e-5, "inner": 3}


@pytest.mark.parametrize("kind", [SFedAvg, SFedProx])
def test_the_presets(kind):
    assert set(kind.presets) == {"paper", "noiseless", "lipschitz"}
    assert kind.preset("paper") == kind(epsilon=0.1)
    assert kind.preset("noiseless") == kind()
    assert kind.preset("lipschitz") == kind(step="lipschitz")


@pytest.mark.parametrize("kind", [SFedAvg, SFedProx])
def test_a_client_joins_with_its_lipschitz_constant_where_the_step_needs_it(kind):
    """r_i itself, without μ: SFedProx's γ_i is 1/r_i too."""
    for i, (x, y) in enumerate(parts()):
        for step_, r in (("lipschitz", byhand.lipschitz(PROBLEM, x)), ("paper", 0.0)):
            with jax.disable_jit():
                state, _ = built(kind(step=step_)).join(ZERO, byhand.batch(x, y, i, padding=3), key_of(0, 0, i))
            assert float(state.r) == pytest.approx(r, rel=1e-13)


# (b) a certificate


@pytest.mark.drill
def test_one_local_step_at_one_over_r_converges_to_the_optimum():
    """With k0 = 1 and equal clients it is gradient descent: f − f* ≤ 1e-12 after 1,500 rounds."""
    x, y = parts()[3]
    best = optimum(PROBLEM, byhand.federation([(x, y)] * 2))
    algorithm = built(SFedAvg(k0=1, step="lipschitz"), clients=2)
    w = flat(play(algorithm, PROBLEM, [(x, y)] * 2, ZERO, [range(2)] * 1500)[-1].after.w)
    assert np.mean([byhand.value(PROBLEM, w, x, y)]) - best.value <= 1e-12
    assert np.linalg.norm(byhand.gradient(PROBLEM, w, x, y)) <= 1e-7


# (c) an invariant: descent


@pytest.mark.parametrize("settings", [SFedAvg(k0=3, step="lipschitz"), SFedProx(k0=2, mu=0.01, step="lipschitz")])
def test_one_client_with_steps_one_over_r_descends(settings):
    """The descent lemma: f(v − ∇f(v)/r) ≤ f(v) − ‖∇f(v)‖²/(2r), here for every round."""
    x, y = parts()[3]
    rounds = play(built(settings, clients=1), PROBLEM, [(x, y)], ZERO, [[0]] * 12)
    values = [byhand.value(PROBLEM, flat(moment.before.w), x, y) for moment in rounds]
    assert np.all(np.diff(values) < 0)
    g, r = byhand.gradient(PROBLEM, np.zeros(4), x, y), byhand.lipschitz(PROBLEM, x)
    assert values[1] <= values[0] - g @ g / (2 * r)


# (d) degenerate cases


def test_without_its_proximal_term_sfedprox_is_sfedavg():
    one, other = SFedAvg(k0=2, scale=0.02), SFedProx(k0=2, scale=0.02, mu=0.0, inner=1)
    rounds = [play(built(settings), PROBLEM, parts(), ZERO, COHORTS) for settings in (one, other)]
    for a, b in zip(*rounds, strict=True):
        assert relative(flat(a.after.w), flat(b.after.w)) <= 1e-14
    loud = [type(s).from_dict(s.to_dict() | {"epsilon": 0.5, "c": 4.0}) for s in (one, other)]
    sent = [step(built(settings), np.ones(4), 1, *parts()[1])[1:] for settings in loud]
    assert relative(flat(sent[0][0].z), flat(sent[1][0].z)) <= 1e-14
    assert float(sent[0][1].noise_scale) == pytest.approx(float(sent[1][1].noise_scale), rel=1e-14)


def test_with_one_over_r_sfedavg_is_fedavg():
    """SFedAvg(k0, step="lipschitz") and FedAvg(steps=k0) take the same steps, scaled or not, and the same mean."""
    for scale in (1.0, 0.3):
        one, other = SFedAvg(k0=3, step="lipschitz", scale=scale), FedAvg(steps=3, scale=scale)
        rounds = [play(built(settings), PROBLEM, parts(), ZERO, COHORTS) for settings in (one, other)]
        for a, b in zip(*rounds, strict=True):
            assert relative(flat(a.after.w), flat(b.after.w)) <= 1e-14
    assert np.any(flat(a.after.w) != 0)


def test_with_one_over_r_sfedprox_is_fedprox_of_k0_times_inner_steps():
    """With a common number for the step, since SFedProx takes 1/r_i and FedProx 1/(r_i + μ)."""
    x, y = parts()[1]
    r = byhand.lipschitz(PROBLEM, x)
    one, other = SFedProx(k0=2, inner=3, mu=0.3, step="lipschitz"), FedProx(mu=0.3, steps=6, step=1 / r)
    rounds = [play(built(s, clients=1), PROBLEM, [(x, y)], ZERO, [[0]] * 3) for s in (one, other)]
    for a, b in zip(*rounds, strict=True):
        assert relative(flat(a.after.w), flat(b.after.w)) <= 1e-13


def test_one_client_one_step_is_gradient_descent():
    x, y = parts()[3]
    rounds = play(built(SFedAvg(k0=1, scale=0.01), clients=1), PROBLEM, [(x, y)], ZERO, [[0]] * 5)
    w = np.zeros(4)
    for t, moment in enumerate(rounds):
        w = w - 0.01 * 24 / math.sqrt(2 + t) * byhand.gradient(PROBLEM, w, x, y)  # d = 12, ⌈k/k0⌉ = t
        assert relative(flat(moment.after.w), w) <= 1e-13


# (f) bad arguments


@pytest.mark.parametrize("kind", [SFedAvg, SFedProx])
@pytest.mark.parametrize(
    ("settings", "error", "said"),
    [
        ({"k0": 0}, InvalidArgument, r"k0 must be an integer of at least 1, got 0\. It is the number .+"),
        ({"step": "papr"}, UnknownName, r"step must be one of lipschitz, paper, got 'papr'\. Did you mean 'paper'\?"),
        ({"step": 0.1}, UnknownName, r"step must be one of lipschitz, paper, got 0\.1\."),
        ({"scale": 0}, InvalidArgument, r"scale must be above 0, got 0\. It multiplies the step size γ_i\."),
        ({"epsilon": -1}, InvalidArgument, r"epsilon \(ε\) must be above 0, got -1\."),
        ({"mu0": 0}, InvalidArgument, r"mu0 \(μ_\{i,0\}\) must be above 0, got 0\."),
        ({"c": None}, InvalidArgument, r"c \(c_i\) must be at least 0, got None\."),
        ({"alpha": 0.5}, InvalidArgument, r"alpha \(α_i\) must be at least 1, got 0\.5\."),
    ],
    ids=str,
)
def test_bad_settings(kind, settings, error, said):
    with pytest.raises(error, match=f"^{said}$"):
        kind(**settings)


def test_bad_settings_of_sfedprox():
    with pytest.raises(InvalidArgument, match=r"^mu \(μ\) must be at least 0, got -1\.$"):
        SFedProx(mu=-1)
    with pytest.raises(InvalidArgument, match=r"^inner \(ℓ\) must be an integer of at least 1, got 0\.$"):
        SFedProx(inner=0)


def test_a_step_by_lipschitz_needs_the_constant():
    class Bare:
        check = staticmethod(lambda federation: None)

    assert built(SFedAvg(step="lipschitz")).needs == {"lipschitz"}
    assert built(SFedAvg()).needs == frozenset()
    with pytest.raises(FedpactError, match=r"^problem must be one that has 'lipschitz' for sfedavg, got Bare\. "):
        check_needs(built(SFedAvg(step="lipschitz")), Bare())
