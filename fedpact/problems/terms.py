"""What constrained problems are made of: terms, their sums, and limits.

A term is a mean over all rows of all clients of something smooth (`Loss`, `Gap`, `Misses`, `PerRow`), a mean over one
client's (`ClientLoss`: one constraint a client), or a norm of the model (`Norm2`, `Norm1`), which SSCA keeps as it is
unless exact=False. Rates that are divided by a count over all clients (a group's rows, the positives) need that count:
clients send theirs when they join.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax.numpy as jnp
import numpy as np

from fedpact.core.contract import Batch
from fedpact.core.errors import DataError, is_number, require, require_flags, unknown
from fedpact.core.vector import Vector


class Arithmetic:
    """Terms and functions are added, multiplied by numbers, and compared with a limit."""

    def _terms(self) -> tuple[tuple[float, Term], ...]:
        raise NotImplementedError

    def __add__(self, other: Any) -> Function:
        return Function((*self._terms(), *as_function(other).terms))

    def __mul__(self, factor: Any) -> Function:
        require(is_number(factor), "factor of a function", "a number", factor)
        return Function(tuple((factor * c, term) for c, term in self._terms()))

    __rmul__ = __mul__

    def __le__(self, limit: Any) -> Function:
        return Function(self._terms(), tuple(limit) if isinstance(limit, list) else limit)


class Term(Arithmetic):
    """One summand. `rows` is what it takes the mean of over the rows, None where it looks at the model alone."""

    signs: tuple[int, ...] = (1,)  # both where a constraint is on the absolute value
    counted = 0  # how many counts over all clients it needs

    def _terms(self) -> tuple[tuple[float, Term], ...]:
        return ((1.0, self),)

    def check(self, model: Any, federation: Any) -> None:
        """Refuse data or models it cannot use."""

    def tally(self, batch: Batch) -> list[Any]:
        """This client's part of the counts."""
        return []

    def rows(self, model: Any, w: Vector, batch: Batch, shares: Sequence[Any]) -> Any:
        """A number a row; `shares` are its counts over all clients divided by all rows."""
        raise NotImplementedError


@dataclass(frozen=True)
class Loss(Term):
    """The model's loss, without any penalty of its own."""

    def check(self, model: Any, federation: Any) -> None:
        """The model must have a loss a row."""
        require(hasattr(model, "losses"), "model", "one with a loss a row for Loss()", type(model).__name__)

    def rows(self, model: Any, w: Vector, batch: Batch, shares: Sequence[Any]) -> Any:
        """ℓ(ω; x_n)."""
        return model.losses(w, batch)


def _probability(model: Any, w: Vector, batch: Batch, of: int) -> Any:
    p = model.predict(w, batch.x)
    return p[:, of] if p.ndim == 2 else p if of == 1 else 1 - p


def _some(share: Any) -> Any:
    """A share to divide by; of no rows it stands beside none."""
    return jnp.where(share > 0, share, 1)


def _check_class(model: Any, federation: Any, of: int, name: str) -> None:
    require(getattr(model, "classifies", False), "model", f"one that classifies for {name}", type(model).__name__)
    classes = federation.dataset.classes
    ok = isinstance(of, int) and not isinstance(of, bool) and 0 <= of < len(classes)
    require(ok, f"of in {name}", f"the number of a class, from 0 to {len(classes) - 1}", of)


@dataclass(frozen=True)
class Gap(Term):
    """How much likelier class `of` is, by the model, for rows of one group than for the others; both ways round.

    |mean of p over rows with x[column] > above − mean of p over the other rows|; a limit makes two constraints of it.
    `column` is a feature's name, and `above` then in the column's own units, or its number, and `above` as x has it.
    """

    column: int | str
    above: float = 0.5
    of: int = 1
    place: tuple[int, float] | None = field(default=None, init=False, repr=False, compare=False)  # of a name, in x
    signs = (1, -1)
    counted = 2

    def resolved(self, schema: Any) -> Gap:
        """The same that knows where its name is in x, and `above` as x is scaled; rounding alone is not above."""
        names = [column.name for column in schema.columns]
        require(is_number(self.above), "above of Gap", "a number", self.above)
        out = dataclasses.replace(self)
        if isinstance(self.column, str):
            if self.column not in names:
                raise unknown("column of Gap", self.column, names)
            j = names.index(self.column)
            scale, shift = schema.scale[j], schema.shift[j]
            above = (self.above - shift) / scale + 1e-9 * max(1.0, abs(self.above / scale))
            object.__setattr__(out, "place", (j, above))
        return out

    def check(self, model: Any, federation: Any) -> None:
        """Two groups, neither of them empty."""
        _check_class(model, federation, self.of, "Gap")
        (j, above), n = self.place or (self.column, self.above), federation.features
        ok = isinstance(j, int) and not isinstance(j, bool) and 0 <= j < n
        require(ok, "column of Gap", f"the name of a feature, or its number from 0 to {n - 1}", self.column)
        require(is_number(above), "above of Gap", "a number", self.above)
        if federation.rows_of != "everyone":
            return
        rows, schema = np.concatenate(federation.rows), federation.dataset.schema
        x = federation.dataset.x[rows][:, [j]]
        inside = int((x > above).sum())
        if inside in (0, len(rows)):
            own = (1.0, 0.0) if self.place is None else (schema.scale[j], schema.shift[j])
            least, most = (f"{round(float(v) * own[0] + own[1], 9):.6g}" for v in (x.min(), x.max()))
            raise DataError(
                f"rows with column {self.column!r} above {self.above} must be some but not all for Gap, got {inside} "
                f"of {len(rows)}: its values are from {least} to {most}. Choose another column or another `above`."
            )

    def _inside(self, batch: Batch) -> Any:
        j, above = self.place or (self.column, self.above)
        unit = jnp.arange(batch.x.shape[1]) == int(j)
        return batch.x @ unit.astype(batch.weight.dtype) > above  # a product, for x may be sparse

    def tally(self, batch: Batch) -> list[Any]:
        """Rows of the group, and of the others."""
        inside = jnp.sum(jnp.where(self._inside(batch), batch.weight, 0))
        return [inside, batch.rows - inside]

    def rows(self, model: Any, w: Vector, batch: Batch, shares: Sequence[Any]) -> Any:
        """p/share of the group, or −p/share of the others."""
        p = _probability(model, w, batch, self.of)
        return jnp.where(self._inside(batch), p / _some(shares[0]), -p / _some(shares[1]))


@dataclass(frozen=True)
class Misses(Term):
    """The false-negative rate with probabilities for decisions: the mean of 1 − p over the rows of class `of`."""

    of: int = 1
    counted = 1

    def check(self, model: Any, federation: Any) -> None:
        """Somebody must have rows of the class."""
        _check_class(model, federation, self.of, "Misses")
        if federation.rows_of != "everyone":
            return
        if not np.any(federation.dataset.y[np.concatenate(federation.rows)] == self.of):
            raise DataError(f"labels must include class {self.of} for Misses, got no such row. Choose another class.")

    def tally(self, batch: Batch) -> list[Any]:
        """Rows of the class."""
        return [jnp.sum(jnp.where(batch.y == self.of, batch.weight, 0))]

    def rows(self, model: Any, w: Vector, batch: Batch, shares: Sequence[Any]) -> Any:
        """(1 − p)/share of the class, 0 of the others."""
        return jnp.where(batch.y == self.of, (1 - _probability(model, w, batch, self.of)) / _some(shares[0]), 0)


@dataclass(frozen=True)
class PerRow(Term):
    """A smooth function of your own: f(w, batch) returns a number for every row of the batch."""

    function: Callable[[Vector, Batch], Any]
    title: str = "per_row"

    def check(self, model: Any, federation: Any) -> None:
        """It must be callable; its shape is checked by `Constrained`."""
        require(callable(self.function), "function of PerRow", "a function of (w, batch)", self.function)

    def rows(self, model: Any, w: Vector, batch: Batch, shares: Sequence[Any]) -> Any:
        """f(w, batch)."""
        return self.function(w, batch)


@dataclass(frozen=True)
class Norm2(Term):
    """‖ω‖², exact in the convex problem, or with exact=False approximated as the rest is."""

    exact: bool = True

    def check(self, model: Any, federation: Any) -> None:
        """A flag is a flag."""
        require_flags(self, "exact")


@dataclass(frozen=True)
class Norm1(Term):
    """‖ω‖₁; it is not smooth, hence always exact."""

    exact = True


@dataclass(frozen=True)
class ClientLoss(Term):
    """Every client's own mean loss: one constraint a client. ClientLoss() <= 0.3, or <= [0.3, 0.5, …]."""

    def check(self, model: Any, federation: Any) -> None:
        """The model must have a loss a row."""
        Loss().check(model, federation)


@dataclass(frozen=True)
class Function(Arithmetic):
    """Σ_k coefficient_k · term_k, and what it must not exceed where it is a constraint."""

    terms: tuple[tuple[float, Term], ...]
    limit: Any = None

    def _terms(self) -> tuple[tuple[float, Term], ...]:
        require(self.limit is None, "function", "one without a limit to calculate with", self.limit)
        return self.terms

    def __repr__(self) -> str:
        body = " + ".join(f"{c:g}·{term!r}" if c != 1 else repr(term) for c, term in self.terms)
        return body if self.limit is None else f"{body} <= {self.limit}"


def as_function(value: Any) -> Function:
    """A term as the function of that term alone."""
    require(isinstance(value, Arithmetic), "function", "made of terms such as Loss() and Norm2()", value)
    return value if isinstance(value, Function) else Function(value._terms())
