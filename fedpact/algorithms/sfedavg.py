"""SFedAvg and SFedProx: the baselines of the FedEPM paper.

S. Zhou and G. Y. Li, "Exact Penalty Method for Federated Learning", 2022. Algorithms 3 and 4.

Start     client i:  z_i⁰ = w_i⁰ + ε_i⁰,  S⁰ = [m]
Server    w^{τ+1} = (1/|S|) Σ_{i∈S} z_i over the clients that have just uploaded                               (34)
Client    SFedAvg   w_i^{k+1} = v − γ_i ∇f_i(v),   v = w^{τ+1} if k ∈ K else w_i^k                             (35)
i ∈ S     SFedProx  ℓ steps  v ← v − γ_i (∇f_i(v) + μ (v − w^{τ+1})) from the same start             (36), Algorithm 4
          k0 of these a round, then  z_i = w_i + ε_i  with the noise (39) of FedEPM                            (37)
          γ_i^k = 2d_i / √(2k0 + ⌈k/k0⌉)                                                                      (38)

paper → code:  k0 → k0, γ_i → gamma, μ → mu, ℓ → inner, ε → epsilon, and of (39) μ_{i,0} → mu0, c_i → c, α_i → alpha.

Differs from the paper:
- (34) prints the set selected next, S^{τ+1}, Section IV.C the one that has just uploaded, S^τ. The second is built: who
  is not in S^τ has no z_i^τ, since Algorithm 3 lets it keep w_i only, where (22) of FedEPM keeps z_i too.
- Section IV.C divides by m, (34) by |S|: |S| is built, the argmin that Section IV.C writes beside it.
- (38) is some 60 times below 1/r_i on the paper's data. `step="lipschitz"` takes γ_i = scale/r_i instead.
- (39) is no privacy guarantee, here as there (see fedepm).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import jax.numpy as jnp
from jax import lax

from fedpact.algorithms.fedepm import NO_GUARANTEE, check_noise, laplace, notes_of
from fedpact.core.contract import Algorithm, standard_measures
from fedpact.core.errors import is_number, require, require_one_of, require_positive_int
from fedpact.core.keys import Purpose
from fedpact.core.settings import Settings
from fedpact.core.vector import Vector


class ServerState(NamedTuple):
    """The mean of the last uploads, and the round τ."""

    w: Vector
    round: Any


class ClientState(NamedTuple):
    """r_i, where the step needs it. The model restarts from the broadcast each round."""

    r: Any


class Hello(NamedTuple):
    """z_i⁰."""

    z: Vector


class Broadcast(NamedTuple):
    """w^{τ+1} and τ."""

    w: Vector
    round: Any


class Upload(NamedTuple):
    """z_i."""

    z: Vector


class Info(NamedTuple):
    """Nothing to add."""


def paper_step(d: Any, k: Any, k0: int) -> Any:
    """γ_i^k = 2d_i/√(2k0 + ⌈k/k0⌉) (38); k0(τ) + j has ⌈k/k0⌉ = τ for j = 0 and τ + 1 after."""
    return 2 * d / jnp.sqrt(2 * k0 + jnp.ceil(k / k0)).astype(d.dtype)


def _check(settings: Any) -> None:
    require_positive_int("k0", settings.k0, hint="It is the number of local steps in a round.")
    require_one_of("step", settings.step, ("paper", "lipschitz"))
    ok = is_number(settings.scale) and settings.scale > 0
    require(ok, "scale", "above 0", settings.scale, hint="It multiplies the step size γ_i.")
    check_noise(settings.epsilon, settings.mu0, settings.c, settings.alpha)


@dataclass(frozen=True)
class SFedAvg(Settings):
    """SFedAvg, a baseline of the FedEPM paper: local gradient steps, the mean of the new uploads (Algorithm 3).

    Defaults are the paper's, without noise.
    """

    k0: int = 12  # local steps in a round
    step: str = "paper"  # "paper": (38); "lipschitz": 1/r_i
    scale: float = 1.0  # multiplies the step
    epsilon: float | None = None  # None: no noise; else the ε of (39)
    mu0: float = 0.05  # μ_{i,0} of (39), Section VII.B
    c: float = 1e-8  # c_i of (39), Section VII.B
    alpha: float = 1.001  # α_i of (39), Section VII.B

    name: ClassVar[str] = "sfedavg"
    remedy: ClassVar[str] = "take shorter steps: a smaller scale"
    presets: ClassVar = {"paper": {"epsilon": 0.1}, "noiseless": {}, "lipschitz": {"step": "lipschitz"}}

    def __post_init__(self) -> None:
        self._plain()
        _check(self)

    def build(self, problem: Any, clients: int, rate: float) -> Algorithm:
        """Algorithm 3 [SFedAvg]."""
        return _build(self, problem, mu=0.0, inner=1)


@dataclass(frozen=True)
class SFedProx(Settings):
    """SFedProx, a baseline of the FedEPM paper: SFedAvg with a proximal term (Algorithms 3 and 4).

    Defaults are the paper's, without noise.
    """

    k0: int = 12  # local steps in a round
    mu: float = 1e-5  # μ, the proximal weight, Section VII.B
    inner: int = 3  # ℓ, gradient steps of Algorithm 4, Section VII.B
    step: str = "paper"  # "paper": (38); "lipschitz": 1/r_i
    scale: float = 1.0  # multiplies the step
    epsilon: float | None = None  # None: no noise; else the ε of (39)
    mu0: float = 0.05  # μ_{i,0} of (39), Section VII.B
    c: float = 1e-8  # c_i of (39), Section VII.B
    alpha: float = 1.001  # α_i of (39), Section VII.B

    name: ClassVar[str] = "sfedprox"
    remedy: ClassVar[str] = "take shorter steps: a smaller scale"
    presets: ClassVar = {"paper": {"epsilon": 0.1}, "noiseless": {}, "lipschitz": {"step": "lipschitz"}}

    def __post_init__(self) -> None:
        self._plain()
        _check(self)
        require(is_number(self.mu) and self.mu >= 0, "mu", "at least 0", self.mu, symbol="μ")
        require_positive_int("inner", self.inner, symbol="ℓ")

    def build(self, problem: Any, clients: int, rate: float) -> Algorithm:
        """Algorithm 3 [SFedProx] with Algorithm 4."""
        return _build(self, problem, mu=self.mu, inner=self.inner)


def _build(settings: Any, problem: Any, *, mu: float, inner: int) -> Algorithm:
    k0, epsilon, mu0, c, alpha = settings.k0, settings.epsilon, settings.mu0, settings.c, settings.alpha
    by_lipschitz = settings.step == "lipschitz"

    def join(w0: Vector, batch: Any, key: Any) -> tuple[ClientState, Hello]:
        z0 = w0 if epsilon is None else w0 + laplace(key(Purpose.NOISE), 1 / mu0, w0)
        return ClientState(problem.lipschitz(batch) if by_lipschitz else jnp.zeros((), batch.x.dtype)), Hello(z0)

    def init(w0: Vector, hellos: Hello) -> ServerState:
        return ServerState(hellos.z.map(lambda a: jnp.mean(a, axis=0)), jnp.asarray(0))  # (34) with S⁰ = [m]

    def broadcast(server: ServerState) -> Broadcast:
        return Broadcast(server.w, server.round)

    def client_step(msg: Broadcast, client: ClientState, batch: Any, grad: Any, key: Any) -> tuple[Any, ...]:
        w, d = msg.w, batch.rows

        def step(s: Any, v: Vector, g: Vector) -> Vector:  # the s-th of the round's k0·ℓ steps belongs to k = τk0 + s÷ℓ
            gamma = settings.scale * (1 / client.r if by_lipschitz else paper_step(d, msg.round * k0 + s // inner, k0))
            return v - gamma * (g + mu * (v - w))  # (35), and Algorithm 4

        def local(s: Any, carry: tuple[Vector, Vector]) -> tuple[Vector, Vector]:
            v, w_k = carry
            w_k = v.map(lambda a, b: jnp.where(s % inner == 0, a, b), w_k)
            return step(s, v, grad(v, batch)), w_k

        g = grad(w, batch)
        w_i, w_k = lax.fori_loop(1, k0 * inner, local, (step(0, w, g), w))
        if epsilon is None:
            return client, Upload(w_i), notes_of(k0 * inner, jnp.nan, 0.0)
        mu_k = mu0 * (1 + c * (w_k - w).norm2()) * (alpha ** (msg.round * k0 + k0)).astype(d.dtype)
        scale = 2 * g.norm1() / (epsilon * mu_k)  # (39)
        e = laplace(key(Purpose.NOISE), scale, w_i)
        return client, Upload(w_i + e), notes_of(k0 * inner, jnp.log10(w_i.norm() / e.norm()), scale)  # (37)

    def server_step(server: ServerState, uploads: Upload, cohort: Any) -> tuple[ServerState, Info]:
        return ServerState(cohort.mean(uploads.z, server.w), server.round + 1), Info()  # (34)

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
        notes={"gradients": "sum", "snr": "min", "noise_scale": "max"},
        needs=frozenset({"lipschitz"}) if by_lipschitz else frozenset(),
        inverts=by_lipschitz,
        notices=() if epsilon is None else (NO_GUARANTEE.format(epsilon=epsilon),),
    )
