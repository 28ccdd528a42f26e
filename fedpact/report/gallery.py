"""The sections of the report that hold plots; each plot is also kept as a pair of files."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
from matplotlib.figure import Figure

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

# y, x, whether as the gap to the minimum, heading, detail
_PLOTS = (
    ("objective", "round", False, "Objective against rounds", ""),
    ("gradient", "round", False, "Squared norm of the mean gradient against rounds", "0 at a stationary point."),
    ("objective", "bytes", True, "Gap to the minimum against bytes sent", "Both directions."),
    ("objective", "gradients", True, "Gap to the minimum against gradient evaluations", "All clients together."),
    ("accuracy", "round", False, "Training accuracy against rounds", "Held-out scores, if any, are below."),
    ("test_accuracy", "round", False, "Test accuracy against rounds", "On the dataset's own test set."),
    ("test_accuracy", "bytes", False, "Test accuracy against bytes sent", "Both directions."),
    ("test_loss", "round", False, "Test loss against rounds", "On the dataset's own test set."),
    ("train_loss", "round", False, "Training loss of the round's clients", "Mean over the batches of the last epoch."),
    ("snr", "round", False, "Signal-to-noise ratio of the uploads against rounds", ""),
    (
        "penalty",
        "round",
        False,
        "Penalised objective against rounds",
        "At the clients' own models; noise and distance from w count.",
    ),
    (
        "lagrangian",
        "round",
        False,
        "Augmented Lagrangian against rounds",
        "At the clients' own models; ADMM lowers it.",
    ),
    ("lyapunov", "round", False, "Lyapunov value against rounds", "Falls in every round where the theorems apply."),
    ("primal_residual", "round", False, "Primal residual against rounds", "Distance of the clients' models from w."),
    ("dual_residual", "round", False, "Dual residual against rounds", "How far w moved, in units of the multipliers."),
    ("dual_sum", "round", False, "Norm of the sum of the multipliers against rounds", "0 at a solution."),
    ("stationarity", "round", False, "Residual of the clients' subproblems against rounds", "0 where all are solved."),
    ("violations", "round", False, "Local steps solved too coarsely", "Share that misses (3.5); the theorems need 0."),
)
# Columns that few readers look for: heading, detail
_OTHERS = {
    "descent": ("Descent function of FedEPM against rounds", "Without noise it falls from round to round."),
    "epsilon": ("Accuracy asked of the clients' solves", "The largest ε_i; it shrinks. It is no privacy budget."),
    "noise_scale": ("Scale of the noise on the uploads", "The largest of all clients' last uploads."),
    "v": ("Optimality gap V of FedADMM against rounds", "(7) of the paper; 0 at a stationary point."),
    "epochs": ("Epochs of the round's clients", "Mean; drawn from 1..E where the work varies."),
    "eta": ("Server's step η", ""),
    "rho": ("Penalty ρ", ""),
    "control": ("Norm of the server's control variate", ""),
    "accuracy_met": ("Residual of the clients' subproblems", "The largest ‖∇L_i‖², of (6)."),
    "spread": ("Distance of the uploads from the model", "Mean of the squares; 0 where all clients agree."),
}
_BOOKKEEPING = ("round", "participants", "bytes", "bytes_up", "bytes_down", "gradients", "local_seconds", "seconds")


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

    def plot(y: str, x: str, gap: bool, heading: str, detail: str) -> str:
        if not any(measured(run, x, y) for run in runs) or (gap and reference is None):
            return ""
        if y == "noise_scale" and not any(np.any(points(run, x, y)[1]) for run in runs):
            return ""  # there was no noise
        if gap:
            detail += f" The minimum is {whose}, {reference:.10g}; a run that reaches it leaves the logarithmic scale."
        detail += _not_measured(runs, x, y)
        drawn = curves(runs, y, x, minimum=reference if gap else None)
        return gallery.add(drawn, f"{y} {'gap ' if gap else ''}by {x}", heading, detail.strip())

    text = _grid(plot(*one) for one in _PLOTS)
    text = f'<p class="note">Also in plots/ as SVG and PNG.</p>\n{text}' if text else ""
    text += "\n".join(gallery.add(figure, caption, caption, wide=True) for caption, figure in figures.items())
    shown = {one[0] for one in _PLOTS} | set(_BOOKKEEPING)
    others = [name for name in dict.fromkeys(c for run in runs for c in columns(run)) if name not in shown]
    words = {name: _OTHERS.get(name, (f"{_capital(name)} against rounds", "")) for name in others}
    rest = _grid(plot(name, "round", False, *text) for name, text in words.items())
    return text + (f"\n<details><summary>Other measured quantities</summary>\n{rest}</details>" if rest else "")


def _capital(name: str) -> str:
    return name[:1].upper() + name[1:].replace("_", " ")


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
        gallery.add(figure, f"clients {metric}", f"{_capital(metric)} over the clients, by run")
        for metric, figure in spread_figures(runs).items()
    ]
    calibration = calibration_figure(runs)
    if calibration is not None:
        drawn.append(gallery.add(calibration, "calibration", "How often the predicted probabilities came true"))
    return text + _grid(drawn)
