"""FedSGD: one gradient of every client of the round, and one step of the server.

H. B. McMahan, E. Moore, D. Ramage, S. Hampson and B. A. y Arcas, "Communication-Efficient Learning of Deep Networks
from Decentralized Data", AISTATS 2017. Algorithm 1 with E = 1 and B = ∞.

Client    g_i = ∇f_i(w) on all rows;  sends p_i g_i and p_i
Server    w ← w − η Σ_{i∈S} p_i g_i / Σ_{i∈S} p_i

paper → code:  η → rate, n_k → batch.rows.
Differs from the paper: p_i = 1 by default, as the reported objective has it; weights="rows" is p_i = d_i.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp

from fedpact.core.contract import Algorithm, standard_measures
from fedpact.core.errors import is_number, require, require_one_of
from fedpact.core.settings import Settings
from fedpact.core.vector import Vector


class ServerState(NamedTuple):
    """The model w."""

    w: Vector


class ClientState(NamedTuple):
    """How often the client took part; nothing of it is used."""

    times: Any


class Hello(NamedTuple):
    """Nothing is sent before the first round."""


class Broadcast(NamedTuple):
    """The model w."""

    w: Vector


class Upload(NamedTuple):
    """p_i g_i and p_i."""

    weighted: Vector
    weight: Any


class Notes(NamedTuple):
    """One pass over the rows, and the loss at w."""

    gradients: Any
    train_loss: Any


class Info(NamedTuple):
    """Nothing to add."""


@dataclass(frozen=True)
class FedSGD(Settings):
    """Settings of FedSGD."""

    rate: float = 0.1  # η, the server's step
    weights: str = "uniform"  # "uniform", or "rows" for p_i = d_i

    name: ClassVar[str] = "fedsgd"
    presets: ClassVar = {"paper": {"weights": "rows"}}

    def __post_init__(self) -> None:
        self._plain()
        require(is_number(self.rate) and self.rate > 0, "rate", "above 0", self.rate, symbol="η")
        require_one_of("weights", self.weights, ("uniform", "rows"))

    def build(self, problem: Any, clients: int, rate: float) -> Algorithm:
        """Averaged gradients."""

        def join(w0: Vector, batch: Any, key: Any) -> tuple[ClientState, Hello]:
            return ClientState(jnp.asarray(0, jnp.int32)), Hello()

        def init(w0: Vector, hellos: Hello) -> ServerState:
            return ServerState(w0)

        def broadcast(server: ServerState) -> Broadcast:
            return Broadcast(server.w)

        def client_step(msg: Broadcast, client: ClientState, batch: Any, grad: Any, key: Any) -> tuple[Any, ...]:
            loss, g = grad.value_and_gradient(msg.w, batch)
            p = batch.rows if self.weights == "rows" else jnp.ones_like(batch.rows)
            notes = Notes(jnp.asarray(1, jnp.float64), jnp.asarray(loss, jnp.float64))
            return ClientState(client.times + 1), Upload(p * g, p), notes

        def server_step(server: ServerState, uploads: Upload, cohort: Any) -> tuple[ServerState, Info]:
            dtype = jax.tree.leaves(server.w.tree)[0].dtype
            total = cohort.sum(uploads)
            share = jnp.where(total.weight > 0, self.rate / jnp.where(total.weight > 0, total.weight, 1), 0)
            return ServerState(server.w - jnp.asarray(share, dtype) * total.weighted), Info()

        def measure(msg: Broadcast, client: ClientState, batch: Any) -> dict[str, Any]:
            return standard_measures(problem, msg.w, batch)

        return Algorithm(
            name=self.name,
            join=join,
            init=init,
            broadcast=broadcast,
            client_step=client_step,
            server_step=server_step,
            measure=measure,
            model=lambda server: server.w,
            combine="sum",
            notes={"gradients": "sum", "train_loss": "mean"},
        )
