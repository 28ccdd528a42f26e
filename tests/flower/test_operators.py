"""What the operators of a federation get: the files of `federation init`, and what `up` and `run` refuse."""

from __future__ import annotations

import json
import os
import shutil
import signal
import stat
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

pytest.importorskip("cryptography")

from fedpact.cli import main
from fedpact.cli.federation import _ends_whole
from fedpact.core.errors import InvalidArgument
from fedpact.flower import local
from fedpact.flower.operators import ARGUMENTS, KEYGEN, write_all
from fedpact.flower.sources import KEYS

DOCS = Path(__file__).resolve().parents[2] / "docs"

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
    server = {"ca.key", "ca.pem", "server.key", "server.pem", "server.sh", "run.sh", "README.txt"}
    assert told == server | own | {"nodes/lab.pub", "nodes/ward.pub"} | {f"app/{name}" for name in app}
    for key in ("ca.key", "server.key", "nodes/lab/lab.key", "nodes/ward/ward.key"):
        assert mode(folder / key) == 0o600, key
    assert mode(folder) == 0o700
    for script in ("server.sh", "run.sh", "nodes/lab/node.sh"):
        assert "\numask 077 " in (folder / script).read_text(), script
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


# run.sh


FLWR = """#!/bin/sh
echo "$@" >> "$CALLS"
[ "$1" = supernode ] || exit 0
case "$3" in *"$FAILS"*) echo "$WORDS" >&2; exit 1 ;; esac
echo "SuperNode 7 registered successfully."
"""


@pytest.fixture
def ran(experiment, tmp_path):
    """run.sh with a flwr that fails to register keys whose files are called so, with these words; what it called."""
    write_all(tmp_path / "f", experiment, "h", 8123, ["lab", "ward"])
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/flwr").write_text(FLWR)
    (tmp_path / "bin/flwr").chmod(0o755)

    def run(fails, words):
        calls = tmp_path / "calls"
        env = {"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}", "CALLS": str(calls), "FAILS": fails, "WORDS": words}
        script = ["sh", str(tmp_path / "f/run.sh")]
        done = subprocess.run(script, env=env, capture_output=True, text=True, timeout=60)
        return done, [line.split()[0] for line in calls.read_text().splitlines()]

    return run


@pytest.mark.parametrize("fails", ["nobody", "lab.pub", "nodes/"])
def test_a_key_that_is_registered_already_is_fine(fails, ran):
    done, called = ran(fails, "Error: Public key already in use.")
    assert (done.returncode, called) == (0, ["supernode", "supernode", "run"])
    assert "must be" not in done.stdout + done.stderr


def test_one_that_cannot_be_registered_ends_the_script_with_flower_s_words(ran):
    done, called = ran("lab.pub", "Error: The SuperLink is unavailable.")
    assert (done.returncode, called) == (1, ["supernode"])
    assert done.stderr.startswith("nodes/lab.pub must be registered, got: Error: The SuperLink is unavailable.\n")


# node.sh


@pytest.fixture
def started(experiment, tmp_path):
    """node.sh of lab with these variables and arguments, with a flower-supernode that tells what it is given, once."""
    write_all(tmp_path / "f", experiment, "h", 8123, ["lab", "ward"])
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/flower-supernode").write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    (tmp_path / "bin/flower-supernode").chmod(0o755)

    def start(*arguments, **variables):
        env = {"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}", **variables}
        script = ["sh", str(tmp_path / "f/nodes/lab/node.sh"), *arguments]
        return subprocess.run(script, env=env, capture_output=True, text=True, timeout=60)

    return start


@pytest.mark.parametrize(
    ("arguments", "variables", "config"),
    [
        ([], {}, {"csv": "{here}/rows.csv", "state": "{here}/state"}),
        ([], {"CSV": "/a b/rows.csv", "STATE": "/s"}, {"csv": "/a b/rows.csv", "state": "/s"}),
        ([], {"LOADER": "wards:load", "STATE": "/s"}, {"loader": "wards:load", "state": "/s"}),
        (
            ["epsilon=3.0", "delta=1e-5", "threads=2", "client=0"],
            {"CSV": "/r.csv", "STATE": "/s"},
            {"csv": "/r.csv", "state": "/s", "epsilon": 3.0, "delta": 1e-5, "threads": 2, "client": 0},
        ),
    ],
)
def test_a_node_s_script_passes_its_configuration_on_as_flower_reads_it(
    arguments, variables, config, started, tmp_path
):
    parse_config_args = pytest.importorskip("flwr.common.config").parse_config_args
    done = started(*arguments, **variables)
    assert done.returncode == 0, done.stderr
    told = done.stdout.splitlines()
    found = parse_config_args([told[told.index("--node-config") + 1]])
    here = str(tmp_path / "f/nodes/lab")
    filled = {k: v.format(here=here) if isinstance(v, str) else v for k, v in config.items()}
    assert found == {"name": "lab", **filled}
    assert set(found) <= set(KEYS)
    assert told[told.index("--superlink") + 1] == "h:8123"


@pytest.mark.parametrize(
    "argument", ["epsilno=3.0", "epsilon", "epsilon=", "epsilon = 3.0", "epsilon=3.0 csv=b", "epsilon=x", "csv=b", "3"]
)
def test_and_refuses_what_flower_would_pass_over(argument, started):
    done = started(argument)
    assert done.returncode == 1
    assert done.stdout == ""
    told = "arguments must be client=, delta=, epsilon= or threads= and a number, such as epsilon=3.0, got "
    assert done.stderr == f"{told}'{argument}'. Correct it.\n"


def test_and_rows_from_two_places(started):
    done = started(CSV="a.csv", LOADER="wards:load")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == "rows of the node must be from CSV or LOADER, got both. Leave one out.\n"


def test_every_key_of_the_configuration_can_be_given_without_editing_the_script(experiment, tmp_path):
    assert set(KEYS) == {"name", "csv", "loader", "state", *ARGUMENTS}
    write_all(tmp_path, experiment, "h", 8123, ["lab"])
    for told in ((tmp_path / "README.txt").read_text(), (DOCS / "how-to-federate.md").read_text()):
        assert "./node.sh epsilon=3.0 delta=1e-5 threads=2" in told
        assert "LOADER=" in told


def readable(private, public):
    """As flower-supernode reads the one, and `flwr supernode register` the other."""
    from cryptography.hazmat.primitives import serialization

    key = serialization.load_ssh_private_key(private.read_bytes(), None)
    own, told = (
        one.public_numbers() for one in (key.public_key(), serialization.load_ssh_public_key(public.read_bytes()))
    )
    return own == told and own.curve.name == "secp384r1"


@pytest.mark.skipif(shutil.which("ssh-keygen") is None, reason="no ssh-keygen")
def test_a_key_made_by_the_documented_command_is_as_good_as_ours(experiment, tmp_path):
    write_all(tmp_path / "f", experiment, "h", 8000, ["ward"])
    assert readable(tmp_path / "f/nodes/ward/ward.key", tmp_path / "f/nodes/ward.pub")
    command = KEYGEN.format(name="lab")
    assert f"`{command}`" in (DOCS / "how-to-federate.md").read_text()
    assert KEYGEN.format(name="NAME") in (tmp_path / "f/README.txt").read_text()
    keyed = {"shell": True, "cwd": tmp_path, "input": b"secret\n" * 2, "start_new_session": True, "timeout": 60}
    subprocess.run(command, check=True, **keyed)  # nothing asks for what would be typed
    shutil.copy(tmp_path / "lab.key.pub", tmp_path / "f/nodes/lab.pub")
    write_all(tmp_path / "f", experiment, "h", 8000, ["lab", "ward"])
    assert not (tmp_path / "f/nodes/lab/lab.key").exists()
    assert readable(tmp_path / "lab.key", tmp_path / "f/nodes/lab.pub")
    shut = command.replace(" -N ''", "").replace("lab", "shut")
    subprocess.run(shut, check=True, **keyed)
    with pytest.raises((ValueError, TypeError)):
        readable(tmp_path / "shut.key", tmp_path / "shut.key.pub")


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


@pytest.fixture
def started_nodes(monkeypatch):
    """The nodes that a command starts, where it starts any; the run itself ends at once."""
    pytest.importorskip("flwr")
    found = []

    class Recorder:
        def __init__(self, folder, configs):
            found.extend(configs)
            raise InvalidArgument("started.")

    monkeypatch.setattr(local, "Local", Recorder)
    return found


def written(tmp_path, clients=3, split=None, engine="", algorithm="fedavg"):
    path = tmp_path / "e.toml"
    split = f'how = "iid"\nclients = {clients}\n' if split is None else split
    tables = {
        "data": 'name = "breast_cancer"',
        "split": split,
        "problem": 'name = "logistic"\nl2 = 1e-2',
        "algorithm": f'name = "{algorithm}"',
        "run": f"rounds = 2\n{engine}",
    }
    path.write_text("\n".join(f"[{name}]\n{table}" for name, table in tables.items()))
    return str(path)


@pytest.mark.parametrize("command", ["up", "run"])
def test_there_are_as_many_nodes_as_the_experiment_has_clients(command, started_nodes, tmp_path):
    assert main(["federation", command, written(tmp_path), "--folder", str(tmp_path / "f")]) == 1
    assert started_nodes == ["node-0", "node-1", "node-2"]


def test_and_four_where_nothing_says_how_many(started_nodes, tmp_path):
    assert main(["federation", "up", "--folder", str(tmp_path / "f")]) == 1
    assert started_nodes == [f"node-{i}" for i in range(4)]


SECURE = 'engine = { name = "flower", secure = true }'
REFUSED = {
    "more than are started unasked": (
        {"clients": 20},
        [],
        "[split] clients must be at most 16 without --nodes, got 20.",
    ),
    "other nodes than clients": ({}, ["--nodes", "4"], "nodes must be the 3 clients of [split], got 4. Start one for "),
    "no sum": ({"engine": SECURE, "algorithm": "fedepm"}, [], "whose server needs the sum of the uploads alone"),
    "an unknown key": ({"split": "hou = 1"}, [], "hou"),
    "an unknown column of the stop rule": ({"engine": "[stop]\ntarget = { column = 'x', value = 1 }"}, [], "column"),
    "no time": ({}, ["--hours", "0"], "--hours must be a number above 0, got 0.0."),
    "less": ({}, ["--hours", "-1"], "--hours must be a number above 0, got -1.0."),
    "no number": ({}, ["--hours", "nan"], "--hours must be a number above 0, got nan."),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_a_run_would_refuse_starts_nothing(what, started_nodes, tmp_path, capsys):
    options, arguments, sentence = REFUSED[what]
    folder = ["--folder", str(tmp_path / "f")]
    assert main(["federation", "run", written(tmp_path, **options), *arguments, *folder]) == 1
    assert sentence in capsys.readouterr().err
    assert started_nodes == []
    assert not (tmp_path / "f").exists()


def test_nor_do_files_whose_columns_differ(started_nodes, tmp_path, capsys):
    (tmp_path / "a.csv").write_text("age,ill\n1,0\n2,1\n")
    (tmp_path / "b.csv").write_text("dose,ill\n1,0\n2,1\n")
    (tmp_path / "e.toml").write_text(TEXT)
    files = [f"--csv={name}={tmp_path / name}.csv" for name in ("a", "b")]
    assert main(["federation", "run", str(tmp_path / "e.toml"), *files, "--folder", str(tmp_path / "f")]) == 1
    assert "columns must be the same at every node" in capsys.readouterr().err
    assert started_nodes == []


#: What each example needs to be told: how many nodes, where they are many or the file does not say it.
EXAMPLES = {
    **{name: ["--nodes", "20"] for name in ("breast_cancer", "breast_cancer_admm", "breast_cancer_fedavg")},
    **dict.fromkeys(("constrained", "federation", "private", "vertical"), ()),
    "hospitals": ["--nodes", "6"],
    "adult": ["--nodes", "50"],
}


@pytest.mark.parametrize("name", EXAMPLES)
def test_every_example_can_be_federated(name, started_nodes, tmp_path, capsys):
    """Up to its first round."""
    shutil.copytree(DOCS.parent / "examples", tmp_path / "examples")
    if name == "hospitals":
        subprocess.run([sys.executable, str(tmp_path / "examples" / "hospitals.py")], check=True)
    file = str(tmp_path / "examples" / f"{name}.toml")
    assert main(["federation", "run", file, *EXAMPLES[name], "--folder", str(tmp_path / "f")]) == 1
    assert "started." in capsys.readouterr().err
    clients = {"constrained": 10, "federation": 4, "private": 8, "vertical": 3, "hospitals": 6, "adult": 50}
    assert len(started_nodes) == clients.get(name, 20)


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGTERM])
def test_a_closed_terminal_ends_a_command_as_ctrl_c_does_and_once(number):
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # under nohup it is ignored, and stays so
    _ends_whole()
    with pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), number)
    os.kill(os.getpid(), signal.SIGHUP)  # a second one does not cut the end short
