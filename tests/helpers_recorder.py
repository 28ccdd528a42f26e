"""Slow, literal recorders of the authors' runs: NumPy, loops over clients and local steps, nothing of fedpact.

The conventions are those of the recordings.

FedEPM. w_i⁰ = 0 although the first messages are Z0; obj[t] = Σ f_i at w = ENS(z) before the clients of row t step; the
power of α counts every local step of every round, selected or not; η has ρ = |S row| / m;
f_i = (1/d_i)[Σ logloss + (β/2)‖w‖²]; the prox weight is μ/d_i.

Inexact ADMM. w_i⁰ = z_i⁰ = 0; OBJ[t] = (1/m)Σ f_i at w before the clients of row t step; ε_i starts at k0² and is
multiplied by ν before the test; the test is ‖α∇f_i(v) + π + σ(v⁺ − w)‖² < ε_i n, at most three inner steps.
"""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import numpy as np
import scipy.io

BETA, MU0, C, ALPHA = 1e-3, 0.05, 1e-8, 1.001
NUMBERS = (0, 2, 4, 10, 11, 12)


def adult(folder: Path) -> tuple[np.ndarray, np.ndarray]:
    """Adult as the authors prepared it: no rows with '?', adult.test first, categories by alphabet, unit columns."""
    rows = []
    for name in ("adult.test", "adult.data"):
        for line in (folder / name).read_text().splitlines():
            cells = [cell.strip() for cell in line.strip().rstrip(".").split(",")]
            if len(cells) == 15 and "?" not in cells:
                rows.append(cells)
    x = np.empty((len(rows), 14))
    for j in range(14):
        cells = [row[j] for row in rows]
        order = sorted(set(cells))
        x[:, j] = [float(c) for c in cells] if j in NUMBERS else [order.index(c) for c in cells]
        x[:, j] /= np.sqrt(np.sum(x[:, j] ** 2))
    return x, np.array([1.0 if row[14] == ">50K" else 0.0 for row in rows])


def center(values: np.ndarray, lam: float, eta: float) -> float:
    """argmin_w Σ λ|w − v_i| + (η/2)(w − v_i)²: the kink or the stretch between two kinks where 0 is a subgradient."""
    v = np.sort(values)
    m = len(v)
    for i in range(m):  # on a kink: the slope to its left is at most 0, to its right at least 0
        smooth = eta * np.sum(v[i] - v)
        below, above = np.sum(v < v[i]), np.sum(v > v[i])
        ties = m - below - above
        if smooth + lam * (below - above - ties) <= 0 <= smooth + lam * (below - above + ties):
            return v[i]
    edges = [-np.inf, *v, np.inf]
    for i in range(m + 1):  # between kinks: i values below, m − i above
        w = np.mean(v) + lam * (m - 2 * i) / (m * eta)
        if edges[i] < w < edges[i + 1]:
            return w
    raise AssertionError("no minimiser")


def value(w: np.ndarray, a: np.ndarray, b: np.ndarray) -> float:
    z = a @ w
    return (np.sum(np.logaddexp(0, z) - b * z) + BETA / 2 * np.sum(w * w)) / len(b)


def gradient(w: np.ndarray, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return (a.T @ (1 / (1 + np.exp(-(a @ w))) - b) + BETA * w) / len(b)


def record(
    path: Path,
    data: tuple[np.ndarray, np.ndarray],
    *,
    m: int,
    k0: int,
    rounds: int,
    seed: int,
    chosen: int | None = None,
    noise: str | None = None,
) -> dict[str, np.ndarray]:
    """Run and save a recording; `chosen` clients a round (None: everyone, no S), `noise` of this kind in uploads."""
    x, y = data
    d, n = x.shape
    rng = np.random.default_rng(seed)
    perm = rng.permutation(d)
    sizes = np.diff(np.concatenate([[0], np.sort(rng.choice(np.arange(500, d - 500), m - 1, replace=False)), [d]]))
    blocks = np.split(perm, np.cumsum(sizes)[:-1])
    first = 0.1 * rng.standard_normal((n, m))
    rows = [list(range(m))] * rounds
    if chosen is not None:
        rows = [sorted(rng.choice(m, chosen, replace=False).tolist()) for _ in range(rounds)]
    added = np.zeros((n, m, rounds))
    if noise is not None:
        added = getattr(rng, noise)(scale=0.02, size=(n, m, rounds))

    rho = 1.0 if chosen is None else chosen / m
    eta = 1e-5 * (0.02 * m + 1) * (rho + 0.1)
    lam = eta / 2
    models = [np.zeros(n) for _ in range(m)]
    messages = [first[:, i].copy() for i in range(m)]
    objectives = []
    for t in range(rounds + 1):
        w = np.array([center(np.array([z[j] for z in messages]), lam, eta) for j in range(n)])
        objectives.append(sum(value(w, x[block], y[block]) for block in blocks))
        for i in rows[t] if t < rounds else ():
            g = gradient(w, x[blocks[i]], y[blocks[i]])
            for j in range(k0):
                gap = models[i] - w
                mu = MU0 * (1 + C * np.sum(gap * gap)) * ALPHA ** (t * k0 + j + 1)
                weight = mu / sizes[i]
                v = weight * gap - g
                models[i] = w + np.sign(v) * np.maximum(np.abs(v) - lam, 0) / (eta + weight)
            messages[i] = models[i] + added[:, i, t]

    fields = {"perm": perm[None] + 1.0, "di": sizes[:, None].astype(float), "Z0": first, "k0": k0, "m": m}
    fields |= {"obj": np.array(objectives)[None], "cr": rounds, "sol": w[:, None]}
    if chosen is not None:
        fields["S"] = np.array(rows, dtype=float) + 1
    if noise is not None:
        fields["N"] = added if rounds > 1 else added[:, :, 0]  # MATLAB keeps no third dimension of length one
    scipy.io.savemat(path, fields)
    return fields


NU, INNER = 0.95, 3


def record_admm(
    path: Path, a: np.ndarray, b: np.ndarray, sizes: list[int], rows: list[list[int]], *, k0: int, linear: bool
) -> tuple[dict[str, np.ndarray], list[int]]:
    """Run inexact ADMM on consecutive blocks and save a recording; also the numbers of inner steps that were taken."""
    m, n = len(sizes), a.shape[1]
    ends = np.cumsum([0, *sizes])
    data = [(a[lo:hi], b[lo:hi]) for lo, hi in pairwise(ends)]
    top = [np.linalg.eigvalsh(x.T @ x)[-1] for x, _ in data]
    if linear:
        r = [lam / (d * m) for lam, d in zip(top, sizes, strict=True)]
        slope = lambda w, x, y: x.T @ (x @ w - y) / len(y)
        loss = lambda w, x, y: np.sum((x @ w - y) ** 2) / (2 * len(y))
    else:
        r = [(lam / 5 + BETA) / (d * m) for lam, d in zip(top, sizes, strict=True)]
        slope, loss = gradient, value
    sigma = [(0.5 if linear else 0.2) * r_i for r_i in r]
    models, duals, eps = [np.zeros(n)] * m, [np.zeros(n)] * m, [float(k0**2)] * m
    objectives, taken = [], []
    for t in range(len(rows) + 1):
        w = sum(s * w_i + pi for s, w_i, pi in zip(sigma, models, duals, strict=True)) / sum(sigma)
        objectives.append(sum(loss(w, *block) for block in data) / m)
        for i in rows[t] if t < len(rows) else ():
            for _ in range(k0):
                eps[i] *= NU
                v, steps, small = w, 0, False
                while steps < INNER and not small:
                    g = slope(v, *data[i]) / m
                    v = (r[i] * v + sigma[i] * w - g - duals[i]) / (r[i] + sigma[i])
                    small = np.sum((g + duals[i] + sigma[i] * (v - w)) ** 2) < eps[i] * n
                    steps += 1
                taken.append(steps)
                models[i], duals[i] = v, duals[i] + sigma[i] * (v - w)
    widest = max(map(len, rows))
    chosen = np.array([[i + 1 for i in row] + [0] * (widest - len(row)) for row in rows], dtype=float)
    fields = {"A": a, "b": b[:, None], "dim": np.array(sizes, float)[None], "k0": k0, "rho": 1.0, "S": chosen}
    fields |= {"OBJ": np.array(objectives)[None], "sol": w[:, None]}
    scipy.io.savemat(path, fields)
    return fields, taken
