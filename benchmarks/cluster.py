"""Local training of CNN1 on a Ray cluster of two workers, beside the engines `host` and `local` on the same cores.

    python benchmarks/cluster.py [--rounds 3]

Ten clients of 600 Fashion-MNIST rows each take part in a round, one epoch in batches of 50. Seconds are those of the
clients' steps (timing=True), first rounds left out, in turns, best of several. Wanted: at least 0.8 of this machine's
rate without Ray, that of the faster of the two.
"""

from __future__ import annotations

import argparse

import numpy as np

import fedpact as fp
from fedpact.engines import HostEngine, LocalEngine, RayEngine


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
    engines = {"local": LocalEngine(), "host": HostEngine(at_once=1), "ray": RayEngine(workers=2, threads=1)}
    found: dict[str, list[float]] = {name: [] for name in engines}
    for _ in range(options.times):
        for name, engine in engines.items():
            found[name].append(seconds(engine, federation, options.rounds))
        print({name: [round(v, 2) for v in values] for name, values in found.items()}, flush=True)
    best = {name: min(values) for name, values in found.items()}
    rates = ", ".join(f"{name} {6000 / value:,.0f}" for name, value in best.items())
    of = ", ".join(f"{best[name] / best['ray']:.2f} of {name}'s" for name in ("local", "host"))
    print(f"rows a second: {rates}; Ray's rate with two workers is {of}")


if __name__ == "__main__":
    main()
