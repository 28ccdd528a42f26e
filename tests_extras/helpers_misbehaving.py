"""Rows for the nodes of a drill, as loaders; node a's also makes its process misbehave.

A copy lies in the nodes' working folder as `misbehaving.py`, beside `plan.json`, which says what node a sends in which
round. What is changed is the answer of the node's real process, before it leaves it; the server is as it always is.
"""

from __future__ import annotations

import contextlib
import json
import sys
from pathlib import Path

import numpy as np

import fedpact as fp
from fedpact.core.wire import Message, unpack
from fedpact.flower.node import Node
from fedpact.flower.run_at_node import RunAtNode, _digest_of

PLAN = "plan.json"
honest = Node.on_step
answers: dict[int, bytes] = {}  # what was answered in each round


def rows(client):
    return fp.data.breast_cancer().split(how="iid", clients=2, seed=0).client(client)


def rows_a():
    Node.on_step = on_step
    return rows(0)


def rows_b():
    return rows(1)


def on_step(node, question):
    """The answer to a step: the node's own, or what the plan has for this round."""
    number = int(question.values["round"])
    with contextlib.suppress(OSError):  # into node.log, which may be on a full disk
        print(f"round {number}: asked", file=sys.stderr, flush=True)
    fault = json.loads(Path(PLAN).read_text()).get(str(number), {"name": ""})
    made = SENT.get(fault["name"], lambda node, question, fault: honest(node, question))(node, question, fault)
    answers.setdefault(number, made)
    return made


def not_finite(node, question, fault):
    """It has stepped and written its state, and sends NaN."""
    return _changed(honest(node, question), lambda a: np.full_like(a, np.nan))


def wrong_shape(node, question, fault):
    """The same, and the last number of an array is missing."""
    return _changed(honest(node, question), lambda a: a[:-1])


def _changed(content, change):
    answer = unpack(content, "step")
    longest = max(range(answer.values["own"]), key=lambda k: answer.arrays[k].size)
    arrays = [change(a) if k == longest else a for k, a in enumerate(answer.arrays)]
    return answer._replace(arrays=arrays).pack()


def earlier_round(node, question, fault):
    """What it has sent in a round before."""
    return answers[fault["of"]]


def stale_state(node, question, fault):
    """It steps from an older state than it is told to, as one put back from a copy does; version t+1 is then wrong."""
    run: RunAtNode = node._run()
    version = int(question.values["version"])
    held = {int(path.stem.split("-")[1]): path for path in run.folder.glob(f"{run.client:06d}-*.bin")}
    older = max((v for v in held if v < version), default=0)
    digest = _digest_of(held[older]) if older else ""
    return honest(node, Message("step", {**question.values, "version": older, "digest": digest}, question.arrays))


SENT = {one.__name__: one for one in (not_finite, wrong_shape, earlier_round, stale_state)}
