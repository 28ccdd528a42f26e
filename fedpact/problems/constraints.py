"""Problems with constraints, as data: minimise one function of the model while others stay below their limits.

    min F_0(ω)   s.t.   F_m(ω) ≤ limit_m,        F_m(ω) = Σ_k coefficient_k · term_k(ω)

    Constrained(TwoLayer(), minimize=Norm2(), subject_to=[Loss() <= 0.13])
    Constrained(Logistic(), minimize=Loss() + 1e-3 * Norm2(), subject_to=[Gap(column=4) <= 0.05, Norm1() <= 20.0])

The terms are in terms.py, experiment files' form in plain_constraints.py, and the convex problem in surrogate.py.
"""

from __future__ import annotations

import dataclasses
import inspect
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedpact.core.contract import Batch, Oracle
from fedpact.core.errors import InvalidArgument, is_number, require
from fedpact.core.vector import Vector
from fedpact.core.vertical import Split
from fedpact.problems.plain_constraints import (
    plain_constraint,
    plain_model,
    plain_term,
    read_constraint,
    read_model,
    read_sum,
)
from fedpact.problems.surrogate import solve_surrogate
from fedpact.problems.terms import (
    ClientLoss,
    Function,
    Gap,
    Loss,
    Misses,
    Norm1,
    Norm2,
    PerRow,
    Term,
    as_function,
)

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
        object.__setattr__(self, "model", read_model(self.model))
        for name in ("l2", "beta"):  # penalties that a mean over rows leaves out
            value = getattr(self.model, name, 0.0)
            hint = f"Give the model {name} = 0, and write the penalty as a term, such as 1e-3 * Norm2()."
            ok = self.plain or value == 0
            require(ok, f"{name} of {type(self.model).__name__}", "0 inside Constrained", value, hint=hint)
        require(hasattr(self.model, "predict"), "model", "a problem such as fedpact.Logistic()", self.model)
        goal = as_function(read_sum("minimize", self.minimize))
        hint = "What must stay below a limit goes into subject_to."
        require(goal.limit is None, "minimize", "a function without a limit", goal, hint=hint)
        given = self.subject_to if isinstance(self.subject_to, (tuple, list)) else (self.subject_to,)
        object.__setattr__(self, "minimize", goal)
        object.__setattr__(self, "subject_to", tuple(as_function(read_constraint(one)) for one in given))
        require(not _caps(goal), "minimize", "free of ClientLoss, which is for constraints", goal)
        smooth = not any(isinstance(term, Gap) for _, term in goal.terms)
        require(smooth, "minimize", "free of Gap, an absolute value: it is for constraints", goal)
        for one in self.subject_to:
            require(one.limit is not None, "subject_to", "functions with limits, such as Loss() <= 0.1", one)
            limits = one.limit if _caps(one) and isinstance(one.limit, (tuple, list)) else [one.limit]
            for limit in limits:
                require(is_number(limit), f"limit of {one.terms}", "a number", limit, symbol="U")
            alone = not _caps(one) or (len(one.terms) == 1 and one.terms[0][0] == 1)
            require(alone, "subject_to", "ClientLoss alone in its function, without a factor", one)
            alone = len(one.terms) == 1 or not any(isinstance(term, Gap) for _, term in one.terms)
            require(alone, "subject_to", "Gap alone in its function", one, hint="It is an absolute value.")
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
            "model": plain_model(self.model),
            "minimize": [plain_term(c, term) for c, term in self.minimize.terms],
            "subject_to": [plain_constraint(one) for one in self.subject_to],
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
        for k, one in enumerate(self.subject_to):
            if _caps(one):
                continue  # every client has its own
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
        # One after the other: all at once is a product over clients and functions, which takes twice the time on a CPU.
        each = [pull(unit)[0] for unit in jnp.eye(functions, dtype=values.dtype)]
        return values, jax.tree.map(lambda *g: jnp.stack(g), *each)

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
            price = jnp.sum(jnp.where(mine, nu[shared : model.constraints], 0))
            slope = slope + (clients * price).astype(own.dtype) * gradient
            limited = jnp.concatenate([limited, over])
            out["worst_client"] = over
        if model.bound is not None:
            limited = jnp.append(limited, share * (w.norm2() - model.bound**2))
            slope = slope + w.map(lambda v: (share * 2 * nu[-1]).astype(v.dtype) * v)
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
        ok = not isinstance(caps, (tuple, list)) or len(caps) == m or federation.rows_of == "one node"
        require(ok, "limit of ClientLoss", f"a number or one a client ({m})", caps, symbol="U_i")
        for term in (t for part in self.parts for _, t in part.rows if isinstance(t, PerRow)):
            self._check_rows(term, federation)

    def _check_rows(self, term: PerRow, federation: Any) -> None:
        """On every row, where the run starts."""
        w = self.init(federation.features, jnp.float64, jax.random.key(0))
        hint = "A constraint must have a value where the run starts."
        for i in range(federation.clients):
            x, y = (jnp.asarray(a.toarray() if hasattr(a, "toarray") else a) for a in federation.client(i))
            batch = Batch(x, y, jnp.ones(len(y)), jnp.asarray(i))
            try:
                got = term.function(w, batch)
            except Exception as error:
                raise InvalidArgument(
                    f"function of PerRow must take (w, batch), got {type(error).__name__}: {error}. Try it on two rows."
                ) from error
            shape = getattr(got, "shape", None)
            require(
                shape == (len(y),), "function of PerRow", f"a function to {len(y)} numbers for {len(y)} rows", shape
            )
            bad = np.flatnonzero(~np.isfinite(np.asarray(got)))
            where = f"values of {term.title} at the start, client {i}"
            require(bad.size == 0, where, "finite", f"{np.asarray(got)[bad[:1]]} in row {bad[:1]}", hint=hint)
            if i == 0 and hasattr(federation, "layout"):
                self._check_split(term, w, batch._replace(x=x[:2], y=y[:2], weight=jnp.ones(2)))

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
        random = {"key": key} if "key" in inspect.signature(self.model.init).parameters else {}
        return self.model.init(features, dtype, **random)

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
        """Rows, and rows classified right; of columns that are elsewhere, what was told of them."""
        told = getattr(batch.x, "counts", None)
        return self.model.counts(w, batch) if told is None else told()

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
