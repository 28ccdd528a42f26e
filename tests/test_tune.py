"""The tuning protocol: the plan, the order, ties, what is judged and what it costs."""

from __future__ import annotations

import dataclasses
import json
import math
from types import SimpleNamespace

import numpy as np
import pytest
from helpers_experiment import tree, write_csv
from helpers_refused import refused

import fedpact as fp
import fedpact.tune
from fedpact.cli import main
from fedpact.core.errors import InvalidArgument, UnknownName
from fedpact.core.history import History
from fedpact.core.stop import Outcome
from fedpact.experiment import build, read
from fedpact.tune import rungs, tune


def test_the_plan_of_a_grid_is_one_rung():
    assert rungs(7, 20, "grid") == [(7, 20)]


@pytest.mark.parametrize(
    ("candidates", "rounds", "plan"),
    [
        (1, 27, [(1, 27)]),
        (2, 27, [(2, 27)]),
        (3, 27, [(3, 27)]),
        (4, 27, [(4, 9), (2, 27)]),
        (9, 27, [(9, 9), (3, 27)]),
        (10, 27, [(10, 3), (4, 9), (2, 27)]),
        (9, 2, [(9, 1), (3, 2)]),
        (28, 2, [(28, 1), (10, 1), (4, 1), (2, 2)]),
        (4, 5, [(4, 2), (2, 5)]),  # rates of the FedADMM paper, and with FedProx's ρ
        (16, 5, [(16, 1), (6, 2), (2, 5)]),
    ],
)
def test_the_plan_of_halving_by_hand(candidates, rounds, plan):
    assert rungs(candidates, rounds, "halving") == plan


class Fake:
    """In place of `fedpact.run`: a run of settings with scale s for R rounds ends at the objective `curve(s, R)`."""

    def __init__(self, curve, outcome=lambda s, r: Outcome.ROUNDS, metrics=lambda s, r: None) -> None:
        self.curve, self.outcome, self.metrics = curve, outcome, metrics
        self.calls: list[tuple[float, int, dict]] = []

    def __call__(self, settings, problem, federation, *, rounds, seed, **options):
        self.calls.append((settings.scale, rounds, {"seed": seed, **options}))
        history = History(["round", "objective", "accuracy"])
        value = self.curve(settings.scale, rounds)
        history.extend({name: np.array([value]) for name in ("objective", "accuracy")} | {"round": np.array([rounds])})
        kind = self.outcome(settings.scale, rounds)
        return SimpleNamespace(
            history=history, outcome_kind=kind, outcome=kind.value, metrics=self.metrics(settings.scale, rounds)
        )


@pytest.fixture
def faked(monkeypatch):
    def install(curve, **options):
        runner = Fake(curve, **options)
        monkeypatch.setattr(fedpact.tune, "run", runner)
        monkeypatch.setattr(fedpact.tune, "_check_metric", lambda *_: None)
        return runner

    return install


def search(scales, **options):
    return tune(fp.FedAvg(steps=2, step=0.1), None, None, {"scale": scales}, **options)


def test_halving_keeps_the_best_third(faked):
    runner = faked(lambda s, r: abs(s - 6) + 1 / r)
    tuned = search([1, 2, 3, 4, 5, 6, 7, 8, 9], rounds=27, seed=4, precision="single")
    assert [(s, r) for s, r, _ in runner.calls] == [
        *((s, 9) for s in range(1, 10)),
        (6, 27), (5, 27), (7, 27),  # the tie of 5 and 7 goes to the earlier
    ]  # fmt: skip
    assert tuned.settings == fp.FedAvg(steps=2, step=0.1, scale=6)
    assert tuned.score == pytest.approx(1 / 27)
    assert tuned.rounds == 9 * 9 + 3 * 27 == sum(r for _, r, _ in runner.calls)
    assert all(options == {"seed": 4, "precision": "single"} for *_, options in runner.calls)
    assert tuned.table()[0] == {
        "scale": 1,
        "rounds": 9,
        "score": pytest.approx(5 + 1 / 9),
        "outcome": "all rounds were run",
    }
    assert len(tuned.trials) == 12


def test_halving_can_be_fooled_by_a_slow_start_and_a_grid_cannot(faked):
    curve = lambda s, r: s if r < 27 else -s  # the smaller leads until the last rung
    faked(curve)
    assert search([1, 2, 3, 4], rounds=27).settings.scale == 2  # the two that are left are compared at full length
    assert search([1, 2, 3], rounds=27).settings.scale == 3
    assert search([1, 2, 3, 4], rounds=27, method="grid").settings.scale == 4


def test_a_grid_is_every_combination_at_full_length(faked):
    runner = faked(lambda s, r: -s)
    grid = {"scale": [1.0, 2.0], "steps": [3, 4, 5]}
    tuned = tune(fp.FedAvg(step=0.1), None, None, grid, method="grid", rounds=8)
    assert [t.changes for t in tuned.trials] == [{"scale": s, "steps": k} for s in (1.0, 2.0) for k in (3, 4, 5)]
    assert {r for _, r, _ in runner.calls} == {8}
    assert tuned.rounds == 48
    assert tuned.settings == fp.FedAvg(step=0.1, scale=2.0, steps=3)  # the first of three equals


@pytest.mark.parametrize("metric", ["accuracy", "objective"])
def test_which_way_is_better(faked, metric):
    faked(lambda s, r: s)
    best = search([2, 5, 3], metric=metric, method="grid", rounds=1).settings.scale
    assert best == (5 if metric == "accuracy" else 2)


@pytest.mark.parametrize(
    ("metric", "best"),
    [("held_out.auc", 5), ("held_out.accuracy", 2), ("held_out.log_loss", 2), ("held_out.calibration_error", 5)],
)
def test_held_out_scores(faked, metric, best):
    pooled = lambda s, r: {"auc": s / 10, "accuracy": -s, "log_loss": s, "calibration_error": 9 - s}
    faked(lambda s, r: 0.0, metrics=lambda s, r: {"pooled": pooled(s, r)})
    tuned = search([2, 5, 3], metric=metric, method="grid", rounds=1)
    assert tuned.settings.scale == best
    assert tuned.score == pooled(best, 1)[metric.removeprefix("held_out.")]


def test_held_out_scores_need_held_out_rows(faked):
    faked(lambda s, r: 0.0)
    with pytest.raises(InvalidArgument, match=r"metric must be a column without held-out rows, got 'held_out.auc'"):
        search([1], metric="held_out.auc", rounds=1)


def test_a_run_that_diverged_is_last_however_low_its_objective(faked):
    faked(lambda s, r: -s, outcome=lambda s, r: Outcome.NONFINITE if s > 2 else Outcome.ROUNDS)
    tuned = search([1, 2, 3, 4], rounds=9)
    assert tuned.settings.scale == 2
    assert [t.score for t in tuned.trials[:4]] == [-1, -2, math.inf, math.inf]


@pytest.mark.parametrize("metric", ["objective", "accuracy"])
def test_when_all_diverge_there_is_no_best(faked, metric):
    faked(lambda s, r: s, outcome=lambda s, r: Outcome.NONFINITE)
    with pytest.raises(InvalidArgument, match="grid must have a candidate that stays finite, got none"):
        search([1, 2], rounds=3, metric=metric)


def test_the_budget_is_checked_before_the_first_run(faked):
    runner = faked(lambda s, r: s)
    cost = 9 * 9 + 3 * 27
    with pytest.raises(
        InvalidArgument, match=f"budget must be at least {cost} rounds for 9 candidates, got {cost - 1}"
    ):
        search(range(1, 10), rounds=27, budget=cost - 1)
    assert runner.calls == []
    assert search(range(1, 10), rounds=27, budget=cost).rounds == cost


def test_on_trial_sees_every_trial_as_it_ends(faked):
    faked(lambda s, r: s)
    seen = []
    tuned = search([1, 2, 3, 4], rounds=9, on_trial=seen.append)
    assert seen == tuned.trials


def test_trials_that_are_kept_are_not_run_again(faked):
    """A tuning that was cut after its third trial goes on with the fourth, and ends as one that was not."""
    faked(lambda s, r: s)
    whole = search([4, 1, 3, 2], rounds=9)
    runner, kept = faked(lambda s, r: s), {}

    def keep(changes, rounds, compute):
        key = (*changes.values(), rounds)
        if key not in kept:
            if len(kept) == 3 and not kept.setdefault("cut", None):
                kept["cut"] = True
                raise MemoryError
            kept[key] = compute()
        return kept[key]

    with pytest.raises(MemoryError):
        search([4, 1, 3, 2], rounds=9, keep=keep)
    done = len(runner.calls)
    assert search([4, 1, 3, 2], rounds=9, keep=keep) == whole
    assert (done, len(runner.calls)) == (3, len(whole.trials))


def test_a_wrong_candidate_is_refused_before_the_first_run(faked):
    runner = faked(lambda s, r: s)
    with pytest.raises(InvalidArgument, match="scale must be above 0, got 0"):
        search([1, 2, 0], rounds=9)
    assert runner.calls == []


# Real runs


@pytest.mark.drill
def test_scores_are_those_of_plain_runs(tmp_path):
    path = write_csv(tmp_path / "people.csv")
    dataset = fp.data.from_csv(path, "outcome", drop=["id", "site"], categorical="sex")
    federation = dataset.split(how="column", column="site", holdout=0.25)
    common = {"participation": 0.5, "seed": 2}
    settings, problem = fp.FedAvg(steps=3, step=0.1, batch=4), fp.Logistic(l2=0.01, intercept=True)
    tuned = tune(settings, problem, federation, {"scale": [1.0, 2.0, 3.0, 4.0]}, rounds=3, **common)
    assert [(t.changes["scale"], t.rounds) for t in tuned.trials[:4]] == [(s, 1) for s in (1.0, 2.0, 3.0, 4.0)]
    assert [t.rounds for t in tuned.trials[4:]] == [3, 3]
    for trial in tuned.trials:
        plain = fp.run(
            dataclasses.replace(settings, **trial.changes), problem, federation, rounds=trial.rounds, **common
        )
        assert trial.score == plain.history.last("objective")
    assert tuned.score == min(t.score for t in tuned.trials[4:])


def test_grid_and_halving_on_the_command(command, people, tmp_path):
    common = ("tune", people, "--grid", "scale=0.5,4", "--rounds", "3")
    grid = command(*common, "--method", "grid", "--json")
    assert grid.code == 0, grid.err
    result = json.loads(grid.out)
    assert result["rounds"] == 6
    assert [(t["scale"], t["rounds"]) for t in result["trials"]] == [(0.5, 3), (4, 3)]
    best = min(result["trials"], key=lambda t: t["score"])
    assert result["settings"]["scale"] == best["scale"]
    assert result["score"] == best["score"]
    assert result["settings"]["steps"] == 3  # the file's other settings stay

    halving = command(*common, "--metric", "held_out.accuracy")
    assert halving.code == 0, halving.err
    assert "best of 6 rounds: FedAvg(" in halving.out  # 2 × 3
    assert "held_out.accuracy" in halving.out
    assert "notice: The settings were chosen by held_out.accuracy, so these rows are no longer held out" in halving.out
    assert halving.err.count(" rounds: ") == 2
    assert sorted(p.name for p in tmp_path.iterdir()) == ["people.csv", "people.toml"]


def test_words_and_numbers_in_a_grid(command, people):
    done = command(
        "tune", people, "--grid", "algorithm.step=lipschitz,0.1", "--rounds", "1", "--method", "grid", "--json"
    )
    assert done.code == 0, done.err
    assert [t["step"] for t in json.loads(done.out)["trials"]] == ["lipschitz", 0.1]


# What cannot be tuned


TUNE = {
    (
        "--grid",
        "scal=1,2",
    ): "setting of fedavg must be one of batch, epochs, momentum, scale, short, step, steps, vary, weights, got 'scal'",
    ("--grid", "scale"): "--grid must be setting=value,value,… got 'scale'.",
    ("--grid", "scale="): "--grid must be setting=value,value,… got 'scale='.",
    ("--grid", "scale=0,1"): "scale must be above 0, got 0.",
    ("--grid", "scale=a,b"): "scale must be above 0, got 'a'.",
    (
        "--grid",
        "scale=1,2",
        "--method",
        "halvin",
    ): "method must be one of grid, halving, got 'halvin'. Did you mean 'halving'?",
    ("--grid", "scale=1,2", "--rounds", "0"): "rounds must be an integer of at least 1, got 0.",
    (
        "--grid",
        "scale=1,2,3",
        "--rounds",
        "9",
        "--budget",
        "17",
    ): "budget must be at least 27 rounds for 3 candidates, got 17.",
    ("--grid", "scale=1", "--rounds", "1", "--metric", "objectiv"): "metric must be one of ",
    ("--grid", "scale=1", "--rounds", "1", "--metric", "held_out.auk"): "held-out metric must be one of ",
    ("--grid", "scale=1", "--rounds", "1", "--metric", "held_out"): "metric must be one of ",
}


@pytest.mark.parametrize("arguments", TUNE, ids=" ".join)
def test_a_tuning_that_cannot_be(command, people, tmp_path, arguments):
    before = tree(tmp_path)
    refused(command("tune", people, *arguments), TUNE[arguments])
    assert tree(tmp_path) == before


def test_a_tuning_that_cannot_be_in_python(people):
    experiment, _ = build(read(people))
    common = (experiment.algorithm, experiment.problem, experiment.federation)
    with pytest.raises(InvalidArgument, match="budget must be at least 27 rounds for 3 candidates, got 17"):
        tune(*common, {"scale": [1, 2, 3]}, rounds=9, budget=17)
    for grid in ({}, {"scale": []}):
        with pytest.raises(InvalidArgument, match="grid must be values for at least one setting, got "):
            tune(*common, grid)
    with pytest.raises(UnknownName, match="method must be one of"):
        tune(*common, {"scale": [1]}, method="random")
    with pytest.raises(UnknownName, match=r"metric must be one of .* Did you mean 'objective'"):
        tune(*common, {"scale": [1]}, rounds=1, metric="objectve")


def test_a_setting_given_twice_has_all_its_values():
    from fedpact.cli.compare import _grid

    assert _grid(["sigma=0.2", "k0=5", "algorithm.sigma=0.5,1"]) == {"sigma": [0.2, 0.5, 1], "k0": [5]}


@pytest.mark.drill
def test_the_files_other_settings_are_kept(people, capsys):
    arguments = ["tune", str(people), "--grid", "steps=1,2", "--rounds", "2", "--json", "--set", "run.timing=true"]
    assert main([*arguments, "--metric", "local_seconds"]) == 0
    assert json.loads(capsys.readouterr().out)["score"] > 0


@pytest.mark.parametrize("metric", ["foo", "held_out.foo"])
def test_an_unknown_metric_is_refused_before_the_first_trial(people, monkeypatch, capsys, metric):
    monkeypatch.setattr("fedpact.tune.run", lambda *_, **__: pytest.fail("it ran"))
    assert main(["tune", str(people), "--grid", "steps=1,2", "--metric", metric]) == 1
    assert "metric must be one of " in capsys.readouterr().err
