from __future__ import annotations

import pytest
from report_fakes import FakeRun, make_runs


@pytest.fixture
def runs() -> list[FakeRun]:
    return make_runs()
