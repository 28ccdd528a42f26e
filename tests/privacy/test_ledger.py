"""The ledger: chained, idempotent, and suspicious of every change; and the budget's gate."""

from __future__ import annotations

import json
import math
import os
import shutil

import pytest

from fedpact.core.errors import BudgetSpent, CheckpointError, InvalidArgument, OutputError
from fedpact.privacy import EVERYONE, Budget, Claim, Event, Head, Ledger, Release, epsilon, worst

DELTA = 1e-5
NOISY, NOISIER = Event("gaussian", 5), Event("gaussian", 9)


def release(who="a", number=0, event=NOISY, **more):
    return Release(who, number, event, 1.0, **more)


@pytest.fixture
def book(tmp_path):
    """Three rounds of clients a and b, then one of a alone; closed."""
    with Ledger(tmp_path) as ledger:
        for t in range(3):
            ledger.spend([release("a", t), release("b", t, NOISIER)])
        ledger.spend([release("a", 3)])
    return tmp_path


def lines(folder):
    return (folder / "ledger.jsonl").read_bytes().splitlines(keepends=True)


def put(folder, content):
    (folder / "ledger.jsonl").write_bytes(b"".join(content))


def refused(folder, sentence, **options):
    for read_only in (True, False):
        before = {path.name: path.read_bytes() for path in folder.iterdir()}
        with pytest.raises(CheckpointError, match=sentence):
            Ledger(folder, read_only=read_only, **options)
        assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def test_what_was_spent_is_read_back(book):
    ledger = Ledger(book, read_only=True)
    assert len(ledger.releases) == 7
    assert ledger.releases[-1] == release("a", 3)
    assert ledger.releases[1].event == NOISIER
    assert ledger.head.lines == 7
    assert Ledger(book / "ledger.jsonl", read_only=True).head == ledger.head


def test_a_line_is_linked_to_the_one_before(book):
    found = [json.loads(line) for line in lines(book)]
    assert [line["number"] for line in found] == [1, 2, 3, 4, 5, 6, 7]
    assert [line["before"] for line in found] == ["0" * 64, *(line["hash"] for line in found[:-1])]
    assert len({line["hash"] for line in found}) == 7


def test_the_scale_is_noise_times_clip():
    assert Release("a", 0, NOISY, 2.5).scale == 12.5


# Nothing is spent twice


def test_the_same_release_again_is_not_spent_again(book):
    with Ledger(book) as ledger:
        before = ledger.head
        assert ledger.spend([release("a", 3), release("b", 0, NOISIER)]) == 0
        assert ledger.head == before
        assert ledger.spend([release("a", 3), release("a", 4), release("a", 4)]) == 1
    assert len(lines(book)) == 8


@pytest.mark.parametrize(
    "other",
    [
        release("a", 3, NOISIER),
        release("a", 3, unit="client"),
        release("a", 3, output="ab"),
        Release("a", 3, NOISY, 2.0),
    ],
)
def test_another_release_under_the_same_name_is_refused_and_nothing_is_written(book, other):
    with Ledger(book) as ledger:
        with pytest.raises(CheckpointError, match="for 'a', round 3, 'upload', attempt 0"):
            ledger.spend([release("c", 9), other])
        assert ledger.spend([release("a", 3, attempt=1, output="ab")]) == 1  # fresh noise: another release
    assert len(lines(book)) == 8


def test_other_purposes_rounds_and_clients_are_other_releases(book):
    with Ledger(book) as ledger:
        assert ledger.spend([release("a", 0, purpose="hello"), release("c", 0), release("b", 3)]) == 3


# Damage


def test_a_torn_last_line_is_cut_off_on_opening(book):
    whole = b"".join(lines(book))
    torn = b'{"before":"00", "rele'
    for tail in (torn, torn + b"\n", b"\x00" * 30, b"\x00\xff\n", b"[1]\n", torn + b"\n" + torn):
        put(book, [whole, tail])
        reader = Ledger(book, read_only=True)
        assert (len(reader.releases), reader.torn) == (7, len(tail))
        assert (book / "ledger.jsonl").read_bytes() == whole + tail  # a reader changes nothing
        with Ledger(book) as ledger:
            assert len(ledger.releases) == 7
        assert (book / "ledger.jsonl").read_bytes() == whole
    with Ledger(book) as ledger:
        assert ledger.spend([release("a", 4)]) == 1
    assert Ledger(book, read_only=True).head.lines == 8


def test_a_whole_line_that_the_head_does_not_know_is_kept_as_spent(book):
    """Killed between the sync of the line and the head's."""
    head = (book / "ledger.head").read_bytes()
    with Ledger(book) as ledger:
        ledger.spend([release("a", 4)])
    (book / "ledger.head").write_bytes(head)
    assert len(Ledger(book, read_only=True).releases) == 8
    with Ledger(book) as ledger:
        assert ledger.spend([release("a", 4)]) == 0
    assert json.loads((book / "ledger.head").read_text())["lines"] == 8


@pytest.mark.parametrize("number", range(1, 8))
def test_an_edited_line_is_named(book, number):
    found = lines(book)
    for old, new in ((b'"noise":5.0', b'"noise":50.0'), (b'"noise":9.0', b'"noise":90.0')):
        if old in found[number - 1]:
            found[number - 1] = found[number - 1].replace(old, new)
    put(book, found)
    refused(book, f"line {number} of the ledger must be as it was written, got one that does not match its hash")


@pytest.mark.parametrize("number", [1, 4, 7])
def test_a_spoiled_line_that_was_synced_is_no_torn_line(book, number):
    found = lines(book)
    found[number - 1] = b"{}\n"
    put(book, found)
    refused(book, f"line {number} of the ledger must be as it was written, got no line of a ledger")


def test_reordered_doubled_and_missing_lines_are_named(book):
    found = lines(book)
    put(book, [found[1], found[0], *found[2:]])
    refused(book, "line 1 of the ledger must be as it was written, got one that does not follow")
    put(book, [*found[:3], found[2], *found[3:]])
    refused(book, "line 4 of the ledger")
    put(book, [*found[:3], *found[4:]])
    refused(book, "line 4 of the ledger")


@pytest.mark.parametrize("kept", [0, 1, 6])
def test_a_shortened_ledger_is_found_by_its_head(book, kept):
    put(book, lines(book)[:kept])
    refused(book, f"must have the 7 lines that ledger.head says, got {kept} in .*: line {kept + 1} is gone")


def test_a_ledger_cut_in_its_last_line_is_shortened(book):
    put(book, [*lines(book)[:-1], lines(book)[-1][:-20]])
    refused(book, "line 7 of the ledger must be as it was written")


def test_a_ledger_without_its_head_or_the_other_way_round_is_refused(book):
    head = (book / "ledger.head").read_bytes()
    (book / "ledger.head").unlink()
    refused(book, "ledger must be whole, got .* without its ledger.head")
    (book / "ledger.head").write_bytes(b"{")
    refused(book, "ledger.head must be whole")
    (book / "ledger.head").write_bytes(head)
    (book / "ledger.jsonl").unlink()
    with pytest.raises(CheckpointError, match="must have the 7 lines"):
        Ledger(book)


def test_ledger_and_head_shortened_together_are_found_by_a_checkpoint(tmp_path, book):
    seen = Ledger(book, read_only=True).head
    shorter = tmp_path / "shorter"
    with Ledger(shorter) as ledger:
        ledger.spend([release("a", 0), release("b", 0, NOISIER)])
    refused(shorter, "must have the 7 lines that the checkpoint says, got 2", seen=seen)
    longer = tmp_path / "longer"
    with Ledger(longer) as ledger:
        ledger.spend([release("z", t) for t in range(9)])
    refused(longer, "line 7 of the ledger must be as it was written, got another than the checkpoint says", seen=seen)
    assert Ledger(book, read_only=True, seen=Head(3, json.loads(lines(book)[2])["hash"])).head == seen


def test_one_process_writes_at_a_time(book):
    with Ledger(book):
        with pytest.raises(OutputError, match="which another process has open"):
            Ledger(book)
        assert Ledger(book, read_only=True).head.lines == 7
    Ledger(book).close()


def test_a_folder_without_a_ledger(tmp_path):
    with pytest.raises(CheckpointError, match=r"ledger.jsonl must be that of a private run, got none"):
        Ledger(tmp_path, read_only=True)
    with pytest.raises(InvalidArgument, match="ledger must be open for writing"):
        Ledger(shutil.copytree(make(tmp_path / "x"), tmp_path / "y"), read_only=True).spend([release()])


def make(folder):
    Ledger(folder).close()
    return folder


# The order of writing


def test_everything_is_synced_before_the_release_may_go(tmp_path, monkeypatch):
    ledger = Ledger(tmp_path)
    done = []
    real = {name: getattr(os, name) for name in ("write", "fsync", "replace")}

    def what(handle):
        path = os.readlink(f"/proc/self/fd/{handle}")
        return "folder" if os.path.isdir(path) else os.path.basename(path).strip(".").split(".")[1]

    def write(handle, content):
        done.append(f"write {what(handle)}")
        return real["write"](handle, content)

    def fsync(handle):
        done.append(f"sync {what(handle)}")
        real["fsync"](handle)

    def rename(old, new):
        done.append("rename head")
        real["replace"](old, new)

    monkeypatch.setattr(os, "write", write)
    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "replace", rename)
    ledger.spend([release(), release("b")])
    assert done == ["write jsonl", "sync jsonl", "sync head", "rename head", "sync folder"]


def test_a_sync_that_fails_allows_no_release(book, monkeypatch):
    ledger = Ledger(book)

    def broken(handle):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", broken)
        with pytest.raises(OutputError, match="the disk is full"):
            ledger.spend([release("a", 4)])
    with pytest.raises(InvalidArgument, match="open for writing"):
        ledger.spend([release("a", 5)])
    with Ledger(book) as again:
        assert again.head.lines == 8  # the line was written: counted, though never sent


# What it cost


def test_each_client_pays_for_its_own_releases_and_the_worst_is_first(book):
    rows = Ledger(book, read_only=True).epsilon(DELTA)
    assert [(row["client"], row["releases"]) for row in rows] == [("a", 4), ("b", 3)]
    assert rows[0]["epsilon"] == epsilon({NOISY: 4}, DELTA).epsilon
    assert rows[1]["epsilon"] == epsilon({NOISIER: 3}, DELTA).epsilon
    assert worst(rows) == rows[:1]
    assert {key: rows[0][key] for key in ("unit", "adversary", "relation", "method")} == {
        "unit": "record",
        "adversary": "server",
        "relation": "add-remove",
        "method": "closed form",
    }


def test_releases_about_everyone_are_paid_by_each(book):
    with Ledger(book) as ledger:
        ledger.spend([release(EVERYONE, 9, NOISIER)])
        rows = {row["client"]: row["epsilon"] for row in ledger.epsilon(DELTA)}
    assert rows == {"a": epsilon({NOISY: 4, NOISIER: 1}, DELTA).epsilon, "b": epsilon({NOISIER: 4}, DELTA).epsilon}


def test_only_everyone(tmp_path):
    with Ledger(tmp_path) as ledger:
        ledger.spend([release(EVERYONE, t, unit="client", place="central") for t in range(2)])
        (row,) = ledger.epsilon(DELTA)
    assert (row["client"], row["releases"], row["unit"]) == ("*", 2, "client")
    assert row["epsilon"] == epsilon({NOISY: 2}, DELTA).epsilon


def test_a_release_that_only_outsiders_are_kept_from_leaves_no_claim_against_the_server(book):
    with Ledger(book) as ledger:
        ledger.spend([release("a", 9, adversary="outsider", place="central")])
        rows = {(row["adversary"], row["client"]): row for row in ledger.epsilon(DELTA)}
    assert rows["server", "a"]["epsilon"] == math.inf
    assert rows["server", "a"]["method"].startswith("no guarantee")
    assert rows["server", "b"]["epsilon"] == epsilon({NOISIER: 3}, DELTA).epsilon
    assert rows["outsider", "a"]["epsilon"] == epsilon({NOISY: 5}, DELTA).epsilon


def test_hiding_a_client_hides_its_records_and_not_the_other_way_round(book):
    with Ledger(book) as ledger:
        ledger.spend([release("a", 9, unit="client")])
        assert ledger.events("a", Claim("record"))[NOISY] == 5
        assert ledger.events("a", Claim("client")) is None


def test_one_ledger_has_one_relation(book):
    with Ledger(book) as ledger, pytest.raises(InvalidArgument, match="relation must be add-remove, got 'replace-one'"):
        ledger.spend([release("c", 0, Event("gaussian", 5, relation="replace-one"))])


# The budget


def test_the_gate_stops_before_the_round_that_would_exceed_it(tmp_path):
    budget = Budget(epsilon({NOISY: 6}, DELTA).epsilon * 1.0001, DELTA)
    rounds = 0
    with Ledger(tmp_path) as ledger:
        for t in range(20):
            coming = [release("a", t), release("b", t, NOISIER)]
            try:
                budget.gate(ledger, coming)
            except BudgetSpent as stop:
                sentence = str(stop)
                break
            ledger.spend(coming)
            rounds += 1
        assert rounds == 6
        assert "for client 'a' after it" in sentence
        assert "Stop here: nothing was released" in sentence
        assert ledger.head.lines == 12
        assert budget.exceeded_by(ledger, [release("b", 6, NOISIER)]) is None  # b could go on
        budget.gate(ledger, [release("a", 5)])  # and what is in the ledger costs nothing more
        who, spent, then = budget.exceeded_by(ledger, [release(EVERYONE, 6)])
    assert (who, spent) == ("a", epsilon({NOISY: 6}, DELTA).epsilon)
    assert then == epsilon({NOISY: 7}, DELTA).epsilon


def test_the_gate_goes_by_the_reported_figure_and_not_by_rdp(tmp_path):
    event = Event("gaussian", 1, "poisson", 0.01)
    budget = Budget(1.2, DELTA)  # 300 rounds cost 1.068 by PLD and 1.451 by RDP
    with Ledger(tmp_path) as ledger:
        ledger.spend([release("a", t, event) for t in range(299)])
        budget.gate(ledger, [release("a", 299, event)])
        with pytest.raises(BudgetSpent):
            budget.gate(ledger, [release("a", 300 + t, event) for t in range(100)])


def test_the_gate_lets_nothing_through_that_does_not_protect_what_was_granted(tmp_path):
    with Ledger(tmp_path) as ledger:
        for bad in (release(adversary="outsider"), release(unit="record")):
            with pytest.raises(BudgetSpent, match="got ε = inf"):
                Budget(100, DELTA, unit="client").gate(ledger, [bad])
        Budget(100, DELTA, adversary="outsider").gate(ledger, [release()])


@pytest.mark.parametrize(("epsilon_", "delta"), [(0, DELTA), (-1, DELTA), (math.nan, DELTA), (1, 0.0), (1, 1.0)])
def test_budgets_out_of_range(epsilon_, delta):
    with pytest.raises(InvalidArgument, match=r"epsilon \(ε\)|delta \(δ\)"):
        Budget(epsilon_, delta)


@pytest.mark.parametrize(
    "bad", [{"who": ""}, {"round": -1}, {"clip": 0}, {"unit": "row"}, {"adversary": "x"}, {"place": "x"}]
)
def test_releases_that_say_nothing_are_refused(bad):
    with pytest.raises((InvalidArgument, KeyError), match=next(iter(bad))):
        Release(**({"who": "a", "round": 0, "event": NOISY, "clip": 1.0} | bad))
