"""Files at nodes: the features everyone agrees on are those of a simulation that has all files in one."""

from __future__ import annotations

import importlib

import numpy as np
import pytest
from helpers_nodes import Faulty, federated, nodes, same_history

from fedpact.core.errors import CheckpointError, ClientError, DataError, InvalidArgument
from fedpact.data import from_arrays
from fedpact.experiment import build
from fedpact.flower.links import Direct
from fedpact.flower.node import Node
from fedpact.flower.server import federate
from fedpact.run import execute

SITES = ("east", "north", "west")
HEADER = "age,dose,ward,site,flat,ill"


def lines(site, rng, count):
    wards = {"east": ["a", "b"], "north": ["b", "c"], "west": ["d", "a"]}[site]  # nobody has all of them
    for _ in range(count):
        age, dose = rng.integers(20, 90), rng.normal() * 1e-3 + 7
        ill = ("no", "yes")[int(rng.random() < 1 / (1 + np.exp(-(age - 55) / 10)))]
        yield f"{age},{dose!r},{wards[rng.integers(2)]},{site},3,{ill}"


@pytest.fixture
def files(tmp_path):
    rng = np.random.default_rng(5)
    tables = {site: list(lines(site, rng, 30 + 10 * k)) for k, site in enumerate(SITES)}
    for site, rows in tables.items():
        (tmp_path / f"{site}.csv").write_text("\n".join([HEADER, *rows]) + "\n")
    (tmp_path / "all.csv").write_text("\n".join([HEADER, *(row for rows in tables.values() for row in rows)]) + "\n")
    return tmp_path


def values(files, data=(), split=(), algorithm="fedavg", problem=None):
    return {
        "data": {"csv": str(files / "all.csv"), "target": "ill", "categorical": ["ward"], **dict(data)},
        "split": {"how": "column", "column": "site", **dict(split)},
        "problem": problem or {"name": "logistic", "l2": 1e-2, "intercept": True},
        "algorithm": {"name": algorithm},
        "run": {"rounds": 4, "seed": 0},
    }


def flowered(values):
    return {**values, "run": {**values["run"], "engine": {"name": "flower", "notes": True}}}


def members(files, sites=SITES):
    return [Node({"name": site, "csv": str(files / f"{site}.csv")}, files / "state" / site) for site in sites]


@pytest.mark.parametrize(
    ("data", "split"),
    [
        ({}, {}),
        ({"coding": "onehot"}, {"holdout": 0.3, "seed": 4}),
        ({"scale": "norm"}, {}),
        ({"scale": "none", "drop": ["flat"]}, {"holdout": 0.2}),
    ],
)
def test_files_at_nodes_give_the_features_of_one_table(files, data, split):
    one, _ = build(values(files, data, split))
    link = Direct(members(files))
    other = federate(flowered(values(files, data, split)), link)
    schema, agreed = one.federation.dataset.schema, other.model.schema
    assert (schema.columns, schema.classes, schema.target) == (agreed.columns, agreed.classes, agreed.target)
    np.testing.assert_allclose(agreed.shift, schema.shift, rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(agreed.scale, schema.scale, rtol=1e-12)
    for i, node in enumerate(link.nodes):  # the same rows, the same held out
        for own, given in zip(node.own.client(0), one.federation.client(i), strict=True):
            np.testing.assert_allclose(own, given, rtol=1e-9, atol=1e-9)
        assert len(node.own.held_out[0]) == len(one.federation.held_out[i])
    same_history(execute(one), other, 1e-9)


def test_a_regression_target(files):
    given = values(files, {"target": "dose", "drop": ["ill"]}, problem={"name": "least_squares", "l2": 1e-2})
    one, other = execute(build(given)[0]), federate(flowered(given), Direct(members(files)))
    assert other.model.schema.classes == ()
    same_history(one, other, 1e-9)


def test_what_crosses_holds_no_row(files):
    link = Direct(members(files))
    link.record = True
    federate(flowered(values(files)), link)
    crossed = b"".join(link.sent)
    assert b"ward" in crossed  # names of columns do
    for site in SITES:
        for line in (files / f"{site}.csv").read_text().splitlines()[1:]:
            dose = line.split(",")[1]
            assert dose.encode() not in crossed
            assert np.float64(dose).tobytes() not in crossed


def test_other_columns_at_one_node_are_named(files):
    text = (files / "west.csv").read_text().replace("dose", "drug")
    (files / "west.csv").write_text(text)
    with pytest.raises(DataError, match="columns must be the same at every node, got dose, drug"):
        federate(flowered(values(files)), Direct(members(files)))


def test_a_cell_that_cannot_be_read_is_named_with_its_node_and_line(files, caplog):
    rows = (files / "north.csv").read_text().splitlines()
    rows[3] = rows[3].replace(rows[3].split(",")[0], "old", 1)
    (files / "north.csv").write_text("\n".join(rows) + "\n")
    sentence = r"node 'north': column 'age' .*line 4\) must be a finite number; what was found is in the node's own log"
    with pytest.raises(ClientError, match=sentence):
        federate(flowered(values(files)), Direct(members(files)))
    assert "got 'old'" in caplog.text


def test_a_run_is_not_resumed_on_other_rows(files):
    folder = files / "run"
    federate(flowered(values(files)), Direct(members(files)), folder)
    rows = (files / "east.csv").read_text().splitlines()
    (files / "east.csv").write_text("\n".join(rows[:-1]) + "\n")
    longer = flowered(values(files))
    longer["run"]["rounds"] = 6
    with pytest.raises(CheckpointError, match="must come from the same settings and data"):
        federate(longer, Direct(members(files)), folder, resume=True)


def test_names_are_told_apart(files):
    from fedpact.flower.server import numbered

    with pytest.raises(DataError, match="names of nodes must be distinct, got 'a' twice"):
        numbered([{"name": "a"}, {"name": "a"}])
    with pytest.raises(DataError, match="clients of the nodes must be 0 to 1, got"):
        numbered([{"name": "a", "client": 1}, {"name": "b", "client": 2}])
    with pytest.raises(InvalidArgument, match="name of node 1 must be a word, got None"):
        numbered([{"name": "a"}, {}])
    with pytest.raises(InvalidArgument, match="client of node 'b' must be a number, or left out, got 'x'"):
        numbered([{"name": "a", "client": 0}, {"name": "b", "client": "x"}])
    assert numbered([{"name": "b"}, {"name": "a"}]) == [1, 0]
    assert numbered([{"name": "b", "client": 0}, {"name": "a", "client": 1}]) == [0, 1]


def test_a_loader_gives_the_rows(files, monkeypatch, tmp_path):
    (tmp_path / "wards.py").write_text(
        "import numpy as np\n\n\ndef load():\n    rng = np.random.default_rng(1)\n    x = rng.normal(size=(40, 3))\n"
        "    return x, (x[:, 0] > 0).astype(float)\n"
    )
    monkeypatch.chdir(tmp_path)
    given = flowered(values(files))
    given["data"] = {"scale": "standard"}
    nodes = [Node({"name": f"n{i}", "loader": "wards:load"}, tmp_path / f"s{i}") for i in range(2)]
    run = federate(given, Direct(nodes))
    assert run.model.schema.classes == ("0", "1")
    assert run.history.end("accuracy") > 0.9


LOADERS = """
import numpy as np
from fedpact.data import from_arrays

def rows(seed):
    rng = np.random.default_rng(seed)
    age, dose = rng.normal(50, 10, 40), rng.normal(size=40)
    return age, dose, 1000001 + (age + 20 * dose > 50)

def one():
    age, dose, ill = rows(1)
    return from_arrays(np.stack([age, dose], 1), ill, ["age", "dose"], classes=())

def other():
    age, dose, ill = rows(2)
    return from_arrays(np.stack([dose, age], 1), ill, ["dose", "age"], classes=())
"""


def test_loaders_columns_are_found_by_name_and_classes_are_told_exactly(files, monkeypatch, tmp_path):
    """The second has its columns the other way round; classes of seven digits stay two."""
    (tmp_path / "swapped.py").write_text(LOADERS)
    monkeypatch.chdir(tmp_path)
    given = flowered(values(files))
    given["data"] = {"scale": "standard"}
    nodes = [Node({"name": n, "loader": f"swapped:{n}"}, tmp_path / n) for n in ("one", "other")]
    run = federate(given, Direct(nodes))
    assert run.model.schema.classes == ("1000001", "1000002")
    swapped = importlib.import_module("swapped")

    for node, seed in zip(nodes, (1, 2), strict=True):
        x, y = node.own.client(0)
        age, dose, ill = swapped.rows(seed)
        shift, scale = np.array(run.model.schema.shift), np.array(run.model.schema.scale)
        np.testing.assert_allclose(x * scale + shift, np.stack([age, dose], 1), rtol=1e-9, atol=1e-9)
        np.testing.assert_array_equal(y, ill - 1000001)
    both = [np.stack(swapped.rows(seed)[:2], 1) for seed in (1, 2)]
    whole = from_arrays(np.concatenate(both), np.zeros(80), ["age", "dose"], scale="standard").schema
    np.testing.assert_allclose(run.model.schema.scale, whole.scale, rtol=1e-12)
    np.testing.assert_allclose(run.model.schema.shift, whole.shift, rtol=1e-12)


def test_a_loader_s_column_that_is_dropped_is_no_feature(files, monkeypatch, tmp_path):
    (tmp_path / "dropping.py").write_text(LOADERS)
    monkeypatch.chdir(tmp_path)
    given = flowered(values(files))
    given["data"] = {"scale": "standard", "drop": "dose"}
    link = Direct([Node({"name": n, "loader": f"dropping:{n}"}, tmp_path / n) for n in ("one", "other")])
    link.record = True
    run = federate(given, link)
    assert [column.name for column in run.model.schema.columns] == ["age"]
    assert not any(b'"dose"' in one for one in link.sent if b'"experiment"' not in one)


def test_a_loader_cannot_give_what_others_have_as_categories(files, monkeypatch, tmp_path):
    (tmp_path / "numbered.py").write_text(
        "import numpy as np\nfrom fedpact.data import from_arrays\n\n\ndef load():\n"
        "    return from_arrays(np.ones((4, 4)), np.arange(4) % 2, ['age', 'dose', 'ward', 'flat'], classes=())\n"
    )
    monkeypatch.chdir(tmp_path)
    given = flowered(values(files, {"task": "classification"}))
    nodes = [*members(files, ("east",)), Node({"name": "n", "loader": "numbered:load"}, tmp_path / "n")]
    with pytest.raises(ClientError, match="column 'ward' must hold numbers where a node has a loader"):
        federate(given, Direct(nodes))


# What a node may tell before the run


def telling(kind, change):
    """A link on which the second node's answers of this kind are changed."""
    return lambda i, question, answer: (
        answer._replace(values=change(dict(answer.values))) if i == 1 and question.kind == kind else answer
    )


def surveyed(**changes):
    return lambda values: {**values, "survey": {**values["survey"], **changes}}


def without(key):
    return lambda values: {k: v for k, v in values.items() if k != key}


@pytest.mark.parametrize(
    ("kind", "change", "sentence"),
    [
        ("hello", without("survey"), "survey of node 'north' must be a table, got None"),
        ("hello", surveyed(columns=7), "columns of node 'north' must be a list of texts, got 7"),
        ("hello", surveyed(columns=[["a"]]), "columns of node 'north' must be a list of texts"),
        ("hello", surveyed(categories=["ward"]), "categories of node 'north' must be a table of lists of texts"),
        ("hello", surveyed(categories={"ward": 3}), "categories of node 'north' must be a table of lists of texts"),
        ("hello", surveyed(numbers=None), "numbers of node 'north' must be true or false, got None"),
        ("hello", surveyed(values={"a": 1}), "values of node 'north' must be a list of texts"),
        ("hello", surveyed(numbers=True), "values of node 'north' must be a list of finite numbers as texts, got"),
        ("hello", surveyed(numbers=True, values=["nan"]), "values of node 'north' must be a list of finite numbers"),
        ("coded", without("blank"), "blank of node 'north' must be true or false, got None"),
        ("coded", without("mark"), "mark of node 'north' must be a word, got None"),
        ("coded", lambda values: {**values, "rows": "9"}, "rows of node 'north' must be a number from 1 to 2³¹−1"),
    ],
)
def test_what_a_node_tells_is_checked_before_it_is_used(kind, change, sentence, files):
    with pytest.raises(InvalidArgument, match=sentence):
        federate(flowered(values(files)), Faulty(members(files), telling(kind, change)))


def test_a_made_schema_that_is_damaged_names_its_node(tmp_path):
    both = lambda i, question, answer: (
        answer._replace(values=surveyed(made={"columns": [{"name": "x"}]})(answer.values))
        if question.kind == "hello"
        else answer
    )
    with pytest.raises(InvalidArgument, match="schema of node '0' must be whole, got one that is damaged"):
        federated("fedavg", tmp_path, Faulty(nodes(tmp_path), both))


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        ({"csv": "a.csv", "loader": "b:c"}, "node configuration must be with csv or loader, not both"),
        ({"loader": "nothing"}, "loader must be module:function, got 'nothing'"),
        ({"loader": "no_such_module:load"}, "loader must be a function that can be imported"),
        ({"csv": "nowhere.csv"}, "path must be a CSV file; what was found"),
        ({"cvs": "a.csv"}, "key of the node's configuration must be one of"),
        (
            {"delta": 1e-5},
            "delta of the node's configuration must be given with epsilon, got 1e-05. Without epsilon the",
        ),
    ],
)
def test_a_node_s_configuration_is_checked(files, config, sentence, tmp_path):
    nodes = [Node({"name": "n", **config}, tmp_path / "s")]
    with pytest.raises((ClientError, InvalidArgument), match=sentence):
        federate(flowered(values(files)), Direct(nodes))
