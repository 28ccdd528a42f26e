"""A disk of a few pages, which can be filled and emptied: a tmpfs of its own."""

from __future__ import annotations

import contextlib
import errno
import subprocess
import time
from pathlib import Path

from fedpact.core.sealed import unseal

SIZE = "2m"


def why_none(folder):
    """Why no such disk can be mounted here; empty where it can."""
    folder.mkdir()
    try:
        done = subprocess.run(_mounted(folder), capture_output=True, text=True)
    except OSError as error:
        return str(error)
    if done.returncode:
        return (done.stderr or done.stdout).strip()
    subprocess.run(["umount", str(folder)], check=True)
    return ""


def _mounted(folder):
    return ["mount", "-t", "tmpfs", "-o", f"size={SIZE}", "fedpact-drill", str(folder)]


@contextlib.contextmanager
def small_disk(folder):
    """Mounted at this folder, and gone at the end."""
    folder.mkdir(parents=True)
    subprocess.run(_mounted(folder), check=True)
    try:
        yield
    finally:
        until = time.monotonic() + 30
        while subprocess.run(["umount", str(folder)], capture_output=True).returncode and time.monotonic() < until:
            time.sleep(0.5)  # a process that has it open is ending
        busy = str(folder) in Path("/proc/mounts").read_text()
        if busy:
            subprocess.run(["umount", "--lazy", str(folder)], check=True)
        assert not busy, "a process was left that has a file open there"


def fill(ballast):
    """Until there is no room for a page; again, where something was removed since. Returns the bytes added."""
    added = 0
    with ballast.open("ab", buffering=0) as file:
        while True:
            try:
                added += file.write(bytes(4096))
            except OSError as error:
                if error.errno != errno.ENOSPC:
                    raise
                return added


def broken(folder):
    """The files of a node's runs that are not whole, and what is left of one that was being written."""
    found = [path.name for path in folder.rglob("*.tmp")]
    for path in folder.glob("run-*/*.bin"):
        content = path.read_bytes()
        if path.name == "answer.bin":
            content = content.partition(b"\n")[2]
        if unseal("client" if path.name[0].isdigit() else "message", content) is None:
            found.append(path.name)
    return found
