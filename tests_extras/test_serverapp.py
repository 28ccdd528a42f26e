"""The server app, with nodes of this process in Flower's place: what it leaves behind, and what it says."""

from __future__ import annotations

import errno
import logging
import ssl
from types import SimpleNamespace

import pytest

pytest.importorskip("flwr")
pytest.importorskip("cryptography")

import httpx

from fedpact.core import files
from fedpact.core.errors import DataError, FolderHeld
from fedpact.flower import links, serverapp
from fedpact.flower.links import Grid
from fedpact.flower.local import Local
from fedpact.flower.node import Node
from fedpact.folder import _locked
from fedpact.run import Run

EXPERIMENT = """
[data]
name = "breast_cancer"
[split]
clients = 2
[problem]
name = "logistic"
[algorithm]
name = "fedavg"
[run]
rounds = 1
"""


class Post:
    """A grid as Flower has one, whose nodes answer at once: by Flower's number a node, or the error it fails by."""

    def __init__(self, nodes):
        self.nodes, self.come = nodes, []

    def get_node_ids(self):
        return list(self.nodes)

    def push_messages(self, posts):
        numbers = []
        for content, number in posts:
            node = self.nodes[number]
            reply = node if isinstance(node, Exception) else node.signed(content)
            told = SimpleNamespace(reply_to_message_id=f"m{len(self.come)}", src_node_id=number)
            self.come.append(SimpleNamespace(metadata=told, content=reply))
            numbers.append(told.reply_to_message_id)
        return numbers

    def pull_messages(self, numbers):
        return [one for one in self.come if one.metadata.reply_to_message_id in numbers]


def opened(reply):
    if isinstance(reply.content, Exception):
        raise reply.content
    return reply.content


@pytest.fixture(autouse=True)
def quiet(monkeypatch, caplog):
    """No process to be tied to, a log that the test reads, and nothing to wait for."""
    monkeypatch.setattr(serverapp, "_tied", lambda: None)
    monkeypatch.setattr(serverapp, "_log_here", lambda: None)
    monkeypatch.setattr(serverapp, "_post", lambda content, node, kind: (content, node))
    monkeypatch.setattr(serverapp, "_open", opened)
    monkeypatch.setattr(links, "AGAIN", 0.01)
    monkeypatch.setattr(Grid, "EVERY", 0.01)
    caplog.set_level(logging.INFO, logger="fedpact")
    logging.getLogger("fedpact").propagate = True


@pytest.fixture
def start(tmp_path):
    """Start a server app; `config` is the run configuration beside what it needs."""
    (tmp_path / "experiment.toml").write_text(EXPERIMENT)
    made = {7 + i: Node({"client": i}, tmp_path / str(i)) for i in range(2)}

    def started(there=made, **config):
        given = {"experiment": str(tmp_path / "experiment.toml"), "folder": str(tmp_path / "run"), "nodes": 2, **config}
        serverapp.main(Post(there), SimpleNamespace(run_config=given))

    return started


def test_a_run(start, tmp_path, caplog):
    start()
    assert Run.load(tmp_path / "run").history.rounds == 1
    assert "kept in" in caplog.text
    assert not (tmp_path / "run.error").exists()


def test_a_second_server_app_leaves_no_word_beside_the_run_of_the_first(start, tmp_path, caplog):
    (tmp_path / "run").mkdir()
    with _locked(tmp_path / "run"), pytest.raises(SystemExit):
        start()
    assert "in which another process is running" in caplog.text
    assert not (tmp_path / "run.error").exists()


def test_a_folder_in_which_another_process_runs_is_refused_before_a_run_is_submitted(tmp_path):
    (tmp_path / "run").mkdir()
    federation = Local(tmp_path / "federation", {"a": {"client": 0}})
    try:
        with _locked(tmp_path / "run"), pytest.raises(FolderHeld):
            federation.finish(tmp_path / "experiment.toml", tmp_path / "run", 1, print)
    finally:
        federation.stop()


@pytest.mark.parametrize(
    ("error", "sentence"),
    [(DataError("rows must be there, got none."), "rows must be there"), (OSError("gone"), "OSError: gone. A defect")],
)
def test_why_a_run_has_ended_is_in_the_log_where_the_disk_is_full(
    error, sentence, start, tmp_path, caplog, monkeypatch
):
    def ended(*_):
        raise error

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(serverapp, "federate", ended)
    with pytest.raises((SystemExit, OSError)) as found:
        start()
    assert sentence in (tmp_path / "run.error").read_text()
    caplog.clear()
    monkeypatch.setattr(files, "_rename_all", full)
    with pytest.raises(type(found.value)) as again:
        start()
    assert again.value is error or again.value.code == 1
    assert sentence in caplog.text
    assert "word of it could not be left: output folder must be writable" in caplog.text


@pytest.mark.parametrize(
    ("error", "cause"),
    [(ConnectionResetError("cut"), None), (ssl.SSLEOFError("cut"), None), (ValueError("x"), "httpx")],
)
def test_who_has_lost_its_superlink_leaves_no_word_so_that_the_run_is_resumed(
    error, cause, start, tmp_path, monkeypatch
):
    def ended(*_):
        raise error from (httpx.ConnectError("cut") if cause else None)

    monkeypatch.setattr(serverapp, "federate", ended)
    with pytest.raises(type(error)):
        start()
    assert not (tmp_path / "run.error").exists()


def test_why_nodes_are_not_ready_is_said_of_each(start, tmp_path):
    """One fails by Flower's own error as long as it is asked; the file of another is not there."""
    nodes = {7: LookupError("Flower's error 1: no module"), 8: Node({"csv": "none.csv"}, tmp_path / "b")}
    with pytest.raises(SystemExit):
        start(nodes, wait=0.2)
    told = (tmp_path / "run.error").read_text()
    assert told.startswith("nodes must be 2, got 0 that are ready. Mend or start the others. Node ")
    assert "Node 7: Flower's error 1: no module" in told
    assert "Node 8: [data] must have 'target' for CSV files at nodes, got none." in told


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        ({"nodes": "two"}, "nodes of the run configuration must be an integer of at least 1, got 'two'."),
        ({"nodes": 0}, "nodes of the run configuration must be an integer of at least 1, got 0."),
        ({"wait": "long"}, "wait of the run configuration must be a number of seconds above 0, got 'long'."),
        ({"wait": -1.0}, "wait of the run configuration must be a number of seconds above 0, got -1.0."),
    ],
)
def test_a_run_configuration_that_is_wrong_is_a_sentence(config, sentence, start, tmp_path):
    with pytest.raises(SystemExit):
        start(**config)
    assert (tmp_path / "run.error").read_text().strip() == sentence


@pytest.mark.parametrize(
    ("right", "wrong", "sentence"),
    [
        ("fedavg", "fedagv", "got 'fedagv'. Did you mean 'fedavg'?"),
        ("clients = 2", "holdot = 0.3", "option of the split 'iid' must be one of clients, holdout, how, seed, got"),
        ('name = "breast_cancer"', 'target = "ill"\nscael = "none"', "got 'scael'. Did you mean 'scale'?"),
    ],
)
def test_an_experiment_that_is_none_is_refused_before_anyone_is_waited_for(right, wrong, sentence, start, tmp_path):
    (tmp_path / "experiment.toml").write_text(EXPERIMENT.replace(right, wrong))
    with pytest.raises(SystemExit):
        start({}, wait=1000)
    assert sentence in (tmp_path / "run.error").read_text()


def test_the_word_of_a_failure_goes_when_a_server_app_begins(start, tmp_path):
    (tmp_path / "run.error").write_text("nodes must be 2, got 1 after 600 s. Start the others.")
    start()
    assert not (tmp_path / "run.error").exists()


def test_nodes_beyond_those_asked_for_are_named_and_left_out(start, tmp_path, caplog):
    nodes = {5 + i: Node({"client": i, "name": f"n{i}"}, tmp_path / f"n{i}") for i in range(3)}
    start(nodes)
    assert "nodes of the run configuration are 2: 1 more, left out: n2 (7)" in caplog.text
    assert Run.load(tmp_path / "run").config["data"]["clients"] == 2
