"""What was released, as data: one frozen event per release. What it costs is `accounting`'s business.

Noise is measured in units of the clipping bound C: σ/C of a Gaussian, b/C of a Laplace. The sensitivity in the same
units is 1 under add-remove and 2 under replace-one (one contribution of norm C leaves, another one comes), plus what
rounding to a lattice adds. An event for which no valid bound is known is refused when it is built.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fedpact.core.errors import InvalidArgument, is_count, is_number, require, require_one_of
from fedpact.privacy.discrete import STEPS_MOST
from fedpact.privacy.mechanisms import MECHANISMS, lattice_sensitivity

#: Which data sets count as neighbours, and how many clipping bounds apart their sums are.
RELATIONS = {"add-remove": 1.0, "replace-one": 2.0}
#: How the contributions of a release were chosen.
SAMPLINGS = {
    "full": "every contribution, in every release",
    "poisson": "each contribution on its own with probability q, in secret",
    "fixed": "a secret set of fixed size, without replacement; q is its share",
    "truncated": "Poisson, cut to at most `cap` contributions by a uniform choice among those drawn",
}
UNITS = {"record": "one record of one client", "client": "all that one client holds"}
ADVERSARIES = {
    "server": "whoever sees every upload and knows which clients took part",
    "outsider": "whoever sees the released models only; the cohort is secret",
}
#: The least noise and rate that are taken: below them the accountants' numbers overflow.
LEAST = 1e-3
MOST_NOISE = 1e6
LEAST_RATE = 1e-6


@dataclass(frozen=True)
class Event:
    """One noisy release: mechanism, noise in units of C, sampler, neighbouring relation, and its lattice if it has one.

    `records` and `cap` belong to truncated sampling; `steps` (noise scale in lattice steps, an integer) and `dimension`
    to the discrete mechanisms.
    """

    mechanism: str
    noise: float
    sampling: str = "full"
    rate: float = 1.0
    relation: str = "add-remove"
    records: int | None = None
    cap: int | None = None
    steps: int | None = None
    dimension: int | None = None

    def __post_init__(self) -> None:
        require_one_of("mechanism", self.mechanism, MECHANISMS)
        require_one_of("sampling", self.sampling, SAMPLINGS)
        require_one_of("relation", self.relation, RELATIONS)
        _require_range("noise", self.noise, LEAST, MOST_NOISE, "z", "It is σ or b in units of the clipping bound C.")
        _require_range("rate", self.rate, LEAST_RATE, 1.0, "q", "It is the share of contributions in a release.")
        for name in ("noise", "rate"):  # 1 and 1.0 are the same event, in a ledger too
            object.__setattr__(self, name, float(getattr(self, name)))
        full = self.sampling != "full" or self.rate == 1.0
        require(full, "rate", "1 where sampling is full", self.rate, symbol="q", hint="Say sampling poisson or fixed.")
        self._require_lattice()
        self._require_sizes()
        why = refusal(self.mechanism, self.sampling, self.relation)
        if why:
            raise InvalidArgument(
                f"sampling must be one with a valid bound, got {self.sampling!r} of {self.mechanism} under "
                f"{self.relation}. {why}"
            )

    def _require_lattice(self) -> None:
        lattice = MECHANISMS[self.mechanism].lattice
        for name, most in (("steps", STEPS_MOST), ("dimension", 2**40)):
            value = getattr(self, name)
            if lattice:
                ok = isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= most
                require(ok, name, f"an integer from 1 to {most} for {self.mechanism}", value)
            else:
                require(value is None, name, f"absent for {self.mechanism}, which has no lattice", value)

    def _require_sizes(self) -> None:
        truncated = self.sampling == "truncated"
        for name in ("records", "cap"):
            value = getattr(self, name)
            ok = is_count(value, 1) if truncated else value is None
            wanted = "an integer of at least 1 where sampling is truncated" if truncated else "absent unless truncated"
            require(ok, name, wanted, value)

    @property
    def sensitivity(self) -> float:
        """The most by which one neighbour moves the release, in units of C, rounding to the lattice included."""
        moved = RELATIONS[self.relation]
        if self.steps is None or self.dimension is None:
            return moved
        step = self.noise / self.steps
        return lattice_sensitivity(moved, step, self.dimension, MECHANISMS[self.mechanism].norm)

    @property
    def ratio(self) -> float:
        """Noise over sensitivity: the noise of the same mechanism at sensitivity one."""
        return self.noise / self.sensitivity

    @property
    def sampled(self) -> bool:
        """Whether a secret sample amplifies the privacy."""
        return self.rate < 1.0 or self.sampling == "truncated"


def refusal(mechanism: str, sampling: str, relation: str) -> str:
    """Why this combination has no valid bound here, or nothing."""
    if sampling == "fixed" and relation != "replace-one":
        return "A set of fixed size tells the number of records, so only replace-one neighbours can be hidden."
    if sampling in ("fixed", "truncated") and mechanism != "gaussian":
        return f"A {sampling} sample has a bound for gaussian noise alone. Use poisson or full."
    if mechanism == "discrete_gaussian" and sampling == "poisson" and relation != "add-remove":
        return "No bound is known to us for it under Poisson sampling and replace-one. Use add-remove, or full."
    return ""


def _require_range(name: str, value: Any, least: float, most: float, symbol: str, hint: str) -> None:
    ok = is_number(value) and least <= value <= most
    require(ok, name, f"a number from {least:g} to {most:g}", value, symbol=symbol, hint=hint)


def check_delta(delta: Any) -> float:
    """δ as a number, or the sentence that says what is wrong with it."""
    ok = is_number(delta) and 1e-100 <= delta < 1
    hint = "A usual choice is below one over the number of records."
    require(ok, "delta", "a number from 1e-100 to below 1", delta, symbol="δ", hint=hint)
    return float(delta)


def check_epsilon(epsilon: Any) -> float:
    """ε as a number, or the sentence that says what is wrong with it."""
    ok = is_number(epsilon) and 1e-3 <= epsilon <= 1e4
    require(ok, "epsilon", "a number from 0.001 to 10000", epsilon, symbol="ε", hint="Usual choices are 0.1 to 10.")
    return float(epsilon)
