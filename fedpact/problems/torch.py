"""A PyTorch module as a problem: its gradients, and whole epochs of local training, come from PyTorch.

The algorithm is unchanged: parameters are fedpact's vectors outside, and the module's own tensors inside. Nothing is
compiled by JAX around it. Clients step side by side, each in a thread with a module and a core of its own, which wastes
less than one client on all cores; where the module draws (Dropout) they step one after the other, for PyTorch has one
stream of draws. Needs the extra: pip install "fedpact[torch]".
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import numpy as np

from fedpact.core.contract import Batch
from fedpact.core.errors import InvalidArgument, require, the_extra
from fedpact.core.vector import Vector
from fedpact.problems.network import Classifier, as_shape
from fedpact.problems.training import Plan, Trained, shuffled


class TorchClassifier(Classifier):
    """What modules share. A final class has `_made` and, where a vector's tree is not one of names, its two turns."""

    precisions = ("single",)  # what a module trains in
    native = True  # not JAX's: engines call it as it is
    _modules: dict[int, Any]  # by thread
    _spare: list[Any]

    def _prepare(self) -> None:
        the_extra("torch")
        self._check_common()
        object.__setattr__(self, "_modules", {})
        object.__setattr__(self, "_spare", [])

    def __getstate__(self) -> dict[str, Any]:
        """What a copy has: the settings. It makes modules of its own."""
        return vars(self) | {"_modules": {}, "_spare": []}

    def _made(self) -> Any:
        raise NotImplementedError

    def _named(self, w: Vector) -> dict[str, Any]:
        """A vector's arrays by the names of the module's parameters."""
        return w.tree

    def _tree(self, named: dict[str, Any]) -> Any:
        """The other way round."""
        return named

    def _vector(self, tensors: dict[str, Any], like: Vector) -> Vector:
        dtype = jax.tree.leaves(like.tree)[0].dtype
        array = lambda t: jax.numpy.asarray(t.detach().numpy().astype(dtype))
        return Vector(self._tree({name: array(t) for name, t in tensors.items()}))

    @property
    def module(self) -> Any:
        """The module that this thread writes clients' parameters into."""
        thread = threading.get_ident()
        if thread not in self._modules:
            self._modules[thread] = self._free()
        return self._modules[thread]

    def _free(self) -> Any:
        """A module that no thread has."""
        try:
            return self._spare.pop()
        except IndexError:
            return self._checked().to(memory_format=self._layout)

    def _checked(self) -> Any:
        import torch

        with torch.random.fork_rng():  # what it starts from is written over: the user's own draws are left alone
            module = self._made()
        require(isinstance(module, torch.nn.Module), "make", "a function that returns an nn.Module", module)
        for name, p in module.named_parameters():
            if not p.dtype.is_floating_point:
                raise InvalidArgument(f"parameters must be floating point, got {p.dtype} at {name}.")
        frozen = [name for name, p in module.named_parameters() if not p.requires_grad]
        hint = "What does not learn is not kept with the model: let it learn, or keep it out of the parameters."
        require(not frozen, "make", "a module whose parameters all learn (requires_grad)", frozen, hint=hint)
        extra = [name for name, b in module.named_buffers() if b.dtype.is_floating_point]
        hint = "Use layers without running statistics: they are not parameters and are not averaged."
        require(not extra, "make", "a module without running statistics", extra, hint=hint)
        return module

    @cached_property
    def _layout(self) -> Any:
        """How images lie in memory: colours together, a seventh quicker, where the module has layers of images.

        A module that takes that for granted which only images of each colour have (`view` of a layer) gets those.
        """
        import torch

        usual, wanted = torch.contiguous_format, torch.channels_last
        module = self._checked()
        if len(self.shape) < 3 or all(p.dim() != 4 for p in module.parameters()):
            return usual
        try:
            with torch.random.fork_rng():
                images = torch.zeros(2, *self.shape).clone(memory_format=wanted)  # as `_laid`
                module.to(memory_format=wanted)(images).sum().backward()
        except Exception:  # whatever it is: `check` tells what the usual layout does with it
            return usual
        return wanted

    @cached_property
    def draws(self) -> bool:
        """Whether the module draws in training, as Dropout does; one that fails may, and training tells why."""
        import torch

        with torch.random.fork_rng(), torch.no_grad():
            before = torch.random.get_rng_state()
            try:
                self.module.train()(self._laid(torch.zeros(2, *self.shape)))
            except Exception:
                return True
            return not torch.equal(before, torch.random.get_rng_state())

    def side_by_side(self, f: Callable[[Any], Any], items: Sequence[Any], count: int) -> Iterator[Any]:
        """f of every item, in their order: `count` threads, with a module and one core each."""
        import torch

        cores = torch.get_num_threads()
        own = [self._free() for _ in range(min(count, len(items)))]  # here: `make` need not bear threads
        free, threads = list(own), []

        def begin() -> None:
            torch.set_num_threads(1)
            thread = threading.get_ident()
            self._modules[thread] = free.pop()
            threads.append(thread)

        pool = ThreadPoolExecutor(len(own), initializer=begin)
        try:
            yield from pool.map(f, items)
        finally:  # also where f fails, or nobody asks for the rest
            pool.shutdown(cancel_futures=True)
            torch.set_num_threads(cores)  # threads that begin later take what was set last
            for thread in threads:
                del self._modules[thread]
            self._spare.extend(own)

    @property
    def dim(self) -> int:
        """The number of parameters."""
        return sum(p.numel() for p in self.module.parameters())

    @property
    def oracle(self) -> TorchOracle:
        """What `client_step` gets as `grad`."""
        return TorchOracle(self)

    def check(self, federation: Any) -> None:
        """Data that fit, and a module that answers with one score a class."""
        super().check(federation)
        import torch

        one, other = self._checked(), self._checked()
        there = {p.data_ptr() for p in other.parameters()}
        same = [name for name, p in one.named_parameters() if p.numel() and p.data_ptr() in there]
        hint = "Clients step side by side, a module each: make=lambda: copy.deepcopy(module) copies one that there is."
        require(not same, "make", "a function whose modules share no parameters", same, hint=hint)
        module, sizes = self.module.eval(), ", ".join(map(str, self.shape))
        try:
            with torch.no_grad():
                got = tuple(module(torch.zeros(2, *self.shape)).shape)
        except Exception as error:
            text = (
                f"make must be a module that takes images of shape (B, {sizes}), got {type(error).__name__}: {error}."
            )
            raise InvalidArgument(f"{text} Try it on torch.zeros(2, *shape).") from error
        require(got == (2, self.classes), "make", f"a module to scores of shape (B, {self.classes})", got)

    # Into the module and out of it

    def _load(self, w: Vector) -> None:
        import torch

        named = self._named(w)
        with torch.no_grad():
            for name, p in self.module.named_parameters():  # every one: none is left of another client
                p.copy_(_tensor(named[name]))

    def _laid(self, images: Any) -> Any:
        return images.clone(
            memory_format=self._layout
        )  # `contiguous` would leave strides that say little at one colour

    def _images(self, x: Any) -> Any:
        import torch

        x = np.asarray(x)
        images = torch.from_numpy(np.array(x)).float()
        if len(self.shape) == 3:  # rows have a pixel's colours together, PyTorch has an image of each colour
            colours, height, width = self.shape
            images = images.reshape(len(x), height, width, colours).permute(0, 3, 1, 2)
        else:
            images = images.reshape(len(x), *self.shape)
        return self._laid((images / 255 - self.mean) / self.std if x.dtype == np.uint8 else images)

    def _loss(self, images: Any, labels: Any, weight: Any) -> Any:
        return self._loss_of(self.module(images), labels, weight)

    def _loss_of(self, z: Any, labels: Any, weight: Any) -> Any:
        import torch

        z = torch.softmax(z, dim=1) if self.softmax else z
        each = torch.nn.functional.cross_entropy(z, labels, reduction="none")
        return (weight * each).sum() / weight.sum()

    def _tensors(self, batch: Batch) -> tuple[Any, Any, Any]:
        import torch

        labels = torch.from_numpy(np.asarray(batch.y).astype(np.int64))
        return self._images(batch.x), labels, torch.from_numpy(np.array(batch.weight, np.float32))

    def value(self, w: Vector, batch: Batch) -> Any:
        """f_i(w)."""
        import torch

        self._load(w)
        self.module.eval()
        with torch.no_grad():
            return np.asarray(self._loss(*self._tensors(batch)).item())

    test_value = value  # without the gradient

    def tested(self, w: Vector, batch: Batch) -> dict[str, Any]:
        """Over these rows: the loss, summed, their number, and how many have the largest output at their class."""
        import torch

        self._load(w)
        self.module.eval()
        images, labels, weight = self._tensors(batch)
        with torch.no_grad():
            z = self.module(images)
            right = (weight * (z.argmax(dim=1) == labels)).sum()
            loss = self._loss_of(z, labels, weight) * weight.sum()
        return {"loss": np.asarray(loss.item()), "rows": batch.rows, "correct": np.asarray(right.item())}

    def value_and_gradient(self, w: Vector, batch: Batch) -> tuple[Any, Vector]:
        """f_i(w) and ∇f_i(w)."""
        self._load(w)
        self.module.eval()  # a gradient without a key has no draws
        self.module.zero_grad()
        loss = self._loss(*self._tensors(batch))
        loss.backward()
        slopes = {name: _slope(p) for name, p in self.module.named_parameters()}
        return np.asarray(loss.item()), self._vector(slopes, w)

    def gradient(self, w: Vector, batch: Batch) -> Vector:
        """∇f_i(w)."""
        return self.value_and_gradient(w, batch)[1]

    def scores(self, w: Vector, x: Any) -> Any:
        """The module's outputs, one a class."""
        import torch

        self._load(w)
        self.module.eval()
        with torch.no_grad():
            return jax.numpy.asarray(self.module(self._images(x)).numpy())


@dataclass(frozen=True)
class TorchNetwork(TorchClassifier):
    """make() returns the nn.Module: images (B, *shape) to scores (B, classes). Its buffers must not learn.

    A `shape` of three sizes is PyTorch's (C, H, W). Layers such as Dropout are at work in local epochs, with draws from
    the client's key, and nowhere else.
    """

    make: Callable[[], Any]
    shape: tuple[int, ...] = (1, 28, 28)
    classes: int = 10
    softmax: bool = False
    mean: float = 0.1307
    std: float = 0.3081
    title: str = "torch"

    def __post_init__(self) -> None:
        self._prepare()
        require(callable(self.make), "make", "a function that returns an nn.Module", self.make)
        object.__setattr__(self, "shape", as_shape(self.shape, "(1, 28, 28)"))

    def to_dict(self) -> dict[str, Any]:
        """What a configuration says of it: the function is known by its name."""
        name = f"{getattr(self.make, '__module__', '')}.{getattr(self.make, '__qualname__', repr(self.make))}"
        plain = {f: getattr(self, f) for f in ("classes", "softmax", "mean", "std", "title")}
        return {**plain, "shape": list(self.shape), "make": name}

    def _made(self) -> Any:
        try:
            return self.make()
        except Exception as error:
            text = f"make must be a function that returns an nn.Module, got {type(error).__name__}: {error}."
            raise InvalidArgument(f"{text} Try make() on its own.") from error

    def init(self, features: int, dtype: Any, key: Any = None) -> Vector:
        """PyTorch's own initialisation, seeded from the run's key."""
        import torch

        seed = 0 if key is None else int(jax.random.randint(key, (), 0, 2**31 - 1))
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            fresh = self._made()
        named = {name: p.detach().numpy().astype(dtype) for name, p in fresh.named_parameters()}
        return Vector({name: jax.numpy.asarray(a) for name, a in named.items()})


def _tensor(array: Any) -> Any:
    import torch

    return torch.from_numpy(np.array(array, np.float32))


def _slope(parameter: Any) -> Any:
    """Its gradient: 0 where the scores do not depend on it."""
    import torch

    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad


def _order(key: Any, epoch: int, weight: Any, size: int, rows: int) -> Any:
    """The rows in the order that `fedpact.problems.training.train` has in this epoch."""
    import torch

    return torch.from_numpy(np.array(shuffled(jax.random.fold_in(key, epoch), weight, size)[:rows]))


@contextmanager
def _drawing(key: Any) -> Iterator[None]:
    """Draws that follow from the key, and the user's own stream as it was."""
    import torch

    with torch.random.fork_rng():
        torch.manual_seed(int(jax.random.randint(key, (), 0, 2**31 - 1)))
        yield


class TorchOracle:
    """∇f_i by PyTorch, and epochs of SGD there."""

    def __init__(self, problem: TorchClassifier) -> None:
        self.problem = problem

    def __call__(self, w: Vector, batch: Batch) -> Vector:
        """∇f_i(w) on these rows."""
        return self.problem.gradient(w, batch)

    def value_and_gradient(self, w: Vector, batch: Batch) -> tuple[Any, Vector]:
        """f_i(w) and ∇f_i(w) on these rows."""
        return self.problem.value_and_gradient(w, batch)

    def train(
        self,
        w: Vector,
        batch: Batch,
        key: Any,
        plan: Plan,
        epochs: Any,
        *,
        linear: Vector | None = None,
        rho: Any = None,
        center: Vector | None = None,
    ) -> Trained:
        """`fedpact.problems.training.train`, in PyTorch; what the module draws follows from the key."""
        import torch

        problem = self.problem
        problem._load(w)
        problem.module.train()
        images, labels, weight = problem._tensors(batch)
        real = torch.nonzero(weight > 0)[:, 0]
        size = len(real) if plan.batch is None else min(plan.batch, len(real))
        parameters = dict(problem.module.named_parameters())
        alike = lambda v: {n: torch.empty_like(parameters[n]).copy_(_tensor(a)) for n, a in problem._named(v).items()}
        with torch.no_grad():
            c, theta = (None if v is None else alike(v) for v in (linear, center))
        moment = {n: torch.zeros_like(p) for n, p in parameters.items()} if plan.momentum else None
        rate, pull = float(plan.rate), 0.0 if rho is None else float(rho)
        steps, last = 0, math.nan
        with _drawing(key) if problem.draws else nullcontext():
            for e in range(int(epochs)):
                losses = []
                for rows in (real if plan.batch is None else _order(key, e, batch.weight, size, len(real))).split(size):
                    problem.module.zero_grad()
                    loss = problem._loss(images[rows], labels[rows], weight[rows])
                    loss.backward()
                    losses.append(loss.item())
                    with torch.no_grad():
                        for n, p in parameters.items():
                            g = _slope(p)  # of this step alone: terms are added in place
                            if c is not None:
                                g.add_(c[n])
                            if theta is not None:
                                g.add_(p - theta[n], alpha=pull)
                            if moment is not None:
                                g = moment[n].mul_(plan.momentum).add_(g)
                            p.sub_(g, alpha=rate)
                steps, last = steps + len(losses), float(np.mean(losses))
        return Trained(problem._vector(parameters, w), steps, last)
