"""What the tables and figures of the FedADMM paper are computed from: runs to a test accuracy, kept in one CSV file.

A cell is a dataset, a number of clients and a split, such as mnist-100-iid; an entry is an algorithm on it. A tenth of
the clients takes part in a round; E_i is drawn from 1..E for FedProx and FedADMM unless said (Table III trains E
epochs, with E_i drawn beside it). FedADMM has the preset `paper` (the released code's start and message, momentum 0.5)
and a learning rate that is tuned like everybody else's; `printed` is Algorithm 1 as it stands. Baselines are tuned by
successive halving over the paper's grid (five rounds, seed 0: who is at the target sooner, or else the test accuracy),
then run on one seed for up to three times the rounds of FedADMM's slowest seed that got there, 100 at most; beyond,
they are "> n". A trial that is given more rounds goes on where it was, and so does the run of what was chosen. The
networks are trained by PyTorch where it is installed: the same runs to rounding, sooner on a CPU.

Every finished run is a row of results.csv: what it was, its accuracies, hours of computing (over all sessions), source,
commit and machine. A run that is there is not run again, one that was cut goes on from its checkpoint in `under-way/`
beside the file, so a table can be filled over days, and what its tuning chose holds for the other seeds of its entry;
what is missing is "not run", with an estimate of its hours.
"""

from __future__ import annotations

import csv
import io
import json
import math
import platform
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from hashlib import sha256
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from fedpact import data
from fedpact.algorithms import FedADMM, FedAvg, FedProx, FedSGD, Scaffold
from fedpact.core.environment import environment
from fedpact.core.errors import DataError, DatasetMissing, unknown
from fedpact.core.files import append_synced, make_folder
from fedpact.core.settings import Settings
from fedpact.core.stop import Outcome, Target
from fedpact.engines import HostEngine
from fedpact.papers.study import Study, whole_lines
from fedpact.problems import CNN1, CNN2, TorchCNN1, TorchCNN2
from fedpact.run import Run, run, uninterrupted
from fedpact.tune import Trial, rungs, tune

RATES, RHOS = (0.01, 0.1, 0.2, 0.5), (0.001, 0.01, 0.1, 1.0)
PARTICIPATION, TUNE_ROUNDS, MOST = 0.1, 5, 100
MANY = 500  # clients whose states are kept on disk: two of CNN1 for each of 1,000 are 13 GB
TARGETS = {"mnist": 0.97, "fmnist": 0.80, "cifar": 0.45}
LOADERS = {"mnist": data.mnist, "fmnist": data.fashion_mnist, "cifar": data.cifar10}
ROWS = {"mnist": 60_000, "fmnist": 60_000, "cifar": 50_000}  # for training
COLUMNS = (
    "cell", "algorithm", "settings", "seed", "most", "target", "reached", "hours", "accuracies", "source", "commit",
    "machine", "finished",
)  # fmt: skip
CPU = Path("/proc/cpuinfo")
#: Seconds of training a sample, before any run has told better: CNN1, CNN2 on two cores.
SECONDS = {"mnist": 0.7e-3, "fmnist": 0.7e-3, "cifar": 1.0e-3}


@dataclass(frozen=True)
class Cell:
    """Data at clients: mnist-100-iid, fmnist-200-imbalanced."""

    dataset: str
    clients: int
    split: str

    @property
    def name(self) -> str:
        """What --cell calls it."""
        return f"{self.dataset}-{self.clients}-{self.split}"

    def federation(self, seed: int) -> data.Federation:
        """The data dealt by this seed."""
        how = {"iid": "iid", "noniid": "shards", "imbalanced": "imbalanced"}[self.split]
        return _dataset(self.dataset).split(self.clients, how=how, seed=seed)

    @property
    def engine(self) -> HostEngine:
        """On a CPU these networks are quickest one client at a time in JAX, and a core each in PyTorch."""
        return HostEngine(at_once=None if _torch() else 1, spill=self.clients >= MANY)

    @property
    def problem(self) -> Any:
        """The paper's network for it."""
        if self.dataset == "cifar":
            return TorchCNN2() if _torch() else CNN2()
        return TorchCNN1() if _torch() else CNN1()


def _torch() -> bool:
    return find_spec("torch") is not None


@cache
def _dataset(name: str) -> data.Dataset:
    return LOADERS[name]()


def available(dataset: str) -> bool:
    """Whether the data are here; CIFAR-10 only where the user has put it or it can be downloaded."""
    try:
        _dataset(dataset)
    except DatasetMissing:
        return False
    return True


@dataclass(frozen=True)
class Entry:
    """An algorithm on a cell: what tables call it, its settings, what of them is tuned, and its seeds."""

    cell: Cell
    label: str
    settings: Settings
    tuned: bool = False
    seeds: int = 1
    most: int = MOST
    after: Entry | None = None  # runs up to three times this one's rounds
    expected: int = 30  # rounds, for the estimate of what is not run
    to_target: bool = True  # the run ends at the target accuracy; false: after `most` rounds

    @property
    def name(self) -> str:
        """What the CSV file calls it."""
        return f"{self.label}{' tuned' if self.tuned else ''}"


class Row(NamedTuple):
    """One finished run of the file."""

    seed: int
    most: int
    reached: int | None
    hours: float
    accuracies: list[float]
    settings: dict[str, Any]
    tuning: float = 0.0  # hours that choosing its settings took

    @property
    def rounds(self) -> int:
        """Rounds that were run: the first accuracy is the start's."""
        return len(self.accuracies) - 1

    @property
    def broken(self) -> bool:
        """Whether it ended before its time and without the target: something was not finite."""
        return self.reached is None and self.rounds < self.most


class Results:
    """results.csv: read once, appended to."""

    def __init__(self, path: Path, source: str) -> None:
        self.path, self.source = path, source
        self.commit = _commit()  # now, as the source is: a run takes hours, in which the files may change
        self.rows: list[dict[str, str]] = []
        if path.is_file():
            self.rows = list(csv.DictReader(whole_lines(path)))
            if self.rows and tuple(self.rows[0]) != COLUMNS:
                raise DataError(f"{path} must have the columns {', '.join(COLUMNS)}. Move it away to start anew.")

    def find(self, entry: Entry) -> list[Row]:
        """The finished runs of an entry, by seed; the longest of each seed."""
        found: dict[int, Row] = {}
        free = _free(entry) if entry.tuned else ()
        wanted = {name: value for name, value in _plain(entry.settings).items() if name not in free}
        usual = _plain(type(entry.settings)())  # what a setting is in a row that was written before it existed
        for row in self.rows:
            if row["cell"] != entry.cell.name or row["algorithm"] != entry.name or not row["finished"]:
                continue
            own = json.loads(row["settings"])
            if own.get("to_target", True) != entry.to_target:
                continue
            if any(own["settings"].get(name, usual[name]) != value for name, value in wanted.items()):
                continue
            one = _read(row)
            if one.seed not in found or found[one.seed].most < one.most:
                found[one.seed] = one
        return [found[seed] for seed in sorted(found)]

    def seconds(self, dataset: str) -> float:
        """Seconds a sample of training took in the finished runs on a dataset; before any, as SECONDS has it."""
        mine = [row for row in self.rows if row["finished"] and row["cell"].partition("-")[0] == dataset]
        done = [_read(row) for row in mine]
        samples = sum(row.rounds * _samples(dataset, row.settings) for row in done)
        return 3600 * sum(row.hours for row in done) / samples if samples else SECONDS[dataset]

    def append(self, values: dict[str, Any]) -> None:
        """One more row, on disk before it counts."""
        new = not self.path.exists()
        make_folder(self.path.parent)
        out = io.StringIO()
        writer = csv.DictWriter(out, COLUMNS)
        if new:
            writer.writeheader()
        writer.writerow(values)
        append_synced(self.path, out.getvalue().encode())
        self.rows.append({k: str(v) for k, v in values.items()})


def _read(row: dict[str, str]) -> Row:
    own = json.loads(row["settings"])
    accuracies = [float(a) for a in row["accuracies"].split()]
    reached = int(row["reached"]) if row["reached"] else None
    tuning = own.get("tuning_hours", 0.0)
    return Row(int(row["seed"]), int(row["most"]), reached, float(row["hours"]), accuracies, own["settings"], tuning)


def _samples(dataset: str, settings: dict[str, Any]) -> float:
    """Samples trained on in a round of these settings, and the test set, forward only."""
    epochs = settings.get("epochs") or 1
    mean = (epochs + 1) / 2 if settings.get("vary") else epochs
    return ROWS[dataset] * PARTICIPATION * mean + 10_000 / 3


def _plain(settings: Settings) -> dict[str, Any]:
    return json.loads(json.dumps(settings.to_dict()))


def _free(entry: Entry) -> tuple[str, ...]:
    """The settings that tuning chooses."""
    rate = "step" if isinstance(entry.settings, (FedAvg, FedProx)) else "rate"
    return (rate, "mu") if isinstance(entry.settings, FedProx) and entry.label == "FedProx" else (rate,)


def _commit() -> str:
    """The commit of this code, with a "+" where a file of it was changed since."""
    place = Path(__file__).parent
    git = partial(subprocess.run, cwd=place, capture_output=True, text=True, timeout=10)
    try:
        told, changed = git(["git", "rev-parse", "HEAD"]), git(["git", "diff", "--quiet", "HEAD", "--"])
    except OSError:
        return ""
    return told.stdout.strip()[:12] + "+" * (changed.returncode == 1) if told.returncode == 0 else ""


def _machine() -> str:
    return ", ".join([platform.machine(), *_cpu(), f"{environment()['cores']} cores", platform.node()])


def _cpu() -> list[str]:
    """The model of the CPU, where there is a file that says it."""
    lines = CPU.read_text().splitlines() if CPU.is_file() else []
    return [" ".join(line.partition(":")[2].split()) for line in lines if line.startswith("model name")][:1]


def _grid(entry: Entry) -> dict[str, Any]:
    return {name: RHOS if name == "mu" else RATES for name in _free(entry)} if entry.tuned else {}


def chosen(study: Study, results: Results, entry: Entry) -> tuple[Settings, float]:
    """The entry's settings, with the best learning rate (and μ) of the paper's grid where it is tuned, and its hours.

    What a finished run of the entry has holds for its other seeds too, and costs nothing again.
    """
    grid, cell, done = _grid(entry), entry.cell, results.find(entry)
    if not grid:
        return entry.settings, 0.0
    if done:
        return _with(entry.settings, {name: done[0].settings[name] for name in grid}), 0.0

    tried: list[tuple[Settings, float]] = []  # and the hours of it

    def keep(changes: dict[str, Any], rounds: int, compute: Callable[[], Trial]) -> Trial:
        settings = _with(entry.settings, changes)

        def timed() -> dict[str, Any]:
            begun = time.perf_counter()
            one = _train(results, entry, settings, 0, rounds)
            return {"score": _score(entry, one), "outcome": one.outcome, "hours": (time.perf_counter() - begun) / 3600}

        what = f"trial of {entry.label} on {cell.name}: {changes}, {rounds} rounds"
        told = study.cell(timed, what, settings=_plain(settings), network=type(cell.problem).__name__)
        tried.append((settings, told["hours"]))
        return Trial(changes, rounds, told["score"], told["outcome"])

    options: dict[str, Any] = {"participation": PARTICIPATION, "metric": "test_accuracy", "rounds": TUNE_ROUNDS}
    found = tune(entry.settings, cell.problem, cell.federation(0), grid, keep=keep, engine=cell.engine, **options)
    others = [
        (one, hours) for one, hours in tried if one != found.settings
    ]  # the best one's run goes on from its trial
    for one, _ in others:
        shutil.rmtree(_under_way(results, entry, one, 0), ignore_errors=True)
    return found.settings, sum(hours for _, hours in others)


def _score(entry: Entry, one: Run) -> float:
    """The last test accuracy; above all of these, the sooner the better, where the target was met."""
    if one.outcome_kind is Outcome.NONFINITE:
        return -math.inf
    reached = _reached(entry, one) if entry.to_target else None
    return one.history.end("test_accuracy") if reached is None else 1.0 + TUNE_ROUNDS - reached


def _reached(entry: Entry, one: Run) -> int | None:
    target = TARGETS[entry.cell.dataset]
    return next((t for t, a in enumerate(one.history.column("test_accuracy")) if a >= target), None)


def _with(settings: Settings, changes: dict[str, Any]) -> Settings:
    return type(settings).from_dict({**settings.to_dict(), **changes})


def limit(results: Results, entry: Entry) -> int:
    """How many rounds the entry may take."""
    if entry.after is None:
        return entry.most
    done = [row.reached for row in results.find(entry.after)]
    known = [t for t in done if t is not None]
    return min(entry.most, 3 * max(known)) if known else entry.most


def missing(results: Results, entry: Entry) -> list[int]:
    """The seeds that are not run, or not for as many rounds as the entry may take."""
    most = limit(results, entry)
    ended = lambda row: row.most >= most or (entry.to_target and row.reached is not None)
    have = {row.seed for row in results.find(entry) if ended(row)}
    return [seed for seed in range(entry.seeds) if seed not in have]


def fill(study: Study, results: Results, entries: list[Entry], until: float) -> None:
    """Run what is missing, until the clock says so; every finished run is a row of the file."""
    for entry in entries:
        if not available(entry.cell.dataset):
            continue
        for seed in missing(results, entry):
            if time.time() >= until:
                return
            _run(study, results, entry, seed, limit(results, entry))


def _under_way(results: Results, entry: Entry, settings: Settings, seed: int) -> Path:
    """Where a run is kept until it is a row."""
    cell = entry.cell
    what = [cell.name, type(cell.problem).__name__, _plain(settings), seed, entry.to_target, results.source]
    return results.path.parent / "under-way" / sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()[:16]


def _train(results: Results, entry: Entry, settings: Settings, seed: int, rounds: int) -> Run:
    """The run of these settings up to this round, on from where it was left."""
    cell = entry.cell
    stop = Target("test_accuracy", TARGETS[cell.dataset], above=True) if entry.to_target else None
    options: dict[str, Any] = {"participation": PARTICIPATION, "rounds": rounds, "seed": seed, "stop": stop}
    options |= {"folder": _under_way(results, entry, settings, seed), "resume": True, "progress": None, "report": False}
    one = run(settings, cell.problem, cell.federation(seed), engine=cell.engine, **options)
    return uninterrupted(one, "Give the same command to go on with it.")


def _run(study: Study, results: Results, entry: Entry, seed: int, most: int) -> None:
    cell, target = entry.cell, TARGETS[entry.cell.dataset]
    settings, tuning = chosen(study, results, entry)
    one = _train(results, entry, settings, seed, most)
    hours = one.history.end("seconds") / 3600
    accuracies, reached = one.history.column("test_accuracy"), _reached(entry, one)
    more = {"outcome": one.outcome, "to_target": entry.to_target, "tuning_hours": round(tuning, 4)}
    more["network"] = type(cell.problem).__name__
    results.append(
        {
            "cell": cell.name,
            "algorithm": entry.name,
            "settings": json.dumps({"settings": _plain(settings), **more}),
            "seed": seed,
            "most": most,
            "target": target,
            "reached": "" if reached is None else reached,
            "hours": f"{hours:.4f}",
            "accuracies": " ".join(f"{a:.4f}" for a in accuracies),
            "source": results.source,
            "commit": results.commit,
            "machine": _machine(),
            "finished": time.strftime("%Y-%m-%d %H:%M:%S"),
        }
    )
    shutil.rmtree(_under_way(results, entry, settings, seed), ignore_errors=True)
    told = _told(_read(results.rows[-1]))
    study.say(f"{cell.name}, {entry.name}, seed {seed}: {told}, {accuracies[-1]:.3f}, {hours:.2f} h")


def _told(row: Row) -> str:
    if row.broken:
        return f"not finite after {row.rounds} rounds"
    return f"> {row.most} rounds" if row.reached is None else f"{row.reached} rounds"


def estimate(results: Results, entry: Entry) -> float:
    """Hours that the entry's missing runs would take: samples a round by the time a sample took in runs before.

    A run takes the rounds that the entry's finished seeds took; before any, those expected. Tuning is counted where no
    finished run has its choice: every trial goes on where its last was left, and so does the run of the best.
    """
    left, done = len(missing(results, entry)), results.find(entry)
    if not left:
        return 0.0
    candidates = math.prod(map(len, _grid(entry).values()))
    plan = rungs(candidates, TUNE_ROUNDS, "halving") if entry.tuned and not done else []
    lengths = [0, *(length for _, length in plan)]
    trials = sum(count * (length - before) for (count, length), before in zip(plan, lengths[:-1], strict=True))
    rounds = left * _expected(results, entry, done) + trials - lengths[-1]
    samples = _samples(entry.cell.dataset, _plain(entry.settings))
    return rounds * samples * results.seconds(entry.cell.dataset) / 3600


def _expected(results: Results, entry: Entry, done: list[Row]) -> float:
    """Rounds of a run that is missing."""
    most = limit(results, entry)
    if not entry.to_target:
        return most
    ended = [row.rounds for row in done if row.reached is not None]
    if done:  # a seed that did not get there takes all the rounds there are
        return (sum(ended) + most * (len(done) - len(ended))) / len(done)
    if entry.after is None:
        return min(most, entry.expected)
    return most if results.find(entry.after) else min(most, 3 * entry.after.expected)


# The entries of tables and figures


def admm(cell: Cell, epochs: int, batch: int | None, label: str = "FedADMM", **changes: Any) -> Entry:
    """FedADMM as the released code has it, its rate tuned unless it is given."""
    own = {"epochs": epochs, "batch": batch, "short": cell.split == "imbalanced", **changes}
    usual: dict[str, Any] = {"seeds": 1, "expected": 30, "to_target": True}
    kept, preset = {name: own.pop(name, value) for name, value in usual.items()}, own.pop("preset", "paper")
    return Entry(cell, label, FedADMM.preset(preset, **own), tuned="rate" not in changes, **kept)


def baselines(cell: Cell, epochs: int, batch: int | None, after: Entry, vary: bool = True) -> Iterator[Entry]:
    """FedSGD, FedAvg, FedProx and SCAFFOLD, tuned; FedProx with E_i drawn from 1..E unless told otherwise."""
    short = {"short": cell.split == "imbalanced"}
    own: dict[str, Any] = {"epochs": epochs, "batch": batch, **short}
    yield Entry(cell, "FedSGD", FedSGD(), tuned=True, after=after)
    yield Entry(cell, "FedAvg", FedAvg(step=0.1, **own), tuned=True, after=after)
    yield Entry(cell, "FedProx", FedProx(step=0.1, vary=vary, **own), tuned=True, after=after)
    yield Entry(cell, "SCAFFOLD", Scaffold(**own), tuned=True, after=after)


class Asked(NamedTuple):
    """What of a table is to be filled: cells and algorithms by their names (None: all), no run begun after `hours`."""

    cells: Sequence[str] | None = None
    algorithms: Sequence[str] | None = None
    hours: float = 0.0


def named(asked: Asked, entries: list[Entry]) -> tuple[list[Entry], list[Entry]]:
    """The entries of the cells asked for, which a table shows, and those of them to fill."""
    shown = _chosen("cell", asked.cells, entries, lambda entry: entry.cell.name)
    return shown, _chosen("algorithm", asked.algorithms, shown, lambda entry: entry.label)


def _chosen(kind: str, names: Sequence[str] | None, entries: list[Entry], own: Callable[[Entry], str]) -> list[Entry]:
    known = {own(entry) for entry in entries}
    for name in names or ():
        if name not in known:
            raise unknown(kind, name, known)
    return [entry for entry in entries if not names or own(entry) in names]
