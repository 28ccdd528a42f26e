"""A dataset and who holds which of its rows."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256
from typing import Any

import numpy as np
import scipy.sparse

from fedpact.core.errors import DataError, is_number, require, unknown
from fedpact.core.settings import plain
from fedpact.data import partition
from fedpact.data.dataset import Dataset, fitted_on, require_rows
from fedpact.data.tables import from_arrays

# What a random number is for: the second word of every seed in fedpact.data.
PARTITION, HOLDOUT = 1, 2


@dataclass(frozen=True, eq=False)
class Federation:
    """A dataset and, per client, the indices of its training rows and of the rows set aside for testing.

    Without `held_out` nothing is set aside; without `names` clients are called "0", "1", ….
    """

    dataset: Dataset
    rows: tuple[np.ndarray, ...]
    held_out: tuple[np.ndarray, ...] = ()
    names: tuple[str, ...] = ()
    description: str = "given rows"
    rows_of = "everyone"  # whose rows are in it: problems ask of all together what one node alone need not have

    def __post_init__(self) -> None:
        m = len(self.rows)
        require(m >= 1, "rows", "one index array per client, at least one", m)
        names = tuple(map(str, self.names)) or tuple(map(str, range(m)))
        held_out = tuple(self.held_out) or (np.empty(0, np.int64),) * m
        require(len(names) == m, "names", f"one per client ({m})", len(names))
        require(len(set(names)) == m, "names", "distinct", names)
        require(len(held_out) == m, "held_out", f"one index array per client ({m})", len(held_out))
        for name, rows in zip(names, self.rows, strict=True):
            if len(rows) == 0:
                raise DataError(f"client {name!r} must be given at least one row, got none. Remove it or give it rows.")
        object.__setattr__(self, "names", names)
        for field, parts in (("rows", self.rows), ("held_out", held_out)):
            checked = [
                require_rows(part, self.dataset.rows, f"{field} of client {name!r}")
                for name, part in zip(names, parts, strict=True)
            ]
            for array in checked:
                array.flags.writeable = False  # the digest is computed once
            object.__setattr__(self, field, tuple(checked))

    def __repr__(self) -> str:
        aside = sum(map(len, self.held_out))
        sizes = f"{self.sizes.min()} to {self.sizes.max()} rows" + (f", {aside} held out in all" if aside else "")
        return f"Federation({self.dataset.name!r}: {self.clients} clients with {sizes}; {self.description})"

    @property
    def clients(self) -> int:
        """m."""
        return len(self.rows)

    @property
    def sizes(self) -> np.ndarray:
        """d_i: the number of training rows of each client."""
        return np.array([len(rows) for rows in self.rows])

    @property
    def features(self) -> int:
        """n."""
        return self.dataset.features

    @cached_property
    def blank(self) -> list[int]:
        """The clients whose training rows are all zeros."""
        filled = self.dataset.filled
        return [i for i, rows in enumerate(self.rows) if not filled[rows].any()]

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the dataset's digest and everyone's rows, training and held out."""
        text = sha256(self.dataset.digest.encode())
        for parts in (self.rows, self.held_out):
            for part in parts:
                text.update(f"{len(part)}:".encode())
                text.update(part.astype("<i8").tobytes())
        return text.hexdigest()

    def client(self, i: int) -> tuple[np.ndarray, np.ndarray]:
        """Training rows (x, y) of client i."""
        return self._part(self.rows, i)

    def test(self, i: int) -> tuple[np.ndarray, np.ndarray]:
        """Held-out rows (x, y) of client i; of length 0 when nothing was set aside."""
        return self._part(self.held_out, i)

    def _part(self, parts: tuple[np.ndarray, ...], i: int) -> tuple[np.ndarray, np.ndarray]:
        ok = isinstance(i, int | np.integer) and 0 <= i < self.clients
        require(ok, "client", f"a number from 0 to {self.clients - 1}", i, symbol="i")
        return self.dataset.x[parts[i]], self.dataset.y[parts[i]]

    @staticmethod
    def from_arrays(
        clients: Sequence[tuple[Any, Any]],
        names: Sequence[str] | None = None,
        classes: Sequence[str] | None = None,
        feature_names: Sequence[str] | None = None,
    ) -> Federation:
        """A federation of your own arrays, one (x, y) per client, as they are. `classes` as in `data.from_arrays`."""
        pairs = len(clients) >= 1 and all(isinstance(pair, tuple | list) and len(pair) == 2 for pair in clients)
        require(pairs, "clients", "a list of pairs (x, y), at least one", clients)
        names = [str(name) for name in names] if names is not None else [str(i) for i in range(len(clients))]
        require(len(names) == len(clients), "names", f"one per client ({len(clients)})", len(names))
        # Each client's arrays are checked on their own, so that an error names the client and its own row.
        own = [
            from_arrays(x, y, feature_names, () if classes is None else classes, name=f"client {name}")
            for name, (x, y) in zip(names, clients, strict=True)
        ]
        for data in own:
            if data.features != own[0].features:
                text = f"x of {data.name!r} must be of {own[0].features} columns, as those of {own[0].name!r} are"
                raise DataError(f"{text}, got {data.features}. Give every client the same columns.")
        sparse = any(scipy.sparse.issparse(data.x) for data in own)
        x = (scipy.sparse.vstack if sparse else np.concatenate)([data.x for data in own])
        y = np.concatenate([data.y for data in own])
        rows = np.split(np.arange(len(y)), np.cumsum([data.rows for data in own])[:-1])
        dataset = from_arrays(x, y, feature_names, classes)
        return Federation(dataset, tuple(rows), (), tuple(names), f"given arrays, {len(own)} clients")


@dataclass(frozen=True, eq=False)
class OwnRows(Federation):
    """The rows of one node, which is one client of several."""

    rows_of = "one node"


def split(
    dataset: Dataset, clients: int | None, how: str, seed: int, holdout: float, options: Mapping[str, Any]
) -> Federation:
    """The federation behind `Dataset.split`."""
    check_options(how, options)
    if how == "features":
        return dataset.split_features(clients, holdout=holdout, seed=seed, **options)
    m = int(clients) if isinstance(clients, np.integer) else clients
    options = {key: plain(value) for key, value in options.items()}
    holdout, seed = plain(holdout), require_draw(seed, holdout)
    own = np.setdiff1d(np.arange(dataset.rows), dataset.test)  # the dataset's test rows are nobody's
    names, rows = _deal(dataset, own, m, how, np.random.default_rng([seed, PARTITION]), dict(options))
    kept, held_out = zip(*(set_aside(part, holdout, seed, i) for i, part in enumerate(rows)), strict=True)
    dataset = fitted_on(dataset, np.concatenate(kept)) if any(map(len, held_out)) else dataset
    shown = ", ".join(f"{k}={v}" for k, v in options.items() if k != "sizes")
    text = f"{how}{f' ({shown})' if shown else ''}, {len(rows)} clients, seed {seed}"
    return Federation(dataset, kept, held_out, names, text + (f", holdout {holdout}" if holdout else ""))


def check_options(how: str, options: Iterable[str]) -> None:
    """Refuse a split that there is not, and options that it does not take."""
    if not isinstance(how, str) or how not in partition.SPLITS:
        raise unknown("how", how, partition.SPLITS)
    known = ("clients", "how", "seed", "holdout", *partition.SPLITS[how])
    for option in options:
        if option not in known:
            raise unknown(f"option of the split {how!r}", option, known)


def _deal(
    dataset: Dataset, own: np.ndarray, m: int | None, how: str, rng: np.random.Generator, options: dict[str, Any]
) -> tuple[tuple[str, ...], list[np.ndarray]]:
    if how in ("sizes", "column"):
        names: list[str] = []
        if how == "sizes":
            rows = partition.sizes(rng, len(own), options.get("sizes"))
        else:
            name = options.get("column", "")
            if not isinstance(name, str) or name not in dataset.raw:
                raise unknown(f"column of dataset {dataset.name!r}", name, dataset.raw)
            rows, names = partition.column(name, dataset.raw[name][own])
        hint = "Leave clients out."
        require(m in (None, len(rows)), "clients", f"{len(rows)}, as {how} says, or left out", m, symbol="m", hint=hint)
        return tuple(names), [own[part] for part in rows]
    hint = "Choose another split, or load the target as classes."
    require(how != "dirichlet" or dataset.classes, "how", "a split that needs no classes", how, hint=hint)
    labelled = how in ("shards", "imbalanced", "dirichlet")
    if how == "dirichlet":
        options.setdefault("alpha", None)
    dealt = getattr(partition, how)(rng, dataset.y[own] if labelled else len(own), m, **options)
    return (), [own[part] for part in dealt]


def require_draw(seed: Any, holdout: Any) -> int:
    """The seed, if it and the fraction to set aside can be used."""
    seed = int(seed) if isinstance(seed, np.integer) else seed
    whole = isinstance(seed, int) and not isinstance(seed, bool) and seed >= 0
    require(whole, "seed", "an integer of at least 0", seed)
    holdout = plain(holdout)
    require(is_number(holdout) and 0 <= holdout < 1, "holdout", "a fraction in [0, 1)", holdout)
    return seed


def set_aside(rows: np.ndarray, fraction: float, seed: int, client: int) -> tuple[np.ndarray, np.ndarray]:
    """A client's rows to train on and those set aside, drawn from (seed, purpose, client)."""
    count = min(round(fraction * len(rows)), len(rows) - 1)
    if count == 0:
        return rows, rows[:0]
    aside = np.zeros(len(rows), dtype=bool)
    aside[np.random.default_rng([seed, HOLDOUT, client]).permutation(len(rows))[:count]] = True
    return rows[~aside], rows[aside]
