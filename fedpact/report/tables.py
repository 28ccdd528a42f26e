"""Rows of values as tables: plain text for a terminal, HTML for the report."""

from __future__ import annotations

import html
import math
import numbers
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from fedpact.core.errors import unknown

Rows = Sequence[Mapping[str, Any]]
Columns = Sequence[str] | Mapping[str, str] | None  # which keys in which order, or {key: heading}

MISSING = "–"


def format_value(value: Any) -> str:
    """One value as people read it.

    Integers get thousands separators, floats five significant digits (six where they would lose the units), powers of
    ten outside 1e-4 … 1e6; None and NaN are '–', booleans yes and no, sequences their items with commas.
    """
    if hasattr(value, "item") and getattr(value, "ndim", None) == 0:  # a NumPy or JAX scalar
        value = value.item()
    if value is None:
        return MISSING
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, numbers.Integral):
        return f"{int(value):,}"
    if isinstance(value, numbers.Real):
        return _format_float(float(value))
    if isinstance(value, Mapping):
        return ", ".join(f"{key} = {format_value(item)}" for key, item in value.items())
    if isinstance(value, Iterable) and not isinstance(value, (str, bytes)):
        return ", ".join(map(format_value, value))
    return str(value)


def _format_float(value: float) -> str:
    if math.isnan(value):
        return MISSING
    if math.isinf(value):
        return "∞" if value > 0 else "-∞"
    size = abs(value)
    if value.is_integer() and size < 1e12:  # a count kept as a float
        return f"{int(value):,}"
    if size < 1e-4 or size >= 999_999.5:
        mantissa, power = f"{value:.4e}".split("e")
        return f"{mantissa.rstrip('0').rstrip('.')}e{int(power)}"
    if size >= 10_000:
        return f"{value:,.0f}"
    text = f"{value:,.{max(0, 4 - math.floor(math.log10(size)))}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def _is_number(value: Any) -> bool:
    if hasattr(value, "item") and getattr(value, "ndim", None) == 0:
        value = value.item()
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def _is_missing(value: Any) -> bool:
    return value is None or (_is_number(value) and math.isnan(value))


class _Grid:
    """Headings, formatted cells, and which columns hold only numbers."""

    def __init__(self, rows: Rows, columns: Columns) -> None:
        known = list(dict.fromkeys(key for row in rows for key in row))
        wanted = known if columns is None else list(columns)
        for key in wanted:
            if rows and key not in known:
                raise unknown("column", key, known)
        names = columns if isinstance(columns, Mapping) else {}
        self.headings = [_one_line(names.get(key, str(key).replace("_", " "))) for key in wanted]
        present = [[row[key] for row in rows if not _is_missing(row.get(key))] for key in wanted]
        self.numeric = [bool(items) and all(map(_is_number, items)) for items in present]
        shown = [[_one_line(format_value(row.get(key))) for row in rows] for key in wanted]
        even = [_even(column) if right else column for column, right in zip(shown, self.numeric, strict=True)]
        self.cells = [list(row) for row in zip(*even, strict=True)]


def _even(column: list[str]) -> list[str]:
    """Decimals filled up with zeros to those of the column, within five significant digits: 0.3331 beside 0.33546."""

    def decimals(text: str) -> int:
        return len(text.partition(".")[2]) if "e" not in text else 0

    def fill(text: str) -> str:
        digits = len(text.partition(".")[0].lstrip("-").replace(",", "").lstrip("0"))
        missing = min(most, 5 - digits) - decimals(text)
        return text + "0" * missing if "." in text and "e" not in text else text

    most = max(map(decimals, column), default=0)
    return [fill(text) for text in column]


def _one_line(text: str) -> str:
    return " ".join(str(text).split())


def display_width(text: str) -> int:
    """Columns that a text takes on a terminal: East Asian wide characters take two, combining marks none."""
    return sum(0 if unicodedata.combining(c) else 2 if unicodedata.east_asian_width(c) in "WF" else 1 for c in text)


def _pad(text: str, width: int, right: bool) -> str:
    space = " " * (width - display_width(text))
    return space + text if right else text + space


def text_table(rows: Rows, columns: Columns = None) -> str:
    """Aligned plain text: numbers to the right, words to the left, a rule below the headings, '–' where missing."""
    grid = _Grid(rows, columns)
    if not rows:
        return "(no rows)"
    widths = [max(map(display_width, column)) for column in zip(grid.headings, *grid.cells, strict=True)]
    lines = [grid.headings, ["─" * width for width in widths], *grid.cells]
    return "\n".join(
        "  ".join(_pad(*cell) for cell in zip(line, widths, grid.numeric, strict=True)).rstrip() for line in lines
    )


def html_table(rows: Rows, columns: Columns = None, label: str = "table") -> str:
    """A `<table>` in a box of its own that scrolls sideways when it is wide; everything is escaped."""
    grid = _Grid(rows, columns)
    if not rows:
        return "<p>(no rows)</p>"
    words = "" if any(grid.numeric) else ' class="texts"'
    kinds = [' class="number"' if right else "" for right in grid.numeric]
    head = "".join(f'<th scope="col"{kind}>{html.escape(t)}</th>' for t, kind in zip(grid.headings, kinds, strict=True))
    body = "\n".join(
        "<tr>" + "".join(f"<td{k}>{html.escape(t)}</td>" for t, k in zip(line, kinds, strict=True)) + "</tr>"
        for line in grid.cells
    )
    return (
        f'<div class="scroll" role="region" tabindex="0" aria-label="{html.escape(label)}">'
        f"<table{words}>\n<thead><tr>{head}</tr></thead>\n<tbody>\n{body}\n</tbody>\n</table></div>"
    )
