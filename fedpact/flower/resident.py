"""The node's process. Flower starts a process for every message; this one outlives them, with the rows in memory.

The ClientApp (`client`) sends it a message through a socket in a folder that only this user can open, and gets the
answer. It is started by the first message, ends with the SuperNode that started it, or after an hour without a message,
and may be killed at any moment: everything that counts is in the node's folder, which it holds a lock on.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from hashlib import sha256
from pathlib import Path
from typing import Any

from fedpact.core.errors import require_positive_int
from fedpact.core.files import own_folder
from fedpact.flower.warm import STARTER, born

IDLE = 3600.0
START = 120.0
#: Seconds within which a process that was killed is gone.
ENDING = 10.0
#: What a node's folder has, one of them at least; and what node.sh has put into a new one (`warm.commands`).
ITS, BESIDE = ("node.key", "node.log", "node.lock"), ("bin",)


def place_of(config: dict[str, Any]) -> Path:
    """The node's folder: its `state`, or one by its name below the working folder."""
    name = str(config.get("name", config.get("client", Path(str(config.get("csv", "node"))).stem)))
    return Path(str(config.get("state", Path("fedpact-state") / name))).absolute()


def _socket_path(folder: Path) -> Path:
    """Short enough for any system; in a folder of this user alone."""
    home = Path(tempfile.gettempdir()) / f"fedpact-{os.getuid()}"
    home.mkdir(mode=0o700, exist_ok=True)
    if home.stat().st_uid != os.getuid():
        raise PermissionError(f"{home} is another user's")
    return home / sha256(str(folder).encode()).hexdigest()[:24]


def forget(config: dict[str, Any]) -> None:
    """Take away the socket of a process that was ended on purpose: left there, it tells the next that one was lost."""
    _socket_path(place_of(config)).unlink(missing_ok=True)


def _send(connection: socket.socket, content: bytes) -> None:
    connection.sendall(struct.pack("!Q", len(content)) + content)


def _receive(connection: socket.socket) -> bytes:
    head = _exactly(connection, 8)
    return _exactly(connection, struct.unpack("!Q", head)[0])


def _exactly(connection: socket.socket, count: int) -> bytes:
    parts, left = [], count
    while left:
        part = connection.recv(min(left, 1 << 20))
        if not part:
            raise ConnectionError("the other side is gone")
        parts.append(part)
        left -= len(part)
    return b"".join(parts)


def ask(config: dict[str, Any], content: bytes) -> bytes:
    """The resident's answer; it is started if it is not there, and again, once, if it is lost on the way.

    One that was killed takes connections until the system has taken it down: until then it is tried again.
    """
    folder, until = place_of(config), None
    while True:
        connection, started = _connected(folder, config)
        try:
            with connection:
                _send(connection, content)
                return _receive(connection)
        except ConnectionError:
            if until is not None and (started or time.monotonic() > until):
                raise
            until = until or time.monotonic() + ENDING
            time.sleep(0.05)


def _connected(folder: Path, config: dict[str, Any]) -> tuple[socket.socket, bool]:
    """A connection, and whether the process at its other side was started for it."""
    path, started, log = _socket_path(folder), None, folder / "node.log"
    before, until = 0, time.monotonic() + START
    while time.monotonic() < until:
        connection = socket.socket(socket.AF_UNIX)
        try:
            connection.connect(str(path))
            return connection, started is not None
        except (FileNotFoundError, ConnectionRefusedError):
            connection.close()
        ended = None if started is None else started.poll()
        if ended is not None and ended > 0:  # 0: another one has the folder, and will answer; below: it was killed
            lines = log.read_bytes()[before:].decode(errors="replace").split("\n")
            last = next((line for line in reversed(lines) if line.strip()), f"exit code {ended}")
            raise ConnectionError(f"the node's process must start, got its end: {last} The rest is in {log}.")
        if started is None or ended is not None:
            before = log.stat().st_size if log.is_file() else 0
            started = _start(folder, config, killed=(ended or 0) < 0)
        time.sleep(0.05)
    raise ConnectionError(f"the node's process did not start within {START:g} s; see {log}")


def _start(folder: Path, config: dict[str, Any], killed: bool = False) -> Any:
    """Start it; `killed`: one was, before it could answer."""
    own_folder(folder, ITS, BESIDE)
    told = json.dumps({"config": config, "folder": str(folder), "parent": int(os.environ.get(STARTER, os.getppid()))})
    with (folder / "node.log").open("ab", buffering=0) as log:
        if killed or _socket_path(folder).exists():  # one that ends by itself takes its socket away
            line = f"{time.strftime('%Y-%m-%d %H:%M:%S')} the node's process was lost; another is started\n"
            sys.stderr.write(line)
            with contextlib.suppress(OSError):  # on a full disk it can still answer that it cannot step
                log.write(line.encode())
        return subprocess.Popen(
            [sys.executable, "-m", "fedpact.flower.resident", told],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )


# The process itself


def serve(config: dict[str, Any], folder: Path, parent: int) -> None:
    """Answer until there is nobody to answer to."""
    lock = (folder / "node.lock").open("w")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return  # another one serves this folder
    if (threads := config.get("threads")) is not None:
        require_positive_int("threads of the node's configuration", threads)
        cores = sorted(os.sched_getaffinity(0))[:threads]
        os.sched_setaffinity(0, cores)
    from fedpact.flower.node import Node

    node = Node(config, folder)
    path = _socket_path(folder)
    path.unlink(missing_ok=True)
    server = socket.socket(socket.AF_UNIX)
    server.bind(str(path))
    server.listen(8)
    last = [time.monotonic()]
    threading.Thread(target=_watch, args=(parent, last, path), daemon=True).start()
    while True:
        connection, _ = server.accept()
        with contextlib.suppress(ConnectionError), connection:
            content = _receive(connection)
            last[0] = float("inf")
            answer = node.signed(content)
            last[0] = time.monotonic()
            _send(connection, answer)


def _watch(parent: int, last: list[float], path: Path) -> None:
    begun = born(parent)
    while True:
        time.sleep(0.5)
        if (begun and born(parent) != begun) or not _alive(parent) or time.monotonic() - last[0] > IDLE:
            path.unlink(missing_ok=True)
            os.kill(os.getpid(), signal.SIGKILL)  # in the middle of anything: what counts is whole on the disk


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


if __name__ == "__main__":
    given = json.loads(sys.argv[1])
    serve(given["config"], Path(given["folder"]), int(given["parent"]))
