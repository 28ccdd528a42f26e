"""Comparing runs: what each needed to reach the same target."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fedpact.core.errors import DataError, InvalidArgument
from fedpact.core.history import History
from fedpact.core.stop import Outcome
from fedpact.experiment import build, read
from fedpact.model import Model
from fedpact.run import Run, Runs, execute


def gather(items: Iterable[str], changes: Iterable[str] = ()) -> Runs:
    """Runs from experiment files (run now) and from folders of finished runs (read)."""
    runs = Runs()
    for item in items:
        if Path(item).is_dir():
            runs.append(load(Path(item)))
        else:
            experiment, name = build(read(item, changes))
            runs.append(execute(experiment, name=name or experiment.algorithm.label, progress=None))
    seen: dict[str, int] = {}
    for i, one in enumerate(runs):
        seen[one.name] = seen.get(one.name, 0) + 1
        if seen[one.name] > 1:
            runs[i] = Run(**{**vars(one), "name": f"{one.name} #{seen[one.name]}"})
    return runs


def load(folder: Path) -> Run:
    """A finished run from its folder."""
    needed = [folder / name for name in ("result.json", "config.json", "history.csv", "model.bin")]
    missing = [path.name for path in needed if not path.is_file()]
    if missing:
        raise DataError(
            f"folder must be of a finished run, got {str(folder)!r} without {', '.join(missing)}. "
            f"An unfinished one continues with: fedpact resume {folder}"
        )
    result, config = _json(needed[0]), _json(needed[1])
    kind, _, where = result["outcome"].partition(": ")
    return Run(
        name=result["name"],
        history=History.read(needed[2]),
        model=Model.load(needed[3]),
        outcome_kind=Outcome(kind),
        where=where,
        config=config,
        metrics=result["metrics"],
        notices=result["notices"],
        folder=folder,
    )


def _json(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        values = None
    if not isinstance(values, dict):
        raise DataError(f"{path.name} must be whole, got a damaged file {path}.")
    return values


def race(runs: Sequence[Run], column: str, target: float | None, above: bool) -> tuple[list[dict[str, Any]], float]:
    """What each run needed to reach the target; without one, the best value that all of them reach."""
    digests = {run.config["data"]["digest"] for run in runs}
    if len(digests) > 1:
        raise InvalidArgument(
            f"runs must be of the same data and split to be compared, got {len(digests)} different ones: "
            + "; ".join(f"{run.name}: {run.config['data']['dataset']}, {run.config['data']['split']}" for run in runs)
            + "."
        )
    sign = -1.0 if above else 1.0
    values = [sign * run.history.column(column) for run in runs]
    for run, v in zip(runs, values, strict=True):
        if np.all(np.isnan(v)):
            raise InvalidArgument(
                f"column must be one that was measured, got {column!r}, which is empty in {run.name}."
            )
    if target is None:
        target = sign * max(float(np.nanmin(v)) for v in values)
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
