"""The plots: curves of runs, box plots and lines over a parameter, and grids of them for a paper's figure.

Each function draws a figure of its own, or into the `axes` it is given. A grid is therefore a list of the same calls
that still lack their axes:

    panels([partial(curves, runs[k0], "objective", title=f"k0 = {k0}") for k0 in (4, 8, 12)], "figures/fig3", columns=3)

Names of runs and series are shown as they are; titles and axis labels may hold matplotlib's mathematics ($k_0$).
"""

from __future__ import annotations

import os
import textwrap
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from fedpact.core.errors import require, require_positive_int
from fedpact.report.points import SHARES, loggable, points, spans, thin, unit
from fedpact.report.style import add_legend, around, colour, line_style, plain, save, sheet, slot, theme, use_log
from fedpact.report.tables import format_value
from fedpact.report.view import RunView, labels, require_column

PathLike = str | os.PathLike[str] | None
Series = Mapping[str, tuple[Sequence[Any], Sequence[float], Sequence[float] | None]]


def curves(
    runs: Sequence[RunView],
    y: str,
    x: str = "round",
    path: PathLike = None,
    logy: bool | Literal["auto"] = "auto",
    title: str | None = None,
    minimum: float | None = None,
    *,
    level: float | None = None,
    logx: bool | Literal["auto"] = "auto",
    axes: Axes | None = None,
) -> Figure:
    """Column `y` against column `x`, one line per run; with `minimum`, the gap y − minimum.

    With `level`, values are shown around a line there, on an axis that is logarithmic on both sides of it where most of
    them are near it.
    `x="bytes"` counts both directions. 'auto' takes a logarithmic y for a gap or for values that span a factor of 50
    (zeros apart), and a logarithmic x when the runs end a factor of 30 apart. A run without these columns has no line;
    that no run has one is an `UnknownName`. Rounds that were not measured are skipped; so are values that a logarithm
    cannot show, and a start that is 0 but for rounding.
    """
    require(len(runs) > 0, "runs", "at least one finished run", list(runs))
    for name in (x, y):
        require_column(name, runs)
    with theme():
        axes, alone = _axes(axes)
        lines = {label: points(run, x, y, minimum) for label, run in zip(labels(runs), runs, strict=True)}
        every_x, every_y = (np.concatenate([line[k] for line in lines.values()]) for k in (0, 1))
        ends = np.array([line[0][-1] for line in lines.values() if len(line[0])])
        wide = (
            y not in SHARES
            and every_y.min(initial=0) >= 0
            and spans(np.concatenate([ys[loggable(ys)] for _, ys in lines.values()]), 50)
        )
        log_y = (minimum is not None or (wide and level is None)) if logy == "auto" else logy
        log_x = (x != "round" and spans(ends, 30)) if logx == "auto" else logx
        x_factor, x_label = unit(x, every_x)
        y_factor, y_label = unit(y, every_y)
        drawn = 0
        for label, (xs, ys) in lines.items():
            slot(axes, label)  # a run without a line keeps its place, so that colours agree between plots
            shown = ((xs > 0) if log_x else True) & (loggable(ys) if log_y else np.full(len(ys), True))
            xs, ys = thin(xs[shown] / x_factor, ys[shown] / y_factor)
            if len(xs):
                axes.plot(xs, ys, **line_style(axes, label, np.log(xs) if log_x else xs))
                drawn += len(xs)
        if minimum is not None:
            y_label += " − minimum"
        _dress(axes, x_label, y_label, title, log_x and drawn > 0, log_y and drawn > 0)
        if level is not None and drawn:
            around(axes, level, every_y)
        if x == "round":
            axes.xaxis.set_major_locator(MaxNLocator(nbins=7, integer=True, min_n_ticks=1))
        if not drawn:
            axes.text(0.5, 0.5, "nothing measured", transform=axes.transAxes, ha="center", color="#555555")
        return _finish(axes, path, alone)


def boxes(
    groups: Mapping[str, Mapping[Any, Any]],
    path: PathLike = None,
    ylabel: str = "",
    xlabel: str = "",
    title: str | None = None,
    *,
    logy: bool = False,
    axes: Axes | None = None,
) -> Figure:
    """Box plots of `{series: {x value: samples}}`: median line, box from 25 to 75 %, outliers 'x'; NaN left out."""
    require(len(groups) > 0, "groups", "at least one series", groups)
    with theme():
        axes, alone = _axes(axes)
        ticks = list(dict.fromkeys(value for group in groups.values() for value in group))
        width = 0.8 / len(groups)
        for number, (label, group) in enumerate(groups.items()):
            samples = {v: np.asarray(s, dtype=np.float64).ravel() for v, s in group.items()}
            finite = {v: s[np.isfinite(s)] for v, s in samples.items() if np.isfinite(s).any()}
            shade = colour(axes, label)
            drawn = axes.boxplot(
                list(finite.values()),
                positions=[ticks.index(v) - 0.4 + (number + 0.5) * width for v in finite],
                widths=0.8 * width,
                patch_artist=True,
                manage_ticks=False,
                boxprops={"facecolor": shade + "40", "edgecolor": shade, "linewidth": 1.3},
                medianprops={"color": shade, "linewidth": 2.2},
                whiskerprops={"color": shade},
                capprops={"color": shade},
                flierprops={"marker": "x", "markeredgecolor": shade, "markersize": 5},
            )
            for box in drawn["boxes"][:1]:
                box.set_label(plain(label))
        _categories(axes, ticks)
        _dress(axes, xlabel, ylabel, title, False, logy)
        return _finish(axes, path, alone)


def lines_over(
    series: Series,
    path: PathLike = None,
    xlabel: str = "",
    ylabel: str = "",
    title: str | None = None,
    *,
    logx: bool = False,
    logy: bool = False,
    axes: Axes | None = None,
) -> Figure:
    """Means against a parameter, `{label: (x values, means, standard deviations or None)}`, with error bars."""
    require(len(series) > 0, "series", "at least one series", series)
    with theme():
        axes, alone = _axes(axes)
        for label, (xs, means, deviations) in series.items():
            mean = np.asarray(means, dtype=np.float64)
            spread = None if deviations is None else np.asarray(deviations, dtype=np.float64)
            axes.errorbar(list(xs), mean, yerr=spread, capsize=3, elinewidth=1, **line_style(axes, label))
        _dress(axes, xlabel, ylabel, title, logx, logy)
        return _finish(axes, path, alone)


def panels(
    draws: Sequence[Callable[..., Any]],
    path: PathLike = None,
    columns: int = 3,
    title: str | None = None,
    *,
    size: tuple[float, float] = (3.5, 2.8),
) -> Figure:
    """A grid filled row by row: each of `draws` is called as `draw(axes=…)`; one legend below serves all panels.

    `size` is one panel's width and height in inches. A label has the same colour, dash and marker in every panel.
    """
    require(len(draws) > 0, "draws", "at least one panel", list(draws))
    require_positive_int("columns", columns)
    columns = min(columns, len(draws))
    rows = -(-len(draws) // columns)
    with theme():
        figure = sheet(size[0] * columns, size[1] * rows)
        for number, draw in enumerate(draws):
            draw(axes=figure.add_subplot(rows, columns, number + 1))
        if title:
            figure.suptitle(title, fontsize=12, fontweight="bold")
        add_legend(figure)
    return save(figure, path)


def _axes(axes: Axes | None) -> tuple[Axes, bool]:
    return (sheet().add_subplot(), True) if axes is None else (axes, False)


def _categories(axes: Axes, ticks: Sequence[Any]) -> None:
    names = ["\n".join(textwrap.wrap(plain(format_value(tick)), 16)) for tick in ticks]
    spec = axes.get_subplotspec()
    room = axes.figure.get_figwidth() / (spec.get_gridspec().ncols if spec else 1) - 0.9  # type: ignore[union-attr]
    longest = max((len(line) for name in names for line in name.splitlines()), default=0)
    crowded = 0.085 * (longest + 1) * len(names) > room
    axes.set_xticks(range(len(ticks)), names, rotation=30 if crowded else 0, ha="right" if crowded else "center")
    axes.set_xlim(-0.6, len(ticks) - 0.4)
    axes.grid(False, axis="x")


def _dress(axes: Axes, xlabel: str, ylabel: str, title: str | None, logx: bool, logy: bool) -> None:
    for which, on in (("x", logx), ("y", logy)):
        if on:
            use_log(axes, which)
    axes.set_xlabel(xlabel)
    axes.set_ylabel(ylabel)
    if title:
        axes.set_title(title)


def _finish(axes: Axes, path: PathLike, alone: bool) -> Figure:
    figure = axes.figure
    if alone:
        add_legend(figure)  # type: ignore[arg-type]
        save(figure, path)  # type: ignore[arg-type]
    return figure  # type: ignore[return-value]
