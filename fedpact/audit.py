"""An empirical lower bound on ε: how well an adversary who knows everything else tells two neighbours apart.

The run's own round (algorithm, guard, keys) is repeated with many seeds in two worlds that differ in one record, or in
all a client holds. The adversary sees what leaves the client. She knows both worlds and what the client would send in
either without noise, u⁰ and u¹, and scores a transcript by

    Gaussian   Σ_t ⟨u_t − (u⁰_t + u¹_t)/2, u¹_t − u⁰_t⟩/s_t²       Laplace   Σ_t (‖u_t − u⁰_t‖₁ − ‖u_t − u¹_t‖₁)/s_t

which is the likelihood ratio where releases are not sampled. On half of the transcripts she picks a threshold, on the
other half she counts. From (ε, δ)-privacy follows P¹(score > h) ≤ e^ε P⁰(score > h) + δ, and the same with the worlds
exchanged, so that

    ε ≥ ln((lower bound on one − δ)/(upper bound on the other))        Clopper–Pearson, each at half of 1 − confidence

The canary is a least-squares row with one feature and a target of ±10⁶, whose clipped gradient is ±C always. What is
known of the client's state is what its messages give away: in ways `once` and `convex` all of it by construction, in
way `steps` because (w_i, y_i), c_i and (x_i, λ_i) follow from the uploads.

`CASES` are the private modes, the papers' own noises, and runs that are broken on purpose: an audit that does not
find those is worth nothing.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.flatten_util import ravel_pytree

from fedpact.algorithms import FedADMM, FedAvg, FedEPM, FedPDM, FedProx, Scaffold
from fedpact.core.contract import Batch, Cohort, Oracle
from fedpact.core.errors import InvalidArgument, is_number, require, require_one_of, require_positive_int
from fedpact.core.keys import JOIN_ROUND, SERVER, Purpose, client_key
from fedpact.core.loop import Loop
from fedpact.core.settings import Settings
from fedpact.core.stop import Never
from fedpact.core.vector import Vector
from fedpact.data import Federation
from fedpact.definition import Experiment, private_plan
from fedpact.engines import LocalEngine
from fedpact.privacy import epsilon as cost
from fedpact.privacy.guard import Guard, Noise, Noisy, clip_whole
from fedpact.privacy.private import Plan, Private
from fedpact.problems import LeastSquares
from fedpact.problems.base import curvature

PROBLEM = LeastSquares()
#: Feature and target of the canary.
FAR = 1e6
FAULTS = {
    "": "",
    "halved": "half the noise that is claimed",
    "unclipped": "gradients or uploads are not clipped",
    "remembered": "the client keeps its state as it was before the noise",
    "unsampled": "samples are claimed, and all rows are taken",
}
#: Transcripts drawn at once.
AT_ONCE = 20_000


@dataclass(frozen=True)
class Case:
    """What is audited: an algorithm with a private mode, or with its paper's noise; perhaps broken on purpose."""

    name: str
    algorithm: Settings
    privacy: Private | None = None  # None: the paper's own noise
    rounds: int = 1
    rows: int = 4
    fault: str = ""

    def __post_init__(self) -> None:
        require_one_of("fault", self.fault, FAULTS)
        require_positive_int("rounds", self.rounds)
        require_positive_int("rows", self.rows)
        noisy = self.privacy is not None or getattr(self.algorithm, "epsilon", None) is not None
        hint = "Give privacy, or the algorithm's own epsilon."
        require(noisy, "case", "one with noise", self.name, hint=hint)


class Audited(NamedTuple):
    """A case with the ε that is claimed and the one that the attack proves is not below."""

    case: Case
    claimed: float
    bound: float
    delta: float
    confidence: float
    trials: int

    @property
    def broken(self) -> bool:
        """Whether the claim is refuted."""
        return self.bound > self.claimed


def worlds(case: Case) -> tuple[Federation, Federation]:
    """Two neighbouring data sets of one client."""
    x, y = np.zeros((case.rows, 2)), np.zeros(case.rows)
    other_x, other_y = x.copy(), y.copy()
    plan = _plan(case, Federation.from_arrays([(x, y)]))
    if plan is None:  # a paper's noise follows the data: a client with next to no gradient, and one with some
        x[0, 0], y[0], other_x[0, 0], other_y[0] = 1, 1, 1, 1e-2
    else:
        who = slice(None) if plan.claim.unit == "client" else 0
        x[who, 0], y[who] = 1, FAR
        if plan.relation == "replace-one":
            other_x[who, 0], other_y[who] = 1, -FAR
    return Federation.from_arrays([(x, y)]), Federation.from_arrays([(other_x, other_y)])


def _plan(case: Case, federation: Federation) -> Plan | None:
    return private_plan(_experiment(case, federation)) if case.privacy is not None else None


def _experiment(case: Case, federation: Federation) -> Experiment:
    return Experiment(case.algorithm, PROBLEM, federation, rounds=case.rounds, privacy=case.privacy)


class _Broken(Guard):
    """The guard with a fault."""

    def __init__(self, plan: Plan, problem: Any, algorithm: Any, fault: str) -> None:
        wrong = plan
        if fault == "halved":
            wrong = plan._replace(noise=plan.noise / 2)
        super().__init__(wrong, problem, algorithm)
        self.fault = fault
        if fault == "unclipped" and self.oracle is not None:
            self.oracle.clip = math.inf
        if fault == "unsampled" and isinstance(self.oracle, Noisy):
            self.oracle._draw = lambda batch, size, key: (batch, jnp.asarray(float(size)))  # type: ignore[method-assign]

    def released(self, msg: Any, before: Any, state: Any, batch: Batch, upload: Any, t: Any, key: Any) -> Any:
        """As the guard does, with the fault."""
        if self.fault == "unclipped" and self.way == "client":
            v = self.noise(self.algorithm.packing.pack(msg, upload), self.plan.noise * self.plan.private.clip, key)
            return state, self.algorithm.packing.unpack(msg, v, jnp.ones(()))
        committed, sent = super().released(msg, before, state, batch, upload, t, key)
        return (state if self.fault == "remembered" else committed), sent


class _Expected(Noisy):
    """The oracle of way `steps` without noise, on all rows: what is sent on average, to first order."""

    def sampled(self, w: Vector, batch: Batch, size: int | None, key: Any) -> tuple[Any, Vector]:
        """Loss and clipped gradient of all rows."""
        return super().sampled(w, batch, None, key)


class _Attack:
    """One case: transcripts of either world, scored."""

    def __init__(self, case: Case) -> None:
        self.case, pair = case, worlds(case)
        self.plan = _plan(case, pair[0])
        self.algorithm = case.algorithm.build(PROBLEM, 1, 1.0)
        self.guard = None
        if self.plan is not None:
            self.guard = _Broken(self.plan, PROBLEM, self.algorithm, case.fault)
        self.loop = Loop(self.algorithm, PROBLEM, LocalEngine(), Never(), 1, False, guard=self.guard)
        self.batches = [_batch(federation) for federation in pair]
        self.w0 = PROBLEM.init(2, np.float64)
        self.laplace = self.guard is None or self.guard.noise.norm == 1
        self.clean = self._clean()

    def _clean(self) -> Any:
        if self.guard is None or self.guard.way == "client":
            return Oracle(PROBLEM)
        if self.guard.way == "steps":
            return _Expected(
                PROBLEM, self.guard.oracle.clip, 0.0, Noise("gaussian" if self.guard.noise.norm == 2 else "laplace")
            )
        return self.guard.oracle

    def scores(self, truth: int, seeds: Any) -> Any:
        """The adversary's scores of the transcripts of these seeds, in the world `truth`."""
        one = jax.jit(lambda seed: self._score(truth, jax.random.key(seed)))
        return np.asarray(lax.map(one, jnp.asarray(seeds, jnp.uint32), batch_size=min(AT_ONCE, len(seeds))))

    def _score(self, truth: int, root: Any) -> Any:
        algorithm, batch = self.algorithm, self.batches[truth]
        state, hello = algorithm.join(self.w0, batch, client_key(root, JOIN_ROUND, 0))
        server = algorithm.init(self.w0, jax.tree.map(lambda a: a[None], hello))
        cohort = Cohort(None, jnp.ones(1, bool))

        def round_(carry: Any, t: Any) -> tuple[Any, Any]:
            server, state, guesses = carry
            msg = algorithm.broadcast(server)
            new, upload, _ = self.loop._step_one((msg, t, root), batch, state)
            sent, own = jax.tree.map(lambda a: a[None], upload), cohort
            if self.guard is not None and self.guard.central:  # what she sees is the noised sum
                key = client_key(root, t, SERVER)(Purpose.NOISE)
                sent, own = self.guard.summed(msg, sent, cohort, key)
                upload = sent
            after, _ = algorithm.server_step(server, sent, own)
            seen = ravel_pytree(upload)[0]
            guesses, score = self._judge(msg, state, guesses, seen, t, root)
            return (after, new, guesses), score

        start = (server, state, (state, state))
        return jnp.sum(lax.scan(round_, start, jnp.arange(self.case.rounds))[1])

    def _judge(self, msg: Any, state: Any, guesses: Any, seen: Any, t: Any, root: Any) -> tuple[Any, Any]:
        """What she expects in each world, the score of what she sees, and the states she expects next."""
        key = client_key(root, t, 0)
        known = self.guard is not None and self.guard.way != "client" and self.case.fault != "remembered"
        said, after, spread = [], [], []
        for batch, guess in zip(self.batches, guesses, strict=True):
            before = state if known else guess
            new, upload, notes = self.algorithm.client_step(msg, before, batch, self.clean, key)
            said.append(self._expected(msg, batch, new, upload))
            after.append(new)
            spread.append(self._scale(notes, t))
        (low, high), (s, r) = said, spread
        if self.laplace:
            apart = lambda u, scale: jnp.sum(jnp.abs(seen - u)) / scale + seen.size * jnp.log(scale)
            return tuple(after), apart(low, s) - apart(high, r)
        return tuple(after), jnp.sum((seen - (low + high) / 2) * (high - low)) / s**2

    def _expected(self, msg: Any, batch: Batch, state: Any, upload: Any) -> Any:
        if self.guard is None:
            return ravel_pytree(state.w)[0]  # FedEPM: what it sends before the noise
        if self.guard.way != "client":
            return ravel_pytree(upload)[0]
        v = clip_whole(self.algorithm.packing.pack(msg, upload), self.guard.plan.private.clip, self.guard.noise.norm)
        return ravel_pytree(self.algorithm.packing.unpack(msg, v, jnp.ones(())))[0]

    def _scale(self, notes: Any, t: Any) -> Any:
        if self.guard is None or self.plan is None:
            return notes.noise_scale
        if self.guard.way in ("once", "convex"):
            return self.plan.noise * self.plan.theorem.moved(self.plan.private.clip, float(self.case.rows), t)
        return jnp.asarray(1.0)

    def claimed(self, delta: float) -> float:
        """The ε that the accountant, or the paper, says these rounds cost."""
        if self.plan is None:
            return self.case.rounds * float(self.case.algorithm.epsilon)  # type: ignore[attr-defined]
        kinds = self.plan.counted(0, self.case.rounds)
        return max(cost({event: times}, delta).epsilon for event, times in kinds)


def _batch(federation: Federation) -> Batch:
    x, y = federation.client(0)
    return Batch(jnp.asarray(x), jnp.asarray(y), jnp.ones(len(y)), jnp.asarray(0, jnp.int32))


def lower_bound(low: Any, high: Any, delta: float, confidence: float) -> float:
    """The ε that scores of two worlds prove not to be below, with this confidence: 0 where they prove nothing."""
    low, high = (np.asarray(v, np.float64) for v in (low, high))
    chosen, counted = zip(*((v[: len(v) // 2], v[len(v) // 2 :]) for v in (low, high)), strict=True)
    both = np.concatenate(chosen)
    places = np.unique(np.quantile(both[np.isfinite(both)], np.linspace(0, 1, 400)))
    picks = [
        (bounds.max(), side, places[bounds.argmax()]) for side, bounds in _bounds(chosen, places, delta, confidence)
    ]
    _, side, place = max(picks)
    return float(dict(_bounds(counted, [place], delta, confidence))[side][0])


def _bounds(scores: Any, places: Any, delta: float, confidence: float) -> list[tuple[int, np.ndarray]]:
    """The bounds from thresholds at these places: `high` scores above one against `low` ones, and the reverse."""
    from scipy.stats import beta

    low, high = (np.sort(v) for v in scores)
    n, alpha, places = len(low), (1 - confidence) / 2, np.asarray(places)
    above = lambda v: n - np.searchsorted(v, places, side="right")
    below = lambda v: np.searchsorted(v, places, side="left")
    found = []
    for side, hits, misses in ((1, above(high), above(low)), (-1, below(low), below(high))):
        least = np.where(hits > 0, beta.ppf(alpha, np.maximum(hits, 1), n - hits + 1), 0.0)
        most = np.where(misses < n, beta.ppf(1 - alpha, misses + 1, np.maximum(n - misses, 1)), 1.0)
        found.append((side, np.log(np.maximum((least - delta) / most, 1.0))))
    return found


def audit(case: Case, trials: int = 200_000, confidence: float = 0.95, delta: float | None = None) -> Audited:
    """Attack a case with so many transcripts of each world, and compare with what it claims."""
    require_positive_int("trials", trials, hint="More trials prove larger bounds: ln(trials) is about the most.")
    require(trials >= 1000, "trials", "at least 1000", trials, hint="Fewer prove nothing.")
    sure = is_number(confidence) and 0.5 <= confidence < 1
    require(sure, "confidence", "from 0.5 to below 1", confidence)
    attack = _Attack(case)
    at = delta if delta is not None else 1e-5 if case.privacy is None else case.privacy.delta
    seeds = np.arange(2 * trials, dtype=np.uint32).reshape(2, trials)
    low, high = (attack.scores(k, seeds[k]) for k in (0, 1))
    bound = lower_bound(low, high, at, confidence)
    return Audited(case, attack.claimed(at), bound, at, confidence, trials)


def _modes() -> list[Case]:
    gaussian = Private(clip=1.0, epsilon=4.0)
    laplace = Private(clip=1.0, epsilon=4.0, mechanism="laplace")
    admm = FedADMM(rho=0.5, epochs=2, vary=False, rate=0.1)
    epm = FedEPM(k0=4, eta=0.5, lam=0.01, mu0=4.0, c=0.0, alpha=1.0)
    pdm = FedPDM(rho=1.0, rate=0.3, steps=3)
    convex = Private(clip=1.0, epsilon=4.0, way="convex", reach=1.0)
    client = Private(clip=1.0, epsilon=4.0, way="client")
    central = dataclasses.replace(client, place="central")
    return [
        Case("one Gaussian release (FedAvg, one step on all rows)", FedAvg(epochs=1, step=0.1), gaussian),
        Case("FedAvg, Gaussian, 3 rounds of 2 steps", FedAvg(epochs=2, step=0.1), gaussian, 3),
        Case("FedProx, Gaussian, 3 rounds of 2 steps", FedProx(epochs=2, step=0.1, mu=0.5), gaussian, 3),
        Case("SCAFFOLD, Gaussian, 3 rounds of 2 steps", Scaffold(epochs=2, rate=0.1), gaussian, 3),
        Case("FedADMM, Gaussian, 3 rounds of 2 steps", admm, gaussian, 3),
        Case("FedADMM, Gaussian, samples of half the rows", dataclasses.replace(admm, batch=2), gaussian, 3),
        Case("FedPDM, Gaussian, 3 rounds of 3 steps", pdm, gaussian, 3),
        Case("FedPDM, Gaussian on convex losses, 3 rounds", pdm, convex, 3),
        Case("FedEPM, Laplace, 3 rounds", epm, laplace, 3),
        Case("FedEPM, Gaussian, 3 rounds", epm, gaussian, 3),
        Case("FedAvg, whole clients, noise by the client", FedAvg(epochs=1, step=0.1), client, 2),
        Case("FedAvg, whole clients, noise by the server", FedAvg(epochs=1, step=0.1), central, 2),
    ]


def _faults() -> list[Case]:
    one, *_, epm_laplace, epm, client, _ = _modes()
    # short steps, so that a state is still there after many rounds
    epm = dataclasses.replace(epm, name="FedEPM, Gaussian, 8 rounds", rounds=8)
    epm = dataclasses.replace(epm, algorithm=FedEPM(k0=4, eta=0.01, lam=0.01, mu0=4.0, c=0.0, alpha=1.0))
    pdm = next(case for case in _modes() if "convex" in case.name)
    pdm = dataclasses.replace(pdm, name="FedPDM, Gaussian on convex losses, 8 rounds", rounds=8)
    pdm = dataclasses.replace(pdm, algorithm=FedPDM(rho=1.0, rate=0.1, steps=1))
    sampled = Case("FedAvg, Gaussian, samples of 2 of 20 rows", FedAvg(epochs=1, step=0.1, batch=2), one.privacy, 2, 20)
    broken = lambda case, fault: dataclasses.replace(case, name=f"{case.name}: {FAULTS[fault]}", fault=fault)
    return [
        broken(one, "halved"),
        broken(epm_laplace, "halved"),
        broken(one, "unclipped"),
        broken(client, "unclipped"),
        broken(epm, "remembered"),
        broken(pdm, "remembered"),
        broken(sampled, "unsampled"),
    ]


def _papers() -> list[Case]:
    return [
        Case("FedEPM's own noise (39), ε = 0.1 a round, 1 round", FedEPM(k0=12, epsilon=0.1)),
        Case("FedEPM's own noise (39), ε = 0.1 a round, 5 rounds", FedEPM(k0=12, epsilon=0.1), rounds=5),
    ]


#: What `fedpact privacy audit` looks at: kinds of cases, and whether their claims should stand.
KINDS = {"modes": (_modes, True), "faults": (_faults, False), "papers": (_papers, False)}


def cases(kinds: Iterable[str] = tuple(KINDS)) -> list[tuple[str, Case]]:
    """The built-in cases with their kinds."""
    names = list(kinds)
    for name in names:
        require_one_of("kind of case", name, KINDS)
    return [(name, case) for name in names for case in KINDS[name][0]()]


def case_of(experiment: Experiment, rounds: int = 20) -> Case:
    """The case of a private experiment: its algorithm and privacy, on canaries, with its smallest client's rows."""
    plan = private_plan(experiment)
    if plan is None or experiment.privacy is None:
        raise InvalidArgument("experiment must be private for an audit, got one without [privacy]. Add the table.")
    privacy = dataclasses.replace(experiment.privacy, noise=plan.noise, epsilon=None)
    if plan.theorem.way == "convex":  # rows of least squares that bend no more than the experiment's own
        privacy = dataclasses.replace(privacy, reach=math.sqrt(curvature(experiment.problem, privacy.reach)[1]))
    fewest = int(np.min(experiment.federation.sizes))
    name = f"{experiment.algorithm.label}, {min(rounds, experiment.rounds)} rounds"
    return Case(name, experiment.algorithm, privacy, min(rounds, experiment.rounds), fewest)


def as_expected(found: Sequence[tuple[str, Audited]]) -> bool:
    """Whether every private mode stood, and every fault and paper's noise was found."""
    return all(audited.broken is not KINDS[kind][1] for kind, audited in found)
