"""Fingerprints: the same program has the same ones in every process, another has others."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedpact.core.fingerprint import fingerprints


def scaled(factor: Any) -> Any:
    def f(x, power=2):
        return factor * x**power

    return f


def powered(power: int) -> Any:
    def f(x, power=power):
        return x**power

    return f


def recursive() -> Any:
    def f(n):
        return n * f(n - 1) if n else 1

    return f


LONG = np.arange(5000.0)
OTHER = LONG + 1e-9 * (LONG == 2500)


@pytest.mark.parametrize(
    ("make", "one", "other"),
    [
        (scaled, 1.0, 2.0),
        (scaled, LONG, OTHER),
        (scaled, jnp.asarray(LONG), jnp.asarray(OTHER)),
        (scaled, {"a": [LONG]}, {"a": [OTHER]}),
        (lambda k: scaled(scaled(k)), 1, 2),
        (lambda k: functools.partial(scaled(1), power=k), 1, 2),
        (lambda k: jax.jit(scaled(k)), 1, 2),
        (lambda k: lambda x: k * x, 1, 2),
        (lambda k: eval(f"lambda x: x + {k}"), 1, 2),
        (powered, 2, 3),
        (lambda k: np.full(3, k), 1, 2),
    ],
)
def test_functions_and_arrays_are_told_apart(make, one, other):
    assert fingerprints(make(one)) == fingerprints(make(one)) != fingerprints(make(other))


def test_the_line_a_lambda_is_on_does_not_matter():
    one = {"f": lambda x: x + 1, "rounds": 1}
    two = {"f": lambda x: x + 1, "rounds": 2, "resume": True}
    assert fingerprints(one) == fingerprints(two)


def test_a_function_that_calls_itself():
    assert fingerprints(recursive()) == fingerprints(recursive())


@dataclass
class Own:
    f: Any
    table: Any
    plain: Any = 1


def test_places_are_named_and_plain_data_have_none():
    assert fingerprints({"a": 1, "b": [2.0, "c", None, np.float32(1)]}) == {}
    assert list(fingerprints(Own(scaled(1), [1, LONG]), "problem")) == [
        "problem (Own)",
        "problem.f",
        "problem.table[1]",
    ]


def test_another_process_has_the_same():
    code = (
        "from fedpact.core.fingerprint import fingerprints\n"
        "def made(k):\n    return lambda x: x in {'a', 'b', 'c', k} or k\n"
        "print(fingerprints([made('d'), {'d', 'e', 'f'}, made]))"
    )
    run = lambda seed: subprocess.check_output([sys.executable, "-c", code], env=os.environ | {"PYTHONHASHSEED": seed})
    assert run("1") == run("2")
