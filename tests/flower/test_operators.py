"""What the operators of a federation get: the files of `federation init`, and what `up` and `run` refuse."""

from __future__ import annotations

import json
import os
import shutil
import signal
import stat
import subprocess
import tomllib

import pytest

pytest.importorskip("cryptography")

from fedpact.cli import main
from fedpact.cli.federation import _ends_whole
from fedpact.core.errors import InvalidArgument
from fedpact.flower import local
from fedpact.flower.operators import write_all

TEXT = """
[data]
target = "ill"

[problem]
name = "logistic"
l2 = 1e-2

[algorithm]
name = "fedavg"

[run]
rounds = 2
"""


@pytest.fixture(autouse=True)
def handlers():
    """Commands leave theirs, which pytest is not to end by."""
    before = {one: signal.getsignal(one) for one in (signal.SIGHUP, signal.SIGTERM)}
    yield
    for one, handler in before.items():
        signal.signal(one, handler)


@pytest.fixture
def experiment(tmp_path):
    path = tmp_path / "experiment.toml"
    path.write_text(TEXT)
    return path


def init(experiment, folder, *more, host="learn.example"):
    return main(["federation", "init", str(experiment), "--host", host, "--node", "lab", "--node", "ward",
                 "--folder", str(folder), *more])  # fmt: skip


def mode(path):
    return stat.S_IMODE(path.stat().st_mode)


# init


def test_init_writes_what_everyone_needs_and_says_who_gets_what(experiment, tmp_path, capsys):
    folder = tmp_path / "federation"
    assert init(experiment, folder, "--json") == 0
    told = {os.path.relpath(path, folder) for path in json.loads(capsys.readouterr().out)}
    app = {
        "pyproject.toml",
        "experiment.toml",
        *(f"fedpact_app/{n}.py" for n in ("__init__", "client_app", "server_app")),
    }
    own = {f"nodes/{n}/{f}" for n in ("lab", "ward") for f in (f"{n}.key", "ca.pem", "node.sh")}
    server = {"ca.key", "ca.pem", "server.key", "server.pem", "server.sh", "run.sh", "README.txt", "nodes.json"}
    assert told == server | own | {"nodes/lab.pub", "nodes/ward.pub"} | {f"app/{name}" for name in app}
    for key in ("ca.key", "server.key", "nodes/lab/lab.key", "nodes/ward/ward.key"):
        assert mode(folder / key) == 0o600, key
    for script in ("server.sh", "run.sh", "nodes/lab/node.sh"):
        assert os.access(folder / script, os.X_OK), script
        subprocess.run(["sh", "-n", str(folder / script)], check=True)
    assert (folder / "app" / "experiment.toml").read_text() == TEXT
    assert tomllib.loads((folder / "app" / "pyproject.toml").read_text())["tool"]["flwr"]["app"]["config"]["nodes"] == 2
    assert "--superlink learn.example:8000 " in (folder / "nodes" / "lab" / "node.sh").read_text()
    readme = (folder / "README.txt").read_text()
    assert "On the server (learn.example): this folder." in readme
    assert "At lab: nodes/lab/ (its key, ca.pem, node.sh)." in readme
    assert "delete nodes/NAME/NAME.key here" in readme


def test_a_key_is_never_open_to_others_not_even_while_it_is_written(experiment, tmp_path, monkeypatch):
    seen = {}
    replace = os.replace
    look = lambda a, b: (seen.setdefault(os.path.basename(b), stat.S_IMODE(os.stat(a).st_mode)), replace(a, b))
    monkeypatch.setattr(os, "replace", look)
    write_all(tmp_path / "f", experiment, "h", 8000, ["lab"])
    assert {name: seen[name] for name in ("lab.key", "ca.key", "server.key")} == dict.fromkeys(
        ("lab.key", "ca.key", "server.key"), 0o600
    )
    assert [path.name for path in (tmp_path / "f").rglob("lab.key*")] == ["lab.key"]  # one copy of it


def test_a_node_whose_public_key_is_there_keeps_it(experiment, tmp_path):
    """Its operator made it, or has the private one already."""
    write_all(tmp_path / "f", experiment, "h", 8000, ["lab"])
    (tmp_path / "f/nodes/lab/lab.key").unlink()
    before = (tmp_path / "f/nodes/lab.pub").read_bytes()
    write_all(tmp_path / "f", experiment, "h", 8000, ["lab", "ward"])
    assert (tmp_path / "f/nodes/lab.pub").read_bytes() == before
    assert not (tmp_path / "f/nodes/lab/lab.key").exists()
    assert (tmp_path / "f/nodes/ward/ward.key").exists()


def test_a_certificate_for_another_host_is_refused_with_what_to_do(experiment, tmp_path, capsys):
    folder = tmp_path / "f"
    assert init(experiment, folder) == 0
    assert init(experiment, folder, "--port", "9000") == 0
    assert init(experiment, folder, host="other.example") == 1
    told = capsys.readouterr().err
    assert "server.pem must be for other.example, localhost, 127.0.0.1, got 'for learn.example, localhost, " in told
    assert "Delete ca.key, " in told
    for name in ("ca.key", "ca.pem", "server.key", "server.pem"):
        (folder / name).unlink()
    assert init(experiment, folder, host="10.0.0.7") == 0
    assert (folder / "nodes/lab/ca.pem").read_bytes() == (folder / "ca.pem").read_bytes()


def test_so_is_one_that_has_expired(experiment, tmp_path, monkeypatch):
    monkeypatch.setattr(local, "YEARS", 0)
    write_all(tmp_path, experiment, "h", 8000, ["lab"])
    with pytest.raises(InvalidArgument, match=r"server.pem must be valid today, got 'valid until .*Delete ca\.key"):
        write_all(tmp_path, experiment, "h", 8000, ["lab"])


@pytest.mark.parametrize(
    ("host", "port", "names", "sentence"),
    [
        ("h", 0, ["a"], "port must be from 1 to 65535, got 0"),
        ("h:80/x", 1, ["a"], "host must be a name or an address"),
        ("höst", 1, ["a"], "host must be a name or an address"),
        ("h", 1, ["a", "a"], "names of nodes must be distinct"),
        ("h", 1, [".."], "name of a node must be letters"),
        ("h", 1, ["a/b"], "name of a node must be letters"),
        ("h", 1, ["superlink"], "name of a node must be another than the SuperLink's, got 'superlink'"),
    ],
)
def test_init_refuses(host, port, names, sentence, experiment, tmp_path):
    with pytest.raises(InvalidArgument, match=sentence):
        write_all(tmp_path / "f", experiment, host, port, names)
    assert not (tmp_path / "f").exists()


def connection_of(folder, home):
    """What run.sh writes in a folder, up to its first call of flwr."""
    text = (folder / "run.sh").read_text().partition("for key in")[0]
    (folder / "part.sh").write_text(text)
    subprocess.run(["sh", str(folder / "part.sh")], check=True, cwd=home)
    return tomllib.loads((folder / "flower" / "config.toml").read_text())["superlink"]


@pytest.mark.parametrize("place", ["moved", 'an "odd" place\\ it is'])
def test_the_folder_may_be_copied_elsewhere(place, experiment, tmp_path):
    write_all(tmp_path / "f", experiment, "h", 8123, ["lab"])
    shutil.copytree(tmp_path / "f", tmp_path / place)
    found = connection_of(tmp_path / place, tmp_path)
    assert found["default"] == "fedpact"
    assert found["fedpact"] == {
        "address": "localhost:8123",
        "root-certificates": str(tmp_path / place / "ca.pem"),
    }


# up and run


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--csv", "lab"], "--csv must be NAME=FILE, got 'lab'"),
        (["--csv", "lab=nowhere.csv"], "file of node 'lab' must be a CSV file that exists, got 'nowhere.csv'"),
        (["--nodes", "0"], "--nodes must be at least 1, got 0"),
        (["--nodes", "3", "--csv", "lab={file}"], "--nodes must be 1, as --csv says, or left out, got 3"),
        (["--csv", "superlink={file}"], "name of a node must be another than the SuperLink's"),
        (["--csv", "../x={file}"], "name of a node must be letters"),
    ],
)
@pytest.mark.parametrize("command", ["up", "run"])
def test_nodes_that_cannot_be_are_refused(command, arguments, sentence, experiment, tmp_path, capsys):
    pytest.importorskip("flwr")
    file = [str(experiment)] if command == "run" else []
    more = [argument.format(file=experiment) for argument in arguments]
    assert main(["federation", command, *file, *more, "--folder", str(tmp_path / "f")]) == 1
    assert sentence in capsys.readouterr().err


def test_an_experiment_that_is_none_starts_nothing(tmp_path, capsys):
    (tmp_path / "e.toml").write_text("[dat]\n")
    assert main(["federation", "run", str(tmp_path / "e.toml"), "--folder", str(tmp_path / "f")]) == 1
    assert "must be one of" in capsys.readouterr().err
    assert not (tmp_path / "f").exists()


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGTERM])
def test_a_closed_terminal_ends_a_command_as_ctrl_c_does_and_once(number):
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # under nohup it is ignored, and stays so
    _ends_whole()
    with pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), number)
    os.kill(os.getpid(), signal.SIGHUP)  # a second one does not cut the end short
