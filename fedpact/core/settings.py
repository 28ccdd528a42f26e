"""Settings are frozen dataclasses: what TOML, `show` and a checkpoint see. `build` checks them and binds the bundle."""

from __future__ import annotations

import dataclasses
import inspect
import itertools
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar, Self

import jax.numpy as jnp
import numpy as np

from fedpact.core.contract import Algorithm
from fedpact.core.errors import InvalidArgument, is_number, require, unknown
from fedpact.core.private import Theorem


def plain(value: Any) -> Any:
    """A NumPy scalar as Python's: those of NumPy would widen single precision, and are no numbers to JSON."""
    return value.item() if isinstance(value, np.generic) else value


def plain_fields(settings: Any) -> None:
    """NumPy scalars in a frozen dataclass to Python's."""
    for f in dataclasses.fields(settings):
        object.__setattr__(settings, f.name, plain(getattr(settings, f.name)))


def called(where: str, build: Callable[..., Any], values: Any, also: Iterable[str] = ()) -> Any:
    """Call a class with a table's keys; an unknown or a missing key is named. `also` are keys that others took."""
    if not isinstance(values, Mapping):
        raise InvalidArgument(f"{where} must be a table, got {values!r}. Write it as {{ key = value }}.")
    known = inspect.signature(build).parameters
    for key in values:
        if key not in known:
            raise unknown(f"key of {where}", key, {*known, *also})
    for name, parameter in known.items():
        if parameter.default is parameter.empty and name not in values:
            raise InvalidArgument(f"{where} must have {name!r}, got only {', '.join(values) or 'nothing'}. Add it.")
    return build(**values)


class Settings:
    """Base of every algorithm's settings: a name, named presets, and a way to and from plain dicts."""

    name: ClassVar[str]
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {}
    sips: ClassVar[bool] = False  # whether its clients draw a few of their rows a round
    vertical: ClassVar[bool] = False  # whether it is for data split by features
    constrains: ClassVar[bool] = False  # whether it keeps constraints
    remedy: ClassVar[str] = "take shorter steps"  # what to do where a run ends above its start
    ways: ClassVar[tuple[str, ...]] = ()  # its private modes (`core.private`), the usual one first

    def _plain(self) -> None:
        """NumPy scalars to Python's."""
        plain_fields(self)

    def build(self, problem: Any, clients: int, rate: float) -> Algorithm:
        """The bundle of pure functions for m clients and participation rate ρ."""
        raise NotImplementedError

    def private(self, way: str, problem: Any, clients: int, rate: float, reach: float | None) -> Theorem:
        """The theorem that a private mode rests on; settings that would let data decide what is seen are refused."""
        raise NotImplementedError

    @classmethod
    def preset(cls, preset: str, **changes: Any) -> Self:
        """A named choice of settings (see `fedpact show NAME`), with changes of your own."""
        if not isinstance(preset, str) or preset not in cls.presets:
            raise unknown(f"{cls.name} preset", preset, cls.presets)
        return cls.from_dict({**cls.presets[preset], **changes})

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Settings from a plain dict; an unknown key is an error with the nearest name."""
        known = [f.name for f in dataclasses.fields(cls)]  # type: ignore[arg-type]
        for key in values:
            if key not in known:
                raise unknown(f"setting of {cls.name}", key, known)
        return cls(**values)

    def to_dict(self) -> dict[str, Any]:
        """The settings as a plain dict."""
        return dataclasses.asdict(self)  # type: ignore[call-overload]

    @property
    def pooled(self) -> bool:
        """Whether its objective is a mean over all rows, as that of methods with constraints is; else over clients."""
        return self.constrains

    @property
    def regularised(self) -> bool:
        """Whether its objective has a regulariser of its own beside the problem's."""
        return False

    @property
    def label(self) -> str:
        """The name with the settings that differ from the defaults: what plots and tables call a run."""
        changed = [
            f"{f.name}={getattr(self, f.name)}"
            for f in dataclasses.fields(self)  # type: ignore[arg-type]
            if getattr(self, f.name) != f.default
        ]
        return f"{type(self).__name__}({', '.join(changed)})" if changed else type(self).__name__


def check_schedule(
    name: str,
    value: Any,
    *,
    symbol: str,
    words: tuple[str, ...] = (),
    least: float = -math.inf,
    above: float = -math.inf,
) -> None:
    """A setting that is a number, a word, or [[round, value], …] with rising rounds from 0 on."""
    fits = lambda v: is_number(v) and v >= least and v > above
    bound = f"above {above:g}" if above > -math.inf else f"at least {least:g}"
    hint = f"Write 0.01, or [[0, 0.01], [60, 0.1]] for another value from round 60 on{_or(words)}."
    if isinstance(value, (tuple, list)):
        pairs = bool(value) and all(isinstance(p, (tuple, list)) and len(p) == 2 for p in value)
        whole = pairs and all(isinstance(r, int) and not isinstance(r, bool) for r, _ in value)
        rising = whole and value[0][0] == 0 and all(a[0] < b[0] for a, b in itertools.pairwise(value))
        require(rising, name, "pairs [round, value] with rising rounds from 0 on", value, symbol=symbol, hint=hint)
        for t, v in value:
            require(fits(v), f"{name} from round {t}", bound, v, symbol=symbol)
        return
    require(value in words if isinstance(value, str) else fits(value), name, bound, value, symbol=symbol, hint=hint)


def _or(words: tuple[str, ...]) -> str:
    return "".join(f', or "{word}"' for word in words)


def scheduled(value: Any, t: Any) -> Any:
    """The value of such a setting in round t."""
    if not isinstance(value, (tuple, list)):
        return value
    rounds, values = (np.array([p[k] for p in value]) for k in (0, 1))
    return jnp.asarray(values)[jnp.searchsorted(jnp.asarray(rounds), t, side="right") - 1]
