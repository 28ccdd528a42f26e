"""Mini-batch SSCA for data split by features: clients hold columns of the same records.

Y. Cui, Y. Li and C. Ye, "Sample-based and Feature-based Federated Learning for Unconstrained and Constrained Nonconvex
Optimization via Mini-batch SSCA", arXiv 2104.06011, 2021. Algorithm 3 (no constraints) and Algorithm 4.

    min F_0(ω)   s.t.  F_m(ω) ≤ 0,     F_m(ω) = (1/N) Σ_n g_m(ω_0, Σ_i h_i(ω_i, x_n,i)),   h_i = x_n,i ω_i        (2)

Server    draws a batch N^(t) of B records; sends its numbers and ω_i to client i, and ω_0 to the closer
Client i  h_i = x_n,i ω_i for n ∈ N^(t), under a mask, to the closer, who learns Σ_i h_i alone
Closer    v_m = mean g_m, ∂F_m/∂ω_0 to the server; δ_m = ∂F_m/∂(Σh) to the clients                                (20)
Client i  ∂F_m/∂ω_i = x_iᵀ δ_m to the server                                                                      (21)
Server    b_m, a_m, κ and ω̄ as in Algorithms 1 and 2 (`ssca`), from these                                    (23), (25)
          ω ← (1−γ) ω + γ ω̄                                                                                      (18)

paper → code:  ω → w, N^(t) → rows; of `core.vertical`: h_{0,i} is Partial, q_{f,m,0} is Closed, q_{f,m,i} is Block.

Differs from the paper:
- step 4: partial sums are sent, J numbers a record, never the products ω_{1,j,p} x_{n,p}; to one client, not to all.
- the closer alone needs labels and ω_0. It computes δ once and sends it to the others.
- what `ssca` says of κ, of signs, of bounds.
- collection="one-step" is Remark 4: clients send h_i and ∂h_i/∂ω_i = x_n,i to the server. It is refused unless
  reveal_rows is true, for that reveals the rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp

from fedpact.core.contract import Algorithm
from fedpact.core.errors import require
from fedpact.core.keys import Purpose
from fedpact.core.settings import Settings
from fedpact.core.vector import Vector
from fedpact.core.vertical import WHO, Layout, Split, disclosure, overflow, traffic
from fedpact.problems.approximation import (
    Approximation,
    Estimates,
    Price,
    check_order,
    check_steps,
    first_price,
    info_of,
    next_price,
    none_yet,
    notices,
    step_sizes,
    told,
    verdict,
)
from fedpact.problems.training import drawn, share
from fedpact.problems.vertical import as_vertical, check_exchange, check_records, exchanged


class ServerState(NamedTuple):
    """ω, the estimates, ν, s, c, N with the counts, and t."""

    w: Vector
    shared: Estimates
    multipliers: Any
    slacks: Any
    price: Price
    tally: Any
    round: Any


class ClientState(NamedTuple):
    """Rounds so far; what a round needs of a client are its columns."""

    rounds: Any


class Hello(NamedTuple):
    """From the closer: N, and the counts that rates are divided by."""

    tally: Any


class Broadcast(NamedTuple):
    """ω (ω_i to client i, ω_0 to the closer) and, to the closer, the counts."""

    w: Vector
    tally: Any


class Upload(NamedTuple):
    """v_m and ∂F_m/∂ω: ω_0's part from the closer, ω_i's from client i."""

    values: Any
    gradients: Vector


class Notes(NamedTuple):
    """Passes over the records, and the first function's mean on the batch."""

    gradients: Any
    train_loss: Any


@dataclass(frozen=True)
class VerticalSSCA(Settings):
    """Settings of mini-batch SSCA for feature-split data."""

    batch: int | None = None  # B, records a round; None: all
    tau: float = 0.2  # τ, the curvature of the approximations
    rho: float = 0.9  # ρ^(t) = min(1, rho / t^rho_power): the weight of the newest batch
    rho_power: float = 0.1  # α of ρ
    gamma: float = 0.5  # γ^(t) = min(1, gamma / t^gamma_power): the step towards the minimiser
    gamma_power: float = 0.15  # α of γ
    penalty: float = 1e5  # c, the price of slack
    growth: float = 1.0  # what c is multiplied by while a slack is left
    patience: int = 100  # rounds between two looks at the slacks
    bound: float | None = None  # ‖ω‖ ≤ bound
    order: str = "random"  # batches: "random", or "stream" for records in the order they came
    collection: str = "two-step"  # "one-step" is Remark 4's
    reveal_rows: bool = False  # accept that one-step collection shows the server every raw row

    name: ClassVar[str] = "vertical_ssca"
    sips: ClassVar[bool] = True
    constrains: ClassVar[bool] = True
    vertical: ClassVar[bool] = True
    remedy: ClassVar[str] = "use a larger tau, or a smaller gamma"
    presets: ClassVar = {
        "paper": {"batch": 100},  # B = 100; the released code has the power α + 0.05 for γ
        "paper-10": {"batch": 10, "tau": 0.1, "rho_power": 0.3, "gamma": 0.3, "gamma_power": 0.35},
        "paper-1000": {"batch": 1000, "tau": 0.05, "rho": 0.3, "gamma": 0.3},
        "printed": {"batch": 100, "gamma_power": 0.1},  # both powers α, as the text has them
        "printed-10": {"batch": 10, "tau": 0.1, "rho_power": 0.3, "gamma": 0.3, "gamma_power": 0.3},
        "printed-1000": {"batch": 1000, "tau": 0.05, "rho": 0.3, "gamma": 0.3, "gamma_power": 0.1},
        "tight": {"batch": 1000, "tau": 0.05, "rho_power": 0.4, "gamma": 0.9, "gamma_power": 0.5},
        "theory": {"rho": 1.0, "rho_power": 0.6, "gamma": 1.0, "gamma_power": 0.9, "penalty": 10.0, "growth": 10.0},
    }

    def __post_init__(self) -> None:
        self._plain()
        check_steps(self)
        check_exchange(self)
        check_order(self)

    def build(self, problem: Any, clients: Any, rate: float) -> Algorithm:
        """Algorithms 3 and 4; `clients` is the layout of the columns."""
        layout: Layout = clients
        task = as_vertical(problem)
        split = Split.of(task.model)
        width = split.width(layout)
        model = Approximation(task.parts, None, self.tau, self.bound)
        titles = [part.title for part in task.parts[1:]]
        views = disclosure(layout, width, self.batch, model.estimated, self.collection)
        hint = "Give the objective a smooth term such as Loss(), or Norm2()."
        curved = task.parts[0].estimated or task.parts[0].norm2 > 0
        require(curved, "minimize", "a function with curvature", task.minimize, hint=hint)
        Info = info_of(model)

        def join(w0: Vector, batch: Any, key: Any) -> tuple[ClientState, Hello]:
            return ClientState(jnp.asarray(0, jnp.int32)), Hello(task.tally(batch))

        def init(w0: Vector, hellos: Hello) -> ServerState:
            start, tally = none_yet(w0, model.estimated), jnp.sum(hellos.tally, axis=0)
            zeros = jnp.zeros(model.multipliers)
            return ServerState(w0, start, zeros, zeros, first_price(self), tally, jnp.asarray(0))

        def broadcast(server: ServerState) -> Broadcast:
            return Broadcast(server.w, server.tally)

        def client_step(msg: Broadcast, client: ClientState, batch: Any, grad: Any, key: Any) -> tuple[Any, ...]:
            place = (client.rounds * (self.batch or 0)) % jnp.maximum(batch.rows.astype(jnp.int32), 1)
            rows = drawn(batch, self.batch, key(Purpose.LOCAL), place if self.order == "stream" else None)
            values, gradients = exchanged(layout, split, task, msg.w, rows, msg.tally)
            notes = Notes(*(jnp.asarray(v, jnp.float64) for v in (share(rows, batch), values[0])))
            return ClientState(client.rounds + 1), Upload(values, gradients), notes

        def server_step(server: ServerState, uploads: Upload, cohort: Any) -> tuple[ServerState, Any]:
            t, w = server.round + 1, server.w
            rho, gamma = step_sizes(self, t, w)
            sent = cohort.sum(uploads)  # of one: the closer's and the clients' messages together
            shared = model.update(server.shared, sent.values, sent.gradients, w, rho)  # (23), (25)
            found = model.minimise(w, shared, None, server.price.penalty)  # Problem 7 or 10
            price = next_price(self, server.price, found.slacks, t)
            w = (1 - gamma) * w + gamma * found.w  # (18)
            new = ServerState(w, shared, found.multipliers, found.slacks, price, server.tally, t)
            new = jax.tree.map(lambda a, b: jnp.where(cohort.count > 0, a, b), new, server)._replace(round=t)
            return new, Info(rho, gamma, *told(model, new.price, new.multipliers, new.slacks))

        def measure(server: ServerState, client: ClientState, batch: Any) -> dict[str, Any]:
            means, gradients = exchanged(layout, split, task, server.w, batch, server.tally)
            return task.read(model, server, batch, 1, means, gradients)

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
            reads={"kkt": "kkt"},
            observe=lambda server: server,
            wire=lambda w, rows: traffic(layout, split, w, self.batch or rows, model.estimated, self.collection),
            rows=lambda sizes: check_records(self.batch, int(sizes[0])),
            notices=(*notices(self), *views.notices),
            tables={WHO: views.table},
            breakdown=overflow(layout),
            verdict=lambda history: verdict(history, titles),
        )
