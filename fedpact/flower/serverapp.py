"""The ServerApp: `flwr run` starts it with a run configuration.

experiment   the experiment's file, within the app's folder or anywhere on the server
folder       where the run is kept; one that is there is resumed
nodes        how many nodes take part
wait         seconds to wait for them (default 600)
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

from flwr.app import Context, Message, MessageType
from flwr.serverapp import Grid as FlowerGrid
from flwr.serverapp import ServerApp

from fedpact.core.errors import (
    ClientError,
    FedpactError,
    FolderHeld,
    InvalidArgument,
    OutputError,
    is_number,
    require,
    require_positive_int,
)
from fedpact.core.files import write_atomic
from fedpact.core.wire import Message as Question
from fedpact.core.wire import Refused
from fedpact.experiment import parts, read
from fedpact.flower.client import unwrapped, wrapped
from fedpact.flower.links import Grid, of_the_link
from fedpact.flower.server import federate, hello_of, numbered
from fedpact.folder import is_run

app = ServerApp()
log = logging.getLogger("fedpact")
#: Of how many nodes that are not ready the sentence says why; the log says it of all.
TOLD = 5


def _post(content: bytes, node: int, kind: str) -> Message:
    return Message(wrapped(content), dst_node_id=node, message_type=MessageType.TRAIN, group_id=kind)


def _open(reply: Message) -> bytes:
    if reply.has_error():
        raise LookupError(f"Flower's error {reply.error.code}: {reply.error.reason}")
    try:
        return unwrapped(reply.content)
    except Exception as error:  # whatever another app may answer
        raise Refused(f"reply must be a message of fedpact, got another ({type(error).__name__}).") from None


def _gather(grid: Any, link: Grid, values: Any, wanted: int, wait: float) -> list[Any]:
    """Wait until so many nodes are there, and learn who they are and what they tell of their data."""
    until = time.monotonic() + wait
    while len(ids := sorted(grid.get_node_ids())) < wanted:
        if time.monotonic() > until:
            raise ClientError(f"nodes must be {wanted}, got {len(ids)} after {wait:g} s. Start the others.")
        time.sleep(0.5)
    link.nodes, link.names = ids[:], [str(i) for i in ids]
    hello = Question("hello", {"experiment": dict(values)})
    answers = link.ask(dict.fromkeys(range(len(ids)), hello), wait, wanted, wait)
    said, why = {}, {k: link.why.get(k, "no answer") for k in range(len(ids)) if k not in answers}
    for k, one in answers.items():
        try:
            said[k] = hello_of(one, link.names[k])
        except Refused as refused:
            why[k] = str(refused)
    for k, reason in why.items():
        log.error("node %s: %s", link.names[k], reason)
    if len(said) < wanted:
        told = "".join(f" Node {link.names[k]}: {reason}" for k, reason in list(why.items())[:TOLD])
        raise ClientError(f"nodes must be {wanted}, got {len(said)} that are ready. Mend or start the others.{told}")
    kept, spare = sorted(said)[:wanted], sorted(said)[wanted:]
    if spare:
        names = ", ".join(f"{said[k].get('name')} ({link.names[k]})" for k in spare)
        log.warning("nodes of the run configuration are %d: %s more, left out: %s", wanted, len(spare), names)
    order = numbered([said[k] for k in kept])
    link.nodes = [ids[kept[k]] for k in order]
    link.names = [str(said[kept[k]]["name"]) for k in order]
    return [said[kept[k]].get("survey") for k in order]  # looked at where it is used


def _log_here() -> None:
    """fedpact's own lines into the run's log, which Flower shows."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s fedpact: %(message)s", "%H:%M:%S"))
    log.handlers, log.propagate = [handler], False
    log.setLevel(logging.INFO)


def _tied() -> None:
    """End with the process that has started this one: answers came through it, and what the folder keeps is whole.

    Flower interrupts such a server app once, as Ctrl-C does: it would first finish a round that nobody answers.
    """
    starter = os.getppid()

    def watch() -> None:
        while os.getppid() == starter:
            time.sleep(0.5)
        log.error("the SuperLink was lost, and the server app ends with it. Run it again: it is resumed.")
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _numbers(config: Any) -> tuple[int, float]:
    """How many nodes the run configuration asks for, and how long they are waited for."""
    for key in ("experiment", "nodes"):
        if key not in config:
            raise InvalidArgument(f"run configuration must have {key!r}, got none. Give it with --run-config.")
    nodes, wait = config["nodes"], config.get("wait", 600)
    require_positive_int("nodes of the run configuration", nodes)
    ok = is_number(wait) and wait > 0
    require(ok, "wait of the run configuration", "a number of seconds above 0", wait)
    return nodes, float(wait)


@app.main()
def main(grid: FlowerGrid, context: Context) -> None:
    """One run, to its end."""
    _log_here()
    _tied()
    config = context.run_config
    if "folder" in config:
        with contextlib.suppress(OSError):
            _word(config).unlink(missing_ok=True)  # of an earlier start
    try:
        wanted, wait = _numbers(config)
        values = read(str(config["experiment"]))
        parts(values)  # refused here, before anyone is waited for
        folder = Path(str(config.get("folder", "runs/flower")))
        link = Grid(grid, _post, _open)
        surveys = _gather(grid, link, values, wanted, wait)
        resume = folder.is_dir() and is_run(folder)
        run = federate(values, link, folder, resume, surveys)
        log.info("%s: %s; kept in %s", run.name, run.outcome, folder)
    except FolderHeld as error:  # most likely by another server app of the same run, which goes on
        log.error("%s", error)
        raise SystemExit(1) from None
    except FedpactError as error:
        _failed(config, str(error))
        raise SystemExit(1) from None
    except Exception as error:
        if not of_the_link(error):  # who has lost its SuperLink ends without a word, and the run is resumed
            told = f"{type(error).__name__}: {error}. A defect of fedpact or of the model; the log has the rest."
            _failed(config, told)
        raise


def _word(config: Any) -> Path:
    """Where it is said why a run has ended."""
    return Path(f"{config['folder']}.error")


def _failed(config: Any, sentence: str) -> None:
    """Leave word of why the run has ended, in the log and beside its folder."""
    log.error("%s", sentence)
    if "folder" not in config:
        return
    try:
        write_atomic(_word(config), f"{sentence}\n".encode())
    except OutputError as error:  # as on a full disk, which may be why the run has ended
        log.error("word of it could not be left: %s", error)
