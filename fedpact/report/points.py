"""From the columns of a history to the points of a line: what was measured, in units people read, and not too many."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fedpact.report.view import RunView, measured, values

# What a reader calls a column; any other is shown by its own name.
AXIS_LABELS = {
    "accuracy": "training accuracy",
    "bytes": "sent up and down",
    "bytes_down": "sent down",
    "bytes_up": "sent up",
    "epsilon": "accuracy asked for, largest ε_i",
    "gradient": "squared gradient norm ‖∇f‖²",
    "gradients": "gradient evaluations",
    "kkt": "KKT residual",
    "local_seconds": "seconds of client work",
    "privacy": "ε spent, worst client",
    "snr": "signal-to-noise ratio",
    "violations": "share of local steps",
    "worst_client": "largest loss − limit",
}
SHARES = ("accuracy", "test_accuracy", "violations")  # of 1: shown on a linear axis

MOST_POINTS = 1200  # of one line: more cannot be seen, and a report of long runs must stay small

_UNITS = ((1e9, "GB", "billions"), (1e6, "MB", "millions"), (1e3, "kB", "thousands"))


def points(run: RunView, x: str, y: str, minimum: float | None = None) -> tuple[np.ndarray, np.ndarray]:
    """The rounds in which both columns were measured, `y` less `minimum`; empty where the run lacks a column."""
    if not measured(run, x, y):
        return np.empty(0), np.empty(0)
    xs, ys = values(run, x), values(run, y) - (minimum or 0.0)
    both = np.isfinite(xs) & np.isfinite(ys)
    return xs[both], ys[both]


def loggable(ys: np.ndarray) -> np.ndarray:
    """Which points of a line a logarithmic axis shows: those above 0, without a start that is 0 but for rounding."""
    shown = ys > 0
    if len(ys) > 1 and shown[1:].any():
        shown[0] &= ys[0] > 1e-6 * ys[1:][shown[1:]].min()
    return shown


def spans(numbers: np.ndarray, factor: float) -> bool:
    """Whether the numbers are positive and the largest is at least `factor` times the smallest."""
    return bool(len(numbers) and numbers.min() > 0 and numbers.max() >= factor * numbers.min())


def unit(column: str, numbers: np.ndarray) -> tuple[float, str]:
    """What to divide a column by, and its axis label with the unit: 3e6 bytes are shown as 3 MB."""
    stems = {"constraint_": "value − limit", "multiplier_": "multiplier ν"}
    usual = next((text for stem, text in stems.items() if column.startswith(stem)), column.replace("_", " "))
    label = AXIS_LABELS.get(column, usual).replace("$", r"\$")
    largest = numbers.max(initial=0.0)
    if column.startswith("bytes"):
        return next(((size, f"{unit} {label}") for size, unit, _ in _UNITS if largest >= size), (1.0, f"bytes {label}"))
    if column == "gradients" and largest >= 1e5:
        return next((size, f"{label} ({word})") for size, _, word in _UNITS if largest >= size)
    return 1.0, label


def thin(xs: np.ndarray, ys: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """At most about `MOST_POINTS` points of a long line: both ends, and the lowest and highest of each stretch."""
    if len(xs) <= MOST_POINTS:
        return xs, ys
    stretches = np.array_split(np.arange(len(xs)), MOST_POINTS // 2)
    extremes = [part[k] for part in stretches for k in (ys[part].argmin(), ys[part].argmax())]
    keep = np.unique([0, *extremes, len(xs) - 1])
    return xs[keep], ys[keep]


def lowest(runs: Sequence[RunView], column: str = "objective") -> float | None:
    """The lowest value of a column over all runs and rounds, None when it was never measured."""
    columns = [values(run, column) for run in runs if measured(run, column)]
    return min((float(found[np.isfinite(found)].min()) for found in columns), default=None)
