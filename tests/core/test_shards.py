"""The server's step in shards over coordinates equals the whole one to the last bit."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedpact as fp
from fedpact.algorithms import fedepm, fedpdm
from fedpact.core import shards
from fedpact.core.contract import Cohort, column_mean
from fedpact.core.shards import Kept, Shards, settled
from fedpact.core.vector import Vector
from fedpact.engines import HostEngine

CLIENTS, SHAPES = 40, ((7, 9), (700,))
SEPARABLE = {
    "fedepm": fp.FedEPM(),
    "fedpdm": fp.FedPDM(memory=True),
    "fedpdm-l1": fp.FedPDM(memory=True, regulariser={"name": "l1", "gamma": 0.3}),
    "fedpdm-box": fp.FedPDM(memory=True, regulariser={"name": "box", "low": -0.1, "high": 0.1}),
}


def vector(seed: int, *front: int) -> Vector:
    rng = np.random.default_rng(seed)
    return Vector({f"layer {i}": jnp.asarray(rng.normal(size=(*front, *s))) for i, s in enumerate(SHAPES)})


def messages(name: str):
    """w⁰ and the hellos, and two rounds of uploads with their cohorts."""
    module = fedepm if name == "fedepm" else fedpdm
    hello = fedepm.Hello(vector(1, CLIENTS)) if name == "fedepm" else fedpdm.Hello(None)
    rounds = []
    for seed, who in ((2, [3, 0, 21]), (3, [39, 3])):
        cohort = Cohort((jnp.asarray(who, jnp.int32),), jnp.ones(len(who), bool))
        rounds.append((module.Upload(vector(seed, len(who))), cohort))
    return vector(0), hello, rounds


def plain(server):
    """A state with its kept messages stacked as the algorithm has them."""
    likes = [jnp.zeros(s) for s in SHAPES]

    def stacked(v: Vector) -> Vector:
        leaves = jax.tree.leaves(v.tree, is_leaf=shards.is_kept)
        whole = [
            a.array.T.reshape(CLIENTS, *b.shape) if shards.is_kept(a) else a for a, b in zip(leaves, likes, strict=True)
        ]
        return Vector({f"layer {i}": jnp.asarray(a) for i, a in enumerate(whole)})

    return type(server)(*(stacked(v) if isinstance(v, Vector) else v for v in server))


def assert_same_bits(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_array_equal(np.asarray(x), np.asarray(y))


@pytest.mark.parametrize("width", [1, 33, 10**6])
@pytest.mark.parametrize("name", SEPARABLE)
def test_shards_equal_the_whole_step_to_the_last_bit(name, width, monkeypatch):
    if width == 1:
        monkeypatch.setitem(globals(), "SHAPES", ((2, 3), (5,)))  # every coordinate is a step of its own
    monkeypatch.setattr(shards, "SHARD", width * CLIENTS * 8)
    bundle = SEPARABLE[name].build(fp.Logistic(), CLIENTS, 0.1)
    w0, hello, rounds = messages(name)
    sharded = Shards(bundle, CLIENTS)
    whole, parts = jax.jit(bundle.init)(w0, hello), sharded.init(w0, hello)
    assert_same_bits(plain(parts), whole)
    step = jax.jit(bundle.server_step)
    for uploads, cohort in rounds:
        whole, told = step(whole, uploads, cohort)
        parts, info = sharded.step(parts, uploads, cohort)
        parts = settled(parts)
        assert_same_bits(plain(parts), whole)
        np.testing.assert_allclose(np.array(info), np.array(told), rtol=1e-12)


@pytest.mark.parametrize(("clients", "columns", "kind"), [(300, 1000, np.float64), (20_000, 30, np.float32)])
def test_shards_of_a_step_that_is_searched_a_few_columns_at_a_time(clients, columns, kind, monkeypatch):
    """The whole is above fedepm.WHOLE and cut by the search itself; the shards are below it and are not."""
    rng = np.random.default_rng(0)
    w0, z = Vector(jnp.zeros(columns, kind)), Vector(jnp.asarray(rng.normal(size=(clients, columns)).astype(kind)))
    who = jnp.asarray([5, 2, clients - 1], jnp.int32)
    sent = fedepm.Upload(Vector(jnp.asarray(rng.normal(size=(3, columns)).astype(kind))))
    cohort = Cohort((who,), jnp.ones(3, bool))
    bundle = fp.FedEPM().build(fp.Logistic(), clients, 0.1)
    whole = jax.jit(bundle.server_step)(jax.jit(bundle.init)(w0, fedepm.Hello(z)), sent, cohort)[0]
    monkeypatch.setattr(shards, "SHARD", 7 * clients * z.tree.dtype.itemsize)
    assert z.tree.nbytes > fedepm.WHOLE > shards.SHARD
    sharded = Shards(bundle, clients)
    parts = settled(sharded.step(sharded.init(w0, fedepm.Hello(z)), sent, cohort)[0])
    np.testing.assert_array_equal(np.asarray(parts.w.tree), np.asarray(whole.w.tree))
    np.testing.assert_array_equal(parts.z.tree.array.T, np.asarray(whole.z.tree))


def test_a_round_that_is_not_kept_leaves_the_messages_as_they_were():
    bundle = fp.FedEPM().build(fp.Logistic(), CLIENTS, 0.1)
    w0, hello, rounds = messages("fedepm")
    sharded = Shards(bundle, CLIENTS)
    server = sharded.init(w0, hello)
    before = [leaf.copy() for leaf in jax.tree.leaves(server.z)]
    new, _ = sharded.step(server, *rounds[0])
    for leaf, old in zip(jax.tree.leaves(server.z), before, strict=True):
        np.testing.assert_array_equal(leaf, old)
    settled(new)
    changed = [
        np.flatnonzero((leaf != old).any(axis=0)).tolist()
        for leaf, old in zip(jax.tree.leaves(server.z), before, strict=True)
    ]
    assert changed == [[0, 3, 21]] * 2


def test_messages_from_a_checkpoint_are_moved_to_where_they_can_be_written():
    bundle = fp.FedEPM().build(fp.Logistic(), CLIENTS, 0.1)
    w0, hello, rounds = messages("fedepm")
    sharded = Shards(bundle, CLIENTS)
    server = sharded.init(w0, hello)
    loaded = jax.tree.map(jnp.array, server)
    assert all(isinstance(leaf, Kept) for leaf in jax.tree.leaves(loaded.z.tree, is_leaf=shards.is_kept))
    one, other = (settled(sharded.step(state, *rounds[0])[0]) for state in (loaded, server))
    assert_same_bits(plain(one), plain(other))


def test_an_empty_round_keeps_everything():
    bundle = fp.FedPDM(memory=True).build(fp.Logistic(), CLIENTS, 0.1)
    w0, hello, rounds = messages("fedpdm")
    sharded = Shards(bundle, CLIENTS)
    server = sharded.init(w0, hello)
    nobody = Cohort((jnp.zeros(3, jnp.int32),), jnp.zeros(3, bool))
    new = settled(sharded.step(server, rounds[0][0], nobody)[0])
    assert_same_bits(plain(new)._replace(round=server.round), plain(server))


def test_what_couples_coordinates_is_not_cut():
    rows = fp.FedPDM(memory=True, regulariser={"name": "group_l1", "gamma": 0.1})
    assert rows.build(fp.Logistic(), 4, 1.0).separable is None
    capped = fp.Constrained(fp.Logistic(l2=0), fp.Loss() + fp.Norm2(), [fp.ClientLoss() <= 1.0])
    bundle = fp.SSCA().build(capped, 4, 1.0)
    assert bundle.combine == "each"
    assert bundle.separable is None


@pytest.mark.parametrize("settings", [fp.FedEPM(), fp.FedPDM(memory=True)], ids=["fedepm", "fedpdm"])
def test_a_run_in_mapped_shards_has_the_bits_of_one_in_memory(settings, monkeypatch):
    federation = fp.data.synthetic(rows=60, features=11).split(clients=6, seed=0)

    def model(engine):
        return fp.run(settings, fp.Logistic(l2=1e-3), federation, rounds=3, participation=0.5, engine=engine).model.w

    whole = model(HostEngine(at_once=1))
    monkeypatch.setattr(shards, "SHARD", 6 * 8 * 4)
    assert_same_bits(model(HostEngine(at_once=1, spill=True)), whole)


@pytest.mark.parametrize("spill", [False, True])
@pytest.mark.parametrize("settings", [fp.FedEPM(), fp.FedPDM(memory=True)], ids=["fedepm", "fedpdm"])
def test_a_run_with_kept_messages_resumes_to_the_same_bits(settings, spill, tmp_path, monkeypatch):
    monkeypatch.setattr(shards, "SHARD", 6 * 8 * 4)
    federation = fp.data.synthetic(rows=60, features=11).split(clients=6, seed=0)

    def go(rounds, **more):
        engine = HostEngine(at_once=1, spill=spill)
        options = {"rounds": rounds, "participation": 0.5, "engine": engine}
        return fp.run(settings, fp.Logistic(l2=1e-3), federation, **options, **more)

    straight = go(5)
    go(2, folder=tmp_path / "run", report=False)
    resumed = go(5, folder=tmp_path / "run", resume=True, report=False)
    assert_same_bits(resumed.model.w, straight.model.w)
    for name in ("objective", *(["spread"] if settings.name == "fedepm" else [])):
        np.testing.assert_array_equal(resumed.history.column(name), straight.history.column(name))


def test_the_mean_over_clients_does_not_depend_on_the_columns_beside_it():
    rows = np.random.default_rng(0).normal(size=(1001, 130)).astype(np.float32)
    whole = np.asarray(jax.jit(column_mean)(rows))
    for width in (1, 7, 64):
        cut = [np.asarray(jax.jit(column_mean)(rows[:, i : i + width])) for i in range(0, 130, width)]
        np.testing.assert_array_equal(np.concatenate(cut), whole)
    np.testing.assert_allclose(whole, rows.astype(np.float64).mean(axis=0), atol=1e-7)
