"""How questions reach nodes."""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from fedpact.core.wire import Message, Refused, unpack

log = logging.getLogger("fedpact")
#: Seconds until a node that failed, or could not be sent to, is asked again.
AGAIN = 3.0
#: Seconds of silence until a question is sent once more; then twice as many, and so on.
SILENCE = 60.0


class Telling:
    """What is to be delivered before a node's next question, with it."""

    def __init__(self) -> None:
        self.session = secrets.token_hex(16)  # nodes tell runs apart by it
        self._told: dict[int, list[bytes]] = {}

    def tell(self, questions: Mapping[int, Message]) -> None:
        """See `engines.flower.Link`."""
        for client, message in questions.items():
            self._told.setdefault(client, []).append(self._of_session(message))

    def _of_session(self, message: Message) -> bytes:
        return message._replace(values={**message.values, "server": self.session}).pack()

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

    def ask(self, questions: Mapping[int, Message], deadline: float, enough: int, patience: float) -> dict[int, Any]:
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


class Grid(Telling):
    """Nodes behind Flower's grid. `post` makes a Flower message of bytes, `open` takes the bytes out of one.

    Questions are pushed and answers pulled, so that what comes after a deadline is not lost: `late` has it. A node that
    was lost with a question is asked again when it is back, as long as the round waits for it. Flower tells of the
    loss only to who pulls while the node is gone; of one that was soon back nothing comes, so silence is asked again
    too. A node that is only slow gives its kept answer to the second question.
    """

    EVERY = 0.5

    def __init__(self, grid: Any, post: Callable[[bytes, int, str], Any], open_: Callable[[Any], Any]) -> None:
        super().__init__()
        self.grid, self.post, self.open = grid, post, open_
        self.names: list[str] = []
        self.nodes: list[int] = []  # node ids by client
        self.waiting: dict[str, tuple[int, str]] = {}  # message id → client and kind, of rounds that went on

    def ask(self, questions: Mapping[int, Message], deadline: float, enough: int, patience: float) -> dict[int, Any]:
        """See `engines.flower.Link`."""
        begun = time.monotonic()
        contents = {client: self.packed(client, message) for client, message in questions.items()}
        kinds = {client: message.kind for client, message in questions.items()}
        again: dict[int, float] = {}  # who failed, and when to ask again
        asked, silence = dict.fromkeys(questions, begun), dict.fromkeys(questions, SILENCE)
        pending = self._push(contents, kinds, again)
        answers: dict[int, Any] = {}
        while pending or again:
            for reply in self.grid.pull_messages(list(pending)):
                client = pending.pop(reply.metadata.reply_to_message_id, None)
                if client is None or client in answers:
                    continue
                try:
                    answers[client] = unpack(self.open(reply), questions[client].kind)
                except Refused as refused:
                    answers[client] = refused
                except LookupError as lost:  # Flower's own error: the node is gone, or its process failed
                    if client not in pending.values():
                        again[client] = time.monotonic() + AGAIN
                        log.warning("node %r did not answer: %s", self.names[client], lost)
            pending = {number: client for number, client in pending.items() if client not in answers}
            again = {client: when for client, when in again.items() if client not in answers}
            spent = time.monotonic() - begun
            good = sum(isinstance(answer, Message) and answer.kind != "error" for answer in answers.values())
            if spent >= deadline and good >= enough:
                break
            if spent >= patience:
                break
            now = time.monotonic()
            for client in set(pending.values()) - set(again):
                if now - asked[client] >= silence[client]:
                    log.warning("node %r is silent for %.0f s; it is asked again", self.names[client], silence[client])
                    again[client], silence[client] = now, 2 * silence[client]
            due = [client for client, when in again.items() if when <= now]
            if due:
                for client in due:
                    del again[client]
                    asked[client] = now
                pending |= self._push({client: contents[client] for client in due}, kinds, again)
            if pending or again:
                time.sleep(self.EVERY)
        newest = {client: number for number, client in pending.items()}
        self.waiting |= {number: (client, kinds[client]) for client, number in newest.items()}
        return answers

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
                log.warning(
                    "node %r could not be sent to: it is not there, or the message is too large", self.names[client]
                )
                again[client] = time.monotonic() + AGAIN
        return out

    def late(self) -> list[tuple[int, Any]]:
        """What has come since for steps that were given up; other answers that came late are of no use."""
        out: list[tuple[int, Any]] = []
        for reply in self.grid.pull_messages(list(self.waiting)) if self.waiting else ():
            client, kind = self.waiting.pop(reply.metadata.reply_to_message_id, (None, ""))
            if client is None or kind != "step":
                continue
            try:
                out.append((client, unpack(self.open(reply), "step")))
            except (Refused, LookupError) as refused:
                log.warning("late answer of node %r: %s", self.names[client], refused)
        return out
