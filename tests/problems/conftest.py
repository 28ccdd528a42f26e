from __future__ import annotations

import jax
import pytest


@pytest.fixture(autouse=True)
def operation_by_operation():
    """At these sizes compiling the loops is what would take the time."""
    with jax.disable_jit():
        yield
