"""FedAvg and FedProx as the inexact ADMM paper states them.

S. Zhou and G. Y. Li, "Federated Learning via Inexact ADMM", 2022. Algorithm 2. They differ from the standard methods in
who is averaged (FedAvg: everyone's last model, stale ones too) and when a client restarts (FedProx: never).

Start     client i:  w_i⁰ = 0;  Ω⁰ = [m]
Server    FedAvg:   w^{τ+1} = (1/m) Σ_{i=1}^m w_i                                                              (3.14)
          FedProx:  w^{τ+1} = (1/|Ω|) Σ_{i∈Ω} w_i                                                              (3.15)
Client    k0 times, γ_k = a/log2(k+2):
i ∈ Ω     FedAvg:   w_i ← w_i − (γ_k/m) ∇f_i(w_i),  from w_i = w^{τ+1}                                         (3.16)
          FedProx:  w_i ← w_i − (γ_k/m) (∇f_i(w_i) + μ(w_i − w^{τ+1})),  from its own w_i                      (3.17)
i ∉ Ω     keeps w_i

paper → code:  k0 → k0, γ_k = γ(a) → a, μ → mu, w^τ → msg.w, w_i → client.w, τ → msg.round, m → clients.

Differs from the paper:
- (3.17) prints +μ(w_i − w^τ) outside the step, which drives the models apart: the term is part of the gradient here.
- γ_k = a/log2(k+1) is infinite at k = 0: log2(k+2) here.
- μ is not given: it is tuned where figures are redrawn.
- for FedAvg the upload is the change of w_i, so that the server holds one sum.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import jax.numpy as jnp
from jax import lax

from fedpact.core.contract import Algorithm, standard_measures
from fedpact.core.errors import is_number, require, require_positive_int
from fedpact.core.settings import Settings
from fedpact.core.vector import Vector


class ServerState(NamedTuple):
    """w and the round τ."""

    w: Vector
    round: Any


class ClientState(NamedTuple):
    """w_i."""

    w: Vector


class Hello(NamedTuple):
    """Nothing is sent before the first round: everyone starts from w⁰."""


class Broadcast(NamedTuple):
    """w^{τ+1} and τ."""

    w: Vector
    round: Any


class Upload(NamedTuple):
    """FedAvg: the change of w_i since it was last sent. FedProx: w_i."""

    w: Vector


class Notes(NamedTuple):
    """Gradients computed."""

    gradients: Any


class Info(NamedTuple):
    """Nothing to add."""


def check_rate(k0: Any, a: Any) -> None:
    """The constraints both share."""
    require_positive_int("k0", k0, hint="It is the number of local steps in a round.")
    require(is_number(a) and a > 0, "a", "above 0", a, hint="γ_k = a/log2(k+2) is divided by m.")


@dataclass(frozen=True)
class FedAvgStale(Settings):
    """FedAvg as the inexact ADMM paper has it: the mean of everyone's last model, stale ones too."""

    k0: int = 5  # local steps in a round, Section 5.4
    a: float = 0.005  # γ_k = a/log2(k+2); Section 5.3: 0.005 for Example 5.1, 0.5d/m for Example 5.2

    name: ClassVar[str] = "fedavg_stale"
    remedy: ClassVar[str] = "take shorter steps: a smaller a"
    presets: ClassVar = {"paper": {}}

    def __post_init__(self) -> None:
        self._plain()
        check_rate(self.k0, self.a)

    def build(self, problem: Any, clients: int, rate: float) -> Algorithm:
        """(3.14) and (3.16)."""
        k0, a, m = self.k0, self.a, clients

        def client_step(msg: Broadcast, client: ClientState, batch: Any, grad: Any, key: Any) -> tuple[Any, ...]:
            def local(j: Any, w_i: Vector) -> Vector:
                gamma = decayed(a, msg.round * k0 + j, batch)
                return w_i - (gamma / m) * grad(w_i, batch)  # (3.16)

            w_i = lax.fori_loop(0, k0, local, msg.w)
            return ClientState(w_i), Upload(w_i - client.w), Notes(jnp.asarray(float(k0)))

        def server_step(server: ServerState, uploads: Upload, cohort: Any) -> tuple[ServerState, Info]:
            w = server.w + cohort.sum(uploads.w) / m  # (3.14)
            return ServerState(w, server.round + 1), Info()

        return bundle(self.name, problem, client_step, server_step)._replace(differences=True)


@dataclass(frozen=True)
class FedProxLocal(Settings):
    """FedProx as the inexact ADMM paper has it, corrected: clients go on from their own models."""

    k0: int = 5  # local steps in a round, Section 5.4
    a: float = 0.005  # γ_k = a/log2(k+2); Section 5.3: 0.005 for Example 5.1, 0.5d/m for Example 5.2
    mu: float = 0.1  # μ, the weight of the proximal term; the paper does not give it

    name: ClassVar[str] = "fedprox_local"
    remedy: ClassVar[str] = "take shorter steps: a smaller a"
    presets: ClassVar = {"paper": {}}

    def __post_init__(self) -> None:
        self._plain()
        check_rate(self.k0, self.a)
        require(is_number(self.mu) and self.mu >= 0, "mu", "at least 0", self.mu, symbol="μ")

    def build(self, problem: Any, clients: int, rate: float) -> Algorithm:
        """(3.15) and (3.17)."""
        k0, a, m, mu = self.k0, self.a, clients, self.mu

        def client_step(msg: Broadcast, client: ClientState, batch: Any, grad: Any, key: Any) -> tuple[Any, ...]:
            w = msg.w

            def local(j: Any, w_i: Vector) -> Vector:
                gamma = decayed(a, msg.round * k0 + j, batch)
                return w_i - (gamma / m) * (grad(w_i, batch) + mu * (w_i - w))  # (3.17)

            w_i = lax.fori_loop(0, k0, local, client.w)
            return ClientState(w_i), Upload(w_i), Notes(jnp.asarray(float(k0)))

        def server_step(server: ServerState, uploads: Upload, cohort: Any) -> tuple[ServerState, Info]:
            return ServerState(cohort.mean(uploads.w, server.w), server.round + 1), Info()  # (3.15)

        return bundle(self.name, problem, client_step, server_step)


def decayed(a: float, k: Any, batch: Any) -> Any:
    """γ_k = a/log2(k+2), in the data's precision."""
    return (a / jnp.log2(k + 2.0)).astype(batch.weight.dtype)


def bundle(name: str, problem: Any, client_step: Any, server_step: Any) -> Algorithm:
    """What the two share: the start, the broadcast and the telemetry."""

    def join(w0: Vector, batch: Any, key: Any) -> tuple[ClientState, Hello]:
        return ClientState(w0), Hello()

    def init(w0: Vector, hellos: Hello) -> ServerState:
        return ServerState(w0, jnp.asarray(0))  # the mean of m equal models

    def measure(msg: Broadcast, client: ClientState, batch: Any) -> dict[str, Any]:
        return standard_measures(problem, msg.w, batch)

    return Algorithm(
        name=name,
        join=join,
        init=init,
        broadcast=lambda server: Broadcast(server.w, server.round),
        client_step=client_step,
        server_step=server_step,
        measure=measure,
        model=lambda server: server.w,
        combine="sum",
        notes={"gradients": "sum"},
    )
