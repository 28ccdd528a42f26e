"""What many clients cost: the model of `fedpact.scaling` beside what is measured here.

    python benchmarks/scaling.py [--quick] [--write]

Every measurement is a process of its own, one after the other (`--case` runs one and prints JSON), so that resident
memory is that of the case. Seconds of the server are those of processors (all threads), so that other work on the
machine counts less; those of simulated rounds are wall time, the quickest block. `--write` puts the tables into
docs/scaling.md.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from datetime import date
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

PAGE = Path(__file__).parents[1] / "docs" / "scaling.md"
BEGIN, END = "<!-- results:scaling -->", "<!-- end -->"
FEATURES, ROWS = 64, 4
MILLION = 10**6


# Memory


def memory(what: str = "VmRSS") -> int:
    """Bytes of this process: VmRSS now, VmHWM at most since `forget_peak`, RssAnon without mapped files."""
    line = next(text for text in Path("/proc/self/status").read_text().splitlines() if text.startswith(what))
    return 1024 * int(line.split()[1])


def forget_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


# Cases: each in a process of its own


def simulated(name: str, clients: int, rounds: int) -> dict[str, float]:
    """Seconds a round and the most memory of a run in `local`; a run of 1,000 clients goes before it."""
    import fedpact as fp
    from fedpact.algorithms import algorithm

    def go(m: int, rounds: int) -> Any:
        federation = fp.data.synthetic(rows=ROWS * m, features=FEATURES).split(clients=m, seed=0)
        forget_peak()
        before = memory()
        run = fp.run(
            algorithm(name)(), fp.Logistic(l2=1e-3), federation, rounds=rounds, participation=0.1, evaluate_every=10**6
        )
        return run, memory("VmHWM") - before

    go(1000, 2)
    begun = time.perf_counter()
    run, grown = go(clients, rounds)
    # Seconds of a block are spread evenly over its rounds; the quickest block counts.
    pace = np.diff(run.history.column("seconds"))
    return {"seconds": float(pace.min()), "memory": grown, "all": time.perf_counter() - begun}


def server(name: str, clients: int, features: int, how: str) -> dict[str, float]:
    """One server step on kept messages, single precision: `shards`, `mapped` (a file), or `whole` (on the device)."""
    import jax
    import jax.numpy as jnp

    jax.config.update("jax_enable_x64", True)
    import fedpact as fp
    from fedpact.core.contract import Cohort
    from fedpact.core.shards import Kept, Shards, settled
    from fedpact.core.vector import Vector
    from fedpact.engines import HostEngine

    settings = fp.FedEPM() if name == "fedepm" else fp.FedPDM(memory=True)
    bundle = settings.build(fp.Logistic(), clients, 0.1)
    rng, cohort = np.random.default_rng(0), max(1, clients // 10)
    ids = rng.choice(clients, cohort, replace=False).astype(np.int32)
    cut = Cohort((jnp.asarray(ids),), jnp.ones(cohort, bool))
    room = HostEngine(spill=tempfile.gettempdir()).room if how == "mapped" else np.empty
    array = room((features, clients), np.float32)
    for row in array:
        row[:] = rng.normal(size=clients)
    uploads = rng.normal(size=(cohort, features)).astype(np.float32)
    field, message = ("z", "w") if name == "fedepm" else ("y", "x0")
    kind = type(jax.eval_shape(lambda: bundle.init(Vector(jnp.zeros(2)), _hellos(name, clients))))
    sent = sys.modules[kind.__module__].Upload(Vector(uploads))
    rest = {message: Vector(jnp.zeros(features, jnp.float32)), "round": jnp.asarray(0)}
    if name == "fedpdm":
        rest["lipschitz"] = None
    if how == "whole":
        state = kind(**rest, **{field: Vector(jnp.asarray(array.T))})
        del array
        step = jax.jit(bundle.server_step)
    else:
        state = kind(**rest, **{field: Vector(Kept(array))})
        step = Shards(bundle, clients, room).step
    jax.block_until_ready(jax.tree.leaves(step(state, sent, cut)))  # compiles
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    forget_peak()
    before, anonymous = memory(), memory("RssAnon")
    begun = time.process_time()
    out = settled(step(state, sent, cut)[0])
    jax.block_until_ready(jax.tree.leaves(out))
    seconds = time.process_time() - begun
    return {
        "seconds": seconds,
        "memory": memory("VmHWM") - before,
        "kept": 4 * clients * features,
        "anonymous": memory("RssAnon"),
        "anonymous before": anonymous,
        "file": memory("RssFile"),
    }


def _hellos(name: str, clients: int) -> Any:
    import jax.numpy as jnp

    from fedpact.algorithms import fedepm, fedpdm
    from fedpact.core.vector import Vector

    return fedepm.Hello(Vector(jnp.zeros((clients, 2)))) if name == "fedepm" else fedpdm.Hello(None)


def streamed(cohort: int, features: int) -> dict[str, float]:
    """Uploads added up as they come in, as the engines `host` and `ray` do."""
    from fedpact.engines.host import collected

    some = [np.random.default_rng(i).normal(size=features).astype(np.float32) for i in range(8)]
    forget_peak()
    before, begun = memory(), time.process_time()
    collected(((i, (None, some[i % 8], None)) for i in range(cohort)), "sum")
    return {"seconds": time.process_time() - begun, "memory": memory("VmHWM") - before}


CASES = {"simulated": simulated, "server": server, "streamed": streamed}


def case(kind: str, *arguments: Any) -> dict[str, float]:
    """One case in a process of its own."""
    told = json.dumps([kind, *arguments])
    done = subprocess.run([sys.executable, __file__, "--case", told], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{told}: {done.stderr[-2000:]}")
    found = json.loads(done.stdout.splitlines()[-1])
    print(told, {k: f"{v:.4g}" for k, v in found.items()}, file=sys.stderr, flush=True)
    return found


# Tables


def size(value: float) -> str:
    """Bytes for people."""
    for unit in ("B", "kB", "MB", "GB", "TB", "PB"):
        if value < 999.5 or unit == "PB":
            return f"{value:.3g} {unit}"
        value /= 1000
    raise AssertionError


def duration(seconds: float) -> str:
    for limit, unit, one in ((1, "ms", 1e-3), (120, "s", 1), (7200, "min", 60), (48 * 3600, "h", 3600)):
        if seconds < limit:
            return f"{seconds / one:.3g} {unit}"
    return f"{seconds / 86400:.3g} d"


def variants() -> dict[str, Any]:
    """Every algorithm for data split by rows, and those settings that need every client's message."""
    import fedpact as fp
    from fedpact.algorithms import ALGORITHMS

    found = {name: (cls(), fp.Logistic(l2=1e-3)) for name, cls in ALGORITHMS.items() if not cls.vertical}
    found["fedpdm, memory"] = (fp.FedPDM(memory=True), fp.Logistic(l2=1e-3))
    return found


def table(head: list[str], rows: list[list[str]]) -> list[str]:
    """Rows that differ in their first cell only are one."""
    merged: dict[tuple[str, ...], list[str]] = {}
    for first, *rest in rows:
        merged.setdefault(tuple(rest), []).append(first)
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return lines + ["| " + " | ".join([", ".join(names), *rest]) + " |" for rest, names in merged.items()]


def message_table() -> list[str]:
    from fedpact.scaling import costs

    n, rows = 10**6, []
    for name, (settings, problem) in variants().items():
        c = costs(settings, problem, n, MILLION, 0.01)
        cells = (c.hello, c.down, c.up, c.state, c.kept)
        rows.append([name, *(f"{cell / (4 * n):.0f}" if cell >= n else "–" for cell in cells)])
    head = [
        "vectors of n numbers",
        "first message",
        "down",
        "up",
        "client's state",
        "kept by the server of each client",
    ]
    return table(head, rows)


def round_table(rates: dict[str, float], share: float) -> list[str]:
    from fedpact.scaling import costs

    rows = []
    for name, (settings, problem) in variants().items():
        found = [costs(settings, problem, n, MILLION, share) for n in (10**4, 10**6, 10**8)]
        each = lambda f, found=found: " / ".join(f(c) for c in found)
        rate = rates["sum"] if found[0].combine == "sum" else rates[settings.name]
        rows.append(
            [
                name,
                each(lambda c: size(c.bytes_down)),
                each(lambda c: size(c.bytes_up)),
                each(lambda c: size(c.memory)),
                each(lambda c: size(c.memory_flower)),
                each(lambda c, rate=rate: duration(c.touched * rate)),
                each(lambda c: size(c.start)) if found[0].start > 10**9 else size(found[0].start),
            ]
        )
    head = ["", "down", "up", "server's memory", "in `flower`", "server's step, seconds of a processor"]
    return table([*head, "first messages, once"], rows)


def simulated_table(quick: bool) -> list[str]:
    import fedpact as fp
    from fedpact.algorithms import algorithm
    from fedpact.scaling import costs

    rows = []
    largest = 10**4 if quick else 10**5
    for name in ("fedavg", "fedepm", "inexact_admm"):
        small, large = (case("simulated", name, m, r) for m, r in ((largest // 10, 66), (largest, 20)))
        c = costs(algorithm(name)(), fp.Logistic(l2=1e-3), FEATURES, largest, 0.1, rows=ROWS, dtype=np.float64)
        predicted = local_memory(c)
        wanted = 10 * small["seconds"]
        rows.append(
            [
                name,
                f"{largest:,}",
                duration(wanted),
                duration(large["seconds"]),
                f"{large['seconds'] / wanted:.2f}",
                size(predicted),
                size(large["memory"]),
                f"{large['memory'] / predicted:.2f}",
                duration(large["all"]),
            ]
        )
    head = ["", "clients", "a round, predicted", "measured", "ratio"]
    return table([*head, "memory, predicted", "measured", "ratio", "the whole run of 20 rounds"], rows)


def local_memory(c: Any) -> int:
    """Of a run in `local`: rows on the host and the device, states and what is kept before and after, the cohort's."""
    rows = c.clients * ROWS * (FEATURES + 2) * 8
    return 2 * rows + 2 * c.clients * (c.state + c.kept) + c.cohort * (c.state + c.up) + c.start


def server_table(quick: bool) -> tuple[list[str], dict[str, float]]:
    import fedpact as fp
    from fedpact.scaling import costs

    scale = 10 if quick else 1
    rows, rates = [], {}
    for name, settings in (("fedepm", fp.FedEPM()), ("fedpdm", fp.FedPDM(memory=True))):
        base = 0.0
        shapes = [(10**3, 10**5, "shards"), (10**4, 10**4, "shards"), (10**5, 10**3, "shards")]
        extra = [(10**4, 10**4, "whole"), (10**4, 10**4, "mapped")] if name == "fedepm" else []
        for m, n, how in shapes + extra:
            n //= scale
            found = case("server", name, m, n, how)
            each = found["seconds"] / (m * n)
            base = base or each
            rates[name] = max(rates.get(name, 0.0), each) if how == "shards" else rates[name]
            c = costs(settings, fp.Logistic(), n, m, 0.1)
            predicted = c.memory - c.clients * c.kept - c.bytes_up  # those are there before the step
            rows.append(
                [
                    f"{name}, {how}",
                    f"{m:,} × {n:,}",
                    duration(base * m * n),
                    duration(found["seconds"]),
                    f"{1e9 * each:.1f}",
                    size(c.clients * c.kept),
                    size(predicted) if how == "shards" else "–",
                    size(found["memory"]),
                ]
            )
    for cohort, n in ((10**4, 10**4), (10**3, 10**5), (10**2, 10**6)):
        found = case("streamed", cohort // scale, n)
        each = found["seconds"] / (cohort // scale * n)
        rates.setdefault("sum base", each)
        rates["sum"] = max(rates.get("sum", 0.0), each)
        seconds = duration(rates["sum base"] * (cohort // scale) * n)
        cells = [seconds, duration(found["seconds"]), f"{1e9 * each:.1f}", "0", size(2 * 4 * n), size(found["memory"])]
        rows.append(["a sum, streamed", f"{cohort // scale:,} × {n:,}", *cells])
    head = ["the server's step", "messages × numbers", "predicted from the first", "measured", "ns a number"]
    return table([*head, "kept", "more memory, predicted", "measured"], rows), rates


def machine() -> str:
    names = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    packages = ", ".join(f"{name} {metadata.version(name)}" for name in ("jax", "numpy"))
    load = ", ".join(f"{value:.1f}" for value in os.getloadavg())
    model = names[0].partition(":")[2].strip() if names else platform.machine()
    return (
        f"{date.today().isoformat()}, {os.cpu_count()} cores, {model}, {packages}; load average before the run {load}."
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a tenth of everything: to see that it works")
    parser.add_argument("--write", action="store_true", help=f"put the results into {PAGE.name}")
    parser.add_argument("--case", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.case:
        kind, *arguments = json.loads(options.case)
        print(json.dumps(CASES[kind](*arguments)))
        return
    text = [machine(), "", "### The server's step, measured", ""]
    lines, rates = server_table(options.quick)
    text += [*lines, "", "### Simulated clients in `local`, measured", "", *simulated_table(options.quick)]
    text += ["", "### Messages and states", "", *message_table()]
    for share in (0.01, 0.1):
        title = f"### 10⁶ clients, {share:.0%} in a round: n = 10⁴ / 10⁶ / 10⁸"
        text += ["", title, "", *round_table(rates, share)]
    print("\n".join(text))
    if options.write:
        head, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
        PAGE.write_text("\n".join([head + BEGIN, *text, END]) + rest.partition(END)[2], encoding="utf-8")


if __name__ == "__main__":
    main()
