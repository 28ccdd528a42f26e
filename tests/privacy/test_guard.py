"""Noise from the operating system's secure source: as much of it as from a seed, and never the same twice."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.flatten_util import ravel_pytree

import fedpact as fp
from fedpact.core.contract import Batch, Cohort
from fedpact.core.errors import UnknownName
from fedpact.core.keys import client_key
from fedpact.core.vector import Vector
from fedpact.definition import Experiment, loop_of
from fedpact.privacy.guard import MARGIN, Guard, Noise
from fedpact.privacy.private import Private

SIZE, STEPS, SCALE, ROWS, CLIP = 4000, 64, 0.3, 8, 0.5
MECHANISMS = {
    "gaussian": None,
    "laplace": None,
    "discrete_gaussian": STEPS,
    "discrete_laplace": STEPS,
}
KEY = jax.random.key(0)


def flat(tree):
    return np.asarray(ravel_pytree(tree)[0])


def fits(mechanism, draws, scale):
    """Whether the draws have this σ or b, within five deviations of such an estimate; and no mean."""
    count = draws.size
    if mechanism.endswith("gaussian"):
        assert np.sqrt(np.mean(draws**2)) == pytest.approx(scale, rel=5 / np.sqrt(2 * count))
    else:
        assert np.mean(np.abs(draws)) == pytest.approx(scale, rel=5 / np.sqrt(count))
    assert abs(np.mean(draws)) < 5 * scale * np.sqrt(2 / count)


def on_lattice(values, scale):
    cells = values / (scale / STEPS)
    np.testing.assert_allclose(cells, np.rint(cells), atol=1e-6)


@pytest.mark.parametrize("compiled", [False, True], ids=["called", "compiled"])
@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_two_draws_of_the_system_differ_and_have_the_scale(mechanism, compiled):
    noise = Noise(mechanism, MECHANISMS[mechanism], source="system")
    v = Vector({"w": jnp.full((SIZE, 2), 7.0), "b": jnp.full(5, -3.0)})
    add = jax.jit(noise) if compiled else noise
    one, two = (add(v, SCALE, KEY) for _ in range(2))  # with one and the same key
    assert jax.tree.structure(one) == jax.tree.structure(v)
    draws = [flat(found - v) for found in (one, two)]
    assert np.mean(draws[0] == draws[1]) < 0.02  # two of a lattice meet now and then
    assert abs(np.corrcoef(draws)[0, 1]) < 5 / np.sqrt(draws[0].size)
    fits(mechanism, np.concatenate(draws), SCALE)
    if MECHANISMS[mechanism]:
        on_lattice(flat(one), SCALE)


def test_clients_stepped_together_draw_each_for_itself():
    noise, v = Noise("discrete_gaussian", STEPS, source="system"), Vector({"w": jnp.zeros((3, SIZE))})
    keys = jax.random.split(KEY, 3)
    drawn = jax.jit(jax.vmap(lambda v, key: noise(v, SCALE, key)))(v, keys).tree["w"]
    assert np.abs(np.corrcoef(drawn) - np.eye(3)).max() < 5 / np.sqrt(SIZE)
    fits("discrete_gaussian", np.asarray(drawn), SCALE)


def test_a_seed_repeats_its_draws_and_other_sources_are_refused():
    v = Vector({"w": jnp.zeros(50)})
    for mechanism, lattice in MECHANISMS.items():
        noise = Noise(mechanism, lattice)
        np.testing.assert_array_equal(flat(noise(v, SCALE, KEY)), flat(noise(v, SCALE, KEY)))
    with pytest.raises(UnknownName, match="source must be one of seed, system, got "):
        Noise("gaussian", source="sytem")


# The guard: what becomes of an upload in a round

FEDPDM, FEDAVG = fp.FedPDM(rho=2.0, rate=0.2, steps=3), fp.FedAvg(epochs=1, step=0.3)
#: Algorithm, privacy, and the scale of the noise in what is sent, for z = 3 and eight rows.
WAYS = {
    "once": (fp.FedEPM(k0=3, c=0.0, eta=0.5, mu0=1.0), {}, lambda plan: 3 * plan.moved(ROWS, 0) * (1 + MARGIN)),
    "convex": (FEDPDM, {"way": "convex", "reach": 1.0}, lambda plan: 3 * plan.moved(ROWS, 0) * (1 + MARGIN)),
    "client": (FEDPDM, {"way": "client"}, lambda plan: 3 * CLIP),
    "steps": (FEDAVG, {}, lambda plan: 0.3 * 3 * CLIP * (1 + MARGIN) / ROWS),
    "central": (FEDAVG, {"way": "client", "place": "central"}, lambda plan: 3 * CLIP),
}


def rounds(way, lattice):
    """A client's round as a compiled function of nothing, the guard in it, and the scale that is expected."""
    settings, kind, scale = WAYS[way]
    mechanism = {} if lattice is None else {"mechanism": "discrete_gaussian", "lattice": lattice}
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(ROWS, SIZE)), np.arange(ROWS) % 2.0
    federation = fp.data.Federation.from_arrays([(x, y)], classes=["0", "1"])
    private = Private(clip=CLIP, noise=3.0, **kind, **mechanism)
    loop = loop_of(Experiment(settings, fp.Logistic(l2=0.1), federation, rounds=1, privacy=private))
    plan, algorithm = loop.guard.plan, loop.algorithm
    guard = Guard(plan, fp.Logistic(l2=0.1), algorithm, source="system")
    batch = Batch(jnp.asarray(x), jnp.asarray(y), jnp.ones(ROWS), jnp.asarray(0, jnp.int32))
    w = Vector({"w": jnp.zeros(SIZE)})
    before, hello = algorithm.join(w, batch, client_key(KEY, 0, 0))
    msg = algorithm.broadcast(algorithm.init(w, jax.tree.map(lambda a: a[None], hello)))

    @jax.jit
    def sent():
        oracle = guard.oracle or loop.grad
        state, upload, _ = algorithm.client_step(msg, before, batch, oracle, client_key(KEY, 0, 0))
        state, upload = guard.released(msg, before, state, batch, upload, 0, KEY)
        if guard.central:
            everyone = Cohort((jnp.zeros(1, jnp.int32),), jnp.ones(1, bool))
            upload, _ = guard.summed(msg, jax.tree.map(lambda a: a[None], upload), everyone, KEY)
        return state, upload

    return sent, algorithm, msg, before, scale(plan)


@pytest.mark.parametrize("lattice", [None, STEPS], ids=["doubles", "lattice"])
@pytest.mark.parametrize(
    "way", [pytest.param(way, marks=[pytest.mark.drill] * (way not in ("convex", "steps"))) for way in WAYS]
)
def test_a_guard_that_draws_from_the_system(way, lattice):
    """The same round twice, of the same key: what is sent differs by two noises."""
    sent, algorithm, msg, before, scale = rounds(way, lattice)
    (state, one), (_, two) = sent(), sent()
    fits("gaussian", flat(one) - flat(two), np.sqrt(2) * scale)
    if lattice is not None:  # two releases are whole steps apart, whatever is added to both
        on_lattice(flat(one) - flat(two), scale)
    if way in ("once", "convex"):  # the client keeps what was sent, and no other draw
        kept = algorithm.commit(msg, before, one)
        for mine, theirs in zip(jax.tree.leaves(state), jax.tree.leaves(kept), strict=True):
            np.testing.assert_allclose(mine, theirs, rtol=1e-12, atol=1e-14)
