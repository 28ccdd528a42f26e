"""The part of a private run that is inside the round: clipping, sampling and noise.

    once, convex   g_i = (1/d_i) Σ_j clip(∇ℓ_j) + ∇(regulariser);  upload + noise of scale z · moved(C, d_i, t)
    steps          each local gradient is (1/B) (Σ_{j ∈ sample} clip(∇ℓ_j) + noise of scale z·C) + ∇(regulariser)
    client         v = upload − what is public, clipped to C;  v + noise of scale z·C, added by the client, or by the
                   server to the sum

A sample takes each row on its own with probability q = B/d_i. Room is kept for `room(B, d_i)` rows, which a sample
exceeds with probability below 10⁻³⁰; d_i is public, as are the regulariser and the point it is taken at. A row whose
gradient is not finite counts as zero, as does an upload that is not finite under way `client`.

Noise is drawn from the key in simulation. On a lattice (discrete noise) the release is computed on the host by the
exact samplers, from a generator that the key seeds; `source="system"` draws either kind from the operating system.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.flatten_util import ravel_pytree

from fedpact.core.contract import Batch, Streamed
from fedpact.core.errors import InvalidArgument, require_one_of
from fedpact.core.vector import Vector
from fedpact.privacy.mechanisms import MECHANISMS, Secure, Simulated, Source, noise, release
from fedpact.privacy.private import Plan
from fedpact.problems.clipping import clipped_sum, public_gradient
from fedpact.problems.training import Plan as Training
from fedpact.problems.training import Trained

#: How likely a Poisson sample may be to exceed the room kept for it.
OVERFLOW = 1e-30
#: Scales are raised, and uploads clipped, by this much more than the theorem asks, for rounding in single precision.
MARGIN = 1e-5
SOURCES = ("seed", "system")


def room(batch: int, rows: int) -> int:
    """Rows that a Poisson sample of mean B among d has room for."""
    from scipy.stats import binom  # half a second, which no other command should wait

    if batch >= rows:
        return rows
    return int(np.searchsorted(-binom.sf(np.arange(rows), rows, batch / rows), -OVERFLOW))  # isf is no such quantile


class Noise:
    """Adds noise of one mechanism to vectors."""

    def __init__(self, mechanism: str, lattice: int | None = None, source: str = "seed") -> None:
        require_one_of("source", source, SOURCES)
        self.mechanism, self.lattice, self.source = mechanism, lattice, source
        self.norm = MECHANISMS[mechanism].norm

    def __call__(self, v: Vector, scale: Any, key: Any) -> Vector:
        """v with independent noise of this scale in every coordinate."""
        flat, unflatten = ravel_pytree(v)
        if self.lattice is None and self.source == "seed":
            draw = jax.random.normal if self.mechanism == "gaussian" else jax.random.laplace
            # in doubles: single normals end at 5.2 deviations, and a missing tail is a δ that nobody counts
            noised = flat.astype(jnp.float64) + scale * draw(key, flat.shape, jnp.float64)
            return unflatten(noised.astype(flat.dtype))
        shape = jax.ShapeDtypeStruct(flat.shape, flat.dtype)
        drawn = jax.pure_callback(
            self._on_host, shape, flat, jnp.asarray(scale), jax.random.key_data(key), vmap_method="sequential"
        )
        return unflatten(drawn)

    def _on_host(self, values: Any, scale: Any, key: Any) -> np.ndarray:
        words = [int(word) for word in np.asarray(key).ravel()]
        source: Source = Secure() if self.source == "system" else Simulated(np.random.default_rng(words))
        flat = np.asarray(values, np.float64)
        if self.lattice is None:
            drawn = flat + noise(self.mechanism, float(scale), flat.size, source)
        else:
            drawn = release(self.mechanism, flat, float(scale), self.lattice, source)
        return drawn.astype(np.asarray(values).dtype)


def clip_whole(v: Vector, clip: float, norm: int) -> Vector:
    """v scaled down to this norm; zero where it is not finite."""
    largest = jnp.max(jnp.stack([jnp.max(jnp.abs(leaf), initial=0) for leaf in jax.tree.leaves(v.tree)]))
    fine = jnp.isfinite(largest)
    unit = jnp.where(fine & (largest > 0), largest, 1)  # so that squares neither overflow nor vanish
    v = v.map(lambda a: jnp.where(fine, a / unit, 0))
    length = v.norm() if norm == 2 else v.norm1()
    return jnp.minimum(unit, clip * (1 - MARGIN) / jnp.where(length > 0, length, 1)) * v


class Clipped:
    """The oracle of ways `once` and `convex`: means of clipped gradients, without noise. The upload gets it."""

    def __init__(self, problem: Any, clip: float, norm: int, reach: float | None = None) -> None:
        self.problem, self.clip, self.norm, self.reach = problem, clip, norm, reach

    def __call__(self, w: Vector, batch: Batch) -> Vector:
        """The clipped ∇f_i(w) on these rows."""
        return self.value_and_gradient(w, batch)[1]

    def value_and_gradient(self, w: Vector, batch: Batch) -> tuple[Any, Vector]:
        """The mean loss and the clipped gradient."""
        d = batch.rows
        found = clipped_sum(self.problem, w, within(batch, self.reach), self.clip, self.norm)
        return found.loss / d, found.total / d + public_gradient(self.problem, w, d)


def within(batch: Batch, reach: float | None) -> Batch:
    """The batch with its rows scaled down to a 2-norm of at most R."""
    if reach is None:
        return batch
    x = batch.x.astype(batch.weight.dtype) / 255 if batch.x.dtype == jnp.uint8 else batch.x
    length = jnp.linalg.norm(x, axis=-1, keepdims=True)
    return batch._replace(x=x * jnp.minimum(1, reach / jnp.where(length > 0, length, 1)))


class Noisy:
    """The oracle of way `steps`: every gradient is of a sample, clipped and noised. There is no other gradient."""

    def __init__(self, problem: Any, clip: float, scale: float, noise: Noise) -> None:
        self.problem, self.clip, self.scale, self.noise = problem, clip, scale * (1 + MARGIN), noise

    def __call__(self, w: Vector, batch: Batch) -> Vector:
        """Refused: a gradient without noise may not be taken here."""
        raise InvalidArgument(
            "gradient must be a noised one in a private run, got a plain one. This algorithm has no such mode: use "
            "epochs or steps as its page says."
        )

    value_and_gradient = __call__

    def sampled(self, w: Vector, batch: Batch, size: int | None, key: Any) -> tuple[Any, Vector]:
        """Loss and noised gradient of a Poisson sample of `size` rows on average; None: of all rows."""
        chosen, fresh = jax.random.split(key)
        d = batch.rows
        rows, share = (batch, d) if size is None else self._draw(batch, size, chosen)
        found = clipped_sum(self.problem, w, rows, self.clip, self.noise.norm)
        total = self.noise(found.total, self.scale, fresh)
        return found.loss / share, total / share + public_gradient(self.problem, w, d)

    def _draw(self, batch: Batch, size: int, key: Any) -> tuple[Batch, Any]:
        width = batch.y.shape[0]
        share = jnp.minimum(jnp.asarray(size, batch.weight.dtype), batch.rows)  # q·d_i, which is public
        chance = jax.random.uniform(key, (width,))
        taken = (batch.weight > 0) & (chance < share / batch.rows)
        most = room(size, width)
        if most >= width:
            return batch._replace(weight=jnp.where(taken, batch.weight, 0)), share
        index = lax.top_k(jnp.where(taken, 2 - chance, 0), most)[1]
        weight = jnp.where(taken[index], batch.weight[index], 0)
        return Batch(batch.x[index], batch.y[index], weight, batch.client), share

    def train(
        self,
        w: Vector,
        batch: Batch,
        key: Any,
        plan: Training,
        epochs: Any,
        *,
        linear: Vector | None = None,
        rho: Any = None,
        center: Vector | None = None,
    ) -> Trained:
        """`problems.training.train` with such gradients: an epoch is ⌈d_i/B⌉ of them."""
        each = 1 if plan.batch is None else jnp.ceil(batch.rows / plan.batch).astype(jnp.int32)
        zero = jnp.zeros((), jax.tree.leaves(w.tree)[0].dtype)

        def step(k: Any, carry: tuple[Any, ...]) -> tuple[Any, ...]:
            v, m, total = carry
            loss, g = self.sampled(v, batch, plan.batch, jax.random.fold_in(key, k))
            g = g if linear is None else g + linear
            g = g if center is None else g + rho * (v - center)
            m = g if m is None else plan.momentum * m + g
            return v - plan.rate * m, (m if plan.momentum else None), jnp.where(k % each == 0, zero, total) + loss

        momentum = 0.0 * w if plan.momentum else None
        v, _, total = lax.fori_loop(0, epochs * each, step, (w, momentum, zero))
        return Trained(v, epochs * each, total / each)


class Guard:
    """What the round loop asks of a private run: the oracle, what becomes of an upload, and of the sum of uploads."""

    def __init__(self, plan: Plan, problem: Any, algorithm: Any, source: str = "seed") -> None:
        private, theorem = plan.private, plan.theorem
        self.plan, self.problem, self.algorithm = plan, problem, algorithm
        self.way, self.central = theorem.way, plan.central
        self.noise = Noise(private.mechanism, private.lattice, source)
        self.oracle: Any = None  # of way client: the problem's own
        if self.way == "steps":
            self.oracle = Noisy(problem, private.clip, plan.noise * private.clip, self.noise)
        elif self.way in ("once", "convex"):
            self.oracle = Clipped(problem, private.clip, self.noise.norm, private.reach)

    def released(self, msg: Any, before: Any, state: Any, batch: Batch, upload: Any, t: Any, key: Any) -> Any:
        """The client's state and what leaves it: (state, upload)."""
        if self.way == "steps":
            return state, upload
        if self.way == "client":
            v = clip_whole(self.algorithm.packing.pack(msg, upload), self.plan.private.clip, self.noise.norm)
            if self.central:
                return state, v
            v = self.noise(v, self.plan.noise * self.plan.private.clip, key)
            return state, self.algorithm.packing.unpack(msg, v, jnp.ones((), dtype_of(v)))
        moved = self.plan.theorem.moved(self.plan.private.clip, batch.rows, t)
        sent = self.noise(Vector(upload), self.plan.noise * moved * (1 + MARGIN), key).tree
        return self.algorithm.commit(msg, before, sent), sent

    def measures(self, w: Vector, batch: Batch) -> dict[str, Any]:
        """Rows whose gradient at the server's model is not finite, where records are clipped: they count as zero."""
        if self.way == "client":
            return {}
        rows = within(batch, self.plan.private.reach)
        return {"refused": clipped_sum(self.problem, w, rows, self.plan.private.clip, self.noise.norm).refused}

    def summed(self, msg: Any, uploads: Any, cohort: Any, key: Any) -> tuple[Any, Any]:
        """Where the server adds the noise: the uploads as their noised sum, and the cohort that it is of."""
        clients = len(self.plan.sizes)
        rho = getattr(self.plan.participation, "rho", None)
        amplified = self.plan.event(0).sampling == "poisson"
        total = self.noise(cohort.sum(uploads), self.plan.noise * self.plan.private.clip, key)
        expected = cohort.count if rho is None or not amplified else max(1.0, rho * clients)
        count = jnp.asarray(expected, dtype_of(total))
        return self.algorithm.packing.unpack(msg, total, count), Streamed(count)


def dtype_of(v: Vector) -> Any:
    """The type of a vector's numbers."""
    return jax.tree.leaves(v.tree)[0].dtype
