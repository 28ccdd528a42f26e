"""FedADMM's tables: what of the file counts, what is left to do, what was tuned, and which claims are tested."""

from __future__ import annotations

import dataclasses
import importlib
import json
import math
import platform
import re
import subprocess
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from fedpact import data, papers
from fedpact.algorithms import FedADMM, FedAvg, FedSGD
from fedpact.core.errors import InvalidArgument, UnknownName
from fedpact.core.stop import Outcome, Target
from fedpact.folder import RunFolder
from fedpact.papers import fedadmm
from fedpact.papers import fedadmm_cells as cells
from fedpact.papers.fedadmm_cells import COLUMNS, Asked, Cell, Entry, Results, admm, baselines
from fedpact.papers.fedadmm_rounds import reductions
from fedpact.papers.study import Study
from fedpact.problems import TwoLayer

run_module = importlib.import_module("fedpact.run")  # fedpact.run is the function
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


def test_a_row_that_was_cut_short_is_taken_off_and_hides_none_after_it(results):
    """Cut within its settings, where a quote is open."""
    done(results, mine())
    whole = results.path.read_bytes()
    done(results, mine(), seed=1)
    results.path.write_bytes(results.path.read_bytes()[: len(whole) + 60])
    again = Results(results.path, "now")
    assert results.path.read_bytes() == whole
    done(again, mine(), seed=2)
    assert [row.seed for row in Results(results.path, "now").find(mine())] == [0, 2]


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
    """Three runs of 10 rounds; four candidates for two rounds, two of them for three more, one of which goes on."""
    rounds = 3 * 10 + 4 * 2 + 2 * 3 - 5
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
    """FedSGD: one pass a round. FedProx: 16 for one round, 6 to two, 2 to five, with E_i drawn from 1..5."""
    entry, second = mine(), cells.SECONDS["mnist"] / 3600
    by = {e.label: e for e in baselines(CELL, 5, 200, entry)}
    once = 6_000 + 10_000 / 3
    assert cells.estimate(results, by["FedSGD"]) == pytest.approx((30 + 9) * once * second)
    drawn = 6_000 * 3 + 10_000 / 3
    assert cells.estimate(results, by["FedProx"]) == pytest.approx((30 + 16 + 6 + 6 - 5) * drawn * second)
    done(results, entry, reached=8)
    second = results.seconds("mnist") / 3600
    assert cells.estimate(results, by["FedSGD"]) == pytest.approx((24 + 9) * once * second)


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


@pytest.fixture
def small(monkeypatch):
    """Real runs of a small network; the rates and the rounds up to which each was asked for."""
    x, y = np.random.default_rng(0).normal(size=(200, 5)), np.arange(200) % 2
    dataset = dataclasses.replace(data.from_arrays(x, y), test=np.arange(50))
    monkeypatch.setattr(cells, "available", lambda dataset: True)
    monkeypatch.setattr(Cell, "federation", lambda self, seed: dataset.split(clients=20, seed=seed))
    monkeypatch.setattr(Cell, "problem", property(lambda self: TwoLayer(inputs=5, hidden=3, classes=2)))
    return SimpleNamespace(run=cells.run, runs=[], dataset=dataset)


def test_a_run_that_was_cut_goes_on_from_its_checkpoint(study, results, monkeypatch, small):
    """Cut in round 2, it ends as one that was not, and its folder is gone."""
    entry = Entry(CELL, "FedADMM", FedADMM(batch=5, rate=0.1), seeds=1, most=4, to_target=False)
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


def test_a_tuning_that_was_cut_goes_on_with_the_trials_it_has(study, tmp_path, results, monkeypatch, small):
    """Four rates for two rounds and two of them to five: cut in its third trial; its hours are of those not chosen."""
    entry, runs = Entry(CELL, "FedADMM", FedADMM(batch=5, epochs=1), tuned=True), []

    def cut(settings, *args, **options):
        runs.append((settings.rate, options["rounds"]))
        if len(runs) == 3:
            raise MemoryError
        return small.run(settings, *args, **options)

    monkeypatch.setattr(cells, "run", cut)
    with pytest.raises(MemoryError):
        cells.chosen(study, results, entry)
    again = Study(tmp_path / "table3", tmp_path / "cells.jsonl", True, "now")
    settings, hours = cells.chosen(again, results, entry)
    rates = [rate for rate, rounds in runs if rounds == 2]
    assert rates == [0.01, 0.1, 0.2, 0.2, 0.5], "only the one that was cut is run again"
    assert len([rounds for _, rounds in runs if rounds == 5]) == 2
    assert settings.rate in cells.RATES
    assert cells.chosen(again, results, entry) == (settings, hours), "what is kept has its hours"
    trials = {line["cell"]: line["result"] for line in map(json.loads, again.path.read_text().splitlines())}
    others = [one["hours"] for what, one in trials.items() if json.loads(what)["settings"]["rate"] != settings.rate]
    assert len(others) == 4
    assert hours == pytest.approx(sum(others))


def test_trials_and_the_run_of_the_best_go_on_where_they_were(study, results, monkeypatch, small):
    """As one run of the rate that was chosen, from its first round; nothing of the others is left."""
    entry = Entry(CELL, "FedADMM", FedADMM(batch=5, epochs=1), tuned=True, most=8, to_target=False)
    begun, drive = [], run_module.drive

    def watched(*args, resumed=None, **options):
        begun.append((args[5], resumed.history.rounds if resumed else 0))
        return drive(*args, resumed=resumed, **options)

    monkeypatch.setattr(run_module, "drive", watched)
    cells.fill(study, results, [entry], math.inf)
    assert [pair for pair in begun if pair[0]] == [(2, 0)] * 4 + [(5, 2)] * 2 + [(8, 5)]
    (row,) = results.find(entry)
    chosen = cells._with(entry.settings, {"rate": row.settings["rate"]})
    whole = small.run(chosen, CELL.problem, CELL.federation(0), rounds=8, participation=0.1, engine=CELL.engine)
    assert row.accuracies == pytest.approx(whole.history.column("test_accuracy"), abs=5e-5)
    assert list((results.path.parent / "under-way").iterdir()) == []


def test_a_row_says_whether_the_code_was_changed_and_on_which_cpu_it_ran(monkeypatch, tmp_path):
    """A "+" after the commit where a file that git keeps is not as committed; others do not count."""
    git = lambda *words: subprocess.run(
        ["git", "-c", "user.name=a", "-c", "user.email=a@b", *words], cwd=tmp_path, check=True
    )
    (tmp_path / "module.py").write_text("one")
    for words in (("init", "-q"), ("add", "module.py"), ("commit", "-qm", "one")):
        git(*words)
    (tmp_path / "results.csv").write_text("")
    monkeypatch.setattr(cells, "__file__", str(tmp_path / "module.py"))
    results = lambda: cells.Results(tmp_path / "kept.csv", "source")
    before = results()
    clean = before.commit
    assert re.fullmatch("[0-9a-f]{12}", clean)
    (tmp_path / "module.py").write_text("two")
    assert (results().commit, before.commit) == (f"{clean}+", clean)  # that of the code which the process has
    monkeypatch.setattr(cells, "CPU", tmp_path / "cpuinfo")
    assert cells._machine() == f"{platform.machine()}, {cells.environment()['cores']} cores, {platform.node()}"
    (tmp_path / "cpuinfo").write_text(
        "processor\t: 0\nmodel name\t: Some  CPU @ 2 GHz\n\nmodel name\t: Some  CPU @ 2 GHz\n"
    )
    assert cells._machine().startswith(f"{platform.machine()}, Some CPU @ 2 GHz, ")


def test_networks_are_jax_s_without_pytorch(monkeypatch):
    """One client after the other; with it they are PyTorch's (tests_extras/test_torch_cnn.py)."""
    monkeypatch.setattr(cells, "find_spec", lambda name: None)
    assert [type(Cell(d, 100, "iid").problem).__name__ for d in ("fmnist", "cifar")] == ["CNN1", "CNN2"]
    assert CELL.engine.at_once == 1


def test_who_is_sooner_at_the_target_is_better_than_who_is_more_accurate_then():
    """Of the trials that get there; any of them is better than one that does not, and one that breaks the worst."""

    def ended(*accuracies, kind=Outcome.ROUNDS):
        column = np.array(accuracies)
        return SimpleNamespace(
            history=SimpleNamespace(column=lambda name: column, end=lambda name: column[-1]), outcome_kind=kind
        )

    soon, late, never = ended(0.1, 0.971), ended(0.1, 0.9, 0.99), ended(0.1, 0.9, 0.9, 0.96)
    broken = ended(0.1, 0.969, kind=Outcome.NONFINITE)
    scores = [cells._score(mine(), one) for one in (soon, late, never, broken)]
    assert scores == sorted(scores, reverse=True)
    assert len(set(scores)) == 4
    assert cells._score(mine(to_target=False), late) == 0.99, "where all rounds are run it is the accuracy"


# Tables and claims


def test_a_table_has_the_hours_of_tuning_and_of_what_is_left(results, monkeypatch):
    entry = mine()
    done(results, entry, hours=0.5, tuning_hours=0.25)
    done(results, entry, seed=1, hours=0.5)
    monkeypatch.setattr(fedadmm, "available", lambda dataset: dataset != "cifar")
    row = fedadmm._row(results, entry)
    assert (row["hours"], row["tuning hours"], row["to do"]) == (1.0, 0.25, "0.5 h")
    absent = admm(Cell("cifar", 1000, "iid"), 20, None, expected=7, vary=False)
    rounds = 7 + 8 + 6 - 5
    hours = rounds * (5_000 * 20 + 10_000 / 3) * 1e-3 / 3600
    assert fedadmm._row(results, absent)["to do"] == f"{hours:.1f} h, data absent"
    done(results, entry, seed=2)
    assert fedadmm._row(results, entry)["to do"] == ""


def test_a_seed_that_did_not_get_there_counts_by_the_rounds_it_had(results):
    entry = mine()
    done(results, entry, reached=30)
    done(results, entry, seed=1, reached=None, rounds=100)
    done(results, entry, seed=2, reached=32)
    assert fedadmm._row(results, entry)["rounds"] == "> 54"


def test_a_run_that_was_not_finite_is_not_told_as_one_that_was_slow(results):
    entry = mine(seeds=1)
    done(results, entry, reached=None, rounds=3)
    assert fedadmm._row(results, entry)["rounds"] == "not finite after 3"


def test_a_claim_is_not_tested_on_some_of_the_seeds(results):
    entry = mine()
    done(results, entry, reached=8)
    (claim,) = fedadmm._best(results, [entry], CELL.name)
    assert claim[1:] == (None, "8, with 1 of 3 seeds")
    for seed in (1, 2):
        done(results, entry, seed=seed, reached=9)
    assert fedadmm._best(results, [entry], CELL.name)[0][1] is True


def test_table_3_before_any_run(study, monkeypatch):
    """Every cell with all its lines, what they would take, and the sum of it."""
    monkeypatch.setattr(fedadmm, "fill", lambda *_: None)
    monkeypatch.setattr(Study, "finish", lambda self, title, lead, claims, figures, tables: tables)
    tables = fedadmm.table3(study, Asked())
    assert {row["rounds"] for row in tables["Rounds"]} == {"not run"}
    for name in fedadmm.PRINTED:
        labels = [row["algorithm"] for row in tables["Rounds"] if row["cell"] == name]
        assert labels[:2] == ["FedADMM", "FedAvg, all but duals of FedADMM"]
        assert {*fedadmm.ORDER, "FedADMM as printed", "FedADMM, E_i drawn"} <= set(labels)
    *each, every = tables["Hours"]
    assert [row["cell"] for row in each] == list(fedadmm.PRINTED)
    assert every["to do"] == pytest.approx(sum(row["to do"] for row in each))
    assert every["hours"] == 0


def test_what_stands_beside_fedadmm_differs_from_it_in_the_duals_alone():
    for mine, plain in pairwise(fedadmm._table3_entries()):
        if mine.label == "FedADMM":
            ours, other = mine.settings.to_dict(), plain.settings.to_dict()
            assert {name: other[name] for name in ours if ours[name] != other[name]} == {"duals": False, "rho": 0.0}
            assert plain.tuned == mine.tuned


VARIED = {
    fedadmm.table4: {"epochs"},
    fedadmm.fig6: {"eta"},
    fedadmm.fig7: {"epochs"},
    fedadmm.fig8: {"start", "eta"},
    fedadmm.fig9: {"rho"},
}


def asked(figure, study, monkeypatch):
    """The entries of a table or figure, and its lead."""
    seen = []
    monkeypatch.setattr(fedadmm, "_plain_study", lambda study, title, entries, *rest: seen.append((entries, rest)))
    figure(study, Asked())
    ((entries, (_, lead, *_)),) = seen
    return entries, lead


@pytest.mark.parametrize("figure", VARIED, ids=lambda f: f.__name__)
def test_a_cell_on_which_rate_01_does_not_train_has_what_table_3_found(figure, study, monkeypatch):
    """B, rate and momentum alone: a figure keeps what it varies, and E."""
    entries, lead = asked(figure, study, monkeypatch)
    (found,) = (e for e in fedadmm._table3_entries() if e.name == "FedADMM" and e.cell.name == "mnist-100-noniid")
    by_cell = {
        cell: {e.label: e.settings.to_dict() for e in entries if e.cell.name == cell} for cell in fedadmm.HUNDRED
    }
    iid, other = by_cell.values()
    assert list(iid) == list(other)
    for label, own in other.items():
        assert {key: own[key] for key in ("batch", "rate", "momentum")} == {"batch": 10, "rate": 0.05, "momentum": 0.0}
        assert {key for key in own if own[key] != iid[label][key]} <= {"batch", "rate", "momentum"}
    assert {(own["batch"], own["rate"]) for own in iid.values()} == {(200, 0.1)}
    first, *rest = other.values()
    assert {key for own in rest for key in own if own[key] != first[key]} == VARIED[figure]
    assert (found.settings.batch, found.settings.rate, found.settings.momentum) == (10, 0.05, 0.0)
    assert "On mnist-100-noniid" in lead
    assert "there FedADMM has B = 10, rate 0.05 and momentum 0, as in Table III." in lead


def test_the_runs_that_the_docs_tell_of_are_those_of_table_3():
    """Labels and settings of entries are what rows are found by: who changes one loses days of computing."""
    kept = Results(Path(__file__).parents[2] / "docs" / "fedadmm_results.csv", "now")
    found = {(e.cell.name, e.label): [row.reached for row in kept.find(e)] for e in fedadmm._table3_entries()}
    assert found["mnist-100-iid", "FedADMM"] == [8, 8, 11]
    assert found["mnist-100-iid", "FedADMM as printed"] == [None]
    assert (found["mnist-100-iid", "FedAvg"], found["mnist-100-iid", "FedSGD"]) == ([8], [None])
    assert found["fmnist-1000-iid", "FedADMM"] == [3, 4, 3]
    assert found["mnist-100-noniid", "FedADMM"] == [24, 19, 19]
    assert found["fmnist-1000-noniid", "FedADMM"] == [47]
    assert found["mnist-100-noniid", "FedADMM as printed"] == [None]
    assert found["mnist-100-noniid", "FedAvg, all but duals of FedADMM"] == [25]


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


def test_lines_are_compared_on_the_seeds_that_both_have(results):
    """24, 19 and 19 against 25 with seed 0: 24 against 25, and of five baselines one was run."""
    entry = mine()
    plain = Entry(CELL, "FedAvg, all but duals of FedADMM", FedADMM(rho=0.0, duals=False), after=entry)
    entries = [entry, plain, *baselines(CELL, 5, 200, entry)]
    for seed, reached in enumerate((24, 19, 19)):
        done(results, entry, seed=seed, reached=reached)
    done(results, plain, reached=25)
    (name, holds, said) = fedadmm._best(results, entries, CELL.name)[-1]
    assert (name, holds) == ("mnist-100-iid: … fewer than every baseline", None)
    assert said.endswith("; FedADMM 24 (seed 0): 4.0 % fewer than the best of those run")
    (row,) = reductions(results, entries, ["FedADMM"])
    assert (row["rounds"], row["its rounds"], row["seeds"], row["reduction"]) == (24.0, 25.0, "1 of 3", "< 4.0 %")
    for other in entries[2:]:
        done(results, other, reached=23)
    assert fedadmm._best(results, entries, CELL.name)[-1][1] is False, "19 on average is not what 23 is beside"
    for other in entries[2:]:
        done(results, other, reached=30, most=101)
    (_, holds, said) = fedadmm._best(results, entries, CELL.name)[-1]
    assert holds is True
    assert said.endswith("4.0 % fewer than the best of them")


#: Rounds of two lines ("> n": cut there; "nan": not finite) → whether the first needs fewer, and rounds do not rise.
COMPARED = [
    (8, 20, True, False),
    (20, 8, False, True),
    (8, 8, False, True),
    (8, "> 24", True, False),
    (30, "> 24", None, None),
    ("> 24", 30, None, None),
    ("> 24", 24, False, True),
    ("> 24", "> 24", None, None),
    (8, "nan", True, False),
    ("nan", 8, False, True),
    ("nan", "nan", False, None),
    ("> 24", "nan", None, None),
    (8, None, None, None),
    (None, None, None, None),
]


def reached_in(results, entry, rounds, seed=0):
    if isinstance(rounds, int):
        done(results, entry, seed=seed, reached=rounds, most=300)
    elif rounds is not None:
        done(results, entry, seed=seed, reached=None, rounds=3 if rounds == "nan" else 24, most=24)


@pytest.mark.parametrize(("first", "second", "less", "falls"), COMPARED)
def test_a_claim_is_decided_by_what_is_known_of_runs_that_were_cut(results, first, second, less, falls):
    """And a cut run is told by its rounds."""
    one, other = mine(seeds=1), Entry(CELL, "FedAvg", FedAvg(step=0.1, epochs=5, batch=200))
    for entry, rounds in ((one, first), (other, second)):
        reached_in(results, entry, rounds)
    claims = [
        *fedadmm._less(("FedADMM", "FedAvg"))(results, [one, other]),
        *fedadmm._fewest(results, [one, other]),
        *fedadmm._falls("fewer")(results, [one, other]),
    ]
    assert [holds for _, holds, _ in claims] == [less, less, falls]
    words = [{"nan": "not finite after 3", None: "not run"}.get(t, str(t)) for t in (first, second)]
    assert claims[0][2] == claims[2][2] == ", ".join(words)
    assert claims[1][2] == f"FedADMM {words[0]}, FedAvg {words[1]}"


def test_rounds_that_rise_somewhere_do_not_fall_whatever_was_not_run(results):
    some = [Entry(CELL, f"E = {e}", FedADMM(epochs=e)) for e in (1, 5, 10)]
    done(results, some[0], reached=10)
    done(results, some[2], reached=9)
    assert fedadmm._falls("")(results, some)[0][1:] == (None, "10, not run, 9")
    done(results, some[2], reached=11, most=101)
    assert fedadmm._falls("")(results, some)[0][1:] == (False, "10, not run, 11")


@pytest.mark.parametrize(
    ("rounds", "holds", "said"),
    [((8, 8, 14), True, "10"), ((8, 8, 15), False, "10.3"), ((8, 8, "> 24"), False, "> 13.3"),
     ((1, 1, "> 24"), None, "> 8.67"),
     ((1, 1, "nan"), False, "not finite after 3")],
)  # fmt: skip
def test_what_is_held_against_the_printed_rounds_says_whose_setting_it_is(results, rounds, holds, said):
    """Ours by the lead; the lines that have the paper's have claims of their own, where they were run."""
    entry, drawn = mine(), Entry(CELL, "FedADMM, E_i drawn", FedADMM(momentum=0.5))
    for seed, reached in enumerate(rounds):
        reached_in(results, entry, reached, seed)
    first, *rest = fedadmm._best(results, [entry, drawn], CELL.name)
    assert first == ("mnist-100-iid: FedADMM with the setting named in the lead needs at most 10 rounds", holds, said)
    assert not any("as Table III prints" in claim for claim, *_ in rest)
    reached_in(results, drawn, 12)
    claim = ("mnist-100-iid: FedADMM, E_i drawn: at most 10 rounds, as Table III prints", False, "12 (seed 0)")
    assert fedadmm._best(results, [entry, drawn], CELL.name)[1] == claim


def test_a_run_that_was_not_finite_has_no_accuracy_in_the_end(results):
    """Nor after a round that it did not see, also where it was at the target before."""
    whole, broken = (Entry(CELL, label, FedADMM(), to_target=False) for label in ("a", "b"))
    done(results, whole, rounds=100, to_target=False)
    done(results, broken, reached=8, rounds=30, to_target=False)
    claims = {at: fedadmm._ahead(("a", "b"), at=at)(results, [whole, broken])[0][1:] for at in (-1, 20, 40)}
    assert claims == {-1: (None, "1.1000, not finite"), 20: (False, "0.3000, 0.3000"), 40: (None, "0.5000, not finite")}
    assert math.isnan(fedadmm._row(results, broken)["last accuracy"])


# Reductions


def test_the_reductions_of_table_3_are_those_printed():
    """Its last line: over the best baseline of each column."""
    printed = ("47.4 %", "56.6 %", "86.9 %", "82.2 %", "70.0 %", "78.8 %", "70.8 %", "82.0 %")
    assert tuple(map(fedadmm._printed, fedadmm.PRINTED)) == printed


CUT = 60  # "> 60"
#: FedADMM's rounds and those of FedSGD, FedAvg, FedProx, SCAFFOLD (None: not run; "nan": not finite) → the reduction
REDUCED = [
    (10, (297, 19, 29, 27), "FedAvg", "47.4 %"),
    (30, (297, 20, 29, 27), "FedAvg", "-50.0 %"),
    (15, (f"> {CUT}",) * 4, "FedSGD", "> 75.0 %"),
    (15, ("nan", f"> {CUT}", "nan", f"> {CUT}"), "FedAvg", "> 75.0 %"),
    (15, (f"> {CUT}", 30, "nan", 45), "FedAvg", "50.0 %"),
    (15, (f"> {CUT}", 80, 90, 90), "FedAvg", "> 75.0 %, < 81.2 %"),
    (15, (None, 30, None, 45), "FedAvg", "< 50.0 %"),
    (15, (None, f"> {CUT}", None, "nan"), "FedAvg", "not known"),
    (15, ("nan",) * 4, "FedSGD", "no baseline gets there"),
    (15, (None,) * 4, "not run", "not run"),
    (f"> {CUT}", (297, 40, 50, 50), "FedAvg", "< -50.0 %"),
    (f"> {CUT}", (f"> {CUT}",) * 4, "FedSGD", "not known"),
    ("nan", (297, 40, 50, 50), "FedAvg", "does not get there"),
    (None, (297, 40, 50, 50), "FedAvg", "not run"),
]


@pytest.mark.parametrize(("own", "others", "best", "reduction"), REDUCED)
def test_a_reduction_is_a_bound_where_a_run_was_cut_or_is_not_there(results, own, others, best, reduction):
    entry = mine(seeds=1)
    entries = [entry, *baselines(CELL, 5, 200, entry)]
    for one, reached in zip(entries, (own, *others), strict=True):
        if isinstance(reached, int):
            done(results, one, reached=reached, most=300)
        elif reached is not None:
            done(results, one, reached=None, rounds=3 if reached == "nan" else CUT, most=CUT)
    (row,) = reductions(results, entries, ["FedADMM"], fedadmm.BASELINES)
    best += ", of those run" if None in others and best != "not run" else ""
    assert (row["best baseline"], row["reduction"]) == (best, reduction)
    unrun = [label for label, reached in zip(fedadmm.BASELINES, others, strict=True) if reached is None]
    assert row["not run"] == ", ".join(unrun)
    assert row["cell"] == CELL.name


def test_a_reduction_is_of_the_seeds_that_all_have(results):
    """Seed 0 of FedADMM against seed 0 of the others, until these have a second: 20 and more than 40 against 100."""
    entry = mine()
    others = list(baselines(CELL, 5, 200, entry))
    for other in others:
        done(results, other, reached=100)
    done(results, entry, reached=20)
    done(results, entry, seed=1, reached=None, rounds=40, most=40)
    first = reductions(results, [entry, *others], ["FedADMM"], fedadmm.BASELINES)[0]
    assert (first["rounds"], first["seeds"], first["reduction"]) == (20.0, "1 of 3", "80.0 %")
    for other in others:
        done(results, other, seed=1, reached=100)
    second = reductions(results, [entry, *others], ["FedADMM"], fedadmm.BASELINES)[0]
    assert (second["rounds"], second["seeds"], second["reduction"]) == ("> 30", "2 of 3", "< 70.0 %")


#: Which lines save against which, by what is shown of it.
AGAINST = {
    fedadmm.table3: ({"FedADMM"}, {"FedSGD", "FedAvg", "FedProx", "SCAFFOLD"}),
    fedadmm.table4: ({"E = 5", "E = 10"}, {"E = 1"}),
    fedadmm.table5: ({"FedADMM"}, {"FedProx 0.01", "FedProx 0.1", "FedProx 1"}),
    fedadmm.fig4: ({"FedADMM"}, {"FedSGD", "FedAvg", "FedProx", "SCAFFOLD"}),
}


@pytest.mark.parametrize("figure", AGAINST, ids=lambda f: f.__name__)
def test_which_tables_have_reductions(figure, study, monkeypatch):
    monkeypatch.setattr(fedadmm, "fill", lambda *_: None)
    monkeypatch.setattr(fedadmm, "available", lambda dataset: True)
    monkeypatch.setattr(Study, "finish", lambda self, title, lead, claims, figures, tables: (lead, tables))
    lead, tables = figure(study, Asked())
    own, others = AGAINST[figure]
    cells_ = {row["cell"] for row in tables["Rounds"]}
    assert {(row["cell"], row["algorithm"]) for row in tables["Reduction"]} == {(c, o) for c in cells_ for o in own}
    assert {frozenset(row["not run"].split(", ")) for row in tables["Reduction"]} == {frozenset(others)}
    assert {row["reduction"] for row in tables["Reduction"]} == {"not run"}
    assert ("which the paper does not print" in lead) == (figure in (fedadmm.table4, fedadmm.table5))
    if figure is fedadmm.table3:
        assert tables["Reduction"][0]["printed"] == "47.4 %"


def test_table_3_tells_what_is_saved_against_fedavg_with_fedadmm_s_own_settings_too(study, results, monkeypatch):
    """24 with seed 0 against 40 of the paper's FedAvg, and 25 of FedAvg with all but the duals."""
    mine_, plain, *rest = (e for e in fedadmm._table3_entries() if e.cell.name == "mnist-100-noniid")
    for seed, reached in enumerate((24, 19, 19)):
        done(results, mine_, seed=seed, reached=reached)
    for other in [plain, *rest]:
        done(results, other, reached=25 if other is plain else 40)
    (row,) = drawn(study, results, monkeypatch, cells=["mnist-100-noniid"])[1]["Reduction"]
    assert (row["best baseline"], row["reduction"]) == ("FedSGD", "40.0 %")
    assert row["against every FedAvg line"] == "4.0 % (FedAvg, all but duals of FedADMM)"


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
    lead, claims, tables = figure(study, Asked(["mnist-100-noniid"]))
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


# What is asked for


def drawn(study, results, monkeypatch, figure=fedadmm.table3, **options):
    """The names of the entries that were to be filled, and the tables."""
    filled = []
    monkeypatch.setattr(fedadmm, "fill", lambda study, results, entries, until: filled.extend(entries))
    monkeypatch.setattr(fedadmm, "available", lambda dataset: True)
    monkeypatch.setattr(Study, "finish", lambda self, title, lead, claims, figures, tables: tables)
    tables = figure(study, Asked(**options))
    return [(entry.cell.name, entry.label) for entry in filled], tables


def test_only_the_algorithms_asked_for_are_run_and_all_are_shown(study, results, monkeypatch):
    every, tables = drawn(study, results, monkeypatch)
    assert [(row["cell"], row["algorithm"]) for row in tables["Rounds"]] == every
    asked_for = {"algorithms": ["FedADMM as printed", "FedADMM"]}
    filled, same = drawn(study, results, monkeypatch, **asked_for)
    assert filled == [entry for entry in every if entry[1] in asked_for["algorithms"]]  # in the table's order
    assert str(same) == str(tables)
    filled, some = drawn(study, results, monkeypatch, cells=["mnist-100-iid"], **asked_for)
    assert filled == [("mnist-100-iid", "FedADMM"), ("mnist-100-iid", "FedADMM as printed")]
    assert str(some["Rounds"]) == str([row for row in tables["Rounds"] if row["cell"] == "mnist-100-iid"])
    filled, _ = drawn(study, results, monkeypatch, fedadmm.fig6, algorithms=["η = 1.5"])
    assert filled == [(cell, "η = 1.5") for cell in fedadmm.HUNDRED]


def test_an_algorithm_that_no_cell_asked_for_has_is_refused_before_any_run(study, results, monkeypatch):
    """Its name is that of a line, commas in it and all; one that other cells have is unknown here."""
    valid = "FedADMM; FedADMM as printed; FedADMM, E_i drawn; FedAvg; FedAvg, all but duals of FedADMM; FedProx; FedSGD"
    said = rf"^algorithm must be one of {valid}; SCAFFOLD, got 'FedAMM'\. Did you mean 'FedADMM'\?$"
    with pytest.raises(UnknownName, match=said):
        drawn(study, results, monkeypatch, cells=["mnist-100-iid"], algorithms=["FedADMM", "FedAMM"])
    own = ["FedADMM, the paper's E and B"]
    have = ("mnist-100-noniid", "fmnist-1000-iid", "fmnist-1000-noniid")
    assert drawn(study, results, monkeypatch, algorithms=own)[0] == [(cell, *own) for cell in have]
    with pytest.raises(UnknownName, match=r"got \"FedADMM, the paper's E and B\"\."):
        drawn(study, results, monkeypatch, cells=["mnist-100-iid"], algorithms=own)


def test_redraw_hands_on_what_is_asked_for(tmp_path, monkeypatch):
    seen = []

    def draw(study, asked):
        seen.append(asked)

    monkeypatch.setitem(papers.PAPERS, "fedadmm", {"table3": ("a table", draw)})
    monkeypatch.setitem(papers.PAPERS, "fedepm", {"fig3": ("a figure", lambda study: None)})
    options = {"out": str(tmp_path), "quiet": True}
    papers.redraw("fedadmm", "table3", **options)
    papers.redraw("fedadmm", "table3", cells=["a"], algorithms=["b", "c"], hours=0, **options)
    assert seen == [Asked(None, None, 1e6), Asked(["a"], ["b", "c"], 0)]
    with pytest.raises(InvalidArgument, match=r"^algorithm must be left out for fedepm fig3, got \['b'\]\. It has no"):
        papers.redraw("fedepm", "fig3", algorithms=["b"], **options)


@pytest.mark.parametrize("figure", [fedadmm.fig3, fedadmm.fig4, fedadmm.fig5, fedadmm.fig10])
def test_leads_say_what_differs_from_the_paper(figure, study, monkeypatch):
    leads = []
    monkeypatch.setattr(fedadmm, "_plain_study", lambda *args: leads.append(args[4]))
    figure(study, Asked())
    assert "FedProx's ρ is tuned; the paper fixes it at 0.1 outside Table III." in leads[0]
    assert "keeps rate 0.1 and momentum 0.5 with two classes a client too" in leads[0]
    assert ("tunes everyone at 100 clients" in leads[0]) == (figure in (fedadmm.fig3, fedadmm.fig4))
