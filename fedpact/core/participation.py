"""Who takes part in a round. Each scheme is a frozen setting; the draw depends on (seed, round) only."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import numpy as np

from fedpact.core.checkpoint import digest
from fedpact.core.errors import is_count, is_number, require, require_positive_int
from fedpact.core.keys import Purpose, host_generator
from fedpact.core.settings import plain, plain_fields


@runtime_checkable
class Participation(Protocol):
    """A scheme: its rate ρ, the room that its rounds need, and the clients of a round."""

    def rate(self, clients: int) -> float:
        """ρ, as it enters the papers' constants: the expected share of clients in a round.

        A `Schedule` has no expectation; its rate is the share of its first round, as the recorded runs use it.
        """
        ...

    def capacity(self, clients: int) -> int:
        """Room for the clients of a round. A block with a round that needs more steps everyone and masks the rest."""
        ...

    def check(self, seed: int, rounds: int, clients: int) -> None:
        """Refuse, before round 1, a run that the scheme cannot serve."""
        ...

    def describe(self) -> str:
        """The scheme in a line: what a run's configuration holds. Schemes that differ are described differently."""
        ...

    def select(self, seed: int, round_number: int, clients: int) -> np.ndarray:
        """The clients of a round, in increasing order."""
        ...


def _check_rate(rho: Any) -> None:
    hint = "It is the share of the clients in a round: 0.5 for half, 1 for everyone."
    require(is_number(rho) and 0 < rho <= 1, "participation", "in (0, 1]", rho, symbol="ρ", hint=hint)


def _ceil(rho: float, clients: int) -> int:
    return max(1, math.ceil(round(rho * clients, 9)))  # 0.1 * 30 is 3, not 4


class _Drawn:
    """What the schemes that draw have in common: they serve any number of rounds, and their settings say it all."""

    def check(self: Any, seed: int, rounds: int, clients: int) -> None:
        """Draw a round."""
        self.select(seed, 0, clients)

    def describe(self) -> str:
        """Name and settings."""
        return repr(self)


@dataclass(frozen=True)
class Everyone(_Drawn):
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
class Fraction(_Drawn):
    """⌈ρm⌉ clients drawn without replacement, independently in each round."""

    rho: float

    def __post_init__(self) -> None:
        plain_fields(self)
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
class Poisson(_Drawn):
    """Each client on its own with probability ρ; a round may be empty."""

    rho: float

    def __post_init__(self) -> None:
        plain_fields(self)
        _check_rate(self.rho)

    def rate(self, clients: int) -> float:
        """ρ."""
        return float(self.rho)

    def capacity(self, clients: int) -> int:
        """Eight deviations above the mean, and a few more: next to no round needs everyone's room."""
        mean = self.rho * clients
        return min(clients, math.ceil(mean + 8 * math.sqrt(mean * (1 - self.rho)) + 4))

    def select(self, seed: int, round_number: int, clients: int) -> np.ndarray:
        """Independent coin flips."""
        rng = host_generator(seed, round_number, Purpose.PARTICIPATION)
        return np.flatnonzero(rng.random(clients) < self.rho)


@dataclass(frozen=True)
class Independent(_Drawn):
    """Client i on its own with probability p_i; a round may be empty."""

    probabilities: Sequence[float]

    def __post_init__(self) -> None:
        plain_fields(self)
        given = self.probabilities
        listed = isinstance(given, (Sequence, np.ndarray)) and not isinstance(given, str) and len(given) > 0
        hint = "Write [0.1, 0.5, 1.0] for three clients. A client with p_i = 0 would never take part."
        require(listed, "probabilities", "a list of numbers, one per client", given, symbol="p_i", hint=hint)
        values = tuple(v.item() if isinstance(v, np.generic) else v for v in given)
        for i, p in enumerate(values):
            require(is_number(p) and 0 < p <= 1, f"probability of client {i}", "in (0, 1]", p, symbol="p_i", hint=hint)
        object.__setattr__(self, "probabilities", values)

    def check(self, seed: int, rounds: int, clients: int) -> None:
        """One probability per client."""
        count = len(self.probabilities)
        hint = "Write as many numbers as the split has clients."
        require(count == clients, "probabilities", f"one per client ({clients})", count, symbol="p_i", hint=hint)

    def rate(self, clients: int) -> float:
        """The mean of the p_i."""
        return float(np.mean(self.probabilities))

    def capacity(self, clients: int) -> int:
        """Eight deviations above the mean, and a few more."""
        p = np.asarray(self.probabilities)
        return min(clients, math.ceil(p.sum() + 8 * math.sqrt(float(np.sum(p * (1 - p)))) + 4))

    def describe(self) -> str:
        """A digest of the list."""
        return f"Independent({digest({'probabilities': list(self.probabilities)})[:12]})"

    def select(self, seed: int, round_number: int, clients: int) -> np.ndarray:
        """Independent coin flips."""
        rng = host_generator(seed, round_number, Purpose.PARTICIPATION)
        return np.flatnonzero(rng.random(clients) < np.asarray(self.probabilities))


@dataclass(frozen=True)
class Covering(_Drawn):
    """Setup VI.1 of the FedEPM paper: ⌈ρm⌉ clients a round, everyone at least once in every s0 rounds.

    For each group of s0 rounds the clients are shuffled and dealt to the rounds; each round is then filled up with
    clients drawn at random from the rest.
    """

    rho: float
    s0: int

    def __post_init__(self) -> None:
        plain_fields(self)
        _check_rate(self.rho)
        require_positive_int("covering", self.s0, symbol="s0", hint="In every s0 rounds everyone takes part.")

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
        plain_fields(self)
        given = isinstance(self.rounds, Sequence) and all(isinstance(r, (Sequence, np.ndarray)) for r in self.rounds)
        hint = "Write [[0, 2], [1]] for clients 0 and 2, then 1."
        require(given, "schedule", "a list of rounds, each a list of clients", self.rounds, hint=hint)
        for t, chosen in enumerate(self.rounds):
            name = f"schedule of round {t}"
            flat = all(is_count(plain(i)) for i in chosen)
            require(flat, name, "a list of client numbers from 0", chosen, hint=hint)
            require(len(set(chosen)) == len(chosen), name, "without repetition", chosen, hint="Name each client once.")

    def rate(self, clients: int) -> float:
        """The share of the first round, as the recorded runs use it."""
        return max(len(self.rounds[0]), 1) / clients if len(self.rounds) else 1.0

    def capacity(self, clients: int) -> int:
        """The largest round."""
        return max((len(r) for r in self.rounds), default=0)

    def check(self, seed: int, rounds: int, clients: int) -> None:
        """The list is long enough, and names clients that exist."""
        self._reach(rounds)
        for t in range(rounds):
            self.select(seed, t, clients)

    def describe(self) -> str:
        """A digest of the list."""
        return f"Schedule({digest({'rounds': [list(map(int, chosen)) for chosen in self.rounds]})[:12]})"

    def _reach(self, rounds: int) -> None:
        hint = "Run fewer rounds or lengthen the schedule."
        longest = len(self.rounds)
        require(rounds <= longest, "rounds", f"at most {longest}, the schedule's length", rounds, hint=hint)

    def select(self, seed: int, round_number: int, clients: int) -> np.ndarray:
        """The clients the list has for this round."""
        self._reach(round_number + 1)
        ids = np.sort(np.asarray(self.rounds[round_number], dtype=int))
        name, hint = f"schedule of round {round_number}", f"Clients are counted from 0 to {clients - 1}."
        require(ids.size == 0 or ids[-1] < clients, name, f"below {clients}", ids.tolist(), hint=hint)
        return ids


def as_participation(value: Any) -> Participation:
    """A scheme from what users write: a number ρ, a scheme, or a list of rounds."""
    value = plain(value)
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        _check_rate(value)
        return Everyone() if value == 1 else Fraction(float(value))
    if isinstance(value, (list, tuple)):
        return Schedule(tuple(tuple(r) if isinstance(r, (list, tuple)) else r for r in value))
    what = "a number in (0, 1], a scheme or a list of rounds"
    hint = "Write 0.5, fedpact.Poisson(0.5) or [[0, 2], [1]]."
    scheme = isinstance(value, Participation) and not isinstance(value, type)
    require(scheme, "participation", what, value, hint=hint)
    return value
