"""When a run ends. Rules combine with `|` (any) and `&` (all).

A rule looks at the last `window` measured rounds: `recent[name]` is an array, newest last, NaN where nothing was
measured yet. Rules are arithmetic only, so that the same rule runs inside a compiled block of rounds and on the host.
They are asked after a measured round, never at row 0: residuals are often 0 before the first round.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np

from fedpact.core.errors import is_count, is_number, require, require_flags, require_positive_int
from fedpact.core.settings import plain_fields

MOST_ROWS = 10**6  # that a rule looks back at


def _check_window(window: Any) -> None:
    require(is_count(window, 2), "window", "an integer of at least 2", window)
    require(window <= MOST_ROWS, "window", f"at most {MOST_ROWS:,}", window, hint="The rows it looks back at are kept.")


class Outcome(enum.Enum):
    """Why a run ended; the value is the sentence shown."""

    STOPPED = "a stop rule was met"
    ROUNDS = "all rounds were run"
    BUDGET = "stopped before the round that would exceed the privacy budget"
    NONFINITE = "a number was not finite"
    INTERRUPTED = "interrupted; what is done is kept"


class Rule:
    """Base of the stop rules: `fired(recent)`, how far back it looks, and which columns it reads."""

    window: int = 1
    reads: tuple[str, ...] = ()

    def fired(self, recent: Mapping[str, Any]) -> Any:
        """Whether the run should end, from the recent rounds."""
        raise NotImplementedError

    def met(self, recent: Mapping[str, Any]) -> list[str]:
        """The rules that fired, in words: this one, or those of a combination."""
        return [str(self)] if bool(self.fired(recent)) else []

    def __or__(self, other: Rule) -> Rule:
        return AnyOf((self, other))

    def __and__(self, other: Rule) -> Rule:
        return AllOf((self, other))


class _Combined(Rule):
    def __init__(self, rules: tuple[Rule, ...]) -> None:
        self.rules = rules
        self.window = max(rule.window for rule in rules)
        self.reads = tuple(dict.fromkeys(name for rule in rules for name in rule.reads))

    def _each(self, recent: Mapping[str, Any]) -> list[Any]:
        return [rule.fired(seen) for rule, seen in self._seen(recent)]

    def _seen(self, recent: Mapping[str, Any]) -> list[tuple[Rule, dict[str, Any]]]:
        return [(rule, {k: v[len(v) - rule.window :] for k, v in recent.items()}) for rule in self.rules]

    def met(self, recent: Mapping[str, Any]) -> list[str]:
        """Those of its rules that fired, if together they end the run."""
        if not bool(self.fired(recent)):
            return []
        return [text for rule, seen in self._seen(recent) for text in rule.met(seen)]


class AnyOf(_Combined):
    """Ends when any of its rules does."""

    def fired(self, recent: Mapping[str, Any]) -> Any:
        """Any."""
        return jnp.any(jnp.stack([jnp.asarray(f) for f in self._each(recent)]))

    def __repr__(self) -> str:
        return " | ".join(map(repr, self.rules))


class AllOf(_Combined):
    """Ends when all of its rules agree in the same round."""

    def fired(self, recent: Mapping[str, Any]) -> Any:
        """All."""
        return jnp.all(jnp.stack([jnp.asarray(f) for f in self._each(recent)]))

    def __repr__(self) -> str:
        return " & ".join(f"({rule!r})" for rule in self.rules)


@dataclass(frozen=True)
class Never(Rule):
    """Ends nothing: the run has all its rounds."""

    def fired(self, recent: Mapping[str, Any]) -> Any:
        """False."""
        return jnp.asarray(False)


@dataclass(frozen=True)
class Rounds(Rule):
    """Ends after a number of rounds."""

    rounds: int
    reads = ("round",)

    def __post_init__(self) -> None:
        plain_fields(self)
        require_positive_int("rounds", self.rounds)

    def fired(self, recent: Mapping[str, Any]) -> Any:
        """round ≥ rounds."""
        return recent["round"][-1] >= self.rounds

    def __str__(self) -> str:
        return f"round ≥ {self.rounds}"


@dataclass(frozen=True)
class Target(Rule):
    """Ends when a column of the history is at most (or, with `above=True`, at least) a value."""

    column: str
    value: float
    above: bool = False

    def __post_init__(self) -> None:
        plain_fields(self)
        known = "Name a column of history.csv, such as 'objective' or 'accuracy'."
        require(isinstance(self.column, str), "column", "the name of a column", self.column, hint=known)
        never = "A run that no target ends has no stop rule."
        require(is_number(self.value), "value", "a finite number", self.value, hint=never)
        require_flags(self, "above")

    @property
    def reads(self) -> tuple[str, ...]:  # type: ignore[override]
        """The column it watches."""
        return (self.column,)

    def fired(self, recent: Mapping[str, Any]) -> Any:
        """column ≤ value, or ≥ with `above`."""
        last = recent[self.column][-1]
        return last >= self.value if self.above else last <= self.value

    def __str__(self) -> str:
        return f"{self.column} {'≥' if self.above else '≤'} {self.value:g}"


@dataclass(frozen=True)
class GradientNorm(Rule):
    """Ends when ‖∇f‖² < tolerance, f being the mean over the clients."""

    tolerance: float = 1e-6
    reads = ("gradient",)

    def __post_init__(self) -> None:
        plain_fields(self)
        require(is_number(self.tolerance) and self.tolerance > 0, "tolerance", "a number above 0", self.tolerance)

    def fired(self, recent: Mapping[str, Any]) -> Any:
        """‖∇f‖² < tolerance."""
        return recent["gradient"][-1] < self.tolerance

    def __str__(self) -> str:
        return f"‖∇f‖² < {self.tolerance:g}"


@dataclass(frozen=True)
class Variance(Rule):
    """Ends when the sample variance of the last `window` values of f is at most tolerance/(1+|f|).

    f is `scale` times the reported mean over the clients: scale=m makes it the sum the FedEPM paper has.
    """

    tolerance: float
    window: int = 4
    scale: float = 1.0
    reads = ("objective",)

    def __post_init__(self) -> None:
        plain_fields(self)
        require(is_number(self.tolerance) and self.tolerance > 0, "tolerance", "a number above 0", self.tolerance)
        _check_window(self.window)
        hint = "Leave it out for the mean over the clients; m gives the sum."
        require(is_number(self.scale) and self.scale > 0, "scale", "a number above 0", self.scale, hint=hint)

    def fired(self, recent: Mapping[str, Any]) -> Any:
        """var ≤ tolerance/(1+|f|); false until the window is full (NaN compares false)."""
        f = self.scale * recent["objective"]
        return jnp.var(f, ddof=1) <= self.tolerance / (1 + jnp.abs(f[-1]))

    def __str__(self) -> str:
        return f"variance of the last {self.window} objectives ≤ {self.tolerance:g}/(1 + |f|)"


@dataclass(frozen=True)
class Rising(Rule):
    """Ends when the objective and ‖∇f‖² are both above their largest of the `window` − 1 rounds before."""

    window: int = 4
    reads = ("objective", "gradient")

    def __post_init__(self) -> None:
        plain_fields(self)
        _check_window(self.window)

    def fired(self, recent: Mapping[str, Any]) -> Any:
        """Both above; false until the window is full (NaN compares false)."""
        f, g = recent["objective"], recent["gradient"]
        return (f[-1] > jnp.max(f[:-1])) & (g[-1] > jnp.max(g[:-1]))

    def __str__(self) -> str:
        return f"objective and ‖∇f‖² above those of the {self.window - 1} rounds before"


@dataclass(frozen=True)
class Seconds(Rule):
    """Ends after a time; looked at between compiled blocks of rounds, so it can overrun by one block."""

    seconds: float
    reads = ("seconds",)

    def __post_init__(self) -> None:
        plain_fields(self)
        require(is_number(self.seconds) and self.seconds > 0, "seconds", "a number above 0", self.seconds)

    def fired(self, recent: Mapping[str, Any]) -> Any:
        """elapsed ≥ seconds."""
        return recent["seconds"][-1] >= self.seconds

    def __str__(self) -> str:
        return f"seconds ≥ {self.seconds:g}"


def any_of(*rules: Rule) -> Rule:
    """The rules joined by `|`; one rule is itself."""
    return rules[0] if len(rules) == 1 else AnyOf(tuple(rules))


def first_fired(rule: Rule, columns: Mapping[str, Any]) -> int | None:
    """The first row of recorded columns at which a rule would have ended the run (never row 0), or None."""
    rows = len(next(iter(columns.values())))
    padded = {name: np.concatenate([np.full(rule.window - 1, np.nan), columns[name]]) for name in rule.reads}
    for t in range(1, rows):
        if bool(rule.fired({name: values[t : t + rule.window] for name, values in padded.items()})):
            return t
    return None
