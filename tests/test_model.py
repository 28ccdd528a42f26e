"""A trained model: saved, loaded, applied; and the scores it gets, against scikit-learn and sums by hand."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
from helpers_experiment import patients, write_csv
from sklearn.metrics import accuracy_score, log_loss, mean_squared_error, r2_score, roc_auc_score

import fedpact as fp
from fedpact.core.errors import CheckpointError, DataError, InvalidArgument
from fedpact.core.vector import Vector
from fedpact.metrics import auc, calibration_curve, calibration_error, held_out, score


@pytest.fixture
def dataset(tmp_path):
    path = write_csv(tmp_path / "people.csv")
    return fp.data.from_csv(path, "outcome", drop=["id", "site"], categorical="sex")


@pytest.fixture
def model(dataset):
    w = Vector({"w": np.array([0.8, -1.1, 0.3]), "b": np.array(0.25)})
    return fp.Model(fp.Logistic(l2=0.01, intercept=True), w, dataset.schema)


def sites(dataset):
    """The split of helpers_experiment, so that its compiled programs serve here too."""
    return dataset.split(how="column", column="site", holdout=0.25)


def by_hand(rows) -> np.ndarray:
    """The probabilities of the model above: standardise, weigh, squash. Classes by alphabet: sick = 0, well = 1."""
    x = np.array([[row["age"], row["dose"], 1.0 if row["sex"] == "m" else 0.0] for row in patients()])
    mean, deviation = x.mean(axis=0), x.std(axis=0)
    new = np.array([[row["age"], row["dose"], 1.0 if row["sex"] == "m" else 0.0] for row in rows])
    z = (new - mean) / deviation @ np.array([0.8, -1.1, 0.3]) + 0.25
    return 1 / (1 + np.exp(-z))


def test_predict_is_the_formula(model, dataset):
    assert dataset.classes == ("sick", "well")
    assert np.allclose(model.predict(dataset.x), by_hand(patients()), rtol=1e-13)


def test_a_model_without_intercept():
    model = fp.Model(fp.Logistic(), Vector({"w": np.array([2.0, -1.0])}), None)
    p = model.predict([[0.0, 0.0], [1.0, 1.0], [1.0, 3.0]])
    assert np.allclose(p, [0.5, 1 / (1 + math.exp(-1)), 1 / (1 + math.exp(1))], rtol=1e-14)


def test_a_linear_model():
    model = fp.Model(fp.LeastSquares(intercept=True), Vector({"w": np.array([2.0, -1.0]), "b": np.array(0.5)}), None)
    assert model.predict([[1.0, 1.0], [0.0, 3.0]]).tolist() == [1.5, -2.5]


def test_saved_and_loaded_it_is_the_same_model(model, dataset, tmp_path):
    path = model.save(tmp_path / "deep" / "model.bin")
    loaded = fp.Model.load(path)
    assert loaded.problem == model.problem
    assert loaded.schema == model.schema
    assert {k: v.tolist() for k, v in loaded.w.tree.items()} == {k: v.tolist() for k, v in model.w.tree.items()}
    assert np.array_equal(loaded.predict(dataset.x), model.predict(dataset.x))
    again = loaded.save(tmp_path / "again.bin")
    assert again.read_bytes() == path.read_bytes()


def test_a_model_without_schema_and_in_single_precision(tmp_path):
    w = Vector({"w": np.array([1, 2], np.float32)})
    loaded = fp.Model.load(fp.Model(fp.LeastSquares(l2=2.0, divide=False), w, None).save(tmp_path / "m.bin"))
    assert loaded.schema is None
    assert loaded.problem == fp.LeastSquares(l2=2.0, divide=False)
    assert loaded.w.tree["w"].dtype == np.float32
    with pytest.raises(
        DataError, match="model must have been trained on named columns to read a file, got one without"
    ):
        loaded.predict_csv(tmp_path / "x.csv")


def test_predict_csv_finds_columns_by_name_and_ignores_others(model, tmp_path):
    rows = patients(9)
    shuffled = [{"note": "x", "sex": row["sex"], "dose": row["dose"], "age": row["age"]} for row in rows]
    assert np.allclose(model.predict_csv(write_csv(tmp_path / "new.csv", shuffled)), by_hand(rows), rtol=1e-13)


def test_a_trained_model_predicts_what_it_was_scored_by(dataset):
    federation = sites(dataset)
    run = fp.run(fp.FedAvg(steps=3, step=0.1, batch=4), fp.Logistic(l2=0.01, intercept=True), federation, rounds=3)
    assert set(run.model.w.tree) == {"w", "b"}
    assert float(run.model.w.tree["b"]) != 0.0
    x = np.concatenate([federation.client(i)[0] for i in range(5)])
    y = np.concatenate([federation.client(i)[1] for i in range(5)])
    p = run.model.predict(x)
    assert run.history.last("accuracy") == pytest.approx(accuracy_score(y, p > 0.5), abs=1e-12)
    assert run.metrics["pooled"]["rows"] == sum(len(federation.test(i)[1]) for i in range(5))


@pytest.mark.parametrize("position", range(0, 1000, 97))
def test_a_flipped_bit_is_found_wherever_it_is(model, tmp_path, position):
    path = model.save(tmp_path / "model.bin")
    content = bytearray(path.read_bytes())
    content[position * len(content) // 1000] ^= 4
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match="model must be a file that fedpact wrote, got "):
        fp.Model.load(path)


@pytest.mark.parametrize("content", [b"", b"fedpact-model 1\n", b"fedpact-model 1\n{}\n", b"\x00" * 50], ids=repr)
def test_files_of_another_kind_are_refused(tmp_path, content):
    (tmp_path / "x.bin").write_bytes(content)
    with pytest.raises(CheckpointError, match="damaged or of another kind"):
        fp.Model.load(tmp_path / "x.bin")


@pytest.mark.parametrize("x", [np.zeros(3), np.zeros((2, 2)), np.zeros((1, 3, 1))], ids=["flat", "narrow", "deep"])
def test_features_of_the_wrong_shape_are_refused(model, x):
    with pytest.raises(InvalidArgument, match=r"x must be an \(N, 3\) array, got "):
        model.predict(x)


# Scores


def guesses(seed: int, rows: int = 200, ties: bool = False) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    p = rng.uniform(size=rows)
    return (rng.uniform(size=rows) < p).astype(float), np.round(p, 1).clip(0.05, 0.95) if ties else p


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("seed", range(5))
def test_scores_are_scikit_learns(seed, ties):
    y, p = guesses(seed, ties=ties)
    got = score(fp.Logistic(), y, p)
    assert got["accuracy"] == pytest.approx(accuracy_score(y, p > 0.5), abs=1e-15)
    assert got["auc"] == pytest.approx(roc_auc_score(y, p), abs=1e-14)
    assert got["log_loss"] == pytest.approx(log_loss(y, p), rel=1e-13)


def test_certain_guesses_have_a_finite_loss():
    y, p = np.array([1.0, 0.0, 1.0]), np.array([1.0, 0.0, 0.0])
    got = score(fp.Logistic(), y, p)["log_loss"]
    assert math.isfinite(got)
    assert got == pytest.approx(-math.log(1e-15) / 3, rel=1e-3)


@pytest.mark.parametrize("y", [np.zeros(4), np.ones(4)])
def test_auc_of_one_class_is_none(y):
    assert auc(y, np.array([0.1, 0.2, 0.3, 0.4])) is None
    assert score(fp.Logistic(), y, np.full(4, 0.4))["auc"] is None


def test_auc_by_hand():
    """Pairs (positive, negative): .8>.3, .8>.6, .3=.3 counts half, .3<.6: 2.5 of 4."""
    assert auc(np.array([1, 0, 1, 0.0]), np.array([0.8, 0.3, 0.3, 0.6])) == 2.5 / 4


def test_calibration_by_hand():
    p = np.array([0.01, 0.09, 0.10, 0.55, 0.58, 0.95, 1.0])
    y = np.array([0.0, 1.0, 0.0, 1.0, 0.0, 1.0, 1.0])
    curve = calibration_curve(y, p)
    assert curve["rows"] == [2, 1, 2, 2]  # [0, .1), [.1, .2), [.5, .6), [.9, 1]
    assert curve["predicted"] == pytest.approx([0.05, 0.10, 0.565, 0.975])
    assert curve["observed"] == [0.5, 0.0, 0.5, 1.0]
    by_rows = (2 * 0.45 + 1 * 0.10 + 2 * 0.065 + 2 * 0.025) / 7
    assert calibration_error(curve) == pytest.approx(by_rows, rel=1e-14)
    assert score(fp.Logistic(), y, p)["calibration_error"] == pytest.approx(by_rows, rel=1e-14)


def test_regression_scores_are_scikit_learns():
    rng = np.random.default_rng(0)
    y, p = rng.normal(size=50), rng.normal(size=50)
    got = score(fp.LeastSquares(), y, p)
    assert got == {
        "mean_squared_error": pytest.approx(mean_squared_error(y, p), rel=1e-14),
        "r_squared": pytest.approx(r2_score(y, p), rel=1e-14),
    }
    assert score(fp.LeastSquares(), np.ones(3), np.zeros(3))["r_squared"] is None


def test_held_out_scores_per_client_and_pooled(model, dataset):
    federation = dataset.split(how="column", column="sex", holdout=0.3, seed=2)
    got = held_out(model, federation)
    assert [client["name"] for client in got["clients"]] == ["f", "m"]
    every_y, every_p = [], []
    for i, client in enumerate(got["clients"]):
        x, y = federation.test(i)
        p = model.predict(x)
        assert client["rows"] == len(y) == len(federation.held_out[i]) > 0
        assert client["accuracy"] == pytest.approx(accuracy_score(y, p > 0.5), abs=1e-15)
        assert client["auc"] == pytest.approx(roc_auc_score(y, p), abs=1e-14)
        every_y.append(y)
        every_p.append(p)
    y, p = np.concatenate(every_y), np.concatenate(every_p)
    assert got["pooled"]["rows"] == len(y)
    assert got["pooled"]["auc"] == pytest.approx(roc_auc_score(y, p), abs=1e-14)
    assert got["pooled"]["log_loss"] == pytest.approx(log_loss(y, p), rel=1e-13)
    assert sum(got["calibration_curve"]["rows"]) == len(y)


def test_clients_without_held_out_rows_are_left_out(model, dataset):
    rows = (np.arange(0, 20), np.arange(20, 40))
    federation = fp.data.Federation(dataset, rows, (np.arange(40, 50), np.array([], int)), ("a", "b"))
    got = held_out(model, federation)
    assert [client["name"] for client in got["clients"]] == ["a"]
    assert got["pooled"]["rows"] == 10


def test_held_out_needs_held_out_rows(model, dataset):
    with pytest.raises(DataError, match="federation must have held-out rows, got none"):
        held_out(model, dataset.split(clients=3))


def test_held_out_rows_are_not_trained_on(dataset):
    """Labels of the held-out rows turned round: the same model, other scores."""
    federation = sites(dataset)
    flipped = dataset.y.copy()
    aside = np.concatenate(federation.held_out)
    flipped[aside] = 1 - flipped[aside]
    other = dataclasses.replace(federation.dataset, y=flipped)
    twin = fp.data.Federation(other, federation.rows, federation.held_out)
    settings, problem = fp.FedAvg(steps=3, step=0.1, batch=4), fp.Logistic(l2=0.01, intercept=True)
    runs = [fp.run(settings, problem, f, rounds=3) for f in (federation, twin)]
    assert np.array_equal(runs[0].model.w.tree["w"], runs[1].model.w.tree["w"])
    assert runs[0].metrics["pooled"]["accuracy"] == pytest.approx(1 - runs[1].metrics["pooled"]["accuracy"], abs=1e-12)
