"""Who is left out of a masked sum is told of in events.jsonl by what happened to it, step by step."""

from __future__ import annotations

import json

import pytest
from helpers_masked import Watched, nodes, run, shared_programs, values

from fedpact.flower import masked
from fedpact.flower.node import Node
from fedpact.flower.run_at_node import RunAtNode
from fedpact.run import Run

pytest.importorskip("cryptography")

SECURE = {"secure": True, "quorum": 0.5}
SILENT = "the sum was opened without it: no answer to {} by the deadline"


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(RunAtNode, "__init__", shared_programs)
    monkeypatch.setattr(Run, "report", lambda self, folder: None)


def events(folder):
    return [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]


class Lossy(Watched):
    """Loses the answers of `lost`, each a purpose, a round, a kind of question and a client."""

    lost: tuple = ()

    def answered(self, i, kind, answer):
        return None if (self.purpose, self.round, kind, i) in self.lost else answer


def test_the_step_in_which_no_answer_came_is_told(tmp_path, monkeypatch, caplog):
    """Every sum has its own step of keys here. Who does not give its last shares stays in, and is no event."""
    start = masked.Sums.start
    monkeypatch.setattr(masked.Sums, "start", lambda self, *a: self.ahead.clear() or start(self, *a))
    link = Lossy(nodes(tmp_path))
    link.lost = (
        ("measure", 0, "mask_words", 2),
        ("step", 0, "mask_shares", 4),
        ("step", 0, "mask_reveal", 0),
        ("step", 1, "step", 3),
        ("step", 1, "mask_words", 5),
    )
    done = run(tmp_path, values("fedsgd", SECURE, rounds=2), link, folder=tmp_path / "run")
    assert done.history.column("participants").tolist() == [0, 5, 4]
    told = [(e["round"], e["client"], e["what"], e["why"]) for e in events(tmp_path / "run")]
    assert told == [
        (0, 2, "unmeasured", SILENT.format("mask_words")),
        (1, 4, "missing", SILENT.format("mask_shares")),
        (2, 3, "missing", "no answer by the deadline"),
        (2, 5, "missing", SILENT.format("mask_words")),
        (2, 4, "rolled_back", "its state went back to version 0, which the server counts, from 1"),
    ]
    assert "client 0 (0), step, mask_reveal: no answer by the deadline; it is in the sum" in caplog.text


class Again(Watched):
    """Three of six are started again before they are asked for `kind` of round 0, so that all are asked for another
    sum; client 5 is silent at `silent` of the first sum or the second."""

    kind, silent, tries = "mask_words", ("", 0), 0

    def before(self, kind):
        if self.purpose == "step" and self.round == 0:
            self.tries += kind == "step"
            if kind == self.kind and self.tries == 1:
                for i in range(3):
                    self.nodes[i] = Node(self.nodes[i].config, self.nodes[i].folder)

    def answered(self, i, kind, answer):
        here = self.purpose == "step" and self.round == 0
        return None if here and i == 5 and (kind, self.tries) == self.silent else answer


@pytest.mark.parametrize(
    ("kind", "silent", "why"),
    [
        ("mask_words", ("step", 2), "the sum was opened without it: no answer when all were asked again"),
        ("mask_words", ("mask_words", 1), None),
        ("mask_reveal", ("mask_words", 1), "the sum was opened without it, before it was asked for again"),
    ],
)
def test_where_all_are_asked_again_the_sum_that_was_opened_counts(tmp_path, kind, silent, why):
    link = Again(nodes(tmp_path))
    link.kind, link.silent = kind, silent
    done = run(tmp_path, values("fedsgd", SECURE, rounds=1), link, folder=tmp_path / "run")
    assert link.tries == 2
    assert done.history.column("participants").tolist() == [0, 6 if why is None else 5]
    assert done.history.column("missing").tolist() == [0, why is not None]
    if why is not None:
        assert events(tmp_path / "run") == [{"round": 1, "client": 5, "name": "5", "what": "missing", "why": why}]
