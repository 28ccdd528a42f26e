"""The files that the operators of a real federation need: who gets what is said in its README."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

from fedpact.core.errors import require
from fedpact.core.files import make_folder, private_folder, write_atomic
from fedpact.flower.local import (
    CONNECTION,
    NAME,
    NO_INSTALL,
    SOON,
    check_name,
    make_certificates,
    make_node_key,
    write_app,
)

ENVIRONMENT = f"""umask 077  # what is kept here is for this user alone
export FLWR_TELEMETRY_ENABLED=0 FLWR_DISABLE_UPDATE_CHECK=1 {" ".join(map("=".join, SOON.items()))}
export FLWR_HOME="$PWD/flower"
"""
SERVER = """#!/bin/sh
# On the server, in this folder: start the SuperLink. It keeps what it must in superlink.db.
cd "$(dirname "$0")" || exit 1
{environment}exec flower-superlink --ssl-ca-certfile ca.pem --ssl-certfile server.pem --ssl-keyfile server.key \\
  --enable-supernode-auth --database superlink.db --host 0.0.0.0 --port {port} {no_install}
"""
RUN = """#!/bin/sh
# On the server: let the nodes' keys in, wait for them, and run the experiment. A run that was cut is resumed.
cd "$(dirname "$0")" || exit 1
{environment}mkdir -p "$FLWR_HOME"
AUTHORITY=$(printf %s "$PWD/ca.pem" | sed 's/[\\\\"]/\\\\&/g')  # flwr takes whole paths only, and the folder may move
cat > "$FLWR_HOME/config.toml" <<END
{connection}END
for key in nodes/*.pub; do
  TOLD=$(flwr supernode register "$key" {name} 2>&1) && echo "$key: $TOLD" && continue
  case "$TOLD" in
    *already*) echo "$key is registered already." ;;
    *) echo "$key must be registered, got: $TOLD
Is server.sh running? Mend what it says, and start run.sh again." >&2
      exit 1 ;;
  esac
done
exec flwr run app {name} --stream
"""
#: How a node's operator makes its key. With a passphrase a SuperNode could not read it.
KEYGEN = "ssh-keygen -t ecdsa -b 384 -N '' -f {name}.key"
#: Keys of a node's configuration that are arguments of its script: numbers.
ARGUMENTS = ("client", "delta", "epsilon", "threads")
#: Where nodes hand out their work, each on its own machine; nodes of one machine need one each.
OWN = 9094
NODE = """#!/bin/sh
# At {name}: start the node. CSV is its table, or LOADER a module:function that gives its rows, the module beside this
# file; STATE is where it keeps its state, which must outlive the process; PORT, on this machine alone, is where it
# hands out its work. Arguments are further keys of its configuration: ./node.sh epsilon=3.0 delta=1e-5 threads=2
# The server lets in no key that run.sh has not registered, and for a minute no node that was killed: it is tried again.
cd "$(dirname "$0")" || exit 1
STATE="${{STATE:-$PWD/state}}"
PORT="${{PORT:-{own}}}"
if [ -n "$CSV" ] && [ -n "$LOADER" ]; then
  echo "rows of the node must be from CSV or LOADER, got both. Leave one out." >&2
  exit 1
fi
CONFIG="name=\\"{name}\\" csv=\\"${{CSV:-$PWD/rows.csv}}\\" state=\\"$STATE\\""
[ -z "$LOADER" ] || CONFIG="name=\\"{name}\\" loader=\\"$LOADER\\" state=\\"$STATE\\""
for argument in "$@"; do
  case "$argument" in  # Flower would pass over what it cannot read
    *[!-+.0-9=E_a-z]*) ;;
    {known})
      CONFIG="$CONFIG $argument"
      continue ;;
  esac
  echo "arguments must be {keys} and a number, such as epsilon=3.0, got '$argument'. Correct it." >&2
  exit 1
done
{environment}# Messages' processes start in a moment with this; without it as Flower starts them.
WARM=$(python3 -P -m fedpact.flower.warm --commands "$STATE" 2> /dev/null) && PATH="$WARM:$PATH"
trap 'trap "" INT TERM HUP; kill $CHILD 2> /dev/null; wait $CHILD; exit 143' INT TERM HUP
while :; do
  flower-supernode --superlink {host}:{port} --host 127.0.0.1 --port "$PORT" --root-certificates ca.pem \\
    --auth-supernode-private-key {name}.key --node-config "$CONFIG" &
  CHILD=$!
  wait $CHILD && exit 0
  echo "{name} was not let in, or was lost. It is tried again in 5 s; the server's run.sh registers its key." >&2
  sleep 5 &
  CHILD=$!
  wait $CHILD
done
"""
README = """The files of a federation, by who gets them. docs/how-to-federate.md walks through it.

On the server ({host}): this folder.
  server.sh   starts the SuperLink          run.sh   lets the nodes in and runs the experiment
{nodes}
node.sh takes CSV=FILE, or LOADER=module:function with the module beside it, STATE=FOLDER and PORT=NUMBER from its
environment, and further keys of the node's configuration as arguments: ./node.sh epsilon=3.0 delta=1e-5 threads=2
Keys (*.key) are for their owner alone. Send a node its folder over a way that you trust, and once it has it
delete nodes/NAME/NAME.key here: nodes/NAME.pub is all the server needs. Better, the operator of a node makes its key
there, beside node.sh, and sends the public one, NAME.key.pub, which becomes nodes/NAME.pub here:
  {keygen}
ca.key signs the server's certificate. Nobody needs it any more: keep it away from both, or delete it.
"""


def write_all(folder: Path, experiment: Path, host: str, port: int, names: Sequence[str]) -> list[Path]:
    """Certificates, keys, the app and scripts; certificates and keys that are there already are kept."""
    require(1 <= port <= 65535, "port", "from 1 to 65535", port)
    plain = host and all(c.isascii() and (c.isalnum() or c in "-.:") for c in host)
    require(plain, "host", "a name or an address, without a port", host)
    for name in names:
        check_name(name)
    twice = sorted({name for name in names if names.count(name) > 1})
    require(not twice, "names of nodes", "distinct", twice)
    private_folder(folder)
    make_certificates(folder, list(dict.fromkeys([host, "localhost", "127.0.0.1"])))  # SuperLinks ask themselves too
    app = write_app(folder, "app/experiment.toml", "run", len(names))
    shutil.copyfile(experiment, app / "experiment.toml")
    connection = CONNECTION.format(address=f"localhost:{port}", authority='"$AUTHORITY"')
    scripts = {
        "server.sh": SERVER.format(environment=ENVIRONMENT, port=port, no_install=NO_INSTALL),
        "run.sh": RUN.format(environment=ENVIRONMENT, name=NAME, connection=connection),
    }
    for k, name in enumerate(names):
        own = folder / "nodes" / name
        make_folder(own)
        if not (folder / "nodes" / f"{name}.pub").is_file():  # whose private key is where it belongs
            make_node_key(folder, name, own / f"{name}.key")
        write_atomic(own / "ca.pem", (folder / "ca.pem").read_bytes())
        at = f"[{host}]" if ":" in host else host
        told = {
            "known": "|".join(f"{key}=[0-9]*" for key in ARGUMENTS),
            "keys": "=, ".join(ARGUMENTS[:-1]) + f"= or {ARGUMENTS[-1]}=",
        }
        text = NODE.format(name=name, host=at, port=port, own=OWN + k, environment=ENVIRONMENT, **told)
        scripts[f"nodes/{name}/node.sh"] = text
    nodes = "\n".join(f"At {name}: nodes/{name}/ (its key, ca.pem, node.sh)." for name in names)
    write_atomic(
        folder / "README.txt", README.format(host=host, nodes=nodes, keygen=KEYGEN.format(name="NAME")).encode()
    )
    for place, text in scripts.items():
        write_atomic(folder / place, text.encode(), mode=0o777)
    return sorted(path for path in folder.rglob("*") if path.is_file())
