"""A federation in one process, whose link loses, changes or remembers answers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from fedpact.core.wire import Message
from fedpact.flower.links import Direct
from fedpact.flower.node import Node
from fedpact.flower.run_at_node import RunAtNode
from fedpact.flower.server import federate

CLIENTS = 6
BASE = {
    "data": {"name": "synthetic", "rows": 40 * CLIENTS, "features": 5},
    "split": {"how": "iid", "clients": CLIENTS, "seed": 0},
    "problem": {"name": "logistic", "l2": 1e-2, "intercept": True},
}


def values(algorithm: Any, engine: dict[str, Any], **run: Any) -> dict[str, Any]:
    algorithm = {"name": algorithm} if isinstance(algorithm, str) else algorithm
    return {
        **BASE,
        "algorithm": algorithm,
        "run": {"rounds": 5, "seed": 0, "engine": {"name": "flower", **engine}, **run},
    }


_MADE: dict[str, Any] = {}
_INIT = RunAtNode.__init__


def shared_programs(self: RunAtNode, node: Node, told: Message) -> None:
    """RunAtNode's __init__, with the programs of the node that was first: all nodes have as many rows."""
    _INIT(self, node, told)
    given = told.values["experiment"]
    decides = {name: given["run"].get(name) for name in ("participation", "precision", "telemetry")}
    key = json.dumps([{**given, "run": decides}, self.loop.scored])
    self._join, self._step, self._measure = _MADE.setdefault(key, (self._join, self._step, self._measure))


def nodes(folder: Path, clients: int = CLIENTS) -> list[Node]:
    return [Node({"client": i}, folder / str(i)) for i in range(clients)]


class Watched(Direct):
    """Tells which sum a question belongs to, and lets a test put in its own hand: `answered` may change an answer,
    or lose it (None).
    """

    def __init__(self, parties: list[Any]) -> None:
        super().__init__(parties)
        self.asks: list[str] = []
        self.purpose, self.round = "", 0

    def ask(self, questions, deadline, enough, patience):
        first = next(iter(questions.values()))
        self.asks.append(first.kind)
        if not first.kind.startswith("mask_"):
            self.purpose, self.round = first.kind, first.values.get("round", 0)
        self.before(first.kind)
        answers = super().ask(questions, deadline, enough, patience)
        changed = {i: self.answered(i, first.kind, answer) for i, answer in answers.items()}
        return {i: answer for i, answer in changed.items() if answer is not None}

    def before(self, kind: str) -> None:
        """Called before anyone is asked."""

    def answered(self, i: int, kind: str, answer: Any) -> Any:
        return answer


def third(t: int) -> set[int]:
    """Who is lost in a round: another third each time."""
    return {(2 * t) % CLIENTS, (2 * t + 1) % CLIENTS}


class Losing(Watched):
    """Loses the answers of a third of the clients, in every round, to one kind of question of the round's sum."""

    def __init__(self, parties: list[Any], kind: str | None) -> None:
        super().__init__(parties)
        self.kind, self.lost = kind, 0

    def answered(self, i, kind, answer):
        if self.purpose == "step" and kind == self.kind and i in third(self.round):
            self.lost += 1
            return None
        return answer


def run(place: Path, described: dict[str, Any], link: Any = None, **options: Any) -> Any:
    return federate(described, link or Direct(nodes(place)), **options)


def same(one: Any, other: Any, but: tuple[str, ...] = ()) -> float:
    """Every column of two runs' histories agrees to 1e-6; the largest difference."""
    worst = 0.0
    for name in one.history.columns:
        if name in ("seconds", *but):
            continue
        a, b = one.history.column(name), other.history.column(name)
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-6, err_msg=name)
        worst = max(worst, float(np.max(np.abs(a - b), initial=0.0, where=np.isfinite(a))))
    return worst


def edited(message: Message, **changes: Any) -> Message:
    return message._replace(values={**message.values, **changes})
