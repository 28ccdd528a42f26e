"""The form of fedpact's sentences."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

import fedpact
from fedpact.core.errors import (
    CheckpointError,
    ClientError,
    DataError,
    DatasetMissing,
    FedpactError,
    InvalidArgument,
    OutputError,
    UnknownName,
    is_number,
    require,
    require_positive_int,
    unknown,
)


def sentence(call, *args, **kwargs):
    with pytest.raises(FedpactError) as caught:
        call(*args, **kwargs)
    return str(caught.value)


def test_require_says_name_symbol_constraint_value_and_hint():
    said = sentence(require, False, "eta", "above 0", -1.5, symbol="η", hint="Leave it out.")
    assert said == "eta (η) must be above 0, got -1.5. Leave it out."
    assert sentence(require, False, "rows", "at least 2", 1) == "rows must be at least 2, got 1."
    require(True, "rows", "at least 2", 2)


def test_long_values_are_cut():
    said = sentence(require, False, "x", "short", "y" * 500)
    assert said.endswith("....")
    assert len(said) < 120


@pytest.mark.parametrize("value", [0, -3, 1.0, True, "2", None])
def test_positive_integers(value):
    said = sentence(require_positive_int, "k0", value, symbol="k0")  # the same word is not said twice
    assert said == f"k0 must be an integer of at least 1, got {value!r}."
    require_positive_int("k0", 1)


def test_numbers():
    assert all(map(is_number, (1, 0.5, -2)))
    assert not any(map(is_number, (True, "1", None, 1j, [1])))


def test_unknown_names_come_with_the_nearest_and_all_of_them():
    error = unknown("algorithm", "fedemp", ["sfedavg", "fedepm", "fedavg"])
    assert str(error) == "algorithm must be one of fedavg, fedepm, sfedavg, got 'fedemp'. Did you mean 'fedepm'?"
    assert str(unknown("line", "z", ["a, b", "c"])) == "line must be one of a, b; c, got 'z'."
    assert str(unknown("preset", "zzz", ["paper"])) == "preset must be one of paper, got 'zzz'."
    assert str(unknown("preset", "x", [])) == "preset must be one of (none), got 'x'."
    assert "Did you mean 'FedEPM'?" in str(unknown("name", "fedepm", ["FedEPM"]))


def test_every_error_is_also_what_python_calls_it():
    for mine, python in (
        (InvalidArgument, ValueError),
        (UnknownName, KeyError),
        (DataError, ValueError),
        (DatasetMissing, DataError),
        (OutputError, OSError),
    ):
        assert issubclass(mine, FedpactError)
        assert issubclass(mine, python)
        assert str(mine("a sentence.")) == "a sentence."
    assert all(issubclass(kind, FedpactError) for kind in (CheckpointError, ClientError))


ADVISING = ("core/history", "core/participation", "experiment", "folder", "race", "cli/compare")


def texts(tree):
    """Every string of a module as it will read, with … for what is filled in."""
    filled = [part for part in ast.walk(tree) if isinstance(part, ast.JoinedStr)]
    pieces = {id(value) for text in filled for value in text.values}
    for text in filled:
        yield "".join(str(v.value) if isinstance(v, ast.Constant) else "…" for v in text.values)
    for part in ast.walk(tree):
        if isinstance(part, ast.Constant) and isinstance(part.value, str) and id(part) not in pieces:
            yield part.value


@pytest.mark.parametrize("module", ADVISING)
def test_a_refusal_says_what_to_do(module):
    """After '… must be …, got ….' comes another sentence, in the text itself or as the hint of `require`."""
    tree = ast.parse((Path(fedpact.__file__).parent / f"{module}.py").read_text(encoding="utf-8"))
    refusals = [text for text in texts(tree) if re.search(r" must .+ got ", text, re.DOTALL)]
    for text in refusals:
        assert re.search(r" got .+\. ?\S", text, re.DOTALL), text
    calls = [n for n in ast.walk(tree) if isinstance(n, ast.Call) and getattr(n.func, "id", "").startswith("require")]
    for call in calls:
        assert any(keyword.arg == "hint" for keyword in call.keywords), ast.unparse(call)
    assert refusals or calls or module == "core/history"  # whose advice is in one place: see test_history


def test_what_is_no_word_is_near_nothing():
    said = str(unknown("name of the model", None, ["cnn1", "cnn2", "none"]))
    assert said == "name of the model must be one of cnn1, cnn2, none, got None."
