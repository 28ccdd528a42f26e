"""`fedpact verify golden` against a literal recorder of the authors' code, and against their own recording."""

from __future__ import annotations

import json

import helpers_recorder
import numpy as np
import pytest
import scipy.io
import scipy.sparse
from helpers_recorder import record

import fedpact
import fedpact.verify
from fedpact.cli import main
from fedpact.core.errors import DataError, FedpactError
from fedpact.definition import use_compilation_cache
from fedpact.verify import Verified, golden

pytestmark = pytest.mark.drill

SMALL = {"m": 5, "k0": 4, "rounds": 3, "chosen": 3, "noise": "laplace"}
ANCHORS = [0.692714, 0.654566, 0.569512, 0.560644, 0.550031, 0.547204, 0.544797, 0.544019, 0.543535]


@pytest.fixture(scope="module")
def adult(adult_folder):
    x, y = helpers_recorder.adult(adult_folder)
    assert x.shape == (45222, 14)
    assert y.sum() == 11208
    return x, y


@pytest.fixture(scope="module", autouse=True)
def quick(adult):
    """Let the replays of this process read Adult once, and keep what they compiled."""
    dataset = fedpact.data.adult()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fedpact.verify.data, "adult", lambda: dataset)
        use_compilation_cache()
        yield


@pytest.fixture
def verify(capsys):
    """verify(file, …) is `fedpact verify golden file …` in this process: its exit code and what it printed."""

    def run(*arguments):
        code = main(["verify", "golden", *map(str, arguments)])
        return code, capsys.readouterr().out

    return run


@pytest.fixture(scope="module")
def small(adult, tmp_path_factory):
    """A recording of three rounds, and its fields."""
    path = tmp_path_factory.mktemp("recordings") / "small.mat"
    return path, record(path, adult, seed=len("Laplace noise"), **SMALL)


CASES = {
    "everyone, no noise": {"m": 6, "k0": 5, "rounds": 5},
    "one round, which loadmat squeezes": {"m": 11, "k0": 8, "rounds": 1, "chosen": 4, "noise": "normal"},
    "half of the clients, no noise, one local step": {"m": 7, "k0": 1, "rounds": 4, "chosen": 3},
    "Laplace noise": SMALL,
}


@pytest.mark.parametrize("case", CASES)
def test_a_recording_of_the_literal_recorder_is_replayed(adult, tmp_path, case):
    path = tmp_path / "recording.mat"
    fields = record(path, adult, seed=len(case), **CASES[case])
    if CASES[case]["rounds"] == 1:
        assert scipy.io.loadmat(path)["N"].ndim == 2
    found = golden(path)
    assert found.clients == CASES[case]["m"]
    assert found.rounds == CASES[case]["rounds"]
    assert np.allclose(np.array(found.recorded) * found.clients, fields["obj"].ravel(), rtol=1e-15, atol=0)
    assert len(found.replayed) == len(found.recorded)
    assert found.difference <= 1e-12
    assert found.passed
    assert np.ptp(fields["obj"]) > 1e-3, "a recording that does not move would be replayed by anything"


def test_the_authors_recording(command, adult, golden_folder):
    done = command("verify", "golden", golden_folder / "fedepm_m50_k12.mat", "--json")
    assert done.code == 0, done.err
    found = json.loads(done.out)
    assert found["passed"] is True
    assert (found["clients"], found["rounds"]) == (50, 8)
    assert found["difference"] <= 1e-12
    assert np.allclose(found["replayed"], ANCHORS, atol=5e-7)
    assert np.allclose(found["recorded"], ANCHORS, atol=5e-7)


def test_one_objective_off_by_2e_9_is_found(verify, small, tmp_path):
    fields = {name: np.array(value, dtype=float) for name, value in small[1].items()}
    fields["obj"][0, 2] += 2e-9 * 5  # obj is the sum over five clients
    scipy.io.savemat(tmp_path / "changed.mat", fields)
    code, out = verify(tmp_path / "changed.mat", "--json")
    assert code == 1
    found = json.loads(out)
    assert found["passed"] is False
    assert found["tolerance"] == 1e-9
    assert found["difference"] == pytest.approx(2e-9, rel=1e-3)
    assert found["worst_round"] == 2
    gaps = np.abs(np.array(found["recorded"]) - np.array(found["replayed"]))
    assert np.flatnonzero(gaps > 1e-12).tolist() == [2]


@pytest.mark.parametrize(("difference", "passed"), [(0.0, True), (1e-9, True), (1.001e-9, False), (np.inf, False)])
def test_what_is_allowed(difference, passed):
    assert Verified("x.mat", "fedepm", 5, 3, difference, 0, [], []).passed is passed


def test_a_recording_that_is_not_finite_differs_in_words(verify, small, tmp_path):
    fields = {name: np.array(value, dtype=float) for name, value in small[1].items()}
    fields["obj"][0, 1] = np.nan
    scipy.io.savemat(tmp_path / "changed.mat", fields)
    code, out = verify(tmp_path / "changed.mat")
    assert code == 1
    expected = "fedepm, 5 clients, 3 rounds: objective DIFFERS, largest difference inf in round 1 (allowed 1e-9)"
    assert expected in out


DAMAGED = {
    "no k0": (lambda f: f.pop("k0"), "without k0"),
    "no perm and Z0": (lambda f: (f.pop("perm"), f.pop("Z0")), "without perm, Z0"),
    "perm short": (lambda f: f.update(perm=f["perm"][:, 1:]), "perm must be a permutation of 1..45222"),
    "perm twice": (lambda f: f["perm"].__setitem__((0, 0), f["perm"][0, 1]), "perm must be a permutation of 1..45222"),
    "di short": (lambda f: f.update(di=f["di"][1:]), "m must be 4, the length of di, got 5"),
    "di zero": (
        lambda f: f.update(di=f["di"] + np.array([[0], [-1], [1], [0], [0]]) * f["di"][1, 0]),
        "di must be sizes of at least 1, got 0",
    ),
    "Z0 turned": (lambda f: f.update(Z0=f["Z0"].T), "di and Z0 must "),
    "Z0 narrow": (lambda f: f.update(Z0=f["Z0"][:, 1:]), "di and Z0 must "),
    "S short": (lambda f: f.update(S=f["S"][:2]), "S must have a row for each of 3 rounds, got 2"),
    "S beyond m": (lambda f: f["S"].__setitem__((1, 2), 6), "must be below 5, got "),
    "S twice": (lambda f: f["S"].__setitem__((1, 2), f["S"][1, 1]), "must be without repetition, got "),
    "N short": (lambda f: f.update(N=f["N"][:, :, :2]), "N must be 14×5×3, got (14, 5, 2)"),
    "N turned": (lambda f: f.update(N=f["N"].transpose(1, 0, 2)), "N must be 14×5×3, got (5, 14, 3)"),
    "k0 two numbers": (lambda f: f.update(k0=np.array([3.0, 4.0])), "k0"),
    "k0 zero": (lambda f: f.update(k0=0.0), "k0 must be an integer of at least 1, got 0."),
    "k0 a fraction": (lambda f: f.update(k0=2.5), "k0"),
    "obj empty": (lambda f: f.update(obj=np.empty((1, 0))), "obj"),
    "obj text": (lambda f: f.update(obj="hello"), "obj"),
}


@pytest.mark.parametrize("damage", DAMAGED)
def test_a_recording_that_does_not_fit_is_refused(small, tmp_path, damage):
    change, expected = DAMAGED[damage]
    fields = {name: np.array(value, dtype=float) for name, value in small[1].items()}
    change(fields)
    scipy.io.savemat(tmp_path / "damaged.mat", fields)
    with pytest.raises(FedpactError) as caught:
        golden(tmp_path / "damaged.mat")
    assert expected in str(caught.value)
    assert " must " in str(caught.value)
    assert "got" in str(caught.value)


def test_files_that_are_no_recordings(command, golden_folder, tmp_path):
    (tmp_path / "text.mat").write_text("hello")
    (tmp_path / "empty.mat").write_bytes(b"")
    (tmp_path / "folder.mat").mkdir()
    for name in ("text.mat", "empty.mat", "folder.mat", "nowhere.mat"):
        done = command("verify", "golden", name)
        assert done.code == 1
        assert done.err.startswith(f"fedpact: recording must be a .mat file, got '{name}'"), done.err
        assert done.err.count("\n") == 1
        with pytest.raises(DataError):
            golden(tmp_path / name)
    other = golden_folder / "inexact_admm_linear_full.mat"
    if not other.is_file():
        pytest.skip("no recording of another algorithm")
    done = command("verify", "golden", other)
    assert done.code in (0, 1)  # 0 once this algorithm can be replayed too
    assert "Traceback" not in done.err
    assert done.code == 0 or "without perm, di, Z0" in done.err


def _negative(di):
    out = np.array(di).ravel().astype(int)
    out[:2] = -5, out[0] + out[1] + 5
    return out


ODD = {
    "N as text": ("N", lambda f: "abc", "N must be numbers"),
    "N as a cell": ("N", lambda f: np.array(["a", 1], dtype=object), "N must be numbers"),
    "N complex": ("N", lambda f: f["N"] + 1j, "N must be numbers"),
    "N sparse": ("N", lambda f: scipy.sparse.csc_array(f["N"][:, :, 0]), "N must be 14×5×3, got"),
    "another m": ("m", lambda f: 3, "m must be 5, the length of di, got 3"),
    "negative clients": ("S", lambda f: -f["S"], "S must be a table of clients from 1"),
    "clients beyond counting": ("S", lambda f: f["S"] * 1e300, "S must be at most 2³¹−1"),
    "di of 0": ("di", lambda f: np.concatenate([[0], [f["di"].sum()], [1, 1, 1]]), "di must be sizes of at least 1"),
    "di negative": ("di", lambda f: _negative(f["di"]), "di must be sizes of at least 1, got -5"),
    "Z0 not finite": ("Z0", lambda f: f["Z0"] * np.nan, "Z0 must be finite"),
    "Z0 transposed": ("Z0", lambda f: f["Z0"].T, "di and Z0 must fit Adult"),
    "perm with a row twice": ("perm", lambda f: np.ones_like(f["perm"]), "perm must be a permutation"),
}


@pytest.mark.parametrize("case", ODD)
def test_odd_fields_of_a_recording_are_refused(small, tmp_path, capsys, case):
    field, change, text = ODD[case]
    fields = {k: v for k, v in scipy.io.loadmat(small[0]).items() if not k.startswith("__")}
    path = tmp_path / "odd.mat"
    scipy.io.savemat(path, fields | {field: change(fields)})
    assert main(["verify", "golden", str(path)]) == 1
    assert capsys.readouterr().err.startswith(f"fedpact: {text}")


@pytest.mark.parametrize("how", ["garbage", "empty", "cut", "flipped"])
def test_files_that_are_no_recording_are_refused(small, tmp_path, capsys, how):
    content = small[0].read_bytes()
    flipped = bytearray(content)
    flipped[130:140] = b"\xff" * 10
    damaged = {"garbage": b"x" * 3000, "empty": b"", "cut": content[: len(content) // 2], "flipped": bytes(flipped)}
    path = tmp_path / "odd.mat"
    path.write_bytes(damaged[how])
    assert main(["verify", "golden", str(path)]) == 1
    assert capsys.readouterr().err.startswith("fedpact: recording ")
