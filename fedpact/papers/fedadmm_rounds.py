"""Rounds to the target, as FedADMM's tables tell them: means over seeds, what is known where a run was cut, reductions.

A seed that was cut after n rounds needs more than n, and one that was not finite never gets there. A mean over such
seeds is a bound ("> n"), and so is what is saved against it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from fedpact.papers.fedadmm_cells import Entry, Results, Row


def mean_rounds(results: Results, entry: Entry) -> float | None:
    """Mean rounds over the seeds; infinite where one did not get there, None where none was run."""
    found = results.find(entry)
    if not found:
        return None
    return float(np.mean([math.inf if row.reached is None else row.reached for row in found]))


def shown(rounds: float | None, found: Sequence[Row] = ()) -> Any:
    """A number; where a seed did not get there, what the mean is above, by the rounds it had."""
    if rounds is None:
        return "not run"
    if not math.isinf(rounds):
        return float(rounds)
    if broken := [row.rounds for row in found if row.broken]:
        return f"not finite after {min(broken)}"
    least = [row.most if row.reached is None else row.reached for row in found]
    return f"> {np.mean(least):.3g}" if least else "not reached"


class Span(NamedTuple):
    """What is known of mean rounds to the target: from `low` to `high`."""

    low: float
    high: float


def span(found: Sequence[Row]) -> Span:
    """A seed that was cut needs more rounds than it had, one that was not finite never gets there."""
    if not found:
        return Span(0.0, math.inf)
    least = [math.inf if row.broken else row.most if row.reached is None else row.reached for row in found]
    most = [math.inf if row.reached is None else row.reached for row in found]
    return Span(float(np.mean(least)), float(np.mean(most)))


def share(own: Span, best: Span) -> str:
    """1 − own/best in percent, or what is known of it."""
    if math.isinf(own.low):
        return "does not get there"
    if math.isinf(best.low):
        return "no baseline gets there"
    low = 1 - own.high / best.low if best.low else -math.inf
    high = 1 - own.low / best.high  # 1 where no baseline may ever get there
    if low == high:
        return _percent(low)
    bounds = [f"> {_percent(low)}"] * (low > -math.inf) + [f"< {_percent(high)}"] * (high < 1)
    return ", ".join(bounds) or "not known"


def _percent(part: float) -> str:
    return f"{100 * part:.1f} %"


def reductions(
    results: Results, entries: Sequence[Entry], labels: Sequence[str], baselines: Sequence[str]
) -> list[dict[str, Any]]:
    """What part of the rounds of the best baseline each of these lines saves, in every cell.

    A baseline that was not run may be better than those that were: the reduction is then below the one told.
    """
    rows = []
    for name in dict.fromkeys(e.cell.name for e in entries):
        mine = {e.label: e for e in entries if e.cell.name == name}
        spans = {label: span(results.find(mine[label])) for label in baselines}
        best = Span(min(one.low for one in spans.values()), min(one.high for one in spans.values()))
        run = sorted((label for label in baselines if results.find(mine[label])), key=lambda one: spans[one][::-1])
        for label in labels:
            found = results.find(mine[label])
            rows.append(
                {
                    "cell": name,
                    "algorithm": label,
                    "rounds": shown(mean_rounds(results, mine[label]), found),
                    "seeds": f"{len(found)} of {mine[label].seeds}",
                    "best baseline": run[0] if run else "not run",
                    "its rounds": shown(mean_rounds(results, mine[run[0]]), results.find(mine[run[0]])) if run else "",
                    "reduction": share(span(found), best) if found and run else "not run",
                    "not run": ", ".join(one for one in baselines if one not in run),
                }
            )
    return rows
