"""A run's folder: what it leaves behind while it runs, when it is killed, and at its end.

experiment.json   the experiment file, where there was one        config.json    all that decided the numbers
environment.json  versions and machine                            history.csv    a row per round, as it grows
checkpoint-*.bin  the last two                                    model.bin, report.html, result.json   at the end
"""

from __future__ import annotations

import json
import math
import os
import platform
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import jax

from fedpact.core import checkpoint
from fedpact.core.driver import Resumed
from fedpact.core.errors import CheckpointError, InvalidArgument, OutputError
from fedpact.core.files import append_synced, make_folder, write_atomic, writing
from fedpact.core.history import History

#: Seconds of computing between two checkpoints.
CHECKPOINT_SECONDS = 5.0


def require_empty(folder: Path) -> None:
    """Refuse a folder that holds anything but the temporary file of a run killed at its first write."""
    if folder.is_dir() and not any(not (p.name.startswith(".") and p.suffix == ".tmp") for p in folder.iterdir()):
        return
    if folder.exists() or folder.is_symlink():
        raise OutputError(
            f"output folder must be new or empty, got {str(folder)!r}. Choose another name, or continue the run "
            f"in it with: fedpact resume {folder}"
        )


class RunFolder:
    """A run's folder: configuration, environment, history as it grows, checkpoints, and at the end model and result."""

    def __init__(self, folder: Path, experiment: Any, resuming: bool) -> None:
        self.folder, self.settings = folder, experiment.digest()
        self.written, self.saved_at = 0, -math.inf
        self.last: tuple[Any, History, float] | None = None
        self._resumed: Resumed | None = None
        if not resuming:
            require_empty(folder)
        make_folder(folder)
        for torn in folder.glob(".*.tmp"):  # of a life that was killed while writing
            torn.unlink(missing_ok=True)
        found = checkpoint.load(folder, self.settings) if resuming else None
        if found is None:
            (folder / "history.csv").unlink(missing_ok=True)
        else:
            self._resume(found)
            if found.round > experiment.rounds:
                raise InvalidArgument(
                    f"rounds must be at least {found.round}, which are done, got {experiment.rounds}."
                )
        write_atomic(folder / "config.json", json_bytes(experiment.config()))
        write_atomic(folder / "environment.json", json_bytes(environment()))

    def _resume(self, found: checkpoint.Checkpoint) -> None:
        csv = self.folder / "history.csv"
        if not csv.is_file() or csv.stat().st_size < found.history_bytes:
            raise CheckpointError(f"{csv} must be as long as the checkpoint says, got a shorter one. It was edited.")
        with writing(csv), csv.open("rb+") as file:
            file.truncate(found.history_bytes)
        history = History.read(csv)
        self.written = len(history)
        self._resumed = Resumed(lambda carry: checkpoint.restore(carry, found.leaves), history, found.elapsed)

    @property
    def begun(self) -> int:
        """Rounds done before this session."""
        return self._resumed.history.rounds if self._resumed else 0

    def resumed(self) -> Resumed | None:
        """Where to go on from, if anywhere."""
        return self._resumed

    def after_block(self, carry: Any, history: History, elapsed: float) -> None:
        """Append the new rows; save a checkpoint when the last one is old enough."""
        append_synced(self.folder / "history.csv", history.lines(self.written).encode())
        self.written, self.last = len(history), (carry, history, elapsed)
        if elapsed - self.saved_at >= CHECKPOINT_SECONDS or self.saved_at == -math.inf:
            self.save()

    def save(self) -> None:
        """Checkpoint the last block's end."""
        if self.last is None:
            return
        carry, history, elapsed = self.last
        size = (self.folder / "history.csv").stat().st_size
        checkpoint.save(self.folder, jax.device_get(carry), self.settings, history.rounds, size, elapsed)
        self.saved_at, self.last = elapsed, None

    def finish(self, result: Any) -> None:
        """Save the end, the model and the result."""
        self.save()
        if self.written == 0:
            append_synced(self.folder / "history.csv", result.history.lines().encode())
        result.model.save(self.folder / "model.bin")
        summary = {
            "name": result.name,
            "outcome": result.outcome,
            "summary": result.summary,
            "metrics": result.metrics,
            "notices": result.notices,
        }
        result.report(self.folder)
        write_atomic(self.folder / "result.json", json_bytes(summary))  # last: its presence says that all is there


def environment() -> dict[str, Any]:
    """Versions and machine, for the record."""
    packages = ("fedpact", "jax", "jaxlib", "numpy", "scipy", "scikit-learn", "matplotlib")
    return {
        "python": sys.version.split()[0],
        "platform": platform.platform(),
        "cores": os.cpu_count(),
        "packages": {name: metadata.version(name) for name in packages},
    }


def json_bytes(values: Any) -> bytes:
    """Readable JSON; numbers that are not finite become null."""

    def plain(value: Any) -> Any:
        if isinstance(value, dict):
            return {k: plain(v) for k, v in value.items()}
        if isinstance(value, (list, tuple)):
            return [plain(v) for v in value]
        return None if isinstance(value, float) and not math.isfinite(value) else value

    return (json.dumps(plain(values), indent=2, ensure_ascii=False, default=str) + "\n").encode()
