"""Mini-batch SSCA, and the problems with constraints that it solves."""

from __future__ import annotations

import functools
import math

import byhand
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.sparse
from byhand import built, entropy, flat, key_of, parts, play, relative, rows_of_three_classes, vector
from helpers_conic import conic
from helpers_experiment import same_bits
from scipy.optimize import minimize

import fedpact as fp
from fedpact import ClientLoss, Constrained, Gap, Loss, Misses, Norm1, Norm2, PerRow
from fedpact.algorithms.ssca import SSCA, Broadcast, ClientState
from fedpact.core import sparse
from fedpact.core.contract import READS, Oracle
from fedpact.core.errors import ClientError, DataError, FedpactError, InvalidArgument
from fedpact.core.keys import Purpose
from fedpact.core.vector import Vector
from fedpact.engines import HostEngine, LocalEngine, local
from fedpact.problems.approximation import Approximation, Estimates, Price, next_price, none_yet
from fedpact.problems.constraints import as_constrained
from fedpact.run import Experiment

#: ½(w − 2)² on one row, ½(w + 4)² on two: F(w) = (½(w−2)² + (w+4)²)/3, N = 3.
TWO = ((np.ones((1, 1)), np.array([2.0])), (np.ones((2, 1)), np.array([-4.0, -4.0])))
SQUARES = fp.LeastSquares()
#: ρ and γ are ½, ¼, ….
HALVES = {"rho": 0.5, "rho_power": 1.0, "gamma": 0.5, "gamma_power": 1.0}
GRADIENT_STEPS = {"rho": 1.0, "rho_power": 0.0, "gamma": 1.0, "gamma_power": 0.0}


def two(settings, problem=SQUARES, rounds=2, cohorts=None, w0=(0.0,)):
    """Rounds of both clients by the literal loop."""
    return play(built(settings, problem, 2), problem, TWO, vector(w0), cohorts or [[0, 1]] * rounds)


def number(w):
    return float(flat(w)[0])


# (a) steps by hand


def test_two_rounds_in_round_numbers():
    """τ = ½, so 2τ = 1; w = 0.

    t = 1  v = (½·4 + 16)/3 = 6,  g = (−2 + 2·4)/3 = 2;   b = ½·6 = 3,  a = ½·2 = 1,  κ = ½;
           ω̄ = −(1/½)/1 = −2,   w = ½·(−2) = −1
    t = 2  v = (½·9 + 9)/3 = 4.5,  g = (−3 + 2·3)/3 = 1;  b = ¾·3 + ¼(4.5 + 1 + ½) = 3.75,  a = ¾ + ¼(1 + 1) = 1.25,
           κ = ¾·½ + ¼ = .625;   ω̄ = −1.25/.625 = −2,   w = ¾·(−1) + ¼·(−2) = −1.25
    """
    one, two_ = two(SSCA(tau=0.5, **HALVES))
    shared = one.after.shared
    assert (float(shared.b[0]), float(shared.a.tree["w"][0, 0]), float(shared.kappa)) == (3.0, 1.0, 0.5)
    assert number(one.after.w) == -1.0
    shared = two_.after.shared
    assert (float(shared.b[0]), float(shared.a.tree["w"][0, 0]), float(shared.kappa)) == (3.75, 1.25, 0.625)
    assert number(two_.after.w) == pytest.approx(-1.25, rel=1e-15)
    assert (float(two_.info.rho), float(two_.info.gamma)) == (0.25, 0.25)


def test_a_constrained_round_in_round_numbers():
    """min w² s.t. F(w) ≤ 5¼, τ = 1, from 0: v, g, b, a, κ as above, F̄ = 6 + 2ω + ω².

    t = 1  b/κ − U = ¾, a/κ = 2:  ν = (√(4/(4 − 4·¾)) − 1)/1 = 1,  ω̄ = −1·2/(2(1 + 1)) = −½  (¾ − 1 + ¼ = 0),  w = −¼
    t = 2  v = (½·2.25² + 3.75²)/3 = 5.53125,  g = (−2.25 + 2·3.75)/3 = 1.75
           b = ¾·3 + ¼(5.53125 + 1.75/4 + 1/16) = 3.7578125,  a = ¾ + ¼(1.75 + ½) = 1.3125,  κ = .625
           b/κ − U = .7625,  a/κ = 2.1:  ν = √(4.41/(4.41 − 4·.7625)) − 1,  ω̄ = −2.1ν/(2(1 + ν)),  w = ¾·(−¼) + ¼ω̄
    """
    problem = Constrained(SQUARES, minimize=Norm2(), subject_to=[Loss() <= 5.25])
    one, two_ = two(SSCA(tau=1.0, **HALVES), problem)
    assert float(one.info.multiplier_constraint_1) == pytest.approx(1.0, rel=1e-14)
    assert number(one.after.w) == pytest.approx(-0.25, rel=1e-14)
    assert float(one.info.slack) == pytest.approx(0.0, abs=1e-15)
    nu = math.sqrt(4.41 / 1.36) - 1
    assert float(two_.info.multiplier_constraint_1) == pytest.approx(nu, rel=1e-12)
    assert number(two_.after.w) == pytest.approx(-0.1875 - 2.1 * nu / (8 * (1 + nu)), rel=1e-12)


def test_a_small_penalty_leaves_slack():
    """The same with c = ½: ν = ½, ω̄ = −½·2/(2·1.5) = −⅓, s = ¾ − ⅔ + 1/9 = 7/36.

    With 2w² in place of w² and c = 2 the multiplier is twice Lemma 1's, ν = 2, and ω̄ the same −½.
    """
    for goal, c, nu, w, slack in ((Norm2(), 0.5, 0.5, -1 / 3, 7 / 36), (2 * Norm2(), 4.0, 2.0, -0.5, 0.0)):
        problem = Constrained(SQUARES, minimize=goal, subject_to=[Loss() <= 5.25])
        (moment,) = two(SSCA(tau=1.0, penalty=c, **HALVES), problem, 1)
        assert float(moment.info.multiplier_constraint_1) == pytest.approx(nu, rel=1e-14)
        assert number(moment.after.w) == pytest.approx(w / 2, rel=1e-14)
        assert float(moment.info.slack) == pytest.approx(slack, abs=1e-15)


def test_norms_are_kept_exact_or_not():
    """τ = ½, ρ = γ = 1, from w = 1: g = (−1 + 2·5)/3 = 3, a = 3 − 1 = 2.

    alone      ω̄ = −2/(2·½) = −2
    + ½‖w‖²    exact: −2/(2(½ + ½)) = −1;  not exact: g = 3 + 1, a = 4 − 1 = 3, −3/1 = −3
    + ½‖w‖₁    −(2 − ½)/(2·½) = −1.5;      + 3‖w‖₁: 0
    bound 1    −2 is cut to −1
    """
    for goal, bound, expected in (
        (Loss(), None, -2.0),
        (Loss() + 0.5 * Norm2(), None, -1.0),
        (Loss() + 0.5 * Norm2(exact=False), None, -3.0),
        (Loss() + 0.5 * Norm1(), None, -1.5),
        (Loss() + 3 * Norm1(), None, 0.0),
        (Loss(), 1.0, -1.0),
        (Loss(), 2.5, -2.0),
    ):
        problem = Constrained(SQUARES, minimize=goal)
        (moment,) = two(SSCA(tau=0.5, bound=bound, **GRADIENT_STEPS), problem, 1, w0=(1.0,))
        assert number(moment.after.w) == pytest.approx(expected, abs=1e-15), goal


#: z is feature 1, the group is feature 0: p = ¾, ½ at client 0 and ½, ¼, ¾ at client 1.
THIRDS = math.log(3)
GROUPS = (
    (np.array([[1.0, THIRDS], [0.0, 0.0]]), np.array([1.0, 0.0])),
    (np.array([[1.0, 0.0], [1.0, -THIRDS], [0.0, THIRDS]]), np.array([1.0, 1.0, 0.0])),
)


def measured(algorithm, batches, w, multipliers):
    """Telemetry, summed over the clients, of a server with this model and these multipliers."""
    server = algorithm.init(w, byhand.stack([algorithm.join(w, batch, None)[1] for batch in batches]))
    measure = jax.jit(lambda server, batch: algorithm.measure(server, None, batch))
    told = [measure(server._replace(multipliers=multipliers), batch) for batch in batches]
    return jax.tree.map(lambda *leaves: sum(leaves), *told)


def test_what_is_limited_in_round_numbers():
    """Group: p = ¾, ½, ¼; the others: ½, ¾. Gap = ½ − ⅝ = −⅛. Of class 1 the same rows: misses = (¼ + ½ + ¾)/3 = ½.

    Shares of the group 3/5 and 2/5: client 0's part is (¾/.6 − ½/.4)/2 = 0, client 1's (¾/.6 − ¾/.4)/3 = −.625/3.
    Losses: ln 4 − ln 3 and ln 2; ln 2, ln(4/3) + ln 3 and ln 4. z²: ln²3 and 0; 0, ln²3 and ln²3.
    """
    square = PerRow(lambda w, batch: (batch.x @ w.tree["w"]) ** 2)
    limited = [Gap(column=0) <= 0.1, Misses() <= 0.2, square <= 0.5, Norm2() <= 3.0, ClientLoss() <= [0.4, 0.9]]
    task = Constrained(fp.Logistic(l2=0), minimize=Loss() + 0.5 * Norm1(), subject_to=limited)
    algorithm = SSCA().build(task, 2, 1.0)
    batches, w = [byhand.batch(x, y, i, padding=3 - len(y)) for i, (x, y) in enumerate(GROUPS)], vector([0.0, 1.0])
    tally = sum(task.tally(batch) for batch in batches)
    assert tally.tolist() == [5, 3, 2, 3, 2, 3]  # N; the group and the others, for both signs; class 1
    each = [jax.jit(task.means)(w, batch, tally) for batch in batches]
    assert float(each[0][1]) == pytest.approx(0.0, abs=1e-15)
    assert float(each[1][1]) == pytest.approx(-0.625 / 3, rel=1e-14)
    total = measured(algorithm, batches, w, jnp.zeros(7))
    read = {name: float(total[name]) / 2 for name in total if name.startswith(("objective", "constraint", "loss"))}
    loss = np.log([4 / 3, 2, 2, 4, 4]).sum() / 5
    assert read == pytest.approx(
        {
            "objective": loss + 0.5,
            "loss": loss,
            "constraint_1_above": -0.125 - 0.1,
            "constraint_1_below": 0.125 - 0.1,
            "constraint_2": 0.5 - 0.2,
            "constraint_3": 3 * THIRDS**2 / 5 - 0.5,
            "constraint_4": 1.0 - 3.0,
        },
        rel=1e-13,
    )
    own = np.array([np.log([4 / 3, 2]).mean() - 0.4, np.log([2, 4, 4]).mean() - 0.9])
    np.testing.assert_allclose(total["worst_client"] / 2, own, rtol=1e-13)
    assert float(READS["largest"](total["worst_client"], 2)) == pytest.approx(own.max(), rel=1e-13)


def test_groups_by_a_sparse_column():
    """Sparse rows have no columns to take: the group is told by a product."""
    matrix = scipy.sparse.csr_array(GROUPS[1][0])
    kept = jax.tree.map(lambda a: jnp.asarray(a[0]), sparse.stack([matrix], 3, np.float64))
    batch, shares, w = byhand.batches(GROUPS)[1], [0.6, 0.4], vector([0.3, 1.0])
    for term in (Gap(column=0), Gap(column=1, above=-0.5)):
        written, rows = (term.rows(MODEL, w, b, shares) for b in (batch, batch._replace(x=kept)))
        np.testing.assert_allclose(rows, written, rtol=1e-14)
        assert [float(c) for c in term.tally(batch._replace(x=kept))] == [2.0, 1.0]


def test_gradients_are_those_of_the_values():
    """By differences, at an arbitrary point, for every function at once."""
    square = PerRow(lambda w, batch: jnp.tanh(batch.x @ w.tree["w"]) ** 2)
    limited = [Gap(column=0) <= 0.1, Misses(of=0) <= 0.2, 2 * Loss() + -0.5 * square <= 0.5]
    task = Constrained(fp.Logistic(l2=0), subject_to=limited)
    batch, counts = byhand.batches(GROUPS)[1], jnp.asarray([5, 3, 2, 3, 2, 2])
    told = jax.jit(lambda w: task.values_and_gradients(None, w, batch, counts))
    at = lambda w: np.asarray(told(vector(w))[0])
    w, step = np.array([0.3, -0.7]), 1e-6
    slopes = told(vector(w))[1].tree["w"]
    for k, unit in enumerate(np.eye(2) * step):
        np.testing.assert_allclose(slopes[:, k], (at(w + unit) - at(w - unit)) / (2 * step), atol=1e-9)


# (b) certificates

CLASSES = fp.Softmax(inputs=4, classes=3)
U = 0.9
smallest = functools.partial(byhand.smallest, U)


LIMITED = Constrained(CLASSES, minimize=Norm2(), subject_to=[Loss() <= U])
FULL = SSCA(tau=0.7, rho=1.0, rho_power=0.0, gamma=0.9, gamma_power=0.0)


@functools.cache
def limited_run():
    federation = byhand.federation(rows_of_three_classes(), ("a", "b", "c"))
    options = {"precision": "double", "engine": LocalEngine(buckets=1)}
    return fp.run(FULL, LIMITED, federation, rounds=250, **options)


def test_the_least_norm_below_a_loss_is_an_independent_solver_s():
    """‖ω‖², the loss, ω itself, and 1/ν = λ (Theorem 5)."""
    lam, expected = smallest()
    assert entropy(expected, rows_of_three_classes())[0] == pytest.approx(U, abs=1e-10)
    run = limited_run()
    w = np.asarray(run.model.w.tree["w"]).ravel()
    assert run.history.last("objective") == pytest.approx(expected @ expected, rel=1e-6)
    assert abs(run.history.last("constraint_1")) <= 1e-7
    assert 1 / run.history.last("multiplier_constraint_1") == pytest.approx(lam, rel=1e-6)
    assert relative(w, expected) <= 1e-6
    assert run.history.last("kkt") <= 1e-5
    assert run.history.last("slack") <= 1e-9
    assert not [said for said in run.notices if "limit" in said]


def test_the_kkt_residual_is_zero_at_a_solution_and_only_there():
    """At the independent solver's solution, from the parts of clients of 6, 8 and 16 rows."""
    lam, w = smallest()
    clients, algorithm = rows_of_three_classes(), built(SSCA(), LIMITED, 3)
    batches = [byhand.batch(x, y, i, padding=16 - len(y)) for i, (x, y) in enumerate(clients)]

    def residual(w, nu):
        told = measured(algorithm, batches, Vector({"w": jnp.asarray(w.reshape(4, 3))}), jnp.asarray([nu]))
        return float(READS["kkt"](told["kkt"], 3))

    assert residual(w, 1 / lam) <= 1e-9
    f, g = entropy(1.1 * w, clients)
    slope = 2.2 * w + 3.0 * g
    expected = np.linalg.norm(slope) + max(0, f - U) + 3.0 * abs(f - U)
    assert residual(1.1 * w, 3.0) == pytest.approx(expected, rel=1e-12)
    f, g = entropy(0.9 * w, clients)
    assert f > U
    assert residual(0.9 * w, 0.0) == pytest.approx(np.linalg.norm(1.8 * w) + f - U, rel=1e-12)


def test_the_residual_of_an_l1_term():
    """∇L without the ℓ1 term is g: where w = 0 what is left is |g| − l beyond 0, elsewhere g + l·sign w."""
    g, w = vector([0.5, -3.0, 1.0, -2.0]), vector([0.0, 0.0, 2.0, 1.0])
    told = {
        "slope": g,
        "w": w,
        "l1": jnp.asarray(1.0),
        "values": jnp.asarray([0.25, -2.0]),
        "nu": jnp.asarray([0, 3.0]),
    }
    expected = np.linalg.norm([0.0, -2.0, 2.0, -1.0]) + 0.25 + 3.0 * 2.0
    doubled = jax.tree.map(lambda a: 2 * a, told)
    assert float(READS["kkt"](doubled, 2)) == pytest.approx(expected, rel=1e-14)


@functools.cache
def general(bound):
    """The convex problem's solution for one constraint: Lemma 1's, or the dual's where a bound is given."""
    limited = Loss() + 0.3 * Norm2() <= 1.5
    parts_ = Constrained(fp.Logistic(l2=0), minimize=0.7 * Norm2(), subject_to=[limited]).parts
    model = Approximation(parts_, None, 0.4, bound)
    assert model._is_lemma1 == (bound is None)
    estimates = lambda b, a: Estimates(b, Vector({"w": a}), jnp.asarray(0.8))
    return jax.jit(lambda b, a, c: model.minimise(vector(np.zeros(3)), estimates(b, a), None, c))


@pytest.mark.parametrize(("b", "c"), [(1.6, 1e3), (1.0, 1e3), (9.0, 50.0), (1.6, 0.05)])
def test_lemma_1_and_the_dual_agree_with_a_conic_solver(b, c):
    """The limit reached, kept without effort, out of reach, and too dear for a small penalty. κ = .8."""
    a = np.array([[0.8, -0.5, 0.3]])
    closed, dual = (general(bound)(jnp.asarray([b]), jnp.asarray(a), jnp.asarray(c)) for bound in (None, 1e3))
    omega, slack, _ = conic((np.zeros(3), 0.7), [(b / 0.8 - 1.5, a[0] / 0.8, 0.7)], c)
    for found in (closed, dual):
        np.testing.assert_allclose(flat(found.w), omega, atol=1e-6)
        np.testing.assert_allclose(found.slacks[:1], slack, atol=1e-6)
    np.testing.assert_allclose(flat(closed.w), flat(dual.w), atol=1e-9)
    np.testing.assert_allclose(closed.multipliers, dual.multipliers[:1], rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("tau", [0.05, 0.2])
@pytest.mark.parametrize("nu", [10.0, 1e3])
def test_lemma_1_has_its_digits_in_single_precision(tau, nu):
    """b is a difference of numbers near τ‖ω‖²: from single-precision gradients, ν is right and the slack none."""
    rng = np.random.default_rng(0)
    model = Approximation(Constrained(CLASSES, minimize=Norm2(), subject_to=[Loss() <= U]).parts, None, tau, None)
    w = rng.normal(size=20_000) * math.sqrt(256 / 20_000)
    g = rng.normal(size=20_000) * 1e-2
    a = g - 2 * tau * w
    scale = -nu / (2 * (1 + nu * tau))
    value = U + g @ w - tau * w @ w - (scale + tau * scale**2) * (a @ a)  # so that the multiplier is ν
    single = lambda v: Vector({"w": jnp.asarray(v, jnp.float32)})
    old = none_yet(single(w), 1)
    shared = model.update(old, jnp.asarray([value]), single(g[None]), single(w), jnp.asarray(1.0, jnp.float32))
    found = model.minimise(single(w), shared, None, jnp.asarray(1e5))
    assert float(found.multipliers[0]) == pytest.approx(nu, rel=1e-3)
    assert float(found.slacks[0]) == 0
    assert found.w.tree["w"].dtype == jnp.float32


def test_a_bound_holds_with_constraints_too():
    """ω̄ of least norm below the limit is longer than ½: the bound wins, and slack is left."""
    a = np.array([[0.8, -0.5, 0.3]])
    free, bounded = (general(k)(jnp.asarray([4.0]), jnp.asarray(a), jnp.asarray(1e3)) for k in (None, 0.5))
    assert np.linalg.norm(flat(free.w)) > 0.5
    assert np.linalg.norm(flat(bounded.w)) == pytest.approx(0.5, rel=1e-9)
    assert relative(flat(bounded.w), -0.5 * a[0] / np.linalg.norm(a)) <= 1e-6
    assert float(bounded.slacks[0]) > 0.1
    assert bounded.multipliers.shape == bounded.slacks.shape == (2,)
    assert float(bounded.multipliers[1]) > 0, "the bound's own"


@pytest.mark.drill
def test_the_residual_counts_an_active_bound():
    """The same minimum as with the bound as a constraint, and a residual as small."""
    federation = byhand.federation(rows_of_three_classes(), ("a", "b", "c"))
    options = {"rounds": 300, "precision": "double", "engine": LocalEngine(buckets=1)}
    still = {"tau": 0.7, "rho": 1.0, "rho_power": 0.0, "gamma": 0.9, "gamma_power": 0.0, "penalty": 100.0}
    near = Loss() <= 1.0  # kept without effort
    bound = fp.run(SSCA(bound=1.0, **still), Constrained(CLASSES, subject_to=[near]), federation, **options)
    limit = fp.run(SSCA(**still), Constrained(CLASSES, subject_to=[near, Norm2() <= 1.0]), federation, **options)
    assert relative(flat(bound.model.w), flat(limit.model.w)) <= 1e-5
    assert float(limit.model.w.norm2()) == pytest.approx(1.0, rel=1e-5)
    assert bound.history.last("kkt") == pytest.approx(limit.history.last("kkt"), abs=1e-5)
    assert bound.history.last("kkt") <= 1e-3


# Four kinds of constraints at once: the literal algorithm, and feasibility

MIXED = parts(sizes=(4, 9, 6))
LIMITS = {"gap": 0.06, "misses": 0.345, "tanh": 0.19, "norm2": 0.36, "own": (0.7, 0.6, 0.722)}
SOME = ((0, 2), (1,), (), (0, 1, 2), (1, 2))
MANY = SSCA(tau=0.5, rho=0.5, rho_power=0.0, gamma=0.4, gamma_power=0.0, penalty=30.0, growth=2.0, patience=5)


def literal_functions(w, clients):
    """Rows' values of loss, gap, misses and tanh² with everyone's counts, their gradients, by client; w's b is last."""
    sigmoid = lambda z: 1 / (1 + np.exp(-z))
    inside = np.concatenate([x[:, 1] > 0 for x, _ in clients])
    ones = np.concatenate([y for _, y in clients])
    share, positive = inside.mean(), ones.mean()
    out = []
    for x, y in clients:
        a = np.column_stack([x, np.ones(len(y))])
        z = a @ w
        p, q = sigmoid(z), np.tanh(x @ w[:-1])
        group = np.where(x[:, 1] > 0, 1 / share, -1 / (1 - share))
        values = np.stack([np.log1p(np.exp(z)) - y * z, group * p, (1 - p) * y / positive, q**2])
        slopes = np.stack([p - y, group * p * (1 - p), -p * (1 - p) * y / positive, np.zeros(len(y))])
        gradients = slopes @ a
        gradients[3, :-1] = (2 * q * (1 - q**2)) @ x
        out.append((len(y), values.mean(axis=1), gradients / len(y)))
    return out


def literal(clients, cohorts, settings, rounds):
    """Algorithm 2 in NumPy, each round's convex problem by a conic solver: ω, Σs and c after every round."""
    tau, rho, gamma, c, m = settings.tau, settings.rho, settings.gamma, settings.penalty, len(clients)
    w, b, a, kappa = np.zeros(4), np.zeros(5), np.zeros((5, 4)), 0.0
    own_b, own_a, own_kappa = np.zeros(m), np.zeros((m, 4)), np.zeros(m)
    out, looked = [], 0.0
    for t in range(rounds):
        slack = out[-1][1] if out else 0.0
        if cohorts[t]:
            told = literal_functions(w, clients)
            n = sum(told[i][0] for i in cohorts[t])
            v = sum(told[i][0] * told[i][1] for i in cohorts[t]) / n
            g = sum(told[i][0] * told[i][2] for i in cohorts[t]) / n
            v, g = v[[0, 1, 1, 2, 3]] * [1, 1, -1, 1, 1], g[[0, 1, 1, 2, 3]] * np.array([[1, 1, -1, 1, 1]]).T
            b = (1 - rho) * b + rho * (v - g @ w + tau * w @ w)
            a = (1 - rho) * a + rho * (g - 2 * tau * w)
            kappa = (1 - rho) * kappa + rho
            for i in cohorts[t]:
                _, v, g = told[i]
                own_b[i] = (1 - rho) * own_b[i] + rho * (v[0] - g[0] @ w + tau * w @ w)
                own_a[i] = (1 - rho) * own_a[i] + rho * (g[0] - 2 * tau * w)
                own_kappa[i] = (1 - rho) * own_kappa[i] + rho
            limits = [LIMITS["gap"], LIMITS["gap"], LIMITS["misses"], LIMITS["tanh"]]
            rows = [(b[k] / kappa - limits[k - 1], a[k] / kappa, tau) for k in (1, 2, 3, 4)]
            rows.append((-LIMITS["norm2"], np.zeros(4), 1.0))
            rows += [
                (own_b[i] / own_kappa[i] - LIMITS["own"][i], own_a[i] / own_kappa[i], tau)
                for i in range(m)
                if own_kappa[i] > 0
            ]
            omega, slacks, _ = conic((a[0] / kappa, tau + 0.02), rows, c)
            w, slack = (1 - gamma) * w + gamma * omega, slacks.sum()
            if (t + 1) % settings.patience == 0:
                c *= settings.growth if slacks.max() > max(1e-6, looked / 2) else 1
                looked = slacks.max()
        out.append((w, slack, c))
    return out


@functools.cache
def mixed_run():
    limited = [
        Gap(column=1, above=0.0) <= LIMITS["gap"],
        Misses() <= LIMITS["misses"],
        PerRow(lambda w, batch: jnp.tanh(batch.x @ w.tree["w"]) ** 2) <= LIMITS["tanh"],
        Norm2() <= LIMITS["norm2"],
        ClientLoss() <= list(LIMITS["own"]),
    ]
    problem = Constrained(fp.Logistic(l2=0, intercept=True), minimize=Loss() + 0.02 * Norm2(), subject_to=limited)
    everyone = ((0, 1, 2),) * 120
    options = {"participation": SOME + everyone, "rounds": 125, "engine": LocalEngine(buckets=1)}
    return fp.run(MANY, problem, byhand.federation(MIXED), **options)


def read_at(w):
    """What the columns must show at w."""
    told = literal_functions(w, MIXED)
    n = sum(d for d, _, _ in told)
    loss, gap, misses, tanh = sum(d * values for d, values, _ in told) / n
    return {
        "objective": loss + 0.02 * w @ w,
        "loss": loss,
        "constraint_1_above": gap - LIMITS["gap"],
        "constraint_1_below": -gap - LIMITS["gap"],
        "constraint_2": misses - LIMITS["misses"],
        "constraint_3": tanh - LIMITS["tanh"],
        "constraint_4": w @ w - LIMITS["norm2"],
        "worst_client": max(values[0] - cap for (_, values, _), cap in zip(told, LIMITS["own"], strict=True)),
    }


@pytest.mark.drill
def test_rounds_are_algorithm_2_literally():
    """M = 8, three clients of 4, 9 and 6 rows, not all of them in every round and nobody in one."""
    history = mixed_run().history
    cohorts = SOME + ((0, 1, 2),) * 10
    for t, (w, slack, c) in enumerate(literal(MIXED, cohorts, MANY, len(cohorts))):
        for name, value in read_at(w).items():
            assert history.column(name)[t + 1] == pytest.approx(value, abs=2e-6), (t, name)
        assert history.column("slack")[t + 1] == pytest.approx(slack, abs=2e-5)
        assert history.column("penalty")[t + 1] == c
    assert history.column("penalty")[15] > 30.0, "the case must raise the penalty"


@pytest.mark.drill
def test_constraints_of_every_kind_are_met():
    """The unconstrained minimiser breaks every one of them (by SciPy)."""
    goal = lambda w: read_at(w)["objective"]
    free = read_at(minimize(goal, np.zeros(4)).x)
    run, kinds = mixed_run(), ("constraint_1_above", "constraint_2", "constraint_3", "constraint_4", "worst_client")
    for name in kinds:
        assert free[name] > 5e-3, name
        assert run.history.last(name) <= 1e-3, name
    assert not [said for said in run.notices if "limit" in said]
    assert run.history.last("slack") <= 1e-6
    assert run.history.last("kkt") <= 0.05 < run.history.column("kkt")[1]
    assert run.history.last("penalty") == run.history.column("penalty")[-40], "c rises only while a slack is left"
    limits = lambda w: -np.array([read_at(w)[name] for name in (*kinds, "constraint_1_below")])
    best = minimize(goal, np.zeros(4), constraints={"type": "ineq", "fun": limits}, method="SLSQP", tol=1e-12)
    assert run.history.last("objective") == pytest.approx(best.fun, abs=1e-3)


# (c) invariants


def drawn_rows(t, client, d, size, width=12):
    """The `size` rows with the largest uniform numbers of (seed 0, round, client, LOCAL)."""
    numbers = np.asarray(jax.random.uniform(key_of(0, t, client)(Purpose.LOCAL), (width,), jnp.float32))[:d]
    return np.argsort(-numbers)[:size]


def test_with_rho_1_of_1_it_is_momentum_sgd():
    """(11) and (12): v ← (1−ρ)(1−γ^(t−1)) v + ρ/(2τ) Σ N_i/(BN) Σ ∇f,  ω ← ω − γ v. Unequal clients, B = 3.

    f_i has β/(2d_i)‖w‖², of which a batch of three has no other share: rows drawn stand for all d_i.
    """
    clients, problem, tau = parts(sizes=(4, 9, 6)), fp.Logistic(l2=2.0, intercept=True), 0.3
    s = SSCA(batch=3, tau=tau, rho=1.0, rho_power=0.6, gamma=0.8, gamma_power=0.9)
    w, v, before = np.zeros(4), np.zeros(4), 0.0
    moments = play(built(s, problem, 3), problem, clients, vector(w, True), [range(3)] * 30)
    for t, moment in enumerate(moments):
        rho, gamma = (t + 1) ** -0.6, 0.8 * (t + 1) ** -0.9
        g = np.zeros(4)
        for i, (x, y) in enumerate(clients):
            rows = drawn_rows(t, i, len(y), 3)
            g += len(y) / 19 * byhand.batch_gradient(problem, w, x, y, rows)
        v = (1 - rho) * (1 - before) * v + rho / (2 * tau) * g
        w, before = w - gamma * v, gamma
        assert relative(flat(moment.after.w), w) <= 1e-12
        assert float(moment.notes[1].gradients) == pytest.approx(3 / 9, rel=1e-15)
    assert np.linalg.norm(w) > 0.1


def test_what_is_sent_is_a_sum():
    """Uploads of the cohort, added up, are all the server needs; with caps it needs each client's."""
    assert built(SSCA(), SQUARES, 2).combine == "sum"
    assert built(SSCA(), Constrained(SQUARES, subject_to=[ClientLoss() <= 1.0]), 2).combine == "each"


# (d) degenerate cases


def test_one_client_is_the_pooled_data():
    """Clients of one and of two rows, or one of three."""
    pooled = [tuple(np.concatenate([part[k] for part in TWO]) for k in (0, 1))]
    one = play(built(SSCA(tau=0.3), SQUARES, 1), SQUARES, pooled, vector([0.0]), [[0]] * 3)
    for a, b in zip(two(SSCA(tau=0.3), rounds=3), one, strict=True):
        assert number(a.after.w) == pytest.approx(number(b.after.w), rel=1e-14)


def test_with_rho_and_gamma_1_it_is_gradient_descent_by_1_over_2_tau():
    """F′(w) = w + 2."""
    w = 0.0
    for moment in two(SSCA(tau=0.8, **GRADIENT_STEPS), rounds=4):
        w = w - (w + 2) / 1.6
        assert number(moment.after.w) == pytest.approx(w, rel=1e-14)


def test_the_penalty_grows_every_so_often_while_a_slack_is_left():
    """c = ½: slack 7/36. Looked at after every second round: ½, 2, 2, 8; without slack it stays as it is."""
    problem = Constrained(SQUARES, minimize=Norm2(), subject_to=[Loss() <= 5.25])
    s = SSCA(tau=1.0, penalty=0.5, growth=4.0, patience=2, rho=0.5, rho_power=0.0, gamma=0.5, gamma_power=0.0)
    moments = two(s, problem, 6)
    penalties = [float(moment.info.penalty) for moment in moments]
    assert penalties == [0.5, 2.0, 2.0, 2.0, 2.0, 2.0]
    assert [float(moment.info.slack) > 1e-6 for moment in moments] == [True, True, *[False] * 4]
    after = lambda c, before, slacks, t: tuple(
        map(float, next_price(s, Price(jnp.asarray(c), jnp.asarray(before)), jnp.asarray(slacks), t))
    )
    assert after(1e12, 0.0, [1.0], 2) == (1e12, 1.0)
    assert after(3.0, 0.5, [1.0, 0.0], 3) == (3.0, 0.5), "no look in an odd round"
    assert after(3.0, 0.0, [0.0, 1e-3], 4) == (12.0, 1e-3)
    assert after(3.0, 0.0, [0.0, 1e-7], 4) == (3.0, 1e-7)
    assert after(3.0, 1.0, [0.5], 4) == (3.0, 0.5), "a slack that halves needs no higher price"
    assert after(3.0, 1.0, [0.51], 4) == (12.0, 0.51)
    assert after(1e15, 0.0, [1.0], 2) == (1e15, 1.0), "it is never lowered"


def test_least_norm_with_every_client_s_loss_limited():
    """No function that all clients share: ½(w−2)² ≤ ⅛ for w ≥ 1½, ½(w+4)² ≤ 18 for w ≤ 2; surrogates exact at τ = ½.

    w = 1½, 2w = ν(2 − w) for ν = 6; already while client 1, not seen yet, limits nothing.
    """
    problem = Constrained(SQUARES, minimize=Norm2(), subject_to=[ClientLoss() <= [0.125, 18.0]])
    s = SSCA(tau=0.5, penalty=100.0, **GRADIENT_STEPS)
    for moment in play(built(s, problem, 2), problem, TWO, vector([0.0]), [[0], [0, 1]], compiled=True):
        assert number(moment.after.w) == pytest.approx(1.5, rel=1e-7)
        np.testing.assert_allclose(moment.after.multipliers, [6.0, 0.0], atol=1e-5)
        assert float(moment.info.multiplier_clients) == pytest.approx(6.0, abs=1e-5)


# (e) engines, participation, streams, resuming


@pytest.mark.parametrize("engine", ["debug", *(pytest.param(k, marks=pytest.mark.drill) for k in ("local", "host"))])
def test_engines_run_the_constrained_problem(engine):
    """The two rounds in round numbers, w = 0, −¼, …: F = (½(w−2)² + (w+4)²)/3, ∇L = 2w + νF′, F′ = w + 2."""
    problem = Constrained(SQUARES, minimize=Norm2(), subject_to=[Loss() <= 5.25])
    run = fp.run(SSCA(tau=1.0, **HALVES), problem, byhand.federation(TWO, ()), rounds=2, engine=engine)
    nu = [0.0, 1.0, math.sqrt(4.41 / 1.36) - 1]
    w = np.array([0.0, -0.25, -0.1875 - 2.1 * nu[2] / (8 * (1 + nu[2]))])
    over = ((w - 2) ** 2 / 2 + (w + 4) ** 2) / 3 - 5.25
    expected = {
        "objective": w**2,
        "gradient": 4 * w**2,
        "constraint_1": over,
        "kkt": np.abs(2 * w + nu * (w + 2)) + np.maximum(over, 0) + nu * np.abs(over),
    }
    for name, values in expected.items():
        np.testing.assert_allclose(run.history.column(name), values, rtol=1e-11, atol=1e-13, err_msg=name)
    np.testing.assert_allclose(run.history.column("multiplier_constraint_1")[1:], nu[1:], rtol=1e-11)


@pytest.mark.drill
def test_engines_agree_on_who_is_limited_by_what(monkeypatch):
    """Eight clients of unequal sizes with limits of their own, two of them a round: buckets, slots, streams, trials."""
    monkeypatch.setattr(local, "BUCKET_COST", 0)
    limited = [Gap(column=1, above=0.0) <= 0.06, ClientLoss() <= [0.7, 0.6, 0.72, 0.75, 0.71, 0.73, 0.74, 0.8]]
    problem = Constrained(fp.Logistic(l2=0, intercept=True), minimize=Loss() + 0.02 * Norm2(), subject_to=limited)
    federation = byhand.federation(parts(sizes=(4, 9, 6, 5, 7, 12, 3, 8)))
    options = {"rounds": 6, "participation": 0.25}
    settings = SSCA(tau=0.5, penalty=30.0)
    engines = (LocalEngine(buckets=1), LocalEngine(buckets=3), HostEngine(at_once=2))
    first, *others = [fp.run(settings, problem, federation, engine=e, seed=3, **options) for e in engines]
    others.append(fp.trials(settings, problem, federation, seeds=[3, 4], **options)[0])
    for run in others:
        for name in ("objective", "worst_client", "kkt", "slack", "multiplier_clients"):
            np.testing.assert_allclose(run.history.column(name), first.history.column(name), rtol=1e-9, atol=1e-12)


def test_who_is_away_is_left_out_of_the_means_and_nobody_changes_nothing():
    """Client 1 alone: g = 4, a = ½·4, ω̄ = −4, w = −2. Nobody: as it was, t goes on."""
    one, empty, after = two(SSCA(tau=0.5, **HALVES), cohorts=[[1], [], [0]])
    assert number(one.after.w) == -2.0
    assert jax.tree.all(jax.tree.map(lambda a, b: bool(jnp.all(a == b)), empty.after._replace(round=1), one.after))
    assert float(after.info.rho) == pytest.approx(1 / 6)
    assert int(after.after.round) == 3


def stepping(settings, problem):
    """One client's step, compiled."""
    algorithm = built(settings, problem, 2)
    send = lambda w: Broadcast(vector(w), jnp.asarray([9]))
    step = jax.jit(lambda msg, state, batch: algorithm.client_step(msg, state, batch, Oracle(problem), key_of(0, 0, 0)))
    return lambda w, state, batch: step(send(w), state, batch)


def test_streams_are_read_in_order():
    """B = 2 of five rows: 0 1, 2 3, 4 0, 1 2, …; the regulariser is that of five."""
    problem, (x, y), w = fp.Logistic(l2=2.0), parts(sizes=(5,))[0], np.array([0.4, -0.2, 0.1])
    step, state = stepping(SSCA(batch=2, order="stream"), problem), ClientState(jnp.asarray(0, jnp.int32))
    for rows, place in (([0, 1], 2), ([2, 3], 4), ([4, 0], 1), ([1, 2], 3)):
        state, upload, notes = step(w, state, byhand.batch(x, y, padding=3))
        sent = np.asarray(upload.gradients.tree["w"][0])
        assert relative(sent, 5 * byhand.batch_gradient(problem, w, x, y, rows)) <= 1e-13
        assert int(state.place) == place
        assert float(notes.gradients) == pytest.approx(2 / 5)


def test_a_short_client_uses_every_row_once():
    """Three rows, batches of five: all of it, in random order or in a stream."""
    problem, (x, y), w = fp.Logistic(l2=2.0), parts(sizes=(3,))[0], np.array([0.4, -0.2, 0.1])
    for order in ("random", "stream"):
        step, state = stepping(SSCA(batch=5, order=order, short=True), problem), ClientState(jnp.asarray(2, jnp.int32))
        _, upload, notes = step(w, state, byhand.batch(x, y, padding=3))
        assert relative(upload.gradients.tree["w"][0], 3 * byhand.gradient(problem, w, x, y)) <= 1e-13
        assert float(notes.gradients) == 1


def test_resumed_is_uninterrupted(tmp_path, monkeypatch):
    monkeypatch.setattr("fedpact.report.html.plots_section", lambda *_: "")
    problem = Constrained(SQUARES, minimize=Norm2(), subject_to=[Loss() <= 5.25])
    federation, settings = byhand.federation(TWO, ()), SSCA(tau=1.0, batch=1, order="stream", penalty=0.5, growth=2.0)
    train = lambda folder, rounds, **more: fp.run(
        settings, problem, federation, rounds=rounds, folder=tmp_path / folder, engine="debug", name="x", **more
    )
    train("whole", 3)
    train("cut", 2)
    assert train("cut", 3, resume=True).history.rounds == 3
    same_bits(tmp_path / "cut", tmp_path / "whole")


def test_the_broadcast_tells_the_model_and_the_counts_only():
    """Duals and estimates stay with the server, though telemetry reads them there."""
    (moment,) = two(SSCA(), Constrained(SQUARES, minimize=Norm2(), subject_to=[Loss() <= 5.25]), 1)
    assert moment.msg._fields == Broadcast._fields == ("w", "tally")
    assert moment.msg.tally.tolist() == [3]


# Limits out of reach, and numbers that are none


def test_a_limit_out_of_reach_is_told_with_the_least_violation():
    """F ≥ F(−2) = 4: the run ends after its rounds, c at most as large as it may be, and says how close it came."""
    problem = Constrained(SQUARES, minimize=Norm2(), subject_to=[Loss() <= 3.0])
    s = SSCA(tau=0.5, growth=1e3, patience=1, **GRADIENT_STEPS)
    run = fp.run(s, problem, byhand.federation(TWO, ()), rounds=6, engine="debug")
    assert run.outcome_kind is fp.stop.Outcome.ROUNDS
    (said,) = [text for text in run.notices if "limit" in text]
    assert "constraint_1 ends 1 above its limit (least 1, after round" in said
    assert "tau may be too large, c too small, or the limit out of the model's reach." in said
    assert run.history.last("penalty") == 1e12
    assert run.history.last("constraint_1") == pytest.approx(1.0, abs=1e-4)
    assert number(run.model.w) == pytest.approx(-2.0, abs=1e-2)


def test_a_constraint_that_is_no_number_at_the_start_is_refused():
    federation = byhand.federation(GROUPS)
    broken = PerRow(lambda w, batch: jnp.log(-1.0 - batch.y), title="cost")
    with pytest.raises(InvalidArgument, match=r"^values of cost at the start, client 0 must be finite, got .*A constr"):
        fp.run(SSCA(), Constrained(fp.Logistic(l2=0), subject_to=[broken <= 1.0]), federation, rounds=1)


def test_a_constraint_that_is_no_number_on_one_client_s_rows_is_refused():
    rare = PerRow(lambda w, batch: jnp.where(batch.y < 0, jnp.nan, 0.0) + 0 * w.tree["w"][0])
    problem = Constrained(SQUARES, minimize=Norm2(), subject_to=[rare <= 1.0])
    with pytest.raises(InvalidArgument, match=r"^values of per_row at the start, client 1 must be finite"):
        fp.run(SSCA(), problem, byhand.federation(TWO, ()), rounds=2)


def test_a_constraint_that_is_no_number_elsewhere_stops_the_run():
    """Where the first step leads."""
    gone = PerRow(lambda w, batch: jnp.where(w.tree["w"][0] == 0, 0.0, jnp.nan) + 0 * batch.y)
    problem = Constrained(SQUARES, minimize=Loss(), subject_to=[gone <= 1.0])
    told = r"^round 1, client 0, client_step: .*values is not finite; at the model it was sent its loss was \d\S*\.$"
    with pytest.raises(ClientError, match=told):
        fp.run(SSCA(), problem, byhand.federation(TWO, ()), rounds=3, engine="debug")


def test_stop_rules_read_constraints_slacks_and_the_residual():
    federation = byhand.federation(TWO, ())
    problem = Constrained(SQUARES, minimize=Norm2(), subject_to=[Loss() <= 5.25, ClientLoss() <= 20.0])
    names = ("constraint_1", "worst_client", "slack", "multiplier_constraint_1", "multiplier_clients", "kkt")
    for name in (*names, "slack_constraint_1", "slack_clients"):
        Experiment(SSCA(), problem, federation, stop=fp.stop.Target(name, 0.0))


# (f) bad arguments


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"batch": 0}, r"^batch \(B\) must be an integer of at least 1, got 0\. Leave it out for all rows\."),
        ({"tau": 0.0}, r"^tau \(τ\) must be above 0, got 0\.0\."),
        ({"rho": -1}, r"^rho \(ρ\) must be above 0, got -1\."),
        ({"gamma": math.nan}, r"^gamma \(γ\) must be above 0, got nan\."),
        ({"rho_power": -0.1}, r"^rho_power \(α\) must be at least 0, got -0\.1\."),
        ({"gamma_power": "fast"}, r"^gamma_power \(α\) must be at least 0, got 'fast'\."),
        ({"penalty": 0}, r"^penalty \(c\) must be above 0, got 0\."),
        ({"growth": 0.5}, r"^growth \(c_\{j\+1\}/c_j\) must be at least 1, got 0\.5\."),
        ({"patience": 0}, r"^patience must be an integer of at least 1, got 0\."),
        ({"bound": 0}, r"^bound \(‖ω‖\) must be above 0, or left out, got 0\."),
        ({"order": "sorted"}, r"^order must be one of random, stream, got 'sorted'"),
        ({"short": 1}, r"^short must be true or false, got 1\."),
    ],
    ids=str,
)
def test_bad_settings_are_refused(settings, message):
    with pytest.raises(FedpactError, match=message):
        SSCA(**settings)


MODEL = fp.Logistic(l2=0)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: Constrained(fp.Logistic(), subject_to=[Loss() <= 1.0]),
            r"^l2 of Logistic must be 0 inside Constrained, got 0\.001\. Give the model l2 = 0, and write the penalty",
        ),
        (
            lambda: Constrained(SQUARES, minimize=Loss() + 3 * Gap(column=0)),
            r"^minimize must be free of Gap, an absolute value: it is for constraints, got ",
        ),
        (
            lambda: Constrained(SQUARES, subject_to=[Gap(column=0) + Norm2() <= 1.0]),
            r"^subject_to must be Gap alone in its function, got .* It is an absolute value\.",
        ),
        (
            lambda: Constrained(SQUARES, subject_to=[2 * ClientLoss() <= 1.0]),
            r"^subject_to must be ClientLoss alone in its function, without a factor, got 2",
        ),
        (lambda: Constrained(3), r"^model must be a problem such as fedpact\.Logistic\(\), got 3\."),
        (lambda: Constrained(MODEL, minimize=3), r"^function must be made of terms such as Loss\(\) and Norm2\(\)"),
        (
            lambda: Constrained(MODEL, minimize=Loss() <= 1.0),
            r"^minimize must be a function without a limit, got Loss\(\) <= 1\.0\. What must stay below a limit",
        ),
        (lambda: Constrained(MODEL, subject_to=[Loss()]), r"^subject_to must be functions with limits, such as Loss"),
        (lambda: Constrained(MODEL, subject_to=[Loss() <= "low"]), r"^limit of .*\(U\) must be a number, got 'low'\."),
        (
            lambda: Constrained(MODEL, subject_to=[Loss() <= [1.0]]),
            r"^limit of .*\(U\) must be a number, got \(1\.0,\)",
        ),
        (lambda: Constrained(MODEL, minimize=ClientLoss()), r"^minimize must be free of ClientLoss"),
        (
            lambda: Constrained(MODEL, subject_to=[ClientLoss() + Norm2() <= 1.0]),
            r"^subject_to must be ClientLoss alone in its function",
        ),
        (
            lambda: Constrained(MODEL, subject_to=[ClientLoss() <= 1.0, ClientLoss() <= 2.0]),
            r"^subject_to must be at most one ClientLoss",
        ),
        (
            lambda: Constrained(MODEL, minimize=Loss() + -1 * Norm2()),
            r"^coefficient of Norm2\(exact=True\) must be at least 0 where it is kept exact, got -1\.0\.",
        ),
        (
            lambda: Constrained(MODEL, minimize=Norm2(), subject_to=[Norm1() <= 1.0]),
            r"^minimize and subject_to must be of the data, with a term such as Loss\(\) in one of them, got Norm2",
        ),
        (lambda: Loss() * "2", r"^factor of a function must be a number, got '2'\."),
        (lambda: (Loss() <= 1.0) + Loss(), r"^function must be one without a limit to calculate with, got 1\.0\."),
        (
            lambda: SSCA().build(Constrained(MODEL, minimize=Norm1(), subject_to=[Loss() <= 1.0]), 2, 1.0),
            r"^minimize must be a function with curvature, got .*Give the objective a smooth term",
        ),
    ],
)
def test_bad_functions_are_refused(make, message):
    with pytest.raises(InvalidArgument, match=message):
        make()


@pytest.mark.parametrize(
    ("function", "error", "message"),
    [
        (
            Gap(column=2) <= 0.1,
            InvalidArgument,
            r"^column of Gap must be the name of a feature, or its number from 0 to 1, got 2\.",
        ),
        (
            Gap(column=0, of=2) <= 0.1,
            InvalidArgument,
            r"^of in Gap must be the number of a class, from 0 to 1, got 2\.",
        ),
        (Gap(column=0, above="x") <= 0.1, InvalidArgument, r"^above of Gap must be a number, got 'x'\."),
        (
            Gap(column=1, above=9.0) <= 0.1,
            DataError,
            r"^rows with column 1 above 9\.0 must be some but not all for Gap, got 0 of 5: its values are from",
        ),
        (
            Misses(of=True) <= 0.1,
            InvalidArgument,
            r"^of in Misses must be the number of a class, from 0 to 1, got True",
        ),
        (PerRow(3) <= 0.1, InvalidArgument, r"^function of PerRow must be a function of \(w, batch\), got 3\."),
        (
            PerRow(lambda w, batch: jnp.sum(batch.y)) <= 0.1,
            InvalidArgument,
            r"^function of PerRow must be a function to 2 numbers for 2 rows, got \(\)\.",
        ),
        (
            PerRow(lambda w, batch: w.tree["v"]) <= 0.1,
            InvalidArgument,
            r"^function of PerRow must take \(w, batch\), got KeyError: 'v'\. Try it on two rows\.",
        ),
        (Norm2(exact="no") <= 0.1, InvalidArgument, r"^exact must be true or false, got 'no'\."),
        (
            ClientLoss() <= [0.1, 0.2, 0.3],
            InvalidArgument,
            r"^limit of ClientLoss \(U_i\) must be a number or one a client \(2\), got \(0\.1, 0\.2, 0\.3\)\.",
        ),
    ],
)
def test_functions_that_do_not_fit_the_data_are_refused(function, error, message):
    with pytest.raises(error, match=message):
        fp.run(SSCA(), Constrained(MODEL, subject_to=[function]), byhand.federation(GROUPS), rounds=1)


def test_terms_that_do_not_fit_the_model_are_refused():
    numbers = byhand.federation(TWO, ())
    with pytest.raises(InvalidArgument, match=r"^model must be one that classifies for Misses, got 'LeastSquares'\."):
        fp.run(SSCA(), Constrained(SQUARES, subject_to=[Misses() <= 1.0]), numbers, rounds=1)
    with pytest.raises(DataError, match=r"^labels must include class 1 for Misses, got no such row\."):
        Misses().check(MODEL, byhand.federation(((GROUPS[0][0], np.zeros(2)), (GROUPS[1][0], np.zeros(3)))))


def test_a_batch_larger_than_a_client_is_refused():
    with pytest.raises(InvalidArgument, match=r"^batch \(B\) must be at most the 1 rows of client 0, got 2\."):
        fp.run(SSCA(batch=2), SQUARES, byhand.federation(TWO, ()), rounds=1)


def test_steps_outside_the_theorems_are_told():
    assert built(SSCA.preset("theory"), SQUARES, 2).notices == ()
    (said,) = built(SSCA(), SQUARES, 2).notices
    assert said.startswith("The steps ρ ~ t^−0.1 and γ ~ t^−0.15 break the conditions (4) and (6) of the theorems")


def test_functions_read_as_they_are_written():
    goal = Loss() + 0.5 * Norm2()
    assert repr(goal) == "Loss() + 0.5·Norm2(exact=True)"
    assert repr(ClientLoss() <= 0.3) == "ClientLoss() <= 0.3"
    assert hash(Constrained(MODEL, subject_to=[ClientLoss() <= [0.1, 0.2]])) is not None
    assert as_constrained(Constrained(MODEL)) == Constrained(MODEL)
