"""Nodes are started again within masked sums: they drop out of that sum alone, or all are asked for another one.

Whatever is asked again, no vector is opened over two sets of clients: their sums would differ by somebody's vector.
"""

from __future__ import annotations

import json

import numpy as np
import pytest
from helpers_masked import CLIENTS, Watched, edited, nodes, run, same, shared_programs, values

from fedpact.core.errors import ClientError, InvalidArgument
from fedpact.flower import masked
from fedpact.flower.node import Node
from fedpact.flower.run_at_node import RunAtNode

pytest.importorskip("cryptography")

SUM = ("mask_shares", "mask_words", "mask_reveal")
#: What is asked of a run of two rounds, up to its second, after the join.
MOMENTS = [
    *(("measure", 0, kind) for kind in ("measure", *SUM)),
    *(("step", 0, kind) for kind in ("step", *SUM[1:])),
    *(("measure", 1, kind) for kind in ("measure", *SUM[1:])),
]


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(RunAtNode, "__init__", shared_programs)


def described(clients=CLIENTS, rounds=2, **engine):
    made = values({"name": "fedadmm", "batch": 20}, engine, rounds=rounds)
    data, split = {**made["data"], "rows": 40 * clients}, {**made["split"], "clients": clients}
    return {**made, "data": data, "split": split}


class Restarting(Watched):
    """Who is started again before which question, as (purpose, round, kind) → a list of clients for each time."""

    def __init__(self, parties, plan=()):
        super().__init__(parties)
        self.plan = {moment: list(times) for moment, times in dict(plan).items()}
        self.asked, self.opened = [], {}

    def ask(self, questions, *rest):
        answers = super().ask(questions, *rest)
        first = next(iter(questions.values()))
        if first.kind == "mask_reveal":
            over = self.opened.setdefault((self.purpose, self.round), [])
            over.append(tuple(first.values["survivors"]))
        return answers

    def before(self, kind):
        self.asked.append((self.purpose, self.round, kind))
        times = self.plan.get(self.asked[-1])
        for i in times.pop(0) if times else ():
            self.nodes[i] = Node(self.nodes[i].config, self.nodes[i].folder)

    def once(self):
        """Every vector that was to be opened was so over one set of clients."""
        assert all(len(set(over)) == 1 for over in self.opened.values())
        return True


# One node, at every question


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """The run without masks; with `lost`, one in which node 1's upload of round 0 does not come."""

    class Lossy(Watched):
        def answered(self, i, kind, answer):
            return None if (kind, self.round, i) == ("step", 0, 1) else answer

    found = {}

    def made(clients, lost=False):
        if (clients, lost) not in found:
            place = tmp_path_factory.mktemp("plain")
            link = (Lossy if lost else Watched)(nodes(place, clients))
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(RunAtNode, "__init__", shared_programs)
                found[clients, lost] = run(place, described(clients, quorum=0.5), link)
        return found[clients, lost]

    return made


@pytest.mark.parametrize("moment", MOMENTS, ids=lambda moment: "-".join(map(str, moment)))
@pytest.mark.parametrize(("clients", "quorum"), [(2, 1.0), (3, 1.0), (3, 2 / 3)])
def test_a_node_drops_out_of_one_sum_or_all_are_asked_again(tmp_path, plain, clients, quorum, moment, caplog):
    purpose, t, kind = moment
    link = Restarting(nodes(tmp_path, clients), {moment: [[1]]})
    found = run(tmp_path, described(clients, secure=True, quorum=quorum), link).history
    before_words = kind in ("mask_shares", "mask_words")
    out = before_words and clients == 3 and (purpose == "measure" or quorum < 1)
    participants, measured = [0.0, *[float(clients)] * 2], [1.0] * 3
    if out and purpose == "step":
        participants[t + 1] = 2.0
    if out and purpose == "measure":
        measured[t] = 2 / 3
    assert found.column("participants").tolist() == participants
    assert found.column("measured").tolist() == measured
    whole = plain(clients, lost=out and purpose == "step").history
    for column in ("objective", "gradient"):
        rows = np.asarray(measured) == 1
        np.testing.assert_allclose(found.column(column)[rows], whole.column(column)[rows], rtol=0, atol=1e-10)
    again = (before_words and not out) or (kind == "mask_reveal" and clients == 2)
    assert caplog.text.count("too few stay without it; all are asked again (2 of 5)") == again
    assert link.asked.count((purpose, t, purpose)) == 1 + (again or (kind == purpose and moment != MOMENTS[0]))
    assert link.once()


def test_nobody_is_invited_by_keys_that_are_known_to_be_lost(tmp_path):
    """Those of node 1 are of the sum before the one it is lost in."""
    lost = {("measure", 0, "mask_words"): [[0]], ("step", 0, "mask_words"): [[1]]}
    link = Restarting(nodes(tmp_path, 3), lost)
    run(tmp_path, described(3, secure=True, quorum=2 / 3), link)
    assert [kind for purpose, t, kind in link.asked if (purpose, t) == ("measure", 1)] == ["measure", *SUM]


# Again and again


@pytest.mark.parametrize("kind", SUM)
def test_a_node_that_is_lost_in_every_sum_but_the_last_try_changes_nothing(tmp_path, plain, kind):
    times = [[i % 2] for i in range(masked.TRIES - 1)]
    link = Restarting(nodes(tmp_path, 2), {("measure", 0, kind): times, ("step", 0, kind): times})
    found = run(tmp_path, described(2, secure=True), link)
    assert same(plain(2), found) < 1e-10
    assert link.asked.count(("measure", 0, kind)) == masked.TRIES
    assert link.once()


@pytest.mark.parametrize("kind", SUM[1:])
def test_one_that_is_always_lost_ends_the_run_which_is_resumed(tmp_path, plain, kind):
    parties, secure = nodes(tmp_path, 2), described(2, secure=True)
    link = Restarting(parties, {("step", 1, kind): [[1]] * masked.TRIES})
    text = rf"^round 1, step: at least 2 of 2 clients must stay in a masked sum, got 1 at {kind}\. 1: .* and resume\."
    with pytest.raises(ClientError, match=text):
        run(tmp_path, secure, link, folder=tmp_path / "run")
    assert link.asked.count(("step", 1, "step")) == masked.TRIES
    resumed = run(tmp_path, secure, Restarting(parties), folder=tmp_path / "run", resume=True)
    assert same(plain(2), resumed) < 1e-10


def test_nor_is_silence_asked_again(tmp_path):
    class Silent(Restarting):
        def answered(self, i, kind, answer):
            return None if (self.purpose, kind, i) == ("step", "mask_words", 1) else answer

    link = Silent(nodes(tmp_path, 2))
    with pytest.raises(ClientError, match=r"^round 0, step: at least 2 of 2 clients must stay .*, got 1 at mask_words"):
        run(tmp_path, described(2, secure=True), link)
    assert link.asked.count(("step", 0, "step")) == 1


# Over the same clients, or not at all


class Half(Restarting):
    """In round 1 client 5 is lost at the words, and three of the others are started again before they give shares:
    two have given theirs, where four would open the sum of clients 0 to 4. Then `then` is done."""

    lost = False

    def __init__(self, parties, then=lambda link: None):
        super().__init__(parties, {("step", 1, "mask_reveal"): [[2, 3, 4]]})
        self.then = then

    def answered(self, i, kind, answer):
        gone = not self.lost and (self.purpose, self.round, kind, i) == ("step", 1, "mask_words", 5)
        return None if gone else answer

    def ask(self, questions, *rest):
        answers = super().ask(questions, *rest)
        if self.asked[-1] == ("step", 1, "mask_reveal") and not self.lost:
            self.lost = True
            assert [i for i in answers if answers[i].kind == "mask_reveal"] == [0, 1]
            self.then(self)
        return answers


SIX = described(rounds=2, secure=True, quorum=0.5)


@pytest.fixture
def without_five(tmp_path):
    class Lossy(Watched):
        def answered(self, i, kind, answer):
            return None if (kind, self.round, i) == ("step", 1, 5) else answer

    place = tmp_path / "plain"
    return run(place, described(rounds=2, quorum=0.5), Lossy(nodes(place)))


def test_a_sum_that_some_gave_shares_for_is_asked_again_over_the_same_clients(tmp_path, without_five, caplog):
    """With two that work with the server, it would know the first: over all six, the difference is 5's upload."""
    link = Half(nodes(tmp_path))
    found = run(tmp_path, SIX, link)
    assert link.opened["step", 1] == [(0, 1, 2, 3, 4)] * 2
    assert same(without_five, found) < 1e-10
    assert "round 1, client 5 (5), step: left out: the sum was opened without it, before it was" in caplog.text
    assert link.once()


@pytest.mark.parametrize("notes", [False, True])
def test_and_so_it_is_by_a_run_that_is_resumed(tmp_path, without_five, notes):
    """Two of five have written down over whom: one would be enough. That notes are asked for makes no other vector."""

    def die(link):
        raise KeyboardInterrupt

    parties = nodes(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, SIX, Half(parties, die), folder=tmp_path / "run")
    link = Restarting(parties)
    asked = described(rounds=2, secure=True, quorum=0.5, notes=notes)
    resumed = run(tmp_path, asked, link, folder=tmp_path / "run", resume=True)
    assert link.opened["step", 1] == [(0, 1, 2, 3, 4)]
    assert notes or same(without_five, resumed) < 1e-10


@pytest.mark.parametrize("kind", ["step", *SUM[:2]])
def test_without_one_of_them_it_is_not_opened(tmp_path, kind):
    """Client 0 gave shares and is not heard of again; 1 to 5 would be enough for another sum."""

    class Gone(Half):
        def answered(self, i, now, answer):
            gone = self.lost and i == 0 and now == kind
            return None if gone else super().answered(i, now, answer)

    link = Gone(nodes(tmp_path))
    text = r"sum must be over clients \[0, 1, 2, 3, 4\], .* \(known to 0, 1, 2, 3, 4\), got one without 0\."
    if kind != "step":
        text = rf"^round 1, step: at least 5 of 6 clients must stay in a masked sum, got 4 at {kind}\."
    with pytest.raises(ClientError, match=text):
        run(tmp_path, SIX, link)
    assert link.opened["step", 1] == [(0, 1, 2, 3, 4)]


def test_who_tells_of_it_is_named_where_others_are_missing(tmp_path):
    class Liar(Restarting):
        def answered(self, i, kind, answer):
            if (kind, self.round) != ("step", 1):
                return answer
            return None if i == 4 else edited(answer, summed=[1, 2, 3, 4]) if i == 1 else answer

    text = r"over clients \[1, 2, 3, 4\], .* \(known to 1\), got one without 4\. Start those that are missing"
    with pytest.raises(ClientError, match=text):
        run(tmp_path, SIX, Liar(nodes(tmp_path)))


def test_nor_is_one_believed_who_always_tells_of_it(tmp_path):
    """Client 1 would have 0 and 5 left out of every round: it can so only where an earlier start may have opened it."""

    class Liar(Restarting):
        def answered(self, i, kind, answer):
            return edited(answer, summed=[1, 2, 3, 4]) if kind == "step" and i == 1 else answer

    link = Liar(nodes(tmp_path))
    rounds = masked.REMEMBERED + 3
    asked = described(rounds=rounds, secure=True, quorum=0.5)
    run(tmp_path, {**asked, "run": {**asked["run"], "telemetry": "none"}}, link)
    found = [link.opened["step", t] for t in range(rounds)]
    assert found == [[(1, 2, 3, 4)]] * (rounds - 2) + [[(0, 1, 2, 3, 4, 5)]] * 2


@pytest.mark.parametrize("told", [[1, 2], [1, 2, 3, 99], [0, 2, 3, 4], "1", [1, "2", 3, 4]])
def test_what_no_sum_can_have_been_opened_over_is_ignored(tmp_path, told):
    class Odd(Restarting):
        def answered(self, i, kind, answer):
            return edited(answer, summed=told) if (kind, self.round, i) == ("step", 1, 1) else answer

    link = Odd(nodes(tmp_path))
    run(tmp_path, SIX, link)
    assert link.opened["step", 1] == [(0, 1, 2, 3, 4, 5)]


def test_the_first_sum_is_remembered_however_often_a_run_is_resumed(tmp_path):
    """Each time it is opened again, and then as many others as are remembered beside it."""
    for resumed in range(3):
        first = masked.Book(tmp_path, "measure", "row 0")
        first.check([0, 1, 2])
        first.write([0, 1, 2])
        for row in range(masked.REMEMBERED + 1):
            masked.Book(tmp_path, "measure", f"row {row} of start {resumed}").write([0, 1])
    with pytest.raises(InvalidArgument, match=r"^sum must be over clients \[0, 1, 2\], .* got one over \[0, 1\]"):
        first.check([0, 1])
    assert len(json.loads(first.path.read_text())) == 1 + masked.REMEMBERED
