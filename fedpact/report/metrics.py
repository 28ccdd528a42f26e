"""Held-out metrics in the report: pooled, client by client (or how they are spread), and calibration."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from fedpact.report.plots import boxes
from fedpact.report.style import HEIGHT, add_legend, line_style, sheet, slot, theme
from fedpact.report.tables import text_table
from fedpact.report.view import RunView, held_out, labels

MOST_CLIENTS = 20  # in a table; above, the spread over the clients is shown instead

_NOT_METRICS = ("name", "rows")
_NAMES = {"auc": "AUC", "name": "client"}


def metric_name(key: str) -> str:
    """What a reader calls a metric."""
    return _NAMES.get(key, key.replace("_", " "))


def metric_headings(rows: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """The headings of a table of metrics, by key."""
    return {key: metric_name(key) for row in rows for key in row}


def _named(runs: Sequence[RunView]) -> list[tuple[str, Mapping[str, Any]]]:
    return [(label, held_out(run)) for label, run in zip(labels(runs), runs, strict=True)]


def pooled_rows(runs: Sequence[RunView]) -> list[dict[str, Any]]:
    """One row per run that has metrics over all held-out rows together."""
    return [{"run": label, **metrics["pooled"]} for label, metrics in _named(runs) if metrics.get("pooled")]


def client_rows(runs: Sequence[RunView]) -> dict[str, list[dict[str, Any]]]:
    """`{run: one row per client}`, for the runs with few enough clients to list."""
    tables = {label: [dict(row) for row in metrics.get("clients") or ()] for label, metrics in _named(runs)}
    return {label: rows for label, rows in tables.items() if 0 < len(rows) <= MOST_CLIENTS}


def spread_rows(runs: Sequence[RunView]) -> list[dict[str, Any]]:
    """For the runs with many clients, one row per run and metric: quantiles over the clients and the two extremes."""
    rows = []
    for label, metric, clients in _many(runs):
        measured = [(float(c[metric]), str(c.get("name", k))) for k, c in enumerate(clients) if _finite(c.get(metric))]
        if not measured:
            continue
        tenth, half, most = np.quantile([value for value, _ in measured], [0.1, 0.5, 0.9])
        (low, lowest), (high, highest) = min(measured), max(measured)
        rows.append(
            {"run": label, "metric": metric_name(metric), "clients": len(measured)}
            | {"lowest": low, "10 %": tenth, "median": half, "90 %": most, "highest": high}
            | {"lowest at": lowest, "highest at": highest}
        )
    return rows


def spread_figures(runs: Sequence[RunView]) -> dict[str, Figure]:
    """`{metric's name: box plot over the clients of every run with many clients}`."""
    groups: dict[str, dict[str, dict[str, list[float]]]] = {}
    for label, metric, clients in _many(runs):
        found = [float(client[metric]) for client in clients if _finite(client.get(metric))]
        if found:
            groups.setdefault(metric_name(metric), {})[label] = {metric_name(metric): found}
    figures = {}
    for name, group in groups.items():
        with theme():
            axes = _axes(runs)
            figures[name] = boxes(group, axes=axes)
            add_legend(figures[name])
    return figures


def _axes(runs: Sequence[RunView], height: float = HEIGHT) -> Axes:
    """Axes in which every run has the colour that it has in the other plots, though not every run is drawn."""
    axes = sheet(height=height).add_subplot()
    for label in labels(runs):
        slot(axes, label)
    return axes


def _many(runs: Sequence[RunView]) -> list[tuple[str, str, Sequence[Mapping[str, Any]]]]:
    """(run, metric, clients) for every metric of every run with more clients than a table holds."""
    found = []
    for label, metrics in _named(runs):
        clients = metrics.get("clients") or ()
        if len(clients) > MOST_CLIENTS:
            names = dict.fromkeys(key for client in clients for key in client if key not in _NOT_METRICS)
            found += [(label, name, clients) for name in names]
    return found


def _finite(value: Any) -> bool:
    return isinstance(value, (int, float, np.number)) and bool(np.isfinite(value))


def summary_table(runs: Sequence[RunView]) -> str:
    """The runs' summaries as text; the accuracy among them is that of the training rows."""
    rows = [{"run": run.name, **run.summary} for run in runs]
    headings = {key: "training accuracy" if key == "accuracy" else key.replace("_", " ") for row in rows for key in row}
    return text_table(rows, headings)


def held_out_text(run: RunView) -> str:
    """The held-out metrics of a run as text: pooled, then client by client, or their spread over many clients."""
    pooled = [{"name": "all together", **held_out(run)["pooled"]}]
    rows = [row for table in client_rows([run]).values() for row in table]
    text = text_table([*pooled, *rows], metric_headings(pooled))
    spread = [{key: value for key, value in row.items() if key != "run"} for row in spread_rows([run])]
    return text + (f"\n\nover the clients\n{text_table(spread)}" if spread else "")


def calibration_figure(runs: Sequence[RunView]) -> Figure | None:
    """Observed frequency against predicted probability, one line per run, with the diagonal that calibration means."""
    found = {label: metrics["calibration_curve"] for label, metrics in _named(runs) if metrics.get("calibration_curve")}
    if not found:
        return None
    with theme():
        axes = _axes(runs, height=4.2)
        axes.plot([0, 1], [0, 1], color="#8a8a8a", linewidth=1, label="perfectly calibrated")
        for label, curve in found.items():
            xs, ys = (np.asarray(curve[key], dtype=np.float64) for key in ("predicted", "observed"))
            finite = np.isfinite(xs) & np.isfinite(ys)
            axes.plot(xs[finite], ys[finite], **line_style(axes, label))
        axes.set(xlim=(-0.04, 1.04), ylim=(-0.04, 1.04), xlabel="predicted probability", ylabel="observed frequency")
        add_legend(axes.figure)  # type: ignore[arg-type]
    return axes.figure  # type: ignore[return-value]
