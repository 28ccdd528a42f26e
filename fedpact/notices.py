"""Sentences that the reader of a run must see, from its experiment and its history."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from fedpact.core.history import History
from fedpact.core.participation import Schedule
from fedpact.definition import Experiment


def unmatched(federation: Any) -> list[str]:
    """Where records were left out because a party lacks them: a sentence."""
    report = getattr(federation, "unmatched", {})
    if not report:
        return []
    each = ", ".join(f"{said['missing']} of {said['records']} of {party}" for party, said in report.items())
    return [f"Records that some party lacks were left out: {each}."]


def uncovered(e: Experiment, algorithm: Any) -> list[str]:
    """Where a theorem needs everyone and the schedule leaves clients out: a sentence."""
    if not algorithm.coverage or not isinstance(e.participation, Schedule):
        return []
    seen = {int(i) for chosen in e.participation.rounds[: e.rounds] for i in chosen}
    never = [i for i in range(e.federation.clients) if i not in seen]
    if not never:
        return []
    who = ", ".join(map(str, never[:5])) + ("" if len(never) <= 5 else f" and {len(never) - 5} more")
    return [f"The schedule never selects client {who}: {algorithm.coverage} fails, and its theorems do not apply."]


def unused_late(e: Experiment) -> list[str]:
    """Where late uploads were to be used and never can be: a sentence."""
    if getattr(e.engine, "late", "drop") != "use" or e.participation.rate(e.federation.clients) < 1:
        return []
    if isinstance(e.participation, Schedule) and any(
        len(chosen) < e.federation.clients for chosen in e.participation.rounds[: e.rounds]
    ):
        return []
    return [
        'late = "use" uses nothing where everyone is asked in every round, as here: an upload that comes late is '
        "dropped, for its node is asked for another one then. Take participation below 1."
    ]


def worse(e: Experiment, history: History) -> list[str]:
    """Where the objective ended above its start: a sentence with the numbers and what to change."""
    name = history.judged
    f = history.column(name)
    first, last = f[0], f[-1]
    if getattr(e.problem, "subject_to", ()):  # it may have to rise for the constraints to hold
        return []
    if not last > first + 1e-9 * abs(first):
        return []
    best = int(np.nanargmin(f))
    lowest = "its lowest is the start" if best == 0 else f"its lowest is {f[best]:.5g}, in round {best}"
    return [
        f"The {name.replace('_', ' ')} ended above its start: {last:.5g} after {history.rounds} rounds, "
        f"from {first:.5g}; {lowest}. The model is worse than an untrained one. To change that, {e.algorithm.remedy}."
    ]


def kept(history: History, w: Any) -> str:
    """What the model w of a run is worth that met a number that is not finite."""
    if not all(np.all(np.isfinite(leaf)) for leaf in jax.tree.leaves(w)):  # a round that is not finite is not kept
        return "The model's own numbers are not finite, and were not at the start: mend where training begins."
    f = history.column(history.judged)
    if np.isfinite(f[-1]):
        return f"The model is that of round {history.rounds}, the last one with a finite objective."
    fine = np.flatnonzero(np.isfinite(f))
    since = f" since round {fine[-1]}" if len(fine) else ""
    return f"The model's numbers are finite, its objective is not, and no better one{since} was kept: do not use it."


def refused(history: History) -> list[str]:
    """Where rows of a private run counted as zero: a sentence."""
    most = int(np.nanmax(history.column("refused"))) if "refused" in history.columns else 0
    what = "gradients that are not finite, or too large to be clipped; they count as zero. Scale the rows"
    return [f"{most} rows had {what}."] if most else []


def unmeasured(history: History) -> list[str]:
    """Where a private run's objective was not finite, which does not end it: a sentence."""
    values = history.column(history.judged)
    fine = bool(np.isfinite(values[-1]) or np.isnan(values).all())  # nothing was measured
    return (
        [] if fine else [f"The {history.judged.replace('_', ' ')} is not finite: scale the rows, or shorten the steps."]
    )
