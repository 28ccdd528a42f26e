"""The figures and the table of the FedEPM paper: S. Zhou and G. Y. Li, "Exact Penalty Method for Federated Learning".

Adult, random cut points, logistic regression with β=1e-3 divided by d_i, noise (39), at most 150 rounds. Runs end by
the rule of the authors' released code: ‖∇f/m‖² < tol, or the variance of the last four f below tol/(1+f), or f and the
gradient both above their last three, with f = Σ f_i and tol = 1e-9·n. Figure 2 gives CR by the printed rule too (‖∇f‖²
< 1e-6, or the variance at most n·1e-8/(1+|f|)), which averages over a part of the clients rarely meet. Every trial has
its own split, cohorts and noise. CR, f/m and SNR come from trials run side by side; TCT and LCT from runs one after
the other on one split, with a clock around the clients' and the server's steps, compilation and telemetry left out.
The baselines are shown twice: with the paper's step (38), and with γ_i = scale/r_i, scale chosen by `fedpact.tune`
(successive halving over 0.3, 1, 1.9 at k0=12, ε=0.1, ρ=0.5, seed 0, 27 rounds, best objective).
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache, partial
from itertools import pairwise
from typing import Any

import numpy as np

from fedpact import data
from fedpact.algorithms import FedEPM, SFedAvg, SFedProx
from fedpact.core.settings import Settings
from fedpact.core.stop import GradientNorm, Rising, Rule, Variance, first_fired
from fedpact.engines import LocalEngine
from fedpact.papers.study import Claim, Study
from fedpact.problems import Logistic
from fedpact.report import boxes, curves, lines_over, panels
from fedpact.run import run, trials
from fedpact.tune import tune

PROBLEM = Logistic(l2=1e-3)
ROUNDS = 150
TIMED = 3  # sequential runs behind each time
K0S, MS = (4, 8, 12, 16, 20), (50, 100)
SCALES = (0.3, 1.0, 1.9)
PAPER = ("FedEPM", "SFedAvg", "SFedProx")
ALL = (*PAPER, "SFedAvg tuned", "SFedProx tuned")
NOTICE = "Noise (39) is the paper's: no guarantee of privacy."


@cache
def _adult() -> data.Dataset:
    return data.adult()


@cache
def _split(m: int, seed: int) -> data.Federation:
    return _adult().split(clients=m, how="cuts", seed=seed)


def printed_stop(m: int, n: int) -> Rule:
    """The printed rule in terms of f = Σ f_i, where the history reports means over the m clients."""
    return GradientNorm(1e-6 / m**2) | Variance(n * 1e-8, window=4, scale=m)


def released_stop(m: int, n: int) -> Rule:
    """The rule of the released code."""
    return GradientNorm(1e-9 * n) | Variance(1e-9 * n, window=4, scale=m) | Rising(window=4)


def _tuned_scale(study: Study, cls: type[Settings], m: int) -> float:
    def search() -> float:
        start = cls.from_dict({"k0": 12, "step": "lipschitz", "epsilon": 0.1})
        found = tune(
            start, PROBLEM, _split(m, 0), {"scale": SCALES}, rounds=27, participation=0.5, engine=LocalEngine(buckets=2)
        )
        return float(found.settings.to_dict()["scale"])

    return study.cell(search, tune=cls.name, m=m)


def _settings(study: Study, name: str, m: int, k0: int, epsilon: float) -> Settings:
    cls: type[Settings] = {"FedEPM": FedEPM, "SFedAvg": SFedAvg, "SFedProx": SFedProx}[name.split()[0]]
    values: dict[str, Any] = {"k0": k0, "epsilon": epsilon}
    if name.endswith("tuned"):
        values |= {"step": "lipschitz", "scale": _tuned_scale(study, cls, m)}
    return cls.from_dict(values)


def _outcomes(
    study: Study, name: str, m: int, k0: int, rho: float, epsilon: float, count: int
) -> dict[str, list[float]]:
    """CR, f/m and SNR of `count` trials."""

    def compute() -> dict[str, list[float]]:
        done = trials(
            _settings(study, name, m, k0, epsilon),
            PROBLEM,
            [_split(m, seed) for seed in range(count)],
            list(range(count)),
            participation=rho,
            rounds=ROUNDS,
            stop=released_stop(m, _adult().features),
            engine=LocalEngine(buckets=2),
        )
        return {
            "cr": [float(one.history.rounds) for one in done],
            "objective": [one.history.last("objective") for one in done],
            "snr": [one.history.last("snr") for one in done],
        }

    return study.cell(compute, name=name, m=m, k0=k0, rho=rho, epsilon=epsilon, trials=count)


def _times(study: Study, name: str, m: int, k0: int, rho: float, epsilon: float) -> dict[str, list[float]]:
    """TCT and LCT of runs one after the other, on one split so that they are compiled once."""

    def compute() -> dict[str, list[float]]:
        out: dict[str, list[float]] = {"tct": [], "lct": []}
        for seed in range(TIMED):
            one = run(
                _settings(study, name, m, k0, epsilon),
                PROBLEM,
                _split(m, 0),
                seed=seed,
                participation=rho,
                rounds=ROUNDS,
                stop=released_stop(m, _adult().features),
                timing=True,
                engine=LocalEngine(buckets=2),
            )
            out["tct"].append(one.history.last("seconds"))
            out["lct"].append(float(np.median(one.history.column("local_seconds")[1:])))
        return out

    return study.cell(compute, timed=name, m=m, k0=k0, rho=rho, epsilon=epsilon)


def _below(mine: Iterable[float], others: Iterable[Iterable[float]]) -> bool:
    return all(a < b for other in others for a, b in zip(mine, other, strict=True))


def _list(values: Iterable[float], form: str = ".3g") -> str:
    return ", ".join(format(v, form) for v in values)


def _rounds(rule: Rule, one: Any) -> float:
    """CR of a recorded run under a rule; what never fires counts as one more than was run."""
    fired = first_fired(rule, {name: one.history.column(name) for name in rule.reads})
    return float(one.history.rounds + 1 if fired is None else fired)


def fig2(study: Study, count: int | None) -> dict[str, Any]:
    """Objective against communication rounds, m ∈ {50, 100}, k0 ∈ {4, 12, 20}."""
    n, draws, rows, claims = _adult().features, [], [], list[Claim]()
    cr: dict[str, dict[str, list[float]]] = {rule: {name: [] for name in ALL} for rule in ("released", "printed")}
    spread, places = [], [(m, k0) for m in MS for k0 in (4, 12, 20)]
    for m, k0 in places:
        runs, ends = [], dict[str, float]()
        for name in ALL:
            settings = _settings(study, name, m, k0, 0.1)
            one = run(
                settings,
                PROBLEM,
                _split(m, 0),
                name=name,
                participation=0.5,
                rounds=ROUNDS,
                engine=LocalEngine(buckets=2),
            )
            study.say(f"m={m} k0={k0} {name}: f/m {one.summary['objective']:.6f}")
            runs.append(one)
            cr["released"][name].append(_rounds(released_stop(m, n), one))
            cr["printed"][name].append(_rounds(printed_stop(m, n), one))
            f = one.history.column("objective")
            ends[name] = float(f[min(int(cr["released"][name][-1]), ROUNDS)])
            row = {"m": m, "k0": k0, "algorithm": name, "f/m at the stop": ends[name], f"f/m at {ROUNDS}": float(f[-1])}
            counts = {f"CR, {rule} rule": cr[rule][name][-1] for rule in cr}
            rows.append(row | {what: f"> {ROUNDS}" if value > ROUNDS else int(value) for what, value in counts.items()})
        spread.append(max(ends[name] for name in PAPER) / min(ends[name] for name in PAPER) - 1)
        draws.append(partial(curves, runs, "objective", title=f"m = {m}, k0 = {k0}", logx=True))
    figure = panels(draws, study.folder / "fig2", columns=3, title="Objective f/m against communication rounds")
    same = max(spread) < 0.01
    claims.append(
        ("the three algorithms stop at the same objective (within 1 %)", same, f"spreads {_list(spread, '.2%')}")
    )
    for rule, values in cr.items():
        claims.append(_fewest(values, PAPER[1:], f"FedEPM uses the fewest CR for each k0 ({rule} rule)", places))
        claims.append(_fewest(values, ALL[3:], f"… also against tuned baselines ({rule} rule)", places))
    lead = f"Objective against rounds; ε=0.1, ρ=0.5, one seed; a CR of {ROUNDS + 1} means more than {ROUNDS}. {NOTICE}"
    return study.finish("FedEPM, Figure 2", lead, claims, {"Figure 2": figure}, {"Ends": rows})


def _fewest(values: dict[str, list[float]], others: Iterable[str], claim: str, where: list[Any]) -> Claim:
    names = list(others)
    wins = sum(values["FedEPM"][i] < min(values[name][i] for name in names) for i in range(len(where)))
    detail = "; ".join(f"{name} {_list(values[name])}" for name in ("FedEPM", *names))
    return claim, wins == len(where), f"true in {wins} of {len(where)} settings. {detail}"


def fig3(study: Study, count: int | None) -> dict[str, Any]:
    """CR and TCT against k0, m ∈ {50, 100}; means over the trials."""
    trials_, draws, rows, claims = count or 20, [], [], list[Claim]()
    for m in MS:
        cr, tct = {}, {}
        for name in ALL:
            ends = [_outcomes(study, name, m, k0, 0.5, 0.1, trials_) for k0 in K0S]
            times = [_times(study, name, m, k0, 0.5, 0.1) for k0 in K0S]
            cr[name] = [float(np.mean(e["cr"])) for e in ends], [float(np.std(e["cr"])) for e in ends]
            tct[name] = [float(np.mean(t["tct"])) for t in times], [float(np.std(t["tct"])) for t in times]
            rows += [
                {"m": m, "k0": k0, "algorithm": name, "CR": c, "TCT": t, "f/m": np.mean(e["objective"])}
                for k0, c, t, e in zip(K0S, cr[name][0], tct[name][0], ends, strict=True)
            ]
        for what, values in (("CR", cr), ("TCT (s)", tct)):
            series = {name: (K0S, *values[name]) for name in ALL}
            draws.append(partial(lines_over, series, xlabel="k0", ylabel=what, title=f"m = {m}", logy=True))
        for what, values in (("CR", cr), ("TCT", tct)):
            fell = {name: values[name][0][-1] < values[name][0][0] for name in PAPER}
            detail = "; ".join(f"{name} {_list(values[name][0])}" for name in PAPER)
            claims.append(
                (f"m={m}: the bigger k0, the smaller {what} (k0=20 against k0=4)", all(fell.values()), detail)
            )
            plain = {name: list(values[name][0]) for name in ALL}
            claims.append(_fewest(plain, PAPER[1:], f"m={m}: FedEPM has the smallest {what} for each k0", list(K0S)))
            claims.append(_fewest(plain, ALL[3:], f"m={m}: … also against tuned baselines ({what})", list(K0S)))
        fewer = _below(cr["SFedProx"][0], [cr["SFedAvg"][0]])
        claims.append(
            (
                f"m={m}: SFedProx uses fewer CR than SFedAvg",
                fewer,
                f"{_list(cr['SFedProx'][0])} against {_list(cr['SFedAvg'][0])}",
            )
        )
    figure = panels(draws, study.folder / "fig3", columns=2, title="Effect of k0")
    lead = f"Means over {trials_} trials (TCT: {TIMED} runs); ε=0.1, ρ=0.5, at most {ROUNDS} rounds. {NOTICE}"
    return study.finish("FedEPM, Figure 3", lead, claims, {"Figure 3": figure}, {"Means": rows})


def table1(study: Study, count: int | None) -> dict[str, Any]:
    """LCT, the clients' time between two communications, against k0; m = 50, 100 and 128."""
    rows, claims = [], list[Claim]()
    for m in (50, 100, 128):
        lct = {name: [float(np.mean(_times(study, name, m, k0, 0.5, 0.1)["lct"])) for k0 in K0S] for name in PAPER}
        rows += [{"m": m, "k0": k0, **{name: 1e3 * lct[name][i] for name in PAPER}} for i, k0 in enumerate(K0S)]
        detail = "; ".join(f"{name} {_list(1e3 * v for v in lct[name])} ms" for name in PAPER)
        claims.append(
            (
                f"m={m}: LCT of FedEPM is below both baselines for each k0",
                _below(lct["FedEPM"], [lct["SFedAvg"], lct["SFedProx"]]),
                detail,
            )
        )
        claims.append(
            (f"m={m}: SFedProx has the largest LCT for each k0", _below(lct["SFedAvg"], [lct["SFedProx"]]), detail)
        )
        for name in PAPER:
            rising = all(a < b for a, b in pairwise(lct[name]))
            claims.append((f"m={m}: LCT of {name} rises with k0", rising, _list(1e3 * v for v in lct[name]) + " ms"))
    lead = (
        "Milliseconds for all selected clients together (ρ=0.5, ε=0.1), vectorised on this machine; the paper's are "
        "MATLAB loops on another. Its table says m=128, its text m=100: both are here."
    )
    return study.finish("FedEPM, Table I", lead, claims, {}, {"LCT in milliseconds": rows})


def _box_study(study: Study, count: int | None, values: tuple[float, ...], vary: str) -> dict[str, Any]:
    """CR, TCT and SNR in boxes against ρ or ε."""
    trials_ = count or 20
    found: dict[str, dict[str, dict[float, np.ndarray]]] = {
        what: {name: {} for name in ALL} for what in ("CR", "TCT (s)", "SNR")
    }
    for name in ALL:
        for value in values:
            rho, epsilon = (value, 0.1) if vary == "ρ" else (0.5, value)
            ends = _outcomes(study, name, 50, 12, rho, epsilon, trials_)
            times = _times(study, name, 50, 12, rho, epsilon)
            found["CR"][name][value] = np.array(ends["cr"])
            found["TCT (s)"][name][value] = np.array(times["tct"])
            found["SNR"][name][value] = np.array(ends["snr"])
    medians = {w: {n: [float(np.median(found[w][n][v])) for v in values] for n in ALL} for w in found}
    rows = [
        {vary: v, "algorithm": n, **{w: medians[w][n][i] for w in found}} for n in ALL for i, v in enumerate(values)
    ]
    return {"found": found, "medians": medians, "rows": rows, "trials": trials_}


def fig4(study: Study, count: int | None) -> dict[str, Any]:
    """CR and TCT in boxes against ρ; m=50, k0=12, ε=0.1."""
    rhos = (0.2, 0.4, 0.6, 0.8, 1.0)
    got = _box_study(study, count, rhos, "ρ")
    med, claims = got["medians"], list[Claim]()
    for name in PAPER:
        cr, tct = med["CR"][name], med["TCT (s)"][name]
        claims.append((f"{name}: CR falls as ρ rises (1.0 against 0.2)", cr[-1] < cr[0], f"medians {_list(cr)}"))
        claims.append((f"{name}: TCT rises with ρ (1.0 against 0.2)", tct[-1] > tct[0], f"medians {_list(tct)} s"))
    for what in ("CR", "TCT (s)"):
        claims.append(_fewest(med[what], PAPER[1:], f"FedEPM has the lowest median {what} for each ρ", list(rhos)))
        claims.append(_fewest(med[what], ALL[3:], f"… also against tuned baselines ({what})", list(rhos)))
    draws = [partial(boxes, got["found"][w], xlabel="ρ", ylabel=w, logy=True) for w in ("CR", "TCT (s)")]
    figure = panels(draws, study.folder / "fig4", columns=2, title="Effect of ρ", size=(5.5, 3.6))
    lead = f"{got['trials']} trials (TCT: {TIMED} runs); m=50, k0=12, ε=0.1, at most {ROUNDS} rounds. {NOTICE}"
    return study.finish("FedEPM, Figure 4", lead, claims, {"Figure 4": figure}, {"Medians": got["rows"]})


def fig5(study: Study, count: int | None) -> dict[str, Any]:
    """CR, TCT and SNR in boxes against ε; m=50, k0=12, ρ=0.5."""
    epsilons = (0.1, 0.3, 0.5, 0.7, 0.9)
    got = _box_study(study, count, epsilons, "ε")
    med, claims = got["medians"], list[Claim]()
    for name in PAPER:
        for what in ("CR", "TCT (s)"):
            ratio = max(med[what][name]) / min(med[what][name])
            claims.append(
                (
                    f"{name}: ε hardly changes {what} (medians within a factor 1.5)",
                    ratio < 1.5,
                    f"medians {_list(med[what][name])}",
                )
            )
        snr = med["SNR"][name]
        claims.append(
            (
                f"{name}: SNR rises with ε",
                all(a < b for a, b in pairwise(snr)),
                f"medians {_list(snr)}",
            )
        )
    for others, words in ((PAPER[1:], ""), (ALL[3:], ", baselines tuned")):
        claims.append(_fewest(med["SNR"], others, f"FedEPM has the smallest SNR for each ε{words}", list(epsilons)))
        claims.append(_fewest(med["CR"], others, f"FedEPM has the lowest median CR for each ε{words}", list(epsilons)))
    draws = [partial(boxes, got["found"][w], xlabel="ε", ylabel=w, logy=w != "SNR") for w in ("CR", "TCT (s)", "SNR")]
    figure = panels(draws, study.folder / "fig5", columns=2, title="Effect of ε", size=(5.5, 3.6))
    lead = (
        f"{got['trials']} trials (TCT: {TIMED} runs); m=50, k0=12, ρ=0.5, at most {ROUNDS} rounds. {NOTICE} "
        "A small SNR is much noise, not privacy."
    )
    return study.finish("FedEPM, Figure 5", lead, claims, {"Figure 5": figure}, {"Medians": got["rows"]})


FIGURES = {
    "fig2": ("objective against rounds (the caption says TCT against k0)", fig2),
    "fig3": ("CR and TCT against k0", fig3),
    "table1": ("LCT against k0", table1),
    "fig4": ("CR and TCT against ρ", fig4),
    "fig5": ("CR, TCT and SNR against ε", fig5),
}
