"""A finished run as the report sees it: any object with these attributes, whatever algorithm or engine made it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from fedpact.core.errors import unknown


class HistoryView(Protocol):
    """What was measured, round by round."""

    @property
    def columns(self) -> Sequence[str]:
        """Names of the measured quantities; `round` is one of them."""

    @property
    def rounds(self) -> int:
        """The last round."""

    def column(self, name: str) -> np.ndarray:
        """One quantity as float64, NaN where it was not measured."""


class RunView(Protocol):
    """A finished run.

    It may also have `metrics`, a dict of held-out metrics or None (see `held_out`), and `coefficients`, rows of
    `feature`, `coefficient` and `per_unit`; and `tables`, rows by heading.
    """

    @property
    def name(self) -> str:
        """The label people read, for example 'FedEPM (paper)'."""

    @property
    def history(self) -> HistoryView:
        """What was measured, round by round."""

    @property
    def summary(self) -> Mapping[str, Any]:
        """The last values and the totals, in the order to show them."""

    @property
    def outcome(self) -> str:
        """A sentence saying why the run stopped."""

    @property
    def config(self) -> Mapping[str, Any]:
        """Every setting, as a nested plain dict."""

    @property
    def notices(self) -> Sequence[str]:
        """Sentences the reader must see, for example that the noise carries no guarantee."""


def held_out(run: RunView) -> Mapping[str, Any]:
    """The run's held-out metrics: any of `pooled`, `clients` and `calibration_curve`; empty when there are none."""
    return getattr(run, "metrics", None) or {}


def labels(runs: Sequence[RunView]) -> list[str]:
    """One label per run, all different: a name that comes again gets a number, a nameless run is '(unnamed)'."""
    result: list[str] = []
    for run in runs:
        name = str(run.name).strip() or "(unnamed)"
        label, count = name, 1
        while label in result:
            count += 1
            label = f"{name} ({count})"
        result.append(label)
    return result


def columns(run: RunView) -> list[str]:
    """The run's columns, with `bytes` = bytes_up + bytes_down added where both exist."""
    names = list(run.history.columns)
    return [*names, "bytes"] if {"bytes_up", "bytes_down"} <= set(names) and "bytes" not in names else names


def values(run: RunView, name: str) -> np.ndarray:
    """One column of a run as float64, NaN where it was not measured; `bytes` counts both directions."""
    if name not in columns(run):
        raise unknown("column", name, columns(run))
    if name == "bytes" and name not in run.history.columns:
        return values(run, "bytes_up") + values(run, "bytes_down")
    return np.asarray(run.history.column(name), dtype=np.float64)


def measured(run: RunView, *names: str) -> bool:
    """Whether the run has at least one round in which all of these columns were measured."""
    if not set(names) <= set(columns(run)):
        return False
    return bool(np.logical_and.reduce([np.isfinite(values(run, name)) for name in names]).any())


def require_column(name: str, runs: Sequence[RunView]) -> None:
    """Raise `UnknownName` when none of these runs has the column."""
    known = {column for run in runs for column in columns(run)}
    if name not in known:
        raise unknown("column", name, known)
