"""The round loop, followed with an algorithm simple enough to do in the head."""

from __future__ import annotations

import os
import signal
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest
from toy_loop import COHORTS, Clients, ClientState, followed, run_toy, toy

from fedpact.core import checkpoint, driver
from fedpact.core.contract import Batch
from fedpact.core.errors import ClientError
from fedpact.core.history import History
from fedpact.core.loop import Loop
from fedpact.core.stop import Never, Outcome, Rounds, Target, Variance
from fedpact.engines import DebugEngine, LocalEngine

ONE = LocalEngine(buckets=1)
engines = pytest.mark.parametrize("engine", [ONE, DebugEngine()], ids=["local", "debug"])


def columns(end):
    return {name: end.history.column(name) for name in end.history.columns}


@engines
def test_row_t_is_measured_after_t_rounds(engine):
    _, end = run_toy(engine=engine)
    rows, history = followed(COHORTS), columns(end)
    took_part = [len(chosen) for chosen in COHORTS]
    np.testing.assert_array_equal(history["round"], range(6))
    np.testing.assert_allclose(history["objective"], [1.5 + row["w"] for row in rows], rtol=1e-15)
    np.testing.assert_allclose(history["gradient"], [2 * row["w"] ** 2 for row in rows], rtol=1e-14)
    np.testing.assert_array_equal(history["participants"], [0, *took_part])
    np.testing.assert_array_equal(history["gradients"], 2 * np.cumsum([0, *took_part]))
    np.testing.assert_array_equal(history["bytes_up"], 4 * 8 + 16 * np.cumsum([0, *took_part]))
    np.testing.assert_array_equal(history["bytes_down"], 16 * np.cumsum([0, *took_part]))
    for name in ("times", "least", "most", "middle", "present"):
        np.testing.assert_array_equal(history[name], [row[name] for row in rows], err_msg=name)
    assert "accuracy" not in history
    np.testing.assert_allclose(end.model.tree["w"], [rows[-1]["w"]] * 2, rtol=1e-15)
    assert end.outcome is Outcome.ROUNDS
    assert end.where == ""
    assert np.all(np.diff(history["seconds"]) >= 0)


def test_where_a_run_is_cut_into_blocks_does_not_change_its_bits(monkeypatch):
    cohorts = COHORTS * 5
    ends = {}
    for seconds in (1e-9, 1e9):  # one round at a time after the first two; or as many as a block holds
        monkeypatch.setattr(driver, "BLOCK_SECONDS", seconds)
        sizes = []
        after = lambda carry, history, elapsed, sizes=sizes: sizes.append(history.rounds)
        _, ends[seconds] = run_toy(engine=ONE, cohorts=cohorts, after_block=after)
        assert len(sizes) == (24 if seconds < 1 else 2)
    a, b = (columns(end) for end in ends.values())
    for name in a:
        if name != "seconds":
            np.testing.assert_array_equal(a[name], b[name])


def test_a_rule_ends_the_run_in_the_round_it_is_met():
    """w after rounds 0..5 is 0, 2.5, 5.5, 5.5, 17.5, …: f = 1.5 + w first reaches 6 in round 2."""
    _, end = run_toy(stop=Target("objective", 6.0, above=True))
    assert end.outcome is Outcome.STOPPED
    assert end.where == "round 2, objective ≥ 6"
    assert end.history.rounds == 2
    assert len(end.history) == 3
    assert float(end.model.tree["w"][0]) == followed(COHORTS)[2]["w"]


@engines
def test_never_is_a_target_that_is_not_met(engine):
    """The loop carries nothing for a rule that reads nothing; every number is as with a rule that never fires."""
    ends = [run_toy(engine=engine, stop=rule, evaluate_every=2)[1] for rule in (Never(), Target("objective", -1e300))]
    assert [end.outcome for end in ends] == [Outcome.ROUNDS] * 2
    a, b = map(columns, ends)
    for name in set(a) - {"seconds"}:
        np.testing.assert_array_equal(a[name], b[name])


@engines
@pytest.mark.parametrize(("every", "last"), [(1, 1), (2, 2)])
def test_a_rule_that_is_met_at_the_start_ends_the_first_measured_round(engine, every, last):
    """Row 0 has f = 1.5 and stops nothing, nor do rounds between measurements, whose last measured row is row 0."""
    _, end = run_toy(engine=engine, evaluate_every=every, stop=Target("objective", 1.5, above=True))
    assert end.outcome is Outcome.STOPPED
    assert end.history.rounds == last


def test_row_0_alone_does_not_meet_a_rule():
    """f = 1.5 at the start and more from round 1 on."""
    assert run_toy(stop=Target("objective", 1.5))[1].outcome is Outcome.ROUNDS


def test_a_window_counts_from_the_start():
    """Rounds 2 and 3 have the same objective (nobody in the third): two of them are flat in round 3, three never."""
    assert run_toy(stop=Variance(1e-9, window=2))[1].history.rounds == 3
    assert run_toy(stop=Variance(1e-9, window=3))[1].outcome is Outcome.ROUNDS
    assert run_toy(stop=Rounds(4) | Variance(1e-9, window=3))[1].history.rounds == 4


def test_a_number_that_is_not_finite_stops_the_run_and_names_the_client():
    """Client 3 stands second by size; its second time is round 1. The state is the one after round 0: f_3 = 3 + w₀."""
    _, end = run_toy(toy(explodes=(3, 2)), engine=ONE)
    assert end.outcome is Outcome.NONFINITE
    assert end.where == "round 1, client 3: its upload is not finite; at the model it was sent its loss was 5.5"
    assert end.history.rounds == 1
    assert len(end.history) == 2
    np.testing.assert_array_equal(end.model.tree["w"], [followed(COHORTS)[1]["w"]] * 2)
    assert np.all(np.isfinite(end.history.column("objective")))


def test_the_debug_engine_raises_there_and_then():
    sentence = r"\['w'\].* is not finite; at the model it was sent its loss was 5\.5\.$"
    with pytest.raises(ClientError, match=rf"^round 1, client 3, client_step: .*{sentence}"):
        run_toy(toy(explodes=(3, 2)))


class Open:
    """A guard that lets everything through."""

    oracle, central = None, False

    def measures(self, w, batch):
        return {}

    def released(self, msg, before, state, batch, upload, t, key):
        return state, upload


def test_a_private_run_does_not_tell_a_loss():
    _, end = run_toy(toy(explodes=(3, 2)), engine=ONE, guard=Open())
    assert end.where == "round 1, client 3: its upload is not finite"
    with pytest.raises(ClientError, match=r"^round 1, client 3, client_step: [^;]* is not finite\.$"):
        run_toy(toy(explodes=(3, 2)), guard=Open())


@pytest.mark.parametrize(("rows", "parts"), [(3, [3]), (500, [500]), (501, [251, 250]), (1203, [401, 401, 401])])
@pytest.mark.parametrize("network", [True, False])
def test_a_network_s_loss_is_looked_at_a_few_rows_at_a_time(rows, parts, network):
    """All the client's rows count once and its padding does not; a penalty that is divided by the rows needs all."""
    seen = []

    def value(w, batch):
        seen.append(len(batch.y))
        return jnp.sum(batch.weight * batch.y) / batch.rows

    name, f = ("test_value", value) if network else ("value_and_gradient", lambda w, b: (value(w, b), None))
    y, weight = np.concatenate([np.arange(rows), np.full(9, 1e9)]), (np.arange(rows + 9) < rows).astype(float)
    batch = Batch(jnp.zeros((rows + 9, 2)), jnp.asarray(y), jnp.asarray(weight), jnp.asarray(1))
    engine = SimpleNamespace(compiled=True, eager=False, one_client=lambda data, position: data[position])
    loop = Loop(toy(), SimpleNamespace(**{name: f}), engine, Never(), 1, False)
    told = loop.loss_before(SimpleNamespace(w=None), [None, batch], 1)
    assert told == f"; at the model it was sent its loss was {(rows - 1) / 2:.4g}"
    assert seen == (parts if network else [rows + 9])


def test_what_a_guard_releases_is_sent_and_what_it_keeps_is_kept():
    """The guard sees the state before the step and after it; the server gets the upload that the guard returns."""

    class Twice:
        oracle, central = None, False

        def measures(self, w, batch):
            return {}

        def released(self, msg, before, state, batch, upload, t, key):
            return ClientState(before.times + 100 * (state.times - before.times)), upload._replace(w=2.0 * upload.w)

    _, end = run_toy(cohorts=((0, 3), (0,)), guard=Twice())
    _, plain = run_toy(cohorts=((0, 3), (0,)))
    assert end.history.column("times")[-1] == (200 + 100) / 4
    assert plain.history.column("times")[-1] == (2 + 1) / 4
    first = lambda one: one.history.column("objective")[1] - one.history.column("objective")[0]
    assert first(end) == 2 * first(plain) != 0


def test_a_run_that_was_cut_goes_on_to_the_same_bits(tmp_path):
    """Two rounds, a checkpoint, three more: state, notes, recent rows and history are those of five rounds at once."""
    stop = Variance(1e-9, window=3)

    def keep(carry, history, elapsed):
        (tmp_path / "history.csv").write_text(history.lines(), encoding="utf-8")
        checkpoint.save(tmp_path, carry, "these settings", history.rounds, 0, elapsed)

    whole = run_toy(stop=stop)[1]
    first = run_toy(rounds=2, stop=stop, after_block=keep)[1]
    assert first.history.rounds == 2
    found = checkpoint.load(tmp_path, "these settings")
    past = History.read(tmp_path / "history.csv")
    resumed = driver.Resumed(lambda carry: checkpoint.restore(carry, found.leaves), past, found.elapsed)
    _, end = run_toy(stop=stop, resumed=resumed)
    a, b = columns(whole), columns(end)
    for name in a:
        if name != "seconds":
            np.testing.assert_array_equal(a[name], b[name])
    np.testing.assert_array_equal(end.model.tree["w"], whole.model.tree["w"])
    assert b["seconds"][-1] > b["seconds"][2] > 0


@engines
def test_telemetry_every_few_rounds(engine):
    """Rows between are empty but for the last; the rounds themselves are the same."""
    _, end = run_toy(engine=engine, evaluate_every=2)
    history, rows = columns(end), followed(COHORTS)
    np.testing.assert_array_equal(np.isnan(history["objective"]), [False, True, False, True, False, False])
    np.testing.assert_allclose(history["objective"][[0, 2, 4, 5]], [1.5 + rows[t]["w"] for t in (0, 2, 4, 5)])
    np.testing.assert_array_equal(history["participants"], [0, 2, 3, 0, 1, 4])
    np.testing.assert_allclose(end.model.tree["w"], [rows[-1]["w"]] * 2, rtol=1e-15)


def test_rules_look_at_measured_rounds_only():
    _, end = run_toy(engine=ONE, evaluate_every=2, cohorts=COHORTS * 2, stop=Rounds(3))
    assert end.history.rounds == 4


def test_the_clock_of_a_round_is_that_round_s(monkeypatch):
    """timing=True: local_seconds of row t is the time of that round's steps, also where a rule ends a block early."""
    monkeypatch.setattr(driver, "BLOCK_SECONDS", 1e9)
    loop, end = run_toy(engine=ONE, cohorts=COHORTS * 3, timing=True, stop=Rounds(5))
    assert end.history.rounds == 5
    assert len(loop.clock["local"]) == len(loop.clock["server"]) == 5
    np.testing.assert_array_equal(end.history.column("local_seconds")[1:], loop.clock["local"])
    spent = np.cumsum(np.add(loop.clock["local"], loop.clock["server"]))
    np.testing.assert_allclose(end.history.column("seconds")[1:], spent, rtol=1e-12)


def test_one_interrupt_finishes_the_block_and_two_stop_at_once(monkeypatch):
    monkeypatch.setattr(driver, "BLOCK_SECONDS", 1e-9)
    before = signal.getsignal(signal.SIGINT)
    once = lambda carry, history, elapsed: os.kill(os.getpid(), signal.SIGINT) if history.rounds == 3 else None
    _, end = run_toy(after_block=once)
    assert end.outcome is Outcome.INTERRUPTED
    assert end.history.rounds == 3
    assert signal.getsignal(signal.SIGINT) is before

    def twice(carry, history, elapsed):
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        run_toy(after_block=twice)
    assert signal.getsignal(signal.SIGINT) is before


def test_the_toy_is_what_it_says():
    assert np.argsort(Clients.sizes, kind="stable").tolist() == [1, 3, 2, 0]
    assert [row["w"] for row in followed(COHORTS)][:4] == [0, 2.5, 2.5 + (2 + 3 + 8) / 3, 2.5 + (2 + 3 + 8) / 3]
