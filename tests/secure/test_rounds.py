"""A round of every algorithm whose server step is linear in the uploads, from the masked sum of the uploads alone."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from helpers_sum import conversation, terms
from jax.flatten_util import ravel_pytree

import fedpact as fp
from fedpact.algorithms import ALGORITHMS
from fedpact.core.contract import Batch, Oracle, Streamed
from fedpact.core.keys import client_key

pytest.importorskip("cryptography")

CLIENTS, FEATURES = 6, 4
SUMS = [
    name
    for name, settings in ALGORITHMS.items()
    if not settings.vertical and settings().build(fp.Logistic(l2=0.01), CLIENTS, 1.0).combine == "sum"
]


def batch(i):
    rng = np.random.default_rng(i)
    rows = 8
    return Batch(rng.normal(size=(rows, FEATURES)), rng.integers(0, 2, rows) * 1.0, np.ones(rows), np.asarray(i))


QUICK = {"scaffold", "fedsgd"}


@pytest.mark.parametrize("name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.drill) for n in SUMS])
def test_the_server_steps_as_with_the_plain_sum_though_a_third_drops_out(name):
    problem = fp.Logistic(l2=0.01)
    algorithm = ALGORITHMS[name]().build(problem, CLIENTS, 1.0)
    w0, keys = problem.init(FEATURES, np.float64), [client_key(jax.random.key(0), 0, i) for i in range(CLIENTS)]
    joined = [algorithm.join(w0, batch(i), keys[i]) for i in range(CLIENTS)]
    server = algorithm.init(w0, jax.tree.map(lambda *a: np.stack(a), *(hello for _, hello in joined)))
    message = algorithm.broadcast(server)
    with jax.disable_jit():
        uploads = [
            algorithm.client_step(message, state, batch(i), Oracle(problem), keys[i])[1]
            for i, (state, _) in enumerate(joined)
        ]
    flat = [ravel_pytree(upload)[0] for upload in uploads]
    total = conversation(terms(CLIENTS, flat[0].size, bound=1e4), np.asarray(flat), {"mask": [1], "reveal": [4]}).total
    assert total.clients == (0, 2, 3, 4, 5)
    masked = ravel_pytree(uploads[0])[1](np.asarray(total.values, flat[0].dtype))
    plain = jax.tree.map(lambda *a: sum(a), *(uploads[i] for i in total.clients))
    stepped = [algorithm.server_step(server, sent, Streamed(np.asarray(5)))[0] for sent in (plain, masked)]
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=1e-9), *stepped)
    moved = jax.tree.map(lambda a, b: float(np.sum(np.abs(a - b))), stepped[0], server)
    assert max(jax.tree.leaves(moved)) > 1e-3


def test_there_are_such_algorithms():
    assert {"fedavg", *QUICK} <= set(SUMS)
