"""What a report says of every column: which plots there are, in which order, with what heading and detail."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from fedpact.report.tables import format_value
from fedpact.report.view import RunView, columns


class Plot(NamedTuple):
    """y against x with its heading and detail; where names have two meanings, of runs with or without some column."""

    y: str
    heading: str
    detail: str = ""
    x: str = "round"
    gap: bool = False  # to the minimum
    level: float | None = None  # a line that values are measured from
    beside: str = ""
    without: str = ""


#: On what rows the columns of tests are.
TESTED = "On the dataset's own test set; of a federation, on the rows that its nodes hold out."

_FIRST = (
    Plot("objective", "Objective against rounds"),
    Plot("gradient", "Squared norm of the mean gradient against rounds", "0 at a stationary point."),
    Plot(
        "kkt",
        "KKT residual against rounds",
        "Slope of the Lagrangian, broken limits, multipliers without need: 0 at a solution.",
    ),
)
_GAPS = (
    Plot("objective", "Gap to the minimum against bytes sent", "Both directions.", "bytes", gap=True),
    Plot(
        "objective", "Gap to the minimum against gradient evaluations", "All clients together.", "gradients", gap=True
    ),
)
_THEN = (
    Plot(
        "worst_client",
        "Largest excess of a client's own loss over its limit",
        "At or below the line every client's limit is kept.",
        level=0.0,
    ),
    Plot("slack", "Slack of the approximate problems", "Sum over the constraints; 0 where they can all be kept."),
    Plot("accuracy", "Training accuracy against rounds", "Held-out scores, if any, are below."),
    Plot("test_accuracy", "Test accuracy against rounds", TESTED),
    Plot("test_accuracy", "Test accuracy against bytes sent", "Both directions.", "bytes"),
    Plot("test_loss", "Test loss against rounds", TESTED),
    Plot("privacy", "ε spent against rounds", "By the worst client, as tracked round by round."),
    Plot("objective", "Objective against ε spent", "By the worst client.", "privacy"),
    Plot("accuracy", "Training accuracy against ε spent", "By the worst client.", "privacy"),
    Plot("test_accuracy", "Test accuracy against ε spent", "By the worst client.", "privacy"),
    Plot("train_loss", "Training loss of the round's clients", "Mean over the round's batches, or the last epoch's."),
    Plot("snr", "Signal-to-noise ratio of the uploads against rounds"),
    Plot(
        "penalty",
        "Penalised objective against rounds",
        "At the clients' own models; noise and distance from w count.",
        without="slack",
    ),
    Plot("lagrangian", "Augmented Lagrangian against rounds", "At the clients' own models; ADMM lowers it."),
    Plot("lyapunov", "Lyapunov value against rounds", "Falls in every round where the theorems apply."),
    Plot("primal_residual", "Primal residual against rounds", "Distance of the clients' models from w."),
    Plot("dual_residual", "Dual residual against rounds", "How far w moved, in units of the multipliers."),
    Plot("dual_sum", "Norm of the sum of the multipliers against rounds", "0 at a solution."),
    Plot("stationarity", "Residual of the clients' subproblems against rounds", "0 where all are solved."),
    Plot("violations", "Local steps solved too coarsely", "Share that misses (3.5); the theorems need 0."),
)
# Columns that few readers look for
_LAST = (
    Plot("descent", "Descent function of FedEPM against rounds", "Without noise it falls from round to round."),
    Plot("epsilon", "Accuracy asked of the clients' solves", "The largest ε_i; it shrinks. It is no privacy budget."),
    Plot("refused", "Rows that count as zero", "Their gradients are not finite, or too large to be clipped."),
    Plot("noise_scale", "Scale of the noise on the uploads", "The largest of all clients' last uploads."),
    Plot("v", "Optimality gap V of FedADMM against rounds", "(7) of the paper; 0 at a stationary point."),
    Plot("p", "Optimality gap P of FedPDM against rounds", "(21) of the paper; 0 at a stationary point."),
    Plot("regulariser", "Regulariser h at the model", "It is part of the objective."),
    Plot("sparsity", "Share of parameters that are 0"),
    Plot("steps", "Local steps of the round's clients", "Mean."),
    Plot("epochs", "Epochs of the round's clients", "Mean; drawn from 1..E where the work varies."),
    Plot("eta", "Server's step η"),
    Plot("rho", "Penalty ρ", without="gamma"),
    Plot("rho", "Weight ρ of the newest batch", beside="gamma"),
    Plot("gamma", "Step γ towards the approximation's minimiser"),
    Plot("penalty", "Price of slack c", "Raised while a slack is left, where `growth` is above 1.", beside="slack"),
    Plot("rate", "Learning rate"),
    Plot("loss", "Loss against rounds", "What is minimised, without its norms."),
    Plot("control", "Norm of the server's control variate"),
    Plot("accuracy_met", "Residual of the clients' subproblems", "The largest ‖∇L_i‖², of (6)."),
    Plot("spread", "Distance of the uploads from the model", "Mean of the squares; 0 where all clients agree."),
)
_BOOKKEEPING = ("round", "participants", "bytes", "bytes_up", "bytes_down", "gradients", "local_seconds", "seconds")


def first_plots(runs: Sequence[RunView]) -> list[Plot]:
    """What readers look for. A gap to the lowest objective says nothing where limits may be broken on the way."""
    names = _names(runs)
    limited = "kkt" in names
    objective, gradient, kkt = _FIRST
    if limited:
        gradient = gradient._replace(detail="Of the objective alone: where a limit binds it does not go to 0.")
    return [objective, gradient, kkt, *_limits(runs, names), *(() if limited else _GAPS), *_THEN]


def other_plots(runs: Sequence[RunView]) -> list[Plot]:
    """The rest, and the columns that only algorithms know."""
    said = [*first_plots(runs), *_GAPS, *_LAST]
    known = {one.y for one in said} | set(_BOOKKEEPING)
    order = [name for name in _names(runs) if name not in known]
    return [*_LAST, *(Plot(name, f"{capital(name)} against rounds") for name in order)]


def capital(name: str) -> str:
    """A column's name as words."""
    return name[:1].upper() + name[1:].replace("_", " ")


def _names(runs: Sequence[RunView]) -> list[str]:
    return list(dict.fromkeys(name for run in runs for name in columns(run)))


# Constraints


def _limits(runs: Sequence[RunView], names: Sequence[str]) -> Iterator[Plot]:
    """A plot of every constraint and one of its multiplier."""
    for name in names:
        found = re.fullmatch(r"(multiplier_)?constraint_(\d+)(_above|_below)?", name)
        if name == "multiplier_clients":
            yield Plot(name, "Largest multiplier of the clients' limits", "0 where no client's limit binds.")
        if not found:
            continue
        priced, number, side = found.groups()
        which = f"constraint {number}" + {"_above": ", from above", "_below": ", from below", None: ""}[side]
        said = _said(runs, name, int(number))
        if priced:
            yield Plot(
                name, f"Multiplier of {which}", f"{said}The objective falls by so much a unit that the limit is raised."
            )
        else:
            yield Plot(name, f"{capital(which)}: value minus limit", f"{said}Kept at or below the line.", level=0.0)


def _said(runs: Sequence[RunView], name: str, number: int) -> str:
    """The constraint in words, from the configuration, where the runs that have it agree."""
    found = {_constraint(run.config, number) for run in runs if name in columns(run)}
    text = found.pop() if len(found) == 1 else ""
    return f"{text}. " if text else ""


def _constraint(config: Mapping[str, Any], number: int) -> str:
    problem = config.get("problem", {})
    given = problem.get("subject_to", ())
    if number > len(given):
        return ""
    one = given[number - 1]
    terms = " + ".join(_term(term) for term in one.get("terms", [one]))
    return f"{terms} ≤ {format_value(one['at_most'])}"


def _term(given: Mapping[str, Any]) -> str:
    times = given.get("times", 1)
    options = [
        f"{key} {format_value(value)}" for key, value in given.items() if key not in ("term", "times", "at_most")
    ]
    text = str(given["term"]).replace("_", " ") + (f" ({', '.join(options)})" if options else "")
    return text if times == 1 else f"{format_value(times)} · {text}"
