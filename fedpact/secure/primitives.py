"""What the masks are made of: X25519, HKDF-SHA256, AES-256-GCM and AES-256-CTR, all from the `cryptography` package.

    agree       HKDF(X25519(private, public); info = label ‖ context): a key of 32 bytes; another for every context
    seal, open  AES-GCM with a fresh nonce; the associated data are checked, not sent
    add_stream  vector ± the AES-CTR keystream of a key, as words modulo 2⁶⁴: all 64 bits are the cipher's

One keystream a key: the counter starts at 0, so a key must never be used for two vectors. Contexts hold the session and
the round. (Flower's own mask generator seeds a Mersenne Twister with 32 bits: not this.)
"""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np

from fedpact.core.errors import InvalidArgument, the_extra

KEY_BYTES = 32
NONCE_BYTES = 12
#: What sealing adds: the nonce and the tag.
SEAL_BYTES = NONCE_BYTES + 16
#: Words of keystream at a time: they stay in the cache. 2¹⁶: 1.8 ms per 10⁶ words; all at once 7.1 ms.
CHUNK = 2**16
_ZEROS = bytes(8 * CHUNK)


def ready() -> None:
    """Refuse, before anything is sent, a Python without `cryptography`."""
    the_extra("cryptography", "secure")


def digest(*parts: bytes) -> bytes:
    """SHA-256 of the parts, each with its length before it: other parts never give the same bytes."""
    return hashlib.sha256(b"".join(len(part).to_bytes(8, "big") + part for part in parts)).digest()


def public_of(private: bytes) -> bytes:
    """The X25519 public key."""
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

    return X25519PrivateKey.from_private_bytes(private).public_key().public_bytes_raw()


def derive(secret: bytes, label: bytes, context: bytes) -> bytes:
    """HKDF-SHA256: a key for one use."""
    from cryptography.hazmat.primitives.hashes import SHA256
    from cryptography.hazmat.primitives.kdf.hkdf import HKDF

    return HKDF(SHA256(), KEY_BYTES, salt=None, info=digest(label, context)).derive(secret)


def agree(private: bytes, public: bytes, label: bytes, context: bytes, owner: int) -> bytes:
    """The key two parties share, each from its own private and the other's public key; `owner` is the other."""
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey

    try:
        secret = X25519PrivateKey.from_private_bytes(private).exchange(X25519PublicKey.from_public_bytes(public))
    except ValueError:  # a point of small order: the secret would be 0
        text = f"{label.decode()} key of client {owner} must be a point of large order, got {public.hex()}"
        raise InvalidArgument(f"{text}. Leave the client out.") from None
    return derive(secret, label, context)


def seal(key: bytes, plain: bytes, associated: bytes, nonce: bytes) -> bytes:
    """Nonce and ciphertext."""
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

    return nonce + AESGCM(key).encrypt(nonce, plain, associated)


def unseal(key: bytes, sealed: bytes, associated: bytes) -> bytes | None:
    """The plain text, or None where another key, other data or another text were sealed."""
    from cryptography.exceptions import InvalidTag
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

    try:
        return AESGCM(key).decrypt(sealed[:NONCE_BYTES], sealed[NONCE_BYTES:], associated)
    except InvalidTag:
        return None


def add_stream(total: np.ndarray[Any, Any], key: bytes, sign: int) -> None:
    """total ← total ± keystream, in place, modulo 2⁶⁴."""
    from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

    stream = Cipher(algorithms.AES(key), modes.CTR(bytes(16))).encryptor()
    buffer = bytearray(8 * min(CHUNK, total.size) + 15)  # update_into asks for a block less one more
    words = np.frombuffer(buffer, "<u8", min(CHUNK, total.size))
    for start in range(0, total.size, CHUNK):
        part = total[start : start + CHUNK]
        stream.update_into(memoryview(_ZEROS)[: 8 * part.size], buffer)
        if sign > 0:
            part += words[: part.size]
        else:
            part -= words[: part.size]
