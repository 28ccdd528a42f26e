"""Records whose columns are spread over parties: feature-split, or vertical, federations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from hashlib import sha256
from typing import Any

import numpy as np

from fedpact.core.errors import InvalidArgument, is_count, require, unknown
from fedpact.core.settings import plain
from fedpact.core.vertical import Layout
from fedpact.data.dataset import Dataset, fitted_on, require_rows
from fedpact.data.federation import Federation, require_draw, set_aside


@dataclass(frozen=True, eq=False)
class VerticalFederation(Federation):
    """A dataset and, per party, the numbers of its columns, in the party's order; every column is with one party.

    The parties share the records: a round is simulated as a whole, by one client that has them all. Party number
    `closer` has the labels. Without `parties` they are called "0", "1", …. `unmatched` is what `align` left out, by
    party: how many `records` it has, how many were `kept`, how many are `missing` elsewhere, and `examples` of these.
    """

    blocks: tuple[np.ndarray, ...] = ()
    parties: tuple[str, ...] = ()
    closer: int = 0
    unmatched: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.clients == 1, "rows", "one index array, of the records that all parties share", self.clients)
        count = len(self.blocks)
        require(count >= 2, "blocks", "the columns of at least two parties", count)
        parties = tuple(map(str, self.parties)) or tuple(map(str, range(count)))
        require(len(parties) == count, "names of the parties", f"one per block ({count})", len(parties))
        require(len(set(parties)) == count, "names of the parties", "distinct", parties)
        closer = int(self.closer) if isinstance(self.closer, np.integer) else self.closer
        require(is_count(closer) and closer < count, "closer", f"a party's number from 0 to {count - 1}", self.closer)
        blocks = tuple(
            require_rows(block, self.features, f"block of party {party!r}", "column")
            for party, block in zip(parties, self.blocks, strict=True)
        )
        _require_partition(blocks, parties, closer, [column.name for column in self.dataset.schema.columns])
        for block in blocks:
            block.flags.writeable = False  # the digest is computed once
        for name, value in (("blocks", blocks), ("parties", parties), ("closer", closer)):
            object.__setattr__(self, name, value)

    def __repr__(self) -> str:
        sizes, aside = [len(block) for block in self.blocks], len(self.held_out[0])
        held = f"{min(sizes)} to {max(sizes)}" if min(sizes) < max(sizes) else f"{sizes[0]}"
        records = f"{len(self.rows[0])} records" + (f", {aside} held out" if aside else "")
        text = f"{len(self.parties)} parties with {held} of {self.features} features, {records}"
        return f"VerticalFederation({self.dataset.name!r}: {text}; labels with {self.parties[self.closer]!r})"

    @property
    def layout(self) -> Layout:
        """The columns of every party, the parties' names, and who has the labels."""
        return Layout(tuple(tuple(block.tolist()) for block in self.blocks), self.parties, self.closer)

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the dataset's digest, the records, training and held out, and the layout."""
        rows = Federation.digest.func(self)  # type: ignore[attr-defined]  # super().digest is stored by the same name
        return sha256(f"{rows}:{tuple(self.layout)!r}".encode()).hexdigest()

    def table(self) -> dict[str, dict[str, Any]]:
        """By party: how many features it has, whether it has the labels, and what `align` said of its records."""
        about = lambda i: {"features": len(self.blocks[i]), "labels": i == self.closer}
        return {party: about(i) | dict(self.unmatched.get(party, {})) for i, party in enumerate(self.parties)}

    def alignment(self) -> str:
        """What `align` left out, as a table with a line per party."""
        if not self.unmatched:
            return "Every party has every record."
        width = max(5, *map(len, self.unmatched))
        lines = [f"{'party':{width}}  records     kept  missing elsewhere"]
        for party, said in self.unmatched.items():
            such = ", ".join(said["examples"]) + (", …" if said["missing"] > len(said["examples"]) else "")
            counts = f"{said['records']:7}  {said['kept']:7}  {said['missing']:17}"
            lines.append(f"{party:{width}}  {counts}" + (f": {such}" if such else ""))
        return "\n".join(lines)


def _require_partition(
    blocks: Sequence[np.ndarray], parties: Sequence[str], closer: int, columns: Sequence[str]
) -> None:
    holder: dict[int, str] = {}
    for i, (party, block) in enumerate(zip(parties, blocks, strict=True)):
        hint = "Give it a column, or leave the party out. Only who has the labels may have nothing else."
        require(len(block) or i == closer, f"block of party {party!r}", "at least one column", [], hint=hint)
        for j in block.tolist():
            what, hint = f"column {columns[j]!r} (number {j})", "Take it out of one of them."
            require(j not in holder, what, "in one block, once", [holder.get(j), party], hint=hint)
            holder[j] = party
    nobody = [name for j, name in enumerate(columns) if j not in holder]
    if nobody:
        some = ", ".join(map(repr, nobody[:5])) + (", …" if len(nobody) > 5 else "")
        text = f"blocks must have all {len(columns)} columns, got {len(nobody)} that nobody holds: {some}"
        raise InvalidArgument(f"{text}. Give each to a party.")


def split_features(
    dataset: Dataset,
    clients: int | None = None,
    blocks: Sequence[Any] | None = None,
    names: Sequence[str] | None = None,
    closer: int = 0,
    holdout: float = 0.0,
    seed: int = 0,
) -> VerticalFederation:
    """The federation behind `Dataset.split_features`."""
    holdout, seed = plain(holdout), require_draw(seed, holdout)
    count: Any = int(clients) if isinstance(clients, np.integer) else clients
    if blocks is None:
        ok, most = is_count(count, 2) and count <= dataset.features, dataset.features
        hint = "Or give blocks, a list of columns per party."
        require(ok, "clients", f"a number of parties from 2 to that of the columns ({most})", count, hint=hint)
        blocks = np.array_split(np.arange(most), count)
    require(isinstance(blocks, list | tuple), "blocks", "a list of columns per party", blocks)
    hint = "Leave clients out."
    require(count in (None, len(blocks)), "clients", f"{len(blocks)}, as blocks says, or left out", count, hint=hint)
    listed = names is None or isinstance(names, list | tuple | np.ndarray)
    require(listed, "names", "a list of names, one per party", names)

    own = np.setdiff1d(np.arange(dataset.rows), dataset.test)  # the dataset's test rows are nobody's
    kept, held_out = set_aside(own, holdout, seed, 0)
    return VerticalFederation(
        fitted_on(dataset, kept) if len(held_out) else dataset,
        rows=(kept,),
        held_out=(held_out,),
        names=("all parties",),
        description=f"features, {len(blocks)} parties" + (f", seed {seed}, holdout {holdout}" if holdout else ""),
        blocks=tuple(_numbers(dataset, blocks)),
        parties=tuple(names) if names is not None else (),
        closer=closer,
    )


def _numbers(dataset: Dataset, blocks: Sequence[Any]) -> list[Any]:
    """Blocks by column number, from numbers and names; the name of a file's column means all features made of it."""
    known: dict[str, list[int]] = {}
    for j, column in enumerate(dataset.schema.columns):
        for name in {column.name, column.read_from}:
            known.setdefault(name, []).append(j)
    numbers = []
    for block in blocks:
        listed = isinstance(block, Sequence | np.ndarray) and not isinstance(block, str)
        require(listed, "blocks", "a list of columns per party", block)
        for name in block:
            if isinstance(name, str) and name not in known:
                raise unknown(f"column of dataset {dataset.name!r}", name, known)
        numbers.append([j for given in block for j in (known[given] if isinstance(given, str) else [given])])
    return numbers
