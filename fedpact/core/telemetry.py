"""What every primal-dual method reports: measured by the clients at the new w, summed, off the round's bill.

lagrangian        Σ_i α_i f_i(w_i) + ⟨w_i − w, π_i⟩ + (σ_i/2)‖w_i − w‖²
primal_residual   (Σ_i ‖w_i − w‖²)^½                     how far the clients are from consensus
stationarity      (Σ_i ‖α_i ∇f_i(w_i) + π_i‖²)^½         how far they are from solving their subproblems
dual_sum          ‖Σ_i π_i‖                              0 at a solution
dual_residual     (Σ_i σ_i²)^½ ‖w^{τ+1} − w^τ‖           the server's part
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from fedpact.core.contract import Batch
from fedpact.core.vector import Vector

#: How the loop reads what `primal_dual_measures` returns.
PRIMAL_DUAL = {"lagrangian": "sum", "primal_residual": "root", "stationarity": "root", "dual_sum": "norm"}


def primal_dual_measures(
    problem: Any, w: Vector, w_i: Vector, pi: Vector, sigma: Any, alpha: Any, batch: Batch
) -> dict[str, Any]:
    """One client's terms of the sums above."""
    value, gradient = problem.value_and_gradient(w_i, batch)
    gap = w_i - w
    return {
        "lagrangian": alpha * value + gap.dot(pi) + sigma / 2 * gap.norm2(),
        "primal_residual": gap.norm2(),
        "stationarity": (alpha * gradient + pi).norm2(),
        "dual_sum": pi,
    }


def dual_residual(new: Vector, old: Vector, sigma_squares: Any) -> Any:
    """(Σ_i σ_i²)^½ ‖w^{τ+1} − w^τ‖."""
    return jnp.sqrt(sigma_squares) * (new - old).norm()
