"""What the figures of the FedEPM paper are computed from: the runs behind them, each set of them a cell of a study.

Adult, random cut points, logistic regression with β=1e-3 divided by d_i, noise (39), at most 150 rounds. Every trial
has its own split, cohorts and noise. CR, f/m and SNR come from trials run side by side; TCT and LCT from runs one after
the other on one split, with a clock around the clients' and the server's steps, compilation and telemetry left out.
A change of this file computes everything anew; what is drawn and claimed is in fedepm.py.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np

from fedpact import data
from fedpact.algorithms import FedEPM, SFedAvg, SFedProx
from fedpact.core.settings import Settings
from fedpact.core.stop import GradientNorm, Outcome, Rising, Rule, Variance, first_fired
from fedpact.engines import LocalEngine
from fedpact.papers.study import Study
from fedpact.problems import Logistic
from fedpact.run import Run, run, trials
from fedpact.tune import tune

PROBLEM = Logistic(l2=1e-3)
ROUNDS = 150
TIMED = 3  # sequential runs behind each time
ENGINE = LocalEngine(buckets=2)
ALGORITHMS: dict[str, type[Settings]] = {"FedEPM": FedEPM, "SFedAvg": SFedAvg, "SFedProx": SFedProx}
#: Candidates and length of the tuning: three are few enough for successive halving to compare all at full length.
SCALES, TUNE_ROUNDS = (0.3, 1.0, 1.9), 27


@cache
def adult() -> data.Dataset:
    """The dataset."""
    return data.adult()


@cache
def split(m: int, seed: int) -> data.Federation:
    """Adult at m clients, cut at random points."""
    return adult().split(clients=m, how="cuts", seed=seed)


def printed_stop(m: int, n: int) -> Rule:
    """The printed rule in terms of f = Σ f_i, where the history reports means over the m clients."""
    return GradientNorm(1e-6 / m**2) | Variance(n * 1e-8, window=4, scale=m)


def released_stop(m: int, n: int) -> Rule:
    """The rule of the released code."""
    return GradientNorm(1e-9 * n) | Variance(1e-9 * n, window=4, scale=m) | Rising(window=4)


def rounds_needed(rule: Rule, columns: dict[str, Any]) -> int:
    """CR of recorded columns under a rule; what never fires, for whatever reason the run ended, counts ROUNDS + 1."""
    fired = first_fired(rule, {name: np.asarray(columns[name]) for name in rule.reads})
    return ROUNDS + 1 if fired is None else fired


def tuned_scale(study: Study, cls: type[Settings], m: int) -> float:
    """The best of SCALES by `fedpact.tune`, at k0=12, ε=0.1, ρ=0.5, seed 0; used for every k0, ε and ρ."""
    start = cls.from_dict({"k0": 12, "step": "lipschitz", "epsilon": 0.1})

    def search() -> float:
        found = tune(
            start, PROBLEM, split(m, 0), {"scale": SCALES}, rounds=TUNE_ROUNDS, participation=0.5, engine=ENGINE
        )
        _uninterrupted([trial.outcome for trial in found.trials])
        return float(found.settings.to_dict()["scale"])

    return study.cell(search, f"tuning {cls.name} m={m}", **_key(start, m, 0.5, None), scales=SCALES, to=TUNE_ROUNDS)


def settings_of(study: Study, name: str, m: int, k0: int, epsilon: float) -> Settings:
    """An algorithm by the name figures have for it; `… tuned` has γ_i = scale/r_i."""
    cls, values = ALGORITHMS[name.split()[0]], {"k0": k0, "epsilon": epsilon}
    if name.endswith("tuned"):
        return cls.from_dict({**values, "step": "lipschitz", "scale": tuned_scale(study, cls, m)})
    return cls.from_dict(values)


def outcomes(study: Study, name: str, m: int, k0: int, rho: float, epsilon: float, count: int) -> dict[str, Any]:
    """CR, f/m and SNR of `count` trials, and why each ended. One that did not stop counts ROUNDS + 1."""
    settings, stop = settings_of(study, name, m, k0, epsilon), released_stop(m, adult().features)

    def compute() -> dict[str, Any]:
        splits, seeds = [split(m, seed) for seed in range(count)], list(range(count))
        options: dict[str, Any] = {"participation": rho, "rounds": ROUNDS, "stop": stop, "engine": ENGINE}
        return ends_of(trials(settings, PROBLEM, splits, seeds, **options))

    what = f"{name} m={m} k0={k0} ρ={rho} ε={epsilon}, {count} trials"
    return study.cell(compute, what, **_key(settings, m, rho, stop))


def ends_of(done: Sequence[Run]) -> dict[str, Any]:
    """What a figure keeps of finished trials."""
    _uninterrupted([one.outcome for one in done])
    stopped = [one.outcome_kind is Outcome.STOPPED for one in done]
    return {
        "cr": [float(one.history.rounds if ok else ROUNDS + 1) for one, ok in zip(done, stopped, strict=True)],
        "objective": [one.history.last("objective") for one in done],
        "snr": [one.history.last("snr") for one in done],
        "ended": [one.outcome_kind.name for one in done],
    }


def times(study: Study, name: str, m: int, k0: int, rho: float, epsilon: float) -> dict[str, Any]:
    """TCT and LCT of runs one after the other, on one split so that they are compiled once."""
    settings, stop = settings_of(study, name, m, k0, epsilon), released_stop(m, adult().features)

    def compute() -> dict[str, Any]:
        options: dict[str, Any] = {"participation": rho, "rounds": ROUNDS, "stop": stop, "engine": ENGINE}
        seeds = range(TIMED)
        return clocks_of([run(settings, PROBLEM, split(m, 0), seed=seed, timing=True, **options) for seed in seeds])

    return study.cell(compute, f"times of {name} m={m} k0={k0} ρ={rho} ε={epsilon}", **_key(settings, m, rho, stop))


def clocks_of(done: Sequence[Run]) -> dict[str, Any]:
    """TCT, infinite where a run ended in a non-finite number, and LCT of timed runs."""
    _uninterrupted([one.outcome for one in done])
    lost = [one.outcome_kind is Outcome.NONFINITE for one in done]
    return {
        "tct": [math.inf if bad else one.history.last("seconds") for one, bad in zip(done, lost, strict=True)],
        "lct": [float(np.median(one.history.column("local_seconds")[1:])) for one in done],
        "ended": [one.outcome_kind.name for one in done],
    }


def recorded(study: Study, name: str, m: int, k0: int, rho: float, epsilon: float) -> dict[str, Any]:
    """Objective and gradient of every round of one run, seed 0, to its last round, and why it ended."""
    settings = settings_of(study, name, m, k0, epsilon)

    def compute() -> dict[str, Any]:
        one = run(settings, PROBLEM, split(m, 0), participation=rho, rounds=ROUNDS, engine=ENGINE)
        _uninterrupted([one.outcome])
        columns = {column: one.history.column(column).tolist() for column in ("round", "objective", "gradient")}
        return {**columns, "ended": one.outcome_kind.name}

    what = f"one run of {name} m={m} k0={k0} ρ={rho} ε={epsilon}"
    return study.cell(compute, what, **_key(settings, m, rho, None))


def _key(settings: Settings, m: int, rho: float, stop: Rule | None) -> dict[str, Any]:
    """What decides a cell besides the package's source and the number of runs."""
    return {
        "algorithm": {"name": settings.name, **settings.to_dict()},
        "split": split(m, 0).digest,
        "rho": rho,
        "rounds": ROUNDS,
        "stop": repr(stop),
        "buckets": ENGINE.buckets,
    }


def _uninterrupted(ends: Sequence[str]) -> None:
    """Ctrl-C ends a run early and in order: what was cut short must not be kept as a cell."""
    if any(outcome.startswith(Outcome.INTERRUPTED.value) for outcome in ends):
        raise KeyboardInterrupt
