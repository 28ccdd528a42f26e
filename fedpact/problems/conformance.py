"""Whether a problem of the user's own is one: its methods, and what they return, from shapes alone."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from fedpact.core.contract import Batch
from fedpact.core.errors import FedpactError, InvalidArgument, require
from fedpact.core.vector import Vector

METHODS = ("check", "init", "value_and_gradient", "gradient", "counts", "predict")
SEE = "docs/python.md shows a whole problem."


def is_own(problem: Any) -> bool:
    """Whether it is the user's, and JAX's: fedpact's own conform, and what is not JAX's cannot be looked into."""
    return type(problem).__module__.split(".")[0] != "fedpact" and not getattr(problem, "native", False)


def check_methods(problem: Any) -> None:
    """Refuse a problem that lacks a method, by its name."""
    missing = [name for name in METHODS if not callable(getattr(problem, name, None))]
    what = f"one with the methods {', '.join(METHODS)}"
    hint = f"{type(problem).__name__} lacks {', '.join(missing)}: {SEE}"
    require(not missing, "problem", what, type(problem).__name__, hint=hint)


def check_conformance(problem: Any, features: int, dtype: Any, kept: Any) -> None:
    """Refuse a problem whose methods fail on a client's rows, or answer with other shapes than the loop works with.

    Nothing is computed. `kept` is the type of the features: `dtype`, or bytes for pixels.
    """
    name = type(problem).__name__
    key = {"key": jax.random.key(0)} if "key" in inspect.signature(problem.init).parameters else {}
    w = _shapes(name, "init", "(features, dtype)", lambda: problem.init(features, dtype, **key))
    hint = "Return fedpact.core.vector.Vector({…}), a dict of arrays in it."
    require(isinstance(w, Vector), f"init of {name}", "a function that returns a Vector", type(w).__name__, hint=hint)
    leaves = jax.tree.leaves(w)
    floating = bool(leaves) and all(jnp.issubdtype(leaf.dtype, jnp.floating) for leaf in leaves)
    types = [str(leaf.dtype) for leaf in leaves]
    hint = "Make them of the dtype that init is given."
    require(floating, f"init of {name}", "a function that returns arrays of floating point", types, hint=hint)

    rows = lambda *shape: jax.ShapeDtypeStruct((3, *shape), dtype)
    x = jax.ShapeDtypeStruct((3, features), kept)
    batch = Batch(x, rows(), rows(), jax.ShapeDtypeStruct((), jnp.int32))
    on_batch = lambda method: _shapes(name, method, "(w, batch)", getattr(problem, method), w, batch)
    both = on_batch("value_and_gradient")
    pair = isinstance(both, tuple) and len(both) == 2
    require(pair, f"value_and_gradient of {name}", "a function that returns (value, gradient)", type(both).__name__)
    got = getattr(both[0], "shape", None)
    hint = "Sum over the rows: jnp.sum(batch.weight * losses) / batch.rows."
    require(got == (), f"value_and_gradient of {name}", "a function whose value is one number", got, hint=hint)
    for method, gradient in (("value_and_gradient", both[1]), ("gradient", on_batch("gradient"))):
        _check_gradient(f"{method} of {name}", gradient, w)
    counts = on_batch("counts")
    ok = isinstance(counts, Mapping) and "rows" in counts
    got = sorted(counts) if isinstance(counts, Mapping) else type(counts).__name__
    hint = 'Return {"rows": batch.rows}, and "correct" where there is an accuracy.'
    require(ok, f"counts of {name}", "a function that returns a dict with 'rows'", got, hint=hint)


def _shapes(name: str, method: str, takes: str, f: Callable[..., Any], *arguments: Any) -> Any:
    try:
        return jax.eval_shape(f, *arguments)
    except FedpactError:
        raise
    except Exception as error:
        said = str(error).strip().splitlines()
        text = f"{method} of {name} must be a function of {takes} that JAX can trace, got {type(error).__name__}"
        raise InvalidArgument(f'{text}: {said[0] if said else ""} engine="debug" runs it step by step.') from error


def _check_gradient(what: str, gradient: Any, w: Vector) -> None:
    hint = "jax.grad of the value with respect to w has them."
    require(isinstance(gradient, Vector), what, "a function to a Vector", type(gradient).__name__, hint=hint)
    mine, theirs = (_by_place(v) for v in (gradient, w))
    require(mine == theirs, what, f"a gradient of the parameters' shapes {theirs}", mine, hint=hint)


def _by_place(v: Vector) -> dict[str, tuple[int, ...]]:
    leaves = jax.tree_util.tree_leaves_with_path(v.tree)
    return {jax.tree_util.keystr(path, simple=True, separator="."): tuple(leaf.shape) for path, leaf in leaves}
