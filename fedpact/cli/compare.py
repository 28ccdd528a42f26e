"""Several runs: `fedpact compare`, `tune`, `paper`, `verify` and `demo`."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from pathlib import Path
from typing import Any

from fedpact.core.errors import InvalidArgument, unknown
from fedpact.core.files import check_writable, json_text

ON_HELD_OUT = (
    "The settings were chosen by {metric}, so these rows are no longer held out: the score is too good. "
    "For one to report, keep other rows aside, or tune by the objective."
)


def compare(options: argparse.Namespace) -> int:
    """`fedpact compare A B …`."""
    from fedpact.race import gather, larger_is_better, never_improved, race
    from fedpact.report import text_table

    if options.out:
        check_writable(options.out)
    runs = gather(options.items, options.changes, options.column)
    above = options.above or larger_is_better(options.column)
    rows, target = race(runs, options.column, options.target, above)
    idle = never_improved(runs, options.column, above)
    report = None
    try:
        report = runs.report(options.out) if options.out else None
    finally:  # whatever becomes of the report
        found = {"column": options.column, "target": target, "above": above, "runs": rows, "never_improved": idle}
        if options.json:
            print(json_text(found | {"report": report and str(report)}), end="")
        else:
            print(f"to reach {options.column} {'≥' if above else '≤'} {target:.8g}\n{text_table(rows)}")
    if options.json:
        return 0
    for name in idle:
        print(f"\nnotice: {name} never improves on its start" + ("" if options.target else ", and sets no target"))
    for run in runs:
        for notice in run.notices:
            print(f"\nnotice ({run.name}): {notice}")
    if report:
        print(f"\nreport: {report}")
    return 0


def tune(options: argparse.Namespace) -> int:
    """`fedpact tune FILE --grid …`."""
    from fedpact.experiment import build, read
    from fedpact.report import text_table
    from fedpact.tune import tune as search

    experiment, _ = build(read(options.file, options.changes))
    own = ("algorithm", "problem", "federation", "rounds", "seed")
    kept = [field.name for field in dataclasses.fields(experiment) if field.name not in own]
    tuned = search(
        experiment.algorithm,
        experiment.problem,
        experiment.federation,
        _grid(options.grid),
        metric=options.metric,
        method=options.method,
        rounds=options.rounds,
        seed=experiment.seed,
        budget=options.budget,
        on_trial=None if options.json else _say,
        **{key: getattr(experiment, key) for key in kept},
    )
    notices = [ON_HELD_OUT.format(metric=options.metric)] if options.metric.startswith("held_out.") else []
    if options.json:
        best = {"settings": tuned.settings.to_dict(), "score": tuned.score, "rounds": tuned.rounds}
        print(json_text(best | {"trials": tuned.table(), "notices": notices}), end="")
    else:
        print(text_table(tuned.table()))
        print(f"\nbest of {tuned.rounds} rounds: {tuned.settings.label}, {options.metric} {tuned.score:.8g}")
        for notice in notices:
            print(f"\nnotice: {notice}")
    return 0


def _grid(items: list[str]) -> dict[str, list[Any]]:
    from fedpact.experiment import toml_value

    grid: dict[str, list[Any]] = {}
    for item in items:
        name, equals, text = item.partition("=")
        if not equals or not text:
            example = "For example: --grid scale=0.3,1,3"
            raise InvalidArgument(f"--grid must be setting=value,value,… got {item!r}. {example}")
        grid.setdefault(name.strip().removeprefix("algorithm."), []).extend(map(toml_value, text.split(",")))
    return grid


def _say(trial: Any) -> None:
    print(f"{trial.changes}  {trial.rounds} rounds: {trial.score:.8g}", file=sys.stderr)


def paper(options: argparse.Namespace) -> int:
    """`fedpact paper …`."""
    from fedpact.papers import PAPERS, redraw

    if options.name == "list":
        names = {name: {fig: what for fig, (what, _) in figures.items()} for name, figures in PAPERS.items()}
        if options.json:
            print(json_text(names), end="")
        else:
            for name, figures in names.items():
                for figure, what in figures.items():
                    print(f"{name:<14}{figure:<8}{what}")
            print("\nA run has up to 150 rounds (FedEPM) or 1,000 (inexact ADMM); --trials takes fewer than 20.")
        return 0
    if options.name not in PAPERS:
        raise unknown("paper", options.name, ["list", *PAPERS])
    if options.figure not in PAPERS[options.name]:
        raise unknown(f"figure of {options.name}", options.figure, PAPERS[options.name])
    given = (options.trials, options.out, options.json, options.cell, options.hours, options.algorithm)
    result = redraw(options.name, options.figure, *given)
    if options.json:
        print(json_text(result), end="")
    return 0


def verify(options: argparse.Namespace) -> int:
    """`fedpact verify golden FILE`."""
    from fedpact.report import format_value
    from fedpact.verify import TOLERANCE, golden

    found = golden(options.file)
    if options.json:
        print(json_text({**found._asdict(), "tolerance": TOLERANCE, "passed": found.passed}), end="")
    else:
        verdict, allowed = "agrees" if found.passed else "DIFFERS", format_value(TOLERANCE)
        print(
            f"{found.file}: {found.algorithm}, {found.clients} clients, {found.rounds} rounds: objective {verdict}, "
            f"largest difference {found.difference:.3g} in round {found.worst_round} (allowed {allowed})"
        )
    return 0 if found.passed else 1


def demo(options: argparse.Namespace) -> int:
    """`fedpact demo`."""
    from fedpact.demo import run_demo

    result = run_demo(Path(options.out), options.rounds, quiet=options.json)
    if options.json:
        print(json_text(result), end="")
    return 0
