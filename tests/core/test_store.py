"""The store of client states: a value, in memory or on disk, whole or refused."""

from __future__ import annotations

from typing import NamedTuple

import jax
import numpy as np
import pytest

from fedpact.core import checkpoint
from fedpact.core.errors import CheckpointError
from fedpact.core.store import FOLDER, Store, sweep
from fedpact.core.vector import Vector


class State(NamedTuple):
    w: Vector
    times: object


def state(value):
    return State(Vector({"w": np.full(3, value, np.float32)}), np.int32(value))


def made(client):
    return state(100 + client)


def same(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert x.dtype == y.dtype
        np.testing.assert_array_equal(x, y)


@pytest.fixture(params=["memory", "disk"])
def empty(request, tmp_path):
    return Store(made, tmp_path / "spill" if request.param == "disk" else None)


def test_a_state_is_made_when_it_is_asked_for(empty):
    assert len(empty) == 0
    same(empty.get(7), state(107))
    assert len(empty) == 0  # and not kept: it can be made again


def test_put_leaves_the_old_store_as_it_was(empty):
    one = empty.put({2: state(1), 5: state(2)}, 1)
    two = one.put({5: state(3)}, 2)
    for store, expected in ((empty, (102, 105)), (one, (1, 2)), (two, (1, 3))):
        for client, value in zip((2, 5), expected, strict=True):
            same(store.get(client), state(value))
    assert (dict(one.versions), dict(two.versions)) == ({2: 1, 5: 1}, {2: 1, 5: 2})
    same(two.put({}, 3).get(5), state(3))


def test_what_did_not_change_is_shared_and_on_disk_nothing_is_held(empty):
    one = empty.put({2: state(1), 5: state(2)}, 1)
    two = one.put({5: state(3)}, 2)
    if empty.spill is None:
        assert two.held[2] is one.held[2]
        return
    assert set(two.held.values()) == {None}
    names = sorted(path.name for path in empty.spill.iterdir())
    assert names == ["000002-000000001.bin", "000005-000000001.bin", "000005-000000002.bin"]
    sweep(empty.spill, [two.versions])
    assert sorted(path.name for path in empty.spill.iterdir()) == ["000002-000000001.bin", "000005-000000002.bin"]
    same(two.get(2), state(1))


def test_saved_and_loaded_it_is_the_same(empty, tmp_path):
    store = empty.put({2: state(1)}, 1).put({5: state(3), 9: state(4)}, 6)
    store.save(tmp_path / "folder")
    written = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "folder").iterdir()}
    assert sorted(written) == ["000002-000000001.bin", "000005-000000006.bin", "000009-000000006.bin"]
    again = empty.load(tmp_path / "folder", store.versions, {})
    for client in (2, 5, 9, 4):
        same(again.get(client), store.get(client))
    again.put({2: state(8)}, 7).save(tmp_path / "folder")  # only what is new is written
    after = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "folder").iterdir()}
    assert {name: after[name] for name in written} == written
    assert set(after) - set(written) == {"000002-000000007.bin"}


def test_an_empty_store_is_saved_as_nothing(empty, tmp_path):
    empty.save(tmp_path / "folder")
    assert not (tmp_path / "folder").exists()
    assert len(empty.load(tmp_path / "folder", {})) == 0


@pytest.mark.parametrize("damage", ["cut", "flip", "missing", "other"])
def test_a_damaged_state_is_refused(damage, tmp_path):
    store = Store(made).put({2: state(1)}, 1)
    store.save(tmp_path)
    path = tmp_path / "000002-000000001.bin"
    whole = path.read_bytes()
    if damage == "missing":
        path.unlink()
    else:
        flipped = whole[:200] + bytes([whole[200] ^ 1]) + whole[201:]
        path.write_bytes({"cut": whole[:-1], "flip": flipped, "other": b"fedpact-model 1 0\n{}\n"}[damage])
    said = (
        r"^state of a client must be whole, got a damaged or missing file .+000002-000000001\.bin\. Delete the newest"
    )
    with pytest.raises(CheckpointError, match=said):
        Store(made).load(tmp_path, {2: 1})


def test_to_jax_it_is_a_value_without_arrays():
    store = Store(made).put({2: state(1)}, 1)
    assert jax.tree.leaves(store) == []
    assert jax.tree.map(lambda a: a + 1, (store, np.ones(2)))[0] is store


def test_a_checkpoint_lists_the_versions_and_two_checkpoints_keep_their_states(tmp_path):
    store = Store(made)
    settings = checkpoint.digest({})
    for t in (1, 2, 3, 4):
        store = store.put({t: state(t), 0: state(10 * t)}, t)
        checkpoint.save(tmp_path, (store, np.arange(t)), settings, t, 0, 0.0)
    names = sorted(path.name for path in (tmp_path / FOLDER).iterdir())
    assert names == [f"00000{c}-00000000{v}.bin" for c, v in ((0, 3), (0, 4), (1, 1), (2, 2), (3, 3), (4, 4))]
    found = checkpoint.load(tmp_path, settings)
    assert found.versions == {1: 1, 2: 2, 3: 3, 4: 4, 0: 4}
    back, _ = checkpoint.restore((Store(made), np.zeros(4, int)), found.leaves, (tmp_path, found.versions, {}))
    same(back.get(0), state(40))
    same(back.get(3), state(3))
    (tmp_path / "checkpoint-000000004.bin").unlink()
    found = checkpoint.load(tmp_path, settings)
    back, _ = checkpoint.restore((Store(made), np.zeros(3, int)), found.leaves, (tmp_path, found.versions, {}))
    same(back.get(0), state(30))
