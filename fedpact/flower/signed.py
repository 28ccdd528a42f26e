"""Answers that the node asked has signed, so that no other node can answer in its place.

Flower checks who connects, not who answers: its SuperLink takes an answer of a node's from whoever is registered and
knows the number of the message (flwr 1.41). A node therefore signs, by Ed25519, each answer with the question it is to:

    signature of digest(label, question, answer), 64 bytes, then the answer

Its key follows from `node.key`, the secret in its folder. The public half comes with the answer to `hello` and counts
for that server from then on; that it is the node of a run before is known by its marks, which need the same secret.
"""

from __future__ import annotations

from fedpact.core.errors import the_extra
from fedpact.core.wire import Message, Refused, unpack
from fedpact.secure.primitives import derive, digest

LABEL = b"fedpact answer"
SIGNATURE = 64  # bytes
#: What an answer to `hello` calls the public key, in hexadecimal.
PUBLIC = "signs"


class Signer:
    """A node's key."""

    def __init__(self, secret: bytes) -> None:
        the_extra("cryptography", "flower")
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

        self._key = Ed25519PrivateKey.from_private_bytes(derive(secret, LABEL, b""))
        self.public = self._key.public_key().public_bytes_raw().hex()

    def sign(self, question: bytes, answer: bytes) -> bytes:
        """The answer, signed as one to this question."""
        return self._key.sign(digest(LABEL, question, answer)) + answer


class Signers:
    """Whose answers a server takes: the keys of nodes, by Flower's numbers of them."""

    def __init__(self) -> None:
        self._keys: dict[int, str] = {}

    def read(self, node: int, question: bytes, signed: bytes, kind: str, who: str) -> Message:
        """What the node has answered. The first answer to a hello brings its key; what failed before has none."""
        answer = signed[SIGNATURE:]
        message = unpack(answer, kind)
        key = self._keys.get(node, message.values.get(PUBLIC))
        if key is None and message.kind == "error":
            return message
        if not _holds(key, signed[:SIGNATURE], digest(LABEL, question, answer)):
            hint = "Give it back the node.key it had."
            raise Refused(f"answer of {who} must be signed by the key that it began with, got one that is not. {hint}")
        self._keys[node] = str(key)
        return message


def _holds(key: object, signature: bytes, signed: bytes) -> bool:
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

    try:
        Ed25519PublicKey.from_public_bytes(bytes.fromhex(str(key))).verify(signature, signed)
    except (InvalidSignature, ValueError):
        return False
    return True
