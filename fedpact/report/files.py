"""Writing a folder all at once: every file under a temporary name first, then renamed, or nothing at all."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from pathlib import Path

from fedpact.core.errors import OutputError


def write_files(folder: str | os.PathLike[str], contents: Mapping[str, bytes]) -> Path:
    """Write `{relative path: bytes}` under `folder`, made if need be.

    Every file is complete under a temporary name before the first is renamed. A failure removes the temporary files
    and the folders made for them, and raises `OutputError` naming the folder.
    """
    root = Path(folder)
    made: list[Path] = []
    staged: list[tuple[Path, Path]] = []
    try:
        for relative, content in contents.items():
            target = root / relative
            made += _make_folder(target.parent)
            temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
            staged.append((temporary, target))
            temporary.write_bytes(content)
        for temporary, target in staged:
            temporary.replace(target)
    except OSError as error:
        _undo([temporary for temporary, _ in staged], made)
        reason = error.strerror or type(error).__name__
        raise OutputError(f"folder must be a folder that can be written, got {str(root)!r}: {reason}.") from error
    except BaseException:  # an interrupt must not leave temporary files behind either
        _undo([temporary for temporary, _ in staged], made)
        raise
    return root


def _make_folder(folder: Path) -> list[Path]:
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    made = []
    for path in reversed(missing):
        path.mkdir(exist_ok=True)
        made.append(path)
    if not folder.is_dir():
        raise NotADirectoryError(20, "a file is in its place", str(folder))
    return made


def _undo(temporaries: list[Path], made: list[Path]) -> None:
    for path in temporaries:
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)
    for path in reversed(made):
        with contextlib.suppress(OSError):  # not empty: something was already renamed into it, or another process wrote
            path.rmdir()
