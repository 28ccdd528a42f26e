"""Sums and SSCA's linear server step on ciphertexts of TenSEAL."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.flatten_util import ravel_pytree

import fedpact as fp
from fedpact.core.contract import Batch, Oracle, Streamed
from fedpact.core.errors import InvalidArgument
from fedpact.core.keys import Purpose, client_key
from fedpact.core.vertical import Split, conversation
from fedpact.definition import start_of
from fedpact.problems.approximation import step_sizes
from fedpact.problems.training import drawn
from fedpact.problems.vertical import as_vertical, closing
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


@pytest.mark.parametrize("own", [False, True], ids=["one key holder", "every client of its own block"])
def test_three_rounds_of_feature_split_ssca_on_ciphertexts(own, holder):
    """Algorithm 3: who computes a block of the gradient seals it, and the server has public keys and ciphertexts alone.

    Blocks 0, 1 and 2 are the clients' ω_i; block 3 is ω_0, which client 1, the closer, has too. Next to the algorithm
    itself, and to its run.
    """
    model = fp.TwoLayer(inputs=5, hidden=3, classes=2, activation="swish")
    problem = fp.Constrained(model, minimize=fp.Loss() + 0.01 * fp.Norm2())
    settings, x = fp.VerticalSSCA(batch=20), np.random.default_rng(0).normal(size=(60, 5))
    data = fp.data.from_arrays(x, (x[:, 0] * x[:, 1] > 0) * 1.0, classes=["no", "yes"])
    federation = data.split_features(blocks=[[0, 3], [1], [2, 4]], closer=1)
    layout, split, closer = federation.layout, Split.of(model), closing(Split.of(model), as_vertical(problem), 3)
    w0 = start_of(fp.Experiment(settings, problem, federation, precision="double"))
    algorithm, root = settings.build(problem, layout, 1.0), jax.random.key(0)
    records = Batch(*federation.client(0), np.ones(60), np.asarray(0))
    state, hello = algorithm.join(w0, records, client_key(root, 0, 0))
    server = algorithm.init(w0, jax.tree.map(lambda a: a[None], hello))  # the algorithm's own, in the clear

    flat = lambda tree: np.asarray(ravel_pytree(tree)[0])
    rebuild = ravel_pytree(split.rest(w0))[1]

    def blocks_of(w):
        first = np.asarray(split.first(w))
        return [*(first[list(columns)].ravel() for columns in layout.columns), flat(split.rest(w))]

    def whole(blocks):
        first = np.zeros((5, 3))
        for columns, block in zip(layout.columns, blocks, strict=False):
            first[list(columns)] = block.reshape(len(columns), 3)
        return split.whole(rebuild(blocks[3]), first, w0)

    holders = [KeyHolder() for _ in layout.columns] if own else [holder] * 3
    holders.append(holders[layout.closer])
    ciphers = [Cipher(one.public()) for one in holders]  # what clients and the server have
    w, kappa = blocks_of(w0), 0.0
    a = [np.zeros_like(block) for block in w]
    for t in range(3):
        key = client_key(root, t, 0)
        rows = drawn(records, settings.batch, key(Purpose.LOCAL))
        said = conversation(layout, split, whole(w), rows, lambda v, b: closer.means(v, b, hello.tally))
        gradients = [*(block.gradient for block in said.blocks), flat(said.closed.head)]
        rho, gamma = (float(v) for v in step_sizes(settings, t + 1, w0))
        sealed = [cipher.seal(np.ravel(g), 4.0) for cipher, g in zip(ciphers, gradients, strict=True)]
        anew = [(cipher.seal(u, 64.0), cipher.seal(v, 64.0)) for cipher, u, v in zip(ciphers, a, w, strict=True)]
        stepped = [
            ssca_step(cipher, *kept, g, kappa, rho, gamma, settings.tau, norm2=0.01)
            for cipher, kept, g in zip(ciphers, anew, sealed, strict=True)
        ]
        a, w = ([one.open(step[k], least=1) for one, step in zip(holders, stepped, strict=True)] for k in (0, 1))
        kappa = stepped[0].kappa

        state, upload, _ = algorithm.client_step(algorithm.broadcast(server), state, records, None, key)
        server = algorithm.server_step(server, upload, Streamed(np.asarray(1)))[0]
        np.testing.assert_allclose(flat(whole(w)), flat(server.w), rtol=0, atol=1e-5)
        np.testing.assert_allclose(flat(whole(a)), flat(server.shared.a), rtol=0, atol=1e-5)
        assert kappa == pytest.approx(float(server.shared.kappa))
    run = fp.run(settings, problem, federation, rounds=3, precision="double")
    np.testing.assert_allclose(flat(whole(w)), flat(run.model.w), rtol=0, atol=1e-5)
    assert min(np.abs(block - before).max() for block, before in zip(w, blocks_of(w0), strict=True)) > 0.01


def test_the_example_in_the_documentation_runs_as_printed(capsys):
    page = (Path(__file__).resolve().parents[1] / "docs" / "encrypted.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    exec(compile(block, "docs/encrypted.md", "exec", dont_inherit=True), {})
    assert capsys.readouterr().out.splitlines() == re.findall(r"^# → (.+)$", block, re.MULTILINE)


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
        r"norm2 \(λ\) must be a number": lambda: ssca_step(cipher, short, short, short, 0.0, 0.5, 0.5, 0.1, -1.0),
        r"tau \(τ\) must be a positive": lambda: ssca_step(cipher, short, short, short, 0.0, 0.5, 0.5, 0.0),
    }
    for text, call in refused.items():
        with pytest.raises(InvalidArgument, match=f"^{text}"):
            call()


def test_without_tenseal_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "tenseal", None)
    with pytest.raises(InvalidArgument, match=r"^tenseal must be installed.* pip install 'fedpact\[he\]'$"):
        KeyHolder()
