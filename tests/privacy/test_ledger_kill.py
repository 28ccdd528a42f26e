"""SIGKILL at every point of a spending: the ledger is never below what was sent, and no resume spends twice."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from helpers_ledger import CLIENTS, releases

from fedpact.privacy import Ledger

#: What of the killed round is in the ledger afterwards, in releases, and whether it was sent.
POINTS = {
    "before writing": (0, False),
    "mid-line": (0, False),
    "mid-batch": (1, False),
    "all but the newline": (1, False),
    "after writing": (2, False),
    "after syncing": (2, False),
    "syncing the head": (2, False),
    "before the head": (2, False),
    "after the head": (2, False),
    "after sending": (2, True),
}


@pytest.fixture(scope="module")
def lives():
    helper = Path(__file__).with_name("helpers_ledger.py")
    process = subprocess.Popen([sys.executable, helper], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def live(folder, point, rounds):
        folder.mkdir(exist_ok=True)
        process.stdin.write(json.dumps({"folder": str(folder), "point": point, "rounds": rounds}) + "\n")
        process.stdin.flush()
        return json.loads(process.stdout.readline())["code"]

    yield live
    process.stdin.close()
    process.wait(30)


def sent(folder):
    text = (folder / "sent").read_text() if (folder / "sent").exists() else ""
    return max(map(int, text.split())) + 1 if text else 0


@pytest.mark.parametrize("rounds", [1, 4])
@pytest.mark.parametrize("point", POINTS)
def test_killed_at_every_point(lives, tmp_path, point, rounds):
    folder = tmp_path / "run"
    assert lives(folder, point, rounds) == -signal.SIGKILL
    kept, was_sent = POINTS[point]
    assert sent(folder) == rounds - 1 + was_sent
    book = Ledger(folder, read_only=True)
    assert book.head.lines >= len(CLIENTS) * sent(folder)
    assert book.head.lines == len(CLIENTS) * (rounds - 1) + kept
    with Ledger(folder) as ledger:  # the resumed run comes to the same round again
        assert ledger.head == book.head
        assert ledger.spend(releases(rounds - 1)) == len(CLIENTS) - kept
        assert ledger.spend(releases(rounds - 1)) == 0
        assert [row["releases"] for row in ledger.epsilon(1e-5)] == [rounds, rounds]
    assert Ledger(folder, read_only=True).torn == 0


def test_killed_again_and_again_it_ends_with_every_release_once(lives, tmp_path):
    folder = tmp_path / "run"
    for number, point in enumerate(POINTS, start=1):
        assert lives(folder, point, number) == -signal.SIGKILL
        assert Ledger(folder, read_only=True).head.lines >= len(CLIENTS) * sent(folder)
    assert lives(folder, "never", 12) == 0
    with Ledger(folder) as ledger:
        found = [release.key for release in ledger.releases]
    assert sorted(found) == sorted(release.key for t in range(12) for release in releases(t))
