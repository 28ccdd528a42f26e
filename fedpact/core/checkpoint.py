"""Checkpoints: one file each, whole or absent, that knows which settings it belongs to.

    line 1   "fedpact-checkpoint 1"
    line 2   JSON: settings (digest), round, history_bytes, sha256 and length of what follows
    rest     the arrays of the loop's carry, in order, as one .npz

The digest of line 2's settings refuses another experiment's checkpoint; the sha256 refuses a damaged file.
"""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from fedpact.core.errors import CheckpointError
from fedpact.core.files import write_atomic

MAGIC = b"fedpact-checkpoint 1\n"
KEPT = 2


class Checkpoint(NamedTuple):
    """What a checkpoint file holds."""

    round: int
    history_bytes: int
    elapsed: float
    leaves: list[np.ndarray]


def digest(values: Mapping[str, Any]) -> str:
    """sha256 of plain settings, independent of key order."""
    return hashlib.sha256(json.dumps(values, sort_keys=True, default=str).encode()).hexdigest()


def _files(folder: Path) -> list[Path]:
    return sorted(folder.glob("checkpoint-*.bin"))


def save(folder: Path, carry: Any, settings: str, round_number: int, history_bytes: int, elapsed: float) -> Path:
    """Write the carry after a round; older checkpoints than the last two are removed afterwards."""
    buffer = io.BytesIO()
    leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(carry)]
    np.savez(buffer, *leaves, allow_pickle=False)
    payload = buffer.getvalue()
    header = {
        "settings": settings,
        "round": round_number,
        "history_bytes": history_bytes,
        "elapsed": elapsed,
        "sha256": hashlib.sha256(payload).hexdigest(),
        "length": len(payload),
    }
    path = folder / f"checkpoint-{round_number:09d}.bin"
    write_atomic(path, MAGIC + json.dumps(header).encode() + b"\n" + payload)
    for old in _files(folder)[:-KEPT]:
        old.unlink(missing_ok=True)
    return path


def load(folder: Path, settings: str) -> Checkpoint | None:
    """The newest checkpoint of a folder, or None when there is none yet."""
    files = _files(folder)
    if not files:
        return None
    path = files[-1]
    content = path.read_bytes()
    magic, _, rest = content.partition(b"\n")
    line, _, payload = rest.partition(b"\n")
    hint = f"Delete it to resume from {files[-2].name}." if len(files) > 1 else "Delete it to start the run again."
    try:
        header = json.loads(line)
        sound = (
            magic + b"\n" == MAGIC
            and len(payload) == header["length"]
            and hashlib.sha256(payload).hexdigest() == header["sha256"]
        )
    except (ValueError, KeyError, TypeError):
        sound = False
    if not sound:
        raise CheckpointError(f"checkpoint must be whole, got a damaged file {path}. {hint}")
    if header["settings"] != settings:
        raise CheckpointError(
            f"checkpoint must come from the same settings and data, got {path} of settings {header['settings'][:12]} "
            f"where this run has {settings[:12]}. Resume with the settings it was made with, or choose a new folder."
        )
    with np.load(io.BytesIO(payload), allow_pickle=False) as arrays:
        leaves = [arrays[f"arr_{i}"] for i in range(len(arrays.files))]
    return Checkpoint(header["round"], header["history_bytes"], header["elapsed"], leaves)


def restore(carry: Any, leaves: list[np.ndarray]) -> Any:
    """A carry of the same structure with the checkpoint's arrays."""
    old, tree = jax.tree.flatten(carry)
    same = len(old) == len(leaves) and all(
        a.shape == b.shape and a.dtype == b.dtype for a, b in zip(old, leaves, strict=False)
    )
    if not same:
        raise CheckpointError("checkpoint must have this run's shapes, got others. It was made by another version.")
    return jax.tree.unflatten(tree, [jax.numpy.asarray(leaf) for leaf in leaves])
