"""CNN1 and CNN2 trained by PyTorch, which is quicker at it on a CPU (docs/benchmarks_deep.md).

They have the parameters, starts and batches of their twins in JAX, so that a run is the same to rounding, and a model
of one is a model of the other. Needs the extra: pip install "fedpact[torch]".
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax

from fedpact.core.errors import require_flags, require_positive_int
from fedpact.core.vector import Vector
from fedpact.problems.network import cnn_init
from fedpact.problems.torch import TorchClassifier


class TorchCNN(TorchClassifier):
    """A network of Table II: the parameters, starts and batches of its twin in JAX, whose runs it gives to rounding."""

    hidden: int
    relu: bool

    def __post_init__(self) -> None:
        self._prepare()
        require_positive_int("hidden", self.hidden)
        require_flags(self, "relu")

    def _init(self, key: Any) -> Any:
        colours, side, _ = self.shape
        return cnn_init(key, colours, side, self.hidden, self.classes)

    def _made(self) -> Any:
        shapes = jax.eval_shape(self._init, jax.random.key(0))
        return cnn_module({layer: {n: a.shape for n, a in own.items()} for layer, own in shapes.items()}, self.relu)

    def _named(self, w: Vector) -> dict[str, Any]:
        return {f"{layer}.{n}": a for layer, own in w.tree.items() for n, a in own.items()}

    def _tree(self, named: dict[str, Any]) -> Any:
        tree: dict[str, dict[str, Any]] = {}
        for name, array in named.items():
            layer, n = name.split(".")
            tree.setdefault(layer, {})[n] = array
        return tree


@dataclass(frozen=True)
class TorchCNN1(TorchCNN):
    """CNN1, trained by PyTorch: the quicker of the two on a CPU. Its models are saved as CNN1's."""

    hidden: int = 512
    classes: int = 10
    relu: bool = True
    softmax: bool = False
    mean: float = 0.1307
    std: float = 0.3081
    shape = (1, 28, 28)
    twin = "cnn1"


@dataclass(frozen=True)
class TorchCNN2(TorchCNN):
    """CNN2, trained by PyTorch. Its models are saved as CNN2's."""

    hidden: int = 256
    classes: int = 10
    relu: bool = True
    softmax: bool = False
    mean: float = 0.5
    std: float = 0.5
    shape = (3, 32, 32)
    twin = "cnn2"


def cnn_module(shapes: dict[str, dict[str, tuple[int, ...]]], relu: bool) -> Any:
    """The module of a network of Table II, its parameters laid out as JAX's: (5, 5, in, out) and (in, out)."""
    import torch
    from torch.nn import functional as F

    act = F.relu if relu else lambda a: a

    class CNN(torch.nn.Module):
        conv1: Any
        conv2: Any
        hidden: Any
        output: Any

        def __init__(self) -> None:
            super().__init__()
            for layer, own in shapes.items():
                zeros = {n: torch.nn.Parameter(torch.zeros(shape)) for n, shape in own.items()}
                setattr(self, layer, torch.nn.ParameterDict(zeros))

        def forward(self, images: Any) -> Any:
            a = images
            for layer in (self.conv1, self.conv2):
                a = F.max_pool2d(act(F.conv2d(a, layer["w"].permute(3, 2, 0, 1), layer["b"], padding=2)), 2)
            a = a.permute(0, 2, 3, 1).flatten(1)
            a = F.relu(torch.addmm(self.hidden["b"], a, self.hidden["w"]))
            return torch.addmm(self.output["b"], a, self.output["w"])

    return CNN()
