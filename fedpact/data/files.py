"""Where the bytes of a named dataset are: a folder of yours, the cache, or the official address."""

from __future__ import annotations

import bz2
import gzip
import hashlib
import http.client
import io
import lzma
import os
import shutil
import urllib.request
import uuid
import zipfile
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path

from fedpact.core.environment import cache_folder
from fedpact.core.errors import DataError, DatasetMissing

TIMEOUT = 20.0  # seconds without an answer


def locate(name: str, filename: str, checksum: str, url: str) -> Path:
    """The file `filename` of dataset `name`, downloaded if need be, its checksum (MD5 or SHA-256, by length) verified.

    Looks in $FEDPACT_DATA/name/, then in the cache ($FEDPACT_CACHE or ~/.cache/fedpact)/name/, then at `url`.
    """
    own = os.environ.get("FEDPACT_DATA")
    cached = cache_folder() / name / filename
    why = []
    for title, path in (
        ("$FEDPACT_DATA", Path(own).expanduser() / name / filename if own else None),
        ("the cache", cached),
    ):
        if path is None:
            why.append(f"{title} is not set")
        elif not os.path.exists(path):
            why.append(f"{title} has no {path}")
        else:
            return _verified(path, checksum)
    try:
        return _download(url, cached, checksum, lambda file: _digest(file, checksum))
    except (OSError, ValueError, http.client.HTTPException) as error:
        why.append(f"{url} failed ({error or type(error).__name__})")
    text = f"{filename} of dataset {name!r} must be in one of three places, got none: {'; '.join(why)}."
    raise DatasetMissing(f"{text} Put the file at {cached}, or in $FEDPACT_DATA/{name}/.")


def present(name: str, filename: str, checksum: str) -> bytes | None:
    """The verified contents of a file of dataset `name` where `locate` looks first, or None if it is not there."""
    own = os.environ.get("FEDPACT_DATA")
    for folder in (*([Path(own).expanduser()] if own else []), cache_folder()):
        if (folder / name / filename).is_file():
            return _checked(folder / name / filename, checksum)
    return None


def contents(name: str, filenames: Sequence[str], checksum: str, url: str) -> bytes:
    """The unpacked contents of dataset `name`, whose file may be packed in several ways; `checksum` is of the contents.

    Looks for each of `filenames` where `locate` looks, then at `url`.
    """
    own = os.environ.get("FEDPACT_DATA")
    folders = [Path(own).expanduser() / name] if own else []
    cached = cache_folder() / name / url.rpartition("/")[2]
    for folder in (*folders, cached.parent):
        for filename in filenames:
            if (folder / filename).is_file():
                return _checked(folder / filename, checksum)
    why = [
        "$FEDPACT_DATA is not set" if not own else f"$FEDPACT_DATA has none of {folders[0]}/{{{','.join(filenames)}}}"
    ]
    why.append(f"the cache has none of {cached.parent}/{{{','.join(filenames)}}}")
    try:
        _download(url, cached, checksum, lambda file: _sum(_unpacked(cached.suffix, file.read_bytes()), checksum))
        return _checked(cached, checksum)
    except (OSError, ValueError, http.client.HTTPException) as error:
        why.append(f"{url} failed ({error or type(error).__name__})")
    text = f"{filenames[0]} of dataset {name!r} must be in one of three places, got none: {'; '.join(why)}."
    raise DatasetMissing(f"{text} Put the file at {cached.parent / filenames[0]}, or in $FEDPACT_DATA/{name}/.")


def _checked(path: Path, checksum: str) -> bytes:
    try:
        found = _unpacked(path.suffix, path.read_bytes())
    except (OSError, ValueError) as error:
        raise DataError(f"{path} must be a file that can be read, got: {error}. Delete it or replace it.") from error
    digest = _sum(found, checksum)
    if digest != checksum:
        text = f"{path} must hold the official data with checksum {checksum}, got {digest}."
        raise DataError(f"{text} Delete it to have it downloaded again, or put the official file there.")
    return found


def _unpacked(suffix: str, packed: bytes) -> bytes:
    unpack = {".zip": _unzipped, ".gz": gzip.decompress, ".xz": lzma.decompress, ".bz2": bz2.decompress}
    try:
        return unpack[suffix](packed) if suffix in unpack else packed
    except (OSError, EOFError, ValueError, RuntimeError, lzma.LZMAError, zipfile.BadZipFile, zlib.error) as error:
        raise ValueError(f"no whole {suffix} file ({error})") from error


def _unzipped(packed: bytes) -> bytes:
    with zipfile.ZipFile(io.BytesIO(packed)) as archive:
        names = archive.namelist()
        if len(names) != 1:
            raise ValueError(f"it holds {len(names)} files instead of one")
        return archive.read(names[0])


def _sum(content: bytes, checksum: str) -> str:
    return hashlib.new("md5" if len(checksum) == 32 else "sha256", content).hexdigest()


def _digest(path: Path, checksum: str) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "md5" if len(checksum) == 32 else "sha256").hexdigest()


def _verified(path: Path, checksum: str) -> Path:
    try:
        found = _digest(path, checksum)
    except OSError as error:
        raise DataError(f"{path} must be a file that can be read, got: {error.strerror}.") from error
    if found != checksum:
        text = f"{path} must be the official file with checksum {checksum}, got {found}."
        raise DataError(f"{text} Delete it to have it downloaded again, or put the official file there.")
    return path


def _download(url: str, path: Path, checksum: str, digest: Callable[[Path], str]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.{uuid.uuid4().hex}.part")
    try:
        with open(partial, "xb") as file, urllib.request.urlopen(url, timeout=TIMEOUT) as answer:
            shutil.copyfileobj(answer, file)
        found = digest(partial)
        if found != checksum:
            raise ValueError(f"the checksum must be {checksum}, got {found}")
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
    return path
