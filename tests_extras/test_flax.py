"""Flax (linen) modules as problems."""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedpact as fp
from fedpact.core.errors import InvalidArgument
from fedpact.core.vector import Vector


class TwoLayers(nn.Module):
    norm: bool = False

    @nn.compact
    def __call__(self, images):
        a = images.reshape(len(images), -1)
        a = nn.BatchNorm(use_running_average=True)(a) if self.norm else a
        return nn.Dense(3)(nn.relu(nn.Dense(5)(a)))


THEIRS = fp.from_flax(TwoLayers(), (4, 4, 1), 3)
OURS = fp.TwoLayer(inputs=16, hidden=5, classes=3)


def as_ours(w):
    layer = lambda i: {"w": w.tree[f"Dense_{i}"]["kernel"], "b": w.tree[f"Dense_{i}"]["bias"]}
    return Vector({"hidden": layer(1), "output": layer(0)})  # numbered as they are made: the outer one first


def test_a_run_is_that_of_the_same_network_here(federation, monkeypatch, tmp_path):
    assert THEIRS.dim == OURS.dim
    monkeypatch.setattr("fedpact.report.html.plots_section", lambda *_: "")
    monkeypatch.setattr(
        fp.TwoLayer, "init", lambda self, features, dtype, key=None: as_ours(THEIRS.init(features, dtype, key))
    )
    options = {"participation": [[0, 1, 2], [2, 3], [0, 4]], "rounds": 3}
    settings = fp.FedADMM(epochs=2, batch=4, rate=0.1)
    theirs = fp.run(settings, THEIRS, federation, folder=tmp_path / "run", **options)
    ours = fp.run(settings, OURS, federation, **options)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6),
        as_ours(theirs.model.w).tree,
        ours.model.w.tree,
    )
    again = fp.Model.load(tmp_path / "run", problem=THEIRS)
    np.testing.assert_array_equal(again.predict(federation.dataset.x), theirs.model.predict(federation.dataset.x))
    assert theirs.config["problem"]["title"] == "TwoLayers"


def test_a_module_with_running_statistics_is_refused(federation):
    with pytest.raises(
        InvalidArgument, match=r"^module must be one whose variables are all parameters, got \['batch_st"
    ):
        fp.run(fp.FedSGD(), fp.from_flax(TwoLayers(norm=True), (4, 4, 1), 3), federation, rounds=1)


def test_a_module_of_other_outputs_is_refused(federation):
    with pytest.raises(InvalidArgument, match=r"^apply must be a function to scores of shape \(B, 4\), got \(2, 3\)"):
        fp.run(fp.FedSGD(), fp.from_flax(TwoLayers(), (4, 4, 1), 4), federation, rounds=1)
    assert jnp.isfinite(THEIRS.init(16, np.float32).norm())
