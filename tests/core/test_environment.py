"""Where a run takes place."""

from __future__ import annotations

import os
from importlib import metadata
from pathlib import Path

import jax
import pytest

from fedpact.core.environment import cache_folder, environment
from fedpact.definition import use_compilation_cache


def test_versions_are_those_installed(monkeypatch):
    found = environment()
    assert found["packages"]["jax"] == jax.__version__
    assert found["cores"] == os.cpu_count()

    def absent(name):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", absent)
    assert environment()["packages"] == {}


@pytest.mark.parametrize(
    ("given", "expected"),
    [("~/mine", Path.home() / "mine"), ("/tmp/x", Path("/tmp/x")), ("", Path.home() / ".cache" / "fedpact")],
)
def test_the_cache_is_in_one_place_for_data_and_for_programs(monkeypatch, given, expected):
    monkeypatch.setenv("FEDPACT_CACHE", given)
    assert cache_folder() == expected
    names = ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs")
    before = {name: jax.config.values[name] for name in names}
    try:
        jax.config.update("jax_compilation_cache_dir", None)
        use_compilation_cache()
        assert jax.config.values["jax_compilation_cache_dir"] == str(expected / "xla")
    finally:
        for name, value in before.items():
            jax.config.update(name, value)
