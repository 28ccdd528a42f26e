"""`fedpact run` and `fedpact resume`."""

from __future__ import annotations

import argparse
import re
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedpact.core.errors import FedpactError
from fedpact.core.files import json_text, read_json


def run(options: argparse.Namespace) -> int:
    """`fedpact run FILE`."""
    from fedpact.experiment import read

    return _execute(read(options.file, options.changes), options.out, options.json, resuming=False)


def resume(options: argparse.Namespace) -> int:
    """`fedpact resume FOLDER`."""
    from fedpact.folder import read_experiment

    values = read_experiment(Path(options.folder))
    if options.rounds is not None:
        values.setdefault("run", {})["rounds"] = options.rounds
    return _execute(values, options.folder, options.json, resuming=True)


def _ended(folder: Path) -> int | None:
    """The rounds of the run that ended in a folder, if one did."""
    try:
        return read_json(folder / "result.json", "")["summary"]["rounds"]
    except (FedpactError, OSError, KeyError, TypeError):
        return None


def _execute(values: Mapping[str, Any], out: str | None, as_json: bool, resuming: bool) -> int:
    from fedpact.experiment import build
    from fedpact.run import execute

    experiment, name = build(values)
    label = name or experiment.algorithm.name
    safe = re.sub(r"[/\\\0]+", "-", label).lstrip(".")[:100]  # a name is no path
    folder = Path(out or f"runs/{safe}-{time.strftime('%Y%m%d-%H%M%S')}")
    before = _ended(folder) if resuming else None
    try:
        result = execute(experiment, folder=folder, name=label, progress=None, resuming=resuming, source=values)
    except KeyboardInterrupt:
        print(f"fedpact: interrupted. Continue with: fedpact resume {folder}", file=sys.stderr)
        return 130
    if result.history.rounds == before:
        _say_ended(result, folder)
    return _finished(result, folder, as_json)


def _say_ended(result: Any, folder: Path) -> None:
    from fedpact.core.stop import Outcome

    rounds, more = (
        result.history.rounds,
        f"Extend it with: fedpact resume {folder} --rounds {2 * result.history.rounds}",
    )
    if result.outcome_kind is not Outcome.ROUNDS:
        more = "It stays ended; change its settings in a new run."
    print(f"fedpact: the run had ended after {rounds} rounds: {result.outcome}. {more}", file=sys.stderr)


def _finished(result: Any, folder: Path, as_json: bool) -> int:
    from fedpact.core.stop import Outcome
    from fedpact.folder import record
    from fedpact.report import held_out_text, summary_table

    report = folder / "report.html"
    if as_json:
        print(json_text(record(result) | {"folder": str(folder), "report": str(report)}), end="")
    else:
        print(summary_table([result]))
        if result.metrics:
            print("\nheld-out rows\n" + held_out_text(result))
        for notice in result.notices:
            print(f"\nnotice: {notice}")
        print(f"\n{result.outcome}.\nreport: {report}")
    if result.outcome_kind is Outcome.INTERRUPTED:
        print(f"continue with: fedpact resume {folder}", file=sys.stderr)
        return 130
    return 1 if result.outcome_kind is Outcome.NONFINITE else 0
