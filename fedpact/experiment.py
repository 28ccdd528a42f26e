"""Experiment files: TOML in, `Experiment` out. An unknown key is an error with the nearest name.

name = "adult"                        # what tables call the run (default: the algorithm)
[data]       name = "adult"           # or csv = "file.csv", target = "…", categorical = […], drop = […], scale, coding
             # categories = { ward = ["a", "b"] }  classes = ["no", "yes"]  which the rows are then not asked for
             # or csv = { lab = "lab.csv", ward = "ward.csv" }  on = "id"  target = "…"  unmatched = "drop"
[split]      how = "cuts"  clients = 50  seed = 0  holdout = 0.2           # and the split's own options
             # how = "features"  clients = 4, or blocks = [["age", "sex"], ["dose"]]  names = […]  closer = 0
[problem]    name = "logistic"  l2 = 1e-3  divide = true  intercept = false
             # name = "constrained"  model = { name = "softmax" }  minimize = [{ term = "loss" }]
             # subject_to = [{ term = "gap", column = "sex", at_most = 0.05 }]
[algorithm]  name = "fedepm"  preset = "paper"  k0 = 12                    # any setting of `fedpact show NAME`
[run]        rounds = 100  seed = 0  participation = 0.5  evaluate_every = 1  precision = "double"  engine = "local"
             # participation = { scheme = "poisson", rho = 0.5 } or { scheme = "covering", rho = 0.5, s0 = 4 }
             # or { scheme = "schedule", rounds = [[0, 1], [2]] } or { scheme = "independent", probabilities = [0.1] }
             # engine = { name = "host", at_once = 1, spill = true }   telemetry = "test", "all" or "none"
[stop]       gradient = 1e-6  variance = 1e-8  seconds = 60  rising = 4    # any of them ends the run
             # target = { column = "accuracy", value = 0.9, above = true }
[privacy]    clip = 1.0  epsilon = 3.0  delta = 1e-5                       # or noise = 5.0; way, mechanism, relation, …
"""

from __future__ import annotations

import dataclasses
import inspect
import tomllib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from fedpact import data
from fedpact.algorithms import algorithm as algorithm_named
from fedpact.core.errors import DataError, FedpactError, InvalidArgument, require, unknown
from fedpact.core.participation import Covering, Everyone, Fraction, Independent, Poisson, Schedule
from fedpact.core.settings import Settings, called
from fedpact.core.stop import GradientNorm, Rising, Rule, Seconds, Target, Variance, any_of
from fedpact.core.vertical import Layout
from fedpact.data import federation
from fedpact.definition import Experiment
from fedpact.engines import ENGINES
from fedpact.privacy.private import Private
from fedpact.problems import PROBLEMS, Logistic

TABLES = ("data", "split", "problem", "algorithm", "run", "stop", "privacy")
#: Keys of [split] that say which rows are held out.
DRAW = ("holdout", "seed")
RUN_KEYS = ("participation", "rounds", "seed", "evaluate_every", "precision", "engine", "timing", "telemetry")
SCHEMES: dict[str, type] = {
    "everyone": Everyone,
    "fraction": Fraction,
    "poisson": Poisson,
    "independent": Independent,
    "covering": Covering,
    "schedule": Schedule,
}
STOPS: dict[str, Callable[[Any], Rule]] = {
    "gradient": GradientNorm,
    "variance": Variance,
    "seconds": Seconds,
    "rising": Rising,
    "target": lambda values: called("[stop] target", Target, values),
}


SEE = "Files to start from are in examples/; docs/experiments.md has every key."


def read(path: str | Path, changes: Iterable[str] = ()) -> dict[str, Any]:
    """Read an experiment file and apply `key=value` changes such as run.rounds=50."""
    path = Path(path)
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        text = f"experiment must be a TOML file, got {str(path)!r}, which does not exist. {SEE}"
        raise DataError(text) from None
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"experiment must be a TOML file, got {str(path)!r}: {error}. {SEE}") from None
    except ValueError as error:  # also an integer of more digits than Python reads
        raise DataError(f"experiment must be valid TOML, got {str(path)!r}: {error}. Correct it there.") from None
    for change in changes:
        _apply(values, change)
    source = values.get("data")
    if isinstance(source, dict) and "csv" in source:  # relative to the file, so that it can be run from anywhere
        source["csv"] = _beside(path, source["csv"])
    return values


def _beside(path: Path, csv: Any) -> Any:
    if isinstance(csv, dict):
        return {party: _beside(path, one) for party, one in csv.items()}
    return [_beside(path, one) for one in csv] if isinstance(csv, list) else str((path.parent / str(csv)).resolve())


def toml_value(text: str) -> Any:
    """What a TOML file means by this text; a bare word is a string."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except ValueError:
        return text.strip()


def _apply(values: dict[str, Any], change: str) -> None:
    key, equals, text = change.partition("=")
    parts = key.strip().split(".")
    if not equals or not all(parts):
        raise InvalidArgument(
            f"--set must be key=value such as run.rounds=50, got {change!r}. Name the table, a dot and the key."
        )
    for part in parts[:-1]:
        values = values.setdefault(part, {})
        if not isinstance(values, dict):
            raise InvalidArgument(
                f"--set must name a key inside a table, got {change!r}. Tables are {', '.join(TABLES)}."
            )
    values[parts[-1]] = toml_value(text)


class Parts(NamedTuple):
    """An experiment file but for its data."""

    algorithm: Settings
    problem: Any
    run: dict[str, Any]
    stop: Rule | None
    private: Private | None
    name: str | None


def build(values: Mapping[str, Any]) -> tuple[Experiment, str | None]:
    """The experiment a file describes, checked throughout, and its name."""
    found = parts(values)
    options: dict[str, Any] = {"stop": found.stop, "privacy": found.private, **found.run}
    made = Experiment(found.algorithm, found.problem, federation_of(values), **options)
    return made, found.name


def federation_of(values: Mapping[str, Any]) -> Any:
    """The data of an experiment file, at its clients."""
    check_rows(values)
    return _federation(dict(values.get("data", {})), dict(values.get("split", {})))


def parts(values: Mapping[str, Any]) -> Parts:
    """Everything else that a file describes, checked."""
    for key, value in values.items():
        if key not in (*TABLES, "name"):
            raise unknown("key of the experiment", key, (*TABLES, "name"))
        if key in TABLES and not isinstance(value, Mapping):
            raise InvalidArgument(f"[{key}] must be a table, got {value!r}. Write [{key}] and its keys below it.")
    name = values.get("name")
    hint = "It is what tables call the run; leave it out for the algorithm's."
    require(name is None or (isinstance(name, str) and name), "name", "a word", name, hint=hint)
    tables = {key: dict(values.get(key, {})) for key in TABLES}
    for required in ("data", "algorithm"):
        if not tables[required]:
            raise InvalidArgument(f"experiment must have a table [{required}], got none. {SEE}")
    settings = _algorithm(tables["algorithm"])
    problem = _problem(tables["problem"])
    run = _run(tables["run"])
    stop = _stop(tables["stop"])
    private = called("[privacy]", Private, tables["privacy"]) if "privacy" in values else None
    check_rows(values)
    return Parts(settings, problem, run, stop, private, name)


def check_rows(values: Mapping[str, Any]) -> None:
    """Refuse keys of [data] and [split] that nobody reads, here or at a node, and a draw that cannot be."""
    source, split = dict(values.get("data", {})), dict(values.get("split", {}))
    several = isinstance(source.get("csv"), (Mapping, list)) or ("on" in source and "csv" not in source)
    if several:
        _check_keys("[data]", source, ["csv", *_arguments(data.align, "files", *DRAW)])
        _check_keys("[split] of several files", split, ["how", *DRAW])
        how = split.get("how", "features")
        require(how == "features", "how", '"features" where csv has a file per party', how, hint="Leave it out.")
    elif "name" in source and "csv" not in source:
        name = source.pop("name")
        require(isinstance(name, str), "data.name", "the name of a dataset", name, hint="See: fedpact list")
        data.check_options(name, source)
    else:  # a file, here or at every node
        none = "csv" not in source
        hint = "In a simulation [data] must have 'name' or 'csv' and 'target'." if none else ""
        known = ["csv", *(("name", "on") if none else ()), *_arguments(data.from_csv, "path")]
        _check_keys("[data]", source, known, hint)
    if not several:
        federation.check_options(split.get("how", "iid"), split)
    federation.require_draw(split.get("seed", 0), split.get("holdout", 0.0))


def _check_keys(where: str, table: Mapping[str, Any], known: Iterable[str], hint: str = "") -> None:
    for key in table:
        if key not in known:
            raise unknown(f"key of {where}", key, known, hint=hint)


def _arguments(function: Callable[..., Any], *but: str) -> list[str]:
    return [name for name in inspect.signature(function).parameters if name not in but]


def _federation(source: dict[str, Any], split: dict[str, Any]) -> Any:
    if isinstance(source.get("csv"), (Mapping, list)):
        split.pop("how", None)
        return called("[data]", data.align, {"files": source.pop("csv"), **source, **split})
    if "csv" in source:
        source = _without_owner(source, split.get("column"))
        dataset = called("[data]", data.from_csv, {"path": source.pop("csv"), **source})
    else:
        if "name" not in source:
            raise InvalidArgument("[data] must have 'name' or 'csv' and 'target', got neither. See: fedpact list")
        dataset = data.load(source.pop("name"), **source)
    return dataset.split(**split)


def _without_owner(source: dict[str, Any], column: Any) -> dict[str, Any]:
    """The column that says whose a row is describes the split, not the row: it is no feature unless it is asked for."""
    drop, categorical = (
        [v] if isinstance(v, str) else v for v in (source.get("drop", []), source.get("categorical", []))
    )
    if not isinstance(column, str) or not isinstance(drop, list) or not isinstance(categorical, list):
        return source
    lists = source.get("categories")
    if column in (*drop, *categorical, *(lists if isinstance(lists, Mapping) else ()), source.get("target")):
        return source
    try:
        header, _ = data.tables.read_rows(source["csv"])
    except FedpactError:
        return source  # reading it below says what is wrong
    return source | {"drop": [*drop, column]} if column in header else source


def _named(where: str, table: dict[str, Any], default: str | None = None) -> str:
    name = table.pop("name", default)
    if not isinstance(name, str):
        raise InvalidArgument(f"[{where}] must have a 'name', got {name!r}. See: fedpact list")
    return name


def _problem(table: dict[str, Any]) -> Any:
    name = _named("problem", table, "logistic")
    if name not in PROBLEMS:
        raise unknown("problem", name, PROBLEMS)
    return called("[problem]", PROBLEMS[name], table)


def _algorithm(table: dict[str, Any]) -> Any:
    cls = algorithm_named(_named("algorithm", table))
    preset = table.pop("preset", None)
    return cls.from_dict(table) if preset is None else cls.preset(preset, **table)


def _run(table: dict[str, Any]) -> dict[str, Any]:
    for key in table:
        if key not in RUN_KEYS:
            raise unknown("key of [run]", key, RUN_KEYS)
    scheme = table.get("participation")
    if isinstance(scheme, Mapping):
        options = dict(scheme)
        name = options.pop("scheme", None)
        if not isinstance(name, str) or name not in SCHEMES:
            raise unknown("participation scheme", name, SCHEMES)
        table["participation"] = called("participation", SCHEMES[name], options)
    engine = table.get("engine")
    if isinstance(engine, Mapping):
        options = dict(engine)
        name = _named("run] engine = { … }, and [run", options)
        if name not in ENGINES:
            raise unknown("engine", name, ENGINES)
        table["engine"] = called("engine", ENGINES[name], options)
    return table


def _stop(table: dict[str, Any]) -> Rule | None:
    rules = []
    for key, value in table.items():
        if key not in STOPS:
            hint = 'Any column of the history can be a target: target = { column = "objective", value = 0.1 }'
            raise unknown("key of [stop]", key, STOPS, hint=hint)
        try:
            rules.append(STOPS[key](value))
        except InvalidArgument as error:  # the rule's word for it is not the file's
            raise InvalidArgument(f"stop.{key}: {error}") from None
    return any_of(*rules) if rules else None


def settings_table(cls: type) -> list[dict[str, Any]]:
    """Name, default and meaning of every setting, from the dataclass and the comments beside its fields."""
    comments = {}
    for line in inspect.getsource(cls).splitlines():
        head, _, comment = line.partition("  # ")
        comments[head.split(":")[0].strip()] = comment.strip()
    return [
        {"setting": f.name, "default": f.default, "meaning": comments.get(f.name, "")} for f in dataclasses.fields(cls)
    ]


def needs(cls: type[Settings]) -> dict[str, list[str]]:
    """What each preset of an algorithm needs of the problem beyond a gradient."""
    made = {name: cls.preset(name) for name in cls.presets} or {"defaults": cls()}
    clients: Any = Layout(((0,), (1,)), ("0", "1"), 0) if cls.vertical else 2
    return {name: sorted(settings.build(Logistic(l2=0), clients, 1.0).needs) for name, settings in made.items()}
