"""Finished runs made up for the report: six algorithms, with everything in them that a report has stumbled over."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

LONG = "Inexact ADMM with every client solving its own subproblem to an accuracy that shrinks with the rounds (paper)"
MARKUP = "Fed<b>PDM</b> & \"co\" $x_1$ 'q'"


@dataclass
class FakeHistory:
    data: dict[str, np.ndarray]

    @property
    def columns(self) -> list[str]:
        return list(self.data)

    @property
    def rounds(self) -> int:
        return int(self.data["round"][-1])

    def column(self, name: str) -> np.ndarray:
        return self.data[name]


@dataclass
class FakeRun:
    name: str
    history: FakeHistory
    summary: dict[str, Any]
    outcome: str = "stopped after the last round: 100."
    config: dict[str, Any] = field(default_factory=dict)
    notices: list[str] = field(default_factory=list)
    metrics: dict[str, Any] | None = None


def make_run(
    name: str,
    rate: float,
    rounds: int = 100,
    gradients: int = 600,
    seed: int = 0,
    clients: int = 0,
    **extra: np.ndarray,
) -> FakeRun:
    """A run whose objective falls to 0.3331 at `rate`, measured in every round, with the columns that runs have."""
    rng = np.random.default_rng(seed)
    k = np.arange(rounds + 1, dtype=np.float64)
    gap = 0.36 * np.exp(-rate * k) * np.exp(0.08 * rng.standard_normal(rounds + 1)) + 1e-9
    data = {
        "round": k,
        "objective": 0.3331 + gap,
        "gradient": 0.2 * gap**1.1,
        "accuracy": 0.85 - 0.35 * np.exp(-rate * k),
        "participants": np.full(rounds + 1, 25.0),
        "bytes_up": k * 25 * 8 * 105,
        "bytes_down": k * 25 * 8 * 105,
        "gradients": k * gradients,
        "local_seconds": k * 0.01,
        "seconds": k * 0.013,
        **extra,
    }
    summary = {
        "objective": float(data["objective"][-1]),
        "gradient": float(data["gradient"][-1]),
        "accuracy": float(data["accuracy"][-1]),
        "rounds": rounds,
        "megabytes_up": data["bytes_up"][-1] / 1e6,
        "megabytes_down": data["bytes_down"][-1] / 1e6,
        "gradient_evaluations": int(data["gradients"][-1]),
        "seconds": float(data["seconds"][-1]),
        "snr": float(extra["snr"][-1]) if "snr" in extra else None,
    }
    config = {
        "algorithm": {"name": name, "k0": 12, "eta": 1e-05, "penalty": {"mu0": 0.05, "growth": 1.01}},
        "problem": {"name": "logistic", "l2": 0.001},
        "data": {"name": "adult", "clients": 50, "sizes": list(range(40))},
        "participation": 0.5,
        "seed": 20240117,
    }
    metrics = fake_metrics(rng, clients) if clients else None
    return FakeRun(name, FakeHistory(data), summary, config=config, metrics=metrics)


def fake_metrics(rng: np.random.Generator, clients: int) -> dict[str, Any]:
    accuracy = np.clip(0.85 + 0.05 * rng.standard_normal(clients), 0, 1)
    predicted = np.linspace(0.05, 0.95, 10)
    return {
        "pooled": {"accuracy": float(accuracy.mean()), "auc": 0.9042, "calibration_error": 0.01234},
        "clients": [
            {
                "name": f"hospital {k}",
                "rows": 100 + 37 * k,
                "accuracy": float(accuracy[k]),
                "auc": float(accuracy[k]) ** 0.5,
            }
            for k in range(clients)
        ],
        "calibration_curve": {
            "predicted": predicted.tolist(),
            "observed": np.clip(predicted + 0.04 * rng.standard_normal(10), 0, 1).tolist(),
            "rows": [50] * 10,
        },
    }


def make_runs() -> list[FakeRun]:
    """Six algorithms: a NaN column, a very long name, markup in a name, one single round, one that diverged."""
    k = np.arange(101)
    epm = make_run(
        "FedEPM (paper)", 0.12, seed=1, clients=8, snr=30 * np.exp(-k / 40.0), penalty=0.05 * 1.01 ** (k / 1.0)
    )
    epm.notices = ["noise (39): no guarantee of differential privacy follows from it."]
    admm = make_run(LONG, 0.2, gradients=9_000, seed=2, clients=8)
    admm.notices = ["the paper's step size was out of its range; the theorem's was taken."]
    pdm = make_run(MARKUP, 0.05, seed=3, clients=60, consensus_error=np.exp(-k / 20.0))
    pdm.notices = ["<script>alert(1)</script>", *epm.notices]
    pdm.history.data["objective"][k % 10 != 0] = np.nan  # measured every ten rounds
    average = make_run("SFedAvg", 0.03, gradients=7_200, seed=4, clients=60)
    average.history.data["accuracy"] = np.full(101, np.nan)
    average.summary |= {"accuracy": None}
    single = make_run("SFedProx", 0.1, rounds=0, seed=5)
    single.outcome = "stopped before the first round: no client took part."
    scaffold = make_run("SCAFFOLD", 0.02, gradients=150, seed=6)
    scaffold.history.data["objective"][60:] = np.inf
    scaffold.summary |= {"objective": float("nan"), "gradient": float("inf")}
    scaffold.outcome = "stopped at round 60: the objective of client 17 is not finite; the last good state was kept."
    return [epm, admm, pdm, average, single, scaffold]


CHECKS = [
    ("FedEPM reaches the target in fewer rounds than SFedAvg (Table 2).", True, "34 rounds against 81."),
    (
        "FedEPM sends fewer bytes than <i>SFedProx</i> (Table 2).",
        False,
        "1.43 MB against 0 MB: SFedProx did not start.",
    ),
    ("The signal-to-noise ratio grows with epsilon (Fig. 5).", None, ""),
]
