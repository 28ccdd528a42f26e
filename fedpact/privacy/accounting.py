"""What a list of releases costs: (ε, δ), never below the truth.

    closed form   Gaussian releases without sampling: exact (Balle & Wang 2018), whatever their noise. μ² = Σ (Δ/σ)²
    PLD           privacy loss distributions of dp-accounting, rounded pessimistically: the figure that is reported
    RDP           Rényi divergences, which add up: what tracks a run round by round, and the figure where no PLD exists
    pure          the sum of pure ε's, whatever δ: Laplace releases only, and the least for few of them
    PLD + RDP     both kinds in one list that neither can take whole: ε's add at δ/2 each

All are upper bounds, so the least of those that apply is reported. Which bound an event has:

    gaussian           full closed form · poisson PLD · fixed RDP (Wang, Balle & Kasiviswanathan 2019) · truncated PLD
    laplace            full, poisson PLD
    discrete_gaussian  full, poisson RDP: in many dimensions its Rényi divergences are at most those of the Gaussian
                       (Canonne, Kamath & Steinke 2020); of its hockey-stick divergences no such thing is known
    discrete_laplace   full, poisson PLD of the worst mechanism of its pure ε

Replace-one is done here, never by dp-accounting's RDP, which forgets to double the sensitivity: `Event.ratio` is noise
over sensitivity. On a Poisson sample, replacing ((1−q)A + qB against (1−q)A + qC) is taken to cost no more than
adding at twice the sensitivity ((1−q)A + qC′ against A, where C′ lies 2C from A): for Laplace noise that was checked
against the exact pair in many settings, not proved; Gaussian PLDs have their own, tighter form.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from scipy.special import gammaln, log_ndtr, logsumexp

from fedpact.core.errors import InvalidArgument
from fedpact.privacy.events import Event, check_delta

Array = np.ndarray[Any, np.dtype[Any]]
#: Rényi orders: dense where the minimum usually is.
ORDERS = (*(1 + x / 10 for x in range(1, 100)), *range(11, 65), 80, 96, 128, 192, 256, 512, 1024)
#: Below this δ the rounding errors of a PLD's convolutions are no longer small beside it, and RDP is used.
PLD_LEAST_DELTA = 1e-10
#: The share of δ set aside for those errors.
PLD_MARGIN = 1e-3
PLD_CELLS = 20  # grid cells per deviation of one release's privacy loss: 0.02 % of ε, upwards
PLD_WIDEST = 0.02
PLD_MOST_EPSILON = 1000.0  # an RDP figure above it is reported as it is: the PLD takes minutes and promises nothing
PLD_STAGE = 1000
PLD_MOST = 2**20  # cells in all, roughly: with more, over some millions of releases, it takes too long
#: Added to (α−1) times a Rényi divergence that comes from a sum of logarithms, for its rounding errors.
RDP_SLACK = 1e-12


class Cost(NamedTuple):
    """An ε at a δ, and by which bound."""

    epsilon: float
    delta: float
    method: str


def epsilon(events: Iterable[Event] | Mapping[Event, int], delta: float) -> Cost:
    """The ε of these releases together at δ; the order of releases does not matter, so counts will do."""
    counts = Counter(events)
    delta = check_delta(delta)
    relations = sorted({event.relation for event in counts})
    if len(relations) > 1:
        raise InvalidArgument(
            f"events of one ε must share their neighbouring relation, got {' and '.join(relations)}. "
            "Ask for the ε of each relation on its own."
        )
    return _epsilon(frozenset((event, count) for event, count in counts.items() if count > 0), delta)


@lru_cache(maxsize=512)
def _epsilon(counts: frozenset[tuple[Event, int]], delta: float) -> Cost:
    if not counts:
        return Cost(0.0, delta, "nothing released")
    if all(event.mechanism == "gaussian" and not event.sampled for event, _ in counts):
        mu = math.sqrt(math.fsum(count / event.ratio**2 for event, count in counts))
        return Cost(gaussian_epsilon(mu, delta), delta, "closed form")
    found = [Cost(rdp_epsilon(_total(counts), delta), delta, "RDP")]
    if all(event.mechanism in ("laplace", "discrete_laplace") for event, _ in counts):
        found.append(Cost(math.fsum(count * _pure(event) for event, count in counts), delta, "pure"))
    if PLD_MOST_EPSILON < found[0].epsilon < math.inf:
        return min(found)
    with_pld = frozenset(item for item in counts if item[0].mechanism != "discrete_gaussian" and not _fixed(item[0]))
    if delta >= PLD_LEAST_DELTA and with_pld == counts:
        found.append(Cost(_pld_epsilon(counts, delta), delta, "PLD"))
    elif delta / 2 >= PLD_LEAST_DELTA and with_pld:
        rest = rdp_epsilon(_total(counts - with_pld), delta / 2)
        found.append(Cost(_epsilon(with_pld, delta / 2).epsilon + rest, delta, "PLD + RDP"))
    best = min(found)
    if not math.isfinite(best.epsilon):
        raise InvalidArgument(
            f"delta (δ) must be at least {PLD_LEAST_DELTA:g} for truncated sampling, got {delta!r}. "
            "Its only bound is a PLD, which is not exact enough below."
        )
    return best


def _fixed(event: Event) -> bool:
    return event.sampling == "fixed" and event.rate < 1


def _pure(event: Event) -> float:
    """ln(1 + q(e^ε − 1)): the pure ε of a mechanism of pure ε on a Poisson sample."""
    whole = 1 / event.ratio
    return whole if event.rate == 1 or whole > 700 else math.log1p(event.rate * math.expm1(whole))


# Closed form


def gaussian_delta(mu: float, epsilon: float) -> float:
    """δ(ε) = Φ(μ/2 − ε/μ) − e^ε Φ(−μ/2 − ε/μ) of a Gaussian release of sensitivity μσ; exact."""
    a, b = log_ndtr(mu / 2 - epsilon / mu), epsilon + log_ndtr(-mu / 2 - epsilon / mu)
    return float(np.exp(a) * -np.expm1(min(b - a, 0.0)))


def gaussian_epsilon(mu: float, delta: float) -> float:
    """The least ε with δ(ε) ≤ δ, by bisection to the last bits, its upper end."""
    if gaussian_delta(mu, 0.0) <= delta:
        return 0.0
    low, high = 0.0, 1.0
    while gaussian_delta(mu, high) > delta:
        low, high = high, 2 * high
    for _ in range(200):
        middle = (low + high) / 2
        if middle in (low, high) or high - low <= 1e-12 * high:
            break
        low, high = (middle, high) if gaussian_delta(mu, middle) > delta else (low, middle)
    return high


# Rényi divergences


def _total(counts: Iterable[tuple[Event, int]]) -> Array:
    return np.asarray(sum(count * rdp(event) for event, count in counts))


@lru_cache(maxsize=512)
def rdp(event: Event) -> Array:
    """An upper bound on a release's Rényi divergence at each of ORDERS; infinite where there is none. Read only."""
    found = _rdp(event)
    found.setflags(write=False)
    return found


def _rdp(event: Event) -> Array:
    orders = np.asarray(ORDERS, float)
    if event.sampling == "truncated":
        return np.full(orders.shape, np.inf)
    if not event.sampled:
        return _rdp_unsampled(event, orders)
    if event.mechanism == "gaussian":
        return _rdp_of_library(event)
    return _rdp_poisson(event)


def _rdp_unsampled(event: Event, orders: Array) -> Array:
    pure = 1 / event.ratio
    if event.mechanism in ("gaussian", "discrete_gaussian"):
        return np.asarray(orders / (2 * event.ratio**2))
    concentrated = np.minimum(pure, orders * pure**2 / 2)  # of any mechanism of pure ε (Bun & Steinke 2016)
    if event.mechanism == "discrete_laplace":
        return concentrated
    excess = (orders - 1) * np.expm1(-(2 * orders - 1) * pure) / (2 * orders - 1)
    exact = pure + np.log1p(excess) / (orders - 1)  # Mironov 2017, Proposition 6
    return np.asarray(np.minimum(concentrated, exact))


def _rdp_of_library(event: Event) -> Array:
    """Gaussian on a Poisson or a fixed-size sample, with the noise over the sensitivity of the relation put in."""
    import dp_accounting as dp
    from dp_accounting.rdp import RdpAccountant

    gaussian: Any = dp.GaussianDpEvent(event.ratio)
    if event.sampling == "poisson":
        relation, sampled = dp.NeighboringRelation.ADD_OR_REMOVE_ONE, dp.PoissonSampledDpEvent(event.rate, gaussian)
    else:
        source = 2**40  # only the share matters to the bound; rounded up
        size = math.ceil(event.rate * source)
        relation = dp.NeighboringRelation.REPLACE_ONE
        sampled = dp.SampledWithoutReplacementDpEvent(source, size, gaussian)
    logger = logging.getLogger("absl")
    before = logger.level
    logger.setLevel(logging.ERROR)  # an order at which its series does not converge is left out, with a warning each
    try:
        found = RdpAccountant(ORDERS, relation).compose(sampled).rdp
    finally:
        logger.setLevel(before)
    safe: Array = np.where(np.isnan(found), np.inf, np.maximum(found, 0.0))
    return safe + RDP_SLACK / (np.asarray(ORDERS) - 1)


def _rdp_poisson(event: Event) -> Array:
    """Any mechanism on a Poisson sample, from its Rényi divergences at whole orders (Zhu & Wang 2019).

    Divergences grow with the order, so that of the next whole order serves for one between.
    """
    q, whole = event.rate, sorted({math.ceil(order) for order in ORDERS})
    base = _rdp_unsampled(event, np.arange(2.0, whole[-1] + 1))  # at 2, 3, …
    found = {}
    for a in whole:
        j = np.arange(3, a + 1)
        choose = gammaln(a + 1) - gammaln(j + 1) - gammaln(a - j + 1)
        terms = math.log(3) + choose + (a - j) * math.log1p(-q) + j * math.log(q) + (j - 1) * base[j - 2]
        first = (a - 1) * math.log1p(-q) + math.log1p((a - 1) * q)
        second = math.log(a * (a - 1) / 2) + 2 * math.log(q) + (a - 2) * math.log1p(-q) + base[0]
        found[a] = float(logsumexp(np.concatenate([[first, second], terms]))) / (a - 1)
    sampled = np.asarray([max(found[math.ceil(order)], 0.0) + RDP_SLACK for order in ORDERS])
    unsampled = _rdp_unsampled(event, np.asarray(ORDERS, float))
    return np.asarray(np.minimum(sampled, unsampled))  # sampling never costs


def rdp_epsilon(total: Array, delta: float) -> float:
    """ε at δ from summed Rényi divergences, at the best of ORDERS."""
    from dp_accounting.rdp import compute_epsilon

    return float(compute_epsilon(ORDERS, total, delta)[0])


def track(events: Iterable[Event], delta: float) -> Array:
    """ε after each of these releases in their order, by RDP: quick, and somewhat above the reported figure.

    Infinite from the first truncated sample on, which RDP has no bound for.
    """
    delta = check_delta(delta)
    total, found = np.zeros(len(ORDERS)), []
    for event in events:
        total = total + rdp(event)
        found.append(rdp_epsilon(total, delta))
    return np.asarray(found)


# Privacy loss distributions


def _pld_epsilon(counts: frozenset[tuple[Event, int]], delta: float) -> float:
    interval = _interval(counts)
    plds = [_pld(event, count, interval) for event, count in sorted(counts, key=repr)]
    total = plds[0]
    for pld in plds[1:]:
        total = total.compose(pld)
    return float(total.get_epsilon_for_delta(delta * (1 - PLD_MARGIN)))


def _interval(counts: Iterable[tuple[Event, int]]) -> float:
    """The grid of privacy losses, from the deviation s of each release's loss: any grid is safe, this one is close."""
    sizes = [(_deviation(event), count) for event, count in counts]
    mean = math.fsum(count * s * s for s, count in sizes) / math.fsum(count * s for s, count in sizes)
    variance = math.fsum(count * s * s for s, count in sizes)
    widest = 16 * math.sqrt(variance) + variance  # of the sum's losses, roughly
    return max(min(mean / PLD_CELLS, PLD_WIDEST), widest / PLD_MOST)


def _deviation(event: Event) -> float:
    spread = math.sqrt(math.expm1(min(event.noise**-2, 2.0)))  # of the likelihood ratio; its rare large values aside
    return event.rate * event.sensitivity * spread


def _pld(event: Event, count: int, interval: float) -> Any:
    if event.mechanism == "gaussian" and not event.sampled:
        return _one(event, event.noise / math.sqrt(count), interval)
    return _composed(_one(event, event.noise, interval), count)


@lru_cache(maxsize=64)
def _one(event: Event, noise: float, interval: float) -> Any:
    """The PLD of one such release with this noise."""
    from dp_accounting import NeighboringRelation
    from dp_accounting.pld import privacy_loss_distribution as library

    replacing = event.relation == "replace-one"
    relation = NeighboringRelation.REPLACE_ONE if replacing else NeighboringRelation.ADD_OR_REMOVE_ONE
    grid: dict[str, Any] = {"value_discretization_interval": interval, "use_connect_dots": True}
    if event.mechanism == "laplace":
        return library.from_laplace_mechanism(event.ratio, sampling_prob=event.rate, **grid)
    if event.mechanism == "discrete_laplace":  # a discrete Laplace of sensitivity one has but two losses, ±pure:
        return library.from_discrete_laplace_mechanism(  # the worst mechanism of this pure ε
            1 / event.ratio, 1, sampling_prob=event.rate, **grid
        )
    # The library's Gaussian PLDs double the sensitivity of replace-one themselves.
    if event.sampling == "truncated":
        return library.from_truncated_subsampled_gaussian_mechanism(
            event.records, event.rate, event.cap, noise, neighboring_relation=relation, **grid
        )
    return library.from_gaussian_mechanism(noise, sampling_prob=event.rate, neighboring_relation=relation, **grid)


def _composed(pld: Any, count: int) -> Any:
    """`count` of the same, in stages: dp-accounting cuts the tails of one long stage so late that it takes minutes."""
    many, rest = divmod(count, PLD_STAGE)
    if not many:
        return pld.self_compose(count)
    stage = _composed(pld.self_compose(PLD_STAGE), many)
    return stage.compose(pld.self_compose(rest)) if rest else stage
