"""What the report says of constraints, and of columns whose names mean two things."""

from __future__ import annotations

import numpy as np
from matplotlib.scale import LinearScale, SymmetricalLogScale
from report_fakes import make_run

from fedpact.report import curves
from fedpact.report.captions import first_plots, other_plots
from fedpact.report.gallery import Gallery, plots_section
from fedpact.report.html import write_report

K = np.arange(101.0)
SUBJECT_TO = [
    {"term": "loss", "at_most": 0.13},
    {
        "terms": [{"term": "gap", "column": "sex", "above": 0.5, "of": 1}, {"term": "norm2", "times": 2.0}],
        "at_most": 3.0,
    },
    {"term": "client_loss", "at_most": 0.4},
]


def limited(name: str = "SSCA", **columns: np.ndarray):
    extra = {
        "constraint_1": 2 * np.exp(-K / 8) - 1e-3,
        "constraint_2_above": -0.1 + 0 * K,
        "kkt": np.exp(-K / 9),
        "multiplier_constraint_1": 1 + 0 * K,
        "multiplier_clients": 0 * K,
        "worst_client": 0.2 - K / 200,
        "slack": np.maximum(0.1 - K / 100, 0),
        "penalty": 10 + 0 * K,
        "rho": 1 / (1 + K),
        "gamma": 1 / (1 + K),
    }
    run = make_run(name, 0.1, **extra | columns)
    run.config = {"problem": {"name": "constrained", "subject_to": SUBJECT_TO}}
    return run


def said(runs) -> dict[str, str]:
    return {one.heading: one.detail for one in (*first_plots(runs), *other_plots(runs))}


def test_constraints_are_told_in_words_and_measured_from_their_limit():
    runs = [limited()]
    words = said(runs)
    assert words["Constraint 1: value minus limit"] == "loss ≤ 0.13. Kept at or below the line."
    text = words["Constraint 2, from above: value minus limit"]
    assert text.startswith("gap (column sex, above 0.5, of 1) + 2 · norm2 ≤ 3. ")
    assert words["Multiplier of constraint 1"].startswith("loss ≤ 0.13. The objective falls by so much")
    assert "Largest multiplier of the clients' limits" in words
    level = {one.y: one.level for one in first_plots(runs)}
    assert level["constraint_1"] == level["worst_client"] == 0.0
    assert level["multiplier_constraint_1"] is None


def test_words_are_left_out_where_runs_differ_or_say_nothing():
    other = limited("other")
    other.config = {"problem": {"subject_to": [{"term": "loss", "at_most": 0.2}]}}
    assert said([limited(), other])["Constraint 1: value minus limit"] == "Kept at or below the line."
    other.config = {}
    assert said([other])["Constraint 1: value minus limit"] == "Kept at or below the line."


def test_gaps_to_a_minimum_are_for_runs_without_limits():
    free = make_run("FedAvg", 0.1)
    assert any(one.gap for one in first_plots([free]))
    assert not any(one.gap for one in first_plots([free, limited()]))
    assert said([free])["Squared norm of the mean gradient against rounds"] == "0 at a stationary point."
    assert "does not go to 0" in said([limited()])["Squared norm of the mean gradient against rounds"]


def drawn(runs, monkeypatch) -> dict[str, list[str]]:
    """By heading, the runs that a report draws; nothing is rendered."""
    found: dict[str, list[str]] = {}

    def note(self, figure, name, heading, detail="", wide=False):
        handles = [h.get_label() for h in figure.axes[0].lines]
        found[heading] = [label for label in handles if not label.startswith("_")]
        return "<figure></figure>"

    monkeypatch.setattr(Gallery, "add", note)
    plots_section(Gallery(), runs, {})
    return found


def test_a_name_with_two_meanings_has_two_plots(monkeypatch):
    penalised = make_run("FedEPM", 0.1, penalty=0.5 + 0 * K, rho=0.01 + 0 * K)
    found = drawn([penalised, limited()], monkeypatch)
    assert found["Penalised objective against rounds"] == ["FedEPM"]
    assert found["Price of slack c"] == ["SSCA"]
    assert found["Penalty ρ"] == ["FedEPM"]
    assert found["Weight ρ of the newest batch"] == ["SSCA"]
    assert found["Constraint 1: value minus limit"] == ["SSCA", "limit"]
    alone = drawn([limited()], monkeypatch)
    assert "Penalised objective against rounds" not in alone
    assert "Penalty ρ" not in alone


def test_values_around_a_limit_have_an_axis_that_shows_both_sides():
    far = curves([limited()], "constraint_1", level=0.0).axes[0]
    assert isinstance(far.yaxis.get_transform(), type(SymmetricalLogScale(far.yaxis).get_transform()))
    near = curves([limited()], "worst_client", level=0.0).axes[0]
    assert isinstance(near.yaxis._scale, LinearScale)
    for axes in (far, near):
        assert any(line.get_label() == "limit" and set(line.get_ydata()) == {0.0} for line in axes.lines)


def test_the_parties_of_split_features_are_listed_once(tmp_path, monkeypatch):
    monkeypatch.setattr("fedpact.report.html.plots_section", lambda *_: "")
    runs = [make_run("a", 0.1), make_run("b", 0.2)]
    about = {"features": 2, "labels": True, "records": 9, "kept": 7, "missing": 2, "examples": ["<x>", "y"]}
    for run in runs:
        run.config = {"data": {"parties": {"lab": about, "ward": {**about, "labels": False, "examples": []}}}}
    page = write_report(runs, tmp_path, "two").read_text(encoding="utf-8")
    assert page.count("<h3>Parties</h3>") == 1
    for cell in ("has the labels", "missing elsewhere", "&lt;x&gt;, y"):
        assert cell in page
