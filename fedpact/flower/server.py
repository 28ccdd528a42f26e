"""The server's side: wait for the nodes, agree on the features, run the experiment over them."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from fedpact import __version__
from fedpact.algorithms import ALGORITHMS
from fedpact.core.errors import ClientError, DataError, FedpactError, InvalidArgument, StartedAgain, require
from fedpact.core.wire import VERSION, Message, Refused, failed, same_version, usable
from fedpact.definition import Experiment, loop_of, start_of
from fedpact.engines import FlowerEngine, PartiesEngine
from fedpact.engines.flower import Link
from fedpact.experiment import parts
from fedpact.flower.agreement import Add, agreed_schema
from fedpact.flower.described import Description, experiment_of, unused, value_of
from fedpact.flower.masked import Rules, Sums, rules_of
from fedpact.flower.vertical import agreed, is_split
from fedpact.folder import clients_in, is_run, place_of
from fedpact.run import Run, execute

log = logging.getLogger("fedpact")
#: How often a run is begun where nodes are lost before it has.
STARTS = 5


def numbered(hellos: Sequence[Mapping[str, Any]]) -> list[int]:
    """The order of the nodes: by the numbers they were given, or by their names."""
    names = [value_of(hello, "name", "a word", k) for k, hello in enumerate(hellos)]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise DataError(f"names of nodes must be distinct, got {twice[0]!r} twice. Give each a name of its own.")
    given = [
        value_of(hello, "client", "a number, or left out", name) for hello, name in zip(hellos, names, strict=True)
    ]
    if all(number is None for number in given):
        return sorted(range(len(names)), key=lambda k: names[k])
    if sorted(given, key=lambda g: -1 if g is None else g) != list(range(len(names))):
        raise DataError(f"clients of the nodes must be 0 to {len(names) - 1}, got {given}. Number all, or none.")
    return sorted(range(len(names)), key=lambda k: given[k])


def _ask(
    link: Link, questions: Mapping[int, Message], patience: float, by: Callable[..., dict[int, Any]] | None = None
) -> dict[int, Message]:
    """Everyone's answer; the first that has none, or a sentence instead, ends the start. `by`: another way to ask."""
    answers = (by or link.ask)(questions, patience, len(questions), patience)
    for i, message in questions.items():
        if i not in answers:
            raise ClientError(f"{message.kind}: node {link.names[i]!r} did not answer within {patience:g} s.")
        try:
            usable(answers[i])
        except Refused as refused:
            raise failed(f"{message.kind}: node {link.names[i]!r}", refused) from None
    return answers


def patience_of(values: Mapping[str, Any]) -> float:
    """How long the experiment's engine waits for an answer; of one that is not Flower's, as long as that does."""
    engine = parts(values).run.get("engine")
    return (engine if isinstance(engine, FlowerEngine) else FlowerEngine()).patience


def agree(values: Mapping[str, Any], link: Link, surveys: Sequence[Any], patience: float) -> Description:
    """What everyone knows of everyone's data."""
    names, everyone = list(link.names), range(len(link.names))
    for name, one in zip(names, surveys, strict=True):
        value_of({"survey": one}, "survey", "a table", name)
    if is_split(surveys):
        return agreed(values, names, surveys, lambda questions: _ask(link, questions, patience), link.tell)
    parts = len(value_of({"names": names, **surveys[0]}, "names", "a list of texts", names[0]))
    hint = "Start one for each, or change clients."
    require(parts == len(names), "nodes", f"the {parts} clients of [split]", len(names), hint=hint)
    rules = rules_of(values)
    add = None if rules is None else _adding(link, Sums(link, rules, patience, patience), patience)
    schema = agreed_schema(values, surveys, names, lambda questions: _ask(link, questions, patience), add)
    questions = {i: Message("coded", {"client": i, "schema": schema.to_dict()}) for i in everyone}
    answers = _ask(link, questions, patience)
    every = lambda key, kind: tuple(value_of(answers[i].values, key, kind, names[i]) for i in everyone)
    return Description(
        tuple(names),
        every("rows", "a number from 1 to 2³¹−1"),
        every("blank", "true or false"),
        every("mark", "a word"),
        schema,
        bool(surveys[0].get("pixels", False)),
        str(surveys[0].get("dataset", values.get("name", "federation"))),
    )


def _adding(link: Link, sums: Sums, patience: float) -> Add:
    """Everyone's answers as a masked sum."""

    def add(questions: Mapping[int, Message], leaves: Sequence[Any]) -> list[np.ndarray]:
        kind = next(iter(questions.values())).kind
        one = sums.start(kind, 0, list(questions), leaves)
        for i, answer in _ask(link, questions, patience, one.ask).items():
            if not one.add(i, answer):
                name = link.names[i]
                raise DataError(
                    f"sums of node {name!r} must be finite, got others. A column is too large to be squared."
                )
        return one.total(len(questions))[0]

    return add


def _sums(experiment: Experiment, link: Link, run: str) -> Sums:
    """What makes the run's sums. Refuses, before round 1, an algorithm that needs every client's upload."""
    e, clients = experiment, experiment.federation.clients
    algorithm, engine, w0 = loop_of(e).algorithm, e.engine, start_of(e)
    if algorithm.combine == "sum":
        rules = Rules(run, engine.bound, engine.threshold)
        return Sums(link, rules, engine.deadline, engine.patience, lambda hellos: algorithm.init(w0, hellos))
    able = []
    for name, settings in ALGORITHMS.items():
        with suppress(FedpactError):  # some do not go with the problem
            if not settings.vertical and settings().build(e.problem, clients, 1.0).combine == "sum":
                able.append(name)
    raise InvalidArgument(
        f"algorithm must be one whose server needs the sum of the uploads alone with secure = true, got "
        f"{e.algorithm.name}, which needs each. Those that can here: {', '.join(able)}."
    )


def greet(values: Mapping[str, Any], link: Link, patience: float) -> dict[int, Mapping[str, Any]]:
    """Who the nodes are, and what they tell of their data."""
    questions = {i: Message("hello", {"experiment": dict(values)}) for i in range(len(link.names))}
    return {i: hello_of(answer, link.names[i]) for i, answer in _ask(link, questions, patience).items()}


def hello_of(answer: Any, name: str) -> Mapping[str, Any]:
    """What a node tells of itself, if it can be used and its fedpact is this one."""
    told = usable(answer).values
    same_version(__version__, told.get(VERSION), told.get("name", name))
    return told


def prepare(
    values: Mapping[str, Any], link: Link, surveys: Sequence[Any], folder: Path | None, patience: float
) -> tuple[Experiment, str | None]:
    """The experiment, made by the server and by every node alike."""
    if folder is not None and (known := clients_in(folder)) is not None:
        # before anyone is asked: masked sums over other nodes than before would differ by what one of them has
        hint = "Start those it began with, or choose a new folder."
        require(
            len(link.names) == known, "nodes", f"the {known} of the run in {str(folder)!r}", len(link.names), hint=hint
        )
    description = agree(values, link, surveys, patience)
    experiment, name = experiment_of(values, description, unused(values, surveys))
    engine = experiment.engine
    assert isinstance(engine, FlowerEngine | PartiesEngine)
    place, digest = "" if folder is None else place_of(folder), experiment.digest()
    run = hashlib.sha256(json.dumps([place, digest]).encode()).hexdigest()[:16]
    whole = {"experiment": dict(values), "description": description.to_dict(), "run": run, "digest": digest}
    begun = {i: Message("prepare", {**whole, "client": i}) for i in range(len(link.names))}
    link.tell(begun)
    if isinstance(engine, PartiesEngine):
        engine.over(link)
    else:
        engine.over(link, _sums(experiment, link, run) if engine.secure else None, begun)
    return experiment, name


def federate(
    values: Mapping[str, Any],
    link: Link,
    folder: str | Path | None = None,
    resume: bool = False,
    surveys: Sequence[Any] | None = None,
) -> Run:
    """Run an experiment over the nodes of a link; with a folder it can be resumed. `surveys`: see `greet`.

    What is agreed on before round 1 is in the nodes' memory alone: if one is started again, everyone is asked anew.
    """
    patience = patience_of(values)  # and refuses what is no experiment, before anyone is asked
    path = None if folder is None else Path(folder)
    lost: StartedAgain | None = None
    for start in range(1, STARTS + 1):
        if lost is not None:
            log.warning("%s Everyone is asked anew (start %d of %d).", lost, start, STARTS)
            link.anew()
            surveys, resume = None, resume or (path is not None and path.is_dir() and is_run(path))
        try:
            if surveys is None:
                found = greet(values, link, patience)
                surveys = [found[i].get("survey") for i in range(len(link.names))]
            experiment, name = prepare(values, link, surveys, path, patience)
            return execute(experiment, folder=path, name=name, resuming=resume, source=values)
        except StartedAgain as error:
            lost = error
    raise ClientError(
        f"nodes must stay until the run has begun, got {STARTS} starts in which one was lost. {lost} See why in its "
        "node.log, and run it again."
    )
