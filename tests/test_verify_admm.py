"""`fedpact verify golden` on recordings of inexact ADMM: the authors' own, and those of a literal recorder."""

from __future__ import annotations

import functools
import json
import os
from pathlib import Path

import numpy as np
import pytest
import scipy.io
import scipy.sparse
from helpers_recorder import record_admm

from fedpact.cli import main
from fedpact.core.errors import FedpactError
from fedpact.definition import use_compilation_cache
from fedpact.verify import golden

pytestmark = pytest.mark.drill

SHARED = Path(__file__).resolve().parents[2] / "shared" / "golden"


@pytest.fixture(scope="module", autouse=True)
def quick(cache):
    """Keep what the replays compiled."""
    use_compilation_cache()


@pytest.mark.parametrize("name", ["inexact_admm_linear_full.mat", "inexact_admm_logistic_half.mat"])
def test_the_authors_recordings(name):
    path = Path(os.environ.get("FEDPACT_GOLDEN") or SHARED) / name
    if not path.is_file():
        pytest.skip(f"no recording {path}")
    fields = scipy.io.loadmat(path)
    found = golden(path)
    assert found.algorithm == "inexact_admm"
    assert found.clients == fields["dim"].size
    assert found.rounds == fields["OBJ"].size - 1 >= 5
    np.testing.assert_array_equal(found.recorded, fields["OBJ"].ravel())
    assert found.difference <= 1e-12
    assert found.passed
    assert np.ptp(found.recorded) > 1e-3, "a recording that does not move would be replayed by anything"


SIZES = [7, 4, 12, 9]
ROWS = [[0, 2, 3], [1, 2], [0, 1, 2, 3], [2], [0, 3]]  # 0-based; shorter rows are filled with 0 in the file


@functools.cache
def table(linear, scale=1.0):
    rng = np.random.default_rng(3)
    a = scale * rng.normal(size=(sum(SIZES), 5))
    b = a @ rng.normal(size=5) + rng.normal(size=len(a))
    return a, b if linear else (b > 0).astype(float)


CASES = {
    "linear.mat": ({"linear": True, "k0": 3}, 1.0),
    "my_logistic_run.mat": ({"linear": False, "k0": 3}, 1.0),
    "linear_of_large_numbers.mat": ({"linear": True, "k0": 2}, 20.0),
}


@pytest.mark.parametrize("name", CASES)
def test_a_recording_of_the_literal_recorder_is_replayed(tmp_path, name):
    options, scale = CASES[name]
    path = tmp_path / name
    fields, taken = record_admm(path, *table(options["linear"], scale), SIZES, ROWS, **options)
    assert set(taken) == ({1} if scale == 1 else {2, 3}), "how many inner steps a case is meant to take"
    found = golden(path)
    assert (found.algorithm, found.clients, found.rounds) == ("inexact_admm", 4, 5)
    np.testing.assert_array_equal(found.recorded, fields["OBJ"].ravel())
    np.testing.assert_allclose(found.replayed, found.recorded, rtol=1e-11)
    assert found.passed
    assert np.ptp(found.recorded) > 1e-3


@pytest.fixture
def fields(tmp_path):
    """Of a recording of two rounds, to be changed."""
    out, _ = record_admm(tmp_path / "linear.mat", *table(True), SIZES, ROWS[:2], k0=2, linear=True)
    return {name: np.array(value, dtype=float) for name, value in out.items()}


def saved(folder, fields, name="linear.mat"):
    scipy.io.savemat(folder / name, fields)
    return folder / name


def test_a_sparse_matrix_is_a_matrix(tmp_path, fields):
    found = golden(saved(tmp_path, fields | {"A": scipy.sparse.csc_matrix(fields["A"])}))
    assert found.passed


def test_later_rows_of_s_are_not_needed(tmp_path, fields):
    fields["S"] = np.vstack([fields["S"], [[4.0, 0.0, 0.0]]])
    assert golden(saved(tmp_path, fields)).passed


def verify(capsys, *arguments):
    code = main(["verify", "golden", *map(str, arguments)])
    return code, capsys.readouterr().out


def test_one_objective_off_by_2e_9_is_found(tmp_path, fields, capsys):
    fields["OBJ"][0, 1] += 2e-9
    path = saved(tmp_path, fields)
    code, out = verify(capsys, path, "--json")
    assert code == 1
    found = json.loads(out)
    assert found["passed"] is False
    assert found["algorithm"] == "inexact_admm"
    assert found["difference"] == pytest.approx(2e-9, rel=1e-3)
    assert found["worst_round"] == 1
    gaps = np.abs(np.array(found["recorded"]) - np.array(found["replayed"]))
    assert np.flatnonzero(gaps > 1e-12).tolist() == [1]
    code, out = verify(capsys, path)
    assert code == 1
    assert "inexact_admm, 4 clients, 2 rounds: objective DIFFERS, largest difference 2e-09 in round 1" in out


@pytest.mark.parametrize("factor", [0.99, 1.01])
def test_it_is_the_data_that_are_replayed(tmp_path, fields, factor):
    fields["b"][0] *= factor
    assert not golden(saved(tmp_path, fields)).passed


def test_a_linear_recording_is_no_logistic_one(tmp_path):
    fields, _ = record_admm(tmp_path / "linear.mat", *table(False), SIZES, ROWS[:2], k0=2, linear=True)
    assert golden(tmp_path / "linear.mat").passed
    assert not golden(saved(tmp_path, fields, "logistic.mat")).passed


@pytest.mark.parametrize("name", ["recording.mat", "linear_logistic.mat", "LINEAR.mat"])
def test_the_name_says_which_problem_it_is(tmp_path, fields, name):
    with pytest.raises(FedpactError) as caught:
        golden(saved(tmp_path, fields, name))
    expected = f"recording of inexact ADMM must have 'linear' or 'logistic' in its name, got '{name}'"
    assert str(caught.value).startswith(expected)


DAMAGED = {
    "no OBJ": (lambda f: f.pop("OBJ"), "recording of inexact ADMM must have A, b, dim, k0, S, OBJ, got "),
    "no S and k0": (lambda f: (f.pop("S"), f.pop("k0")), " without k0, S. "),
    "dim short": (lambda f: f.update(dim=f["dim"][:, 1:]), "dim must be sizes of at least 1 that sum to the rows of A"),
    "dim zero": (lambda f: f.update(dim=np.array([[7.0, 0, 16, 9]])), "dim must be sizes of at least 1"),
    "dim a fraction": (lambda f: f.update(dim=f["dim"] + 0.5), "dim must be whole numbers, got 7.5"),
    "dim text": (lambda f: f.update(dim="seven"), "dim must be numbers, at least one, got <U5 of 1"),
    "b short": (lambda f: f.update(b=f["b"][1:]), "the rows of A and b, 32 and 31"),
    "b not finite": (lambda f: f["b"].__setitem__((2, 0), np.nan), "y of dataset 'linear.mat' must be finite, got nan"),
    "A not finite": (lambda f: f["A"].__setitem__((2, 1), np.inf), "x of dataset 'linear.mat' must be finite, got inf"),
    "A text": (lambda f: f.update(A="data"), "A must be numbers, at least one, got <U4 of 1"),
    "S short": (lambda f: f.update(S=f["S"][:1]), "S must have a row for each of 2 rounds, got 1"),
    "S beyond m": (lambda f: f["S"].__setitem__((1, 0), 5), "must be below 4, got "),
    "S twice": (lambda f: f["S"].__setitem__((1, 0), f["S"][1, 1]), "must be without repetition, got "),
    "S a fraction": (lambda f: f["S"].__setitem__((1, 0), 1.5), "S must be whole numbers, got 1.5"),
    "S not a number": (lambda f: f["S"].__setitem__((1, 0), np.nan), "S must be whole numbers, got nan"),
    "S text": (lambda f: f.update(S="all"), "S must be numbers, at least one, got <U3 of 1"),
    "k0 two numbers": (lambda f: f.update(k0=np.array([3.0, 4.0])), "k0 must be one whole number, got [3, 4]"),
    "k0 zero": (lambda f: f.update(k0=0.0), "k0 must be an integer of at least 1, got 0."),
    "k0 a fraction": (lambda f: f.update(k0=2.5), "k0 must be whole numbers, got 2.5"),
    "k0 not a number": (lambda f: f.update(k0=np.nan), "k0 must be whole numbers, got nan"),
    "OBJ empty": (lambda f: f.update(OBJ=np.empty((1, 0))), "OBJ must be numbers, at least one, got float64 of 0"),
    "OBJ text": (lambda f: f.update(OBJ="hello"), "OBJ must be numbers, at least one, got <U5 of 1"),
    "OBJ complex": (lambda f: f.update(OBJ=1j * f["OBJ"]), "OBJ must be numbers, at least one, got complex128 of 3"),
}


@pytest.mark.parametrize("damage", DAMAGED)
def test_a_recording_that_does_not_fit_is_refused(tmp_path, fields, damage):
    change, expected = DAMAGED[damage]
    change(fields)
    with pytest.raises(FedpactError) as caught:
        golden(saved(tmp_path, fields))
    assert expected in str(caught.value)
    assert " must " in str(caught.value)
    assert "got" in str(caught.value)


def test_labels_that_are_no_classes(tmp_path, fields):
    with pytest.raises(FedpactError, match=r"^y of dataset 'logistic\.mat' must be class codes 0\.\.1, got "):
        golden(saved(tmp_path, fields, "logistic.mat"))


def test_a_recording_that_is_not_finite_differs(tmp_path, fields, capsys):
    fields["OBJ"][0, 2] = np.nan
    code, out = verify(capsys, saved(tmp_path, fields), "--json")
    assert code == 1
    assert json.loads(out)["difference"] is None  # JSON has no infinity
    assert json.loads(out)["worst_round"] == 2
