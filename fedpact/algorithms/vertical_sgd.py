"""SGD and momentum SGD for data split by features: the baselines of feature-based SSCA.

S. Hardy et al., "Private federated learning on vertically partitioned data via entity resolution and additively
homomorphic encryption", arXiv 1711.10677, 2017, extended to I clients and any loss as the SSCA paper does (Remark 3):
the baseline of its Algorithm 3.

Client i, closer   the messages of `vertical_ssca`: together the gradient g of a batch of B records
Server             v ← β v + g,   w ← w − r_t v

paper → code:  r^(t) = ā/t^ᾱ → rate / t^rate_power, β̄ → momentum.
Differs from the paper: no homomorphic encryption; who sees what is said on the page of `vertical_ssca`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp

from fedpact.core.contract import Algorithm
from fedpact.core.errors import is_number, require
from fedpact.core.keys import Purpose
from fedpact.core.settings import Settings
from fedpact.core.vector import Vector
from fedpact.core.vertical import WHO, Layout, Split, disclosure, overflow, traffic
from fedpact.problems.approximation import Approximation
from fedpact.problems.training import drawn, share
from fedpact.problems.vertical import as_vertical, check_exchange, check_records, exchanged


class ServerState(NamedTuple):
    """w, v, N with the counts, and t."""

    w: Vector
    v: Vector
    tally: Any
    round: Any


class ClientState(NamedTuple):
    """Rounds so far; what a round needs of a client are its columns."""

    rounds: Any


class Hello(NamedTuple):
    """From the closer: N, and the counts that rates are divided by."""

    tally: Any


class Broadcast(NamedTuple):
    """w (ω_i to client i, ω_0 to the closer) and, to the closer, the counts."""

    w: Vector
    tally: Any


class Upload(NamedTuple):
    """The mean over the batch and its gradient by w: ω_0's part from the closer, ω_i's from client i."""

    values: Any
    gradients: Vector


class Notes(NamedTuple):
    """Passes over the records, and the mean on the batch."""

    gradients: Any
    train_loss: Any


class Info(NamedTuple):
    """r_t."""

    rate: Any


@dataclass(frozen=True)
class VerticalSGD(Settings):
    """Settings of SGD and momentum SGD for feature-split data."""

    batch: int | None = None  # B, records a round; None: all
    rate: float = 0.3  # r_t = rate / t^rate_power
    rate_power: float = 0.3  # ᾱ
    momentum: float = 0.0  # β
    collection: str = "two-step"  # "one-step" is Remark 4's
    reveal_rows: bool = False  # accept that one-step collection shows the server every raw row

    name: ClassVar[str] = "vertical_sgd"
    sips: ClassVar[bool] = True
    vertical: ClassVar[bool] = True
    presets: ClassVar = {
        "sgd": {"batch": 100},
        "momentum": {"batch": 100, "rate_power": 0.0, "momentum": 0.1},
    }

    def __post_init__(self) -> None:
        self._plain()
        check_exchange(self)
        require(is_number(self.rate) and self.rate > 0, "rate", "above 0", self.rate, symbol="ā")
        power, beta = self.rate_power, self.momentum
        require(is_number(power) and power >= 0, "rate_power", "at least 0", power, symbol="ᾱ")
        require(is_number(beta) and 0 <= beta < 1, "momentum", "in [0, 1)", beta, symbol="β")

    def build(self, problem: Any, clients: Any, rate: float) -> Algorithm:
        """Steps along the batch's gradient; `clients` is the layout of the columns."""
        layout: Layout = clients
        task = as_vertical(problem)
        split = Split.of(task.model)
        views = disclosure(layout, split.width(layout), self.batch, 1, self.collection)
        goal = Approximation(task.parts, None, 1.0, None)
        hint = "Constraints need vertical_ssca."
        require(not goal.constraints, "subject_to", "empty for vertical_sgd", task.subject_to, hint=hint)
        require(task.parts[0].norm1 == 0, "minimize", "smooth for vertical_sgd", task.minimize)

        def join(w0: Vector, batch: Any, key: Any) -> tuple[ClientState, Hello]:
            return ClientState(jnp.asarray(0, jnp.int32)), Hello(task.tally(batch))

        def init(w0: Vector, hellos: Hello) -> ServerState:
            return ServerState(w0, 0.0 * w0, jnp.sum(hellos.tally, axis=0), jnp.asarray(0))

        def broadcast(server: ServerState) -> Broadcast:
            return Broadcast(server.w, server.tally)

        def client_step(msg: Broadcast, client: ClientState, batch: Any, grad: Any, key: Any) -> tuple[Any, ...]:
            rows = drawn(batch, self.batch, key(Purpose.LOCAL))
            values, gradients = exchanged(layout, split, task, msg.w, rows, msg.tally)
            notes = Notes(*(jnp.asarray(v, jnp.float64) for v in (share(rows, batch), values[0])))
            return ClientState(client.rounds + 1), Upload(values, gradients), notes

        def server_step(server: ServerState, uploads: Upload, cohort: Any) -> tuple[ServerState, Info]:
            dtype = jax.tree.leaves(server.w.tree)[0].dtype
            r = (self.rate / (server.round + 1.0) ** self.rate_power).astype(dtype)
            g, _ = goal.weighted([1.0], cohort.sum(uploads).gradients, server.w)
            v = self.momentum * server.v + g
            new = server._replace(w=server.w - r * v, v=v)
            new = jax.tree.map(lambda a, b: jnp.where(cohort.count > 0, a, b), new, server)
            return new._replace(round=server.round + 1), Info(r)

        def measure(server: ServerState, client: ClientState, batch: Any) -> dict[str, Any]:
            means, gradients = exchanged(layout, split, task, server.w, batch, server.tally)
            return task.read(goal, server, batch, 1, means, gradients)

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
            info=Info._fields,
            notes={"gradients": "sum", "train_loss": "mean"},
            observe=lambda server: server,
            wire=lambda w, rows: traffic(layout, split, w, self.batch or rows, 1, self.collection),
            rows=lambda sizes: check_records(self.batch, int(sizes[0])),
            notices=views.notices,
            tables={WHO: views.table},
            breakdown=overflow(layout),
        )
