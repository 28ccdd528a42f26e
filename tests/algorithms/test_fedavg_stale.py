"""FedAvg and FedProx as Algorithm 2 of the inexact ADMM paper has them."""

from __future__ import annotations

import math

import byhand
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from byhand import PROBLEM, built, flat, parts, play, relative, vector

import fedpact as fp
from fedpact.algorithms.fedavg import FedAvg
from fedpact.algorithms.fedavg_stale import FedAvgStale, FedProxLocal
from fedpact.core.errors import InvalidArgument
from fedpact.engines import LocalEngine
from fedpact.problems import optimum

ZERO = vector(np.zeros(4), intercept=True)
START = np.array([0.4, -0.3, 0.2, 0.1])
COHORTS = ((0, 2, 5), (1, 3, 4, 6), (), (2,), (0, 1, 2, 3, 4, 5, 6), (2, 6))
EVERYONE = [range(7)] * 4


def gamma(a, k):
    return a / math.log2(k + 2)


# (a) one step by hand


def test_two_rounds_in_round_numbers():
    """Clients b = 2 (one row) and −4 (two rows), f_i = ½(w − b_i)², m = 2, from 0; one local step, a = ½.

    FedAvg   τ = 0: γ_0 = ½/log2(2) = ½, γ_0/m = ¼. w_1 = ½, w_2 = −1. w = −¼.
             τ = 1, client 1 alone: γ_1 = ½/log2(3), w_1 = −¼ + (γ_1/2)(9/4). w = (w_1 + (−1))/2: client 2's is stale.
    FedProx  with μ = 2. τ = 0: as above, since w_i = w = 0: w_1 = ½, w_2 = −1, w = −¼.
             τ = 1, client 1 alone: from its own ½, gradient −3/2 + 2(½ + ¼) = 0: it stays, and w = ½, the cohort's.
    """
    clients = [(np.ones((1, 1)), np.array([2.0])), (np.ones((2, 1)), np.array([-4.0, -4.0]))]
    problem, start = fp.LeastSquares(), vector([0.0])
    rounds = play(built(FedAvgStale(k0=1, a=0.5), problem, 2), problem, clients, start, [[0, 1], [0]])
    w_1 = -0.25 + 0.25 / math.log2(3) * 2.25
    np.testing.assert_allclose([flat(r.after.w)[0] for r in rounds], [-0.25, (w_1 - 1) / 2], rtol=1e-15)
    rounds = play(built(FedProxLocal(k0=1, a=0.5, mu=2.0), problem, 2), problem, clients, start, [[0, 1], [0]])
    np.testing.assert_allclose([flat(r.after.w)[0] for r in rounds], [-0.25, 0.5], rtol=1e-15)


def test_two_local_steps_in_round_numbers():
    """The same clients, k0 = 2, γ_0/m = ¼ and γ_1/m = ¼/log2(3): the second step has the smaller size.

    FedAvg: w_1 = ½ + 1.5 γ_1/m, w_2 = −1 − 3 γ_1/m. FedProx, μ = 2: ½ + (1.5 − 1) γ_1/m, −1 − (3 − 2) γ_1/m.
    """
    clients = [(np.ones((1, 1)), np.array([2.0])), (np.ones((2, 1)), np.array([-4.0, -4.0]))]
    problem, g = fp.LeastSquares(), 0.25 / math.log2(3)
    for settings, ends in (
        (FedAvgStale(k0=2, a=0.5), (0.5 + 1.5 * g, -1 - 3 * g)),
        (FedProxLocal(k0=2, a=0.5, mu=2.0), (0.5 + 0.5 * g, -1 - g)),
    ):
        (moment,) = play(built(settings, problem, 2), problem, clients, vector([0.0]), [[0, 1]])
        np.testing.assert_allclose([flat(moment.clients_after[i].w)[0] for i in (0, 1)], ends, rtol=1e-15)
        np.testing.assert_allclose(flat(moment.after.w), [sum(ends) / 2], rtol=1e-14)
        assert [float(moment.notes[i].gradients) for i in (0, 1)] == [2, 2]


def literal(clients, cohorts, start, *, k0, a, mu=None):
    """Algorithm 2 in NumPy; μ = None: FedAvg. The server's w and everyone's w_i after each round."""
    m, w = len(clients), start
    models, out = [start] * m, []
    for t, chosen in enumerate(cohorts):
        for i in chosen:
            v = w if mu is None else models[i]
            for k in range(t * k0, (t + 1) * k0):
                g = byhand.gradient(PROBLEM, v, *clients[i])
                v = v - gamma(a, k) / m * (g if mu is None else g + mu * (v - w))
            models = [*models[:i], v, *models[i + 1 :]]
        if mu is None:
            w = sum(models) / m
        elif chosen:
            w = sum(models[i] for i in chosen) / len(chosen)
        out.append((w, models))
    return out


@pytest.mark.parametrize(
    ("settings", "numbers"),
    [
        (FedAvgStale(k0=1, a=3.0), {"k0": 1, "a": 3.0}),
        (FedAvgStale(k0=3, a=2.0), {"k0": 3, "a": 2.0}),
        (FedProxLocal(k0=1, a=3.0, mu=0.7), {"k0": 1, "a": 3.0, "mu": 0.7}),
        (FedProxLocal(k0=3, a=2.0, mu=0.7), {"k0": 3, "a": 2.0, "mu": 0.7}),
    ],
    ids=lambda v: getattr(v, "label", ""),
)
def test_the_run_is_the_literal_algorithm(settings, numbers):
    """Partial participation, from a start that is not 0; k counts every round's steps, whoever takes part."""
    moments = play(built(settings), PROBLEM, parts(), vector(START, True), COHORTS)
    for t, (moment, (w, models)) in enumerate(zip(moments, literal(parts(), COHORTS, START, **numbers), strict=True)):
        assert relative(flat(moment.after.w), w) <= 1e-13
        assert int(moment.after.round) == t + 1
        for client, expected in zip(moment.clients_after, models, strict=True):
            assert relative(flat(client.w), expected) <= 1e-13


def test_the_step_size_falls_with_all_local_steps():
    """A client whose gradient is g = −6 wherever it is (b − w stays near 6 for tiny steps): each step is 6 γ_k/m."""
    a, k0, m = 1e-9, 3, 7
    clients = [(np.ones((1, 1)), np.array([6.0]))] * m
    problem = fp.LeastSquares()
    rounds = play(built(FedAvgStale(k0=k0, a=a), problem), problem, clients, vector([0.0]), EVERYONE)
    ends = np.array([flat(r.after.w)[0] for r in rounds])
    expected = [6 / m * sum(gamma(a, k) for k in range((t + 1) * k0)) for t in range(4)]
    np.testing.assert_allclose(ends, expected, rtol=1e-8)


# (b) a certificate


def test_one_step_a_round_nears_the_optimum():
    """Everyone, k0 = 1: gradient descent with γ_k/m on (1/m) Σ f_i, large enough to get there."""
    best = optimum(PROBLEM, byhand.federation(parts()))
    rounds = play(built(FedAvgStale(k0=1, a=70.0)), PROBLEM, parts(), ZERO, [range(7)] * 250)
    w = flat(rounds[-1].after.w)
    assert np.mean([byhand.value(PROBLEM, w, x, y) for x, y in parts()]) - best.value <= 1e-10
    assert np.linalg.norm(np.mean([byhand.gradient(PROBLEM, w, x, y) for x, y in parts()], axis=0)) <= 1e-5


# (c) invariants


def test_the_model_is_the_mean_of_everyone_s_last_models():
    """(3.14) after every round, although only changes are sent."""
    for moment in play(built(FedAvgStale(k0=2, a=3.0)), PROBLEM, parts(), vector(START, True), COHORTS):
        assert relative(flat(moment.after.w), np.mean([flat(c.w) for c in moment.clients_after], axis=0)) <= 1e-14
        for i in set(range(7)) - set(moment.chosen):
            np.testing.assert_array_equal(flat(moment.clients_after[i].w), flat(moment.clients_before[i].w))


def test_the_cohort_s_mean_is_proxlocal_s_model():
    """(3.15): everyone else's model counts for nothing, and nobody leaves w as it is."""
    for moment in play(built(FedProxLocal(k0=2, a=3.0)), PROBLEM, parts(), vector(START, True), COHORTS):
        sent = [flat(moment.clients_after[i].w) for i in moment.chosen]
        expected = np.mean(sent, axis=0) if sent else flat(moment.before.w)
        assert relative(flat(moment.after.w), expected) <= 1e-14


@pytest.mark.parametrize("kind", [FedAvgStale, FedProxLocal])
def test_what_is_sent(kind):
    algorithm = built(kind(k0=2, a=3.0))
    assert algorithm.combine == "sum"
    assert algorithm.needs == frozenset()
    _, hello = algorithm.join(ZERO, byhand.batch(*parts()[0]), None)
    assert jax.tree.leaves(hello) == []
    (moment,) = play(algorithm, PROBLEM, parts(), vector(START, True), [[1, 2]])
    end = flat(moment.clients_after[1].w)
    expected = end - START if kind is FedAvgStale else end
    assert relative(flat(moment.uploads[1].w), expected) <= 1e-15
    np.testing.assert_array_equal(flat(moment.msg.w), START)
    assert int(moment.msg.round) == 0


# (d) degenerate cases


def test_everyone_every_round_with_one_step_is_fedavg():
    """With FedAvg's step set to γ_τ/m in every round."""
    moments = play(built(FedAvgStale(k0=1, a=3.0)), PROBLEM, parts(), ZERO, EVERYONE)
    w = ZERO
    for t, moment in enumerate(moments):
        (standard,) = play(built(FedAvg(steps=1, step=gamma(3.0, t) / 7)), PROBLEM, parts(), w, [range(7)])
        w = standard.after.w
        assert relative(flat(moment.after.w), flat(w)) <= 1e-14


def test_without_its_proximal_term_a_first_round_of_both_is_the_same():
    """Everyone from w⁰: they differ only where a client restarts and who is averaged."""
    ends = [
        play(built(settings), PROBLEM, parts(), vector(START, True), [range(7)])[0]
        for settings in (FedAvgStale(k0=3, a=2.0), FedProxLocal(k0=3, a=2.0, mu=0.0))
    ]
    assert relative(flat(ends[0].after.w), flat(ends[1].after.w)) <= 1e-14


def test_without_its_proximal_term_clients_that_never_restart_are_on_their_own():
    """μ = 0: each client's models are gradient descent on f_i, whatever the server says."""
    moments = play(built(FedProxLocal(k0=2, a=5.0, mu=0.0)), PROBLEM, parts(), ZERO, EVERYONE)
    x, y = parts()[3]
    v = np.zeros(4)
    for k in range(8):
        v = v - gamma(5.0, k) / 7 * byhand.gradient(PROBLEM, v, x, y)
    assert relative(flat(moments[-1].clients_after[3].w), v) <= 1e-13


@pytest.mark.drill
def test_a_large_proximal_term_keeps_the_clients_together():
    spread = []
    for mu in (0.0, 1.0, 10.0):
        end = play(built(FedProxLocal(k0=2, a=0.5, mu=mu)), PROBLEM, parts(), ZERO, [range(7)] * 10)[-1]
        spread.append(np.std([flat(c.w) for c in end.clients_after], axis=0).sum())
    assert spread[0] > spread[1] > spread[2]


@pytest.mark.parametrize("kind", [FedAvgStale, FedProxLocal])
def test_rounds_without_clients_leave_the_model_as_it_is(kind, run_once):
    """But γ_k goes on: k is τ·k0, and τ counts empty rounds too."""
    cohorts = ((0, 1), (), (), (2, 3))
    history = run_once(kind(k0=2, a=3.0), LocalEngine(buckets=1), participation=cohorts, rounds=4).history
    objective = history.column("objective")
    assert objective[1] == objective[2] == objective[3] != objective[4]
    mu = None if kind is FedAvgStale else 0.1
    w = literal(parts(), cohorts, np.zeros(4), k0=2, a=3.0, mu=mu)[-1][0]
    assert objective[4] == pytest.approx(np.mean([byhand.value(PROBLEM, w, x, y) for x, y in parts()]), rel=1e-12)


# (e) precision


@pytest.mark.parametrize("kind", [FedAvgStale, FedProxLocal])
def test_the_step_size_does_not_widen_single_precision(kind):
    algorithm = built(kind(k0=2))
    start = vector(np.zeros(4), True).map(lambda a: a.astype(jnp.float32))
    batch = byhand.batch(*parts()[0], dtype=np.float32)
    client, _ = algorithm.join(start, batch, None)
    msg = algorithm.broadcast(algorithm.init(start, None))
    state, upload, _ = jax.eval_shape(
        lambda m, c, b: algorithm.client_step(m, c, b, PROBLEM.gradient, None), msg, client, batch
    )
    assert {leaf.dtype for leaf in jax.tree.leaves((state, upload))} == {np.dtype(np.float32)}


# (f) arguments


def test_the_paper_s_constants():
    """Section 5.3: a = 0.005 for Example 5.1; Section 5.4: k0 = 5. μ is ours."""
    assert FedAvgStale().to_dict() == {"k0": 5, "a": 0.005}
    assert FedProxLocal().to_dict() == {"k0": 5, "a": 0.005, "mu": 0.1}
    assert FedAvgStale.preset("paper") == FedAvgStale()
    assert FedProxLocal.preset("paper") == FedProxLocal()


@pytest.mark.parametrize("kind", [FedAvgStale, FedProxLocal])
@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (
            {"k0": 0},
            r"k0 must be an integer of at least 1, got 0\. It is the number of local steps in a round\.",
        ),
        ({"k0": 1.5}, r"k0 must be an integer of at least 1, got 1\.5\. .+"),
        ({"a": 0}, r"a must be above 0, got 0\. γ_k = a/log2\(k\+2\) is divided by m\."),
        ({"a": -1.0}, r"a must be above 0, got -1\.0\. .+"),
        ({"a": "0.5d/m"}, r"a must be above 0, got '0\.5d/m'\. .+"),
        ({"a": float("nan")}, r"a must be above 0, got nan\. .+"),
    ],
    ids=str,
)
def test_bad_settings(kind, settings, said):
    with pytest.raises(InvalidArgument, match=f"^{said}$"):
        kind(**settings)


@pytest.mark.parametrize("mu", [-0.1, None, "small"])
def test_bad_settings_of_fedprox_local(mu):
    with pytest.raises(InvalidArgument, match=r"^mu \(μ\) must be at least 0, got .+\.$"):
        FedProxLocal(mu=mu)
