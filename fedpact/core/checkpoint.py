"""Checkpoints: one sealed file each, whole or absent, that knows which settings it belongs to.

The header holds the digest of the settings, so that another experiment's checkpoint is refused, the round, and how much
of history.csv belongs to it, with the digest of that part; the arrays are those of the loop's carry, in order. The seal
refuses a damaged file. Client states that an engine keeps on the host are files of their own (`core.store`), written
before the checkpoint that lists their versions.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from fedpact.core.errors import CheckpointError
from fedpact.core.files import write_atomic
from fedpact.core.sealed import seal, unseal
from fedpact.core.store import FOLDER, Store, sweep

KEPT = 2


class Checkpoint(NamedTuple):
    """What a checkpoint file holds."""

    round: int
    history_bytes: int
    elapsed: float
    leaves: list[np.ndarray]
    history_digest: str = ""
    versions: Mapping[int, int] = {}
    ledger: tuple[int, str] | None = None  # lines and last hash of the privacy ledger
    digests: Mapping[int, str] = {}  # of the states of clients that keep their own


def digest(values: Mapping[str, Any]) -> str:
    """sha256 of plain settings, independent of key order."""
    return hashlib.sha256(json.dumps(values, sort_keys=True, default=str).encode()).hexdigest()


def _files(folder: Path) -> list[Path]:
    return sorted(folder.glob("checkpoint-*.bin"))


def save(
    folder: Path,
    carry: Any,
    settings: str,
    round_number: int,
    history_bytes: int,
    elapsed: float,
    history_digest: str = "",
    ledger: tuple[int, str] | None = None,
) -> Path:
    """Write the carry after a round; older checkpoints than the last two are removed afterwards."""
    store = _store(carry)
    arrays = {f"{i:06d}": np.asarray(leaf) for i, leaf in enumerate(jax.tree.leaves(carry))}
    header: dict[str, Any] = {
        "settings": settings,
        "round": round_number,
        "history_bytes": history_bytes,
        "elapsed": elapsed,
    }
    header["history_digest"] = history_digest
    if ledger is not None:
        header["ledger"] = list(ledger)
    if store is not None:
        store.save(folder / FOLDER)
        header["versions"] = {str(client): version for client, version in store.versions.items()}
        header["digests"] = {str(client): digest for client, digest in store.digests.items()}
    path = folder / f"checkpoint-{round_number:09d}.bin"
    write_atomic(path, seal("checkpoint", header, arrays))
    for old in _files(folder)[:-KEPT]:
        old.unlink(missing_ok=True)
    if store is not None:
        sweep(folder / FOLDER, [_versions(file) for file in _files(folder)])
    return path


def _store(carry: Any) -> Store | None:
    """The store of client states in a carry, where an engine keeps one."""
    parts = jax.tree.leaves(carry, is_leaf=lambda node: isinstance(node, Store))
    return next((part for part in parts if isinstance(part, Store)), None)


def _versions(path: Path) -> dict[int, int]:
    found = unseal("checkpoint", path.read_bytes())
    return {} if found is None else {int(k): v for k, v in found[0].get("versions", {}).items()}


def load(folder: Path, settings: str, differs: str = "") -> Checkpoint | None:
    """The newest checkpoint of a folder, or None when there is none yet.

    `differs` is what is known of how the settings differ where they do.
    """
    files = _files(folder)
    if not files:
        return None
    path = files[-1]
    found = unseal("checkpoint", path.read_bytes()) if path.is_file() else None
    if found is None:
        hint = f"Delete it to resume from {files[-2].name}." if len(files) > 1 else "Delete it to start the run again."
        raise CheckpointError(f"checkpoint must be whole, got a damaged file {path}. {hint}")
    header, arrays = found
    if header["settings"] != settings:
        others = f"settings {header['settings'][:12]} where this run has {settings[:12]}"
        others = f"others: {differs}" if differs else others
        raise CheckpointError(
            f"checkpoint must come from the same settings and data, got {path} of {others}. "
            "Resume with the settings it was made with, or choose a new folder."
        )
    leaves = [arrays[name] for name in sorted(arrays)]
    versions = {int(client): version for client, version in header.get("versions", {}).items()}
    return Checkpoint(
        header["round"],
        header["history_bytes"],
        header["elapsed"],
        leaves,
        header.get("history_digest", ""),
        versions,
        tuple(header["ledger"]) if "ledger" in header else None,
        {int(client): text for client, text in header.get("digests", {}).items()},
    )


def restore(carry: Any, leaves: list[np.ndarray], states: tuple[Path, Mapping[int, int], Any] | None = None) -> Any:
    """A carry of the same structure with the checkpoint's arrays.

    `states` are the folder, the versions and the digests of client states that are files of their own.
    """
    old, tree = jax.tree.flatten(carry)
    same = len(old) == len(leaves) and all(
        a.shape == b.shape and a.dtype == b.dtype for a, b in zip(old, leaves, strict=False)
    )
    if not same:
        raise CheckpointError(
            "checkpoint must have this run's shapes, got others. Its model or data are of other sizes, or another "
            "version made it: resume with what it was made with, or choose a new folder."
        )
    new = jax.tree.unflatten(tree, [jax.numpy.asarray(leaf) for leaf in leaves])
    if states is None or _store(carry) is None:
        return new
    folder, versions, digests = states
    is_store = lambda node: isinstance(node, Store)
    load = lambda node: node.load(folder / FOLDER, versions, digests) if is_store(node) else node
    return jax.tree.map(load, new, is_leaf=is_store)
