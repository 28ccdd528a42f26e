"""How every plot looks: lines told apart without colour vision, text readable at full size, the same bytes every time.

A label keeps its colour, dash and marker within a figure whichever panels it is drawn in: `slot` numbers the labels
of a figure in the order they first appear. Seven colours, four dashes and nine markers give 252 different lines.
"""

from __future__ import annotations

import io
import math
import os
import re
import textwrap
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogFormatterSciNotation

from fedpact.core.files import write_files

# Okabe and Ito's palette without its yellow, which is unreadable on white.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#000000", "#E69F00", "#56B4E9")
DASHES: tuple[Any, ...] = ("-", (0, (6, 1.8)), (0, (6, 1.8, 1.5, 1.8)), (0, (1.6, 1.4)))
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", "*")

WIDTH, HEIGHT = 5.2, 3.4  # inches; narrow, so that ten-point text is still ten pixels on a telephone

_RC: Any = {
    "axes.axisbelow": True,
    "axes.edgecolor": "#555555",
    "axes.formatter.limits": (-4, 6),
    "axes.formatter.useoffset": False,
    "axes.grid": True,
    "axes.labelsize": 11,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlelocation": "left",
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "figure.autolayout": False,
    "figure.constrained_layout.use": False,  # `sheet` asks for it
    "figure.facecolor": "white",
    "font.family": "sans-serif",
    "font.sans-serif": [
        "DejaVu Sans",
        "Verdana",
        "Arial",
        "Helvetica",
        "Noto Sans CJK SC",
        "PingFang SC",
        "sans-serif",
    ],
    "font.size": 10,
    "grid.color": "#e2e2e2",
    "grid.linewidth": 0.7,
    "legend.fontsize": 10,
    "legend.frameon": False,
    "savefig.dpi": 150,
    "svg.fonttype": "none",  # text stays text: searchable, selectable, small
    "svg.hashsalt": "fedpact",
    "text.usetex": False,
    "xtick.labelsize": 10,
    "ytick.labelsize": 10,
}

_slots: WeakKeyDictionary[Any, dict[str, int]] = WeakKeyDictionary()


def theme() -> AbstractContextManager[None]:
    """The settings to draw and to save under; whatever the caller's matplotlib settings are comes back afterwards."""
    return matplotlib.rc_context(_RC)


def sheet(width: float = WIDTH, height: float = HEIGHT) -> Figure:
    """An empty figure that lays itself out; it belongs to no window and to no global state."""
    figure = Figure(figsize=(width, height), layout="constrained")
    figure.get_layout_engine().set(w_pad=0.07, h_pad=0.07)  # type: ignore[union-attr,call-arg]
    return figure


def plain(text: Any) -> str:
    """A name as matplotlib must see it to show it as it is: no mathematics, no control characters, never hidden."""
    shown = "".join(c if c.isprintable() else " " for c in str(text)).replace("$", r"\$")
    return f" {shown}" if shown.startswith("_") else shown


def slot(axes: Axes, label: str) -> int:
    """The number of a label within its figure, the same in all panels."""
    order = _slots.setdefault(axes.figure, {})
    return order.setdefault(label, len(order))


def colour(axes: Axes, label: str) -> str:
    """The colour of a label within its figure."""
    return COLOURS[slot(axes, label) % len(COLOURS)]


def line_style(axes: Axes, label: str, xs: np.ndarray | None = None) -> dict[str, Any]:
    """Colour, dash and marker of a label.

    With the x positions of a long line, it gets seven markers, where those of the other lines are not; a line of a
    single point gets a larger one on top.
    """
    number = slot(axes, label)
    every = None
    if xs is not None and len(xs) > 12:
        stops = xs[0] + (xs[-1] - xs[0]) * (np.arange(7) + (0.1 + 0.31 * number) % 1) / 7
        every = np.unique(np.abs(xs[:, None] - stops).argmin(axis=0)).tolist()
    single = xs is not None and len(xs) == 1
    return {
        "color": COLOURS[number % len(COLOURS)],
        "label": plain(label),
        "linestyle": DASHES[number % len(DASHES)],
        "linewidth": 1.7,
        "marker": MARKERS[number % len(MARKERS)],
        "markeredgecolor": "white",
        "markeredgewidth": 0.6,
        "markersize": 9 if single else 6.5,
        "markevery": every,
        "zorder": 3 if single else 2,
    }


class _PowerLabels(LogFormatterSciNotation):
    """10⁻³ in characters instead of mathematics, so that it stays text in SVG."""

    _RAISED = str.maketrans("-−0123456789", "⁻⁻⁰¹²³⁴⁵⁶⁷⁸⁹")

    def __call__(self, x: float, pos: int | None = None) -> str:
        if not math.isfinite(x):  # a tick beyond the largest double
            return ""
        text = re.sub(r"^\$\\mathdefault\{(.*)\}\$$", r"\1", super().__call__(x, pos)).replace(r"\times", "×")
        return re.sub(r"\^\{([^}]*)\}", lambda power: power[1].translate(self._RAISED), text)


def use_log(axes: Axes, which: str) -> None:
    """Make the axis 'x' or 'y' logarithmic; a range within one decade still gets numbers on its minor ticks."""
    axis = axes.xaxis if which == "x" else axes.yaxis
    (axes.set_xscale if which == "x" else axes.set_yscale)("log")
    axis.set_major_formatter(_PowerLabels())
    axis.set_minor_formatter(_PowerLabels(minor_thresholds=(1, 0.4)))


def around(axes: Axes, level: float, ys: np.ndarray) -> None:
    """A line at `level`; where most values are far nearer to it than the farthest, both sides are logarithmic."""
    axes.axhline(level, color="#8a8a8a", linewidth=1, zorder=1, label="limit")
    far, near = np.max(np.abs(ys - level)), np.median(np.abs(ys - level))
    if level == 0 and near > 0 and far > 20 * near:
        axes.set_yscale("symlog", linthresh=10 ** math.floor(math.log10(near)))
        axes.yaxis.set_major_formatter(_PowerLabels())


def add_legend(figure: Figure) -> None:
    """One legend below all axes, every label once, and the figure made taller by the room that it takes."""
    entries: dict[str, Any] = {}
    for axes in figure.axes:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            entries.setdefault(str(label), handle)
    if not entries:
        return
    width, height = figure.get_size_inches()
    wrapped = ["\n".join(textwrap.wrap(label, int((width - 0.9) / 0.091)) or [label]) for label in entries]
    longest = max(len(line) for label in wrapped for line in label.splitlines())
    ncols = min(len(wrapped), max(1, int(width / (0.6 + 0.091 * longest))))
    lines = sum(sorted((label.count("\n") + 1 for label in wrapped), reverse=True)[: math.ceil(len(wrapped) / ncols)])
    figure.set_size_inches(width, height + 0.1 + 0.21 * lines)
    figure.legend(list(entries.values()), wrapped, loc="outside lower center", ncols=ncols, handlelength=3.2)


def render(figure: Figure) -> dict[str, bytes]:
    """The figure as `{"svg": bytes, "png": bytes}`, the same bytes for the same figure whenever it is drawn.

    It is laid out once for both: each `savefig` would do it anew, which takes about as long as drawing, and ends
    elsewhere.
    """
    result = {}
    with theme(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph")  # a character our font lacks: the browser has another font
        with _laid_out(figure):
            for kind, metadata in (("svg", {"Date": None, "Creator": None}), ("png", {"Software": None})):
                buffer = io.BytesIO()
                figure.savefig(buffer, format=kind, metadata=metadata)
                result[kind] = buffer.getvalue()
    return result


@contextmanager
def _laid_out(figure: Figure) -> Iterator[None]:
    """Everything of the figure has its place, and stays there."""
    engine = figure.get_layout_engine()
    if engine is not None:
        engine.execute(figure)
    figure.set_layout_engine(None)
    try:
        yield
    finally:
        figure.set_layout_engine(engine)


def save(figure: Figure, path: str | os.PathLike[str] | None) -> Figure:
    """Write `path`.svg and `path`.png (nothing when `path` is None) and return the figure."""
    if path is not None:
        text = os.fspath(path)
        stem = Path(text[:-4] if text.endswith((".svg", ".png")) else text)
        write_files(stem.parent, {f"{stem.name}.{kind}": content for kind, content in render(figure).items()})
    return figure
