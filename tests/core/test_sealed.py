"""Sealed files: any names, any numbers, no pickles."""

from __future__ import annotations

import copy
import hashlib
import io
import zipfile

import numpy as np
import pytest

from fedpact.core.sealed import seal, unseal

ARRAYS = {
    "w": np.arange(6.0).reshape(2, 3),
    "scalar": np.array(2, np.int32),
    "none": np.empty((0, 3), np.float32),
    "allow_pickle": np.array([True, False]),  # names that np.savez takes for its own arguments
    "file": np.array([1.0]),
}


def test_what_is_sealed_is_unsealed():
    header, arrays = unseal("model", seal("model", {"a": [1, "ε"]}, ARRAYS))
    assert header == {"a": [1, "ε"]}
    assert list(arrays) == list(ARRAYS)
    for name, array in ARRAYS.items():
        assert arrays[name].dtype == array.dtype
        np.testing.assert_array_equal(arrays[name], array)


def test_the_same_arrays_give_the_same_bytes_and_numpy_reads_them():
    content = seal("model", {}, ARRAYS)
    assert content == seal("model", {}, ARRAYS)
    with np.load(io.BytesIO(content.split(b"\n", 2)[2])) as arrays:
        assert arrays.files == list(ARRAYS)


def test_objects_are_not_pickled():
    with pytest.raises(ValueError, match="allow_pickle=False"):
        seal("model", {}, {"w": np.array([{}], dtype=object)})


def test_another_kind_and_any_damage_are_found():
    content = seal("model", {"a": 1}, ARRAYS)
    assert unseal("checkpoint", content) is None
    for at in range(0, len(content), 37):
        assert unseal("model", content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :]) is None


def resealed(change):
    """A sealed file whose archive was changed, with the right checksum: whoever sends can make one."""
    _, line, payload = seal("model", {}, {"w": np.zeros(10_000)}).split(b"\n", 2)
    body = line + b"\n" + change(payload)
    return f"fedpact-model 1 {hashlib.sha256(body).hexdigest()}\n".encode() + body


def compressed(payload):
    out = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(payload)) as old, zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as new:
        new.writestr("w.npy", old.read("w.npy"))
    return out.getvalue()


def larger_than_it_is(payload):
    out = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(payload)) as old, zipfile.ZipFile(out, "w") as new:
        new.writestr("w.npy", old.read("w.npy").replace(b"(10000,)", b"(99999,)"))
    return out.getvalue()


def overlapping(payload):
    """A list that names the same bytes a hundred times: what is read is a hundred times what was sent."""
    out = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(payload)) as old, zipfile.ZipFile(out, "w") as new:
        new.writestr("w.npy", old.read("w.npy"))
        new.filelist *= 100
    return out.getvalue()


def within_one_another(payload):
    """Members of different names, each of which ends where the others do."""
    inner = payload[: payload.rindex(b"PK\x01\x02")]  # without the list
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as new:
        new.writestr("v.npy", _headed(inner))
        found = copy.copy(new.filelist[0])
        found.filename = found.orig_filename = "w.npy"
        found.header_offset = out.getvalue().index(b"PK\x03\x04", 4)
        with zipfile.ZipFile(io.BytesIO(payload)) as old:
            found.CRC, found.file_size = old.filelist[0].CRC, old.filelist[0].file_size
            found.compress_size = found.file_size
        new.filelist.append(found)
    return out.getvalue()


def _headed(content):
    """The bytes as an array of bytes."""
    buffer = io.BytesIO()
    np.lib.format.write_array(buffer, np.frombuffer(content, np.uint8))
    return buffer.getvalue()


def test_arrays_take_no_more_room_than_their_bytes():
    assert unseal("model", resealed(lambda payload: payload)) is not None
    assert unseal("model", resealed(compressed)) is None
    assert unseal("model", resealed(larger_than_it_is)) is None
    assert unseal("model", resealed(overlapping)) is None
    assert unseal("model", resealed(within_one_another)) is None
