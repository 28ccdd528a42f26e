"""The figures of the SSCA paper: Y. Cui, Y. Li and C. Ye, arXiv 2104.06011. The runs are those of ssca_cells.py."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np

from fedpact.algorithms import SSCA, VerticalSSCA
from fedpact.core.history import History
from fedpact.papers.claims import Claim, listed
from fedpact.papers.ssca_cells import (
    FEATURES,
    LIMIT,
    PENALTY,
    ROUNDS,
    SAMPLES,
    constrained,
    recorded,
    sgd,
    ssca,
    tuned,
    unconstrained,
)
from fedpact.papers.study import Study
from fedpact.report import curves, lines_over, panels

LEAD = (
    f"MNIST, 10 clients, J = 128, swish; means over {{seeds}} seeds, {ROUNDS} rounds; cost is the cross-entropy on all "
    "60,000 training rows. SSCA has the paper's steps as its released code takes them: they break (6), so its theorems "
    "do not apply. SGD and SGD-m have the paper's learning rates, and tuned ones. Split by rows, B is of each client; "
    "split by features, of all records."
)
LEVEL = 0.95  # the test accuracy of Figure 3
LAMBDAS, LIMITS = (1e-5, 1e-4, 3e-4, 1e-3), (0.1, 0.13, 0.2, 0.3)


def _mean(runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The mean over seeds, column by column."""
    names = [name for name in runs[0] if name != "outcome"]
    return {name: np.mean([run[name] for run in runs], axis=0) for name in names}


def _lines(study: Study, split: str, batch: int) -> dict[str, Any]:
    """The unconstrained algorithms with this B, or B·E for local steps."""
    found = {f"SGD, B={batch}": sgd(split, batch), f"SGD-m, B={batch}": sgd(split, batch, momentum=True)}
    if split == "samples":
        found |= {f"SGD, B={batch // 10}, E=10": sgd(split, batch, 10)}
        found |= {f"SGD-m, B={batch // 10}, E=10": sgd(split, batch, 10, momentum=True)}
    better = {f"{name} tuned": tuned(study, split, settings) for name, settings in found.items()}
    return {f"SSCA, B={batch}": ssca(split, batch)} | found | better


def _free(study: Study, split: str, batch: int, seeds: int) -> dict[str, dict[str, Any]]:
    return {
        name: _mean([recorded(study, split, settings, unconstrained(), seed) for seed in range(seeds)])
        for name, settings in _lines(study, split, batch).items()
    }


def _limited(study: Study, split: str, batches: Sequence[int], seeds: int) -> dict[str, dict[str, Any]]:
    """The paper's settings for every batch, and the schedule `tight`."""
    made: dict[str, Any] = {f"SSCA, B={batch}": ssca(split, batch) for batch in batches}
    tight = SSCA.preset("tight") if split == "samples" else VerticalSSCA.preset("tight")
    found = {
        name: _mean([recorded(study, split, settings, constrained(), seed) for seed in range(seeds)])
        for name, settings in made.items()
    }
    name = f"SSCA tight, B={tight.batch}, {3 * ROUNDS} rounds"
    found[name] = _mean([recorded(study, split, tight, constrained(), seed, 3 * ROUNDS) for seed in range(seeds)])
    return found


def _drawn(runs: Mapping[str, Mapping[str, Any]], column: str, title: str, **options: Any) -> Callable[..., Any]:
    shown = []
    for name, one in runs.items():
        history = History(["round", column])
        history.extend({"round": np.asarray(one["round"]), column: np.asarray(one[column])})
        shown.append(SimpleNamespace(name=name, history=history))
    return partial(curves, shown, column, title=title, **options)


def _rows(runs: Mapping[str, Mapping[str, Any]], what: str) -> list[dict[str, Any]]:
    out = []
    for name, one in runs.items():
        at = {f"cost at {t}": one["cost"][list(one["round"]).index(t)] for t in (100, ROUNDS) if t in one["round"]}
        last = {"last 100 rounds": float(np.mean(one["cost"][-5:])), "test accuracy": one["accuracy"][-1]}
        out.append({"problem": what, "algorithm": name, **at, **last, "‖ω‖²": one["norm2"][-1]})
    return out


def _faster(runs: Mapping[str, Mapping[str, Any]], what: str) -> Iterator[Claim]:
    """SSCA's cost is the lowest, on the mean over the run; against the paper's rates, and against tuned ones."""
    means = {name: float(np.mean(one["cost"][1:])) for name, one in runs.items()}
    mine, *others = means
    for kind in (False, True):
        these = [name for name in others if name.endswith(" tuned") == kind]
        claim = f"{what}: SSCA converges faster than every {'tuned ' * kind}baseline (mean cost over the rounds)"
        yield claim, all(means[mine] < means[name] for name in these), _told({n: means[n] for n in (mine, *these)})


def _told(values: Mapping[str, float]) -> str:
    return "; ".join(f"{name} {value:.4g}" for name, value in values.items())


def _kept(runs: Mapping[str, Mapping[str, Any]], what: str) -> list[Claim]:
    last = {name: float(np.mean(one["cost"][-5:])) for name, one in runs.items()}
    falls = {name: (float(np.mean(one["kkt"][1:6])), float(np.mean(one["kkt"][-5:]))) for name, one in runs.items()}
    claims: list[Claim] = [
        (
            f"{what}: {name} satisfies the constraint (last 100 rounds, within 0.005)",
            cost <= LIMIT + 0.005,
            f"{cost:.4f}",
        )
        for name, cost in last.items()
    ]
    told = "; ".join(f"{name} {a:.3g} to {b:.3g}" for name, (a, b) in falls.items())
    claims.append((f"{what}: the KKT residual falls", all(b < a for a, b in falls.values()), told))
    return claims


def _both(study: Study, count: int | None, split: str, batches: Sequence[int], figure: int) -> dict[str, Any]:
    seeds = count or 3
    draws, rows, claims = [], [], list[Claim]()
    for batch in batches:
        runs, what = _free(study, split, batch, seeds), f"unconstrained, B = {batch}"
        draws.append(_drawn(runs, "cost", f"training cost, {what}", logy=True))
        draws.append(_drawn(runs, "accuracy", f"test accuracy, {what}"))
        rows += _rows(runs, what)
        claims += _faster(runs, what)
    runs = _limited(study, split, batches, seeds)
    draws.append(_drawn(runs, "cost", f"training cost, constrained, U = {LIMIT}", logy=True))
    draws.append(_drawn(runs, "accuracy", f"test accuracy, constrained, U = {LIMIT}"))
    rows += _rows(runs, f"constrained, U = {LIMIT}")
    claims += _kept(runs, "constrained")
    word = "rows" if split == "samples" else "features"
    drawn = panels(draws, study.folder / f"fig{figure}", columns=2, title=f"Data split by {word}")
    lead = LEAD.format(seeds=seeds)
    return study.finish(f"SSCA, Figure {figure}", lead, claims, {f"Figure {figure}": drawn}, {"Means": rows})


def fig1(study: Study, count: int | None) -> dict[str, Any]:
    """Training cost and test accuracy against rounds, data split by rows."""
    return _both(study, count, "samples", SAMPLES, 1)


def fig2(study: Study, count: int | None) -> dict[str, Any]:
    """Training cost and test accuracy against rounds, data split by features."""
    return _both(study, count, "features", FEATURES, 2)


def fig3(study: Study, count: int | None) -> dict[str, Any]:
    """Rounds to a test accuracy against rows a round: communication against computation."""
    seeds, draws, rows, claims = count or 3, [], [], []
    for split, batches in (("samples", SAMPLES), ("features", FEATURES)):
        needed: dict[str, list[float]] = {}
        for batch in batches:
            for name, one in _free(study, split, batch, seeds).items():
                there = np.flatnonzero(np.asarray(one["accuracy"]) >= LEVEL)
                t = float(one["round"][there[0]]) if len(there) else float("inf")
                kind = name.split(",")[0] + (", E=10" if "E=10" in name else "") + (" tuned" if "tuned" in name else "")
                needed.setdefault(kind, []).append(t)
                rows.append({"split by": split, "B": batch, "algorithm": kind, "rounds": t})
        lines = {kind: (list(batches), values, None) for kind, values in needed.items()}
        title = f"split by {split}"
        draws.append(partial(lines_over, lines, xlabel="B, or B·E", ylabel="rounds", title=title, logx=True, logy=True))
        mine, others = needed["SSCA"], {kind: v for kind, v in needed.items() if kind != "SSCA"}
        for better in (False, True):
            these = {kind: v for kind, v in others.items() if kind.endswith("tuned") == better}
            best = all(a <= b for values in these.values() for a, b in zip(mine, values, strict=True))
            told = "; ".join(f"{kind} {listed(values)}" for kind, values in {"SSCA": mine, **these}.items())
            rest = " (baselines tuned)" if better else ""
            claims.append((f"{title}: SSCA needs the fewest rounds for each B{rest}", best, told))
    drawn = panels(draws, study.folder / "fig3", columns=2, title=f"Rounds to {LEVEL:.0%} on the test set")
    lead = LEAD.format(seeds=seeds) + f" Measured every 20 rounds; rounds to {LEVEL:.0%}, inf where never."
    return study.finish("SSCA, Figure 3", lead, claims, {"Figure 3": drawn}, {"Rounds": rows})


def fig4(study: Study, count: int | None) -> dict[str, Any]:
    """‖ω‖² against training cost: λ of (32), and U of (40)."""
    seeds, rows = count or 3, []
    curve: dict[str, list[tuple[float, float]]] = {"Algorithm 1": [], "Algorithm 2": [], "Algorithm 2, tight": []}
    for penalty in LAMBDAS:
        one = _mean(
            [
                recorded(study, "samples", ssca("samples", 100), unconstrained(penalty), s, every=ROUNDS)
                for s in range(seeds)
            ]
        )
        curve["Algorithm 1"].append((one["cost"][-1], one["norm2"][-1]))
        rows.append({"algorithm": "Algorithm 1", "λ or U": penalty, "cost": one["cost"][-1], "‖ω‖²": one["norm2"][-1]})
    for name, settings in (("Algorithm 2", ssca("samples", 100)), ("Algorithm 2, tight", SSCA.preset("tight"))):
        for limit in LIMITS:
            one = _mean(
                [recorded(study, "samples", settings, constrained(limit), s, every=ROUNDS) for s in range(seeds)]
            )
            curve[name].append((one["cost"][-1], one["norm2"][-1]))
            rows.append({"algorithm": name, "λ or U": limit, "cost": one["cost"][-1], "‖ω‖²": one["norm2"][-1]})
    falls = {name: all(a[1] > b[1] for a, b in pairwise(v)) for name, v in curve.items()}
    claims: list[Claim] = [
        (f"{name}: a smaller norm costs accuracy", falls[name], listed([norm for _, norm in points]))
        for name, points in curve.items()
    ]
    costs = [cost for cost, _ in curve["Algorithm 2"]]
    near = all(abs(cost - limit) <= 0.1 * limit for cost, limit in zip(costs, LIMITS, strict=True))
    claims.append(
        ("Algorithm 2: U sets the training cost (within 10 %)", near, f"{listed(costs)} for {listed(LIMITS)}")
    )
    lines = {name: ([c for c, _ in points], [n for _, n in points], None) for name, points in curve.items()}
    draws = [partial(lines_over, lines, xlabel="training cost", ylabel="‖ω‖²", title=f"after {ROUNDS} rounds")]
    drawn = panels(draws, study.folder / "fig4", columns=1, title="Size against cost, B = 100", size=(5.5, 3.6))
    lead = LEAD.format(seeds=seeds) + f" λ from {LAMBDAS[0]:g} to {LAMBDAS[-1]:g} (the paper's is {PENALTY:g})."
    return study.finish("SSCA, Figure 4", lead, claims, {"Figure 4": drawn}, {"Ends": rows})


FIGURES = {
    "fig1": (
        "cost and test accuracy, data split by rows; 31 runs a seed, ten minutes each at B = 6,000",
        fig1,
    ),
    "fig2": ("cost and test accuracy, data split by features; 19 runs a seed", fig2),
    "fig3": ("rounds to a test accuracy against rows a round; the runs of Figures 1 and 2", fig3),
    "fig4": ("model size against training cost; 12 runs a seed", fig4),
}
