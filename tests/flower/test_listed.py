"""What [data] lists of categories and classes is told by no node; what it does not is, in a secure run by a sum."""

from __future__ import annotations

import logging

import pytest
from helpers_nodes import same_history

from fedpact.core.errors import ClientError
from fedpact.core.wire import unpack
from fedpact.data import from_csv
from fedpact.experiment import build
from fedpact.flower.links import Direct
from fedpact.flower.node import Node
from fedpact.flower.server import agree, federate, greet
from fedpact.run import execute

CELLS = {"lab": (("oak", "elm"), ("mild", "grave")), "ward": (("oak", "yew"), ("grave", "mild"))}
LISTS = {"categories": {"tree": ["yew", "oak", "elm", "fir"]}, "classes": ["mild", "grave"]}


@pytest.fixture
def files(tmp_path):
    both = []
    for k, (name, (trees, ends)) in enumerate(CELLS.items()):
        rows = [f"{i + k},{trees[i % 2]},{ends[(i // 2 + k) % 2]},{name}" for i in range(20)]
        both += rows
        (tmp_path / f"{name}.csv").write_text("\n".join(["age,tree,end,site", *rows]) + "\n")
    (tmp_path / "all.csv").write_text("\n".join(["age,tree,end,site", *both]) + "\n")
    return tmp_path


def values(files, data, secure=False):
    return {
        "data": {"csv": str(files / "all.csv"), "target": "end", **data},
        "split": {"how": "column", "column": "site"},
        "problem": {"name": "logistic", "l2": 1e-2},
        "algorithm": {"name": "fedavg"},
        "run": {"rounds": 2, "seed": 0, "engine": {"name": "flower", "notes": True, "secure": secure}},
    }


def members(files):
    return [Node({"name": name, "csv": str(files / f"{name}.csv")}, files / "state" / name) for name in CELLS]


def agreed(files, data, secure=False):
    """The schema, and all that nodes have answered."""
    link = Direct(members(files))
    link.record = True
    asked = values(files, data, secure)
    found = greet(asked, link, 60)
    schema = agree(asked, link, [found[i]["survey"] for i in range(2)], 60).schema
    return schema, link.sent[1::2]


@pytest.mark.parametrize("coding", ["ordinal", "onehot"])
def test_a_simulation_of_the_same_files_has_the_same_features_and_history(files, coding):
    given = values(files, {**LISTS, "coding": coding})
    one, _ = build({**given, "run": {"rounds": 2, "seed": 0}})
    other = federate(given, Direct(members(files)))
    schema = one.federation.dataset.schema
    assert (schema.columns, schema.classes) == (other.model.schema.columns, other.model.schema.classes)
    assert schema.classes == ("mild", "grave")
    assert schema.columns[1].categories == ("yew", "oak", "elm", "fir")
    same_history(execute(one), other, 1e-9)


def test_nodes_tell_none_of_their_own(files):
    _, answers = agreed(files, LISTS)
    words = [word.encode() for trees, ends in CELLS.values() for word in (*trees, *ends)]
    assert not any(word in answer for word in words for answer in answers)
    _, answers = agreed(files, {"categorical": ["tree"]})
    assert all(any(word in answer for answer in answers) for word in words)
    told = unpack(agreed(files, {"categorical": ["tree"], "classes": LISTS["classes"]})[1][0]).values["survey"]
    assert (told["categories"], told["values"]) == ({"tree": ["elm", "oak"]}, [])


@pytest.mark.parametrize("scale", ["standard", "none"])
@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        ({"categories": {"tree": ["oak", "elm"]}}, r"column 'tree' .*ward.csv, line 3\) must be one of elm, oak;"),
        ({"classes": ["mild", "dire"]}, r"column 'end' .*line 4\) must be one of dire, mild;"),
    ],
)
def test_a_node_with_a_cell_that_is_not_listed_is_refused_by_name(files, data, sentence, scale, caplog):
    who = "ward" if "categories" in data else "lab"
    data = {"categorical": ["tree"] if "classes" in data else [], "scale": scale, **data}
    with pytest.raises(ClientError, match=f"node '{who}': {sentence} what was found is in the node's own log"):
        agreed(files, data)
    assert "got 'yew'" in caplog.text or "got 'grave'" in caplog.text


def test_classes_that_are_numbers_are_found_by_value(files):
    for name in CELLS:
        text = (files / f"{name}.csv").read_text()
        (files / f"{name}.csv").write_text(text.replace("mild", "1.0").replace("grave", "7"))
    schema, answers = agreed(files, {"categorical": ["tree"], "classes": [7, 1]})
    assert schema.classes == ("7", "1")
    assert not any(b'"7"' in answer for answer in answers)
    link = Direct(members(files))
    federate(values(files, {"categorical": ["tree"], "classes": [7, 1]}), link)
    assert link.nodes[0].own.dataset.y.tolist() == [1.0, 1.0, 0.0, 0.0] * 5


def test_a_secure_run_says_which_cells_the_server_was_told(files, caplog):
    pytest.importorskip("cryptography")
    caplog.set_level(logging.INFO, "fedpact")
    schema, _ = agreed(files, {"categorical": ["tree"]}, secure=True)
    told = (
        "secure: the server was told which categories of 'tree', values of the target there are over all nodes and how"
    )
    assert told in caplog.text
    assert schema.classes == ("grave", "mild")
    caplog.clear()
    schema, answers = agreed(files, LISTS, secure=True)
    assert "secure: the server" not in caplog.text
    assert schema.classes == ("mild", "grave")
    assert not any(b'"oak"' in answer or b'"grave"' in answer for answer in answers)
    agreed(files, {"categorical": ["tree"]})
    assert "secure: the server" not in caplog.text


def test_parties_refuse_lists(files):
    asked = values(files, {"on": "age", **LISTS})
    del asked["split"], asked["data"]["csv"]
    with pytest.raises(KeyError, match=r"key of \[data\] must be one of .*unmatched, got 'categories'\."):
        federate(asked, Direct(members(files)))


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"categories": ["tree"]}, "categories must be lists of categories by column, got"),
        (
            {"categories": {"tree": "oak"}},
            "categories of 'tree' must be a list of at least 1 distinct cells, got 'oak'",
        ),
        ({"categories": {"tree": []}}, "categories of 'tree' must be a list of at least 1 distinct cells"),
        ({"categories": {"tree": ["oak", "oak"]}}, "categories of 'tree' must be a list of at least 1 distinct cells"),
        ({"categories": {"bush": ["oak"]}}, "categorical must be one of age, end, site, tree, got 'bush'"),
        ({"categories": {"tree": ["oak"]}}, r"column 'tree' .*line 3\) must be one of oak, got 'elm'"),
        ({"classes": ["mild"]}, "classes must be a list of at least 2 distinct cells"),
        ({"classes": "mild"}, "classes must be a list of at least 2 distinct cells"),
        ({"classes": ["1", "1.0"]}, "classes must be distinct numbers"),
        ({"classes": ["mild", "dire"]}, r"column 'end' .*line 4\) must be one of dire, mild, got 'grave'"),
        ({"classes": ["mild", "grave"], "task": "regression"}, "classes must be left out for a regression target"),
    ],
)
def test_lists_that_cannot_be_used(files, options, sentence):
    usual = {"target": "end", "drop": "site", "categorical": [] if "categories" in options else ["tree"]}
    with pytest.raises((ValueError, KeyError), match=sentence):
        from_csv(files / "lab.csv", **usual, **options)


@pytest.fixture(autouse=True)
def told(monkeypatch):
    monkeypatch.setattr(logging.getLogger("fedpact"), "propagate", True)
