"""Skeleton: one gradient a round. A file to copy for a new algorithm.

H. B. McMahan, E. Moore, D. Ramage, S. Hampson and B. A. y Arcas, "Communication-Efficient Learning of Deep Networks
from Decentralized Data", AISTATS 2017. Section 2, FedSGD.

Problem   min_w (1/m) Σ_i f_i(w)

Start     client i:  r_i, the Lipschitz constant of ∇f_i, where the step needs it
Client    g_i = ∇f_i(w)
i ∈ S
Server    w ← w − γ (1/|S|) Σ_{i∈S} g_i

paper → code:  η → step (γ here), w_t → msg.w, g_k → upload.g.

Differs from the paper:
- the mean of the gradients is not weighted by n_k, so that the method and the reported objective agree.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import jax.numpy as jnp

from fedpact.core.contract import Algorithm, standard_measures
from fedpact.core.errors import is_number, require
from fedpact.core.settings import Settings
from fedpact.core.vector import Vector

# What exists, and nothing else. Hello, Broadcast and Upload cross the wire: bytes are counted from these types.


class ServerState(NamedTuple):
    """The model w and the step γ."""

    w: Vector
    gamma: Any


class ClientState(NamedTuple):
    """r_i. (A client's state holds at least one array: the loop counts the clients by it.)"""

    r: Any


class Hello(NamedTuple):
    """r_i, or 0 where the step is given. It is computed from the client's rows, and the server sees it."""

    r: Any


class Broadcast(NamedTuple):
    """The model w."""

    w: Vector


class Upload(NamedTuple):
    """g_i."""

    g: Vector


class Notes(NamedTuple):
    """Gradients computed."""

    gradients: Any


class Info(NamedTuple):
    """‖mean of the cohort's gradients‖²."""

    step_gradient: Any


def theory_step(r: Any) -> Any:
    """γ = 1/r̄ with r̄ = (1/m) Σ r_i, which bounds the Lipschitz constant of the mean's gradient."""
    return 1 / jnp.mean(r)


@dataclass(frozen=True)
class Skeleton(Settings):
    """Settings of the skeleton."""

    step: float | None = None  # γ; None: 1/r̄

    name: ClassVar[str] = "skeleton"
    presets: ClassVar = {"theory": {}}

    def __post_init__(self) -> None:
        ok = self.step is None or (is_number(self.step) and self.step > 0)
        require(ok, "step", "above 0", self.step, symbol="γ", hint="Leave it out for 1/r̄.")

    def build(self, problem: Any, clients: int, rate: float) -> Algorithm:
        """The bundle for m clients at participation rate ρ. Short names are bound here, once."""
        step = self.step

        def join(w0: Vector, batch: Any, key: Any) -> tuple[ClientState, Hello]:
            r = problem.lipschitz(batch) if step is None else jnp.zeros((), batch.x.dtype)
            return ClientState(r), Hello(r)

        def init(w0: Vector, hellos: Hello) -> ServerState:
            gamma = theory_step(hellos.r) if step is None else jnp.asarray(step, hellos.r.dtype)
            return ServerState(w0, gamma)

        def broadcast(server: ServerState) -> Broadcast:
            return Broadcast(server.w)

        def client_step(msg: Broadcast, client: ClientState, batch: Any, grad: Any, key: Any) -> tuple[Any, ...]:
            g = grad(msg.w, batch)
            return client, Upload(g), Notes(jnp.asarray(1.0, jnp.float64))

        def server_step(server: ServerState, uploads: Upload, cohort: Any) -> tuple[ServerState, Info]:
            g = cohort.mean(uploads.g, server.w * 0)  # a round may be empty: then nothing moves
            return ServerState(server.w - server.gamma * g, server.gamma), Info(g.norm2())

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
            notes={"gradients": "sum"},
            needs=frozenset({"lipschitz"}) if step is None else frozenset(),
        )
