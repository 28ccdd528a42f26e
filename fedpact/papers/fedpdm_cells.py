"""What the figures of the FedPDM paper are computed from: runs on MNIST, each a cell of a study.

MNIST split evenly over N = 100 clients, K = 5 a round, n = 785 (pixels/255 and a constant 1), β = 1e-2, γ = 1e-4,
b = 30, ρ = 10, T = 300, δ = 1e-5. Three losses: (25) as printed, one-vs-rest, softmax. η^t = 1/(ρ√(1+t)): the printed
1/√(1+t) diverges. Q = 10 local steps: half of a client's 600 rows. (20) with c_0 = 1 gives the ε of a round from that
in all, and G = 1: the paper gives neither.

A `Line` is what a figure draws: a name, a loss, the settings, what noise it has ("none"; "paper": (18)(19), no
guarantee), and the ε in all.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import numpy as np

from fedpact import data
from fedpact.algorithms import FedAvg, FedPDM, FedProx, Scaffold
from fedpact.algorithms.fedpdm import total_epsilon
from fedpact.core.settings import Settings
from fedpact.core.stop import Outcome
from fedpact.papers.study import Study
from fedpact.problems import MulticlassLogistic
from fedpact.problems.multiclass_logistic import LOSSES
from fedpact.run import run
from fedpact.tune import tune

CLIENTS, CHOSEN, ROUNDS, EVERY, BATCH, STEPS = 100, 5, 300, 10, 30, 10
RHO, BETA, DELTA, BOUND = 10.0, 1e-2, 1e-5, 1.0
#: Candidates and longest run of the baselines' tuning: all but the best are dropped after 30 rounds.
TUNED, TUNE_ROUNDS = (0.01, 0.03, 0.1, 0.3), 90
#: The setting of a baseline that is its learning rate.
RATE = {"fedavg": "step", "fedprox": "step", "scaffold": "rate"}


class Line(NamedTuple):
    """One run of a figure."""

    name: str
    loss: str
    settings: Settings
    kind: str = "none"
    epsilon: float | None = None  # in all


@cache
def federation() -> data.Federation:
    """MNIST, its rows dealt evenly."""
    return data.mnist().split(CLIENTS, seed=0)


def problem(loss: str) -> MulticlassLogistic:
    """(25) with this loss."""
    return MulticlassLogistic(loss=loss, beta=BETA, intercept=True)


def per_round(epsilon: float) -> float:
    """ε of a round by (20), c_0 = 1, where that in all is given."""
    share = STEPS * BATCH / (60_000 // CLIENTS)
    return epsilon / total_epsilon(1.0, share, CHOSEN / CLIENTS, ROUNDS)


def fedpdm(loss: str, epsilon: float | None = None, **changes: Any) -> Line:
    """FedPDM without noise, or with the paper's for this ε in all."""
    noise = {} if epsilon is None else {"epsilon": per_round(epsilon), "delta": DELTA, "bound": BOUND}
    settings = FedPDM.preset("paper", rho=RHO, batch=BATCH, steps=STEPS, **noise, **changes)
    name = ", ".join(["FedPDM", *(f"{key}={value}" for key, value in changes.items())])
    if epsilon is None:
        return Line(name, loss, settings)
    return Line(f"{name}, paper's ε = {epsilon:g} (no guarantee)", loss, settings, "paper", epsilon)


def baselines() -> dict[str, Settings]:
    """As many steps on as many rows as FedPDM; SCAFFOLD has passes: one, of 20 steps."""
    return {
        "FedAvg": FedAvg(steps=STEPS, batch=BATCH, step=0.1),
        "FedProx": FedProx(steps=STEPS, batch=BATCH, step=0.1, mu=1.0),
        "SCAFFOLD": Scaffold(epochs=1, batch=BATCH, rate=0.1),
    }


def tuned(study: Study, loss: str, name: str) -> Line:
    """A baseline with the best of TUNED as its learning rate, by the training objective, seed 0."""
    settings = baselines()[name]
    rate = RATE[settings.name]

    def search() -> float:
        options: dict[str, Any] = {"participation": CHOSEN / CLIENTS, "telemetry": "all", "evaluate_every": EVERY}
        found = tune(settings, problem(loss), federation(), {rate: TUNED}, rounds=TUNE_ROUNDS, **options)
        return float(found.settings.to_dict()[rate])

    key = {"algorithm": {"name": settings.name, **settings.to_dict()}, "rates": TUNED, "to": TUNE_ROUNDS, "loss": loss}
    best = study.cell(search, f"tuning {name}, {loss}", **key)
    return Line(f"{name}, tuned", loss, type(settings).from_dict({**settings.to_dict(), rate: best}))


def recorded(study: Study, line: Line, seed: int, rounds: int = ROUNDS) -> dict[str, Any]:
    """f = (1/N) Σ f_i without h, accuracies, and of FedPDM h and the share of zeros, every ten rounds."""

    def compute() -> dict[str, Any]:
        one = run(
            line.settings,
            problem(line.loss),
            federation(),
            participation=CHOSEN / CLIENTS,
            rounds=rounds,
            evaluate_every=EVERY,
            telemetry="all",
            seed=seed,
        )
        if one.outcome_kind is Outcome.INTERRUPTED:
            raise KeyboardInterrupt
        column = one.history.column
        measured = np.isfinite(column("objective"))
        h = column("regulariser") if "regulariser" in one.history.columns else 0 * column("objective")
        kept = {"round": column("round"), "loss": column("objective") - h, "accuracy": column("test_accuracy")}
        kept |= {"regulariser": h} | ({"sparsity": column("sparsity")} if "sparsity" in one.history.columns else {})
        return {name: values[measured].tolist() for name, values in kept.items()} | {"outcome": one.outcome}

    what = f"{line.name}, {line.loss}, seed {seed}"
    key = {"algorithm": {"name": line.settings.name, **line.settings.to_dict()}, "rounds": rounds, "every": EVERY}
    return study.cell(compute, what, **key, kind=line.kind, epsilon=line.epsilon)


__all__ = ["LOSSES", "Line", "baselines", "fedpdm", "recorded", "tuned"]
