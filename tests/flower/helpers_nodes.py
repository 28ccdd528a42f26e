"""A federation in one process: real nodes, real files, a link that can lose, change and delay answers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from fedpact.core.wire import Message, Refused, unpack
from fedpact.experiment import build
from fedpact.flower.links import Direct
from fedpact.flower.node import Node
from fedpact.flower.server import federate
from fedpact.run import execute

CLIENTS = 4
#: What is not the same wherever a run is computed.
CLOCK = ("seconds", "local_seconds")


def values(
    algorithm: dict[str, Any] | str = "fedavg", rounds: int = 5, flower: Any = None, **run: Any
) -> dict[str, Any]:
    settings = {"name": algorithm} if isinstance(algorithm, str) else algorithm
    engine = {"engine": {"name": "flower", "notes": True, **flower}} if flower is not None else {}
    return {
        "data": {"name": "breast_cancer"},
        "split": {"how": "iid", "clients": CLIENTS, "seed": 0},
        "problem": {"name": "logistic", "l2": 1e-2, "intercept": True},
        "algorithm": settings,
        "run": {"rounds": rounds, "seed": 0, **engine, **run},
    }


def simulated(algorithm: Any, **options: Any) -> Any:
    return execute(build(values(algorithm, **options))[0])


def nodes(folder: Path, count: int = CLIENTS, **config: Any) -> list[Node]:
    return [Node({"client": i, **config}, folder / f"node-{i}") for i in range(count)]


class Faulty(Direct):
    """`on_answer(client, question, answer)` returns what arrives, or None for nothing; `before(client, question)` may
    do harm first."""

    def __init__(self, members: Any, on_answer: Any = None, before: Any = None) -> None:
        super().__init__(members)
        self.on_answer, self.before, self.after_deadline = on_answer, before, []

    def ask(self, questions: Any, deadline: float, enough: int, patience: float) -> dict[int, Any]:
        out = {}
        for i, message in questions.items():
            if self.before is not None:
                self.before(i, message)
            answer = self._answer(i, message)
            arrived = answer if self.on_answer is None else self.on_answer(i, message, answer)
            if isinstance(arrived, Late):
                self.after_deadline.append((i, arrived.answer))
            elif arrived is not None:
                out[i] = arrived
        return out

    def late(self) -> list[tuple[int, Any]]:
        found, self.after_deadline = self.after_deadline, []
        return found


class Late:
    def __init__(self, answer: Any) -> None:
        self.answer = answer


def federated(
    algorithm: Any, folder: Path, link: Any = None, run: Any = None, flower: Any = None, **options: Any
) -> Any:
    return federate(
        values(algorithm, flower=flower or {}, **options),
        Direct(nodes(folder)) if link is None else link,
        folder=run,
        resume=run is not None and Path(run).is_dir(),
    )


def same_history(one: Any, other: Any, tolerance: float, skip: tuple[str, ...] = ()) -> None:
    shared = [c for c in one.history.columns if c in other.history.columns and c not in (*CLOCK, *skip)]
    assert {"objective", "gradient", "participants", "bytes_up"} <= set(shared)
    for column in shared:
        a, b = one.history.column(column), other.history.column(column)
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance, equal_nan=True, err_msg=column)


def step_of(message: Message, number: int) -> bool:
    """Whether this is the question for the step of this round."""
    return message.kind == "step" and message.values["round"] == number


__all__ = [
    "CLIENTS",
    "Faulty",
    "Late",
    "Refused",
    "federated",
    "nodes",
    "same_history",
    "simulated",
    "step_of",
    "unpack",
    "values",
]
