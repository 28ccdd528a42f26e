"""FedADMM: local training on the augmented Lagrangian, one message a round.

Y. Gong, Y. Li and N. M. Freris, "FedADMM: A Robust Federated Deep Learning Framework with Adaptivity to System
Heterogeneity", ICDE 2022. Algorithm 1.

Problem   min Σ_i f_i(w_i)  s.t.  w_i = θ,   f_i = α_i · (mean loss of client i),
          L_i(w_i, y_i, θ) = f_i(w_i) + ⟨y_i, w_i − θ⟩ + (ρ/2)‖w_i − θ‖²                                        (3)
Server    θ ← θ + (η/|S|) Σ_{i∈S} Δ_i                                                                          (5)
Client    w_i ← E_i epochs of  w_i ← w_i − γ (∇f_i(w_i; b) + y_i + ρ (w_i − θ)),  b over shuffled batches  l. 14-19
i ∈ S     y_i⁺ = y_i + ρ (w_i⁺ − θ)                                                                           l. 20
          Δ_i = (w_i⁺ + y_i⁺/ρ) − (w_i + y_i/ρ)                                                                (4)

paper → code:  θ → theta, w_i → w, y_i → y, ρ → rho, η → eta, η_i → rate;  E, B → epochs, batch;  ε_i of (6) → accuracy;
V of (7) → v.

Differs from the paper:
- start="global" and message="double" are what the released code does: training starts from θ, and 2(w_i⁺ − θ) is
  sent. With the printed warm start a client that takes part for the first time in round t trains from θ⁰. The preset
  `printed` is the box above; `paper` has the released code's start, message and momentum of 0.5; E and B are
  yours, and its η is 0.5 from round 60. What it gives of Table III is in docs/papers_fedadmm.md.
- newcomer="global" gives a client that takes part for the first time w_i = θ, the model it is sent. With w_i = θ⁰, as
  printed, its Δ_i holds θ − θ⁰: all that was learned before it came, once more.
- ρ, η and γ may change with the rounds; the paper's γ does not. Both y of (4) are divided by the round's ρ: after ρ has
  changed, θ is not the mean of the w_i + y_i/ρ.
- rows are dealt into batches anew in every epoch; l. 13 deals them once a round.
- besides SGD a client may take gradient steps on all rows or L-BFGS, and stop at (6) where it is met before E_i epochs
  are over; momentum then begins anew with every epoch.
- α_i is 1, or m·n_i/n with weights="rows": the paper's n_i/n on the scale of the first.
- Theorem 1 needs η = |S|/m (eta="participation") and ρ > (1+√5)L (rho="lipschitz"); the experiments have η = 1,
  ρ = 0.01. The preset `theory` has both of Theorem 1's, and asks for a problem with Lipschitz constants. It also needs
  (6) at every client: give `accuracy`, and a rate below 2/(L+ρ).
- Theorem 1 holds from the round on by which every client has come, not from t = 0 as printed: Lemma 1 takes
  ‖e_i^t‖ ≤ √ε_i before a visit too, and before the first one e_i⁰ = ∇f_i(θ⁰). With f_i = ½(w ∓ 2)² and θ⁰ = 0, (8) says
  V⁰ ≤ 0 where V⁰ = 8, and the Lagrangian rises from 4 to 4.5 before it falls.
"""

from __future__ import annotations

import math
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from fedpact.core.contract import Algorithm, standard_measures
from fedpact.core.errors import is_number, require, require_flags, require_one_of
from fedpact.core.keys import Purpose
from fedpact.core.private import Packing, Theorem
from fedpact.core.settings import Settings, check_schedule, scheduled
from fedpact.core.telemetry import PRIMAL_DUAL, primal_dual_measures
from fedpact.core.vector import Vector
from fedpact.problems.solvers import Subproblem, lbfgs
from fedpact.problems.training import (
    Plan,
    Trained,
    check_batches,
    check_training,
    local_epochs,
    noised_steps,
    train,
    whole_upload,
)

STARTS, MESSAGES, SOLVERS = ("global", "local"), ("augmented", "double"), ("sgd", "gd", "lbfgs")
NEWCOMERS = ("initial", "global")
NO_THEOREM = "Theorem 1 does not apply: it needs {needs}."
SOME_THEOREM = "Theorem 1 applies only from the round on by which every client has come; {where}."


class ServerState(NamedTuple):
    """θ, the rounds done, and what the hellos gave: n, and L where ρ comes from it."""

    theta: Vector
    round: Any
    rows: Any
    lipschitz: Any


class ClientState(NamedTuple):
    """w_i and y_i, and with newcomer="global" whether the client has taken part."""

    w: Vector
    y: Vector
    seen: Any = None


class Hello(NamedTuple):
    """n_i with weights="rows", r_i with rho="lipschitz", else nothing."""

    rows: Any
    lipschitz: Any


class Broadcast(NamedTuple):
    """θ, ρ of this round, n where clients weigh by their rows, and γ of this round where it changes."""

    theta: Vector
    rho: Any
    rows: Any
    rate: Any = None


class Upload(NamedTuple):
    """Δ_i."""

    delta: Vector


class Notes(NamedTuple):
    """Passes over the rows, epochs E_i, the last epoch's loss, ‖∇L_i‖² where (6) is looked at."""

    gradients: Any
    epochs: Any
    train_loss: Any
    accuracy_met: Any = math.nan


class Info(NamedTuple):
    """η and ρ of the round."""

    eta: Any
    rho: Any


def theorem_rho(lipschitz: Any) -> Any:
    """A ρ that Theorem 1 allows, just above (1+√5)L, where every ∇f_i is L-Lipschitz."""
    return 1.01 * (1 + math.sqrt(5)) * lipschitz


@dataclass(frozen=True)
class FedADMM(Settings):
    """Settings of FedADMM."""

    rho: Any = 0.01  # ρ: a number, [[round, value], …] from these rounds on, or "lipschitz" for Theorem 1's
    eta: Any = 1.0  # η: a number, [[round, value], …], or "participation" for |S|/m
    start: str = "global"  # where local training starts: "global" for θ, "local" for w_i
    message: str = "double"  # what is sent: "augmented" for (4), "double" for 2(w_i − θ)
    newcomer: str = "initial"  # w_i of a client's first round: "initial" for θ⁰, "global" for the θ it is sent
    duals: bool = True  # false leaves y_i at 0
    epochs: int = 5  # E
    vary: bool = True  # E_i drawn from 1..E for every client and round; false: E
    batch: int | None = None  # B, rows a step; None: all
    short: bool = False  # let a client with fewer rows than a batch use all it has
    rate: Any = 0.1  # γ, the learning rate: a number, or [[round, value], …]
    momentum: float = 0.0  # of the local optimiser
    solver: str = "sgd"  # "sgd", "gd" (all rows a step) or "lbfgs" (at most `epochs` steps)
    accuracy: Any = None  # ε_i of (6): stop a client's epochs at ‖∇L_i‖² ≤ ε_i; a number, or one per client
    weights: str = "uniform"  # α_i: "uniform" for 1, "rows" for m·n_i/n

    name: ClassVar[str] = "fedadmm"
    ways: ClassVar = ("steps", "client")
    presets: ClassVar = {
        "paper": {"momentum": 0.5},
        "printed": {"start": "local", "message": "augmented"},
        "theory": {"rho": "lipschitz", "eta": "participation", "start": "local", "message": "augmented"},
    }

    def __post_init__(self) -> None:
        self._plain()
        check_training(self, falling=True)
        check_schedule("rho", self.rho, symbol="ρ", words=("lipschitz",), least=0.0)
        check_schedule("eta", self.eta, symbol="η", words=("participation",), above=0.0)
        for field, known in (("start", STARTS), ("message", MESSAGES), ("newcomer", NEWCOMERS), ("solver", SOLVERS)):
            require_one_of(field, getattr(self, field), known)
        require_one_of("weights", self.weights, ("uniform", "rows"))
        require_flags(self, "duals")
        values = [v for _, v in self.rho] if isinstance(self.rho, (tuple, list)) else [self.rho]
        hint = 'Message "double" allows ρ = 0.'
        positive = self.message == "double" or all(v == "lipschitz" or v > 0 for v in values)
        require(positive, "rho", 'above 0 for message "augmented"', self.rho, symbol="ρ", hint=hint)
        full = self.solver == "sgd" or self.batch is None
        require(full, "batch", f"left out for solver {self.solver!r}", self.batch, symbol="B", hint="It uses all rows.")
        plain = self.solver != "lbfgs" or self.momentum == 0
        hint = "It has no momentum."
        require(plain, "momentum", "0 for solver 'lbfgs'", self.momentum, symbol="β", hint=hint)
        whole = self.accuracy is None or self.batch is not None or self.solver == "lbfgs" or self.momentum == 0
        hint = "It begins anew with every epoch, which is one step without a batch (B)."
        require(whole, "momentum", "0 for accuracy on all rows", self.momentum, symbol="β", hint=hint)
        many = self.accuracy if isinstance(self.accuracy, (tuple, list)) else (self.accuracy,)
        ok = self.accuracy is None or (len(many) > 0 and all(is_number(e) and e >= 0 for e in many))
        require(ok, "accuracy", "at least 0, one number or one per client", self.accuracy, symbol="ε_i")

    def private(self, way: str, problem: Any, clients: int, rate: float, reach: float | None) -> Theorem:
        """Noise in every local gradient, or on the whole upload."""
        fixed = {} if self.rho != "lipschitz" else {"rho": 0.01}
        if way == "client":
            require(not fixed, "rho", "a number in a private run", self.rho, symbol="ρ", hint="Say rho=0.01.")
            return whole_upload()
        solver = self.solver if self.solver != "lbfgs" else "sgd"
        return noised_steps(self, accuracy=None, solver=solver, **fixed)

    def build(self, problem: Any, clients: int, rate: float) -> Algorithm:
        """Algorithm 1 for m clients."""
        m, by_rows, by_theorem = clients, self.weights == "rows", self.rho == "lipschitz"
        plan, falls = Plan(self.rate, self.momentum, self.batch), isinstance(self.rate, (tuple, list))
        if isinstance(self.accuracy, (tuple, list)):
            require(len(self.accuracy) == m, "accuracy", f"one per client ({m})", len(self.accuracy), symbol="ε_i")
        epsilon = None if self.accuracy is None else jnp.broadcast_to(jnp.asarray(self.accuracy), (m,))
        native = getattr(problem, "native", False) and (self.solver == "lbfgs" or epsilon is not None)
        plainly = jax.disable_jit if native else nullcontext  # gradients that are not JAX's cannot be in its loops

        def alpha(msg: Broadcast, batch: Any) -> Any:
            return m * batch.rows / msg.rows if by_rows else 1.0

        def join(w0: Vector, batch: Any, key: Any) -> tuple[ClientState, Hello]:
            r = problem.lipschitz(batch) if by_theorem else None
            seen = jnp.asarray(False) if self.newcomer == "global" else None
            return ClientState(w0, 0.0 * w0, seen), Hello(batch.rows if by_rows else None, r)

        def init(w0: Vector, hellos: Hello) -> ServerState:
            rows = jnp.sum(hellos.rows) if by_rows else None
            each = m * hellos.rows / rows if by_rows else 1.0
            return ServerState(w0, jnp.asarray(0), rows, jnp.max(each * hellos.lipschitz) if by_theorem else None)

        def broadcast(server: ServerState) -> Broadcast:
            dtype = jax.tree.leaves(server.theta.tree)[0].dtype
            rho = theorem_rho(server.lipschitz) if by_theorem else scheduled(self.rho, server.round)
            rate = jnp.asarray(scheduled(self.rate, server.round), dtype) if falls else None
            return Broadcast(server.theta, jnp.asarray(rho, dtype), server.rows, rate)

        def own(msg: Broadcast, client: ClientState) -> Vector:
            """w_i before this round."""
            if client.seen is None:
                return client.w
            return jax.tree.map(lambda w, theta: jnp.where(client.seen, w, theta), client.w, msg.theta)

        def local(
            msg: Broadcast, client: ClientState, batch: Any, grad: Any, key: Any
        ) -> tuple[Trained, Any, Any, Any]:
            """Lines 14-19: E_i epochs, or until (6). The point, E_i, passes over the rows, ‖∇L_i‖²."""
            a, y, rho, theta, rate = alpha(msg, batch), client.y, msg.rho, msg.theta, msg.rate if falls else self.rate
            w = theta if self.start == "global" else own(msg, client)
            most = local_epochs(jax.random.fold_in(key(Purpose.LOCAL), 0), self.epochs, self.vary)
            shuffle = jax.random.fold_in(key(Purpose.LOCAL), 1)

            def look(v: Vector) -> tuple[Any, Any]:
                loss, g = grad.value_and_gradient(v, batch)
                return loss, (a * g + y + rho * (v - theta)).norm2()  # (6)

            def some(v: Vector, key: Any, epochs: Any) -> Trained:  # α∇f + y + ρ(w−θ) = α(∇f + y/α + (ρ/α)(w−θ))
                steps = plan._replace(rate=rate * a)
                return train(grad, v, batch, key, steps, epochs, linear=y / a, rho=rho / a, center=theta)

            if self.solver == "lbfgs":
                target = 0.0 if epsilon is None else epsilon[batch.client]
                sub = Subproblem(lambda v: a * grad(v, batch), a * grad(w, batch), theta, y, rho, 1 / rate, target)
                solved = lbfgs(sub, most, start=w)
                trained = Trained(solved.v, solved.gradients, grad.value_and_gradient(solved.v, batch)[0])
                return (
                    trained,
                    solved.steps,
                    solved.gradients + 2,
                    solved.residual,
                )  # two more: at the start, at the end
            if epsilon is None:
                return some(w, shuffle, most), most, most, jnp.nan

            def again(carry: tuple[Any, ...]) -> tuple[Any, ...]:
                done, trained, _ = carry
                new = some(trained.w, jax.random.fold_in(shuffle, done), 1)
                return done + 1, Trained(new.w, trained.steps + new.steps, new.loss), look(new.w)[1]

            loss, left = look(w)
            first = (jnp.asarray(0), Trained(w, jnp.asarray(0), loss), left)
            going = lambda c: (c[0] < most) & ~(c[2] <= epsilon[batch.client])  # what is no number does not meet (6)
            done, trained, left = lax.while_loop(going, again, first)
            return trained, done, 2 * done + 1, left  # a pass an epoch, and one for every look at (6)

        def client_step(msg: Broadcast, client: ClientState, batch: Any, grad: Any, key: Any) -> tuple[Any, ...]:
            theta, rho, y = msg.theta, msg.rho, client.y
            with plainly():
                trained, epochs, passes, left = local(msg, client, batch, grad, key)
            w = trained.w  # l. 14-19
            y_new = y + rho * (w - theta) if self.duals else y  # l. 20
            double = self.message == "double"
            delta = 2.0 * (w - theta) if double else (w + y_new / rho) - (own(msg, client) + y / rho)  # (4)
            notes = (jnp.asarray(value, jnp.float64) for value in (passes, epochs, trained.loss, left))
            seen = None if client.seen is None else jnp.asarray(True)
            return ClientState(w, y_new, seen), Upload(delta), Notes(*notes)

        def server_step(server: ServerState, uploads: Upload, cohort: Any) -> tuple[ServerState, Info]:
            dtype = jax.tree.leaves(server.theta.tree)[0].dtype
            count = jnp.maximum(cohort.count, 1)
            eta = cohort.count / m if self.eta == "participation" else scheduled(self.eta, server.round)
            theta = server.theta + jnp.asarray(eta / count, dtype) * cohort.sum(uploads.delta)  # (5)
            return server._replace(theta=theta, round=server.round + 1), Info(eta, broadcast(server).rho)

        def measure(msg: Broadcast, client: ClientState, batch: Any) -> dict[str, Any]:
            a, w = alpha(msg, batch), own(msg, client)
            d = w - msg.theta
            by_w = a * problem.gradient(w, batch) + client.y + msg.rho * d
            v = (-1.0 * (client.y + msg.rho * d), by_w.norm2() + d.norm2())  # (7): ∇_θ L is their sum over the clients
            terms = primal_dual_measures(problem, msg.theta, w, client.y, msg.rho, a, batch)
            return standard_measures(problem, msg.theta, batch) | terms | {"v": v}

        return Algorithm(
            name=self.name,
            join=join,
            init=init,
            broadcast=broadcast,
            client_step=client_step,
            server_step=server_step,
            measure=measure,
            model=lambda server: server.theta,
            combine="sum",
            differences=self.message == "augmented",
            packing=Packing(lambda msg, upload: upload.delta, lambda msg, v, count: Upload(v)),
            info=Info._fields,
            notes={"gradients": "sum", "epochs": "mean", "train_loss": "mean"}
            | ({} if epsilon is None and self.solver != "lbfgs" else {"accuracy_met": "max"}),
            reads=PRIMAL_DUAL | {"v": "optimality"},
            rows=check_batches(self),
            coverage="participation infinitely often (Remark 2)",
            needs=frozenset({"lipschitz"}) if by_theorem else frozenset(),
            notices=self._notices(rate),
        )

    def _notices(self, rate: float) -> tuple[str, ...]:
        full = self.eta == "participation" or (rate == 1 and self.eta == 1)
        missing = [] if full else [f"η = |S|/m, and it is {self.eta}"]
        missing += [f"a constant ρ, and it is {self.rho}"] if isinstance(self.rho, (tuple, list)) else []
        missing += [] if self.message == "augmented" else ["the message (4), and 2(w_i − θ) is sent"]
        missing += [] if self.newcomer == "initial" else ["w_i = θ⁰ at first, and it is θ of a client's first round"]
        missing += [] if self.duals else ["the duals of l. 20, and y_i stays 0"]
        missing += [] if self.accuracy is not None else ["(6) met at every client, and it is not looked at"]
        large = [] if not is_number(self.rho) else [f"ρ > (1+√5)L, not checked for ρ = {self.rho}"]
        if missing:
            return (NO_THEOREM.format(needs="; ".join(missing + large)),)
        reached = f"where accuracy_met is at most ε = {self.accuracy}: epochs may end before"
        return (SOME_THEOREM.format(where="; ".join([f"with {one}" for one in large] + [reached])),)
