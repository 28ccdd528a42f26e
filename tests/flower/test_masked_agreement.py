"""Before a secure run: the scaling from masked sums is the plain one, constant columns included."""

from __future__ import annotations

import csv
import json

import numpy as np
import pytest
from helpers_masked import Watched

from fedpact.core.errors import ClientError, DataError, InvalidArgument
from fedpact.core.wire import unpack
from fedpact.flower.node import Node
from fedpact.flower.server import agree, federate, greet

pytest.importorskip("cryptography")

SITES, ROWS = 3, 40
COLUMNS = ("large", "small", "shifted", "zero", "tenth", "huge", "counts", "target")


def table(site):
    rng = np.random.default_rng(site)
    return np.column_stack(
        [
            1e9 * rng.normal(size=ROWS),
            1e-12 * rng.normal(size=ROWS),
            1e6 + 1e-3 * rng.normal(size=ROWS),
            np.zeros(ROWS),
            np.full(ROWS, 0.1),  # sums of it are not exact
            np.full(ROWS, -1e100 / 3),
            np.full(ROWS, float(site)),  # constant at every site, not over them
            np.arange(ROWS) % 2,
        ]
    )


def agreed(folder, scale, secure, change=lambda site, x: x):
    folder.mkdir()
    for site in range(SITES):
        with (folder / f"{site}.csv").open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerows([COLUMNS, *([repr(float(v)) for v in row] for row in change(site, table(site)))])
    parties = [Node({"client": i, "csv": str(folder / f"{i}.csv")}, folder / f"node-{i}") for i in range(SITES)]
    link = Watched(parties)
    link.record = True
    described = {
        "data": {"target": "target", "scale": scale, "task": "classification"},
        "algorithm": {"name": "fedavg"},
        "run": {"engine": {"name": "flower", "secure": secure}},
    }
    found = greet(described, link, 60)
    return agree(described, link, [found[i]["survey"] for i in range(SITES)], 60).schema, link


def test_a_run_is_not_resumed_over_fewer_nodes_and_no_sums_are_asked_for(tmp_path):
    """Sums of columns over three, and then over two of them, would differ by those of the third."""
    _, link = agreed(tmp_path / "nodes", "standard", secure=True)
    described = {
        "data": {"target": "target", "task": "classification"},
        "algorithm": {"name": "fedavg"},
        "run": {"rounds": 1, "engine": {"name": "flower", "secure": True}},
    }
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.json").write_text(json.dumps({"data": {"clients": SITES, "digest": "d"}}))
    fewer = Watched(link.nodes[:2])
    with pytest.raises(InvalidArgument, match=r"^nodes must be the 3 of the run in '.*', got 2\. Start those it began"):
        federate(described, fewer, tmp_path / "run", resume=True)
    assert fewer.asks == ["hello"]


@pytest.mark.parametrize("scale", ["standard", "norm", "none"])
def test_the_scaling_is_the_plain_one(tmp_path, scale):
    plain, _ = agreed(tmp_path / "a", scale, secure=False)
    secure, link = agreed(tmp_path / "b", scale, secure=True)
    np.testing.assert_allclose(secure.scale, plain.scale, rtol=1e-9, atol=0)
    np.testing.assert_allclose(secure.shift, plain.shift, rtol=1e-9, atol=1e-25)
    if scale == "standard":
        assert [float(d) for d in np.asarray(secure.scale)[[3, 4, 5]]] == [1.0, 1.0, 1.0]
        assert link.asks[1:-1] == [
            "vocabulary",
            "mask_shares",
            "mask_words",
            "mask_reveal",
            "moments",
            "mask_words",
            "mask_reveal",
            "moments",
            "mask_words",
            "mask_reveal",
        ]
        told = [unpack(content) for content in link.sent[1::2]]
        assert not any(m.arrays for m in told if m.kind == "moments")


def test_a_column_too_large_to_be_squared_is_named_by_its_node(tmp_path):
    def beyond(site, x):
        x[:, 0] = 1e155 if site == 1 else 0.0
        return x

    with pytest.raises(DataError, match=r"^sums of node '1' must be finite, got others\. A column is too large"):
        agreed(tmp_path / "a", "standard", True, beyond)


def test_extremes_stay_within_the_words(tmp_path):
    def far(site, x):
        x[:, 0], x[:, 1] = 1e140 * x[:, 2], 1e-130 * (x[:, 2] - 1e6)
        return x

    (plain, _), (secure, _) = (agreed(tmp_path / name, "standard", on, far) for name, on in (("a", False), ("b", True)))
    np.testing.assert_allclose(secure.scale[1], plain.scale[1], rtol=1e-9, atol=0)
    np.testing.assert_allclose(secure.shift, plain.shift, rtol=1e-9, atol=1e-140)


def test_everyone_must_stay(tmp_path, monkeypatch):
    monkeypatch.setattr(
        Watched, "answered", lambda self, i, kind, answer: None if (i, kind) == (1, "mask_words") else answer
    )
    with pytest.raises(
        ClientError, match=r"^round 0, vocabulary: at least 3 of 3 clients must stay .* got 2 at mask_words"
    ):
        agreed(tmp_path / "a", "standard", True)
