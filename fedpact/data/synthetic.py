"""Generated data of known origin."""

from __future__ import annotations

import numpy as np

from fedpact.core.errors import is_number, require, require_one_of, require_positive_int
from fedpact.core.settings import plain
from fedpact.data.dataset import Dataset
from fedpact.data.tables import from_arrays

DISTRIBUTIONS = ("normal", "student", "uniform")
KINDS = ("logistic", "least_squares")
SYNTHETIC, MIXTURE = 3, 4  # what the random numbers are for, next to PARTITION and HOLDOUT in federation.py
MOST_CELLS = 10**9  # 8 GB


def _check_room(rows: int, features: int) -> None:
    room = f"at most {MOST_CELLS:,}"
    require(rows * features <= MOST_CELLS, "rows × features", room, rows * features, hint="Generate fewer.")


def synthetic(
    kind: str = "logistic", rows: int = 1000, features: int = 10, seed: int = 0, noise: float = 0.5
) -> Dataset:
    """Normal features and a linear rule with noise: `rows`, `features`, kind "logistic" or "least_squares".

    A ~ N(0, I), ‖w‖ = 1, b = Aw + noise·e with e ~ N(0, I). "least_squares" has y = b; "logistic" has y = 1 where b is
    above its median, so that both classes are there. The larger rows / features, the better the conditioning.
    """
    rows, features, seed, noise = map(plain, (rows, features, seed, noise))
    require_one_of("kind", kind, KINDS)
    require_positive_int("rows", rows, symbol="d")
    require(rows >= 2, "rows", "at least 2", rows, symbol="d")
    require_positive_int("features", features, symbol="n")
    _check_room(rows, features)
    require(is_number(noise) and 0 <= noise < np.inf, "noise", "a finite number of at least 0", noise)
    whole = isinstance(seed, int) and not isinstance(seed, bool)
    require(whole and seed >= 0, "seed", "an integer of at least 0", seed)
    rng = np.random.default_rng([seed, SYNTHETIC])
    a, w, e = rng.standard_normal((rows, features)), rng.standard_normal(features), rng.standard_normal(rows)
    b = a @ (w / np.linalg.norm(w)) + noise * e
    if kind == "least_squares":
        return from_arrays(a, b, classes=(), name="synthetic least_squares")
    return from_arrays(a, b > np.median(b), classes=("0", "1"), name="synthetic logistic")


def mixture(clients: int = 64, features: int = 100, seed: int = 0, iid: bool = True) -> Dataset:
    """Rows of three distributions, targets independent of the features: Example 5.1 of the inexact ADMM paper.

    Client i has d_i ∈ [50, 150] rows; a third of all (a, b) is standard normal, a third Student's t with 5 degrees of
    freedom, the rest uniform in [−5, 5]. With iid=True the rows are shuffled over the clients, as printed (the paper
    calls that non-i.i.d.); with iid=False every client draws from one of the three. Split with how="column",
    column="client".
    """
    clients, features, seed, iid = map(plain, (clients, features, seed, iid))
    require_positive_int("clients", clients, symbol="m")
    require_positive_int("features", features, symbol="n")
    _check_room(150 * clients, features)
    whole = isinstance(seed, int) and not isinstance(seed, bool)
    require(whole and seed >= 0, "seed", "an integer of at least 0", seed)
    require(isinstance(iid, bool), "iid", "true or false", iid)
    rng = np.random.default_rng([seed, MIXTURE])
    sizes = rng.integers(50, 151, size=clients)
    owner = np.repeat(np.arange(clients), sizes)
    d = len(owner)
    third = -(-d // 3)
    kind = np.repeat(np.arange(3), [third, third, d - 2 * third])  # the paper's ⌊·⌋ is the ceiling
    kind = rng.permutation(kind) if iid else (owner % 3)
    shape = (d, features + 1)
    draws = (rng.standard_normal(shape), rng.standard_t(5, shape), rng.uniform(-5, 5, shape))
    rows = np.choose(kind[:, None], draws)
    extra = {"client": owner, "distribution": np.array(DISTRIBUTIONS, dtype=object)[kind]}
    return from_arrays(rows[:, :-1], rows[:, -1], classes=(), name="mixture", extra=extra)
