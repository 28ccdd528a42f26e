"""Problems on data split by features: what feature-split methods ask of them."""

from __future__ import annotations

import dataclasses
from typing import Any

from fedpact.core.contract import Batch
from fedpact.core.errors import InvalidArgument, require, require_flags, require_one_of, require_positive_int
from fedpact.core.vector import Vector
from fedpact.core.vertical import Layout, Split, exchange
from fedpact.problems.constraints import ClientLoss, Constrained, Gap


def as_vertical(problem: Any) -> Constrained:
    """The problem by its terms, refused where the closer could not compute one of them."""
    if not isinstance(problem, Constrained):
        l2 = getattr(problem, "l2", 0.0)
        hint = "Write Constrained(model, minimize=Loss() + 1e-3 * Norm2()) for the penalty."
        require(l2 == 0, f"l2 of {type(problem).__name__}", "0 for feature-split data", l2, hint=hint)
        problem = Constrained(problem)
    for one in (problem.minimize, *problem.subject_to):
        for _, term in one.terms:
            if isinstance(term, (Gap, ClientLoss)):
                why = "nobody who closes the loss sees that column" if isinstance(term, Gap) else "no client has rows"
                raise InvalidArgument(
                    f"functions must be of Loss, Misses, PerRow and norms for feature-split data, got {term!r}: {why}. "
                    "Leave it out, or split the data by rows."
                )
    return problem


def exchanged(
    layout: Layout, split: Split, task: Constrained, w: Vector, rows: Batch, tally: Any
) -> tuple[Any, Vector]:
    """Every function's mean over these records and its gradient, by the round's messages."""
    own = closing(split, task, split.first(w).shape[1])
    return exchange(layout, split, w, rows, lambda v, batch: own.means(v, batch, tally))


def closing(split: Split, task: Constrained, width: int) -> Constrained:
    """The problem that the closer has: Σh, of this width, for its features."""
    return dataclasses.replace(task, model=split.closing(width))


def check_exchange(settings: Any) -> None:
    """The constraints of the settings that feature-split methods share."""
    if settings.batch is not None:
        require_positive_int("batch", settings.batch, symbol="B", hint="Leave it out for all records.")
        hint = "From one record's gradients its features can be read off."
        require(settings.batch >= 2, "batch", "at least 2", settings.batch, symbol="B", hint=hint)
    require_one_of("collection", settings.collection, ("two-step", "one-step"))
    require_flags(settings, "reveal_rows")
    ok = settings.collection == "two-step" or settings.reveal_rows
    hint = "It sends every raw row of the batch to the server. To accept that, set reveal_rows=True."
    require(ok, "collection", '"two-step"', settings.collection, hint=hint)
    idle = settings.collection == "two-step" and settings.reveal_rows
    require(not idle, "reveal_rows", 'false with collection="two-step", which reveals none', settings.reveal_rows)


def check_records(batch: int | None, records: int) -> None:
    """A batch is a part of the records."""
    hint = "Use a smaller batch, or leave it out for all records."
    require(batch is None or batch <= records, "batch", f"at most the {records} records", batch, symbol="B", hint=hint)
