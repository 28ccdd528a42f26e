"""Running experiments: `run` one algorithm, `compare` several, `trials` of one with many seeds."""

from __future__ import annotations

import dataclasses
import inspect
import math
import os
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import numpy as np
import scipy.sparse

from fedpact.algorithms import ALGORITHMS
from fedpact.core import checkpoint
from fedpact.core.contract import check_flat, check_needs
from fedpact.core.driver import Finished, drive
from fedpact.core.environment import cache_folder, environment
from fedpact.core.errors import (
    InvalidArgument,
    is_count,
    require,
    require_flags,
    require_one_of,
    require_positive_int,
    unknown,
)
from fedpact.core.files import make_folder, write_atomic, write_json
from fedpact.core.fingerprint import fingerprints
from fedpact.core.history import TELEMETRY, History
from fedpact.core.keys import Purpose
from fedpact.core.loop import Loop
from fedpact.core.participation import Everyone, Schedule, as_participation
from fedpact.core.settings import Settings, plain
from fedpact.core.stop import Never, Outcome, Rule
from fedpact.data import Federation
from fedpact.engines import DebugEngine, HostEngine, LocalEngine, as_engine
from fedpact.folder import RunFolder, load
from fedpact.metrics import has_held_out, held_out
from fedpact.model import Model, as_host, plain_problem, problem_name, trained
from fedpact.privacy.account import Account
from fedpact.privacy.guard import Guard
from fedpact.privacy.private import Plan, Private
from fedpact.privacy.private import plan as worked_out
from fedpact.problems import PROBLEMS, Constrained
from fedpact.problems.clipping import check_clippable
from fedpact.problems.conformance import check_conformance, check_methods, is_own
from fedpact.problems.optimum import least
from fedpact.report import Progress, curves, lines_over, summary_table, write_report

#: How the columns begin that say by how much a function exceeds its limit.
LIMITED = ("constraint_", "worst_client")
#: Columns that a private run may be stopped by: no training row enters them but through the released model.
PUBLIC = ("round", "seconds", "test_loss", "test_accuracy")
PRECISIONS = {"double": np.float64, "single": np.float32}


@dataclass(frozen=True)
class Experiment:
    """Everything that decides a run's numbers. Checked when it is made.

    What is left out is chosen by the problem: "double" and the engine "local" for convex ones; for networks "single"
    and "host". `telemetry` is "all" (every client's rows) or, as networks have it where the dataset has a test set,
    "test" (that set only).
    """

    algorithm: Settings
    problem: Any
    federation: Any
    participation: Any = 1.0
    rounds: int = 100
    stop: Rule | None = None
    seed: int = 0
    evaluate_every: int = 1
    precision: str | None = None
    engine: Any = None
    timing: bool = False
    telemetry: str | None = None
    privacy: Private | None = None

    def __post_init__(self) -> None:
        require(isinstance(self.algorithm, Settings), "algorithm", "settings such as fedpact.FedEPM()", self.algorithm)
        made = dataclasses.is_dataclass(self.problem) and not isinstance(self.problem, type)
        ok, hint = made and hasattr(self.problem, "gradient"), "One of your own is a frozen dataclass: docs/python.md."
        require(ok, "problem", "a problem such as fedpact.Logistic()", self.problem, hint=hint)
        given, hint = type(self.federation).__name__, "Deal a dataset's rows to clients with dataset.split(clients=10)."
        require(isinstance(self.federation, Federation), "federation", "a Federation", given, hint=hint)
        split, wanted = hasattr(self.federation, "layout"), self.algorithm.vertical
        hint = "Use dataset.split_features(clients=4)." if wanted else "Use dataset.split(clients=10)."
        name = f"split by {'features' if wanted else 'rows'} for {self.algorithm.name}"
        require(split == wanted, "federation", name, given, hint=hint)
        if isinstance(self.problem, Constrained):
            object.__setattr__(self, "problem", self.problem.resolved(self.federation))
        kept = self.algorithm.constrains or not getattr(self.problem, "subject_to", ())
        hint = "Leave subject_to empty, or use ssca; vertical_ssca for data split by features."
        require(kept, "algorithm", "one that keeps constraints", self.algorithm.name, hint=hint)
        for name in ("rounds", "seed", "evaluate_every", "timing"):
            object.__setattr__(self, name, plain(getattr(self, name)))
        require_positive_int("rounds", self.rounds)
        require_positive_int("evaluate_every", self.evaluate_every)
        require(is_count(self.seed), "seed", "an integer from 0 to 2³¹−1", self.seed)
        require(self.stop is None or isinstance(self.stop, Rule), "stop", "a rule of fedpact.stop", self.stop)
        require_flags(self, "timing")
        deep = hasattr(self.problem, "multiclass")
        if self.precision is None:
            object.__setattr__(self, "precision", "single" if deep else "double")
        if self.engine is None:
            usual = getattr(self.problem, "engine", "local")
            sips = self.algorithm.sips and not getattr(self.problem, "native", False)
            object.__setattr__(self, "engine", LocalEngine(one_by_one=False) if sips else usual)
        if not isinstance(self.precision, str) or self.precision not in PRECISIONS:
            raise unknown("precision", self.precision, PRECISIONS)
        object.__setattr__(self, "participation", as_participation(self.participation))
        everyone, hint = isinstance(self.participation, Everyone), "A round needs every party's columns."
        require(everyone or not wanted, "participation", "1 for data split by features", self.participation, hint=hint)
        object.__setattr__(self, "engine", as_engine(self.engine))
        native = getattr(self.problem, "native", False)
        hint = "A problem that is not JAX's runs there only."
        ok = not native or isinstance(self.engine, HostEngine)
        require(ok, "engine", f'"host" for {type(self.problem).__name__}', type(self.engine).__name__, hint=hint)
        tested = not isinstance(self.engine, DebugEngine) and len(self.federation.dataset.test) > 0
        if self.telemetry is None:
            object.__setattr__(self, "telemetry", "test" if deep and tested and not self.algorithm.sips else "all")
        if self.telemetry not in ("all", "test"):
            raise unknown("telemetry", self.telemetry, ("all", "test"))
        hint = 'It needs another engine than "debug" and a dataset with a test set, such as mnist.'
        require(self.telemetry == "all" or tested, "telemetry", '"all" here', self.telemetry, hint=hint)
        self.participation.check(self.seed, self.rounds, self.federation.clients)
        self._check_own()
        self.problem.check(self.federation)
        private = self.privacy is None or isinstance(self.privacy, Private)
        require(private, "privacy", "a Private, such as fedpact.Private(clip=1, epsilon=3)", self.privacy)
        loop = _loop(self)
        check_flat(loop.algorithm, self.problem, self.federation)
        if loop.algorithm.rows is not None:
            loop.algorithm.rows(self.federation.sizes)
        for name in self.stop.reads if self.stop is not None and self.privacy is not None else ():
            hint = (
                "When a run ends is seen: use seconds or rounds, or the dataset's own test set, which counts as public."
            )
            require(name in PUBLIC, "stop rule of a private run", f"on {', '.join(PUBLIC)}", name, hint=hint)
        if self.stop is not None:
            loop.check_stop(_start(self), self.federation.features, PRECISIONS[self.precision], tested)

    def _check_own(self) -> None:
        """A problem of the user's own must be one."""
        own, x = trained(self.problem), self.federation.dataset.x
        if not is_own(own):
            return
        check_methods(own)
        if not (self.engine.eager or scipy.sparse.issparse(x)):  # which shapes cannot stand for
            dtype = PRECISIONS[str(self.precision)]
            check_conformance(own, self.federation.features, dtype, x.dtype if x.dtype == np.uint8 else dtype)

    def config(self) -> dict[str, Any]:
        """The experiment as plain data: what the run folder, the report and the checkpoint's digest hold."""
        kind = type(self.problem)
        problem = next((n for n, cls in PROBLEMS.items() if kind is cls), kind.__name__)
        hidden = fingerprints(self.algorithm, "algorithm") | fingerprints(self.problem, "problem")
        parties = self.federation.table() if self.algorithm.vertical else {}
        return {
            "algorithm": {"name": self.algorithm.name, **self.algorithm.to_dict()},
            "problem": {"name": problem, **plain_problem(self.problem)},
            "data": {
                "dataset": self.federation.dataset.name,
                "split": self.federation.description,
                "clients": len(parties) or self.federation.clients,
                "rows": int(self.federation.sizes.sum()),
                "features": self.federation.features,
                "digest": self.federation.digest,
                **({"parties": parties} if parties else {}),
            },
            "run": {
                "participation": self.participation.describe(),
                "rounds": self.rounds,
                "stop": repr(self.stop) if self.stop else None,
                "seed": self.seed,
                "evaluate_every": self.evaluate_every,
                "precision": self.precision,
                "engine": type(self.engine).__name__,
                "timing": self.timing,
                "telemetry": self.telemetry,
            },
            **({"fingerprints": hidden} if hidden else {}),  # of functions and arrays
            **self._private_config(),
        }

    def _private_config(self) -> dict[str, Any]:
        plan = private_plan(self)
        if plan is None or self.privacy is None:
            return {}
        unit, adversary = plan.claim
        found = {"noise": plan.noise, "way": plan.theorem.way, "relation": plan.relation}
        return {"privacy": self.privacy.to_dict() | found | {"unit": unit, "adversary": adversary}}

    def digest(self) -> str:
        """Of all that decides the numbers; the number of rounds may grow."""
        config = self.config()
        del config["run"]["rounds"]
        engine = {f.name: getattr(self.engine, f.name) for f in dataclasses.fields(self.engine) if f.compare}
        return checkpoint.digest(config | {"engine": engine})


@dataclass(frozen=True)
class Run:
    """A finished run: its history, the model, why it ended, and what the reader must know."""

    name: str
    history: History
    model: Model
    outcome_kind: Outcome
    where: str
    config: dict[str, Any]
    notices: list[str] = field(default_factory=list)
    tables: dict[str, list[dict[str, str]]] = field(default_factory=dict)  # what the algorithm has the report show
    metrics: dict[str, Any] | None = None
    folder: Path | None = None
    least: float | None = None  # the least possible objective, where it is convex and quickly found
    privacy: dict[str, Any] | None = None  # of a private run: ε against rounds, by client

    @classmethod
    def load(cls, folder: str | os.PathLike[str], problem: Any = None) -> Run:
        """A finished run, from its folder. A network of your own has to be given again as `problem`."""
        return cls(**load(Path(folder), problem))

    def __repr__(self) -> str:
        name = self.history.judged
        value = self.history.end(name)
        return f"Run({self.name!r}: {self.history.rounds} rounds, {self.outcome}; {name.replace('_', ' ')} {value:.6g})"

    @property
    def outcome(self) -> str:
        """Why it ended, as a sentence."""
        return self.outcome_kind.value + (f": {self.where}" if self.where else "")

    @property
    def summary(self) -> dict[str, Any]:
        """What matters, at the end: the telemetry is the last row's, finite or not."""
        last, columns = self.history.last, self.history.columns
        out: dict[str, Any] = {name: self.history.end(name) for name in TELEMETRY if name in columns}
        out |= {
            "rounds": self.history.rounds,
            "megabytes_up": last("bytes_up") / 1e6,
            "megabytes_down": last("bytes_down") / 1e6,
            "gradients": last("gradients"),
            "seconds": last("seconds"),
        }
        if "snr" in columns and not math.isnan(last("snr")):
            out["snr"] = last("snr")
        limited = [self.history.end(name) for name in columns if name.startswith(LIMITED)]
        return out | ({"over_limit": max(limited), "kkt": last("kkt")} if limited else {})

    @property
    def coefficients(self) -> list[dict[str, Any]]:
        """The model's coefficients by the features' names, where it is linear."""
        return self.model.coefficients()

    def report(self, folder: str | os.PathLike[str]) -> Path:
        """Write report.html and its plots."""
        lead = f"{self.name}: {self.outcome}."
        return write_report([self], folder, title=self.name, lead=lead, minimum=self.least, figures=_spent(self))


def _spent(run: Run) -> dict[str, Any]:
    """The figure of ε against rounds by client, of a private run."""
    if run.privacy is None:
        return {}
    rounds = run.privacy["rounds"]
    series = {name: (rounds, values, None) for name, values in run.privacy["epsilon"].items()}
    return {"ε spent by client against rounds": lines_over(series, xlabel="round", ylabel="ε spent")}


class Runs(list[Run]):
    """Several runs of one comparison."""

    def table(self) -> str:
        """The runs' summaries as a text table."""
        return summary_table(self)

    def plot(self, column: str, path: str | os.PathLike[str] | None = None, **options: Any) -> Any:
        """One line per run of a column of the history; PNG and SVG where a path is given."""
        return curves(self, column, path=path, **options)

    def report(self, folder: str | os.PathLike[str], title: str = "fedpact comparison", **options: Any) -> Path:
        """Write report.html, its plots, and every run's history and configuration."""
        path = Path(folder)
        for run in self:
            problem_name(run.model.problem)  # refuse what cannot be saved before anything is written
        found = {run.least for run in self}
        minimum = found.pop() if len(found) == 1 else None
        page = write_report(self, path, title=title, **{"minimum": minimum} | options)
        write_json(path / "environment.json", environment())
        for index, run in enumerate(self):
            name = _numbered(index, run.config["algorithm"]["name"])
            make_folder(path / "runs" / name)
            write_atomic(path / "runs" / name / "history.csv", run.history.lines().encode())
            write_json(path / "runs" / name / "config.json", run.config)
            run.model.save(path / "runs" / name / "model.bin")
        return page


def _numbered(index: int, algorithm: str) -> str:
    """The folder of one run among several."""
    return f"{index + 1:02d}-{algorithm}"


def run(
    algorithm: Settings,
    problem: Any,
    federation: Any,
    *,
    folder: str | os.PathLike[str] | None = None,
    resume: bool = False,
    name: str | None = None,
    progress: bool | None = False,
    **options: Any,
) -> Run:
    """Train one model across the clients of a federation.

    Options are the fields of `Experiment`: participation, rounds, stop, seed, evaluate_every, precision, engine,
    timing. With a `folder` the run leaves its configuration, history and checkpoints there; after a crash the same call
    with resume=True goes on to the same bits.
    """
    experiment = Experiment(algorithm, problem, federation, **options)
    return execute(experiment, folder=folder, name=name, progress=progress, resuming=resume)


def uninterrupted(run: Run, hint: str) -> Run:
    """The run, unless Ctrl-C cut it: then what several runs are for ends too, for a cut run must not be judged."""
    if run.outcome_kind is Outcome.INTERRUPTED:
        raise KeyboardInterrupt(f"interrupted in {run.name}, after {run.history.rounds} rounds. {hint}")
    return run


def compare(
    algorithms: Sequence[Settings],
    problem: Any,
    federation: Any,
    *,
    names: Sequence[str] | None = None,
    folder: str | os.PathLike[str] | None = None,
    progress: bool | None = False,
    **options: Any,
) -> Runs:
    """Run several algorithms on the same data with the same seed, hence the same cohorts.

    With a `folder` each run has a folder of its own in it: 01-fedepm, 02-sfedavg, …. Ctrl-C ends the comparison; the
    same call with resume=True goes on with what the folders keep.
    """
    made = all(isinstance(settings, Settings) for settings in algorithms)
    require(made, "algorithms", "settings such as fedpact.FedEPM()", list(algorithms))
    labels = list(names) if names else [settings.label for settings in algorithms]
    require(len(labels) == len(algorithms), "names", f"{len(algorithms)} names, one per algorithm", labels)
    resuming = options.pop("resume", False)
    experiments = [
        Experiment(settings, problem, federation, **options) for settings in algorithms
    ]  # all, then any runs
    runs = Runs()
    for i, (e, label) in enumerate(zip(experiments, labels, strict=True)):
        own = None if folder is None else Path(folder) / _numbered(i, e.algorithm.name)
        one = execute(e, folder=own, name=label, progress=progress, resuming=resuming)
        runs.append(uninterrupted(one, "Nothing was kept." if own is None else "Go on with resume=True."))
    minimum = least(problem, federation)
    runs = Runs(_with_least(one, e, minimum) for one, e in zip(runs, experiments, strict=True))
    runs = _together_spent(runs)
    return mixed(runs, [e.algorithm.pooled for e in experiments]) if _uneven(federation) else runs


def _together_spent(runs: Runs) -> Runs:
    """Private runs on the same data add up: with a notice of what they cost together."""
    private = [run.privacy for run in runs if run.privacy is not None]
    if len(private) < 2:
        return runs
    epsilon, delta = (sum(float(one[name]) for one in private) for name in ("spent", "delta"))
    runs_ = f"The {len(private)} private runs are about the same data"
    text = f"{runs_}: together they cost up to ε = {epsilon:.4g} at δ = {delta:g}."
    return Runs(dataclasses.replace(run, notices=[*run.notices, text]) if run.privacy else run for run in runs)


def _uneven(federation: Any) -> bool:
    """Whether clients hold different numbers of rows: then a mean over rows is not one over clients."""
    return len(set(federation.sizes.tolist())) > 1


def _with_least(run: Run, e: Experiment, minimum: float | None) -> Run:
    """The run with the least mean over clients, where that is what its objective is."""
    other = e.algorithm.regularised or (e.algorithm.pooled and _uneven(e.federation))
    return dataclasses.replace(run, least=None if other else minimum)


def mixed(runs: Runs, pooled: Sequence[bool]) -> Runs:
    """The runs, with a notice where some have a mean over rows as their objective and some a mean over clients."""
    if len(set(pooled)) < 2:
        return runs
    rows, clients = (
        ", ".join(r.name for r, p in zip(runs, pooled, strict=True) if p is kind) for kind in (True, False)
    )
    text = (
        f"The objective of {rows} is a mean over all rows, that of {clients} a mean over clients: where clients hold "
        "different numbers of rows these are two quantities, and neither is better for being smaller."
    )
    add = lambda run: dataclasses.replace(run, notices=[*run.notices, text])
    return Runs(add(run) if p else run for run, p in zip(runs, pooled, strict=True))


def trials(
    algorithm: Settings,
    problem: Any,
    federations: Any,
    seeds: Sequence[int],
    *,
    at_once: int = 25,
    name: str | None = None,
    **options: Any,
) -> Runs:
    """One experiment with many seeds, vectorised: all trials of a group run in one compiled program.

    `federations` is one federation for all, or one per seed (same number of clients and features). `at_once` bounds
    the memory. Times in these histories are those of the whole group: measure times with sequential runs.
    """
    seeds = [plain(seed) for seed in seeds]
    splits = list(federations) if isinstance(federations, (list, tuple)) else [federations] * len(seeds)
    require(len(splits) == len(seeds), "federations", f"one, or one per seed ({len(seeds)})", len(splits))
    shapes = sorted({(one.clients, one.features) for one in splits if isinstance(one, Federation)})
    hint = "Run them one by one."
    require(len(shapes) <= 1, "federations", "of the same number of clients and features", shapes, hint=hint)
    require_positive_int("at_once", at_once, hint="It is how many trials share the memory.")
    require(not options.get("timing"), "timing", "False for vectorised trials", True, hint="Run them one by one.")
    out = Runs()
    for first in range(0, len(seeds), at_once):
        group = range(first, min(first + at_once, len(seeds)))
        experiments = [Experiment(algorithm, problem, splits[i], seed=seeds[i], **options) for i in group]
        for several in _together(experiments):
            ends = _vectorised(several, name)
            out.extend(uninterrupted(one, f"Trials {first} and later were not kept.") for one in ends)
    return out


def _together(experiments: list[Experiment]) -> list[list[Experiment]]:
    """Those that share a program: all, unless a column by name is elsewhere or scaled otherwise in another split."""
    places = [_places(e.problem) for e in experiments]
    plans = [private_plan(e) for e in experiments]  # the noise is a constant of the program
    private = experiments[0].privacy
    gated = private is not None and private.noise is not None and private.epsilon is not None  # each ends on its own
    same = not gated and all(p == places[0] for p in places) and all(_same(p, plans[0]) for p in plans)
    return [experiments] if same else [[e] for e in experiments]


def _same(one: Plan | None, other: Plan | None) -> bool:
    return one is other or (one is not None and other is not None and one.noise == other.noise)


def _places(problem: Any) -> list[Any]:
    sums = (problem.minimize, *problem.subject_to) if isinstance(problem, Constrained) else ()
    return [getattr(term, "place", None) for f in sums for _, term in f.terms]


def _vectorised(experiments: list[Experiment], name: str | None) -> list[Run]:
    e, splits = experiments[0], [one.federation for one in experiments]
    loop = _loop(e)
    plans = [private_plan(one) for one in experiments]
    accounts = [Account(plan, one.seed) if plan else None for plan, one in zip(plans, experiments, strict=True)]
    roots = [_root(one) for one in experiments] if plans[0] else []
    finished = drive(
        loop,
        splits[:1] if all(split is splits[0] for split in splits) else splits,
        _start(e),
        e.participation,
        [one.seed for one in experiments],
        e.rounds,
        PRECISIONS[str(e.precision)],
        accounts=[account for account in accounts if account],
        roots=roots,
    )
    ends = zip(experiments, finished, accounts, strict=True)
    return [_run(one, loop, end, name, None, account) for one, end, account in ends]


def _start(experiment: Experiment) -> Any:
    init, features = experiment.problem.init, experiment.federation.features
    key = jax.random.fold_in(jax.random.key(experiment.seed), int(Purpose.MODEL))
    random = {"key": key} if "key" in inspect.signature(init).parameters else {}  # a fixed start needs none
    return init(features, PRECISIONS[str(experiment.precision)], **random)


def _loop(experiment: Experiment) -> Loop:
    use_compilation_cache()
    e = experiment
    clients = e.federation.clients
    layout = getattr(e.federation, "layout", None)  # of data split by features
    algorithm = e.algorithm.build(e.problem, clients if layout is None else layout, e.participation.rate(clients))
    check_needs(algorithm, e.problem)
    plan = private_plan(e)
    guard = None if plan is None else Guard(plan, e.problem, algorithm)
    stop, telemetry = e.stop or Never(), e.telemetry or "all"
    return Loop(algorithm, e.problem, e.engine, stop, e.evaluate_every, e.timing, telemetry, guard)


def private_plan(experiment: Experiment) -> Plan | None:
    """A private run worked out, or None where the run is not private."""
    e, private = experiment, experiment.privacy
    if private is None:
        return None
    way = _way(e.algorithm, private)
    if way != "client":
        check_clippable(e.problem, e.federation.features, PRECISIONS[str(e.precision)])
    clients = e.federation.clients
    exact = e.precision == "double" or way not in ("once", "convex")
    hint = "Single precision rounds by more than the noise's margin where it is added to the upload."
    require(exact, "precision", f'"double" for way {way}', e.precision, hint=hint)
    theorem = e.algorithm.private(way, e.problem, clients, e.participation.rate(clients), private.reach)
    size = theorem.copies * _start(e).size
    return worked_out(private, theorem, e.federation.sizes, size, e.participation, e.seed, e.rounds)


def _mark(experiment: Experiment) -> str:
    """A digest of what a private run's releases depend on: data, settings and seed, not the engine or the rounds."""
    config = experiment.config()
    kept = {name: config["run"][name] for name in ("participation", "seed", "precision")}
    return checkpoint.digest({name: part for name, part in config.items() if name != "run"} | {"run": kept})


def _root(experiment: Experiment) -> Any:
    """The random key of a private run. It follows from all of the above, for noise that two runs share cancels."""
    mark = _mark(experiment)
    key = jax.random.key(experiment.seed)
    for begin in range(0, len(mark), 8):
        key = jax.random.fold_in(key, int(mark[begin : begin + 8], 16))
    return key


def _way(algorithm: Settings, private: Private) -> str:
    """Which of the algorithm's private modes: the one asked for, or its usual one."""
    if not algorithm.ways:
        able = ", ".join(f"{name} ({', '.join(cls.ways)})" for name, cls in ALGORITHMS.items() if cls.ways)
        raise InvalidArgument(
            f"algorithm must be one with a sensitivity theorem in a private run, got {algorithm.name}. "
            f"Those that have one, and by which way: {able}."
        )
    if private.way is None:
        return algorithm.ways[0]
    require_one_of(f"way of {algorithm.name}", private.way, algorithm.ways)
    return private.way


def _run(
    e: Experiment, loop: Loop, end: Finished, name: str | None, folder: Path | None, account: Account | None = None
) -> Run:
    dataset = e.federation.dataset
    model = Model(trained(e.problem), as_host(end.model), dataset.schema, dataset.x.dtype == np.uint8)
    scores = held_out(model, e.federation) if has_held_out(e.federation) else None
    verdict = loop.algorithm.verdict(end.history) if loop.algorithm.verdict is not None else []
    given = [*_unmatched(e.federation), *_uncovered(e, loop.algorithm)]
    spent = [] if account is None else [*account.statement(), *_refused(end.history), *_unmeasured(end.history)]
    notices = [*spent, *loop.algorithm.notices, *given, *verdict, *_worse(e, end.history)]
    if end.outcome is Outcome.NONFINITE:
        remedy = f" To change that, {e.algorithm.remedy}."
        notices.append(f"The run stopped: {end.where}. {_kept(end.history)}{loop.algorithm.breakdown}{remedy}")
    label = name or e.algorithm.label
    tables = {heading: [dict(row) for row in rows] for heading, rows in loop.algorithm.tables.items()}
    if account is not None and account.table():
        tables["What privacy was spent"] = account.table()
    spending = None if account is None else account.curves(end.history.rounds)
    return Run(
        label,
        end.history,
        model,
        end.outcome,
        end.where,
        e.config(),
        notices,
        tables,
        scores,
        folder,
        privacy=spending,
    )


def _refused(history: History) -> list[str]:
    """Where rows of a private run counted as zero: a sentence."""
    most = int(np.nanmax(history.column("refused"))) if "refused" in history.columns else 0
    what = "gradients that are not finite, or too large to be clipped; they count as zero. Scale the rows"
    return [f"{most} rows had {what}."] if most else []


def _unmeasured(history: History) -> list[str]:
    """Where a private run's objective was not finite, which does not end it: a sentence."""
    fine = bool(np.isfinite(history.end(history.judged)))
    return (
        [] if fine else [f"The {history.judged.replace('_', ' ')} is not finite: scale the rows, or shorten the steps."]
    )


def _kept(history: History) -> str:
    """What the model of a run is worth that met a number that is not finite."""
    f = history.column(history.judged)
    if np.isfinite(f[-1]):
        return f"The model is that of round {history.rounds}, the last one with a finite objective."
    fine = np.flatnonzero(np.isfinite(f))
    since = f" since round {fine[-1]}" if len(fine) else ""
    return f"The model's numbers are finite, its objective is not, and no better one{since} was kept: do not use it."


def _worse(e: Experiment, history: History) -> list[str]:
    """Where the objective ended above its start: a sentence with the numbers and what to change."""
    name = history.judged
    f = history.column(name)
    first, last = f[0], f[-1]
    if getattr(e.problem, "subject_to", ()):  # it may have to rise for the constraints to hold
        return []
    if not last > first + 1e-9 * abs(first):
        return []
    best = int(np.nanargmin(f))
    lowest = "its lowest is the start" if best == 0 else f"its lowest is {f[best]:.5g}, in round {best}"
    return [
        f"The {name.replace('_', ' ')} ended above its start: {last:.5g} after {history.rounds} rounds, "
        f"from {first:.5g}; {lowest}. The model is worse than an untrained one. To change that, {e.algorithm.remedy}."
    ]


def _unmatched(federation: Any) -> list[str]:
    """Where records were left out because a party lacks them: a sentence."""
    report = getattr(federation, "unmatched", {})
    if not report:
        return []
    each = ", ".join(f"{said['missing']} of {said['records']} of {party}" for party, said in report.items())
    return [f"Records that some party lacks were left out: {each}."]


def _uncovered(e: Experiment, algorithm: Any) -> list[str]:
    """Where a theorem needs everyone and the schedule leaves clients out: a sentence."""
    if not algorithm.coverage or not isinstance(e.participation, Schedule):
        return []
    seen = {int(i) for chosen in e.participation.rounds[: e.rounds] for i in chosen}
    never = [i for i in range(e.federation.clients) if i not in seen]
    if not never:
        return []
    who = ", ".join(map(str, never[:5])) + ("" if len(never) <= 5 else f" and {len(never) - 5} more")
    return [f"The schedule never selects client {who}: {algorithm.coverage} fails, and its theorems do not apply."]


def execute(
    experiment: Experiment,
    *,
    folder: str | os.PathLike[str] | None = None,
    name: str | None = None,
    progress: bool | None = False,
    resuming: bool = False,
    source: Mapping[str, Any] | None = None,
) -> Run:
    """Run an experiment, in a folder of its own where one is given; with `resuming`, go on from its checkpoint.

    `source` is the experiment file as it was read, for the folder to keep.
    """
    require(folder is not None or not resuming, "resume", "False without a folder", resuming, hint="Give the folder.")
    path = None if folder is None else Path(folder)
    with RunFolder(path, experiment, resuming, source) if path is not None else nullcontext() as keeper:
        return _execute(experiment, keeper, name, progress)


def _execute(experiment: Experiment, keeper: RunFolder | None, name: str | None, progress: bool | None) -> Run:
    loop = _loop(experiment)
    begun = keeper.begun if keeper is not None else 0
    plan = private_plan(experiment)
    ledger = keeper.ledger() if keeper is not None and plan else None
    account = Account(plan, experiment.seed, ledger, _mark(experiment)[:16]) if plan else None
    bar = Progress(experiment.rounds, name or experiment.algorithm.label, enabled=progress, start=begun)

    def after_block(carry: Any, history: History, elapsed: float) -> None:
        if keeper is not None:
            keeper.after_block(carry, history, elapsed)
        shown = ("objective", "gradient", "primal_residual", "kkt")
        bar.update(history.rounds, *(history.last(name) if name in history.columns else None for name in shown))

    try:
        (end,) = drive(
            loop,
            [experiment.federation],
            _start(experiment),
            experiment.participation,
            [experiment.seed],
            experiment.rounds,
            PRECISIONS[str(experiment.precision)],
            resumed=keeper.resumed() if keeper is not None else None,
            after_block=after_block,
            accounts=[account] if account else [],
            roots=[_root(experiment)] if account else [],
        )
    finally:
        bar.close()
    result = _run(experiment, loop, end, name, keeper.folder if keeper is not None else None, account)
    if keeper is not None:
        result = _with_least(result, experiment, least(experiment.problem, experiment.federation))
        keeper.finish(result)
    return result


def before(experiment: Experiment) -> Run:
    """The run before its first round: it has the columns and the scores that the run will have."""
    e, loop = experiment, _loop(experiment)
    roots = [_root(e)] if e.privacy is not None else []
    precision = PRECISIONS[str(e.precision)]
    (end,) = drive(loop, [e.federation], _start(e), e.participation, [e.seed], 0, precision, roots=roots)
    return _run(e, loop, end, None, None)


def use_compilation_cache() -> None:
    """Keep compiled programs on disk, unless the user has set JAX's own cache: a second run compiles nothing."""
    if jax.config.values["jax_compilation_cache_dir"] is None:
        jax.config.update("jax_compilation_cache_dir", str(cache_folder() / "xla"))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)


__all__ = ["Experiment", "Run", "Runs", "compare", "environment", "execute", "run", "trials"]
