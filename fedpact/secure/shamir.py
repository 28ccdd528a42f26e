"""Shamir's secret sharing: any t of n shares give a secret of 32 bytes, fewer tell nothing about it.

A. Shamir, "How to Share a Secret", Communications of the ACM 22(11), 1979.

    split   f(x) = s + c_1 x + … + c_{t−1} x^{t−1} mod p,  c_k uniform on 0 … p−1;   share of x ∈ {1, 2, …} is f(x)
    join    s = f(0) = Σ_i f(x_i) λ_i,   λ_i = Π_{j≠i} x_j / (x_j − x_i)                            (Lagrange)

p = 2²⁵⁶ + 297, the least prime above all secrets. Wrong shares are found if there are more than t (the rest must lie on
the polynomial of the first t), or if f(0) is no secret (≥ 2²⁵⁶: one in 2²⁴⁸): a caller with just t
compares with a commitment. Python's integers take time that depends on their values; shares are made and joined
locally, once a round.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache

from fedpact.core.errors import is_count, require

PRIME = 2**256 + 297
SECRET_BYTES = 32
SHARE_BYTES = 33

#: Where random bytes come from: as many as asked for.
Source = Callable[[int], bytes]


def _below_prime(source: Source) -> int:
    while True:
        value = int.from_bytes(source(SHARE_BYTES), "big") >> 7  # 257 bits; about one of two is below p
        if value < PRIME:
            return value


def split(secret: bytes, threshold: int, points: Sequence[int], source: Source = os.urandom) -> list[bytes]:
    """The share of every point x, any `threshold` (t) of which give the secret."""
    require(isinstance(secret, bytes) and len(secret) == SECRET_BYTES, "secret", "32 bytes", f"{len(secret)}")
    _check_points(points)
    ok = is_count(threshold, 1) and threshold <= len(points)
    require(ok, "threshold", f"an integer from 1 to the number of shares, {len(points)}", threshold, symbol="t")
    coefficients = [int.from_bytes(secret, "big"), *(_below_prime(source) for _ in range(threshold - 1))]
    return [_value(coefficients, x).to_bytes(SHARE_BYTES, "big") for x in points]


def _value(coefficients: Sequence[int], x: int) -> int:
    value = 0
    for c in reversed(coefficients):  # Horner
        value = (value * x + c) % PRIME
    return value


def join(shares: Mapping[int, bytes], threshold: int) -> bytes:
    """The secret, from shares by their points; those beyond `threshold` are checked against it."""
    require(len(shares) >= threshold, "shares", f"at least {threshold}", len(shares), symbol="t")
    _check_points(tuple(shares))
    values = {x: _number(x, share) for x, share in shares.items()}
    points = tuple(sorted(values))
    first, rest = points[:threshold], points[threshold:]
    for x in rest:
        same = _at(first, values, x) == values[x]
        require(same, "shares", f"of one secret at threshold {threshold}", f"another at {x}, or before it")
    secret = _at(first, values, 0)
    require(secret < 2**256, "shares", "of one secret of 32 bytes", "shares of none")
    return secret.to_bytes(SECRET_BYTES, "big")


def _at(points: tuple[int, ...], values: Mapping[int, int], x: int) -> int:
    return sum(values[p] * weight for p, weight in zip(points, _lagrange(points, x), strict=True)) % PRIME


@lru_cache(maxsize=1024)  # all secrets of a round are joined at the same points
def _lagrange(points: tuple[int, ...], x: int) -> tuple[int, ...]:
    """What f(x_i) counts for in f(x)."""
    weights = []
    for i in points:
        above = below = 1
        for j in points:
            if j != i:
                above, below = above * (x - j) % PRIME, below * (i - j) % PRIME
        weights.append(above * pow(below, -1, PRIME) % PRIME)
    return tuple(weights)


def _number(x: int, share: bytes) -> int:
    ok = isinstance(share, bytes) and len(share) == SHARE_BYTES and int.from_bytes(share, "big") < PRIME
    require(ok, f"share at {x}", "33 bytes of a number below p", share)
    return int.from_bytes(share, "big")


def _check_points(points: Sequence[int]) -> None:
    ok = all(is_count(x, 1) for x in points) and len(set(points)) == len(points)
    require(ok, "points", "distinct integers of at least 1", points, symbol="x")
