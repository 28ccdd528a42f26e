"""Problems with constraints, as data: minimise one function of the model while others stay below their limits.

    min F_0(ω)   s.t.   F_m(ω) ≤ limit_m,        F_m(ω) = Σ_k coefficient_k · term_k(ω)

    Constrained(TwoLayer(), minimize=Norm2(), subject_to=[Loss() <= 0.13])
    Constrained(Logistic(), minimize=Loss() + 1e-3 * Norm2(), subject_to=[Gap(column=4) <= 0.05, Norm1() <= 20.0])

A term is a mean over all rows of all clients of something smooth (`Loss`, `Gap`, `Misses`, `PerRow`), a mean over one
client's (`ClientLoss`: one constraint a client), or a norm of the model (`Norm2`, `Norm1`), which SSCA keeps as it is
unless exact=False. Rates that are divided by a count over all clients (a group's rows, the positives) need that count:
clients send theirs when they join.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedpact.core.contract import Batch, Oracle
from fedpact.core.errors import DataError, InvalidArgument, is_number, require, require_flags, unknown
from fedpact.core.settings import called
from fedpact.core.vector import Vector
from fedpact.core.vertical import Split
from fedpact.problems.surrogate import solve_surrogate

__all__ = [
    "ClientLoss",
    "Constrained",
    "Function",
    "Gap",
    "Loss",
    "Misses",
    "Norm1",
    "Norm2",
    "PerRow",
    "solve_surrogate",
]


class Arithmetic:
    """Terms and functions are added, multiplied by numbers, and compared with a limit."""

    def _terms(self) -> tuple[tuple[float, Term], ...]:
        raise NotImplementedError

    def __add__(self, other: Any) -> Function:
        return Function((*self._terms(), *_function(other).terms))

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
        rows, schema = np.concatenate(federation.rows), federation.dataset.schema
        x = federation.dataset.x[rows][:, [j]]
        inside = int(np.sum(np.asarray(x > above)))
        if inside in (0, len(rows)):
            own = (1.0, 0.0) if self.place is None else (schema.scale[j], schema.shift[j])
            least, most = (f"{round(float(v) * own[0] + own[1], 9):.6g}" for v in (x.min(), x.max()))
            raise DataError(
                f"rows with column {self.column!r} above {self.above} must be some but not all for Gap, got {inside} "
                f"of {len(rows)}: its values are from {least} to {most}. Choose another column or another `above`."
            )

    def _inside(self, batch: Batch) -> Any:
        j, above = self.place or (self.column, self.above)
        unit = jnp.equal(jnp.arange(batch.x.shape[1]), j)
        return batch.x @ unit.astype(batch.weight.dtype) > above  # a product, for x may be sparse

    def tally(self, batch: Batch) -> list[Any]:
        """Rows of the group, and of the others."""
        inside = jnp.sum(jnp.where(self._inside(batch), batch.weight, 0))
        return [inside, batch.rows - inside]

    def rows(self, model: Any, w: Vector, batch: Batch, shares: Sequence[Any]) -> Any:
        """p/share of the group, or −p/share of the others."""
        p = _probability(model, w, batch, self.of)
        return jnp.where(self._inside(batch), p / shares[0], -p / shares[1])


@dataclass(frozen=True)
class Misses(Term):
    """The false-negative rate with probabilities for decisions: the mean of 1 − p over the rows of class `of`."""

    of: int = 1
    counted = 1

    def check(self, model: Any, federation: Any) -> None:
        """Somebody must have rows of the class."""
        _check_class(model, federation, self.of, "Misses")
        if not np.any(federation.dataset.y[np.concatenate(federation.rows)] == self.of):
            raise DataError(f"labels must include class {self.of} for Misses, got no such row. Choose another class.")

    def tally(self, batch: Batch) -> list[Any]:
        """Rows of the class."""
        return [jnp.sum(jnp.where(batch.y == self.of, batch.weight, 0))]

    def rows(self, model: Any, w: Vector, batch: Batch, shares: Sequence[Any]) -> Any:
        """(1 − p)/share of the class, 0 of the others."""
        return jnp.where(batch.y == self.of, (1 - _probability(model, w, batch, self.of)) / shares[0], 0)


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


def _function(value: Any) -> Function:
    require(isinstance(value, Arithmetic), "function", "made of terms such as Loss() and Norm2()", value)
    return value if isinstance(value, Function) else Function(value._terms())


class Part(NamedTuple):
    """A function taken apart: means over rows and ‖ω‖² to be approximated, the norms kept exact, limit and name."""

    rows: tuple[tuple[float, Term], ...]
    square: float
    norm2: float
    norm1: float
    limit: float
    title: str

    @property
    def estimated(self) -> bool:
        """Whether there is anything to approximate."""
        return bool(self.rows) or self.square != 0


@dataclass(frozen=True)
class Constrained:
    """min `minimize` subject to every function of `subject_to`, for a model such as TwoLayer() or Logistic()."""

    model: Any
    minimize: Any = field(default_factory=Loss)
    subject_to: Any = ()
    plain = False  # whether it is a problem without terms, asked through its oracle

    def __post_init__(self) -> None:
        object.__setattr__(self, "model", _read_model(self.model))
        require(hasattr(self.model, "predict"), "model", "a problem such as fedpact.Logistic()", self.model)
        goal = _function(_read_sum("minimize", self.minimize))
        hint = "What must stay below a limit goes into subject_to."
        require(goal.limit is None, "minimize", "a function without a limit", goal, hint=hint)
        given = self.subject_to if isinstance(self.subject_to, (tuple, list)) else (self.subject_to,)
        object.__setattr__(self, "minimize", goal)
        object.__setattr__(self, "subject_to", tuple(_function(_read_constraint(one)) for one in given))
        require(not _caps(goal), "minimize", "free of ClientLoss, which is for constraints", goal)
        for one in self.subject_to:
            require(one.limit is not None, "subject_to", "functions with limits, such as Loss() <= 0.1", one)
            limits = one.limit if _caps(one) and isinstance(one.limit, (tuple, list)) else [one.limit]
            for limit in limits:
                require(is_number(limit), f"limit of {one.terms}", "a number", limit, symbol="U")
            alone = not _caps(one) or len(one.terms) == 1
            require(alone, "subject_to", "ClientLoss alone in its function", one)
        require(sum(map(_caps, self.subject_to)) <= 1, "subject_to", "at most one ClientLoss", self.subject_to)
        of_data = any(not isinstance(term, (Norm1, Norm2)) for one in (goal, *self.subject_to) for _, term in one.terms)
        require(of_data, "minimize and subject_to", "of the data, with a term such as Loss() in one of them", goal)
        for c, term in (pair for one in (goal, *self.subject_to) for pair in one.terms):
            convex = not getattr(term, "exact", False) or c >= 0
            require(convex, f"coefficient of {term}", "at least 0 where it is kept exact", c)

    # As plain data, and on a dataset

    def to_dict(self) -> dict[str, Any]:
        """What experiment files, configurations and digests hold; Constrained(**it) is the same problem.

        A function of one's own (`PerRow`) is known by its name, and cannot be read back.
        """
        return {
            "model": _plain_model(self.model),
            "minimize": [_plain_term(c, term) for c, term in self.minimize.terms],
            "subject_to": [_plain_constraint(one) for one in self.subject_to],
        }

    def resolved(self, federation: Any) -> Constrained:
        """The same that knows where columns given by name are."""
        schema = federation.dataset.schema
        placed = lambda term: term.resolved(schema) if isinstance(term, Gap) else term
        sums = [Function(tuple((c, placed(t)) for c, t in f.terms), f.limit) for f in (self.minimize, *self.subject_to)]
        return dataclasses.replace(self, minimize=sums[0], subject_to=tuple(sums[1:]))

    # The functions, taken apart

    @cached_property
    def parts(self) -> tuple[Part, ...]:
        """F_0 and the constraints that all clients share; |·| ≤ limit counts twice."""
        out = [_part(self.minimize, 1, "objective")]
        for k, one in enumerate(f for f in self.subject_to if not _caps(f)):
            signs = one.terms[0][1].signs if len(one.terms) == 1 else (1,)
            for sign in signs:
                title = f"constraint_{k + 1}" + ({1: "_above", -1: "_below"}[sign] if len(signs) > 1 else "")
                out.append(_part(one, sign, title))
        return tuple(out)

    @property
    def caps(self) -> Any:
        """The limits of clients' own losses: None, a number, or one a client."""
        found = [one for one in self.subject_to if _caps(one)]
        return found[0].limit if found else None

    @cached_property
    def terms(self) -> tuple[Term, ...]:
        """The smooth terms that need counts over all clients."""
        return tuple(term for part in self.parts for _, term in part.rows if term.counted)

    # What SSCA asks for

    def tally(self, batch: Batch) -> Any:
        """d_i, and this client's part of every count."""
        return jnp.stack([batch.rows, *(c for term in self.terms for c in term.tally(batch))]).astype(jnp.int64)

    def means(self, w: Vector, batch: Batch, counts: Any) -> Any:
        """The means over rows in every F_m that is approximated, on this batch."""
        shares = (counts[1:] / counts[0]).astype(batch.weight.dtype)
        place = iter(np.cumsum([0, *(term.counted for term in self.terms)])[:-1].tolist())
        out = []
        for part in (part for part in self.parts if part.estimated):
            value = jnp.zeros((), batch.weight.dtype)
            for c, term in part.rows:
                mine = slice(first := next(place), first + term.counted) if term.counted else slice(0, 0)
                rows = term.rows(self.model, w, batch, list(shares[mine]) if term.counted else [])
                value = value + c * jnp.sum(batch.weight * rows) / batch.rows
            out.append(value)
        return jnp.stack(out)

    def values_and_gradients(self, grad: Any, w: Vector, batch: Batch, counts: Any) -> tuple[Any, Vector]:
        """Those means, and their gradients along a leading axis."""
        functions = sum(part.estimated for part in self.parts)
        if not any(part.rows for part in self.parts):
            return jnp.zeros(functions, batch.weight.dtype), w.map(lambda v: jnp.zeros((functions, *v.shape), v.dtype))
        if self.plain:
            value, gradient = grad.value_and_gradient(w, batch)
            return value[None], gradient.map(lambda g: g[None])
        values, pull = jax.vjp(lambda v: self.means(v, batch, counts), w)
        return values, jax.vmap(pull)(jnp.eye(functions, dtype=values.dtype))[0]

    def own_loss(self, w: Vector, batch: Batch) -> Any:
        """This client's mean loss."""
        return jnp.sum(batch.weight * self.model.losses(w, batch)) / batch.rows

    def measure(self, model: Any, server: Any, batch: Batch, clients: int) -> dict[str, Any]:
        """F_0, its gradient, every constraint and the KKT residual, from a server with w, multipliers and tally.

        A client's part weighs N_i m/N, so that the mean over clients is the mean over rows.
        """
        w = server.w
        means, gradients = self.values_and_gradients(Oracle(self), w, batch, server.tally)
        return self.read(model, server, batch, clients, means, gradients)

    def read(
        self, model: Any, server: Any, batch: Batch, clients: int, means: Any, gradients: Vector
    ) -> dict[str, Any]:
        """The same from the means and their gradients."""
        w = server.w
        share = batch.rows * clients / server.tally[0]
        values = model.values(means, w)
        one = [1.0] + [0.0] * (len(values) - 1)
        goal, norm1 = model.weighted(one, gradients, w)
        out = {"objective": share * values[0], "gradient": share * (goal + w.map(lambda v: norm1 * jnp.sign(v)))}
        out |= self.counts(w, batch)
        if self._normed:
            out["loss"] = share * means[0]  # what is minimised without the norms
        if not model.constraints:
            return out
        out |= {part.title: share * v for part, v in zip(self.parts[1:], values[1:], strict=True)}
        nu, shared = server.multipliers, len(values) - 1
        slope, l1 = model.weighted([1.0, *nu[:shared]], gradients, w)
        limited = jnp.stack([share * jnp.asarray(v, jnp.float64) for v in values[1:]] or [jnp.zeros(())])[:shared]
        slope = share * slope
        if model.caps is not None:
            own, gradient = jax.value_and_grad(self.own_loss)(w, batch)
            mine = jnp.arange(clients) == batch.client
            over = jnp.where(mine, clients * (own - jnp.asarray(model.caps)), 0.0)
            slope = slope + (clients * jnp.sum(jnp.where(mine, nu[shared:], 0))).astype(own.dtype) * gradient
            limited = jnp.concatenate([limited, over])
            out["worst_client"] = over
        out["kkt"] = {"slope": slope, "w": share * w, "l1": share * l1, "values": limited, "nu": share * nu}
        return out

    # A problem like any other: what is minimised, without the constraints

    def check(self, federation: Any) -> None:
        """The model's data, and every term's."""
        self.model.check(federation)
        for one in (self.minimize, *self.subject_to):
            for _, term in one.terms:
                term.check(self.model, federation)
        caps = self.caps
        m = federation.clients
        ok = not isinstance(caps, (tuple, list)) or len(caps) == m
        require(ok, "limit of ClientLoss", f"a number or one a client ({m})", caps, symbol="U_i")
        for term in (t for part in self.parts for _, t in part.rows if isinstance(t, PerRow)):
            self._check_rows(term, federation)

    def _check_rows(self, term: PerRow, federation: Any) -> None:
        x, y = federation.client(0)
        x, y = (jnp.asarray(a[:2].toarray() if hasattr(a, "toarray") else a[:2]) for a in (x, y))
        w = self.init(federation.features, jnp.float64, jax.random.key(0))
        batch = Batch(x, y, jnp.ones(len(y)), jnp.asarray(0))
        try:
            got = term.function(w, batch)
        except Exception as error:
            raise InvalidArgument(
                f"function of PerRow must take (w, batch), got {type(error).__name__}: {error}. Try it on two rows."
            ) from error
        shape = getattr(got, "shape", None)
        require(shape == (len(y),), "function of PerRow", f"a function to {len(y)} numbers for {len(y)} rows", shape)
        values = np.asarray(got)
        hint = "A constraint must have a value where the run starts."
        require(np.isfinite(values).all(), f"values of {term.title} at the start", "finite", values, hint=hint)
        if hasattr(federation, "layout"):
            self._check_split(term, w, batch)

    def _check_split(self, term: PerRow, w: Vector, batch: Batch) -> None:
        """Who closes the loss has x @ first for features and the unit matrix for `first`: f must not see that."""
        split = Split.of(self.model)
        w = w.map(lambda a: jax.random.normal(jax.random.key(0), a.shape, a.dtype))
        first = split.first(w)
        sums = split.inputs(batch.x, first.dtype) @ first
        try:
            closed = term.function(split.put(w, jnp.eye(first.shape[1])), batch._replace(x=sums))
            same = np.allclose(closed, term.function(w, batch))
        except Exception:
            same = False
        name = f"function of {term.title}"
        hint = f"Use them through batch.x @ w.tree{''.join(f'[{k!r}]' for k in split.path)} alone."
        require(same, name, "one of the features' sums for feature-split data", term.function, hint=hint)

    @property
    def classifies(self) -> bool:
        """As the model does."""
        return self.model.classifies

    def __getattr__(self, name: str) -> Any:
        if name in ("multiclass", "classes", "shape"):  # only where the model has them
            return getattr(self.model, name)
        raise AttributeError(name)

    def init(self, features: int, dtype: Any, key: Any = None) -> Vector:
        """The model's start."""
        return self.model.init(features, dtype, key)

    def value(self, w: Vector, batch: Batch) -> Any:
        """F_0 on this client's rows."""
        own, part = Constrained(self.model, self.minimize), self.parts[0]
        data = own.means(w, batch, own.tally(batch))[0] if part.rows else 0.0
        return data + (part.norm2 + part.square) * w.norm2() + (part.norm1 * w.norm1() if part.norm1 else 0.0)

    def value_and_gradient(self, w: Vector, batch: Batch) -> tuple[Any, Vector]:
        """F_0 and its gradient on this client's rows."""
        return jax.value_and_grad(self.value)(w, batch)

    def gradient(self, w: Vector, batch: Batch) -> Vector:
        """∇F_0 on this client's rows."""
        return jax.grad(self.value)(w, batch)

    def counts(self, w: Vector, batch: Batch) -> dict[str, Any]:
        """Rows, and rows classified right."""
        return self.model.counts(w, batch)

    @property
    def _normed(self) -> bool:
        goal = self.parts[0]
        return bool(goal.rows) and any((goal.norm2, goal.square, goal.norm1))

    def more(self, w: Vector, batch: Batch) -> dict[str, Any]:
        """For methods that know no terms: what is minimised without the norms."""
        own = Constrained(self.model, self.minimize)
        return {"loss": own.means(w, batch, own.tally(batch))[0]} if self._normed else {}

    def test_value(self, w: Vector, batch: Batch) -> Any:
        """What is shown of rows nobody trains on: the model's loss."""
        return self.own_loss(w, batch)

    def predict(self, w: Vector, x: Any) -> Any:
        """The model's predictions."""
        return self.model.predict(w, x)


def _caps(function: Function) -> bool:
    return any(isinstance(term, ClientLoss) for _, term in function.terms)


def _part(function: Function, sign: int, title: str) -> Part:
    total = lambda kind, exact: float(sum(c for c, t in function.terms if isinstance(t, kind) and t.exact == exact))
    rows = tuple((sign * c, t) for c, t in function.terms if not isinstance(t, (Norm1, Norm2)))
    norms = (sign * total(Norm2, False), total(Norm2, True), total(Norm1, True))
    return Part(rows, *norms, float(function.limit or 0.0), title)


@dataclass(frozen=True)
class _Whole(Term):
    """A problem's own objective, its penalties included."""

    problem: Any


@dataclass(frozen=True)
class _Plain(Constrained):
    """A problem without terms or constraints of ours."""

    plain = True

    def value(self, w: Vector, batch: Batch) -> Any:
        """f_i."""
        return self.model.value_and_gradient(w, batch)[0]

    def value_and_gradient(self, w: Vector, batch: Batch) -> tuple[Any, Vector]:
        """f_i and ∇f_i."""
        return self.model.value_and_gradient(w, batch)


def as_constrained(problem: Any) -> Constrained:
    """Any problem as one with terms: its own objective, and no constraint."""
    return problem if isinstance(problem, Constrained) else _Plain(problem, _Whole(problem))


# Problems as plain data

#: The terms that an experiment file may name.
TERMS: dict[str, type[Term]] = {
    "loss": Loss,
    "gap": Gap,
    "misses": Misses,
    "norm1": Norm1,
    "norm2": Norm2,
    "client_loss": ClientLoss,
}


def _read_model(given: Any) -> Any:
    """A model from its name, or from { name = "two_layer", hidden = 128 }."""
    if not isinstance(given, (str, Mapping)):
        return given
    from fedpact.problems import PROBLEMS  # which holds this module's problem

    options = {"name": given} if isinstance(given, str) else dict(given)
    known = [name for name in PROBLEMS if name != "constrained"]
    name = options.pop("name", None)
    if not isinstance(name, str) or name not in known:
        raise unknown("name of the model", name, known)
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


def _read_sum(where: str, given: Any) -> Any:
    """A sum of terms from their list, or from one; anything else is returned."""
    if not isinstance(given, (list, tuple, Mapping)):
        return given
    listed = [given] if isinstance(given, Mapping) else given
    require(listed, where, "at least one term", given)
    return Function(tuple(pair for one in listed for pair in _read_term(where, one).terms))


def _read_constraint(given: Any) -> Any:
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
    return _function(_read_sum("terms", given["terms"])) <= given["at_most"]


def _plain_model(model: Any) -> dict[str, Any]:
    from fedpact.problems import PROBLEMS

    name = next((name for name, cls in PROBLEMS.items() if isinstance(model, cls)), type(model).__name__)
    return {"name": name, **(model.to_dict() if hasattr(model, "to_dict") else dataclasses.asdict(model))}


def _plain_term(times: float, term: Term) -> dict[str, Any]:
    name = next((name for name, cls in TERMS.items() if type(term) is cls), type(term).__name__)
    out: dict[str, Any] = {"term": name} | ({"times": float(times)} if times != 1 else {})
    if not isinstance(term, PerRow):
        return out | {f.name: getattr(term, f.name) for f in dataclasses.fields(term) if f.init}  # type: ignore[arg-type]
    f = term.function
    known_by = f"{getattr(f, '__module__', '')}.{getattr(f, '__qualname__', repr(f))}"
    return out | {"term": "per_row", "title": term.title, "function": known_by}


def _plain_constraint(function: Function) -> dict[str, Any]:
    terms = [_plain_term(c, term) for c, term in function.terms]
    limit = function.limit
    most = [float(v) for v in limit] if isinstance(limit, (list, tuple)) else float(limit)
    return {**terms[0], "at_most": most} if len(terms) == 1 else {"terms": terms, "at_most": most}
