"""What FedPDM reaches on MNIST without noise, as docs/papers_fedpdm.md has it: 300 rounds of seed 0."""

from __future__ import annotations

import pytest

from fedpact.papers import fedpdm_cells
from fedpact.papers.fedpdm_cells import LOSSES, fedpdm, recorded
from fedpact.papers.study import Study

pytestmark = [pytest.mark.drill, pytest.mark.usefixtures("mnist_files")]

#: Training objective at t = 0, 100, 300; test accuracy and share of zeros at t = 300.
REPORTED = {
    "printed": ((0.693, 0.182, 0.119), 0.799, 0.46),
    "one_vs_rest": ((6.931, 2.339, 2.001), 0.829, 0.25),
    "softmax": ((2.303, 1.279, 1.032), 0.839, 0.28),
}


@pytest.mark.parametrize("loss", LOSSES)
def test_the_loss_falls_and_zeros_appear_as_reported(loss, tmp_path, monkeypatch):
    """Rounding may lead elsewhere on another machine, but not further than another seed.

    Seeds 0 to 4 end within 0.004 of the reported accuracy, 0.008 of the zeros and 3 % of the objective. At t = 100 an
    objective swings by 14 %: five of 100 clients made it.
    """
    monkeypatch.setattr(fedpdm_cells, "EVERY", 100)  # measured every ten rounds it takes twice as long
    objectives, accuracy, zeros = REPORTED[loss]
    cell = recorded(Study(tmp_path, tmp_path / "cells.jsonl", quiet=True), fedpdm(loss), seed=0)
    f = dict(zip(cell["round"], cell["loss"], strict=True))
    h = dict(zip(cell["round"], cell["regulariser"], strict=True))
    assert f[0] > f[100] > f[300]
    for t, close, objective in zip((0, 100, 300), (1e-3, 0.15, 0.03), objectives, strict=True):
        assert f[t] + h[t] == pytest.approx(objective, rel=close), t
    assert cell["accuracy"][-1] == pytest.approx(accuracy, abs=0.005)
    assert cell["sparsity"][-1] == pytest.approx(zeros, abs=0.01)
