"""Parameters as vectors: arithmetic over a tree of arrays.

`w - eta * (g + y + rho * (w - theta))` reads like the paper while the compiler still sees the layers.
Flatten only at a boundary (wire, disk, PyTorch).
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp


@jax.tree_util.register_pytree_node_class
class Vector:
    """A tree of arrays with `+`, `-`, scalar `*` and `/`, `dot`, norms and `map`."""

    __slots__ = ("tree",)
    # NumPy scalars and arrays on the left defer to our reflected operators.
    __array_ufunc__ = None

    def __init__(self, tree: Any) -> None:
        self.tree = tree

    def map(self, f: Callable[..., Any], *others: Vector) -> Vector:
        """Apply `f` to every leaf, together with the matching leaves of `others`."""
        return Vector(jax.tree.map(f, self.tree, *(o.tree for o in others)))

    def __add__(self, other: Vector) -> Vector:
        return self.map(operator.add, other)

    def __sub__(self, other: Vector) -> Vector:
        return self.map(operator.sub, other)

    def __mul__(self, scalar: Any) -> Vector:
        return self.map(lambda a: a * scalar)

    __rmul__ = __mul__

    def __truediv__(self, scalar: Any) -> Vector:
        return self.map(lambda a: a / scalar)

    def __neg__(self) -> Vector:
        return self.map(operator.neg)

    def dot(self, other: Vector) -> Any:
        """Inner product over all leaves."""
        return sum(jax.tree.leaves(self.map(lambda a, b: jnp.sum(a * b), other).tree))

    def norm2(self) -> Any:
        """Squared Euclidean norm."""
        return self.dot(self)

    def norm(self) -> Any:
        """Euclidean norm."""
        return jnp.sqrt(self.norm2())

    def norm1(self) -> Any:
        """Sum of absolute values."""
        return sum(jax.tree.leaves(self.map(lambda a: jnp.sum(jnp.abs(a))).tree))

    @property
    def size(self) -> int:
        """How many numbers it holds."""
        return sum(leaf.size for leaf in jax.tree.leaves(self.tree))

    def tree_flatten(self) -> tuple[tuple[Any], None]:
        """For JAX: the one child is the tree."""
        return (self.tree,), None

    @classmethod
    def tree_unflatten(cls, _: None, children: tuple[Any]) -> Vector:
        """For JAX: the inverse of `tree_flatten`."""
        return cls(*children)

    def __repr__(self) -> str:
        return f"Vector({self.tree!r})"
