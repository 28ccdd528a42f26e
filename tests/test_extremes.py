"""Settings of absurd size or of the wrong kind: a sentence with the setting's name, never a traceback."""

from __future__ import annotations

import dataclasses
import json
import math

import jax.numpy as jnp
import numpy as np
import pytest
from helpers_experiment import experiment, history_cells, patients, write_csv, write_toml
from helpers_refused import sentence

import fedpact as fp
from fedpact import stop
from fedpact.algorithms import ALGORITHMS
from fedpact.cli import main
from fedpact.core.errors import DataError, FedpactError, InvalidArgument, UnknownName, is_number, require_positive_int
from fedpact.core.vector import Vector
from fedpact.data.federation import Federation
from fedpact.experiment import build

HUGE = [10**400, 10**5000, 2**63, -(2**63), 10**30]
ODD = [*HUGE, [1], [], {}, {"a": 1}, (1, 2), b"x", 1 + 2j, np.array([1, 2]), np.array(["a", "b"]), np.float64("nan")]
SETTINGS = [(name, field.name) for name, cls in ALGORITHMS.items() for field in dataclasses.fields(cls)]


def test_numbers_and_counts():
    assert not any(is_number(value) for value in HUGE)
    assert is_number(2**63 - 1)
    require_positive_int("rounds", 2**31 - 1)
    for value in (2**31, 10**400, 10**5000):
        with pytest.raises(InvalidArgument, match="rounds must be at most 2³¹−1, got "):
            require_positive_int("rounds", value)


@pytest.mark.parametrize(("name", "setting"), SETTINGS)
def test_every_setting_refuses_what_is_no_value_of_it(name, setting):
    for value in ODD:
        if setting == "accuracy" and isinstance(value, (list, tuple)) and value:
            continue  # one number per client
        with pytest.raises(FedpactError) as error:
            ALGORITHMS[name](**{setting: value})
        assert setting in sentence(str(error.value))


def test_a_name_that_is_its_own_symbol_is_said_once():
    with pytest.raises(InvalidArgument, match=r"^k0 must be an integer of at least 1, got 0"):
        fp.FedEPM(k0=0)


TABLES = {
    "data": {"name": "synthetic", "rows": 40, "features": 3},
    "split": {"clients": 4},
    "problem": {"name": "logistic"},
    "algorithm": {"name": "fedavg"},
    "run": {"rounds": 2},
}
KEYS = {
    "data": ["name", "rows", "features", "noise", "kind"],
    "split": ["how", "clients", "holdout"],
    "problem": ["l2"],
    "run": ["rounds", "participation", "seed", "evaluate_every", "precision", "engine"],
    "stop": ["gradient", "variance", "seconds", "rising"],
}


@pytest.mark.parametrize(("table", "key"), [(table, key) for table, keys in KEYS.items() for key in keys])
def test_every_key_of_a_file_refuses_a_huge_integer(table, key):
    for value in (10**400, 2**63):
        with pytest.raises(FedpactError) as error:
            build({**TABLES, table: {**TABLES.get(table, {}), key: value}})
        sentence(str(error.value))


def test_the_key_of_a_stop_rule_is_named():
    for key, value in (("gradient", -1), ("rising", 0), ("rising", 10**7), ("variance", 0)):
        with pytest.raises(InvalidArgument, match=f"^stop.{key}: "):
            build({**TABLES, "stop": {key: value}})
    with pytest.raises(InvalidArgument, match=r"data.name must be the name of a dataset, got 5"):
        build({**TABLES, "data": {"name": 5}})
    assert stop.Rising(10**6).window == 10**6


def test_schedules_with_clients_of_no_size():
    with pytest.raises(InvalidArgument, match="schedule of round 0 must be a list of client numbers from 0"):
        fp.Schedule([[2**70], [1]])


def test_an_integer_longer_than_python_reads(tmp_path, capsys):
    path = tmp_path / "long.toml"
    path.write_text(f"[run]\nrounds = {'9' * 5000}\n")
    assert main(["run", str(path)]) == 1
    assert capsys.readouterr().err.startswith("fedpact: experiment must be valid TOML, got ")


@pytest.mark.parametrize(
    ("key", "value"), [("drop", 5), ("drop", True), ("drop", [[1]]), ("categorical", 5), ("scale", ["none"])]
)
def test_lists_of_columns_that_are_none(people, key, value):
    with pytest.raises(FedpactError, match=f"{key} must be ") as error:
        fp.data.from_csv(people.parent / "people.csv", "outcome", **{"categorical": ["sex", "site"], key: value})
    sentence(str(error.value))


def test_sizes_of_different_lengths():
    with pytest.raises(InvalidArgument, match=r"sizes \(d_i\) must be a list of whole numbers"):
        fp.data.synthetic(rows=20).split(how="sizes", sizes=[[1], [1, 2]])


def test_path_is_no_key_beside_csv(people, capsys):
    assert main(["run", str(people), "--set", "data.path=other.csv"]) == 1
    assert "key of [data] must be one of categorical, categories, classes, coding, csv, drop" in capsys.readouterr().err


# Numbers of NumPy


@pytest.fixture(scope="module")
def federation():
    return fp.data.synthetic(rows=40, features=3).split(clients=4)


def test_numbers_of_numpy_are_numbers(federation, tmp_path, monkeypatch):
    monkeypatch.setattr("fedpact.report.html.plots_section", lambda *_: "")
    options = {"rounds": 2, "seed": 3, "participation": 0.5}
    own = {"rounds": np.int64(2), "seed": np.int32(3), "participation": np.float32(0.5)}
    one = fp.run(fp.FedAvg(), fp.Logistic(), federation, **options)
    other = fp.run(fp.FedAvg(), fp.Logistic(), federation, **own, folder=tmp_path / "run")
    assert one.config == other.config == json.loads((tmp_path / "run" / "config.json").read_text())
    assert np.array_equal(one.history.column("objective"), other.history.column("objective"))
    runs = fp.trials(fp.FedAvg(), fp.Logistic(), federation, np.arange(3), rounds=1)
    assert [run.config["run"]["seed"] for run in runs] == [0, 1, 2]


def test_trials_of_federations_that_differ(federation):
    other = fp.data.synthetic(rows=40, features=4).split(clients=4)
    with pytest.raises(
        InvalidArgument, match=r"federations must be of the same number of clients and features, got \[\("
    ):
        fp.trials(fp.FedAvg(), fp.Logistic(), [federation, other], [0, 1], rounds=1)


def test_resuming_needs_a_folder(federation):
    with pytest.raises(InvalidArgument, match="resume must be False without a folder, got True"):
        fp.run(fp.FedAvg(), fp.Logistic(), federation, rounds=1, resume=True)


# Solvers of the user's


@pytest.mark.parametrize(
    "solver",
    [
        lambda sub: None,
        lambda sub: jnp.zeros(3),
        lambda sub: Vector({"w": jnp.zeros(4)}),
        lambda sub: sub.w.map(lambda a: a.astype(jnp.float32)),
    ],
    ids=["nothing", "an array", "another shape", "another precision"],
)
def test_a_solver_that_returns_no_point_is_named(federation, solver):
    with pytest.raises(InvalidArgument, match="solver must be a function that returns a point like w") as error:
        fp.run(fp.InexactADMM(solver=solver), fp.Logistic(), federation, rounds=1)
    sentence(str(error.value))


def test_a_solver_that_returns_a_point(federation):
    solver = lambda sub: sub.step(sub.w, sub.gradient_at_w)
    assert fp.run(fp.InexactADMM(solver=solver), fp.Logistic(), federation, rounds=1).history.rounds == 1


# Clients without a slope


def blank_client() -> Federation:
    rng = np.random.default_rng(0)
    parts = [(rng.normal(size=(6, 2)) * (i != 1), rng.normal(size=6)) for i in range(3)]
    return Federation.from_arrays(parts, classes=())


@pytest.mark.parametrize(
    "settings", [fp.FedAvg(), fp.FedProx(mu=0), fp.SFedAvg(step="lipschitz"), fp.SFedProx(step="lipschitz")], ids=repr
)
def test_a_client_whose_step_would_be_infinite_is_named(settings):
    with pytest.raises(DataError, match=r"r_i of client 1 must be above 0 for steps of 1/r_i, got 0: its rows"):
        fp.run(settings, fp.LeastSquares(l2=0.0), blank_client(), rounds=1)


@pytest.mark.parametrize("settings", [fp.FedAvg(step=0.1), fp.FedProx(mu=0.1), fp.SFedAvg()], ids=repr)
def test_where_r_i_is_not_inverted_it_may_be_0(settings):
    assert fp.run(settings, fp.LeastSquares(l2=0.0), blank_client(), rounds=1).history.rounds == 1


def test_an_l2_gives_every_client_a_slope():
    assert fp.run(fp.FedAvg(), fp.LeastSquares(l2=0.1), blank_client(), rounds=1).history.rounds == 1


# Tables


def test_a_cell_too_large_to_be_scaled_is_told_by_its_column(tmp_path):
    rows = [row | {"dose": 1e300} if row["id"] == 7 else row for row in patients()]
    path = write_csv(tmp_path / "people.csv", rows)
    for scale in ("standard", "norm"):
        with pytest.raises(DataError, match=r"column 'dose' must be small enough to be squared, got .* 1e\+300"):
            fp.data.from_csv(path, "outcome", drop=["id", "site"], categorical="sex", scale=scale)


@pytest.mark.parametrize(
    "change", [("sick", "ill"), ("age", "years"), (",f,", ",x,")], ids=["class", "column", "category"]
)
def test_other_names_of_the_same_numbers_are_other_data(command, finished, finished_once, change):
    path = finished_once.parent / "people.csv"
    text = path.read_text()
    try:
        path.write_text(text.replace(*change))
        done = command("resume", finished, "--rounds", 8)
    finally:
        path.write_text(text)
    assert done.code == 1
    assert "checkpoint must come from the same settings and data" in done.err


def test_predicting_without_a_column(command, finished, tmp_path):
    write_csv(tmp_path / "new.csv", [{k: v for k, v in row.items() if k != "dose"} for row in patients(3)])
    done = command("predict", finished, "new.csv")
    assert done.code == 1
    assert "new.csv must have the column 'dose', which the model was trained on, got only id, age, sex," in done.err


def test_predicting_what_is_no_number(finished):
    model = fp.Model.load(finished)
    good = np.zeros((2, len(model.schema.columns)))
    for cell in ("a", None, math.nan, math.inf):
        bad = good.astype(object)
        bad[1, 0] = cell
        with pytest.raises(DataError, match=r"x must be .*, got .* at row 1") as error:
            model.predict(bad.tolist())
        sentence(str(error.value))
    assert model.predict(good).shape == (2,)


def test_a_name_is_no_path(command, tmp_path):
    write_csv(tmp_path / "people.csv")
    write_toml(tmp_path / "x.toml", {**experiment(), "name": "../../x/y"})
    assert command("run", "x.toml").code == 0
    (folder,) = (tmp_path / "runs").iterdir()
    assert len(history_cells(folder)) == 7
    assert sorted(path.name for path in tmp_path.iterdir()) == ["people.csv", "runs", "x.toml"]


def test_words_that_are_none():
    for wrong in (["x"], {}, 5):
        with pytest.raises(UnknownName, match="solver must be one of "):
            fp.InexactADMM(solver=wrong)
