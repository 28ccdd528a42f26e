"""Running from Python: what an experiment refuses when it is made, and where several runs keep their folders."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest

import fedpact as fp
from fedpact.core.errors import InvalidArgument, UnknownName
from fedpact.run import Experiment

PROBLEM = fp.LeastSquares()


@pytest.fixture(scope="module")
def dataset():
    return fp.data.synthetic(kind="least_squares", rows=60, features=3)


@pytest.fixture(scope="module")
def federation(dataset):
    return dataset.split(clients=4)


def test_an_experiment_is_checked_when_it_is_made(federation):
    with pytest.raises(InvalidArgument, match=r"algorithm must be settings such as fedpact.FedEPM\(\), got 'fedepm'"):
        Experiment("fedepm", PROBLEM, federation)
    with pytest.raises(
        InvalidArgument, match=r"algorithms must be settings such as fedpact.FedEPM\(\), got \['fedepm'"
    ):
        fp.compare(["fedepm"], PROBLEM, federation)
    with pytest.raises(InvalidArgument, match=r"stop must be a rule of fedpact\.stop, got 'soon'"):
        Experiment(fp.FedAvg(), PROBLEM, federation, stop="soon")


@pytest.mark.parametrize("problem", ["logistic", fp.Logistic, None], ids=str)
def test_what_is_no_problem_is_refused(federation, problem):
    with pytest.raises(
        InvalidArgument, match=r"^problem must be a problem such as fedpact\.Logistic\(\), got .+ One of"
    ):
        Experiment(fp.FedAvg(), problem, federation)


def test_a_dataset_is_no_federation(dataset):
    said = r"^federation must be a Federation, got 'Dataset'\. Deal a dataset's rows .+split\(clients=10\)\.$"
    for call in (
        lambda: fp.run(fp.FedAvg(), PROBLEM, dataset),
        lambda: fp.compare([fp.FedAvg()], PROBLEM, dataset),
        lambda: fp.trials(fp.FedAvg(), PROBLEM, dataset, [0, 1]),
    ):
        with pytest.raises(InvalidArgument, match=said):
            call()


@dataclass(frozen=True)
class Bare:
    """A problem that does not know its Lipschitz constant."""

    def check(self, federation):
        pass

    def init(self, features, dtype):
        return PROBLEM.init(features, dtype)

    def value_and_gradient(self, w, batch):
        return PROBLEM.value_and_gradient(w, batch)

    def gradient(self, w, batch):
        return PROBLEM.gradient(w, batch)

    def counts(self, w, batch):
        return PROBLEM.counts(w, batch)

    def predict(self, w, x):
        return PROBLEM.predict(w, x)


def test_what_the_algorithm_needs_is_checked_without_a_stop_rule_too(federation):
    with pytest.raises(InvalidArgument, match="problem must be one that has 'lipschitz' for fedavg, got Bare"):
        Experiment(fp.FedAvg(), Bare(), federation)
    assert fp.run(fp.FedAvg(step=0.1), Bare(), federation, rounds=1).history.rounds == 1


def test_trials_need_room_for_one(federation):
    for count in (0, -1, 2.5):
        with pytest.raises(InvalidArgument, match=rf"^at_once must be an integer of at least 1, got {count}\. It is"):
            fp.trials(fp.FedAvg(), PROBLEM, federation, [0, 1], at_once=count)


def test_names_that_do_not_exist(federation):
    with pytest.raises(InvalidArgument, match="names must be 1 names, one per algorithm, got "):
        fp.compare([fp.FedAvg()], PROBLEM, federation, names=["a", "b"])
    with pytest.raises(UnknownName, match="fedavg preset must be one of lipschitz, rows, got 'papr'"):
        fp.FedAvg.preset("papr")
    with pytest.raises(UnknownName, match=r"dataset must be one of .* Did you mean 'iris'"):
        fp.data.load("irs")
    with pytest.raises(UnknownName, match="how must be one of"):
        federation.dataset.split(clients=3, how="random")
    with pytest.raises(InvalidArgument, match=r"clients \(m\) must be at most the number of rows, 60, got 61"):
        federation.dataset.split(clients=61)


# Folders of a comparison


def test_every_run_of_a_comparison_has_a_folder_of_its_own(federation, tmp_path, monkeypatch):
    monkeypatch.setattr("fedpact.report.html.plots_section", lambda *_: "")
    settings = [fp.FedAvg(step=0.1), fp.FedEPM(), fp.FedAvg(step=0.2)]
    runs = fp.compare(settings, PROBLEM, federation, rounds=2, folder=tmp_path / "all")
    names = ["01-fedavg", "02-fedepm", "03-fedavg"]
    assert sorted(path.name for path in (tmp_path / "all").iterdir()) == names
    assert [run.folder.name for run in runs] == names
    for run in runs:
        assert (run.folder / "result.json").is_file()
    longer = fp.compare(settings, PROBLEM, federation, rounds=4, folder=tmp_path / "all", resume=True)
    straight = fp.compare(settings, PROBLEM, federation, rounds=4)
    for one, other in zip(longer, straight, strict=True):
        np.testing.assert_array_equal(one.history.column("objective"), other.history.column("objective"))
