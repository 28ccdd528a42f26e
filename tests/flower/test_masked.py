"""Secure federations: the same runs from sums alone, whoever drops out, restarts or sends what is not right."""

from __future__ import annotations

import logging

import numpy as np
import pytest
from helpers_masked import CLIENTS, Losing, Watched, edited, nodes, run, same, shared_programs, third, values

from fedpact.core.errors import ClientError, InvalidArgument
from fedpact.core.wire import unpack
from fedpact.flower import masked
from fedpact.flower.links import Direct
from fedpact.flower.node import Node
from fedpact.flower.run_at_node import RunAtNode
from fedpact.secure import shamir

pytest.importorskip("cryptography")

SECURE = {"secure": True}
FEDADMM = {"name": "fedadmm", "batch": 20}


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(RunAtNode, "__init__", shared_programs)


@pytest.fixture
def slow(monkeypatch):
    """No keys are sent ahead, so that every sum has its own step of keys."""
    monkeypatch.setattr(
        masked.Sums, "start", lambda self, *a, _start=masked.Sums.start: self.ahead.clear() or _start(self, *a)
    )


@pytest.mark.parametrize("algorithm", ["fedavg", FEDADMM, {"name": "scaffold", "batch": 20}], ids=str)
def test_a_secure_run_is_the_plain_run(tmp_path, algorithm):
    link = Watched(nodes(tmp_path / "b"))
    plain = run(tmp_path / "a", values(algorithm, {"notes": True}))
    secure = run(tmp_path / "b", values(algorithm, {"notes": True, **SECURE}), link)
    assert 0 < same(plain, secure) < 1e-10
    assert secure.history.end("objective") < 0.8 * secure.history.column("objective")[0]
    assert link.asks.count("step") == 5
    assert link.asks[-6:] == ["step", "mask_words", "mask_reveal", "measure", "mask_words", "mask_reveal"]
    assert link.asks.count("mask_shares") == 1  # of row 0, before which nobody had keys


def test_hellos_come_as_sums_where_the_start_needs_no_more(tmp_path):
    """Inexact ADMM's tell σ_i and σ_i w⁰ − g_i⁰: a gradient."""
    algorithm = {"name": "inexact_admm", "preset": "paper"}
    link = Direct(nodes(tmp_path / "b"))
    link.record = True
    secure = run(tmp_path / "b", values(algorithm, SECURE, rounds=2), link)
    same(run(tmp_path / "a", values(algorithm, {}, rounds=2)), secure)
    (told,) = {tuple(a.shape for a in m.arrays) for m in answers(link) if m.kind == "join"}
    assert told == ((),)


def test_what_of_a_first_message_is_not_masked_is_said_once(tmp_path, caplog):
    """σ_i of inexact ADMM, of which the start takes the largest; of FedAvg there is no first message."""
    admm = {"name": "inexact_admm", "preset": "paper"}
    said = "secure masks sums alone: the server is told each node's own sigma in its first message, for"
    run(tmp_path / "a", values(admm, SECURE, rounds=1))
    assert caplog.text.count(said) == caplog.text.count("secure masks") == 1
    caplog.clear()
    run(tmp_path / "b", values(admm, {}, rounds=1))
    run(tmp_path / "c", values("fedavg", SECURE, rounds=1))
    assert "secure masks" not in caplog.text


def answers(link):
    """What the nodes have sent, in order."""
    return [unpack(content) for content in link.sent[1::2]]


# Dropouts


@pytest.mark.parametrize("kind", ["step", "mask_shares", "mask_words", "mask_reveal"])
def test_a_third_drops_out_of_every_round(tmp_path, request, kind, caplog):
    if kind == "mask_shares":
        request.getfixturevalue("slow")
    lost = Losing(nodes(tmp_path / "a"), None if kind == "mask_reveal" else "step")
    plain = run(tmp_path / "a", values(FEDADMM, {"quorum": 0.5}, rounds=3), lost)
    link = Losing(nodes(tmp_path / "b"), kind)
    secure = run(tmp_path / "b", values(FEDADMM, {"quorum": 0.5, **SECURE}, rounds=3), link)
    assert same(plain, secure) < 1e-10
    assert link.lost == 3 * CLIENTS // 3
    if kind.startswith("mask"):
        assert sum(f"step, {kind}: no answer by the deadline" in r.getMessage() for r in caplog.records) == link.lost
    assert secure.history.column("participants")[1:].tolist() == [6.0 if kind == "mask_reveal" else 4.0] * 3


def test_more_than_a_third_ends_the_run_with_the_numbers(tmp_path):
    class Most(Losing):
        def answered(self, i, kind, answer):
            return None if (self.purpose, kind) == ("step", "mask_words") and i < 3 else answer

    text = r"^round 0, step: at least 4 of 6 clients must stay in a masked sum, got 3 at mask_words\. Start the missing"
    with pytest.raises(ClientError, match=text):
        run(tmp_path, values("fedavg", {"quorum": 0.5, **SECURE}), Most(nodes(tmp_path), None))


def test_the_threshold_is_a_setting(tmp_path):
    described = values("fedavg", {"quorum": 0.5, "threshold": 1.0, **SECURE})
    with pytest.raises(ClientError, match=r"at least 6 of 6 clients must stay in a masked sum, got 4 at mask_words"):
        run(tmp_path, described, Losing(nodes(tmp_path), "mask_words"))


def test_telemetry_is_of_those_who_answer(tmp_path, caplog):
    class Away(Watched):
        def answered(self, i, kind, answer):
            return None if (self.purpose, kind, i) == ("measure", self.kind, 2) else answer

    found = []
    for name, kind, engine in (("a", "measure", {}), ("b", "mask_words", SECURE)):
        link = Away(nodes(tmp_path / name))
        link.kind = kind
        found.append(run(tmp_path / name, values("fedavg", {"quorum": 0.5, **engine}, rounds=2), link))
    assert same(*found) < 1e-9
    assert found[1].history.column("measured").tolist() == [5 / 6] * 3
    said = [
        r.getMessage() for r in caplog.records if "telemetry is of 5 of 6 clients; without client 2" in r.getMessage()
    ]
    assert len(said) == 6


# Restarts


class Restarting(Watched):
    """Client 1 is started again before one kind of question, in round 1."""

    kind = ""

    def before(self, kind):
        if (self.purpose, self.round, kind) == ("step", 1, self.kind):
            self.kind = ""
            self.nodes[1] = Node(self.nodes[1].config, self.nodes[1].folder)


def restarted(folder, kind, **engine):
    link = Restarting(nodes(folder))
    link.kind = kind
    return run(folder, values(FEDADMM, {**SECURE, **engine}, rounds=3), link), link


def test_a_node_that_restarts_within_a_sum_has_dropped_out_of_it(tmp_path, caplog):
    class Without(Losing):
        def answered(self, i, kind, answer):
            return None if (kind, self.round, i) == ("step", 1, 1) else answer

    plain = run(tmp_path / "a", values(FEDADMM, {"quorum": 0.5}, rounds=3), Without(nodes(tmp_path / "a"), None))
    secure, _ = restarted(tmp_path / "b", "mask_words", quorum=0.5)
    assert same(plain, secure, but=("missing", "refused_uploads")) < 1e-10
    assert secure.history.column("refused_uploads").tolist() == [0, 0, 1, 0]
    text = "round 1, client 1 (1), step, mask_words: refused: question must be of the masked sum under way, got one"
    assert any(text in record.getMessage() for record in caplog.records)


def test_a_node_that_restarts_between_sums_is_asked_for_new_keys(tmp_path, caplog):
    caplog.set_level(logging.INFO, "fedpact")
    plain = run(tmp_path / "a", values(FEDADMM, {}, rounds=3))
    secure, link = restarted(tmp_path / "b", "step")
    assert same(plain, secure) < 1e-10
    assert link.asks.count("step") == 4
    assert any("round 1, step: a node was started again" in record.getMessage() for record in caplog.records)


def test_a_node_that_has_lost_its_state_starts_again_where_the_rule_says_so(tmp_path):
    class Wiped(Restarting):
        def before(self, kind):
            if (kind, self.round, self.kind) == ("step", 1, "step"):
                for path in self.nodes[1].folder.glob("run-*/000001-*.bin"):
                    path.unlink()
                (path.parent / "answer.bin").unlink()
            super().before(kind)

    found = []
    for name, engine in (("a", {}), ("b", SECURE)):
        link = Wiped(nodes(tmp_path / name))
        link.kind = "step"
        found.append(run(tmp_path / name, values(FEDADMM, {"stale": "restart", **engine}, rounds=3), link))
    assert same(*found) < 1e-10


class Dies(Watched):
    """Client 5 is lost at the words of round 1; then the server dies, once that round's sum was opened."""

    def answered(self, i, kind, answer):
        here = (self.purpose, self.round) == ("step", 1)
        return None if here and (kind, i) == ("mask_words", 5) else answer

    def ask(self, *arguments):
        found = super().ask(*arguments)
        if (self.asks[-1], self.round) == ("measure", 2):
            raise KeyboardInterrupt
        return found


def test_a_round_that_is_asked_for_again_is_summed_over_the_same_clients(tmp_path, caplog):
    """Over others, the difference of the two sums would be client 5's upload."""

    class Without(Watched):
        def answered(self, i, kind, answer):
            return None if (kind, self.round, i) == ("step", 1, 5) else answer

    described = values(FEDADMM, {"quorum": 0.5, **SECURE}, rounds=3)
    parties = nodes(tmp_path / "b")
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "b", described, Dies(parties), folder=tmp_path / "run")
    link = Watched(parties)
    resumed = run(tmp_path / "b", described, link, folder=tmp_path / "run", resume=True)
    plain_of = values(FEDADMM, {"quorum": 0.5}, rounds=3)
    plain = run(tmp_path / "a", plain_of, Without(nodes(tmp_path / "a")))
    assert same(plain, resumed) < 1e-10
    text = "round 1, client 5 (5), step: left out: the sum was opened without it, before it was asked for again"
    assert any(text in record.getMessage() for record in caplog.records)


def test_nor_do_nodes_open_it_over_others(tmp_path):
    described = values(FEDADMM, {"quorum": 0.5, **SECURE}, rounds=3)
    parties = nodes(tmp_path / "b")
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "b", described, Dies(parties), folder=tmp_path / "run")

    class Another(Watched):
        """It does not listen to what nodes tell of it."""

        def answered(self, i, kind, answer):
            if (kind, self.round) != ("step", 1):
                return answer
            return None if i == 4 else edited(answer, summed=None)

    text = r"sum must be over clients \[0, 1, 2, 3, 4\], over whom .* before, got one over \[0, 1, 2, 3, 5\]"
    with pytest.raises(ClientError, match=text):
        run(tmp_path / "b", described, Another(parties), folder=tmp_path / "run", resume=True)


# What is refused


def test_algorithms_that_need_every_upload_are_refused_before_round_1(tmp_path):
    link = Watched(nodes(tmp_path))
    text = (
        r"^algorithm must be one whose server needs the sum .* secure = true, got fedepm, which needs each\. .*fedavg.*"
    )
    with pytest.raises(InvalidArgument, match=text) as caught:
        run(tmp_path, values("fedepm", SECURE), link)
    assert "fedepm" not in str(caught.value).split("here:")[1]
    assert "join" not in link.asks


def test_a_round_of_one_client_is_refused(tmp_path):
    text = r"^round 0, step: clients of a masked sum must be at least 2, got 1: a sum of one is its upload\."
    with pytest.raises(ClientError, match=text):
        run(tmp_path, values("fedavg", SECURE, participation=1 / CLIENTS))


@pytest.mark.parametrize(
    ("engine", "text"),
    [
        (
            {"bound": 1e-3},
            r"numbers of step must be at most 0\.001 in size, got a larger one\. Raise the engine's bound",
        ),
        ({"largest": 1e-3}, r"upload must be of norm at most 0\.001, got a longer one; it was not sent"),
    ],
)
def test_what_the_server_cannot_check_the_node_does(tmp_path, engine, text):
    with pytest.raises(ClientError, match=f"^round 0: at least 6 of 6 clients must answer, got 0.*{text}"):
        run(tmp_path, values("fedavg", {**SECURE, **engine}))


def test_an_upload_that_is_not_finite_stays_out(tmp_path, monkeypatch, caplog):
    stepped = RunAtNode._stepped

    def broken(self, message):
        made = unpack(stepped(self, message))
        if self.client in bad:
            made = made._replace(arrays=[np.full_like(a, np.nan) for a in made.arrays])
        return made.pack()

    monkeypatch.setattr(RunAtNode, "_stepped", broken)
    bad = {3}
    five = {"quorum": 5 / 6}
    plain = run(tmp_path / "a", values("fedavg", five, rounds=2))
    secure = run(tmp_path / "b", values("fedavg", {**SECURE, **five}, rounds=2))
    assert same(plain, secure) < 1e-9
    assert "client 3 (3): upload refused: it is not finite" in caplog.text
    bad = set(range(CLIENTS))
    plain, secure = (run(tmp_path / name, values("fedavg", e)) for name, e in (("c", {}), ("d", SECURE)))
    assert plain.outcome == secure.outcome
    assert "finite" in str(secure.outcome)


def test_telemetry_that_is_not_finite_stays_out(tmp_path, monkeypatch, caplog):
    """As in a plain run; where fewer are left than a sum is opened of, it is not finite."""
    put = RunAtNode._put

    def broken(self, purpose, message, arrays, *rest):
        lost = purpose == "measure" and self.client in bad
        return put(self, purpose, message, [a * np.nan for a in arrays] if lost else arrays, *rest)

    monkeypatch.setattr(RunAtNode, "_put", broken)
    bad = {3}
    history = run(tmp_path / "a", values("fedavg", SECURE, rounds=2)).history
    np.testing.assert_allclose(history.column("measured"), 1 - 1 / CLIENTS)
    assert np.isfinite(history.column("objective")).all()
    assert "client 3 (3), measure: its numbers are not finite" in caplog.text
    bad = set(range(1, CLIENTS))
    assert "finite" in run(tmp_path / "b", values("fedavg", SECURE)).outcome


def test_a_run_that_leaves_all_bounds_ends_as_the_plain_one(tmp_path):
    wild = {"name": "fedsgd", "rate": 1e300}
    plain, secure = (
        run(tmp_path / name, values(wild, e)) for name, e in (("a", {}), ("b", {**SECURE, "bound": 2.0**40}))
    )
    assert plain.outcome == secure.outcome


def test_a_node_of_a_secure_run_answers_nothing_without_masks(tmp_path):
    class Curious(Watched):
        def ask(self, questions, *rest):
            plain = {
                i: q._replace(values={k: v for k, v in q.values.items() if k != "sum"}) for i, q in questions.items()
            }
            return super().ask(plain, *rest)

    text = "question for measure must invite to a masked sum in a secure run, got one that does not"
    with pytest.raises(ClientError, match=text):
        run(tmp_path, values("fedavg", SECURE), Curious(nodes(tmp_path)))


class Forging(Watched):
    """Client 2 sends something else, in the sum of round 1; `forge` says what, by the kind of the question."""

    forge: tuple = ("", None)

    def answered(self, i, kind, answer):
        here = i == 2 and (self.purpose, self.round, kind) == ("step", 1, self.forge[0])
        return self.forge[1](answer) if here else answer


def other_share(answer):
    seeds = dict(answer.values["seeds"])
    seeds["0"] = bytes(shamir.SHARE_BYTES).hex()
    return edited(answer, seeds=seeds)


FORGED = {
    "small order": (
        "step",
        lambda a: edited(a, keys={"0": "00" * 32, "1": a.values["keys"]["1"]}),
        "point of large order",
    ),
    "no keys": ("step", lambda a: edited(a, keys=7), "keys of a masked sum must be bytes by client"),
    "no receivers": ("mask_shares", lambda a: edited(a, sealed={}), r"receivers in Shares from client 2 must be"),
    "other words": (
        "mask_words",
        lambda a: a._replace(arrays=[a.arrays[0][:-1]]),
        "words in Masked from client 2 must be",
    ),
    "as numbers": (
        "mask_words",
        lambda a: a._replace(arrays=[a.arrays[0] * 1.0]),
        "words in Masked from client 2 must be",
    ),
    "no seeds": ("mask_reveal", lambda a: edited(a, seeds={}), "seeds in Reveal from client 2 must be of"),
    "wrong share": (
        "mask_reveal",
        other_share,
        "the share of 0 that it holds is wrong; it was not used: seed of client 0",
    ),
}


def test_whose_secret_cannot_be_joined_is_named(tmp_path, slow):
    """Client 0 gave wrong shares of its own to two: neither of them is blamed."""

    class Dealt(Watched):
        def answered(self, i, kind, answer):
            wrong = i in (2, 3) and (self.purpose, self.round, kind) == ("step", 1, "mask_reveal")
            return other_share(answer) if wrong else answer

    text = r"^round 1, step: masked sum could not be opened: seed of client 0 .* look at 0, start it again, and resume"
    with pytest.raises(ClientError, match=text):
        run(tmp_path, values("fedsgd", {"quorum": 0.5, **SECURE}, rounds=2), Dealt(nodes(tmp_path)))


@pytest.mark.parametrize("name", FORGED)
def test_a_message_that_is_not_right_is_named_and_the_round_goes_on(tmp_path, slow, name, caplog):
    kind, change, text = FORGED[name]
    link = Forging(nodes(tmp_path))
    link.forge = (kind, change)
    done = run(tmp_path, values("fedsgd", {"quorum": 0.5, **SECURE}, rounds=2), link)
    found = [record.getMessage() for record in caplog.records if "round 1, client 2 (2)" in record.getMessage()]
    assert len(found) == 1
    assert text in found[0]
    assert done.history.column("participants").tolist() == [0, 6, 6 if kind == "mask_reveal" else 5]


def test_settings():
    from fedpact.engines import FlowerEngine

    with pytest.raises(InvalidArgument, match=r"^threshold must be a fraction above 1/2 and at most 1, got 0\.5\."):
        FlowerEngine(threshold=0.5)
    with pytest.raises(InvalidArgument, match=r"^bound must be a number from 2⁻⁴⁰ to 2⁴⁰, got 0\."):
        FlowerEngine(bound=0)
    for name, value in (("threshold", 0.9), ("bound", 10.0)):
        sentence = rf"^{name} must be left out without secure = true, got {value}\. It is of masked sums: leave it out"
        with pytest.raises(InvalidArgument, match=sentence):
            FlowerEngine(**{name: value})
        assert FlowerEngine(secure=True, **{name: value}) != FlowerEngine(secure=True)
    with pytest.raises(InvalidArgument, match=r'^late must be "drop" with secure = true, got \'use\''):
        FlowerEngine(secure=True, late="use")
    with pytest.raises(
        InvalidArgument, match=r"^secure must be false here, got True\. Masked sums are for data split by rows"
    ):
        FlowerEngine(secure=True).over(Direct([]))


def test_a_third_is_another_each_round():
    assert set().union(*(third(t) for t in range(3))) == set(range(CLIENTS))
