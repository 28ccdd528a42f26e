"""What an experiment file asks for and a federation of nodes does not do is said: in the log, and as notices."""

from __future__ import annotations

import logging

import pytest
from helpers_nodes import nodes, same_history, values
from helpers_tables import nodes_of, tables, written

from fedpact.flower.described import unused
from fedpact.flower.links import Direct
from fedpact.flower.node import Node
from fedpact.flower.server import federate

ENGINE = (
    '[run] engine = "host" is of one machine and was not used: the clients are nodes, and the engine is "flower" with '
    "its defaults (deadline 300 s, quorum 1)."
)
HOLDOUT = "[split] holdout = 0.2: nodes do not train on that share of their rows"
SCORED = f"{HOLDOUT} but score it: test_loss and, for classes, test_accuracy are of all these rows."
BLIND = f"{HOLDOUT}, and nothing was scored on it"


@pytest.fixture(autouse=True)
def told(monkeypatch):
    monkeypatch.setattr(logging.getLogger("fedpact"), "propagate", True)


def run(folder, engine=None, holdout=None, **options):
    asked = values("fedavg", rounds=1, **options)
    asked["run"] |= {} if engine is None else {"engine": engine}
    asked["split"] |= {} if holdout is None else {"holdout": holdout}
    return federate(asked, Direct(nodes(folder)))


def test_an_engine_of_one_machine_is_not_replaced_in_silence(tmp_path, caplog):
    named, plain = run(tmp_path / "a", {"name": "host", "at_once": 1}), run(tmp_path / "b", "flower")
    assert named.notices[0] == ENGINE
    assert caplog.text.count(ENGINE) == 1
    assert not any("engine" in notice for notice in plain.notices)
    same_history(named, plain, 0)
    assert run(tmp_path / "c").notices == plain.notices


def test_an_engine_that_there_is_not_is_refused(tmp_path):
    with pytest.raises(KeyError, match="'hots'"):
        run(tmp_path, "hots")


def test_rows_that_are_held_out_are_told_of_and_what_is_scored_on_them(tmp_path, caplog):
    one = run(tmp_path / "a", "flower", 0.2)
    assert one.metrics is None
    assert one.notices[0].startswith(SCORED)
    assert SCORED in caplog.text
    assert not any("holdout" in notice for notice in run(tmp_path / "b", "flower", 0).notices)


def test_and_that_nothing_is_where_there_is_no_telemetry(tmp_path):
    assert run(tmp_path, "flower", 0.2, telemetry="none").notices[0].startswith(BLIND)


def test_of_parties_too(tmp_path):
    files = written(tmp_path)
    found = federate(tables(None), Direct(nodes_of(files, tmp_path / "nodes")))
    assert any(notice.startswith(BLIND) for notice in found.notices)


# What of [data] and [split] nodes with rows of their own do not use


FILE, LOADER, PARTY, PART = {"file": True}, {}, {"on": True}, {"made": {}}
OWN = "not used: the clients are the 2 nodes, with rows of their own"


@pytest.mark.parametrize(
    ("survey", "data", "split", "sentence"),
    [
        (FILE, {}, {}, None),
        (FILE, {"target": "ill", "categorical": ["ward"]}, {"holdout": 0.2, "seed": 1}, None),
        (FILE, {"csv": "all.csv"}, {"how": "column", "column": "site"}, f"[data] csv and [split] how were {OWN}."),
        (FILE, {}, {"how": "iid", "clients": 2}, f"[split] how, clients were {OWN}."),
        (FILE, {}, {"clients": 50, "seed": 1}, f"[split] clients was {OWN}, and not the 50 of [split] clients."),
        (LOADER, {"drop": ["id"], "scale": "none"}, {}, None),
        (LOADER, {"categorical": ["ward"], "coding": "onehot"}, {}, f"[data] categorical, coding were {OWN}."),
        (
            LOADER,
            {"name": "digits"},
            {"how": "column", "column": "site"},
            f"[data] name and [split] how, column were {OWN}.",
        ),
        (PARTY, {"categorical": ["ward"]}, {"how": "features", "holdout": 0.2}, None),
        (PARTY, {"csv": {"lab": "a.csv", "ward": "b.csv"}, "on": "id"}, {}, f"[data] csv was {OWN}."),
        (PART, {"name": "digits"}, {"how": "dirichlet", "alpha": 1.0, "clients": 50}, None),
    ],
)
def test_keys_that_nodes_with_own_rows_do_not_use_are_named(survey, data, split, sentence):
    found = unused({"data": data, "split": split}, [survey, survey])
    assert found == ([] if sentence is None else [sentence])


def test_a_simulation_s_file_runs_over_nodes_and_says_what_it_did_not_use(tmp_path, caplog):
    for name in ("lab", "ward"):
        (tmp_path / f"{name}.csv").write_text("age,ill\n" + "".join(f"{20 + 5 * i},{i % 2}\n" for i in range(8)))
    asked = values("fedavg", rounds=1) | {"data": {"csv": "all.csv", "target": "ill"}}
    link = Direct([Node({"csv": str(tmp_path / f"{name}.csv")}, tmp_path / name) for name in ("lab", "ward")])
    told = f"[data] csv and [split] how, clients were {OWN}, and not the 4 of [split] clients."
    assert told in federate(asked, link).notices
    assert caplog.text.count(told) == 1
