"""Flower's process for a message, made in a moment: a fork of one that has imported everything.

Flower starts `flwr-clientapp` for every message, and each spends two seconds of a processor on imports before it reads
its message: most of what a round costs where the work is small. The folder of `commands` has a command of that name,
and stands first in a node's PATH:

    the command   SuperExec starts it; no more than Python's standard library. Finds the warm process of its SuperExec
                  and hands it its arguments; without one it starts it for those who come later, and becomes Flower's
                  own command itself. Whatever goes wrong before a fork ends so too: a message is at worst as slow.
    the warm one  imports what Flower's command does, and waits. Never more than one thread: it forks for every command,
                  and ends with SuperExec.
    the fork      is Flower's command. It and the command that asked for it end with each other, tied by two pipes; and
                  the command ends with SuperExec.

On one machine `node` is Flower's SuperNode that looks for messages twice a second: Flower's own waits for three seconds
between looks, which spares the server of a large federation, and is half a round's time in a small one.

The forks are for Linux only: elsewhere a process that has imported much cannot be forked safely, and the command is
Flower's own.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import struct
import sys
import threading
import time
from types import SimpleNamespace
from typing import NamedTuple

COMMAND = "flwr-clientapp"
#: In the environment of forks: the process that a node's own one (`resident`) ends with, since their parent is another.
STARTER = "FEDPACT_SUPEREXEC"
#: Seconds between looks whether SuperExec is still there.
LOOK = 0.5
#: And, of a SuperNode on the server's machine, between looks for messages.
NEAR = 0.5


def commands(folder: os.PathLike[str] | str) -> str:
    """The folder with the command, written for this Python, below the given one."""
    import shlex
    from pathlib import Path

    place = Path(folder).absolute() / "bin"
    place.mkdir(parents=True, exist_ok=True)
    own = " ".join(map(shlex.quote, (sys.executable, "-IS", str(Path(__file__).absolute()))))
    fresh = place / f".{COMMAND}.{os.getpid()}"
    fresh.write_text(f'#!/bin/sh\nexec {own} "$0" "$@"\n')
    fresh.chmod(0o755)
    fresh.replace(place / COMMAND)
    return str(place)


# The command


def main(command: str, arguments: list[str]) -> None:
    """What SuperExec starts: a fork of the warm process where there is one, else Flower's own command."""
    starter = os.getppid()
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            address = _address(starter)
            if (ended := _forked(address, arguments)) is not None:
                signal.signal(signal.SIGINT, signal.SIG_DFL)
                while os.getppid() == starter and not select.select([ended], [], [], LOOK)[0]:
                    pass  # nothing is written: it can be read when the fork has ended
                sys.exit(0)
            _start(starter)
    own = _own(command)
    os.execv(own, [own, *arguments])


def _own(command: str) -> str:
    """Flower's own command: the next of the name in PATH."""
    here = os.path.realpath(os.path.dirname(command))
    for place in os.environ.get("PATH", os.defpath).split(os.pathsep):
        own = os.path.join(place, COMMAND)
        if os.path.realpath(place) != here and os.access(own, os.X_OK):
            return own
    sys.exit(f"{COMMAND} must be in PATH, got none beside {command}. Install fedpact[flower] where PATH looks.")


def _address(starter: int) -> str:
    """A socket without a file, by the process that it serves and when that one was started. Anyone may have the name:
    both sides look who the other one is."""
    return f"\0fedpact-warm-{os.getuid()}-{starter}-{born(starter)}"


def _mine(connection: socket.socket) -> bool:
    """Whether a process of this user is at the other side."""
    _, user, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return user == os.getuid()


def born(process: int) -> str:
    """When a process was started, to know it from another of the same number; empty if it is gone, or has ended."""
    try:
        with open(f"/proc/{process}/stat", encoding="utf-8") as file:
            state, *more = file.read().rsplit(")", 1)[1].split()
    except (OSError, IndexError):
        return ""
    return "" if state in "ZX" else more[18]


def _forked(address: str, arguments: list[str]) -> int | None:
    """Ask for a fork with these arguments: the end of a pipe that closes when it ends; None if there is none.

    Of the other pipe the fork has the end that reads, and this process, as long as it lives, the one that is held.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        connection.settimeout(10)
        try:
            connection.connect(address)
        except ConnectionRefusedError:
            return None
        if not _mine(connection):
            return None
        watched, _held = os.pipe()
        ended, its = os.pipe()
        socket.send_fds(connection, [os.fsencode("\0".join(arguments))], [watched, its])
        os.close(watched)
        os.close(its)
        return ended if connection.recv(1) else None


def _start(starter: int) -> None:
    """Start the warm process, for those who come once it has imported everything."""
    import subprocess

    told = [sys.executable, "-P", "-m", "fedpact.flower.warm", "--serve", str(starter)]
    subprocess.Popen(told, stdin=subprocess.DEVNULL, start_new_session=True)


# The warm process


def serve(starter: int) -> None:
    """Import what Flower's command imports, and be it in every fork."""
    server = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        server.bind(_address(starter))
    except OSError:
        return  # another one serves
    from flwr.supernode.cli import flwr_clientapp

    import fedpact.flower.client  # noqa: F401

    os.environ[STARTER] = str(starter)
    with server:
        asked = _asked(server, starter)
    if asked is not None:
        connection, arguments, (watched, _its) = asked
        threading.Thread(target=_end_with, args=(watched,), daemon=True).start()
        with contextlib.suppress(OSError), connection:
            connection.send(b"1")  # whoever does not hear this has ended, and so does this process
        sys.argv = [COMMAND, *arguments]
        flwr_clientapp()


def _asked(server: socket.socket, starter: int) -> Asked | None:
    """Wait to be asked. Returns in every fork, with what it was asked; here once SuperExec is gone, with nothing."""
    begun = born(starter)
    server.listen(64)
    server.settimeout(LOOK)
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # who has ended is forgotten
    while begun and born(starter) == begun:
        if (given := _given(server)) is None:
            continue
        if _fork() == 0:
            signal.signal(signal.SIGCHLD, before)
            return given
        given.connection.close()
        for end in given.ends:
            os.close(end)
    return None


class Asked(NamedTuple):
    """A command's question: where it waits for the answer, its arguments, and its ends of the two pipes."""

    connection: socket.socket
    arguments: list[str]
    ends: list[int]


def _given(server: socket.socket) -> Asked | None:
    """The next question; None if there is none for a while, or nobody to answer any more."""
    try:
        connection, _ = server.accept()
    except OSError:
        return None
    with contextlib.suppress(OSError):
        if _mine(connection):
            connection.settimeout(1)
            content, ends, _, _ = socket.recv_fds(connection, 1 << 16, 2)
            if len(ends) == 2:
                return Asked(connection, os.fsdecode(content).split("\0"), ends)
    connection.close()
    return None


def _fork() -> int | None:
    """As os.fork; None where there can be none now: who asked is not answered, and takes Flower's own command."""
    try:
        return os.fork()
    except OSError:
        return None


def _end_with(watched: int) -> None:
    os.read(watched, 1)  # nothing is written: it returns when the other end is closed
    os.kill(os.getpid(), signal.SIGKILL)


# The SuperNode of a federation on one machine


def node(arguments: list[str]) -> None:
    """Flower's command `flower-supernode`, with shorter pauses; with its own where a Flower has them elsewhere."""
    from flwr.supernode.cli import flower_supernode

    with contextlib.suppress(ImportError, AttributeError):
        from flwr.supernode import start_client_internal

        quick = SimpleNamespace(**vars(start_client_internal.time))
        quick.sleep = lambda seconds: time.sleep(min(seconds, NEAR))
        start_client_internal.time = quick  # type: ignore[assignment]
    sys.argv = ["flower-supernode", *arguments]
    flower_supernode()


if __name__ == "__main__":
    if sys.argv[1] == "--node":
        node(sys.argv[2:])
    elif sys.argv[1] == "--serve":
        serve(int(sys.argv[2]))
    elif sys.argv[1] == "--commands":
        print(commands(sys.argv[2]))
    else:
        main(sys.argv[1], sys.argv[2:])
