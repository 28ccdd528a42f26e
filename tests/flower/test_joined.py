"""CSV files at parties, joined by ids that nobody shows."""

from __future__ import annotations

import logging
from hashlib import sha256
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("cryptography")

from helpers_parties import Changing, assert_same, simulated
from helpers_tables import nodes_of, tables, written

from fedpact.core.errors import ClientError, DataError, InvalidArgument
from fedpact.core.wire import Message
from fedpact.flower.links import Direct
from fedpact.flower.node import Node
from fedpact.flower.server import federate

PARTIES = ("lab", "shop", "ward")


@pytest.mark.parametrize("labels_only", [False, True])
def test_the_history_is_that_of_files_joined_in_the_clear(labels_only, tmp_path):
    files = written(tmp_path, labels_only)
    ours = federate(tables(None), Direct(nodes_of(files, tmp_path)))
    theirs = simulated(tables(files))
    assert_same(ours, theirs)
    assert [c.name for c in ours.model.schema.columns] == [c.name for c in theirs.model.schema.columns]
    np.testing.assert_allclose(ours.model.schema.scale, theirs.model.schema.scale, rtol=1e-14)
    assert ours.model.schema.classes == theirs.model.schema.classes == ("sick", "well")
    counts = {name: (said["records"], said["kept"]) for name, said in ours.config["data"]["parties"].items()}
    assert counts == {name: (said["records"], said["kept"]) for name, said in theirs.config["data"]["parties"].items()}
    assert any("left out" in notice for notice in ours.notices)


def test_no_id_crosses_and_no_hash_of_one(tmp_path):
    files = written(tmp_path)
    link = Direct(nodes_of(files, tmp_path))
    link.record = True
    federate(tables(None), link)
    crossed = b"".join(link.sent)
    assert b"pat-" not in crossed
    assert not any(sha256(f"pat-{i}".encode()).digest() in crossed for i in range(80))


def test_a_node_that_is_started_again_has_the_same_records(tmp_path):
    files = written(tmp_path)
    asked = []

    def restart(i: int, message: Message) -> Message:
        asked.append(message.kind)
        if message.kind == "partial" and len(asked) % 4 == 0:
            link.nodes[i] = Node({"csv": files[PARTIES[i]]}, tmp_path / PARTIES[i])
        return message

    link = Changing(nodes_of(files, tmp_path), restart)
    assert_same(federate(tables(None), link), simulated(tables(files)))


def test_records_that_a_party_lacks_are_refused_with_counts(tmp_path):
    link = Direct(nodes_of(written(tmp_path), tmp_path))
    with pytest.raises(DataError, match=r"ids that others lack: lab 4 of 74; shop 10 of 80; ward 6 of 76") as told:
        federate(tables(None, unmatched="refuse"), link)
    assert "pat-" not in str(told.value)


def test_files_without_a_common_id_are_refused(tmp_path):
    files = written(tmp_path)
    path = Path(files["lab"])
    path.write_text(path.read_text().replace("pat-", "x"))
    with pytest.raises(DataError, match="files must share ids, got none"):
        federate(tables(None), Direct(nodes_of(files, tmp_path)))


def test_an_id_that_occurs_twice_is_told_to_the_node_alone(tmp_path, caplog):
    files = written(tmp_path)
    path = Path(files["lab"])
    path.write_text(path.read_text() + path.read_text().splitlines()[3] + "\n")
    with caplog.at_level(logging.ERROR), pytest.raises(ClientError, match="ids must be in every row") as told:
        federate(tables(None), Direct(nodes_of(files, tmp_path)))
    assert "pat-" not in str(told.value)
    assert "must occur once" in caplog.text


def test_columns_and_targets_are_found_as_in_the_simulation(tmp_path):
    files = written(tmp_path)
    with pytest.raises(DataError, match="must be in one party's file, got it in the file of 'shop' and"):
        federate(tables(None, target="age"), Direct(nodes_of(files, tmp_path)))
    with pytest.raises(KeyError, match="drop must be one of"):
        federate(tables(None, drop="agee"), Direct(nodes_of(files, tmp_path)))
    with pytest.raises(DataError, match="'lab' must have a feature"):
        federate(tables(None, drop=["sugar", "iron"]), Direct(nodes_of(files, tmp_path)))


def test_nodes_of_rows_among_nodes_of_columns_are_refused(tmp_path):
    files = written(tmp_path)
    nodes = [*nodes_of(files, tmp_path)[1:], Node({"name": "lab"}, tmp_path / "other")]
    with pytest.raises((ClientError, DataError)):
        federate(tables(None), Direct(nodes))


def _without(key, kind):
    return lambda i, one: (
        one._replace(values={k: v for k, v in one.values.items() if k != key}) if one.kind == kind else one
    )


def _no_order(i, one):
    return one._replace(arrays=()) if one.kind == "align" and one.values.get("step") == "finish" and i == 2 else one


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (_without("survey", "hello"), "survey of node 'lab' must be a table, got None"),
        (lambda i, one: one._replace(values={**one.values, "survey": {"on": True}}) if one.kind == "hello" else one,
         "header of node 'lab' must be a list of texts, got None"),
        (_without("owner", "align"), "lab's message of the alignment must name an owner and a path, got None"),
        (_no_order, r"ward's message of the alignment must hold one list of int64, got \[\]"),
        (_without("rows", "coded"), "rows of node 'lab' must be a number from 1"),
        (_without("public", "coded"), "public of node 'lab' must be 64 digits of 0-9 and a-f, got None"),
        (_without("mark", "coded"), "mark of node 'lab' must be a word, got None"),
        (_without("columns", "coded"), "columns of node 'lab' must be a list of tables, got None"),
        (lambda i, one: one._replace(values={**one.values, "columns": [{}]}) if one.kind == "coded" else one,
         "schema of node 'lab' must be whole, got one that is damaged"),
        (_without("classes", "coded"), "classes of node 'lab' must be a list of texts, got None"),
    ],
)  # fmt: skip
def test_what_a_party_tells_is_checked_before_it_is_used(change, sentence, tmp_path):
    link = Changing(nodes_of(written(tmp_path), tmp_path), change, answers=True)
    with pytest.raises(InvalidArgument, match=sentence):
        federate(tables(None), link)
