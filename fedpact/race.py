"""Comparing runs: what each needed to reach the same target."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fedpact.algorithms import ALGORITHMS
from fedpact.core.errors import InvalidArgument, is_number, require
from fedpact.experiment import build, read
from fedpact.report.view import labels
from fedpact.run import Experiment, Run, Runs, before, execute, mixed, uninterrupted
from fedpact.tune import LARGER_IS_BETTER

KEEP = "Nothing was kept: run the files with 'fedpact run', which can be resumed, and compare their folders."


def gather(items: Iterable[str], changes: Iterable[str] = (), column: str = "objective") -> Runs:
    """Runs from experiment files (run now) and from folders of finished runs (read).

    Whether they can be compared, by this column, is found before the first of them runs.
    """
    items, changes = list(items), list(changes)
    files = any(not Path(item).is_dir() for item in items)
    hint = "Folders hold runs that are done; change the experiment file and run it again."
    require(files or not changes, "--set", "left out where only folders are compared", changes, hint=hint)
    made = [Run.load(item) if Path(item).is_dir() else build(read(item, changes)) for item in items]
    _check_data([(one.name, one.config) if isinstance(one, Run) else (_label(one), one[0].config()) for one in made])
    for one in made:
        _check_column(one if isinstance(one, Run) else one[0], column)
    runs = Runs(one if isinstance(one, Run) else _executed(one) for one in made)
    runs = Runs(dataclasses.replace(run, name=label) for run, label in zip(runs, labels(runs), strict=True))
    return mixed(runs, [_pooled(run) for run in runs]) if any(map(_uneven, made)) else runs


def _label(built: tuple[Experiment, str | None]) -> str:
    experiment, name = built
    return name or experiment.algorithm.label


def _executed(built: tuple[Experiment, str | None]) -> Run:
    return uninterrupted(execute(built[0], name=_label(built), progress=None), KEEP)


def _check_column(one: Run | Experiment, column: str) -> None:
    if isinstance(one, Run) or column != "objective" or one.telemetry != "all":  # every run of "all" has an objective
        (one if isinstance(one, Run) else before(one)).history.column(column)


def _pooled(run: Run) -> bool:
    """Whether the objective is a mean over all rows."""
    kind = ALGORITHMS.get(run.config["algorithm"].get("name", ""))
    return kind is not None and kind.constrains


def _uneven(one: Run | tuple[Experiment, str | None]) -> bool:
    """Whether clients hold different numbers of rows, or may: a finished run does not say."""
    if isinstance(one, Run):
        return one.config["data"].get("clients", 1) > 1
    return len(set(one[0].federation.sizes.tolist())) > 1


def _check_data(configs: Sequence[tuple[str, Mapping[str, Any]]]) -> None:
    """Refuse runs of different data."""
    digests = {config["data"]["digest"] for _, config in configs}
    if len(digests) > 1:
        each = [f"{name}: {config['data']['dataset']}, {config['data']['split']}" for name, config in configs]
        raise InvalidArgument(
            f"runs must be of the same data and split to be compared, got {len(digests)} different ones: "
            f"{'; '.join(each)}. Give them the same [data] and [split]."
        )


def larger_is_better(column: str) -> bool:
    """Whether a target on this column is reached from below."""
    return column in LARGER_IS_BETTER


def never_improved(runs: Sequence[Run], column: str, above: bool) -> list[str]:
    """The runs whose start is as good as any of their rounds: they say nothing about what can be reached."""
    sign = -1.0 if above else 1.0
    values = {run.name: sign * run.history.column(column) for run in runs}
    return [name for name, v in values.items() if not np.any(v[1:] < v[0])]


def race(runs: Sequence[Run], column: str, target: float | None, above: bool) -> tuple[list[dict[str, Any]], float]:
    """What each run needed to reach the target; without one, the best value that all reach which improve at all."""
    require(target is None or is_number(target), "target", "a finite number", target, hint="Leave it out for one.")
    _check_data([(run.name, run.config) for run in runs])
    sign = -1.0 if above else 1.0
    values = [sign * run.history.column(column) for run in runs]
    for run, v in zip(runs, values, strict=True):
        if np.all(np.isnan(v)):
            raise InvalidArgument(
                f"column must be one that was measured, got {column!r}, which is empty in {run.name}. "
                f"Compare by objective, or leave {run.name} out."
            )
    if target is None:
        idle = never_improved(runs, column, above)
        if len(idle) == len(runs):
            raise InvalidArgument(
                f"target must be given where no run improves on its start, got none: {column} of "
                f"{', '.join(idle)} is best at round 0. Change the settings, or give --target."
            )
        target = sign * max(float(np.nanmin(v)) for run, v in zip(runs, values, strict=True) if run.name not in idle)
    rows = []
    for run, v in zip(runs, values, strict=True):
        reached = np.flatnonzero(v <= sign * target + 0.0)
        row: dict[str, Any] = {"run": run.name}
        if len(reached):
            at = int(reached[0])
            cell = {
                name: float(run.history.column(name)[at]) for name in ("bytes_up", "bytes_down", "gradients", "seconds")
            }
            row |= {
                "rounds": int(run.history.column("round")[at]),
                "megabytes": (cell["bytes_up"] + cell["bytes_down"]) / 1e6,
                "gradients": cell["gradients"],
                "seconds": cell["seconds"],
            }
        else:
            row |= {"rounds": f"> {run.history.rounds}", "megabytes": None, "gradients": None, "seconds": None}
        rows.append(row | {"best": sign * float(np.nanmin(v))})
    return rows, target
