"""What every redrawn figure needs: cells whose results are kept as they come, claims, and one report at the end."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from fedpact.core.errors import DataError
from fedpact.core.files import append_synced, make_folder, writing
from fedpact.papers.claims import Claim
from fedpact.report import text_table, write_report

PACKAGE = Path(__file__).parents[1]
#: The parts of the package that decide a run's numbers.
DECIDING = ("algorithms", "core", "data", "engines", "privacy", "problems", "definition.py", "run.py", "tune.py")


def source_digest(parts: Iterable[str], package: Path = PACKAGE) -> str:
    """12 hexadecimal digits of the SHA-256 of modules and of all modules in folders, by their names and texts."""
    places = [package / part for part in parts]
    files = {file for place in places for file in ([place] if place.suffix == ".py" else place.rglob("*.py"))}
    text = sha256()
    for file in sorted(files):
        text.update(f"{file.relative_to(package).as_posix()}\n".encode() + file.read_bytes())
    return text.hexdigest()[:12]


class Study:
    """A figure being redrawn. `cell` computes a result once; a study that was stopped goes on where it was.

    `cells` is the file the results are kept in; figures of one paper share it. `source` says which code computes them
    (see `source_digest`): results of other code are left in the file and not used. Delete it to compute anew.
    """

    def __init__(self, folder: Path, cells: Path, quiet: bool, source: str = "") -> None:
        self.folder, self.path, self.quiet, self.source = folder, cells, quiet, source
        self.begun = time.perf_counter()
        make_folder(folder)
        self._kept: dict[str, Any] = {}
        for number, line in enumerate(whole_lines(cells), 1):
            try:
                entry = json.loads(line)
                self._kept[entry["cell"]] = entry["result"]
            except (ValueError, KeyError, TypeError):
                problem = f"{cells} must hold one result per line, got a damaged line {number}. Delete the line."
                raise DataError(problem) from None

    def say(self, text: str) -> None:
        """A line of progress."""
        if not self.quiet:
            print(f"[{time.perf_counter() - self.begun:6.0f} s] {text}", file=sys.stderr, flush=True)

    def cell(self, compute: Callable[[], Any], what: str, **key: Any) -> Any:
        """The result of a cell: read where it was computed before, else computed and kept.

        `what` names it; `key` is everything else that decides it.
        """
        decided = {"what": what, **key, "source": self.source, "version": version("fedpact")}
        name = json.dumps(decided, sort_keys=True)
        if name not in self._kept:
            result = compute()
            append_synced(self.path, (json.dumps({"cell": name, "result": result}) + "\n").encode())
            self._kept[name] = result
            self.say(what)
        return self._kept[name]

    def finish(
        self,
        title: str,
        lead: str,
        claims: Sequence[Claim],
        figures: Mapping[str, Figure],
        tables: Mapping[str, list[dict[str, Any]]],
    ) -> dict[str, Any]:
        """Write the report, print claims and tables, and return them."""
        report = write_report([], self.folder, title, lead, claims, figures, tables)
        if not self.quiet:
            for heading, rows in tables.items():
                print(f"\n{heading}\n{text_table(rows)}")
            print("\nThe paper's claims")
            for claim, holds, detail in claims:
                mark = "not tested    " if holds is None else "holds         " if holds else "does not hold "
                print(f"  {mark}{claim}\n                {detail}")
            print(f"\nreport: {report}")
        return {
            "title": title,
            "claims": [{"claim": c, "holds": h, "detail": d} for c, h, d in claims],
            "tables": dict(tables),
            "report": str(report),
        }


def whole_lines(path: Path) -> list[str]:
    """The whole lines of a file that grows by appending; a last line that was cut short is taken off."""
    if not path.is_file():
        return []
    whole, newline, torn = path.read_bytes().rpartition(b"\n")
    if torn:
        with writing(path), path.open("rb+") as file:
            file.truncate(len(whole) + len(newline))
    return whole.decode().splitlines()
