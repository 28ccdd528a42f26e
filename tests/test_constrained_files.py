"""Problems with constraints and data split by features in experiment files, from the file to the report."""

from __future__ import annotations

import csv
import json
from typing import Any

import numpy as np
import pytest
from helpers_experiment import history_cells, patients, same_bits, toml, tree, write_csv, write_toml
from helpers_refused import refused, sentence

import fedpact as fp
from fedpact.core.errors import DataError, FedpactError, InvalidArgument, UnknownName
from fedpact.experiment import build, needs, read
from fedpact.problems import PROBLEMS

LOGISTIC = {"name": "logistic", "l2": 0, "intercept": True}
LIMITED = {
    "name": "patients",
    "data": {"csv": "people.csv", "target": "outcome", "drop": ["id", "site"], "categorical": ["sex"]},
    "split": {"how": "column", "column": "site", "holdout": 0.25},
    "problem": {
        "name": "constrained",
        "model": LOGISTIC,
        "minimize": [{"term": "norm2"}],
        "subject_to": [{"term": "loss", "at_most": 0.6}],
    },
    "algorithm": {"name": "ssca", "tau": 0.2, "penalty": 100.0},
    "run": {"rounds": 6},
}
JOINED = {
    "name": "joined",
    "data": {"csv": {"lab": "lab.csv", "ward": "ward.csv"}, "on": "id", "target": "outcome", "unmatched": "drop"},
    "split": {"holdout": 0.25},
    "problem": {"name": "softmax", "inputs": 2, "classes": 2, "bias": True},
    "algorithm": {"name": "vertical_sgd", "batch": 10},
    "run": {"rounds": 6},
}


@pytest.fixture
def limited(tmp_path):
    """Patients at five sites, and the smallest model whose loss is at most 0.6."""
    write_csv(tmp_path / "people.csv")
    return write_toml(tmp_path / "limited.toml", LIMITED)


@pytest.fixture
def joined(tmp_path):
    """The ages of sixty patients in one file; doses and outcomes of fifty-five, and of two others, in another."""
    rows = patients()
    write_csv(tmp_path / "lab.csv", [{"id": row["id"], "age": row["age"]} for row in rows])
    other = [{key: row[key] for key in ("id", "dose", "outcome")} for row in reversed(rows[5:])]
    write_csv(tmp_path / "ward.csv", [*other, other[0] | {"id": 98}, other[1] | {"id": 99}])
    write_csv(tmp_path / "new.csv", [{"age": 70, "dose": 1.0}, {"age": 25, "dose": 4.0}])
    return write_toml(tmp_path / "joined.toml", JOINED)


# Problems as plain data


def everything() -> fp.Constrained:
    return fp.Constrained(
        fp.TwoLayer(inputs=3, hidden=4, classes=2, activation="swish", bias=False),
        minimize=fp.Loss() + 1e-5 * fp.Norm2(exact=False),
        subject_to=[
            fp.Loss() <= 0.13,
            fp.Gap("sex", above=0.5) <= 0.05,
            2 * fp.Misses(of=0) + fp.Norm1() <= 3,
            fp.ClientLoss() <= [0.4, 0.5],
        ],
    )


def test_a_problem_is_read_back_from_its_plain_data():
    problem = everything()
    plain = problem.to_dict()
    assert json.loads(json.dumps(plain)) == plain
    again = PROBLEMS["constrained"](**plain)
    assert again == problem
    assert again.to_dict() == plain
    assert plain["model"]["name"] == "two_layer"
    assert plain["minimize"] == [{"term": "loss"}, {"term": "norm2", "times": 1e-5, "exact": False}]
    assert plain["subject_to"] == [
        {"term": "loss", "at_most": 0.13},
        {"term": "gap", "column": "sex", "above": 0.5, "of": 1, "at_most": 0.05},
        {"terms": [{"term": "misses", "times": 2.0, "of": 0}, {"term": "norm1"}], "at_most": 3.0},
        {"term": "client_loss", "at_most": [0.4, 0.5]},
    ]


def test_one_term_and_the_name_of_a_model_will_do():
    problem = fp.Constrained("logistic", {"term": "loss"}, {"term": "norm2", "at_most": 2})
    assert problem == fp.Constrained(fp.Logistic(l2=0), fp.Loss(), [fp.Norm2() <= 2])


def row_of_mine(w, batch):
    return batch.y


def test_functions_of_ones_own_are_known_by_name_and_are_for_python():
    scores, start = (lambda tree, images: images @ tree["a"]), (lambda key: {"a": np.zeros((3, 2))})
    problem = fp.Constrained(
        fp.Network(scores, start, shape=(3,), classes=2), subject_to=fp.PerRow(row_of_mine, title="mine") <= 1.0
    )
    plain = problem.to_dict()
    assert plain["model"]["apply"].startswith(f"{__name__}.test_functions_of_ones_own")
    assert plain["subject_to"] == [
        {"term": "per_row", "title": "mine", "function": f"{__name__}.row_of_mine", "at_most": 1.0}
    ]
    with pytest.raises(UnknownName, match=r"term must be one of .*, got 'per_row'\. .*for Python: PerRow"):
        fp.Constrained("logistic", subject_to=plain["subject_to"])


def whole_years(scale: str) -> Any:
    """Ages in whole years, half of them exactly 50 or below."""
    age = np.array([30.0, 50.0, 50.0, 51.0, 64.0, 50.0, 49.0, 77.0])
    x = np.column_stack([age, np.arange(8)])
    y = np.arange(8) % 2
    return fp.data.from_arrays(x, y.astype(float), ["age", "dose"], ["well", "sick"], scale=scale)


@pytest.mark.parametrize("scale", ["none", "standard", "norm"])
@pytest.mark.parametrize("holdout", [0.0, 0.25])
def test_a_column_by_its_name_is_in_its_own_units(scale, holdout):
    federation = whole_years(scale).split(clients=2, holdout=holdout)
    problem = fp.Constrained("logistic", subject_to=fp.Gap("age", above=50) <= 0.1)
    gap = problem.resolved(federation).subject_to[0].terms[0][1]
    j, above = gap.place
    assert j == 0
    age = np.rint(federation.dataset.x[:, 0] * federation.dataset.schema.scale[0] + federation.dataset.schema.shift[0])
    assert np.array_equal(federation.dataset.x[:, j] > above, age > 50)
    single = federation.dataset.x[:, j].astype(np.float32) > np.float32(above)
    assert np.array_equal(single, age > 50)
    assert fp.Experiment(fp.SSCA(), problem, federation).config()["problem"]["subject_to"][0]["above"] == 50


def test_a_column_that_does_not_split_the_rows_is_refused_with_its_range():
    federation = whole_years("standard").split(clients=2)
    with pytest.raises(DataError, match=r"'age' above 80 must be some but not all .* got 0 of 8: .* from 30 to 77\."):
        fp.Experiment(fp.SSCA(), fp.Constrained("logistic", subject_to=fp.Gap("age", 80) <= 0.1), federation)
    with pytest.raises(UnknownName, match=r"column of Gap must be one of age, dose, got 'ages'\. Did you mean 'age'"):
        fp.Experiment(fp.SSCA(), fp.Constrained("logistic", subject_to=fp.Gap("ages") <= 0.1), federation)


# What files may not say

PROBLEM = {
    'minimize=[{term="los"}]': ("term must be one of ", "got 'los'. Did you mean 'loss'?"),
    'minimize=[{term="norm2",exakt=true}]': ("key of the term 'norm2' must be one of ", "Did you mean 'exact'?"),
    'minimize=[{term="loss",time=2}]': ("key of the term 'loss' must be one of ", "Did you mean 'times'?"),
    'minimize=[{term="loss",at_most=2}]': ("key of the term 'loss' must be one of term, times, got 'at_most'.",),
    'minimize=[{term="loss",times="2"}]': ("times of the term 'loss' must be a number, got '2'.",),
    "minimize=[{times=2}]": ("minimize must have a 'term', got only times.",),
    "minimize=[]": ("minimize must be at least one term, got [].",),
    "minimize=3": ("function must be made of terms ", "got 3."),
    'minimize=[{term="client_loss"}]': ("minimize must be free of ClientLoss",),
    'subject_to=[{term="loss"}]': ("subject_to must have 'at_most', got only term.",),
    'subject_to=[{term="loss",at_mots=1}]': ("subject_to must have 'at_most', got only term, at_mots.",),
    'subject_to=[{term="loss",at_most="1"}]': ("must be a number, got '1'.",),
    'subject_to=[{term="gap",at_most=1}]': ("the term 'gap' must have 'column', got only ",),
    'subject_to=[{term="gap",column="sx",at_most=1}]': ("column of Gap must be one of age, dose, sex", "'sex'?"),
    'subject_to=[{term="gap",column=9,at_most=1}]': ("column of Gap must be ", "from 0 to 2, got 9."),
    'subject_to=[{term="gap",column="sex",abov=1,at_most=1}]': ("got 'abov'. Did you mean 'above'?",),
    'subject_to=[{term="gap",column="sex",above=2,at_most=1}]': ("'sex' above 2 must be some but not all", "0 to 1."),
    'subject_to=[{term="misses",of=2,at_most=1}]': ("of in Misses must be the number of a class, from 0 to 1, got 2.",),
    'subject_to=[{terms=[{term="loss"}],term="loss",at_most=1}]': ("must be one of at_most, terms, got 'term'.",),
    'subject_to=[{term="client_loss",at_most=[1.0,2.0]}]': ("limit of ClientLoss (U_i) must be ", "one a client (5)"),
    'model={name="logistik"}': ("name of the model must be one of ", "got 'logistik'. Did you mean 'logistic'?"),
    'model={name="logistic",l1=0}': ("key of the model 'logistic' must be one of ", "got 'l1'. Did you mean 'l2'?"),
    'model={name="constrained"}': ("name of the model must be one of ", "got 'constrained'."),
    "model={l2=0}": ("name of the model must be one of ", "got None."),
    "modle=1": ("key of [problem] must be one of ", "got 'modle'. Did you mean 'model'?"),
}


@pytest.mark.parametrize("change", PROBLEM)
def test_a_wrong_problem_is_refused(limited, change):
    with pytest.raises(FedpactError) as caught:
        build(read(limited, [f"problem.{change}"]))
    text = sentence(str(caught.value))
    for part in PROBLEM[change]:
        assert part in text, text


def test_a_wrong_problem_is_refused_by_the_command_and_leaves_nothing(command, limited, tmp_path):
    before = tree(tmp_path)
    change = 'problem.subject_to=[{term="gap",colum="sex",at_most=1}]'
    refused(command("run", limited, "--out", "run", "--set", change), "got 'colum'. Did you mean 'column'?")
    done = command("run", limited, "--out", "run", "--set", 'algorithm={name="fedavg"}')
    refused(done, "algorithm must be one that keeps constraints, got 'fedavg'.")
    assert tree(tmp_path) == before


FILES = {
    "data.on=idd": ("must have the id column 'idd'", "Did you mean 'id'?"),
    "data.unmatched=keep": ("unmatched must be one of drop, refuse, got 'keep'.",),
    "data.unmatched=refuse": ("files must have the same ids in column 'id'", "5 of 60", "2 of 57"),
    "data.unmached=drop": ("key of [data] must be one of ", "got 'unmached'. Did you mean 'unmatched'?"),
    "data.holdout=0.1": ("key of [data] must be one of ", "got 'holdout'."),
    "data.files=1": ("key of [data] must be one of ", "csv", "got 'files'."),
    'data={csv={lab="lab.csv",ward="ward.csv"},target="outcome"}': ("[data] must have 'on', got only ",),
    'data.csv=["lab.csv"]': ("files must be at least two paths, one per party",),
    "split.how=iid": ("how must be \"features\" where csv has a file per party, got 'iid'.",),
    "split.clients=2": ("key of [split] of several files must be one of holdout, how, seed, got 'clients'.",),
    "run.participation=0.5": ("participation must be 1 for data split by features", "every party's columns"),
    'algorithm={name="local_sgd"}': ("federation must be split by rows for local_sgd, got 'VerticalFederation'.",),
}


@pytest.mark.parametrize("change", FILES)
def test_wrong_files_and_splits_are_refused(joined, change):
    with pytest.raises(FedpactError) as caught:
        build(read(joined, [change]))
    text = sentence(str(caught.value))
    for part in FILES[change]:
        assert part in text, text


COLUMNS = {
    'split={how="feature",clients=2}': ("how must be one of ", "got 'feature'. Did you mean 'features'?"),
    'split={how="features",clients=2,blok=1}': ("option of the split 'features' must be one of ", "'blocks'?"),
    'split={how="features",clients=2,closer=2}': ("closer must be a party's number from 0 to 1, got 2.",),
    'split={how="features",blocks=[["age"],["dose"]]}': ("blocks must have all 3 columns", "'sex'"),
    'split={how="iid",clients=2,blocks=[[0]]}': ("option of the split 'iid' must be one of ", "got 'blocks'."),
}


@pytest.mark.parametrize("change", COLUMNS)
def test_wrong_blocks_are_refused(limited, change):
    with pytest.raises(FedpactError) as caught:
        build(read(limited, [change]))
    text = sentence(str(caught.value))
    for part in COLUMNS[change]:
        assert part in text, text


def test_columns_may_be_dealt_by_name(limited):
    changes = ['split={how="features",blocks=[["sex","age"],["dose"]],names=["a","b"],closer=1,holdout=0.2}']
    changes += ['algorithm={name="vertical_ssca"}']
    experiment, _ = build(read(limited, changes))
    assert tuple(experiment.federation.layout) == (((2, 0), (1,)), ("a", "b"), 1)
    assert experiment.config()["data"]["clients"] == 2


# From the file to the report


@pytest.mark.drill
def test_a_constrained_file_runs_resumes_and_predicts(command, limited, tmp_path):
    done = command("run", limited, "--out", "run", "--set", "run.rounds=3")
    assert done.code == 0, done.err
    assert "over limit" in done.out
    done = command("resume", "run", "--rounds", 6)
    assert done.code == 0, done.err
    again, _ = build(json.loads((tmp_path / "run" / "experiment.json").read_text()))
    assert again.config() == json.loads((tmp_path / "run" / "config.json").read_text())
    refused(command("resume", "run", "--rounds", 2), "rounds must be at least 6")

    run = fp.Run.load(tmp_path / "run")
    assert run.history.rounds == 6
    assert run.model.problem == fp.Logistic(l2=0, intercept=True)
    assert run.config["problem"]["subject_to"] == [{"term": "loss", "at_most": 0.6}]
    assert fp.Constrained(**{k: v for k, v in run.config["problem"].items() if k != "name"}).caps is None
    assert run.summary["over_limit"] == run.history.end("constraint_1")
    done = command("predict", "run", "people.csv")
    lines = list(csv.DictReader(done.out.splitlines()))
    assert {line["label"] for line in lines} <= {"sick", "well"}
    np.testing.assert_allclose(
        [float(line["probability of well"]) for line in lines], run.model.predict_csv(tmp_path / "people.csv")
    )


@pytest.mark.drill
def test_files_joined_by_ids_run_resume_predict_compare_and_tune(command, joined, tmp_path):
    done = command("run", joined, "--out", "whole")
    assert done.code == 0, done.err
    assert "notice: Records that some party lacks were left out: 5 of 60 of lab, 2 of 57 of ward." in done.out
    assert "notice: Others' raw features of a batch" in done.out
    assert command("run", joined, "--out", "cut", "--set", "run.rounds=2").code == 0
    assert command("resume", "cut", "--rounds", 6).code == 0
    same_bits(tmp_path / "whole", tmp_path / "cut")
    assert [row["participants"] for row in history_cells(tmp_path / "whole")] == ["0"] + 6 * ["2"]

    config = json.loads((tmp_path / "whole" / "config.json").read_text())
    assert config["data"]["clients"] == 2
    assert config["data"]["parties"]["ward"] == {
        "features": 1,
        "labels": True,
        "records": 57,
        "kept": 55,
        "missing": 2,
        "examples": ["98", "99"],
    }
    page = (tmp_path / "whole" / "report.html").read_text(encoding="utf-8")
    for words in ("<h3>Parties</h3>", "missing elsewhere", "98, 99", "Others&#x27; raw features"):
        assert words in page, words

    done = command("predict", "whole", "new.csv", "--json")
    told = json.loads(done.out)
    assert np.array(told["predictions"]).shape == (2, 2)
    assert told["labels"] == [told["classes"][k] for k in np.argmax(told["predictions"], axis=1)]
    head, *lines = command("predict", "whole", "new.csv").out.splitlines()
    assert head == "probability of sick,probability of well,label"
    assert [line.split(",")[2] for line in lines] == told["labels"]

    done = command("compare", "whole", joined, "--json")
    assert done.code == 0, done.err
    first, second = json.loads(done.out)["runs"]
    assert (first["run"], second["run"]) == ("joined", "joined (2)")
    assert first["best"] == second["best"]
    grid = ("--grid", "rate=0.3", "--method", "grid", "--rounds", 6)
    done = command("tune", joined, *grid, "--metric", "held_out.accuracy", "--json")
    assert done.code == 0, done.err
    assert len(json.loads(done.out)["trials"]) == 1


def test_paths_of_several_files_are_relative_to_the_experiment_file(joined, tmp_path):
    values = read(joined)
    assert values["data"]["csv"] == {name: str((tmp_path / f"{name}.csv").resolve()) for name in ("lab", "ward")}
    (tmp_path / "list.toml").write_text(toml({**JOINED, "data": {**JOINED["data"], "csv": ["lab.csv", "ward.csv"]}}))
    assert build(read(tmp_path / "list.toml"))[0].federation.parties == ("lab", "ward")


@pytest.mark.parametrize("name", ["ssca", "local_sgd", "vertical_ssca", "vertical_sgd"])
def test_what_an_algorithm_needs_is_known_without_a_run(name):
    from fedpact.algorithms import ALGORITHMS

    assert set(needs(ALGORITHMS[name])) == set(ALGORITHMS[name].presets)
    assert not any(needs(ALGORITHMS[name]).values())


def test_it_is_shown_and_listed(command):
    shown = command("show", "vertical_ssca").out
    assert "  printed-1000  batch=1000" in shown
    listed = command("list").out
    assert "constrained" in listed
    assert "features" in listed.split("splits")[1]


# What the loop owes to constraints


def test_a_clients_limit_is_its_own_whatever_its_size():
    """The engine orders clients by size: limits must not. The third client's labels disagree with the others'."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(60, 2))
    y = (x @ [1.0, -1.0] + 0.5 * rng.normal(size=60) > 0).astype(float)
    parts = [(x[:40], y[:40]), (x[40:50], y[40:50]), (x[50:], 1 - y[50:])]
    federation = fp.data.Federation.from_arrays(parts, classes=["a", "b"])
    problem = fp.Constrained("logistic", fp.Loss() + 1e-3 * fp.Norm2(), fp.ClientLoss() <= [9.0, 9.0, 0.75])
    settings = fp.SSCA(tau=0.2, rho=0.9, gamma=0.5, penalty=100.0)
    run = fp.run(settings, problem, federation, rounds=200)
    w = np.asarray(run.model.w.tree["w"])
    losses = [np.mean(np.logaddexp(0, a @ w) - b * (a @ w)) for a, b in parts]
    assert losses[2] == pytest.approx(0.75, abs=1e-3)
    assert run.history.last("kkt") < 1e-2


def test_the_model_of_a_network_of_ones_own_is_loaded_with_either_problem(tmp_path):
    scores, start = (lambda tree, images: images @ tree["a"]), (lambda key: {"a": np.zeros((4, 3))})
    own = fp.Network(scores, start, shape=(4,), classes=3)
    path = fp.Model(own, own.init(4, np.float64), None).save(tmp_path / "model.bin")
    for given in (fp.Constrained(own, fp.Norm2(), fp.Loss() <= 0.5), own):
        assert fp.Model.load(path, problem=given).problem is own
    with pytest.raises(InvalidArgument, match="problem must be given"):
        fp.Model.load(path)
