"""Which claims the FedEPM figures say hold: the logic on made-up cells, without a run."""

from __future__ import annotations

import math
from types import SimpleNamespace

import numpy as np
import pytest

from fedpact.papers import fedepm
from fedpact.papers.claims import below, fewest, mean, rises
from fedpact.papers.fedepm import ALL, PAPER, _unfinished
from fedpact.papers.study import Study

#: Smaller is better: FedEPM 10, its baselines 100 and 50, tuned 4 and 3.
LEVEL = {"FedEPM": 10.0, "SFedAvg": 100.0, "SFedProx": 50.0, "SFedAvg tuned": 4.0, "SFedProx tuned": 3.0}


class Claims:
    """A study that keeps what it is handed."""

    def __init__(self, folder):
        self.folder = folder

    def finish(self, title, lead, claims, figures, tables):
        self.lead, self.tables = lead, tables
        self.claims = {claim: (holds, detail) for claim, holds, detail in claims}
        assert len(self.claims) == len(claims), "two claims with one text"
        return self

    def holds(self, start):
        """The verdict of the one claim that starts so."""
        (found,) = [holds for claim, (holds, _) in self.claims.items() if claim.startswith(start)]
        return found


@pytest.fixture
def draw(monkeypatch, tmp_path):
    """draw(figure, cr=…, tct=…, lct=…, snr=…, ended=…): the figure's claims, from cells of given(name, k0, ρ, ε)."""

    def made(figure, *, count=(2,), **given):
        value = {
            "cr": lambda name, k0, rho, epsilon: LEVEL[name] / k0 / rho,
            "tct": lambda name, k0, rho, epsilon: LEVEL[name] / k0,
            "lct": lambda name, k0, rho, epsilon: {"FedEPM": 1, "SFedAvg": 2, "SFedProx": 3}[name] * k0,
            "snr": lambda name, k0, rho, epsilon: math.log10(epsilon) - 1 / LEVEL[name],
            "ended": lambda name, k0, rho, epsilon: ["STOPPED", "STOPPED"],
        } | given
        of = lambda what, name, k0, rho, epsilon: [value[what](name, k0, rho, epsilon)] * 2

        def outcomes(study, name, m, k0, rho, epsilon, trials):
            kept = {what: of(what, name, k0, rho, epsilon) for what in ("cr", "snr")}
            return kept | {"objective": [0.5, 0.5], "ended": value["ended"](name, k0, rho, epsilon)}

        def times(study, name, m, k0, rho, epsilon):
            return {what: of(what, name, k0, rho, epsilon) for what in ("tct", "lct") if what == "tct" or name in PAPER}

        monkeypatch.setattr(fedepm, "outcomes", outcomes)
        monkeypatch.setattr(fedepm, "times", times)
        monkeypatch.setattr(fedepm, "panels", lambda *args, **options: None)
        return figure(Claims(tmp_path), *count)

    return made


# The small parts


def test_below_is_below_everywhere_and_strictly():
    assert below([1, 2], [[2, 3], [9, 3]])
    assert not below([1, 2], [[2, 3], [9, 2]])
    assert not below([1, 2], [[2, 1]])
    assert below([1, 2], [[math.inf, 3]])
    assert not below([1, math.nan], [[2, 3]])
    with pytest.raises(ValueError, match="zip"):
        below([1], [[2, 3]])


def test_rises_is_strict_and_of_every_step():
    assert rises([1, 2, 3])
    assert not rises([1, 3, 2, 4])
    assert not rises([1, 1, 2])
    assert not rises([1, math.nan, 3])


def test_fewest_counts_the_settings_that_are_won():
    values = {"FedEPM": [3, 5, 7], "a": [4, 5, 9], "b": [8, 8, 8]}
    assert fewest(values, "FedEPM", ["b"], "claim", "xyz") == (
        "claim",
        True,
        "true in 3 of 3 settings. FedEPM 3, 5, 7; b 8, 8, 8",
    )
    claim, holds, detail = fewest(values, "FedEPM", ["a", "b"], "claim", "xyz")
    assert (claim, holds) == ("claim", False)  # as many as another is not the fewest
    assert detail == "true in 2 of 3 settings. FedEPM 3, 5, 7; a 4, 5, 9; b 8, 8, 8"
    assert not fewest({"FedEPM": [151], "a": [151]}, "FedEPM", ["a"], "", [1])[1]
    assert not fewest({"FedEPM": [5], "a": [math.nan], "b": [9]}, "FedEPM", ["a", "b"], "", [1])[1]
    assert fewest({"FedEPM": [5], "a": [math.inf]}, "FedEPM", ["a"], "", [1])[1]


def test_means_of_what_is_not_finite_are_infinite():
    assert mean([1.0, 3.0]) == (2.0, 1.0)
    assert mean([1.0, math.inf])[0] == math.inf
    assert mean([1.0, math.nan])[0] == math.inf


def test_the_runs_that_did_not_stop_are_counted_by_why():
    ends = ["STOPPED", "ROUNDS", "NONFINITE", "ROUNDS", "STOPPED"]
    assert _unfinished(ends) == {"capped": 2, "not finite": 1}
    assert _unfinished([]) == {"capped": 0, "not finite": 0}


# Figure 2


def curve(level, rounds=150, ended="ROUNDS"):
    """Falls to `level` in `level` rounds, then stays: the released rule fires three rounds later, by the variance."""
    f = [0.5 + max(0.0, (level - t) / 100) for t in range(rounds + 1)]
    return {"round": list(range(rounds + 1)), "objective": f, "gradient": [1.0] * (rounds + 1), "ended": ended}


def drawn2(monkeypatch, tmp_path, of):
    monkeypatch.setattr(fedepm, "recorded", lambda study, name, m, k0, rho, epsilon: of(name, k0))
    monkeypatch.setattr(fedepm, "adult", lambda: SimpleNamespace(features=14))
    monkeypatch.setattr(fedepm, "panels", lambda *args, **options: None)
    return fedepm.fig2(Claims(tmp_path))


def test_figure_2_counts_by_both_rules(monkeypatch, tmp_path):
    got = drawn2(monkeypatch, tmp_path, lambda name, k0: curve(LEVEL[name]))
    assert got.holds("the three algorithms have the same objective at the stop") is True
    assert got.holds("the three algorithms have the same objective at 150") is True
    for rule in ("released", "printed"):
        assert got.holds(f"FedEPM uses the fewest CR for each k0 ({rule} rule)") is True
        assert got.holds(f"… also against tuned baselines ({rule} rule)") is False
    first = got.tables["Ends"][0]
    assert (first["CR, released rule"], first["CR, printed rule"], first["f/m at 150"]) == (13, 13, 0.5)


def test_figure_2_does_not_take_a_nan_for_an_early_stop(monkeypatch, tmp_path):
    """SFedAvg breaks off after 5 rounds: it has not stopped before FedEPM's 13."""
    broken = lambda name, k0: curve(100, 5, "NONFINITE") if name == "SFedAvg" else curve(LEVEL[name])
    got = drawn2(monkeypatch, tmp_path, broken)
    assert got.holds("FedEPM uses the fewest CR for each k0 (released rule)") is True
    assert got.holds("the three algorithms have the same objective at the stop") is False
    assert got.holds("the three algorithms have the same objective at 150") is False
    row = got.tables["Ends"][1]
    assert (row["algorithm"], row["CR, released rule"]) == ("SFedAvg", "> 150")
    assert "not finite after 5 rounds" in row.values()
    assert math.isnan(row["f/m at 150"])


# Figure 3


def test_figure_3(draw):
    got = draw(fedepm.fig3)
    for m in (50, 100):
        for what in ("CR", "TCT"):
            assert got.holds(f"m={m}: the bigger k0, the smaller {what} (k0=20 against k0=4)") is True
            assert got.holds(f"m={m}: FedEPM has the smallest {what} for each k0") is True
            assert got.holds(f"m={m}: … also against tuned baselines ({what})") is False
        assert got.holds(f"m={m}: SFedProx uses fewer CR than SFedAvg") is True
    assert "Means over 2 trials" in got.lead
    assert "(of 100 trials 0 and 0)" in got.lead  # 2 m × 5 k0 × 5 algorithms × 2 trials


def test_figure_3_when_nothing_holds(draw):
    upside_down = lambda name, k0, rho, epsilon: k0 / LEVEL[name]
    got = draw(fedepm.fig3, cr=upside_down, tct=upside_down)
    wrong = [claim for claim, (holds, _) in got.claims.items() if holds and "tuned" not in claim]
    assert wrong == []


def test_figure_3_reports_the_trials_that_did_not_stop(draw):
    ends = lambda name, k0, rho, epsilon: ["ROUNDS", "NONFINITE"] if name == "SFedAvg" else ["STOPPED", "STOPPED"]
    got = draw(fedepm.fig3, ended=ends)
    assert "counts CR 151 (of 100 trials 10 and 10)" in got.lead
    for row in got.tables["Means"]:
        expected = (1, 1) if row["algorithm"] == "SFedAvg" else (0, 0)
        assert (row["capped"], row["not finite"]) == expected


def test_a_baseline_without_a_time_is_not_faster(draw, tmp_path):
    broken = lambda name, k0, rho, epsilon: math.inf if name == "SFedAvg" else LEVEL[name] / k0
    got = draw(fedepm.fig3, tct=broken)
    assert got.holds("m=50: FedEPM has the smallest TCT for each k0") is True
    assert got.holds("m=50: the bigger k0, the smaller TCT") is False


# Table I


def test_table_1(draw):
    got = draw(fedepm.table1, count=())
    assert all(holds for holds, _ in got.claims.values())
    assert {row["m"] for row in got.tables["LCT in milliseconds"]} == {50, 100, 128}
    assert "all m clients' work" in got.lead
    assert "masks those who were not drawn" in got.lead


def test_table_1_when_it_does_not_hold(draw):
    """FedEPM slower than SFedAvg, and slowest of all at one k0; SFedAvg's time does not rise."""
    value = lambda name, k0, *_: {"FedEPM": 2.5 * k0 + (20 if k0 == 8 else 0), "SFedAvg": 2, "SFedProx": 3 * k0}[name]
    got = draw(fedepm.table1, count=(), lct=value)
    assert got.holds("m=50: LCT of FedEPM is below both") is False
    assert got.holds("m=50: SFedProx has the largest LCT") is False
    assert got.holds("m=50: LCT of SFedAvg rises") is False
    assert got.holds("m=50: LCT of SFedProx rises") is True


# Figures 4 and 5


def test_figure_4(draw):
    got = draw(fedepm.fig4)
    for name in PAPER:
        assert got.holds(f"{name}: CR falls as ρ rises") is True
        assert got.holds(f"{name}: TCT rises with ρ") is None
        assert got.claims[f"{name}: TCT rises with ρ"][1].startswith(
            "not tested: a time here is of all m clients' work"
        )
    for what in ("CR", "TCT (s)"):
        assert got.holds(f"FedEPM has the lowest median {what} for each ρ") is True
        assert got.holds(f"… also against tuned baselines ({what})") is False
    assert "all m clients' work" in got.lead
    assert "after 27 rounds at k0=12" in got.lead
    assert draw(fedepm.fig4, cr=lambda name, k0, rho, epsilon: rho).holds("FedEPM: CR falls as ρ rises") is False


def test_figure_5(draw):
    got = draw(fedepm.fig5)
    for name in PAPER:
        for what in ("CR", "TCT (s)"):
            assert got.holds(f"{name}: ε hardly changes {what}") is True
        assert got.holds(f"{name}: SNR rises with ε") is True
    for what in ("median CR", "median TCT (s)"):
        assert got.holds(f"FedEPM has the lowest {what} for each ε, baselines tuned") is False
        assert got.claims[f"FedEPM has the lowest {what} for each ε"][0] is True
    assert got.claims["FedEPM has the smallest SNR for each ε"][0] is True
    assert got.holds("FedEPM has the smallest SNR for each ε, baselines tuned") is False
    assert "all m clients' work" in got.lead


def test_figure_5_when_it_does_not_hold(draw):
    got = draw(
        fedepm.fig5,
        cr=lambda name, k0, rho, epsilon: LEVEL[name] / epsilon,
        snr=lambda name, k0, rho, epsilon: LEVEL[name] - epsilon,
        tct=lambda name, k0, rho, epsilon: 7.0,
    )
    assert got.holds("FedEPM: ε hardly changes CR") is False
    assert got.holds("FedEPM: ε hardly changes TCT (s)") is True
    assert got.holds("FedEPM: SNR rises with ε") is False
    assert got.claims["FedEPM has the smallest SNR for each ε"][0] is True
    assert got.claims["FedEPM has the lowest median TCT (s) for each ε"][0] is False  # all alike


def test_a_figure_with_what_is_not_finite_is_drawn_and_reported(draw, monkeypatch, tmp_path):
    """The real report of Figure 3 with a baseline that breaks off everywhere."""
    real = fedepm.panels
    broken = lambda name, k0, rho, epsilon: math.inf if name == "SFedAvg" else LEVEL[name] / k0
    draw(fedepm.fig3, tct=broken)  # leaves its cells in place
    monkeypatch.setattr(fedepm, "panels", real)
    study = Study(tmp_path / "fig3", tmp_path / "cells.jsonl", True)
    result = fedepm.fig3(study, 2)
    assert (tmp_path / "fig3" / "report.html").is_file()
    assert len(result["claims"]) == 14
    assert np.isinf([row["TCT"] for row in result["tables"]["Means"] if row["algorithm"] == "SFedAvg"]).all()
    assert set(ALL) == {row["algorithm"] for row in result["tables"]["Means"]}
