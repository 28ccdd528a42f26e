"""Running from Python: what an experiment refuses when it is made, and the folders that runs keep."""

from __future__ import annotations

import sys
from dataclasses import dataclass

import numpy as np
import pytest
from helpers_experiment import tree

import fedpact as fp
from fedpact.core.errors import ClientError, DataError, InvalidArgument, OutputError, UnknownName
from fedpact.problems import PROBLEMS
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


@pytest.mark.drill
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


def test_a_run_that_never_begins_leaves_nothing(federation, tmp_path, monkeypatch):
    def fail(*_args, **_kwargs):
        raise ClientError("round 0, client 1, join: something failed.")

    monkeypatch.setattr(sys.modules["fedpact.run"], "drive", fail)  # fedpact.run is the function
    (tmp_path / "empty").mkdir()
    for name, left in (("new", False), ("empty", True)):
        with pytest.raises(ClientError):
            fp.run(fp.FedAvg(), PROBLEM, federation, folder=tmp_path / name)
        assert (tmp_path / name).exists() == left
    assert list((tmp_path / "empty").iterdir()) == []


def test_a_folder_of_something_else_is_left_alone(federation, tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(OutputError, match="output folder must be new or empty"):
        fp.run(fp.FedAvg(), PROBLEM, federation, folder=tmp_path)
    before = dict.fromkeys(("config.json", "history.csv", "notes.txt", "report.html", ".draft.tmp"), b"mine")
    for name, content in before.items():
        (tmp_path / name).write_bytes(content)
    with pytest.raises(OutputError, match="output folder must be new, empty or of a run to resume, got "):
        fp.run(fp.FedAvg(), PROBLEM, federation, folder=tmp_path, resume=True)
    assert tree(tmp_path) == before


# A problem without a name


def test_a_problem_that_cannot_be_saved_is_refused_before_the_first_round(federation, tmp_path):
    said = r"^problem must be one of .+ to be saved, got Bare\. Give it a name first: .+ = Bare$"
    with pytest.raises(InvalidArgument, match=said):
        fp.run(fp.FedAvg(step=0.1), Bare(), federation, rounds=1, folder=tmp_path / "run")
    runs = fp.compare([fp.FedAvg(step=0.1)], Bare(), federation, rounds=1)
    with pytest.raises(InvalidArgument, match=said):
        runs.report(tmp_path / "report")
    with pytest.raises(InvalidArgument, match=said):
        runs[0].model.save(tmp_path / "model.bin")
    assert list(tmp_path.iterdir()) == []


def test_a_problem_with_a_name_is_saved_and_loaded(federation, tmp_path, monkeypatch):
    monkeypatch.setitem(PROBLEMS, "bare", Bare)
    run = fp.run(fp.FedAvg(step=0.1), Bare(), federation, rounds=1)
    path = run.model.save(tmp_path / "model.bin")
    assert fp.Model.load(path).problem == Bare()
    monkeypatch.delitem(PROBLEMS, "bare")
    with pytest.raises(
        UnknownName,
        match=r"^problem of .+model\.bin must be one of .*, nonconvex_logistic, softmax, .*two_layer, got 'bare'",
    ):
        fp.Model.load(path)


def test_what_is_made_says_in_a_line_what_it_is(federation):
    """A notebook shows these: no arrays."""
    run = fp.run(fp.FedAvg(steps=2), PROBLEM, federation, rounds=2)
    shown = [repr(thing) for thing in (federation.dataset, federation, run, run.history)]
    for text, kind in zip(shown, ("Dataset", "Federation", "Run", "History"), strict=True):
        assert text.startswith(f"{kind}(")
        assert len(text) < 250
        assert "array" not in text
    assert f"{federation.clients} clients with {federation.sizes.min()} to {federation.sizes.max()} rows" in shown[1]
    assert f"2 rounds, all rounds were run; objective {run.summary['objective']:.6g}" in shown[2]
    assert "2 rounds: round, objective, gradient" in shown[3]


# NumPy's numbers are numbers


def test_numpy_numbers_are_taken_where_plain_ones_are():
    i, f = np.int64, np.float32
    dataset = fp.data.synthetic(rows=i(40), features=i(3), seed=i(1), noise=f(0.5))
    federation = dataset.split(clients=i(2), how="dirichlet", alpha=f(100), seed=i(0), holdout=f(0.25))
    assert dataset.split_features(clients=i(3), holdout=f(0.25)).features == 3
    made = [
        (fp.Logistic(l2=f(0.5)), fp.Logistic(l2=0.5)),
        (fp.LeastSquares(l2=f(0.5)), fp.LeastSquares(l2=0.5)),
        (fp.NonconvexLogistic(beta=f(0.5)), fp.NonconvexLogistic(beta=0.5)),
        (fp.TwoLayer(inputs=i(3), hidden=i(2), start=f(0.5)), fp.TwoLayer(inputs=3, hidden=2, start=0.5)),
        (fp.stop.Target("objective", f(0.5)), fp.stop.Target("objective", 0.5)),
        (fp.Poisson(f(0.5)), fp.Poisson(0.5)),
        (fp.LocalEngine(buckets=i(2)), fp.LocalEngine(buckets=2)),
    ]
    for numpy, plain in made:
        assert repr(numpy) == repr(plain)
    options = {"stop": made[4], "participation": made[5]}
    digests = {
        Experiment(
            fp.FedSGD(rate=rate), made[0][k], federation, **{name: two[k] for name, two in options.items()}
        ).digest()
        for k, rate in enumerate((f(0.5), 0.5))
    }
    assert len(digests) == 1


def test_ten_classes_are_sent_to_softmax():
    federation = fp.data.digits().split(clients=2)
    said = r"labels must be two classes for Logistic, got 10 classes \(0, .*4…\)\. .*Softmax\(inputs=64, classes=10\)"
    with pytest.raises(DataError, match=said):
        Experiment(fp.FedSGD(), fp.Logistic(), federation)
