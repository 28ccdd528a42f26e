"""What the figures of the inexact ADMM paper are computed from: its runs, each set of them a cell of a study.

Example 5.1 is least squares on `data.mixture` (d_i in [50, 150], n = 100), every instance with its own data. Example
5.2 is logistic regression with λ = 1e-3 divided by d_i on QSAR oral toxicity (`qot`, n = 1,024, d = 8,992) and on
Santander customer transactions (`sct`) where the user has that file, split at random into equal parts. Half of the
clients take part unless ρ says otherwise. Runs end by the rule of the authors' released code, ‖∇f‖²/m² ≤ 1e-5·n/d, or
after 1,000 rounds. The printed rule (5.1), ‖∇f‖² ≤ 5e-4·n/d, is another: stricter by up to m²/50. Figure 1 shows both.
A change of this file computes everything anew; what is drawn and claimed is in inexact_admm.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np

from fedpact import data
from fedpact.algorithms import FedAvgStale, FedProxLocal, InexactADMM
from fedpact.core.errors import DatasetMissing
from fedpact.core.settings import Settings
from fedpact.core.stop import GradientNorm, Outcome, Rule, first_fired
from fedpact.engines import LocalEngine
from fedpact.papers.study import Study
from fedpact.problems import LeastSquares, Logistic
from fedpact.run import Run, run, trials
from fedpact.tune import tune

ROUNDS = 1000
ENGINE = LocalEngine(buckets=1)
EXAMPLES = ("Example 5.1", "Example 5.2, qot", "Example 5.2, sct")
#: Candidates of the tuning: `a` in units of the paper's, and μ. Successive halving to 27 rounds, k0 = 10, seed 0.
RATES = {"Example 5.1": (30.0, 100.0, 300.0, 1000.0), "Example 5.2": (0.1, 0.3, 1.0, 3.0)}
MUS, TUNE_ROUNDS = (0.01, 0.1, 1.0), 27


@cache
def _dataset(example: str) -> data.Dataset:
    return data.qsar() if example.endswith("qot") else data.santander()


def available(example: str) -> bool:
    """Whether the example's data are here; Santander's only where the user has put the file."""
    if example == "Example 5.1":
        return True
    try:
        _dataset(example)
    except DatasetMissing:
        return False
    return True


@cache
def federation(example: str, m: int, seed: int) -> data.Federation:
    """One instance of an example with m clients."""
    if example == "Example 5.1":
        return data.mixture(clients=m, seed=seed).split(how="column", column="client")
    return _dataset(example).split(clients=m, seed=seed)


def problem(example: str) -> Any:
    """The loss of an example."""
    return LeastSquares() if example == "Example 5.1" else Logistic(l2=1e-3)


def printed_stop(example: str, m: int) -> Rule:
    """(5.1): ‖∇f‖² ≤ 5e-4·n/d."""
    one = federation(example, m, 0)
    return GradientNorm(5e-4 * one.features / int(one.sizes.sum()))


def released_stop(example: str, m: int) -> Rule:
    """The released code's: ‖∇f‖²/m² ≤ 1e-5·n/d."""
    one = federation(example, m, 0)
    return GradientNorm(1e-5 * m**2 * one.features / int(one.sizes.sum()))


def paper_rate(example: str, m: int) -> float:
    """a of γ_k(a) as Section 5.3 has it: 0.005, or 0.5 d/m."""
    return 0.005 if example == "Example 5.1" else 0.5 * int(federation(example, m, 0).sizes.sum()) / m


def settings_of(study: Study, name: str, example: str, m: int, k0: int) -> Settings:
    """An algorithm by the name figures have for it; `… tuned` has the best rate of a grid, and FedProx a tuned μ."""
    if name == "ADMM":
        return InexactADMM(k0=k0, audit=False)
    cls: type[Settings] = FedAvgStale if name.startswith("FedAvg") else FedProxLocal
    grid: dict[str, Any] = {"mu": MUS} if cls is FedProxLocal else {}
    if name.endswith("tuned"):
        grid["a"] = tuple(paper_rate(example, m) * rate for rate in RATES[example.split(",")[0]])
    start = cls.from_dict({"k0": 10, "a": paper_rate(example, m)})
    best = tuned(study, start, example, m, grid) if grid else {}
    return cls.from_dict({**start.to_dict(), **best, "k0": k0})


def tuned(study: Study, start: Settings, example: str, m: int, grid: dict[str, Any]) -> dict[str, Any]:
    """The best of a grid by `fedpact.tune`, at k0 = 10, ρ = 0.5, seed 0; used for every k0 and ρ."""

    def search() -> dict[str, Any]:
        options: dict[str, Any] = {"rounds": TUNE_ROUNDS, "participation": 0.5, "engine": ENGINE}
        found = tune(start, problem(example), federation(example, m, 0), grid, **options)
        uninterrupted([trial.outcome for trial in found.trials])
        return {name: found.settings.to_dict()[name] for name in grid}

    return study.cell(
        search, f"tuning {start.name} on {example}, m={m}", grid=grid, **_key(start, example, m, 0.5, None)
    )


def outcomes(study: Study, name: str, example: str, m: int, k0: int, rho: float, count: int) -> dict[str, Any]:
    """CR and the last objective of `count` instances; one that did not stop counts ROUNDS + 1."""
    settings, stop = settings_of(study, name, example, m, k0), released_stop(example, m)

    def compute() -> dict[str, Any]:
        seeds = list(range(count))
        options: dict[str, Any] = {"participation": rho, "rounds": ROUNDS, "stop": stop, "engine": ENGINE}
        many = [federation(example, m, seed) for seed in seeds]
        if example == "Example 5.1":
            return ends_of(trials(settings, problem(example), many, seeds, **options))
        # large data: one after the other, compiled once
        pairs = zip(many, seeds, strict=True)
        return ends_of([run(settings, problem(example), one, seed=seed, **options) for one, seed in pairs])

    what = f"{name} on {example} m={m} k0={k0} ρ={rho}, {count} instances"
    return study.cell(compute, what, **_key(settings, example, m, rho, stop))


def ends_of(done: Sequence[Run]) -> dict[str, Any]:
    """What a figure keeps of finished instances."""
    uninterrupted([one.outcome for one in done])
    stopped = [one.outcome_kind is Outcome.STOPPED for one in done]
    return {
        "cr": [float(one.history.rounds if ok else ROUNDS + 1) for one, ok in zip(done, stopped, strict=True)],
        "objective": [one.history.last("objective") for one in done],
        "ended": [one.outcome_kind.name for one in done],
    }


def seconds(study: Study, name: str, example: str, m: int, k0: int, rho: float) -> float:
    """Computing time of one run, compilation and telemetry left out; ∞ if it ended in a non-finite number."""
    settings, stop = settings_of(study, name, example, m, k0), released_stop(example, m)

    def compute() -> float:
        options: dict[str, Any] = {"participation": rho, "rounds": ROUNDS, "stop": stop, "engine": ENGINE}
        one = run(settings, problem(example), federation(example, m, 0), timing=True, **options)
        uninterrupted([one.outcome])
        return float("inf") if one.outcome_kind is Outcome.NONFINITE else one.history.last("seconds")

    what = f"time of {name} on {example} m={m} k0={k0} ρ={rho}"
    return study.cell(compute, what, **_key(settings, example, m, rho, stop))


def recorded(study: Study, name: str, example: str, m: int, k0: int, rho: float, rounds: int) -> dict[str, Any]:
    """Objective and gradient of every round of one run, and for ADMM the share of local steps that break (3.5)."""
    settings = settings_of(study, name, example, m, k0)
    if isinstance(settings, InexactADMM):
        settings = InexactADMM(k0=k0)

    def compute() -> dict[str, Any]:
        chosen = federation(example, m, 0)
        one = run(settings, problem(example), chosen, participation=rho, rounds=rounds, engine=ENGINE)
        uninterrupted([one.outcome])
        columns = {column: one.history.column(column).tolist() for column in ("round", "objective", "gradient")}
        fired = {
            "printed": first_fired(printed_stop(example, m), columns),
            "released": first_fired(released_stop(example, m), columns),
        }
        broken = one.history.column("violations")[1:] if "violations" in one.history.columns else np.array([np.nan])
        return {**columns, "cr": fired, "violations": float(np.mean(broken)), "ended": one.outcome_kind.name}

    what = f"one run of {name} on {example} m={m} k0={k0} ρ={rho}, {rounds} rounds"
    return study.cell(compute, what, **_key(settings, example, m, rho, None))


def _key(settings: Settings, example: str, m: int, rho: float, stop: Rule | None) -> dict[str, Any]:
    """What decides a cell besides the package's source and the number of runs."""
    return {
        "algorithm": {"name": settings.name, **settings.to_dict()},
        "data": federation(example, m, 0).digest,
        "rho": rho,
        "rounds": ROUNDS,
        "stop": repr(stop),
        "buckets": ENGINE.buckets,
    }


def uninterrupted(ends: Sequence[str]) -> None:
    """Ctrl-C ends a run early and in order: what was cut short must not be kept as a cell."""
    if any(outcome.startswith(Outcome.INTERRUPTED.value) for outcome in ends):
        raise KeyboardInterrupt
