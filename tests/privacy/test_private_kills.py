"""SIGKILL at every point of a private round: what was sent is in the ledger, nothing is sent twice with other numbers,
and the resumed run ends with the bits and the ε of one that nobody disturbed.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from helpers_experiment import same_bits
from helpers_private_life import SIZES

from fedpact.core.participation import Fraction
from fedpact.privacy import Ledger

pytestmark = pytest.mark.drill

ROUNDS, LONG = 5, 3000
#: Whether the round in which it is killed is in the ledger afterwards, and whether it was sent.
POINTS = {
    "before spending": (False, False),
    "written": (True, False),
    "synced": (True, False),
    "headed": (True, False),
    "after spending": (True, False),
    "clients stepped": (True, True),
    "server stepped": (True, True),
    "before history": (True, True),
    "after history": (True, True),
    "before checkpoint": (True, True),
    "after checkpoint": (True, True),
}
KILLS = 12


class Lives:
    def __init__(self) -> None:
        helper = Path(__file__).with_name("helpers_private_life.py")
        self.process = subprocess.Popen(
            [sys.executable, helper], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self._answer()["ready"]

    def _answer(self) -> dict:
        return json.loads(self.process.stdout.readline())

    def start(self, folder, engine="debug", point="never", number=0, rounds=ROUNDS, **more) -> int:
        request = {"folder": str(folder), "engine": engine, "point": point, "round": number, "rounds": rounds, **more}
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        return self._answer()["pid"]

    def code(self) -> int:
        return self._answer()["code"]

    def __call__(self, *args, **options) -> int:
        self.start(*args, **options)
        return self.code()


@pytest.fixture(scope="module")
def lives(cache):
    made = Lives()
    yield made
    made.process.stdin.close()
    made.process.wait(30)


@pytest.fixture(scope="module")
def straight(lives, tmp_path_factory):
    """straight(engine) is the folder of the undisturbed run."""
    base, done = tmp_path_factory.mktemp("straight"), {}

    def folder(engine):
        if engine not in done:
            done[engine] = base / engine / "run"
            done[engine].parent.mkdir()
            assert lives(done[engine], engine, rounds=ROUNDS if engine == "debug" else LONG) == 0
        return done[engine]

    return folder


def sent(folder):
    """What left the machine: {(who, round): digests of what was sent under that name}."""
    path, found = folder.with_name("sent"), {}
    for line in path.read_text().splitlines() if path.exists() else ():
        t, client, digest = line.split()
        found.setdefault((client, int(t)), set()).add(digest)
    return found


def paid(folder):
    """(who, round) of every line."""
    if not (folder / "ledger.head").exists():  # killed before there was one: nothing can have been sent
        return []
    return [release.key[:2] for release in Ledger(folder, read_only=True).releases]


def cohorts(rounds):
    return sorted((str(i), t) for t in range(rounds) for i in Fraction(0.6).select(0, t, len(SIZES)))


def check_killed(folder):
    once = paid(folder)
    assert set(sent(folder)) <= set(once), "something was sent that nobody paid for"
    assert len(set(once)) == len(once), "a release was paid twice"


def check_finished(folder, undisturbed, rounds):
    same_bits(folder, undisturbed)
    assert sorted(paid(folder)) == cohorts(rounds)
    assert sorted(sent(folder)) == cohorts(rounds)
    assert all(len(digests) == 1 for digests in sent(folder).values()), "sent twice under one name, with other numbers"
    assert sent(folder) == sent(undisturbed)
    one, other = (Ledger(place, read_only=True) for place in (folder, undisturbed))
    assert one.epsilon(1e-5) == other.epsilon(1e-5)
    assert one.head == other.head
    results = [json.loads((place / "result.json").read_text()) for place in (folder, undisturbed)]
    assert results[0]["privacy"] == results[1]["privacy"]
    assert results[0]["notices"] == results[1]["notices"]


@pytest.mark.parametrize("number", [0, 2])
@pytest.mark.parametrize("point", POINTS)
def test_killed_at_every_point_of_a_round(lives, straight, tmp_path, point, number):
    undisturbed, folder = straight("debug"), tmp_path / "run"
    assert lives(folder, point=point, number=number) == -signal.SIGKILL
    check_killed(folder)
    was_paid, was_sent = POINTS[point]
    assert any(t == number for _, t in paid(folder)) == was_paid
    assert any(t == number for _, t in sent(folder)) == was_sent
    assert lives(folder) == 0
    check_finished(folder, undisturbed, ROUNDS)


def test_killed_again_and_again_on_its_way(lives, straight, tmp_path):
    folder = tmp_path / "run"
    for number, point in enumerate(("synced", "clients stepped", "before history", "written", "before checkpoint")):
        assert lives(folder, point=point, number=number) == -signal.SIGKILL
        check_killed(folder)
    assert lives(folder) == 0
    check_finished(folder, straight("debug"), ROUNDS)


def test_killed_at_random_moments_where_rounds_are_compiled(lives, straight, tmp_path):
    undisturbed, folder, rng = straight("local"), tmp_path / "run", np.random.default_rng()
    options, seen = {"engine": "local", "rounds": LONG, "checkpoint_seconds": 0.02}, set()
    for _ in range(KILLS):
        pid = lives.start(folder, **options)
        before, until = sent(folder), time.monotonic() + 60
        while len(sent(folder)) == len(before) and time.monotonic() < until:  # it imports, builds, compiles
            time.sleep(0.01)
        time.sleep(rng.uniform(0, 0.4))
        with contextlib.suppress(ProcessLookupError):  # it may have come to its end
            os.kill(pid, signal.SIGKILL)
        code = lives.code()
        check_killed(folder)
        seen.add(max((t for _, t in sent(folder)), default=-1))
        if code == 0:
            break
        assert code == -signal.SIGKILL
    assert len(seen) >= 3, f"the kills came at too few different rounds: {sorted(seen)}"
    assert lives(folder, **options) == 0
    check_finished(folder, undisturbed, LONG)
