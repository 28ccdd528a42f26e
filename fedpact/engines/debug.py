"""The debug engine: a plain Python loop, one client after the other, nothing compiled or padded.

Every failure inside a round is raised with its round, client and stage, and so is the first number that is not finite.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import scipy.sparse

from fedpact.core.contract import Batch, Cohort
from fedpact.core.errors import ClientError, FedpactError, InvalidArgument, NotFinite
from fedpact.engines.stacked import Stacked, kept_dtype


@dataclass(frozen=True)
class DebugEngine(Stacked):
    """One client at a time, in Python, with errors that say where."""

    compiled, eager, first_block = False, True, 2

    def load(self, federations: Sequence[Any], dtype: Any) -> tuple[np.ndarray, Any]:
        """Each client's rows as they are, in the user's order."""
        if len(federations) > 1:
            raise InvalidArgument("engine must be 'local' for vectorised trials, got 'debug'. Run them one by one.")
        (federation,) = federations
        data = []
        for i in range(federation.clients):
            x, y = federation.client(i)
            x = x.toarray() if scipy.sparse.issparse(x) else x
            data.append(
                Batch(
                    jnp.asarray(x, kept_dtype(federation, dtype)),
                    jnp.asarray(y, dtype),
                    jnp.ones(len(y), dtype),
                    jnp.asarray(i, jnp.int32),
                )
            )
        return np.arange(federation.clients)[None], tuple(data)

    def clients_of(self, data: Any) -> Any:
        """The client numbers by position."""
        return jnp.stack([batch.client for batch in data])

    def one_client(self, data: Any, position: int = 0) -> Batch:
        """The rows of one client."""
        return data[position]

    def capacities(self, data: Any, largest: int, trials: bool) -> None:
        """Everyone has a slot; clients that do not take part are skipped, not masked."""
        return

    def map(self, f: Callable[..., Any], data: Any, rows: Any, cohort: Cohort | None, where: tuple[Any, str]) -> Any:
        """f(batch, row) client by client; the rows of clients outside the cohort are zeros."""
        t, stage = where
        mask = np.ones(len(data), bool) if cohort is None else np.asarray(cohort.mask)
        outs: list[Any] = [None] * len(data)
        for i in np.flatnonzero(mask):
            place = f"round {int(t)}, client {int(data[i].client)}, {stage}"
            try:
                outs[i] = f(data[i], jax.tree.map(lambda a, i=i: a[i], rows))
            except FedpactError:
                raise
            except Exception as error:
                raise ClientError(f"{place}: {type(error).__name__}: {error}") from error
            _check_finite(outs[i], place, stage, int(i))
        template = next((o for o in outs if o is not None), None)
        if template is None:  # an empty cohort still needs the shapes
            template = f(data[0], jax.tree.map(lambda a: a[0], rows))
        zeros = jax.tree.map(jnp.zeros_like, template)
        return jax.tree.map(lambda *leaves: jnp.stack(leaves), *(zeros if o is None else o for o in outs))


def _check_finite(out: Any, place: str, stage: str, position: int) -> None:
    """In a client's step: what it keeps and what it uploads (notes and telemetry may hold NaN for 'none')."""
    checked = out[:2] if stage in ("client_step", "join") else ()
    for path, leaf in jax.tree_util.tree_leaves_with_path(checked):
        if jnp.issubdtype(leaf.dtype, jnp.floating) and not bool(jnp.all(jnp.isfinite(leaf))):
            raise NotFinite(f"{place}: {jax.tree_util.keystr(path)} is not finite.", position)
