from __future__ import annotations

import io
import sys

import pytest

from fedpact.report import Progress


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Latin(io.TextIOWrapper):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture(autouse=True)
def width(monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")


def pictures(stream):
    return [text.rstrip() for text in stream.getvalue().split("\r")[1:]]


def test_the_line_on_a_terminal_by_hand(clock):
    stream = Terminal()
    bar = Progress(40, "FedEPM", stream, clock=clock)
    clock.now = 30.0
    bar.update(10, objective=0.333123456, gradient=1.23456e-7, residual=0.5)
    assert pictures(stream) == [
        "FedEPM  [" + "█" * 8 + "░" * 22 + "]  10/40  f 0.333123  ‖∇f‖² 1.2346e-07  ‖w_i−w‖ 0.500000  0:30  1:30 left"
    ]


def test_it_redraws_at_most_ten_times_a_second_and_ends_with_the_last_round(clock):
    stream = Terminal()
    bar = Progress(1000, "x", stream, clock=clock)
    for k in range(1, 1001):
        clock.now += 0.002
        bar.update(k, objective=1.0 / k)
    bar.close("Done: 1,000 rounds.")
    shown = pictures(stream)
    assert 15 <= len(shown) <= 21  # two seconds, and the last picture
    assert "1,000/1,000" in shown[-1]
    assert "left" not in shown[-1]
    assert stream.getvalue().endswith("\nDone: 1,000 rounds.\n")


def test_a_constrained_run_shows_its_kkt_residual(clock):
    stream = Terminal()
    Progress(40, "SSCA", stream, clock=clock).update(10, objective=0.5, gradient=None, residual=None, kkt=1e-4)
    assert "f 0.500000  KKT 1.0000e-04" in stream.getvalue()


def test_what_was_not_measured_is_not_shown(clock):
    stream = Terminal()
    Progress(10, "x", stream, clock=clock).update(1, objective=float("nan"), gradient=0.5)
    assert "nan" not in stream.getvalue()
    assert "‖∇f‖² 0.500000" in stream.getvalue()


def test_a_shorter_line_covers_a_longer_one(clock):
    stream = Terminal()
    bar = Progress(10, "x", stream, clock=clock)
    bar.update(1, objective=1.0, gradient=0.5, residual=0.25)
    clock.now = 1.0
    bar.update(2)
    first, second = stream.getvalue().split("\r")[1:]
    assert len(second) >= len(first)


@pytest.mark.parametrize("columns", [20, 40, 60, 80, 200])
def test_it_fits_the_terminal(clock, monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", str(columns))
    stream = Terminal()
    bar = Progress(100, "A very long label of an algorithm, much too long", stream, clock=clock)
    clock.now = 4000.0
    bar.update(50, objective=0.5, gradient=0.25, residual=0.125)
    (shown,) = pictures(stream)
    assert len(shown) < columns
    assert "50/100" in shown
    assert ("‖∇f‖²" in shown) == (columns >= 200)
    assert ("‖w_i−w‖" in shown) == (columns >= 80)


def test_plain_lines_on_a_pipe_are_seldom(clock):
    stream = io.StringIO()
    bar = Progress(100, "FedEPM", stream, enabled=True, clock=clock)
    for k in range(1, 51):
        clock.now += 0.5
        bar.update(k, objective=0.5)
    bar.close("stopped: the target was reached.")
    assert stream.getvalue().splitlines() == [
        "FedEPM: 1/100, f 0.500000, 0:01, 0:50 left",
        "FedEPM: 21/100, f 0.500000, 0:11, 0:40 left",
        "FedEPM: 41/100, f 0.500000, 0:21, 0:30 left",
        "FedEPM: 50/100, f 0.500000, 0:25",
        "stopped: the target was reached.",
    ]


def test_it_is_on_only_for_a_terminal_unless_told(clock):
    for stream, enabled, speaks in (
        (io.StringIO(), None, False),
        (Terminal(), None, True),
        (Terminal(), False, False),
        (io.StringIO(), True, True),
    ):
        with Progress(2, "x", stream, enabled, clock=clock) as bar:
            bar.update(1)
        assert bool(stream.getvalue()) == speaks


def test_the_stream_is_the_standard_error_of_the_moment(clock, monkeypatch):
    stream = Terminal()
    monkeypatch.setattr(sys, "stderr", stream)
    Progress(2, "x", clock=clock).update(1)
    assert "1/2" in stream.getvalue()


def test_a_resumed_run_estimates_from_its_own_rounds(clock):
    stream = Terminal()
    bar = Progress(100, "x", stream, start=80, clock=clock)
    bar.update(80)
    assert "left" not in stream.getvalue()  # nothing to go by yet
    clock.now = 10.0
    bar.update(90)
    assert "0:10 left" in stream.getvalue()


def test_an_old_terminal_gets_plain_characters(clock):
    raw = io.BytesIO()
    stream = Latin(raw, encoding="ascii")
    bar = Progress(2, "Föd", stream, clock=clock)
    bar.update(1, gradient=0.5)
    stream.flush()
    assert raw.getvalue().decode("ascii").startswith("\rF?d  [###")
    assert b"|grad f|^2 0.500000" in raw.getvalue()


def test_a_closed_stream_does_not_stop_the_run(clock):
    stream = Terminal()
    bar = Progress(3, "x", stream, clock=clock)
    stream.close()
    bar.update(1)
    bar.close("done")
    assert not bar.enabled


def test_close_is_final_and_silent_when_nothing_happened(clock):
    stream = Terminal()
    bar = Progress(3, "x", stream, clock=clock)
    bar.close()
    bar.update(1)
    bar.close("again")
    assert stream.getvalue() == ""
