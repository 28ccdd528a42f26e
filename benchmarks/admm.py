"""Inexact ADMM on Covertype: a round's cost against plain matrix–vector products, and the server's against m.

    FEDPACT_DATA=… python benchmarks/admm.py [--json]

(a) 100 clients, half of them selected, k0 = 5: seconds a round, without telemetry, next to the same number of plain JAX
    products A w and r A over the selected rows, timed in the same run, alternating, best of several.
(b) The server's step with 50 clients of 100, 1,000 and 10,000 selected: it must not grow with m.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import fedpact as fp
from fedpact.core.contract import Cohort

REPEATS, ROUNDS = 5, 16


def best(f: Callable[[], Any], repeats: int) -> float:
    """The least seconds of several calls, after one that compiles."""
    f()
    found = []
    for _ in range(repeats):
        begun = time.perf_counter()
        f()
        found.append(time.perf_counter() - begun)
    return min(found)


def products(federation: Any, count: int) -> Callable[[], Any]:
    """`count` gradients' worth of plain products over the rows of half of the clients."""
    rows = np.concatenate([federation.client(i)[0] for i in range(federation.clients // 2)])
    a, w = jnp.asarray(rows), jnp.full(rows.shape[1], 0.01)
    forward, back = jax.jit(lambda a, w: a @ w), jax.jit(lambda a, r: r @ a)

    def run() -> None:
        for _ in range(count):
            back(a, forward(a, w)).block_until_ready()

    return run


def round_cost(federation: Any, settings: Any) -> dict[str, float]:
    """Seconds a round and its gradients a selected client, next to as many plain products."""
    problem = fp.Logistic()
    options = {"participation": 0.5, "rounds": ROUNDS, "evaluate_every": ROUNDS + 1}
    done = fp.run(settings, problem, federation, **options)
    gradients = done.history.last("gradients") / (ROUNDS * federation.clients / 2)
    plain = products(federation, round(gradients))
    mine, theirs = [], []
    for _ in range(REPEATS):
        theirs.append(best(plain, 2))
        done = fp.run(settings, problem, federation, **options)
        mine.append(done.history.last("seconds") / ROUNDS)
    return {"round": min(mine), "products": min(theirs), "gradients": gradients, "ratio": min(mine) / min(theirs)}


def server_cost(clients: int, cohort: int = 50, features: int = 10_000) -> float:
    """Seconds of one server step for `cohort` uploads out of `clients`."""
    from fedpact.algorithms.inexact_admm import Hello, Upload
    from fedpact.core.vector import Vector

    algorithm = fp.InexactADMM().build(fp.Logistic(), clients, cohort / clients)
    zeros = Vector({"w": jnp.zeros(features)})
    hello = Hello(jnp.ones(2), Vector({"w": jnp.ones((2, features))}))
    server = jax.jit(algorithm.init)(zeros, hello)
    uploads = Upload(Vector({"w": jnp.ones((cohort, features))}))
    who = Cohort((jnp.arange(cohort, dtype=jnp.int32),), jnp.ones(cohort, bool))
    step = jax.jit(algorithm.server_step)
    return best(lambda: jax.block_until_ready(step(server, uploads, who)), 50)


def main() -> None:
    """Print both tables, or JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="machine-readable results")
    json_only = parser.parse_args().json
    federation = fp.data.covtype().split(clients=100, seed=0)
    kinds = {
        "paper": fp.InexactADMM(k0=5, audit=False),
        "theory": fp.InexactADMM.preset("theory", k0=5),
    }
    rounds = {name: round_cost(federation, settings) for name, settings in kinds.items()}
    servers = {m: server_cost(m) for m in (100, 1_000, 10_000)}
    if json_only:
        print(json.dumps({"rounds": rounds, "server": servers}))
        return
    for name, row in rounds.items():
        print(
            f"{name:8}  round {1e3 * row['round']:7.1f} ms, {row['gradients']:.1f} gradients; "
            f"plain products {1e3 * row['products']:7.1f} ms; ratio {row['ratio']:.2f}"
        )
    for m, seconds in servers.items():
        print(f"server step, 50 of {m:6,} clients: {1e3 * seconds:.3f} ms")


if __name__ == "__main__":
    main()
