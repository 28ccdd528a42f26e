"""FedEPM: federated learning by an exact penalty method.

S. Zhou and G. Y. Li, "Exact Penalty Method for Federated Learning", 2022. Algorithm 2.

Problem   min_w Σ_i f_i(w), through the penalty model  min Σ_i f_i(w_i) + φ(w_i − w),  φ(v) = λ‖v‖₁ + (η/2)‖v‖²   (7)(8)

Start     client i:  w_i⁰,  z_i⁰ = w_i⁰ + ε_i⁰
Server    w^{τ+1} = argmin_w Σ_{i=1}^m φ(z_i − w) = ENS(z_1, …, z_m)                                          (19)
Client    g_i = ∇f_i(w^{τ+1}), once a round                                                                   (18)
i ∈ S     for k = τk0, …, τk0 + k0 − 1:
              μ_{i,k+1} = μ_{i,0} (1 + c_i ‖w_i^k − w^{τ+1}‖²) α_i^{k+1}                                      (20)
              w_i^{k+1} = w^{τ+1} + soft(μ̄ (w_i^k − w^{τ+1}) − g_i, λ) / (η + μ̄),   μ̄ = μ_{i,k+1}/d_i
          z_i = w_i + ε_i,   ε_ij ~ Lap(0, 2‖g_i‖₁ / (ε μ_{i,k+1}))                                           (21)(39)
i ∉ S     keeps w_i and z_i                                                                                   (22)

paper → code:  k0 → k0, λ → lam, η → eta, μ_{i,0} → mu0, c_i → c, α_i → alpha, ε → epsilon, w^τ → msg.w, w_i → client.w,
z_i → upload.z, τ → msg.round, ρ → rate, m → clients, d_i → batch.rows.

Differs from the paper:
- (13)(15)(42) have the sign of λ/η wrong, and the search of Algorithm 1 can end without an answer (an optimum on a
  kink). `elastic_net_center` is the median of the 2m+1 numbers {w_i} ∪ {mean + (λ/η)(2s/m − 1)}, which is always right.
- the prox weight in (20) is μ/d_i, as the experiments need; the noise scale keeps μ.
- ⌊t⌋ in the paper is the ceiling: τ_k = ⌈k/k0⌉.
- (25) integrates to 2: Lap(0, ν) here has E|e| = ν and E e² = 2ν², where (59) has 4ν and 16ν². The factor 2 of (45) is
  not needed.
- ε_i⁰ is Lap(0, 1/μ_{i,0}), not the Lap(0, Δ_i⁰/(ε μ_{i,0})) of Setup V.1: Δ_i⁰ is of a gradient at a w⁰ that nobody
  has sent, w_i⁰ = 0 has nothing to hide, and the authors' recorded z_i⁰ have deviation 19.3, about 1/μ_{i,0} = 20.
- (39) is computed from the data and ignores that w_i carries data from round to round: it is not differential
  privacy. It is here to redraw the figures and is reported as "no guarantee".
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.flatten_util import ravel_pytree

from fedpact.core.contract import Algorithm, column_mean, standard_measures
from fedpact.core.errors import is_number, require, require_positive_int
from fedpact.core.keys import Purpose
from fedpact.core.private import Theorem
from fedpact.core.settings import Settings
from fedpact.core.vector import Vector

NO_GUARANTEE = (
    "noise (39) with ε={epsilon}: no guarantee. Its scale is computed from the data and leaves out that the client's "
    "model carries data from round to round; it redraws the paper's figures and protects nobody."
)


class ServerState(NamedTuple):
    """Everyone's last message z_i, the broadcast model, and the round τ."""

    z: Vector
    w: Vector
    round: Any


class ClientState(NamedTuple):
    """w_i, and the Lipschitz constant r_i that the telemetry of (31) needs."""

    w: Vector
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


class Notes(NamedTuple):
    """Gradients computed, log10(‖w_i‖/‖ε_i‖) and the scale of the noise."""

    gradients: Any
    snr: Any
    noise_scale: Any


class Info(NamedTuple):
    """Mean of ‖z_i − w‖² over all clients."""

    spread: Any


def notes_of(gradients: Any, snr: Any, noise_scale: Any) -> Notes:
    """Notes in double precision, whatever the model's."""
    return Notes(*(jnp.asarray(value, jnp.float64) for value in (gradients, snr, noise_scale)))


def soft(v: Vector, a: Any) -> Vector:
    """Soft-thresholding (2)(3): argmin_z ½‖z − v‖² + a‖z‖₁."""
    return v.map(lambda t: jnp.sign(t) * jnp.maximum(jnp.abs(t) - a, 0))


def elastic_net_center(messages: Any, lam: float, eta: float) -> Any:
    """The minimiser of Σ_i λ|w − w_i| + (η/2)(w − w_i)² for every column of an (m, n) array: ENS of (16).

    It is the median of the m messages and the m+1 numbers mean + (λ/η)(2s/m − 1), s = 0..m. λ=0 gives the mean, η=0
    the median. NumPy arrays are partitioned on the host; JAX arrays take a search that compiles.
    """
    require(is_number(lam) and lam >= 0, "lam", "a number of at least 0", lam, symbol="λ")
    require(is_number(eta) and eta >= 0, "eta", "a number of at least 0", eta, symbol="η")
    require(lam + eta > 0, "lam and eta", "not both 0", (lam, eta), symbol="λ, η")
    on_device = isinstance(messages, jax.Array)
    z = messages if on_device else np.asarray(messages)
    require(z.ndim == 2 and z.shape[0] > 0, "messages", "an (m, n) array with m at least 1", z.shape)
    if eta == 0:
        return jnp.median(z, axis=0) if on_device else np.median(z, axis=0)
    return _in_chunks(z, lam / eta) if on_device else _partition(z, lam / eta)


def _partition(z: np.ndarray, ratio: float) -> np.ndarray:
    m, n = z.shape
    numbers = np.empty((n, 2 * m + 1), dtype=np.result_type(z.dtype, np.float32))
    numbers[:, :m] = z.T
    numbers[:, m:] = z.mean(axis=0)[:, None] + ratio * ((2 * np.arange(m + 1) - m) / m)
    numbers.partition(m, axis=1)
    return numbers[:, m].copy()


#: Bytes of messages that are searched as they are; more are searched a few columns at a time.
WHOLE, FEW = 2**20, 2**16


def _in_chunks(z: Any, ratio: Any) -> Any:
    m, n = z.shape
    mean = column_mean(z)
    if z.nbytes <= WHOLE:
        return _search(z, mean, ratio)
    columns = min(n, max(1, FEW // (m * z.dtype.itemsize)))  # their messages stay in the processor's cache
    chunks = -(-n // columns)
    padded = jnp.pad(z, ((0, 0), (0, chunks * columns - n))).reshape(m, chunks, columns).swapaxes(0, 1)
    means = jnp.pad(mean, (0, chunks * columns - n)).reshape(chunks, columns)
    return lax.map(lambda part: _search(part[0], part[1], ratio), (padded, means)).reshape(-1)[:n]


def _search(z: Any, mean: Any, ratio: Any) -> Any:
    """The same median without sorting (slow on CPU under XLA).

    w(s) = mean + (λ/η)(2s−m)/m rises with s and #{z > w(s)} falls, so the smallest s* with #{z > w(s*)} ≤ s* is found
    by bisection. The answer is then min(w(s*), s*-th largest z); the latter lies in (w(s*−1), w(s*)] when it is the
    smaller, and is found by bisection on values between two data points, which ends when only one value is left.
    """
    m, n = z.shape

    def level(s: Any) -> Any:
        return mean + ratio * ((2 * s - m) / m).astype(z.dtype)

    def halve(_: Any, ends: tuple[Any, Any]) -> tuple[Any, Any]:
        low, high = ends
        middle = (low + high) // 2
        enough = jnp.sum(z > level(middle), axis=0) <= middle
        return jnp.where(enough, low, middle), jnp.where(enough, middle, high)

    _, s = lax.fori_loop(0, (m + 1).bit_length(), halve, (jnp.full(n, -1), jnp.full(n, m)))
    top = level(s)
    on_kink = jnp.sum(z > top, axis=0) < s
    high = jnp.max(jnp.where(z <= top, z, -jnp.inf), axis=0)
    low = jnp.min(jnp.where(z > jnp.where(s > 0, level(s - 1), -jnp.inf), z, jnp.inf), axis=0)

    def narrow(ends: tuple[Any, Any]) -> tuple[Any, Any]:
        low, high = ends
        middle = low + (high - low) / 2
        middle = jnp.where(middle < high, middle, low)  # between neighbouring numbers it rounds up to high
        above = z > middle
        right = jnp.sum(above, axis=0) >= s
        next_low = jnp.min(jnp.where(above, z, jnp.inf), axis=0)
        next_high = jnp.max(jnp.where(above, -jnp.inf, z), axis=0)
        return jnp.where(right, next_low, low), jnp.where(right, high, next_high)

    ends = (jnp.where(on_kink, low, high), high)
    _, value = lax.while_loop(lambda e: jnp.any(e[0] < e[1]), narrow, ends)
    return jnp.where(on_kink, value, top)


def penalty(v: Vector, lam: Any, eta: Any) -> Any:
    """φ(v) = λ‖v‖₁ + (η/2)‖v‖² (8)."""
    return lam * v.norm1() + eta / 2 * v.norm2()


def laplace(key: Any, scale: Any, like: Vector) -> Vector:
    """Independent Laplace noise with E|e| = scale, shaped like a vector."""
    flat, unflatten = ravel_pytree(like)
    return unflatten(scale * jax.random.laplace(key, flat.shape, flat.dtype))


def paper_eta(clients: int, rate: float) -> float:
    """η of the experiments: 1e-5 (0.02m + 1)(ρ + 0.1)."""
    return 1e-5 * (0.02 * clients + 1) * (rate + 0.1)


def check_noise(epsilon: Any, mu0: Any, c: Any, alpha: Any) -> None:
    """The constraints on what enters (39)."""
    require(epsilon is None or (is_number(epsilon) and epsilon > 0), "epsilon", "above 0", epsilon, symbol="ε")
    require(is_number(mu0) and mu0 > 0, "mu0", "above 0", mu0, symbol="μ_{i,0}")
    require(is_number(c) and c >= 0, "c", "at least 0", c, symbol="c_i")
    require(is_number(alpha) and alpha >= 1, "alpha", "at least 1", alpha, symbol="α_i")


@dataclass(frozen=True)
class FedEPM(Settings):
    """Settings of FedEPM; defaults are those of the paper's experiments, without noise."""

    k0: int = 12  # local steps in a round
    eta: float | None = None  # η of the elastic net; None: 1e-5 (0.02m + 1)(ρ + 0.1), Section VII.B
    lam: float | None = None  # λ of the elastic net; None: η/2, Section VII.B
    mu0: float = 0.05  # μ_{i,0}, the prox weight's start, Section VII.B
    c: float = 1e-8  # c_i, its growth with the distance to w, Section VII.B
    alpha: float = 1.001  # α_i, its growth with every step, Section VII.B
    epsilon: float | None = None  # None: no noise; else the ε of (39)

    name: ClassVar[str] = "fedepm"
    ways: ClassVar = ("once",)
    remedy: ClassVar[str] = (
        "raise mu0 (shorter local steps) and eta: the defaults suit columns of 2-norm 1; "
        "for standardised columns begin with mu0 = 10, eta = 1e-3"
    )
    presets: ClassVar = {"paper": {"epsilon": 0.1}, "noiseless": {}}

    def __post_init__(self) -> None:
        self._plain()
        require_positive_int("k0", self.k0, hint="It is the number of local steps in a round.")
        ok = self.eta is None or (is_number(self.eta) and self.eta > 0)
        require(ok, "eta", "above 0", self.eta, symbol="η", hint="Leave it out for the paper's value.")
        ok = self.lam is None or (is_number(self.lam) and self.lam >= 0)
        require(ok, "lam", "at least 0", self.lam, symbol="λ", hint="Leave it out for η/2.")
        check_noise(self.epsilon, self.mu0, self.c, self.alpha)

    def _penalty(self, clients: int, rate: float) -> tuple[float, float]:
        eta = paper_eta(clients, rate) if self.eta is None else self.eta
        return eta, eta / 2 if self.lam is None else self.lam

    def private(self, way: str, problem: Any, clients: int, rate: float, reach: float | None) -> Theorem:
        """One clipped gradient a round at w, which everyone has; w_i starts from the message sent before.

        soft is non-expansive, so two runs that share w, w_i⁰ and μ differ after a step of (20) by
        D⁺ ≤ (μ̄ D + Δ)/(η + μ̄),  D = 0 at the start of a round and Δ = C/d_i, in the ℓ1 and in the ℓ2 norm.
        """
        hint = "μ must be public: with c above 0 it is computed from w_i."
        require(self.c == 0, "c", "0 in a private run", self.c, symbol="c_i", hint=hint)
        hint = "The noise of (39) is no privacy; the run's own takes its place."
        require(self.epsilon is None, "epsilon", "left out in a private run", self.epsilon, symbol="ε", hint=hint)
        eta, _ = self._penalty(clients, rate)

        def moved(clip: float, rows: Any, t: Any) -> Any:
            d = 0.0 * rows
            for j in range(self.k0):
                mu_bar = self.mu0 * self.alpha ** (t * self.k0 + j + 1.0) / rows
                d = (mu_bar * d + clip / rows) / (eta + mu_bar)
            return d

        about = "One clipped gradient a round, at the broadcast model; clients keep what they sent (w_i = z_i)."
        return Theorem("once", moved, about=about)

    def build(self, problem: Any, clients: int, rate: float) -> Algorithm:
        """Algorithm 2 for m clients at participation rate ρ."""
        k0, mu0, c, alpha, epsilon = self.k0, self.mu0, self.c, self.alpha, self.epsilon
        eta, lam = self._penalty(clients, rate)

        def center(z: Vector) -> Vector:
            return z.map(lambda a: elastic_net_center(a.reshape(a.shape[0], -1), lam, eta).reshape(a.shape[1:]))

        def join(w0: Vector, batch: Any, key: Any) -> tuple[ClientState, Hello]:
            z0 = w0 if epsilon is None else w0 + laplace(key(Purpose.NOISE), 1 / mu0, w0)
            r = problem.lipschitz(batch) if hasattr(problem, "lipschitz") else jnp.asarray(jnp.nan)
            return ClientState(w0, r), Hello(z0)

        def init(w0: Vector, hellos: Hello) -> ServerState:
            return ServerState(hellos.z, center(hellos.z), jnp.asarray(0))

        def broadcast(server: ServerState) -> Broadcast:
            return Broadcast(server.w, server.round)

        def client_step(msg: Broadcast, client: ClientState, batch: Any, grad: Any, key: Any) -> tuple[Any, ...]:
            w, d = msg.w, batch.rows
            g = grad(w, batch)  # (18)

            def local(j: Any, carry: tuple[Vector, Any]) -> tuple[Vector, Any]:
                gap = carry[0] - w
                growth = (alpha ** (msg.round * k0 + j + 1)).astype(d.dtype)
                mu = mu0 * (1 + c * gap.norm2()) * growth  # (20), first line
                mu_bar = mu / d
                return w + soft(mu_bar * gap - g, lam) / (eta + mu_bar), mu  # (20), second and third

            w_i, mu = lax.fori_loop(0, k0, local, (client.w, jnp.zeros_like(d)))
            if epsilon is None:
                return ClientState(w_i, client.r), Upload(w_i), notes_of(1, jnp.nan, 0.0)
            scale = 2 * g.norm1() / (epsilon * mu)  # (39)
            e = laplace(key(Purpose.NOISE), scale, w_i)
            notes = notes_of(1, jnp.log10(w_i.norm() / e.norm()), scale)
            return ClientState(w_i, client.r), Upload(w_i + e), notes  # (21)

        def server_step(server: ServerState, uploads: Upload, cohort: Any) -> tuple[ServerState, Info]:
            z = cohort.put(server.z, uploads.z)  # (22) for those who did not upload
            w = center(z)  # (19)
            spread = jnp.mean(jax.vmap(lambda z_i: (z_i - w).norm2())(z))
            return ServerState(z, w, server.round + 1), Info(spread)

        def measure(msg: Broadcast, client: ClientState, batch: Any) -> dict[str, Any]:
            value = problem.value_and_gradient(client.w, batch)[0]
            penalised = value + penalty(client.w - msg.w, lam, eta)  # F_i of (7)
            tail = client.r**2 * batch.rows / (2 * mu0 * c * (alpha - 1)) if c > 0 and alpha > 1 else jnp.nan
            # (31) with μ/d_i for μ, at the next w, without E and the noise's 2ϕ: with noise it need not fall
            descent = penalised + tail / (alpha ** (msg.round * k0)).astype(penalised.dtype)
            return standard_measures(problem, msg.w, batch) | {"penalty": penalised, "descent": descent}

        return Algorithm(
            name=self.name,
            join=join,
            init=init,
            broadcast=broadcast,
            client_step=client_step,
            server_step=server_step,
            measure=measure,
            model=lambda server: server.w,
            combine="each",
            separable=("spread",),
            commit=lambda msg, before, sent: ClientState(sent.z, before.r),
            info=Info._fields,
            notes={"gradients": "sum", "snr": "min", "noise_scale": "max"},
            notices=() if epsilon is None else (NO_GUARANTEE.format(epsilon=epsilon),),
        )
