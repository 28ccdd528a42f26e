"""Gradients clipped row by row next to gradients as they are, in one run.

    python benchmarks/clipping.py [--repeats 300] [--json]

Microseconds of one compiled call on made-up rows in float32, the two sides in turns, the best of several: the sum of
clipped gradients (with the count of refused rows) next to `gradient`; the same with every row's own gradient formed
(`clipped_rows`), which is what a problem without closed form gets. Required: logistic regression at most 2 times,
TwoLayer at most 4 times. CNN1 has no closed form and is only reported.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import fedpact as fp
from fedpact.core.contract import Batch
from fedpact.problems.clipping import clipped_rows, clipped_sum

NETWORK = fp.TwoLayer(hidden=128)
CASES: dict[str, tuple[Any, int, int, float | None]] = {  # problem, rows, features, most times
    "logistic, 3000 x 100": (fp.Logistic(), 3000, 100, 2.0),
    "logistic, 600 x 784": (fp.Logistic(), 600, 784, 2.0),
    "softmax 784-10, 600 rows": (fp.Softmax(), 600, 784, None),
    "TwoLayer 784-128-10, 100 rows": (NETWORK, 100, 784, 4.0),
    "TwoLayer 784-128-10, 600 rows": (NETWORK, 600, 784, 4.0),
    "CNN1, 10 rows": (fp.CNN1(), 10, 784, None),
}
CLIP = 1.0


def batch_of(problem: Any, rows: int, features: int) -> Batch:
    rng = np.random.default_rng(0)
    pixels = isinstance(problem, fp.problems.network.Classifier)
    x = rng.integers(0, 256, (rows, features)).astype(np.uint8) if pixels else rng.normal(size=(rows, features))
    y = rng.integers(0, 10 if pixels else 2, rows)
    single = lambda a: jnp.asarray(a, jnp.float32)
    return Batch(jnp.asarray(x) if pixels else single(x), single(y), jnp.ones(rows, jnp.float32), jnp.asarray(0))


def sides(problem: Any, features: int) -> dict[str, Any]:
    return {
        "gradient": problem.gradient,
        "clipped": lambda w, batch: clipped_sum(problem, w, batch, CLIP)[:2],
        "clipped, L1": lambda w, batch: clipped_sum(problem, w, batch, CLIP, norm=1)[:2],
        "value and gradient": problem.value_and_gradient,
        "clipped with loss": lambda w, batch: clipped_sum(problem, w, batch, CLIP),
        "row by row": lambda w, batch: clipped_rows(problem, w, batch, CLIP, 2)[:2],
    }


def measure(problem: Any, rows: int, features: int, most: float | None, repeats: int) -> dict[str, Any]:
    batch = batch_of(problem, rows, features)
    w = problem.init(features, jnp.float32, jax.random.key(0))
    calls = {name: jax.jit(f) for name, f in sides(problem, features).items()}
    if not hasattr(problem, "clipped"):  # all is row by row
        calls = {name: calls[name] for name in ("gradient", "row by row")}
    for f in calls.values():
        jax.block_until_ready(f(w, batch))
    least = dict.fromkeys(calls, math.inf)
    for k in range(repeats):
        for name, f in calls.items():
            if name == "row by row" and k % 10:  # it is slow
                continue
            begun = time.perf_counter()
            jax.block_until_ready(f(w, batch))
            least[name] = min(least[name], time.perf_counter() - begun)
    of = lambda name, other: least[name] / least[other] if name in least else None
    ratios = {
        "clipped": of("clipped", "gradient"),
        "L1": of("clipped, L1", "gradient"),
        "with loss": of("clipped with loss", "value and gradient"),
        "row by row": of("row by row", "gradient"),
    }
    return {"us": {name: 1e6 * s for name, s in least.items()}, "times": ratios, "at_most": most}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=300)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    load = os.getloadavg()[0]
    found = {name: measure(*case, given.repeats) for name, case in CASES.items()}
    if given.json:
        print(json.dumps({"load": load, **found}, indent=2))
        return
    print(f"load {load:.1f} of {os.cpu_count()} cores before the run")
    for name, result in found.items():
        wanted = "" if result["at_most"] is None else f"   wanted: at most {result['at_most']:g} times"
        print(f"\n{name}{wanted}")
        print("  us     " + "   ".join(f"{side} {us:.0f}" for side, us in result["us"].items()))
        print("  times  " + "   ".join(f"{side} {r:.2f}" for side, r in result["times"].items() if r is not None))


if __name__ == "__main__":
    main()
