"""The papers' figures and tables, each one a named experiment: `fedpact paper list`."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

from fedpact.core.errors import require
from fedpact.papers import fedadmm, fedepm, fedpdm, inexact_admm, ssca
from fedpact.papers.fedadmm_cells import Asked
from fedpact.papers.study import DECIDING, Study, source_digest

__all__ = ["PAPERS", "redraw"]

#: paper → figure → (what it shows, the function that redraws it)
PAPERS: dict[str, dict[str, Any]] = {
    "fedepm": fedepm.FIGURES,
    "inexact_admm": inexact_admm.FIGURES,
    "fedadmm": fedadmm.FIGURES,
    "ssca": ssca.FIGURES,
    "fedpdm": fedpdm.FIGURES,
}


def redraw(
    paper: str,
    figure: str,
    trials: int | None = None,
    out: str | None = None,
    quiet: bool = False,
    cells: list[str] | None = None,
    hours: float | None = None,
    algorithms: list[str] | None = None,
) -> dict[str, Any]:
    """Redraw a figure, check the paper's claims about it, and write a report.

    What the same code computed before is kept. A paper's runs are in its module PAPER_cells, its figures in PAPER.
    Of those of FedADMM, which take hours, `cells` are the ones to fill and `algorithms` those to run, by the names in
    the table (None: all), and no run is begun after `hours`.
    """
    _, draw = PAPERS[paper][figure]
    counted = "count" in inspect.signature(draw).parameters
    hint, least = "The number of its runs is fixed.", 1 if paper in ("ssca", "fedpdm") else 2  # others draw spreads
    require(trials is None or counted, "trials", f"left out for {paper} {figure}", trials, hint=hint)
    require(trials is None or trials >= least, "trials", f"an integer of at least {least}", trials)
    by_cell = "asked" in inspect.signature(draw).parameters
    for name, value in (("cell", cells), ("algorithm", algorithms), ("hours", hours)):
        require(
            value is None or by_cell, name, f"left out for {paper} {figure}", value, hint="It has no cells to fill."
        )
    require(hours is None or hours >= 0, "hours", "at least 0", hours, hint="0 draws what is there.")
    folder = Path(out) if out else Path("out") / paper / figure
    kept = (folder if out else folder.parent) / "cells.jsonl"
    study = Study(folder, kept, quiet, source_digest([*DECIDING, f"papers/{paper}_cells.py"]))
    if by_cell:
        return draw(study, Asked(cells, algorithms, 1e6 if hours is None else hours))
    return draw(study, trials) if counted else draw(study)
