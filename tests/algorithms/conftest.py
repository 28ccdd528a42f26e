from __future__ import annotations

import functools

import byhand
import pytest

import fedpact as fp
from fedpact.engines import LocalEngine, local


@functools.cache
def _run(settings, engine, options):
    case = byhand.case(settings.vertical)
    with pytest.MonkeyPatch.context() as patch:
        if isinstance(engine, LocalEngine) and engine.buckets > 1:
            patch.setattr(local, "BUCKET_COST", 0)  # at these sizes one bucket would always be cheapest
        return fp.run(settings, case.problem, case.federation, engine=engine, **dict(options))


@pytest.fixture(scope="session")
def run_once():
    """run_once(settings, engine, **options): a run on the small federation, made once in the session."""
    return lambda settings, engine, **options: _run(settings, engine, tuple(sorted(options.items())))
