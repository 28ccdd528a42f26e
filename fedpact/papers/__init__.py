"""The papers' figures and tables, each one a named experiment: `fedpact paper list`."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

from fedpact.core.errors import require
from fedpact.papers import fedepm, inexact_admm
from fedpact.papers.study import DECIDING, Study, source_digest

__all__ = ["PAPERS", "redraw"]

#: paper → figure → (what it shows, the function that redraws it)
PAPERS: dict[str, dict[str, Any]] = {"fedepm": fedepm.FIGURES, "inexact_admm": inexact_admm.FIGURES}


def redraw(
    paper: str, figure: str, trials: int | None = None, out: str | None = None, quiet: bool = False
) -> dict[str, Any]:
    """Redraw a figure, check the paper's claims about it, and write a report.

    What the same code computed before is kept. A paper's runs are in its module PAPER_cells, its figures in PAPER.
    """
    _, draw = PAPERS[paper][figure]
    counted = "count" in inspect.signature(draw).parameters
    hint = "The number of its runs is fixed."
    require(trials is None or counted, "trials", f"left out for {paper} {figure}", trials, hint=hint)
    require(trials is None or trials >= 2, "trials", "an integer of at least 2", trials)
    folder = Path(out) if out else Path("out") / paper / figure
    cells = (folder if out else folder.parent) / "cells.jsonl"
    study = Study(folder, cells, quiet, source_digest([*DECIDING, f"papers/{paper}_cells.py"]))
    return draw(study, trials) if counted else draw(study)
