"""Private runs over nodes: each has a ledger of its own, which no question gets around."""

from __future__ import annotations

import numpy as np
import pytest
from helpers_masked import BASE, CLIENTS, Watched, nodes, run, shared_programs

from fedpact.core.errors import ClientError, InvalidArgument
from fedpact.core.wire import unpack
from fedpact.flower import run_at_node as module
from fedpact.flower.links import Direct
from fedpact.flower.node import Node
from fedpact.flower.run_at_node import RunAtNode
from fedpact.privacy.ledger import Ledger

ROUNDS = 3


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(RunAtNode, "__init__", shared_programs)


def values(engine=None, seed=0, noise=2.0, **privacy):
    return {
        **BASE,
        "algorithm": {"name": "fedavg", "epochs": 1, "step": 0.5, "batch": 10},
        "run": {
            "rounds": ROUNDS,
            "seed": seed,
            "telemetry": "none",
            "engine": {"name": "flower", **(engine or {})},
        },
        "privacy": {"clip": 1.0, "noise": noise, **privacy},
    }


def ledger(folder, i):
    with Ledger(folder / str(i), read_only=True) as found:
        return found.releases


def weights(done):
    return np.asarray(done.model.w.tree["w"])


class Asked(Watched):
    """Remembers the questions of steps, as they were sent, with the answers to them."""

    def __init__(self, parties):
        super().__init__(parties)
        self.questions, self.uploads = [], []

    def ask(self, questions, deadline, enough, patience):
        answers = super().ask(questions, deadline, enough, patience)
        if next(iter(questions.values())).kind == "step":
            self.questions.append({i: unpack(self._of_session(q)) for i, q in questions.items()})
            self.uploads.append({i: answer.arrays for i, answer in answers.items()})
        return answers


def test_every_node_writes_down_what_it_releases_and_the_model_is_noisy(tmp_path):
    one, other = (run(tmp_path / name, values()) for name in "ab")
    for i in range(CLIENTS):
        mine = ledger(tmp_path / "a", i)
        assert [(r.round, r.attempt, r.who) for r in mine] == [(t, 0, "this node") for t in range(ROUNDS)]
        assert {r.event.noise for r in mine} == {2.0}
    assert not np.allclose(weights(one), weights(other), atol=1e-3)  # noise is the system's own
    assert "simulation" not in " ".join(one.notices)


def test_with_masks_too(tmp_path):
    pytest.importorskip("cryptography")
    link = Asked(nodes(tmp_path))
    done = run(tmp_path, values({"secure": True}), link)
    assert np.isfinite(weights(done)).all()
    assert all(arrays == [] for uploads in link.uploads for arrays in uploads.values())
    assert [len(ledger(tmp_path, i)) for i in range(CLIENTS)] == [ROUNDS] * CLIENTS


def test_a_question_that_is_asked_again_has_the_same_answer_and_is_spent_once(tmp_path):
    parties = nodes(tmp_path)
    link = Asked(parties)
    run(tmp_path, values(), link)
    again = unpack(parties[0].answer(link.questions[-1][0].pack()))
    np.testing.assert_array_equal(again.arrays[0], link.uploads[-1][0][0])
    assert len(ledger(tmp_path, 0)) == ROUNDS


def test_another_question_of_the_same_round_is_another_release(tmp_path):
    """A server that moves its broadcast a little and asks again would average the noise away."""
    parties = nodes(tmp_path)
    link = Asked(parties)
    run(tmp_path, values(), link)
    last = link.questions[-1][0]
    moved = last._replace(arrays=[a + 1e-9 for a in last.arrays])
    first = unpack(parties[0].answer(moved.pack()))
    assert first.kind == "step"
    assert [(r.round, r.attempt) for r in ledger(tmp_path, 0)][-2:] == [(ROUNDS - 1, 0), (ROUNDS - 1, 1)]
    back = unpack(parties[0].answer(last.pack()))  # whose answer is no longer kept: noise is drawn anew
    assert not np.array_equal(back.arrays[0], link.uploads[-1][0][0])
    assert [r.attempt for r in ledger(tmp_path, 0) if r.round == ROUNDS - 1] == [0, 1, 2]


def test_a_node_killed_between_ledger_and_answer_spends_once(tmp_path, monkeypatch):
    """What never left is drawn again under the same line."""

    class Killed(BaseException):
        pass

    link = Asked(nodes(tmp_path))
    written = module.write_atomic

    def killed(path, content):
        if path.name == "answer.bin":
            raise Killed
        return written(path, content)

    monkeypatch.setattr(module, "write_atomic", killed)
    with pytest.raises(Killed):
        run(tmp_path, values(), link)
    monkeypatch.undo()
    monkeypatch.setattr(RunAtNode, "__init__", shared_programs)
    spent = [len(ledger(tmp_path, i)) if (tmp_path / str(i) / "ledger.jsonl").exists() else 0 for i in range(CLIENTS)]
    assert sum(spent) == 1
    run(tmp_path, values(), Direct(nodes(tmp_path)))
    assert [len(ledger(tmp_path, i)) for i in range(CLIENTS)] == [ROUNDS] * CLIENTS


def test_runs_add_up_and_the_node_keeps_to_what_it_grants(tmp_path):
    """Another run of the same experiment is another release; so is one in which the node has another number."""
    granted = {"epsilon": 12.0, "delta": 1e-4}  # the third run takes it to 10.6, the fourth would to 14.5

    def parties(names):
        return [Node({"client": i, **(granted if name == "0" else {})}, tmp_path / name) for i, name in names]

    straight = [(i, str(i)) for i in range(CLIENTS)]
    run(tmp_path, values(), Direct(parties(straight)), folder=tmp_path / "first")
    run(tmp_path, values(seed=1), Direct(parties([(1, "0"), (0, "1"), *straight[2:]])), folder=tmp_path / "second")
    mine = ledger(tmp_path, 0)
    assert [r.attempt for r in mine] == [0] * ROUNDS + [1] * ROUNDS
    run(tmp_path, values(seed=2, noise=0.7), Direct(parties(straight)), folder=tmp_path / "third")
    beyond = r"epsilon of node '0' must cover round \d, got ε = .* EPS at δ = 0.0001 is granted"
    with pytest.raises(ClientError, match=beyond.replace("EPS", f"{granted['epsilon']:g}")):
        run(tmp_path, values(seed=3, noise=0.7), Direct(parties(straight)), folder=tmp_path / "fourth")
    assert len(ledger(tmp_path, 0)) < len(ledger(tmp_path, 2))


def test_what_is_not_private_is_refused(tmp_path):
    parties = [Node({"client": i, "epsilon": 1.0}, tmp_path / str(i)) for i in range(CLIENTS)]
    open_ = {name: part for name, part in values().items() if name != "privacy"}
    with pytest.raises(ClientError, match=r"experiment must be private for node '0', .* epsilon = 1.0"):
        run(tmp_path, open_, Direct(parties))


def test_the_servers_own_noise_is_refused(tmp_path):
    """It would come from the seed, which everyone has."""
    with pytest.raises(InvalidArgument, match=r'place of \[privacy\] must be "local" in a federation'):
        run(tmp_path, values(way="client", place="central"))


def test_notes_of_nodes_are_refused(tmp_path):
    with pytest.raises(
        InvalidArgument, match=r"^notes must be false in a private federation, got True\. What nodes tell"
    ):
        run(tmp_path, values({"notes": True}))


def test_there_is_no_telemetry(tmp_path):
    parties = nodes(tmp_path)
    link = Asked(parties)
    run(tmp_path, values(), link)
    question = link.questions[-1][0]._replace(kind="measure")
    refused = unpack(parties[0].answer(question.pack()))
    assert (refused.kind, "telemetry must be" in refused.values["sentence"]) == ("error", True)


@pytest.mark.parametrize(("part", "wrong", "refused"), [
    ("sizes", 4000, r"rows of node '1' must be told as the 40 it has, got 4000 from the server\."),
    ("marks", "f" * 32, r"rows of node '1' must be those the run began with, got others\."),
])  # fmt: skip
def test_a_node_does_not_believe_what_the_server_says_of_its_own_rows(tmp_path, part, wrong, refused):
    """Of more rows the same batch would be a smaller sample, and ε less than was spent."""

    class Lying(Direct):
        def tell(self, questions):
            described = dict(questions[1].values["description"])
            described[part] = [wrong if i == 1 else one for i, one in enumerate(described[part])]
            values = {**questions[1].values, "description": described}
            super().tell({**questions, 1: questions[1]._replace(values=values)})

    with pytest.raises(ClientError, match=refused):
        run(tmp_path, values(), Lying(nodes(tmp_path)))
    assert not (tmp_path / "1" / "ledger.jsonl").exists()
