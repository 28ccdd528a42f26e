"""SGD and momentum SGD with E local steps on small batches: the baselines of mini-batch SSCA.

H. Yu, S. Yang and S. Zhu, "Parallel Restarted SGD with Faster Convergence and Less Communication", AAAI 2019 (β = 0);
W. Liu, L. Chen, Y. Chen and W. Zhang, "Accelerating Federated Learning via Momentum Gradient Descent", TPDS 2020. As
the SSCA paper has them for comparison with its Algorithm 1.

Client i  w_i ← w, v_i ← v;  E times, on B rows drawn anew:  v_i ← β v_i + ∇f_i(w_i; rows),  w_i ← w_i − r_t v_i
          sends N_i w_i, N_i v_i (where β > 0) and N_i
Server    w ← Σ N_i w_i / Σ N_i,   v ← Σ N_i v_i / Σ N_i

paper → code:  E → steps, B → batch, r^(t) = ā/t^ᾱ → rate / t^rate_power, β̄ → momentum, N_i → batch.rows.
Differs from the paper: nothing. With B·E = N_i it is FedAvg of one epoch but for the draw of its batches.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from fedpact.core.contract import Algorithm, standard_measures
from fedpact.core.errors import is_number, require, require_flags, require_positive_int
from fedpact.core.keys import Purpose
from fedpact.core.settings import Settings
from fedpact.core.vector import Vector
from fedpact.problems.training import check_batches, drawn


class ServerState(NamedTuple):
    """w, v (None without momentum) and t."""

    w: Vector
    v: Any
    round: Any


class ClientState(NamedTuple):
    """Rounds the client took part in; nothing of it is used."""

    times: Any


class Hello(NamedTuple):
    """Nothing is sent before the first round."""


class Broadcast(NamedTuple):
    """w, v (None without momentum) and t."""

    w: Vector
    v: Any
    round: Any


class Upload(NamedTuple):
    """N_i w_i, N_i v_i (None without momentum) and N_i."""

    w: Vector
    v: Any
    weight: Any


class Notes(NamedTuple):
    """Passes over the client's rows, and the last batch's loss."""

    gradients: Any
    train_loss: Any


class Info(NamedTuple):
    """r_t."""

    rate: Any


def check_rates(settings: Any) -> None:
    """The constraints of r_t and β."""
    require(is_number(settings.rate) and settings.rate > 0, "rate", "above 0", settings.rate, symbol="ā")
    power, beta = settings.rate_power, settings.momentum
    require(is_number(power) and power >= 0, "rate_power", "at least 0", power, symbol="ᾱ")
    require(is_number(beta) and 0 <= beta < 1, "momentum", "in [0, 1)", beta, symbol="β")


@dataclass(frozen=True)
class LocalSGD(Settings):
    """Settings of SGD and momentum SGD with E local steps."""

    steps: int = 1  # E, steps of a client in a round
    batch: int | None = None  # B, rows a step; None: all
    rate: float = 0.3  # r_t = rate / t^rate_power
    rate_power: float = 0.3  # ᾱ
    momentum: float = 0.0  # β
    short: bool = False  # let a client with fewer rows than a batch use all it has

    name: ClassVar[str] = "local_sgd"
    sips: ClassVar[bool] = True
    presets: ClassVar = {
        "sgd": {"batch": 100},
        "momentum": {"batch": 100, "rate_power": 0.0, "momentum": 0.1},
    }

    def __post_init__(self) -> None:
        self._plain()
        require_positive_int("steps", self.steps, symbol="E")
        if self.batch is not None:
            require_positive_int("batch", self.batch, symbol="B", hint="Leave it out for all rows.")
        check_rates(self)
        require_flags(self, "short")

    def build(self, problem: Any, clients: int, rate: float) -> Algorithm:
        """Averaged models, and averaged momenta where there are any."""
        E, beta = self.steps, self.momentum

        def step_size(t: Any, w: Vector) -> Any:
            dtype = jax.tree.leaves(w.tree)[0].dtype
            return (self.rate / (t + 1.0) ** self.rate_power).astype(dtype)

        def join(w0: Vector, batch: Any, key: Any) -> tuple[ClientState, Hello]:
            return ClientState(jnp.asarray(0, jnp.int32)), Hello()

        def init(w0: Vector, hellos: Hello) -> ServerState:
            return ServerState(w0, 0.0 * w0 if beta else None, jnp.asarray(0))

        def broadcast(server: ServerState) -> Broadcast:
            return Broadcast(server.w, server.v, server.round)

        def client_step(msg: Broadcast, client: ClientState, batch: Any, grad: Any, key: Any) -> tuple[Any, ...]:
            r, n = step_size(msg.round, msg.w), batch.rows

            def step(k: Any, carry: tuple[Any, ...]) -> tuple[Any, ...]:
                w, v, _ = carry
                rows = drawn(batch, self.batch, jax.random.fold_in(key(Purpose.LOCAL), k))
                loss, g = grad.value_and_gradient(w, rows)
                v = g if v is None else beta * v + g
                return w - r * v, (v if beta else None), loss

            w, v, loss = lax.fori_loop(0, E, step, (msg.w, msg.v, jnp.zeros((), r.dtype)))
            seen = E * jnp.minimum(self.batch or n, n) / n
            notes = Notes(*(jnp.asarray(value, jnp.float64) for value in (seen, loss)))
            return ClientState(client.times + 1), Upload(n * w, n * v if beta else None, n), notes

        def server_step(server: ServerState, uploads: Upload, cohort: Any) -> tuple[ServerState, Info]:
            total = cohort.sum(uploads)
            many = jnp.where(total.weight > 0, total.weight, 1)
            new = ServerState(total.w / many, total.v / many if beta else None, server.round)
            new = jax.tree.map(lambda a, b: jnp.where(total.weight > 0, a, b), new, server)
            return new._replace(round=server.round + 1), Info(step_size(server.round, server.w))

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
            info=Info._fields,
            notes={"gradients": "sum", "train_loss": "mean"},
            rows=check_batches(self),
        )
