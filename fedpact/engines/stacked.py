"""What the engines have in common that keep every client's state in stacked arrays."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedpact.core.contract import Cohort, Stepped, finite_rows


class Stacked:
    """The engine's side of a round, given `map` and `clients_of`."""

    def join(self: Any, f: Callable[..., Any], shared: Any, data: Any, where: tuple[Any, str]) -> tuple[Any, Any]:
        """Everyone's state and hello: f(shared, batch)."""
        return self.map(lambda batch, _: f(shared, batch), data, self.clients_of(data), None, where=where)

    def one_state(self, clients: Any) -> Any:
        """The first client's state, to learn a message's shape from."""
        return jax.tree.map(lambda a: a[0], clients)

    def step(
        self: Any,
        f: Callable[..., Any],
        shared: Any,
        data: Any,
        clients: Any,
        cohort: Cohort,
        combine: str,
        where: tuple[Any, str],
    ) -> Stepped:
        """f(shared, batch, state) for the cohort. Every upload is at hand, so `combine` makes no difference."""
        mine = cohort.take(clients)
        rows, uploads, notes = self.map(lambda batch, client: f(shared, batch, client), data, mine, cohort, where=where)
        return Stepped(rows, uploads, notes, finite_rows(uploads) | ~cohort.mask, cohort, cohort)

    def keep(self, clients: Any, rows: Any, cohort: Cohort, t: Any) -> Any:
        """The clients' states with the cohort's new ones."""
        return cohort.put(clients, rows)

    def total(self: Any, f: Callable[..., Any], shared: Any, data: Any, clients: Any, where: tuple[Any, str]) -> Any:
        """The sum of f(shared, batch, state) over all clients."""
        each = self.map(lambda batch, client: f(shared, batch, client), data, clients, None, where=where)
        return jax.tree.map(lambda a: jnp.sum(a, axis=0), each)

    def test(self, f: Callable[..., Any], w: Any, data: Any) -> None:
        """The dataset's own test rows are looked at by the engines `local` and `host` only."""
        return


def kept_dtype(federation: Any, dtype: Any) -> Any:
    """The type of the features: that of the run, but pixels stay bytes."""
    return np.uint8 if federation.client(0)[0].dtype == np.uint8 else dtype
