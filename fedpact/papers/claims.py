"""How claims of the papers are checked and worded."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from fedpact.report import Claim

__all__ = ["Claim", "below", "fewest", "listed", "mean", "rises"]


def below(mine: Sequence[float], others: Iterable[Sequence[float]]) -> bool:
    """Whether mine is below every other, place by place."""
    return all(a < b for other in others for a, b in zip(mine, other, strict=True))


def rises(values: Sequence[float]) -> bool:
    """Whether every value is above the one before."""
    return all(a < b for a, b in pairwise(values))


def listed(values: Iterable[float], form: str = ".3g") -> str:
    """Numbers as a sentence has them."""
    return ", ".join(f"{v:{form}}" for v in values)


def fewest(
    values: Mapping[str, Sequence[float]], mine: str, others: Iterable[str], claim: str, where: Sequence[Any]
) -> Claim:
    """Whether `mine` is below every other in every setting; as many is not fewer."""
    names = list(others)
    wins = sum(below([values[mine][i]], [[values[name][i]] for name in names]) for i in range(len(where)))
    detail = "; ".join(f"{name} {listed(values[name])}" for name in (mine, *names))
    return claim, wins == len(where), f"true in {wins} of {len(where)} settings. {detail}"


def mean(values: Sequence[float]) -> tuple[float, float]:
    """Mean and deviation; infinite, and none, where a value is not finite."""
    if not np.all(np.isfinite(values)):
        return float("inf"), float("nan")
    return float(np.mean(values)), float(np.std(values))
