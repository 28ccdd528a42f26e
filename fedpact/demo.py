"""The demo: seven ways to train one model on scikit-learn's breast cancer data, dealt to twenty clients by label."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from fedpact import data
from fedpact.algorithms import FedAvg, FedEPM, FedProx, InexactADMM, SFedAvg, SFedProx
from fedpact.core.files import check_writable
from fedpact.problems import Logistic, optimum
from fedpact.run import Runs, run, uninterrupted

ROUNDS = 60


def run_demo(folder: Path, rounds: int = ROUNDS, quiet: bool = False) -> dict[str, Any]:
    """Run the comparison, print its table and write its report."""
    begun = time.perf_counter()
    check_writable(folder)
    dataset = data.breast_cancer()
    federation = dataset.split(clients=20, how="dirichlet", alpha=0.5, seed=0, holdout=0.25)
    problem = Logistic(l2=1e-2, intercept=True)
    contenders = {
        "FedEPM (eta=1e-3, mu0=10)": FedEPM(eta=1e-3, mu0=10.0),  # the paper's constants suit unit columns, not these
        "SFedAvg (paper's step)": SFedAvg(),
        "SFedProx (paper's step)": SFedProx(),
        "FedAvg (1/r)": FedAvg(),
        "FedAvg (batches of 8)": FedAvg(batch=8, scale=0.3),
        "FedProx (1/r)": FedProx(mu=0.1),
        "Inexact ADMM (paper)": InexactADMM(),
    }
    if not quiet:
        print(
            f"{dataset.name}: {int(federation.sizes.sum())} training rows at {federation.clients} clients "
            f"({federation.description}), {rounds} rounds, half of the clients in each"
        )
    runs = Runs()
    for name, settings in contenders.items():
        shown = None if not quiet else False
        one = run(settings, problem, federation, participation=0.5, rounds=rounds, name=name, progress=shown)
        runs.append(uninterrupted(one, "No report was written."))
        if not quiet:
            print(f"  {name}: {runs[-1].outcome}, objective {runs[-1].summary['objective']:.5f}")
    best = optimum(problem, federation)
    seconds = time.perf_counter() - begun
    if not quiet:
        print(f"\n{runs.table()}\n\nleast possible objective: {best.value:.5f}   ({seconds:.0f} s)")
    report = runs.report(
        folder,
        title="fedpact demo",
        lead=f"Seven ways to train one logistic regression on {dataset.name} at {federation.clients} clients that "
        f"never share a row. The least possible objective, from a central solver, is {best.value:.5f}.",
        minimum=best.value,
    )
    if not quiet:
        print(f"report: {report}")
    return {
        "optimum": best.value,
        "seconds": seconds,
        "report": str(report),
        "runs": [
            {"name": r.name, "outcome": r.outcome, **r.summary, "held_out": r.metrics and r.metrics["pooled"]}
            for r in runs
        ],
    }
