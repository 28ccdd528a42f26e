"""The `fedpact` command: parse → build → run. No maths."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:  # nothing is imported before `main` is there to be interrupted
    import argparse
    from collections.abc import Callable, Sequence

EXAMPLE = """examples:
  fedpact demo                              a minute: real data, six algorithms in seven runs, a report you can open
  fedpact run examples/breast_cancer.toml   any experiment; --set run.rounds=50 changes a key
  fedpact resume runs/…                     continue after a crash
  fedpact compare a.toml b.toml             rounds, bytes, gradients, seconds to the same target
  fedpact privacy plan --noise 1 --sampling poisson --rate 0.01 --rounds 300   what would this cost?
  fedpact federation run FILE --nodes 4     the same experiment over Flower: four nodes, TLS, keys
  fedpact show fedepm                       the algorithm box, its settings, what it needs of a problem
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; errors of the user's making end in one sentence and exit code 1 or 2."""
    try:
        options = _begin(arguments)
        from fedpact.core.errors import FedpactError
    except KeyboardInterrupt:
        return _interrupted()
    try:
        code = options.command(options)
        sys.stdout.flush()
        return code
    except FedpactError as error:
        print(f"fedpact: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt as stopped:
        return _interrupted(str(stopped))
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _interrupted(text: str = "") -> int:
    print(f"fedpact: {text or 'interrupted.'}", file=sys.stderr)
    return 130


def _begin(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The options, and what every command needs imported.

    Ctrl-C in here ends the process at once: nothing has begun, and an import that is cut may hide the interrupt.
    """
    import importlib
    import signal
    import threading

    def end(*_: Any) -> NoReturn:
        os.write(2, b"fedpact: interrupted.\n")
        os._exit(130)

    mine = threading.current_thread() is threading.main_thread()
    mine = mine and signal.getsignal(signal.SIGINT) is signal.default_int_handler
    before = signal.signal(signal.SIGINT, end) if mine else None
    try:
        options = parser().parse_args(arguments)
        importlib.import_module("fedpact.run")
        return options
    finally:
        if mine:
            signal.signal(signal.SIGINT, before)


def parser() -> argparse.ArgumentParser:
    """The command line. Sub-commands import what they need when they run, so that help is quick."""
    import argparse

    from fedpact import __version__
    from fedpact.cli.about import list_names, predict, show
    from fedpact.cli.compare import compare, demo, paper, tune, verify
    from fedpact.cli.federation import add_federation
    from fedpact.cli.privacy import add_privacy
    from fedpact.cli.runs import resume, run

    top = argparse.ArgumentParser(
        prog="fedpact",
        description="Federated learning by penalties, ADMM and constraints.",
        epilog=EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    top.add_argument("--version", action="version", version=f"fedpact {__version__}")
    commands = top.add_subparsers(title="commands", required=True, metavar="COMMAND")

    def add(name: str, command: Callable[[argparse.Namespace], int], text: str) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=text, description=text)
        sub.set_defaults(command=command)
        return sub

    sub = add("demo", demo, "Compare six algorithms in seven runs on real data; ends with a table and a report.")
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
    sub.add_argument(
        "--above", action="store_true", help="the target is reached from below (implied for accuracy, snr)"
    )
    changed = "change a key of the files"
    sub.add_argument("--set", dest="changes", action="append", default=[], metavar="KEY=VALUE", help=changed)
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
    sub.add_argument("model", help="model.bin of a run, or the run's folder")
    sub.add_argument("data", help="CSV file with the columns of training")
    sub.add_argument("--out", help="write to this file instead of the screen")
    _json(sub)

    sub = add("list", list_names, "List algorithms, problems, datasets and splits.")
    _json(sub)
    sub = add("show", show, "Print an algorithm's box, settings, presets and needs.")
    sub.add_argument("name", help="algorithm")
    _json(sub)

    sub = add("paper", paper, "Redraw a paper's figure or table: 'paper list', 'paper fedepm fig3 --trials 20'.")
    sub.add_argument("name", help="'list', or a paper")
    sub.add_argument("figure", nargs="?", help="figure or table")
    sub.add_argument("--trials", type=int, help="seeded trials (default: the experiment's own)")
    sub.add_argument("--out", help="folder (default: out/PAPER/FIGURE)")
    sub.add_argument("--cell", action="append", help="of fedadmm: fill this cell, such as mnist-100-iid (repeatable)")
    only = "of fedadmm: run this line only, as the table's column names it, such as FedADMM (repeatable)"
    sub.add_argument("--algorithm", action="append", help=only)
    sub.add_argument("--hours", type=float, help="of fedadmm: begin no run after so many hours; 0 draws what is there")
    _json(sub)

    sub = add("verify", verify, "Replay a recorded trajectory: 'verify golden FILE'; exits 1 where it differs.")
    sub.add_argument("what", choices=["golden"], help="what to verify")
    sub.add_argument("file", help="recording (.mat)")
    _json(sub)

    add_privacy(commands, _json)
    add_federation(commands, _json)
    return top


def _json(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("--json", action="store_true", help="print machine-readable results")
