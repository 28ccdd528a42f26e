"""Files that are whole or absent, and JSON in them."""

from __future__ import annotations

import errno
import math
import os
import stat

import pytest

from fedpact.core import files
from fedpact.core.errors import CheckpointError, OutputError


def listing(folder):
    return {p.name: p.read_bytes() for p in folder.iterdir()}


def failing(error):
    def fail(*_args, **_kwargs):
        raise error

    return fail


def test_a_file_is_written_and_replaced(tmp_path):
    path = tmp_path / "a.bin"
    files.write_atomic(path, b"one")
    files.write_atomic(path, b"two")
    assert listing(tmp_path) == {"a.bin": b"two"}


@pytest.mark.parametrize("name", ["fsync", "replace"])
@pytest.mark.parametrize(
    ("error", "raised"),
    [(OSError(errno.ENOSPC, "No space left"), OutputError), (KeyboardInterrupt(), KeyboardInterrupt)],
)
def test_a_failure_leaves_nothing_new_and_the_old_file_whole(tmp_path, monkeypatch, name, error, raised):
    path = tmp_path / "a.bin"
    files.write_atomic(path, b"old")
    monkeypatch.setattr(os, name, failing(error))
    with pytest.raises(raised):
        files.write_atomic(path, b"new")
    assert listing(tmp_path) == {"a.bin": b"old"}


def test_a_first_write_that_fails_leaves_nothing_at_all(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "replace", failing(OSError(errno.EIO, "I/O error")))
    with pytest.raises(OutputError, match=r"^output folder must be writable, got '.+': I/O error\. Choose another"):
        files.write_atomic(tmp_path / "a.bin", b"new")
    assert listing(tmp_path) == {}


def test_a_full_disk_is_called_that(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "fsync", failing(OSError(errno.ENOSPC, "No space left on device")))
    with pytest.raises(OutputError, match=r": the disk is full\. "):
        files.write_atomic(tmp_path / "a.bin", b"new")


def test_a_folder_in_the_way_is_a_sentence(tmp_path):
    (tmp_path / "a.bin").mkdir()
    with pytest.raises(OutputError, match=r"^output folder must be writable, got "):
        files.write_atomic(tmp_path / "a.bin", b"new")
    assert [p.name for p in tmp_path.iterdir()] == ["a.bin"]
    with pytest.raises(OutputError):
        files.write_atomic(tmp_path / "absent" / "b.bin", b"new")
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(OutputError):
        files.make_folder(tmp_path / "file" / "below")
    with pytest.raises(OutputError):
        files.write_atomic(tmp_path / "file" / "b.bin", b"new")


def test_the_file_is_synced_before_it_is_named_and_the_folder_after(tmp_path, monkeypatch):
    order = []
    fsync, replace = os.fsync, os.replace

    def spy_fsync(handle):
        order.append("folder" if stat.S_ISDIR(os.fstat(handle).st_mode) else "file")
        fsync(handle)

    def spy_replace(*args):
        order.append("rename")
        replace(*args)

    monkeypatch.setattr(os, "fsync", spy_fsync)
    monkeypatch.setattr(os, "replace", spy_replace)
    files.write_atomic(tmp_path / "a.bin", b"new")
    assert order == ["file", "rename", "folder"]


def test_appending_is_synced(tmp_path, monkeypatch):
    synced = []
    fsync = os.fsync
    monkeypatch.setattr(os, "fsync", lambda handle: (synced.append(handle), fsync(handle)))
    files.append_synced(tmp_path / "a.csv", b"1\n")
    files.append_synced(tmp_path / "a.csv", b"2\n")
    assert (tmp_path / "a.csv").read_bytes() == b"1\n2\n"
    assert len(synced) == 2
    with pytest.raises(OutputError):
        files.append_synced(tmp_path / "absent" / "a.csv", b"1\n")


def test_folders_are_made_with_their_parents(tmp_path):
    files.make_folder(tmp_path / "a" / "b")
    files.make_folder(tmp_path / "a" / "b")
    assert (tmp_path / "a" / "b").is_dir()


# Several at once


def test_a_write_that_fails_halfway_leaves_nothing(tmp_path):
    (tmp_path / "out" / "old").mkdir(parents=True)  # a folder where a file should go: its rename fails
    with pytest.raises(OutputError, match="out"):
        files.write_files(tmp_path / "out", {"old": b"1", "new/file": b"2"})
    assert [p.name for p in tmp_path.rglob("*")] == ["out", "old"]


def test_files_are_replaced_and_no_temporary_name_stays(tmp_path):
    for content in (b"1", b"2"):
        files.write_files(tmp_path, {"a/b.txt": content})
    assert [p.name for p in tmp_path.rglob("*")] == ["a", "b.txt"]
    assert (tmp_path / "a" / "b.txt").read_bytes() == b"2"


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left"), KeyboardInterrupt()], ids=repr)
def test_several_files_that_cannot_be_synced_leave_neither_files_nor_folders(tmp_path, monkeypatch, error):
    monkeypatch.setattr(os, "fsync", failing(error))
    with pytest.raises((OutputError, KeyboardInterrupt)):
        files.write_files(tmp_path / "a" / "b", {"c/x": b"1", "y": b"2"})
    assert list(tmp_path.iterdir()) == []


# JSON


def test_json_holds_what_it_can_and_null_for_what_is_not_finite(tmp_path):
    values = {"a": [1.5, math.nan], 2: (math.inf, "ε"), "path": tmp_path, "deep": {"x": -math.inf}}
    files.write_json(tmp_path / "a.json", values)
    expected = {"a": [1.5, None], "2": [None, "ε"], "path": str(tmp_path), "deep": {"x": None}}
    assert files.read_json(tmp_path / "a.json", "") == expected
    assert (tmp_path / "a.json").read_text(encoding="utf-8") == files.json_text(values)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff", b"5"])
def test_damaged_json_is_refused_with_what_to_do(tmp_path, content):
    path = tmp_path / "a.json"
    path.write_bytes(content)
    with pytest.raises(CheckpointError) as caught:
        files.read_json(path, "Delete it.")
    assert str(caught.value) == f"a.json must be whole, got a damaged file {path}. Delete it."
