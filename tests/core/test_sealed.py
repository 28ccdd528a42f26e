"""Sealed files: any names, any numbers, no pickles."""

from __future__ import annotations

import io

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
