"""The link over Flower: replies that come twice, late or are none of ours; nodes that fail are asked again."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest

from fedpact.core.wire import Message, Refused
from fedpact.flower import links
from fedpact.flower.links import Grid
from fedpact.flower.signed import PUBLIC, Signer, Signers


class Post:
    """A grid as Flower has one: messages get numbers, and `replies` says what becomes of each, in the order pushed."""

    def __init__(self, *replies):
        self.replies, self.pushed, self.come = list(replies), [], []
        self.sender = None  # of all replies, in the place of who was asked

    def push_messages(self, posts):
        numbers = []
        for post in posts:
            reply = self.replies.pop(0)
            number = None if reply == "lost" else f"m{len(self.pushed)}"
            self.pushed.append(post)
            numbers.append(number)
            for one in reply if isinstance(reply, list) else []:
                self.come.append((number, one))
        return numbers

    def pull_messages(self, numbers):
        found = [pair for pair in self.come if pair[0] in numbers]
        self.come = [pair for pair in self.come if pair[0] not in numbers]
        told = lambda n: SimpleNamespace(reply_to_message_id=n, src_node_id=self.sender or self.pushed[int(n[1:])][0])
        return [SimpleNamespace(metadata=told(n), content=self.signed(n, c)) for n, c in found]

    def signed(self, number, content):
        """As the node asked by this message signs it."""
        node, question = self.pushed[int(number[1:])]
        return content if isinstance(content, Exception) else signer(node).sign(question, content)


def signer(node):
    return Signer(str(node).encode())


def opened(reply):
    if isinstance(reply.content, Exception):
        raise reply.content
    return reply.content


@pytest.fixture
def grid(monkeypatch):
    monkeypatch.setattr(links, "AGAIN", 0.01)
    monkeypatch.setattr(Grid, "EVERY", 0.01)

    def made(*replies, nodes=1):
        link = Grid(Post(*replies), lambda content, node, kind: (node, content), opened)
        link.nodes, link.names = list(range(100, 100 + nodes)), [f"n{k}" for k in range(nodes)]
        link.signers._keys = {node: signer(node).public for node in link.nodes}
        return link

    return made


@pytest.fixture
def soon(monkeypatch):
    monkeypatch.setattr(links, "SILENCE", 0.1)


STEP = Message("step", {"round": 0})
ANSWER = Message("step", {"round": 0, "client": 0}).pack()


def ask(link, clients=1, deadline=1.0, enough=1, patience=1.0):
    return link.ask(dict.fromkeys(range(clients), STEP), deadline, enough, patience)


def test_an_answer(grid):
    assert ask(grid([ANSWER]))[0].values["client"] == 0


def test_the_second_of_two_replies_is_not_taken(grid):
    other = Message("step", {"round": 0, "client": 7}).pack()
    link = grid([ANSWER, other])
    assert ask(link)[0].values["client"] == 0
    assert link.late() == []


def test_a_node_that_failed_or_could_not_be_sent_to_is_asked_again(grid, caplog):
    link = grid("lost", [LookupError("Flower's error 0: gone")], [ANSWER])
    assert ask(link)[0].kind == "step"
    assert len(link.grid.pushed) == 3
    assert "could not be sent to" in caplog.text
    assert "did not answer: Flower's error 0: gone" in caplog.text


def test_a_node_that_fails_again_and_again_holds_nobody_once_there_are_enough(grid, monkeypatch):
    """A dead node would else cost every exchange its whole deadline. Where everyone is needed it is waited for."""
    gone = [LookupError("Flower's error 5: Node Unavailable")]
    link = grid(gone, [ANSWER], *[gone] * 2, nodes=2)
    begun = time.monotonic()
    assert set(ask(link, clients=2, deadline=5.0, patience=5.0)) == {1}
    assert time.monotonic() - begun < 2
    assert (len(link.grid.pushed), link.why) == (2 + links.GONE - 1, {0: str(gone[0])})
    link = grid(gone, [ANSWER], *[gone] * 5, [ANSWER], nodes=2)
    assert set(ask(link, clients=2, enough=2, deadline=0.05, patience=5.0)) == {0, 1}
    link = grid(gone, [], *[gone] * 40, nodes=2)
    assert set(ask(link, clients=2, enough=0, deadline=0.3, patience=5.0)) == set()  # the other one may be slow


def test_a_question_that_was_lost_without_a_word_is_asked_again(grid, soon, caplog):
    """Its node was gone and back between two looks: neither an answer nor Flower's error comes to the first."""
    link = grid([], [ANSWER])
    assert ask(link)[0].kind == "step"
    assert len(link.grid.pushed) == 2
    assert link.waiting == {}
    assert "node 'n0' is silent for 0 s; it is asked again" in caplog.text


def test_silence_is_asked_less_and_less_often(grid, soon):
    link = grid(*[[]] * 9)
    assert ask(link, enough=0) == {}
    assert len(link.grid.pushed) == 4  # at 0, 0.1, 0.3 and 0.7 s of 1


def test_silence_is_counted_from_the_last_question(grid, monkeypatch):
    """The node failed and was asked again after 0.15 s: 0.2 s after the first question it is not silent yet."""
    monkeypatch.setattr(links, "SILENCE", 0.2)
    monkeypatch.setattr(links, "AGAIN", 0.15)
    link = grid([LookupError("gone")], [])
    assert ask(link, enough=0, deadline=0.3, patience=0.3) == {}
    assert len(link.grid.pushed) == 2


def test_a_node_that_was_only_slow_is_heard_once(grid, soon):
    """Both questions are answered: in time, or late."""
    link = grid([], [])
    pull = link.grid.pull_messages
    link.grid.pull_messages = lambda numbers: pull(numbers if len(link.grid.pushed) == 2 else [])
    link.grid.come += [("m0", ANSWER), ("m1", ANSWER)]
    assert set(ask(link)) == {0}
    assert (link.waiting, link.late()) == ({}, [])
    link = grid([], [])
    assert ask(link, deadline=0.2, enough=0, patience=0.2) == {}
    link.grid.come += [("m0", ANSWER), ("m1", ANSWER)]
    assert len(link.late()) == 1
    assert link.late() == []


def test_a_node_whose_answers_wait_for_the_next_message_is_asked_once_more_soon(grid, monkeypatch):
    """Flower's, where an answer is left over from before. It takes a minute once; after that seconds, until it is so no
    longer."""
    monkeypatch.setattr(links, "SILENCE", 0.5)
    monkeypatch.setattr(links, "NUDGE", 0.05)
    link = grid(*[[]] * 9)
    push = link.grid.push_messages

    def pushed(posts):
        if link.grid.pushed:
            link.grid.come.append((f"m{len(link.grid.pushed) - 1}", ANSWER))
        return push(posts)

    link.grid.push_messages = pushed
    spent = []
    for _ in range(3):
        begun = time.monotonic()
        assert set(ask(link, patience=2.0, deadline=2.0)) == {0}
        spent.append(time.monotonic() - begun)
    assert spent[0] >= 0.5 > max(spent[1:])
    assert len(link.grid.pushed) == 6
    link.grid.push_messages = push
    link.grid.replies[:2] = [[ANSWER], []]
    assert set(ask(link)) == {0}
    assert ask(link, enough=0, deadline=0.3, patience=0.3) == {}
    assert len(link.grid.pushed) == 8


@pytest.mark.parametrize("number", ["m0", "m1"])
def test_a_late_answer_to_either_of_two_questions_is_heard(grid, soon, number):
    link = grid([], [])
    assert ask(link, deadline=0.2, enough=0, patience=0.2) == {}
    link.grid.come.append((number, ANSWER))
    assert [client for client, _ in link.late()] == [0]
    assert link.waiting == {}


def test_one_of_two_questions_that_fails_late_does_not_lose_the_other(grid, soon):
    link = grid([], [])
    assert ask(link, deadline=0.2, enough=0, patience=0.2) == {}
    link.grid.come += [("m0", LookupError("gone")), ("m1", ANSWER)]
    assert [client for client, _ in link.late()] == [0]


def test_who_answers_while_a_second_question_could_not_be_sent_is_not_asked_a_third_time(grid, soon, monkeypatch):
    monkeypatch.setattr(links, "AGAIN", 0.2)
    link = grid([], "lost", [ANSWER])
    pull = link.grid.pull_messages

    def slow(numbers):
        if len(link.grid.pushed) == 2:
            link.grid.come.append(("m0", ANSWER))
        return pull(numbers)

    link.grid.pull_messages = slow
    assert ask(link)[0].kind == "step"
    assert len(link.grid.pushed) == 2


def test_the_errors_of_two_questions_are_one_failure(grid, soon, caplog):
    """The node goes for good while two of its questions wait: Flower gives an error for each, and it is asked once."""
    link = grid([], [], [ANSWER])
    pull = link.grid.pull_messages

    def gone(numbers):
        if len(link.grid.pushed) == 2:
            link.grid.come += [(n, LookupError("gone")) for n in numbers]
        return pull(numbers)

    link.grid.pull_messages = gone
    assert ask(link)[0].kind == "step"
    assert len(link.grid.pushed) == 3
    assert caplog.text.count("did not answer: gone") == 1


def test_what_is_no_message_of_ours_is_refused_and_not_asked_again(grid):
    link = grid([Refused("reply must be a message of fedpact, got another (KeyError).")], [b"garbage"], nodes=2)
    found = ask(link, clients=2)
    assert "message of fedpact" in str(found[0])
    assert "message must be whole" in str(found[1])
    assert len(link.grid.pushed) == 2


class Unread(Post):
    """As Flower does, it raises for all of a pull in which one reply cannot be read, and then has none of them."""

    def pull_messages(self, numbers):
        found = super().pull_messages(numbers)
        if any(isinstance(reply.content, ValueError) for reply in found):
            kept = [reply.metadata.reply_to_message_id for reply in found if len(found) > 1]
            self.come += [(number, LookupError("no such message")) for number in kept]
            raise ValueError("no object of Flower")
        return found


def test_a_reply_that_flower_cannot_read_is_refused_by_name_and_the_others_are_heard(grid):
    link = grid(nodes=2)
    link.grid = Unread([ValueError()], [ANSWER], [ValueError()], [ANSWER])
    found = ask(link, clients=2, enough=2)
    assert str(found[0]) == "answer of node 'n0' must be one that Flower can read, got another (ValueError)."
    assert found[1].values["client"] == 0
    link.grid.replies += [[], [ANSWER]]
    assert set(ask(link, clients=2, deadline=0.05, enough=1, patience=0.05)) == {1}
    link.grid.come.append(("m4", ValueError()))
    assert [(client, type(said)) for client, said in link.late()] == [(0, Refused)]


def test_a_link_that_is_lost_is_no_reply(grid):
    link = grid([])
    link.grid.pull_messages = lambda numbers: (_ for _ in ()).throw(ConnectionResetError())
    with pytest.raises(ConnectionResetError):
        ask(link)


def test_an_answer_of_another_node_is_refused_by_name(grid):
    link = grid([ANSWER])
    link.grid.sender = 7
    sentence = "answer of node 'n0' must come from Flower's node 100, got one from node 7."
    assert str(ask(link)[0]) == sentence
    link = grid([])
    assert ask(link, deadline=0.05, enough=0, patience=0.05) == {}
    link.grid.sender = 7
    link.grid.come.append(("m0", ANSWER))
    assert [(client, str(said)) for client, said in link.late()] == [(0, sentence)]


def test_a_step_that_comes_after_its_deadline_is_late_and_other_kinds_are_not(grid):
    link = grid([], [ANSWER], nodes=2)
    assert set(ask(link, clients=2, deadline=0.05, enough=1)) == {1}
    link.grid.come.append(("m0", ANSWER))
    ((client, message),) = link.late()
    assert (client, message.values["client"]) == (0, 0)
    link = grid([])
    assert link.ask({0: Message("measure", {})}, 0.05, 0, 0.05) == {}
    link.grid.come.append(("m0", Message("measure", {}).pack()))
    assert link.late() == []


def test_answers_that_say_no_do_not_make_the_quorum(grid):
    no = Message("error", {"sentence": "no", "why": ""}).pack()
    link = grid([no], [], nodes=2)
    assert set(ask(link, clients=2, deadline=0.02, enough=1, patience=0.2)) == {0}


def test_nor_do_answers_that_the_question_has_no_use_for(grid):
    """Where the caller says what counts, the others are waited for until there is enough of that."""
    link = grid([ANSWER], [], nodes=2)
    assert set(ask(link, clients=2, deadline=0.02, enough=lambda answers: 0 in answers, patience=9.0)) == {0}
    late = Message("step", {"round": 0, "client": 1}).pack()
    link = grid([ANSWER], [], nodes=2)
    asked = []

    def enough(answers):
        asked.append(set(answers))
        if len(asked) == 1:
            link.grid.come.append(("m1", late))
        return 1 in answers

    assert set(ask(link, clients=2, deadline=0.02, enough=enough, patience=9.0)) == {0, 1}
    assert asked[0] == {0}


# Who has signed

OTHERS = (
    "answer of node 'n0' must be signed by the key that it began with, got one that is not. "
    "Give it back the node.key it had."
)


def test_an_answer_that_another_node_has_signed_is_refused_by_name(grid, monkeypatch):
    """It comes as node 100's: Flower lets every registered node say so that knows the message's number."""
    link = grid([ANSWER], [ANSWER])
    monkeypatch.setattr(link.grid, "signed", lambda number, content: signer(101).sign(link.grid.pushed[0][1], content))
    assert str(ask(link)[0]) == OTHERS
    monkeypatch.undo()
    assert ask(link)[0].kind == "step"


def test_so_is_one_to_another_question_or_that_was_changed_on_the_way(grid, monkeypatch):
    other = Message("step", {"round": 1}).pack()
    changed = Message("step", {"round": 0, "client": 9}).pack()
    for signed in (
        lambda link, content: signer(100).sign(other, content),
        lambda link, content: signer(100).sign(link.grid.pushed[0][1], content)[:64] + changed,
        lambda link, content: content,
    ):
        link = grid([ANSWER])
        monkeypatch.setattr(
            link.grid, "signed", lambda number, content, link=link, signed=signed: signed(link, content)
        )
        assert isinstance(ask(link)[0], Refused)
    link = grid([])
    assert ask(link, deadline=0.05, enough=0, patience=0.05) == {}
    monkeypatch.setattr(link.grid, "signed", lambda number, content: signer(101).sign(link.grid.pushed[0][1], content))
    link.grid.come.append(("m0", ANSWER))
    assert [(client, str(said)) for client, said in link.late()] == [(0, OTHERS)]


def test_a_hello_brings_the_key_that_counts_from_then_on(grid, monkeypatch):
    hello = lambda node: Message("hello", {PUBLIC: signer(node).public}).pack()
    greet = lambda link: link.ask({0: Message("hello", {})}, 1.0, 1, 1.0)[0]
    link = grid([hello(100)], [hello(101)], [ANSWER])
    link.signers = Signers()
    assert greet(link).kind == "hello"
    with monkeypatch.context() as patch:  # whose disk was lost with its key
        patch.setattr(link.grid, "signed", lambda number, content: signer(101).sign(link.grid.pushed[-1][1], content))
        assert str(greet(link)) == OTHERS
    assert ask(link)[0].kind == "step"
    link = grid([hello(101)])  # a key that the answer is not signed by
    link.signers = Signers()
    assert str(greet(link)) == OTHERS


def test_a_node_that_could_not_say_hello_is_told_of_by_its_sentence(grid):
    """It may have no folder, hence no key; nothing of such an answer is used."""
    link = grid([Message("error", {"sentence": "no", "why": ""}).pack()], [ANSWER])
    link.signers = Signers()
    assert ask(link, enough=0, deadline=0.05)[0].kind == "error"
    assert str(ask(link)[0]) == OTHERS
