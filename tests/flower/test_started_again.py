"""A node's process is lost before round 1, at any question: everyone is asked anew, and the run is the same."""

from __future__ import annotations

import logging

import helpers_parties
import helpers_tables
import numpy as np
import pytest
from helpers_nodes import same_history

pytest.importorskip("cryptography")

from fedpact.core.errors import ClientError
from fedpact.core.wire import Message
from fedpact.flower import server
from fedpact.flower.links import Direct
from fedpact.flower.node import Node
from fedpact.flower.run_at_node import RunAtNode
from fedpact.flower.server import federate

SUM = ["mask_shares", "mask_words", "mask_reveal"]
ALIGN = [f"align {step}" for step in ("begin", "blind", "blind", "unwind", "unwind", "finish")]
#: What is asked before round 1, by the kind of federation.
ASKED = {
    "rows": ["hello", "moments", "moments", "coded", "join"],
    "masked": ["hello", "vocabulary", *SUM, *2 * ["moments", *SUM[1:]], "coded", "join", *SUM],
    "parties": ["hello", "coded", "join", "partial"],
    "aligned": ["hello", *ALIGN, "coded"],
}
#: Questions by their number that a node answers which was started again, or whose answer is not needed.
BY_ITSELF = (("rows", 0), ("masked", 15))
MOMENTS = [(kind, k) for kind in ASKED for k in range(kind != "rows", len(ASKED[kind]))]


def described(kind):
    if kind == "parties":
        return helpers_parties.over_nodes(helpers_parties.tables(rounds=1))
    if kind == "aligned":
        values = helpers_tables.tables(None)
        return {**values, "run": {**values["run"], "rounds": 1}}
    return {
        "data": {"target": "sick"},
        "problem": {"name": "logistic", "l2": 1e-2},
        "algorithm": {"name": "inexact_admm", "preset": "paper"},
        "run": {"rounds": 1, "seed": 0, "engine": {"name": "flower", "secure": kind == "masked"}},
    }


class Nodes:
    """The nodes of a federation, each made from its folder as often as it is started."""

    def __init__(self, kind, folder):
        folder.mkdir()
        self.names, self.folder = (helpers_parties.NAMES if kind == "parties" else ("lab", "shop", "ward")), folder
        self.configs = {name: {"name": name} for name in self.names}
        if kind == "aligned":
            self.configs = {name: {"csv": path} for name, path in helpers_tables.written(folder).items()}
        if kind in ("rows", "masked"):
            for k, name in enumerate(self.names):
                x = np.random.default_rng(k).normal(size=(30, 3))
                lines = [f"{a},{b},{c},{int(a + b > 0)}" for a, b, c in x.round(3)]
                (folder / f"{name}.csv").write_text("\n".join(["age,iron,sugar,sick", *lines]))
                self.configs[name]["csv"] = str(folder / f"{name}.csv")

    def start(self, i):
        return Node(self.configs[self.names[i]], self.folder / self.names[i])


class Restarting(Direct):
    """One of the nodes asked is started again before each question that `when` tells, by its number and name."""

    def __init__(self, members, when):
        super().__init__([members.start(i) for i in range(len(members.names))])
        self.members, self.when, self.asked = members, when, []

    def ask(self, questions, deadline, enough, patience):
        message = next(iter(questions.values()))
        name, number = " ".join(filter(None, (message.kind, message.values.get("step")))), len(self.asked)
        if self.when(number, name):
            i = sorted(questions)[number % len(questions)]
            self.nodes[i] = self.members.start(i)
        self.asked.append(name)
        return super().ask(questions, deadline, enough, patience)


@pytest.fixture(scope="module", autouse=True)
def programs():
    """Nodes have as many rows: they share what is compiled for one."""
    made, init = {}, RunAtNode.__init__

    def shared(self, node, told):
        init(self, node, told)
        own = self._join, self._step, self._measure
        self._join, self._step, self._measure = made.setdefault(told.values["experiment"]["run"]["rounds"], own)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RunAtNode, "__init__", shared)
        yield


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    found = {}

    def run(kind):
        if kind not in found:
            link = Restarting(Nodes(kind, tmp_path_factory.mktemp(kind) / "f"), lambda *_: False)
            found[kind] = federate(described(kind), link), link.asked
        return found[kind]

    return run


@pytest.mark.parametrize(("kind", "number"), MOMENTS)
def test_a_node_lost_before_a_question_of_the_start_changes_nothing(kind, number, undisturbed, tmp_path, caplog):
    whole, asked = undisturbed(kind)
    assert asked[: len(ASKED[kind])] == ASKED[kind]
    link = Restarting(Nodes(kind, tmp_path / "f"), lambda k, _: k == number)
    begun = asked[number] in ("join", "partial")  # the run has a folder by then
    run = federate(described(kind), link, tmp_path / "run" if begun else None)
    same_history(run, whole, 1e-12)
    times = 0 if (kind, number) in BY_ITSELF else 1
    assert caplog.text.count("Everyone is asked anew (start 2 of 5)") == times
    assert link.asked == asked[: number + 1] + asked if times else asked
    assert all(len(node.sessions) == 1 for node in link.nodes)


def test_nor_do_nodes_lost_again_and_again(undisturbed, tmp_path, caplog):
    """Before the first time that anything is asked."""
    seen = set()
    link = Restarting(Nodes("rows", tmp_path / "f"), lambda _, name: not (name in seen or seen.add(name)))
    same_history(federate(described("rows"), link), undisturbed("rows")[0], 1e-12)
    assert caplog.text.count("Everyone is asked anew") == 3


@pytest.mark.parametrize(("kind", "question"), [("rows", "step"), ("parties", "partial")])
def test_what_a_node_was_writing_when_it_was_killed_is_gone_once_it_goes_on(kind, question, tmp_path):
    members = Nodes(kind, tmp_path / "f")
    link = Restarting(members, lambda *_: False)
    federate(described(kind), link)
    home, (session,) = link.nodes[0].folder, link.nodes[0].sessions
    places = [home, home / "sessions", *home.glob("run-*")]
    assert len(places) == 3
    for place in places:
        (place / ".answer.bin.1.tmp").write_bytes(b"torn")
    members.start(0).answer(Message(question, {"server": session}).pack())
    assert list(home.rglob("*.tmp")) == []


def test_a_node_that_is_always_lost_ends_the_start_with_its_name(tmp_path):
    link = Restarting(Nodes("rows", tmp_path / "f"), lambda _, name: name == "coded")
    sentence = r"nodes must stay until the run has begun, got 5 starts in which one was lost\. coded: node 'shop': "
    with pytest.raises(ClientError, match=sentence):
        federate(described("rows"), link, tmp_path / "run")
    assert link.asked.count("coded") == server.STARTS
    assert not (tmp_path / "run").exists()


def test_a_run_that_is_resumed_is_begun_anew_as_well(tmp_path):
    members = Nodes("rows", tmp_path / "f")
    longer = described("rows")
    longer["run"]["rounds"] = 3
    federate(described("rows"), Restarting(members, lambda *_: False), tmp_path / "run")
    run = federate(longer, Restarting(members, lambda k, _: k == 4), tmp_path / "run", resume=True)
    same_history(run, federate(longer, Restarting(members, lambda *_: False)), 1e-12)


@pytest.fixture(autouse=True)
def told(caplog):
    caplog.set_level(logging.WARNING, logger="fedpact")
    logging.getLogger("fedpact").propagate = True
