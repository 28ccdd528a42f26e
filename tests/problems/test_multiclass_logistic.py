"""Multi-class logistic regression: the three losses row by row, gradients, counts, constants, and what is refused."""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedpact as fp
from fedpact.core.contract import Batch
from fedpact.core.errors import DataError, InvalidArgument, UnknownName
from fedpact.core.vector import Vector

LOSSES = ("printed", "one_vs_rest", "softmax")
BETA, D, N, M = 0.3, 7, 4, 3
each = pytest.mark.parametrize("loss", LOSSES)
both = pytest.mark.parametrize("intercept", [False, True])


def rows(seed=0, d=D, padding=0, dtype=np.float64):
    rng = np.random.default_rng(seed)
    x, y = rng.normal(size=(d, N)), rng.integers(0, M, size=d).astype(float)
    batch = Batch(
        jnp.asarray(np.vstack([x, np.full((padding, N), 9.0)]), dtype),
        jnp.asarray(np.append(y, np.zeros(padding)), dtype),
        jnp.asarray(np.append(np.ones(d), np.zeros(padding)), dtype),
        jnp.asarray(0),
    )
    return x, y, batch


def problem(loss, intercept=True, beta=BETA):
    return fp.MulticlassLogistic(inputs=N, classes=M, loss=loss, beta=beta, intercept=intercept)


def point(intercept=True, seed=1, dtype=np.float64):
    return np.random.default_rng(seed).normal(size=(M, N + intercept)).astype(dtype)


def literal(loss, X, x, y, intercept):
    """f_i from its definition, one row after the other."""
    total = 0.0
    for a, b in zip(x, y, strict=True):
        a, k = np.append(a, 1.0) if intercept else a, int(b)
        if loss == "printed":  # Tr(X X_ij^T), X_ij = b a^T with b the unit vector of the class
            unit = np.eye(M)[k]
            total += math.log(1 + math.exp(-np.trace(X @ np.outer(unit, a).T)))
        elif loss == "one_vs_rest":
            total += sum(math.log(1 + math.exp(-(1 if j == k else -1) * (X[j] @ a))) for j in range(M))
        else:
            total += -math.log(math.exp(X[k] @ a) / sum(math.exp(X[j] @ a) for j in range(M)))
    return total / len(y) + BETA * sum(t**2 / (1 + t**2) for t in X.ravel())


def test_by_hand():
    """One row a = (2, 1 | 1) of class 1 of two; X = [[½, 0, 0], [1, −1, ln 3 − 1]]: z = (1, ln 3)."""
    X = np.array([[0.5, 0.0, 0.0], [1.0, -1.0, math.log(3) - 1]])
    w, batch = Vector({"w": jnp.asarray(X)}), Batch(jnp.array([[2.0, 1]]), jnp.array([1.0]), jnp.ones(1), jnp.array(0))
    e = math.e
    want = {
        "printed": (math.log(4 / 3), [0, -1 / 4]),  # 1/(1 + e^{ln 3}) = 1/4
        "one_vs_rest": (math.log(1 + e) + math.log(4 / 3), [e / (1 + e), -1 / 4]),
        "softmax": (math.log(e + 3) - math.log(3), [e / (e + 3), -e / (e + 3)]),
    }
    for loss, (value, slope) in want.items():
        p = fp.MulticlassLogistic(inputs=2, classes=2, loss=loss, beta=0.0, intercept=True)
        found, gradient = p.value_and_gradient(w, batch)
        assert float(found) == pytest.approx(value, rel=1e-14)
        np.testing.assert_allclose(gradient.tree["w"], np.outer(slope, [2, 1, 1]), rtol=1e-14, atol=1e-16)
    np.testing.assert_allclose(p.predict(w, batch.x), [[e / (e + 3), 3 / (e + 3)]], rtol=1e-14)  # (26)
    penal = dataclasses.replace(p, beta=2.0).value(w, batch) - p.value(w, batch)
    t = (math.log(3) - 1) ** 2
    assert float(penal) == pytest.approx(2 * (0.2 + 0.5 + 0.5 + t / (1 + t)), rel=1e-13)


@each
@both
def test_the_value_is_the_definition_and_the_gradient_its_slope(loss, intercept):
    x, y, batch = rows(padding=3)
    X, p = point(intercept), problem(loss, intercept)
    value, gradient = p.value_and_gradient(Vector({"w": jnp.asarray(X)}), batch)
    assert float(value) == pytest.approx(literal(loss, X, x, y, intercept), rel=1e-13)
    np.testing.assert_array_equal(p.gradient(Vector({"w": jnp.asarray(X)}), batch).tree["w"], gradient.tree["w"])
    for place in np.ndindex(X.shape):
        step = np.zeros_like(X)
        step[place] = 1e-6
        slope = (literal(loss, X + step, x, y, intercept) - literal(loss, X - step, x, y, intercept)) / 2e-6
        assert float(gradient.tree["w"][place]) == pytest.approx(slope, abs=1e-8)
    by_jax = jax.grad(p.value)(Vector({"w": jnp.asarray(X)}), batch)
    np.testing.assert_allclose(gradient.tree["w"], by_jax.tree["w"], rtol=1e-12, atol=1e-15)


@each
def test_losses_are_rows_without_the_regulariser(loss):
    _, _, batch = rows()
    w, p = Vector({"w": jnp.asarray(point())}), problem(loss)
    assert p.losses(w, batch).shape == (D,)
    plain = dataclasses.replace(p, beta=0.0)
    assert float(jnp.mean(p.losses(w, batch))) == pytest.approx(float(plain.value(w, batch)), rel=1e-14)


@each
def test_counts_are_the_largest_scores(loss):
    x, y, batch = rows(padding=2)
    X = point()
    right = sum(np.argmax(X @ np.append(a, 1)) == b for a, b in zip(x, y, strict=True))
    found = problem(loss).counts(Vector({"w": jnp.asarray(X)}), batch)
    assert (float(found["rows"]), float(found["correct"])) == (D, right)


@pytest.mark.drill
@each
@both
def test_the_constants_bound_the_hessian(loss, intercept):
    """Eigenvalues of ∇²f at points near and far lie in [−s_i, r_i]."""
    _, _, batch = rows()
    p = problem(loss, intercept)
    r, s = float(p.lipschitz(batch)), float(p.weak_convexity(batch))
    assert s == BETA / 2
    for scale in (0.0, 0.3, 1.0, 5.0):
        X = jnp.asarray(scale * point(intercept)).ravel()
        f = lambda v: p.value(Vector({"w": v.reshape(M, -1)}), batch)
        eigenvalues = np.linalg.eigvalsh(jax.hessian(f)(X))
        assert -s - 1e-12 <= eigenvalues[0]
        assert eigenvalues[-1] <= r + 1e-12


@each
def test_bytes_are_pixels_and_single_precision_stays(loss):
    rng = np.random.default_rng(3)
    x = rng.integers(0, 256, size=(D, N)).astype(np.uint8)
    _, _, plain = rows(dtype=np.float32)
    p, w = problem(loss), Vector({"w": jnp.asarray(point(dtype=np.float32))})
    of_bytes = p.value_and_gradient(w, plain._replace(x=jnp.asarray(x)))
    of_numbers = p.value_and_gradient(w, plain._replace(x=jnp.asarray(x / np.float32(255), jnp.float32)))
    assert float(of_bytes[0]) == pytest.approx(float(of_numbers[0]), rel=1e-6)
    np.testing.assert_allclose(of_bytes[1].tree["w"], of_numbers[1].tree["w"], rtol=1e-5, atol=1e-7)
    assert of_bytes[0].dtype == of_bytes[1].tree["w"].dtype == np.float32
    assert p.lipschitz(plain._replace(x=jnp.asarray(x))).dtype == np.float32


def test_softmax_is_the_network_s():
    _, _, batch = rows()
    X = point(False)
    ours = problem("softmax", False, beta=0.0).value_and_gradient(Vector({"w": jnp.asarray(X)}), batch)
    theirs = fp.Softmax(inputs=N, classes=M).value_and_gradient(Vector({"w": jnp.asarray(X.T)}), batch)
    assert float(ours[0]) == pytest.approx(float(theirs[0]), rel=1e-14)
    np.testing.assert_allclose(ours[1].tree["w"], theirs[1].tree["w"].T, rtol=1e-12, atol=1e-15)


@pytest.mark.drill
def test_a_run_is_saved_and_read_back(tmp_path):
    fed = fp.data.iris().split(clients=5, seed=0, holdout=0.2)
    p = fp.MulticlassLogistic(inputs=4, classes=3, loss="one_vs_rest", beta=1e-3, intercept=True)
    done = fp.run(fp.FedAvg(steps=5), p, fed, rounds=10, folder=tmp_path / "run", precision="double")
    assert done.history.last("objective") < done.history.column("objective")[0]
    assert done.metrics["pooled"]["accuracy"] > 0.7
    model = fp.Model.load(tmp_path / "run")
    assert model.problem == p
    np.testing.assert_array_equal(model.predict(fed.dataset.x[:3]), done.model.predict(fed.dataset.x[:3]))
    assert model.coefficients() == []


def test_labels_and_rows_that_do_not_fit_are_refused():
    fed = fp.data.iris().split(clients=5, seed=0)
    with pytest.raises(DataError, match=r"^labels must be below 2, the outputs of MulticlassLogistic, got class 2"):
        fp.MulticlassLogistic(inputs=4, classes=2).check(fed)
    with pytest.raises(DataError, match=r"must be 784 numbers a row .* for MulticlassLogistic, got 4"):
        fp.MulticlassLogistic().check(fed)
    regression = fp.data.synthetic("least_squares", rows=30, features=4).split(clients=3)
    with pytest.raises(DataError, match="labels must be classes for MulticlassLogistic"):
        fp.MulticlassLogistic(inputs=4).check(regression)


def test_bad_arguments():
    with pytest.raises(UnknownName, match=r"^loss must be one of one_vs_rest, printed, softmax, got 'hinge'"):
        fp.MulticlassLogistic(loss="hinge")
    with pytest.raises(InvalidArgument, match=r"^beta \(β\) must be a number of at least 0, got -1"):
        fp.MulticlassLogistic(beta=-1)
    with pytest.raises(InvalidArgument, match=r"^intercept must be true or false, got 1"):
        fp.MulticlassLogistic(intercept=1)
    with pytest.raises(InvalidArgument, match=r"^beta of MulticlassLogistic must be 0 inside Constrained, got 0\.01"):
        fp.Constrained(fp.MulticlassLogistic(inputs=4, classes=3))
    assert fp.Constrained({"name": "multiclass_logistic", "inputs": 4, "classes": 3}).model.beta == 0
