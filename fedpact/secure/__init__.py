"""Protocols that keep what one party holds from the others: pure objects that turn messages into messages.

lattice      real vectors as integers modulo 2⁶⁴
shamir       t-of-n shares of a secret of 32 bytes
primitives   X25519, HKDF, AES-GCM and AES-CTR of the `cryptography` package, as the masks use them
messages     what clients and server of a secure sum agree on and send
masks        secure sums that survive dropouts: the server learns the sum alone
vocabulary   which words clients have between them, from a sum: not who has which
psi          which records all parties hold, without the others
encrypted    sums and linear steps on ciphertexts (TenSEAL): the server learns nothing, the key holder the result

Nothing here sends anything: a transport carries the messages. Who learns what: docs/secure.md.
"""

from fedpact.secure.lattice import Lattice
from fedpact.secure.masks import Client, Server, Total, WrongShare
from fedpact.secure.messages import Terms

__all__ = ["Client", "Lattice", "Server", "Terms", "Total", "WrongShare"]
