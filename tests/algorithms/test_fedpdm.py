"""FedPDM."""

from __future__ import annotations

import functools
import math

import byhand
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from byhand import built, flat, key_of, parts, play, relative, vector
from scipy.optimize import minimize

import fedpact as fp
from fedpact.algorithms.fedpdm import FedPDM, noise_scale, sensitivity, theorem_rho, total_epsilon
from fedpact.core.errors import InvalidArgument, UnknownName
from fedpact.core.keys import Purpose
from fedpact.core.stop import Outcome
from fedpact.engines import LocalEngine
from fedpact.experiment import build
from fedpact.problems.optimum import least

ZERO = vector(np.zeros(3))
LINEAR = fp.LeastSquares(l2=0.1, divide=False)
ONE = LocalEngine(buckets=1)
SIZES = (4, 9, 6, 12, 9, 4, 6)
REGULARISERS = {
    "none": None,
    "l1": fp.L1(0.3),
    "elastic_net": fp.ElasticNet(0.2, 0.5),
    "group_l1": fp.GroupL1(0.3),
    "mcp": fp.MCP(0.3, 1.5),
    "box": fp.Box(-0.25, 0.3),
}

KINDS = {
    "batches": {"rho": 2.0, "rate": "decreasing", "steps": 3, "batch": 4, "short": True},
    "memory": {"rho": 1.5, "rate": 0.2, "steps": 8, "accuracy": 0.05, "memory": True, "start": "global"},
}
QUICK = (("none", "memory"), ("l1", "batches"), ("group_l1", "batches"), ("mcp", "memory"))


def soft(v, a):
    return np.sign(v) * np.maximum(np.abs(v) - a, 0)


def proxed(h, v, rho):
    """prox_{h/ρ} in NumPy, number by number; a vector's groups are its numbers."""
    if h is None:
        return v
    if isinstance(h, (fp.L1, fp.GroupL1)):
        return soft(v, h.gamma / rho)
    if isinstance(h, fp.ElasticNet):
        return soft(v, h.gamma / rho) * rho / (rho + h.l2)
    if isinstance(h, fp.MCP):
        inner = soft(v, h.gamma / rho) / (1 - 1 / (rho * h.theta))
        return np.where(np.abs(v) <= h.gamma * h.theta, inner, v)
    return np.clip(v, h.low, h.high)


def eta_of(s, t):
    return {"decreasing": 1 / (s.rho * math.sqrt(1 + t)), "paper": 1 / math.sqrt(1 + t), "steady": 1 / s.rho}.get(
        s.rate, s.rate
    )


def chosen_rows(seed, t, i, r, d, size, width=12):
    """The rows with the `size` largest uniform numbers of (seed, round, client, LOCAL, step), or all of fewer."""
    if size is None:
        return np.arange(d)
    key = jax.random.fold_in(key_of(seed, t, i)(Purpose.LOCAL), r)
    return np.argsort(-np.asarray(jax.random.uniform(key, (width,), jnp.float32))[:d])[:size]


def literal(s, problem, clients, cohorts, n=3):
    """Algorithm 1, line by line: (x_0, x, λ, y of the round, Q of the round) after every round."""
    m = len(clients)
    x0, x, lam, kept = np.zeros(n), np.zeros((m, n)), np.zeros((m, n)), np.zeros((m, n))
    for t, cohort in enumerate(cohorts):
        eta, sent, steps = eta_of(s, t), {}, {}
        for i in cohort:
            v = x[i] if s.start == "local" else x0
            done = 0
            while done < s.steps:
                rows = chosen_rows(0, t, i, done, len(clients[i][1]), s.batch)
                g = byhand.batch_gradient(problem, v, *clients[i], rows) - lam[i] + s.rho * (v - x0)
                v, done = v - eta * g, done + 1
                if s.accuracy is not None and g @ g <= s.accuracy:  # (11), looked at after the step
                    break
            x[i], steps[i] = v, done
            lam[i] = lam[i] + s.rho * (x0 - v)
            sent[i] = kept[i] = x[i] - lam[i] / s.rho
        if sent:
            x0 = proxed(s.regulariser, np.mean(kept if s.memory else list(sent.values()), axis=0), s.rho)
        yield x0, x.copy(), lam.copy(), sent, steps


@functools.cache
def rounds_of(count=20, m=7, seed=4):
    rng = np.random.default_rng(seed)
    drawn = [tuple(sorted(rng.choice(m, size=rng.integers(1, 5), replace=False).tolist())) for _ in range(count)]
    return (*drawn[:6], (), *drawn[7:])


# (a) one step by hand


@pytest.mark.parametrize(
    ("settings", "first", "second"),
    [
        ({}, -0.75, -0.84375),
        ({"start": "global"}, -0.75, -1.03125),
        ({"regulariser": fp.L1(0.5)}, -0.25, None),
        ({"regulariser": fp.Box(-0.5, 0.0)}, -0.5, None),
        ({"memory": True}, -0.75, -0.84375),
    ],
    ids=str,
)
def test_two_rounds_in_round_numbers(settings, first, second):
    """f_0 = ½(x − 2)², f_1 = ½(x + 4)²; ρ = 1, η = ¼, two steps on all rows, x_0 = 0.

    Round 0.  client 0:  0 + ¼·2 = ½,   ½ − ¼(−1.5 + ½) = ¾;      λ = 0 + (0 − ¾) = −¾,   y = ¾ + ¾ = 1.5
              client 1:  0 − ¼·4 = −1,  −1 − ¼(3 − 1) = −1.5;     λ = 1.5,                y = −3
              mean −¾;  l1 with γ/ρ = ½: −¼;  the box: −½
    Round 1 at x_0 = −¾, from x_i:
              ¾ − ¼(−1.25 + ¾ + 1.5) = ½,       ½ − ¼(−1.5 + ¾ + 1.25) = .375;            λ = −¾ − 1.125 = −1.875
              −1.5 − ¼(2.5 − 1.5 − ¾) = −1.5625, −1.5625 − ¼(2.4375 − 1.5 − .8125) = −1.59375;  λ = 1.5 + .84375
              y = .375 + 1.875 = 2.25 and −1.59375 − 2.34375 = −3.9375: mean −.84375
    from x_0: −¾ − ¼(−2.75 + ¾) = −¼, −¼ − ¼(−2.25 + ¾ + ½) = 0;   λ = −1.5,   y = 1.5;  the other −1.1875, −1.40625,
              λ = 1.5 + .65625 = 2.15625, y = −3.5625: mean −1.03125
    """
    clients = [(np.ones((1, 1)), np.array([2.0])), (np.ones((2, 1)), np.array([-4.0, -4.0]))]
    s = FedPDM(**{"rho": 1.0, "rate": 0.25, "steps": 2} | settings)
    problem = fp.LeastSquares()
    moments = play(built(s, problem, 2), problem, clients, vector([0.0]), [[0, 1], [0, 1]])
    np.testing.assert_allclose(flat(moments[0].after.x0), [first], rtol=1e-14)
    if second is not None:
        np.testing.assert_allclose(flat(moments[0].clients_after[0].lam), [-0.75], rtol=1e-14)
        np.testing.assert_allclose(flat(moments[0].uploads[0].y), [1.5], rtol=1e-14)
        np.testing.assert_allclose(flat(moments[1].after.x0), [second], rtol=1e-14)


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        pytest.param(name, settings, id=f"{name}-{kind}", marks=[] if (name, kind) in QUICK else [pytest.mark.drill])
        for name in REGULARISERS
        for kind, settings in KINDS.items()
    ],
)
def test_rounds_are_algorithm_1_literally(name, settings):
    """Twenty rounds of some clients, nobody in one, every x_i, λ_i, y_i, Q_i and x_0 from NumPy."""
    s, clients, cohorts = FedPDM(regulariser=REGULARISERS[name], **settings), parts("linear"), rounds_of()
    moments = play(built(s, LINEAR, 7), LINEAR, clients, ZERO, cohorts, compiled=True)
    counts = set()
    for moment, (x0, x, lam, sent, steps) in zip(moments, literal(s, LINEAR, clients, cohorts), strict=True):
        assert relative(flat(moment.after.x0), x0) <= 1e-11
        for i in moment.chosen:
            assert relative(flat(moment.clients_after[i].x), x[i]) <= 1e-11
            assert relative(flat(moment.clients_after[i].lam), lam[i]) <= 1e-11
            assert relative(flat(moment.uploads[i].y), sent[i]) <= 1e-11
            assert float(moment.notes[i].steps) == steps[i]
            share = 1 if s.batch is None else min(s.batch, SIZES[i]) / SIZES[i]
            assert float(moment.notes[i].gradients) == pytest.approx(steps[i] * share)
            counts.add(steps[i])
    assert s.accuracy is None or len(counts) > 2  # (11) ends some loops early and not others


# (b) certificates


def quadratic_clients(m=10, n=4, d=6, seed=0):
    """Clients whose minimisers differ."""
    rng = np.random.default_rng(seed)
    return [(rng.normal(size=(d, n)), rng.normal(size=d) + 3 * rng.normal()) for _ in range(m)]


@functools.cache
def quadratic_run(rounds=1500, **settings):
    fed = fp.data.Federation.from_arrays(quadratic_clients(), classes=())
    s = FedPDM(**{"rho": 2.0, "rate": 0.15, "steps": 20} | settings)
    return fp.run(s, LINEAR, fed, participation=0.3, rounds=rounds, engine=ONE, evaluate_every=rounds)


def mean_hessian():
    a = [x.T @ x / len(y) + 0.1 * np.eye(4) for x, y in quadratic_clients()]
    b = [x.T @ y / len(y) for x, y in quadratic_clients()]
    return np.mean(a, axis=0), np.mean(b, axis=0)


@pytest.mark.drill
def test_memory_reaches_the_optimum_where_the_printed_mean_stalls():
    """Ten unlike clients, three a round: (13) over S has a floor, the mean over all N none."""
    a, b = mean_hessian()
    best = np.linalg.solve(a, b)
    error = lambda run: np.linalg.norm(flat(run.model.w) - best)
    assert error(quadratic_run(memory=True)) <= 1e-9
    assert error(quadratic_run(memory=False)) >= 0.1


def test_everyone_needs_no_memory():
    """With K = N the two means are one."""
    clients, everyone = parts("linear"), [range(7)] * 2
    one, other = (
        play(built(FedPDM(rho=2.0, rate=0.15, steps=2, memory=memory), LINEAR, 7), LINEAR, clients, ZERO, everyone)
        for memory in (False, True)
    )
    assert relative(flat(one[-1].after.x0), flat(other[-1].after.x0)) <= 1e-14


def objective(h, w):
    a, b = mean_hessian()
    return w @ a @ w / 2 - b @ w + float(h.value(vector(w)))


@pytest.mark.parametrize(
    "h",
    [
        fp.L1(0.4),
        pytest.param(fp.Box(-0.1, 0.2), marks=pytest.mark.drill),
        pytest.param(fp.ElasticNet(0.4, 0.5), marks=pytest.mark.drill),
        pytest.param(fp.MCP(0.4, 2.0), marks=pytest.mark.drill),
    ],
    ids=repr,
)
def test_the_fixed_point_is_a_stationary_point_of_f_plus_h(h):
    """0 ∈ ∇f + ∂h, and for convex h no better point near the one found or by an independent solver."""
    run = quadratic_run(memory=True, regulariser=h)
    (a, b), w = mean_hessian(), flat(run.model.w)
    g = a @ w - b
    if isinstance(h, fp.Box):
        inside = (w > h.low) & (w < h.high)
        assert np.all(np.abs(g[inside]) <= 1e-8)
        assert np.all(g[w == h.low] >= 0)
        assert np.all(g[w == h.high] <= 0)
        assert not inside.all()
    else:
        slope = g + (h.l2 * w if isinstance(h, fp.ElasticNet) else 0)
        edge = h.gamma
        if isinstance(h, fp.MCP):
            slope = slope - np.sign(w) * np.minimum(np.abs(w) / h.theta, h.gamma)
        assert np.all(np.abs(slope[w != 0] + edge * np.sign(w[w != 0])) <= 1e-8)
        assert np.all(np.abs(slope[w == 0]) <= edge)
    if not isinstance(h, fp.MCP):
        bounds = [(h.low, h.high)] * 4 if isinstance(h, fp.Box) else None
        method = "L-BFGS-B" if bounds else "Nelder-Mead"
        options = {} if bounds else {"xatol": 1e-10, "fatol": 1e-14, "maxiter": 5000, "maxfev": 9000}
        other = minimize(lambda v: objective(h, v), w + 1e-2, method=method, bounds=bounds, options=options)
        assert objective(h, w) <= other.fun + 1e-9


def test_the_telemetry_ends_at_zero_and_says_what_h_is():
    run = quadratic_run(memory=True, regulariser=fp.L1(0.4))
    w, history = flat(run.model.w), run.history
    assert history.last("p") <= 1e-16
    assert history.last("primal_residual") <= 1e-8
    assert history.last("regulariser") == pytest.approx(0.4 * np.abs(w).sum(), rel=1e-13)
    f = np.mean([byhand.value(LINEAR, w, x, y) for x, y in quadratic_clients()])
    assert history.last("objective") == pytest.approx(f + 0.4 * np.abs(w).sum(), rel=1e-13)
    assert history.last("lagrangian") == pytest.approx(10 * history.last("objective"), rel=1e-9)
    assert history.last("sparsity") == np.mean(w == 0)


# (c) the paper's invariants


def test_what_is_sent_is_twice_the_model_less_the_rest():
    """y⁺ = 2x⁺ − x_0 − λ/ρ, with x_0 and λ from before the round."""
    s = FedPDM(rho=2.0, rate=0.2, steps=3, regulariser=fp.L1(0.1))
    for moment in play(built(s, LINEAR, 7), LINEAR, parts("linear"), ZERO, rounds_of()[:5]):
        for i in moment.chosen:
            new, old = moment.clients_after[i], moment.clients_before[i]
            want = 2 * flat(new.x) - flat(moment.msg.x0) - flat(old.lam) / 2.0
            np.testing.assert_allclose(flat(moment.uploads[i].y), want, rtol=0, atol=1e-13)


@pytest.mark.parametrize("h", [pytest.param(None, marks=pytest.mark.drill), fp.L1(0.3)], ids=repr)
def test_p_is_21_literally(h):
    """The squared gradients of L by every x_j and λ_j, by differences, and the residual of (13) for that by x_0."""
    s, clients = FedPDM(rho=2.0, rate=0.2, steps=3, regulariser=h), parts("linear")
    fed = fp.data.Federation.from_arrays(clients, classes=())
    run = fp.run(s, LINEAR, fed, participation=rounds_of(), rounds=20, engine=ONE)
    for t, (x0, x, lam, _, _) in enumerate(literal(s, LINEAR, clients, rounds_of()), 1):
        by_x = [(byhand.gradient(LINEAR, x[j], *clients[j]) - lam[j] + 2 * (x[j] - x0)) / 7 for j in range(7)]
        by_lam = [(x0 - x[j]) / 7 for j in range(7)]
        by_x0 = np.mean([lam[j] + 2 * (x0 - x[j]) for j in range(7)], axis=0)
        if h is not None:
            by_x0 = 2 * (x0 - soft(np.mean(x - lam / 2, axis=0), 0.3 / 2))
        p = sum(v @ v for v in (*by_x, *by_lam, by_x0))
        assert run.history.column("p")[t] == pytest.approx(p, rel=1e-9)
        assert run.history.column("rate")[t] == pytest.approx(0.2)
        value = 0 if h is None else 0.3 * np.abs(x0).sum()
        each = [byhand.value(LINEAR, x[i], *clients[i]) + lam[i] @ (x0 - x[i]) for i in range(7)]
        whole = sum(each) + np.sum((x0 - x) ** 2) + 7 * value  # N times (9a)
        assert run.history.column("lagrangian")[t] == pytest.approx(whole, rel=1e-12)
        assert run.history.column("primal_residual")[t] == pytest.approx(np.linalg.norm(x - x0), rel=1e-9)


# (d) degenerate cases


def test_one_client_with_one_step_of_1_over_rho_is_proximal_gradient():
    """From x_i = x_0 and λ = 0: x = x_0 − ∇f/ρ, λ = ∇f, y = x_0 − 2∇f/ρ: with start="global" a step of 2/ρ at first."""
    h, clients = fp.L1(0.3), parts("linear")[3:4]
    s = FedPDM(rho=4.0, rate="steady", steps=1, start="global", regulariser=h)
    (moment,) = play(built(s, LINEAR, 1), LINEAR, clients, vector([0.1, -0.2, 0.3]), [[0]])
    g = byhand.gradient(LINEAR, np.array([0.1, -0.2, 0.3]), *clients[0])
    np.testing.assert_allclose(flat(moment.after.x0), soft(np.array([0.1, -0.2, 0.3]) - g / 2, 0.3 / 4), atol=1e-14)
    np.testing.assert_allclose(flat(moment.clients_after[0].lam), g, rtol=1e-12)


@pytest.mark.drill
def test_theory_solves_logistic_regression():
    """ρ = 4L, (11) with ν = 1e-8, memory: the optimum of (1/N) Σ f_i to what ν allows."""
    fed = byhand.federation(parts())
    run = fp.run(FedPDM.preset("theory"), byhand.PROBLEM, fed, participation=0.5, rounds=400, engine=ONE)
    best = fp.optimum(byhand.PROBLEM, fed)
    assert run.history.last("objective") - best.value <= 1e-7
    assert run.history.last("rho") == pytest.approx(4 * max(byhand.lipschitz(byhand.PROBLEM, x) for x, _ in parts()))
    assert run.notices == []
    assert float(theorem_rho(0.1)) == pytest.approx(4 * (2 * math.sqrt(5) - 4))


# The step that diverges


def test_the_printed_step_diverges_and_the_run_says_so():
    """ρ = 10: |1 − ηρ| = 9 in the first round."""
    fed = byhand.federation(parts())
    run = fp.run(FedPDM.preset("printed", short=True), byhand.PROBLEM, fed, rounds=30, engine=ONE)
    ended = run.outcome_kind is Outcome.NONFINITE or any("ended above its start" in n for n in run.notices)
    assert ended
    assert run.history.column("gradient")[:2].max() > 1 or run.outcome_kind is Outcome.NONFINITE
    assert any("take shorter steps" in notice for notice in run.notices)


@pytest.mark.parametrize(
    ("rate", "want"), [("decreasing", [0.25, 0.125]), ("steady", [0.25, 0.25]), ("paper", [1, 0.5]), (0.1, [0.1, 0.1])]
)
def test_rates(rate, want):
    bundle = built(FedPDM(rho=4.0, rate=rate))
    server = bundle.init(ZERO, None)
    said = [bundle.broadcast(server._replace(round=jnp.asarray(t))).eta for t in (0, 3)]
    np.testing.assert_allclose(said, want)


# The paper's noise


def test_the_scale_of_the_noise_is_18_and_19():
    """ηρ = ½, Q = 3: (1 − ⅛)/(1 − ½) = 7/4;  ηρ = 2 and 0 sum Q ones;  σ² = 2 s² ln(1.25/δ)/ε²."""
    assert float(sensitivity(0.25, 2.0, 3.0, 5.0)) == pytest.approx(7 / 4 * 4 * 0.25 * 5)
    assert float(sensitivity(1.0, 2.0, 3.0, 5.0)) == pytest.approx(4 * 3 * 5)
    assert float(noise_scale(2.0, 0.5, 1e-5)) ** 2 == pytest.approx(2 * 4 * math.log(1.25e5) / 0.25)
    assert total_epsilon(0.8, 0.5, 0.05, 300) == pytest.approx(0.25 * 0.8 * math.sqrt(0.05 * 300 / 0.5))
    with pytest.raises(InvalidArgument, match=r"^share \(q\) must be between 0 and 1, got 1"):
        total_epsilon(0.8, 1, 0.05, 300)


def test_noise_is_added_to_the_message_and_not_to_the_state():
    settings = {"rho": 2.0, "rate": 0.25, "steps": 3}
    noisy, plain = FedPDM(epsilon=2.0, bound=5.0, **settings), FedPDM(**settings)
    clients = parts("linear")
    one, other = (play(built(s, LINEAR, 7), LINEAR, clients, ZERO, [[0, 3, 5]])[0] for s in (noisy, plain))
    sigma = float(noise_scale(sensitivity(0.25, 2.0, 3.0, 5.0), 2.0, 1e-5))
    for i in (0, 3, 5):
        np.testing.assert_array_equal(flat(one.clients_after[i].x), flat(other.clients_after[i].x))
        np.testing.assert_array_equal(flat(one.clients_after[i].lam), flat(other.clients_after[i].lam))
        drawn = np.asarray(jax.random.normal(key_of(0, 0, i)(Purpose.NOISE), (3,)))
        added = flat(one.uploads[i].y) - flat(other.uploads[i].y)
        np.testing.assert_allclose(added, sigma * drawn, rtol=1e-10)
        assert float(one.notes[i].noise_scale) == pytest.approx(sigma)
        assert float(other.notes[i].noise_scale) == 0


def test_noise_is_reported_as_no_guarantee():
    (said,) = [n for n in built(FedPDM(epsilon=0.5)).notices if "no guarantee" in n]
    assert said.startswith("noise (18) with ε=0.5, δ=1e-05 a round: no guarantee. (19) leaves out that λ_i depends on")
    assert "Q depends on the data" not in said
    (said,) = [n for n in built(FedPDM(epsilon=0.5, accuracy=1e-2)).notices if "no guarantee" in n]
    assert "and Q depends on the data" in said
    assert not [n for n in built(FedPDM()).notices if "no guarantee" in n]


# Runs


@pytest.mark.drill
def test_the_objective_of_a_regularised_run_is_not_measured_against_the_minimum_of_f():
    fed = fp.data.breast_cancer().split(clients=5, seed=0)
    (run,) = fp.compare([FedPDM(regulariser=fp.L1(1e-3))], fp.Logistic(l2=1e-2), fed, rounds=1, engine=ONE)
    assert run.least is None
    assert least(fp.Logistic(l2=1e-2), fed) is not None
    assert any(n.startswith("The objective has h(x_0) in it") for n in run.notices)


@pytest.mark.drill
def test_from_an_experiment_file():
    values = {
        "data": {"name": "iris"},
        "split": {"clients": 5},
        "problem": {"name": "multiclass_logistic", "inputs": 4, "classes": 3, "loss": "one_vs_rest", "intercept": True},
        "algorithm": {"name": "fedpdm", "rho": 4, "regulariser": {"name": "group_l1", "gamma": 0.4}},
        "run": {"rounds": 30, "precision": "double"},
    }
    experiment, _ = build(values)
    assert experiment.algorithm == FedPDM(rho=4, regulariser=fp.GroupL1(0.4))
    assert experiment.config()["algorithm"]["regulariser"] == {"name": "group_l1", "gamma": 0.4, "groups": "columns"}
    other, _ = build(values | {"algorithm": {**values["algorithm"], "regulariser": {"name": "l1", "gamma": 0.4}}})
    assert experiment.digest() != other.digest()
    options = {"rounds": 30, "precision": "double", "engine": ONE}
    run = fp.run(experiment.algorithm, experiment.problem, experiment.federation, **options)
    w = np.asarray(run.model.w.tree["w"])
    zero = np.all(w == 0, axis=0)
    assert 0 < zero.sum() < 5  # whole features, no single numbers
    assert np.all(w[:, ~zero] != 0)


def test_a_box_begins_inside_it():
    bundle = built(FedPDM(regulariser=fp.Box(0.5, 1.0)), LINEAR, 7)
    server = bundle.init(ZERO, None)
    np.testing.assert_array_equal(flat(server.x0), [0.5, 0.5, 0.5])
    batch = byhand.batch(*parts("linear")[0])
    state, _ = bundle.join(ZERO, batch, None)
    assert np.isfinite(float(bundle.measure(bundle.broadcast(server), state, batch)["objective"]))


# (f) bad arguments


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"rho": 0.0}, 'rho (ρ) must be above 0, or "lipschitz", got 0.0.'),
        ({"rho": -1}, 'rho (ρ) must be above 0, or "lipschitz", got -1.'),
        ({"rho": "large"}, "rho (ρ) must be above 0, or \"lipschitz\", got 'large'."),
        ({"rate": 0.0}, "rate (η) must be above 0, got 0.0."),
        ({"rate": float("inf")}, "rate (η) must be above 0, got inf."),
        ({"steps": 0}, "steps (Q) must be an integer of at least 1, got 0."),
        ({"accuracy": 0.0}, "accuracy (ν) must be above 0, got 0.0."),
        ({"batch": 0}, "batch (b) must be an integer of at least 1, got 0."),
        ({"memory": 1}, "memory must be true or false, got 1."),
        ({"epsilon": 0.0}, "epsilon (ε) must be above 0, got 0.0."),
        ({"delta": 1.0}, "delta (δ) must be between 0 and 1, got 1.0."),
        ({"bound": 0.0}, "bound (G) must be above 0, got 0.0."),
        ({"regulariser": fp.MCP(0.1, 0.05)}, "theta (θ) must be above 1/ρ = 0.1 for mcp, got 0.05."),
        (
            {"rho": "lipschitz", "regulariser": fp.MCP(0.1, 0.5)},
            "theta (θ) must be above 1/ρ = 0.5295 for mcp, got 0.5.",
        ),
        ({"regulariser": {"name": "box", "low": 1.0, "high": 0.0}}, "low must be at most high, 0, got 1.0."),
    ],
    ids=str,
)
def test_settings_that_break_a_constraint(values, says):
    with pytest.raises(InvalidArgument) as caught:
        FedPDM(**values)
    assert str(caught.value).startswith(says)


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"rate": "fast"}, "rate must be one of decreasing, paper, steady, got 'fast'."),
        ({"start": "zero"}, "start must be one of global, local, got 'zero'."),
        ({"regulariser": "lasso"}, "regulariser must be one of box, elastic_net, group_l1, l1, mcp, got 'lasso'."),
    ],
    ids=str,
)
def test_names_that_are_unknown(values, says):
    with pytest.raises(UnknownName) as caught:
        FedPDM(**values)
    assert str(caught.value).startswith(says)


def test_a_batch_larger_than_a_client_is_refused():
    with pytest.raises(InvalidArgument, match=r"^batch \(B\) must be at most the 4 rows of client 0, got 5"):
        fp.run(FedPDM(batch=5), byhand.PROBLEM, byhand.federation(parts()), rounds=1)
