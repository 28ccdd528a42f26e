"""A process that has imported fedpact and forks a child for every command, so that no command pays for the imports.

It reads one JSON request a line and answers each with one line. The children are processes like any other: they can
be killed, limited and waited for. JAX's backend is started in the children only, so the fork is safe.
"""

from __future__ import annotations

import importlib
import json
import os
import resource
import signal
import sys
import time
import traceback
import warnings

MODULES = (
    "fedpact.cli",
    "fedpact.run",
    "fedpact.race",
    "fedpact.tune",
    "fedpact.verify",
    "fedpact.demo",
    "fedpact.report.html",
    "sklearn.datasets",
    "scipy.io",
    "matplotlib.backends.backend_agg",
    "matplotlib.backends.backend_svg",
)


def child(request: dict) -> int:
    os.chdir(request["cwd"])
    os.environ.update(request["env"])
    if "JAX_COMPILATION_CACHE_DIR" in request["env"]:  # which JAX has read when it was imported
        importlib.import_module("jax").config.update(
            "jax_compilation_cache_dir", request["env"]["JAX_COMPILATION_CACHE_DIR"]
        )
    for descriptor, path in ((0, os.devnull), (1, request["stdout"]), (2, request["stderr"])):
        handle = os.open(path, os.O_RDONLY if descriptor == 0 else os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        os.dup2(handle, descriptor)
        os.close(handle)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if request["file_limit"] is not None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # so that a write fails with EFBIG, as on a full disk
        resource.setrlimit(resource.RLIMIT_FSIZE, (request["file_limit"], resource.RLIM_INFINITY))
    if not request["plots"]:  # the plots are most of a short run's time
        importlib.import_module("fedpact.report.html").plots_section = lambda *_: ""
    if request["checkpoint_seconds"] is not None:
        module = importlib.import_module("fedpact.folder")
        assert module.CHECKPOINT_SECONDS > 0
        module.CHECKPOINT_SECONDS = request["checkpoint_seconds"]
    from fedpact.cli import main

    try:
        return main(request["arguments"])
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else 1
    except BaseException:
        traceback.print_exc()
        return 1


def fork(request: dict) -> dict:
    pid = os.fork()
    if pid:
        return {"pid": pid}
    code = 1
    try:
        code = child(request)
        sys.stdout.flush()
        sys.stderr.flush()
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
    finally:
        os._exit(code)


def wait(pid: int, timeout: float) -> dict:
    """The exit code (negative: the signal), or None while the child lives."""
    until = time.monotonic() + timeout
    while True:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return {"code": os.waitstatus_to_exitcode(status)}
        if time.monotonic() >= until:
            return {"code": None}
        time.sleep(0.002)


def main() -> None:
    warnings.simplefilter("ignore")
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    for module in MODULES:
        importlib.import_module(module)
    print(json.dumps({"ready": True}), file=answers)
    for line in sys.stdin:
        request = json.loads(line)
        answer = fork(request) if "arguments" in request else wait(request["pid"], request["timeout"])
        print(json.dumps(answer), file=answers)


if __name__ == "__main__":
    main()
