"""A node's disk is lost in a round: it is told of the run again, and `stale` decides what becomes of it."""

from __future__ import annotations

import json
import logging
import shutil

import helpers_masked
import pytest
from helpers_nodes import Faulty, federated, nodes, same_history, simulated, step_of

from fedpact.core.errors import ClientError
from fedpact.flower.links import Direct
from fedpact.flower.node import KEY, Node
from fedpact.flower.run_at_node import RunAtNode
from fedpact.flower.sources import Part
from fedpact.run import Run

RESTART = {"quorum": 0.5, "stale": "restart"}
LOST = "state of node '2' must be of version 2, got none."
ANOTHER = "rows of node '2' must be those the run began with, got others. Put them back, and the node.key by which"


@pytest.fixture(autouse=True)
def told(monkeypatch, caplog):
    monkeypatch.setattr(Run, "report", lambda self, folder: None)
    monkeypatch.setattr(logging.getLogger("fedpact"), "propagate", True)
    caplog.set_level(logging.WARNING, logger="fedpact")


def emptied(folder, key=False):
    """All of a node's folder is gone, but for its key where that is kept."""
    kept = (folder / KEY).read_bytes()
    shutil.rmtree(folder)
    if not key:
        folder.mkdir()
        (folder / KEY).write_bytes(kept)


def losing(place, number, harm):
    """Before the first question for the step of this round harm is done to node 2, and its process is started again."""
    members: list[Node] = nodes(place)
    done: list[bool] = []

    def before(i, question):
        if i == 2 and step_of(question, number) and not done:
            done.append(True)
            harm(members[2].folder)
            link.nodes[2] = Node(members[2].config, members[2].folder)

    link = Faulty(members, before=before)
    return link


def events(folder):
    path = folder / "events.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def forgotten_state(place):
    """The same loss of the states alone, of which the node can tell by itself."""

    return losing(place, 2, without("run-*/000002-*.bin", "run-*/answer.bin"))


def test_a_node_whose_disk_was_lost_begins_as_one_that_joins(tmp_path, caplog):
    """As one that has lost its states alone."""
    run = federated("fedadmm", tmp_path / "a", losing(tmp_path / "a", 2, emptied), tmp_path / "run", flower=RESTART)
    other = federated("fedadmm", tmp_path / "b", forgotten_state(tmp_path / "b"), flower=RESTART)
    same_history(run, other, 1e-12)
    assert run.history.column("restarted").tolist() == [0, 0, 0, 1, 0, 0]
    assert run.history.column("participants").tolist() == [0, 4, 4, 4, 4, 4]
    assert events(tmp_path / "run") == [{"round": 3, "client": 2, "name": "2", "what": "restarted", "why": LOST}]
    assert "It is told of the run again." in caplog.text
    assert "Traceback" not in caplog.text


@pytest.mark.parametrize("name", ["fedadmm", "scaffold"])
def test_or_is_left_out_by_name_and_the_round_goes_on(name, tmp_path):
    link, folder = losing(tmp_path, 2, emptied), tmp_path / "run"
    run = federated(name, tmp_path, link, folder, flower={"quorum": 0.5})
    assert run.history.column("participants").tolist() == [0, 4, 4, 3, 3, 3]
    assert run.history.column("refused_uploads").tolist() == [0, 0, 0, 1, 0, 0]
    assert run.history.column("missing").tolist() == [0, 0, 0, 0, 1, 1]
    assert events(folder)[0] == {"round": 3, "client": 2, "name": "2", "what": "refused_uploads", "why": LOST}


def test_one_that_had_no_state_yet_has_lost_nothing(tmp_path):
    """Before its first step it is known by what everyone began with."""
    run = federated("fedadmm", tmp_path, losing(tmp_path, 0, emptied), flower={"quorum": 0.5})
    same_history(run, simulated("fedadmm"), 1e-12)
    assert run.history.column("refused_uploads").sum() == run.history.column("restarted").sum() == 0


def torn(name):
    def harm(folder):
        (path,) = folder.glob(name)
        path.write_bytes(b"\xff torn")

    return harm


def without(*names):
    def harm(folder):
        for path in [path for name in names for path in folder.glob(name)]:
            path.unlink()

    return harm


@pytest.mark.parametrize("how", [torn, without])
@pytest.mark.parametrize("name", ["run-*/prepare.bin", "run-*/join.bin", "sessions/*"])
def test_where_the_states_are_there_it_goes_on_from_them(name, how, tmp_path, caplog):
    """Whichever file of the start is missing or torn."""
    run = federated("fedadmm", tmp_path, losing(tmp_path, 2, how(name)), rounds=4)
    same_history(run, simulated("fedadmm", rounds=4), 1e-12)
    assert "It is told of the run again." in caplog.text
    assert "could not be answered" not in caplog.text


@pytest.mark.parametrize("stale", ["refuse", "restart"])
def test_one_without_its_key_cannot_show_its_rows_and_is_left_out(stale, tmp_path, caplog):
    link, folder = losing(tmp_path, 2, lambda place: emptied(place, key=True)), tmp_path / "run"
    run = federated("fedadmm", tmp_path, link, folder, flower={"quorum": 0.5, "stale": stale}, rounds=4)
    assert run.history.column("refused_uploads").tolist() == [0, 0, 0, 1, 1]
    assert events(folder)[0]["why"].startswith(ANOTHER)
    assert "could not be answered" not in caplog.text


def test_one_that_comes_back_with_other_rows_is_refused_by_name(tmp_path, monkeypatch):
    """Node 2 has the rows of client 1, with its own key."""
    own = Part.federation

    def another(folder):
        emptied(folder)
        monkeypatch.setattr(Part, "federation", lambda self, *of: own(self if self.client != 2 else first(self), *of))

    def first(source):
        source.client = 1
        return source

    link, folder = losing(tmp_path, 2, another), tmp_path / "run"
    run = federated("fedadmm", tmp_path, link, folder, flower=RESTART, rounds=4)
    assert run.history.column("refused_uploads").tolist() == [0, 0, 0, 1, 1]
    assert events(folder)[0]["why"].startswith(ANOTHER)


def test_too_few_without_it_end_the_run_which_names_it(tmp_path):
    with pytest.raises(
        ClientError, match=r"round 2: at least 4 of 4 clients must answer, got 3\. client 2 \(2\): state"
    ):
        federated("fedadmm", tmp_path, losing(tmp_path, 2, emptied))


# States that carry nothing


@pytest.mark.parametrize("name", ["fedavg", "fedsgd", "local_sgd", "sfedavg"])
@pytest.mark.parametrize("harm", [emptied, without("run-*/000002-*.bin")])
def test_where_a_state_carries_nothing_there_is_nothing_to_be_stale(name, harm, tmp_path):
    """Whatever `stale` says: as it joined it is as it was."""
    asked = {"name": "sfedavg", "scale": 0.3} if name == "sfedavg" else name
    run = federated(asked, tmp_path, losing(tmp_path, 2, harm), tmp_path / "run", rounds=4)
    same_history(run, simulated(asked, rounds=4), 1e-12)
    assert run.history.column("restarted").tolist() == [0, 0, 0, 1, 0]
    assert [event["what"] for event in events(tmp_path / "run")] == ["restarted"]


# Masked sums


class Emptied(helpers_masked.Watched):
    """Node 1's folder is gone before the step of round 1, but for its key."""

    def before(self, kind):
        if (kind, self.round) == ("step", 1) and not getattr(self, "done", False):
            self.done = True
            emptied(self.nodes[1].folder)
            self.nodes[1] = Node(self.nodes[1].config, self.nodes[1].folder)


@pytest.mark.parametrize("stale", ["refuse", "restart"])
def test_masked_rounds_do_the_same(stale, tmp_path, monkeypatch):
    pytest.importorskip("cryptography")
    monkeypatch.setattr(RunAtNode, "__init__", helpers_masked.shared_programs)
    found = []
    for name, engine in (("a", {}), ("b", {"secure": True})):
        place = tmp_path / name
        asked = helpers_masked.values(
            {"name": "fedadmm", "batch": 20}, {"stale": stale, "quorum": 0.5, **engine}, rounds=3
        )
        found.append(helpers_masked.run(place, asked, Emptied(helpers_masked.nodes(place))))
    assert helpers_masked.same(*found) < 1e-10
    everyone = float(helpers_masked.CLIENTS)
    left = everyone if stale == "restart" else everyone - 1
    assert found[1].history.column("participants").tolist() == [0, everyone, left, left]
    assert found[1].history.column("restarted").sum() == (stale == "restart")


# Private runs


class Kept(Emptied):
    """All but the key and the ledger."""

    def before(self, kind):
        folder = self.nodes[1].folder
        ledger = {path.name: path.read_bytes() for path in folder.glob("ledger.*")}
        super().before(kind)
        for name, content in ledger.items():
            (folder / name).write_bytes(content)


@pytest.mark.parametrize("link", [Emptied, Kept])
def test_one_that_has_lost_its_ledger_releases_nothing_more(link, tmp_path, monkeypatch):
    """It would count from nothing what it has released."""
    monkeypatch.setattr(RunAtNode, "__init__", helpers_masked.shared_programs)
    asked = helpers_masked.values(
        {"name": "fedavg", "epochs": 1, "step": 0.5, "batch": 10}, RESTART, rounds=3, telemetry="none"
    )
    asked = {**asked, "privacy": {"clip": 1.0, "noise": 2.0}}
    run = helpers_masked.run(tmp_path, asked, link(helpers_masked.nodes(tmp_path)), folder=tmp_path / "run")
    out = link is Emptied
    assert run.history.column("refused_uploads").tolist() == [0, 0, out, out]
    assert run.history.column("restarted").tolist() == [0, 0, not out, 0]
    whys = {event["why"].partition(", got")[0] for event in events(tmp_path / "run")}
    kept = "state of node '1' must be of version 1"
    assert whys == {"ledger of node '1' must have what it released in this run" if out else kept}


# A resumed run


def test_a_node_left_out_for_its_disk_is_so_when_the_run_is_resumed(tmp_path):
    federated("fedadmm", tmp_path, losing(tmp_path, 2, emptied), tmp_path / "run", flower={"quorum": 0.5}, rounds=4)
    run = federated("fedadmm", tmp_path, Direct(nodes(tmp_path)), tmp_path / "run", flower={"quorum": 0.5}, rounds=5)
    assert run.history.column("participants").tolist() == [0, 4, 4, 3, 3, 3]
