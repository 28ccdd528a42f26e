"""The ClientApp's records: the bytes that go in come out, whichever of Flower's types carries them."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("flwr")

from flwr.app import ArrayRecord, ConfigRecord
from flwr.common.serde import recorddict_from_proto, recorddict_to_proto

from fedpact.flower.client import RECORD, WHOLE, unwrapped, wrapped


@pytest.mark.parametrize(
    ("size", "kind"),
    [
        (0, ConfigRecord),
        (WHOLE - 1, ConfigRecord),
        (WHOLE, ConfigRecord),
        (WHOLE + 1, ArrayRecord),
        (6 << 20, ArrayRecord),
    ],
)
def test_bytes_come_out_of_a_record_as_they_went_in(size, kind):
    content = np.random.default_rng(size).bytes(size)
    record = wrapped(content)
    assert isinstance(record[RECORD], kind)
    assert unwrapped(record) == content
    assert unwrapped(recorddict_from_proto(recorddict_to_proto(record))) == content
