"""The files that the operators of a real federation need: who gets what is said in its README."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path

from fedpact.core.errors import require
from fedpact.core.files import make_folder, write_atomic
from fedpact.flower.local import NAME, NO_INSTALL, make_certificates, make_node_key, write_app, write_connection

ENVIRONMENT = """export FLWR_TELEMETRY_ENABLED=0 FLWR_DISABLE_UPDATE_CHECK=1 FLWR_SUPEREXEC_TASK_POLL_INTERVAL=0.1
export FLWR_HOME="$PWD/flower"
"""
SERVER = """#!/bin/sh
# On the server, in this folder: start the SuperLink. It keeps what it must in superlink.db.
cd "$(dirname "$0")" || exit 1
{environment}exec flower-superlink --ssl-ca-certfile ca.pem --ssl-certfile server.pem --ssl-keyfile server.key \\
  --enable-supernode-auth --database superlink.db --host 0.0.0.0 --port {port} {no_install}
"""
RUN = """#!/bin/sh
# On the server, once the nodes are up: let their keys in, and run the experiment. A run that was cut is resumed.
cd "$(dirname "$0")" || exit 1
{environment}for key in nodes/*.pub; do flwr supernode register "$key" {name}; done
exec flwr run app {name} --stream
"""
NODE = """#!/bin/sh
# At {name}: start the node. CSV is its table; STATE is where it keeps its state, which must outlive the process.
cd "$(dirname "$0")" || exit 1
CSV="${{CSV:-$PWD/rows.csv}}"
STATE="${{STATE:-$PWD/state}}"
{environment}exec flower-supernode --superlink {host}:{port} --root-certificates ca.pem \\
  --auth-supernode-private-key {name}.key --node-config "name=\\"{name}\\" csv=\\"$CSV\\" state=\\"$STATE\\""
"""
README = """The files of a federation, by who gets them. docs/how-to-federate.md walks through it.

On the server ({host}): this folder without nodes/*.key and ca.key.
  server.sh   starts the SuperLink          run.sh   lets the nodes in and runs the experiment
{nodes}
ca.key signs the server's certificate. Nobody else needs it: keep it away from both, or delete it.
Keys (*.key) are for their owner alone. Send a node its own over a way that you trust; better, the operator of a node
makes its key there and sends NAME.pub only.
"""


def write_all(folder: Path, experiment: Path, host: str, port: int, names: Sequence[str]) -> list[Path]:
    """Certificates, keys, the app and scripts; what is there already is kept."""
    require(1 <= port <= 65535, "port", "from 1 to 65535", port)
    twice = sorted({name for name in names if names.count(name) > 1})
    require(not twice, "names of nodes", "distinct", twice)
    make_folder(folder)
    make_certificates(folder, [host, "localhost"] if host != "localhost" else ["localhost"])
    app = write_app(folder, "app/experiment.toml", "run", len(names))
    shutil.copyfile(experiment, app / "experiment.toml")
    write_connection(folder, f"{host}:{port}", "../ca.pem")
    scripts = {
        "server.sh": SERVER.format(environment=ENVIRONMENT, port=port, no_install=NO_INSTALL),
        "run.sh": RUN.format(environment=ENVIRONMENT, name=NAME),
    }
    for name in names:
        key = make_node_key(folder, name)
        own = folder / "nodes" / name
        make_folder(own)
        for source in (key, folder / "ca.pem"):
            shutil.copy2(source, own / source.name)
        text = NODE.format(name=name, host=host, port=port, environment=ENVIRONMENT)
        scripts[f"nodes/{name}/node.sh"] = text
    told = "\n".join(f"At {name}: nodes/{name}/ (its key, ca.pem, node.sh)." for name in names)
    write_atomic(folder / "README.txt", README.format(host=host, nodes=told).encode())
    for place, text in scripts.items():
        write_atomic(folder / place, text.encode())
        (folder / place).chmod(0o755)
    write_atomic(folder / "nodes.json", json.dumps(list(names)).encode())
    return sorted(path for path in folder.rglob("*") if path.is_file())
