"""Masked sums and private alignment on a real federation: histories as of simulations, and what does not cross.

Kills at random steps take minutes: `make drills-network` runs them, and `make test-extras` has no case of them.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import sqlite3
import time
from hashlib import sha256

import numpy as np
import pytest

pytest.importorskip("flwr")
pytest.importorskip("cryptography")

import helpers_mortal
from helpers_federation import MOMENTS, begun, same, simulated, text
from helpers_mortal import NAMES
from helpers_wire import Wire

from fedpact.experiment import build, read
from fedpact.flower.coding import CODINGS, Fixed
from fedpact.flower.local import Local
from fedpact.run import Run, execute

SECURE = 'engine = { name = "flower", secure = true, quorum = 0.6, deadline = 600, patience = 600 }'
PLAIN = 'engine = { name = "flower", notes = true, patience = 600 }'
ROUNDS = 2
SUMS = [("measure", 0), *((purpose, t + k) for t in range(ROUNDS) for k, purpose in enumerate(("step", "measure")))]
#: Columns of the history that are a clock's, or notes, which stay with the nodes.
ASIDE = ("seconds", "local_seconds", "rolled_back", "gradients", "epochs", "train_loss", "accuracy_met")
#: Too few are left of a and c in the first round, and all are asked again; without b the second goes on.
PLAN = {"a": [["step", 0, "mask_words"]], "c": [["step", 0, "mask_words"]], "b": [["step", 1, "mask_words"]]}


def say(line):
    print(f"{time.strftime('%H:%M:%S')} {line}", flush=True)


@contextlib.contextmanager
def listened(folder, configs):
    """A federation whose nodes talk to the SuperLink through `wire`, which keeps what crosses."""
    made = Local(folder, configs)
    made.wire = Wire(made.folder, made.port)
    made.address = made.wire.address
    try:
        yield made
    finally:
        made.wire.close()
    assert made.processes_of() == []


def crossed(federation):
    """All that nodes and SuperLink have told each other, TLS taken off, and all that the SuperLink has kept."""
    heard = b"".join(map(bytes, federation.wire.heard))
    return heard, b"".join(path.read_bytes() for path in sorted(federation.folder.glob("superlink.db*")))


def log_of(federation):
    with contextlib.closing(sqlite3.connect(federation.folder / "superlink.db")) as database:
        logs = [lines for (lines,) in database.execute("select log from task_logs")]
    return [line for one in logs for line in one.splitlines() if " fedpact: " in line]


# Masked sums, of nodes that lose their keys and secrets on the way


def masked(folder, plan, also=lambda federation: None):
    """A masked run of two rounds in which processes are killed as planned; `also` is done with its federation."""
    path, run = folder / "masked.toml", folder / "run"
    path.write_text(text("fedadmm", SECURE, rounds=ROUNDS, clients=len(NAMES)))
    with listened(folder / "federation", {name: {"loader": f"mortal:rows_{name}"} for name in NAMES}) as federation:
        shutil.copy(helpers_mortal.__file__, federation.folder / "mortal.py")
        (federation.folder / helpers_mortal.PLAN).write_text(json.dumps(plan))
        with federation:
            federation.finish(path, run, 1500, say)
            lines = log_of(federation)
            for line in lines:
                say(f"in the run's log: {line}")
            also(federation)
    _said(federation, plan, lines)
    _as_simulated(Run.load(run), plan, folder)


def _lost(plan, purpose, t):
    """Who is killed in a sum, by the kind of the question."""
    return {
        kind: [client for client, name in enumerate(NAMES) if [purpose, t, kind] in plan.get(name, [])]
        for kind in helpers_mortal.KINDS
    }


def _left_out(plan, purpose, t):
    """Whom a sum goes on without: those who were lost before their words were there, if two stay."""
    out = _lost(plan, purpose, t)["mask_words"]
    return out if len(NAMES) - len(out) >= 2 else []


def _said(federation, plan, lines):
    """Every loss is in the node's own log, and what became of the sum in the run's."""
    for client, name in enumerate(NAMES):
        own = (federation.folder / "state" / name / "node.log").read_text(errors="replace")
        assert own.count("the node's process was lost; another is started") == len(plan.get(name, []))
        for purpose, t, kind in plan.get(name, []):
            where = f"round {t}, client {client} ({name}), {purpose}, {kind}: refused: question must be of the masked"
            if kind == purpose:
                where = f"round {t}, {purpose}: a node was started again; everyone is asked for new keys"
            assert any(where in line for line in lines) == (kind != purpose or _ahead(plan, purpose, t)), where
    again = [f"round {t}, {purpose}: a node was started again, and too few stay" for purpose, t in _asked_again(plan)]
    assert [line.partition("fedpact: ")[2][: len(one)] for line, one in zip(_again(lines), again, strict=True)] == again


def _again(lines):
    return [line for line in lines if "too few stay without it; all are asked again (2 of 5)" in line]


def _asked_again(plan):
    """The sums in which fewer than two stay, in order."""
    lost = {one: _lost(plan, *one) for one in SUMS}
    return [one for one in SUMS if max(len(lost[one]["mask_words"]), len(lost[one]["mask_reveal"])) >= 2]


def _ahead(plan, purpose, t):
    """Whether a sum begins with everyone's keys: the one before has ended with everyone's answer."""
    before = SUMS[SUMS.index((purpose, t)) - 1]
    lost = _lost(plan, *before)
    return before in _asked_again(plan) or not (lost["mask_words"] or lost["mask_reveal"])


def _as_simulated(found, plan, folder):
    """The history is that of a schedule without those who were left out, wherever everyone's telemetry is there."""
    drawn = [[i for i in range(len(NAMES)) if i not in _left_out(plan, "step", t)] for t in range(ROUNDS)]
    schedule = f'participation = {{ scheme = "schedule", rounds = {drawn} }}'
    expected = simulated("fedadmm", folder, schedule, rounds=ROUNDS, clients=len(NAMES)).history
    history = found.history
    measured = [1 - len(_left_out(plan, "measure", t)) / len(NAMES) for t in range(ROUNDS + 1)]
    np.testing.assert_allclose(history.column("measured"), measured, rtol=1e-12)
    assert history.column("participants")[1:].tolist() == [len(one) for one in drawn]
    assert not history.column("missing").any()
    whole, off = history.column("measured") == 1, {}
    columns = [c for c in expected.columns if c in history.columns and c not in ASIDE]
    assert {"objective", "gradient", "participants", "bytes_up"} <= set(columns)
    for column in columns:
        pair = history.column(column)[whole], expected.column(column)[whole]
        off[column] = float(np.nanmax(np.abs(pair[0] - pair[1]), initial=0.0))
        np.testing.assert_allclose(*pair, rtol=1e-9, atol=1e-9, equal_nan=True, err_msg=column)
    say(f"off by {max(off.values()):.1e} at most, in {max(off, key=off.get)}")


def numbers_told(federation):
    """What nodes have computed for the server since this was asked last, but for numbers of few digits."""
    found = []
    for path in federation.folder.glob("told-*"):
        found.append(np.frombuffer(path.read_bytes()))
        path.unlink()
    assert len(found) == len(NAMES)
    every = np.unique(np.concatenate(found))
    return every[np.isfinite(every) & (every.view(np.uint64) & 0xFFFFFF != 0)]


def seen(numbers, content):
    """How many of them are in these bytes, as they are or as what is put under masks."""
    step, digits = Fixed(1e6), CODINGS["measure"]
    spread = digits.lattice(len(NAMES)).encode(digits.spread(numbers)).reshape(digits.words, -1)
    forms = np.stack([numbers.view(np.uint64), step.lattice(len(NAMES)).encode(numbers), *spread])
    there = np.zeros(forms.shape, bool)
    for offset in range(8):
        there |= np.isin(forms, np.frombuffer(content, np.uint64, (len(content) - offset) // 8, offset))
    there[np.minimum(forms, -forms) < 2**36] = False  # smaller words may be anywhere
    return int(there.any(axis=0).sum())


def test_a_masked_run_is_the_simulation_whoever_is_lost_and_no_number_of_a_node_crosses(tmp_path):
    def nothing_crossed(federation):
        told = numbers_told(federation)
        found = [seen(told, place) for place in crossed(federation)]
        say(
            f"of the masked run's {len(told)} numbers {found[0]} were on the wire, and {found[1]} kept by the SuperLink"
        )
        assert len(told) > 500
        assert found == [0, 0]
        path = tmp_path / "plain.toml"
        path.write_text(text("fedadmm", PLAIN, rounds=1, clients=len(NAMES)))
        federation.finish(path, tmp_path / "plain", 900, say)
        told = numbers_told(federation)
        found = [seen(told, place) for place in crossed(federation)]
        say(f"of a plain run's {len(told)} numbers {found[0]} were on the wire, and {found[1]} kept by the SuperLink")
        assert found[0] == len(told) > 200
        assert found[1] > 100

    masked(tmp_path, PLAN, nothing_crossed)


@pytest.mark.parametrize("moment", range(MOMENTS if MOMENTS > 1 else 0))
def test_at_whatever_steps_processes_are_killed_a_masked_run_ends_right(moment, tmp_path):
    """A process that is started again within a sum reads its rows, and with them what it dies of, in the next one: it
    is not killed in that."""
    (rng, say), plan, spared = begun(), {}, []
    for purpose, t in (("step", 0), ("measure", 1), ("step", 1)):
        kind = rng.choice([purpose, "mask_words", "mask_reveal"])
        mortals = [name for name in NAMES if name not in spared]
        killed = rng.sample(mortals, min(rng.choice([1, 2]), len(mortals)))
        for name in killed:
            plan.setdefault(name, []).append([purpose, t, kind])
        spared = killed if kind != purpose else []
    say(json.dumps(plan))
    masked(tmp_path, plan)


# Parties


JOINED = """
[data]
on = "id"
target = "outcome"
unmatched = "drop"
categorical = ["kind"]
{csv}

[split]
holdout = 0.2
seed = 1

[problem]
name = "logistic"
l2 = 0.0
intercept = true

[algorithm]
name = "vertical_sgd"
batch = 20

[run]
rounds = 2
seed = 0
evaluate_every = 2
{engine}
"""


def written(folder):
    """Two files of overlapping patients, each in an order of its own: their paths, and all ids."""
    rng = np.random.default_rng(3)
    sugar, spent = rng.normal(size=(2, 60)).round(4)
    ids = [f"patient-{number}" for number in rng.choice(10**8, 60, replace=False)]
    rows = {
        "lab": ["id,sugar,kind"] + [f"{ids[i]},{sugar[i]},kind-{7654321 + i % 3}" for i in rng.permutation(60)[:55]],
        "ward": ["id,spent,outcome"]
        + [f"{ids[i]},{spent[i]},{'sick' if sugar[i] + spent[i] > 0 else 'well'}" for i in rng.permutation(60)[:56]],
    }
    for name, lines in rows.items():
        (folder / f"{name}.csv").write_text("\n".join(lines) + "\n")
    return {name: str(folder / f"{name}.csv") for name in rows}, ids


def test_parties_align_their_records_and_no_id_crosses(tmp_path):
    files, ids = written(tmp_path)
    path, run, clear = tmp_path / "parties.toml", tmp_path / "run", tmp_path / "clear.toml"
    path.write_text(JOINED.format(csv="", engine='engine = { name = "flower", patience = 600 }'))
    clear.write_text(JOINED.format(csv=f"csv = {{ lab = {files['lab']!r}, ward = {files['ward']!r} }}", engine=""))
    with listened(tmp_path / "federation", {name: {"csv": file} for name, file in files.items()}) as federation:
        with federation:
            federation.finish(path, run, 1500, say)
        places = crossed(federation)
    found, joined = Run.load(run), execute(build(read(clear))[0])
    same(found, joined, 1e-12)
    counts = {name: (said["records"], said["kept"]) for name, said in found.config["data"]["parties"].items()}
    kept = counts["lab"][1]
    assert counts == {"lab": (55, kept), "ward": (56, kept)}
    assert kept < 55
    hashes = [sha256(one.encode()).digest() for one in ids]
    spelt = [form for one in ids for form in (one.encode(), one.partition("-")[2].encode(), one.encode("utf-16-le"))]
    for place in (*places, (federation.folder / "logs" / "superlink.log").read_bytes()):
        assert not [one for one in (*spelt, *hashes) if one in place]
    told = [f"kind-{7654321 + k}".encode() for k in range(3)]  # cells too: of a column whose categories are told
    assert all(one in places[0] for one in told)
