"""The ServerApp: `flwr run` starts it with a run configuration.

experiment   the experiment's file, within the app's folder or anywhere on the server
folder       where the run is kept; one that is there is resumed
nodes        how many nodes take part
wait         seconds to wait for them (default 600)
"""

from __future__ import annotations

import logging
import sys
import time
from pathlib import Path
from typing import Any

from flwr.app import Context, Message, MessageType
from flwr.serverapp import Grid as FlowerGrid
from flwr.serverapp import ServerApp

from fedpact.core.errors import ClientError, FedpactError, InvalidArgument
from fedpact.core.files import write_atomic
from fedpact.core.wire import Message as Question
from fedpact.core.wire import Refused, usable
from fedpact.experiment import read
from fedpact.flower.client import unwrapped, wrapped
from fedpact.flower.links import Grid
from fedpact.flower.server import federate, numbered
from fedpact.folder import is_run

app = ServerApp()
log = logging.getLogger("fedpact")


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
    said = {}
    for k, one in answers.items():
        try:
            said[k] = usable(one).values
        except Refused as refused:
            log.error("node %s: %s", link.names[k], refused)
    if len(said) < wanted:
        raise ClientError(f"nodes must be {wanted}, got {len(said)} that are ready. Mend or start the others.")
    kept = sorted(said)[:wanted]
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


@app.main()
def main(grid: FlowerGrid, context: Context) -> None:
    """One run, to its end."""
    _log_here()
    config = context.run_config
    try:
        for key in ("experiment", "nodes"):
            if key not in config:
                raise InvalidArgument(f"run configuration must have {key!r}, got none. Give it with --run-config.")
        values = read(str(config["experiment"]))
        folder = Path(str(config.get("folder", "runs/flower")))
        link = Grid(grid, _post, _open)
        surveys = _gather(grid, link, values, int(config["nodes"]), float(config.get("wait", 600)))
        resume = folder.is_dir() and is_run(folder)
        run = federate(values, link, folder, resume, surveys)
        log.info("%s: %s; kept in %s", run.name, run.outcome, folder)
    except FedpactError as error:
        log.error("%s", error)
        _failed(config, str(error))
        raise SystemExit(1) from None
    except Exception as error:
        _failed(config, f"{type(error).__name__}: {error}. A defect of fedpact or of the model; the log has the rest.")
        raise


def _failed(config: Any, sentence: str) -> None:
    """Leave word of why the run has ended, beside its folder."""
    if "folder" in config:
        write_atomic(Path(f"{config['folder']}.error"), f"{sentence}\n".encode())
