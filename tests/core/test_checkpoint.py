"""Checkpoints: the same bits back, or a refusal."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedpact.core import checkpoint
from fedpact.core.errors import CheckpointError
from fedpact.core.vector import Vector

SETTINGS = checkpoint.digest({"k0": 12})


class Carry(NamedTuple):
    w: Vector
    round: object
    flags: object
    recent: dict


def carry(seed=0):
    rng = np.random.default_rng(seed)
    w = rng.normal(size=(3, 2))
    w[0, 0], w[1, 1] = np.nan, -0.0
    return Carry(
        Vector({"w": jnp.asarray(w), "b": jnp.asarray(rng.normal(size=3), jnp.float32)}),
        jnp.asarray(7),
        jnp.array([True, False]),
        {"objective": jnp.asarray([np.nan, np.inf, 5e-324])},
    )


def save(folder, seed=0, round_number=7, **changes):
    values = {"settings": SETTINGS, "round_number": round_number, "history_bytes": 1234, "elapsed": 0.1} | changes
    return checkpoint.save(folder, carry(seed), **values)


def same_bits(a, b):
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert x.dtype == y.dtype
        assert np.asarray(x).tobytes() == np.asarray(y).tobytes()


def test_what_is_saved_comes_back_to_the_bit(tmp_path):
    save(tmp_path)
    found = checkpoint.load(tmp_path, SETTINGS)
    assert (found.round, found.history_bytes, found.elapsed) == (7, 1234, 0.1)
    back = checkpoint.restore(carry(seed=9), found.leaves)
    same_bits(back, carry())
    assert isinstance(back, Carry)
    assert isinstance(back.w, Vector)


def test_many_leaves_keep_their_order(tmp_path):
    leaves = [jnp.asarray(float(i)) for i in range(25)]
    checkpoint.save(tmp_path, leaves, SETTINGS, 1, 0, 0.0)
    assert [float(leaf) for leaf in checkpoint.load(tmp_path, SETTINGS).leaves] == list(range(25))


def test_no_checkpoint_yet(tmp_path):
    assert checkpoint.load(tmp_path, SETTINGS) is None


@pytest.mark.parametrize("pattern", [0x01, 0x80])
def test_a_damaged_byte_anywhere_is_refused(tmp_path, pattern):
    path = save(tmp_path)
    whole = path.read_bytes()
    accepted = []
    for position in [*range(500), *range(500, len(whole), 5)]:  # every byte of the header, every fifth of the arrays
        path.write_bytes(whole[:position] + bytes([whole[position] ^ pattern]) + whole[position + 1 :])
        try:
            checkpoint.load(tmp_path, SETTINGS)
        except CheckpointError:
            continue
        except Exception as error:
            accepted.append((position, type(error).__name__))
            continue
        accepted.append((position, "accepted"))
    shown = [(whole[max(0, p - 12) : p + 6], what) for p, what in accepted[:5]]
    assert not accepted, f"{len(accepted)} bytes of {len(whole)} can be damaged without a CheckpointError: {shown}"


def test_a_cut_file_is_refused(tmp_path):
    path = save(tmp_path)
    whole = path.read_bytes()
    for length in [*range(0, 400, 7), *range(400, len(whole), 97), len(whole) - 1]:
        path.write_bytes(whole[:length])
        with pytest.raises(CheckpointError, match=r"^checkpoint must be whole, got a damaged file .+\. Delete it to "):
            checkpoint.load(tmp_path, SETTINGS)
    path.write_bytes(whole + b"\0")
    with pytest.raises(CheckpointError):
        checkpoint.load(tmp_path, SETTINGS)


def test_a_damaged_file_points_to_the_one_before(tmp_path):
    save(tmp_path, round_number=5)
    path = save(tmp_path, round_number=9)
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match=r"Delete it to resume from checkpoint-000000005\.bin\.$"):
        checkpoint.load(tmp_path, SETTINGS)
    path.unlink()
    assert checkpoint.load(tmp_path, SETTINGS).round == 5
    (tmp_path / "checkpoint-000000005.bin").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"Delete it to start the run again\.$"):
        checkpoint.load(tmp_path, SETTINGS)


def test_other_settings_are_refused(tmp_path):
    save(tmp_path)
    other = checkpoint.digest({"k0": 13})
    with pytest.raises(CheckpointError, match=r"^checkpoint must come from the same settings and data, got ") as caught:
        checkpoint.load(tmp_path, other)
    assert SETTINGS[:12] in str(caught.value)
    assert other[:12] in str(caught.value)


def test_the_digest_is_of_the_values_not_of_their_order():
    a = {"k0": 12, "run": {"seed": 0, "stop": None}, "rho": 0.5}
    assert checkpoint.digest(a) == checkpoint.digest({"rho": 0.5, "run": {"stop": None, "seed": 0}, "k0": 12})
    others = [a | {"k0": 13}, a | {"rho": 0.25}, a | {"run": {"seed": 1, "stop": None}}, {"k0": 12}]
    assert len({checkpoint.digest(v) for v in (a, *others)}) == 5


def test_two_are_kept(tmp_path):
    for t in (1, 2, 3, 10, 100):
        save(tmp_path, seed=t, round_number=t)
    names = [p.name for p in sorted(tmp_path.iterdir())]
    assert names == ["checkpoint-000000010.bin", "checkpoint-000000100.bin"]
    found = checkpoint.load(tmp_path, SETTINGS)
    assert found.round == 100
    same_bits(checkpoint.restore(carry(), found.leaves), carry(seed=100))


def test_arrays_of_other_shapes_types_or_number_are_refused(tmp_path):
    save(tmp_path)
    leaves = checkpoint.load(tmp_path, SETTINGS).leaves
    wrong = [leaves[:-1], [*leaves, np.zeros(1)], [leaves[0][:2], *leaves[1:]], [leaves[0].astype(float), *leaves[1:]]]
    for changed in wrong:
        with pytest.raises(CheckpointError, match=r"^checkpoint must have this run's shapes, got others\. "):
            checkpoint.restore(carry(), changed)


def test_a_failed_save_leaves_the_last_checkpoint(tmp_path, monkeypatch):
    save(tmp_path, round_number=3)
    before = {p.name: p.read_bytes() for p in tmp_path.iterdir()}

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="the disk is full"):
        save(tmp_path, seed=1, round_number=4)
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == before
