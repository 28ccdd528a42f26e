"""FedProx: FedAvg with a proximal term.

T. Li, A. K. Sahu, M. Zaheer, M. Sanjabi, A. Talwalkar and V. Smith, "Federated Optimization in Heterogeneous Networks",
MLSys 2020. Algorithm 2.

Server    w ← Σ_{i∈S} p_i w_i / Σ_{i∈S} p_i
Client    w_i ≈ argmin_v f_i(v) + (μ/2)‖v − w‖²:  `steps` times  w_i ← w_i − γ (∇f_i(w_i) + μ (w_i − w)),  from w_i = w

          or, where `epochs` is given, E passes over shuffled batches of the same step

paper → code:  μ → mu, η → step (γ here), E → epochs.

Differs from the paper:
- clients are drawn uniformly and p_i = 1 by default; the paper draws them in proportion to d_i and takes p_i = 1.
  weights="rows" weights the mean by d_i instead.
- a subproblem is solved by a number of steps or epochs, not to an accuracy γ.
- step="lipschitz" is 1/(r_i + μ), the inverse Lipschitz constant of the subproblem.
- with `epochs`, rows are dealt into batches anew in each, local steps may have momentum, and E_i may be drawn from 1..E
  (`vary`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from fedpact.algorithms.fedavg import build_local, check_local, private_local
from fedpact.core.contract import Algorithm
from fedpact.core.errors import is_number, require
from fedpact.core.private import Theorem
from fedpact.core.settings import Settings


@dataclass(frozen=True)
class FedProx(Settings):
    """Settings of FedProx."""

    mu: float = 1e-3  # μ, the weight of the proximal term
    steps: int = 12  # local gradient steps in a round
    step: float | str = "lipschitz"  # γ: a number, or "lipschitz" for 1/(r_i + μ)
    scale: float = 1.0  # multiplies γ
    batch: int | None = None  # rows a step; None: all
    weights: str = "uniform"  # "uniform", or "rows" for p_i = d_i
    epochs: int | None = None  # E passes over shuffled batches instead of `steps`
    momentum: float = 0.0  # of the local optimiser, with epochs
    vary: bool = False  # with epochs: E_i drawn from 1..E for every client and round
    short: bool = False  # with epochs: let a client with fewer rows than a batch use all it has

    name: ClassVar[str] = "fedprox"
    ways: ClassVar = ("steps", "client")
    remedy: ClassVar[str] = "take shorter steps: a smaller scale"
    presets: ClassVar = {"lipschitz": {}, "rows": {"weights": "rows"}}

    def __post_init__(self) -> None:
        self._plain()
        check_local(self)
        require(is_number(self.mu) and self.mu >= 0, "mu", "at least 0", self.mu, symbol="μ")

    def private(self, way: str, problem: Any, clients: int, rate: float, reach: float | None) -> Theorem:
        """Noise in every local gradient, or on the whole upload."""
        return private_local(self, way)

    def build(self, problem: Any, clients: int, rate: float) -> Algorithm:
        """Local steps with the proximal term."""
        return build_local(self, problem, mu=self.mu)
