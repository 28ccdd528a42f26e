"""What pyproject.toml declares is what the code imports, and the version is written once."""

from __future__ import annotations

import ast
import re
import signal
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import pytest

import fedpact

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
NAMES = {"scikit-learn": "sklearn", "dp-accounting": "dp_accounting"}
EXTRAS = {
    "torch": "torch",
    "flax": "flax",
    "equinox": "equinox",
    "ray": "ray",
    "secure": "cryptography",
    "he": "tenseal",
    "flower": "flwr",
}
TOOLS = {"pytest-xdist", "ruff", "mypy"}  # run, not imported


def declared(requirements: list[str]) -> set[str]:
    return {re.match(r"[\w-]+", requirement)[0] for requirement in requirements}


def imported(*folders: str) -> set[str]:
    """Top-level names of other projects that the modules below these folders import, lazily or not."""
    paths = [path for folder in folders for path in (ROOT / folder).rglob("*.py")]
    own = {path.stem for path in paths} | {"fedpact"} | set(sys.stdlib_module_names)
    found = set()
    for path in paths:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                found |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and not node.level:
                found.add(node.module.split(".")[0])
    return found - own


def test_the_package_imports_what_it_declares_and_nothing_else():
    wanted = {NAMES.get(name, name) for name in declared(PROJECT["dependencies"])}
    assert imported("fedpact") - wanted <= set(
        EXTRAS.values()
    )  # imported where they are used, never at the top of a module
    assert imported("fedpact") >= wanted
    assert set(PROJECT["optional-dependencies"]) == set(EXTRAS) | {"dev"}
    for extra, module in EXTRAS.items():
        assert declared(PROJECT["optional-dependencies"][extra]) - ({"cryptography"} - {module}) == {module}


def test_without_the_extras_nothing_of_them_is_imported():
    code = f"import sys, fedpact.cli, fedpact.secure.psi; sys.exit(bool({set(EXTRAS.values())} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], timeout=120).returncode == 0


def test_names_are_imported_when_they_are_asked_for():
    """Also once modules of these names were imported; and what JAX makes is in double precision from the start."""
    code = """
import sys, fedpact, fedpact.cli
try:
    fedpact.cli.main(["--version"])
except SystemExit as end:
    assert end.code == 0
assert not {"jax", "numpy", "scipy", "matplotlib"} & set(sys.modules)
import jax.numpy as jnp
assert jnp.zeros(1).dtype == "float64"
import fedpact.run
from fedpact.model import Model
assert callable(fedpact.run) and fedpact.Model is Model and fedpact.stop.Target and fedpact.engines.ENGINES
assert set(fedpact.__all__) <= set(dir(fedpact))
for name in fedpact.__all__:
    assert getattr(fedpact, name) is not None
from fedpact import *
assert not hasattr(fedpact, "nothing")
"""
    done = subprocess.run([sys.executable, "-c", code], timeout=120, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == f"fedpact {fedpact.__version__}\n"


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="looks into /proc")
@pytest.mark.parametrize("library", ["numpy", "jaxlib"])
def test_ctrl_c_while_the_command_is_importing_ends_in_a_sentence(library):
    heard = lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)  # jobs of the background are started deaf to it
    command = [sys.executable, "-m", "fedpact", "list"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, preexec_fn=heard)
    maps = Path(f"/proc/{process.pid}/maps")
    while library not in maps.read_text():
        assert process.poll() is None
        time.sleep(0.001)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=120)
    assert (process.returncode, out, err) == (130, b"", b"fedpact: interrupted.\n")


def test_tests_and_benchmarks_import_what_is_declared_for_them():
    wanted = {NAMES.get(name, name) for name in declared(PROJECT["dependencies"])}
    extra = declared(PROJECT["optional-dependencies"]["dev"]) - TOOLS
    peers = declared((ROOT / "benchmarks" / "requirements-deep.txt").read_text(encoding="utf-8").splitlines()[1:])
    assert imported("tests", "benchmarks") - wanted == extra | peers


def test_the_version_is_written_once():
    assert "version" in PROJECT["dynamic"]
    assert re.fullmatch(r"\d+\.\d+\.\d+", fedpact.__version__)
    assert f"[{fedpact.__version__}]" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


def test_tools_whose_verdict_changes_with_their_version_are_pinned():
    pins = [
        requirement for requirement in PROJECT["optional-dependencies"]["dev"] if re.match("ruff|mypy", requirement)
    ]
    assert len(pins) == 2
    for requirement in pins:
        assert re.fullmatch(r"\w+==\d+\.\d+\.\*", requirement)


def test_type_checkers_of_users_see_the_types():
    assert (Path(fedpact.__file__).parent / "py.typed").is_file()


def test_every_marker_is_used():
    own = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["pytest"]["ini_options"]
    for marker in own.get("markers", ()):
        name = marker.partition(":")[0]
        assert any(f"mark.{name}" in path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("test_*.py"))


def test_the_licence_is_named_as_packaging_tools_read_it():
    assert PROJECT["license"] == "Apache-2.0"
    assert PROJECT["license-files"] == ["LICENSE"]
    assert not any("License" in classifier for classifier in PROJECT["classifiers"])


def test_every_drill_by_name_is_a_test():
    for line in (ROOT / "tests" / "drills.txt").read_text(encoding="utf-8").splitlines():
        path, name = line.split("::")
        assert f"def {name.split('[')[0]}(" in (ROOT / path).read_text(encoding="utf-8"), line
