"""Sums and linear steps on encrypted vectors: the server computes on what it cannot read, with TenSEAL's CKKS.

Y. Cui, Y. Li and C. Ye, arXiv 2104.06011, 2021, propose it for Algorithms 1 and 3, whose server steps are linear.

    key holder   draws the keys; the public ones to all, the secret one to nobody
    client i     E(v_i)                                                                  `Cipher.seal`
    server       Σ_i E(v_i) = E(Σ v_i),   Σ_k s_k E(u_k) = E(Σ s_k u_k)                  `Cipher.add`, `Cipher.linear`
    key holder   opens the result                                                        `KeyHolder.open`

    a ← (1−ρ) a + ρ (g − 2τω),  κ ← (1−ρ) κ + ρ,  ω ← (1−γ) ω − γ a / (2(τ+λ)κ)          `ssca_step`: (9), (10), (5)

for λ‖ω‖² beside the loss. In Algorithm 1 g is the sum of the clients' N_i g_i / N. In Algorithm 3, (23), (24), (18),
nothing is summed: client i seals ∂F_0/∂ω_i, the closer ∂F_0/∂ω_0 too, and every block has a step of its own, under the
keys of its key holder: one for all, who learns what the server did not, or client i of its own block.

The key holder is not the server, and the two share nothing else: together they read every upload. One product by
numbers is possible before the key holder opens and seals anew, so a and ω go by it once a round. There is one secret
key: no threshold of key holders.

Degree 8192 and moduli of 60, 40, 60 bits: 160 of the 218 bits that 128-bit security allows (homomorphic encryption
standard, 2018). 4096 numbers a ciphertext of 235 kB, 57 bytes a number (32 after a product). Numbers come back with
noise: of 10⁵ sums of 10 numbers the worst is off by 4e-8. A product is as good once its scalar is corrected for SEAL's
prime, which is 1.3e-7 short of the 2⁴⁰ that TenSEAL takes it for. From 2¹⁹ on numbers wrap around: every vector carries
a bound, sums add theirs, and more than 2¹⁸ is refused.

That noise tells something of the secret key to whoever sees both a ciphertext and what it opens to (Li and Micciancio,
EUROCRYPT 2021). Opened numbers are therefore rounded, to 2⁻²⁰ unless told, which lessens it and does not end it; and
they are for the clients, never for the server, who has the ciphertexts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from fedpact.core.errors import InvalidArgument, is_number, require, the_extra

DEGREE = 8192
MODULI = (60, 40, 60)
SCALE = 2.0**40
SLOTS = DEGREE // 2
#: SEAL's prime of 40 bits for this degree, by which a product is divided.
PRIME = 2**40 - 9 * 2**14 + 1
#: The most that a number may be in size.
MOST = 2.0**18
#: A scalar is a multiple of 2⁻⁴⁰; below this it would be off by more than 2⁻²¹ of itself.
SCALAR_LEAST = 2.0**-20


class Sealed(NamedTuple):
    """An encrypted vector: ciphertexts of 4096 numbers, a bound on their size, how many uploads are in it."""

    size: int
    bound: float
    summands: int
    scaled: bool  # whether it is a product already
    parts: tuple[bytes, ...]


class KeyHolder:
    """Has the secret key, sees results only; neither the server nor under its control."""

    def __init__(self) -> None:
        tenseal = the_extra("tenseal", "he")
        self._context = tenseal.context(tenseal.SCHEME_TYPE.CKKS, DEGREE, coeff_mod_bit_sizes=list(MODULI))
        self._context.global_scale = SCALE
        self._load = tenseal.ckks_vector_from

    def public(self) -> bytes:
        """What clients and the server need, without the secret key: 1.1 MB."""
        return self._context.serialize(save_secret_key=False)

    def open(self, sealed: Sealed, least: int = 2, step: float = 2.0**-20) -> Any:
        """The numbers, to multiples of `step`; refused if fewer than `least` uploads are said to be in them."""
        require(sealed.summands >= least, "summands", f"at least {least}", sealed.summands)
        require(is_number(step) and step > 0, "step", "a positive number", step)
        parts = [_loaded(self._load, self._context, part).decrypt() for part in sealed.parts]
        return np.rint(np.concatenate(parts)[: sealed.size] / step) * step


class Cipher:
    """What clients and the server do, with the public keys alone."""

    def __init__(self, public: bytes) -> None:
        self._tenseal = the_extra("tenseal", "he")
        self._context = self._tenseal.context_from(public)
        require(not self._context.is_private(), "public", "keys without the secret one", "keys with it")

    def seal(self, values: Any, bound: float, summands: int = 1) -> Sealed:
        """A vector whose numbers are at most `bound` in size."""
        v = np.asarray(values, np.float64)
        require(v.ndim == 1 and v.size > 0, "values", "a vector", f"an array of shape {v.shape}")
        require(is_number(bound) and 0 < bound <= MOST, "bound", "a positive number of at most 2¹⁸", bound)
        bad = np.flatnonzero(~(np.abs(v) <= bound))
        at, value = (int(bad[0]), float(v[bad[0]])) if bad.size else (0, 0.0)
        require(not bad.size, f"values[{at}]", f"finite and at most {bound:g} in size", value)
        chunks = [v[k : k + SLOTS] for k in range(0, v.size, SLOTS)]
        parts = tuple(self._tenseal.ckks_vector(self._context, chunk).serialize() for chunk in chunks)
        return Sealed(v.size, float(bound), summands, False, parts)

    def _open(self, part: bytes) -> Any:
        return _loaded(self._tenseal.ckks_vector_from, self._context, part)

    def add(self, vectors: Sequence[Sealed]) -> Sealed:
        """E(Σ v_i)."""
        return self._combined(vectors, [1.0] * len(vectors), scaled=False)

    def linear(self, scalars: Sequence[float], vectors: Sequence[Sealed]) -> Sealed:
        """E(Σ s_k u_k), for sums that were not multiplied before."""
        require(len(scalars) == len(vectors), "scalars", f"one a vector, {len(vectors)}", len(scalars))
        for s in scalars:
            ok = is_number(s) and (s == 0 or SCALAR_LEAST <= abs(s) <= MOST)
            hint = "Multiply the vector before it is sealed."
            require(ok, "scalar", "0, or from 2⁻²⁰ to 2¹⁸ in size", s, symbol="s", hint=hint)
        again = any(v.scaled for v in vectors)
        require(not again, "vectors", "sums that were not multiplied yet", "products", hint="Open and seal anew.")
        return self._combined(vectors, scalars, scaled=True)

    def _combined(self, vectors: Sequence[Sealed], scalars: Sequence[float], scaled: bool) -> Sealed:
        require(len(vectors) > 0, "vectors", "at least one", len(vectors))
        first = vectors[0]
        same = {(v.size, v.scaled) for v in vectors} == {(first.size, first.scaled)}
        require(same, "vectors", "of one size, all products or none", [(v.size, v.scaled) for v in vectors])
        bound = sum(abs(s) * v.bound for s, v in zip(scalars, vectors, strict=True))
        hint = "Scale the vectors down before they are sealed."
        require(bound <= MOST, "bound on the sum", "at most 2¹⁸", bound, hint=hint)
        parts = []
        for k in range(len(first.parts)):
            total = None
            for s, v in zip(scalars, vectors, strict=True):
                if scaled and s == 0:
                    continue
                term = self._open(v.parts[k])
                term = term * (s * PRIME / SCALE) if scaled else term
                total = term if total is None else total + term
            require(total is not None, "scalars", "some not 0", scalars)
            assert total is not None
            parts.append(total.serialize())
        many = (max if scaled else sum)(v.summands for v in vectors)
        return Sealed(first.size, bound, many, first.scaled or scaled, tuple(parts))


def _loaded(load: Any, context: Any, part: bytes) -> Any:
    try:
        return load(context, part)
    except ValueError as error:
        raise InvalidArgument(f"ciphertext must be one of CKKS under these keys, got {error}.") from None


class Stepped(NamedTuple):
    """a and ω after a round, and κ."""

    a: Sealed
    w: Sealed
    kappa: float


def ssca_step(
    cipher: Cipher,
    a: Sealed,
    w: Sealed,
    gradient: Sealed,
    kappa: float,
    rho: float,
    gamma: float,
    tau: float,
    norm2: float = 0.0,
) -> Stepped:
    """The server step of SSCA without constraints; `norm2` is λ of a term λ‖ω‖² (`Norm2`), which is no part of g.

    `gradient` is E(Σ N_i g_i / Σ N_i) in Algorithm 1. In Algorithm 3 it is one block's, E(∂F_0/∂ω_i), with that block's
    a and ω; every block of a round starts from the same κ.
    """
    require(is_number(tau) and tau > 0, "tau", "a positive number", tau, symbol="τ")
    require(is_number(norm2) and norm2 >= 0, "norm2", "a number of at least 0", norm2, symbol="λ")
    for name, value, symbol in (("rho", rho, "ρ"), ("gamma", gamma, "γ")):
        require(is_number(value) and 0 < value <= 1, name, "above 0 and at most 1", value, symbol=symbol)
    kappa = (1 - rho) * kappa + rho
    new_a = [1 - rho, rho, -2 * tau * rho]  # (9), of a, g and ω
    pull = -gamma / (2 * (tau + norm2) * kappa)  # (10) and (5)
    new_w = [pull * new_a[0], pull * new_a[1], pull * new_a[2] + 1 - gamma]
    vectors = [a, gradient, w]
    return Stepped(cipher.linear(new_a, vectors), cipher.linear(new_w, vectors), kappa)
