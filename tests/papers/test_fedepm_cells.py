"""What the FedEPM figures keep of their runs, and the stop rules behind CR. Nothing longer than the recording runs."""

from __future__ import annotations

import math
from types import SimpleNamespace

import helpers_recorder
import numpy as np
import pytest
import scipy.io

import fedpact.verify
from fedpact.core.history import History
from fedpact.core.stop import Outcome, first_fired
from fedpact.engines import LocalEngine
from fedpact.papers import fedepm_cells as cells
from fedpact.papers.fedepm import TUNED
from fedpact.papers.study import Study
from fedpact.tune import rungs


def ended(kind, rounds, objective=0.5):
    """A finished run as far as a cell looks at it."""
    history = History(("round", "objective", "snr", "seconds", "local_seconds"))
    steps = np.arange(rounds + 1.0)
    history.extend(
        {
            "round": steps,
            "objective": np.full(rounds + 1, objective),
            "snr": steps,
            "seconds": steps / 10,
            "local_seconds": steps / 100,
        }
    )
    return SimpleNamespace(history=history, outcome_kind=kind, outcome=kind.value)


# What is kept


def test_trials_that_did_not_stop_count_one_more_than_the_most_rounds():
    """A run that ends in a NaN after 3 rounds has not needed 3 rounds; one that stops in the last round has."""
    kinds = [(Outcome.STOPPED, 8), (Outcome.NONFINITE, 3), (Outcome.ROUNDS, 150), (Outcome.STOPPED, 150)]
    kept = cells.ends_of([ended(*kind) for kind in kinds])
    assert kept["cr"] == [8, 151, 151, 150]
    assert kept["ended"] == ["STOPPED", "NONFINITE", "ROUNDS", "STOPPED"]
    assert kept["snr"] == [8, 3, 150, 150]
    assert kept["objective"] == [0.5] * 4


def test_a_run_that_ended_in_a_nan_has_no_time():
    kept = cells.clocks_of([ended(Outcome.STOPPED, 8), ended(Outcome.NONFINITE, 3), ended(Outcome.ROUNDS, 150)])
    assert kept["tct"] == [0.8, math.inf, 15.0]
    assert kept["lct"] == pytest.approx([0.045, 0.02, 0.755])
    assert kept["ended"] == ["STOPPED", "NONFINITE", "ROUNDS"]


@pytest.mark.parametrize("keep", [cells.ends_of, cells.clocks_of])
def test_interrupted_runs_are_not_kept(keep):
    with pytest.raises(KeyboardInterrupt):
        keep([ended(Outcome.STOPPED, 8), ended(Outcome.INTERRUPTED, 40)])


def test_rounds_needed_of_a_record():
    """A rule that never fires counts 151, however short the record: its run ended in a NaN."""
    rule = cells.released_stop(50, 14)
    falling = {"objective": [0.69, 0.6, 0.57, 0.55], "gradient": [1e-3, 1e-4, 1e-5, 1.39e-8]}
    assert cells.rounds_needed(rule, falling) == 3
    assert cells.rounds_needed(rule, {name: values[:3] for name, values in falling.items()}) == 151


# What decides a cell


@pytest.fixture
def faked(monkeypatch):
    """`trials` and `run` return at once; how often, and with which settings."""
    calls = []

    def trials(settings, problem, splits, seeds, **options):
        calls.append(settings)
        return [ended(Outcome.STOPPED, 5 + seed) for seed in seeds]

    def run(settings, problem, federation, **options):
        calls.append(settings)
        one = ended(Outcome.STOPPED if "stop" in options else Outcome.ROUNDS, 4)
        one.history.column = lambda name: np.arange(5.0)
        return one

    monkeypatch.setattr(cells, "trials", trials)
    monkeypatch.setattr(cells, "run", run)
    monkeypatch.setattr(cells, "adult", lambda: SimpleNamespace(features=14))
    monkeypatch.setattr(cells, "split", lambda m, seed: SimpleNamespace(digest=f"cuts {m} {seed}"))
    monkeypatch.setattr(cells, "tuned_scale", lambda study, cls, m: 1.0)
    return calls


def outcomes(folder, name="SFedAvg tuned", m=50):
    return cells.outcomes(Study(folder, folder / "cells.jsonl", True), name, m, 12, 0.5, 0.1, 3)


def test_whatever_decides_a_cell_is_in_its_key(faked, tmp_path, monkeypatch):
    assert outcomes(tmp_path)["cr"] == [5, 6, 7]
    outcomes(tmp_path)
    assert len(faked) == 1
    for number, (name, value) in enumerate(
        [
            ("tuned_scale", lambda study, cls, m: 0.3),
            ("split", lambda m, seed: SimpleNamespace(digest="another")),
            ("released_stop", cells.printed_stop),
            ("ENGINE", LocalEngine(buckets=3)),
            ("ROUNDS", 151),
        ],
        2,
    ):
        monkeypatch.setattr(cells, name, value)
        outcomes(tmp_path)
        outcomes(tmp_path)
        assert len(faked) == number, name


def test_figures_share_their_cells_and_times_are_others(faked, tmp_path):
    study = Study(tmp_path, tmp_path / "cells.jsonl", True)
    for _ in range(2):
        cells.outcomes(study, "FedEPM", 50, 12, 0.5, 0.1, 3)
        cells.times(study, "FedEPM", 50, 12, 0.5, 0.1)
        cells.recorded(study, "FedEPM", 50, 12, 0.5, 0.1)
    assert len(faked) == 1 + cells.TIMED + 1
    again = cells.recorded(Study(tmp_path, tmp_path / "cells.jsonl", True), "FedEPM", 50, 12, 0.5, 0.1)
    assert again == {name: [0, 1, 2, 3, 4] for name in ("round", "objective", "gradient")} | {"ended": "ROUNDS"}
    assert len(faked) == 1 + cells.TIMED + 1


def test_what_the_lead_says_of_the_tuning():
    """Three candidates are compared after all 27 rounds."""
    assert rungs(len(cells.SCALES), cells.TUNE_ROUNDS, "halving") == [(3, 27)]
    assert "the best of 0.3, 1 and 1.9 after 27 rounds at k0=12" in TUNED
    assert cells.SCALES == (0.3, 1.0, 1.9)


# The stop rules


def test_the_printed_rule_is_of_the_sum_over_clients():
    """m = 50, n = 14: ‖∇Σf_i‖² < 1e-6 is ‖∇f/m‖² < 4e-10; var(Σf_i) ≤ 14e-8/(1 + Σf_i), here 14e-8/26 = 5.38e-9.

    f/m in steps of d has Σf_i of variance 2500 · 5/3 · d² ≤ 5.38e-9 for d ≤ 1.137e-6.
    """
    rule = cells.printed_stop(50, 14)
    slow = lambda d: {"objective": [0.5 + d * k for k in (3, 2, 1, 0)], "gradient": [1.0] * 4}
    assert first_fired(rule, slow(1.13e-6)) == 3
    assert first_fired(rule, slow(1.15e-6)) is None
    assert first_fired(rule, {"objective": [0.6, 0.5], "gradient": [1.0, 3.9e-10]}) == 1
    assert first_fired(rule, {"objective": [0.6, 0.5], "gradient": [1.0, 4.1e-10]}) is None
    rising = {"objective": [0.5, 0.6, 0.7, 0.8], "gradient": [1.0, 2.0, 3.0, 4.0]}
    assert first_fired(rule, rising) is None


def test_the_released_rule_has_the_mean_s_gradient_the_sum_s_variance_and_a_third_test():
    """tol = 14e-9: ‖∇f/m‖² < 1.4e-8; var(Σf_i) ≤ 14e-9/26 = 5.38e-10, d ≤ 3.59e-7; or both above their last three."""
    rule = cells.released_stop(50, 14)
    slow = lambda d: {"objective": [0.5 + d * k for k in (3, 2, 1, 0)], "gradient": [1.0] * 4}
    assert first_fired(rule, slow(3.5e-7)) == 3
    assert first_fired(rule, slow(3.7e-7)) is None
    assert first_fired(rule, {"objective": [0.6, 0.5], "gradient": [1.0, 1.39e-8]}) == 1
    assert first_fired(rule, {"objective": [0.6, 0.5], "gradient": [1.0, 1.41e-8]}) is None
    rising = {"objective": [0.5, 0.6, 0.7, 0.8], "gradient": [1.0, 2.0, 3.0, 4.0]}
    assert first_fired(rule, rising) == 3
    assert first_fired(rule, rising | {"gradient": [1.0, 2.0, 3.0, 3.0]}) is None


@pytest.fixture(scope="module")
def recording(adult_folder, golden_folder):
    """The authors' recording, and the history of its replay."""
    path, kept = golden_folder / "fedepm_m50_k12.mat", []
    with pytest.MonkeyPatch.context() as patch:
        drive = fedpact.verify.drive

        def keep(*args, **options):
            kept.extend(drive(*args, **options))
            return kept

        patch.setattr(fedpact.verify, "drive", keep)
        fedpact.verify.golden(path)
    return scipy.io.loadmat(str(path)), kept[0].history


@pytest.mark.drill
def test_the_authors_code_stopped_where_the_released_rule_does(recording, adult_folder):
    """Row 8, where their run ends: ‖∇f/m‖² = 1.313e-8 < 1.4e-8, by NumPy at their own solution. By no test before."""
    fields, history = recording
    x, y = helpers_recorder.adult(adult_folder)
    blocks = np.split(fields["perm"].ravel().astype(int) - 1, np.cumsum(fields["di"].ravel().astype(int))[:-1])
    w = fields["sol"].ravel()
    slope = np.mean([helpers_recorder.gradient(w, x[block], y[block]) for block in blocks], axis=0)
    assert slope @ slope == pytest.approx(1.313e-8, rel=1e-3)
    assert history.column("gradient")[8] == pytest.approx(slope @ slope, rel=1e-6)
    columns = {name: history.column(name) for name in ("objective", "gradient")}
    assert int(fields["cr"].item()) == len(fields["obj"].ravel()) - 1 == 8
    assert first_fired(cells.released_stop(50, 14), columns) == 8
    assert first_fired(cells.printed_stop(50, 14), columns) is None


def test_the_recorded_first_messages_have_a_deviation_of_about_one_over_mu0(golden_folder):
    """1/μ_{i,0} = 20, for small and large clients alike: ε_i⁰ is scaled by neither data nor ε."""
    fields = scipy.io.loadmat(str(golden_folder / "fedepm_m50_k12.mat"))
    first, order = fields["Z0"], np.argsort(fields["di"].ravel())
    assert np.std(first) == pytest.approx(19.27, abs=0.01)
    small, large = np.std(first[:, order[:25]]), np.std(first[:, order[25:]])
    assert small / large == pytest.approx(1, abs=0.15)
