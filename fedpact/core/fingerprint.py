"""Fingerprints of what plain data do not show: functions, arrays, and classes of the user's own.

A function is its source (a lambda its code: its line says more than it does), its defaults and what it closes over; an
array its bytes. Addresses in memory are left out, so that the same program has the same fingerprints in every process.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import functools
import hashlib
import inspect
import re
import textwrap
import types
from collections.abc import Mapping
from typing import Any

import numpy as np

#: Values that settings show as they are.
PLAIN = (type(None), bool, int, float, complex, str, bytes, np.generic, enum.Enum)
LENGTH = 16
#: How far a value is looked into.
DEEPEST = 20


def fingerprints(value: Any, name: str = "") -> dict[str, str]:
    """By place in the value, such as problem.apply: what plain data would not tell apart."""
    if isinstance(value, PLAIN):
        return {}
    if isinstance(value, Mapping):
        return _all(fingerprints(item, f"{name}.{key}") for key, item in value.items())
    if isinstance(value, (tuple, list)):
        return _all(fingerprints(item, f"{name}[{i}]") for i, item in enumerate(value))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        own = {} if _ours(type(value)) else {f"{name} ({type(value).__name__})": _short(_class(type(value)))}
        fields = [f.name for f in dataclasses.fields(value) if f.compare]
        return own | _all(fingerprints(getattr(value, f, None), f"{name}.{f}") for f in fields)
    return {name: _short(_text(value, ()))}


def _all(parts: Any) -> dict[str, str]:
    return {key: found for part in parts for key, found in part.items()}


def _short(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:LENGTH]


def _ours(cls: type) -> bool:
    return cls.__module__.split(".")[0] == "fedpact"


def _text(value: Any, outer: tuple[int, ...]) -> str:
    """All that is known of a value; `outer` are those it is in, for functions that refer to themselves."""
    if id(value) in outer or len(outer) > DEEPEST:
        return "itself" if id(value) in outer else type(value).__qualname__
    inner = (*outer, id(value))
    again = lambda part: _text(part, inner)
    if isinstance(value, PLAIN):
        return repr(value)
    if isinstance(value, types.ModuleType):
        return value.__name__
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{again(key)}: {again(item)}' for key, item in value.items())}}}"
    if isinstance(value, (tuple, list)):
        return f"{type(value).__name__}({', '.join(map(again, value))})"
    if isinstance(value, (set, frozenset)):
        return f"{type(value).__name__}({', '.join(sorted(map(again, value)))})"
    if isinstance(value, functools.partial):
        return f"partial({again(value.func)}, {again(value.args)}, {again(value.keywords)})"
    if isinstance(value, types.MethodType):
        return f"{again(value.__self__)}.{again(value.__func__)}"
    if isinstance(value, types.FunctionType):
        return _function(value, again)
    if isinstance(value, type):
        return _class(value)
    if dataclasses.is_dataclass(value):
        fields = {f.name: getattr(value, f.name, None) for f in dataclasses.fields(value) if f.compare}
        return f"{type(value).__qualname__}{again(fields)}"
    if hasattr(value, "dtype") and hasattr(value, "shape"):
        with contextlib.suppress(Exception):  # keys of JAX, sparse matrices: as they are shown
            array = np.asarray(value)
            if array.dtype != object:
                return f"{array.dtype}{array.shape}{hashlib.sha256(array.tobytes()).hexdigest()}"
    if callable(getattr(value, "__wrapped__", None)):  # jit, lru_cache, functools.wraps
        return f"{type(value).__qualname__}({again(value.__wrapped__)})"
    own = getattr(value, "__dict__", {})
    shown = re.sub(r" at 0x[0-9a-fA-F]+", "", repr(value))
    return f"{shown}{again(own)}" if own and not _shows(type(value)) else shown


def _shows(cls: type) -> bool:
    """Whether a class says how it is shown; then that is what it is."""
    return cls.__repr__ is not object.__repr__


def _function(f: types.FunctionType, again: Any) -> str:
    cells = []
    for cell in f.__closure__ or ():
        try:
            cells.append(again(cell.cell_contents))
        except ValueError:  # not yet filled
            cells.append("empty")
    parts = (_source(f) or _code(f.__code__), again(f.__defaults__), again(f.__kwdefaults__), *cells)
    return f"function({'; '.join(parts)})"


def _source(f: Any) -> str:
    """Its text, or nothing where there is none or, as for a lambda, others' beside it."""
    if getattr(f, "__name__", "") == "<lambda>":
        return ""
    try:
        return textwrap.dedent(inspect.getsource(f))
    except (OSError, TypeError, SyntaxError, IndentationError):
        return ""


def _code(code: types.CodeType) -> str:
    inside = [_code(c) if isinstance(c, types.CodeType) else _text(c, ()) for c in code.co_consts]
    return repr((code.co_code, code.co_names, code.co_varnames, code.co_freevars, inside))


def _class(cls: type) -> str:
    """A class of the user's own by its text, one of a library by its name."""
    name = f"{cls.__module__}.{cls.__qualname__}"
    return name if _ours(cls) or cls.__module__ == "builtins" else f"{name}: {_source(cls)}"
