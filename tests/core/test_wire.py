"""Messages: what is packed is unpacked; whatever else comes is refused with a sentence."""

from __future__ import annotations

import numpy as np
import pytest

from fedpact.core.sealed import seal
from fedpact.core.wire import SCHEMA, Message, Refused, unpack

HEADER = {"schema": SCHEMA, "kind": "step", "values": {}, "order": [0]}


def test_what_is_packed_is_unpacked_and_equal_arrays_travel_once():
    a = np.arange(1000.0)
    content = Message("step", {"round": 3}, [a, a + 1, a]).pack()
    assert len(content) < 2.5 * a.nbytes
    message = unpack(content, "step")
    assert (message.kind, message.values) == ("step", {"round": 3})
    for got, wanted in zip(message.arrays, [a, a + 1, a], strict=True):
        np.testing.assert_array_equal(got, wanted)


@pytest.mark.parametrize(
    ("header", "sentence"),
    [
        ([1, 2], "header of a message must be a table"),
        (HEADER | {"values": 3}, "header of a message must be a table"),
        (HEADER | {"schema": SCHEMA + 1}, f"schema of a message must be {SCHEMA}, got {SCHEMA + 1}"),
        (HEADER | {"kind": 7}, "message must be of kind 'step', got 7"),
        (HEADER | {"kind": "join"}, "message must be of kind 'step', got 'join'"),
        (HEADER | {"order": [1]}, "must list the arrays it has"),
        (HEADER | {"order": ["x"]}, "must list the arrays it has"),
        (HEADER | {"order": 5}, "must list the arrays it has"),
    ],
)
def test_a_header_made_by_somebody_else_is_refused(header, sentence):
    with pytest.raises(Refused, match=sentence):
        unpack(seal("message", header, {"000000": np.zeros(2)}), "step")


def test_bytes_that_are_no_message_are_refused():
    whole = Message("step", {}, [np.zeros(3)]).pack()
    for content in (b"", b"GET / HTTP/1.1", whole[:-5], seal("checkpoint", HEADER, {})):
        with pytest.raises(Refused, match="message must be whole"):
            unpack(content)
