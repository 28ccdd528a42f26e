"""What secure sums, private alignment and sums on ciphertexts cost.

    python benchmarks/secure.py [--dimension 1000000] [--clients 10 50 100] [--ids 1000] [--json]

A sum runs in one process, one client after the other; a client's time is the median over clients, the server's is its
own work until it has the sum, with nobody and with a third dropping out after the shares were handed out. Bytes are
those of the messages' contents. Ciphertexts are measured where TenSEAL is installed (`pip install 'fedpact[he]'`).
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import statistics
import time
from collections.abc import Mapping
from typing import Any

import numpy as np

from fedpact.secure import Client, Lattice, Server, Terms, primitives, psi


def size_of(message: Any) -> int:
    """Bytes of a message's contents; 8 for an integer."""
    if isinstance(message, bytes | str):
        return len(message)
    if isinstance(message, np.ndarray):
        return message.nbytes
    if isinstance(message, Mapping):
        return sum(size_of(key) + size_of(value) for key, value in message.items())
    return sum(map(size_of, message)) if isinstance(message, tuple) else 8


def stream(dimension: int, repeats: int = 20) -> float:
    """Milliseconds of one mask, per 10⁶ words: the best of several."""
    total, least = np.zeros(dimension, np.uint64), float("inf")
    for _ in range(repeats):
        key, begun = os.urandom(32), time.perf_counter()
        primitives.add_stream(total, key, 1)
        least = min(least, time.perf_counter() - begun)
    return least * 1e9 / dimension


def secure_sum(n: int, d: int, dropping: int) -> dict[str, Any]:
    """One sum: milliseconds by step, and bytes a client."""
    terms = Terms(os.urandom(16), 0, tuple(range(n)), d, Lattice(10.0, n))
    server, clients = Server(terms), [Client(terms, i) for i in range(n)]
    x = np.random.default_rng(0).uniform(-1, 1, d)
    spent: dict[str, list[float]] = {}
    up, down, own = [0] * n, [0] * n, 0.0

    def timed(name: str, act: Any, *arguments: Any) -> Any:
        begun = time.perf_counter()
        made = act(*arguments)
        spent.setdefault(name, []).append(1e3 * (time.perf_counter() - begun))
        return made

    def send(client: Client, message: Any) -> None:
        up[client.number] += size_of(message)
        timed("add", server.add, message)

    for c in clients:
        send(c, timed("advertise", c.advertise))
    roster = timed("roster", server.roster)
    for c in clients:
        down[c.number] += size_of(roster)
        send(c, timed("share", c.share, roster))
    boxes = timed("inboxes", server.inboxes)
    for c in clients[: n - dropping]:
        down[c.number] += size_of(boxes[c.number])
        send(c, timed("mask", c.mask, boxes[c.number], x))
    request = timed("request", server.request)
    for c in clients[: n - dropping]:
        down[c.number] += size_of(request)
        send(c, timed("reveal", c.reveal, request))
    total = timed("total", server.total)
    np.testing.assert_allclose(total.values, (n - dropping) * x, rtol=0, atol=1e-6)
    own = sum(sum(spent[name]) for name in ("add", "roster", "inboxes", "request", "total"))
    middle = {name: statistics.median(spent[name]) for name in ("advertise", "share", "mask", "reveal")}
    return {"client_ms": middle, "server_ms": own, "up": up[0], "down": down[0], "vector": 8 * d}


def alignment(ids: int) -> dict[str, float]:
    """Microseconds an id, of two parties' steps."""
    names = ["a", "b"]
    texts = [f"record {k}" for k in range(ids)]
    a, b = (psi.Party(bytes(16), name, names, texts) for name in names)
    marks = [time.perf_counter()]
    mine, theirs = a.begin(), b.begin()
    marks.append(time.perf_counter())
    sets = [b.blind(mine), a.blind(theirs)]
    marks.append(time.perf_counter())
    psi.match(bytes(16), names, sets)
    marks.append(time.perf_counter())
    begin, blind, match = np.diff(marks) * 1e6 / ids
    return {"begin": begin / 2, "blind": blind / 2, "match": match, "bytes": 2 * 32}


def ciphertexts(size: int = 100_000, clients: int = 5) -> dict[str, float]:
    """Milliseconds for 10⁵ numbers, bytes a number, the worst error."""
    from fedpact.secure.encrypted import Cipher, KeyHolder

    holder = KeyHolder()
    cipher, x = Cipher(holder.public()), np.random.default_rng(0).normal(size=(clients, size))
    marks = [time.perf_counter()]
    sealed = [cipher.seal(v, 10.0) for v in x]
    marks.append(time.perf_counter())
    total = cipher.add(sealed)
    marks.append(time.perf_counter())
    step = cipher.linear([0.3], [total])
    marks.append(time.perf_counter())
    opened = holder.open(total, step=2.0**-40)
    marks.append(time.perf_counter())
    seal, add, linear, opening = np.diff(marks) * 1e3
    errors = [opened - x.sum(0), holder.open(step, step=2.0**-40) - 0.3 * x.sum(0)]
    found = {"seal": seal / clients, "add a client": add / clients, "linear, a vector": linear, "open": opening}
    sizes = {"bytes a number": sum(map(len, sealed[0].parts)) / size, "scaled": sum(map(len, step.parts)) / size}
    return found | sizes | {"error": float(max(np.max(np.abs(e)) for e in errors))}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dimension", type=int, default=1_000_000)
    parser.add_argument("--clients", type=int, nargs="+", default=[10, 50, 100])
    parser.add_argument("--ids", type=int, default=1000)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    d = given.dimension
    found: dict[str, Any] = {"load": os.getloadavg()[0], "stream_ms": stream(d)}
    found["sums"] = {f"{n}, {k} drop": secure_sum(n, d, k) for n in given.clients for k in (0, n // 3)}
    found["alignment_us"] = alignment(given.ids)
    found["ciphertexts"] = ciphertexts() if importlib.util.find_spec("tenseal") else None
    if given.json:
        print(json.dumps(found, indent=2))
        return
    print(f"load {found['load']:.1f} of {os.cpu_count()} cores before the run; d = {d:,}")
    print(f"one mask, ms per 10⁶ words: {found['stream_ms']:.2f}")
    for name, result in found["sums"].items():
        steps = "   ".join(f"{step} {ms:.1f}" for step, ms in result["client_ms"].items())
        more = result["up"] - result["vector"]
        print(f"n = {name}   client ms: {steps}   server ms: {result['server_ms']:.0f}")
        print(f"    bytes up: the vector's {result['vector']:,} and {more:,}; down: {result['down']:,}")
    print("alignment, µs an id:   " + "   ".join(f"{step} {us:.1f}" for step, us in found["alignment_us"].items()))
    if found["ciphertexts"]:
        print(
            "ciphertexts, ms for 10⁵ numbers:   " + "   ".join(f"{k} {v:.3g}" for k, v in found["ciphertexts"].items())
        )


if __name__ == "__main__":
    main()
