"""A privacy budget: (ε, δ) granted, and the gate that stops before the round that would exceed it."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from fedpact.core.errors import BudgetSpent, require_one_of
from fedpact.privacy.accounting import epsilon, rdp, rdp_epsilon
from fedpact.privacy.events import ADVERSARIES, UNITS, Event, check_delta, check_epsilon
from fedpact.privacy.ledger import EVERYONE, Claim, Ledger, Release


@dataclass(frozen=True)
class Budget:
    """The ε at δ that every client grants, for hiding this unit from this adversary."""

    epsilon: float
    delta: float
    unit: str = "record"
    adversary: str = "server"

    def __post_init__(self) -> None:
        check_epsilon(self.epsilon)
        check_delta(self.delta)
        require_one_of("unit", self.unit, UNITS)
        require_one_of("adversary", self.adversary, ADVERSARIES)

    def covers(self, counts: Counter[Event]) -> bool:
        """Whether these releases together cost at most the budget: by RDP where that decides, for it is quick."""
        total: Any = sum(count * rdp(event) for event, count in counts.items())
        if not counts or rdp_epsilon(total, self.delta) <= self.epsilon:
            return True
        return epsilon(counts, self.delta).epsilon <= self.epsilon

    def exceeded_by(self, ledger: Ledger, releases: Iterable[Release]) -> tuple[str, float, float] | None:
        """The first client whose budget these releases would exceed, its ε so far and after them; or None.

        Those that are in the ledger already cost nothing more.
        """
        claim = Claim(self.unit, self.adversary)
        new = [release for release in dict.fromkeys(releases) if not ledger.holds(release)]
        for who in _about(ledger, new):
            before = ledger.events(who, claim)
            mine = [release for release in new if release.who in (who, EVERYONE)]
            if before is None or not all(map(claim.covers, mine)):
                return who, math.inf if before is None else epsilon(before, self.delta).epsilon, math.inf
            after = before + _counted(mine)
            if not self.covers(after):
                return who, epsilon(before, self.delta).epsilon, epsilon(after, self.delta).epsilon
        return None

    def gate(self, ledger: Ledger, releases: Iterable[Release]) -> None:
        """Raise `BudgetSpent` if these releases would cost any client more than the budget. Call it before `spend`."""
        found = self.exceeded_by(ledger, releases)
        if found is not None:
            who, spent, then = found
            name = "every client" if who == EVERYONE else f"client {who!r}"
            raise BudgetSpent(
                f"budget (ε) must cover the next release, got ε = {then:.6g} for {name} after it where "
                f"{self.epsilon:g} at δ = {self.delta:g} was granted for hiding a {self.unit} from the "
                f"{self.adversary}, and {spent:.6g} is spent. Stop here: nothing was released."
            )


def _counted(releases: Iterable[Release]) -> Counter[Event]:
    found: Counter[Event] = Counter()
    for release in releases:
        found[release.event] += release.times
    return found


def _about(ledger: Ledger, releases: Sequence[Release]) -> list[str]:
    """The clients whom these releases are about."""
    named = {release.who for release in releases}
    if EVERYONE in named:
        named |= set(ledger.clients())
    return sorted(named - {EVERYONE}) or [EVERYONE]
