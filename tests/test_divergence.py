"""A run that diverges stops, says where, and keeps the last good state."""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np
import pytest
from helpers_experiment import experiment, history_cells, patients, same_bits, tree, whole, write_csv, write_toml

import fedpact as fp
from fedpact.core.errors import ClientError, DataError
from fedpact.core.stop import Outcome
from fedpact.experiment import build, read
from fedpact.metrics import score
from fedpact.tune import _score, tune


def test_a_step_that_is_too_long(command, people, tmp_path):
    tables = experiment(
        data={"scale": "none"},
        problem={"name": "least_squares", "l2": 0.0},
        algorithm={"step": 1e6},
        run={"rounds": 100},
    )
    write_toml(people, tables)
    done = command("run", people, "--out", "run")
    assert done.code == 1
    assert "Traceback" not in done.err
    found = re.search(r"a number was not finite.*: (round (\d+), (client \d+|the server).* not finite)", done.out)
    assert found, done.out
    assert "To change that, take shorter steps: a smaller scale." in done.out
    folder = tmp_path / "run"
    whole(folder)
    assert found[1] in (folder / "report.html").read_text(encoding="utf-8")
    assert found[1] in json.loads((folder / "result.json").read_text())["outcome"]
    rows = history_cells(folder)
    assert 0 < int(rows[-1]["round"]) == int(found[2]) < 100
    assert all(math.isfinite(float(row["objective"])) for row in rows)
    assert all(np.all(np.isfinite(leaf)) for leaf in fp.Model.load(folder / "model.bin").w.tree.values())


def test_a_run_that_ends_above_its_start_says_so(command, people, tmp_path):
    """FedEPM's constants suit columns of 2-norm 1; on standardised ones its defaults diverge without a bad number."""
    tables = experiment(run={"rounds": 3, "participation": 1.0}) | {"algorithm": {"name": "fedepm"}}
    write_toml(people, tables)
    done = command("run", people, "--out", "run")
    assert done.code == 0, done.err
    f = [float(row["objective"]) for row in history_cells(tmp_path / "run")]
    assert f[-1] > f[0]
    said = f"notice: The objective ended above its start: {f[-1]:.5g} after 3 rounds, from 0.69315; "
    assert said in done.out
    assert "begin with mu0 = 10, eta = 1e-3." in done.out
    assert "ended above its start" in (tmp_path / "run" / "report.html").read_text(encoding="utf-8")
    compared = command("compare", "run", "--target", "0.5")
    assert "patients never improves on its start" in compared.out
    assert "notice (patients): The objective ended above its start" in compared.out


def test_a_run_that_improves_says_nothing(finished):
    assert not any("above its start" in notice for notice in fp.Run.load(finished).notices)


@pytest.fixture
def outlier(people, tmp_path):
    """Client 4 (west) has features that overflow in its second local step; it takes part in round 3 first."""
    rows = [row | {"dose": 1e120} if row["site"] == "west" else row for row in patients()]
    write_csv(tmp_path / "people.csv", rows)
    tables = experiment(
        data={"scale": "none"},
        problem={"name": "least_squares", "l2": 0.0},
        algorithm={"step": 1e-4},
        run={"participation": [[0], [1], [0, 2], [1, 3, 4], [0]], "rounds": 5},
    )
    return write_toml(people, tables)


def test_the_client_that_diverges_is_named_and_the_last_good_state_kept(command, outlier, tmp_path):
    done = command("run", outlier, "--out", "run")
    assert done.code == 1
    assert "Traceback" not in done.err
    found = re.search(r"a number was not finite: (round 3, client 4: its upload is not finite; .* was \S+)\.", done.out)
    where = found[1]
    folder = tmp_path / "run"
    whole(folder)
    assert where in (folder / "report.html").read_text(encoding="utf-8")
    assert where in json.loads((folder / "result.json").read_text())["outcome"]

    good = command("run", outlier, "--out", "good", "--set", "run.rounds=3")  # the same run, ended in time
    assert good.code == 0, good.err
    same_bits(folder, tmp_path / "good")

    before = tree(folder)
    again = command("resume", folder)
    assert again.code == 1
    assert where in again.out
    assert tree(folder)["history.csv"] == before["history.csv"]
    assert tree(folder)["model.bin"] == before["model.bin"]


def half_square(x, y, w):
    return np.mean((np.asarray(x) @ np.asarray(w) - y) ** 2) / 2


def test_divergence_in_python_is_a_result(outlier):
    experiment, _ = build(read(outlier))
    participation, rounds = experiment.participation, experiment.rounds
    setup = (experiment.algorithm, experiment.problem, experiment.federation)
    run = fp.run(*setup, participation=participation, rounds=rounds)
    assert run.outcome.startswith("a number was not finite: ")
    loss = half_square(*experiment.federation.client(4), run.model.w.tree["w"])
    told = f"its upload is not finite; at the model it was sent its loss was {loss:.4g}"
    assert run.where == f"round 3, client 4: {told}"
    assert run.history.rounds == 3
    assert np.all(np.isfinite(run.model.w.tree["w"]))
    assert any("round 3, client 4" in notice for notice in run.notices)


def test_the_debug_engine_names_the_stage_too(command, outlier, tmp_path):
    done = command("run", outlier, "--out", "run", "--set", "run.engine=debug")
    assert done.code == 1
    assert "Traceback" not in done.err
    assert done.err.startswith("fedpact: round 3, client 4, client_step: ")
    assert "not finite" in done.err
    whole(tmp_path / "run")


# The loss of the client that diverged


@pytest.fixture(scope="module")
def unequal():
    """Five clients of 40, 1203, 7, 300 and 60 rows, those of client 1 so large that its second local step overflows."""
    rng, parts = np.random.default_rng(3), []
    for i, rows in enumerate((40, 1203, 7, 300, 60)):
        x = rng.normal(size=(rows, 3)) * (1e120 if i == 1 else 1.0)
        parts.append((x, rng.normal(size=rows)))
    return fp.data.Federation.from_arrays(parts, classes=())


#: Client 1 takes part in round 2 first.
LATE = {"participation": [[0, 2], [3, 4], [0, 1, 2]], "rounds": 3, "precision": "double"}
TOLD = r"its upload is not finite; at the model it was sent its loss was (\S+)"


@pytest.fixture(scope="module")
def diverged(unequal):
    settings = fp.FedAvg(steps=5, step=0.01)
    return lambda engine: fp.run(settings, fp.LeastSquares(), unequal, engine=engine, **LATE)


@pytest.fixture(scope="module")
def sent(diverged):
    """The model that client 1 was sent."""
    return diverged("local").model.w.tree["w"]


@pytest.mark.parametrize("engine", ["local", "host"])
def test_the_client_that_diverged_is_told_with_its_loss_at_the_model_it_was_sent(unequal, diverged, sent, engine):
    """The loss after the steps is no number, which tells nobody anything."""
    run = diverged(engine)
    assert run.outcome_kind is Outcome.NONFINITE
    found = re.fullmatch(rf"round 2, client 1: {TOLD}", run.where)
    assert found, run.where
    assert float(found[1]) == pytest.approx(half_square(*unequal.client(1), sent), rel=1e-3)
    np.testing.assert_allclose(run.model.w.tree["w"], sent, rtol=1e-12)
    assert any(f"The run stopped: {run.where}. The model is that of round 2" in notice for notice in run.notices)


def test_the_debug_engine_tells_that_loss_too(unequal, diverged, sent):
    with pytest.raises(ClientError) as caught:
        diverged("debug")
    found = re.fullmatch(
        r"round 2, client 1, client_step: .* is not finite; .* its loss was (\S+)\.", str(caught.value)
    )
    assert found, caught.value
    assert float(found[1]) == pytest.approx(half_square(*unequal.client(1), sent), rel=1e-3)


def test_every_trial_tells_the_loss_of_its_own_client(unequal):
    """The other federation has the large rows at client 3, with other labels."""
    parts = [unequal.client(i) for i in (0, 3, 2, 1, 4)]
    other = fp.data.Federation.from_arrays([(x, 3 * y) for x, y in parts], classes=())
    one, two = fp.trials(fp.FedAvg(steps=5, step=0.01), fp.LeastSquares(), [unequal, other], [0, 1], rounds=2)
    for run, split, client in ((one, unequal, 1), (two, other, 3)):
        found = re.fullmatch(rf"round 0, client {client}: {TOLD}", run.where)
        assert float(found[1]) == pytest.approx(half_square(*split.client(client), np.zeros(3)), rel=1e-3)


# Where not every round is measured


STEEP = fp.FedAvg(steps=3, step=1e12)
FLAT = {"kind": "least_squares", "rows": 60, "features": 3}


@pytest.fixture(scope="module")
def three():
    return fp.data.synthetic(**FLAT).split(clients=3)


@pytest.mark.parametrize("every", [1, 2, 3, 7])
def test_no_rhythm_of_measuring_hides_an_objective_that_is_not_finite(three, every):
    """Rounds 1 to 4 are finite, the model of round 5 is too, and its objective is not."""
    run = fp.run(STEEP, fp.LeastSquares(), three, rounds=5, evaluate_every=every)
    assert run.outcome_kind is Outcome.NONFINITE
    assert "not finite" in run.where
    end = run.history.column("objective")[-1]
    assert np.array_equal(run.summary["objective"], end, equal_nan=True)
    assert any("do not use it" in notice for notice in run.notices) == (not np.isfinite(end))
    if every in (1, 2, 3):
        assert any("The model is that of round 4" in n or "do not use it" in n for n in run.notices)


def test_a_run_that_broke_between_measurements_says_that_its_model_is_of_no_use(three):
    """Round 6 is measured and not kept; round 5, which is, was not measured before and is no better."""
    run = fp.run(STEEP, fp.LeastSquares(), three, rounds=8, evaluate_every=2)
    assert run.outcome_kind is Outcome.NONFINITE
    assert run.summary["rounds"] == 5
    assert not math.isfinite(run.summary["objective"])
    assert any("no better one since round 4 was kept: do not use it" in notice for notice in run.notices)


def test_tuning_ranks_a_run_that_diverged_unmeasured_last(three):
    found = tune(STEEP, fp.LeastSquares(), three, {"step": [1e12, 3.0]}, rounds=5, method="grid", evaluate_every=7)
    assert found.settings.step == 3.0
    assert [math.isfinite(trial.score) for trial in found.trials] == [False, True]


def test_the_command_fails_and_the_folder_says_so(command, tmp_path):
    tables = {
        "data": {"name": "synthetic", **FLAT},
        "split": {"clients": 3},
        "problem": {"name": "least_squares"},
        "algorithm": {"name": "fedavg", "steps": 3, "step": 1e12},
        "run": {"rounds": 5, "evaluate_every": 7},
    }
    done = command("run", write_toml(tmp_path / "steep.toml", tables), "--out", "run")
    assert done.code == 1
    assert "round 5, the server: the objective is not finite" in done.out
    run = fp.Run.load(tmp_path / "run")
    assert run.outcome_kind is Outcome.NONFINITE
    assert not math.isfinite(run.summary["objective"])


def test_a_report_of_numbers_near_the_largest_double_is_drawn(three, tmp_path):
    run = fp.run(STEEP, fp.LeastSquares(), three, rounds=60)
    assert run.history.last("objective") > 1e280
    assert run.report(tmp_path).is_file()


# Where every upload is finite


def overflowing(tree, images):
    """The scores of rows that begin with 1 are 1e30 times the others': their loss is large, and no number at 1e20."""
    z = images @ tree["a"] * jnp.where(images[:, :1] == 1, 1e30, 1.0)
    return jnp.where(jnp.abs(tree["a"]).max() > 1, jnp.inf, z)


@pytest.mark.parametrize("engine", ["local", "host"])
def test_the_client_with_the_largest_training_loss_is_told_with_round_and_loss(engine):
    rng = np.random.default_rng(0)
    x, y = np.abs(rng.normal(size=(20, 3))) / 10, np.arange(20) % 2.0
    x[10:15, 0] = 1  # client 2
    clients = [(x[i : i + 5], y[i : i + 5]) for i in range(0, 20, 5)]
    federation = fp.data.Federation.from_arrays(clients, classes=["a", "b"])
    problem = fp.Network(overflowing, lambda key: {"a": 0.5 * jnp.eye(3)[:, :2]}, shape=(3,), classes=2)
    options = {"participation": [[0, 1], [1, 2, 3], [0]], "rounds": 3, "precision": "double", "engine": engine}
    run = fp.run(fp.FedSGD(rate=1e-29), problem, federation, telemetry="all", **options)
    assert run.outcome_kind is Outcome.NONFINITE
    found = re.fullmatch(r"round 1, the server: .* is not finite \(largest training loss (\S+), client 2\)", run.where)
    assert found, run.where
    w = run.model.w
    z = np.asarray(problem.scores(w, jnp.asarray(x[10:15])))
    assert float(found[1]) == pytest.approx(np.mean(z.max(axis=1) - z[np.arange(5), y[10:15].astype(int)]), rel=1e-5)
    assert any(f"The run stopped: {run.where}. The model is that of round 1" in notice for notice in run.notices)


def test_a_start_that_is_not_finite_is_told_so():
    problem = fp.Network(
        lambda tree, images: images @ tree["a"], lambda key: {"a": jnp.full((30, 2), jnp.nan)}, shape=(30,), classes=2
    )
    federation = fp.data.breast_cancer().split(3)
    for more in ({}, {"telemetry": "none"}):
        run = fp.run(fp.FedSGD(), problem, federation, rounds=2, **more)
        assert run.outcome_kind is Outcome.NONFINITE
        assert any("The model's own numbers are not finite, and were not at the start" in n for n in run.notices)
        assert not any("numbers are finite" in notice for notice in run.notices)


# Scores


def lost(tree, images):
    """No number as soon as a parameter has moved; the parameters stay finite."""
    return images @ tree["a"] + jnp.where(jnp.any(tree["a"] != 0), jnp.nan, 0.0)


@pytest.mark.parametrize("blind", [{"evaluate_every": 2}, {"telemetry": "none"}], ids=str)
def test_predictions_that_are_not_finite_have_no_score_and_end_the_run_properly(blind, tmp_path, monkeypatch):
    monkeypatch.setattr("fedpact.report.html.plots_section", lambda *_: "")
    federation = fp.data.breast_cancer().split(3, holdout=0.2)
    problem = fp.Network(lost, lambda key: {"a": jnp.zeros((30, 2))}, shape=(30,), classes=2)
    run = fp.run(fp.FedSGD(), problem, federation, rounds=1, folder=tmp_path / "run", **blind)
    assert run.outcome_kind is (Outcome.NONFINITE if "evaluate_every" in blind else Outcome.ROUNDS)
    scores = {"accuracy": None, "log_loss": None, "calibration_error": None}
    assert {k: v for k, v in run.metrics["pooled"].items() if k != "rows"} == scores
    assert fp.Run.load(tmp_path / "run", problem=problem).metrics == run.metrics
    assert math.isinf(_score(run, "held_out.log_loss"))


@pytest.mark.parametrize(
    ("problem", "names"),
    [
        (fp.Logistic(), ["accuracy", "auc", "log_loss", "calibration_error"]),
        (fp.LeastSquares(), ["mean_squared_error", "r_squared"]),
    ],
)
def test_one_prediction_that_is_not_finite_is_enough(problem, names):
    assert score(problem, np.array([0.0, 1.0, 1.0]), np.array([0.2, np.nan, 0.7])) == dict.fromkeys(names)


# First messages


@dataclass(frozen=True)
class Broken(fp.LeastSquares):
    """Client 2's gradient at the start is not a number."""

    def gradient(self, w, batch):
        g = super().gradient(w, batch)
        return g.map(lambda a: jnp.where(batch.client == 2, jnp.nan, a))


def test_a_first_message_that_is_not_finite_is_refused_and_its_client_named(three):
    with pytest.raises(DataError, match=r"first message of client 2 must be finite, got z.* that is not"):
        fp.run(fp.InexactADMM(), Broken(), three, rounds=3)
    with pytest.raises(DataError, match="first message of client 2"):
        fp.trials(fp.InexactADMM(), Broken(), three, [0, 1], rounds=3)


def test_rows_too_large_to_be_squared_are_not_called_flat():
    rng = np.random.default_rng(0)
    parts = [(rng.normal(size=(8, 2)) * (1e200 if i == 1 else 1), rng.normal(size=8)) for i in range(3)]
    federation = fp.data.Federation.from_arrays(parts, classes=())
    with pytest.raises(DataError, match=r"r_i of client 1 must be finite, got σ_i = .*overflow"):
        fp.run(fp.InexactADMM(), fp.LeastSquares(), federation, rounds=3)
