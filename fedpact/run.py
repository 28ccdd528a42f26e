"""Running experiments: `run` one algorithm, `compare` several, `trials` of one with many seeds."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from fedpact import notices
from fedpact.core.driver import Finished, drive
from fedpact.core.environment import environment
from fedpact.core.errors import require, require_positive_int
from fedpact.core.files import make_folder, write_atomic, write_json
from fedpact.core.history import TELEMETRY, History
from fedpact.core.loop import Loop
from fedpact.core.settings import Settings, plain
from fedpact.core.stop import Outcome
from fedpact.data import Federation
from fedpact.definition import (
    PRECISIONS,
    Experiment,
    loop_of,
    mark_of,
    private_plan,
    root_of,
    start_of,
)
from fedpact.engines import FlowerEngine
from fedpact.folder import RunFolder, load
from fedpact.metrics import has_held_out, held_out
from fedpact.model import Model, as_host, problem_name, trained
from fedpact.privacy.account import Account
from fedpact.privacy.private import Plan
from fedpact.problems import Constrained
from fedpact.problems.optimum import least
from fedpact.report import Progress, curves, lines_over, summary_table, write_report

#: How the columns begin that say by how much a function exceeds its limit.
LIMITED = ("constraint_", "worst_client")


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
    report: bool = True,
    **options: Any,
) -> Run:
    """Train one model across the clients of a federation.

    Options are the fields of `Experiment`: participation, rounds, stop, seed, evaluate_every, precision, engine,
    timing. With a `folder` the run leaves its configuration, history and checkpoints there; after a crash the same call
    with resume=True goes on to the same bits. report=False leaves report.html and its plots out of the folder, a second
    or two of drawing; `Run.load(folder).report(folder)` draws them later.
    """
    experiment = Experiment(algorithm, problem, federation, **options)
    return execute(experiment, folder=folder, name=name, progress=progress, resuming=resume, report=report)


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
    report: bool = True,
    **options: Any,
) -> Runs:
    """Run several algorithms on the same data with the same seed, hence the same cohorts.

    With a `folder` each run has a folder of its own in it: 01-fedepm, 02-sfedavg, …, without a report where report is
    False. Ctrl-C ends the comparison; the same call with resume=True goes on with what the folders keep.
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
        one = execute(e, folder=own, name=label, progress=progress, resuming=resuming, report=report)
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
    loop = loop_of(e)
    plans = [private_plan(one) for one in experiments]
    accounts = [Account(plan, one.seed) if plan else None for plan, one in zip(plans, experiments, strict=True)]
    roots = [root_of(one) for one in experiments] if plans[0] else []
    finished = drive(
        loop,
        splits[:1] if all(split is splits[0] for split in splits) else splits,
        start_of(e),
        e.participation,
        [one.seed for one in experiments],
        e.rounds,
        PRECISIONS[str(e.precision)],
        accounts=[account for account in accounts if account],
        roots=roots,
    )
    ends = zip(experiments, finished, accounts, strict=True)
    return [_run(one, loop, end, name, None, account) for one, end, account in ends]


def _run(
    e: Experiment, loop: Loop, end: Finished, name: str | None, folder: Path | None, account: Account | None = None
) -> Run:
    dataset = e.federation.dataset
    model = Model(trained(e.problem), as_host(end.model), dataset.schema, dataset.x.dtype == np.uint8)
    scores = held_out(model, e.federation) if has_held_out(e.federation) else None
    verdict = loop.algorithm.verdict(end.history) if loop.algorithm.verdict is not None else []
    remarks = getattr(e.federation, "remarks", ())  # of a federation of nodes: what the file asks for in vain
    given = [*remarks, *notices.unmatched(e.federation), *notices.uncovered(e, loop.algorithm), *notices.unused_late(e)]
    spent = (
        []
        if account is None
        else [*account.statement(), *notices.refused(end.history), *notices.unmeasured(end.history)]
    )
    told = [*spent, *loop.algorithm.notices, *given, *verdict, *notices.worse(e, end.history)]
    if end.outcome is Outcome.NONFINITE:
        remedy = f" To change that, {e.algorithm.remedy}."
        told.append(
            f"The run stopped: {end.where}. {notices.kept(end.history, end.model)}{loop.algorithm.breakdown}{remedy}"
        )
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
        told,
        tables,
        scores,
        folder,
        privacy=spending,
    )


def execute(
    experiment: Experiment,
    *,
    folder: str | os.PathLike[str] | None = None,
    name: str | None = None,
    progress: bool | None = False,
    resuming: bool = False,
    source: Mapping[str, Any] | None = None,
    report: bool = True,
) -> Run:
    """Run an experiment, in a folder of its own where one is given; with `resuming`, go on from its checkpoint.

    `source` is the experiment file as it was read, for the folder to keep; without `report` it gets none.
    """
    require(isinstance(report, bool), "report", "True or False", report)
    require(folder is not None or not resuming, "resume", "False without a folder", resuming, hint="Give the folder.")
    path = None if folder is None else Path(folder)
    with RunFolder(path, experiment, resuming, source) if path is not None else nullcontext() as keeper:
        try:
            return _execute(experiment, keeper, name, progress, report)
        finally:
            getattr(experiment.engine, "close", lambda: None)()  # the workers of a cluster


def _execute(
    experiment: Experiment, keeper: RunFolder | None, name: str | None, progress: bool | None, report: bool
) -> Run:
    loop = loop_of(experiment)
    begun = keeper.begun if keeper is not None else 0
    plan = private_plan(experiment)
    ledger = keeper.ledger() if keeper is not None and plan else None
    simulated = not isinstance(experiment.engine, FlowerEngine)
    account = Account(plan, experiment.seed, ledger, mark_of(experiment)[:16], simulated) if plan else None
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
            start_of(experiment),
            experiment.participation,
            [experiment.seed],
            experiment.rounds,
            PRECISIONS[str(experiment.precision)],
            resumed=keeper.resumed() if keeper is not None else None,
            after_block=after_block,
            accounts=[account] if account else [],
            roots=[root_of(experiment)] if account else [],
        )
    finally:
        bar.close()
    getattr(experiment.engine, "ended", lambda rounds: None)(end.history.rounds)  # what came too late is told of
    result = _run(experiment, loop, end, name, keeper.folder if keeper is not None else None, account)
    if keeper is not None:
        result = _with_least(result, experiment, least(experiment.problem, experiment.federation))
        keeper.finish(result, report)
    return result


def before(experiment: Experiment) -> Run:
    """The run before its first round: it has the columns and the scores that the run will have."""
    e, loop = experiment, loop_of(experiment)
    roots = [root_of(e)] if e.privacy is not None else []
    precision = PRECISIONS[str(e.precision)]
    (end,) = drive(loop, [e.federation], start_of(e), e.participation, [e.seed], 0, precision, roots=roots)
    return _run(e, loop, end, None, None)


__all__ = ["Experiment", "Run", "Runs", "compare", "environment", "execute", "run", "trials"]
