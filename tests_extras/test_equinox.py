"""Equinox modules as problems."""

from __future__ import annotations

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedpact as fp
from fedpact.core.errors import InvalidArgument
from fedpact.core.vector import Vector


def make(key):
    return eqx.nn.MLP(16, 3, 5, 1, key=key)


THEIRS = fp.from_equinox(make, (16,), 3)
OURS = fp.TwoLayer(inputs=16, hidden=5, classes=3)


def as_ours(w):
    """Leaves in the order of the module: weight (outputs, inputs) and bias of each layer."""
    first, b1, second, b2 = (np.asarray(w.tree[name]) for name in sorted(w.tree))
    return Vector({"hidden": {"w": first.T, "b": b1}, "output": {"w": second.T, "b": b2}})


def test_a_run_is_that_of_the_same_network_here(federation, monkeypatch, tmp_path):
    assert THEIRS.dim == OURS.dim
    monkeypatch.setattr("fedpact.report.html.plots_section", lambda *_: "")
    monkeypatch.setattr(
        fp.TwoLayer,
        "init",
        lambda self, features, dtype, key=None: jax.tree.map(
            jax.numpy.asarray, as_ours(THEIRS.init(features, dtype, key))
        ),
    )
    options = {"participation": [[0, 1, 2], [2, 3], [0, 4]], "rounds": 3}
    settings = fp.Scaffold(epochs=2, batch=4, rate=0.1)
    theirs = fp.run(settings, THEIRS, federation, folder=tmp_path / "run", **options)
    ours = fp.run(settings, OURS, federation, **options)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6),
        as_ours(theirs.model.w).tree,
        ours.model.w.tree,
    )
    again = fp.Model.load(tmp_path / "run", problem=THEIRS)
    np.testing.assert_array_equal(again.predict(federation.dataset.x), theirs.model.predict(federation.dataset.x))


def test_a_module_of_other_inputs_is_refused(federation):
    with pytest.raises(InvalidArgument, match=r"^apply must take \(tree, images of shape \(B, 4, 4\)\), got "):
        fp.run(fp.FedSGD(), fp.from_equinox(make, (4, 4), 3), federation, rounds=1)


def test_a_make_that_fails_is_told():
    def failing(key):
        raise OSError("no weights here")

    said = r"^make must be a function of a key that returns a module, got "
    with pytest.raises(InvalidArgument, match=f"{said}OSError: no weights here. Try it on"):
        fp.from_equinox(failing, (16,), 3)
    with pytest.raises(InvalidArgument, match=f"{said}None"):
        fp.from_equinox(None, (16,), 3)


@pytest.mark.parametrize("extra", [np.arange(3), jnp.zeros(2, bool)])
def test_whole_numbers_in_a_module_are_refused_as_in_a_tree(extra):
    """They would be constants that the run neither trains nor sends."""

    class Counting(eqx.Module):
        mlp: eqx.nn.MLP
        seen: Any

        def __call__(self, x):
            return self.mlp(x)

    said = r"^parameters of Network must be floating point, got (int64|bool) at \.seen\. Keep whole numbers out of the "
    with pytest.raises(InvalidArgument, match=f"{said}module: close over them"):
        fp.from_equinox(lambda key: Counting(make(key), extra), (16,), 3)
