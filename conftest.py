"""Every program is compiled once for all tests, workers and subprocesses of a session, however small, and in one piece.

Compiling is half of what the tests take, and in pieces, by threads of its own, it takes a fifth more of the processors,
which are busy with tests. This is read before JAX is imported; workers have what the session has set.
"""

from __future__ import annotations

import os
import shutil
import tempfile

OWN = "JAX_COMPILATION_CACHE_DIR" not in os.environ
if OWN:
    os.environ["JAX_COMPILATION_CACHE_DIR"] = tempfile.mkdtemp(prefix="fedpact-programs-")
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
os.environ.setdefault("XLA_FLAGS", "--xla_cpu_parallel_codegen_split_count=1")


def pytest_unconfigure():
    """What was made for this session goes with it."""
    if OWN:
        shutil.rmtree(os.environ["JAX_COMPILATION_CACHE_DIR"], ignore_errors=True)
