"""The figures and the table of the FedEPM paper: S. Zhou and G. Y. Li, "Exact Penalty Method for Federated Learning".

The runs are those of fedepm_cells.py. They end by the rule of the authors' released code: ‖∇f/m‖² < tol, or the
variance of the last four f below tol/(1+f), or f and the gradient both above their last three, with f = Σ f_i and tol =
1e-9·n. Figure 2 gives CR by the printed rule too (‖∇f‖² < 1e-6, or the variance at most n·1e-8/(1+|f|)), which the
baselines rarely meet: their local steps lead to each client's own minimiser, so that their mean settles away from w*,
also with everyone taking part. FedEPM takes its gradient at w: at a fixed point Σ g_i(w) = 0 where no w_ij = w_j.
The baselines are shown twice: with the paper's step (38), and with γ_i = scale/r_i, scale chosen by `fedpact.tune`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np

from fedpact.core.history import History
from fedpact.core.stop import Outcome
from fedpact.papers.claims import Claim, below, fewest, listed, mean, rises
from fedpact.papers.fedepm_cells import (
    ROUNDS,
    TIMED,
    adult,
    outcomes,
    printed_stop,
    recorded,
    released_stop,
    rounds_needed,
    times,
)
from fedpact.papers.study import Study
from fedpact.report import boxes, curves, lines_over, panels

K0S, MS = (4, 8, 12, 16, 20), (50, 100)
PAPER = ("FedEPM", "SFedAvg", "SFedProx")
ALL = (*PAPER, "SFedAvg tuned", "SFedProx tuned")
NOTICE = "Noise (39) is the paper's: no guarantee of privacy."
TUNED = (
    "Tuned: γ_i = scale/r_i, for each m the best of 0.3, 1 and 1.9 after 27 rounds at k0=12, ε=0.1, ρ=0.5, seed 0, "
    "and used for every k0, ε and ρ."
)
TIMES = (
    "Times are of all m clients' work: the engine steps everyone and masks those who were not drawn, unless so few are "
    "drawn that it gathers them."
)
CAPPED = f"A run that did not stop in {ROUNDS} rounds, or ended in a non-finite number, counts CR {ROUNDS + 1}"


def _unfinished(ended: Iterable[str]) -> dict[str, int]:
    """How many runs were capped, and how many ended in a non-finite number."""
    ends = Counter(ended)
    return {"capped": ends[Outcome.ROUNDS.name], "not finite": ends[Outcome.NONFINITE.name]}


def _lead(opening: str, rows: Iterable[dict[str, Any]]) -> str:
    """What the reader of a figure of trials must know, with how many of them did not stop."""
    sums = Counter[str]()
    for row in rows:
        sums.update({what: row[what] for what in ("trials", "capped", "not finite")})
    lost = f"of {sums['trials']} trials {sums['capped']} and {sums['not finite']}"
    return f"{opening}; TCT: {TIMED} runs; released rule. {CAPPED} ({lost}). {TIMES} {TUNED} {NOTICE}"


def _curve(name: str, columns: dict[str, Any]) -> Any:
    """Recorded columns as a plot wants its runs."""
    history = History(("round", "objective"))
    history.extend({column: np.asarray(columns[column]) for column in history.columns})
    return SimpleNamespace(name=name, history=history)


def fig2(study: Study) -> dict[str, Any]:
    """Objective against communication rounds, m ∈ {50, 100}, k0 ∈ {4, 12, 20}."""
    n, draws, rows, claims = adult().features, [], list[dict[str, Any]](), list[Claim]()
    rules = {"released": released_stop, "printed": printed_stop}
    cr: dict[str, dict[str, Sequence[float]]] = {rule: {name: [] for name in ALL} for rule in rules}
    places = [(m, k0) for m in MS for k0 in (4, 12, 20)]
    spread: dict[str, list[float]] = {"at the stop": [], f"at {ROUNDS}": []}
    for m, k0 in places:
        found = {name: recorded(study, name, m, k0, 0.5, 0.1) for name in ALL}
        ends: dict[str, dict[str, float]] = {when: {} for when in spread}
        for name, one in found.items():
            needed = {rule: rounds_needed(stop(m, n), one) for rule, stop in rules.items()}
            for rule, value in needed.items():
                cr[rule][name] = [*cr[rule][name], value]
            f = one["objective"]
            ends["at the stop"][name] = f[min(needed["released"], len(f) - 1)]
            ends[f"at {ROUNDS}"][name] = f[-1] if len(f) > ROUNDS else float("nan")
            counts = {f"CR, {rule} rule": f"> {ROUNDS}" if v > ROUNDS else v for rule, v in needed.items()}
            lost = f"not finite after {len(f) - 1} rounds" if one["ended"] == Outcome.NONFINITE.name else ""
            values = {f"f/m {when}": ends[when][name] for when in ends}
            rows.append({"m": m, "k0": k0, "algorithm": name, **values, **counts, "": lost})
        for when, of in ends.items():
            three = [of[name] for name in PAPER]
            spread[when].append(float(np.max(three) / np.min(three)) - 1)  # NaN where one of them is
        runs = [_curve(name, one) for name, one in found.items()]
        draws.append(partial(curves, runs, "objective", title=f"m = {m}, k0 = {k0}", logx=True))
    figure = panels(draws, study.folder / "fig2", columns=3, title="Objective f/m against communication rounds")
    for when, of_all in spread.items():
        claim = f"the three algorithms have the same objective {when} (within 1 %)"
        claims.append((claim, all(s < 0.01 for s in of_all), f"spreads {listed(of_all, '.2%')}"))
    for rule, by_name in cr.items():
        claims.append(
            fewest(by_name, "FedEPM", PAPER[1:], f"FedEPM uses the fewest CR for each k0 ({rule} rule)", places)
        )
        claims.append(fewest(by_name, "FedEPM", ALL[3:], f"… also against tuned baselines ({rule} rule)", places))
    lead = (
        f"Objective against rounds; ε=0.1, ρ=0.5, one seed; stopped by the released rule or at {ROUNDS}. "
        f"{CAPPED}. {TUNED} {NOTICE}"
    )
    return study.finish("FedEPM, Figure 2", lead, claims, {"Figure 2": figure}, {"Ends": rows})


def fig3(study: Study, count: int | None) -> dict[str, Any]:
    """CR and TCT against k0, m ∈ {50, 100}; means over the trials."""
    trials, draws, rows, claims = count or 20, [], list[dict[str, Any]](), list[Claim]()
    for m in MS:
        ends = {name: [outcomes(study, name, m, k0, 0.5, 0.1, trials) for k0 in K0S] for name in ALL}
        clocks = {name: [times(study, name, m, k0, 0.5, 0.1) for k0 in K0S] for name in ALL}
        cr = {name: [mean(e["cr"]) for e in ends[name]] for name in ALL}
        tct = {name: [mean(t["tct"]) for t in clocks[name]] for name in ALL}
        for name in ALL:
            for i, (k0, e) in enumerate(zip(K0S, ends[name], strict=True)):
                means = {"CR": cr[name][i][0], "TCT": tct[name][i][0], "f/m": float(np.mean(e["objective"]))}
                why = {"trials": trials, **_unfinished(e["ended"])}
                rows.append({"m": m, "k0": k0, "algorithm": name, **means, **why})
        for what, values in (("CR", cr), ("TCT (s)", tct)):
            lines = {name: (K0S, [v[0] for v in values[name]], [v[1] for v in values[name]]) for name in ALL}
            draws.append(partial(lines_over, lines, xlabel="k0", ylabel=what, title=f"m = {m}", logy=True))
        for what, values in (("CR", cr), ("TCT", tct)):
            plain: dict[str, Sequence[float]] = {name: [mean for mean, _ in values[name]] for name in ALL}
            fell = all(plain[name][-1] < plain[name][0] for name in PAPER)
            detail = "; ".join(f"{name} {listed(plain[name])}" for name in PAPER)
            claims.append((f"m={m}: the bigger k0, the smaller {what} (k0=20 against k0=4)", fell, detail))
            claims.append(fewest(plain, "FedEPM", PAPER[1:], f"m={m}: FedEPM has the smallest {what} for each k0", K0S))
            claims.append(fewest(plain, "FedEPM", ALL[3:], f"m={m}: … also against tuned baselines ({what})", K0S))
        prox, avg = ([mean for mean, _ in cr[name]] for name in ("SFedProx", "SFedAvg"))
        claim = f"m={m}: SFedProx uses fewer CR than SFedAvg"
        claims.append((claim, below(prox, [avg]), f"{listed(prox)} against {listed(avg)}"))
    figure = panels(draws, study.folder / "fig3", columns=2, title="Effect of k0")
    lead = _lead(f"Means over {trials} trials; ε=0.1, ρ=0.5", rows)
    return study.finish("FedEPM, Figure 3", lead, claims, {"Figure 3": figure}, {"Means": rows})


def table1(study: Study) -> dict[str, Any]:
    """LCT, the clients' time between two communications, against k0; m = 50, 100 and 128."""
    rows, claims = [], list[Claim]()
    for m in (50, 100, 128):
        lct = {name: [float(np.mean(times(study, name, m, k0, 0.5, 0.1)["lct"])) for k0 in K0S] for name in PAPER}
        rows += [{"m": m, "k0": k0, **{name: 1e3 * lct[name][i] for name in PAPER}} for i, k0 in enumerate(K0S)]
        detail = "; ".join(f"{name} {listed(1e3 * v for v in lct[name])} ms" for name in PAPER)
        least = below(lct["FedEPM"], [lct["SFedAvg"], lct["SFedProx"]])
        claims.append((f"m={m}: LCT of FedEPM is below both baselines for each k0", least, detail))
        most = below(lct["SFedAvg"], [lct["SFedProx"]]) and below(lct["FedEPM"], [lct["SFedProx"]])
        claims.append((f"m={m}: SFedProx has the largest LCT for each k0", most, detail))
        for name in PAPER:
            shown = listed(1e3 * v for v in lct[name]) + " ms"
            claims.append((f"m={m}: LCT of {name} rises with k0", rises(lct[name]), shown))
    lead = (
        f"Milliseconds of a round (ρ=0.5, ε=0.1), vectorised on this machine; the paper's are MATLAB loops on another. "
        f"{TIMES} Its table says m=128, its text m=100: both are here."
    )
    return study.finish("FedEPM, Table I", lead, claims, {}, {"LCT in milliseconds": rows})


def _box_study(study: Study, count: int | None, values: Sequence[float], vary: str) -> dict[str, Any]:
    """CR, TCT and SNR in boxes against ρ or ε."""
    trials, rows = count or 20, list[dict[str, Any]]()
    found: dict[str, dict[str, dict[float, np.ndarray]]] = {
        what: {name: {} for name in ALL} for what in ("CR", "TCT (s)", "SNR")
    }
    for name in ALL:
        for value in values:
            rho, epsilon = (value, 0.1) if vary == "ρ" else (0.5, value)
            ends = outcomes(study, name, 50, 12, rho, epsilon, trials)
            found["CR"][name][value] = np.array(ends["cr"])
            found["TCT (s)"][name][value] = np.array(times(study, name, 50, 12, rho, epsilon)["tct"])
            found["SNR"][name][value] = np.array(ends["snr"])
            middle = {what: float(np.median(of[name][value])) for what, of in found.items()}
            why = {"trials": trials, **_unfinished(ends["ended"])}
            rows.append({vary: value, "algorithm": name, **middle, **why})
    medians = {w: {n: [float(np.median(found[w][n][v])) for v in values] for n in ALL} for w in found}
    return {"found": found, "medians": medians, "rows": rows, "trials": trials}


def fig4(study: Study, count: int | None) -> dict[str, Any]:
    """CR and TCT in boxes against ρ; m=50, k0=12, ε=0.1."""
    rhos = (0.2, 0.4, 0.6, 0.8, 1.0)
    got = _box_study(study, count, rhos, "ρ")
    med, claims = got["medians"], list[Claim]()
    for name in PAPER:
        cr, tct = med["CR"][name], med["TCT (s)"][name]
        claims.append((f"{name}: CR falls as ρ rises (1.0 against 0.2)", cr[-1] < cr[0], f"medians {listed(cr)}"))
        why = "not tested: a time here is of all m clients' work, masked, not of that of the ρm drawn"
        claims.append((f"{name}: TCT rises with ρ", None, f"{why}; medians {listed(tct)} s"))
    for what in ("CR", "TCT (s)"):
        claims.append(fewest(med[what], "FedEPM", PAPER[1:], f"FedEPM has the lowest median {what} for each ρ", rhos))
        claims.append(fewest(med[what], "FedEPM", ALL[3:], f"… also against tuned baselines ({what})", rhos))
    draws = [partial(boxes, got["found"][w], xlabel="ρ", ylabel=w, logy=True) for w in ("CR", "TCT (s)")]
    figure = panels(draws, study.folder / "fig4", columns=2, title="Effect of ρ", size=(5.5, 3.6))
    lead = _lead(f"{got['trials']} trials; m=50, k0=12, ε=0.1", got["rows"])
    return study.finish("FedEPM, Figure 4", lead, claims, {"Figure 4": figure}, {"Medians": got["rows"]})


def fig5(study: Study, count: int | None) -> dict[str, Any]:
    """CR, TCT and SNR in boxes against ε; m=50, k0=12, ρ=0.5."""
    epsilons = (0.1, 0.3, 0.5, 0.7, 0.9)
    got = _box_study(study, count, epsilons, "ε")
    med, claims = got["medians"], list[Claim]()
    for name in PAPER:
        for what in ("CR", "TCT (s)"):
            even = bool(np.max(med[what][name]) < 1.5 * np.min(med[what][name]))
            claim = f"{name}: ε hardly changes {what} (medians within a factor 1.5)"
            claims.append((claim, even, f"medians {listed(med[what][name])}"))
        snr = med["SNR"][name]
        claims.append((f"{name}: SNR rises with ε (the text prints ρ)", rises(snr), f"medians {listed(snr)}"))
    for others, words in ((PAPER[1:], ""), (ALL[3:], ", baselines tuned")):
        claims.append(fewest(med["SNR"], "FedEPM", others, f"FedEPM has the smallest SNR for each ε{words}", epsilons))
        for what in ("CR", "TCT (s)"):
            claims.append(
                fewest(med[what], "FedEPM", others, f"FedEPM has the lowest median {what} for each ε{words}", epsilons)
            )
    draws = [partial(boxes, got["found"][w], xlabel="ε", ylabel=w, logy=w != "SNR") for w in ("CR", "TCT (s)", "SNR")]
    figure = panels(draws, study.folder / "fig5", columns=2, title="Effect of ε", size=(5.5, 3.6))
    lead = _lead(f"{got['trials']} trials; m=50, k0=12, ρ=0.5", got["rows"])
    lead += " A small SNR is much noise, not privacy."
    return study.finish("FedEPM, Figure 5", lead, claims, {"Figure 5": figure}, {"Medians": got["rows"]})


FIGURES = {
    "fig2": ("objective against rounds (the caption says TCT against k0); 30 runs", fig2),
    "fig3": ("CR and TCT against k0; 50 cells of 20 trials, 150 timed runs", fig3),
    "table1": ("LCT against k0; 135 timed runs", table1),
    "fig4": ("CR and TCT against ρ; 25 cells of 20 trials, 75 timed runs", fig4),
    "fig5": ("CR, TCT and SNR against ε; 25 cells of 20 trials, 75 timed runs", fig5),
}
