"""Rounds to the target, as FedADMM's tables tell them: means over seeds, what is known where a run was cut, reductions.

A seed that was cut after n rounds needs more than n, and one that was not finite never gets there. A mean over such
seeds is a bound ("> n"), and so is what is saved against it. Two lines are compared on the seeds that both have.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from fedpact.papers.fedadmm_cells import Entry, Results, Row


def shown(found: Sequence[Row]) -> float | str:
    """Mean rounds over the seeds; where one did not get there, what the mean is above, by the rounds it had."""
    if not found:
        return "not run"
    if broken := [row.rounds for row in found if row.broken]:
        return f"not finite after {min(broken)}"
    known = span(found)
    return known.low if known.low == known.high else f"> {known.low:.3g}"


def told(found: Sequence[Row]) -> str:
    """The same in a sentence."""
    rounds = shown(found)
    return rounds if isinstance(rounds, str) else f"{rounds:.3g}"


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


def common(own: Sequence[Row], others: Mapping[str, Sequence[Row]]) -> tuple[list[Row], dict[str, list[Row]]]:
    """The runs of those seeds that all lines have of which any was run."""
    seeds = [{row.seed for row in found} for found in (own, *others.values()) if found]
    every = set.intersection(*seeds) if seeds else set()
    keep = lambda found: [row for row in found if row.seed in every]
    return keep(own), {label: keep(found) for label, found in others.items()}


def fewer(own: Sequence[Row], other: Sequence[Row]) -> bool | None:
    """Whether own needs fewer rounds than the other, on the seeds that both have; None where it is not known."""
    mine, theirs = common(own, {"": other})
    a, b = span(mine), span(theirs[""])
    if a.high < b.low:
        return True
    return False if a.low >= b.high else None


def no_rise(first: Sequence[Row], second: Sequence[Row]) -> bool | None:
    """Whether the second needs no more rounds than the first; None where it is not known, or neither gets there."""
    less = fewer(first, second)
    return None if less is None or (less is False and math.isinf(span(second).high)) else not less


def at_most(found: Sequence[Row], rounds: int) -> bool | None:
    """Whether no more than these rounds are needed; None where it is not known."""
    known = span(found)
    if known.high <= rounds:
        return True
    cut = known.low < known.high  # and so above its low
    return False if known.low > rounds or (cut and known.low == rounds) else None


def every(parts: Iterable[bool | None]) -> bool | None:
    """Whether all hold; None where none is broken and one is not known."""
    told = list(parts)
    if any(one is False for one in told):
        return False
    return None if not told or None in told else True


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
    results: Results, entries: Sequence[Entry], labels: Sequence[str], baselines: Sequence[str] | None = None
) -> list[dict[str, Any]]:
    """What part of the rounds of the best baseline each of these lines saves, in every cell, on their common seeds.

    A baseline that was not run may be better than those that were: the reduction is then below the one told. Without
    `baselines` they are all lines of the cell that are not FedADMM.
    """
    rows = []
    for name in dict.fromkeys(e.cell.name for e in entries):
        mine = {e.label: e for e in entries if e.cell.name == name}
        against = [one for one in mine if not one.startswith("FedADMM")] if baselines is None else baselines
        for label in labels:
            found = results.find(mine[label])
            own, others = common(found, {one: results.find(mine[one]) for one in against})
            run = sorted((one for one in against if results.find(mine[one])), key=lambda one: span(others[one])[::-1])
            unrun = [one for one in against if one not in run]
            rows.append(
                {
                    "cell": name,
                    "algorithm": label,
                    "rounds": shown(own or found),
                    "seeds": f"{len(own or found)} of {mine[label].seeds}",
                    "best baseline": (run[0] + ", of those run" * bool(unrun)) if run else "not run",
                    "its rounds": shown(others[run[0]]) if run else "",
                    "reduction": share(span(own), best(others.values())) if found and run else "not run",
                    "not run": ", ".join(unrun),
                }
            )
    return rows


def best(lines: Iterable[Sequence[Row]]) -> Span:
    """What is known of the rounds of the best of these lines."""
    spans = [span(found) for found in lines]
    return Span(min(one.low for one in spans), min(one.high for one in spans))
