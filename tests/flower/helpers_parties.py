"""Feature-split federations of nodes in this process, and links that record, lose and change what crosses."""

from __future__ import annotations

import gc
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from fedpact.core.errors import ClientError
from fedpact.core.wire import Message
from fedpact.experiment import build
from fedpact.flower.links import Direct
from fedpact.flower.node import Node
from fedpact.flower.server import federate
from fedpact.run import Run, execute

NAMES = ("means", "errors", "worst")
CLOSER = 1
LOGISTIC: dict[str, Any] = {"name": "logistic", "l2": 0.0, "intercept": True}
BOUNDED: dict[str, Any] = {
    "name": "constrained",
    "model": LOGISTIC,
    "minimize": [{"term": "norm2"}],
    "subject_to": [{"term": "loss", "at_most": 0.1}, {"term": "misses", "at_most": 0.05}],
}


def tables(problem: Any = LOGISTIC, rounds: int = 5, **algorithm: Any) -> dict[str, Any]:
    """An experiment on tumours that three laboratories measured."""
    split = {"how": "features", "clients": 3, "names": list(NAMES), "closer": CLOSER, "holdout": 0.25}
    algorithm = {"name": "vertical_sgd", "batch": 20} | algorithm
    run = {"rounds": rounds, "seed": 3}
    return {"data": {"name": "breast_cancer"}, "split": split, "problem": problem, "algorithm": algorithm, "run": run}


def over_nodes(values: dict[str, Any], **engine: Any) -> dict[str, Any]:
    """The same over a federation."""
    return {**values, "run": {**values["run"], "engine": {"name": "flower", **engine}}}


def nodes_in(folder: Path, names: tuple[str, ...] = NAMES) -> list[Node]:
    return [Node({"name": name}, folder / name) for name in names]


def simulated(values: dict[str, Any]) -> Run:
    return execute(build(values)[0])


def refused(values: dict[str, Any], link: Any) -> str:
    """The sentence that ends a run over this link."""
    try:
        federate(over_nodes(values, deadline=2.0, patience=2.0), link)
    except ClientError as error:
        return str(error)
    raise AssertionError("the run went on")


def assert_same(ours: Run, theirs: Run, within: float = 1e-12) -> None:
    """The same history but for the clock, and for the order of its columns."""
    assert set(ours.history.columns) == set(theirs.history.columns)
    for name in ours.history.columns:
        if name != "seconds":
            pair = [run.history.column(name) for run in (ours, theirs)]
            np.testing.assert_allclose(*pair, rtol=within, atol=within, err_msg=name)


class Changing(Direct):
    """A link whose questions, or answers, pass through a function: (party, kind, Message) → Message, None if lost."""

    def __init__(self, nodes: list[Node], change: Callable[[int, Message], Message | None], answers: bool = False):
        super().__init__(nodes)
        self.change, self.answers = change, answers

    def ask(self, questions, deadline, enough, patience):
        if self.answers:
            found = super().ask(questions, deadline, enough, patience)
            changed = {i: self.change(i, one) if isinstance(one, Message) else one for i, one in found.items()}
            return {i: one for i, one in changed.items() if one is not None}
        changed = {i: self.change(i, one) for i, one in questions.items()}
        return super().ask({i: one for i, one in changed.items() if one is not None}, deadline, enough, patience)


def arrays_within(thing: Any) -> Iterator[np.ndarray]:
    """Every array that can be reached from an object: attributes, closures, containers; not modules or classes."""
    seen, left = set(), [thing]
    skipped = (types.ModuleType, type, types.FrameType, types.CodeType)
    while left:
        one = left.pop()
        if id(one) in seen or isinstance(one, skipped):
            continue
        seen.add(id(one))
        if isinstance(one, np.ndarray) or type(one).__name__ == "ArrayImpl":
            yield np.asarray(one)
        if isinstance(one, types.FunctionType):  # what it closes over, not the module it is in
            left += [cell.cell_contents for cell in one.__closure__ or ()]
        else:
            left += gc.get_referents(one)


def patterns(values: np.ndarray) -> set[bytes]:
    """The eight bytes of every number, without those that are everywhere."""
    flat = np.unique(np.asarray(values, np.float64).ravel())
    return {number.tobytes() for number in flat if abs(number) not in (0.0, 1.0)}


def found_in(content: bytes, wanted: set[bytes]) -> set[bytes]:
    """Which of the patterns occur, at any place."""
    return {content[i : i + 8] for i in range(len(content) - 7)} & wanted
