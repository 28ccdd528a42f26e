"""The sections of the report that hold plots; each plot is also kept as a pair of files."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from fedpact.report.captions import Plot, capital, first_plots, other_plots
from fedpact.report.metrics import (
    calibration_figure,
    client_rows,
    metric_headings,
    pooled_rows,
    spread_figures,
    spread_rows,
)
from fedpact.report.page import escape, inline_svg
from fedpact.report.plots import curves
from fedpact.report.points import lowest, points
from fedpact.report.style import render
from fedpact.report.tables import html_table
from fedpact.report.view import RunView, columns, labels, measured


class Gallery:
    """The plots of one report: `files` holds plots/*.svg and plots/*.png, ready to be written."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self._names: list[str] = []

    def add(self, figure: Figure, name: str, heading: str, detail: str = "", wide: bool = False) -> str:
        """The `<figure>` element of a plot, which is kept as plots/`name`.svg and .png."""
        stem = re.sub(r"[^a-z0-9]+", "_", name.lower())[:60].strip("_") or "figure"
        stem = stem if stem not in self._names else f"{stem}_{len(self._names) + 1}"
        self._names.append(stem)
        drawn = render(figure)
        self.files |= {f"plots/{stem}.{kind}": content for kind, content in drawn.items()}
        svg = inline_svg(drawn["svg"], f"plot{len(self._names)}", heading)
        kind = ' class="wide"' if wide else ""
        caption = f"<strong>{escape(heading)}</strong>{escape(detail)}"
        return f"<figure{kind}>\n<figcaption>{caption}</figcaption>\n{svg}\n</figure>"


def _grid(figures: Iterable[str]) -> str:
    text = "\n".join(filter(None, figures))
    return f'<div class="plots">\n{text}\n</div>\n' if text else ""


def plots_section(
    gallery: Gallery, runs: Sequence[RunView], figures: Mapping[str, Figure], minimum: float | None = None
) -> str:
    """Every plot that these runs can fill, then the caller's `figures`, then the columns that only algorithms know."""
    several = len(runs) > 1  # one run's own best says nothing about the minimum
    reference = (lowest(runs) if several else None) if minimum is None else minimum
    whose = "the lowest objective of these runs" if minimum is None else "the least objective"

    def plot(one: Plot) -> str:
        mine = [run if _means(run, one) else _without(run, one.y) for run in runs]
        if not any(measured(run, one.x, one.y) for run in mine) or (one.gap and reference is None):
            return ""
        if one.y in ("noise_scale", "refused") and not any(np.any(points(run, one.x, one.y)[1]) for run in mine):
            return ""  # there was none
        detail = one.detail
        if one.gap:
            detail += f" The minimum is {whose}, {reference:.10g}; a run that reaches it leaves the logarithmic scale."
        detail += _not_measured(mine, one.x, one.y)
        drawn = curves(mine, one.y, one.x, minimum=reference if one.gap else None, level=one.level)
        return gallery.add(drawn, f"{one.y} {'gap ' if one.gap else ''}by {one.x}", one.heading, detail.strip())

    text = _grid(map(plot, first_plots(runs)))
    text = f'<p class="note">Also in plots/ as SVG and PNG.</p>\n{text}' if text else ""
    text += "\n".join(gallery.add(figure, caption, caption, wide=True) for caption, figure in figures.items())
    rest = _grid(map(plot, other_plots(runs)))
    return text + (f"\n<details><summary>Other measured quantities</summary>\n{rest}</details>" if rest else "")


def _means(run: RunView, one: Plot) -> bool:
    """Whether a run means by the column what the plot does."""
    there = columns(run)
    return (not one.beside or one.beside in there) and one.without not in there


def _without(run: RunView, column: str) -> Any:
    """The run as if it did not have a column; it keeps its place among the others."""
    kept = [name for name in run.history.columns if name != column]
    history = SimpleNamespace(columns=kept, rounds=run.history.rounds, column=run.history.column)
    return SimpleNamespace(name=run.name, history=history)


def _not_measured(runs: Sequence[RunView], x: str, y: str) -> str:
    without = [label for label, run in zip(labels(runs), runs, strict=True) if not measured(run, x, y)]
    if not without:
        return ""
    if len(without) <= len(runs) / 2:
        return f" Not measured: {', '.join(without)}."
    return f" Not measured in the other {len(without)} run{'s' if len(without) > 1 else ''}."


def metrics_section(gallery: Gallery, runs: Sequence[RunView]) -> str:
    """Held-out metrics: pooled, client by client or their spread over many clients, and calibration."""
    pooled, clients, spread = pooled_rows(runs), client_rows(runs), spread_rows(runs)
    text = ""
    if pooled:
        text += f"<h3>All clients together</h3>\n{html_table(pooled, metric_headings(pooled), 'Pooled metrics')}\n"
    if clients:
        text += "<h3>Client by client</h3>\n"
    for number, (label, rows) in enumerate(clients.items()):
        table = html_table(rows, metric_headings(rows), f"Clients of {label}")
        text += f"<details{'' if number else ' open'}><summary>{escape(label)}</summary>\n{table}</details>\n"
    if spread:
        text += f"<h3>Spread over clients</h3>\n{html_table(spread, label='Spread over clients')}\n"
    drawn = [
        gallery.add(figure, f"clients {metric}", f"{capital(metric)} over the clients, by run")
        for metric, figure in spread_figures(runs).items()
    ]
    calibration = calibration_figure(runs)
    if calibration is not None:
        drawn.append(gallery.add(calibration, "calibration", "How often the predicted probabilities came true"))
    return text + _grid(drawn)
