"""Who takes part in a round. Each scheme is a frozen setting; the draw depends on (seed, round) only."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from fedpact.core.errors import InvalidArgument, is_number, require, require_positive_int
from fedpact.core.keys import Purpose, host_generator


class Participation(Protocol):
    """A scheme: its rate ρ, the size of its largest round, and the clients of a round."""

    def rate(self, clients: int) -> float:
        """The expected share of clients in a round."""
        ...

    def capacity(self, clients: int) -> int:
        """The most clients that one round can have."""
        ...

    def select(self, seed: int, round_number: int, clients: int) -> np.ndarray:
        """The clients of a round, in increasing order."""
        ...


def _check_rate(rho: Any) -> None:
    require(is_number(rho) and 0 < rho <= 1, "participation", "in (0, 1]", rho, symbol="ρ")


def _ceil(rho: float, clients: int) -> int:
    return max(1, math.ceil(round(rho * clients, 9)))  # 0.1 * 30 is 3, not 4


@dataclass(frozen=True)
class Everyone:
    """Every client, every round."""

    def rate(self, clients: int) -> float:
        """1."""
        return 1.0

    def capacity(self, clients: int) -> int:
        """All of them."""
        return clients

    def select(self, seed: int, round_number: int, clients: int) -> np.ndarray:
        """All of them."""
        return np.arange(clients)


@dataclass(frozen=True)
class Fraction:
    """⌈ρm⌉ clients drawn without replacement, independently in each round."""

    rho: float

    def __post_init__(self) -> None:
        _check_rate(self.rho)

    def rate(self, clients: int) -> float:
        """ρ as given: what enters the papers' constants."""
        return float(self.rho)

    def capacity(self, clients: int) -> int:
        """⌈ρm⌉."""
        return _ceil(self.rho, clients)

    def select(self, seed: int, round_number: int, clients: int) -> np.ndarray:
        """A uniform subset."""
        rng = host_generator(seed, round_number, Purpose.PARTICIPATION)
        return np.sort(rng.choice(clients, size=self.capacity(clients), replace=False))


@dataclass(frozen=True)
class Poisson:
    """Each client on its own with probability ρ; a round may be empty."""

    rho: float

    def __post_init__(self) -> None:
        _check_rate(self.rho)

    def rate(self, clients: int) -> float:
        """ρ."""
        return float(self.rho)

    def capacity(self, clients: int) -> int:
        """All of them, in the worst case."""
        return clients

    def select(self, seed: int, round_number: int, clients: int) -> np.ndarray:
        """Independent coin flips."""
        rng = host_generator(seed, round_number, Purpose.PARTICIPATION)
        return np.flatnonzero(rng.random(clients) < self.rho)


@dataclass(frozen=True)
class Covering:
    """Setup VI.1 of the FedEPM paper: ⌈ρm⌉ clients a round, everyone at least once in every s0 rounds.

    For each group of s0 rounds the clients are shuffled and dealt to the rounds; each round is then filled up with
    clients drawn at random from the rest.
    """

    rho: float
    s0: int

    def __post_init__(self) -> None:
        _check_rate(self.rho)
        require_positive_int("covering", self.s0, symbol="s0")

    def rate(self, clients: int) -> float:
        """ρ."""
        return float(self.rho)

    def capacity(self, clients: int) -> int:
        """⌈ρm⌉."""
        return _ceil(self.rho, clients)

    def select(self, seed: int, round_number: int, clients: int) -> np.ndarray:
        """The round's share of its group's deal, filled up."""
        size = self.capacity(clients)
        require(
            size * self.s0 >= clients,
            "covering",
            f"at least {math.ceil(clients / size)} so that {size} of {clients} clients a round can cover everyone",
            self.s0,
            symbol="s0",
            hint="Raise s0 or ρ.",
        )
        group, place = divmod(round_number, self.s0)
        deal = host_generator(seed, group, Purpose.COVER).permutation(clients)
        own = deal[place :: self.s0]
        rest = np.setdiff1d(np.arange(clients), own, assume_unique=True)
        rng = host_generator(seed, round_number, Purpose.PARTICIPATION)
        return np.sort(np.concatenate([own, rng.choice(rest, size=size - len(own), replace=False)]))


@dataclass(frozen=True)
class Schedule:
    """A given list of rounds, each a list of clients (counted from 0). The run cannot be longer than the list."""

    rounds: Sequence[Sequence[int]] = field(repr=False)

    def __post_init__(self) -> None:
        given = isinstance(self.rounds, Sequence) and all(isinstance(r, (Sequence, np.ndarray)) for r in self.rounds)
        require(given, "schedule", "a list of rounds, each a list of clients", self.rounds)
        for t, chosen in enumerate(self.rounds):
            flat = all(isinstance(i, (int, np.integer)) and not isinstance(i, bool) for i in chosen)
            require(flat, f"schedule of round {t}", "a list of client numbers from 0", chosen)
            ids = np.asarray(chosen)
            ok = ids.ndim == 1 and (ids.size == 0 or (ids.dtype.kind in "iu" and ids.min() >= 0))
            require(ok, f"schedule of round {t}", "a list of client numbers from 0", chosen)
            require(len(np.unique(ids)) == len(ids), f"schedule of round {t}", "without repetition", chosen)

    def rate(self, clients: int) -> float:
        """The share of the first round, as the recorded runs use it."""
        return max(len(self.rounds[0]), 1) / clients if len(self.rounds) else 1.0

    def capacity(self, clients: int) -> int:
        """The largest round."""
        return max((len(r) for r in self.rounds), default=0)

    def select(self, seed: int, round_number: int, clients: int) -> np.ndarray:
        """The clients the list has for this round."""
        if round_number >= len(self.rounds):
            raise InvalidArgument(
                f"rounds must be at most {len(self.rounds)}, the length of the schedule, got {round_number + 1}."
            )
        ids = np.sort(np.asarray(self.rounds[round_number], dtype=int))
        require(
            ids.size == 0 or ids[-1] < clients, f"schedule of round {round_number}", f"below {clients}", ids.tolist()
        )
        return ids


def as_participation(value: Any) -> Participation:
    """A scheme from what users write: a number ρ, a scheme, or a list of rounds."""
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        _check_rate(value)
        return Everyone() if value == 1 else Fraction(float(value))
    if isinstance(value, (list, tuple)):
        return Schedule(tuple(tuple(r) if isinstance(r, (list, tuple)) else r for r in value))
    require(hasattr(value, "select"), "participation", "a number in (0, 1], a scheme or a list of rounds", value)
    return value
