"""FedPDM: a primal-dual method for losses with a regulariser that need not be smooth.

Y. Li, C.-W. Huang, S. Wang, C.-Y. Chi and T. Q. S. Quek, "Privacy-Preserving Federated Primal-Dual Learning for
Non-convex Problems with Non-smooth Regularization", 2023. Algorithm 1 (FedPDM-DP).

Problem   min (1/N) Σ_i f_i(x_i) + h(x_0)   s.t.  x_i = x_0                                                    (2)
          L_i(x_i, x_0, λ_i) = f_i(x_i) + ⟨λ_i, x_0 − x_i⟩ + (ρ/2)‖x_0 − x_i‖²,   L = (1/N) Σ L_i + h(x_0)      (9)
Client    for r = 0, …, Q−1 (or until ‖g‖² ≤ ν (11)), B_r a batch drawn without replacement, from x_i:
i ∈ S         g = ∇f_i(x_i; B_r) − λ_i + ρ (x_i − x_0),   x_i ← x_i − η^t g                                  (10a)
          λ_i⁺ = λ_i + ρ (x_0 − x_i⁺)                                                                        (10c)
          y_i = x_i⁺ − λ_i⁺/ρ  (= 2x_i⁺ − x_0 − λ_i/ρ),   sends  ỹ_i = y_i + ξ_i,  ξ_i ~ N(0, σ² I)           (10d)(12)
          σ = s √(2 ln(1.25/δ))/ε,   s = 4ηG (1 − |1−ηρ|^Q)/(1 − |1−ηρ|),  or 4ηQG where |1−ηρ| = 1          (18)(19)
Server    x_0⁺ = prox_{h/ρ}( mean of ỹ_i, i ∈ S ) = argmin_x h(x) + (ρ/2)‖x − mean‖²                           (13)

paper → code:  x_0 → x0, x_i → client.x, λ_i → lam, y_i → upload.y, ρ → rho, η^t → eta, Q → steps, ν → accuracy,
b → batch, h → h, G → bound, ε → epsilon, δ → delta, N → clients, P of (21) → p.

Differs from the paper:
- η^t = 1/√(1+t) with ρ = 10 diverges: |1 − ηρ| = 9 in round 0, and above 1 up to t = 24. rate="decreasing" (the
  default, and in the preset `paper`) is 1/(ρ√(1+t)), "steady" 1/ρ, "paper" what is printed (preset `printed`).
- (11) is not met on small batches: Q is given, and caps the steps where (11) is looked at (`accuracy`).
- (13) averages S only. Where clients differ and K < N that has an error floor; with memory=True the server averages the
  last ỹ_i of all N clients, which is what (8c) says. S_0 = [N] is a matter of participation: S_0 is drawn as all are.
- P of (21) has a gradient by x_0 of a function that has none; ρ(x_0 − prox_{h/ρ}(mean of x_i − λ_i/ρ)) stands in its
  place, which is that gradient where h = 0.
- start="global" begins from x_0; printed is x_i. Appendix A drops a 1/N and restores it: the weight ρ in (13) is right.
- The noise is no differential privacy: (19) ignores that λ_i depends on the data (6G/ρ is reached against its 4G/ρ),
  (5) holds for ε < 1 only, G is assumed, and Q by (11) depends on the data. It is here to redraw the figures and is
  reported as "no guarantee". `total_epsilon` is (20), whose c_0 is not given.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.flatten_util import ravel_pytree

from fedpact.core.contract import Algorithm, column_mean, standard_measures
from fedpact.core.errors import is_number, require, require_flags, require_one_of, require_positive_int
from fedpact.core.keys import Purpose
from fedpact.core.private import Packing, Theorem
from fedpact.core.settings import Settings
from fedpact.core.telemetry import PRIMAL_DUAL, primal_dual_measures
from fedpact.core.vector import Vector
from fedpact.problems.base import curvature
from fedpact.problems.regulariser import plain_regulariser, read_regulariser, total
from fedpact.problems.training import EVERY_GRADIENT, check_batches, sampled_gradient, whole_upload

STARTS, RATES = ("local", "global"), ("decreasing", "steady", "paper")
#: The least L that Theorem 3 allows.
LEAST = 2 * math.sqrt(5) - 4
NO_GUARANTEE = (
    "noise (18) with ε={epsilon}, δ={delta} a round: no guarantee. (19) leaves out that λ_i depends on the data too "
    "(6G/ρ is reached against its 4G/ρ), (5) holds for ε below 1 only, G={bound} is assumed and not enforced{steps}; "
    "it redraws the paper's figures and protects nobody."
)
NO_THEOREM = "Theorem 3 does not apply: it needs {needs}."
REGULARISED = "The objective has h(x_0) in it (column regulariser): methods without it minimise another function."


class ServerState(NamedTuple):
    """x_0, everyone's last ỹ_i with memory, the round t, and L where ρ comes from it."""

    x0: Vector
    y: Vector | None
    round: Any
    lipschitz: Any


class ClientState(NamedTuple):
    """x_i and λ_i, without the noise of (12); in a private run of way convex as `commit` computes them from ỹ_i."""

    x: Vector
    lam: Vector


class Hello(NamedTuple):
    """r_i with rho="lipschitz", else nothing."""

    lipschitz: Any


class Broadcast(NamedTuple):
    """x_0, ρ, and η of this round."""

    x0: Vector
    rho: Any
    eta: Any


class Upload(NamedTuple):
    """ỹ_i."""

    y: Vector


class Notes(NamedTuple):
    """Passes over the rows, local steps Q_i, and σ of the noise."""

    gradients: Any
    steps: Any
    noise_scale: Any


class Info(NamedTuple):
    """η and ρ of the round."""

    rate: Any
    rho: Any


def theorem_rho(lipschitz: Any) -> Any:
    """The least ρ that Theorem 3 allows where every ∇f_i is L-Lipschitz: 4L, L being at least 2√5 − 4."""
    return 4 * jnp.maximum(lipschitz, LEAST)


def sensitivity(eta: Any, rho: Any, steps: Any, bound: Any) -> Any:
    """s of (19)."""
    a = jnp.abs(1 - eta * rho)
    times = jnp.where(a == 1, steps, (1 - a**steps) / jnp.where(a == 1, 1, 1 - a))
    return 4 * eta * bound * times


def noise_scale(s: Any, epsilon: float, delta: float) -> Any:
    """σ of (18)."""
    return s * (math.sqrt(2 * math.log(1.25 / delta)) / epsilon)


def total_epsilon(epsilon: float, share: float, participation: float, rounds: int, c0: float = 1.0) -> float:
    """ε̄ of (20): c_0 q² ε √(pT/(1−q)), q = Q b/|D_i| below 1, p = K/N. The paper's number, and no guarantee."""
    require(0 < share < 1, "share", "between 0 and 1", share, symbol="q", hint="It is Q·b/|D_i|.")
    return c0 * share**2 * epsilon * math.sqrt(participation * rounds / (1 - share))


def gaussian(key: Any, scale: Any, like: Vector) -> Vector:
    """Independent normal noise of this deviation, shaped like a vector."""
    flat, unflatten = ravel_pytree(like)
    return unflatten(scale * jax.random.normal(key, flat.shape, flat.dtype))


@dataclass(frozen=True)
class FedPDM(Settings):
    """Settings of FedPDM; defaults are those of the paper's experiments on all rows, without h and noise."""

    rho: Any = 10.0  # ρ, or "lipschitz" for Theorem 3's 4L
    steps: int = 10  # Q, local steps in a round; with `accuracy` at most so many
    accuracy: float | None = None  # ν of (11): end the local steps at ‖g‖² ≤ ν; None: always Q
    batch: int | None = None  # b, rows a step, drawn without replacement; None: all
    short: bool = False  # let a client with fewer rows than a batch use all it has
    rate: Any = "decreasing"  # η^t: "decreasing" 1/(ρ√(1+t)), "steady" 1/ρ, "paper" 1/√(1+t), or a number
    start: str = "local"  # where local steps begin: "local" for x_i, "global" for x_0
    memory: bool = False  # average the last ỹ_i of all N clients instead of the round's
    regulariser: Any = None  # h: None, or { name = "l1", gamma = 1e-4 }; elastic_net, group_l1, mcp, box
    epsilon: float | None = None  # ε of (18), a round; None: no noise
    delta: float = 1e-5  # δ of (18)
    bound: float = 1.0  # G of (19), which is assumed of the gradients

    name: ClassVar[str] = "fedpdm"
    ways: ClassVar = ("steps", "convex", "client")
    remedy: ClassVar[str] = 'take shorter steps: a smaller rate, or a larger rho with rate "decreasing" or "steady"'
    presets: ClassVar = {
        "paper": {"batch": 30, "regulariser": {"name": "l1", "gamma": 1e-4}},
        "printed": {
            "batch": 30,
            "regulariser": {"name": "l1", "gamma": 1e-4},
            "rate": "paper",
            "accuracy": 1e-2,
            "steps": 100,
        },
        "theory": {"rho": "lipschitz", "rate": "steady", "accuracy": 1e-8, "steps": 100, "memory": True},
    }

    def __post_init__(self) -> None:
        self._plain()
        known = self.rho == "lipschitz" if isinstance(self.rho, str) else is_number(self.rho) and self.rho > 0
        require(known, "rho", 'above 0, or "lipschitz"', self.rho, symbol="ρ")
        require_positive_int("steps", self.steps, symbol="Q", hint="It is the number of local steps in a round.")
        ok = self.accuracy is None or (is_number(self.accuracy) and self.accuracy > 0)
        require(ok, "accuracy", "above 0", self.accuracy, symbol="ν", hint="Leave it out for Q steps always.")
        if self.batch is not None:
            require_positive_int("batch", self.batch, symbol="b", hint="Leave it out for all rows.")
        if isinstance(self.rate, str):
            require_one_of("rate", self.rate, RATES)
        else:
            require(is_number(self.rate) and self.rate > 0, "rate", "above 0", self.rate, symbol="η")
        require_one_of("start", self.start, STARTS)
        require_flags(self, "memory", "short")
        ok = self.epsilon is None or (is_number(self.epsilon) and self.epsilon > 0)
        require(ok, "epsilon", "above 0", self.epsilon, symbol="ε", hint="Leave it out for no noise.")
        require(is_number(self.delta) and 0 < self.delta < 1, "delta", "between 0 and 1", self.delta, symbol="δ")
        require(is_number(self.bound) and self.bound > 0, "bound", "above 0", self.bound, symbol="G")
        object.__setattr__(self, "regulariser", read_regulariser(self.regulariser))
        if self.regulariser is not None:
            self.regulariser.check(4 * LEAST if self.rho == "lipschitz" else self.rho)

    def to_dict(self) -> dict[str, Any]:
        """The settings as a plain dict."""
        plain = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        return plain | {"regulariser": plain_regulariser(self.regulariser)}

    @property
    def regularised(self) -> bool:
        """Whether there is an h."""
        return self.regulariser is not None

    def private(self, way: str, problem: Any, clients: int, rate: float, reach: float | None) -> Theorem:
        """Noise in every local gradient, on ỹ_i where the loss is convex, or on the whole upload.

        convex: two runs that share x_0, λ_i and the start differ after a step of (10a) by D⁺ ≤ (1 − η(ρ − s))D + ηC/b,
        where −s is the least curvature of the regulariser and η(ρ + L) ≤ 1; and y = 2x − x_0 − λ/ρ doubles it.
        """
        hint = "In a private run no number of steps, step size or penalty may be computed from the data."
        for name, ok in (("rho", self.rho != "lipschitz"), ("accuracy", self.accuracy is None)):
            require(ok, name, "a number" if name == "rho" else "left out", getattr(self, name), hint=hint)
        hint = "The noise of (18) is no privacy; the run's own takes its place."
        require(self.epsilon is None, "epsilon", "left out in a private run", self.epsilon, symbol="ε", hint=hint)
        if way == "client":
            hint = "Memory keeps every upload; whole clients are hidden in sums."
            require(not self.memory, "memory", "false for way client", self.memory, hint=hint)
            return whole_upload()
        if way == "steps":
            return Theorem("steps", steps=lambda rows: self.steps, batch=self.batch, about=EVERY_GRADIENT)
        rho, (low, high) = float(self.rho), curvature(problem, reach)
        first = self.rate_of(0, rho)
        hint = f"Give a rate of at most {1 / (rho + high):.6g}, or a smaller reach."
        fits = self.rate != "paper" and first * (rho + high) <= 1 and rho > low
        require(fits, "rate", "at most 1/(ρ + L) for way convex", f"{self.rate!r}", symbol="η", hint=hint)

        def moved(clip: float, rows: Any, t: Any) -> Any:
            eta = self.rate_of(t, rho)
            shrink = 1 - eta * (rho - low)
            size = rows if self.batch is None else jnp.minimum(self.batch, rows)  # `short`: all that a client has
            return 2 * eta * (clip / size) * (1 - shrink**self.steps) / (1 - shrink)

        about = "Q steps on a convex loss with clipped gradients; x_i and λ_i are computed from what was sent."
        return Theorem("convex", moved, about=about)

    def rate_of(self, t: Any, rho: Any) -> Any:
        """η^t."""
        if self.rate == "steady":
            return 1 / rho
        falls = {"decreasing": rho, "paper": 1.0}
        return 1 / (falls[self.rate] * (1.0 + t) ** 0.5) if self.rate in falls else self.rate

    def build(self, problem: Any, clients: int, rate: float) -> Algorithm:
        """Algorithm 1 for N clients."""
        h, nu, epsilon, by_theorem = self.regulariser, self.accuracy, self.epsilon, self.rho == "lipschitz"
        native = getattr(problem, "native", False)
        require(not native, "problem", "JAX's for fedpdm", type(problem).__name__, hint="Use fedadmm.")

        def prox(w: Vector, rho: Any) -> Vector:
            return w if h is None else h.prox(w, rho)

        def join(w0: Vector, batch: Any, key: Any) -> tuple[ClientState, Hello]:
            return ClientState(w0, 0.0 * w0), Hello(problem.lipschitz(batch) if by_theorem else None)

        def init(w0: Vector, hellos: Hello) -> ServerState:
            y = w0.map(lambda a: jnp.broadcast_to(a, (clients, *a.shape))) if self.memory else None
            x0 = w0 if h is None else h.start(w0)
            return ServerState(x0, y, jnp.asarray(0), jnp.max(hellos.lipschitz) if by_theorem else None)

        def broadcast(server: ServerState) -> Broadcast:
            dtype = jax.tree.leaves(server.x0.tree)[0].dtype
            rho = theorem_rho(server.lipschitz) if by_theorem else self.rho
            eta = self.rate_of(server.round, rho)
            return Broadcast(server.x0, jnp.asarray(rho, dtype), jnp.asarray(eta, dtype))

        def local(msg: Broadcast, client: ClientState, batch: Any, grad: Any, key: Any) -> tuple[Vector, Any]:
            """Lines 6-13: Q steps, or until (11). x_i⁺ and Q_i."""
            x0, rho, eta, lam = msg.x0, msg.rho, msg.eta, client.lam

            def step(r: Any, x: Vector) -> tuple[Vector, Any]:
                slope = sampled_gradient(grad, x, batch, self.batch, jax.random.fold_in(key, r))[1]  # l. 7
                g = slope - lam + rho * (x - x0)
                return x - eta * g, g.norm2()  # (10a)

            x = client.x if self.start == "local" else x0
            if nu is None:
                return lax.fori_loop(0, self.steps, lambda r, x: step(r, x)[0], x), jnp.asarray(self.steps)
            going = lambda c: (c[0] < self.steps) & ~(c[2] <= nu)  # (11)
            again = lambda c: (c[0] + 1, *step(c[0], c[1]))
            done, x, _ = lax.while_loop(going, again, (jnp.asarray(0), x, jnp.full((), jnp.inf, eta.dtype)))
            return x, done

        def client_step(msg: Broadcast, client: ClientState, batch: Any, grad: Any, key: Any) -> tuple[Any, ...]:
            x0, rho = msg.x0, msg.rho
            x, steps = local(msg, client, batch, grad, key(Purpose.LOCAL))  # (10b)
            lam = client.lam + rho * (x0 - x)  # (10c)
            y, sigma = x - lam / rho, 0.0  # (10d)
            if epsilon is not None:
                s = sensitivity(msg.eta, rho, steps.astype(rho.dtype), self.bound)  # (19)
                sigma = noise_scale(s, epsilon, self.delta)  # (18)
                y = y + gaussian(key(Purpose.NOISE), sigma, y)  # (12)
            d = jnp.sum(batch.weight > 0)
            passes = steps * (1.0 if self.batch is None else jnp.minimum(self.batch, d) / d)
            notes = (jnp.asarray(value, jnp.float64) for value in (passes, steps, sigma))
            return ClientState(x, lam), Upload(y), Notes(*notes)

        def commit(msg: Broadcast, before: ClientState, sent: Upload) -> ClientState:
            """x_i and λ_i as (10c)(10d) would have them if what was sent were y_i."""
            x = (sent.y + msg.x0 + before.lam / msg.rho) / 2.0
            return ClientState(x, before.lam + msg.rho * (msg.x0 - x))

        def server_step(server: ServerState, uploads: Upload, cohort: Any) -> tuple[ServerState, Info]:
            _, rho, eta = broadcast(server)
            y = None if server.y is None else cohort.put(server.y, uploads.y)
            mean = cohort.mean(uploads.y, server.x0) if y is None else y.map(column_mean)
            x0 = prox(mean, rho)  # (13)
            x0 = x0.map(lambda a, b: jnp.where(cohort.count > 0, a, b), server.x0)
            return ServerState(x0, y, server.round + 1, server.lipschitz), Info(eta, rho)

        def measure(msg: Broadcast, client: ClientState, batch: Any) -> dict[str, Any]:
            x0, rho, x, lam = msg.x0, msg.rho, client.x, client.lam
            value = jnp.zeros_like(rho) if h is None else h.value(x0)
            terms = standard_measures(problem, x0, batch) | primal_dual_measures(problem, x0, x, -lam, rho, 1.0, batch)
            by_x, by_lam = problem.gradient(x, batch) - lam + rho * (x - x0), x0 - x  # N times the gradients in (21)
            return terms | {
                "objective": terms["objective"] + value,  # (1)
                "lagrangian": terms["lagrangian"] + value,  # N times (9a)
                "regulariser": value,
                "sparsity": total(x0, lambda a: a == 0) / x0.size,
                "p": (x - lam / rho, x0, rho, by_x.norm2() + by_lam.norm2()),
            }

        def stationarity(sums: Any, clients: int) -> Any:
            """P of (21) from the sums over the clients, the residual of (13) for the gradient by x_0."""
            mean, x0, rho = jax.tree.map(lambda a: a / clients, sums[:3])
            return sums[3] / clients**2 + rho**2 * (x0 - prox(mean, rho)).norm2()

        return Algorithm(
            name=self.name,
            join=join,
            init=init,
            broadcast=broadcast,
            client_step=client_step,
            server_step=server_step,
            measure=measure,
            model=lambda server: server.x0,
            combine="each" if self.memory else "sum",
            separable=() if h is None or h.separable else None,
            commit=commit,
            packing=Packing(  # ỹ_i − x_0
                lambda msg, upload: upload.y - msg.x0,
                lambda msg, v, count: Upload(v + count * msg.x0),
            ),
            info=Info._fields,
            notes={"gradients": "sum", "steps": "mean", "noise_scale": "max"},
            reads=PRIMAL_DUAL | {"p": stationarity},
            rows=check_batches(self),
            needs=frozenset({"lipschitz"}) if by_theorem else frozenset(),
            notices=self._notices(rate),
        )

    def _notices(self, participation: float) -> tuple[str, ...]:
        missing = [] if self.rho == "lipschitz" else [f"ρ ≥ 4L with L ≥ 2√5 − 4, and ρ is {self.rho}"]
        missing += [] if self.accuracy is not None else ["(11) met at every client, and it is not looked at"]
        missing += [] if self.memory or participation == 1 else ["the mean of (8c), over all clients, and (13) has S"]
        out = [NO_THEOREM.format(needs="; ".join(missing))] if missing else []
        if self.epsilon is not None:
            steps = "" if self.accuracy is None else ", and Q depends on the data"
            values = {"epsilon": self.epsilon, "delta": self.delta, "bound": self.bound, "steps": steps}
            out.append(NO_GUARANTEE.format(**values))
        return (*out, *([REGULARISED] if self.regularised else []))
