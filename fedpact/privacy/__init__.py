"""Privacy that holds: noise, what it costs, a ledger of every release, and a budget that stops in time.

events       what was released, as data: mechanism, noise in units of C, sampler, neighbouring relation
accounting   the (ε, δ) of a list of events; `calibration` solves for noise or rounds
mechanisms   noise from a generator or the system's secure source; `discrete` draws it exactly on a lattice
ledger       every release on the disk before it is sent; `budget` gates the next one
private      how a run is private; `guard` clips and noises inside the round, `account` keeps its books
"""

from fedpact.privacy.accounting import Cost, epsilon, track
from fedpact.privacy.budget import Budget
from fedpact.privacy.calibration import cost, noise_for, rounds_for
from fedpact.privacy.events import ADVERSARIES, RELATIONS, SAMPLINGS, UNITS, Event
from fedpact.privacy.ledger import EVERYONE, Claim, Head, Ledger, Release, worst
from fedpact.privacy.mechanisms import MECHANISMS, PLACES, Secure, Simulated, noise, release
from fedpact.privacy.private import Private

__all__ = [
    "ADVERSARIES",
    "EVERYONE",
    "MECHANISMS",
    "PLACES",
    "RELATIONS",
    "SAMPLINGS",
    "UNITS",
    "Budget",
    "Claim",
    "Cost",
    "Event",
    "Head",
    "Ledger",
    "Private",
    "Release",
    "Secure",
    "Simulated",
    "cost",
    "epsilon",
    "noise",
    "noise_for",
    "release",
    "rounds_for",
    "track",
    "worst",
]
