"""SCAFFOLD: control variates against client drift.

S. P. Karimireddy, S. Kale, M. Mohri, S. Reddi, S. Stich and A. T. Suresh, "SCAFFOLD: Stochastic Controlled Averaging
for Federated Learning", ICML 2020. Algorithm 1, option II.

Client    y ← x;  K times over batches b:  y ← y − η_l (g_i(y; b) − c_i + c)                                 (3)
i ∈ S     c_i⁺ = c_i − c + (x − y)/(K η_l)                                                                (4), option II
          sends Δy_i = y − x and Δc_i = c_i⁺ − c_i
Server    x ← x + (η_g/|S|) Σ_{i∈S} Δy_i,   c ← c + (1/N) Σ_{i∈S} Δc_i                                        (5)

paper → code:  N → m, η_l → rate, η_g → eta, K → steps; x, c, c_i and y keep their letters.

Invariant: c is the mean of the c_i, whoever takes part; a dropped |S|/N would break it and no convergence test.
Differs from the paper: K follows from epochs over shuffled batches, so that it differs between clients of unequal
sizes, and with vary=True between rounds; c_i⁺ has the client's own K.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp

from fedpact.core.contract import Algorithm, standard_measures
from fedpact.core.errors import is_number, require
from fedpact.core.keys import Purpose
from fedpact.core.private import Packing, Theorem
from fedpact.core.settings import Settings
from fedpact.core.vector import Vector
from fedpact.problems.training import (
    Plan,
    check_batches,
    check_training,
    local_epochs,
    noised_steps,
    train,
    whole_upload,
)


class ServerState(NamedTuple):
    """x and c."""

    x: Vector
    c: Vector


class ClientState(NamedTuple):
    """c_i."""

    c: Vector


class Hello(NamedTuple):
    """Nothing is sent before the first round."""


class Broadcast(NamedTuple):
    """x and c."""

    x: Vector
    c: Vector


class Upload(NamedTuple):
    """Δy_i and Δc_i: twice what FedAvg sends."""

    model: Vector
    control: Vector


class Notes(NamedTuple):
    """Passes over the rows, epochs, and the last epoch's loss."""

    gradients: Any
    epochs: Any
    train_loss: Any


class Info(NamedTuple):
    """‖c‖."""

    control: Any


@dataclass(frozen=True)
class Scaffold(Settings):
    """Settings of SCAFFOLD."""

    epochs: int = 5  # E
    vary: bool = False  # E_i drawn from 1..E for every client and round; false: E
    batch: int | None = None  # B, rows a step; None: all
    short: bool = False  # let a client with fewer rows than a batch use all it has
    rate: float = 0.1  # η_l, the learning rate
    eta: float = 1.0  # η_g, the server's step

    name: ClassVar[str] = "scaffold"
    ways: ClassVar = ("steps", "client")
    presets: ClassVar = {"paper": {}}

    def __post_init__(self) -> None:
        self._plain()
        check_training(self)
        require(is_number(self.eta) and self.eta > 0, "eta", "above 0", self.eta, symbol="η_g")

    def private(self, way: str, problem: Any, clients: int, rate: float, reach: float | None) -> Theorem:
        """Noise in every local gradient, or on the whole upload."""
        return whole_upload()._replace(copies=2) if way == "client" else noised_steps(self)

    def build(self, problem: Any, clients: int, rate: float) -> Algorithm:
        """Algorithm 1, option II, for m clients."""
        m, eta, plan = clients, self.eta, Plan(self.rate, 0.0, self.batch)

        def join(w0: Vector, batch: Any, key: Any) -> tuple[ClientState, Hello]:
            return ClientState(0.0 * w0), Hello()

        def init(w0: Vector, hellos: Hello) -> ServerState:
            return ServerState(w0, 0.0 * w0)

        def broadcast(server: ServerState) -> Broadcast:
            return Broadcast(server.x, server.c)

        def client_step(msg: Broadcast, client: ClientState, batch: Any, grad: Any, key: Any) -> tuple[Any, ...]:
            x, c, c_i = msg.x, msg.c, client.c
            epochs = local_epochs(jax.random.fold_in(key(Purpose.LOCAL), 0), self.epochs, self.vary)
            shuffle = jax.random.fold_in(key(Purpose.LOCAL), 1)
            y, steps, loss = train(grad, x, batch, shuffle, plan, epochs, linear=c - c_i)  # (3)
            c_new = c_i - c + (x - y) / (steps * self.rate)  # (4)
            notes = (jnp.asarray(value, jnp.float64) for value in (epochs, epochs, loss))
            return ClientState(c_new), Upload(y - x, c_new - c_i), Notes(*notes)

        def server_step(server: ServerState, uploads: Upload, cohort: Any) -> tuple[ServerState, Info]:
            dtype = jax.tree.leaves(server.x.tree)[0].dtype
            share = jnp.asarray(eta / jnp.maximum(cohort.count, 1), dtype)
            x = server.x + share * cohort.sum(uploads.model)  # (5)
            c = server.c + cohort.sum(uploads.control) / m
            return ServerState(x, c), Info(c.norm())

        def measure(msg: Broadcast, client: ClientState, batch: Any) -> dict[str, Any]:
            return standard_measures(problem, msg.x, batch)

        return Algorithm(
            name=self.name,
            join=join,
            init=init,
            broadcast=broadcast,
            client_step=client_step,
            server_step=server_step,
            measure=measure,
            model=lambda server: server.x,
            combine="sum",
            differences=True,  # c_i⁺ − c_i
            packing=Packing(
                lambda msg, upload: Vector({"model": upload.model.tree, "control": upload.control.tree}),
                lambda msg, v, count: Upload(Vector(v.tree["model"]), Vector(v.tree["control"])),
            ),
            info=Info._fields,
            notes={"gradients": "sum", "epochs": "mean", "train_loss": "mean"},
            rows=check_batches(self),
        )
