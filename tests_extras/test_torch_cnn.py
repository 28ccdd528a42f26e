"""CNN1 and CNN2 of Table II, trained by PyTorch: the starts, batches, steps and runs of JAX's, to rounding."""

from __future__ import annotations

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import fedpact as fp
from fedpact.core.contract import Batch
from fedpact.data.dataset import Column, Schema
from fedpact.engines import HostEngine
from fedpact.model import Model
from fedpact.papers import fedadmm_cells as cells
from fedpact.papers.fedadmm_cells import Cell, Results


@pytest.fixture(scope="module")
def grey():
    rng = np.random.default_rng(3)
    x, y = rng.integers(0, 256, (44, 784), dtype=np.uint8), rng.integers(0, 10, 44)
    columns, classes = tuple(Column(f"p{i}", "number") for i in range(784)), tuple(map(str, range(10)))
    schema = Schema(columns, (1.0,) * 784, (0.0,) * 784, "class", classes)
    data = fp.data.Dataset("grey", x, y.astype(float), schema, {}, "none", np.arange(36, 44))
    return data.split(how="sizes", sizes=[10, 7, 8, 11])


@pytest.mark.parametrize(
    "settings",
    [
        fp.FedAvg(epochs=2, step=0.05, batch=4),
        fp.FedADMM(epochs=2, batch=4, vary=True, rate=0.05, momentum=0.5, rho=0.1),
        fp.Scaffold(epochs=2, batch=4, rate=0.05),
        fp.FedSGD(rate=0.1),
    ],
    ids=["fedavg", "fedadmm", "scaffold", "fedsgd"],
)
def test_cnn1_by_pytorch_is_cnn1_to_rounding(settings, grey, tmp_path):
    """The same start, batches and steps; and its model is a model of CNN1."""
    options = {"rounds": 2, "participation": 0.5, "seed": 4}
    ours = fp.run(settings, fp.CNN1(), grey, engine=HostEngine(at_once=1), **options)
    theirs = fp.run(settings, fp.TorchCNN1(), grey, folder=tmp_path / "run", **options)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=2e-5), theirs.model.w.tree, ours.model.w.tree
    )
    for column in ("test_loss", "bytes_up", "gradients"):
        np.testing.assert_allclose(theirs.history.column(column), ours.history.column(column), rtol=1e-4)
    model = Model.load(tmp_path / "run")
    assert model.problem == fp.CNN1()
    x = grey.dataset.x[:5]
    np.testing.assert_allclose(model.predict(x), theirs.model.predict(x), rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize(("ours", "theirs"), [(fp.CNN1, fp.TorchCNN1), (fp.CNN2, fp.TorchCNN2)], ids=["cnn1", "cnn2"])
@pytest.mark.parametrize("relu", [True, False])
def test_gradients_of_table_2_s_networks_are_jax_s(ours, theirs, relu):
    """Of one draw in three they may differ: where two pixels of a pool are equal to rounding (seldom, and not on every
    CPU), either may be the larger one."""
    ours, theirs = ours(relu=relu, hidden=7), theirs(relu=relu, hidden=7)
    assert theirs.dim == ours.dim
    agree = [_same_gradient(ours, theirs, np.random.default_rng(seed)) for seed in range(3)]
    assert sum(agree) >= 2, agree


def _same_gradient(ours, theirs, rng):
    w = theirs.init(0, np.float32, jax.random.key(5))
    jax.tree.map(np.testing.assert_array_equal, w.tree, ours.init(0, np.float32, jax.random.key(5)).tree)
    x = rng.integers(0, 256, (6, np.prod(ours.shape)), dtype=np.uint8)
    batch = Batch(jnp.asarray(x), jnp.asarray(rng.integers(0, 10, 6), jnp.float32), jnp.ones(6, jnp.float32), 0)
    (a, slope), (b, wanted) = (p.value_and_gradient(w, batch) for p in (theirs, ours))
    assert float(a) == pytest.approx(float(b), rel=1e-5)
    near = jax.tree.map(lambda a, b: np.allclose(a, b, rtol=1e-3, atol=1e-5), slope.tree, wanted.tree)
    return all(jax.tree.leaves(near))


def test_table_2_s_parameters():
    assert (fp.TorchCNN1().dim, fp.TorchCNN2().dim) == (1_663_370, 1_105_098)
    assert not fp.TorchCNN1().draws
    assert fp.TorchCNN1()._layout == torch.channels_last


def test_cells_of_the_fedadmm_paper_are_trained_by_pytorch_where_it_is_installed(monkeypatch):
    """Clients a core each there; and a run of the one is not gone on with by the other."""
    entry = cells.admm(Cell("fmnist", 100, "iid"), 5, 200)
    place = lambda: cells._under_way(Results(Path("results.csv"), "now"), entry, fp.FedADMM(), 0)
    assert [type(Cell(d, 100, "iid").problem).__name__ for d in ("fmnist", "cifar")] == ["TorchCNN1", "TorchCNN2"]
    assert entry.cell.engine.at_once is None
    own = place()
    monkeypatch.setattr(cells, "find_spec", lambda name: None)
    assert place() != own
