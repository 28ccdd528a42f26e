"""What fedpact raises, and the one form its sentences have.

FedpactError
├── InvalidArgument      a setting or argument breaks its constraint (also a ValueError)
├── UnknownName          an algorithm, dataset, key or column that does not exist (also a KeyError)
├── DataError            rows, labels or files that cannot be used
│   └── DatasetMissing   a dataset that is nowhere to be found
├── CheckpointError      a checkpoint or model file that is damaged or belongs to other settings
├── OutputError          a folder that cannot be written to
└── ClientError          something failed inside a round: names round, client and stage
"""

from __future__ import annotations

import difflib
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


class ClientError(FedpactError):
    """A failure inside a round, with round, client and stage."""


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def require(ok: Any, name: str, constraint: str, value: Any, *, symbol: str = "", hint: str = "") -> None:
    """Raise `InvalidArgument` unless `ok`: '<name> (<symbol>) must be <constraint>, got <value>. <hint>'."""
    if ok:
        return
    label = f"{name} ({symbol})" if symbol else name
    raise InvalidArgument(f"{label} must be {constraint}, got {_shown(value)}." + (f" {hint}" if hint else ""))


def is_number(value: Any) -> bool:
    """Whether a setting is a finite real number (a bool is not)."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def require_flags(settings: Any, *names: str) -> None:
    """Raise unless these settings are true or false."""
    for name in names:
        value = getattr(settings, name)
        require(isinstance(value, bool), name, "true or false", value)


def require_positive_int(name: str, value: Any, *, symbol: str = "", hint: str = "") -> None:
    """Raise unless `value` is an integer of at least 1."""
    ok = isinstance(value, int) and not isinstance(value, bool) and value >= 1
    require(ok, name, "an integer of at least 1", value, symbol=symbol, hint=hint)


def unknown(kind: str, name: Any, known: Iterable[str], *, hint: str = "") -> UnknownName:
    """The error for a name that does not exist: all valid ones, the nearest, and the hint if there is one."""
    names = sorted(map(str, known))  # `name` may be of any type: it is only shown
    near = difflib.get_close_matches(str(name).lower(), [n.lower() for n in names], n=1, cutoff=0.5)
    nearest = next((n for n in names if near and n.lower() == near[0]), None)
    guess = f" Did you mean {nearest!r}?" if nearest else ""
    more = f" {hint}" if hint else ""
    return UnknownName(f"{kind} must be one of {', '.join(names) or '(none)'}, got {_shown(name)}.{guess}{more}")
