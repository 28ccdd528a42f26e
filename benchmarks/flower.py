"""Seconds a round over Flower, beside Flower's own FedAvg in the same federation: a model of ten numbers, and CNN1.

    python benchmarks/flower.py [--rounds 3] [--nodes 4] [--times 2]

All on this machine, with TLS and keys, in turns: Flower's FedAvg and fedpact's on the same SuperLink and SuperNodes as
Flower has them, and fedpact's on those that `fedpact federation up` starts, whose messages' processes are forks and
which look for messages more often (`fedpact.flower.warm`). A round of Flower's strategy is train and evaluate; one of
fedpact is step and telemetry. Local work is next to nothing on both sides (one gradient on a few rows; the peer only
adds a number), so that this is what a round costs beyond it.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import tempfile
import time
from pathlib import Path

import numpy as np

from fedpact.core.history import History
from fedpact.flower.local import NAME, Local

PEER = """
import json, time
import numpy as np
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg

client = ClientApp()
server = ServerApp()


@client.train()
def train(message: Message, context: Context) -> Message:
    arrays = [a + 0.01 for a in message.content["arrays"].to_numpy_ndarrays()]
    metrics = MetricRecord({"num-examples": 1, "loss": 0.0})
    return Message(RecordDict({"arrays": ArrayRecord(arrays), "metrics": metrics}), reply_to=message)


@client.evaluate()
def evaluate(message: Message, context: Context) -> Message:
    return Message(RecordDict({"metrics": MetricRecord({"num-examples": 1, "loss": 0.0})}), reply_to=message)


@server.main()
def main(grid: Grid, context: Context) -> None:
    config = context.run_config
    shapes = json.loads(str(config["shapes"]))
    arrays = ArrayRecord([np.zeros(shape, str(config["dtype"])) for shape in shapes])
    ends = [time.time()]

    def noted(number: int, arrays: ArrayRecord) -> MetricRecord:
        ends.append(time.time())
        with open(str(config["times"]), "w") as file:
            json.dump(ends, file)
        return MetricRecord({"t": 0.0})

    nodes = int(config["nodes"])
    strategy = FedAvg(min_train_nodes=nodes, min_evaluate_nodes=nodes, min_available_nodes=nodes)
    strategy.start(grid, arrays, num_rounds=int(config["rounds"]) + 1, evaluate_fn=noted)
"""
PROJECT = """[project]
name = "peer"
version = "1.0.0"
description = "plain Flower"
license = {{ text = "Apache-2.0" }}
dependencies = []

[tool.flwr.app]
publisher = "peer"

[tool.flwr.app.components]
serverapp = "peer_app.app:server"
clientapp = "peer_app.app:client"

[tool.flwr.app.config]
{config}
"""
OURS = """
[data]
name = "{data}"

[split]
how = "iid"
clients = {nodes}

[problem]
{problem}

[algorithm]
name = "fedavg"
{algorithm}

[run]
rounds = {rounds}
telemetry = "all"
engine = {{ name = "flower" }}
"""
MODELS = {
    "ten numbers": {
        "shapes": [[9], [1]],
        "dtype": "float64",
        "data": "ten",
        "problem": 'name = "logistic"\nl2 = 1e-2\nintercept = true',
        "algorithm": "",
    },
    "CNN1": {
        "shapes": [[5, 5, 1, 32], [32], [5, 5, 32, 64], [64], [3136, 512], [512], [512, 10], [10]],
        "dtype": "float32",
        "data": "pixels",
        "problem": 'name = "cnn1"',
        "algorithm": "epochs = 1\nstep = 0.1",
    },
}
LOADERS = """
import numpy as np


def ten():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(40, 9))
    return x, (x[:, 0] > 0).astype(float)


def pixels():
    rng = np.random.default_rng(0)
    return rng.random((10, 784)), np.arange(10.0)
"""


def peer(federation: Local, folder: Path, model: dict, rounds: int) -> list[float]:
    """Seconds of each round of Flower's FedAvg."""
    app, times = folder / "peer", folder / "times.json"
    shutil.rmtree(app, ignore_errors=True)
    times.unlink(missing_ok=True)
    (app / "peer_app").mkdir(parents=True)
    (app / "peer_app" / "__init__.py").write_text("")
    (app / "peer_app" / "app.py").write_text(PEER)
    told = {
        "rounds": rounds,
        "nodes": len(federation.configs),
        "times": str(times),
        "shapes": json.dumps(model["shapes"]),
        "dtype": model["dtype"],
    }
    config = "\n".join(f"{k} = {json.dumps(v)}" for k, v in told.items())
    (app / "pyproject.toml").write_text(PROJECT.format(config=config))
    federation.flwr("run", str(app), NAME)
    until = time.monotonic() + 1800
    while not times.is_file() or len(json.loads(times.read_text())) < rounds + 3:
        if time.monotonic() > until:
            raise SystemExit(f"plain Flower did not end; see {federation.folder}/logs/superlink.log")
        time.sleep(1)
    ends = json.loads(times.read_text())
    return np.diff(ends)[2:].tolist()  # from the end of round 1 on: each holds an evaluation and a training


def ours(federation: Local, folder: Path, model: dict, rounds: int) -> list[float]:
    """Seconds of each round of fedpact's FedAvg."""
    file, run = folder / "ours.toml", folder / "run"
    shutil.rmtree(run, ignore_errors=True)
    text = OURS.format(**{**model, "nodes": len(federation.configs), "rounds": rounds + 1})
    file.write_text(text.replace(f'name = "{model["data"]}"', 'scale = "none"'))
    federation.finish(file, run, 1800, lambda line: None)
    seconds = History.read(run / "history.csv").column("seconds")
    return np.diff(seconds)[1:].tolist()  # without the first, which compiles


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--nodes", type=int, default=4)
    parser.add_argument("--times", type=int, default=2, help="how often each runs, in turns")
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    options = parser.parse_args()
    for name in options.models:
        model = MODELS[name]
        with tempfile.TemporaryDirectory() as place:
            folder = Path(place)
            (folder / "rows.py").write_text(LOADERS)
            os.environ["PYTHONPATH"] = f"{folder}:{os.environ.get('PYTHONPATH', '')}"
            config = {"loader": f"rows:{model['data']}"}
            nodes = {f"n{i}": dict(config) for i in range(options.nodes)}
            theirs, same, own = [], [], []
            for _ in range(options.times):
                with Local(folder / "plain", nodes, plain=True) as federation:
                    theirs += peer(federation, folder, model, options.rounds)
                    same += ours(federation, folder, model, options.rounds)
                with Local(folder / "own", nodes) as federation:
                    own += ours(federation, folder, model, options.rounds)
        a, b, c = (float(np.median(values)) for values in (theirs, same, own))
        print(f"{name}, {options.nodes} nodes, seconds a round: Flower's FedAvg {a:.1f}; fedpact's", end=" ")
        print(f"on the same processes {b:.1f}, {b / a:.2f} of it; on fedpact's own {c:.1f}, {c / a:.2f} of it")
        for told, values in (("Flower", theirs), ("fedpact on the same", same), ("on its own", own)):
            print(f"    {told}: {[round(v, 1) for v in values]}", flush=True)


if __name__ == "__main__":
    main()
