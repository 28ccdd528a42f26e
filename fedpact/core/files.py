"""Files that are whole or absent: written to a temporary name, synced, renamed, the folder synced. And JSON in them."""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import tempfile
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fedpact.core.errors import CheckpointError, OutputError


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


def private_folder(path: Path) -> None:
    """Make a folder, which nobody else can look into if it is new."""
    new = not path.exists()
    make_folder(path)
    if new:
        with writing(path):
            path.chmod(0o700)


def own_folder(path: Path, its: Collection[str], beside: Collection[str] = ()) -> None:
    """Make a folder that nobody else can look into; one that is there becomes such a folder if it is empty, but for
    what may lie `beside`, or has one of `its` files. Any other is left alone, and refused where it is open to others.
    """
    private_folder(path)
    with writing(path):
        names = {one.name for one in path.iterdir()} - set(beside)
        if names and names.isdisjoint(its):
            if path.stat().st_mode & 0o077:
                raise OutputError(
                    f"state must be a folder of its own, got {str(path)!r}, which is open to others and has other "
                    f"files in it. Give a new one, or close it to others if that is what you want: chmod 700."
                )
            return
        path.chmod(0o700)


def check_writable(folder: str | os.PathLike[str]) -> None:
    """Refuse now a folder that could not be written to at the end; what is made to find out is removed again."""
    root = Path(folder)
    made: list[Path] = []
    with writing(root):
        try:
            _make_missing(root, made)
            with tempfile.TemporaryFile(dir=root):
                pass
        finally:
            for path in reversed(made):
                path.rmdir()


def write_atomic(path: Path, content: bytes, mode: int = 0o666) -> None:
    """Write a file so that it is there whole or not at all, also after a crash. `mode` is less the user's umask."""
    with writing(path.parent):
        _rename_all({path: content}, mode)


def write_files(folder: str | os.PathLike[str], contents: Mapping[str, bytes]) -> Path:
    """Write `{relative path: bytes}` under `folder`, made if need be.

    Every file is complete under a temporary name before the first is renamed. A failure removes the temporary files
    and the folders made for them.
    """
    root = Path(folder)
    made: list[Path] = []
    with writing(root):
        try:
            for relative in contents:
                _make_missing((root / relative).parent, made)
            _rename_all({root / relative: content for relative, content in contents.items()})
        except BaseException:  # an interrupt leaves nothing behind either
            for path in reversed(made):
                with contextlib.suppress(OSError):  # not empty: a file was already renamed into it
                    path.rmdir()
            raise
    return root


def _rename_all(contents: Mapping[Path, bytes], mode: int = 0o666) -> None:
    staged = {path.with_name(f".{path.name}.{os.getpid()}.tmp"): path for path in contents}
    try:
        for temporary, path in staged.items():
            _write_synced(temporary, "wb", contents[path], mode)
        for temporary, path in staged.items():
            os.replace(temporary, path)
    finally:
        for temporary in staged:
            temporary.unlink(missing_ok=True)
    for folder in dict.fromkeys(path.parent for path in contents):
        sync_folder(folder)


def remove_torn(folder: Path) -> None:
    """Remove what a process left in a folder that was killed while it wrote there."""
    with writing(folder):
        for torn in folder.glob(".*.tmp"):
            torn.unlink(missing_ok=True)


def _make_missing(folder: Path, made: list[Path]) -> None:
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    for path in reversed(missing):
        path.mkdir(exist_ok=True)
        made.append(path)
    if not folder.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, "a file is in its place", str(folder))


def append_synced(path: Path, content: bytes) -> None:
    """Append to a file and sync it."""
    with writing(path.parent):
        _write_synced(path, "ab", content)


def _write_synced(path: Path, how: str, content: bytes, mode: int = 0o666) -> None:
    with open(path, how, opener=lambda name, flags: os.open(name, flags, mode)) as file:
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


def json_text(values: Any) -> str:
    """Readable JSON; numbers that are not finite become null."""

    def plain(value: Any) -> Any:
        if isinstance(value, dict):
            return {str(k): plain(v) for k, v in value.items()}
        if isinstance(value, (list, tuple)):
            return [plain(v) for v in value]
        return None if isinstance(value, float) and not math.isfinite(value) else value

    return json.dumps(plain(values), indent=2, ensure_ascii=False, default=str) + "\n"


def write_json(path: Path, values: Any) -> None:
    """Write a JSON file, whole or not at all."""
    write_atomic(path, json_text(values).encode())


def read_json(path: Path, hint: str) -> dict[str, Any]:
    """The table that a JSON file holds; `hint` is what to do about a damaged one."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        values = None
    if not isinstance(values, dict):
        raise CheckpointError(f"{path.name} must be whole, got a damaged file {path}. {hint}")
    return values
