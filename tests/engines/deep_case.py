"""A small case for the host engine: bytes for pixels, twelve clients of unequal sizes, a test set, one hidden layer."""

from __future__ import annotations

import jax
import numpy as np

import fedpact as fp
from fedpact.data.dataset import Column, Schema

SIZES = (6, 4, 6, 4, 5, 6, 4, 6, 4, 5, 6, 4)  # widths 6 and 4
PROBLEM = fp.TwoLayer(inputs=6, hidden=4, classes=3)
SETTINGS = fp.FedADMM(epochs=2, vary=False, batch=3, rate=0.05, rho=0.1)


def dataset(rows=90, test=30):
    rng = np.random.default_rng(0)
    x = rng.integers(0, 256, (rows, 6)).astype(np.uint8)
    y = np.minimum(x[:, 0].astype(int) + x[:, 1] // 2, 383) // 128
    schema = Schema(
        tuple(Column(f"p{i}", "number") for i in range(6)), (1.0,) * 6, (0.0,) * 6, "class", ("a", "b", "c")
    )
    return fp.data.Dataset("tiny", x, y.astype(float), schema, {}, "none", np.arange(rows - test, rows))


def federation():
    return dataset().split(how="sizes", sizes=list(SIZES))


def run(engine=None, rounds=4, settings=SETTINGS, problem=PROBLEM, **options):
    plain = {"participation": 0.75, "precision": "double", "engine": engine or fp.HostEngine(at_once=1)}
    return fp.run(settings, problem, federation(), rounds=rounds, **plain | options)


def flat(model):
    return np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(model.w.tree)])
