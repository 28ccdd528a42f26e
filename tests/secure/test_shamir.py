"""Shares: any t give the secret, fewer nothing, wrong ones are found where they can be."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from helpers_sum import SOURCES
from scipy import stats

from fedpact.core.errors import InvalidArgument
from fedpact.secure.shamir import PRIME, SHARE_BYTES, join, split

SECRET = bytes(range(200, 232))


def test_a_line_by_hand():
    """t = 2: f(x) = s + c x, and the source is asked for c alone; s = 2 f(1) − f(2)."""
    c = 5
    one, two = split(SECRET, 2, [1, 2], lambda size: (c << 7).to_bytes(size, "big"))
    s = int.from_bytes(SECRET, "big")
    assert [int.from_bytes(y, "big") for y in (one, two)] == [s + c, s + 2 * c]
    assert join({1: one, 2: two}, 2) == SECRET


def test_the_prime_is_one():
    d, r = PRIME - 1, 0
    while d % 2 == 0:
        d, r = d // 2, r + 1
    for a in range(2, 60):  # Miller-Rabin
        x = pow(a, d, PRIME)
        assert x in (1, PRIME - 1) or any((x := x * x % PRIME) == PRIME - 1 for _ in range(r - 1))


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("secret", [SECRET, bytes(32), b"\xff" * 32])
def test_any_t_of_n_give_the_secret(source, secret):
    points = [1, 2, 3, 5, 8, 100]
    shares = dict(zip(points, split(secret, 3, points, SOURCES[source](7)), strict=True))
    for chosen in itertools.combinations(points, 3):
        assert join({x: shares[x] for x in chosen}, 3) == secret
    assert join(shares, 3) == secret


def test_fewer_shares_fit_every_secret():
    """With t−1 shares and any secret there is a polynomial: the missing share completes it."""
    shares = dict(zip([1, 2, 3], split(SECRET, 3, [1, 2, 3]), strict=True))
    other = int.from_bytes(bytes(32), "big")
    y1, y2 = (int.from_bytes(shares[x], "big") for x in (1, 2))
    y3 = (other - 3 * y1 + 3 * y2) % PRIME  # s = 3 f(1) − 3 f(2) + f(3)
    assert join({1: shares[1], 2: shares[2], 3: y3.to_bytes(SHARE_BYTES, "big")}, 3) == bytes(32)


def test_a_share_is_uniform_whatever_the_secret():
    rng = np.random.default_rng(5)
    for secret in (bytes(32), b"\xff" * 32):
        top = [int.from_bytes(split(secret, 2, [1, 2], rng.bytes)[0], "big") / PRIME for _ in range(2000)]
        assert stats.kstest(top, "uniform").pvalue > 1e-3


def test_too_few_and_wrong_shares_are_refused():
    shares = dict(zip([1, 2, 3, 4], split(SECRET, 3, [1, 2, 3, 4]), strict=True))
    with pytest.raises(InvalidArgument, match=r"^shares \(t\) must be at least 3, got 2"):
        join({1: shares[1], 2: shares[2]}, 3)
    wrong = {**shares, 2: bytes(33)}
    with pytest.raises(InvalidArgument, match=r"^shares must be of one secret at threshold 3"):
        join(wrong, 3)
    with pytest.raises(InvalidArgument, match=r"^share at 1 must be 33 bytes of a number below p"):
        join({**shares, 1: b"\xff" * 33}, 3)
    with pytest.raises(InvalidArgument, match=r"^share at 1 must be 33 bytes"):
        join({**shares, 1: shares[1][:-1]}, 3)
    beyond = (2**256 + 5).to_bytes(33, "big")
    with pytest.raises(InvalidArgument, match=r"^shares must be of one secret of 32 bytes, got 'shares of none'"):
        join({1: beyond}, 1)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ((b"short", 2, [1, 2]), "secret must be 32 bytes, got '5'"),
        ((SECRET, 3, [1, 2]), r"threshold \(t\) must be an integer from 1 to the number of shares, 2, got 3"),
        ((SECRET, 0, [1, 2]), r"threshold \(t\) must be"),
        ((SECRET, 2, [0, 1]), r"points \(x\) must be distinct integers of at least 1"),
        ((SECRET, 2, [1, 1]), r"points \(x\) must be distinct"),
    ],
)
def test_bad_arguments(arguments, text):
    with pytest.raises(InvalidArgument, match=f"^{text}"):
        split(*arguments)
