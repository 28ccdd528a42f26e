"""Who may import whom, read from the source: a lazy import inside a function counts too."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import fedpact

PACKAGE = Path(fedpact.__file__).parent
ALLOWED = {
    "core": {"core"},
    "problems": {"core", "problems"},
    "algorithms": {"core", "problems", "algorithms"},
    "engines": {"core", "problems", "engines"},
    "data": {"core", "problems", "data"},
    "privacy": {"core", "problems", "privacy"},
    "secure": {"core", "secure"},
    "report": {"core", "report"},
}


def imported(source: str, package: tuple[str, ...]) -> set[str]:
    """The layers of fedpact that a module imports; `fedpact` itself counts as the layer ''.

    `package` is the importing module's own package, for relative imports.
    """
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package[: len(package) - node.level + 1]) if node.level else ""
            module = ".".join(part for part in (base, node.module) if part)
            names = [f"{module}.{alias.name}" if module == "fedpact" else module for alias in node.names]
        else:
            continue
        for name in names:
            parts = name.split(".")
            if parts[0] == "fedpact":
                found.add(parts[1] if len(parts) > 1 else "")
    return found


def modules(layer: str) -> list[Path]:
    return sorted((PACKAGE / layer).rglob("*.py"))


@pytest.mark.parametrize("layer", ALLOWED)
def test_a_layer_imports_only_what_it_may(layer):
    assert modules(layer), f"no modules in fedpact.{layer}"
    for path in modules(layer):
        package = ("fedpact", *path.relative_to(PACKAGE).parent.parts)
        extra = imported(path.read_text(encoding="utf-8"), package) - ALLOWED[layer]
        assert not extra, f"{path.relative_to(PACKAGE)} imports {sorted(extra)}"


def test_the_reader_of_imports_sees_every_form():
    source = """
import fedpact.core.stop as stop
from fedpact import data
from fedpact.engines.local import LocalEngine
from ..problems import base
def f():
    from fedpact.report import curves
"""
    assert imported(source, ("fedpact", "algorithms")) == {"core", "data", "engines", "problems", "report"}
    assert imported("import numpy, fedpact", ("fedpact",)) == {""}
    assert imported("from . import fedavg", ("fedpact", "algorithms")) == {"algorithms"}
