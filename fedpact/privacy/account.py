"""The host's side of a private run: the gate before every block of rounds, the ledger, and ε round by round."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from fedpact.privacy.accounting import epsilon as exact
from fedpact.privacy.accounting import rdp, rdp_epsilon
from fedpact.privacy.budget import Budget
from fedpact.privacy.events import ADVERSARIES, Event
from fedpact.privacy.ledger import EVERYONE, Ledger, Release, Unwritten, worst
from fedpact.privacy.private import Plan

#: Clients up to which each has a line of its own, and rounds at which lines are looked at.
FEW, POINTS = 12, 60
#: What a report calls the relation.
NEIGHBOURS = {
    ("add-remove", "record"): "a record counted or not, its client's size being public",
    ("add-remove", "client"): "one client more or less",
    ("replace-one", "record"): "another record in its place",
    ("replace-one", "client"): "another client in its place",
}
NOT_COVERED = (
    "The telemetry, this report, and whatever was computed from the data before the run (scaling of columns, "
    "categories, the choice of settings by earlier runs) are not covered by it. Client sizes are public."
)
SIMULATED = (
    " This is a simulation: noise, samples and cohorts are computed from the seed, and hide nothing from those who "
    "know it."
)


class Account:
    """A run's ledger and budget: how many of the next rounds `fit`, and `spend` before they are run."""

    def __init__(
        self, plan: Plan, seed: int, ledger: Ledger | None = None, mark: str = "", simulated: bool = True
    ) -> None:
        self.simulated = simulated
        self.plan, self.seed, self.mark = plan, seed, mark  # of the run: other numbers are other releases
        self.ledger = Unwritten() if ledger is None else ledger
        private = plan.private
        self.budget = None if private.epsilon is None else Budget(private.epsilon, private.delta, *plan.claim)
        self._kinds: dict[Event, int] = {}  # a column of counts each
        self._counts = np.zeros((len(plan.sizes), 0), int)
        self._counted, self._tracked = 0, [0.0]  # rounds in the counts; the worst client's ε after each

    def _clients(self, t: int) -> np.ndarray:
        return np.asarray(self.plan.participation.select(self.seed, t, len(self.plan.sizes)))

    def _releases(self, first: int, steps: int) -> list[Release]:
        rounds = range(first, first + steps)
        return [r for t in rounds for r in self.plan.releases(t, self._clients(t), self.mark)]

    def fit(self, first: int, steps: int) -> int:
        """How many of these rounds the budget has room for."""
        fine = lambda n: self.budget is None or self.budget.exceeded_by(self.ledger, self._releases(first, n)) is None
        if fine(steps):
            return steps
        low, high = 0, steps  # `low` rounds fit, `high` do not
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if fine(middle) else (low, middle)
        return low

    def spend(self, first: int, steps: int) -> None:
        """Write down what these rounds release: on the disk when this returns."""
        self.ledger.spend(self._releases(first, steps))

    def epsilon(self, rounds: Sequence[int]) -> np.ndarray:
        """The worst client's ε after each of these rounds: exact for Gaussian noise on all rows, elsewhere by RDP and
        somewhat above what the end reports.
        """
        while len(self._tracked) <= max(rounds, default=0):
            self._count(self._counted)
            self._tracked.append(max(self._each()))
        return np.asarray([self._tracked[t] for t in rounds])

    def _count(self, t: int) -> None:
        for release in self.plan.releases(t, self._clients(t)):
            if release.event not in self._kinds:
                self._kinds[release.event] = len(self._kinds)
                self._counts = np.pad(self._counts, ((0, 0), (0, 1)))
            who = slice(None) if release.who == EVERYONE else int(release.who)
            self._counts[who, self._kinds[release.event]] += release.times
        self._counted = t + 1

    def _each(self) -> np.ndarray:
        """ε of every client so far."""
        rows, place = np.unique(self._counts, axis=0, return_inverse=True)
        return np.asarray([self._cost(row) for row in rows])[place.reshape(-1)]

    def _cost(self, counts: np.ndarray) -> float:
        some = [(event, int(n)) for event, n in zip(self._kinds, counts, strict=True) if n]
        delta = self.plan.private.delta
        if all(event.mechanism == "gaussian" and not event.sampled for event, _ in some):
            return exact(dict(some), delta).epsilon
        return rdp_epsilon(np.sum([n * rdp(event) for event, n in some], axis=0), delta)

    def curves(self, rounds: int) -> dict[str, Any]:
        """ε against rounds, of every client where they are few, else of the most and the least exposed and the median.

        At most `POINTS` rounds are looked at.
        """
        at = sorted({round(x) for x in np.linspace(0, rounds, min(rounds, POINTS) + 1)})
        again, found = Account(self.plan, self.seed), []
        for t in range(rounds + 1):
            if t in at:
                found.append(again._each() if t else np.zeros(len(self.plan.sizes)))
            if t < rounds:
                again._count(t)
        each = np.stack(found)
        if self.plan.central:
            lines = {"every client": each[:, 0]}
        elif each.shape[1] <= FEW:
            lines = {f"client {i}": each[:, i] for i in range(each.shape[1])}
        else:
            order = np.argsort(-each[-1], kind="stable")
            named = {"largest": order[0], "median": order[len(order) // 2], "least": order[-1]}
            lines = {f"{name} (client {i})": each[:, i] for name, i in named.items()}
        rows = self.ledger.epsilon(self.plan.private.delta)
        return {
            "rounds": at,
            "epsilon": {name: values.tolist() for name, values in lines.items()},
            "spent": max((row["epsilon"] for row in rows), default=0.0),
            "delta": self.plan.private.delta,
        }

    # What it comes to, for people

    def statement(self) -> list[str]:
        """The sentences a report begins with: what is hidden from whom, at which ε."""
        plan, private = self.plan, self.plan.private
        rows = self.ledger.epsilon(private.delta)
        if not rows:
            return ["Nothing was released, so nothing was spent."]
        row = next(r for r in worst(rows) if (r["unit"], r["adversary"]) == plan.claim)
        unit, adversary = plan.claim
        who = "every client" if row["client"] == EVERYONE else f"client {row['client']}, the worst"
        granted = "" if private.epsilon is None else f", of {private.epsilon:g} granted"
        neighbours = NEIGHBOURS[row["relation"], unit]
        spent = (
            f"ε = {row['epsilon']:.4g} at δ = {private.delta:g} ({row['method']}){granted}, for {who}: a {unit} is "
            f"hidden from the {adversary} ({ADVERSARIES[adversary]}); neighbours: {neighbours}. "
            f"Way {plan.theorem.way}, {private.mechanism} noise z = {plan.noise:.4g}, clip C = {private.clip:g}. "
            f"{plan.theorem.about}"
        )
        return [spent.strip(), NOT_COVERED + (SIMULATED if self.simulated else "")]

    def table(self) -> list[dict[str, str]]:
        """The ε of the worst client, the median one and the least exposed."""
        rows = [
            r for r in self.ledger.epsilon(self.plan.private.delta) if (r["unit"], r["adversary"]) == self.plan.claim
        ]
        if not rows:
            return []
        rows.sort(key=lambda row: -row["epsilon"])
        shown = {"largest": rows[0], "median": rows[len(rows) // 2], "least": rows[-1]}
        return [
            {
                "ε": name,
                "value": f"{row['epsilon']:.4g}",
                "client": "all" if row["client"] == EVERYONE else row["client"],
                "releases": str(row["releases"]),
                "bound": row["method"],
            }
            for name, row in shown.items()
        ]
