"""The `fedpact` command: parse → build → run. No maths."""

from __future__ import annotations

import argparse
import inspect
import json
import math
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from fedpact.core.errors import FedpactError, InvalidArgument, unknown

EXAMPLE = """examples:
  fedpact demo                              a minute: real data, six algorithms, a report you can open
  fedpact run examples/breast_cancer.toml   any experiment; --set run.rounds=50 changes a key
  fedpact resume runs/…                     continue after a crash
  fedpact compare a.toml b.toml             rounds, bytes, gradients, seconds to the same target
  fedpact show fedepm                       the algorithm box, its settings, what it needs
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; errors of the user's making end in one sentence and exit code 1 or 2."""
    options = parser().parse_args(arguments)
    try:
        code = options.command(options)
        sys.stdout.flush()
        return code
    except FedpactError as error:
        print(f"fedpact: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("fedpact: interrupted.", file=sys.stderr)
        return 130
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def parser() -> argparse.ArgumentParser:
    """The command line. Sub-commands import what they need when they run, so that help is quick."""
    top = argparse.ArgumentParser(
        prog="fedpact",
        description="Federated learning by penalties, ADMM and constraints.",
        epilog=EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = top.add_subparsers(title="commands", required=True, metavar="COMMAND")

    def add(name: str, command: Callable[[argparse.Namespace], int], text: str) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=text, description=text)
        sub.set_defaults(command=command)
        return sub

    sub = add("demo", demo, "Compare six algorithms on real data; ends with a table and the path of a report.")
    sub.add_argument("--out", default="out/demo", help="folder of the report (default: %(default)s)")
    sub.add_argument("--rounds", type=int, default=60, help="rounds of each algorithm (default: %(default)s)")
    _json(sub)

    sub = add("run", run, "Run an experiment file (TOML); the run leaves a folder that can be resumed.")
    sub.add_argument("file", help="experiment file")
    sub.add_argument("--set", dest="changes", action="append", default=[], metavar="KEY=VALUE", help="change a key")
    sub.add_argument("--out", help="folder of the run (default: runs/NAME-TIME)")
    _json(sub)

    sub = add("resume", resume, "Continue a run from its folder to the bits of an uninterrupted one.")
    sub.add_argument("folder", help="folder of the run")
    sub.add_argument("--rounds", type=int, help="go on to this many rounds instead of the file's")
    _json(sub)

    sub = add("compare", compare, "Rounds, bytes, gradients and seconds to the same target.")
    sub.add_argument("items", nargs="+", metavar="FILE|FOLDER", help="experiment files or folders of finished runs")
    sub.add_argument("--target", type=float, help="value to reach (default: what all of them reach)")
    sub.add_argument("--column", default="objective", help="column of the history (default: %(default)s)")
    sub.add_argument("--above", action="store_true", help="the target is reached from below (accuracy)")
    sub.add_argument("--set", dest="changes", action="append", default=[], metavar="KEY=VALUE", help="change a key")
    sub.add_argument("--out", help="folder of a report")
    _json(sub)

    sub = add("tune", tune, "Choose settings from a grid by a documented protocol.")
    sub.add_argument("file", help="experiment file")
    sub.add_argument("--grid", action="append", required=True, metavar="SETTING=V1,V2,…", help="values of a setting")
    sub.add_argument("--method", default="halving", help="grid or halving (default: %(default)s)")
    sub.add_argument("--rounds", type=int, default=27, help="rounds of the last rung (default: %(default)s)")
    sub.add_argument("--metric", default="objective", help="column, or held_out.NAME (default: %(default)s)")
    sub.add_argument("--budget", type=int, help="refuse to spend more rounds than this in all")
    sub.add_argument("--set", dest="changes", action="append", default=[], metavar="KEY=VALUE", help="change a key")
    _json(sub)

    sub = add("predict", predict, "Predict the rows of a CSV file with a saved model.")
    sub.add_argument("model", help="model.bin of a run")
    sub.add_argument("data", help="CSV file with the columns of training")
    sub.add_argument("--out", help="write to this file instead of the screen")
    _json(sub)

    sub = add("list", list_names, "List algorithms, problems, datasets and splits.")
    _json(sub)
    sub = add("show", show, "Print an algorithm's box, settings and presets.")
    sub.add_argument("name", help="algorithm")
    _json(sub)

    sub = add("paper", paper, "Redraw a paper's figure or table: 'paper list', 'paper fedepm fig3 --trials 20'.")
    sub.add_argument("name", help="'list', or a paper")
    sub.add_argument("figure", nargs="?", help="figure or table")
    sub.add_argument("--trials", type=int, help="seeded trials (default: the experiment's own)")
    sub.add_argument("--out", help="folder (default: out/PAPER/FIGURE)")
    _json(sub)

    sub = add("verify", verify, "Replay a recorded trajectory: 'verify golden FILE'; exits 1 above 1e-9.")
    sub.add_argument("what", choices=["golden"], help="what to verify")
    sub.add_argument("file", help="recording (.mat)")
    _json(sub)
    return top


def _json(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("--json", action="store_true", help="print machine-readable results")


def _print(values: Any) -> None:
    def plain(value: Any) -> Any:
        if isinstance(value, dict):
            return {str(k): plain(v) for k, v in value.items()}
        if isinstance(value, (list, tuple)):
            return [plain(v) for v in value]
        if isinstance(value, float) and not math.isfinite(value):
            return None
        return value

    print(json.dumps(plain(values), indent=2, ensure_ascii=False, default=str))


def demo(options: argparse.Namespace) -> int:
    """`fedpact demo`."""
    from fedpact.demo import run_demo

    result = run_demo(Path(options.out), options.rounds, quiet=options.json)
    if options.json:
        _print(result)
    return 0


def _finished(result: Any, as_json: bool) -> int:
    from fedpact.core.stop import Outcome
    from fedpact.report import text_table

    report = result.folder / "report.html"
    if as_json:
        _print(
            {
                "name": result.name,
                "outcome": result.outcome,
                "summary": result.summary,
                "metrics": result.metrics,
                "notices": result.notices,
                "folder": str(result.folder),
                "report": str(report),
            }
        )
    else:
        print(text_table([{"run": result.name, **result.summary}]))
        if result.metrics:
            print("\nheld-out rows\n" + text_table([result.metrics["pooled"]]))
        for notice in result.notices:
            print(f"\nnotice: {notice}")
        print(f"\n{result.outcome}.\nreport: {report}")
    if result.outcome_kind is Outcome.INTERRUPTED:
        print(f"continue with: fedpact resume {result.folder}", file=sys.stderr)
        return 130
    return 1 if result.outcome_kind is Outcome.NONFINITE else 0


def run(options: argparse.Namespace) -> int:
    """`fedpact run FILE`."""
    from fedpact.core.files import make_folder, write_atomic
    from fedpact.experiment import build, read
    from fedpact.folder import require_empty

    values = read(options.file, options.changes)
    experiment, name = build(values)
    label = name or experiment.algorithm.name
    folder = Path(options.out or f"runs/{label}-{time.strftime('%Y%m%d-%H%M%S')}")
    require_empty(folder)
    made = not folder.exists()
    make_folder(folder)
    write_atomic(folder / "experiment.json", json.dumps(values, indent=2, default=str).encode())
    try:
        return _go(experiment, label, folder, options.json)
    except FedpactError:
        if not (folder / "history.csv").exists():  # it never began: leave nothing behind
            for path in folder.iterdir():
                path.unlink()
            if made:
                folder.rmdir()
        raise


def _go(experiment: Any, label: str, folder: Path, as_json: bool) -> int:
    from fedpact.run import execute

    try:
        result = execute(experiment, folder=folder, name=label, progress=None, resuming=True)
    except KeyboardInterrupt:
        print(f"fedpact: interrupted. Continue with: fedpact resume {folder}", file=sys.stderr)
        return 130
    return _finished(result, as_json)


def resume(options: argparse.Namespace) -> int:
    """`fedpact resume FOLDER`."""
    from fedpact.core.errors import CheckpointError
    from fedpact.core.files import write_atomic
    from fedpact.experiment import build

    folder = Path(options.folder)
    source = folder / "experiment.json"
    if not source.is_file():
        raise CheckpointError(
            f"folder must be of a run that 'fedpact run' started, got {str(folder)!r} without experiment.json. "
            "A run started in Python resumes with fedpact.run(…, folder=…, resume=True)."
        )
    try:
        values = json.loads(source.read_text(encoding="utf-8"))
    except ValueError:
        values = None
    if not isinstance(values, dict) or not isinstance(values.get("run", {}), dict):
        raise CheckpointError(f"experiment.json must be whole, got a damaged file {source}.")
    if options.rounds is not None:
        values.setdefault("run", {})["rounds"] = options.rounds
    experiment, name = build(values)
    code = _go(experiment, name or experiment.algorithm.name, folder, options.json)
    if options.rounds is not None:
        write_atomic(source, json.dumps(values, indent=2, default=str).encode())
    return code


def compare(options: argparse.Namespace) -> int:
    """`fedpact compare A B …`."""
    from fedpact.race import gather, race
    from fedpact.report import text_table

    runs = gather(options.items, options.changes)
    rows, target = race(runs, options.column, options.target, options.above)
    report = runs.report(options.out) if options.out else None
    if options.json:
        _print({"column": options.column, "target": target, "runs": rows, "report": report and str(report)})
    else:
        sign = "≥" if options.above else "≤"
        print(f"to reach {options.column} {sign} {target:.8g}\n{text_table(rows)}")
        if report:
            print(f"\nreport: {report}")
    return 0


def tune(options: argparse.Namespace) -> int:
    """`fedpact tune FILE --grid …`."""
    from fedpact.experiment import build, read
    from fedpact.report import text_table
    from fedpact.tune import tune as search

    experiment, _ = build(read(options.file, options.changes))
    grid: dict[str, list[Any]] = {}
    for item in options.grid:
        name, equals, text = item.partition("=")
        if not equals or not text:
            raise InvalidArgument(f"--grid must be setting=value,value,… got {item!r}.")
        grid[name.removeprefix("algorithm.")] = [_value(word) for word in text.split(",")]
    kept = ("participation", "stop", "evaluate_every", "precision", "engine")
    tuned = search(
        experiment.algorithm,
        experiment.problem,
        experiment.federation,
        grid,
        metric=options.metric,
        method=options.method,
        rounds=options.rounds,
        seed=experiment.seed,
        budget=options.budget,
        on_trial=None
        if options.json
        else lambda t: print(f"{t.changes}  {t.rounds} rounds: {t.score:.8g}", file=sys.stderr),
        **{key: getattr(experiment, key) for key in kept},
    )
    if options.json:
        _print(
            {
                "settings": tuned.settings.to_dict(),
                "score": tuned.score,
                "rounds": tuned.rounds,
                "trials": tuned.table(),
            }
        )
    else:
        print(text_table(tuned.table()))
        print(f"\nbest of {tuned.rounds} rounds: {tuned.settings.label}, {options.metric} {tuned.score:.8g}")
    return 0


def _value(word: str) -> Any:
    """A TOML value, or the word itself."""
    import tomllib

    try:
        return tomllib.loads(f"value = {word}")["value"]
    except tomllib.TOMLDecodeError:
        return word.strip()


def predict(options: argparse.Namespace) -> int:
    """`fedpact predict MODEL data.csv`."""
    from fedpact.core.files import write_atomic
    from fedpact.model import Model
    from fedpact.problems import Logistic

    model = Model.load(options.model)
    values = model.predict_csv(options.data)
    classes = model.schema.classes if model.schema and isinstance(model.problem, Logistic) else ()
    if options.json:
        out: dict[str, Any] = {"predictions": values.tolist()}
        if classes:
            out |= {"classes": list(classes), "labels": [classes[int(v > 0.5)] for v in values]}
        text = json.dumps(out) + "\n"
    elif classes:
        lines = [f"{float(v)!r},{classes[int(v > 0.5)]}" for v in values]
        text = "\n".join([f"probability of {classes[1]},label", *lines]) + "\n"
    else:
        text = "\n".join(["prediction", *(repr(float(v)) for v in values)]) + "\n"
    if options.out:
        write_atomic(Path(options.out), text.encode())
    else:
        sys.stdout.write(text)
    return 0


def list_names(options: argparse.Namespace) -> int:
    """`fedpact list`."""
    from fedpact import data
    from fedpact.algorithms import ALGORITHMS
    from fedpact.data import partition
    from fedpact.data.partition import SPLITS
    from fedpact.problems import PROBLEMS

    def first(thing: Any) -> str:
        return (inspect.getdoc(thing) or "").splitlines()[0]

    about = dict(line.split(maxsplit=1) for line in (partition.__doc__ or "").splitlines() if line[:1].islower())
    groups = {
        "algorithms": {name: first(sys.modules[cls.__module__]) for name, cls in ALGORITHMS.items()},
        "problems": {name: first(cls) for name, cls in PROBLEMS.items()},
        "datasets": data.names(),
        "splits": {
            name: about[name] + (f" (option: {', '.join(keys)})" if keys else "") for name, keys in SPLITS.items()
        },
    }
    if options.json:
        _print(groups)
        return 0
    for group, names in groups.items():
        print(group)
        for name, text in names.items():
            print(f"  {name:<16}{text}")
    return 0


def show(options: argparse.Namespace) -> int:
    """`fedpact show NAME`."""
    from fedpact.algorithms import algorithm
    from fedpact.experiment import settings_table
    from fedpact.report import text_table

    cls = algorithm(options.name)
    box = inspect.getdoc(sys.modules[cls.__module__]) or ""
    if options.json:
        _print({"name": cls.name, "box": box, "settings": settings_table(cls), "presets": dict(cls.presets)})
        return 0
    print(box + "\n\nSettings\n" + text_table(settings_table(cls)))
    print("\nPresets")
    for name, values in cls.presets.items():
        print(f"  {name:<12}{', '.join(f'{k}={v}' for k, v in values.items()) or '(the defaults)'}")
    return 0


def paper(options: argparse.Namespace) -> int:
    """`fedpact paper …`."""
    from fedpact.papers import PAPERS, redraw

    if options.name == "list":
        names = {name: {fig: what for fig, (what, _) in figures.items()} for name, figures in PAPERS.items()}
        if options.json:
            _print(names)
        else:
            for name, figures in names.items():
                for figure, what in figures.items():
                    print(f"{name:<10}{figure:<8}{what}")
        return 0
    if options.name not in PAPERS:
        raise unknown("paper", options.name, ["list", *PAPERS])
    if options.figure not in PAPERS[options.name]:
        raise unknown(f"figure of {options.name}", options.figure, PAPERS[options.name])
    result = redraw(options.name, options.figure, options.trials, options.out, quiet=options.json)
    if options.json:
        _print(result)
    return 0


def verify(options: argparse.Namespace) -> int:
    """`fedpact verify golden FILE`."""
    from fedpact.verify import golden

    found = golden(options.file)
    if options.json:
        _print({**found._asdict(), "tolerance": 1e-9, "passed": found.passed})
    else:
        verdict = "agrees" if found.passed else "DIFFERS"
        print(
            f"{found.file}: {found.algorithm}, {found.clients} clients, {found.rounds} rounds: objective {verdict}, "
            f"largest difference {found.difference:.3g} in round {found.worst_round} (allowed 1e-9)"
        )
    return 0 if found.passed else 1


if __name__ == "__main__":
    sys.exit(main())
