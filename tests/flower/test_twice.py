"""A question may come twice, since silence is asked again: no protocol minds, whichever answer arrives."""

from __future__ import annotations

import helpers_masked
import helpers_nodes
import helpers_parties
import helpers_tables
import numpy as np
import pytest

pytest.importorskip("cryptography")

from fedpact.core.wire import Refused, unpack
from fedpact.flower.links import Direct
from fedpact.flower.run_at_node import RunAtNode
from fedpact.flower.server import federate
from fedpact.privacy.ledger import Ledger


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


@pytest.mark.parametrize("secure", [False, True], ids=["plain", "masked"])
def test_a_private_run_releases_once_what_is_asked_twice(which, secure, tmp_path, monkeypatch):
    """A kept answer is given again. One that is no longer kept is another release, and the ledger has it."""
    monkeypatch.setattr(RunAtNode, "__init__", helpers_masked.shared_programs)
    rounds, algorithm = 3, {"name": "fedavg", "epochs": 1, "step": 0.5, "batch": 10}
    described = helpers_masked.values(algorithm, {"secure": secure}, rounds=rounds, telemetry="none")
    link = Twice(helpers_masked.nodes(tmp_path), which)
    run = helpers_masked.run(tmp_path, {**described, "privacy": {"clip": 1.0, "noise": 2.0}}, link)
    assert np.isfinite(run.model.w.tree["w"]).all()
    assert link.repeated > rounds * helpers_masked.CLIENTS
    released = [(t, 0) for t in range(rounds)]
    if which == "after the next" and not secure:  # masked, the next question is of the sum: the answer is kept yet
        released = [(0, 0), (1, 0), (0, 1), (2, 0)]  # round 1 again would go on from a state that is gone: refused
    for i in range(helpers_masked.CLIENTS):
        with Ledger(tmp_path / str(i), read_only=True) as ledger:
            assert [(r.round, r.attempt) for r in ledger.releases] == released
