"""What a server of nodes holds of a round: all uploads until it closes, for they are added in the clients' order."""

from __future__ import annotations

import tracemalloc

import jax
import jax.numpy as jnp
import numpy as np

import fedpact as fp
from fedpact.core.contract import Batch, Cohort
from fedpact.core.wire import Message
from fedpact.engines.flower import Away, FlowerEngine, Remote
from fedpact.scaling import costs

NUMBERS, CLIENTS = 500_000, 8


def upload(i):
    return np.random.default_rng(i).normal(size=NUMBERS).astype(np.float32)


class Sending:
    """Everyone answers with a large upload, in this order."""

    def __init__(self, order):
        self.names, self.order = [str(i) for i in range(CLIENTS)], order

    def ask(self, questions, deadline, enough, patience):
        about = lambda i: {"client": i, "round": 0, "based": 0, "version": 1, "digest": "d"}
        return {i: Message("step", about(i), [upload(i)]) for i in self.order}

    def late(self):
        return []


def stepped(order):
    """The sum of a round's uploads, and the most memory that it took."""
    engine = FlowerEngine().over(Sending(order))
    line = jax.ShapeDtypeStruct((1,), np.float32)
    first = Batch(jax.ShapeDtypeStruct((1, 1), np.float32), line, line, jax.ShapeDtypeStruct((), np.int32))
    f = lambda shared, batch, state: (state, shared[0], jnp.zeros(()))
    states = Away(lambda client: line, engine._running)
    cohort = Cohort((jnp.arange(CLIENTS),), jnp.ones(CLIENTS, bool))
    shared = (jnp.zeros(NUMBERS, jnp.float32), 0, jax.random.key(0))
    tracemalloc.start()
    done = engine.step(f, shared, Remote(CLIENTS, first), states, cohort, "sum", (0, "client_step"))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return np.asarray(done.uploads), peak


def test_the_order_of_the_answers_changes_no_bit_of_their_sum():
    forth, back = range(CLIENTS), range(CLIENTS)[::-1]
    one, other = (sum(map(upload, order), np.zeros(NUMBERS, np.float32)) for order in (forth, back))
    assert not np.array_equal(one, other)  # the order of additions is seen in these numbers
    assert np.array_equal(stepped(forth)[0], one)
    assert np.array_equal(stepped(back)[0], one)


def test_a_round_holds_its_uploads_until_it_closes():
    """More than a stream's memory, and no more than is told."""
    found = costs(fp.FedAvg(), fp.Logistic(), NUMBERS, CLIENTS, 1.0)
    assert found.memory < CLIENTS * found.up < stepped(range(CLIENTS))[1] < found.memory_flower
