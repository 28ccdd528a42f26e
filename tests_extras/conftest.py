"""Networks of other libraries: `make test-extras`."""

from __future__ import annotations

import numpy as np
import pytest

import fedpact as fp
from fedpact.data.dataset import Column, Schema


@pytest.fixture(scope="session", autouse=True)
def cache(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FEDPACT_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="session")
def federation():
    """Bytes for pixels, 4×4, three classes, five clients of unequal sizes, and a test set."""
    rng = np.random.default_rng(0)
    x = rng.integers(0, 256, (110, 16)).astype(np.uint8)
    y = np.minimum(x[:, 0].astype(int) + x[:, 5] // 2, 383) // 128
    schema = Schema(
        tuple(Column(f"p{i}", "number") for i in range(16)), (1.0,) * 16, (0.0,) * 16, "class", ("a", "b", "c")
    )
    data = fp.data.Dataset("tiny", x, y.astype(float), schema, {}, "none", np.arange(80, 110))
    return data.split(how="sizes", sizes=[20, 12, 16, 20, 12])
