"""The keys and keystreams against independent versions: a ladder of RFC 7748, HMAC of RFC 5869, AES block by block."""

from __future__ import annotations

import hashlib
import hmac

import numpy as np
import pytest

from fedpact.core.errors import InvalidArgument
from fedpact.secure import primitives

pytest.importorskip("cryptography")
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

P = 2**255 - 19


def ladder(scalar: bytes, u: bytes) -> bytes:
    """X25519 of RFC 7748, section 5."""
    k = int.from_bytes(scalar, "little") & ~7 & (2**255 - 1) | 2**254
    x1 = int.from_bytes(u, "little") % 2**255
    x2, z2, x3, z3, swap = 1, 0, x1, 1, 0
    for t in reversed(range(255)):
        bit = k >> t & 1
        if swap ^ bit:
            x2, x3, z2, z3 = x3, x2, z3, z2
        swap = bit
        a, b, c, d = x2 + z2, x2 - z2, x3 + z3, x3 - z3
        aa, bb, da, cb = a * a, b * b, d * a, c * b
        e = aa - bb
        x3, z3 = pow(da + cb, 2, P), x1 * pow(da - cb, 2, P) % P
        x2, z2 = aa * bb % P, e * (aa + 121665 * e) % P
    if swap:
        x2, z2 = x3, z3
    return (x2 * pow(z2, -1, P) % P).to_bytes(32, "little")


def test_keys_are_those_of_the_standards():
    mine, theirs = bytes(range(32)), bytes(range(100, 132))
    public = ladder(theirs, (9).to_bytes(32, "little"))
    assert primitives.public_of(theirs) == public
    extracted = hmac.digest(bytes(32), ladder(mine, public), "sha256")
    parts = b"".join(len(part).to_bytes(8, "big") + part for part in (b"label", b"context"))
    expanded = hmac.digest(extracted, hashlib.sha256(parts).digest() + b"\x01", "sha256")
    assert primitives.agree(mine, public, b"label", b"context", 1) == expanded
    assert primitives.agree(theirs, primitives.public_of(mine), b"label", b"context", 1) == expanded
    assert primitives.agree(mine, public, b"label", b"another", 1) != expanded


@pytest.mark.parametrize("size", [1, 7, primitives.CHUNK, 2 * primitives.CHUNK + 5])
def test_the_stream_is_aes_of_a_counter(size):
    key, total = bytes(range(32)), np.arange(size, dtype=np.uint64)
    blocks = b"".join(k.to_bytes(16, "big") for k in range(-(-size // 2)))
    words = np.frombuffer(Cipher(algorithms.AES(key), modes.ECB()).encryptor().update(blocks), "<u8")[:size]
    primitives.add_stream(total, key, 1)
    assert np.array_equal(total, np.arange(size, dtype=np.uint64) + words)
    primitives.add_stream(total, key, -1)
    assert np.array_equal(total, np.arange(size, dtype=np.uint64))


def test_sealed_bytes_open_with_the_right_key_and_data_only():
    key, nonce = bytes(32), bytes(12)
    sealed = primitives.seal(key, b"text", b"data", nonce)
    assert len(sealed) == 4 + primitives.SEAL_BYTES
    assert primitives.unseal(key, sealed, b"data") == b"text"
    assert primitives.unseal(bytes(31) + b"1", sealed, b"data") is None
    assert primitives.unseal(key, sealed, b"date") is None
    assert primitives.unseal(key, sealed[:-1] + bytes([sealed[-1] ^ 1]), b"data") is None


def test_a_key_of_small_order_is_refused():
    with pytest.raises(InvalidArgument, match=r"^label key of client 7 must be a point of large order, got 00"):
        primitives.agree(bytes(range(32)), bytes(32), b"label", b"context", 7)


def test_digests_know_where_a_part_ends():
    assert primitives.digest(b"ab", b"c") != primitives.digest(b"a", b"bc")
