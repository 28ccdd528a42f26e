"""Files that are whole or absent: written to a temporary name, synced, renamed, the folder synced."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fedpact.core.errors import OutputError


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn the system's refusal to write into a sentence."""
    try:
        yield
    except OSError as error:
        if isinstance(error, OutputError):
            raise
        why = "the disk is full" if error.errno == errno.ENOSPC else (error.strerror or str(error))
        raise OutputError(
            f"output folder must be writable, got {str(path)!r}: {why}. "
            "Choose another folder or free some room; what was written before is whole."
        ) from error


def make_folder(path: Path) -> None:
    """Make a folder and its parents."""
    with writing(path):
        path.mkdir(parents=True, exist_ok=True)


def write_atomic(path: Path, content: bytes) -> None:
    """Write a file so that it is there whole or not at all, also after a crash."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with writing(path.parent):
        try:
            with temporary.open("wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)
        sync_folder(path.parent)


def append_synced(path: Path, content: bytes) -> None:
    """Append to a file and sync it."""
    with writing(path.parent), path.open("ab") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def sync_folder(path: Path) -> None:
    """Sync a folder, so that a rename in it survives a crash."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
