"""A federation: its files (certificates, keys, the app), and on this machine its processes.

    FOLDER/ca.pem, ca.key              the authority that signs the server's certificate; its key stays with it
    FOLDER/server.pem, server.key      the SuperLink's, for its host names
    FOLDER/nodes/NAME.key, NAME.pub    each node's own key: who has no registered key cannot join (of a real
                                       federation NAME/NAME.key, in the folder that the node is sent)
    FOLDER/app/                        what `flwr run` sends: two lines of Python and the experiment's file
    FOLDER/flower/config.toml          where `flwr` finds the SuperLink
    FOLDER/bin/                        first in the nodes' PATH: messages' processes that start in a moment (`warm`)
    FOLDER/superlink.db, logs/, state/ what the processes keep
    FOLDER/.lock                       held by the process that started them

`Local` starts the SuperLink and a SuperNode for every node, on loopback, watches them, and ends them all.
"""

from __future__ import annotations

import contextlib
import datetime
import ipaddress
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from fedpact.core.errors import ClientError, InvalidArgument, require, the_extra
from fedpact.core.files import make_folder, private_folder, write_atomic
from fedpact.flower import resident, warm
from fedpact.folder import LOCK, _locked

NAME = "fedpact"
#: fedpact is installed where it runs; Flower is not to install anything, and needs no network for it.
NO_INSTALL = "--disable-runtime-dependency-installation"
#: In the environment of every process that is started here and of all that they start: how they are found again.
MARK = "FEDPACT_FEDERATION"
YEARS = 2
CONNECTION = """[superlink]
default = "fedpact"

[superlink.fedpact]
address = "{address}"
root-certificates = {authority}
"""
#: Becomes the command after its first argument, the starting process; ends when that one does, however it does (Linux).
#: By SIGKILL: at SIGTERM a SuperLink waits for its server apps, and they for it. What it started ends without it.
TIED = """import ctypes, os, sys
getattr(ctypes.CDLL(None), "prctl", lambda *_: 0)(1, 9)
if os.getppid() == int(sys.argv[1]):
    os.execv(sys.argv[2], sys.argv[2:])"""
#: Seconds until a run that was submitted must have a server app, and without one until it counts as lost.
STARTING, GONE = 30.0, 3.0
#: Server apps that may be lost one after the other without a round between them.
LOSSES = 5
#: What was lost is up again after so many seconds; until then it is tried every few.
UP, PAUSE = 15.0, 5.0
PYPROJECT = """[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"

[project]
name = "fedpact-app"
version = "1.0.0"
description = "A federation of fedpact"
license = {{ text = "Apache-2.0" }}
dependencies = []

[tool.hatch.build.targets.wheel]
packages = ["."]

[tool.flwr.app]
publisher = "fedpact"

[tool.flwr.app.components]
serverapp = "fedpact_app.server_app:app"
clientapp = "fedpact_app.client_app:app"

[tool.flwr.app.config]
experiment = {experiment}
folder = {folder}
nodes = {nodes}
wait = 600
"""


def _private_file(path: Path, content: bytes) -> None:
    write_atomic(path, content, mode=0o600)


def make_certificates(folder: Path, hosts: Sequence[str]) -> None:
    """An authority and the server's certificate for these hosts, unless they are there and still good."""
    x509 = the_extra("cryptography.x509", "flower")
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

    now = datetime.datetime.now(datetime.UTC)
    alternatives = [
        x509.IPAddress(ipaddress.ip_address(host)) if _is_address(host) else x509.DNSName(host) for host in hosts
    ]
    if (folder / "server.pem").is_file():
        _check_certificate(x509, folder, [name.value for name in alternatives], now)
        return
    pem = serialization.Encoding.PEM
    plain = (pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    named = lambda text: x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])

    def certificate(subject: str, key: Any, issuer: str, signer: Any, extensions: list[tuple[Any, bool]]) -> Any:
        made = (
            x509.CertificateBuilder()
            .subject_name(named(subject))
            .issuer_name(named(issuer))
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(minutes=5))
            .not_valid_after(now + datetime.timedelta(days=365 * YEARS))
        )
        for extension, critical in extensions:
            made = made.add_extension(extension, critical)
        return made.sign(signer, hashes.SHA256())

    authority, server = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())
    title = "fedpact federation authority"
    use = dict.fromkeys(("key_encipherment", "data_encipherment", "key_agreement", "content_commitment"), False)
    signs = x509.KeyUsage(
        digital_signature=True, key_cert_sign=True, crl_sign=True, encipher_only=False, decipher_only=False, **use
    )
    own = x509.SubjectKeyIdentifier.from_public_key(authority.public_key())
    of_authority = [(x509.BasicConstraints(ca=True, path_length=0), True), (signs, True), (own, False)]
    root = certificate(title, authority, title, authority, of_authority)
    of_server = [
        (x509.BasicConstraints(ca=False, path_length=None), True),
        (x509.SubjectAlternativeName(alternatives), False),
        (x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), False),
        (x509.AuthorityKeyIdentifier.from_issuer_public_key(authority.public_key()), False),
    ]
    leaf = certificate(hosts[0], server, title, authority, of_server)
    _private_file(folder / "ca.key", authority.private_bytes(*plain))
    _private_file(folder / "server.key", server.private_bytes(*plain))
    write_atomic(folder / "ca.pem", root.public_bytes(pem))
    write_atomic(folder / "server.pem", leaf.public_bytes(pem))


def _check_certificate(x509: Any, folder: Path, wanted: Sequence[Any], now: datetime.datetime) -> None:
    """Refuse a certificate that is there but has expired, or is for other hosts."""
    there = x509.load_pem_x509_certificate((folder / "server.pem").read_bytes())
    hint = (
        f"Delete ca.key, ca.pem, server.key and server.pem in {folder} and do this again: new ones are made. "
        "Nodes elsewhere need the new ca.pem."
    )
    until = f"{there.not_valid_after_utc:%Y-%m-%d}"
    require(now < there.not_valid_after_utc, "server.pem", "valid today", f"valid until {until}", hint=hint)
    known = [name.value for name in there.extensions.get_extension_for_class(x509.SubjectAlternativeName).value]
    hosts = lambda names: ", ".join(map(str, names))
    require(set(wanted) <= set(known), "server.pem", f"for {hosts(wanted)}", f"for {hosts(known)}", hint=hint)


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def check_name(name: str) -> None:
    """Refuse a name of a node that is no file's, or another process's."""
    ok = name and name[0] not in "-." and all(c.isalnum() or c in "-_." for c in name)
    require(ok, "name of a node", "letters, digits, - and _", name)
    require(name != "superlink", "name of a node", "another than the SuperLink's", name, hint="Call it something else.")


def make_node_key(folder: Path, name: str, private: Path | None = None) -> Path:
    """A node's key pair, unless it is there. Returns the private key's file, nodes/NAME.key unless it is given."""
    the_extra("cryptography", "flower")
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    check_name(name)
    private, public = private or folder / "nodes" / f"{name}.key", folder / "nodes" / f"{name}.pub"
    if private.is_file() and public.is_file():
        return private
    make_folder(private.parent)
    key = ec.generate_private_key(ec.SECP384R1())
    openssh = (
        serialization.Encoding.PEM,
        serialization.PrivateFormat.OpenSSH,
        serialization.NoEncryption(),
    )
    told = key.public_key().public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
    _private_file(private, key.private_bytes(*openssh))
    write_atomic(public, told + b"\n")
    return private


def write_app(folder: Path, experiment: str, run: str, nodes: int) -> Path:
    """The folder that `flwr run` sends: it names fedpact's two apps and holds the experiment's file."""
    app = folder / "app"
    make_folder(app / "fedpact_app")
    told = {"experiment": json.dumps(experiment), "folder": json.dumps(run), "nodes": nodes}
    write_atomic(app / "pyproject.toml", PYPROJECT.format(**told).encode())
    write_atomic(app / "fedpact_app" / "__init__.py", b'"""A federation of fedpact."""\n')
    text = '"""fedpact\'s own {what}."""\n\nfrom fedpact.flower.{module} import app\n\n__all__ = ["app"]\n'
    for name, module, what in (("client_app", "client", "ClientApp"), ("server_app", "serverapp", "ServerApp")):
        write_atomic(app / "fedpact_app" / f"{name}.py", text.format(module=module, what=what).encode())
    return app


def write_connection(folder: Path, address: str) -> None:
    """Where `flwr` finds the SuperLink, for FLWR_HOME=FOLDER/flower."""
    make_folder(folder / "flower")
    text = CONNECTION.format(address=address, authority=json.dumps(str((folder / "ca.pem").resolve())))
    write_atomic(folder / "flower" / "config.toml", text.encode())


def free_port() -> int:
    """A port of this machine that nobody uses now."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


def quiet_environment(folder: Path) -> dict[str, str]:
    """What Flower's processes are started with: no telemetry, no look for updates, a home of their own."""
    return {
        **os.environ,
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "FLWR_HOME": str((folder / "flower").resolve()),
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}",
        "PYTHONUNBUFFERED": "1",
    }


#: How often Flower's SuperExecs look for work, in seconds; Flower's own is 1.
SOON = {"FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.25"}


class Local:
    """SuperLink and SuperNodes on loopback. `configs` are the nodes' configurations by name; `plain` for
    processes as Flower has them, which start slowly and wait long (`warm`)."""

    def __init__(
        self,
        folder: str | Path,
        configs: Mapping[str, Mapping[str, Any]],
        port: int | None = None,
        *,
        plain: bool = False,
    ) -> None:
        the_extra("flwr", "flower")
        self.folder, self.configs = Path(folder).resolve(), dict(configs)
        for name in self.configs:
            check_name(name)
        private_folder(self.folder)
        make_folder(self.folder / "logs")
        self.port = port or free_port()
        self.address = f"127.0.0.1:{self.port}"
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.begun: dict[str, float] = {}  # when each was started
        self.returning: set[str] = set()  # started again, and not up for long yet
        self.ports = {name: free_port() for name in self.configs}
        self.lock = _locked(self.folder)
        try:
            make_certificates(self.folder, ["localhost", "127.0.0.1", "::1"])
            for name in self.configs:
                make_node_key(self.folder, name)
            write_connection(self.folder, self.address)
            self.commands = [] if plain else [warm.commands(self.folder)]
        except BaseException:
            self.lock.close()
            raise

    def __enter__(self) -> Local:
        try:
            self.start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_: Any) -> None:
        self.stop()

    # Processes

    def _launch(self, name: str, command: Sequence[str]) -> None:
        program, env = str(Path(sys.executable).parent / command[0]), quiet_environment(self.folder)
        env |= {MARK: f"{self.folder}:{name}", "PATH": os.pathsep.join([*self.commands, env["PATH"]])}
        env |= SOON if self.commands else {}
        with (self.folder / "logs" / f"{name}.log").open("ab") as log:
            self.processes[name] = subprocess.Popen(
                [sys.executable, "-S", "-c", TIED, str(os.getpid()), program, *command[1:]],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=env,
                cwd=self.folder,
                start_new_session=True,
                umask=0o077,  # what crosses is in the SuperLink's database
            )
        self.begun[name] = time.monotonic()

    def start(self) -> None:
        """Everything, and wait until it answers."""
        self.start_superlink()
        for name in self.configs:
            self.register(name)
            self.start_node(name)

    def start_superlink(self) -> None:
        """The SuperLink; returns when its port is open."""
        f = self.folder
        self._launch(
            "superlink",
            [
                "flower-superlink",
                *("--ssl-ca-certfile", str(f / "ca.pem")),
                *("--ssl-certfile", str(f / "server.pem")),
                *("--ssl-keyfile", str(f / "server.key")),
                "--enable-supernode-auth",
                *("--database", str(f / "superlink.db")),
                *("--host", "127.0.0.1", "--port", str(self.port)),
                NO_INSTALL,
            ],
        )
        self._await_port("superlink", self.port)

    def _await_port(self, name: str, port: int, seconds: float = 60.0) -> None:
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            if self.processes[name].poll() is not None:
                break
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
                return
            time.sleep(0.1)
        raise ClientError(f"{name} must start within {seconds:g} s, got none. Its log: {self.folder}/logs/{name}.log")

    def flwr(self, *arguments: str, check: bool = True, timeout: float = 120.0) -> subprocess.CompletedProcess[str]:
        """The command `flwr`, for this federation."""
        command = [str(Path(sys.executable).parent / "flwr"), *arguments]
        env = quiet_environment(self.folder)
        try:
            done = subprocess.run(command, env=env, cwd=self.folder, capture_output=True, text=True, timeout=timeout)
        except subprocess.TimeoutExpired:
            raise ClientError(
                f"flwr {' '.join(arguments[:2])} must end within {timeout:g} s, got no end. The machine is busy, or "
                f"the SuperLink does not answer; its log: {self.folder}/logs/superlink.log. Run it again."
            ) from None
        if check and done.returncode:
            told = (done.stderr or done.stdout).strip().splitlines()
            raise ClientError(f"flwr {' '.join(arguments[:2])} must succeed, got: {' '.join(told)[-500:]}")
        return done

    def register(self, name: str) -> None:
        """Let a node's key in; one that is registered already is."""
        done = self.flwr("supernode", "register", str(self.folder / "nodes" / f"{name}.pub"), NAME, check=False)
        told = done.stdout + done.stderr
        if done.returncode and "already" not in told:
            raise ClientError(f"node {name!r} must be registered, got: {told.strip()[-500:]}")

    def start_node(self, name: str, key: str | None = None) -> None:
        """A SuperNode, with its own key, state and configuration."""
        config = self._config(name)
        shown = " ".join(f"{k}={json.dumps(v)}" for k, v in config.items())
        near = [Path(sys.executable).name, "-P", "-m", warm.__name__, "--node"]
        self._launch(
            name,
            [
                *(near if self.commands else ["flower-supernode"]),
                *("--superlink", self.address),
                *("--root-certificates", str(self.folder / "ca.pem")),
                *("--auth-supernode-private-key", str(self.folder / "nodes" / f"{key or name}.key")),
                *("--host", "127.0.0.1", "--port", str(self.ports[name])),
                *("--node-config", shown),
            ],
        )

    def _config(self, name: str) -> dict[str, Any]:
        return {"name": name, "state": str(self.folder / "state" / name), **self.configs[name]}

    def submit(self, experiment: Path, run: Path) -> int:
        """Start a run of an experiment's file; returns Flower's number of it."""
        app = write_app(self.folder, str(experiment.resolve()), str(run.resolve()), len(self.configs))
        told = self.flwr("run", str(app), NAME, "--format", "json").stdout
        try:
            found = json.loads(told[told.index("{") :])
        except ValueError:
            raise ClientError(
                f"flwr run must tell the number of the run, got {told.strip()[-500:]!r}. The SuperLink's log, "
                f"{self.folder}/logs/superlink.log, may say why. Run it again."
            ) from None
        if not found.get("success", False):
            raise InvalidArgument(f"flwr run must start a run, got {found}.")
        return int(found["run-id"])

    def status(self, number: int) -> str:
        """How a run stands: its status, a colon, and how it ended."""
        try:
            told = self.flwr("list", NAME, "--run-id", str(number), "--format", "json", check=False).stdout
            runs = json.loads(told[told.index("{") :])["runs"]
        except (ValueError, KeyError, ClientError):
            return "unknown"
        return str(runs[0]["status"]) if runs else "unknown"

    def wait(self, number: int, seconds: float) -> str:
        """Until a run is over."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            status = self.status(number)
            if status.startswith("finished"):
                return status
            time.sleep(1)
        return "unfinished"

    def mend(self) -> list[str]:
        """Start again what has ended by itself; returns the names of those that were up before.

        A SuperLink knows a dead SuperNode for half a minute yet and takes no other in its place: what ends as soon
        as it is started is tried every few seconds.
        """
        now = time.monotonic()
        for name, process in self.processes.items():
            if process.poll() is None and now - self.begun[name] > UP:
                self.returning.discard(name)
        ended = [name for name, process in self.processes.items() if process.poll() is not None]
        due = [name for name in ended if name not in self.returning or now - self.begun[name] > PAUSE]
        for name in due:
            self.kill(name)
        for name in sorted(due, key=lambda name: name != "superlink"):
            if name == "superlink":
                self.start_superlink()
            else:
                self.start_node(name)
        lost = [name for name in due if name not in self.returning]
        self.returning.update(due)
        return lost

    def finish(self, experiment: Path, run: Path, seconds: float, say: Callable[[str], None]) -> None:
        """Run an experiment to its end, whatever process is lost on the way: what the folder keeps is resumed."""
        until = time.monotonic() + seconds
        failure = Path(f"{run}.error")
        failure.unlink(missing_ok=True)
        if (run / LOCK).exists():
            _locked(run).close()  # refused now if another process is running there
        result, before = run / "result.json", _stamp(run / "result.json")  # of a shorter run that is now extended
        number = self.submit(experiment, run)
        rounds, gone = -1, time.monotonic() + STARTING
        lost, at = 0, -2  # server apps lost one after the other, and after which round
        while True:
            rounds = _shown(run, rounds, say)
            serving = bool(self.processes_of("superlink", "flwr-serverapp"))
            if failure.is_file():
                raise ClientError(failure.read_text().strip())
            if result.is_file() and not serving and (_stamp(result) != before or "completed" in self.status(number)):
                return
            if time.monotonic() > until:
                raise ClientError(f"run must end within {seconds:g} s, got no end. Run it again: it is resumed.")
            for name in self.mend():
                say(f"{name} was lost and started again")
            if serving:
                gone = time.monotonic() + GONE
            elif time.monotonic() > gone:
                lost = lost + 1 if rounds == at else 1
                at = rounds
                if lost > LOSSES:
                    raise ClientError(
                        f"server app must stay for a round, got {LOSSES} that were lost after round {max(rounds, 0)}. "
                        f"Its log: {self.folder}/logs/superlink.log. Run it again: it is resumed."
                    )
                say("the server app was lost; the run is resumed")
                number = self.submit(experiment, run)
                gone = time.monotonic() + STARTING
            time.sleep(0.5)

    def processes_of(self, name: str | None = None, word: str = "") -> list[int]:
        """What runs for one of the processes started here, or for all; with `word` in its command."""
        return processes_of(self.folder, name, word)

    def kill(self, name: str) -> None:
        """kill -9 of one process and of what it started."""
        process = self.processes.pop(name, None)
        _signal(self.processes_of(name), signal.SIGKILL)
        if process is not None:
            process.wait()
        _signal(self.processes_of(name), signal.SIGKILL)  # what was being started

    def stop(self) -> None:
        """End everything: asked first, then killed."""
        for process in self.processes.values():
            process.terminate()  # not by its number, which is another's by now if it has ended
        until = time.monotonic() + 5
        for process in self.processes.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.1, until - time.monotonic()))
        for name in list(self.processes):
            self.kill(name)
        while left := self.processes_of():
            _signal(left, signal.SIGKILL)
            time.sleep(0.05)
        for name in self.configs:
            resident.forget(self._config(name))
        self.lock.close()


def _stamp(path: Path) -> int:
    return path.stat().st_mtime_ns if path.is_file() else 0


def _shown(run: Path, before: int, say: Callable[[str], None]) -> int:
    """Tell which round a run has reached, where it has gone on."""
    try:
        last = (run / "history.csv").read_text().splitlines()[-1].split(",")[0]
    except (OSError, IndexError):
        return before
    if last.isdigit() and int(last) > before:
        say(f"round {last}")
        return int(last)
    return before


def processes_of(folder: Path, name: str | None = None, word: str = "") -> list[int]:
    """What runs for the federation of this folder, or for one of its processes; with `word` in its command."""
    mark = f"{MARK}={folder}:{'' if name is None else name + chr(0)}".encode()
    found = []
    for place in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if not place.name.isdigit() or mark not in (place / "environ").read_bytes() + b"\0":
                continue
            if word.encode() in (place / "cmdline").read_bytes().replace(b"\0", b" "):
                found.append(int(place.name))
    return found


def _signal(processes: Sequence[int], number: int) -> None:
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, number)
