"""What the figures of the SSCA paper are computed from: runs on MNIST, each a cell of a study.

The network has 784 inputs, J = 128 swish units and 10 classes, no biases, weights from U(±√(6/794)), pixels divided by
255; 10 clients, T = 1,000 rounds. Unconstrained: cross-entropy + 1e-5‖ω‖², the norm approximated as in (33);
constrained: min ‖ω‖² s.t. cross-entropy ≤ U. SSCA has the paper's steps as its released code takes them (preset
`paper`, power α + 0.05 for γ). A baseline's E local steps have B/E rows each, so that a round costs the same. Baselines
have the paper's rates, and tuned ones: ā by successive halving on the training objective.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import numpy as np

from fedpact import data
from fedpact.algorithms import SSCA, LocalSGD, VerticalSGD, VerticalSSCA
from fedpact.core.settings import Settings
from fedpact.papers.study import Study
from fedpact.problems import Constrained, Loss, Norm2, TwoLayer
from fedpact.run import run
from fedpact.tune import tune

CLIENTS, ROUNDS, EVERY, PENALTY, LIMIT = 10, 1000, 20, 1e-5, 0.13
NETWORK = TwoLayer(hidden=128, activation="swish", bias=False, start=math.sqrt(6 / 794), mean=0.0, std=1.0)
SAMPLES, FEATURES = (10, 100, 6000), (10, 100, 1000)
#: Candidates and longest run of the tuning: all but the best are dropped after 30 rounds.
RATES, TUNE_ROUNDS = (0.1, 0.3, 1.0, 2.0), 90


@cache
def federation(split: str) -> data.Federation:
    """MNIST at ten clients, by rows or by columns."""
    dataset = data.mnist()
    return dataset.split(CLIENTS, seed=0) if split == "samples" else dataset.split_features(CLIENTS)


def unconstrained(penalty: float = PENALTY) -> Constrained:
    """(32)."""
    return Constrained(NETWORK, Loss() + penalty * Norm2(exact=False))


def constrained(limit: float = LIMIT) -> Constrained:
    """(40)."""
    return Constrained(NETWORK, Norm2(), (Loss() <= limit,))


def ssca(split: str, batch: int, preset: str = "paper") -> Settings:
    """SSCA with the paper's steps for this batch."""
    cls = SSCA if split == "samples" else VerticalSSCA
    usual = {"paper": 100}.get(preset, batch)
    return cls.preset(preset if batch == usual else f"{preset}-{batch}")


def sgd(split: str, batch: int, steps: int = 1, momentum: bool = False) -> Settings:
    """A baseline that looks at `batch` rows a round, in so many steps."""
    preset = "momentum" if momentum else "sgd"
    if split == "features":
        return VerticalSGD.preset(preset, batch=batch)
    return LocalSGD.preset(preset, batch=batch // steps, steps=steps)


def tuned(study: Study, split: str, settings: Settings) -> Settings:
    """The same baseline with the best of RATES, seed 0."""

    def search() -> float:
        found = tune(settings, unconstrained(), federation(split), {"rate": RATES}, rounds=TUNE_ROUNDS)
        return float(found.settings.to_dict()["rate"])

    key = {"algorithm": {"name": settings.name, **settings.to_dict()}, "rates": RATES, "to": TUNE_ROUNDS}
    rate = study.cell(search, f"tuning {settings.label}, {split}", **key)
    return type(settings).from_dict({**settings.to_dict(), "rate": rate})


def recorded(
    study: Study,
    split: str,
    settings: Settings,
    problem: Constrained,
    seed: int,
    rounds: int = ROUNDS,
    every: int = EVERY,
) -> dict[str, Any]:
    """Cross-entropy on all training rows, test accuracy, ‖ω‖² and the KKT residual, every so many rounds."""

    def compute() -> dict[str, Any]:
        one = run(settings, problem, federation(split), rounds=rounds, evaluate_every=every, seed=seed)
        column, limited = one.history.column, bool(problem.subject_to)
        measured = np.isfinite(column("objective"))
        cost = column("constraint_1") + problem.subject_to[0].limit if limited else column("loss")
        size = column("objective") if limited else (column("objective") - cost) / problem.minimize.terms[1][0]
        kept = {"round": column("round"), "cost": cost, "accuracy": column("test_accuracy"), "norm2": size}
        kept |= {"kkt": column("kkt")} if limited else {}
        return {name: values[measured].tolist() for name, values in kept.items()} | {"outcome": one.outcome}

    what = f"{settings.label}, {split}, {problem.minimize!r}, {problem.subject_to!r}, seed {seed}"
    key = {"algorithm": {"name": settings.name, **settings.to_dict()}, "rounds": rounds, "every": every}
    return study.cell(compute, what, **key)
