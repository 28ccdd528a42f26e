"""A round of SSCA next to a round of SGD at equal batch, and the convex problem next to a conic solver.

    FEDPACT_DATA=… python benchmarks/ssca.py [--json]        (needs clarabel, a dev dependency)

rounds   MNIST, the paper's network (d = 101,632), 10 clients: milliseconds a round of SSCA and of SGD, split by rows
         (100 rows of each client) and by features (1,000 records), with M = 0, 1, 2, 3 constraints; blocks of rounds in
         turns, the best of several. Required: at most 1.3 times SGD's without constraints, (M+1) times that with M.
solver   `solve_surrogate` at d = 100,000 and M = 3 next to Clarabel. Required: at most 1/50 of its time.
"""

from __future__ import annotations

import argparse
import json
import math
import runpy
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

import fedpact as fp
from fedpact.core.driver import drive
from fedpact.core.participation import as_participation
from fedpact.definition import Experiment, loop_of, start_of

NETWORK = fp.TwoLayer(hidden=128, activation="swish", bias=False, start=math.sqrt(6 / 794), mean=0.0, std=1.0)
ROUNDS, NEVER = 130, 10**6


def functions(m: int) -> fp.Constrained:
    """The cross-entropy with M constraints: on misses of the classes 1, 2, …."""
    return fp.Constrained(NETWORK, fp.Loss(), tuple(fp.Misses(of=k + 1) <= 0.1 for k in range(m)))


def round_ms(algorithm: Any, problem: Any, federation: Any) -> float:
    """The least time a round of a block of compiled rounds, drawing and bookkeeping included."""
    e = Experiment(algorithm, problem, federation, rounds=ROUNDS, evaluate_every=NEVER, precision="single")
    marks: list[tuple[int, float]] = []
    done = lambda carry, history, seconds: marks.append((history.rounds, time.perf_counter()))
    drive(loop_of(e), [federation], start_of(e), as_participation(1.0), [0], ROUNDS, np.float32, after_block=done)
    spent = [(b[1] - a[1]) / (b[0] - a[0]) for a, b in list(pairwise(marks))[1:]]
    return 1e3 * min(spent)


def rounds(repeats: int) -> dict[str, Any]:
    dataset = fp.data.mnist()
    rows, columns = dataset.split(10, seed=0), dataset.split_features(10)
    cases: dict[str, tuple[Any, Any, Any]] = {
        "rows: SGD": (fp.LocalSGD(batch=100), functions(0), rows),
        "features: SGD": (fp.VerticalSGD(batch=1000), functions(0), columns),
    }
    for m in range(4):
        cases[f"rows: SSCA, M={m}"] = (fp.SSCA(batch=100), functions(m), rows)
        cases[f"features: SSCA, M={m}"] = (fp.VerticalSSCA(batch=1000), functions(m), columns)
    least = dict.fromkeys(cases, math.inf)
    for _ in range(repeats):
        for name, case in cases.items():
            least[name] = min(least[name], round_ms(*case))
    found: dict[str, Any] = {}
    for name, ms in least.items():
        split, m = name.split(":")[0], int(name.split("M=")[1]) if "M=" in name else None
        ratio = ms / least[f"{split}: SGD"]
        found[name] = {"ms": ms} | ({} if m is None else {"of_sgd": ratio, "allowed": 1.3 * (m + 1)})
    return found


def solver(repeats: int) -> dict[str, float]:
    conic = runpy.run_path(str(Path(__file__).parents[1] / "tests" / "helpers_conic.py"))["conic"]
    rng = np.random.default_rng(0)
    d = 100_000
    objective = (rng.normal(size=d), 0.5)
    constraints = [(rng.normal(), rng.normal(size=d), rng.uniform(0.1, 1.0)) for _ in range(3)]
    spent: dict[str, list[float]] = {"fedpact": [], "clarabel": []}
    fp.problems.constraints.solve_surrogate(objective, constraints, 100.0)  # compiles
    for _ in range(repeats):
        begun = time.perf_counter()
        omega, _, _ = fp.problems.constraints.solve_surrogate(objective, constraints, 100.0)
        spent["fedpact"].append(time.perf_counter() - begun)
    begun = time.perf_counter()
    witness, _, status = conic(objective, constraints, 100.0)
    spent["clarabel"].append(time.perf_counter() - begun)
    ours, theirs = min(spent["fedpact"]), min(spent["clarabel"])
    gap = float(np.abs(omega - witness).max())
    return {
        "fedpact_ms": 1e3 * ours,
        "clarabel_ms": 1e3 * theirs,
        "ratio": theirs / ours,
        "largest_gap": gap,
        "status": status,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", nargs="*", choices=["rounds", "solver", []], default=[])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    wanted = given.what or ["solver", "rounds"]
    found = {name: {"rounds": rounds, "solver": solver}[name](given.repeats) for name in wanted}
    if given.json:
        print(json.dumps(found, indent=2))
        return
    for name, values in found.items():
        print(f"\n{name}")
        for key, value in values.items():
            print(f"  {key:24} {value}")


if __name__ == "__main__":
    main()
