"""Replay a recorded trajectory of the authors' solver and compare the objective at every round.

A FedEPM recording (.mat) holds `perm` (1-based rows of Adult), `di` (client sizes), `Z0` (n×m first messages), `k0`,
`m`, `obj` (Σ f_i per round) and, with partial participation, `S` (row t: 1-based clients of round t) and `N`
(n×m×rounds: noise added to the uploads).

A recording of inexact ADMM holds `A`, `b`, `dim` (client sizes, consecutive blocks), `k0`, `S` and `OBJ`, which is
f = (1/m)Σ f_i per round. With `linear` in its name it is least squares with σ_i = .5 r_i/m, with `logistic` logistic
regression with σ_i = .2 r_i/m and r_i = λ_max/(5d_i) + 1e-3/d_i.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
import scipy.io
import scipy.sparse

from fedpact import data
from fedpact.algorithms.fedepm import FedEPM, Hello, Upload
from fedpact.algorithms.inexact_admm import InexactADMM
from fedpact.core.contract import Algorithm
from fedpact.core.driver import drive
from fedpact.core.errors import MOST, DataError
from fedpact.core.loop import Loop
from fedpact.core.participation import Everyone, Schedule
from fedpact.core.stop import Never
from fedpact.core.vector import Vector
from fedpact.engines import LocalEngine
from fedpact.problems import LeastSquares, Logistic
from fedpact.problems.base import largest_eigenvalue

TOLERANCE = 1e-9
FEDEPM_FIELDS = ("perm", "di", "Z0", "k0", "obj")
ADMM_FIELDS = ("A", "b", "dim", "k0", "S", "OBJ")


class Verified(NamedTuple):
    """What a replay found: the largest difference of f/m, per round both values, and where it was largest."""

    file: str
    algorithm: str
    clients: int
    rounds: int
    difference: float
    worst_round: int
    recorded: list[float]
    replayed: list[float]

    @property
    def passed(self) -> bool:
        """Whether every round agrees to 1e-9."""
        return self.difference <= TOLERANCE


def golden(path: str | Path) -> Verified:
    """Replay one recording."""
    path = Path(path)
    try:
        fields = scipy.io.loadmat(str(path), appendmat=False)
    except FileNotFoundError:
        raise DataError(f"recording must be a .mat file, got {str(path)!r}, which does not exist.") from None
    except Exception as error:  # scipy raises many kinds for a file of another kind
        raise DataError(f"recording must be a .mat file, got {str(path)!r}: {error}.") from None
    kinds = {"FedEPM": (FEDEPM_FIELDS, _fedepm), "inexact ADMM": (ADMM_FIELDS, _inexact_admm)}
    kind = max(kinds, key=lambda kind: sum(name in fields for name in kinds[kind][0]))
    names, replayed = kinds[kind]
    missing = [name for name in names if name not in fields]
    if missing:
        wanted = f"recording of {kind} must have {', '.join(names)}"
        raise DataError(f"{wanted}, got {str(path)!r} without {', '.join(missing)}. See: fedpact verify --help")
    return replayed(path, fields)


def _fedepm(path: Path, fields: dict[str, Any]) -> Verified:
    adult = data.adult()
    perm = _whole(fields, "perm", path).ravel() - 1
    sizes = _whole(fields, "di", path).ravel()
    z0 = _numbers(fields, "Z0", path).T
    recorded = _numbers(fields, "obj", path).ravel() / len(sizes)
    rounds = len(recorded) - 1
    clients = len(sizes)
    if sorted(perm.tolist()) != list(range(adult.rows)):
        raise DataError(f"perm must be a permutation of 1..{adult.rows}, got another in {str(path)!r}.")
    if "m" in fields and _one(fields, "m", path) != clients:
        raise DataError(f"m must be {clients}, the length of di, got {_one(fields, 'm', path)} in {str(path)!r}.")
    if np.any(sizes < 1):
        raise DataError(f"di must be sizes of at least 1, got {sizes.min()} in {str(path)!r}.")
    if not np.isfinite(z0).all():
        raise DataError(f"Z0 must be finite, got a number that is not in {str(path)!r}.")
    if sizes.sum() != adult.rows or z0.shape != (clients, adult.features):
        raise DataError(
            f"di and Z0 must fit Adult's {adult.rows} rows and {adult.features} columns, got sizes of {sizes.sum()} "
            f"and Z0 of {z0.T.shape} in {str(path)!r}."
        )
    federation = data.Federation(adult, tuple(np.split(perm, np.cumsum(sizes)[:-1])))
    participation: Any = Everyone()
    if "S" in fields:
        participation = _schedule(fields, rounds, path)
    noise = _noise(fields, clients, adult.features, rounds, path)

    problem = Logistic()
    settings = FedEPM(k0=_one(fields, "k0", path))
    recorded_run = replay(settings.build(problem, clients, participation.rate(clients)), z0, noise)
    loop = Loop(recorded_run, problem, LocalEngine(), Never(), 1, False)
    return _compared(path, "fedepm", loop, federation, participation, problem, recorded)


def _inexact_admm(path: Path, fields: dict[str, Any]) -> Verified:
    linear = "linear" in path.name
    if linear == ("logistic" in path.name):
        raise DataError(f"recording of inexact ADMM must have 'linear' or 'logistic' in its name, got {path.name!r}.")
    a, b = _numbers(fields, "A", path), _numbers(fields, "b", path).ravel()
    sizes = _whole(fields, "dim", path).ravel()
    if sizes.sum() != len(a) or len(a) != len(b) or np.any(sizes < 1):
        text = f"dim must be sizes of at least 1 that sum to the rows of A and b, {len(a)} and {len(b)}"
        raise DataError(f"{text}, got {sizes.tolist()[:5]}… of sum {sizes.sum()} in {str(path)!r}.")
    recorded = _numbers(fields, "OBJ", path).ravel()
    federation = data.Federation(
        data.from_arrays(a, b, classes=() if linear else ("0", "1"), name=path.name),
        tuple(np.split(np.arange(len(a)), np.cumsum(sizes)[:-1])),
    )
    participation = _schedule(fields, len(recorded) - 1, path)
    problem: Any = LeastSquares() if linear else RecordedLogistic()
    settings = InexactADMM(k0=_one(fields, "k0", path), sigma=0.5 if linear else 0.2, audit=False)
    algorithm = settings.build(problem, len(sizes), 1.0)
    loop = Loop(algorithm, problem, LocalEngine(), Never(), 1, False)
    return _compared(path, "inexact_admm", loop, federation, participation, problem, recorded)


class RecordedLogistic(Logistic):
    """Logistic regression with the constant of the recorded runs, r_i = λ_max/(5d_i) + β/d_i."""

    def lipschitz(self, batch: Any) -> Any:
        """r_i."""
        return (largest_eigenvalue(batch, False) / 5 + self.l2) / batch.rows


def _schedule(fields: dict[str, Any], rounds: int, path: Path) -> Schedule:
    rows = np.atleast_2d(_whole(fields, "S", path))[:rounds] - 1  # a 0 fills a row of fewer clients
    if rows.ndim > 2 or np.any(rows < -1):
        raise DataError(f"S must be a table of clients from 1, 0 for none, got {rows.min() + 1} in {str(path)!r}.")
    if len(rows) < rounds:
        raise DataError(f"S must have a row for each of {rounds} rounds, got {len(rows)} in {str(path)!r}.")
    return Schedule(tuple(tuple(row[row >= 0].tolist()) for row in rows))


def _compared(
    path: Path, name: str, loop: Loop, federation: Any, participation: Any, problem: Any, recorded: np.ndarray
) -> Verified:
    rounds = len(recorded) - 1
    w0 = problem.init(federation.features, np.float64)
    (end,) = drive(loop, [federation], w0, participation, [0], rounds, np.float64)
    replayed = end.history.column("objective")
    gaps = np.full(rounds + 1, np.inf)
    gaps[: len(replayed)] = np.abs(replayed - recorded[: len(replayed)])
    gaps = np.where(np.isfinite(gaps), gaps, np.inf)
    worst = int(np.argmax(gaps))
    return Verified(
        str(path), name, federation.clients, rounds, float(gaps[worst]), worst, recorded.tolist(), replayed.tolist()
    )


def _numbers(fields: dict[str, Any], name: str, path: Path) -> np.ndarray:
    values = fields[name]
    array = values.toarray() if scipy.sparse.issparse(values) else np.asarray(values)
    if array.dtype.kind not in "fiu" or array.size == 0:
        raise DataError(f"{name} must be numbers, at least one, got {array.dtype} of {array.size} in {str(path)!r}.")
    return array.astype(np.float64)


def _whole(fields: dict[str, Any], name: str, path: Path) -> np.ndarray:
    array = _numbers(fields, name, path)
    odd = array[~np.isfinite(array) | (array != np.rint(array))]
    if odd.size:
        raise DataError(f"{name} must be whole numbers, got {odd[0]:g} in {str(path)!r}.")
    if np.abs(array).max() > MOST:
        raise DataError(f"{name} must be at most 2³¹−1, got {np.abs(array).max():g} in {str(path)!r}.")
    return array.astype(int)


def _one(fields: dict[str, Any], name: str, path: Path) -> int:
    array = _whole(fields, name, path).ravel()
    if array.size != 1:
        raise DataError(f"{name} must be one whole number, got {array.tolist()} in {str(path)!r}.")
    return int(array[0])


def _noise(fields: dict[str, Any], clients: int, features: int, rounds: int, path: Path) -> np.ndarray | None:
    """(rounds, m, n), or None where nothing was added."""
    if "N" not in fields or rounds == 0:
        return None
    noise = _numbers(fields, "N", path)
    noise = noise[:, :, None] if noise.ndim == 2 else noise
    if noise.ndim != 3 or noise.shape[:2] != (features, clients) or noise.shape[2] < rounds:
        raise DataError(f"N must be {features}×{clients}×{rounds}, got {noise.shape} in {str(path)!r}.")
    return noise.transpose(2, 1, 0)


def replay(algorithm: Algorithm, z0: np.ndarray, noise: np.ndarray | None) -> Algorithm:
    """FedEPM without noise of its own, with the recorded first messages and the recorded noise in its uploads."""
    first = jnp.asarray(z0)
    added = None if noise is None else jnp.asarray(noise)

    def join(w0: Vector, batch: Any, key: Any) -> tuple[Any, Hello]:
        state, _ = algorithm.join(w0, batch, key)
        return state, Hello(Vector({"w": first[batch.client]}))

    def client_step(msg: Any, client: Any, batch: Any, grad: Any, key: Any) -> tuple[Any, ...]:
        state, upload, notes = algorithm.client_step(msg, client, batch, grad, key)
        if added is not None:
            upload = Upload(upload.z + Vector({"w": added[msg.round, batch.client]}))
        return state, upload, notes

    return algorithm._replace(join=join, client_step=client_step)
