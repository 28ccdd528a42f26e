"""FedAvg: local gradient steps, then the mean of the models.

H. B. McMahan, E. Moore, D. Ramage, S. Hampson and B. A. y Arcas, "Communication-Efficient Learning of Deep Networks
from Decentralized Data", AISTATS 2017. Algorithm 1.

Server    w ← Σ_{i∈S} p_i w_i / Σ_{i∈S} p_i
Client    w_i ← w;  `steps` times:  w_i ← w_i − γ ∇f_i(w_i), on all rows or on a batch drawn with replacement;
i ∈ S     or, where `epochs` is given, E passes over shuffled batches
          sends p_i w_i and p_i

paper → code:  η → step (γ here), E and B → epochs and batch, n_k → batch.rows, w_{t+1}^k → w_i.

Differs from the paper:
- p_i = 1 by default, so that the method and the reported objective (1/m) Σ f_i agree; weights="rows" is p_i = d_i.
- rows are dealt into batches anew in every epoch, where the paper deals them once a round.
- without `epochs`, `steps` gradient steps instead of passes over shuffled batches.
- with `epochs`, local steps may have momentum, and E_i may be drawn from 1..E (`vary`).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from fedpact.core.contract import Algorithm, Batch, standard_measures
from fedpact.core.errors import is_number, require, require_one_of, require_positive_int, unknown
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
    """The model w."""

    w: Vector


class ClientState(NamedTuple):
    """γ, this client's step size."""

    gamma: Any


class Hello(NamedTuple):
    """Nothing is sent before the first round."""


class Broadcast(NamedTuple):
    """The model w."""

    w: Vector


class Upload(NamedTuple):
    """p_i w_i and p_i: a sum over clients is all the server needs."""

    weighted: Vector
    weight: Any


class Notes(NamedTuple):
    """Gradients computed, counted in passes over all of the client's rows; with epochs, the last one's loss."""

    gradients: Any
    train_loss: Any = math.nan


class Info(NamedTuple):
    """Nothing to add."""


def draw(batch: Batch, size: int, key: Any) -> Batch:
    """`size` of the client's rows, with replacement; each weighs d_i/size, so that the batch still counts d_i rows.

    Then the batch's gradient is an unbiased ∇f_i: a regulariser divided by d_i stays divided by d_i, not by `size`.
    """
    rows = jax.random.randint(key, (size,), 0, batch.rows.astype(jnp.int32))
    return Batch(batch.x[rows], batch.y[rows], jnp.full(size, batch.rows / size), batch.client)


def check_draws(settings: Any) -> Callable[[np.ndarray], None]:
    """The check of clients' numbers of rows against a batch drawn with replacement: some client must have so many."""

    def check(sizes: np.ndarray) -> None:
        most = int(sizes.max())
        hint = "Leave it out: all rows cost less and have no noise."
        ok = settings.batch is None or settings.batch <= most
        require(ok, "batch", f"at most the {most} rows of the largest client", settings.batch, symbol="B", hint=hint)

    return check


class _Training(NamedTuple):
    """The settings of passes over batches, by the names that `check_training` has for them."""

    epochs: Any
    batch: Any
    rate: Any
    momentum: Any
    vary: Any
    short: Any


def check_local(settings: Any) -> None:
    """The constraints FedAvg and FedProx share."""
    require_positive_int("steps", settings.steps)
    step = settings.step
    if isinstance(step, str) and step != "lipschitz":
        raise unknown("step", step, ("lipschitz", "a number"))
    ok = isinstance(step, str) or (is_number(step) and step > 0)
    require(ok, "step", "above 0", step, symbol="γ")
    require(is_number(settings.scale) and settings.scale > 0, "scale", "above 0", settings.scale)
    if settings.epochs is not None:
        hint = "With epochs the step is the learning rate, such as 0.1."
        require(step != "lipschitz", "step", "a number where epochs is given", step, symbol="γ", hint=hint)
        hint = "Passes over the rows take the place of steps: give one of the two."
        usual = next(f.default for f in dataclasses.fields(settings) if f.name == "steps")
        require(settings.steps == usual, "steps", "left out where epochs is given", settings.steps, hint=hint)
        check_training(
            _Training(settings.epochs, settings.batch, step, settings.momentum, settings.vary, settings.short)
        )
    if settings.batch is not None:
        require_positive_int("batch", settings.batch, symbol="B")
    for name, default in (("momentum", 0.0), ("vary", False), ("short", False)):
        value = getattr(settings, name)
        unused = settings.epochs is not None or (isinstance(value, bool | int | float) and value == default)
        require(unused, name, "left out without epochs", value, hint="Give epochs=E.")
    require_one_of("weights", settings.weights, ("uniform", "rows"))


@dataclass(frozen=True)
class FedAvg(Settings):
    """Settings of FedAvg."""

    steps: int = 12  # local gradient steps in a round
    step: float | str = "lipschitz"  # γ: a number, or "lipschitz" for 1/r_i
    scale: float = 1.0  # multiplies γ
    batch: int | None = None  # rows a step; None: all
    weights: str = "uniform"  # "uniform", or "rows" for p_i = d_i
    epochs: int | None = None  # E passes over shuffled batches instead of `steps`
    momentum: float = 0.0  # of the local optimiser, with epochs
    vary: bool = False  # with epochs: E_i drawn from 1..E for every client and round
    short: bool = False  # with epochs: let a client with fewer rows than a batch use all it has

    name: ClassVar[str] = "fedavg"
    ways: ClassVar = ("steps", "client")
    remedy: ClassVar[str] = "take shorter steps: a smaller scale"
    presets: ClassVar = {"lipschitz": {}, "rows": {"weights": "rows"}}

    def __post_init__(self) -> None:
        self._plain()
        check_local(self)

    def private(self, way: str, problem: Any, clients: int, rate: float, reach: float | None) -> Theorem:
        """Noise in every local gradient, or on the whole upload."""
        return private_local(self, way)

    def build(self, problem: Any, clients: int, rate: float) -> Algorithm:
        """Local steps without a proximal term."""
        return build_local(self, problem, mu=0.0)


def private_local(settings: Any, way: str) -> Theorem:
    """The private modes that FedAvg and FedProx share."""
    if way == "client":
        hint = "A step size of 1/r_i is computed from the data."
        require(settings.step != "lipschitz", "step", "a number in a private run", settings.step, symbol="γ", hint=hint)
        hint = "The uploads are clipped and must weigh the same."
        require(settings.weights == "uniform", "weights", '"uniform" for way client', settings.weights, hint=hint)
        return whole_upload()._replace(stateless=True)
    hint = "Local steps are noised where they are passes over the rows: give epochs, step and, for samples, batch."
    require(settings.epochs is not None, "epochs", "given in a private run", None, symbol="E", hint=hint)
    return noised_steps(settings)


def build_local(settings: Any, problem: Any, *, mu: float) -> Algorithm:
    """FedAvg, or FedProx where μ > 0: the two differ in one term."""
    steps, size = settings.steps, settings.batch
    by_lipschitz, by_rows = settings.step == "lipschitz", settings.weights == "rows"
    native = getattr(problem, "native", False) and settings.epochs is None
    hint = "Train by epochs, such as epochs=2: those are PyTorch's own."
    require(not native, "epochs", "given for a problem that is not JAX's", settings.epochs, symbol="E", hint=hint)

    def join(w0: Vector, batch: Any, key: Any) -> tuple[ClientState, Hello]:
        gamma = 1 / (problem.lipschitz(batch) + mu) if by_lipschitz else jnp.asarray(settings.step, batch.weight.dtype)
        return ClientState(settings.scale * gamma), Hello()

    def init(w0: Vector, hellos: Hello) -> ServerState:
        return ServerState(w0)

    def broadcast(server: ServerState) -> Broadcast:
        return Broadcast(server.w)

    def client_step(msg: Broadcast, client: ClientState, batch: Any, grad: Any, key: Any) -> tuple[Any, ...]:
        w = msg.w
        p = batch.rows if by_rows else jnp.ones_like(batch.rows)
        if settings.epochs is not None:
            epochs = local_epochs(jax.random.fold_in(key(Purpose.LOCAL), 0), settings.epochs, settings.vary)
            shuffle = jax.random.fold_in(key(Purpose.LOCAL), 1)
            plan = Plan(client.gamma, settings.momentum, size)
            center: dict[str, Any] = {"rho": mu, "center": w} if mu else {}
            w_i, _, loss = train(grad, w, batch, shuffle, plan, epochs, **center)
            return client, Upload(p * w_i, p), Notes(*(jnp.asarray(v, jnp.float64) for v in (epochs, loss)))

        def local(s: Any, w_i: Vector) -> Vector:
            rows = batch if size is None else draw(batch, size, jax.random.fold_in(key(Purpose.LOCAL), s))
            return w_i - client.gamma * (grad(w_i, rows) + mu * (w_i - w))

        w_i = lax.fori_loop(0, steps, local, w)
        passes = steps if size is None else steps * size / batch.rows
        return client, Upload(p * w_i, p), Notes(jnp.asarray(passes, jnp.float64))

    def server_step(server: ServerState, uploads: Upload, cohort: Any) -> tuple[ServerState, Info]:
        total = cohort.sum(uploads)
        mean = total.weighted / jnp.where(total.weight > 0, total.weight, 1)
        return ServerState(mean.map(lambda a, b: jnp.where(total.weight > 0, a, b), server.w)), Info()

    def measure(msg: Broadcast, client: ClientState, batch: Any) -> dict[str, Any]:
        return standard_measures(problem, msg.w, batch)

    return Algorithm(
        name=settings.name,
        join=join,
        init=init,
        broadcast=broadcast,
        client_step=client_step,
        server_step=server_step,
        measure=measure,
        model=lambda server: server.w,
        combine="sum",
        packing=Packing(  # of equal weights: w_i − w
            lambda msg, upload: upload.weighted - msg.w, lambda msg, v, count: Upload(v + count * msg.w, count)
        ),
        notes={"gradients": "sum"} | ({} if settings.epochs is None else {"train_loss": "mean"}),
        rows=check_draws(settings) if settings.epochs is None else check_batches(settings),
        needs=frozenset({"lipschitz"}) if by_lipschitz else frozenset(),
        inverts=by_lipschitz and mu == 0,
    )
