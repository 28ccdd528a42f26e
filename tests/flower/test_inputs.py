"""What an experiment file says of data is read, or refused before anyone is asked; so is it by nodes, of any server."""

from __future__ import annotations

import pytest
from helpers_tables import nodes_of, tables, written

from fedpact.core.wire import Message, unpack
from fedpact.experiment import build
from fedpact.flower.links import Direct
from fedpact.flower.node import Node
from fedpact.flower.server import federate

FILE = {"csv": "all.csv", "target": "ill"}
FILES = {"csv": {"lab": "lab.csv", "ward": "ward.csv"}, "on": "id", "target": "ill"}
MISSPELT = {
    "a file": (FILE, {"scael": "none"}, {}, "got 'scael'. Did you mean 'scale'?"),
    "a split of files": (FILE, {}, {"holdot": 0.3}, "got 'holdot'. Did you mean 'holdout'?"),
    "a way to split": (FILE, {}, {"how": "colum"}, "got 'colum'. Did you mean 'column'?"),
    "another split's option": (FILE, {}, {"how": "iid", "alpha": 1.0}, "option of the split 'iid' must be one of"),
    "a share": (FILE, {}, {"holdout": 1.5}, "holdout must be a fraction in [0, 1), got 1.5."),
    "files of parties": (FILES, {"unmached": "drop"}, {}, "got 'unmached'. Did you mean 'unmatched'?"),
    "parties' split": (FILES, {}, {"holdot": 0.3}, "got 'holdot'. Did you mean 'holdout'?"),
    "a dataset": ({"name": "synthetic"}, {"row": 9}, {}, "got 'row'. Did you mean 'rows'?"),
}
HERE = {"algorithm": {"name": "fedavg"}, "run": {"rounds": 1}}


class Silent(Direct):
    """Nodes that nobody may ask."""

    def ask(self, questions, deadline, enough, patience):
        raise AssertionError("a node was asked")


def described(case):
    rows, data, split, sentence = MISSPELT[case]
    return {"data": {**rows, **data}, "split": split, **HERE}, sentence


@pytest.mark.parametrize("case", MISSPELT)
def test_the_server_refuses_before_it_asks_anyone_as_a_simulation_does(case, tmp_path):
    values, sentence = described(case)
    with pytest.raises((KeyError, ValueError)) as simulated:
        build(values)
    with pytest.raises((KeyError, ValueError)) as found:
        federate(values, Silent([Node({"csv": "rows.csv"}, tmp_path)]))
    assert str(found.value) == str(simulated.value)
    assert sentence in str(found.value)


def test_also_where_the_rows_are_named_at_the_nodes_alone(tmp_path):
    for data in ({"target": "ill", "scael": "none"}, {"scael": "none"}, {"on": "id", "target": "ill", "scael": "none"}):
        with pytest.raises(KeyError, match=r"key of \[data\] must be one of .*got 'scael'\. Did you mean 'scale'\?"):
            federate({"data": data, **HERE}, Silent([Node({"csv": "rows.csv"}, tmp_path)]))


@pytest.mark.parametrize("config", [{"csv": "rows.csv"}, {"loader": "wards:load"}, {"client": 0}])
@pytest.mark.parametrize("case", MISSPELT)
def test_a_node_refuses_whatever_the_server_did_before_it_reads_a_row(case, config, tmp_path):
    values, sentence = described(case)
    answer = unpack(Node(config, tmp_path).answer(Message("hello", {"experiment": values}).pack()))
    assert (answer.kind, answer.values["why"]) == ("error", "refused")
    assert sentence in answer.values["sentence"]


@pytest.mark.parametrize("client", ["0", 1.5, -1, True, "first"])
def test_a_node_whose_number_is_none_is_refused_and_not_taken_as_one_without(client, tmp_path):
    told = unpack(Node({"client": client, "name": "lab"}, tmp_path).answer(Message("hello", {}).pack())).values
    wanted = "client of node 'lab''s configuration must be a whole number from 0, or left out"
    assert told["sentence"] == f"{wanted}, got {client!r}. Number the nodes, or leave it out at all of them."


# How long nodes are waited for before round 1


class Stop(Exception):
    pass


class Watched(Direct):
    """Remembers how long each question may wait, up to the first of the run itself."""

    def __init__(self, nodes):
        super().__init__(nodes)
        self.waits = []

    def ask(self, questions, deadline, enough, patience):
        kind = next(iter(questions.values())).kind
        if kind == "join":
            raise Stop
        self.waits.append((kind, patience))
        return super().ask(questions, deadline, enough, patience)


@pytest.mark.parametrize("kind", ["rows", "masked", "parties"])
def test_the_engine_s_patience_is_that_before_round_1_too(kind, tmp_path):
    pytest.importorskip("cryptography")
    files = written(tmp_path)
    asked = tables(None)
    if kind != "parties":
        files = dict.fromkeys(files, files["shop"])
        asked |= {"data": {"target": "spent", "drop": ["id", "kind"]}, "split": {}}
        asked |= {"problem": {"name": "least_squares"}, "algorithm": {"name": "fedavg"}}
    engine = {"name": "flower", "deadline": 40.0, "patience": 40.0} | ({"secure": True} if kind == "masked" else {})
    asked["run"] = {"rounds": 1, "engine": engine}
    nodes = [Node({"name": name, "csv": path}, tmp_path / "nodes" / name) for name, path in files.items()]
    link = Watched(nodes if kind != "parties" else nodes_of(files, tmp_path / "nodes"))
    with pytest.raises(Stop):
        federate(asked, link)
    kinds = {name for name, _ in link.waits}
    assert kinds >= {"hello", "coded", *({"parties": ["align"], "masked": ["mask_words"]}.get(kind, ["moments"]))}
    assert {wait for _, wait in link.waits} == {40.0}
