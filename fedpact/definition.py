"""An experiment: everything that decides a run's numbers, checked when it is made; and the loop that it makes."""

from __future__ import annotations

import dataclasses
import inspect
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
import scipy.sparse

from fedpact.algorithms import ALGORITHMS
from fedpact.core import checkpoint
from fedpact.core.contract import check_flat, check_needs
from fedpact.core.environment import cache_folder
from fedpact.core.errors import (
    InvalidArgument,
    is_count,
    require,
    require_flags,
    require_one_of,
    require_positive_int,
    unknown,
)
from fedpact.core.fingerprint import fingerprints
from fedpact.core.keys import Purpose
from fedpact.core.loop import Loop
from fedpact.core.participation import Everyone, as_participation
from fedpact.core.settings import Settings, plain
from fedpact.core.stop import Never, Rule
from fedpact.data import Federation
from fedpact.engines import DebugEngine, FlowerEngine, HostEngine, LocalEngine, as_engine
from fedpact.model import plain_problem, trained
from fedpact.privacy.guard import Guard
from fedpact.privacy.private import Plan, Private
from fedpact.privacy.private import plan as worked_out
from fedpact.problems import PROBLEMS, Constrained
from fedpact.problems.clipping import check_clippable
from fedpact.problems.conformance import check_conformance, check_methods, is_own

#: Columns that a private run may be stopped by: no training row enters them but through the released model.
PUBLIC = ("round", "seconds", "test_loss", "test_accuracy")
TELEMETRIES = ("all", "test", "none")
PRECISIONS = {"double": np.float64, "single": np.float32}


@dataclass(frozen=True)
class Experiment:
    """Everything that decides a run's numbers. Checked when it is made.

    What is left out is chosen by the problem: "double" and the engine "local" for convex ones; for networks "single"
    and "host". `telemetry` is "all" (every client's rows) or, as networks have it where the dataset has a test set,
    "test" (that set only); "none" measures nothing, as private runs over a network have it.
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
        known = getattr(self.problem, "precisions", PRECISIONS)
        these = " or ".join(f'"{name}"' for name in known)
        require(self.precision in known, "precision", f"{these} for {type(self.problem).__name__}", self.precision)
        tested = not isinstance(self.engine, DebugEngine) and len(self.federation.dataset.test) > 0
        if self.telemetry is None:
            usual = "test" if deep and tested and not self.algorithm.sips else "all"
            away = isinstance(self.engine, FlowerEngine) and self.privacy is not None
            object.__setattr__(self, "telemetry", "none" if away else usual)
        if self.telemetry not in TELEMETRIES:
            raise unknown("telemetry", self.telemetry, TELEMETRIES)
        hint = 'It needs another engine than "debug" and a dataset with a test set, such as mnist.'
        ok = self.telemetry != "test" or tested
        require(ok, "telemetry", '"all" or "none" here', self.telemetry, hint=hint)
        away = isinstance(self.engine, FlowerEngine) and self.privacy is not None
        hint = "What nodes tell of their rows would tell what the noise hides."
        told = not away or self.telemetry == "none"
        require(told, "telemetry", '"none" in a private federation', self.telemetry, hint=hint)
        noted = away and getattr(self.engine, "notes", False)
        require(not noted, "notes", "false in a private federation", True, hint=hint)
        self.participation.check(self.seed, self.rounds, self.federation.clients)
        self._check_own()
        self.problem.check(self.federation)
        private = self.privacy is None or isinstance(self.privacy, Private)
        require(private, "privacy", "a Private, such as fedpact.Private(clip=1, epsilon=3)", self.privacy)
        loop = loop_of(self)
        check_flat(loop.algorithm, self.problem, self.federation)
        if loop.algorithm.rows is not None:
            loop.algorithm.rows(self.federation.sizes)
        for name in self.stop.reads if self.stop is not None and self.privacy is not None else ():
            hint = (
                "When a run ends is seen: use seconds or rounds, or the dataset's own test set, which counts as public."
            )
            require(name in PUBLIC, "stop rule of a private run", f"on {', '.join(PUBLIC)}", name, hint=hint)
        if self.stop is not None:
            loop.check_stop(start_of(self), self.federation.features, PRECISIONS[self.precision], tested)

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
        loose = getattr(self.engine, "loose", ())  # how long to wait, and where: it may change from resume to resume
        fields = [f.name for f in dataclasses.fields(self.engine) if f.compare and f.name not in loose]
        engine = {name: getattr(self.engine, name) for name in fields}
        return checkpoint.digest(config | {"engine": engine})


def start_of(experiment: Experiment) -> Any:
    """The parameters a run starts from."""
    init, features = experiment.problem.init, experiment.federation.features
    key = jax.random.fold_in(jax.random.key(experiment.seed), int(Purpose.MODEL))
    random = {"key": key} if "key" in inspect.signature(init).parameters else {}  # a fixed start needs none
    return init(features, PRECISIONS[str(experiment.precision)], **random)


def loop_of(experiment: Experiment) -> Loop:
    """The round loop of an experiment."""
    use_compilation_cache()
    e = experiment
    clients = e.federation.clients
    layout = getattr(e.federation, "layout", None)  # of data split by features
    algorithm = e.algorithm.build(e.problem, clients if layout is None else layout, e.participation.rate(clients))
    check_needs(algorithm, e.problem)
    hint = "Its uploads are changes of what a client sent before: the server would count what was forgotten for ever."
    again = getattr(e.engine, "stale", "refuse") == "refuse" or not algorithm.differences
    require(again, "stale", f'"refuse" for {algorithm.name}', "restart", hint=hint)
    plan = private_plan(e)
    source = "system" if isinstance(e.engine, FlowerEngine) else "seed"  # a simulation can be computed again
    guard = None if plan is None else Guard(plan, e.problem, algorithm, source)
    stop, telemetry = e.stop or Never(), e.telemetry or "all"
    scored = getattr(e.federation, "scored", False)  # by nodes, on rows that they hold out
    return Loop(algorithm, e.problem, e.engine, stop, e.evaluate_every, e.timing, telemetry, guard, scored)


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
    size = theorem.copies * start_of(e).size
    return worked_out(private, theorem, e.federation.sizes, size, e.participation, e.seed, e.rounds)


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


def mark_of(experiment: Experiment) -> str:
    """A digest of what a private run's releases depend on: data, settings and seed, not the engine or the rounds."""
    config = experiment.config()
    kept = {name: config["run"][name] for name in ("participation", "seed", "precision")}
    return checkpoint.digest({name: part for name, part in config.items() if name != "run"} | {"run": kept})


def root_of(experiment: Experiment) -> Any:
    """The random key of a private run. It follows from all of the above, for noise that two runs share cancels."""
    mark = mark_of(experiment)
    key = jax.random.key(experiment.seed)
    for begin in range(0, len(mark), 8):
        key = jax.random.fold_in(key, int(mark[begin : begin + 8], 16))
    return key


def use_compilation_cache() -> None:
    """Keep compiled programs on disk, unless the user has set JAX's own cache: a second run compiles nothing."""
    if jax.config.values["jax_compilation_cache_dir"] is None:
        jax.config.update("jax_compilation_cache_dir", str(cache_folder() / "xla"))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)
