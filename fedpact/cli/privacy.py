"""What privacy costs, has cost, and whether it holds: `fedpact privacy plan`, `privacy ledger` and `privacy audit`."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from typing import Any

from fedpact.core.errors import InvalidArgument
from fedpact.core.files import json_text


def add_privacy(commands: Any, add_json: Callable[[argparse.ArgumentParser], None]) -> None:
    """`fedpact privacy …` on the command line."""
    text = "Plan what privacy will cost, read what a run has spent, or attack it: 'privacy plan', 'ledger', 'audit'."
    privacy = commands.add_parser("privacy", help=text, description=text)
    add_json(privacy)
    below = privacy.add_subparsers(title="commands", required=True, metavar="COMMAND", help="plan, ledger or audit")

    about = "Give an experiment file, or two of --noise, --rounds and --epsilon (at --delta) and get the third."
    sub = below.add_parser("plan", help=about, description=about)
    sub.set_defaults(command=plan)
    sub.add_argument("file", nargs="?", metavar="FILE", help="experiment file (TOML): what its private run would cost")
    sub.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", dest="changes", help="of the file: a changed setting"
    )
    sub.add_argument(
        "--mechanism", default="gaussian", help="gaussian, laplace, discrete_gaussian or discrete_laplace (%(default)s)"
    )
    sub.add_argument("--noise", type=float, metavar="Z", help="σ or b in units of the clipping bound C")
    sub.add_argument("--rounds", type=int, metavar="T", help="releases by one client")
    sub.add_argument("--epsilon", type=float, metavar="E", help="ε that they may cost together")
    sub.add_argument("--delta", type=float, default=1e-5, metavar="D", help="δ of (ε, δ) (default: %(default)s)")
    sub.add_argument("--sampling", default="full", help="full, poisson, fixed or truncated (default: %(default)s)")
    sub.add_argument("--rate", type=float, metavar="Q", help="share of the contributions in a release")
    sub.add_argument("--relation", default="add-remove", help="add-remove or replace-one (default: %(default)s)")
    sub.add_argument("--records", type=int, metavar="N", help="of truncated sampling: contributions to choose from")
    sub.add_argument("--cap", type=int, metavar="B", help="of truncated sampling: the most in a release")
    sub.add_argument("--steps", type=int, metavar="S", help="of discrete noise: its scale in lattice steps")
    sub.add_argument("--dimension", type=int, metavar="N", help="of discrete noise: numbers in a release")
    _json(sub)

    about = "Verify a run's ledger and print the ε it has spent, per client and the worst."
    sub = below.add_parser("ledger", help=about, description=about)
    sub.set_defaults(command=ledger)
    sub.add_argument("run", metavar="RUN", help="folder of the run, or its ledger.jsonl")
    sub.add_argument("--delta", type=float, default=1e-5, metavar="D", help="δ of (ε, δ) (default: %(default)s)")
    _json(sub)

    about = (
        "Attack private modes with canaries: a lower bound on ε beside the one claimed. Without FILE, every mode, the "
        "papers' own noises, and runs broken on purpose, which the attack must find."
    )
    sub = below.add_parser("audit", help="attack private modes with canaries", description=about)
    sub.set_defaults(command=audit)
    sub.add_argument("file", nargs="?", metavar="FILE", help="experiment file: attack its algorithm and [privacy]")
    sub.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", dest="changes", help="of the file: a changed setting"
    )
    sub.add_argument("--kind", action="append", metavar="KIND", help="modes, faults or papers (default: all)")
    sub.add_argument("--trials", type=int, default=200_000, metavar="N", help="runs in each world (%(default)s)")
    sub.add_argument("--confidence", type=float, default=0.95, metavar="P", help="of the bound (default: %(default)s)")
    _json(sub)


def _json(sub: argparse.ArgumentParser) -> None:
    kept = argparse.SUPPRESS  # a default would undo 'privacy --json plan'
    sub.add_argument("--json", action="store_true", default=kept, help="print machine-readable results")


def plan(options: argparse.Namespace) -> int:
    """`fedpact privacy plan …`."""
    from fedpact.privacy import Event, cost, noise_for, rounds_for

    if options.file is not None:
        return _plan_file(options)
    wanted = [name for name in ("epsilon", "noise", "rounds") if getattr(options, name) is None]
    if len(wanted) != 1:
        given = [f"--{name}" for name in ("epsilon", "noise", "rounds") if name not in wanted]
        raise InvalidArgument(
            f"plan must have two of --epsilon, --noise and --rounds, got {' '.join(given) or 'none of them'}. "
            "The one left out is the answer."
        )
    if options.rate is None and options.sampling in ("poisson", "fixed", "truncated"):
        raise InvalidArgument(
            f"rate (q) must be given where sampling is {options.sampling}, got none. For example: --rate 0.01"
        )
    names = ("mechanism", "sampling", "relation", "records", "cap", "steps", "dimension")
    kind = {name: getattr(options, name) for name in names} | {"rate": 1.0 if options.rate is None else options.rate}
    noise, rounds = options.noise, options.rounds
    if noise is None:
        noise = noise_for(options.epsilon, options.delta, rounds, **kind)
    event = Event(noise=noise, **kind)
    if rounds is None:
        rounds = rounds_for(options.epsilon, options.delta, event)
    found = cost(event, rounds, options.delta)
    if options.json:
        solved = {"solved_for": wanted[0], "epsilon": found.epsilon, "noise": noise, "rounds": rounds}
        more = {"delta": found.delta, "method": found.method, "sensitivity": event.sensitivity}
        print(json_text(solved | more | kind), end="")
        return 0
    value = {"epsilon": f"{found.epsilon:.6g}", "noise": f"{noise:.6g}", "rounds": rounds}[wanted[0]]
    print(f"{wanted[0]} {value}")
    sample = event.sampling + (f" at rate {event.rate:g}" if event.sampling != "full" else "")
    print(
        f"ε = {found.epsilon:.6g} at δ = {found.delta:g} ({found.method}): {rounds} releases of {event.mechanism} "
        f"noise {noise:.6g} C, sampling {sample}, {event.relation} (sensitivity {event.sensitivity:.6g} C)"
    )
    return 0


def _plan_file(options: argparse.Namespace) -> int:
    """`fedpact privacy plan FILE`: what the run would cost, before anything is released."""
    from fedpact.definition import private_plan
    from fedpact.experiment import build, read
    from fedpact.privacy import epsilon

    named = ("noise", "rounds", "epsilon", "rate", "records", "cap", "steps", "dimension")
    given = [f"--{name}" for name in named if getattr(options, name) is not None]
    if given:
        raise InvalidArgument(
            f"plan of a file must have its settings in the file, got {' '.join(given)}. Use --set privacy.epsilon=3"
        )
    experiment, _ = build(read(options.file, options.changes))
    made = private_plan(experiment)
    if made is None:
        raise InvalidArgument(
            f"experiment must have a table [privacy], got {options.file!r} without. Add one, or: "
            "--set privacy.clip=1 --set privacy.epsilon=3"
        )
    private, (unit, adversary) = made.private, made.claim
    costs = {
        kind: epsilon({kind[0]: kind[1]}, private.delta) for kind in made.counted(experiment.seed, experiment.rounds)
    }
    (event, times), found = max(costs.items(), key=lambda item: item[1].epsilon)
    values = {"epsilon": found.epsilon, "delta": private.delta, "method": found.method, "noise": made.noise}
    values |= {"clip": private.clip, "rounds": experiment.rounds, "releases": times, "way": made.theorem.way}
    values |= {"mechanism": event.mechanism, "sampling": event.sampling, "rate": event.rate, "relation": event.relation}
    values |= {"unit": unit, "adversary": adversary, "granted": private.epsilon, "about": made.theorem.about}
    if options.json:
        print(json_text(values), end="")
        return 0
    print(f"epsilon {found.epsilon:.6g}")
    sample = event.sampling + (f" at rate {event.rate:g}" if event.sampling != "full" else "")
    print(
        f"ε = {found.epsilon:.6g} at δ = {private.delta:g} ({found.method}) after {experiment.rounds} rounds, for the "
        f"worst client: {times} releases of {event.mechanism} noise {made.noise:.6g} C, C = {private.clip:g}, sampling "
        f"{sample}, {event.relation}. A {unit} is hidden from the {adversary}. "
        f"Way {made.theorem.way}: {made.theorem.about}"
    )
    if private.epsilon is not None and found.epsilon > private.epsilon:
        print(f"The run would end before its last round: ε = {private.epsilon:g} is granted.")
    return 0


def audit(options: argparse.Namespace) -> int:
    """`fedpact privacy audit`: 0 where every claim that should stand does, and no other."""
    from fedpact import audit as auditing

    if options.file is not None and options.kind:
        raise InvalidArgument("audit must be of a FILE or of a --kind, got both. Leave one out.")
    if options.file is not None:
        from fedpact.experiment import build, read

        experiment, _ = build(read(options.file, options.changes))
        cases = [("modes", auditing.case_of(experiment))]
    else:
        cases = auditing.cases(options.kind or tuple(auditing.KINDS))
    found = []
    for kind, case in cases:
        one = auditing.audit(case, options.trials, options.confidence)
        found.append((kind, one))
        if not options.json:
            verdict = "refuted" if one.broken else "stands"
            print(
                f"{kind:6}  claimed ε {one.claimed:<6.4g} at least {one.bound:<6.4g} {verdict:8} {case.name}",
                flush=True,
            )
    fine = auditing.as_expected(found)
    if options.json:
        rows = [
            {"kind": kind, "case": a.case.name, "claimed": a.claimed, "bound": a.bound, "broken": a.broken}
            | {"delta": a.delta, "confidence": a.confidence, "trials": a.trials}
            for kind, a in found
        ]
        print(json_text({"as_expected": fine, "cases": rows}), end="")
    else:
        print("every private mode stands, and every fault was found" if fine else "NOT as expected: see above")
    return 0 if fine else 1


def ledger(options: argparse.Namespace) -> int:
    """`fedpact privacy ledger RUN`."""
    from fedpact.privacy import Ledger, worst
    from fedpact.report import text_table

    with Ledger(options.run, read_only=True) as book:
        rows = book.epsilon(options.delta)
        head, torn = book.head, book.torn
    if options.json:
        print(
            json_text(
                {"ledger": str(book.path), "verified": True, "releases": head.lines, "hash": head.hash, "torn": torn}
                | {"delta": options.delta, "worst": worst(rows), "clients": rows}
            ),
            end="",
        )
        return 0
    print(f"{book.path}: {head.lines} releases, the chain is whole ({head.hash[:12]})")
    if torn:
        print(f"notice: {torn} bytes of a last line that was never released are ignored")
    if rows:
        print(text_table([row | {"epsilon": _shown(row["epsilon"])} for row in rows]))
    for row in worst(rows):
        print(
            f"worst client for hiding a {row['unit']} from the {row['adversary']} ({row['relation']}): "
            f"{row['client']}, ε = {_shown(row['epsilon'])} at δ = {options.delta:g}"
        )
    return 0


def _shown(value: float) -> str:
    return f"{value:.6g}" if math.isfinite(value) else "∞"
