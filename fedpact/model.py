"""A trained model: its parameters, the problem they belong to, and how raw rows become features."""

from __future__ import annotations

import dataclasses
import math
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
from fedpact.problems import PROBLEMS, Constrained, Network


@dataclass(frozen=True)
class Model:
    """What a run leaves for use: `predict` takes features, `predict_csv` a file like the one it was trained on.

    `pixels`: a network was trained on bytes, so bytes are pixels to it; else they are numbers like others.
    """

    problem: Any
    w: Vector
    schema: Schema | None
    pixels: bool = True

    def coefficients(self) -> list[dict[str, Any]]:
        """A row per feature: its name, its coefficient, and that per unit of its column before scaling.

        The intercept, if there is one in either unit, comes last. Empty for a model that is not linear.
        """
        tree = self.w.tree
        if not isinstance(tree, dict) or not {"w"} <= set(tree) <= {"w", "b"}:
            return []
        w = tree["w"]
        if np.shape(w) != (self.features,) or np.ndim(tree.get("b", 0.0)) != 0:
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
        """Probabilities of class 1 (of every class for a network), or values, for an (N, n) array of features."""
        pixels = self.pixels and getattr(x, "dtype", None) == np.uint8 and hasattr(self.problem, "multiclass")
        if not pixels:
            x = as_sparse(x, "x") if scipy.sparse.issparse(x) else as_numbers(x, "x")
        features = self.features
        require(x.ndim == 2 and x.shape[1] == features, "x", f"an (N, {features}) array", x.shape)
        if not (pixels or scipy.sparse.issparse(x)):
            require_finite(x, "x")
        if not hasattr(self.problem, "multiclass"):
            return np.asarray(self.problem.predict(self.w, x))
        parts = [np.asarray(self.problem.predict(self.w, x[i : i + 500])) for i in range(0, len(x), 500)]
        return np.concatenate(parts) if parts else np.empty((0, self.problem.classes))

    @property
    def features(self) -> int:
        """n, the numbers a row has."""
        return math.prod(self.problem.shape) if hasattr(self.problem, "shape") else self.w.tree["w"].shape[0]

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
            "problem": {"name": problem_name(self.problem), **plain_problem(self.problem)},
            "schema": None if self.schema is None else self.schema.to_dict(),
            "pixels": bool(self.pixels),
        }
        arrays = {name: np.asarray(a) for name, a in named_leaves(self.w.tree).items()}
        make_folder(path.parent)
        write_atomic(path, seal("model", header, arrays))
        return path

    @classmethod
    def load(cls, path: str | os.PathLike[str], problem: Any = None) -> Model:
        """Read a model that `save` wrote, from its file or from a run's folder.

        A network of your own has to be given again as `problem`: its functions are not saved.
        """
        path, problem = Path(path), trained(problem)
        ok = problem is None or (hasattr(problem, "predict") and not isinstance(problem, type))
        hint = "Leave it out for all but a network of your own: the file says which."
        require(ok, "problem", "a problem such as fedpact.TwoLayer()", problem, hint=hint)
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
        if problem is None and name == "network":
            raise InvalidArgument(
                f"problem must be given to load a network of your own, got none for {str(path)!r}. "
                "Write Model.load(path, problem=…) with the one it was trained with."
            )
        if problem is None and name not in PROBLEMS:
            raise unknown(f"problem of {path}", name, PROBLEMS)
        problem = PROBLEMS[name](**settings) if problem is None else problem
        w = Vector(dict(arrays)) if set(arrays) <= {"w", "b"} else _tree_like(problem, arrays, path)
        schema = None if header["schema"] is None else Schema.from_dict(header["schema"])
        return cls(problem, w, schema, header.get("pixels", True))


def named_leaves(tree: Any) -> dict[str, Any]:
    """The arrays of a tree by their places in it, such as conv1.w."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in leaves}


def _tree_like(problem: Any, arrays: dict[str, np.ndarray], path: Path) -> Vector:
    """The problem's own tree with these arrays."""
    tree = jax.eval_shape(lambda: problem.init(0, np.float32)).tree
    names = named_leaves(tree)
    same = set(names) == set(arrays) and all(names[n].shape == arrays[n].shape for n in names)
    if not same:
        raise CheckpointError(f"model must have the parameters of its problem, got others in {str(path)!r}.")
    return Vector(jax.tree.unflatten(jax.tree.structure(tree), [arrays[name] for name in names]))


def plain_problem(problem: Any) -> dict[str, Any]:
    """A problem's settings as plain data."""
    return problem.to_dict() if hasattr(problem, "to_dict") else dataclasses.asdict(problem)


def trained(problem: Any) -> Any:
    """What a run of the problem trains and saves: of a constrained one the model."""
    return problem.model if isinstance(problem, Constrained) else problem


def problem_name(problem: Any) -> str:
    """The name under which a problem is saved: that of its class in `fedpact.problems.PROBLEMS`, or of its twin's."""
    if hasattr(problem, "twin"):
        return problem.twin
    if isinstance(problem, Network) or getattr(problem, "native", False):
        return "network"  # its functions are not saved: it is given again to load it
    for name, cls in PROBLEMS.items():
        if type(problem) is cls:  # a subclass has a loss of its own: it is not its parent
            return name
    kind = type(problem).__name__
    raise InvalidArgument(
        f"problem must be one of {', '.join(PROBLEMS)} to be saved, got {kind}. "
        f"Give it a name first: fedpact.problems.PROBLEMS['{kind.lower()}'] = {kind}"
    )


def as_host(w: Vector) -> Vector:
    """Parameters as NumPy arrays."""
    return jax.tree.map(np.asarray, w)
