"""A process that runs a small private experiment in a folder and is killed (SIGKILL) at a point of its own choosing.

One line of JSON on stdin per life: {"folder", "engine", "point", "round", "rounds"}; it is answered with the pid, and
with the exit code when the life has ended. Each life is a fork: the imports are paid once, JAX's backend is its own.
What a life sends is appended to `sent` beside the folder, and synced: round, client, and the digest of the upload.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import os
import signal
import sys
import warnings
from pathlib import Path

import numpy as np

import fedpact as fp
import fedpact.run
from fedpact.core import checkpoint
from fedpact.core.loop import Loop
from fedpact.privacy import ledger
from fedpact.privacy.account import Account
from fedpact.privacy.ledger import Ledger
from fedpact.privacy.private import Private

SIZES, FEATURES = (5, 8, 6), 3
PRIVATE = Private(clip=0.5, noise=6.0, way="convex", reach=1.0)


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def federation():
    rng = np.random.default_rng(1)
    clients = [(rng.normal(size=(d, FEATURES)), np.arange(d) % 2.0) for d in SIZES]
    return fp.data.Federation.from_arrays(clients, classes=("0", "1"))


def wrapped(place, name, before=None, after=None):
    """Replace place.name by itself with something before or after it, which sees its arguments (and its value)."""
    real = getattr(place, name)

    def call(*args, **options):
        if before is not None:
            before(*args, **options)
        value = real(*args, **options)
        if after is not None:
            after(value, *args, **options)
        return value

    setattr(place, name, call)


def record_what_is_sent(path: Path, engine: str) -> None:
    handle = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)

    def write(t, ids, mask, uploads):
        rows = [(int(i), np.asarray(row).tobytes()) for i, row, real in zip(ids, uploads, mask, strict=True) if real]
        lines = [f"{int(t)} {i} {hashlib.sha256(content).hexdigest()}\n" for i, content in rows]
        os.write(handle, "".join(lines).encode())
        os.fsync(handle)

    def sent(stepped, loop, server, clients, data, cohort, t, root):
        from jax.experimental import io_callback

        (y,) = stepped.uploads.y.tree.values()
        told = (t, loop.engine.clients_of(data)[stepped.cohort.positions], stepped.cohort.mask, y)
        if engine == "debug":
            write(*told)
        else:
            io_callback(write, None, *told, ordered=True)

    wrapped(Loop, "client_stage", after=sent)


def arm(point: str, number: int) -> None:
    """Die at this point of the round."""
    armed = [False]  # whether the spending is that of the round

    def at(ok):
        if ok:
            die()

    covers = lambda first, steps: first <= number < first + steps
    if point in ("written", "synced", "headed"):
        wrapped(Account, "spend", before=lambda _, first, steps: armed.__setitem__(0, covers(first, steps)))
    if point == "before spending":
        wrapped(Account, "spend", before=lambda _, first, steps: at(covers(first, steps)))
    elif point == "after spending":
        wrapped(Account, "spend", after=lambda _, account, first, steps: at(covers(first, steps)))
    elif point == "written":  # not synced
        wrapped(ledger, "_write_all", after=lambda *_: at(armed[0]))
    elif point == "synced":  # no head
        wrapped(Ledger, "_write_head", before=lambda *_: at(armed[0]))
    elif point == "headed":
        wrapped(Ledger, "_write_head", after=lambda *_: at(armed[0]))
    elif point == "clients stepped":
        wrapped(Loop, "client_stage", after=lambda _, *args: at(int(args[5]) == number))
    elif point == "server stepped":
        wrapped(Loop, "server_stage", after=lambda _, *args: at(int(args[4]) == number))
    elif point in ("before history", "after history"):
        folder = importlib.import_module("fedpact.folder")
        wrapped(folder.RunFolder, "after_block", before=lambda *args: armed.__setitem__(0, args[2].rounds > number))
        hook = {point.split()[0]: lambda *_: at(armed[0])}
        wrapped(folder, "append_synced", **hook)
    elif point == "before checkpoint":
        wrapped(checkpoint, "save", before=lambda *args: at(args[3] > number))
    elif point == "after checkpoint":
        wrapped(checkpoint, "save", after=lambda _, *args: at(args[3] > number))
    else:
        assert point == "never", point


def share_compiled_programs() -> None:
    """Keep the smallest too: engine `debug` compiles every operation, and every life would do so again."""
    import jax

    importlib.import_module("fedpact.definition").use_compilation_cache()
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def live(request: dict) -> None:
    folder = Path(request["folder"])
    share_compiled_programs()
    importlib.import_module("fedpact.folder").CHECKPOINT_SECONDS = request.get("checkpoint_seconds", 0.0)
    importlib.import_module("fedpact.report.html").plots_section = lambda *_: ""
    record_what_is_sent(folder.with_name("sent"), request["engine"])
    arm(request["point"], request["round"])
    settings = fp.FedPDM(rho=2.0, rate=0.2, steps=2, memory=True)  # which few operations do: `debug` is slow
    options = {"rounds": request["rounds"], "participation": 0.6, "engine": request["engine"], "privacy": PRIVATE}
    fp.run(settings, fp.Logistic(l2=0.1), federation(), folder=folder, resume=folder.exists(), **options)


def main() -> None:
    warnings.simplefilter("ignore")
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    print(json.dumps({"ready": True}), file=answers)
    for line in sys.stdin:
        request = json.loads(line)
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                live(request)
                code = 0
            except BaseException:
                import traceback

                traceback.print_exc()
            finally:
                os._exit(code)
        print(json.dumps({"pid": pid}), file=answers)
        _, status = os.waitpid(pid, 0)
        print(json.dumps({"code": os.waitstatus_to_exitcode(status)}), file=answers)


if __name__ == "__main__":
    main()
