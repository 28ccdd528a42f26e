"""Mini-batch SSCA: successive convex approximation, without or with constraints, for rows spread over clients.

Y. Cui, Y. Li and C. Ye, "Sample-based and Feature-based Federated Learning for Unconstrained and Constrained Nonconvex
Optimization via Mini-batch SSCA", arXiv 2104.06011, 2021. Algorithm 1 (no constraints) and Algorithm 2.

    min F_0(ω)   s.t.  F_m(ω) ≤ 0,  m = 1..M         F_m = (1/N) Σ_n f_m(ω; x_n), plus norms kept as they are

Client i  draws B of its N_i rows;  for every m:  v_i,m = mean f_m(ω; x_n),  g_i,m = mean ∇f_m(ω; x_n)
          sends N_i v_i,m, N_i g_i,m and N_i
Server    v_m = Σ N_i v_i,m / Σ N_i,   g_m = Σ N_i g_i,m / Σ N_i
          b_m ← (1−ρ) b_m + ρ (v_m − g_m·ω + τ‖ω‖²)                                                        (3), (14)
          a_m ← (1−ρ) a_m + ρ (g_m − 2τ ω),    κ ← (1−ρ) κ + ρ                                             (9)
          ω̄, s = argmin  F̄_0(ω) + c Σ s_m   s.t.  F̄_m(ω) ≤ s_m,  s_m ≥ 0                                   Problem 2, 5
                 F̄_m(ω) = (b_m + a_m·ω)/κ + τ‖ω‖² + the norms − the limit                                  (8), (15)
          ω ← (1−γ) ω + γ ω̄                                                                                (5)
          every `patience` rounds, while a slack is left that has not halved:  c ← growth · c              Theorem 2

paper → code:  ω → w, f̂_{m,0} → b, f̂_{m,1} → a, I → clients, ρ^(t) = min(1, rho/t^rho_power),
γ^(t) = min(1, gamma/t^gamma_power). Without constraints ω̄ = −(a/κ)/(2τ)  (10); for min ‖ω‖² s.t. F(ω) ≤ U it is
Lemma 1's; otherwise `problems.surrogate` solves it.

Differs from the paper:
- b_m and a_m start from 0, so they are κ = 1−Π(1−ρ) times a mean of what the rounds gave: they are divided by κ. The
  paper's (10) and Lemma 1 take κ for 1, which it is only if ρ^(1) = 1.
- the sign of c̄ in (31), and the last case of Appendix C, are corrected (Lemma 1 is written for b + a·ω + τ‖ω‖² ≤ s).
- c rises where a slack is left that has not halved since the last look, up to 1e12; Theorem 2 has any c_j ↑ ∞.
- clients that do not take part are left out of the means; the paper has everyone in every round.
- a bound ‖ω‖ ≤ bound (footnote 11), clients' own losses as constraints, batches in the order rows came (footnote 3).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedpact.core.contract import Algorithm, Batch
from fedpact.core.errors import require, require_flags, require_positive_int
from fedpact.core.keys import Purpose
from fedpact.core.settings import Settings
from fedpact.core.vector import Vector
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
    update,
    verdict,
)
from fedpact.problems.constraints import as_constrained
from fedpact.problems.training import check_batches, drawn, share


class ServerState(NamedTuple):
    """ω, the estimates of the functions all clients share and of each client's own loss, ν, s, c, the counts, and t."""

    w: Vector
    shared: Estimates
    own: Estimates | None
    multipliers: Any
    slacks: Any
    price: Price
    tally: Any
    round: Any


class ClientState(NamedTuple):
    """Where the next batch begins, for batches in the order rows came."""

    place: Any


class Hello(NamedTuple):
    """N_i, and this client's part of the counts that rates are divided by."""

    tally: Any


class Broadcast(NamedTuple):
    """ω, and N with the counts over all clients."""

    w: Vector
    tally: Any


class Upload(NamedTuple):
    """N_i v_i,m, N_i g_i,m and N_i; and i, its own loss and the gradient of that where those are limited."""

    values: Any
    gradients: Vector
    weight: Any
    own: Any


class Own(NamedTuple):
    """A client's number, its own loss and the gradient of that."""

    client: Any
    value: Any
    gradient: Vector


class Notes(NamedTuple):
    """Passes over the client's rows, and the first smooth function's value on the batch."""

    gradients: Any
    train_loss: Any


@dataclass(frozen=True)
class SSCA(Settings):
    """Settings of mini-batch SSCA."""

    batch: int | None = None  # B, rows of each client a round; None: all
    tau: float = 0.05  # τ, the curvature of the approximations
    rho: float = 0.3  # ρ^(t) = min(1, rho / t^rho_power): the weight of the newest batch
    rho_power: float = 0.1  # α of ρ
    gamma: float = 0.3  # γ^(t) = min(1, gamma / t^gamma_power): the step towards the minimiser
    gamma_power: float = 0.15  # α of γ
    penalty: float = 1e5  # c, the price of slack
    growth: float = 1.0  # what c is multiplied by while a slack is left
    patience: int = 100  # rounds between two looks at the slacks
    bound: float | None = None  # ‖ω‖ ≤ bound
    order: str = "random"  # batches: "random", or "stream" for rows in the order they came
    short: bool = False  # let a client with fewer rows than a batch use all it has

    name: ClassVar[str] = "ssca"
    sips: ClassVar[bool] = True
    constrains: ClassVar[bool] = True
    remedy: ClassVar[str] = "use a larger tau, or a smaller gamma"
    presets: ClassVar = {
        "paper": {"batch": 100},  # B = 100; the released code has the power α + 0.05 for γ
        "paper-10": {"batch": 10, "tau": 0.2, "rho": 0.9, "gamma": 0.5},
        "paper-6000": {"batch": 6000, "tau": 0.03, "rho": 0.2},
        "printed": {"batch": 100, "gamma_power": 0.1},  # both powers α, as the text has them
        "printed-10": {"batch": 10, "tau": 0.2, "rho": 0.9, "gamma": 0.5, "gamma_power": 0.1},
        "printed-6000": {"batch": 6000, "tau": 0.03, "rho": 0.2, "gamma_power": 0.1},
        "tight": {"batch": 100, "rho": 0.9, "rho_power": 0.4, "gamma": 0.9, "gamma_power": 0.5},
        "theory": {"rho": 1.0, "rho_power": 0.6, "gamma": 1.0, "gamma_power": 0.9, "penalty": 10.0, "growth": 10.0},
    }

    def __post_init__(self) -> None:
        self._plain()
        check_steps(self)
        if self.batch is not None:
            require_positive_int("batch", self.batch, symbol="B", hint="Leave it out for all rows.")
        check_order(self)
        require_flags(self, "short")

    def build(self, problem: Any, clients: int, rate: float) -> Algorithm:
        """Algorithms 1 and 2 for I clients."""
        task = as_constrained(problem)
        caps = None if task.caps is None else tuple(np.broadcast_to(task.caps, clients).tolist())
        model = Approximation(task.parts, caps, self.tau, self.bound)
        stream, titles = self.order == "stream", [part.title for part in task.parts[1:]]
        hint = "Give the objective a smooth term such as Loss(), or Norm2()."
        curved = task.parts[0].estimated or task.parts[0].norm2 > 0
        require(curved, "minimize", "a function with curvature", task.minimize, hint=hint)
        Info = info_of(model)

        def join(w0: Vector, batch: Any, key: Any) -> tuple[ClientState, Hello]:
            return ClientState(jnp.asarray(0, jnp.int32)), Hello(task.tally(batch))

        def init(w0: Vector, hellos: Hello) -> ServerState:
            start, tally = none_yet(w0, model.estimated), jnp.sum(hellos.tally, axis=0)
            own = None if caps is None else none_yet(w0, clients)._replace(kappa=jnp.zeros(clients))
            zeros = jnp.zeros(model.multipliers)
            return ServerState(w0, start, own, zeros, zeros, first_price(self), tally, jnp.asarray(0))

        def broadcast(server: ServerState) -> Broadcast:
            return Broadcast(server.w, server.tally)

        def own_loss(w: Vector, rows: Batch) -> Own | None:
            return None if caps is None else Own(rows.client, *jax.value_and_grad(task.own_loss)(w, rows))

        def client_step(msg: Broadcast, client: ClientState, batch: Any, grad: Any, key: Any) -> tuple[Any, ...]:
            rows = drawn(batch, self.batch, key(Purpose.LOCAL), client.place if stream else None)
            values, gradients = task.values_and_gradients(grad, msg.w, rows, msg.tally)
            n = batch.rows
            place = (client.place + (self.batch or 0)) % jnp.maximum(n.astype(jnp.int32), 1)
            seen = values[0] if model.estimated else 0.0
            notes = Notes(*(jnp.asarray(v, jnp.float64) for v in (share(rows, batch), seen)))
            return ClientState(place), Upload(n * values, n * gradients, n, own_loss(msg.w, rows)), notes

        def server_step(server: ServerState, uploads: Upload, cohort: Any) -> tuple[ServerState, Any]:
            t, w = server.round + 1, server.w
            rho, gamma = step_sizes(self, t, w)
            total = cohort.sum(uploads._replace(own=None))
            many = jnp.where(total.weight > 0, total.weight, 1)
            shared = model.update(server.shared, total.values / many, total.gradients / many, w, rho)  # (9), (14)
            own = None if server.own is None else own_estimates(server.own, w, uploads.own, cohort, rho)
            found = model.minimise(w, shared, own, server.price.penalty)  # Problem 2 or 5
            price = next_price(self, server.price, found.slacks, t)
            new = server._replace(
                w=(1 - gamma) * w + gamma * found.w,  # (5)
                shared=shared,
                own=own,
                multipliers=found.multipliers,
                slacks=found.slacks,
                price=price,
            )
            new = jax.tree.map(lambda a, b: jnp.where(total.weight > 0, a, b), new, server)._replace(round=t)
            return new, Info(rho, gamma, *told(model, new.price, new.multipliers, new.slacks))

        def own_estimates(old: Estimates, w: Vector, sent: Own, cohort: Any, rho: Any) -> Estimates:
            """Each client's own loss, by its number; who did not take part keeps the estimate it had."""
            place = jnp.where(cohort.mask, sent.client, clients)  # beyond the end, where it is dropped
            put = lambda old, new: jnp.zeros_like(old).at[place].set(new, mode="drop")
            here = put(old.kappa, jnp.full(place.shape, rho))
            return update(old, put(old.b, sent.value), old.a.map(put, sent.gradient), w, here, self.tau)

        def measure(server: ServerState, client: ClientState, batch: Any) -> dict[str, Any]:
            return task.measure(model, server, batch, clients)

        return Algorithm(
            name=self.name,
            join=join,
            init=init,
            broadcast=broadcast,
            client_step=client_step,
            server_step=server_step,
            measure=measure,
            model=lambda server: server.w,
            combine="sum" if caps is None else "each",
            info=Info._fields,
            notes={"gradients": "sum", "train_loss": "mean"},
            reads={"kkt": "kkt", "worst_client": "largest"},
            observe=lambda server: server,
            rows=check_batches(self),
            notices=notices(self),
            verdict=lambda history: verdict(history, [*titles, *(["worst_client"] if caps else [])]),
        )
