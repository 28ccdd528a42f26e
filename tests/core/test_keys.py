"""Random keys: one stream for each (seed, round, client, purpose), and no two the same."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np

from fedpact.core.keys import JOIN_ROUND, Purpose, client_key, host_generator

SEEDS, ROUNDS, CLIENTS = (0, 1, 2, 3, 10), (0, 1, 2, 3, 4, JOIN_ROUND), range(5)


def bits(seed, t, client, purpose):
    return tuple(np.asarray(jax.random.key_data(client_key(jax.random.key(seed), t, client)(purpose))).tolist())


def test_every_key_is_its_own():
    places = list(itertools.product(SEEDS, ROUNDS, CLIENTS, Purpose))
    assert len({bits(*place) for place in places}) == len(places)


def test_a_key_is_the_same_whenever_and_wherever_it_is_asked_for():
    root = jax.random.key(7)
    expected = bits(7, 3, 4, Purpose.NOISE)
    key = client_key(root, 3, 4)
    key(Purpose.LOCAL)  # asking for another purpose first changes nothing
    assert tuple(np.asarray(jax.random.key_data(key(Purpose.NOISE))).tolist()) == expected
    traced = jax.jit(lambda t, i: jax.random.key_data(client_key(root, t, i)(Purpose.NOISE)))
    assert tuple(np.asarray(traced(jnp.asarray(3), jnp.asarray(4, jnp.int32))).tolist()) == expected
    many = jax.vmap(lambda i: jax.random.key_data(client_key(root, 3, i)(Purpose.NOISE)))(jnp.arange(6))
    assert tuple(np.asarray(many[4]).tolist()) == expected


def test_the_host_s_streams_are_their_own_too():
    places = list(itertools.product(SEEDS, ROUNDS, Purpose))
    first = {tuple(host_generator(*place).integers(0, 2**63, 2).tolist()) for place in places}
    assert len(first) == len(places)
    a, b = host_generator(5, 6, Purpose.COVER), host_generator(5, 6, Purpose.COVER)
    np.testing.assert_array_equal(a.random(10), b.random(10))


def test_joining_never_shares_a_round_s_number():
    assert JOIN_ROUND > 10**9
    assert len(set(Purpose)) == len({int(p) for p in Purpose})
