"""Constrained problems as plain data: what experiment files, configurations and digests hold, and its reading."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from fedpact.core.errors import InvalidArgument, is_number, require, unknown
from fedpact.core.settings import called
from fedpact.problems.terms import ClientLoss, Function, Gap, Loss, Misses, Norm1, Norm2, PerRow, Term, as_function

#: The terms that an experiment file may name.
TERMS: dict[str, type[Term]] = {
    "loss": Loss,
    "gap": Gap,
    "misses": Misses,
    "norm1": Norm1,
    "norm2": Norm2,
    "client_loss": ClientLoss,
}


def read_model(given: Any) -> Any:
    """A model from its name, or from { name = "two_layer", hidden = 128 }."""
    if not isinstance(given, (str, Mapping)):
        return given
    from fedpact.problems import PROBLEMS  # which holds this module's problem

    options = {"name": given} if isinstance(given, str) else dict(given)
    known = [name for name in PROBLEMS if name != "constrained"]
    name = options.pop("name", None)
    if not isinstance(name, str) or name not in known:
        raise unknown("name of the model", name, known)
    for f in dataclasses.fields(PROBLEMS[name]):  # type: ignore[arg-type]
        if f.name in ("l2", "beta"):
            options.setdefault(f.name, 0.0)  # a penalty is a term here
    return called(f"the model {name!r}", PROBLEMS[name], options, also=["name"])


def _read_term(where: str, given: Any, also: Sequence[str] = ()) -> Function:
    """times · term, from { term = "gap", times = 2, column = "sex" }."""
    if not isinstance(given, Mapping) or "term" not in given:
        got = f"got {given!r}" if not isinstance(given, Mapping) else f"got only {', '.join(given) or 'nothing'}"
        raise InvalidArgument(f"{where} must have a 'term', {got}. Write {{ term = \"loss\" }}.")
    options = {key: value for key, value in given.items() if key not in also}
    name, times = options.pop("term"), options.pop("times", 1.0)
    if not isinstance(name, str) or name not in TERMS:
        raise unknown("term", name, TERMS, hint="A function of your own is for Python: PerRow.")
    require(is_number(times), f"times of the term {name!r}", "a number", times)
    return times * called(f"the term {name!r}", TERMS[name], options, also=["term", "times", *also])


def read_sum(where: str, given: Any) -> Any:
    """A sum of terms from their list, or from one; anything else is returned."""
    if not isinstance(given, (list, tuple, Mapping)):
        return given
    listed = [given] if isinstance(given, Mapping) else given
    require(listed, where, "at least one term", given)
    return Function(tuple(pair for one in listed for pair in _read_term(where, one).terms))


def read_constraint(given: Any) -> Any:
    """A constraint from { term = "loss", at_most = 0.1 } or { terms = […], at_most = 0.1 }."""
    if not isinstance(given, Mapping):
        return given
    if "at_most" not in given:
        raise InvalidArgument(f"subject_to must have 'at_most', got only {', '.join(given) or 'nothing'}. Add it.")
    if "terms" not in given:
        return _read_term("subject_to", given, also=["at_most"]) <= given["at_most"]
    for key in given:
        if key not in ("terms", "at_most"):
            raise unknown("key of a constraint with 'terms'", key, ("terms", "at_most"))
    return as_function(read_sum("terms", given["terms"])) <= given["at_most"]


def plain_model(model: Any) -> dict[str, Any]:
    """A model by its name, with its options."""
    from fedpact.problems import PROBLEMS

    name = next((name for name, cls in PROBLEMS.items() if type(model) is cls), type(model).__name__)
    return {"name": name, **(model.to_dict() if hasattr(model, "to_dict") else dataclasses.asdict(model))}


def plain_term(times: float, term: Term) -> dict[str, Any]:
    """A term as `read_sum` takes it; a function of one's own is known by its name."""
    name = next((name for name, cls in TERMS.items() if type(term) is cls), type(term).__name__)
    out: dict[str, Any] = {"term": name} | ({"times": float(times)} if times != 1 else {})
    if not isinstance(term, PerRow):
        return out | {f.name: getattr(term, f.name) for f in dataclasses.fields(term) if f.init}  # type: ignore[arg-type]
    f = term.function
    known_by = f"{getattr(f, '__module__', '')}.{getattr(f, '__qualname__', repr(f))}"
    return out | {"term": "per_row", "title": term.title, "function": known_by}


def plain_constraint(function: Function) -> dict[str, Any]:
    """A constraint as `read_constraint` takes it."""
    terms = [plain_term(c, term) for c, term in function.terms]
    limit = function.limit
    most = [float(v) for v in limit] if isinstance(limit, (list, tuple)) else float(limit)
    return {**terms[0], "at_most": most} if len(terms) == 1 else {"terms": terms, "at_most": most}
