"""What fedpact raises, and the one form its sentences have.

FedpactError
├── InvalidArgument      a setting or argument breaks its constraint (also a ValueError)
├── UnknownName          an algorithm, dataset, key or column that does not exist (also a KeyError)
├── DataError            rows, labels or files that cannot be used
│   └── DatasetMissing   a dataset that is nowhere to be found
├── CheckpointError      a checkpoint or model file that is damaged or belongs to other settings
├── OutputError          a folder that cannot be written to
│   └── FolderHeld       one in which another process is running
├── BudgetSpent          a release that would cost more privacy than was granted
└── ClientError          something failed inside a round: names round, client and stage
    ├── NotFinite        what a client made of a round is not finite (engine `debug`; elsewhere that is an outcome)
    └── StartedAgain     a node has forgotten what was agreed on, or its part of a masked sum: it is to be asked anew
"""

from __future__ import annotations

import difflib
import importlib
import math
from collections.abc import Iterable
from typing import Any


class FedpactError(Exception):
    """Base of every error that fedpact raises on purpose; the command prints its sentence, never a traceback."""

    def __str__(self) -> str:
        return str(self.args[0]) if self.args else ""


class InvalidArgument(FedpactError, ValueError):
    """An argument or setting that breaks its constraint."""


class UnknownName(FedpactError, KeyError):
    """A name that does not exist; the sentence lists the valid ones and the nearest."""


class DataError(FedpactError, ValueError):
    """Rows, labels or files that cannot be used."""


class DatasetMissing(DataError):
    """A dataset that is in none of the places fedpact looks."""


class CheckpointError(FedpactError):
    """A checkpoint or model file that is damaged or belongs to other settings."""


class OutputError(FedpactError, OSError):
    """A folder or file that cannot be written."""


class FolderHeld(OutputError):
    """A folder in which another process is running."""


class BudgetSpent(FedpactError):
    """A release that would cost more privacy than was granted; nothing was released."""


class ClientError(FedpactError):
    """A failure inside a round, with round, client and stage."""


class NotFinite(ClientError):
    """A client's state or upload is not finite; `position` is where the engine has the client."""

    def __init__(self, sentence: str, position: int) -> None:
        super().__init__(sentence)
        self.position = position


class StartedAgain(ClientError):
    """A node was started again, and has forgotten what was agreed on before the run, or its part of a masked sum."""


#: The largest count that settings take: steps, rounds, rows a batch, ….
MOST = 2**31 - 1


def _shown(value: Any) -> str:
    try:
        text = repr(value)
    except ValueError:  # Python writes no integer of more than 4300 digits
        return "an integer too long to show"
    return text if len(text) <= 80 else text[:77] + "..."


def require(ok: Any, name: str, constraint: str, value: Any, *, symbol: str = "", hint: str = "") -> None:
    """Raise `InvalidArgument` unless `ok`: '<name> (<symbol>) must be <constraint>, got <value>. <hint>'."""
    if ok:
        return
    label = f"{name} ({symbol})" if symbol not in ("", name) else name
    raise InvalidArgument(f"{label} must be {constraint}, got {_shown(value)}." + (f" {hint}" if hint else ""))


def is_number(value: Any) -> bool:
    """Whether a setting is a finite real number that fits 64 bits (a bool is not)."""
    if isinstance(value, int):
        return not isinstance(value, bool) and abs(value) < 2**63
    return isinstance(value, float) and math.isfinite(value)


def is_count(value: Any, least: int = 0) -> bool:
    """Whether a setting is an integer from `least` to 2³¹−1 (a bool is not)."""
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= MOST


def require_flags(settings: Any, *names: str) -> None:
    """Raise unless these settings are true or false."""
    for name in names:
        value = getattr(settings, name)
        require(isinstance(value, bool), name, "true or false", value)


def require_positive_int(name: str, value: Any, *, symbol: str = "", hint: str = "") -> None:
    """Raise unless `value` is an integer of at least 1, and not absurdly large."""
    large = isinstance(value, int) and value > MOST
    require(not large, name, "at most 2³¹−1", value, symbol=symbol, hint=hint)
    require(is_count(value, 1), name, "an integer of at least 1", value, symbol=symbol, hint=hint)


def the_extra(name: str, extra: str = "") -> Any:
    """The module of an optional dependency, or what to install; `extra` where it is not called like the module."""
    try:
        return importlib.import_module(name)
    except ImportError:
        text = f"{name} must be installed for this, got a Python without it"
        raise InvalidArgument(f"{text}. Install it: pip install 'fedpact[{extra or name}]'") from None


def require_one_of(name: str, value: Any, known: Iterable[str]) -> None:
    """Raise `UnknownName` unless `value` is one of these words."""
    known = list(known)
    if not isinstance(value, str) or value not in known:
        raise unknown(name, value, known)


def nearest(name: Any, known: Iterable[str]) -> str:
    """' Did you mean …?' with the nearest of the valid names, or nothing."""
    names = sorted(map(str, known))
    if not isinstance(name, str):  # nothing was misspelt
        return ""
    near = difflib.get_close_matches(name.lower(), [n.lower() for n in names], n=1, cutoff=0.5)
    found = next((n for n in names if near and n.lower() == near[0]), None)
    return f" Did you mean {found!r}?" if found else ""


def unknown(kind: str, name: Any, known: Iterable[str], *, hint: str = "") -> UnknownName:
    """The error for a name that does not exist: all valid ones, the nearest, and the hint if there is one."""
    names = sorted(map(str, known))
    more = f" {hint}" if hint else ""
    apart = "; " if any("," in one for one in names) else ", "
    return UnknownName(
        f"{kind} must be one of {apart.join(names) or '(none)'}, got {_shown(name)}.{nearest(name, names)}{more}"
    )
