"""FedAvg and FedProx."""

from __future__ import annotations

import byhand
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from byhand import PROBLEM, built, flat, key_of, parts, play, relative, vector
from scipy.optimize import minimize

import fedpact as fp
from fedpact.algorithms.fedavg import Broadcast, ClientState, FedAvg, draw
from fedpact.algorithms.fedprox import FedProx
from fedpact.core.errors import InvalidArgument, UnknownName
from fedpact.core.keys import Purpose
from fedpact.engines import LocalEngine
from fedpact.problems import optimum

ZERO = vector(np.zeros(4), intercept=True)
COHORTS = ((0, 2, 5), (1, 3, 4, 6), (), (2,))


def local(w, x, y, steps, gamma, mu=0.0):
    w_i = w
    for _ in range(steps):
        w_i = w_i - gamma * (byhand.gradient(PROBLEM, w_i, x, y) + mu * (w_i - w))
    return w_i


def step(algorithm, w, x, y, gamma, seed=0, t=0, client=0, padding=0, grad=PROBLEM.gradient):
    with jax.disable_jit():
        return algorithm.client_step(
            Broadcast(vector(w, True)),
            ClientState(jnp.asarray(gamma)),
            byhand.batch(x, y, client, padding),
            grad,
            key_of(seed, t, client),
        )


# (a) one step by hand


def test_one_round_in_round_numbers():
    """Clients (1)→2 and (1),(1)→−4,−4, f_i = ½(w − b_i)², from 0 with γ = ¼: one step gives ½ and −1.

    Two steps: ½ + ¼·1.5 = .875 and −1 − ¼·3 = −1.75. Uniform mean −.4375; by rows (.875 − 2·1.75)/3 = −.875.
    FedProx with μ = 2: the second step adds −¼·2·½ and +¼·2·1: .625 and −1.25; mean −.3125.
    """
    clients = [(np.ones((1, 1)), np.array([2.0])), (np.ones((2, 1)), np.array([-4.0, -4.0]))]
    start = vector([0.0])
    for settings, expected in (
        (FedAvg(steps=2, step=0.25), -0.4375),
        (FedAvg(steps=2, step=0.25, weights="rows"), -0.875),
        (FedAvg(steps=2, step=0.5, scale=0.5), -0.4375),
        (FedProx(mu=2.0, steps=2, step=0.25), -0.3125),
        (FedProx(mu=2.0, steps=2, step=0.25, weights="rows"), (0.625 - 2.5) / 3),
    ):
        (moment,) = play(built(settings, fp.LeastSquares(), 2), fp.LeastSquares(), clients, start, [[0, 1]])
        np.testing.assert_allclose(flat(moment.after.w), [expected], rtol=1e-15)


@pytest.mark.parametrize("padding", [0, 5])
@pytest.mark.parametrize("mu", [0.0, 0.4])
def test_local_steps_are_gradient_steps(mu, padding):
    w = np.random.default_rng(3).normal(size=4)
    x, y = parts()[1]
    settings = FedProx(mu=mu, steps=3) if mu else FedAvg(steps=3)
    client, upload, notes = step(built(settings), w, x, y, 0.3, padding=padding)
    assert relative(flat(upload.weighted), local(w, x, y, 3, 0.3, mu)) <= 1e-13
    assert float(upload.weight) == 1
    assert float(notes.gradients) == 3
    assert float(client.gamma) == 0.3


def test_the_step_size_is_the_inverse_lipschitz_constant():
    """1/r_i, 1/(r_i + μ) for FedProx, times `scale`; or the number given."""
    x, y = parts()[1]
    r = byhand.lipschitz(PROBLEM, x)
    batch = byhand.batch(x, y)
    for settings, expected in (
        (FedAvg(), 1 / r),
        (FedAvg(scale=0.3), 0.3 / r),
        (FedAvg(step=0.2, scale=0.5), 0.1),
        (FedProx(mu=0.7), 1 / (r + 0.7)),
        (FedProx(mu=0.7, scale=2.0), 2 / (r + 0.7)),
        (FedProx(mu=0.7, step=0.2), 0.2),
    ):
        with jax.disable_jit():
            state, hello = built(settings).join(ZERO, batch, key_of(0, 0, 0))
        assert float(state.gamma) == pytest.approx(expected, rel=1e-10)
        assert jax.tree.leaves(hello) == []


@pytest.mark.parametrize("weights", ["uniform", "rows"])
def test_the_server_takes_the_weighted_mean_of_those_who_took_part(weights):
    rounds = play(built(FedAvg(steps=2, step=0.3, weights=weights)), PROBLEM, parts(), ZERO, COHORTS)
    w = np.zeros(4)
    for moment in rounds:
        sent = [(local(w, *parts()[i], 2, 0.3), len(parts()[i][1]) if weights == "rows" else 1) for i in moment.chosen]
        for i, (_, p) in zip(moment.chosen, sent, strict=True):
            assert float(moment.uploads[i].weight) == p
        w = sum(p * w_i for w_i, p in sent) / sum(p for _, p in sent) if sent else w
        assert relative(flat(moment.after.w), w) <= 1e-13


def test_batches_are_drawn_from_the_client_s_own_rows():
    """Over many draws every real row is used and no row of padding ever is; about equally often."""
    x = np.arange(1.0, 6.0)[:, None]
    batch = byhand.batch(x, 10 * x[:, 0], client=3, padding=40)
    rows = jax.jit(jax.vmap(lambda k: draw(batch, 4, k)))(jax.random.split(jax.random.key(0), 2000))
    assert set(np.unique(rows.x)) == {1.0, 2.0, 3.0, 4.0, 5.0}
    np.testing.assert_array_equal(rows.y, 10 * rows.x[..., 0])
    np.testing.assert_array_equal(rows.weight, 5 / 4)  # four rows that stand for five
    assert np.all(np.asarray(rows.client) == 3)
    _, counts = np.unique(rows.x, return_counts=True)
    np.testing.assert_allclose(counts / 8000, 0.2, atol=5 * (0.2 * 0.8 / 8000) ** 0.5)


@pytest.mark.parametrize("divide", [True, False])
@pytest.mark.parametrize("kind", [fp.Logistic, fp.LeastSquares])
def test_a_batch_s_gradient_is_unbiased(kind, divide):
    """The mean over every batch of one row is ∇f_i, regulariser included; each of them counts d_i rows."""
    problem = kind(l2=0.5, divide=divide, intercept=True)
    x, y = parts()[1]
    whole, w = byhand.batch(x, y, padding=6), np.random.default_rng(3).normal(size=4)
    drawn, seen = jax.vmap(lambda k: draw(whole, 1, k))(jax.random.split(jax.random.key(0), 200)), {}
    for k in range(200):
        one = jax.tree.map(lambda a, k=k: a[k], drawn)
        seen.setdefault(float(one.x[0, 0]), one)
    assert sorted(seen) == sorted(x[:, 0])
    assert all(float(one.rows) == len(y) for one in seen.values())
    found = [flat(problem.gradient(vector(w, True), one)) for one in seen.values()]
    assert relative(np.mean(found, axis=0), byhand.gradient(problem, w, x, y)) <= 1e-13


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_a_batch_keeps_its_precision(dtype):
    x, y = parts()[1]
    drawn = draw(byhand.batch(x, y, dtype=dtype), 4, jax.random.key(0))
    assert {a.dtype for a in drawn[:3]} == {np.dtype(dtype)}


@pytest.mark.parametrize("mu", [0.0, 0.4])
def test_minibatch_steps_use_the_key_of_round_client_and_step(mu):
    """The s-th step's rows come from fold_in(key(LOCAL), s); witnessed by drawing them again in NumPy's hands.

    The step's gradient is the mean of the drawn rows' losses plus (β/d_i) w, with d_i = 9 and not the batch's 4.
    """
    w = np.random.default_rng(3).normal(size=4)
    x, y = parts()[1]
    settings = FedProx(mu=mu, steps=3, batch=4) if mu else FedAvg(steps=3, batch=4)
    _, upload, notes = step(built(settings), w, x, y, 0.3, seed=5, t=2, client=1, padding=6)
    loss, expected = fp.Logistic(l2=0.0, intercept=True), w
    for s in range(3):
        chosen = np.asarray(jax.random.randint(jax.random.fold_in(key_of(5, 2, 1)(Purpose.LOCAL), s), (4,), 0, len(y)))
        slope = byhand.gradient(loss, expected, x[chosen], y[chosen]) + 0.5 / 9 * np.append(expected[:3], 0.0)
        expected = expected - 0.3 * (slope + mu * (expected - w))
    assert relative(flat(upload.weighted), expected) <= 1e-12
    assert float(notes.gradients) == pytest.approx(3 * 4 / 9)


# (b) certificates


def test_one_step_a_round_reaches_the_optimum():
    """With one step of a common size it is gradient descent on (1/m) Σ f_i: f − f* ≤ 1e-12 after 250 rounds."""
    best = optimum(PROBLEM, byhand.federation(parts()))
    rounds = play(built(FedAvg(steps=1, step=1.5)), PROBLEM, parts(), ZERO, [range(7)] * 250)
    w = flat(rounds[-1].after.w)
    assert np.mean([byhand.value(PROBLEM, w, x, y) for x, y in parts()]) - best.value <= 1e-12
    assert np.linalg.norm(w - best.w) <= 1e-6


def test_many_steps_of_fedprox_solve_its_subproblem():
    """w_i → argmin_v f_i(v) + (μ/2)‖v − w‖², by SciPy's BFGS, and its optimality residual is 0."""
    w, mu = np.random.default_rng(3).normal(size=4), 0.6
    x, y = parts()[1]
    gamma = 1 / (byhand.lipschitz(PROBLEM, x) + mu)
    algorithm = built(FedProx(mu=mu, steps=500))
    run = jax.jit(
        lambda msg: algorithm.client_step(
            msg, ClientState(jnp.asarray(gamma)), byhand.batch(x, y), PROBLEM.gradient, key_of(0, 0, 0)
        )
    )
    reached = flat(run(Broadcast(vector(w, True)))[1].weighted)
    exact = minimize(
        lambda v: byhand.value(PROBLEM, v, x, y) + mu / 2 * np.sum((v - w) ** 2),
        w,
        jac=lambda v: byhand.gradient(PROBLEM, v, x, y) + mu * (v - w),
        method="BFGS",
        options={"gtol": 1e-11},
    ).x
    assert np.linalg.norm(reached - exact) <= 1e-6
    assert np.linalg.norm(byhand.gradient(PROBLEM, reached, x, y) + mu * (reached - w)) <= 1e-13


def test_fedprox_s_step_descends_on_its_subproblem():
    """(c): with γ = 1/(r + μ) every local step lowers f_i + (μ/2)‖· − w‖²."""
    w, mu = np.random.default_rng(3).normal(size=4), 0.6
    x, y = parts()[1]
    gamma = 1 / (byhand.lipschitz(PROBLEM, x) + mu)
    values = []
    for steps in (1, 2, 3, 4):
        v = flat(step(built(FedProx(mu=mu, steps=steps)), w, x, y, gamma)[1].weighted)
        values.append(byhand.value(PROBLEM, v, x, y) + mu / 2 * np.sum((v - w) ** 2))
    assert np.all(np.diff([byhand.value(PROBLEM, w, x, y), *values]) < 0)


# (c) invariants


def test_a_model_everyone_is_content_with_stays():
    """A fixed point: equal clients at their common optimum."""
    x, y = parts()[3]
    best = optimum(PROBLEM, byhand.federation([(x, y)] * 3)).w
    for settings in (FedAvg(steps=4), FedProx(mu=0.5, steps=4)):
        (moment,) = play(built(settings, clients=3), PROBLEM, [(x, y)] * 3, vector(best, True), [range(3)])
        assert relative(flat(moment.after.w), best) <= 1e-10


def test_what_is_sent_adds_up():
    """combine = "sum": the server's step on all uploads is that on their sum."""
    algorithm = built(FedAvg(steps=2, step=0.3, weights="rows"))
    assert algorithm.combine == "sum"
    (moment,) = play(algorithm, PROBLEM, parts(), ZERO, [range(7)])
    total = sum(flat(u.weighted) for u in moment.uploads.values()) / sum(
        float(u.weight) for u in moment.uploads.values()
    )
    assert relative(flat(moment.after.w), total) <= 1e-14


# (d) degenerate cases


def test_one_client_is_gradient_descent():
    x, y = parts()[3]
    rounds = play(built(FedAvg(steps=3), clients=1), PROBLEM, [(x, y)], ZERO, [[0]] * 4)
    w, gamma = np.zeros(4), 1 / byhand.lipschitz(PROBLEM, x)
    for moment in rounds:
        w = local(w, x, y, 3, gamma)
        assert relative(flat(moment.after.w), w) <= 1e-12


@pytest.mark.parametrize("options", [{"steps": 3}, {"steps": 2, "batch": 3, "step": 0.2, "weights": "rows"}])
def test_without_its_proximal_term_fedprox_is_fedavg(options):
    a = play(built(FedAvg(**options)), PROBLEM, parts(), ZERO, COHORTS)
    b = play(built(FedProx(mu=0.0, **options)), PROBLEM, parts(), ZERO, COHORTS)
    for one, other in zip(a, b, strict=True):
        np.testing.assert_array_equal(flat(one.after.w), flat(other.after.w))


def test_the_proximal_term_holds_back():
    """The larger μ, the nearer to the server's model, and as μ → ∞ (with the step to match) no move at all."""
    w = np.random.default_rng(3).normal(size=4)
    x, y = parts()[1]
    r, moved = byhand.lipschitz(PROBLEM, x), []
    for mu in (0.0, 1.0, 10.0, 1e6):
        upload = step(built(FedProx(mu=mu, steps=20)), w, x, y, 1 / (r + mu))[1]
        moved.append(np.linalg.norm(flat(upload.weighted) - w))
    assert moved == sorted(moved, reverse=True)
    assert moved[-1] < 1e-5


@pytest.mark.parametrize("settings", [FedAvg(steps=2), FedProx(steps=2, mu=0.1)], ids=["fedavg", "fedprox"])
def test_rounds_without_clients_leave_the_model_as_it_is(settings, run_once):
    """Poisson rounds may be empty: no upload, no NaN, the same model to the bit."""
    scheme = fp.Poisson(0.15)
    options = {"participation": scheme, "rounds": 12, "seed": 1}
    empty = [t for t in range(12) if len(scheme.select(1, t, 7)) == 0]
    assert empty
    history = run_once(settings, LocalEngine(buckets=1), **options).history
    for t in empty:
        assert history.column("participants")[t + 1] == 0
        for name in ("objective", "gradient", "bytes_up", "bytes_down", "gradients"):
            assert history.column(name)[t + 1] == history.column(name)[t]
    assert np.all(np.isfinite(history.column("objective")))
    assert history.column("participants").tolist()[1:] == [len(scheme.select(1, t, 7)) for t in range(12)]


# (f) bad arguments


@pytest.mark.parametrize("kind", [FedAvg, FedProx])
@pytest.mark.parametrize(
    ("settings", "error", "said"),
    [
        ({"steps": 0}, InvalidArgument, r"steps must be an integer of at least 1, got 0\."),
        ({"step": 0}, InvalidArgument, r"step \(γ\) must be above 0, got 0\."),
        ({"step": "lipshitz"}, UnknownName, r"step must be one of .+, got 'lipshitz'\. Did you mean 'lipschitz'\?"),
        ({"step": None}, InvalidArgument, r"step \(γ\) must be above 0, got None\."),
        ({"scale": -2.0}, InvalidArgument, r"scale must be above 0, got -2\.0\."),
        ({"batch": 0}, InvalidArgument, r"batch \(B\) must be an integer of at least 1, got 0\."),
        ({"weights": "row"}, UnknownName, r"weights must be one of rows, uniform, got 'row'\. Did you mean 'rows'\?"),
    ],
    ids=str,
)
def test_bad_settings(kind, settings, error, said):
    with pytest.raises(error, match=f"^{said}$"):
        kind(**settings)


def test_bad_settings_of_fedprox():
    with pytest.raises(InvalidArgument, match=r"^mu \(μ\) must be at least 0, got -0\.1\.$"):
        FedProx(mu=-0.1)


# Passes over shuffled batches


@pytest.mark.parametrize("mu", [0.0, 0.4])
def test_epochs_are_passes_over_shuffled_batches(mu):
    """Batches of 4 of 9, 6, 12 and 4 rows, the last one shorter; E_i drawn; momentum over all of a round's steps."""
    options = {"epochs": 3, "step": 0.4, "scale": 0.5, "batch": 4, "momentum": 0.5, "vary": True}
    s = FedProx(mu=mu, **options) if mu else FedAvg(**options)
    cohorts, w = ((1, 2), (0, 3)), np.zeros(4)
    for t, moment in enumerate(play(built(s), PROBLEM, parts(), ZERO, cohorts)):
        sent = []
        for i in moment.chosen:
            x, y = parts()[i]
            epochs = int(jax.random.randint(jax.random.fold_in(key_of(0, t, i)(Purpose.LOCAL), 0), (), 1, 4))
            orders = byhand.shuffles(0, t, i, len(y), epochs, 4)
            sent.append(byhand.sgd(PROBLEM, w, x, y, orders, rate=0.2, momentum=0.5, rho=mu, center=w))
            assert relative(flat(moment.uploads[i].weighted), sent[-1]) <= 1e-12
            assert float(moment.notes[i].gradients) == epochs
        w = np.mean(sent, axis=0)
        assert relative(flat(moment.after.w), w) <= 1e-12


def test_the_training_loss_is_the_mean_of_the_last_epoch_s_batches():
    """Every batch's loss where it was met: before its step, with the regulariser."""
    (moment,) = play(built(FedAvg(epochs=2, step=0.2, batch=4)), PROBLEM, parts(), ZERO, [(1,)])
    x, y = parts()[1]
    w, losses = np.zeros(4), []
    for batches in byhand.shuffles(0, 0, 1, 9, 2, 4):
        losses = []
        for rows in batches:
            whole = byhand.ridge(PROBLEM, 9, 4) @ w**2 / 2 - byhand.ridge(PROBLEM, len(rows), 4) @ w**2 / 2
            losses.append(byhand.value(PROBLEM, w, x[rows], y[rows]) + whole)
            w = w - 0.2 * byhand.batch_gradient(PROBLEM, w, x, y, rows)
    assert float(moment.notes[1].train_loss) == pytest.approx(np.mean(losses), rel=1e-12)


@pytest.mark.parametrize("kind", [FedAvg, FedProx])
def test_an_epoch_on_all_rows_is_a_step(kind):
    one = play(built(kind(epochs=3, step=0.2)), PROBLEM, parts(), ZERO, [(1, 3)])[0]
    other = play(built(kind(steps=3, step=0.2)), PROBLEM, parts(), ZERO, [(1, 3)])[0]
    assert relative(flat(one.after.w), flat(other.after.w)) <= 1e-14


@pytest.mark.parametrize("kind", [FedAvg, FedProx])
def test_a_batch_larger_than_a_client_s_rows_names_both(kind):
    said = (
        r"^batch \(B\) must be at most the 4 rows of client 0, got 5\. Use a smaller batch, or short=True to let such "
    )
    with pytest.raises(InvalidArgument, match=said):
        fp.run(kind(epochs=1, step=0.1, batch=5), PROBLEM, byhand.federation(parts()), rounds=1)
    short = play(built(kind(epochs=2, step=0.2, batch=5, short=True)), PROBLEM, parts(), ZERO, [(0,)])[0]
    whole = play(built(kind(epochs=2, step=0.2)), PROBLEM, parts(), ZERO, [(0,)])[0]
    assert relative(flat(short.after.w), flat(whole.after.w)) <= 1e-14  # four rows in one batch of up to five


@pytest.mark.parametrize("kind", [FedAvg, FedProx])
@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"epochs": 0, "step": 0.1}, r"epochs \(E\) must be an integer of at least 1, got 0\."),
        (
            {"epochs": 2},
            r"step \(γ\) must be a number where epochs is given, got 'lipschitz'\. With epochs the step is",
        ),
        ({"epochs": 2, "step": 0.1, "momentum": 1}, r"momentum \(β\) must be in \[0, 1\), got 1\."),
        ({"epochs": 2, "step": 0.1, "vary": 0}, r"vary must be true or false, got 0\."),
        ({"epochs": 2, "step": 0.1, "short": None}, r"short must be true or false, got None\."),
        (
            {"epochs": 2, "step": 0.1, "steps": 3},
            r"steps must be left out where epochs is given, got 3\. Passes over the rows take the place of steps",
        ),
        ({"momentum": 0.5}, r"momentum must be left out without epochs, got 0\.5\. Give epochs=E\."),
        ({"vary": True}, r"vary must be left out without epochs, got True\. Give epochs=E\."),
        ({"short": True}, r"short must be left out without epochs, got True\. Give epochs=E\."),
    ],
    ids=str,
)
def test_bad_settings_of_epochs(kind, settings, said):
    with pytest.raises(InvalidArgument, match=f"^{said}"):
        kind(**settings)


@pytest.mark.parametrize("kind", [FedAvg, FedProx])
def test_a_batch_of_more_rows_than_any_client_has_is_refused(kind):
    """Drawn with replacement it may have more than some."""
    federation = fp.data.synthetic(rows=20, features=2).split(how="sizes", sizes=[5, 15])
    said = r"batch \(B\) must be at most the 15 rows of the largest client, got 16\. Leave it out"
    with pytest.raises(InvalidArgument, match=said):
        fp.Experiment(kind(steps=1, step=0.1, batch=16), fp.Logistic(), federation)
    fp.Experiment(kind(steps=1, step=0.1, batch=15), fp.Logistic(), federation)
