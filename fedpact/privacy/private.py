"""How a run is private: the settings, the theorem they rest on, and the noise they come to.

Give `noise` (z), or `epsilon` and have the noise calibrated to the run's rounds, or both: then the run ends before the
round that would pass the budget. What is computed from the data must not decide anything that is seen: in a private run
step sizes, numbers of local steps and penalties are numbers, never "lipschitz" or a test on gradients.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from fedpact.core.errors import InvalidArgument, is_number, require, require_one_of, require_positive_int
from fedpact.core.participation import Everyone, Fraction, Poisson
from fedpact.core.private import WAYS, Theorem
from fedpact.core.settings import plain_fields
from fedpact.privacy.accounting import epsilon as cost_of
from fedpact.privacy.accounting import rdp, rdp_epsilon
from fedpact.privacy.calibration import noise_for
from fedpact.privacy.events import RELATIONS, Event, check_delta, check_epsilon
from fedpact.privacy.ledger import EVERYONE, Claim, Release
from fedpact.privacy.mechanisms import MECHANISMS

PLACED = ("local", "central")


@dataclass(frozen=True)
class Private:
    """A private run: every release is clipped, noised, written to the ledger and counted."""

    clip: float  # C: the norm to which a record's gradient, or with way "client" the whole upload, is clipped
    noise: float | None = None  # z: σ or b in units of C; None: calibrated to `epsilon` over the run's rounds
    epsilon: float | None = None  # ε that every client grants; the run ends before a round that would pass it
    delta: float = 1e-5  # δ
    way: str | None = None  # "once", "steps", "convex" or "client"; None: the algorithm's first
    mechanism: str = "gaussian"  # "gaussian", "laplace", "discrete_gaussian" or "discrete_laplace"
    relation: str | None = None  # "replace-one" or "add-remove"; None: add-remove where rows are sampled
    place: str = "local"  # who adds the noise: "local" for the clients; with way "client" also "central", the server
    lattice: int | None = None  # of discrete noise: its scale in lattice steps
    reach: float | None = None  # R, of way "convex": rows are scaled down to this 2-norm

    def __post_init__(self) -> None:
        plain_fields(self)
        hint = "A record's gradient is scaled down to it: begin with a usual gradient's norm."
        require(is_number(self.clip) and self.clip > 0, "clip", "a number above 0", self.clip, symbol="C", hint=hint)
        given = self.noise is not None or self.epsilon is not None
        require(given, "privacy", "with noise (z), epsilon (ε) or both", "neither", hint="For example epsilon=3.")
        if self.noise is not None:
            Event("gaussian", self.noise)  # its range
        if self.epsilon is not None:
            check_epsilon(self.epsilon)
        check_delta(self.delta)
        require_one_of("mechanism", self.mechanism, MECHANISMS)
        if self.way is not None:
            require_one_of("way", self.way, WAYS)
        if self.relation is not None:
            require_one_of("relation", self.relation, RELATIONS)
        require_one_of("place", self.place, PLACED)
        central = self.place == "local" or self.way == "client"
        hint = "Noise that the server adds leaves the clients' own uploads bare: it can only hide whole clients."
        require(central, "place", '"local" unless way is "client"', self.place, hint=hint)
        if MECHANISMS[self.mechanism].lattice:
            hint = "Noise is drawn on a lattice of that many steps a scale: 65536 for models of some 10,000 numbers."
            require_positive_int("lattice", self.lattice, hint=hint)
        else:
            require(self.lattice is None, "lattice", f"left out for {self.mechanism}", self.lattice)
        convex = self.way == "convex"
        hint = "Steps on a convex loss contract in the ℓ2 norm, not in the ℓ1 norm of Laplace noise."
        contracts = not convex or MECHANISMS[self.mechanism].norm == 2
        require(contracts, "mechanism", "gaussian or discrete_gaussian for way convex", self.mechanism, hint=hint)
        ok = self.reach is None if not convex else is_number(self.reach) and float(self.reach or 0) > 0
        hint = "Rows are scaled down to this norm, so that the loss is as smooth as the theorem needs."
        require(ok, "reach", "above 0 for way convex" if convex else "left out", self.reach, symbol="R", hint=hint)

    def to_dict(self) -> dict[str, Any]:
        """As plain data."""
        return dataclasses.asdict(self)


class Plan(NamedTuple):
    """A private run worked out: settings, theorem, noise z, and who releases what in a round."""

    private: Private
    theorem: Theorem
    noise: float
    sizes: tuple[int, ...]
    dimension: int
    participation: Any

    @property
    def central(self) -> bool:
        """Whether the server adds the noise."""
        return self.private.place == "central"

    @property
    def claim(self) -> Claim:
        """What the ε is about."""
        return Claim(WAYS[self.theorem.way], "outsider" if self.central else "server")

    @property
    def relation(self) -> str:
        """Which data sets are neighbours."""
        return self.event(self.sizes[0]).relation

    def event(self, rows: int) -> Event:
        """One release of a client with so many rows; where the server adds the noise, of a round."""
        return _event(self.private, self.theorem, self.noise, rows, self.dimension, self.participation, len(self.sizes))

    def releases(self, t: int, clients: np.ndarray, mark: str = "") -> list[Release]:
        """What round t releases; `mark` says of which run."""
        place, (unit, adversary) = self.private.place, self.claim
        more: dict[str, Any] = {"unit": unit, "adversary": adversary, "place": place, "output": mark}
        if self.central:
            return [Release(EVERYONE, t, self.event(0), self.private.clip, "model", **more)]
        return [
            Release(str(i), t, self.event(rows), self.moved(rows, t), times=self.theorem.steps(rows), **more)
            for i, rows in ((int(i), self.sizes[int(i)]) for i in clients)
        ]

    def moved(self, rows: int, t: int) -> float:
        """The C of a release of round t: how far one record can move it."""
        return float(self.theorem.moved(self.private.clip, rows, t))

    def counted(self, seed: int, rounds: int) -> Counter[tuple[Event, int]]:
        """Distinct (event, how often) over the clients, as the seed draws the cohorts of so many rounds."""
        return _counted(self, seed, rounds)


def _event(
    private: Private, theorem: Theorem, noise: float, rows: int, dimension: int, participation: Any, clients: int
) -> Event:
    kind: dict[str, Any] = {"mechanism": private.mechanism, "noise": noise}
    if private.lattice is not None:
        kind |= {"steps": private.lattice, "dimension": dimension}
    usual = "replace-one"
    if private.place == "central":  # client sampling is a secret from outsiders, where it is drawn at random
        if isinstance(participation, Poisson):
            kind |= {"sampling": "poisson", "rate": participation.rho}
            usual = "add-remove"
        elif isinstance(participation, Fraction) and private.mechanism == "gaussian" and theorem.stateless:
            # of fixed-size cohorts: what clients remember of earlier ones tells who was in them
            kind |= {"sampling": "fixed", "rate": participation.capacity(clients) / clients}
    elif theorem.batch is not None:
        kind |= {"sampling": "poisson", "rate": theorem.batch / rows} if theorem.batch < rows else {}
        usual = "add-remove"
    return Event(**kind, relation=private.relation or usual)


def plan(
    private: Private, theorem: Theorem, sizes: Any, dimension: int, participation: Any, seed: int, rounds: int
) -> Plan:
    """The run worked out, with its noise calibrated where only ε was given."""
    sizes = tuple(int(n) for n in sizes)
    draft = Plan(private, theorem, private.noise or 1.0, sizes, dimension, participation)
    hidden = theorem.way != "client" or draft.central or private.relation != "add-remove"
    hint = "Whoever sees every upload knows who took part; what is hidden is which data they have."
    require(hidden, "relation", '"replace-one" for way client with noise by the clients', private.relation, hint=hint)
    for rows in set(sizes):
        draft.event(rows)  # refuses what has no bound
    if private.noise is not None:
        return draft
    kinds = tuple(sorted(((e, n) for e, n in draft.counted(seed, rounds)), key=repr))
    return draft._replace(noise=_calibrated(kinds, float(private.epsilon or 0), private.delta))


def _counted(made: Plan, seed: int, rounds: int) -> Counter[tuple[Event, int]]:
    if made.central:
        return Counter({(made.event(0), rounds): len(made.sizes)})
    clients = len(made.sizes)
    if isinstance(made.participation, Everyone):
        times = np.full(clients, rounds)
    else:
        times = np.zeros(clients, int)
        for t in range(rounds):
            times[made.participation.select(seed, t, clients)] += 1
    each = ((made.event(d), int(n) * made.theorem.steps(d)) for d, n in zip(made.sizes, times, strict=True))
    return Counter((event, n) for event, n in each if n > 0)


@lru_cache(maxsize=64)
def _calibrated(kinds: tuple[tuple[Event, int], ...], epsilon: float, delta: float) -> float:
    """The least noise with which nobody's releases cost more than ε: that of the worst, found by RDP and checked."""
    if not kinds:
        raise InvalidArgument("rounds must have a release for the noise to be calibrated, got none. Run more rounds.")
    left, noise = list(kinds), 0.0
    while left:
        at = noise or _rough(kinds[0], epsilon, delta)
        worst = max(left, key=lambda kind: rdp_epsilon(kind[1] * rdp(dataclasses.replace(kind[0], noise=at)), delta))
        event, times = worst
        fields = {f.name: getattr(event, f.name) for f in dataclasses.fields(event) if f.name != "noise"}
        noise = max(noise, noise_for(epsilon, delta, times, **fields))
        left = [kind for kind in left if kind != worst and _exceeds(kind, noise, epsilon, delta)]
    return noise


def _rough(kind: tuple[Event, int], epsilon: float, delta: float) -> float:
    event, times = kind
    return float(np.clip(event.sensitivity * math.sqrt(2 * times * math.log(1.25 / delta)) / epsilon, 0.5, 1e5))


def _exceeds(kind: tuple[Event, int], noise: float, epsilon: float, delta: float) -> bool:
    event, times = dataclasses.replace(kind[0], noise=noise), kind[1]
    if rdp_epsilon(times * rdp(event), delta) <= epsilon:
        return False
    return cost_of({event: times}, delta).epsilon > epsilon
