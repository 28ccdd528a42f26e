"""A process that spends, sends and is killed (SIGKILL) at a point of its own choosing; see test_ledger_kill.

One line of JSON on stdin per life: {"folder", "point", "rounds"}. Each life is a fork: the imports are paid once.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

from fedpact.privacy import Event, Ledger, Release

CLIENTS = ("a", "b")


def releases(number):
    return [Release(who, number, Event("gaussian", 5), 1.0) for who in CLIENTS]


def live(folder: Path, point: str, rounds: int) -> None:
    """Rounds of spending and sending; the kill comes in the last one."""
    sent = os.open(folder / "sent", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    with Ledger(folder) as ledger:
        for number in range(rounds):
            if number == rounds - 1:
                arm(point)
            ledger.spend(releases(number))
            os.pwrite(
                sent, f"{number}\n".encode(), 0
            )  # `write` may be armed. What has left the machine, for the test to see
            if number == rounds - 1 and point == "after sending":
                die()


def die(*_: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def arm(point: str) -> None:
    real = {name: getattr(os, name) for name in ("write", "fsync", "replace")}

    def some(handle, content):
        real["write"](handle, content[: len(content) // 4])
        die()

    def one_and_a_half(handle, content):
        first = content.index(b"\n") + 1
        real["write"](handle, content[: first + (len(content) - first) // 2])
        die()

    def most(handle, content):
        real["write"](handle, content[:-1])
        die()

    def written(handle, content):
        real["write"](handle, content)
        die()

    def synced(handle):
        real["fsync"](handle)
        die()

    def renamed(old, new):
        real["replace"](old, new)
        die()

    count = iter(range(99))
    patches = {
        "before writing": ("write", die),
        "mid-line": ("write", some),
        "mid-batch": ("write", one_and_a_half),
        "all but the newline": ("write", most),
        "after writing": ("write", written),
        "after syncing": ("fsync", synced),
        "syncing the head": ("fsync", lambda handle: die() if next(count) else real["fsync"](handle)),
        "before the head": ("replace", die),
        "after the head": ("replace", renamed),
    }
    if point in patches:
        name, patch = patches[point]
        setattr(os, name, patch)


def main() -> None:
    for line in sys.stdin:
        request = json.loads(line)
        pid = os.fork()
        if pid == 0:
            live(Path(request["folder"]), request["point"], request["rounds"])
            os._exit(0)
        _, status = os.waitpid(pid, 0)
        print(json.dumps({"code": os.waitstatus_to_exitcode(status)}), flush=True)


if __name__ == "__main__":
    main()
