"""The papers' figures and tables, each one a named experiment: `fedpact paper list`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fedpact.core.errors import require
from fedpact.papers import fedepm
from fedpact.papers.study import Study

__all__ = ["PAPERS", "redraw"]

#: paper → figure → (what it shows, the function that redraws it)
PAPERS: dict[str, dict[str, Any]] = {"fedepm": fedepm.FIGURES}


def redraw(
    paper: str, figure: str, trials: int | None = None, out: str | None = None, quiet: bool = False
) -> dict[str, Any]:
    """Redraw a figure, check the paper's claims about it, and write a report. What was computed before is kept."""
    require(trials is None or trials >= 2, "trials", "an integer of at least 2", trials)
    _, draw = PAPERS[paper][figure]
    folder = Path(out) if out else Path("out") / paper / figure
    cells = (folder if out else folder.parent) / "cells.jsonl"
    return draw(Study(folder, cells, quiet), trials)
