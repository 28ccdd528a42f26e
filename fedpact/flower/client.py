"""The ClientApp: hands every message to the node's own process and its answer back. Imports next to nothing."""

from __future__ import annotations

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp

from fedpact.flower import resident

#: Where in a Flower message the bytes are.
RECORD, BODY = "fedpact", "body"
#: Bytes up to which they are one value: Flower asks for every object of a message by itself, over each of its links,
#: and an array is two more. Larger ones are an array, which Flower carries in pieces.
WHOLE = 1 << 20

app = ClientApp()


def wrapped(content: bytes) -> RecordDict:
    """Bytes as a record that Flower carries."""
    if len(content) <= WHOLE:
        return RecordDict({RECORD: ConfigRecord({BODY: content})})
    return RecordDict({RECORD: ArrayRecord({BODY: Array(np.frombuffer(content, np.uint8))})})


def unwrapped(record: RecordDict) -> bytes:
    """The bytes of such a record."""
    body = record[RECORD][BODY]  # type: ignore[index]
    return body if isinstance(body, bytes) else body.numpy().tobytes()  # type: ignore[union-attr]


@app.train()
def train(message: Message, context: Context) -> Message:
    """Any question of fedpact's."""
    answer = resident.ask(dict(context.node_config), unwrapped(message.content))
    return Message(wrapped(answer), reply_to=message)
