"""The figures of the FedPDM paper: Y. Li et al. 2023. The runs are those of fedpdm_cells.py.

A figure is drawn from lines: add a `Line` to `fig1` or `fig2` and it is run, drawn and tabled like the others.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np

from fedpact.core.history import History
from fedpact.papers.claims import Claim, listed
from fedpact.papers.fedpdm_cells import LOSSES, ROUNDS, Line, baselines, fedpdm, recorded, tuned
from fedpact.papers.fedpdm_private import privacy
from fedpact.papers.study import Study
from fedpact.report import curves, panels

LEAD = (
    f"MNIST, 100 clients, 5 a round, {ROUNDS} rounds, 10 steps on 30 rows each; means over {{seeds}} seeds. Loss is "
    "(1/N) Σ f_i on all training rows, without γ‖X‖₁, so that methods can be compared. η = 1/(ρ√(1+t)): the printed "
    "step diverges. The paper's noise, its ε by (20) with c_0 = 1 and G = 1, is no privacy guarantee."
)
EPSILONS, LOW = (10.0, 20.0, 30.0), 7.0
TITLES = {"printed": "(25) as printed", "one_vs_rest": "one-vs-rest", "softmax": "softmax"}


class Drawn(SimpleNamespace):
    """A line with its means over seeds, as plots take it."""

    name: str
    line: Line
    history: History


def _mean(study: Study, line: Line, seeds: int) -> Drawn:
    runs = [recorded(study, line, seed) for seed in range(seeds)]
    shortest = min(len(one["round"]) for one in runs)  # a run that diverged has fewer
    names = [name for name in runs[0] if name != "outcome"]
    history = History(names)
    history.extend({name: np.mean([one[name][:shortest] for one in runs], axis=0) for name in names})
    return Drawn(name=line.name, line=line, history=history)


def _draws(lines: Sequence[Drawn], loss: str) -> list[Callable[..., Any]]:
    return [
        partial(curves, lines, "loss", title=f"training loss, {TITLES[loss]}", logy=True),
        partial(curves, lines, "accuracy", title=f"test accuracy, {TITLES[loss]}"),
    ]


def _row(drawn: Drawn) -> dict[str, Any]:
    line, history = drawn.line, drawn.history
    zeros = {"zeros": history.end("sparsity")} if "sparsity" in history.columns else {}
    return {
        "loss": TITLES[line.loss],
        "method": line.name,
        "noise": line.kind,
        "ε in all": line.epsilon,
        "training loss": history.end("loss"),
        "test accuracy": history.end("accuracy"),
        **zeros,
    }


def _figure(
    study: Study, number: int, seeds: int, lines: Mapping[str, Sequence[Line]], claims: Callable[..., list[Claim]]
) -> dict[str, Any]:
    draws, rows, held = [], [], list[Claim]()
    for loss, these in lines.items():
        shown = [_mean(study, line, seeds) for line in these]
        draws += _draws(shown, loss)
        rows += [_row(one) for one in shown]
        held += claims(shown, TITLES[loss])
    drawn = panels(draws, study.folder / f"fig{number}", columns=2, title=f"FedPDM, Figure {number}")
    lead = LEAD.format(seeds=seeds)
    return study.finish(f"FedPDM, Figure {number}", lead, held, {f"Figure {number}": drawn}, {"Ends": rows})


def _of_noise(shown: Sequence[Drawn], what: str) -> list[Claim]:
    """Loss falls and accuracy rises, and both are better for a larger ε."""
    order = sorted(shown, key=lambda one: np.inf if one.line.epsilon is None else one.line.epsilon)
    ends = [one.history.end("loss") for one in order]
    scores = [one.history.end("accuracy") for one in order]
    falls = [one.history.end("loss") < one.history.column("loss")[0] for one in order]
    names = ", ".join("none" if one.line.epsilon is None else f"{one.line.epsilon:g}" for one in order)
    return [
        (f"{what}: the training loss falls", all(falls), f"{sum(falls)} of {len(falls)} lines"),
        (
            f"{what}: the larger ε, the lower the loss",
            all(a > b for a, b in pairwise(ends)),
            f"{names}: {listed(ends)}",
        ),
        (
            f"{what}: the larger ε, the higher the accuracy",
            all(a < b for a, b in pairwise(scores)),
            f"{names}: {listed(scores)}",
        ),
    ]


def _of_methods(shown: Sequence[Drawn], what: str) -> list[Claim]:
    """FedPDM is ahead of the others that have no noise, as they are and tuned."""
    plain = [one for one in shown if one.line.kind == "none"]
    mine, others = plain[0], [one for one in plain[1:] if not one.name.startswith("FedPDM")]
    claims: list[Claim] = []
    for better in (False, True):
        these = [one for one in others if one.name.endswith(", tuned") == better]
        score = lambda one: one.history.end("accuracy")
        told = "; ".join(f"{one.name} {score(one):.4f}" for one in (mine, *these))
        claim = f"{what}: FedPDM has a higher test accuracy than every {'tuned ' * better}baseline"
        claims.append((claim, all(score(mine) > score(one) for one in these), told))
    return claims


def fig1(study: Study, count: int | None) -> dict[str, Any]:
    """Training loss and test accuracy of FedPDM under ε in all of 10, 20, 30, and without noise."""
    lines = {loss: [*(fedpdm(loss, epsilon) for epsilon in EPSILONS), fedpdm(loss)] for loss in LOSSES}
    return _figure(study, 1, count or 1, lines, _of_noise)


def fig2(study: Study, count: int | None) -> dict[str, Any]:
    """FedPDM against FedAvg, FedProx and SCAFFOLD."""

    def of(loss: str) -> list[Line]:
        plain = [Line(name, loss, settings) for name, settings in baselines().items()]
        better = [tuned(study, loss, name) for name in baselines()]
        own = [fedpdm(loss), fedpdm(loss, start="global"), fedpdm(loss, LOW)]
        return [*own, *plain, *better]

    return _figure(study, 2, count or 1, {loss: of(loss) for loss in LOSSES}, _of_methods)


FIGURES = {
    "fig1": ("loss and test accuracy under the paper's noise, three losses; 12 runs a seed", fig1),
    "fig2": ("against FedAvg, FedProx and SCAFFOLD, three losses; 27 runs a seed", fig2),
    "privacy": ("accuracy against ε with a real accountant, four methods tuned; 108 runs", privacy),
}
