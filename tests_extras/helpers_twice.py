"""A ClientApp that is fedpact's own and replies twice where `plan.json` says so; the app that is sent has it.

`twice`: what is doubled is the reply of node a's relay, the process that Flower starts for a message. It hands the
same answer to its SuperNode twice, as two messages with numbers of their own, and the SuperNode sends both to the
SuperLink, over TLS and signed with the node's key. The SuperLink keeps one reply to a message and refuses the other.

`slow_and_twice`: what is doubled is the question. The relay holds its reply back until the server has asked once more;
the node answers both, and two replies reach the SuperLink, each to a message of its own.
"""

from __future__ import annotations

import json
import time
from pathlib import Path

from flwr.app import Context, Message
from flwr.clientapp import ClientApp
from flwr.supernode.runtime import run_clientapp

from fedpact.core.wire import unpack
from fedpact.flower import client
from fedpact.flower.links import SILENCE

app = ClientApp()


@app.train()
def train(message: Message, context: Context) -> Message:
    asked = unpack(client.unwrapped(message.content))
    if asked.kind == "several":
        asked = unpack(asked.arrays[-1].tobytes())
    plan = json.loads(Path("plan.json").read_text())
    fault = plan.get(str(asked.values["round"]), {}) if asked.kind == "step" else {}
    reply = client.app(message, context)
    name = fault.get("name") if context.node_config["name"] == "a" else None
    if name == "slow_and_twice" and not (held := Path("held")).exists():
        held.touch()
        time.sleep(SILENCE + 5)
    if name == "twice":
        again, push = Message(reply.content, reply_to=message), run_clientapp.push_message

        def pushed(link, first, context):
            push(link, first, context)
            push(link, again, context)

        run_clientapp.push_message = pushed
    return reply
