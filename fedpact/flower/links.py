"""How questions reach nodes."""

from __future__ import annotations

import logging
import secrets
import ssl
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from fedpact import __version__
from fedpact.core.wire import VERSION, Enough, Message, Refused, suffice, unpack
from fedpact.flower.signed import Signers

log = logging.getLogger("fedpact")
#: Seconds until a node that failed, or could not be sent to, is asked again.
AGAIN = 3.0
#: How often in a row a node must have failed to count as gone: a round that has enough answers goes on without it.
GONE = 3
#: Seconds of silence until a question is sent once more; then twice as many, and so on.
SILENCE = 60.0
#: The same for the first time, of a node that answered its last question only when it was asked once more.
NUDGE = 5.0


class Telling:
    """What is to be delivered before a node's next question, with it."""

    names: list[str]

    def __init__(self) -> None:
        self.session = secrets.token_hex(16)  # nodes tell runs apart by it
        self._told: dict[int, list[bytes]] = {}

    def tell(self, questions: Mapping[int, Message]) -> None:
        """See `engines.flower.Link`."""
        for client, message in questions.items():
            self._told.setdefault(client, []).append(self._of_session(message))

    def anew(self) -> None:
        """See `engines.flower.Link`."""
        before, self.session = self.session, secrets.token_hex(16)
        self._told = {}
        self.tell({client: Message("forget", {"session": before}) for client in range(len(self.names))})

    def _of_session(self, message: Message) -> bytes:
        return message._replace(values={**message.values, "server": self.session, VERSION: __version__}).pack()

    def packed(self, client: int, message: Message) -> bytes:
        """The question, with what was to be told before it."""
        before = self._told.pop(client, [])
        content = self._of_session(message)
        if not before:
            return content
        several = [np.frombuffer(one, np.uint8) for one in (*before, content)]
        return Message("several", {"server": self.session}, several).pack()


class Direct(Telling):
    """Nodes of the same process, one after the other: for tests, and to see a protocol without a network."""

    def __init__(self, nodes: Sequence[Any]) -> None:
        super().__init__()
        self.nodes = list(nodes)
        self.names: list[str] = [node.name for node in nodes]
        self.sent: list[bytes] = []  # everything that crossed, both ways, where `record` is set
        self.record = False

    def ask(self, questions: Mapping[int, Message], deadline: float, enough: Enough, patience: float) -> dict[int, Any]:
        """Everyone's answer."""
        return {i: self._answer(i, message) for i, message in questions.items()}

    def _answer(self, i: int, message: Message) -> Any:
        content = self.packed(i, message)
        answer = self.nodes[i].answer(content)
        if self.record:
            self.sent += [content, answer]
        try:
            return unpack(answer, message.kind)
        except Refused as refused:
            return refused

    def late(self) -> list[tuple[int, Any]]:
        """Nothing comes late."""
        return []


class Waiting(NamedTuple):
    """A question that was given up, and the messages that asked the same: the first answer to any of them counts."""

    client: int
    kind: str
    question: bytes
    same: list[str]


class Grid(Telling):
    """Nodes behind Flower's grid. `post` makes a Flower message of bytes, `open` takes the bytes out of one.

    Questions are pushed and answers pulled, so that what comes after a deadline is not lost: `late` has it. A node that
    was lost with a question is asked again when it is back, as long as the round waits for it. Flower tells of the
    loss only to who pulls while the node is gone; of one that was soon back nothing comes, so silence is asked again
    too. A node that is only slow gives its kept answer to the second question.

    Flower's SuperNode sends what answers it has after it has taken a message. Where an app has answered twice, one may
    be left over, and every later answer then waits for the message after its own: such a node is `behind`, and is asked
    once more soon.
    """

    EVERY = 0.5

    def __init__(self, grid: Any, post: Callable[[bytes, int, str], Any], open_: Callable[[Any], Any]) -> None:
        super().__init__()
        self.grid, self.post, self.open = grid, post, open_
        self.names: list[str] = []
        self.nodes: list[int] = []  # node ids by client
        self.signers = Signers()
        self.waiting: dict[str, Waiting] = {}  # by message id: questions of rounds that went on
        self.singly = False  # whether replies are pulled one by one
        self.behind: set[int] = set()  # who answered the last question when it was asked once more
        self.why: dict[int, str] = {}  # of the last question: who failed last for which reason, and has not answered

    def ask(self, questions: Mapping[int, Message], deadline: float, enough: Enough, patience: float) -> dict[int, Any]:
        """See `engines.flower.Link`."""
        begun, self.why = time.monotonic(), {}
        contents = {client: self.packed(client, message) for client, message in questions.items()}
        kinds = {client: message.kind for client, message in questions.items()}
        again: dict[int, float] = {}  # who failed, and when to ask again
        failures = dict.fromkeys(questions, 0)
        asked = dict.fromkeys(questions, begun)
        silence = {client: NUDGE if client in self.behind else SILENCE for client in questions}
        pending = self._push(contents, kinds, again)
        answers: dict[int, Any] = {}
        while pending or again:
            for number, reply in self._pull(list(pending)):
                client = pending.pop(number, None)
                if client is None or client in answers:
                    continue
                (self.behind.add if client in pending.values() else self.behind.discard)(client)
                try:
                    answers[client] = self._read(reply, client, contents[client], kinds[client])
                except Refused as refused:
                    answers[client] = refused
                except LookupError as lost:  # Flower's own error: the node is gone, or its process failed
                    if client not in pending.values():
                        again[client] = time.monotonic() + AGAIN
                        failures[client] += 1
                        log.warning("node %r did not answer: %s", self.names[client], lost)
                        self.why[client] = str(lost)
            pending = {number: client for number, client in pending.items() if client not in answers}
            again = {client: when for client, when in again.items() if client not in answers}
            spent = time.monotonic() - begun
            gone = all(failures[client] >= GONE for client in {*pending.values(), *again})
            if spent >= patience or ((spent >= deadline or gone) and suffice(answers, enough)):
                break
            now = time.monotonic()
            for client in set(pending.values()) - set(again):
                if now - asked[client] >= silence[client]:
                    log.warning("node %r is silent for %.0f s; it is asked again", self.names[client], silence[client])
                    again[client], silence[client] = now, max(SILENCE, 2 * silence[client])
            due = [client for client, when in again.items() if when <= now]
            if due:
                for client in due:
                    del again[client]
                    asked[client] = now
                pending |= self._push({client: contents[client] for client in due}, kinds, again)
            if pending or again:
                time.sleep(self.EVERY)
        self.why = {client: why for client, why in self.why.items() if client not in answers}
        for number, client in pending.items():
            same = [other for other, who in pending.items() if who == client]
            self.waiting[number] = Waiting(client, kinds[client], contents[client], same)
        return answers

    def _pull(self, numbers: Sequence[str]) -> Iterator[tuple[str, Any]]:
        """Replies, by the messages that they answer; for one that Flower cannot read, the error that it raises.

        It raises for all it was asked for, and what it has handed out it has no more. So after the first every reply is
        pulled by itself: those lost with it are told of as lost, and asked for again, and then it is known whose it is.
        """
        for some in [[number] for number in numbers] if self.singly else [list(numbers)]:
            try:
                replies = [(reply.metadata.reply_to_message_id, reply) for reply in self.grid.pull_messages(some)]
            except Exception as error:
                if of_the_link(error):
                    raise
                log.warning("a reply could not be read by Flower (%s: %s)", type(error).__name__, error)
                self.singly, replies = True, [(number, error) for number in some if len(some) == 1]
            yield from replies

    def _read(self, reply: Any, client: int, question: bytes, kind: str) -> Message:
        """What a node has answered, if it is the one that was asked."""
        if isinstance(reply, Exception):
            name, got = self.names[client], type(reply).__name__
            raise Refused(f"answer of node {name!r} must be one that Flower can read, got another ({got}).")
        content, sender, node = self.open(reply), reply.metadata.src_node_id, self.nodes[client]
        if sender != node:
            name = self.names[client]
            raise Refused(f"answer of node {name!r} must come from Flower's node {node}, got one from node {sender}.")
        return self.signers.read(node, question, content, kind, f"node {self.names[client]!r}")

    def _push(self, contents: Mapping[int, bytes], kinds: Mapping[int, str], again: dict[int, float]) -> dict[str, int]:
        """Send; the messages' ids. Who could not be sent to is asked again later."""
        posts = [self.post(content, self.nodes[client], kinds[client]) for client, content in contents.items()]
        ids = list(self.grid.push_messages(posts))
        ids += [None] * (len(posts) - len(ids))
        out = {}
        for number, client in zip(ids, contents, strict=True):
            if number:
                out[number] = client
            else:
                self.why[client] = "it is not there, or the message is too large"
                log.warning("node %r could not be sent to: %s", self.names[client], self.why[client])
                again[client] = time.monotonic() + AGAIN
        return out

    def late(self) -> list[tuple[int, Any]]:
        """What has come since for steps that were given up; other answers that came late are of no use."""
        out: list[tuple[int, Any]] = []
        for number, reply in self._pull(list(self.waiting)) if self.waiting else ():
            one = self.waiting.pop(number, None)
            if one is None or one.kind != "step":
                continue
            try:
                out.append((one.client, self._read(reply, one.client, one.question, "step")))
            except Refused as refused:  # told of as one that is dropped; another copy of it may still come
                out.append((one.client, refused))
                continue
            except LookupError as lost:
                log.warning("late answer of node %r: %s", self.names[one.client], lost)
                continue
            for other in one.same:
                self.waiting.pop(other, None)
        return out


def of_the_link(error: BaseException | None) -> bool:
    """Whether it is of the connection to the SuperLink, by which Flower's own calls fail while that one dies."""
    while error is not None:
        kinds = {kind.__module__.partition(".")[0] for kind in type(error).__mro__}
        if isinstance(error, (ConnectionError, ssl.SSLError)) or kinds & {"httpx", "httpcore"}:
            return True
        error = error.__cause__
    return False
