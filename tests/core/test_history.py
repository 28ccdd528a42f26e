"""History: the numbers that come back from the file are those that went in, bit for bit."""

from __future__ import annotations

import math

import numpy as np
import pytest

from fedpact.core.errors import CheckpointError, UnknownName
from fedpact.core.history import History

COLUMNS = ["round", "objective", "participants", "bytes_up", "bytes_down", "snr"]


def block(first, count, seed=0):
    rng = np.random.default_rng(seed)
    return {
        "round": np.arange(first, first + count),
        "objective": rng.normal(size=count) * 10.0 ** rng.integers(-300, 300, count),
        "participants": rng.integers(0, 50, count),
        "bytes_up": rng.integers(0, 2**52, count),
        "bytes_down": rng.integers(0, 2**52, count),
        "snr": np.where(rng.random(count) < 0.5, np.nan, rng.normal(size=count)),
        "not a column": np.zeros(count),
    }


def filled():
    history = History(COLUMNS)
    history.extend(block(0, 30))
    odd = {name: values[:6].astype(float) for name, values in block(30, 6, seed=1).items()}
    odd["objective"] = np.array([math.inf, -math.inf, 5e-324, -0.0, 1 / 3, math.nextafter(1, 2)])
    history.extend(odd)
    return history


def test_the_file_gives_back_the_same_bits(tmp_path):
    history = filled()
    path = tmp_path / "history.csv"
    path.write_bytes(history.lines().encode())
    again = History.read(path)
    assert again.columns == COLUMNS
    assert len(again) == len(history) == 36
    for name in COLUMNS:
        a, b = history.column(name), again.column(name)
        np.testing.assert_array_equal(np.isnan(a), np.isnan(b))
        known = ~np.isnan(a)
        np.testing.assert_array_equal(a[known].view(np.uint64), b[known].view(np.uint64))
    assert again.lines() == history.lines()


def test_written_block_by_block_it_is_the_same_file():
    history = filled()
    assert history.lines()[: len(history.lines(0)) - len(history.lines(30))] + history.lines(30) == history.lines()
    assert history.lines(30).count("\n") == 6
    assert history.lines(36) == ""
    assert history.lines().startswith("round,objective,")


def test_what_was_not_measured_is_an_empty_cell():
    history = History(["round", "objective", "snr"])
    history.extend({"round": [0], "objective": [0.5], "snr": [math.nan]})
    assert history.lines() == "round,objective,snr\n0,0.5,\n"


def test_the_newest_measured_value():
    history = History(["round", "objective", "snr"])
    assert history.rounds == 0
    history.extend({"round": [0, 1, 2], "objective": [3, 2, math.nan], "snr": [math.nan] * 3})
    assert history.rounds == 2
    assert history.last("objective") == 2
    assert math.isnan(history.last("snr"))


def test_an_unknown_column_is_named_with_the_nearest():
    with pytest.raises(UnknownName, match=r"^column must be one of .+, got 'objectiv'\. Did you mean 'objective'\?$"):
        filled().column("objectiv")
    with pytest.raises(UnknownName, match=r"got 'objectiv'\. Did you mean 'objective'\?$"):
        filled().last("objectiv")


DAMAGED = {
    "a cut line": (b"round,objective\n0,0.5\n1\n", "of 2 cells a line, got 1 in "),
    "a word": (b"round,objective\n0,half\n", "of numbers, got 'half' in column 'objective' of "),
    "another table": (b"a,b\n1,2\n", "a table with a column 'round', got ['a', 'b'] in "),
    "nothing": (b"", "a table with a column 'round', got nothing in "),
    "no text": (b"round\n\xff\n", "a table in UTF-8, got "),
}


@pytest.mark.parametrize("kind", DAMAGED)
def test_a_damaged_file_is_refused_with_what_to_do(tmp_path, kind):
    content, said = DAMAGED[kind]
    path = tmp_path / "history.csv"
    path.write_bytes(content)
    with pytest.raises(CheckpointError) as caught:
        History.read(path)
    assert str(caught.value).startswith(f"history.csv must be {said}")
    assert str(path) in str(caught.value)
    assert str(caught.value).endswith(". Put back the file that the run wrote, or run it again.")
