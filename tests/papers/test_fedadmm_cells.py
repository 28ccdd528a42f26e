"""FedADMM's tables: what of the file counts, what is left to do, what was tuned, and which claims are tested."""

from __future__ import annotations

import dataclasses
import json
import math
from types import SimpleNamespace

import numpy as np
import pytest

from fedpact import data
from fedpact.algorithms import FedADMM, FedAvg, FedSGD
from fedpact.core.stop import Outcome, Target
from fedpact.folder import RunFolder
from fedpact.papers import fedadmm
from fedpact.papers import fedadmm_cells as cells
from fedpact.papers.fedadmm_cells import COLUMNS, Cell, Entry, Results, admm, baselines
from fedpact.papers.study import Study
from fedpact.problems import TwoLayer

CELL = Cell("mnist", 100, "iid")
ROUND = 60_000 * 0.1 * 5 + 10_000 / 3  # samples of a round of five epochs, and the test set forward only


@pytest.fixture
def study(tmp_path):
    return Study(tmp_path / "table3", tmp_path / "cells.jsonl", True, "now")


@pytest.fixture
def results(tmp_path):
    return Results(tmp_path / "results.csv", "now")


def done(results, entry, seed=0, reached=8, rounds=None, hours=0.1, most=100, changes=None, **more):
    """A finished run of the entry, written by hand."""
    rounds = reached if rounds is None else rounds
    settings = {k: v for k, v in {**entry.settings.to_dict(), **(changes or {})}.items() if v != "absent"}
    row = dict.fromkeys(COLUMNS, "") | {
        "cell": entry.cell.name,
        "algorithm": entry.name,
        "settings": json.dumps({"settings": settings, "outcome": "", **more}),
        "seed": seed,
        "most": most,
        "target": 0.97,
        "reached": "" if reached is None else reached,
        "hours": hours,
        "accuracies": " ".join(f"{0.1 + 0.01 * t:.4f}" for t in range(rounds + 1)),
        "source": "before",
        "finished": "2025-01-01 00:00:00",
    }
    results.append(row)


def mine(**changes):
    return admm(CELL, 5, 200, **{"seeds": 3, "expected": 10, "vary": False} | changes)


# What is there


def test_a_row_of_a_time_before_a_setting_existed_has_its_default(results):
    entry = mine(rate=0.1)
    done(results, entry, changes={"duals": "absent"})
    assert [row.seed for row in results.find(entry)] == [0]
    assert results.find(mine(rate=0.1, duals=False)) == []
    assert results.find(mine(rate=0.2)) == []


def test_runs_of_a_fixed_length_are_apart_from_those_to_the_target(results):
    entry, fixed = mine(rate=0.1), mine(rate=0.1, to_target=False)
    done(results, entry)  # as rows were before they said so
    assert results.find(fixed) == []
    done(results, fixed, reached=8, rounds=100, to_target=False)
    assert [row.rounds for row in results.find(entry)] == [8]
    assert [row.rounds for row in results.find(fixed)] == [100]
    assert cells.missing(results, fixed) == cells.missing(results, entry) == [1, 2]


def test_a_run_cut_at_fewer_rounds_than_it_may_take_is_missing(results):
    entry = mine(rate=0.1, seeds=1)
    after = Entry(CELL, "FedAvg", FedAvg(step=0.1, epochs=5, batch=200), after=entry)
    done(results, entry, reached=8)
    assert cells.limit(results, after) == 24
    done(results, after, reached=None, rounds=20, most=20)
    assert cells.missing(results, after) == [0]
    done(results, after, reached=None, rounds=24, most=24)
    assert cells.missing(results, after) == []


# The estimate


def test_before_any_run_rounds_are_those_expected_and_seconds_those_known(results):
    """Three runs of 10 rounds, and tuning: four candidates for two rounds, two for five."""
    rounds = 3 * 10 + 4 * 2 + 2 * 5
    assert cells.estimate(results, mine()) == pytest.approx(rounds * ROUND * cells.SECONDS["mnist"] / 3600)
    assert cells.estimate(results, mine(rate=0.1)) == pytest.approx(30 * ROUND * cells.SECONDS["mnist"] / 3600)


def test_after_a_seed_rounds_and_seconds_are_those_it_took(results):
    """Eight rounds in half an hour: two more seeds take an hour, and tuning is over."""
    done(results, mine(), reached=8, hours=0.5)
    assert results.seconds("mnist") == pytest.approx(1800 / (8 * ROUND))
    assert cells.estimate(results, mine()) == pytest.approx(1.0)
    done(results, mine(), seed=1, reached=None, rounds=100, hours=0.5 * 100 / 8)  # of 8 and 100 the mean is 54
    assert cells.estimate(results, mine()) == pytest.approx(0.5 * 54 / 8)
    done(results, mine(), seed=2)
    assert cells.estimate(results, mine()) == 0


def test_seconds_are_those_of_the_same_dataset(results):
    done(results, mine(), hours=5.0)
    assert results.seconds("mnist") > 10 * cells.SECONDS["mnist"]
    assert results.seconds("fmnist") == cells.SECONDS["fmnist"]


def test_a_baseline_takes_three_times_the_rounds_and_fedprox_tunes_sixteen(results):
    """FedSGD: one pass a round. FedProx: 16 for one round, 6 for two, 2 for five, with E_i drawn from 1..5."""
    entry, second = mine(), cells.SECONDS["mnist"] / 3600
    by = {e.label: e for e in baselines(CELL, 5, 200, entry)}
    once = 6_000 + 10_000 / 3
    assert cells.estimate(results, by["FedSGD"]) == pytest.approx((30 + 18) * once * second)
    drawn = 6_000 * 3 + 10_000 / 3
    assert cells.estimate(results, by["FedProx"]) == pytest.approx((30 + 16 + 12 + 10) * drawn * second)
    done(results, entry, reached=8)
    second = results.seconds("mnist") / 3600
    assert cells.estimate(results, by["FedSGD"]) == pytest.approx((24 + 18) * once * second)


def test_a_run_of_a_fixed_length_takes_all_its_rounds(results):
    entry = mine(rate=0.1, to_target=False, seeds=1)
    assert cells.estimate(results, entry) == pytest.approx(100 * ROUND * cells.SECONDS["mnist"] / 3600)


# Tuning and running


@pytest.fixture
def faked(monkeypatch):
    """Tuning chooses the rates given, one after the other; runs reach the target in round 3."""
    calls = SimpleNamespace(rates=[0.2, 0.5], tuned=0, runs=[])

    def tune(settings, *_, **__):
        calls.tuned += 1
        return SimpleNamespace(settings=cells._with(settings, {"rate": calls.rates[calls.tuned - 1]}), table=list)

    def run(settings, problem, federation, **options):
        calls.runs.append((settings.rate, options))
        accuracy = np.array([0.1, 0.5, 0.9, 0.98])
        history = SimpleNamespace(column=lambda name: accuracy, end=lambda name: 36.0)
        return SimpleNamespace(history=history, outcome_kind=Outcome.STOPPED, outcome="the target was met", name="")

    monkeypatch.setattr(cells, "tune", tune)
    monkeypatch.setattr(cells, "run", run)
    monkeypatch.setattr(cells, "available", lambda dataset: True)
    monkeypatch.setattr(Cell, "federation", lambda self, seed: None)
    return calls


def test_what_a_finished_run_has_holds_for_the_other_seeds_whatever_code_tuned_it(study, results, faked, tmp_path):
    entry = Entry(CELL, "FedSGD", FedSGD(), tuned=True, seeds=2)
    cells.fill(study, results, [Entry(CELL, "FedSGD", FedSGD(), tuned=True)], math.inf)
    other = Study(tmp_path / "table3", tmp_path / "cells.jsonl", True, "later")  # its tuning would choose 0.5
    again = Results(results.path, "later")
    cells.fill(other, again, [entry], math.inf)
    assert [rate for rate, _ in faked.runs] == [0.2, 0.2]
    assert faked.tuned == 1
    assert [row["source"] for row in again.rows] == ["now", "later"]
    assert [row.reached for row in again.find(entry)] == [3, 3]
    cells.fill(other, again, [entry], math.inf)
    assert len(faked.runs) == 2, "what is there is not run again"


def test_a_fixed_length_has_no_stop_rule(study, results, faked):
    for target in (True, False):
        entry = mine(rate=0.1, seeds=1, to_target=target)
        cells.fill(study, results, [entry], math.inf)
        assert [row.reached for row in results.find(entry)] == [3]
    first, second = (options["stop"] for _, options in faked.runs)
    assert isinstance(first, Target)
    assert second is None


def test_a_run_that_was_interrupted_is_no_row(study, results, faked, monkeypatch):
    cut = SimpleNamespace(history=SimpleNamespace(rounds=1), outcome_kind=Outcome.INTERRUPTED, name="FedADMM")
    monkeypatch.setattr(cells, "run", lambda *_, **__: cut)
    with pytest.raises(KeyboardInterrupt, match="interrupted in FedADMM, after 1 rounds"):
        cells.fill(study, results, [mine(rate=0.1)], math.inf)
    assert results.rows == []


def test_a_run_that_was_cut_goes_on_from_its_checkpoint(study, results, monkeypatch):
    """A real one, on a small network: cut in round 2, it ends as one that was not, and its folder is gone."""
    entry = Entry(CELL, "FedADMM", FedADMM(batch=5, rate=0.1), seeds=1, most=4, to_target=False)
    x, y = np.random.default_rng(0).normal(size=(200, 5)), np.arange(200) % 2
    dataset = dataclasses.replace(data.from_arrays(x, y), test=np.arange(50))
    monkeypatch.setattr(cells, "available", lambda dataset: True)
    monkeypatch.setattr(Cell, "federation", lambda self, seed: dataset.split(clients=20, seed=seed))
    monkeypatch.setattr(Cell, "problem", property(lambda self: TwoLayer(inputs=5, hidden=3, classes=2)))
    whole = Results(results.path.with_name("other") / "results.csv", "now")
    cells.fill(study, whole, [entry], math.inf)
    save, saved = RunFolder.save, []

    def cut(self):
        save(self)
        saved.append(self.begun)
        if len(saved) == 2:
            raise MemoryError

    monkeypatch.setattr("fedpact.folder.CHECKPOINT_SECONDS", 0.0)
    monkeypatch.setattr(RunFolder, "save", cut)
    with pytest.raises(MemoryError):
        cells.fill(study, results, [entry], math.inf)
    assert results.rows == []
    cells.fill(study, results, [entry], math.inf)
    assert saved[-1] > 0, "it did not begin anew"
    assert [row["accuracies"] for row in results.rows] == [row["accuracies"] for row in whole.rows]
    assert list((results.path.parent / "under-way").iterdir()) == []


# Tables and claims


def test_a_table_has_the_hours_of_tuning_and_of_what_is_left(results, monkeypatch):
    entry = mine()
    done(results, entry, hours=0.5, tuning_hours=0.25)
    done(results, entry, seed=1, hours=0.5)
    monkeypatch.setattr(fedadmm, "available", lambda dataset: dataset != "cifar")
    row = fedadmm._row(results, entry)
    assert (row["hours"], row["tuning hours"], row["to do"]) == (1.0, 0.25, "0.5 h")
    absent = admm(Cell("cifar", 1000, "iid"), 20, None, expected=7, vary=False)
    rounds = 7 + 18
    hours = rounds * (5_000 * 20 + 10_000 / 3) * 1e-3 / 3600
    assert fedadmm._row(results, absent)["to do"] == f"{hours:.1f} h, data absent"
    done(results, entry, seed=2)
    assert fedadmm._row(results, entry)["to do"] == ""


@pytest.mark.parametrize("claims", [lambda r, e: fedadmm._best(r, e, CELL.name)[1:], fedadmm._fewest])
def test_fewer_than_every_baseline_is_tested_where_all_were_run(results, claims):
    entry = mine(seeds=1)
    others = list(baselines(CELL, 5, 200, entry))
    done(results, entry, reached=8)
    for other in others[:-1]:
        done(results, other, reached=20)
        assert claims(results, [entry, *others])[0][1] is None
    done(results, others[-1], reached=None, rounds=24, most=24)
    assert claims(results, [entry, *others])[0][1] is True
    done(results, others[0], reached=7, most=101)
    assert claims(results, [entry, *others])[0][1] is False


def claims_of(figure, study, monkeypatch, last, twenty=None):
    """A figure's claims, where a run ends at the accuracy `last` has for its label."""
    monkeypatch.setattr(fedadmm, "fill", lambda *_: None)
    monkeypatch.setattr(Study, "finish", lambda self, title, lead, claims, figures, tables: (lead, claims, tables))
    monkeypatch.setattr(fedadmm, "_paths", lambda *_: {})
    monkeypatch.setattr(fedadmm, "available", lambda dataset: True)

    def find(self, entry):
        assert not entry.to_target
        at = (twenty or {}).get(entry.label, 0.5)
        path = [at] * 100 + [last[entry.label]] if entry.label in last else []
        return [cells.Row(0, 100, 30, 1.0, path, {"rate": 0.1})] if path else []

    monkeypatch.setattr(Results, "find", find)
    lead, claims, tables = figure(study, ["mnist-100-noniid"], 0)
    assert "100 rounds each, whatever they reach" in lead
    assert {row["algorithm"]: row["last accuracy"] for row in tables["Rounds"] if row["seeds"]} == last
    return {claim.partition(": ")[2]: holds for claim, holds, _ in claims}


def test_figure_6_is_of_the_last_accuracy(study, monkeypatch):
    falls = "η = 1, 0.5 from round 60"
    found = claims_of(fedadmm.fig6, study, monkeypatch, {"η = 1.0": 0.98, "η = 1.5": 0.9, falls: 0.97})
    assert found == {
        "η = 1.0 is more accurate in the end than η = 1.5": True,
        f"{falls} is more accurate in the end than η = 1.0": False,
    }


def test_figure_9_is_of_the_accuracies_after_20_rounds_and_in_the_end(study, monkeypatch):
    rises = "ρ = 0.01, 0.1 from round 20"
    last = {"ρ = 0.01": 0.97, "ρ = 0.1": 0.99, rises: 0.98}
    twenty = {"ρ = 0.01": 0.9, "ρ = 0.1": 0.8, rises: 0.9}
    assert claims_of(fedadmm.fig9, study, monkeypatch, last, twenty) == {
        "ρ = 0.01 is more accurate after 20 rounds than ρ = 0.1": True,
        "ρ = 0.01 is more accurate after 20 rounds than ρ = 1": None,
        f"{rises} is more accurate in the end than ρ = 0.01": True,
    }


@pytest.mark.parametrize("figure", [fedadmm.fig3, fedadmm.fig4, fedadmm.fig5, fedadmm.fig10])
def test_leads_say_what_differs_from_the_paper(figure, study, monkeypatch):
    leads = []
    monkeypatch.setattr(fedadmm, "_plain_study", lambda *args: leads.append(args[5]))
    figure(study, None, 0)
    assert "FedProx's ρ is tuned; the paper fixes it at 0.1 outside Table III." in leads[0]
    assert ("tunes everyone at 100 clients" in leads[0]) == (figure in (fedadmm.fig3, fedadmm.fig4))
