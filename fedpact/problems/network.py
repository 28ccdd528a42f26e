"""Networks that classify: softmax cross-entropy on any model that is a function of a tree of parameters.

    f_i(w) = Σ_t weight_t · CE(apply(w, x_t), y_t) / Σ_t weight_t

`CNN1` and `CNN2` are the two of Table II of the FedADMM paper: conv 5×5 → 32, pool, conv 5×5 → 64, pool, a hidden
layer, ten classes; bias everywhere, weights and biases from U(±1/√fan_in). `TwoLayer` has one hidden layer. `Network`
is your own: a pure function, or a module of Flax or Equinox (`from_flax`, `from_equinox`); PyTorch's are in
`problems.torch`.

What the paper's released code does and its text does not say are switches: relu=False (no activation between the
convolutions), softmax=True (softmax before the cross-entropy, so that the loss sees probabilities as scores).
Bytes are pixels: they are divided by 255, then normalised by `mean` and `std`. Numbers are taken as they are.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedpact.core.contract import Batch
from fedpact.core.errors import (
    DataError,
    FedpactError,
    InvalidArgument,
    is_count,
    is_number,
    require,
    require_flags,
    require_one_of,
    require_positive_int,
    the_extra,
)
from fedpact.core.settings import plain, plain_fields
from fedpact.core.vector import Vector
from fedpact.problems.clipping import Clipped, clipped_dense
from fedpact.problems.layers import block, dense


def check_rows(problem: Any, federation: Any) -> None:
    """Refuse rows that are not of the model's shape, and labels that are not among its classes."""
    dataset, name = federation.dataset, type(problem).__name__
    if dataset.features != math.prod(problem.shape):
        shape = "×".join(map(str, problem.shape))
        raise DataError(
            f"x of dataset {dataset.name!r} must be {math.prod(problem.shape)} numbers a row ({shape}) for {name}, "
            f"got {dataset.features}. Choose a model for this shape, such as TwoLayer(inputs={dataset.features})."
        )
    if not dataset.classes:
        raise DataError(f"labels must be classes for {name}, got a numeric target. Use LeastSquares.")
    if dataset.y.max() >= problem.classes:
        raise DataError(
            f"labels must be below {problem.classes}, the outputs of {name}, got class {int(dataset.y.max())} "
            f"({len(dataset.classes)} classes). Give the model classes={len(dataset.classes)}."
        )


class Classifier:
    """What networks share. A final class has `shape`, `classes`, `softmax`, `mean`, `std`, `_apply`, `_init`."""

    classifies = True
    multiclass = True
    engine = "host"  # the engine that suits it
    shape: tuple[int, ...]
    classes: int
    softmax: bool
    mean: float
    std: float

    def _check_common(self) -> None:
        plain_fields(self)
        require_positive_int("classes", self.classes)
        require(is_number(self.mean), "mean", "a number", self.mean)
        require(is_number(self.std) and self.std > 0, "std", "above 0", self.std)
        require_flags(self, "softmax")

    @property
    def dim(self) -> int:
        """The number of parameters."""
        tree = jax.eval_shape(self._init, jax.random.key(0))
        return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(tree))

    def check(self, federation: Any) -> None:
        """Images of the model's shape, labels among its classes."""
        check_rows(self, federation)

    def init(self, features: int, dtype: Any, key: Any = None) -> Vector:
        """Random parameters."""
        tree = self._init(jax.random.key(0) if key is None else key)
        return Vector(jax.tree.map(lambda a: jnp.asarray(a, dtype), tree))

    def inputs_of(self, x: Any, dtype: Any) -> Any:
        """Pixels divided by 255 and normalised; numbers as they are."""
        return (x.astype(dtype) / 255 - self.mean) / self.std if x.dtype == jnp.uint8 else x.astype(dtype)

    def _inputs(self, x: Any, dtype: Any) -> Any:
        return self.inputs_of(x, dtype).reshape(x.shape[0], *self.shape)

    def scores(self, w: Vector, x: Any) -> Any:
        """The network's outputs, one a class, before any softmax."""
        return self._apply(w.tree, self._inputs(x, jax.tree.leaves(w.tree)[0].dtype))

    def losses(self, w: Vector, batch: Batch) -> Any:
        """The cross-entropy of every row."""
        return self._losses_of(self.scores(w, batch.x), batch)

    def _losses_of(self, z: Any, batch: Batch) -> Any:
        z = jax.nn.softmax(z) if self.softmax else z
        labels = batch.y.astype(jnp.int32)
        return jax.nn.logsumexp(z, axis=1) - jnp.take_along_axis(z, labels[:, None], axis=1)[:, 0]

    def value(self, w: Vector, batch: Batch) -> Any:
        """f_i(w)."""
        return jnp.sum(batch.weight * self.losses(w, batch)) / batch.rows

    test_value = value  # without the gradient

    def value_and_gradient(self, w: Vector, batch: Batch) -> tuple[Any, Vector]:
        """f_i(w) and ∇f_i(w)."""
        return jax.value_and_grad(self.value)(w, batch)

    def gradient(self, w: Vector, batch: Batch) -> Vector:
        """∇f_i(w)."""
        return jax.grad(self.value)(w, batch)

    def counts(self, w: Vector, batch: Batch) -> dict[str, Any]:
        """Rows, and rows whose class has the largest output."""
        right = jnp.argmax(self.scores(w, batch.x), axis=1) == batch.y.astype(jnp.int32)
        return {"rows": batch.rows, "correct": jnp.sum(batch.weight * right)}

    def _clipped_dense(
        self, layers: Any, activation: Callable[[Any], Any], batch: Batch, clip: Any, norm: int
    ) -> Clipped:
        """For a network of these dense layers, first to last."""
        inputs = self._inputs(batch.x, jax.tree.leaves(layers)[0].dtype)
        return clipped_dense(layers, activation, lambda z: self._losses_of(z, batch), inputs, batch, clip, norm)

    def predict(self, w: Vector, x: Any) -> Any:
        """The probability of every class, (N, classes)."""
        return jax.nn.softmax(self.scores(w, x), axis=1)

    def _apply(self, tree: Any, images: Any) -> Any:
        raise NotImplementedError

    def _init(self, key: Any) -> Any:
        raise NotImplementedError


def as_shape(value: Any, example: str) -> tuple[int, ...]:
    """The sizes of one input, if they are."""
    shape = tuple(map(plain, value)) if isinstance(value, (tuple, list)) else ()
    ok = bool(shape) and all(is_count(size, 1) for size in shape)
    require(ok, "shape", f"the sizes of one input, such as {example}", value, hint="A row of 64 numbers is (64,).")
    return shape


ACTIVATIONS = {"relu": jax.nn.relu, "swish": jax.nn.silu}


def _uniform(key: Any, shape: tuple[int, ...], inputs: float) -> Any:
    """U(±1/√fan_in)."""
    return jax.random.uniform(key, shape, jnp.float32, -1, 1) / np.float32(math.sqrt(inputs))


def cnn_init(key: Any, colours: int, side: int, hidden: int, classes: int) -> dict[str, Any]:
    """The parameters of a network of Table II."""
    flat = 64 * (side // 4) ** 2
    sizes = {  # weights' shape and fan-in
        "conv1": ((5, 5, colours, 32), 25 * colours),
        "conv2": ((5, 5, 32, 64), 25 * 32),
        "hidden": ((flat, hidden), flat),
        "output": ((hidden, classes), hidden),
    }
    keys = iter(jax.random.split(key, 2 * len(sizes)))
    return {
        name: {"w": _uniform(next(keys), shape, fan), "b": _uniform(next(keys), shape[-1:], fan)}
        for name, (shape, fan) in sizes.items()
    }


def _cnn_apply(tree: Any, images: Any, relu: bool) -> Any:
    a = block(images, tree["conv1"], relu, first=True)
    a = block(a, tree["conv2"], relu)
    a = jax.nn.relu(dense(a.reshape(a.shape[0], -1), tree["hidden"]))
    return dense(a, tree["output"])


@dataclass(frozen=True)
class CNN1(Classifier):
    """Table II's network for 28×28 grey images: 1,663,370 parameters with its defaults."""

    hidden: int = 512
    classes: int = 10
    relu: bool = True  # between the convolutions
    softmax: bool = False  # before the cross-entropy
    mean: float = 0.1307
    std: float = 0.3081
    shape = (28, 28, 1)

    def __post_init__(self) -> None:
        self._check_common()
        require_positive_int("hidden", self.hidden)
        require_flags(self, "relu")

    def _init(self, key: Any) -> Any:
        return cnn_init(key, 1, 28, self.hidden, self.classes)

    def _apply(self, tree: Any, images: Any) -> Any:
        return _cnn_apply(tree, images, self.relu)


@dataclass(frozen=True)
class CNN2(Classifier):
    """Table II's network for 32×32 colour images: 1,105,098 parameters with its defaults."""

    hidden: int = 256
    classes: int = 10
    relu: bool = True
    softmax: bool = False
    mean: float = 0.5
    std: float = 0.5
    shape = (32, 32, 3)

    def __post_init__(self) -> None:
        self._check_common()
        require_positive_int("hidden", self.hidden)
        require_flags(self, "relu")

    def _init(self, key: Any) -> Any:
        return cnn_init(key, 3, 32, self.hidden, self.classes)

    def _apply(self, tree: Any, images: Any) -> Any:
        return _cnn_apply(tree, images, self.relu)


@dataclass(frozen=True)
class TwoLayer(Classifier):
    """One hidden layer; the SSCA paper's: hidden=128, activation="swish", bias=False, start=0.0869, mean=0, std=1."""

    first = ("hidden", "w")  # where the weights are that meet the features

    inputs: int = 784
    hidden: int = 200
    classes: int = 10
    activation: str = "relu"  # or "swish", z/(1+e^{−z})
    bias: bool = True
    start: float | None = None  # weights from U(±start); None: ±1/√fan_in
    softmax: bool = False
    mean: float = 0.1307
    std: float = 0.3081

    def __post_init__(self) -> None:
        self._check_common()
        require_positive_int("inputs", self.inputs)
        require_positive_int("hidden", self.hidden)
        require_one_of("activation", self.activation, ACTIVATIONS)
        require_flags(self, "bias")
        ok = self.start is None or (is_number(self.start) and self.start > 0)
        require(ok, "start", "above 0, or left out", self.start)

    @property
    def shape(self) -> tuple[int, ...]:  # type: ignore[override]
        """Rows as they are."""
        return (self.inputs,)

    def _init(self, key: Any) -> Any:
        keys = jax.random.split(key, 4)
        n, h, c = self.inputs, self.hidden, self.classes
        fan = lambda inputs: inputs if self.start is None else 1 / self.start**2
        tree = {"hidden": {"w": _uniform(keys[0], (n, h), fan(n))}, "output": {"w": _uniform(keys[2], (h, c), fan(h))}}
        if self.bias:
            tree["hidden"]["b"] = _uniform(keys[1], (h,), fan(n))
            tree["output"]["b"] = _uniform(keys[3], (c,), fan(h))
        return tree

    def _apply(self, tree: Any, images: Any) -> Any:
        return dense(ACTIVATIONS[self.activation](dense(images, tree["hidden"])), tree["output"])

    def clipped(self, w: Vector, batch: Batch, clip: Any, norm: int) -> Clipped:
        """Σ_j weight_j ∇ℓ_j, each clipped to norm C."""
        layers = {name: w.tree[name] for name in ("hidden", "output")}
        return self._clipped_dense(layers, ACTIVATIONS[self.activation], batch, clip, norm)


@dataclass(frozen=True)
class Softmax(Classifier):
    """Multinomial logistic regression: scores W x, plus b where there is a bias. Starts at 0."""

    first = ("w",)

    inputs: int = 784
    classes: int = 10
    bias: bool = False
    mean: float = 0.0
    std: float = 1.0
    softmax = False

    def __post_init__(self) -> None:
        self._check_common()
        require_positive_int("inputs", self.inputs)
        require_flags(self, "bias")

    @property
    def shape(self) -> tuple[int, ...]:  # type: ignore[override]
        """Rows as they are."""
        return (self.inputs,)

    def _init(self, key: Any) -> Any:
        tree = {"w": jnp.zeros((self.inputs, self.classes))}
        return tree | ({"b": jnp.zeros(self.classes)} if self.bias else {})

    def _apply(self, tree: Any, images: Any) -> Any:
        return dense(images, tree)

    def clipped(self, w: Vector, batch: Batch, clip: Any, norm: int) -> Clipped:
        """Σ_j weight_j ∇ℓ_j, each clipped to norm C."""
        out = self._clipped_dense({"only": w.tree}, jax.nn.relu, batch, clip, norm)
        return out._replace(total=Vector(out.total.tree["only"]))


@dataclass(frozen=True)
class Network(Classifier):
    """A model of your own: apply(tree, images (B, *shape)) → scores (B, classes), and initial(key) → tree."""

    apply: Callable[[Any, Any], Any]
    initial: Callable[[Any], Any]
    shape: tuple[int, ...] = (28, 28, 1)
    classes: int = 10
    softmax: bool = False
    mean: float = 0.1307
    std: float = 0.3081
    title: str = "network"  # what tables and folders call it

    def __post_init__(self) -> None:
        self._check_common()
        require(callable(self.apply), "apply", "a function of (tree, images)", self.apply)
        require(callable(self.initial), "initial", "a function of a key that returns a tree", self.initial)
        object.__setattr__(self, "shape", as_shape(self.shape, "(28, 28, 1)"))

    def to_dict(self) -> dict[str, Any]:
        """What a configuration says of it: functions are known by their names."""
        named = {
            f: f"{getattr(g, '__module__', '')}.{getattr(g, '__qualname__', repr(g))}" for f, g in self._functions()
        }
        return {
            "title": self.title,
            "shape": list(self.shape),
            "classes": self.classes,
            "softmax": self.softmax,
            "mean": self.mean,
            "std": self.std,
            **named,
        }

    def _functions(self) -> list[tuple[str, Any]]:
        return [("apply", self.apply), ("initial", self.initial)]

    def check(self, federation: Any) -> None:
        """Data that fit, and a model that answers with one score a class."""
        super().check(federation)
        tree = self._tree()
        images = jax.ShapeDtypeStruct((2, *self.shape), jnp.float32)
        try:
            out = jax.eval_shape(self.apply, tree, images)
        except Exception as error:
            raise InvalidArgument(
                f"apply must take (tree, images of shape (B, {', '.join(map(str, self.shape))})), got "
                f"{type(error).__name__}: {error}. Try it on jnp.zeros((2, *shape))."
            ) from error
        got = getattr(out, "shape", None)
        require(got == (2, self.classes), "apply", f"a function to scores of shape (B, {self.classes})", got)

    def _tree(self) -> Any:
        """The shapes of the parameters."""
        try:
            tree = jax.eval_shape(self.initial, jax.random.key(0))
        except FedpactError:
            raise
        except Exception as error:
            raise InvalidArgument(
                f"initial must take a key and return a tree of arrays, got {type(error).__name__}: {error}. "
                "Try it on jax.random.key(0)."
            ) from error
        hint = "It is where training begins: initial(key) → tree."
        require(jax.tree.leaves(tree), "initial", "a function to a tree with at least one array", tree, hint=hint)
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
            if not jnp.issubdtype(leaf.dtype, jnp.floating):
                raise InvalidArgument(
                    f"parameters of {type(self).__name__} must be floating point, got {leaf.dtype} at "
                    f"{jax.tree_util.keystr(path)}. Keep whole numbers out of the tree: close over them."
                )
        return tree

    def _init(self, key: Any) -> Any:
        return self.initial(key)

    def _apply(self, tree: Any, images: Any) -> Any:
        return self.apply(tree, images)


def from_flax(module: Any, shape: tuple[int, ...], classes: int, **options: Any) -> Network:
    """A Flax (linen) module as a problem; its variables must all be parameters."""
    the_extra("flax")
    shape = as_shape(shape, "(28, 28, 1)")
    ok = callable(getattr(module, "init", None)) and callable(getattr(module, "apply", None))
    require(ok and not isinstance(module, type), "module", "a module of flax.linen, made", module)

    def initial(key: Any) -> Any:
        variables = module.init(key, jnp.zeros((1, *shape), jnp.float32))
        extra = set(variables) - {"params"}
        hint = "Use layers without running statistics: they are not parameters and are not averaged."
        require(not extra, "module", "one whose variables are all parameters", sorted(extra), hint=hint)
        return variables["params"]

    def apply(tree: Any, images: Any) -> Any:
        return module.apply({"params": tree}, images)

    return Network(apply, initial, shape, classes, title=type(module).__name__, **options)


def from_equinox(make: Callable[[Any], Any], shape: tuple[int, ...], classes: int, **options: Any) -> Network:
    """An Equinox model as a problem: make(key) returns the module, which maps one input to its scores."""
    equinox = the_extra("equinox")
    require(callable(make), "make", "a function of a key that returns a module", make)
    try:
        module = make(jax.random.key(0))
    except Exception as error:
        text = f"make must be a function of a key that returns a module, got {type(error).__name__}: {error}."
        raise InvalidArgument(f"{text} Try it on jax.random.key(0).") from error
    for path, leaf in jax.tree_util.tree_leaves_with_path(module):
        if isinstance(leaf, jax.Array | np.ndarray) and (leaf.dtype == bool or jnp.issubdtype(leaf.dtype, jnp.integer)):
            raise InvalidArgument(  # it would be a constant that no run trains or sends
                f"parameters of Network must be floating point, got {leaf.dtype} at {jax.tree_util.keystr(path)}. Keep "
                "whole numbers out of the module: close over them."
            )
    params, static = equinox.partition(module, equinox.is_inexact_array)
    structure = jax.tree.structure(params)

    def initial(key: Any) -> Any:
        leaves = jax.tree.leaves(equinox.filter(make(key), equinox.is_inexact_array))
        return dict(zip((f"{i:06d}" for i in range(len(leaves))), leaves, strict=True))

    def apply(tree: Any, images: Any) -> Any:
        params = jax.tree.unflatten(structure, [tree[name] for name in sorted(tree)])
        return jax.vmap(equinox.combine(params, static))(images)

    return Network(apply, initial, shape, classes, title=getattr(make, "__name__", "equinox"), **options)
