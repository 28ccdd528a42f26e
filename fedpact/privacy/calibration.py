"""Of (ε, δ), noise and rounds, give two and get the third; always on the safe side.

The ε of T like releases falls with the noise and rises with T. The noise is found to a relative 1e-4 and is the upper
end of the bracket, whose ε was computed and is at most the one asked for; the rounds are the largest whose ε was
computed and is at most the one asked for.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from fedpact.core.errors import InvalidArgument, require_positive_int
from fedpact.privacy.accounting import Cost, epsilon, rdp, rdp_epsilon
from fedpact.privacy.events import LEAST, MOST_NOISE, Event, check_delta, check_epsilon

#: Relative width of the bracket in which the noise lies.
TOLERANCE = 1e-4
#: The most rounds that are looked for.
ROUNDS_MOST = 10_000_000


def cost(event: Event, rounds: int, delta: float) -> Cost:
    """The ε of this release in each of `rounds` rounds."""
    require_positive_int("rounds", rounds, symbol="T")
    return epsilon({event: rounds}, delta)


def noise_for(target: float, delta: float, rounds: int, **kind: Any) -> float:
    """The noise (in units of C) with which `rounds` releases cost at most ε = `target`.

    `kind` are the other fields of `Event`: mechanism, sampling, rate, relation, ….
    """
    target, delta = check_epsilon(target), check_delta(delta)
    require_positive_int("rounds", rounds, symbol="T")
    event = Event(noise=1.0, **kind)

    def excess(noise: float) -> float:
        found = cost(replace(event, noise=noise), rounds, delta).epsilon
        return math.log(max(found, 1e-300) / target)

    low, high = _bracket(excess, target)
    below, above = excess(low), excess(high)  # above ≤ 0 < below
    while high / low > 1 + TOLERANCE:
        share = min(max(below / (below - above), 0.1), 0.9) if above > -50 else 0.5  # false position, kept off the ends
        middle = low * (high / low) ** share
        found = excess(middle)
        low, below, high, above = (middle, found, high, above) if found > 0 else (low, below, middle, found)
    return high


def _bracket(excess: Callable[[float], float], target: float) -> tuple[float, float]:
    low = high = 1.0
    if excess(high) > 0:
        while excess(high) > 0:
            low, high = high, min(2 * high, MOST_NOISE)
            if low == high:
                raise InvalidArgument(
                    f"epsilon (ε) must be reachable with noise of at most {MOST_NOISE:g} C, got {target!r}. "
                    "Ask for fewer rounds or a larger ε or δ; on a lattice, for more steps."
                )
    else:
        while excess(low) <= 0:
            high, low = low, max(low / 2, LEAST)
            if low == high:
                raise InvalidArgument(
                    f"epsilon (ε) must be below what noise of {LEAST:g} C costs, got {target!r}. Ask for a smaller ε."
                )
    return low, high


def rounds_for(target: float, delta: float, event: Event) -> int:
    """The largest number of rounds, up to 10⁷, in which this release costs at most ε = `target`."""
    target, delta = check_epsilon(target), check_delta(delta)

    def excess(rounds: int) -> float:
        return math.log(max(cost(event, rounds, delta).epsilon, 1e-300) / target)

    below = excess(1)
    if below > 0:
        raise InvalidArgument(
            f"noise (z) must be large enough for one round, got {event.noise!r}: one costs "
            f"ε = {cost(event, 1, delta).epsilon:.6g} and {target!r} was asked for. Ask for more noise or a larger ε."
        )
    low = _rounds_by_rdp(target, delta, event)
    if low == ROUNDS_MOST:
        return low
    high, above = low, excess(low)
    while above <= 0:
        if high == ROUNDS_MOST:
            return ROUNDS_MOST
        low, below = high, above
        grow = math.exp(min(max(-2 * above, 0.1), 2.5))  # as if ε grew with √T
        high = min(math.ceil(grow * high) + 1, ROUNDS_MOST)
        above = excess(high)
    while high - low > 1:
        share = min(max(below / (below - above), 0.1), 0.9) if below > -50 else 0.5
        middle = min(max(round(low * (high / low) ** share), low + 1), high - 1)
        found = excess(middle)
        low, below, high, above = (middle, found, high, above) if found <= 0 else (low, below, middle, found)
    return low


def _rounds_by_rdp(target: float, delta: float, event: Event) -> int:
    """A number of rounds that fits by RDP, hence by the reported figure: where to start from."""
    one = rdp(event)
    low, high = 1, ROUNDS_MOST
    if not np.all(np.isinf(one)) and rdp_epsilon(high * one, delta) <= target:
        return high
    while high - low > 1 and not np.all(np.isinf(one)):
        middle = (low + high) // 2
        low, high = (middle, high) if rdp_epsilon(middle * one, delta) <= target else (low, middle)
    return low
