"""Tuning: one documented protocol, used for every "tuned" baseline in this project.

Candidates are all combinations of a grid over an algorithm's settings. Every candidate is run with the same seed, hence
the same split, cohorts and noise streams, and is judged by one number: the last value of a column of the history
(`objective` by default) or a held-out score (`held_out.auc`). A run that ends in a non-finite number is last.

    grid      every candidate runs all `rounds`; the best is kept
    halving   successive halving with factor 3: all candidates run a few rounds, the best third runs three times as
              many, and so on until two or three are left, which run all `rounds` and are compared there; a longer run
              starts anew, so that every number is a plain run's

The cost is counted in rounds; with a `budget` a tuning that would exceed it is refused before it starts. Ties go to the
earlier candidate. Tuning looks at the data: in a private setting it costs budget or must be declared.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from fedpact.core.errors import InvalidArgument, require, require_one_of, require_positive_int, unknown
from fedpact.core.settings import Settings
from fedpact.core.stop import Outcome
from fedpact.run import Experiment, Run, before, run, uninterrupted

FACTOR = 3
LARGER_IS_BETTER = ("accuracy", "test_accuracy", "auc", "r_squared", "snr")
METHODS = ("grid", "halving")


class Trial(NamedTuple):
    """One candidate at one rung: its changes, how long it ran and how it scored."""

    changes: dict[str, Any]
    rounds: int
    score: float
    outcome: str


#: What stands around a trial: its changes, its rounds, and what runs it.
Keep = Callable[[dict[str, Any], int, Callable[[], Trial]], Trial]


class Tuned(NamedTuple):
    """The best settings, their score, and every trial on the way."""

    settings: Settings
    score: float
    trials: list[Trial]
    rounds: int

    def table(self) -> list[dict[str, Any]]:
        """The trials as rows."""
        return [{**t.changes, "rounds": t.rounds, "score": t.score, "outcome": t.outcome} for t in self.trials]


def rungs(candidates: int, rounds: int, method: str) -> list[tuple[int, int]]:
    """(candidates, rounds) of every rung; the last compares two or three at full length, if there are so many."""
    if method == "grid":
        return [(candidates, rounds)]
    counts = [candidates]
    while counts[-1] > FACTOR:
        counts.append(math.ceil(counts[-1] / FACTOR))
    last = len(counts) - 1
    return [(count, max(1, math.ceil(rounds / FACTOR ** (last - i)))) for i, count in enumerate(counts)]


def tune(
    settings: Settings,
    problem: Any,
    federation: Any,
    grid: Mapping[str, Sequence[Any]],
    *,
    metric: str = "objective",
    method: str = "halving",
    rounds: int = 27,
    seed: int = 0,
    budget: int | None = None,
    on_trial: Callable[[Trial], None] | None = None,
    keep: Keep | None = None,
    **options: Any,
) -> Tuned:
    """The best of a grid over `settings`, by the protocol at the top of this module; options are those of `run`.

    `keep(changes, rounds, compute)` may answer for a trial that was run before, so that a tuning can go on.
    """
    require_one_of("method", method, METHODS)
    require_positive_int("rounds", rounds)
    require(len(grid) > 0 and all(len(v) > 0 for v in grid.values()), "grid", "values for at least one setting", grid)
    candidates = [dict(zip(grid, values, strict=True)) for values in itertools.product(*grid.values())]
    made = [type(settings).from_dict({**settings.to_dict(), **changes}) for changes in candidates]
    plan = rungs(len(made), rounds, method)
    cost = sum(count * length for count, length in plan)
    if budget is not None and cost > budget:
        raise InvalidArgument(
            f"budget must be at least {cost} rounds for {len(made)} candidates, got {budget}. "
            "Take a smaller grid or fewer rounds."
        )
    _check_metric(metric, made[0], problem, federation, {"rounds": rounds, "seed": seed, **options})
    trials: list[Trial] = []
    order = list(range(len(made)))
    for count, length in plan:
        scored = []
        for index in order[:count]:

            def compute(index: int = index, length: int = length) -> Trial:
                result = run(made[index], problem, federation, rounds=length, seed=seed, **options)
                after = "a tuning starts anew" if keep is None else "they are kept"
                uninterrupted(result, f"{len(trials)} trials were done before it; {after}.")
                return Trial(candidates[index], length, _score(result, metric), result.outcome)

            trial = compute() if keep is None else keep(candidates[index], length, compute)
            trials.append(trial)
            scored.append((trial.score, index))
            if on_trial is not None:
                on_trial(trial)
        worst = -math.inf if _larger(metric) else math.inf
        scored.sort(key=lambda pair: (-pair[0] if _larger(metric) else pair[0], pair[1]))
        order = [index for score, index in scored]
    best = scored[0]
    if best[0] == worst:
        raise InvalidArgument(f"grid must have a candidate that stays finite, got none: {grid}. Try smaller steps.")
    return Tuned(made[best[1]], best[0], trials, cost)


def _check_metric(metric: str, settings: Settings, problem: Any, federation: Any, options: Mapping[str, Any]) -> None:
    """Refuse, before the first trial, a metric that no run has."""
    known = [field.name for field in dataclasses.fields(Experiment)]
    shared = {name: value for name, value in options.items() if name in known}  # `run` takes others too
    _score(before(Experiment(settings, problem, federation, **shared)), metric)


def _larger(metric: str) -> bool:
    return metric.rpartition(".")[2] in LARGER_IS_BETTER


def _score(result: Run, metric: str) -> float:
    worst = -math.inf if _larger(metric) else math.inf
    place, _, name = metric.rpartition(".")
    if place == "held_out":
        pooled = (result.metrics or {}).get("pooled")
        if pooled is None:
            raise InvalidArgument(f"metric must be a column without held-out rows, got {metric!r}. Split with holdout.")
        if name not in pooled:
            raise unknown("held-out metric", name, pooled)
        value = pooled[name]
    else:
        if metric not in result.history.columns:
            raise unknown("metric", metric, [*result.history.columns, "held_out.accuracy", "held_out.auc"])
        value = result.history.end(metric)
    if result.outcome_kind is Outcome.NONFINITE or value is None or not math.isfinite(value):
        return worst
    return float(value)
