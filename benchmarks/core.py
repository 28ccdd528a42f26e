"""Speed and memory of the core, against plain NumPy: python benchmarks/core.py [--quick] [--write].

(1) time a round of FedEPM on Adult at 100, 1,000 and 10,000 clients, beside (a) the same algorithm as per-client NumPy
loops and (b) as hand-vectorised NumPy; all three must first agree to 1e-10 over 5 rounds. (2) overhead of the round
loop. (3) memory over 10,000 rounds. (4) the server step at 100,000 parameters. (5) the cost of telemetry.
Every figure is the best of several repetitions, wall time, drawing of cohorts included on all sides. The NumPy versions
are timed with one BLAS thread and with all, and the faster counts.
"""

from __future__ import annotations

import argparse
import os
import platform
import resource
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import date
from importlib import metadata
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from scipy.sparse import csr_matrix
from scipy.special import expit
from threadpoolctl import threadpool_limits

import fedpact as fp
from fedpact.algorithms.fedepm import elastic_net_center, paper_eta
from fedpact.core.contract import Batch
from fedpact.core.driver import drive
from fedpact.core.loop import Loop
from fedpact.core.participation import as_participation
from fedpact.core.vector import Vector
from fedpact.definition import use_compilation_cache
from fedpact.engines import LocalEngine

PAGE = Path(__file__).resolve().parents[1] / "docs" / "benchmarks.md"
BEGIN, END = "<!-- results:core -->", "<!-- end -->"
SAME = 1e-10
NEVER = 10**9


class Constants(NamedTuple):
    """FedEPM's, without noise."""

    k0: int
    eta: float
    lam: float
    mu0: float
    c: float
    alpha: float
    l2: float


def constants(clients: int, rate: float) -> Constants:
    s = fp.FedEPM(k0=12)
    eta = paper_eta(clients, rate)
    return Constants(s.k0, eta, eta / 2, s.mu0, s.c, s.alpha, fp.Logistic().l2)


# The two NumPy versions. Both: w is the broadcast model, step(t, cohort) is one round.


class Loops:
    """(a) One client after the other: gradient, k0 local steps; then the server's median of 2m+1 numbers."""

    def __init__(self, federation: Any, k: Constants) -> None:
        self.k, self.parts = k, [federation.client(i) for i in range(federation.clients)]
        m, n = federation.clients, federation.features
        self.w, self.z = np.zeros(n), np.zeros((m, n))
        self.levels = k.lam / k.eta * ((2 * np.arange(m + 1) - m) / m)

    def step(self, t: int, cohort: np.ndarray) -> None:
        k, w = self.k, self.w
        for i in cohort:
            x, y = self.parts[i]
            d = len(y)
            g = (x.T @ (expit(x @ w) - y) + k.l2 * w) / d
            w_i = self.z[i]  # without noise z_i = w_i
            for j in range(k.k0):
                gap = w_i - w
                mu = k.mu0 * (1 + k.c * (gap @ gap)) * k.alpha ** (t * k.k0 + j + 1) / d
                v = mu * gap - g
                w_i = w + np.sign(v) * np.maximum(np.abs(v) - k.lam, 0) / (k.eta + mu)
            self.z[i] = w_i
        numbers = np.concatenate([self.z, self.z.mean(axis=0) + self.levels[:, None]])
        self.w = np.median(numbers, axis=0)


class Flat:
    """(b) All rows in one array, all clients in (n, m) arrays, buffers reused.

    The per-client sums of the gradient are one sparse product: a matrix with client i's residuals in row i, times the
    features. It takes a third of the time of np.add.reduceat at 1,000 clients. Clients lie along the last axis, so that
    what belongs to a client (d_i, μ_i) multiplies without a copy.
    """

    def __init__(self, federation: Any, k: Constants) -> None:
        m, n = federation.clients, federation.features
        parts = [federation.client(i) for i in range(m)]
        self.k, self.m = k, m
        self.x, self.y = np.concatenate([x for x, _ in parts]), np.concatenate([y for _, y in parts])
        self.d = federation.sizes.astype(np.float64)
        ends = np.concatenate([[0], np.cumsum(federation.sizes)]).astype(np.int32)
        rows = np.arange(len(self.y), dtype=np.int32)
        self.residuals = csr_matrix((np.zeros(len(self.y)), rows, ends), shape=(m, len(self.y)))
        self.w, self.z = np.zeros(n), np.zeros((n, m))
        self.levels = k.lam / k.eta * ((2 * np.arange(m + 1) - m) / m)
        self.numbers = np.empty((n, 2 * m + 1))

    def step(self, t: int, cohort: np.ndarray) -> None:
        everyone = len(cohort) == self.m
        g = self.gradient()
        if everyone:
            self.z = self.local(t, self.z, g, self.d)
        else:
            self.z[:, cohort] = self.local(t, self.z[:, cohort], g[:, cohort], self.d[cohort])
        self.serve()

    def gradient(self) -> np.ndarray:
        s = self.residuals.data
        np.dot(self.x, self.w, out=s)
        expit(s, out=s)
        s -= self.y
        return ((self.residuals @ self.x + self.k.l2 * self.w) / self.d[:, None]).T.copy()

    def local(self, t: int, z: np.ndarray, g: np.ndarray, d: np.ndarray) -> np.ndarray:
        k, w = self.k, self.w[:, None]
        gap = z - w
        v, cut = np.empty_like(gap), np.empty_like(gap)
        for j in range(k.k0):
            mu = k.mu0 * k.alpha ** (t * k.k0 + j + 1) * (1 + k.c * np.einsum("ji,ji->i", gap, gap)) / d
            np.multiply(gap, mu, out=v)
            v -= g
            np.minimum(v, k.lam, out=cut)
            np.maximum(cut, -k.lam, out=cut)
            v -= cut  # soft(v, λ) = v − clip(v, −λ, λ)
            np.divide(v, k.eta + mu, out=gap)
        gap += w
        return gap

    def serve(self) -> None:
        self.numbers[:, : self.m] = self.z
        self.numbers[:, self.m :] = self.z.mean(axis=1)[:, None] + self.levels
        self.numbers.partition(self.m, axis=1)
        self.w = self.numbers[:, self.m].copy()


# fedpact, driven as fedpact.run drives it


class Mark(NamedTuple):
    """The end of a block of rounds."""

    rounds: int
    at: float
    memory: float


def memory() -> float:
    """Resident megabytes now; the most so far where the system does not say."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3


def driven(
    settings: Any, problem: Any, federation: Any, participation: Any, rounds: int, evaluate_every: int = NEVER
) -> tuple[list[Mark], list[tuple[int, np.ndarray]], Any]:
    """Run, and note the clock, the memory and the model at the end of every block."""
    clients = federation.clients
    algorithm = settings.build(problem, clients, participation.rate(clients))
    loop = Loop(algorithm, problem, LocalEngine(), fp.stop.Never(), evaluate_every, timing=False)
    marks: list[Mark] = []
    models: list[tuple[int, np.ndarray]] = []

    def after_block(carry: Any, history: Any, elapsed: float) -> None:
        marks.append(Mark(history.rounds, time.perf_counter(), memory()))
        if rounds <= 10:
            models.append((history.rounds, np.asarray(algorithm.model(carry.state.server).tree["w"])))

    w0 = problem.init(federation.features, np.float64)
    (end,) = drive(loop, [federation], w0, participation, [0], rounds, np.float64, after_block=after_block)
    assert end.history.rounds == rounds, end.where
    return marks, models, end.history


def best_block(marks: list[Mark]) -> float:
    """Milliseconds a round in the best block. The first block compiles and does not count."""
    pairs = list(pairwise(marks))
    longest = max(b.rounds - a.rounds for a, b in pairs)
    return min(1e3 * (b.at - a.at) / (b.rounds - a.rounds) for a, b in pairs if b.rounds - a.rounds > longest // 2)


def best(work: Callable[[], Any], repetitions: int) -> float:
    """Milliseconds of the fastest repetition, after one that does not count."""
    work()
    times = []
    for _ in range(repetitions):
        begun = time.perf_counter()
        work()
        times.append(time.perf_counter() - begun)
    return 1e3 * min(times)


def stepped(version: Any, participation: Any, clients: int, rounds: int, repetitions: int) -> float:
    """Milliseconds a round of a NumPy version, the cohorts drawn as fedpact draws them."""
    t = 0

    def work() -> None:
        nonlocal t
        for _ in range(rounds):
            version.step(t, participation.select(0, t, clients))
            t += 1

    found = []
    for threads in (1, os.cpu_count()):
        with threadpool_limits(threads):
            found.append(best(work, repetitions) / rounds)
    return min(found)


# The measurements. Each returns the lines of a Markdown table and whether its requirement holds.


def agree(federation: Any, participation: Any, k: Constants, rounds: int = 5) -> float:
    """The largest relative difference between the three versions: the objective of each round and the models."""
    m = federation.clients
    _, models, history = driven(fp.FedEPM(k0=k.k0), fp.Logistic(), federation, participation, rounds, 1)
    versions = [Loops(federation, k), Flat(federation, k)]
    parts = [federation.client(i) for i in range(m)]

    def objective(w: np.ndarray) -> float:
        sums = ((np.sum(np.logaddexp(0, x @ w) - y * (x @ w)) + k.l2 / 2 * w @ w) / len(y) for x, y in parts)
        return sum(sums) / m

    ours, at = history.column("objective"), dict(models)
    worst = 0.0
    for t in range(rounds):
        for version in versions:
            version.step(t, participation.select(0, t, m))
            worst = max(worst, abs(objective(version.w) / ours[t + 1] - 1))
            if t + 1 in at:
                worst = max(worst, np.max(np.abs(version.w - at[t + 1])) / np.max(np.abs(at[t + 1])))
    return worst


def rounds_table(dataset: Any, sizes: list[int], repetitions: int) -> tuple[list[str], list[str]]:
    lines = [
        "| clients | active | fedpact, ms | (a) loops, ms | (b) flat, ms | (a) / fedpact | (b) / fedpact | differ by |",
        "|---|---|---|---|---|---|---|---|",
    ]
    verdicts = []
    for m in sizes:
        federation = dataset.split(clients=m, how="cuts", seed=0)
        for rate in (1.0, 0.5):
            participation = as_participation(rate)
            k = constants(m, rate)
            gap = agree(federation, participation, k)
            if not gap <= SAME:
                raise SystemExit(
                    f"the three versions must agree to {SAME}, got {gap:.3g} at m={m}, participation {rate}."
                )
            length = max(2, 20_000 // m)
            flat = stepped(Flat(federation, k), participation, m, length, repetitions)
            loops = stepped(Loops(federation, k), participation, m, max(1, 1000 // m), max(2, repetitions // 4))
            rounds = 66 + 64 * repetitions if m <= 1000 else 2 + 32 * repetitions
            marks, _, history = driven(fp.FedEPM(k0=12), fp.Logistic(), federation, participation, rounds)
            assert np.isnan(history.column("objective")[1:-1]).all()  # nothing but the two ends is measured
            ours = best_block(marks)
            lines.append(
                f"| {m:,} | {participation.capacity(m):,} | {ours:.3f} | {loops:.2f} | {flat:.3f} "
                f"| {loops / ours:.0f} | {flat / ours:.2f} | {gap:.0e} |"
            )
            print(lines[-1], flush=True)
            if m == 1000 and rate == 1.0:
                verdicts.append(verdict("at least 50 times (a) at m=1,000", loops / ours >= 50, f"{loops / ours:.0f}"))
                verdicts.append(verdict("not slower than (b) at m=1,000", flat >= ours, f"{flat / ours:.2f}"))
    return lines, verdicts


@dataclass(frozen=True)
class Empty:
    """One number per client and next to no work: f_i(w) = (w − y_i)²/2."""

    def check(self, federation: Any) -> None: ...

    def init(self, features: int, dtype: Any) -> Vector:
        return Vector({"w": jnp.zeros(features, dtype)})

    def value_and_gradient(self, w: Vector, batch: Batch) -> tuple[Any, Vector]:
        gap = w.tree["w"] - batch.y
        return jnp.sum(gap**2) / 2, Vector({"w": gap})

    def gradient(self, w: Vector, batch: Batch) -> Vector:
        return self.value_and_gradient(w, batch)[1]

    def counts(self, w: Vector, batch: Batch) -> dict[str, Any]:
        return {"rows": batch.rows}


def overhead_table(rounds: int) -> tuple[list[str], list[str]]:
    federation = fp.data.Federation.from_arrays(
        [(np.ones((1, 1)), np.array([i / 100])) for i in range(100)], classes=()
    )
    lines = ["| 100 clients, one number each | ms a round |", "|---|---|"]
    worst = 0.0
    for text, rate in (("everyone", 1.0), ("half of them", 0.5), ("five of them", 0.05)):
        marks, _, _ = driven(fp.FedAvg(steps=1, step=0.1), Empty(), federation, as_participation(rate), rounds, 1)
        took = best_block(marks)
        whole = 1e3 * (marks[-1].at - marks[0].at) / (marks[-1].rounds - marks[0].rounds)
        worst = max(worst, took)
        lines.append(f"| {text} | {took:.3f} (mean of all blocks {whole:.3f}) |")
    return lines, [verdict("overhead at most 1 ms a round", worst <= 1, f"{worst:.3f} ms")]


def memory_table(dataset: Any, rounds: int) -> tuple[list[str], list[str]]:
    federation = dataset.split(clients=100, how="cuts", seed=0)
    marks, _, history = driven(fp.FedEPM(k0=12), fp.Logistic(), federation, as_participation(0.5), rounds, 1)
    early = next(mark for mark in marks if mark.rounds >= rounds // 10)
    cells = len(history) * len(history.columns)
    growth = marks[-1].memory - early.memory
    lines = [
        "| rounds | resident MB |",
        "|---|---|",
        f"| {early.rounds:,} | {early.memory:.1f} |",
        f"| {marks[-1].rounds:,} | {marks[-1].memory:.1f} |",
        "",
        f"Growth {growth:.1f} MB, the history of {cells:,} numbers included.",
    ]
    return lines, [
        verdict("memory grows by less than 20 MB from a tenth of the rounds on", growth < 20, f"{growth:.1f} MB")
    ]


def server_table(repetitions: int) -> tuple[list[str], list[str]]:
    m, n, lam, eta = 100, 100_000, 5e-6, 1e-5
    z = np.random.default_rng(0).standard_normal((m, n))
    levels = lam / eta * ((2 * np.arange(m + 1) - m) / m)
    numbers = np.concatenate([z, z.mean(axis=0) + levels[:, None]])
    compiled = jax.jit(lambda a: elastic_net_center(a, lam, eta))
    on_device = jnp.asarray(z)
    median = np.median(numbers, axis=0)
    for found in (elastic_net_center(z, lam, eta), compiled(on_device)):
        assert np.max(np.abs(np.asarray(found) - median)) <= SAME
    reference = best(lambda: np.median(numbers, axis=0), repetitions)
    host = best(lambda: elastic_net_center(z, lam, eta), repetitions)
    device = best(lambda: compiled(on_device).block_until_ready(), repetitions)
    lines = ["| m = 100, n = 100,000 | ms | numpy.median / it |", "|---|---|---|"]
    lines.append(f"| numpy.median of the (201, n) array | {reference:.0f} | 1 |")
    lines.append(f"| elastic_net_center, NumPy array | {host:.0f} | {reference / host:.2f} |")
    lines.append(f"| elastic_net_center, JAX array | {device:.0f} | {reference / device:.2f} |")
    return lines, []


@dataclass(frozen=True)
class Counting(fp.Logistic):
    """Logistic regression that counts, per client, how often telemetry asks for its value."""

    def value_and_gradient(self, w: Vector, batch: Batch) -> tuple[Any, Vector]:
        jax.debug.callback(lambda: CALLS.append(1))
        return super().value_and_gradient(w, batch)


CALLS: list[int] = []


def telemetry_table(dataset: Any, repetitions: int) -> tuple[list[str], list[str]]:
    few = dataset.take(np.arange(200)).split(clients=5, how="iid", seed=0)
    counted = []
    for every in (1, NEVER):
        CALLS.clear()
        driven(fp.FedEPM(), Counting(), few, as_participation(1.0), 20, every)
        jax.effects_barrier()
        counted.append(len(CALLS))
    federation = dataset.split(clients=1000, how="cuts", seed=0)
    rounds = 66 + 64 * repetitions
    took = {
        every: best_block(driven(fp.FedEPM(), fp.Logistic(), federation, as_participation(1.0), rounds, every)[0])
        for every in (1, 10, NEVER)
    }
    lines = ["| m = 1,000, everyone | ms a round | telemetry |", "|---|---|---|"]
    for every, text in ((1, "every round"), (10, "every tenth round"), (NEVER, "never")):
        lines.append(f"| {text} | {took[every]:.3f} | {took[every] - took[NEVER]:.3f} |")
    told = f"{counted[0]} with telemetry, {counted[1]} without (the first row and the last)"
    lines += ["", f"Evaluations of f_i in 20 rounds: {told}."]
    return lines, [
        verdict("telemetry is skipped where it is not asked for", counted[1] <= counted[0] * 2 / 21, f"{counted}")
    ]


def verdict(text: str, holds: bool, value: str) -> str:
    return f"- {text}: {'met' if holds else '**not met**'} ({value})"


def machine() -> str:
    model = platform.processor() or platform.machine()
    try:
        names = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
        model = names[0].partition(":")[2].strip()
    except (OSError, IndexError):
        pass
    packages = ", ".join(f"{name} {metadata.version(name)}" for name in ("jax", "numpy", "scipy"))
    load = ", ".join(f"{value:.1f}" for value in os.getloadavg())
    return (
        f"{date.today().isoformat()}, {os.cpu_count()} cores, {model}, Python {platform.python_version()}, {packages}; "
        f"load average before the run {load}."
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="few repetitions: to see that it works")
    parser.add_argument("--write", action="store_true", help=f"put the results into {PAGE.name}")
    options = parser.parse_args()
    repetitions = 3 if options.quick else 12
    use_compilation_cache()
    dataset = fp.data.adult()
    text, verdicts = [machine()], []
    print(text[0], flush=True)
    for title, measure in (
        ("Time a round of FedEPM (k0 = 12) on Adult", lambda: rounds_table(dataset, [100, 1000, 10_000], repetitions)),
        ("Overhead of the round loop", lambda: overhead_table(1000 if options.quick else 5000)),
        ("Memory", lambda: memory_table(dataset, 10_000)),
        ("The server step", lambda: server_table(repetitions)),
        ("Telemetry", lambda: telemetry_table(dataset, repetitions)),
    ):
        lines, found = measure()
        section = ["", f"### {title}", "", *lines]
        text, verdicts = text + section, verdicts + found
        print("\n".join(section), flush=True)
    text += ["", "### Requirements", "", *verdicts]
    print("\n".join(["", *verdicts]))
    if options.write:
        page = PAGE.read_text(encoding="utf-8")
        head, _, rest = page.partition(BEGIN)
        _, _, tail = rest.partition(END)
        PAGE.write_text("\n".join([head + BEGIN, *text, END]) + tail, encoding="utf-8")


if __name__ == "__main__":
    main()
