"""Sealed files: a kind, a checksum of all that follows, a JSON header, named arrays. Checkpoints and models are such.

line 1   "fedpact-KIND 1 SHA256", the checksum of everything after this line
line 2   the header, JSON
rest     the arrays, as one .npz
"""

from __future__ import annotations

import hashlib
import io
import json
import math
import zipfile
from collections.abc import Mapping
from typing import Any

import numpy as np

HEADERS = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}


def seal(kind: str, header: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> bytes:
    """The bytes of a sealed file."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:  # what np.savez writes, with any names and no pickles
        for name, array in arrays.items():
            with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                np.lib.format.write_array(member, np.asarray(array), allow_pickle=False)
    body = json.dumps(header).encode() + b"\n" + buffer.getvalue()
    return f"fedpact-{kind} 1 {hashlib.sha256(body).hexdigest()}\n".encode() + body


def unseal(kind: str, content: bytes) -> tuple[dict[str, Any], dict[str, np.ndarray]] | None:
    """Header and arrays, or None if the file is damaged or of another kind."""
    first, _, body = content.partition(b"\n")
    if first != f"fedpact-{kind} 1 {hashlib.sha256(body).hexdigest()}".encode():
        return None
    line, _, payload = body.partition(b"\n")
    if not _plain(payload):
        return None
    with np.load(io.BytesIO(payload), allow_pickle=False) as arrays:
        return json.loads(line), {name: arrays[name] for name in arrays.files}


def _plain(payload: bytes) -> bool:
    """Whether the arrays take no more room than the bytes they came in: nothing is compressed, no size is made up."""
    with zipfile.ZipFile(io.BytesIO(payload)) as archive:
        members = archive.infolist()
        if sum(member.file_size for member in members) > len(payload):
            return False  # the same bytes under several names, which Python reads each time
        for member in members:
            if member.compress_type != zipfile.ZIP_STORED:
                return False
            with archive.open(member) as file:
                read = HEADERS.get(np.lib.format.read_magic(file))
                if read is None:
                    return False
                shape, _, dtype = read(file)
            if dtype.hasobject or math.prod(shape) * dtype.itemsize > member.file_size:
                return False
    return True
