"""A trained model: its parameters, the problem they belong to, and how raw rows become features."""

from __future__ import annotations

import dataclasses
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
import scipy.sparse

from fedpact.core.errors import CheckpointError, DataError, InvalidArgument, require, unknown
from fedpact.core.files import make_folder, write_atomic
from fedpact.core.sealed import seal, unseal
from fedpact.core.vector import Vector
from fedpact.data.dataset import Schema, as_numbers, as_sparse, require_finite
from fedpact.data.tables import read_rows
from fedpact.problems import PROBLEMS


@dataclass(frozen=True)
class Model:
    """What a run leaves for use: `predict` takes features, `predict_csv` a file like the one it was trained on."""

    problem: Any
    w: Vector
    schema: Schema | None

    def coefficients(self) -> list[dict[str, Any]]:
        """A row per feature: its name, its coefficient, and that per unit of its column before scaling.

        The intercept, if there is one in either unit, comes last. Empty for a model that is not linear.
        """
        w = self.w.tree.get("w")
        if not set(self.w.tree) <= {"w", "b"} or np.ndim(w) != 1:
            return []
        w, b = np.asarray(w, np.float64), float(self.w.tree.get("b", 0.0))
        names = [f"x{j}" for j in range(len(w))] if self.schema is None else [c.name for c in self.schema.columns]
        scale, shift = (1.0, 0.0) if self.schema is None else (np.array(self.schema.scale), np.array(self.schema.shift))
        own = w / scale
        rows = [
            {"feature": name, "coefficient": float(c), "per_unit": float(u)}
            for name, c, u in zip(names, w, own, strict=True)
        ]
        constant = b - float(np.sum(own * shift))
        intercept = {"feature": "(intercept)", "coefficient": b, "per_unit": constant}
        return [*rows, intercept] if b or constant else rows

    def predict(self, x: Any) -> np.ndarray:
        """Probabilities of class 1, or values, for an (N, n) array of features."""
        x = as_sparse(x, "x") if scipy.sparse.issparse(x) else as_numbers(x, "x")
        features = self.w.tree["w"].shape[0]
        require(x.ndim == 2 and x.shape[1] == features, "x", f"an (N, {features}) array", x.shape)
        if not scipy.sparse.issparse(x):
            require_finite(x, "x")
        return np.asarray(self.problem.predict(self.w, x))

    def predict_csv(self, path: str | os.PathLike[str]) -> np.ndarray:
        """Predictions for the rows of a CSV file, coded and scaled as in training. Extra columns are ignored."""
        if self.schema is None:
            raise DataError("model must have been trained on named columns to read a file, got one without a schema.")
        header, rows = read_rows(path)
        return self.predict(self.schema.encode(header, rows, str(path)))

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the model as one file, whole or not at all."""
        path = Path(path)
        header = {
            "problem": {"name": problem_name(self.problem), **dataclasses.asdict(self.problem)},
            "schema": None if self.schema is None else self.schema.to_dict(),
        }
        arrays = {key: np.asarray(a) for key, a in self.w.tree.items()}
        make_folder(path.parent)
        write_atomic(path, seal("model", header, arrays))
        return path

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Model:
        """Read a model that `save` wrote, from its file or from a run's folder."""
        path = Path(path)
        if path.is_dir() and (path / "model.bin").is_file():
            path = path / "model.bin"
        if not path.is_file():
            what = "a folder without model.bin" if path.is_dir() else "which is not a file"
            raise CheckpointError(f"model must be a file that fedpact wrote, got {str(path)!r}, {what}.")
        found = unseal("model", path.read_bytes())
        if found is None:
            raise CheckpointError(
                f"model must be a file that fedpact wrote, got {str(path)!r}, which is damaged or of another kind."
            )
        header, arrays = found
        settings = dict(header["problem"])
        name = settings.pop("name")
        if name not in PROBLEMS:
            raise unknown(f"problem of {path}", name, PROBLEMS)
        problem = PROBLEMS[name](**settings)
        w = Vector(dict(arrays))
        return cls(problem, w, None if header["schema"] is None else Schema.from_dict(header["schema"]))


def problem_name(problem: Any) -> str:
    """The name under which a problem is saved: that of its class in `fedpact.problems.PROBLEMS`."""
    for name, cls in PROBLEMS.items():
        if isinstance(problem, cls):
            return name
    kind = type(problem).__name__
    raise InvalidArgument(
        f"problem must be one of {', '.join(PROBLEMS)} to be saved, got {kind}. "
        f"Give it a name first: fedpact.problems.PROBLEMS['{kind.lower()}'] = {kind}"
    )


def as_host(w: Vector) -> Vector:
    """Parameters as NumPy arrays."""
    return jax.tree.map(np.asarray, w)
