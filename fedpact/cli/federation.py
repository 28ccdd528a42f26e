"""`fedpact federation`: a federation over Flower, on this machine or on many."""

from __future__ import annotations

import argparse
import shlex
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from fedpact.core.errors import InvalidArgument, is_count, is_number, require
from fedpact.core.files import json_text

ABOUT = "A federation over Flower: on this machine (up, run), or the files of a real one (init)."
#: Nodes where neither --nodes nor the experiment says how many; and how many are started unasked. Each is processes.
USUAL, UNASKED = 4, 16


def add_federation(commands: Any, add_json: Callable[[argparse.ArgumentParser], None]) -> None:
    """The sub-commands `federation up`, `run` and `init`."""
    top = commands.add_parser("federation", help=ABOUT, description=ABOUT)
    add_json(top)
    parts = top.add_subparsers(title="commands", required=True, metavar="COMMAND", help="up, run or init")

    def add(name: str, command: Callable[[argparse.Namespace], int], text: str) -> argparse.ArgumentParser:
        sub = parts.add_parser(name, help=text, description=text)
        sub.set_defaults(command=command)
        return sub

    def nodes(sub: argparse.ArgumentParser) -> None:
        sub.add_argument("--nodes", type=int, help="nodes, each a part of the data (default: [split] clients, else 4)")
        sub.add_argument("--csv", action="append", default=[], metavar="NAME=FILE", help="a node with this file")
        sub.add_argument("--folder", default="federation", help="keys, logs and states (default: %(default)s)")

    sub = add("up", up, "Start a SuperLink and nodes on this machine, with TLS and keys, until Ctrl-C.")
    sub.add_argument("file", nargs="?", help="experiment file that the printed flwr run is of")
    nodes(sub)
    _json(sub)

    sub = add("run", run, "Start a federation on this machine, run an experiment over it to its end, and stop it.")
    sub.add_argument("file", help="experiment file")
    nodes(sub)
    sub.add_argument("--out", help="folder of the run (default: FOLDER/run); one that is there is resumed")
    sub.add_argument("--hours", type=float, default=24.0, help="give up after so long (default: %(default)s)")
    _json(sub)

    sub = add("init", init, "Write the certificates, keys and scripts that the operators of a real federation need.")
    sub.add_argument("file", help="experiment file")
    sub.add_argument("--host", required=True, help="name or address of the server, as nodes reach it")
    sub.add_argument("--port", type=int, default=8000, help="the server's port (default: %(default)s)")
    sub.add_argument("--node", action="append", required=True, metavar="NAME", help="a node (repeatable)")
    sub.add_argument("--folder", default="federation", help="where to write (default: %(default)s)")
    _json(sub)


def _json(sub: argparse.ArgumentParser) -> None:
    kept = argparse.SUPPRESS  # a default would undo 'federation --json run'
    sub.add_argument("--json", action="store_true", default=kept, help="print machine-readable results")


def _configs(options: argparse.Namespace, values: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The nodes' configurations by name, from --nodes or --csv, or as many as the experiment has clients."""
    from fedpact.flower.local import check_name

    given = {}
    for text in options.csv:
        name, equals, path = text.partition("=")
        if not equals or not name or not path:
            raise InvalidArgument(f"--csv must be NAME=FILE, got {text!r}. Such as --csv lab=lab.csv")
        file = Path(path)
        require(file.is_file(), f"file of node {name!r}", "a CSV file that exists", path)
        check_name(name)
        given[name] = {"csv": str(file.resolve())}
    if given:
        right = options.nodes in (None, len(given))
        require(right, "--nodes", f"{len(given)}, as --csv says, or left out", options.nodes)
        return given
    count = _unasked(values) if options.nodes is None else options.nodes
    require(count >= 1, "--nodes", "at least 1", count)
    return {f"node-{i}": {"client": i} for i in range(count)}


def _unasked(values: Mapping[str, Any]) -> int:
    """How many nodes where --nodes does not say it: a typing slip in a file is not to start hundreds of processes."""
    clients = values.get("split", {}).get("clients")
    if not is_count(clients, 1):  # what is wrong with it is told by who reads it
        return USUAL
    hint = f"Each is a few processes on this machine: say --nodes {clients} if it can bear them, or have fewer clients."
    require(clients <= UNASKED, "[split] clients", f"at most {UNASKED} without --nodes", clients, hint=hint)
    return int(clients)


def _checked(options: argparse.Namespace, out: Path | None = None) -> dict[str, dict[str, Any]]:
    """The nodes' configurations; what a run of the experiment over them would refuse is refused here."""
    from fedpact.core.errors import the_extra
    from fedpact.experiment import parts, read

    values = {} if options.file is None else read(options.file)
    if options.file is None:
        return _configs(options, values)
    parts(values)
    configs = _configs(options, values)
    the_extra("flwr", "flower")
    from fedpact.flower.rehearsal import rehearse

    rehearse(values, configs, out)
    return configs


def _ends_whole() -> None:
    """SIGTERM and a terminal that is closed (SIGHUP) end the processes too, as Ctrl-C does; once, not in the middle."""
    if threading.current_thread() is not threading.main_thread():
        return
    heard = [s for s in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(s) != signal.SIG_IGN]  # nohup ignores it

    def end(*_: Any) -> None:
        for one in heard:
            signal.signal(one, signal.SIG_IGN)
        raise KeyboardInterrupt("ended.")

    for one in heard:
        signal.signal(one, end)


def up(options: argparse.Namespace) -> int:
    """`fedpact federation up`."""
    from fedpact.flower.local import Local

    configs = _checked(options)
    _ends_whole()
    with Local(options.folder, configs) as federation:
        told = {
            "address": federation.address,
            "nodes": list(federation.configs),
            "logs": f"{options.folder}/logs",
            "run": _flwr_run(federation, options.file),
        }
        lines = [
            f"SuperLink at {told['address']}, nodes: {', '.join(federation.configs)}; logs in {told['logs']}",
            f"  {told['run']}",
            "Ctrl-C ends them all.",
        ]
        print(json_text(told) if options.json else "\n".join(lines), flush=True)
        while True:
            time.sleep(1)
            for name in federation.mend():
                print(f"{name} was lost and started again", file=sys.stderr, flush=True)


def _flwr_run(federation: Any, file: str | None) -> str:
    """Write the app; the command that runs it, which without an experiment's file has a blank for its path."""
    from fedpact.flower.local import NAME, write_app

    folder = federation.folder
    path = "FILE" if file is None else str(Path(file).resolve())
    app = write_app(folder, path, str(folder / "run"), len(federation.configs))
    blank = ["--run-config", 'experiment="FILE"'] if file is None else []
    command = shlex.join(["flwr", "run", str(app), NAME, "--stream", *blank])
    return f"FLWR_HOME={shlex.quote(str(folder / 'flower'))} {command}"


def run(options: argparse.Namespace) -> int:
    """`fedpact federation run FILE`."""
    from fedpact.flower.local import Local
    from fedpact.run import Run

    hours, hint = options.hours, "It is how long the run may take."
    require(is_number(hours) and hours > 0, "--hours", "a number above 0", hours, hint=hint)
    folder = Path(options.folder)
    out = Path(options.out) if options.out else folder / "run"
    configs = _checked(options, out)
    _ends_whole()
    say: Callable[[str], None] = lambda text: print(text, file=sys.stderr, flush=True)
    with Local(folder, configs) as federation:
        say(f"{len(federation.configs)} nodes at {federation.address}; logs in {folder}/logs")
        federation.finish(Path(options.file), out, hours * 3600, say)
    result = Run.load(out)
    print(json_text(result.summary) if options.json else f"{result!r}\nkept in {out}")
    return 0


def init(options: argparse.Namespace) -> int:
    """`fedpact federation init FILE --host HOST --node NAME …`."""
    from fedpact.experiment import parts, read
    from fedpact.flower.operators import write_all

    parts(read(options.file))
    written = write_all(Path(options.folder), Path(options.file), options.host, options.port, options.node)
    print(json_text([str(path) for path in written]) if options.json else "\n".join(map(str, written)))
    return 0
