"""Engines: order-preserving maps over clients. Algorithms never import them."""

from __future__ import annotations

from typing import Any

from fedpact.core.errors import require, unknown
from fedpact.engines.debug import DebugEngine
from fedpact.engines.flower import FlowerEngine
from fedpact.engines.host import HostEngine
from fedpact.engines.local import LocalEngine
from fedpact.engines.parties import PartiesEngine
from fedpact.engines.ray import RayEngine

__all__ = ["DebugEngine", "FlowerEngine", "HostEngine", "LocalEngine", "PartiesEngine", "RayEngine", "as_engine"]

ENGINES = {
    "debug": DebugEngine,
    "flower": FlowerEngine,
    "host": HostEngine,
    "local": LocalEngine,
    "ray": RayEngine,
}


def as_engine(engine: Any) -> Any:
    """An engine from its name, or the engine itself."""
    if isinstance(engine, (*ENGINES.values(), PartiesEngine)):  # which "flower" becomes for data split by features
        return engine
    require(isinstance(engine, str), "engine", "a name or an engine", engine)
    if engine not in ENGINES:
        raise unknown("engine", engine, ENGINES)
    return ENGINES[engine]()
