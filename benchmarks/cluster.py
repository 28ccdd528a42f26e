"""Local training of CNN1 on a Ray cluster of two workers, beside the engine `host` on the same cores.

    python benchmarks/cluster.py [--rounds 3]

Ten clients of 600 Fashion-MNIST rows each take part in a round, one epoch in batches of 50. Seconds are those of the
clients' steps (timing=True), first rounds left out, in turns, best of several. Wanted: at least 0.8 of this machine's
rate without Ray; `host` is what networks run on there, and faster with them than `local`.
"""

from __future__ import annotations

import argparse

import numpy as np

import fedpact as fp
from fedpact.engines import HostEngine, RayEngine


def seconds(engine: object, federation: object, rounds: int) -> float:
    run = fp.run(
        fp.FedAvg(step=0.1, epochs=1, batch=50),
        fp.CNN1(),
        federation,
        rounds=rounds + 1,
        participation=0.1,
        engine=engine,
        timing=True,
        evaluate_every=rounds + 1,
    )
    return float(np.min(run.history.column("local_seconds")[2:]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--times", type=int, default=2)
    options = parser.parse_args()
    federation = fp.data.fashion_mnist().split(clients=100, seed=0)
    found: dict[str, list[float]] = {"host": [], "ray": []}
    for _ in range(options.times):
        found["host"].append(seconds(HostEngine(at_once=1), federation, options.rounds))
        found["ray"].append(seconds(RayEngine(workers=2, threads=1), federation, options.rounds))
        print({name: [round(v, 2) for v in values] for name, values in found.items()}, flush=True)
    host, ray = min(found["host"]), min(found["ray"])
    rows = 6000
    print(f"host {rows / host:,.0f} rows a second, Ray with two workers {rows / ray:,.0f}: {host / ray:.2f} of it")


if __name__ == "__main__":
    main()
