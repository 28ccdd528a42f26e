"""Every program is compiled once for all tests, workers and subprocesses of a session, however small, and in one piece.

Compiling is half of what the tests take, and in pieces, by threads of its own, it takes a fifth more of the processors,
which are busy with tests. This is read before JAX is imported; workers have what the session has set. What JAX writes
programs down in, its MLIR context, is made for hundreds of them at once, where JAX makes one for each: a tenth of what
tests take.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import threading

import pytest

OWN = "JAX_COMPILATION_CACHE_DIR" not in os.environ
if OWN:
    os.environ["JAX_COMPILATION_CACHE_DIR"] = tempfile.mkdtemp(prefix="fedpact-programs-")
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
os.environ.setdefault("XLA_FLAGS", "--xla_cpu_parallel_codegen_split_count=1")

#: A context keeps the constants of its programs, so it is not kept for ever.
PROGRAMS = 200


@pytest.fixture(scope="session", autouse=True)
def shared_contexts():
    """JAX's MLIR context is one for many programs of a thread. No effect where JAX has no such function."""
    from jax._src.interpreters import mlir

    make, own = getattr(mlir, "make_ir_context", None), threading.local()

    def shared():
        if getattr(own, "left", 0) == 0:
            own.context, own.left = make(), PROGRAMS
        own.left -= 1
        return own.context

    with pytest.MonkeyPatch.context() as patch:
        if make is not None:
            patch.setattr(mlir, "make_ir_context", shared)
        yield


def pytest_unconfigure():
    """What was made for this session goes with it."""
    if OWN:
        shutil.rmtree(os.environ["JAX_COMPILATION_CACHE_DIR"], ignore_errors=True)
