"""Which addresses processes listen on, as the kernel has them."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

#: 127.0.0.1, the same as an address of IPv6, and ::1.
LOOPBACK = {"0100007F", "0000000000000000FFFF00000100007F", "00000000000000000000000001000000"}


def listening(processes):
    """The addresses that each of these processes listens on; who has ended is left out."""
    sockets = {}
    for name in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]:
            words = line.split()
            if words[3] == "0A":
                sockets[f"socket:[{words[9]}]"] = words[1].partition(":")[0]
    found = {}
    for process in processes:
        with contextlib.suppress(OSError):
            files = [os.readlink(one.path) for one in os.scandir(f"/proc/{process}/fd")]
            found[process] = {sockets[one] for one in files if one in sockets}
    return found


def family():
    """This process and all it has started."""
    parents = {}
    for place in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if place.name.isdigit():
                parents[int(place.name)] = int((place / "stat").read_text().rpartition(")")[2].split()[1])
    mine = {os.getpid()}
    while more := {process for process, parent in parents.items() if parent in mine} - mine:
        mine |= more
    return mine
