"""Who holds which rows: pure functions from a generator and the rows (or labels) to one index array per client.

The last split deals columns instead: `fedpact.data.features`.

iid        shuffled, sizes equal to within one row
cuts       shuffled, then cut at random points (FedEPM, Section VII.A), every d_i > 0.01·d/m
sizes      shuffled, sizes given
shards     sorted by label, cut into equal shards, some per client (FedAvg, FedADMM)
imbalanced sorted by label, 1, 2, 3, … shards to pairs of clients (FedADMM, Table VI)
dirichlet  every class shared out by Dirichlet proportions
column     one client per value of a column
features   columns to parties that share the records, in equal runs or as blocks says
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from fedpact.core.errors import DataError, InvalidArgument, is_number, require, require_positive_int

SPLITS: dict[str, tuple[str, ...]] = {
    "iid": (),
    "cuts": (),
    "sizes": ("sizes",),
    "shards": ("shards",),
    "imbalanced": (),
    "dirichlet": ("alpha", "least"),
    "column": ("column",),
    "features": ("blocks", "names", "closer"),
}
"""Each split and the options it takes."""

DRAWS = 1000


def _check_clients(clients: Any, rows: int) -> None:
    require_positive_int("clients", clients, symbol="m")
    require(clients <= rows, "clients", f"at most the number of rows, {rows}", clients, symbol="m")


def iid(rng: np.random.Generator, rows: int, clients: int) -> list[np.ndarray]:
    """Shuffle, then deal blocks whose sizes differ by at most one."""
    _check_clients(clients, rows)
    return np.array_split(rng.permutation(rows), clients)


def cuts(rng: np.random.Generator, rows: int, clients: int) -> list[np.ndarray]:
    """Shuffle, then cut at m−1 uniform distinct points, given that every d_i > 0.01·d/m.

    FedEPM's Section VII.A says "randomly divide all instances into m parts" and no more; the condition is that of the
    authors' code, which draws again until it holds, up to some e^(0.01·m) times. This draws once, from the same
    distribution: distinct cut points are a uniform composition of d into m positive parts; given that all parts are
    ≥ g it is uniform over those, and taking g−1 off every part maps them one to one onto the compositions of
    d − m(g−1) into m positive parts, of which there is one whenever m ≤ d.
    """
    _check_clients(clients, rows)
    extra = rows // (100 * clients)  # g − 1, where g is the smallest whole number above 0.01·d/m
    spare = rows - clients * extra
    points = 1 + np.sort(rng.choice(spare - 1, clients - 1, replace=False, shuffle=False))
    d = np.diff(points, prepend=0, append=spare) + extra
    return np.split(rng.permutation(rows), np.cumsum(d)[:-1])


def sizes(rng: np.random.Generator, rows: int, sizes: Sequence[int] | np.ndarray | None) -> list[np.ndarray]:
    """Shuffle, then deal blocks of the given sizes; rows left over belong to nobody."""
    try:
        d = np.asarray(sizes if sizes is not None else [])
    except ValueError:  # lists of different lengths
        d = np.empty((0, 0))
    whole = d.ndim == 1 and d.size > 0 and d.dtype.kind in "iu"
    require(whole, "sizes", "a list of whole numbers, one per client", sizes, symbol="d_i")
    require(d.min() >= 1, "sizes", "at least 1 each", int(d.min()), symbol="d_i")
    require(d.sum() <= rows, "sizes", f"in all at most the number of rows, {rows}", int(d.sum()), symbol="d_i")
    return np.split(rng.permutation(rows), np.cumsum(d))[:-1]


def shards(rng: np.random.Generator, labels: np.ndarray, clients: int, shards: int = 2) -> list[np.ndarray]:
    """Sort by label, cut into clients × shards nearly equal pieces, deal `shards` of them to each client at random."""
    _check_clients(clients, len(labels))
    require_positive_int("shards", shards)
    count = clients * shards
    hint = "Use fewer clients or fewer shards."
    require(count <= len(labels), "clients × shards", f"at most the number of rows, {len(labels)}", count, hint=hint)
    pieces = np.array_split(np.argsort(labels, kind="stable"), count)
    hands = rng.permutation(count).reshape(clients, shards)
    return [np.concatenate([pieces[k] for k in hand]) for hand in hands]


def imbalanced(rng: np.random.Generator, labels: np.ndarray, clients: int) -> list[np.ndarray]:
    """Table VI of FedADMM: pairs of clients with 1, 2, … G−1 shards each, and the rest to the last pair.

    Sorted by label and cut into G² nearly equal shards, G = m/2, which are dealt at random. The last pair has the G
    that are left, so that m = 200 has 10,000 shards and its last two clients 50 each.
    """
    _check_clients(clients, len(labels))
    require(clients % 2 == 0, "clients", "even for pairs of clients", clients, symbol="m")
    groups = clients // 2
    hint = "Use fewer clients."
    require(
        groups**2 <= len(labels), "(clients/2)²", f"at most the number of rows, {len(labels)}", groups**2, hint=hint
    )
    counts = np.append(np.repeat(np.arange(1, groups), 2), [groups - groups // 2, groups // 2])
    require(counts.min() >= 1, "clients", "at least 4 for pairs of unlike size", clients, symbol="m")
    pieces = np.array_split(np.argsort(labels, kind="stable"), groups**2)
    hands = np.split(rng.permutation(groups**2), np.cumsum(counts)[:-1])
    return [np.concatenate([pieces[k] for k in hand]) for hand in hands]


def dirichlet(
    rng: np.random.Generator, labels: np.ndarray, clients: int, alpha: float | None, least: int = 1
) -> list[np.ndarray]:
    """Share out every class by proportions from Dirichlet(α, …, α), drawn again until everyone has `least` rows."""
    _check_clients(clients, len(labels))
    require(is_number(alpha) and 0 < alpha < np.inf, "alpha", "a finite number above 0", alpha, symbol="α")  # type: ignore[operator]
    require_positive_int("least", least)
    require(least * clients <= len(labels), "least", f"at most rows / clients, {len(labels) // clients}", least)
    classes = [np.flatnonzero(labels == label) for label in np.unique(labels)]
    for _ in range(DRAWS):
        shares = rng.dirichlet(np.full(clients, alpha), size=len(classes))
        stops = [(np.cumsum(p)[:-1] * len(rows)).astype(int) for p, rows in zip(shares, classes, strict=True)]
        d = sum(np.diff(s, prepend=0, append=len(rows)) for s, rows in zip(stops, classes, strict=True))
        if np.min(d) >= least:
            dealt = [np.split(rng.permutation(rows), s) for s, rows in zip(stops, classes, strict=True)]
            return [np.concatenate(parts) for parts in zip(*dealt, strict=True)]
    text = f"alpha (α) must be large enough for {least} rows at each of {clients} clients, got {alpha} ({DRAWS} draws)."
    raise InvalidArgument(f"{text} Use a larger alpha, fewer clients or a smaller least.")


def column(name: str, values: np.ndarray) -> tuple[list[np.ndarray], list[str]]:
    """One client per distinct value, in sorted order, with the values as names."""
    missing = np.flatnonzero([value == "" or value != value for value in values])
    if missing.size:
        text = f"column {name!r} must be filled in every row, got nothing at row {missing[0]}."
        raise DataError(f"{text} Fill it or remove the row.")
    found, client = np.unique(values, return_inverse=True)
    rows = np.split(np.argsort(client, kind="stable"), np.cumsum(np.bincount(client))[:-1])
    return rows, [str(value).removesuffix(".0") if found.dtype.kind == "f" else str(value) for value in found]
