"""What private runs refuse: settings, runs, problems and files, each with a sentence."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
from helpers_experiment import private_tables, write_toml
from helpers_private_life import federation
from helpers_refused import refused, sentence

import fedpact as fp
from fedpact.algorithms import ALGORITHMS
from fedpact.core.errors import FedpactError, InvalidArgument
from fedpact.privacy import Event
from fedpact.privacy.private import Private
from fedpact.run import Experiment, private_plan

LOGISTIC = fp.Logistic(l2=0.1)
FEDAVG = fp.FedAvg(epochs=2, step=0.1, batch=3)


BAD_SETTINGS = [
    ({"noise": 1, "clip": 0}, "clip (C) must be a number above 0, got 0."),
    ({"noise": 1, "clip": -1.0}, "clip (C) must be"),
    ({"noise": 1, "clip": float("nan")}, "clip (C) must be"),
    ({"noise": 1, "clip": True}, "clip (C) must be"),
    ({}, "privacy must be with noise (z), epsilon (ε) or both, got 'neither'."),
    ({"noise": 0}, "noise (z) must be"),
    ({"noise": float("inf")}, "noise (z) must be"),
    ({"epsilon": 0}, "epsilon (ε) must be a number from 0.001 to 10000, got 0."),
    ({"epsilon": -1}, "epsilon (ε) must be"),
    ({"epsilon": float("nan")}, "epsilon (ε) must be"),
    ({"epsilon": 1, "delta": 0}, "delta (δ) must be"),
    ({"epsilon": 1, "delta": 1}, "delta (δ) must be"),
    ({"noise": 1, "way": "twice"}, "way must be"),
    ({"noise": 1, "mechanism": "gausian"}, "gaussian"),
    ({"noise": 1, "relation": "add"}, "add-remove"),
    ({"noise": 1, "place": "centre"}, "central"),
    ({"noise": 1, "place": "central"}, 'place must be "local" unless way is "client", got \'central\'.'),
    ({"noise": 1, "place": "central", "way": "steps"}, "it can only hide whole clients"),
    ({"noise": 1, "mechanism": "discrete_gaussian"}, "lattice must be"),
    ({"noise": 1, "lattice": 64}, "lattice must be left out for gaussian, got 64."),
    ({"noise": 1, "way": "convex"}, "reach (R) must be above 0 for way convex, got None."),
    ({"noise": 1, "way": "convex", "reach": 0}, "reach (R) must be"),
    ({"noise": 1, "reach": 1.0}, "reach (R) must be left out, got 1.0."),
]


@pytest.mark.parametrize(("settings", "text"), BAD_SETTINGS)
def test_settings_that_are_refused(settings, text):
    with pytest.raises(FedpactError) as error:
        Private(**{"clip": 1.0, **settings})
    assert text in sentence(str(error.value))


PLAIN = Private(1.0, noise=1.0)
WHOLE = Private(1.0, noise=1.0, way="client")
BENT = Private(1.0, noise=1.0, way="convex", reach=1.0)
BAD_RUNS = [
    (fp.FedEPM(), PLAIN, "c (c_i) must be 0 in a private run, got 1e-08."),
    (fp.FedEPM(c=0.0, epsilon=0.1), PLAIN, "epsilon (ε) must be left out in a private run, got 0.1."),
    (fp.FedEPM(c=0.0), replace(PLAIN, way="steps"), "way of fedepm must be"),
    (FEDAVG, replace(PLAIN, way="once"), "way of fedavg must be"),
    (fp.FedAvg(), PLAIN, "epochs (E) must be given in a private run, got None."),
    (fp.FedAvg(step=0.1), PLAIN, "epochs (E) must be given"),
    (fp.FedAvg(), WHOLE, "step (γ) must be a number in a private run, got 'lipschitz'."),
    (fp.FedProx(), WHOLE, "step (γ) must be a number in a private run, got 'lipschitz'."),
    (fp.FedAvg(epochs=1, step=0.1, weights="rows"), WHOLE, "weights must be \"uniform\" for way client, got 'rows'."),
    (fp.FedAvg(epochs=2, step=0.1, vary=True), PLAIN, "vary must be False in a private run, got True."),
    (fp.Scaffold(vary=True), PLAIN, "vary must be False in a private run, got True."),
    (fp.FedADMM(), PLAIN, "vary must be False in a private run, got True."),
    (fp.FedADMM(vary=False, accuracy=0.1), PLAIN, "accuracy must be None in a private run, got 0.1."),
    (fp.FedADMM(vary=False, solver="lbfgs"), PLAIN, "solver must be 'sgd' in a private run, got 'lbfgs'."),
    (fp.FedADMM(vary=False, rho="lipschitz"), PLAIN, "rho must be 0.01 in a private run, got 'lipschitz'."),
    (fp.FedADMM(rho="lipschitz"), WHOLE, "rho (ρ) must be a number in a private run, got 'lipschitz'."),
    (fp.FedPDM(rho="lipschitz"), PLAIN, "rho must be a number, got 'lipschitz'."),
    (fp.FedPDM(accuracy=0.1), WHOLE, "accuracy must be left out, got 0.1."),
    (fp.FedPDM(epsilon=0.5), PLAIN, "epsilon (ε) must be left out in a private run, got 0.5."),
    (fp.FedPDM(memory=True), WHOLE, "memory must be false for way client, got True."),
    (fp.FedPDM(), BENT, "rate (η) must be at most 1/(ρ + L) for way convex"),
    (fp.FedPDM(rho=2.0, rate=0.45), BENT, "Give a rate of at most 0.425532"),
    (fp.FedPDM(rho=2.0, rate="paper"), BENT, "rate (η) must be"),
]


@pytest.mark.parametrize(("settings", "private", "text"), BAD_RUNS)
def test_runs_that_are_refused(settings, private, text, tmp_path):
    with pytest.raises(FedpactError) as error:
        fp.run(settings, LOGISTIC, federation(), rounds=2, privacy=private, folder=tmp_path / "run")
    assert text in sentence(str(error.value))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("name", [n for n, cls in ALGORITHMS.items() if not cls.ways and not cls.vertical])
def test_an_algorithm_without_a_theorem_is_refused_with_those_that_have_one(name):
    with pytest.raises(InvalidArgument) as error:
        fp.run(ALGORITHMS[name](), LOGISTIC, federation(), rounds=2, privacy=PLAIN)
    text = sentence(str(error.value))
    assert f"got {name}." in text
    for listed in ("fedepm (once)", "fedavg (steps, client)", "fedpdm (steps, convex, client)", "scaffold", "fedadmm"):
        assert listed in text


def test_samples_of_fixed_size_without_a_bound_are_refused():
    options = {"rounds": 2, "participation": 0.5}
    central = replace(WHOLE, place="central")
    with pytest.raises(InvalidArgument, match="sampling must be one with a valid bound, got 'fixed' of gaussian under"):
        fp.run(FEDAVG, LOGISTIC, federation(), privacy=replace(central, relation="add-remove"), **options)
    made = private_plan(Experiment(FEDAVG, LOGISTIC, federation(), privacy=central, **options))
    assert made.event(0) == Event("gaussian", 1.0, "fixed", 2 / 3, "replace-one")
    laplace = private_plan(
        Experiment(FEDAVG, LOGISTIC, federation(), privacy=replace(central, mechanism="laplace"), **options)
    )
    assert laplace.event(0).sampling == "full"  # no bound for a smaller one


def test_problems_that_cannot_be_clipped_are_refused():
    @dataclass(frozen=True)
    class Native(fp.Logistic):
        native = True
        engine = "host"

    with pytest.raises(
        InvalidArgument, match="problem must be one of JAX's for gradients clipped by row, got 'Native'"
    ):
        fp.run(FEDAVG, Native(), federation(), rounds=2, privacy=PLAIN, engine="host")
    limited = fp.Constrained(fp.Logistic(l2=0), minimize=fp.Norm2(), subject_to=[fp.Loss() <= 0.6])
    with pytest.raises(InvalidArgument, match="algorithm must be one "):
        fp.run(fp.SSCA(), limited, federation(), rounds=2, privacy=PLAIN)
    free = fp.Constrained(fp.Logistic(l2=0), minimize=fp.Loss(), subject_to=[])
    with pytest.raises(
        InvalidArgument, match="problem must be one loss for gradients clipped by row, got 'Constrained'"
    ):
        fp.run(FEDAVG, free, federation(), rounds=2, privacy=PLAIN)
    with pytest.raises(
        InvalidArgument, match=r"privacy must be a Private, such as fedpact\.Private\(clip=1, epsilon=3\)"
    ):
        fp.run(FEDAVG, LOGISTIC, federation(), rounds=2, privacy={"clip": 1})


def test_files_that_are_refused(command, people, tmp_path):
    write_toml(tmp_path / "misspelt.toml", private_tables(epsilon=3.0) | {"privacy": {"clip": 1.0, "epsilom": 3.0}})
    refused(command("run", "misspelt.toml"), "epsilom", "epsilon")
    refused(command("privacy", "plan", "misspelt.toml"), "epsilom", "epsilon")
    refused(command("privacy", "plan", people), "experiment must have a table [privacy], got ")
    write_toml(tmp_path / "private.toml", private_tables(epsilon=3.0))
    refused(
        command("privacy", "plan", "private.toml", "--noise", 2), "plan of a file must have its settings in the file"
    )
