"""Local training of CNN1, and a round of FedAvg, next to PyTorch, Flower's simulation and pfl on the same cores.

    python -m venv peers && peers/bin/pip install -r benchmarks/requirements-deep.txt && peers/bin/pip install -e .
    FEDPACT_DATA=… peers/bin/python benchmarks/deep.py [step] [round] [memory] [--json]

(In this order: pfl asks for an older dp-accounting than fedpact, which its averaging does without; pip warns of it.)

step    samples a second of local SGD at batch 10 and 200: fedpact's compiled loop, fedpact with a PyTorch module (a
        client on all cores, and as rounds have them: a client on each core), and PyTorch's own loop in the same two
        ways, in turns, best of several; and the rate of a plain float32 product of conv2's shape.
round   one FedAvg round of 100 clients on Fashion-MNIST (10 of them, one epoch, batch 50): fedpact, fedpact with a
        PyTorch module, Flower, pfl, and the same clients in a bare PyTorch loop.
memory  the largest resident memory of 1,000 clients × CNN1 × 13 rounds of 10 %, in memory (below 12 GB is wanted) and
        spilled to disk (below 4 GB), in JAX and as a PyTorch module.

Results are printed as they come. Rounds and steps are for an idle machine; memory is the same on a busy one.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np

THREADS = len(os.sched_getaffinity(0))
FLOPS = {"conv1": 2 * 784 * 25 * 32, "conv2": 2 * 196 * 800 * 64, "dense": 2 * (3136 * 512 + 512 * 10)}
#: Products of a training step, per sample: forward, by the weights, and by the inputs (not for the first layer).
STEP_FLOPS = 2 * FLOPS["conv1"] + 3 * FLOPS["conv2"] + 3 * FLOPS["dense"]


def best(runs: dict[str, Callable[[], Any]], repeats: int) -> dict[str, float]:
    """The least seconds of each, taken in turns after one call that warms up."""
    found: dict[str, list[float]] = {name: [] for name in runs}
    for f in runs.values():
        f()
    for _ in range(repeats):
        for name, f in runs.items():
            begun = time.perf_counter()
            f()
            found[name].append(time.perf_counter() - begun)
    return {name: min(times) for name, times in found.items()}


def torch_cnn() -> Any:
    from torch import nn

    return nn.Sequential(
        nn.Conv2d(1, 32, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(32, 64, 5, padding=2), nn.ReLU(),
        nn.MaxPool2d(2), nn.Flatten(), nn.Linear(3136, 512), nn.ReLU(), nn.Linear(512, 10),
    )  # fmt: skip


def torch_training(x: np.ndarray, y: np.ndarray, batch: int, cores: int = THREADS) -> Callable[[], None]:
    import torch

    model = torch_cnn()
    optimiser = torch.optim.SGD(model.parameters(), lr=0.01)
    images = torch.from_numpy((x.reshape(-1, 1, 28, 28).astype(np.float32) / 255 - 0.1307) / 0.3081)
    labels = torch.from_numpy(y.astype(np.int64))

    def run() -> None:
        torch.set_num_threads(cores)
        for begin in range(0, len(y), batch):
            rows = slice(begin, begin + batch)
            optimiser.zero_grad()
            torch.nn.functional.cross_entropy(model(images[rows]), labels[rows]).backward()
            optimiser.step()

    return run


def torch_clients(x: np.ndarray, y: np.ndarray, batch: int) -> Callable[[], None]:
    """PyTorch's loop for a client on each core."""
    runs = [torch_training(*part, batch, cores=1) for part in halves(x, y)]

    def run() -> None:
        threads = [threading.Thread(target=one) for one in runs]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    return run


def halves(x: np.ndarray, y: np.ndarray) -> list[tuple[np.ndarray, np.ndarray]]:
    """The rows of as many clients as there are cores."""
    return list(zip(np.array_split(x, THREADS), np.array_split(y, THREADS), strict=True))


def own_training(x: np.ndarray, y: np.ndarray, batch: int) -> Callable[[], None]:
    import jax
    import jax.numpy as jnp

    import fedpact as fp
    from fedpact.core.contract import Batch, Oracle
    from fedpact.problems.training import Plan, train

    problem = fp.CNN1()
    w = problem.init(784, jnp.float32, jax.random.key(0))
    rows = Batch(jnp.asarray(x), jnp.asarray(y, jnp.float32), jnp.ones(len(y), jnp.float32), jnp.asarray(0))
    program = jax.jit(lambda w, rows, key: train(Oracle(problem), w, rows, key, Plan(0.01, 0.0, batch), 1).w)
    return lambda: jax.block_until_ready(program(w, rows, jax.random.key(1)))


def own_torch_training(x: np.ndarray, y: np.ndarray, batch: int, clients: bool = False) -> Callable[[], Any]:
    """fedpact with the network handed in as a PyTorch module; `clients`: a client on each core."""
    import jax
    import jax.numpy as jnp
    import torch

    from fedpact.core.contract import Batch
    from fedpact.problems.torch import TorchNetwork
    from fedpact.problems.training import Plan, train

    problem = TorchNetwork(torch_cnn, shape=(1, 28, 28))
    w = problem.init(784, jnp.float32, jax.random.key(0))
    rows = lambda x, y: Batch(x, y.astype(np.float32), np.ones(len(y), np.float32), np.asarray(0))
    one = lambda part: train(problem.oracle, w, rows(*part), jax.random.key(1), Plan(0.01, 0.0, batch), 1).w

    def run() -> None:
        torch.set_num_threads(THREADS)
        if clients:
            list(problem.side_by_side(one, halves(x, y), THREADS))
        else:
            one((x, y))

    return run


def product_rate() -> float:
    """Floating point operations a second of a plain product of conv2's shape at batch 200."""
    import jax
    import jax.numpy as jnp

    a, b = jnp.ones((200 * 196, 800), jnp.float32), jnp.ones((800, 64), jnp.float32)
    product = jax.jit(lambda a, b: a @ b)
    spent = best({"product": lambda: product(a, b).block_until_ready()}, 20)["product"]
    return 2 * 200 * 196 * 800 * 64 / spent


def step(repeats: int) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    found: dict[str, Any] = {"product_gflops": product_rate() / 1e9}
    for batch, steps in ((10, 60), (200, 6)):
        x = rng.integers(0, 256, (batch * steps, 784), dtype=np.uint8)
        y = rng.integers(0, 10, batch * steps)
        sides = {
            "fedpact": own_training(x, y, batch),
            "module": own_torch_training(x, y, batch),
            "module_clients": own_torch_training(x, y, batch, clients=True),
            "torch": torch_training(x, y, batch),
            "torch_clients": torch_clients(x, y, batch),
        }
        spent = best(sides, repeats)
        rate = {name: batch * steps / seconds for name, seconds in spent.items()}
        ms = {f"{name}_ms": 1e3 * seconds / steps for name, seconds in spent.items()}
        mine = ("fedpact", "module", "module_clients")
        ratios = {f"{name}_of_torch": rate[name] / rate["torch"] for name in mine}
        ratios["module_clients_of_torch_clients"] = rate["module_clients"] / rate["torch_clients"]
        shares = {f"{name}_of_product_rate": rate[name] * STEP_FLOPS / (found["product_gflops"] * 1e9) for name in mine}
        found[f"batch {batch}"] = ms | ratios | shares
    found["product_gflops_after"] = product_rate() / 1e9
    return found


# One round of FedAvg

CLIENTS, CHOSEN, BATCH, RATE = 100, 10, 50, 0.1
TURNS = 3


def fashion() -> tuple[Any, list[np.ndarray]]:
    import fedpact as fp

    dataset = fp.data.fashion_mnist()
    return dataset, [np.asarray(r) for r in dataset.split(CLIENTS, seed=0).rows]


def own_round(rounds: int) -> float:
    import fedpact as fp

    return _own_round(fp.CNN1(), rounds)


def module_round(rounds: int) -> float:
    """fedpact with the network handed in as a PyTorch module."""
    from fedpact.problems.torch import TorchNetwork

    return _own_round(TorchNetwork(torch_cnn, shape=(1, 28, 28)), rounds)


def _own_round(problem: Any, rounds: int) -> float:
    import fedpact as fp

    federation = fp.data.fashion_mnist().split(CLIENTS, seed=0)
    settings = fp.FedAvg(epochs=1, batch=BATCH, step=RATE)
    options = {"participation": CHOSEN / CLIENTS, "evaluate_every": 10**6, "seed": 0}
    done = fp.run(settings, problem, federation, rounds=rounds + 1, timing=True, **options)
    return float(np.min(np.diff(done.history.column("seconds")[1:])))


def _torch_client(model: Any, images: Any, labels: Any) -> None:
    import torch

    optimiser = torch.optim.SGD(model.parameters(), lr=RATE)
    order = torch.randperm(len(labels))
    for rows in order.split(BATCH):
        optimiser.zero_grad()
        torch.nn.functional.cross_entropy(model(images[rows]), labels[rows]).backward()
        optimiser.step()


def _torch_data() -> list[tuple[Any, Any]]:
    import torch

    dataset, parts = fashion()
    out = []
    for rows in parts:
        images = (dataset.x[rows].reshape(-1, 1, 28, 28).astype(np.float32) / 255 - 0.1307) / 0.3081
        out.append((torch.from_numpy(images), torch.from_numpy(dataset.y[rows].astype(np.int64))))
    return out


def bare_round(rounds: int) -> float:
    """The same clients in a plain PyTorch loop."""
    import torch

    torch.set_num_threads(THREADS)
    data, model = _torch_data(), torch_cnn()
    spent = []
    for t in range(rounds + 1):
        begun = time.perf_counter()
        start = {k: v.clone() for k, v in model.state_dict().items()}
        total = {k: torch.zeros_like(v) for k, v in start.items()}
        for i in range(CHOSEN):
            model.load_state_dict(start)
            _torch_client(model, *data[(t * CHOSEN + i) % CLIENTS])
            for k, v in model.state_dict().items():
                total[k] += v / CHOSEN
        model.load_state_dict(total)
        spent.append(time.perf_counter() - begun)
    return min(spent[1:])


def flower_round(rounds: int) -> float:
    """Flower's simulation: one actor per core, the clients' rows in memory."""
    os.environ |= {
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "RAY_DISABLE_DOCKER_CPU_WARNING": "1",
    }
    from flwr.client import ClientApp, NumPyClient
    from flwr.common import ndarrays_to_parameters
    from flwr.server import ServerApp, ServerAppComponents, ServerConfig
    from flwr.server.strategy import FedAvg
    from flwr.simulation import run_simulation

    stamps: list[float] = []

    def client_fn(context: Any) -> Any:
        import torch

        torch.set_num_threads(1)
        cache = globals().setdefault("_flower_data", {})
        if not cache:
            cache["data"] = _torch_data()
        model = torch_cnn()

        class One(NumPyClient):
            def fit(self, parameters: Any, config: Any) -> Any:
                names = model.state_dict().keys()
                model.load_state_dict({k: torch.from_numpy(v) for k, v in zip(names, parameters, strict=True)})
                _torch_client(model, *cache["data"][int(context.node_config["partition-id"])])
                return [v.numpy() for v in model.state_dict().values()], 600, {}

        return One().to_client()

    class Clocked(FedAvg):
        def configure_fit(self, *args: Any, **kwargs: Any) -> Any:
            stamps.append(time.perf_counter())
            return super().configure_fit(*args, **kwargs)

        def aggregate_fit(self, *args: Any, **kwargs: Any) -> Any:
            out = super().aggregate_fit(*args, **kwargs)
            stamps.append(time.perf_counter())
            return out

    def server_fn(context: Any) -> Any:
        initial = ndarrays_to_parameters([v.numpy() for v in torch_cnn().state_dict().values()])
        strategy = Clocked(
            fraction_fit=CHOSEN / CLIENTS, fraction_evaluate=0.0, min_fit_clients=CHOSEN, initial_parameters=initial
        )
        return ServerAppComponents(strategy=strategy, config=ServerConfig(num_rounds=rounds + 1))

    run_simulation(
        ServerApp(server_fn=server_fn),
        ClientApp(client_fn=client_fn),
        num_supernodes=CLIENTS,
        backend_config={"client_resources": {"num_cpus": 1, "num_gpus": 0.0}},
    )
    times = [b - a for a, b in zip(stamps[::2], stamps[1::2], strict=True)]
    return min(times[1:])


def pfl_round(rounds: int) -> float:
    """pfl's FedAvg, in its one process."""
    import torch
    from pfl.aggregate.simulate import SimulatedBackend
    from pfl.algorithm.base import NNAlgorithmParams
    from pfl.algorithm.federated_averaging import FederatedAveraging
    from pfl.callback.base import TrainingProcessCallback
    from pfl.data.dataset import Dataset
    from pfl.data.federated_dataset import FederatedDataset
    from pfl.data.sampling import get_user_sampler
    from pfl.hyperparam import NNTrainHyperParams
    from pfl.metrics import Metrics
    from pfl.model.pytorch import PyTorchModel

    torch.set_num_threads(THREADS)
    data = _torch_data()

    class Module(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = torch_cnn()

        def forward(self, x: Any) -> Any:
            return self.layers(x)

        def loss(self, x: Any, y: Any, eval: bool = False) -> Any:
            return torch.nn.functional.cross_entropy(self(x), y)

        def metrics(self, x: Any, y: Any) -> dict[str, Any]:
            return {}

    sampler = get_user_sampler("random", list(range(CLIENTS)))
    federated = FederatedDataset(lambda i: Dataset(raw_data=list(data[i])), sampler)
    module = Module()
    optimiser = torch.optim.SGD(module.parameters(), lr=1.0)
    model = PyTorchModel(module, local_optimizer_create=torch.optim.SGD, central_optimizer=optimiser)
    stamps: list[float] = []

    class Clock(TrainingProcessCallback):
        def after_central_iteration(self, *args: Any, **kwargs: Any) -> Any:
            stamps.append(time.perf_counter())
            return False, Metrics()

    params = NNAlgorithmParams(
        central_num_iterations=rounds + 2, evaluation_frequency=10**6, train_cohort_size=CHOSEN, val_cohort_size=0
    )
    local = NNTrainHyperParams(local_num_epochs=1, local_learning_rate=RATE, local_batch_size=BATCH)
    FederatedAveraging().run(params, SimulatedBackend(federated, None), model, local, callbacks=[Clock()])
    return float(np.min(np.diff(stamps)))


PEERS = {
    "fedpact": own_round,
    "fedpact module": module_round,
    "torch loop": bare_round,
    "flower": flower_round,
    "pfl": pfl_round,
}


def one_round(repeats: int) -> dict[str, Any]:
    """Each in a process of its own, in turns, best of several rounds; how many times as long the peers take."""
    found: dict[str, Any] = {}
    for _ in range(TURNS):
        for name in PEERS:
            told = subprocess.run(
                [sys.executable, __file__, "--peer", name, "--repeats", str(repeats)],
                capture_output=True, text=True, timeout=900,
            )  # fmt: skip
            lines = [line for line in told.stdout.splitlines() if line.startswith("seconds ")]
            if not lines:
                raise SystemExit(f"{name}: no result\n{told.stderr[-2000:]}")
            found.setdefault(name, []).append(float(lines[-1].split()[1]))
    least = {name: min(times) for name, times in found.items()}
    mine = ("fedpact", "fedpact module")
    ratios = {f"{peer} / {own}": least[peer] / least[own] for own in mine for peer in PEERS if peer not in mine}
    return {f"{name}, s": times for name, times in found.items()} | ratios


# Memory


def memory_run(spill: bool, module: bool) -> float:
    """Resident GB at the highest, of 13 rounds of 100 clients; training is one step, which holds as much."""
    import fedpact as fp

    federation = fp.data.mnist().split(1000, seed=0)
    settings = fp.FedADMM.preset("printed", epochs=1, batch=None, vary=False)
    with tempfile.TemporaryDirectory() as folder:
        engine = fp.HostEngine(at_once=None if module else 1, spill=folder if spill else False)
        network = fp.TorchCNN1() if module else fp.CNN1()
        fp.run(settings, network, federation, participation=0.1, rounds=13, engine=engine, evaluate_every=13)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9


def memory() -> dict[str, Any]:
    found = {}
    for kind in ("fedpact", "module"):
        for place, spill in (("in_memory", "0"), ("spilled", "1")):
            command = [sys.executable, __file__, "--memory", spill, kind]
            told = subprocess.run(command, capture_output=True, text=True, check=True)
            found[f"{kind}_{place}_gb"] = float(told.stdout.split()[-1])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="*", choices=["step", "round", "memory", []])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--peer", choices=PEERS)
    parser.add_argument("--memory", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.peer:
        print("seconds", PEERS[options.peer](options.repeats))
        return
    if options.memory:
        spill, kind = options.memory
        print(memory_run(spill == "1", kind == "module"))
        return
    jobs = {"step": lambda: step(options.repeats), "round": lambda: one_round(3), "memory": memory}
    for name in options.what or jobs:
        values = jobs[name]()
        if options.json:
            print(json.dumps({name: values}), flush=True)
            continue
        print(name)
        for key, value in values.items():
            shown = value if isinstance(value, dict) else {"": value}
            each = (f"{k} {', '.join(f'{v:.3g}' for v in np.atleast_1d(many))}" for k, many in shown.items())
            print(f"  {key:<22}" + "  ".join(each), flush=True)


if __name__ == "__main__":
    main()
