"""Client states on the host: made when first needed, kept in memory, or spilled to disk.

A store is a value: `put` returns a new one that shares what did not change, so that a round can be thrown away. Every
state has a version, the rounds done when it was made. On disk a state is a sealed file `clients/000012-000000007.bin`
(client, version), whole or absent: a checkpoint lists the versions it belongs to, and files that neither it nor the
one before it lists are removed.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from fedpact.core.errors import CheckpointError
from fedpact.core.files import make_folder, write_atomic, writing
from fedpact.core.sealed import seal, unseal

FOLDER = "clients"
#: Bytes from which on a state has memory of its own.
LARGE = 1 << 20


def packed(state: Any) -> Any:
    """The state's arrays copied into one mapping of their own, if they are large: it is given back as it was taken.

    Left where they were computed they are blocks between others that live for a moment, and allocators do not get the
    room between them back: 750 states of CNN1 held half as much again.
    """
    leaves, structure = jax.tree.flatten(jax.tree.map(np.asarray, state))
    ends = np.cumsum([-(-leaf.nbytes // 64) * 64 for leaf in leaves], dtype=np.int64)
    if not leaves or ends[-1] < LARGE:
        return state
    block = mmap.mmap(-1, int(ends[-1]))
    own = [
        np.ndarray(leaf.shape, leaf.dtype, block, begin) for leaf, begin in zip(leaves, [0, *ends[:-1]], strict=True)
    ]
    for into, leaf in zip(own, leaves, strict=True):
        into[...] = leaf
    return jax.tree.unflatten(structure, own)


def _name(client: int, version: int) -> str:
    return f"{client:06d}-{version:09d}.bin"


def _read(path: Path) -> list[np.ndarray]:
    found = unseal("client", path.read_bytes()) if path.is_file() else None
    if found is None:
        raise CheckpointError(
            f"state of a client must be whole, got a damaged or missing file {path}. "
            "Delete the newest checkpoint to resume from the one before it, or start the run again."
        )
    return [found[1][name] for name in sorted(found[1])]


def _write(path: Path, leaves: Iterable[np.ndarray]) -> None:
    write_atomic(path, seal("client", {}, {f"{i:06d}": leaf for i, leaf in enumerate(leaves)}))


@jax.tree_util.register_pytree_node_class
class Store:
    """Client → state. Clients that never took part have no entry: `make` computes theirs when it is asked for."""

    def __init__(self, make: Callable[[int], Any], spill: Path | None = None) -> None:
        self.make, self.spill = make, spill
        self.held: Mapping[int, list[np.ndarray] | None] = {}  # None: on disk
        self.versions: Mapping[int, int] = {}
        self.digests: Mapping[int, str] = {}  # of states that are elsewhere, to know them by
        self.structure: Any = None

    def __len__(self) -> int:
        return len(self.versions)

    def get(self, client: int) -> Any:
        """The client's state, as arrays of the host."""
        if client not in self.versions:
            return jax.tree.map(np.asarray, self.make(client))
        leaves = self.held[client]
        if leaves is None:
            assert self.spill is not None  # a state is only ever on disk where there is a folder for it
            leaves = _read(self.spill / _name(client, self.versions[client]))
        return jax.tree.unflatten(self.structure, leaves)

    def put(self, states: Mapping[int, Any], version: int) -> Store:
        """A store with these clients' states replaced."""
        new = Store(self.make, self.spill)
        new.structure = self.structure
        new.versions = {**self.versions, **dict.fromkeys(states, version)}
        held: dict[int, list[np.ndarray] | None] = dict(self.held)
        for client, state in states.items():
            leaves, new.structure = jax.tree.flatten(state)
            held[client] = [np.asarray(leaf) for leaf in leaves]
            if self.spill is not None:
                make_folder(self.spill)
                _write(self.spill / _name(client, version), held[client] or ())
                held[client] = None
        new.held = held
        return new

    def save(self, folder: Path) -> None:
        """Write the states that `folder` does not have yet."""
        if not self.versions:
            return
        make_folder(folder)
        for client, version in self.versions.items():
            path, leaves = folder / _name(client, version), self.held[client]
            if path.exists():
                continue
            if leaves is None:
                leaves = jax.tree.leaves(self.get(client))
            _write(path, leaves)

    def load(self, folder: Path, versions: Mapping[int, int], digests: Mapping[int, str] | None = None) -> Store:
        """A store of the states that `folder` holds in these versions; `digests` are of those that are elsewhere."""
        new = Store(self.make, self.spill)
        new.versions = dict(versions)
        held: dict[int, list[np.ndarray] | None] = {}
        for client, version in versions.items():
            held[client] = _read(folder / _name(client, version))
            if self.spill is not None:
                make_folder(self.spill)
                _write(self.spill / _name(client, version), held[client] or ())
                held[client] = None
        new.held = held
        new.structure = jax.tree.structure(self.make(next(iter(versions), 0)))
        return new

    def tree_flatten(self) -> tuple[tuple[()], Store]:
        """For JAX: a value without arrays of its own."""
        return (), self

    @classmethod
    def tree_unflatten(cls, store: Store, _: tuple[()]) -> Store:
        """For JAX: itself."""
        return store


def sweep(folder: Path, kept: Iterable[Mapping[int, int]]) -> None:
    """Remove the files of states that none of these tables of versions lists."""
    names = {_name(client, version) for versions in kept for client, version in versions.items()}
    if not folder.is_dir():
        return
    with writing(folder):
        for path in folder.iterdir():
            if path.name not in names:
                path.unlink(missing_ok=True)
