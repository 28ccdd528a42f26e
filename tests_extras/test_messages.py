"""A node of a real federation that sends what it should not, and one whose disk is full: refused, named, gone on.

The run is the calm one, which ends within 1e-6 of an undisturbed one's objective. Exact is another comparison: a
simulation in which the node is not drawn in the rounds that the history says it was refused in.
"""

from __future__ import annotations

import contextlib
import csv
import json
import math
import os
import re
import shutil
import threading
import time
import warnings
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

pytest.importorskip("flwr")
pytest.importorskip("cryptography")

import helpers_misbehaving
import helpers_twice
from helpers_disk import broken, fill, small_disk, why_none
from helpers_federation import MOMENTS, begun, calm, flower, same, simulated_calm, warned

from fedpact.flower import local
from fedpact.flower.local import Local
from fedpact.run import Run

#: What the log says of each, after "round t, client 0 (a): upload refused: ".
REFUSED = {
    "not_finite": r"it is not finite\.",
    "wrong_shape": r"array \d of client 0 \(a\)'s step must be of shape \(30,\), got \(29,\)\.",
    "earlier_round": r"answer of client 0 \(a\) must be of round {t}, got one of round {of}\.",
    "stale_state": r"answer of client 0 \(a\) must go on from version \d+, got \d+\.",
    "full_disk": r"output folder must be writable, got '.*/state/a/.*': the disk is full\.",
}
MESSAGES = ("not_finite", "wrong_shape", "earlier_round", "stale_state", "twice")
#: Rounds between telemetry, which costs an exchange; and how many rounds everyone is there at the end, at least.
EVERY, AFTER = 4, 3
#: Rounds that a full disk may reach into: it fills in one, is noticed in that or the next, and emptied a little later;
#: and the seconds that each of the two may take. A round is one or two seconds.
DISK, FULL, FREED = 8, 3.0, 2.0


def planned(names, width, rng):
    """Message faults at random rounds among `width`, a full disk before or after them: plan, disk's round, rounds."""
    disk = "full_disk" in names
    first = bool(disk and rng.randrange(2))
    begin = 1 + DISK * first
    messages = [name for name in names if name != "full_disk"]
    at = rng.sample(range(begin, begin + width), len(messages))
    answered = lambda t: [0, *range(begin, t)]  # those that no full disk can have kept from answering
    plan = {t: {"name": name, "of": rng.choice(answered(t))} for t, name in zip(at, messages, strict=True)}
    full = None if not disk else 1 if first else begin + width
    last = begin + width + DISK * (disk and not first)
    return plan, full, EVERY * math.ceil((last + AFTER) / EVERY)  # history.csv has the last round's telemetry then


def filled(run, disk, after, ended, rng, say):
    """Fill a disk at a random moment after so many rounds, keep it full until a round was refused for it, free it."""
    while not _rows(run)[after:] and not ended.wait(0.1):
        pass
    delay, ballast = rng.uniform(0, FULL), disk / "ballast"
    time.sleep(delay)
    before = len(_rows(run))
    say(f"full_disk, {delay:.1f} s after round {after}, {fill(ballast)} bytes")
    while not any(float(row["refused_uploads"]) for row in _rows(run)[before:]):
        fill(ballast)  # what the node removed meanwhile
        if ended.wait(0.1):
            return
    until = time.monotonic() + 10
    while broken(disk) and time.monotonic() < until:
        time.sleep(0.1)  # it may be trying right now
    assert broken(disk) == []
    delay = rng.uniform(0, FREED)
    time.sleep(delay)
    ballast.unlink()
    say(f"room again, {delay:.1f} s after the round was refused")


def _rows(run):
    """Of history.csv; the first is the start."""
    with contextlib.suppress(OSError), (run / "history.csv").open() as file:
        return [row for row in csv.DictReader(file) if None not in row.values()]
    return []


def misbehaved(names, folder, width, seconds, rng, say, monkeypatch):
    """A run with these faults of node a, and all that must be true of it."""
    plan, full, rounds = planned(names, width, rng)
    for t, fault in sorted(plan.items()):
        say(f"{fault['name']}, round {t}" + (f", of round {fault['of']}" if fault["name"] == "earlier_round" else ""))
    path, run = folder / "drill.toml", folder / "run"
    path.write_text(calm(rounds, EVERY, flower(quorum=0.5)))
    federation = Local(folder / "federation", {name: {"loader": f"misbehaving:rows_{name}"} for name in ("a", "b")})
    (federation.folder / helpers_misbehaving.PLAN).write_text(json.dumps(plan))
    shutil.copy(helpers_misbehaving.__file__, federation.folder / "misbehaving.py")
    _reply_twice(monkeypatch)
    disk, ended = federation.folder / "state" / "a", threading.Event()
    with small_disk(disk) if full is not None else contextlib.nullcontext(), ThreadPoolExecutor(1) as pool:
        with federation:
            harm = pool.submit(filled, run, disk, full, ended, rng, say) if full is not None else None
            try:
                federation.finish(path, run, seconds, say)
            finally:
                ended.set()
        assert federation.processes_of() == []
        if harm is not None:
            harm.result()
        assert broken(disk) == []
        lines = warned(federation)
        for line in lines:
            say(f"in the run's log: {line}")
        _said_of_twice(federation, names, lines, say)
    found = Run.load(run)
    _as_it_should_be(found, plan, full, rounds, lines)
    _ends_right(found, rounds, folder, say)


def _reply_twice(monkeypatch):
    """The app that is sent has the ClientApp of `helpers_twice`."""
    write = local.write_app

    def written(*given):
        app = write(*given)
        shutil.copy(helpers_twice.__file__, app / "fedpact_app" / "client_app.py")
        return app

    monkeypatch.setattr(local, "write_app", written)


def _said_of_twice(federation, names, lines, say):
    """The SuperLink says that it refused a second reply; the server that it asks again, and the node answers both."""
    text = (federation.folder / "logs" / "superlink.log").read_text(errors="replace")
    told = re.findall(r"Failed to store Message reply: .*", text)
    for line in told:
        say(f"in the SuperLink's log: {line}")
    assert told or "twice" not in names
    if "slow_and_twice" in names:
        asked = re.findall(r"round (\d+): asked", (federation.folder / "state" / "a" / "node.log").read_text())
        assert len(asked) > len(set(asked)), asked  # the next one too, if it takes longer than `links.NUDGE`
        assert any("node 'a' is silent for 60 s; it is asked again" in line for line in lines)


def _as_it_should_be(found, plan, full, rounds, lines):
    """The history says in which rounds node a was refused, and the log why: nothing else, and nobody else."""
    refused = [t for t in range(rounds) if found.history.column("refused_uploads")[t + 1]]
    expected = {t for t, fault in plan.items() if fault["name"] in REFUSED}
    by_disk = set(refused) - expected
    assert expected <= set(refused)
    assert bool(by_disk) == (full is not None)
    assert all(full <= t < full + DISK for t in by_disk), (refused, full)
    assert not found.history.column("missing").any()
    assert found.history.column("participants")[1:].tolist() == [2 - (t in refused) for t in range(rounds)]
    for t in refused:
        fault = plan.get(t, {"name": "full_disk", "of": None})
        sentence = REFUSED[fault["name"]].format(t=t, of=fault["of"])
        pattern = rf"round {t}, client 0 \(a\): upload refused: {sentence}"
        assert sum(re.search(pattern, line) is not None for line in lines) == 1, (pattern, lines)
    assert sum("refused" in line for line in lines) == len(refused)


def _ends_right(found, rounds, folder, say):
    """Exactly as a simulation that does not draw who was refused; and its objective as if nothing had happened."""
    drawn = [[1] if n else [0, 1] for n in found.history.column("refused_uploads")[1:]]
    same(
        found,
        simulated_calm(rounds, folder, EVERY, f'participation = {{ scheme = "schedule", rounds = {drawn} }}'),
        1e-12,
    )
    undisturbed = simulated_calm(rounds, folder, EVERY)
    off = abs(found.history.end("objective") - undisturbed.history.end("objective"))
    furthest = np.nanmax(np.abs(found.history.column("objective") - undisturbed.history.column("objective")))
    say(f"objective off by {off:.1e} at the end, by {furthest:.1e} on the way")
    assert off < 1e-6
    if all(len(one) == 2 for one in drawn):
        same(found, undisturbed, 1e-12)


@pytest.mark.parametrize("moment", range(MOMENTS))
def test_one_run_meets_every_message_fault_and_a_full_disk_and_ends_right(moment, tmp_path, monkeypatch):
    rng, say = begun()
    names = [*MESSAGES, "full_disk"] + ["slow_and_twice"] * (MOMENTS > 1)  # which takes more than a minute
    if why := why_none(tmp_path / "disk"):
        left_out = MOMENTS == 1 and "FEDPACT_NO_TMPFS" in os.environ
        assert left_out, f"a tmpfs must be mounted for this drill, got: {why}. Set FEDPACT_NO_TMPFS=1 to leave it out."
        warnings.warn(f"no small disk can be mounted here, so that none is filled: {why}", stacklevel=1)
        names.remove("full_disk")
    misbehaved(names, tmp_path, len(names) + 1, 900, rng, say, monkeypatch)
