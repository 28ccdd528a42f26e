"""A question may come twice, since silence is asked again: no protocol minds, whichever answer arrives."""

from __future__ import annotations

import helpers_masked
import helpers_nodes
import helpers_parties
import helpers_tables
import pytest

pytest.importorskip("cryptography")

from fedpact.core.wire import Refused, unpack
from fedpact.flower.links import Direct
from fedpact.flower.node import RunAtNode
from fedpact.flower.server import federate


class Twice(Direct):
    """Every question is asked twice: the answer to the first is taken, or to the second, or the second question comes
    when the node has answered the next one, and its answer is nobody's."""

    def __init__(self, nodes, which):
        super().__init__(nodes)
        self.which, self.before, self.repeated = which, {}, 0

    def _answer(self, i, message):
        content = self.packed(i, message)
        answers = [self.nodes[i].answer(content)]
        if self.which == "after the next":
            again, self.before[i] = self.before.get(i), content
        else:
            again = content
        if again is not None:
            self.repeated += 1
            answers.append(self.nodes[i].answer(again))
        try:
            return unpack(answers[self.which == "second"], message.kind)
        except Refused as refused:
            return refused


@pytest.fixture(params=["first", "second", "after the next"])
def which(request):
    return request.param


def test_a_plain_run(which, tmp_path):
    settings = {"name": "fedadmm", "batch": 20}
    link = Twice(helpers_nodes.nodes(tmp_path), which)
    run = helpers_nodes.federated(settings, tmp_path, link, rounds=4)
    helpers_nodes.same_history(run, helpers_nodes.simulated(settings, rounds=4), 1e-12)
    assert link.repeated > 4 * helpers_nodes.CLIENTS


def test_a_masked_run(which, tmp_path, monkeypatch):
    monkeypatch.setattr(RunAtNode, "__init__", helpers_masked.shared_programs)
    described = helpers_masked.values({"name": "fedadmm", "batch": 20}, {"secure": True}, rounds=3)
    plain = helpers_masked.run(tmp_path / "a", described)
    link = Twice(helpers_masked.nodes(tmp_path / "b"), which)
    assert helpers_masked.same(plain, helpers_masked.run(tmp_path / "b", described, link)) < 1e-10
    assert link.repeated > 3 * helpers_masked.CLIENTS


def test_parties(which, tmp_path):
    values = helpers_parties.tables(rounds=3)
    link = Twice(helpers_parties.nodes_in(tmp_path), which)
    run = federate(helpers_parties.over_nodes(values), link)
    helpers_parties.assert_same(run, helpers_parties.simulated(values))
    assert link.repeated > 9


def test_parties_that_align_their_records(which, tmp_path):
    files = helpers_tables.written(tmp_path)
    link = Twice(helpers_tables.nodes_of(files, tmp_path), which)
    run = federate(helpers_tables.tables(None), link)
    helpers_parties.assert_same(run, helpers_parties.simulated(helpers_tables.tables(files)))
