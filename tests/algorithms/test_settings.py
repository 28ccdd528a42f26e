"""Every algorithm checks its settings when it is made, by the same sentences in Python and on the command."""

from __future__ import annotations

import math

import pytest
from helpers_experiment import experiment, write_csv, write_toml
from helpers_refused import refused, sentence

from fedpact.algorithms import algorithm
from fedpact.core.errors import FedpactError

ALGORITHMS = {
    ("fedepm", "k0", 0): "k0 must be an integer of at least 1, got 0.",
    ("fedepm", "k0", 1.5): "k0 must be an integer of at least 1, got 1.5.",
    ("fedepm", "k0", True): "k0 must be an integer of at least 1, got True.",
    ("fedepm", "lam", -0.1): "lam (λ) must be at least 0, got -0.1.",
    ("fedepm", "lam", math.inf): "lam (λ) must be ",
    ("fedepm", "eta", 0): "eta (η) must be above 0, got 0.",
    ("fedepm", "eta", -1e-3): "eta (η) must be above 0, got -0.001.",
    ("fedepm", "eta", math.nan): "eta (η) must be above 0, got nan.",
    ("fedepm", "eta", math.inf): "eta (η) must be ",
    ("fedepm", "eta", "big"): "eta (η) must be above 0, got 'big'.",
    ("fedepm", "epsilon", 0): "epsilon (ε) must be above 0, got 0.",
    ("fedepm", "epsilon", -1): "epsilon (ε) must be above 0, got -1.",
    ("fedepm", "mu0", 0): "mu0 (μ_{i,0}) must be above 0, got 0.",
    ("fedepm", "mu0", math.inf): "mu0 (μ_{i,0}) must be ",
    ("fedepm", "c", -1): "c (c_i) must be at least 0, got -1.",
    ("fedepm", "alpha", 0.5): "alpha (α_i) must be at least 1, got 0.5.",
    ("sfedavg", "k0", 0): "k0 must be an integer of at least 1, got 0.",
    ("sfedavg", "step", "big"): "step must be one of lipschitz, paper, got 'big'.",
    ("sfedavg", "epsilon", 0): "epsilon (ε) must be above 0, got 0.",
    ("sfedprox", "inner", 0): "inner (ℓ) must be an integer of at least 1, got 0.",
    ("sfedprox", "mu", -1): "mu (μ) must be at least 0, got -1.",
    ("fedprox", "mu", -1): "mu (μ) must be at least 0, got -1.",
    ("fedavg", "step", -1): "step (γ) must be above 0, got -1.",
    (
        "fedavg",
        "step",
        "lipshitz",
    ): "step must be one of a number, lipschitz, got 'lipshitz'. Did you mean 'lipschitz'?",
    ("fedavg", "step", math.inf): "step (γ) must be ",
    ("fedavg", "scale", 0): "scale must be above 0, got 0.",
    ("fedavg", "weights", "row"): "weights must be one of rows, uniform, got 'row'. Did you mean 'rows'?",
    ("ssca", "tau", 0): "tau (τ) must be above 0, got 0.",
    ("ssca", "order", "steam"): "order must be one of random, stream, got 'steam'. Did you mean 'stream'?",
    ("local_sgd", "momentum", 1): "momentum (β) must be in [0, 1), got 1.",
    ("vertical_ssca", "batch", 1): "batch (B) must be at least 2, got 1.",
    ("vertical_sgd", "collection", "one-step"): "collection must be \"two-step\", got 'one-step'.",
}


@pytest.mark.parametrize(("name", "setting", "value"), ALGORITHMS)
def test_an_algorithms_settings_are_checked_when_it_is_made(command, tmp_path, name, setting, value):
    expected = ALGORITHMS[name, setting, value]
    with pytest.raises(FedpactError) as caught:
        algorithm(name)(**{setting: value})
    assert expected in sentence(str(caught.value))
    write_csv(tmp_path / "people.csv")
    tables = experiment()
    tables["algorithm"] = {"name": name, setting: value}
    write_toml(tmp_path / "wrong.toml", tables)
    refused(command("run", "wrong.toml", "--out", "run"), expected)
    assert not (tmp_path / "run").exists()
