"""Mini-batch SSCA for data split by features, its messages, and what they tell."""

from __future__ import annotations

import itertools
import math

import byhand
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.sparse
from byhand import built, flat, key_of, parts, play, relative, rows_of_three_classes, smallest, vector
from helpers_experiment import same_bits

import fedpact as fp
from fedpact import ClientLoss, Constrained, Gap, Loss, Misses, Norm1, Norm2, PerRow
from fedpact.algorithms.vertical_ssca import VerticalSSCA
from fedpact.core import sparse as sparse_rows
from fedpact.core import vertical
from fedpact.core.errors import InvalidArgument
from fedpact.core.keys import Purpose
from fedpact.core.vector import Vector
from fedpact.core.vertical import COALITIONS, Layout, Split, Traffic, disclosure, exchange, masked, solvable, traffic
from fedpact.problems.vertical import as_vertical, exchanged

P, H, L, N = 10, 3, 3, 12
NETWORK = fp.TwoLayer(P, H, L, activation="swish", bias=False, start=0.5, mean=0.0, std=1.0)


def layout(blocks, closer=0):
    return Layout(tuple(map(tuple, blocks)), tuple(map(str, range(len(blocks)))), closer)


LAYOUTS = {
    "2": layout([range(6), range(6, 10)], 1),
    "4": layout([range(3), range(3, 5), range(5, 8), range(8, 10)]),
    "10": layout([[p] for p in range(10)], 7),
    "scattered": layout([[9, 0, 4], [7, 2, 1, 3], [5, 8, 6]], 2),
}


def records(seed=3):
    rng = np.random.default_rng(seed)
    return rng.normal(size=(N, P)), rng.integers(0, L, N).astype(float)


def start(seed=4):
    rng = np.random.default_rng(seed)
    first, second = rng.uniform(-0.5, 0.5, (P, H)), rng.uniform(-0.5, 0.5, (H, L))
    return Vector({"hidden": {"w": jnp.asarray(first)}, "output": {"w": jnp.asarray(second)}})


def both(w):
    return np.concatenate([np.asarray(w.tree["hidden"]["w"]).ravel(), np.asarray(w.tree["output"]["w"]).ravel()])


# The centralised computation, in NumPy


def central(w, x, y):
    """The mean cross-entropy of softmax(W_2 S(W_1 x)), its gradient, and δ = ∂F/∂(x W_1)."""
    first, second = w[: P * H].reshape(P, H), w[P * H :].reshape(H, L)
    z = x @ first
    s = 1 / (1 + np.exp(-z))
    q = np.exp(z * s @ second)
    q /= q.sum(axis=1, keepdims=True)
    right = np.eye(L)[y.astype(int)]
    out = (q - right) / len(y)
    delta = (out @ second.T) * (s + z * s * (1 - s))
    value = -np.mean(np.log(np.sum(right * q, axis=1)))
    return value, np.concatenate([(x.T @ delta).ravel(), ((z * s).T @ out).ravel()]), delta


def batch_of(t, size):
    """The records with the largest uniform numbers of (seed 0, round, client 0, LOCAL)."""
    numbers = np.asarray(jax.random.uniform(key_of(0, t, 0)(Purpose.LOCAL), (N,), jnp.float32))
    return np.argsort(-numbers)[:size]


def central_rounds(settings, rounds, limit=None):
    """Algorithm 3, or 4 for min ‖ω‖² s.t. F ≤ limit by Lemma 1, on all columns at once: ω and ν after every round."""
    x, y = records()
    w, b, a, kappa, tau, out = both(start()), 0.0, 0.0, 0.0, settings.tau, []
    for t in range(rounds):
        rho = min(1.0, settings.rho / (t + 1) ** settings.rho_power)
        gamma = min(1.0, settings.gamma / (t + 1) ** settings.gamma_power)
        rows = batch_of(t, settings.batch)
        v, g, _ = central(w, x[rows], y[rows])
        b = (1 - rho) * b + rho * (v - g @ w + tau * w @ w)
        a = (1 - rho) * a + rho * (g - 2 * tau * w)
        kappa = (1 - rho) * kappa + rho
        nu, omega = 0.0, -a / kappa / (2 * tau)
        if limit is not None:
            q, gap = a @ a / kappa**2, b / kappa - limit
            room = q - 4 * tau * gap
            nu = min(max((math.sqrt(q / room) - 1) / tau, 0), settings.penalty) if room > 0 else settings.penalty
            omega = -nu * a / kappa / (2 * (1 + nu * tau))
        w = (1 - gamma) * w + gamma * omega
        out.append((w, nu))
    return out


# (a) and (c): the centralised computation, however the columns are split


@pytest.mark.parametrize("name", ["2", "10", *(pytest.param(k, marks=pytest.mark.drill) for k in ("4", "scattered"))])
def test_the_trajectory_is_the_centralised_computation_s(name):
    """Of the same batches, to the rounding of the lattice."""
    s = VerticalSSCA(batch=5, tau=0.3)
    algorithm = built(s, NETWORK, LAYOUTS[name])
    moments = play(algorithm, NETWORK, [records()], start(), [[0]] * 4, compiled=True)
    for moment, (w, _) in zip(moments, central_rounds(s, 4), strict=True):
        assert relative(both(moment.after.w), w) <= 1e-10
        assert float(moment.notes[0].gradients) == pytest.approx(5 / 12)
    x, y = records()
    rows = batch_of(0, 5)
    value, gradient, _ = central(both(start()), x[rows], y[rows])
    assert float(moments[0].notes[0].train_loss) == pytest.approx(value, rel=1e-10)
    assert relative(both(Vector(jax.tree.map(lambda g: g[0], moments[0].uploads[0].gradients.tree))), gradient) <= 1e-11


def test_the_constrained_trajectory_is_the_centralised_computation_s():
    s = VerticalSSCA(batch=5, tau=0.3, penalty=50.0)
    problem = Constrained(NETWORK, minimize=Norm2(), subject_to=[Loss() <= 1.0])
    algorithm = built(s, problem, LAYOUTS["scattered"])
    moments = play(algorithm, problem, [records()], start(), [[0]] * 6, compiled=True)
    expected = central_rounds(s, 6, limit=1.0)
    for moment, (w, nu) in zip(moments, expected, strict=True):
        assert relative(both(moment.after.w), w) <= 1e-9
        assert float(moment.info.multiplier_constraint_1) == pytest.approx(nu, rel=1e-8)
    assert any(0 < nu < 50 for _, nu in expected), "the case must meet its limit"


def test_who_holds_what_and_who_closes_changes_no_bit():
    """Sums on the lattice are exact, in any order; the values are the centralised ones. A closer may have no column."""
    x, y = records()
    batch, split = byhand.batch(x, y), Split.of(NETWORK)
    close = lambda v, b: jnp.mean(split.closing(H).losses(v, b))[None]
    told = []
    for blocks, closer in (
        ([[9, 0, 4], [7, 2, 1, 3], [5, 8, 6]], 0),
        ([[5, 8, 6], [9, 0, 4], [7, 2, 1, 3]], 1),
        ([[5, 8, 6], [9, 0, 4], [], [7, 2, 1, 3]], 2),
    ):
        seen = layout(blocks, closer)
        told.append(jax.jit(lambda w, seen=seen: exchange(seen, split, w, batch, close))(start()))
    for other in told[1:]:
        assert jax.tree.all(jax.tree.map(lambda a, b: bool(jnp.all(a == b)), other, told[0]))
    value, gradient, _ = central(both(start()), x, y)
    assert float(told[0][0][0]) == pytest.approx(value, rel=1e-11)
    assert relative(both(Vector(jax.tree.map(lambda g: g[0], told[0][1].tree))), gradient) <= 1e-11


def test_pixels_are_scaled_by_each_party_as_by_the_model():
    x = np.random.default_rng(0).integers(0, 256, (N, P)).astype(np.uint8)
    model = fp.TwoLayer(P, H, L, activation="swish", mean=0.3, std=0.7)
    batch = byhand.batch(np.zeros((N, P)), records()[1])._replace(x=jnp.asarray(x))
    split = Split.of(model)
    w = model.init(P, np.float64, jax.random.key(0))
    close = lambda v, b: jnp.mean(split.closing(H).losses(v, b))[None]
    values, gradients = jax.jit(lambda w: exchange(LAYOUTS["4"], split, w, batch, close))(w)
    expected, slope = jax.jit(model.value_and_gradient)(w, batch)
    assert float(values[0]) == pytest.approx(float(expected), rel=1e-11)
    for got, wanted in zip(jax.tree.leaves(gradients), jax.tree.leaves(slope), strict=True):
        assert relative(got[0], wanted) <= 1e-11


# (b) a certificate


def test_the_least_norm_below_a_loss_is_an_independent_solver_s():
    """Algorithm 4 on thirty records of four columns at three parties; 1/ν = λ (Theorem 5)."""
    x, y = (np.concatenate([part[k] for part in rows_of_three_classes()]) for k in (0, 1))
    federation = fp.data.from_arrays(x, y).split_features(blocks=[[3], [0, 1], [2]])
    problem = Constrained(fp.Softmax(inputs=4, classes=3), minimize=Norm2(), subject_to=[Loss() <= 0.9])
    settings = VerticalSSCA(tau=0.7, rho=1.0, rho_power=0.0, gamma=0.9, gamma_power=0.0)
    run = fp.run(settings, problem, federation, rounds=250, precision="double")
    lam, expected = smallest(0.9)
    assert relative(np.asarray(run.model.w.tree["w"]).ravel(), expected) <= 1e-6
    assert run.history.last("objective") == pytest.approx(expected @ expected, rel=1e-6)
    assert abs(run.history.last("constraint_1")) <= 1e-7
    assert 1 / run.history.last("multiplier_constraint_1") == pytest.approx(lam, rel=1e-6)
    assert run.history.last("kkt") <= 1e-5
    assert not [said for said in run.notices if "limit" in said]


# (d) degenerate cases


@pytest.mark.parametrize("sparse", [False, True])
def test_the_messages_add_up_to_what_one_client_of_all_columns_has(sparse):
    """A model with an intercept, a rate over records of one class and a function of one's own; weights of all kinds."""
    curve = PerRow(lambda w, batch: jnp.tanh(batch.x @ w.tree["w"] + w.tree["b"]))
    limited = [Misses() <= 0.1, Loss() + 0.5 * curve <= 0.2, Norm2() <= 3.0]
    task = Constrained(fp.Logistic(l2=0, intercept=True), minimize=Loss() + 0.1 * Norm1(), subject_to=limited)
    (x, y), w = parts()[3], vector([0.1, -0.2, 0.3, 0.4], True)
    batch, tally = byhand.batch(x, y), jnp.asarray([12, 5])
    batch = batch._replace(weight=jnp.asarray(np.tile([1.5, 0.0, 1.0], 4)))
    apart = batch._replace(x=one_sparse(x)) if sparse else batch
    got = jax.jit(lambda w: exchanged(layout([[2], [0, 1]]), Split.of(task.model), task, w, apart, tally))(w)
    expected = jax.jit(lambda w: task.values_and_gradients(None, w, batch, tally))(w)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        assert a.shape == b.shape
        assert relative(a, b) <= 1e-11


def one_sparse(x):
    """As the engine keeps the rows of one client."""
    return jax.tree.map(lambda a: jnp.asarray(a[0]), sparse_rows.stack([scipy.sparse.csr_array(x)], len(x), np.float64))


def test_a_function_of_one_s_own_sees_the_sums():
    """tanh²(x w) through batch.x @ w; what looks past the sums is refused."""
    (x, y), model = parts()[3], fp.Logistic(l2=0)
    federation = fp.data.from_arrays(x, y).split_features(clients=3)
    fine = PerRow(lambda w, batch: jnp.tanh(batch.x @ w.tree["w"]) ** 2, title="tanh")
    Constrained(model, subject_to=[fine <= 0.1]).check(federation)
    for function in (
        lambda w, batch: batch.x[:, 1] * w.tree["w"][0],
        lambda w, batch: jnp.sum(w.tree["w"] ** 2) + 0 * batch.y,
        lambda w, batch: batch.x @ w.tree["w"][:3] + w.tree["w"][2],
    ):
        problem = Constrained(model, subject_to=[PerRow(function, title="own") <= 0.1])
        sentence = (
            r"^function of own must be one of the features' sums for feature-split data.*batch\.x @ w\.tree\['w'\] a"
        )
        with pytest.raises(InvalidArgument, match=sentence):
            problem.check(federation)


# Masks and the lattice


@pytest.mark.parametrize("clients", [2, 5])
def test_masks_cancel_to_the_bit_and_hide(clients):
    """Under masks every byte of every message is as likely as any other, though the sums are small numbers."""
    rng = np.random.default_rng(clients)
    partials = [vertical.to_lattice(jnp.asarray(rng.normal(size=(200, 20))), clients)[0] for _ in range(clients)]
    hidden = masked(partials, jax.random.key(0))
    plain = vertical.total(partials, np.float64)
    np.testing.assert_array_equal(vertical.total(hidden, np.float64), plain)
    assert not np.array_equal(vertical.total([*hidden[:-1], partials[-1]], np.float64), plain)
    for i, message in enumerate(hidden):
        assert message.dtype == np.uint64
        counts = np.bincount(np.asarray(message).view(np.uint8).ravel(), minlength=256)
        expected = 200 * 20 * 8 / 256
        assert np.sum((counts - expected) ** 2 / expected) < 255 + 6 * math.sqrt(2 * 255)
        bare = np.bincount(np.asarray(partials[i]).view(np.uint8).ravel(), minlength=256)
        assert np.sum((bare - expected) ** 2 / expected) > 1e4, "without masks it shows"
    both_ = np.corrcoef(np.asarray(hidden[0], float).ravel(), np.asarray(partials[0], float).ravel())
    assert abs(both_[0, 1]) < 5 / math.sqrt(4000)


def test_the_lattice_is_fine_and_wide():
    """Steps of 2⁻⁴⁰: half a step of error a client; sizes up to 2²²/I, and sums of negative numbers."""
    h = [jnp.asarray([[1e-3, -5.25]]), jnp.asarray([[-2e-3, 3.5]]), jnp.asarray([[4e-3, -1e6]])]
    steps = [vertical.to_lattice(part, 3) for part in h]
    assert all(bool(fits) for _, fits in steps)
    np.testing.assert_allclose(vertical.total([p for p, _ in steps], np.float64), sum(h), atol=1.5 * 2**-40)
    assert not bool(vertical.to_lattice(jnp.asarray([2.0**22 / 3 + 1]), 3)[1])
    assert bool(vertical.to_lattice(jnp.asarray([2.0**22 / 3 - 1]), 3)[1])
    assert not bool(vertical.to_lattice(jnp.asarray([0.0, jnp.nan]), 3)[1])
    assert not bool(vertical.to_lattice(jnp.asarray([-jnp.inf]), 3)[1])


@pytest.mark.parametrize("size", [1e9, 1e200])
def test_sums_beyond_the_lattice_stop_the_run(size):
    """w = 0 is fine; the first step makes sums of about size²."""
    x = np.array([[1.0, 0.5], [-1.0, 2.0], [0.3, 1.0]]) * [size, 1.0]
    federation = fp.data.from_arrays(x, np.array([1.0, 0.0, 1.0])).split_features(clients=2)
    run = fp.run(VerticalSSCA(), fp.Logistic(l2=0), federation, rounds=3)
    assert run.outcome_kind is fp.stop.Outcome.NONFINITE
    assert run.where.startswith("round 0, ")
    (said,) = [text for text in run.notices if text.startswith("The run stopped")]
    assert "Partial sums must stay below 2,097,152 in size to be added up under masks: scale the columns." in said
    assert np.all(flat(run.model.w) == 0), "the last good model"


# Messages: their types, and their bytes


def test_traffic_in_round_numbers():
    """Three clients, P = 10, H = 3, B = 5, L = 3, doubles, K = 2.

    Tasks: 3·5 numbers of records, ω_1 of 10·3 and ω_0 of 3·3 doubles: 8·(15 + 30 + 9) = 432 down
    Partial: 8·15 + 60 = 180, Feedback: 2·8·15 + 60 = 300, of two clients, through the server: 2·480 = 960 both ways
    Closed: 2·8·(1 + 9) = 160 up;  Block: 2·8·30 = 480 up
    """
    split = Split.of(NETWORK)
    given = (LAYOUTS["scattered"], split, start(), 5, 2)
    assert traffic(*given, "two-step") == Traffic(up=960 + 160 + 480, down=432 + 960)
    rows = 5 * (10 + 3 * 3 + 1) * 8  # x_i, h_i and the labels
    assert traffic(*given, "one-step") == Traffic(up=rows, down=8 * (15 + 30))
    single = jax.tree.map(lambda a: a.astype(jnp.float32), start())
    halves = traffic(LAYOUTS["scattered"], split, single, 5, 2, "two-step")
    assert halves == Traffic(up=2 * (180 + 180) + 80 + 240, down=8 * 15 + 4 * 39 + 2 * 360)


def test_bytes_are_counted_as_told():
    algorithm = built(VerticalSSCA(batch=5), NETWORK, LAYOUTS["scattered"])
    assert algorithm.wire(start(), 12) == traffic(LAYOUTS["scattered"], Split.of(NETWORK), start(), 5, 1, "two-step")
    whole = built(VerticalSSCA(), NETWORK, LAYOUTS["scattered"])
    assert whole.wire(start(), 12) == traffic(LAYOUTS["scattered"], Split.of(NETWORK), start(), 12, 1, "two-step")


# What the messages tell: the views' equations, written out


def determined(sizes, closer, coalition, batch, width, functions, rounds=1):
    """How many of the others' raw numbers the linear equations in a coalition's view determine, and how many there are.

    Client i knows x_i, ω_i, its block δᵀx_i and δ; the closer Σ x_i ω_i too; the server every ω_i and every block. An
    equation counts where its coefficients are known: δᵀx_j with δ and j's block, Σ x_j ω_j with the sum and every ω_j.
    Rounds with the same records have other δ and ω.
    """
    rng = np.random.default_rng(0)
    clients = [k for k in coalition if k != "server"]
    others = [j for j in range(len(sizes)) if j not in clients]
    unknown = sum(sizes[j] for j in others)
    delta = rng.normal(size=(rounds * functions * width, batch))
    weights = rng.normal(size=(unknown, rounds * width))
    equations = [np.zeros((0, batch * unknown))]  # of x column by column
    if "server" in coalition and clients:
        equations.append(np.kron(np.eye(unknown), delta))
    if "server" in coalition and closer in clients:
        equations.append(np.kron(weights.T, np.eye(batch)))
    matrix = np.concatenate(equations)
    rank = np.linalg.matrix_rank(matrix) if len(matrix) else 0
    units = np.eye(batch * unknown)
    more = [np.linalg.matrix_rank(np.vstack([matrix, unit])) for unit in units]
    return sum(r == rank for r in more), batch * unknown


def words(coalition, closer):
    """As the report calls them."""
    one = lambda k: "the server" if k == "server" else "the closer" if k == closer else "another client"
    if len(coalition) == 2 and "server" not in coalition and closer not in coalition:
        return "two other clients"
    return " and ".join(one(k) for k in sorted(coalition, key=lambda k: (k != "server", k != closer)))


@pytest.mark.parametrize(("batch", "functions"), [(2, 1), (3, 1), (4, 2), (5, 2)])
@pytest.mark.parametrize("sizes", [(2, 2), (1, 3), (0, 3), (3, 1, 1), (1, 2, 1), (0, 1, 2), (1, 1, 1, 1)], ids=str)
def test_the_report_tells_what_every_party_and_pair_can_solve_for(sizes, batch, functions):
    """Two sums a record: B at and above K·H, the others' columns up to and above H."""
    width, closer = 2, 0
    columns = np.split(np.arange(sum(sizes)), np.cumsum(sizes)[:-1])
    shown = disclosure(layout([c.tolist() for c in columns], closer), width, batch, functions, "two-step")
    (sentence,), table = shown
    told = sentence.partition("determined for ")[2].partition("; not for ")
    yes, no = told[0].split("; "), told[2].partition(". ")[0].split("; ")
    everyone = ["server", *range(len(sizes))]
    seen = set()
    for coalition in [(k,) for k in everyone] + list(itertools.combinations(everyone, 2)):
        found, unknown = determined(sizes, closer, coalition, batch, width, functions)
        if unknown == 0:
            continue
        who = words(coalition, closer)
        seen.add(who)
        assert found in (0, unknown), "all or nothing"
        assert (who in yes) == (found == unknown), (who, found, sentence)
        assert (who in no) == (found < unknown), (who, found, sentence)
    assert seen == {who for who in (*yes, *no) if who != "nobody"}
    assert not {"the server", "the closer", "another client"} & set(yes), "nobody alone"
    assert seen <= set(COALITIONS)
    column = {row["who"]: row["others' raw features, by linear equations"] for row in table}
    assert set(column) == seen
    assert all(answer.startswith("yes" if who in yes else "no") for who, answer in column.items())
    assert ("span" in column.get("the server", "")) == ("the server" in column and batch <= functions * width)
    assert {row["the labels"] for row in table if "closer" in row["who"]} <= {"has them"}
    assert all(
        row["the labels"] == "by δ" for row in table if "other client" in row["who"] and "closer" not in row["who"]
    )


@pytest.mark.parametrize("rounds", [1, 2, 3, 4])
@pytest.mark.parametrize(("records", "columns"), [(4, 7), (7, 3), (9, 5)])
def test_rounds_with_the_same_records_add_equations(records, columns, rounds):
    """Two sums a record, one function: by gradients once 2 rounds reach the records, by sums once the columns."""
    for coalition, equations in ((("server", 0), ("gradients", "sums")), (("server", 1), ("gradients",))):
        sizes = (1, columns) if 0 in coalition else (columns, 1)
        found, unknown = determined(sizes, 0, coalition, records, 2, 1, rounds)
        assert (found == unknown) == solvable(records, 2, 1, unknown // records, equations, rounds)


def test_what_rounds_add_to_a_batch_s_equations_is_told():
    """Ten columns at the others, two sums a record, three functions; B = 7 is beyond 3·2."""
    three = layout([[0], list(range(1, 6)), list(range(6, 11))])
    rows = {
        row["who"]: row["others' raw features, by linear equations"]
        for row in disclosure(three, 2, 7, 3, "two-step").table
    }
    assert rows["the server and the closer"] == (
        "not in one round; yes once rounds × 6 reach the records, or of a record that was in 5 batches"
    )
    assert rows["the server and another client"] == "not in one round; yes once rounds × 6 reach the records"
    assert rows["the closer and another client"] == "no"


@pytest.mark.parametrize("rounds", [2, 3])
def test_batches_that_overlap_add_up_to_all_records(rounds):
    """Five records in batches of three, one sum a record: a round has one equation a column, five are wanted."""
    rng = np.random.default_rng(rounds)
    for many in (rounds, 5):
        delta = np.zeros((many, 5))
        for t in range(many):
            delta[t, rng.choice(5, 3, replace=False) if t < 4 else [0, 1, 2]] = rng.normal(size=3)
        assert (np.linalg.matrix_rank(delta) == 5) == solvable(5, 1, 1, 9, ("gradients",), many)


def test_all_records_in_every_round_is_told():
    two = layout([[0, 1], [2, 3, 4]])
    table = disclosure(two, 1, None, 2, "two-step").table
    rows = {row["who"]: row["others' raw features, by linear equations"] for row in table}
    assert rows["the server and the closer"] == (
        "yes, once rounds × 2 reach the records, or rounds × 1 the others' 3 columns"
    )
    assert rows["the server and another client"] == "yes, once rounds × 2 reach the records"
    assert rows["the server"] == "no"


def test_what_is_said_to_be_solvable_is_solved_from_a_round_s_messages():
    """The gradient blocks of a round, and δ: with B ≤ H the server and any client read the rows, above it not."""
    x, y = records()
    for size in (3, 4):
        rows = batch_of(0, size)
        _, gradient, delta = central(both(start()), x[rows], y[rows])
        blocks = gradient[: P * H].reshape(P, H)  # xᵀδ
        guess = np.linalg.lstsq(delta.T, blocks.T, rcond=None)[0]
        assert (np.max(np.abs(guess - x[rows])) < 1e-6) == (size <= H) == solvable(size, H, 1, 6, ("gradients",))


def test_sums_with_every_weight_give_the_features_of_few_columns():
    assert solvable(100, 3, 1, 3, ("sums",))
    assert not solvable(100, 3, 1, 4, ("sums",))
    assert not solvable(4, 3, 1, 4, ("gradients", "sums"))
    assert solvable(6, 3, 2, 4, ("gradients", "sums"))
    assert not solvable(1, 9, 9, 1, ())


def test_the_report_says_it():
    """Also of all records, and of rows given away."""
    x, y = records()
    federation = fp.data.from_arrays(x, y).split_features(clients=4)
    settings = VerticalSSCA(batch=5, collection="one-step", reveal_rows=True)
    for s, words_ in (
        (VerticalSSCA(batch=5), "raw features of a batch (B = 5, 3 sums a record)"),
        (VerticalSSCA(batch=5), "δ tells every client the labels."),
        (VerticalSSCA(), "Every round uses all records: by linear equations nobody alone determines raw features"),
        (settings, "The server receives every client's raw rows of the batch"),
    ):
        algorithm = built(s, NETWORK, federation.layout)
        assert any(words_ in said for said in algorithm.notices)
        assert len(algorithm.tables["What parties can solve for, alone and in pairs"]) == (1 if s == settings else 7)


@pytest.mark.drill
def test_streams_are_read_in_order():
    """Five of twelve records a round: 0 to 4, 5 to 9, 10 to 2. The values sent are the loss on those."""
    x, y = records()
    algorithm = built(VerticalSSCA(batch=5, order="stream"), NETWORK, LAYOUTS["2"])
    whole, w = byhand.batch(x, y, 0), start()
    state, hello = algorithm.join(w, whole, None)
    msg = algorithm.broadcast(algorithm.init(w, jax.tree.map(lambda a: a[None], hello)))
    for t, rows in enumerate(([0, 1, 2, 3, 4], [5, 6, 7, 8, 9], [10, 11, 0, 1, 2])):
        state, upload, _ = algorithm.client_step(msg, state, whole, None, key_of(0, t, 0))
        expected, *_ = central(both(w), x[rows], y[rows])
        assert float(upload.values[0]) == pytest.approx(float(expected), rel=1e-11)


# (e) resuming


@pytest.mark.drill
def test_resumed_is_uninterrupted(tmp_path, monkeypatch):
    monkeypatch.setattr("fedpact.report.html.plots_section", lambda *_: "")
    case = byhand.case(True)
    train = lambda folder, rounds, **more: fp.run(
        VerticalSSCA(batch=5, tau=0.5), case.problem, case.federation, rounds=rounds, folder=tmp_path / folder,
        name="x", **more
    )  # fmt: skip
    train("whole", 3)
    train("cut", 2)
    assert train("cut", 3, resume=True).history.rounds == 3
    same_bits(tmp_path / "cut", tmp_path / "whole")


# (f) bad arguments


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"batch": 0}, r"^batch \(B\) must be an integer of at least 1, got 0\. Leave it out for all records\."),
        (
            {"batch": 1},
            r"^batch \(B\) must be at least 2, got 1\. From one record's gradients its features can be read",
        ),
        ({"tau": -1}, r"^tau \(τ\) must be above 0, got -1\."),
        ({"growth": 0}, r"^growth \(c_\{j\+1\}/c_j\) must be at least 1, got 0\."),
        ({"reveal_rows": 1}, r"^reveal_rows must be true or false, got 1\."),
        (
            {"collection": "one-step"},
            r"^collection must be \"two-step\", got 'one-step'\. It sends every raw row of the batch to the server\. "
            r"To accept that, set reveal_rows=True\.",
        ),
    ],
    ids=str,
)
def test_bad_settings_are_refused(settings, message):
    with pytest.raises(InvalidArgument, match=message):
        VerticalSSCA(**settings)


@pytest.mark.parametrize(
    ("problem", "message"),
    [
        (fp.Logistic(), r"^l2 of Logistic must be 0 for feature-split data, got 0\.001\. Write Constrained\(model"),
        (fp.CNN1(), r"^problem must be one whose first step is a product with the features, got CNN1\. Use TwoLayer"),
        (
            Constrained(fp.Logistic(l2=0), subject_to=[Gap(column=0) <= 0.1]),
            r"^functions must be of Loss, Misses, PerRow and norms for feature-split data, got Gap\(.*nobody who",
        ),
        (
            Constrained(fp.Logistic(l2=0), subject_to=[ClientLoss() <= 0.1]),
            r"^functions must be of Loss, .*, got ClientLoss\(\): no client has rows\. Leave it out, or split the",
        ),
        (
            Constrained(fp.Logistic(l2=0), minimize=Norm1(), subject_to=[Loss() <= 1.0]),
            r"^minimize must be a function with curvature, got .*Give the objective a smooth term",
        ),
    ],
)
def test_problems_that_do_not_fit_are_refused(problem, message):
    with pytest.raises(InvalidArgument, match=message):
        VerticalSSCA().build(problem, LAYOUTS["2"], 1.0)


def test_rows_and_columns_are_not_mixed_up():
    x, y = parts()[3]
    dataset, model = fp.data.from_arrays(x, y), fp.Logistic(l2=0)
    with pytest.raises(
        InvalidArgument, match=r"^federation must be split by features for vertical_ssca, got 'Federation"
    ):
        fp.run(VerticalSSCA(), model, dataset.split(clients=3), rounds=1)
    with pytest.raises(
        InvalidArgument, match=r"^federation must be split by rows for ssca, got 'VerticalFederation'\. U"
    ):
        fp.run(fp.SSCA(), model, dataset.split_features(clients=3), rounds=1)
    with pytest.raises(
        InvalidArgument, match=r"^batch \(B\) must be at most the 12 records, got 13\. Use a smaller batch"
    ):
        fp.run(VerticalSSCA(batch=13), model, dataset.split_features(clients=3), rounds=1)


def test_constraints_are_not_left_out_in_silence():
    x, y = parts()[3]
    problem = Constrained(fp.Logistic(l2=0), subject_to=[Norm2() <= 1.0])
    assert as_vertical(problem) is problem
    for settings, split in (
        (fp.FedAvg(), fp.data.from_arrays(x, y).split(clients=2)),
        (fp.LocalSGD(), fp.data.from_arrays(x, y).split(clients=2)),
        (fp.VerticalSGD(), fp.data.from_arrays(x, y).split_features(clients=2)),
    ):
        sentence = rf"^algorithm must be one that keeps constraints, got '{settings.name}'\. Leave subject_to empty, or"
        with pytest.raises(InvalidArgument, match=sentence):
            fp.run(settings, problem, split, rounds=1)
