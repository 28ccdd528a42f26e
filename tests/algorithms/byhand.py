"""Witnesses in NumPy and exact fractions, and a literal round loop: nothing here comes from the code under test.

Flat vectors have the intercept last. Clients are pairs (x, y); `d` is their number of rows.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from fractions import Fraction
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from scipy.optimize import brentq, minimize

import fedpact as fp
from fedpact.core.contract import Batch, Cohort, Oracle
from fedpact.core.keys import JOIN_ROUND, Purpose, client_key
from fedpact.core.vector import Vector
from fedpact.core.vertical import Layout

SIZES = (4, 9, 6, 12, 9, 4, 6)  # four different ones, so that four buckets differ
PROBLEM = fp.Logistic(l2=0.5, intercept=True)


@functools.cache
def parts(kind="logistic", sizes=SIZES, features=3, seed=5):
    """Clients of unequal sizes and unlike distributions, both classes at each."""
    rng = np.random.default_rng(seed)
    truth, out = rng.normal(size=features), []
    for d in sizes:
        x = rng.normal(size=(d, features)) + rng.normal(size=features) / 2
        target = x @ truth + rng.normal(size=d)
        if kind == "logistic":
            target[:2] = [9.0, -9.0]
        out.append((x, (target > 0).astype(float) if kind == "logistic" else target))
    return tuple(out)


def federation(clients, classes=("0", "1")):
    return fp.data.Federation.from_arrays([(x, y) for x, y in clients], classes=list(classes))


class Case(NamedTuple):
    """What an algorithm of the registry runs on: the problem, the clients' rows, and what `build` is told of them."""

    problem: Any
    clients: Any
    given: Any

    @property
    def federation(self):
        if isinstance(self.given, int):
            return federation(self.clients)
        ((x, y),) = self.clients
        blocks = [list(columns) for columns in self.given.columns]
        return fp.data.from_arrays(x, y, classes=["0", "1"]).split_features(blocks=blocks, closer=self.given.closer)


@functools.cache
def case(vertical):
    """Rows at seven clients; or one client's records, their columns with three parties."""
    if not vertical:
        return Case(PROBLEM, parts(), 7)
    problem = fp.Constrained(fp.Logistic(l2=0, intercept=True))
    return Case(problem, parts()[3:4], Layout(((2,), (0,), (1,)), ("0", "1", "2"), 1))


def batch(x, y, client=0, padding=0, dtype=np.float64):
    """A client's rows, followed by `padding` rows of weight 0."""
    weight = np.concatenate([np.ones(len(y)), np.zeros(padding)])
    x, y = np.concatenate([x, np.zeros((padding, x.shape[1]))]), np.append(y, np.zeros(padding))
    return Batch(
        jnp.asarray(x, dtype), jnp.asarray(y, dtype), jnp.asarray(weight, dtype), jnp.asarray(client, jnp.int32)
    )


def batches(clients):
    return [batch(x, y, i) for i, (x, y) in enumerate(clients)]


def flat(w: Vector) -> np.ndarray:
    return np.append(np.asarray(w.tree["w"]), np.asarray(w.tree["b"]).reshape(-1) if "b" in w.tree else [])


def vector(values, intercept=False) -> Vector:
    values = np.asarray(values, float)
    if not intercept:
        return Vector({"w": jnp.asarray(values)})
    return Vector({"w": jnp.asarray(values[:-1]), "b": jnp.asarray(values[-1])})


# The problems


def with_ones(x, intercept):
    return np.column_stack([x, np.ones(len(x))]) if intercept else x


def ridge(problem, d, size):
    weight = problem.l2 / d if problem.divide else problem.l2
    return np.array([weight] * (size - problem.intercept) + [0.0] * problem.intercept)


def value(problem, w, x, y):
    """f_i(w)."""
    a, d = with_ones(x, problem.intercept), len(y)
    z = a @ w
    logistic = isinstance(problem, fp.Logistic)
    loss = np.sum(np.log1p(np.exp(z)) - y * z) if logistic else np.sum((z - y) ** 2) / 2
    return loss / d + ridge(problem, d, len(w)) @ w**2 / 2


def gradient(problem, w, x, y):
    """∇f_i(w)."""
    a, d = with_ones(x, problem.intercept), len(y)
    z = a @ w
    residual = (1 / (1 + np.exp(-z)) if isinstance(problem, fp.Logistic) else z) - y
    return a.T @ residual / d + ridge(problem, d, len(w)) * w


def batch_gradient(problem, w, x, y, rows):
    """The gradient of the mean loss of some rows, and of the whole regulariser: d_i is len(y), not the batch's size."""
    loss = gradient(dataclasses.replace(problem, l2=0.0), w, x[rows], y[rows])
    return loss + ridge(problem, len(y), len(w)) * w


def shuffles(seed, t, client, d, epochs, batch=None, width=12):
    """The batches of every epoch: d rows in the order of uniform numbers of (seed, round, client, LOCAL, 1, epoch)."""
    key = jax.random.fold_in(key_of(seed, t, client)(Purpose.LOCAL), 1)
    for e in range(epochs):
        numbers = np.asarray(jax.random.uniform(jax.random.fold_in(key, e), (width,)))[:d]
        order = np.arange(d) if batch is None else np.argsort(numbers)
        yield [order[k : k + (batch or d)] for k in range(0, d, batch or d)]


def sgd(problem, w, x, y, orders, *, rate, momentum=0.0, alpha=1.0, linear=0.0, rho=0.0, center=0.0):
    """w ← w − γm, m ← βm + α∇f(w; b) + linear + ρ(w − center), over the batches b of every epoch."""
    m = np.zeros_like(w)
    for batches in orders:
        for rows in batches:
            m = momentum * m + alpha * batch_gradient(problem, w, x, y, rows) + linear + rho * (w - center)
            w = w - rate * m
    return w


def lipschitz(problem, x):
    """r_i from NumPy's eigenvalues."""
    a, d = with_ones(x, problem.intercept), len(x)
    largest = np.linalg.eigvalsh(a.T @ a)[-1] / (4 if isinstance(problem, fp.Logistic) else 1)
    return largest / d + problem.l2 / (d if problem.divide else 1)


# The least norm below a cross-entropy


@functools.cache
def rows_of_three_classes():
    """Thirty rows at three clients of 6, 8 and 16; no weights separate the classes."""
    rng = np.random.default_rng(11)
    x = rng.normal(size=(30, 4))
    y = np.argmax(x @ rng.normal(size=(4, 3)) + 1.5 * rng.normal(size=(30, 3)), axis=1).astype(float)
    return tuple(zip(np.split(x, [6, 14]), np.split(y, [6, 14]), strict=True))


def entropy(w, clients):
    """The mean cross-entropy over all rows and its gradient, in NumPy."""
    x, y = (np.concatenate([part[k] for part in clients]) for k in (0, 1))
    z = x @ w.reshape(4, 3)
    q = np.exp(z - z.max(axis=1, keepdims=True))
    q /= q.sum(axis=1, keepdims=True)
    right = np.eye(3)[y.astype(int)]
    return -np.mean(np.log(np.sum(right * q, axis=1))), (x.T @ (q - right) / len(y)).ravel()


@functools.cache
def smallest(limit):
    """(λ, ω) with ω = argmin F + λ‖ω‖² (32) and F(ω) = limit: by KKT the minimiser of ‖ω‖² below it, ν = 1/λ."""
    clients = rows_of_three_classes()

    def best(lam):
        goal = lambda w: (entropy(w, clients)[0] + lam * w @ w, entropy(w, clients)[1] + 2 * lam * w)
        return minimize(goal, np.zeros(12), jac=True, method="BFGS", options={"gtol": 1e-12}).x

    lam = math.exp(brentq(lambda v: entropy(best(math.exp(v)), clients)[0] - limit, -8, 3, xtol=1e-13))
    return lam, best(lam)


# FedEPM


def phi(v, lam, eta):
    return lam * np.sum(np.abs(v)) + eta / 2 * np.sum(v**2)


def soft(v, a):
    return np.array([t - a if t > a else t + a if t < -a else 0.0 for t in v])


def elastic_center(column, lam, eta):
    """argmin_w Σ λ|w − z_i| + (η/2)(w − z_i)², exactly: walk up the sorted z until the subgradient reaches 0.

    Between two neighbouring z with `below` of the m numbers below, the derivative is η(mw − Σz) + λ(below − above);
    at a z it jumps up by 2λ for each message there.
    """
    z = sorted(Fraction(float(v)) for v in column)
    lam, eta, m, total = Fraction(float(lam)), Fraction(float(eta)), len(z), sum(Fraction(float(v)) for v in column)
    for i, at in enumerate(z):
        slope = eta * (m * at - total)
        if slope + lam * (i - (m - i)) > 0:  # just below z_i it is positive already: the zero lies before z_i
            return (eta * total - lam * (i - (m - i))) / (eta * m)
        if slope + lam * ((i + 1) - (m - i - 1)) >= 0:  # just above z_i it is not negative: the zero is on the kink
            return at
    raise AssertionError("above the largest message the derivative is positive")


def center(messages, lam, eta):
    """ENS, coordinate by coordinate, rounded once at the end."""
    return np.array([float(elastic_center(column, lam, eta)) for column in np.asarray(messages).T])


class LocalStep(NamedTuple):
    """One pass of (20): w_i^{k+1}, μ_{i,k+1}, and w_i^k."""

    w: np.ndarray
    mu: float
    before: np.ndarray


def fedepm_local(w, w_i, g, d, first, *, k0, lam, eta, mu0, c, alpha) -> list[LocalStep]:
    """k0 passes of (20) with the prox weight μ/d_i, from step k = first on."""
    steps = []
    for k in range(first, first + k0):
        gap = w_i - w
        mu = mu0 * (1 + c * sum(t * t for t in gap)) * alpha ** (k + 1)
        new = w + soft(mu / d * gap - g, lam) / (eta + mu / d)
        steps.append(LocalStep(new, mu, w_i))
        w_i = new
    return steps


# A round loop without an engine: one client after the other


class Moment(NamedTuple):
    """One round: who took part, the states before it, what was sent, and the states after it."""

    chosen: list[int]
    before: Any
    clients_before: list[Any]
    msg: Any
    uploads: dict[int, Any]
    notes: dict[int, Any]
    after: Any
    info: Any
    clients_after: list[Any]


def key_of(seed, t, client):
    return client_key(jax.random.key(seed), t, client)


@functools.cache
def built(settings, problem=None, clients=None, rate=1.0):
    """The bundle, made once for the same settings so that its programs are compiled once."""
    usual = case(settings.vertical)
    return settings.build(problem or usual.problem, clients or usual.given, rate)


_PROGRAMS: dict[tuple[int, Any], Any] = {}


def programs(algorithm, problem):
    """join, init, client_step and server_step, compiled, with the seed's key as their last argument."""
    place = (id(algorithm.client_step), problem)
    if place not in _PROGRAMS:
        key = lambda root, t, b: client_key(root, t, b.client)
        _PROGRAMS[place] = (
            jax.jit(lambda w0, b, root: algorithm.join(w0, b, key(root, JOIN_ROUND, b))),
            jax.jit(algorithm.init),
            jax.jit(lambda m, c, b, t, root: algorithm.client_step(m, c, b, Oracle(problem), key(root, t, b))),
            jax.jit(algorithm.server_step),
            algorithm,  # kept alive, so that its id stays its own
        )
    return _PROGRAMS[place][:4]


def play(algorithm, problem, clients, w0, cohorts, seed=0, compiled=None) -> list[Moment]:
    """The rounds of `cohorts` (lists of clients; not the first one empty), function by function as in the contract.

    Long runs are compiled; short ones run operation by operation, which is quicker than compiling them.
    """
    with jax.disable_jit(len(cohorts) <= 20 if compiled is None else not compiled):
        return _play(algorithm, problem, clients, w0, cohorts, jax.random.key(seed))


def _play(algorithm, problem, clients, w0, cohorts, root):
    data = [batch(x, y, i, padding=max(SIZES) - len(y)) for i, (x, y) in enumerate(clients)]
    join, init, step, serve = programs(algorithm, problem)
    joined = [join(w0, b, root) for b in data]
    states = [state for state, _ in joined]
    server = strong(init(w0, stack([hello for _, hello in joined])))
    moments: list[Moment] = []
    blank = None  # what stands in the rows of those who did not upload
    for t, chosen in enumerate(cohorts):
        msg = algorithm.broadcast(server)
        old, old_states, uploads, notes = server, list(states), {}, {}
        for i in chosen:
            states[i], uploads[i], notes[i] = step(msg, old_states[i], data[i], t, root)
        blank = jax.tree.map(lambda a: jnp.full_like(a, jnp.nan), next(iter(uploads.values()), blank))
        rows = stack([uploads.get(i, blank) for i in range(len(data))])
        server, info = serve(server, rows, Cohort(None, jnp.asarray(np.isin(np.arange(len(data)), list(chosen)))))
        moments.append(Moment(list(chosen), old, old_states, msg, uploads, notes, server, info, list(states)))
    return moments


def strong(tree):
    """Without JAX's weak types, so that the second round is the first one's program."""
    return jax.tree.map(lambda a: jnp.asarray(np.asarray(a)), tree)


def stack(trees):
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *trees)


def relative(a, b):
    """max |a − b| over max(1, |b|)."""
    a, b = np.asarray(a, float), np.asarray(b, float)
    return float(np.max(np.abs(a - b) / np.maximum(1, np.abs(b)))) if a.size else 0.0
