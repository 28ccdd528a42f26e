"""The ClientApp: hands every message to the node's own process and its answer back. Imports next to nothing."""

from __future__ import annotations

import numpy as np
from flwr.app import Array, ArrayRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp

from fedpact.flower import resident

#: Where in a Flower message the bytes are.
RECORD, BODY = "fedpact", "body"

app = ClientApp()


def wrapped(content: bytes) -> RecordDict:
    """Bytes as a record that Flower carries, in pieces where it is large."""
    return RecordDict({RECORD: ArrayRecord({BODY: Array(np.frombuffer(content, np.uint8))})})


def unwrapped(record: RecordDict) -> bytes:
    """The bytes of such a record."""
    return record[RECORD][BODY].numpy().tobytes()  # type: ignore[union-attr,index]


@app.train()
def train(message: Message, context: Context) -> Message:
    """Any question of fedpact's."""
    answer = resident.ask(dict(context.node_config), unwrapped(message.content))
    return Message(wrapped(answer), reply_to=message)
