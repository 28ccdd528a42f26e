"""Datasets, and how their rows are dealt to clients, or their columns to parties."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any

from fedpact.core.errors import unknown
from fedpact.data.adult import adult
from fedpact.data.alignment import align
from fedpact.data.bundled import breast_cancer, diabetes, digits, iris, wine
from fedpact.data.dataset import Dataset, Schema
from fedpact.data.features import VerticalFederation
from fedpact.data.federation import Federation
from fedpact.data.images import cifar10, fashion_mnist, mnist
from fedpact.data.public import covtype, qsar, santander, w8a
from fedpact.data.synthetic import mixture, synthetic
from fedpact.data.tables import from_arrays, from_csv

__all__ = [
    "Dataset",
    "Federation",
    "Schema",
    "VerticalFederation",
    "adult",
    "align",
    "breast_cancer",
    "cifar10",
    "covtype",
    "diabetes",
    "digits",
    "fashion_mnist",
    "from_arrays",
    "from_csv",
    "iris",
    "load",
    "mixture",
    "mnist",
    "names",
    "qsar",
    "santander",
    "synthetic",
    "w8a",
    "wine",
]

_LOADERS: dict[str, Callable[..., Dataset]] = {
    loader.__name__: loader
    for loader in (
        adult,
        breast_cancer,
        cifar10,
        covtype,
        diabetes,
        digits,
        fashion_mnist,
        iris,
        mixture,
        mnist,
        qsar,
        santander,
        synthetic,
        w8a,
        wine,
    )
}


def load(name: str, **options: Any) -> Dataset:
    """The dataset of that name; `options` go to its function."""
    check_options(name, options)
    return _LOADERS[name](**options)


def check_options(name: str, options: Iterable[str]) -> None:
    """Refuse a name that `load` does not know, and options that its function does not take."""
    if name not in _LOADERS:
        raise unknown("dataset", name, _LOADERS)
    known = inspect.signature(_LOADERS[name]).parameters
    for option in options:
        if option not in known:
            raise unknown(f"option of dataset {name!r}", option, known)


def names() -> dict[str, str]:
    """Every name that `load` knows, with a one-line description."""
    return {name: inspect.getdoc(loader).splitlines()[0] for name, loader in sorted(_LOADERS.items())}  # type: ignore[union-attr]
