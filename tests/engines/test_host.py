"""The host engine: some clients at once, states on the host or on disk, several devices, kills."""

from __future__ import annotations

import gc
import itertools
import json
import mmap
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import deep_case as case
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from deep_case import flat

import fedpact as fp
from fedpact.core import checkpoint
from fedpact.core.errors import InvalidArgument
from fedpact.core.stop import Outcome
from fedpact.core.store import FOLDER, packed
from fedpact.engines import HostEngine, host

HERE = Path(__file__).resolve().parent


@pytest.fixture(scope="module")
def reference():
    """One client after the other."""
    return case.run()


@pytest.fixture
def stores(monkeypatch):
    """Every store that a run's rounds left, in order."""
    seen, keep = [], HostEngine.keep

    def noting(self, *args):
        seen.append(keep(self, *args))
        return seen[-1]

    monkeypatch.setattr(HostEngine, "keep", noting)
    return seen


# Some at once


@pytest.mark.parametrize("count", [2, pytest.param(8, marks=pytest.mark.drill)])
def test_clients_step_together_to_the_same_numbers(count, reference):
    """Nine clients of 4 to 6 rows: the last group is filled up with copies, which do not count."""
    run = case.run(HostEngine(at_once=count))
    np.testing.assert_allclose(flat(run.model), flat(reference.model), rtol=1e-12)
    for name in ("test_loss", "train_loss", "epochs", "gradients", "participants"):
        np.testing.assert_allclose(run.history.column(name)[1:], reference.history.column(name)[1:], rtol=1e-12)


@pytest.mark.drill
def test_left_out_the_number_is_measured_and_remembered(reference, tmp_path, monkeypatch):
    monkeypatch.setattr(host, "cache_folder", lambda: tmp_path)
    (tmp_path / "at_once.json").write_text("{torn")
    run = case.run(HostEngine(), rounds=2)
    (key,) = table = json.loads((tmp_path / "at_once.json").read_text())
    assert table[key] in host.CANDIDATES
    assert f"x{os.cpu_count()}" in key
    np.testing.assert_allclose(run.history.column("test_loss"), reference.history.column("test_loss")[:3], rtol=1e-12)
    monkeypatch.setattr(HostEngine, "_run", _counting(counts := []))
    (tmp_path / "at_once.json").write_text(json.dumps({key: 8}))
    case.run(HostEngine(), rounds=2, participation=[range(9), range(3)])
    assert set(counts) == {8, 1}  # as remembered for nine; three are fewer than the 8 it was measured with


@pytest.mark.parametrize(
    ("each", "best", "turns"),
    [
        ({1: [9, 4, 4, 4], 8: [9, 1]}, 8, 2),  # clear at once, and what compiles does not count
        ({1: [0, 1], 8: [0, 4]}, 1, 2),
        ({1: [9, 1.3, 1, 1], 8: [9, 1, 1, 1]}, 1, 4),  # the machine was busy for a moment: as quick as one
        ({1: [9, 1, 1, 1], 8: [9, 1.3, 1.3, 0.8]}, 8, 4),
        ({1: [9, 1, 1, 1], 8: [9, 0.95, 0.95, 0.95]}, 1, 4),  # not worth it
    ],
    ids=str,
)
def test_the_measurement_is_in_turns_until_it_is_clear(each, best, turns, tmp_path, monkeypatch):
    """A clock by hand: the seconds of each turn of all clients, one after the other and at once."""
    now, begun = [0.0], {1: 0, 8: 0}

    def taking(self, f, shared, data, clients, mine, stage, count):
        now[0] += each[count][begun[count] // (8 // count)] / (8 // count)
        begun[count] += 1

    monkeypatch.setattr(host, "cache_folder", lambda: tmp_path)
    monkeypatch.setattr(host, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    monkeypatch.setattr(HostEngine, "_run", taking)
    monkeypatch.setattr(HostEngine, "_kind", lambda *_: "such")
    assert HostEngine()._measured(None, None, None, None, range(10)) == best
    assert begun == {1: 8 * turns, 8: turns}
    assert json.loads((tmp_path / "at_once.json").read_text()) == {"such": best}


class _Known(Exception):
    """The kind of a program is known: that is all the test wants."""


def test_the_number_is_remembered_for_a_model_and_a_batch_and_for_every_rate(monkeypatch):
    """FedAvg's states are one number each: they tell nothing apart."""

    def kind(problem=case.PROBLEM, **changes):
        settings = fp.FedAvg(**{"epochs": 2, "batch": 3, "step": 0.05} | changes)
        with pytest.raises(_Known) as found:
            case.run(HostEngine(), settings=settings, problem=problem)
        return str(found.value)

    def noting(self, f, shared, data, clients, ids):
        raise _Known(self._kind(f, shared, data, clients, ids[0]))

    monkeypatch.setattr(HostEngine, "_measured", noting)
    usual = kind()
    assert kind() == kind(step=0.01) == usual
    others = [kind(batch=2), kind(batch=None), kind(momentum=0.5), kind(fp.TwoLayer(inputs=6, hidden=5, classes=3))]
    assert len({usual, *others}) == 5


def _counting(counts):
    run = HostEngine._run

    def noting(self, f, shared, data, clients, mine, stage, count):
        counts.append(count) if stage == "client_step" else None
        return run(self, f, shared, data, clients, mine, stage, count)

    return noting


def test_widths_are_few_and_hold_everyone():
    widths = host.padded_widths(np.array([600, 3, 77, 250]))
    assert widths[-1] == 600
    assert len(widths) == 13
    assert all(b * 2 // 3 == a for a, b in itertools.pairwise(widths))
    assert widths[0] >= 3  # and two thirds of it are fewer than the least
    assert widths[0] * 2 // 3 < 3
    assert host.padded_widths(np.array([300, 300])) == [300]


# Who takes part


def test_rounds_of_independent_clients_and_of_nobody(reference):
    """p_i of its own for everyone; with a small p rounds are empty, and change nothing."""
    scheme = fp.Independent([0.02] * 11 + [0.3])
    chosen = [len(scheme.select(1, t, 12)) for t in range(8)]
    assert 0 in chosen
    assert max(chosen) >= 1
    history = case.run(participation=scheme, rounds=8, seed=1).history
    assert history.column("participants")[1:].tolist() == chosen
    loss = history.column("test_loss")
    assert np.all(np.isfinite(loss))
    for t, count in enumerate(chosen):
        assert (loss[t + 1] == loss[t]) == (count == 0)


def test_states_exist_for_those_who_took_part_only(stores):
    case.run(participation=[[0, 3], [], [3, 7]], rounds=3)
    assert [dict(store.versions) for store in stores] == [{0: 1, 3: 1}, {0: 1, 3: 1}, {0: 1, 3: 3, 7: 3}]
    assert all(isinstance(leaf, np.ndarray) for leaf in stores[-1].held[3])


def test_clients_rows_are_indices_into_one_copy_of_the_data():
    federation = case.federation()
    _, rows = HostEngine().load([federation], np.float32)
    assert rows.index is federation.rows
    assert rows.x.shape == federation.dataset.x.shape


def test_large_states_have_memory_of_their_own_that_is_given_back():
    """In one mapping, as they were, whatever their types; what is small stays where it is."""
    state = {
        "w": jnp.arange(300_000, dtype=jnp.float32),
        "seen": jnp.asarray(True),
        "none": jnp.zeros((0, 3)),
        "y": -1.5,
    }
    own = packed(state)
    assert {name: (a.dtype, a.shape) for name, a in own.items()} == {
        name: (np.asarray(a).dtype, np.shape(a)) for name, a in state.items()
    }
    jax.tree.map(np.testing.assert_array_equal, own, state)
    assert isinstance(own["w"].base, mmap.mmap)
    assert all(a.ctypes.data % 64 == 0 for a in own.values())
    small = {"w": np.zeros(3)}
    assert packed(small) is small


# On disk


@pytest.mark.parametrize("named", [False, True])
def test_spilled_states_are_on_disk_and_the_run_is_the_same(named, stores, reference, tmp_path):
    (tmp_path / "mine.txt").write_text("not the engine's")
    engine = HostEngine(at_once=1, spill=str(tmp_path) if named else True)
    run = case.run(engine)
    np.testing.assert_array_equal(flat(run.model), flat(reference.model))
    folder = stores[-1].spill
    assert (folder.parent.parent == tmp_path) == named
    assert all(set(store.held.values()) == {None} for store in stores), "memory holds no state"
    names = {path.name for path in folder.iterdir()}
    kept = {f"{c:06d}-{v:09d}.bin" for store in stores[-2:] for c, v in store.versions.items()}
    assert names == kept, "the states of this round and of the one before it"
    assert (tmp_path / "mine.txt").read_text() == "not the engine's"
    stores.clear()
    del engine, run
    gc.collect()
    assert not folder.exists()


def test_runs_with_one_engine_have_states_of_their_own(stores):
    engine = HostEngine(at_once=1, spill=True)
    case.run(engine, rounds=1)
    first = stores[-1].spill
    kept = {path.name: path.read_bytes() for path in first.iterdir()}
    case.run(engine, rounds=2)
    assert stores[-1].spill != first
    assert {path.name: path.read_bytes() for path in first.iterdir()} == kept


def test_accuracy_is_right_answers_over_rows_also_in_single_precision():
    """As a target must see it: 0.45 in single precision is below 0.45."""
    found = case.run(rounds=4, precision="single").history.column("test_accuracy")
    np.testing.assert_array_equal(found, np.round(found * 30) / 30)


# A round that is not finite


def broken(tree, images):
    """Not a number for a client that holds a pixel of exactly 255."""
    return images @ tree["a"] * jnp.where(jnp.any(images == 255), jnp.nan, 1.0)


def test_a_round_that_is_not_finite_keeps_the_old_states_and_names_the_client(stores):
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(40, 4)), rng.integers(0, 2, 40).astype(float)
    x[30:35, 0] = 255
    clients = [(x[i : i + 5], y[i : i + 5]) for i in range(0, 40, 5)]
    federation = fp.data.Federation.from_arrays(clients, classes=["a", "b"])
    problem = fp.Network(broken, lambda key: {"a": jnp.zeros((4, 2))}, shape=(4,), classes=2)
    cohorts = [[0, 1, 2], [1, 3], [2, 6, 7], [0]]
    monkey = {"telemetry": "all", "evaluate_every": 10, "engine": HostEngine(at_once=1)}  # f at client 6 is NaN anyway
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            fp.core.loop.Loop, "_measure_all", lambda self, state, data, t: {"objective": 1.0, "gradient": 1.0}
        )
        run = fp.run(fp.FedADMM(epochs=1), problem, federation, participation=cohorts, rounds=4, **monkey)
        good = fp.run(fp.FedADMM(epochs=1), problem, federation, participation=cohorts[:2], rounds=2, **monkey)
    assert run.outcome_kind is Outcome.NONFINITE
    told = "its upload is not finite; at the model it was sent its loss was not finite either"
    assert run.where == f"round 2, client 6: {told}"
    assert run.history.rounds == 2
    np.testing.assert_array_equal(flat(run.model), flat(good.model))
    assert dict(stores[2].versions) == {0: 1, 1: 2, 2: 1, 3: 2}  # nothing of round 2, not even of clients 2 and 7


def test_a_learning_rate_that_diverges_stops_the_run():
    run = case.run(settings=fp.FedAvg(epochs=20, step=1e200), rounds=3)
    assert run.outcome_kind is Outcome.NONFINITE
    told = r"round 0, client \d+: its upload is not finite; at the model it was sent its loss was \d\.\d+"
    assert re.fullmatch(told, run.where)
    assert np.all(np.isfinite(flat(run.model)))
    assert any(notice.startswith("The run stopped: round 0, client ") for notice in run.notices)


# Several devices


EIGHT = """
import json, sys
sys.path.insert(0, {here!r})
import deep_case as case, fedpact as fp, jax
assert len(jax.devices()) == 8
run = case.run(fp.HostEngine(devices=None), rounds=4)
print(json.dumps([case.flat(run.model).tolist(), run.history.column("test_loss").tolist()]))
"""


@pytest.mark.drill
def test_eight_devices_share_the_clients(reference):
    """Eight virtual devices of one processor: nine clients are two calls, the second one filled up with copies."""
    env = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=8", "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-c", EIGHT.format(here=str(HERE))]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    model, loss = json.loads(done.stdout.splitlines()[-1])
    np.testing.assert_allclose(model, flat(reference.model), rtol=1e-11)
    np.testing.assert_allclose(loss, reference.history.column("test_loss"), rtol=1e-12)


# Kills


LONG = """
import sys
sys.path.insert(0, {here!r})
import deep_case as case, fedpact.folder, fedpact.report.html
fedpact.folder.CHECKPOINT_SECONDS = 0
fedpact.report.html.plots_section = lambda *_: ""
case.run(rounds={rounds}, folder={folder!r})
"""


@pytest.mark.drill
def test_killed_and_resumed_it_ends_with_the_same_bits(tmp_path, monkeypatch):
    monkeypatch.setattr("fedpact.report.html.plots_section", lambda *_: "")
    folder, rounds = tmp_path / "killed", 40
    command = [sys.executable, "-c", LONG.format(here=str(HERE), rounds=rounds, folder=str(folder))]
    process = subprocess.Popen(command, env=dict(os.environ), stderr=subprocess.PIPE)
    try:
        until = time.monotonic() + 200
        while len(list(folder.glob("checkpoint-*.bin"))) < 2 and process.poll() is None and time.monotonic() < until:
            time.sleep(0.005)
        assert process.poll() is None, process.stderr.read().decode()[-2000:]
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait(30)
    assert not (folder / "result.json").exists(), "it ended before it was killed"
    (folder / FOLDER / ".000000-000000099.bin.4242.tmp").write_bytes(b"half")  # what a kill inside a write leaves
    (folder / FOLDER / "000000-000000039.bin").write_bytes(b"of a checkpoint that never came to be")
    resumed = case.run(rounds=rounds, folder=folder, resume=True)
    straight = case.run(rounds=rounds)
    np.testing.assert_array_equal(flat(resumed.model), flat(straight.model))
    for name in ("test_loss", "train_loss", "participants", "gradients"):
        np.testing.assert_array_equal(resumed.history.column(name), straight.history.column(name))
    digest = fp.Experiment(
        case.SETTINGS, case.PROBLEM, case.federation(), 0.75, rounds, precision="double", engine=HostEngine(at_once=1)
    ).digest()
    listed = set()
    for path in folder.glob("checkpoint-*.bin"):
        listed |= set(checkpoint._versions(path).items())
    assert checkpoint.load(folder, digest).round == rounds
    assert {path.name for path in (folder / FOLDER).iterdir()} == {f"{c:06d}-{v:09d}.bin" for c, v in listed}


# What is refused


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"at_once": 0}, r"at_once must be an integer of at least 1, got 0"),
        ({"devices": 0}, r"devices must be an integer of at least 1, got 0"),
        ({"devices": 99}, r"devices must be at most the \d+ there are, got 99\. XLA_FLAGS=--xla_force_host"),
        ({"spill": ""}, r"spill must be true, false or a folder, got ''"),
        ({"spill": 1.5}, r"spill must be true, false or a folder, got 1\.5"),
    ],
    ids=str,
)
def test_bad_options(options, said):
    with pytest.raises(InvalidArgument, match=f"^{said}"):
        HostEngine(**options)


@pytest.mark.parametrize("devices", [3, None])
def test_clients_stepped_together_are_as_many_on_every_device(devices, monkeypatch):
    monkeypatch.setattr("fedpact.engines.host.jax.devices", lambda: [None] * 3)
    assert HostEngine(devices=devices, at_once=6).at_once == 6
    for count in (1, 4):
        with pytest.raises(InvalidArgument, match=rf"^at_once must be a multiple of the 3 devices, got {count}\."):
            HostEngine(devices=devices, at_once=count)


def test_trials_are_the_local_engine_s():
    with pytest.raises(InvalidArgument, match=r"^engine must be 'local' for vectorised trials, got 'host'\."):
        fp.trials(case.SETTINGS, case.PROBLEM, case.federation(), [0, 1], rounds=1)


def test_a_state_that_is_damaged_is_refused_on_resume(tmp_path, monkeypatch):
    monkeypatch.setattr("fedpact.report.html.plots_section", lambda *_: "")
    case.run(rounds=1, folder=tmp_path / "run")
    for path in (tmp_path / "run" / FOLDER).iterdir():
        path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(fp.CheckpointError, match=r"^state of a client must be whole, got a damaged or missing file "):
        case.run(rounds=2, folder=tmp_path / "run", resume=True)


@pytest.mark.drill
def test_stages_are_timed_and_telemetry_is_not():
    federation, problem = fp.data.digits().split(6, seed=0), fp.TwoLayer(inputs=64, hidden=4)
    settings = fp.FedAvg(epochs=1, batch=20, step=0.1)
    run = fp.run(settings, problem, federation, rounds=2, participation=0.5, engine=HostEngine(at_once=1), timing=True)
    local, whole = run.history.column("local_seconds")[1:], np.diff(run.history.column("seconds"))
    assert np.all(local > 0)
    assert np.all(local <= whole)
