"""Sums and SSCA's linear server step on ciphertexts of TenSEAL."""

from __future__ import annotations

import sys

import jax
import numpy as np
import pytest
from jax.flatten_util import ravel_pytree

import fedpact as fp
from fedpact.core.contract import Batch, Oracle, Streamed
from fedpact.core.errors import InvalidArgument
from fedpact.core.keys import client_key
from fedpact.problems.approximation import step_sizes
from fedpact.secure import encrypted
from fedpact.secure.encrypted import Cipher, KeyHolder, ssca_step

FINE = 2.0**-40


@pytest.fixture(scope="module")
def holder():
    return KeyHolder()


@pytest.fixture(scope="module")
def cipher(holder):
    return Cipher(holder.public())


@pytest.fixture(scope="module")
def vectors():
    return np.random.default_rng(0).normal(size=(10, 10_000))


def test_a_sum_is_right_to_the_stated_error(holder, cipher, vectors):
    total = cipher.add([cipher.seal(v, 10.0) for v in vectors])
    assert (total.size, total.bound, total.summands, total.scaled) == (10_000, 100.0, 10, False)
    assert np.max(np.abs(holder.open(total, step=FINE) - vectors.sum(0))) < 1e-7
    assert np.max(np.abs(holder.open(total) - vectors.sum(0))) < 1e-6


def test_a_linear_step_is_as_right_as_a_sum(holder, cipher, vectors):
    """Without the correction for SEAL's prime it is off by 1.3e-7 of each number: 0.02 of the large ones."""
    sealed = [cipher.seal(v, 10.0) for v in vectors[:3]]
    step = cipher.linear([0.3, 0.0, -2.0], sealed)
    assert np.max(np.abs(holder.open(step, 1, FINE) - (0.3 * vectors[0] - 2 * vectors[2]))) < 1e-7
    large = np.random.default_rng(1).uniform(-(2**17), 2**17, 5000)
    step = cipher.linear([0.7], [cipher.seal(large, 2.0**17)])
    assert np.max(np.abs(holder.open(step, 1, FINE) - 0.7 * large)) < 1e-6


def test_bytes_are_as_stated(cipher, vectors):
    sealed = cipher.seal(np.resize(vectors, 4 * encrypted.SLOTS), 10.0)
    size = lambda one: sum(map(len, one.parts)) / one.size
    assert 55 < size(sealed) < 60
    assert 31 < size(cipher.linear([0.5], [sealed])) < 34


def test_the_server_cannot_open_and_ciphertexts_differ(cipher, vectors):
    one, two = (cipher.seal(vectors[0], 10.0) for _ in range(2))
    assert not cipher._context.is_private()
    with pytest.raises(ValueError, match="secret_key"):
        cipher._open(one.parts[0]).decrypt()
    assert one.parts != two.parts
    with pytest.raises(InvalidArgument, match=r"^public must be keys without the secret one"):
        Cipher(KeyHolder()._context.serialize(save_secret_key=True))


def test_another_key_opens_noise(cipher, vectors):
    opened = KeyHolder().open(cipher.add([cipher.seal(v, 10.0) for v in vectors[:2]]))
    assert np.max(np.abs(opened - vectors[:2].sum(0))) > 1e3


def test_three_rounds_of_ssca_on_ciphertexts(holder, cipher):
    """The server sees ciphertexts alone; a and ω go by the key holder once a round. Next to the algorithm itself."""
    settings, problem, clients, features = fp.SSCA(tau=0.1), fp.Logistic(l2=0.0), 3, 5
    algorithm = settings.build(problem, clients, 1.0)
    w0 = problem.init(features, np.float64)
    rng = np.random.default_rng(0)
    batches = [
        Batch(rng.normal(size=(n, features)), rng.integers(0, 2, n) * 1.0, np.ones(n), np.asarray(i))
        for i, n in enumerate((20, 30, 50))
    ]
    key = client_key(jax.random.key(0), 0, 0)
    joined = [algorithm.join(w0, b, key) for b in batches]
    server = algorithm.init(w0, jax.tree.map(lambda *a: np.stack(a), *(hello for _, hello in joined)))
    _, rebuild = ravel_pytree(w0)
    w, a, kappa = np.zeros(features), np.zeros(features), 0.0
    for t in range(3):
        message = algorithm.broadcast(server)._replace(w=rebuild(w))  # what the key holder told the clients
        uploads = [
            algorithm.client_step(message, s, b, Oracle(problem), key)[1]
            for (s, _), b in zip(joined, batches, strict=True)
        ]
        gradients = [ravel_pytree(u.gradients)[0] / 100 for u in uploads]  # N_i g_i / N
        rho, gamma = (float(v) for v in step_sizes(settings, t + 1, w0))
        sealed = cipher.add([cipher.seal(g, 4.0) for g in gradients])
        stepped = ssca_step(cipher, cipher.seal(a, 64.0), cipher.seal(w, 64.0), sealed, kappa, rho, gamma, settings.tau)
        a, w, kappa = holder.open(stepped.a, 3), holder.open(stepped.w, 3), stepped.kappa
        plain = jax.tree.map(lambda *x: sum(x), *uploads)
        server = algorithm.server_step(server, plain, Streamed(np.asarray(clients)))[0]
        np.testing.assert_allclose(w, ravel_pytree(server.w)[0], rtol=0, atol=1e-5)
        np.testing.assert_allclose(a, ravel_pytree(server.shared.a)[0], rtol=0, atol=1e-5)
        assert kappa == pytest.approx(float(server.shared.kappa))
        assert np.linalg.norm(w) > 0.01


def test_what_is_refused(holder, cipher, vectors):
    sealed = cipher.seal(vectors[0], 10.0)
    step = cipher.linear([0.5], [sealed])
    short = cipher.seal(vectors[0][:5], 10.0)
    cut = short._replace(parts=(short.parts[0][:100],))
    refused = {
        r"values\[1\] must be finite and at most 1 in size, got 2.0": lambda: cipher.seal([0.0, 2.0], 1.0),
        r"values\[0\] must be finite": lambda: cipher.seal([np.nan], 1.0),
        "bound must be a positive number of at most 2¹⁸": lambda: cipher.seal([0.0], 2.0**19),
        "values must be a vector": lambda: cipher.seal(np.zeros((2, 2)), 1.0),
        "vectors must be at least one": lambda: cipher.add([]),
        "vectors must be of one size": lambda: cipher.add([sealed, short]),
        "vectors must be sums that were not multiplied yet": lambda: cipher.linear([0.5], [step]),
        "vectors must be of one size, all products or none": lambda: cipher.add([step, sealed]),
        r"scalar \(s\) must be 0, or from 2⁻²⁰": lambda: cipher.linear([1e-8], [sealed]),
        "scalars must be one a vector, 1, got 2": lambda: cipher.linear([1.0, 1.0], [sealed]),
        "scalars must be some not 0": lambda: cipher.linear([0.0], [sealed]),
        "bound on the sum must be at most 2¹⁸": lambda: cipher.linear([1e5], [sealed]),
        "summands must be at least 2, got 1": lambda: holder.open(sealed),
        "ciphertext must be one of CKKS": lambda: cipher.add([cut]),
        r"rho \(ρ\) must be above 0": lambda: ssca_step(cipher, short, short, short, 0.0, 0.0, 0.5, 0.1),
        r"tau \(τ\) must be a positive": lambda: ssca_step(cipher, short, short, short, 0.0, 0.5, 0.5, 0.0),
    }
    for text, call in refused.items():
        with pytest.raises(InvalidArgument, match=f"^{text}"):
            call()


def test_without_tenseal_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "tenseal", None)
    with pytest.raises(InvalidArgument, match=r"^tenseal must be installed.* pip install 'fedpact\[he\]'$"):
        KeyHolder()
