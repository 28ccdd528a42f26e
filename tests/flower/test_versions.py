"""Server and nodes of one fedpact: what messages hold is pinned, and another version is refused by name."""

from __future__ import annotations

import pytest
from helpers_nodes import Faulty, federated, nodes

from fedpact import __version__
from fedpact.core.errors import ClientError, InvalidArgument
from fedpact.core.wire import SCHEMA, Message, unpack
from fedpact.flower.links import Direct

#: The fields of every message between server and nodes of data split by rows, by the schema that has them: who
#: changes them gives the schema its next number, and a table here.
EVERY = {"server", "fedpact"}
ASKED = {"client", "digest", "keep", "round", "version"}
FIELDS = {
    1: {
        "hello": ({"experiment"}, {"client", "fedpact", "name", "signs", "survey"}),
        "coded": ({"client", "schema"}, {"blank", "mark", "rows"}),
        "prepare": ({"client", "description", "digest", "experiment", "run"}, set()),
        "join": ({"client", "clients"}, {"client"}),
        "step": (ASKED | {"notes"}, {"based", "client", "digest", "notes", "own", "round", "version"}),
        "measure": (ASKED, {"client", "round", "version"}),
    },
}


def test_the_fields_of_messages_are_those_of_their_schema(tmp_path):
    link = Direct(nodes(tmp_path, 4))
    link.record = True
    federated("fedavg", tmp_path, link, rounds=2)
    found: dict[str, tuple[set[str], set[str]]] = {}
    for content in link.sent:
        message = unpack(content)
        inner = [unpack(one.tobytes()) for one in message.arrays] if message.kind == "several" else [message]
        for one in inner:
            question = "server" in one.values
            fields = found.setdefault(one.kind, (set(), set()))[0 if question else 1]
            fields.update(set(one.values) - EVERY if question else one.values)
    assert found == FIELDS[SCHEMA]


class OtherServer(Direct):
    """A server of another version, told with every question."""

    def _of_session(self, message):
        return Message(message.kind, {**message.values, "server": self.session, "fedpact": "0.9.0"}).pack()


def test_a_node_refuses_a_server_of_another_version(tmp_path):
    wanted = rf"fedpact of node '0' must be 0\.9\.0, as the server's, got {__version__}\. Install fedpact 0\.9\.0 at"
    with pytest.raises(ClientError, match=wanted):
        federated("fedavg", tmp_path, OtherServer(nodes(tmp_path)))


@pytest.mark.parametrize("version", ["0.9.0", None])
def test_a_server_refuses_a_node_of_another_version(version, tmp_path):
    def other(i, question, answer):
        return (
            answer._replace(values={**answer.values, "fedpact": version})
            if (i, question.kind) == (2, "hello")
            else answer
        )

    told = version or "one that does not tell its version"
    with pytest.raises(
        InvalidArgument, match=rf"fedpact of node '2' must be {__version__}, as the server's, got {told}\."
    ):
        federated("fedavg", tmp_path, Faulty(nodes(tmp_path), other))


def test_a_node_that_goes_on_with_another_version_than_it_began_with_is_left_out(tmp_path, monkeypatch, caplog):
    """As one that was installed anew in the middle of a run."""
    from fedpact.flower import node

    def before(i, question):
        newer = i == 2 and question.kind == "step" and question.values["round"] >= 1
        monkeypatch.setattr(node, "__version__", "0.9.0" if newer else __version__)

    link = Faulty(nodes(tmp_path), before=before)
    run = federated("fedavg", tmp_path, link, flower={"quorum": 0.5}, rounds=3)
    assert run.history.column("refused_uploads").tolist() == [0, 0, 1, 1]
    assert f"fedpact of node '2' must be {__version__}, as the server's, got 0.9.0." in caplog.text
