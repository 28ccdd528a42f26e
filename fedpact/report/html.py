"""The report: one HTML file that says what was run, how it ended and what follows, with its plots beside it."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from fedpact.core.environment import environment
from fedpact.core.errors import require
from fedpact.core.files import write_files
from fedpact.report.gallery import Gallery, metrics_section, plots_section
from fedpact.report.page import document, escape
from fedpact.report.tables import Rows, html_table
from fedpact.report.view import RunView, labels

Claim = tuple[str, bool | None, str]  # what is claimed, whether it holds (None: not tested), and the detail

MOST_COEFFICIENTS = 20

_HEADINGS = {
    "accuracy": "training accuracy",
    "gradient": "‖∇f‖²",
    "gradients": "gradient evaluations",
    "snr": "SNR",
    "kkt": "KKT residual",
}
_VERDICTS = {True: ("holds", "✓ holds"), False: ("fails", "✗ does not hold"), None: ("open", "– not tested")}


def write_report(
    runs: Sequence[RunView],
    folder: str | os.PathLike[str],
    title: str,
    lead: str | None = None,
    checks: Sequence[Claim] | None = None,
    figures: Mapping[str, Figure] | None = None,
    extra_tables: Mapping[str, Rows] | None = None,
    *,
    minimum: float | None = None,
) -> Path:
    """Write folder/report.html and folder/plots/*.svg, *.png; returns the path of report.html.

    `figures` are more plots by caption and `extra_tables` more tables by heading. `minimum` is the least objective, if
    it is known; otherwise gaps are to the lowest objective that any of several runs reached. The same runs give the
    same bytes. All files are written or none: a folder that cannot be written raises `OutputError`.
    """
    given = len(runs) > 0 or bool(figures) or bool(extra_tables)
    require(given, "runs", "at least one finished run where there are no figures or tables", list(runs))
    gallery = Gallery()
    sections = [
        ("summary", "Summary", _summary(runs) + _extra_tables(extra_tables or {})),
        ("checks", "Claims", _checks(checks or ())),
        ("plots", "Plots", plots_section(gallery, runs, figures or {}, minimum)),
        ("metrics", "Held-out data", metrics_section(gallery, runs)),
        ("coefficients", "Coefficients", _coefficients(runs)),
        ("settings", "Settings", "\n".join(_settings(runs))),
        ("environment", "Environment", _environment()),
    ]
    opening = (f'<p class="lead">{escape(lead)}</p>\n' if lead else "") + _notices(runs)
    page = document(title, sections, opening)
    return write_files(folder, {**gallery.files, "report.html": page.encode()}) / "report.html"


def _notices(runs: Sequence[RunView]) -> str:
    """Every notice once, with the runs that it is about."""
    about: dict[str, list[str]] = {}
    for label, run in zip(labels(runs), runs, strict=True):
        for notice in dict.fromkeys(run.notices or ()):
            about.setdefault(notice, []).append(label)
    if not about:
        return ""
    items = "".join(
        f"<li><strong>{escape('All runs' if len(runs) == len(names) > 1 else ', '.join(names))}:</strong> "
        f"{escape(notice)}</li>\n"
        for notice, names in about.items()
    )
    return f'<div class="notices" role="note"><strong>Read this first</strong>\n<ul>\n{items}</ul></div>\n'


def _summary(runs: Sequence[RunView]) -> str:
    names = labels(runs)
    if not runs:
        return ""
    rows = [{"run": label, **run.summary} for label, run in zip(names, runs, strict=True)]
    ends = [{"run": label, "why it stopped": run.outcome} for label, run in zip(names, runs, strict=True)]
    headings = {key: _HEADINGS.get(key, key.replace("_", " ")) for row in rows for key in row}
    tables = [html_table(rows, headings, "Summary of all runs"), html_table(ends, label="Why each run stopped")]
    return "\n".join([*tables, *_parties(runs), *_told(runs)])


def _parties(runs: Sequence[RunView]) -> list[str]:
    """Who holds the columns of feature-split data, and which records the parties share: each split once."""
    found: list[Mapping[str, Any]] = []
    for run in runs:
        parties = run.config.get("data", {}).get("parties")
        if parties and parties not in found:
            found.append(parties)
    rows = [[{"party": name, **about} for name, about in parties.items()] for parties in found]
    headings = {"party": "party", "features": "features", "labels": "has the labels", "records": "records"}
    headings |= {"kept": "kept", "missing": "missing elsewhere", "examples": "such as"}
    return [
        f"<h3>Parties</h3>\n{html_table(one, {k: v for k, v in headings.items() if k in one[0]}, 'Parties')}"
        for one in rows
    ]


def _told(runs: Sequence[RunView]) -> Iterator[str]:
    """The tables that the runs bring along, the same one once."""
    seen: list[tuple[str, Any]] = []
    for label, run in zip(labels(runs), runs, strict=True):
        for heading, rows in getattr(run, "tables", {}).items():
            if (heading, rows) not in seen:
                seen.append((heading, rows))
                title = f"{heading}: {label}" if len(runs) > 1 else heading
                yield f"<h3>{escape(title)}</h3>\n{html_table(rows, label=title)}"


def _extra_tables(tables: Mapping[str, Rows]) -> str:
    return "".join(f"\n<h3>{escape(name)}</h3>\n{html_table(rows, label=name)}" for name, rows in tables.items())


def _checks(checks: Sequence[Claim]) -> str:
    if not checks:
        return ""
    items = []
    for claim, holds, detail in checks:
        kind, verdict = _VERDICTS[None if holds is None else bool(holds)]
        more = f'<br><span class="note">{escape(detail)}</span>' if detail else ""
        items.append(f'<li><span class="verdict {kind}">{verdict}</span><span>{escape(claim)}{more}</span></li>')
    verdicts = [None if holds is None else bool(holds) for _, holds, _ in checks]
    counts = ((True, "Hold"), (False, "Do not hold"), (None, "Not tested"))
    total = ". ".join(f"{words}: {verdicts.count(kind)}" for kind, words in counts if kind in verdicts)
    return f'<p class="note">{total}.</p>\n<ul class="checks">\n' + "\n".join(items) + "\n</ul>"


def _coefficients(runs: Sequence[RunView]) -> str:
    """The largest coefficients of linear models, by feature."""
    found: dict[str, dict[str, Any]] = {}
    tables = [(label, getattr(run, "coefficients", ())) for label, run in zip(labels(runs), runs, strict=True)]
    for label, rows in tables:
        for row in rows:
            found.setdefault(row["feature"], {})[label if len(runs) > 1 else "coefficient"] = row["coefficient"]
    if not found:
        return ""
    order = sorted(found, key=lambda name: -max(map(abs, found[name].values())))[:MOST_COEFFICIENTS]
    shown: list[dict[str, Any]] = [{"feature": name, **found[name]} for name in order]
    if len(runs) == 1:
        unit = {row["feature"]: row["per_unit"] for row in tables[0][1]}
        shown = [{**row, "per unit of its column": unit[row["feature"]]} for row in shown]
    note = "Of the features as scaled for training, so that they compare."
    if len(found) > len(order):
        note += f" The {len(order)} largest of {len(found)}; all are in result.json of the run's folder."
    return f'<p class="note">{note}</p>\n{html_table(shown, label="Coefficients")}'


def _settings(runs: Sequence[RunView]) -> Iterator[str]:
    for label, run in zip(labels(runs), runs, strict=True):
        rows = [{"setting": key, "value": value} for key, value in _flat(run.config)]
        yield f"<details><summary>{escape(label)}</summary>\n{html_table(rows, label=f'Settings of {label}')}</details>"


def _flat(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Dotted keys and literal values: without separators and without rounding."""
    for key, value in config.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{prefix}{key}.")
        else:
            literal = value.tolist() if isinstance(value, (np.generic, np.ndarray)) else value
            yield f"{prefix}{key}", literal if isinstance(literal, str) else repr(literal)


def _environment() -> str:
    found = environment()
    versions = {"python": found["python"], **found["packages"]}
    versions["platform"] = f"{found['platform']}, {found['cores']} processors"
    rows = [{"package": name, "version": version} for name, version in versions.items()]
    table = html_table(rows, label="Versions")
    return f"<details><summary>Versions when this report was written</summary>\n{table}</details>"
