"""Clipped gradients against a slow version that takes one row after the other, and the bound that privacy rests on."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.sparse

import fedpact as fp
from fedpact.core import sparse
from fedpact.core.contract import Batch
from fedpact.core.errors import InvalidArgument
from fedpact.core.vector import Vector
from fedpact.problems import clipping
from fedpact.problems.clipping import check_clippable, clipped_rows, clipped_sum, public_gradient

INF = float("inf")
D, N, CLASSES = 9, 6, 3


@pytest.fixture(autouse=True)
def operation_by_operation():
    """Not here: loops over rows are slow without compiled programs."""
    return


@dataclass(frozen=True)
class Huber:
    """A problem of the user's own, with a regulariser that it may or may not own up to."""

    delta: float = 0.5
    l2: float = 0.3
    classifies = False

    def check(self, federation):
        """Anything will do."""

    def init(self, features, dtype):
        return Vector({"w": jnp.zeros(features, dtype)})

    def losses(self, w, batch):
        r = jnp.abs(self.predict(w, batch.x) - batch.y)
        return jnp.where(r <= self.delta, r**2 / 2, self.delta * (r - self.delta / 2))

    def value_and_gradient(self, w, batch):
        mean = lambda w: jnp.sum(batch.weight * self.losses(w, batch)) / batch.rows
        return jax.value_and_grad(lambda w: mean(w) + self.l2 / 2 * w.norm2())(w)

    def gradient(self, w, batch):
        return self.value_and_gradient(w, batch)[1]

    def counts(self, w, batch):
        return {"rows": batch.rows}

    def predict(self, w, x):
        return x @ w.tree["w"]


class Owning(Huber):
    def public_gradient(self, w, rows):
        return self.l2 * w


def scores_of(tree, x):
    return jnp.tanh(x.reshape(len(x), -1) @ tree["a"]) @ tree["c"]


OWN = fp.Network(
    scores_of, lambda key: {"a": jnp.ones((N, 4)), "c": jnp.ones((4, CLASSES))}, shape=(2, 3), classes=CLASSES
)
LOGISTIC, LEAST = fp.Logistic(l2=0.7), fp.LeastSquares(l2=0.7, divide=False, intercept=True)
SOFTMAX, NETWORK = fp.Softmax(N, CLASSES, bias=True, mean=0.3), fp.TwoLayer(N, 4, CLASSES)
LINEAR = [LOGISTIC, fp.problems.NonconvexLogistic(beta=0.4, intercept=True), LEAST]
DENSE = [SOFTMAX, NETWORK, fp.TwoLayer(N, 4, CLASSES, activation="swish", bias=False, softmax=True)]
PROBLEMS = [*LINEAR, *DENSE, OWN, Owning()]
MORE = [fp.Logistic(l2=0.7, divide=False, intercept=True), fp.LeastSquares(l2=0.7), fp.Softmax(N, CLASSES)]


def label(problem):
    flags = [f for f in ("intercept", "bias", "softmax", "divide") if getattr(problem, f, False) is True]
    return "-".join([type(problem).__name__, *flags])


def some(first, then):
    """The first ones always, the others in drills."""
    drills = [pytest.param(problem, marks=pytest.mark.drill) for problem in then]
    return pytest.mark.parametrize("problem", [*first, *drills], ids=label)


each = some(PROBLEMS, MORE)
REST = [*MORE, SOFTMAX, LINEAR[1], DENSE[2], OWN]
few = some([LEAST, NETWORK, Owning()], [LOGISTIC, *REST])
both = pytest.mark.parametrize(
    ("problem", "norm"),
    [(p, 2) for p in PROBLEMS]
    + [(p, 1) for p in (LEAST, NETWORK, Owning())]
    + [pytest.param(p, n, marks=pytest.mark.drill) for p in (LOGISTIC, *REST) for n in ((1, 2) if p in MORE else (1,))],
    ids=lambda value: str(value) if isinstance(value, int) else label(value),
)


def is_network(problem):
    return isinstance(problem, fp.problems.network.Classifier)


@cache
def shapes(problem, features=N):
    return jax.eval_shape(lambda: problem.init(features, np.float64))


def drawn(problem, seed=0, dtype=np.float64, scale=0.8, features=N):
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda leaf: rng.uniform(-scale, scale, leaf.shape).astype(dtype), shapes(problem, features))


def rows(problem, seed=0, d=D, padding=2, dtype=np.float64, pixels=False):
    """Rows of unequal size and weight, some of them padding that is not zero."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(d + padding, N)) * rng.uniform(0.1, 4, (d + padding, 1))
    x = rng.integers(0, 256, x.shape).astype(np.uint8) if pixels else x.astype(dtype)
    y = rng.integers(0, CLASSES if is_network(problem) else 2, d + padding)
    weight = np.concatenate([rng.choice([1.0, 1.0, 2.5], d), np.zeros(padding)])
    return Batch(jnp.asarray(x), jnp.asarray(y, dtype), jnp.asarray(weight, dtype), jnp.asarray(0, jnp.int32))


# The slow version


def row_loss(problem, tree, x, y):
    """ℓ_j by its definition, where it can be written down."""
    if isinstance(problem, (fp.Logistic, fp.problems.NonconvexLogistic)):
        z = jnp.dot(x, tree["w"]) + tree.get("b", 0.0)
        return jnp.logaddexp(0, z) - y * z
    if isinstance(problem, fp.LeastSquares):
        return (jnp.dot(x, tree["w"]) + tree.get("b", 0.0) - y) ** 2 / 2
    if isinstance(problem, (fp.Softmax, fp.TwoLayer)):
        x = (x.astype(float) / 255 - problem.mean) / problem.std if x.dtype == jnp.uint8 else x
        z = x
        if isinstance(problem, fp.TwoLayer):
            z = jnp.dot(x, tree["hidden"]["w"]) + tree["hidden"].get("b", 0.0)
            z = jnp.maximum(z, 0) if problem.activation == "relu" else z / (1 + jnp.exp(-z))
            tree = tree["output"]
        z = jnp.dot(z, tree["w"]) + tree.get("b", 0.0)
        z = jnp.exp(z) / jnp.sum(jnp.exp(z)) if problem.softmax else z
        return jnp.log(jnp.sum(jnp.exp(z))) - z[y.astype(int)]
    alone = Batch(x[None], y[None], jnp.ones(1), jnp.asarray(0))
    return problem.losses(Vector(tree), alone)[0]


@cache
def row_gradient(problem):
    return jax.jit(jax.value_and_grad(lambda tree, x, y: row_loss(problem, tree, x, y)))


def literal(problem, w, batch, clip, norm):
    total, loss = jax.tree.map(lambda a: np.zeros(a.shape), w.tree), 0.0
    for x, y, weight in zip(batch.x, batch.y, np.asarray(batch.weight), strict=True):
        value, g = jax.tree.map(np.asarray, row_gradient(problem)(w.tree, x, y))
        size = np.linalg.norm(np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(g)]), norm)
        factor = min(1.0, clip / size)
        total = jax.tree.map(lambda t, a, s=weight * factor: t + s * a, total, g)
        loss += weight * float(value)
    return total, loss


def same(mine, theirs, rtol=1e-12, atol=1e-13):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=rtol, atol=atol), mine, theirs)


@cache
def compiled(problem, norm, general=False):
    if general:
        return jax.jit(lambda w, batch, clip: clipped_rows(problem, w, batch, clip, norm))
    return jax.jit(lambda w, batch, clip: clipped_sum(problem, w, batch, clip, norm))


@both
def test_the_sum_is_the_one_taken_row_by_row(problem, norm):
    w, batch = drawn(problem), rows(problem)
    for clip in (0.05, 1.0, INF):
        got = compiled(problem, norm)(w, batch, clip)
        total, loss = literal(problem, w, batch, clip, norm)
        same(got.total.tree, total)
        assert float(got.loss) == pytest.approx(loss, rel=1e-12)
        assert int(got.refused) == 0


@some([SOFTMAX], [NETWORK])
def test_pixels_are_divided_and_normalised_first(problem):
    w, batch = drawn(problem), rows(problem, pixels=True)
    got = jax.jit(lambda w, batch: clipped_sum(problem, w, batch, 0.5))(w, batch)
    same(got.total.tree, literal(problem, w, batch, 0.5, 2)[0])


@some([LEAST], [NETWORK, LOGISTIC, *MORE, SOFTMAX])
@pytest.mark.parametrize("norm", [2, pytest.param(1, marks=pytest.mark.drill)])
def test_the_closed_forms_are_the_general_one(problem, norm, monkeypatch):
    """Row by row, and in chunks of which the last is not full."""
    w, batch = drawn(problem), rows(problem)  # 11 of them
    for size in (1, 4):
        monkeypatch.setattr(clipping, "AT_ONCE", size * w.size)
        got = jax.jit(lambda w, batch: clipped_rows(problem, w, batch, 0.6, norm))(w, batch)
        same(got, compiled(problem, norm)(w, batch, 0.6))


@pytest.mark.drill
@pytest.mark.parametrize("norm", [1, 2])
def test_a_convolutional_network_row_by_row(norm):
    problem = fp.CNN1(hidden=4)
    w = drawn(problem, scale=0.1)
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.integers(0, 256, (5, 784)).astype(np.uint8))
    batch = Batch(x, jnp.arange(5.0), jnp.asarray([1.0, 1.0, 2.0, 1.0, 0.0]), jnp.asarray(0, jnp.int32))
    got = compiled(problem, norm)(w, batch, 3.0)
    same(got.total.tree, literal(problem, w, batch, 3.0, norm)[0], rtol=1e-9, atol=1e-12)


@each
def test_rows_and_what_is_public_are_the_whole_gradient(problem):
    """d ∇f_i = Σ_j ∇ℓ_j + d · public, weighted rows and padding included."""
    w, batch = drawn(problem), rows(problem)
    whole = jax.jit(problem.gradient)(w, batch) * batch.rows
    apart = compiled(problem, 2)(w, batch, INF).total + batch.rows * public_gradient(problem, w, batch.rows)
    same(apart.tree, whole.tree)


@some([LEAST], [NETWORK, LOGISTIC, Owning(), *REST])
def test_many_clients_at_once_are_one_after_the_other(problem):
    """Under vmap, one client having a row that is refused."""
    batches = [rows(problem, seed=k) for k in range(3)]
    batches[1] = batches[1]._replace(x=batches[1].x.at[2, 3].set(jnp.nan))
    w = drawn(problem)
    together = jax.tree.map(lambda *a: jnp.stack(a), *batches)
    got = jax.jit(jax.vmap(lambda b: clipped_sum(problem, w, b, 0.7)))(together)
    assert got.refused.tolist() == [0, 1, 0]
    for k, batch in enumerate(batches):
        same(jax.tree.map(lambda a, k=k: a[k], got), compiled(problem, 2)(w, batch, 0.7))


def thin(x):
    stacked = sparse.stack([scipy.sparse.csr_array(np.asarray(x))], len(x), np.float64)
    return jax.tree.map(lambda a: jnp.asarray(a)[0], stacked)


@some([LEAST], [*LINEAR[:2], *MORE[:2]])
@pytest.mark.parametrize("norm", [1, 2])
def test_sparse_rows_are_dense_rows(problem, norm):
    w, batch = drawn(problem), rows(problem)
    x = np.where(np.random.default_rng(3).random(batch.x.shape) < 0.6, batch.x, 0)
    x[4] = 0
    worse = np.where(np.arange(x.size).reshape(x.shape) == np.flatnonzero(x)[3], np.inf, x)
    for values, refused in ((x, 0), (worse, 1)):
        full = compiled(problem, norm)(w, batch._replace(x=jnp.asarray(values)), 0.6)
        assert int(full.refused) == refused
        same(compiled(problem, norm)(w, batch._replace(x=thin(values)), 0.6), full)


def test_sparse_rows_of_a_problem_of_one_s_own():
    w, batch = drawn(Owning()), rows(Owning())
    same(compiled(Owning(), 2)(w, batch._replace(x=thin(batch.x)), 0.2), compiled(Owning(), 2)(w, batch, 0.2))


# The bound


def alone(problem, seed, dtype):
    """One row, from tiny to huge, and parameters likewise."""
    rng = np.random.default_rng(seed)
    big = float(np.finfo(dtype).maxexp) * np.log10(2)
    power = lambda share: 10.0 ** rng.uniform(-share * big, share * big)
    near = rng.random() < 0.5  # of sizes as rows have
    x = rng.normal(size=(1, N)) * (rng.uniform(0, 5) if near else power(0.9))
    x = x * (1 if near else 10.0 ** rng.uniform(-5, 5, N))
    y = rng.integers(0, 2, 1) if near or is_network(problem) else rng.integers(0, 2, 1) * power(0.9)
    if isinstance(problem, (fp.Logistic, fp.problems.NonconvexLogistic)):
        y = rng.integers(0, 2, 1)
    w = drawn(problem, seed, dtype, scale=1.0 if near else power(0.4))
    with np.errstate(over="ignore"):
        return w, Batch(x.astype(dtype), y.astype(dtype), np.ones(1, dtype), np.int32(0))


def sizes(total, norm):
    """Of a sum for every one of several rows, in more digits than it has."""
    leaves = [np.asarray(leaf, np.longdouble) for leaf in jax.tree.leaves(total)]
    power = sum(np.sum((np.abs(a) if norm == 1 else a**2).reshape(len(a), -1), axis=1) for a in leaves)
    return power if norm == 1 else np.sqrt(power)


@few
@pytest.mark.parametrize("dtype", [np.float32, pytest.param(np.float64, marks=pytest.mark.drill)])
def test_one_row_adds_at_most_c(problem, dtype):
    """Never more, to the last bit: over rows and parameters of all sizes, in both norms, for limits of all sizes."""
    cases = [alone(problem, seed, dtype) for seed in range(600)]
    w, batch = jax.tree.map(lambda *a: np.stack(a), *cases)
    clip = 10.0 ** np.random.default_rng(1).uniform(-6, 3, len(cases)).astype(dtype)
    for norm in (1, 2):
        got = jax.vmap(compiled(problem, norm))(w, batch, clip)
        size = sizes(got.total, norm)
        assert np.all(size <= clip)
        assert np.sum(size > clip * (1 - 1e-4)) > 60  # the bound is met, not only kept
        assert np.sum(got.refused) < 400  # not kept by refusing what is large


@pytest.mark.parametrize("norm", [2, pytest.param(1, marks=pytest.mark.drill)])
@pytest.mark.parametrize("general", [False, pytest.param(True, marks=pytest.mark.drill)])
@pytest.mark.parametrize("n", [784, pytest.param(5000, marks=pytest.mark.drill)])
def test_the_bound_holds_for_long_rows(n, norm, general):
    """Where the norm's own rounding would matter: many numbers a row, all of them equal among others."""
    rng = np.random.default_rng(0)
    equal = np.broadcast_to(rng.uniform(0.3, 3, (40, 1, 1)), (40, 1, n))
    x = np.concatenate([equal, 3 * rng.normal(size=(40, 1, n))]).astype(np.float32)
    for problem in (fp.LeastSquares(), fp.TwoLayer(n, 3, 2, mean=0.0, std=1.0)):
        w = drawn(problem, dtype=np.float32, scale=0.1, features=n)
        rows = Batch(x, jnp.ones((80, 1), x.dtype), jnp.ones((80, 1), x.dtype), jnp.zeros(80, int))
        got = jax.vmap(compiled(problem, norm, general), (None, 0, None))(w, rows, 0.1)
        size = sizes(got.total, norm)
        assert np.all(size <= np.float32(0.1))
        assert np.all(size > 0.1 * (1 - 4e-4))


def test_clipping_a_linear_model_is_clipping_its_residual():
    """r_j at ±C/‖(x_j, 1)‖, which keeps gradients of convex losses monotone along any line."""
    problem = fp.LeastSquares(intercept=True)
    x = np.random.default_rng(0).normal(size=(1, N))
    batch = Batch(jnp.asarray(x), jnp.zeros(1), jnp.ones(1), jnp.asarray(0))
    direction, limit = drawn(problem, 1), 0.4 / np.sqrt(np.sum(x**2) + 1)
    slopes = []
    for t in np.linspace(-3, 3, 13):
        g = compiled(problem, 2)(t * direction, batch, 0.4).total
        r = float(t * (x[0] @ direction.tree["w"] + direction.tree["b"]))
        assert float(g.tree["b"]) == pytest.approx(np.clip(r, -limit, limit), rel=1e-12, abs=1e-15)
        slopes.append(float(g.dot(direction)))
    assert np.all(np.diff(slopes) >= -1e-15)


# What is not finite


@both
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_rows_that_are_not_finite_are_zero_and_counted(problem, norm, bad):
    w, batch = drawn(problem), rows(problem)
    worse = batch._replace(x=batch.x.at[3, 2].set(bad).at[5].set(bad))
    without = batch._replace(weight=batch.weight.at[jnp.array([3, 5])].set(0))
    got, expected = (compiled(problem, norm)(w, b, 0.8) for b in (worse, without))
    assert int(got.refused) == 2
    same(got._replace(refused=0), expected._replace(refused=0))


@some([LEAST, NETWORK, Owning()], [LOGISTIC, *REST[:-1]])  # of OWN the tanh is flat out there: nothing to clip
def test_rows_too_large_for_their_type_are_zero_and_counted(problem):
    """Squares of 1e25 are beyond float32: refused, not infinite; in float64 they are clipped."""
    w, batch = drawn(problem, dtype=np.float32), rows(problem, dtype=np.float32)
    worse = batch._replace(x=batch.x.at[3].set(1e25))
    without = batch._replace(weight=batch.weight.at[3].set(0))
    got, expected = (compiled(problem, 2)(w, b, 0.8) for b in (worse, without))
    assert int(got.refused) == 1
    same(got._replace(refused=0), expected._replace(refused=0), rtol=1e-5, atol=1e-6)
    wide = jax.tree.map(lambda a: a.astype(np.float64) if a.dtype == np.float32 else a, (w, worse))
    assert int(compiled(problem, 2)(*wide, 0.8).refused) == 0


@each
def test_nobody_s_rows_are_zero(problem):
    """Padding that is not finite is no row: nothing is counted."""
    w, batch = drawn(problem), rows(problem)
    batch = batch._replace(weight=0 * batch.weight, x=batch.x.at[0].set(jnp.nan))
    got = compiled(problem, 2)(w, batch, 1.0)
    assert all(np.all(np.asarray(leaf) == 0) for leaf in jax.tree.leaves(got))


def test_types_are_the_parameters_own():
    for problem in (*PROBLEMS, *MORE):
        w, batch = drawn(problem, dtype=np.float32), rows(problem, dtype=np.float32)
        for clip in (0.5, jnp.asarray(0.5), np.float64(0.5)):
            out = jax.eval_shape(lambda w, b, p=problem, c=clip: clipped_sum(p, w, b, c), w, batch)
            assert {leaf.dtype for leaf in jax.tree.leaves(out.total)} == {np.dtype(np.float32)}
            assert (out.loss.dtype, out.refused.dtype) == (np.float32, np.int32)
            assert jax.tree.structure(out.total) == jax.tree.structure(w)


# What is refused


def test_settings_that_are_refused():
    w, batch = drawn(LOGISTIC), rows(LOGISTIC)
    with pytest.raises(InvalidArgument, match=r"norm \(p\) must be 1 or 2, got 3"):
        clipped_sum(LOGISTIC, w, batch, 1.0, norm=3)
    for clip in (0, -1.0, float("nan")):
        with pytest.raises(InvalidArgument, match=r"clip \(C\) must be above 0, got"):
            clipped_sum(LOGISTIC, w, batch, clip)


def test_problems_that_can_be_clipped():
    for problem in (*PROBLEMS, *MORE, fp.CNN1(), Huber()):
        check_clippable(problem)
    check_clippable(Owning(), features=5)
    check_clippable(Huber(l2=0.0), features=5)


def test_problems_that_cannot_be_clipped():
    class Bare:
        """No losses."""

    class Native(Huber):
        native = True

    for problem, said in (
        (Bare(), r"problem must be one with a loss a row .* got 'Bare'. Give it losses\(w, batch\)"),
        (Native(), "problem must be one of JAX's .* got 'Native'. Hand the network in as Network"),
        (fp.Constrained(fp.Logistic(l2=0.0)), "problem must be one loss .* got 'Constrained'.* use its model"),
    ):
        with pytest.raises(InvalidArgument, match=said):
            check_clippable(problem)


def test_a_regulariser_that_nobody_knows_of_is_refused():
    """The rows' losses alone would train another model than `gradient` does."""
    with pytest.raises(InvalidArgument, match=r"gradient of Huber must be the mean over rows .* public_gradient"):
        check_clippable(Huber(), features=5)


def test_a_loss_of_one_s_own_under_an_inherited_closed_form_is_refused():
    @dataclasses.dataclass(frozen=True)
    class Quartic(fp.LeastSquares):
        def value_and_gradient(self, w, batch):
            f = lambda w: jnp.sum(batch.weight * (batch.x @ w.tree["w"] - batch.y) ** 4) / batch.rows
            return jax.value_and_grad(f)(w)

    with pytest.raises(InvalidArgument, match="gradient of Quartic must be the mean over rows"):
        check_clippable(Quartic(), features=5)
