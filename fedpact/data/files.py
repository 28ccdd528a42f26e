"""Where the bytes of a named dataset are: a folder of yours, the cache, or the official address."""

from __future__ import annotations

import hashlib
import http.client
import os
import shutil
import urllib.request
import uuid
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
        return _download(url, cached, checksum)
    except (OSError, ValueError, http.client.HTTPException) as error:
        why.append(f"{url} failed ({error or type(error).__name__})")
    text = f"{filename} of dataset {name!r} must be in one of three places, got none: {'; '.join(why)}."
    raise DatasetMissing(f"{text} Put the file at {cached}, or in $FEDPACT_DATA/{name}/.")


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


def _download(url: str, path: Path, checksum: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.{uuid.uuid4().hex}.part")
    try:
        with open(partial, "xb") as file, urllib.request.urlopen(url, timeout=TIMEOUT) as answer:
            shutil.copyfileobj(answer, file)
        found = _digest(partial, checksum)
        if found != checksum:
            raise ValueError(f"the checksum must be {checksum}, got {found}")
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
    return path
