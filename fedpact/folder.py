"""A run's folder: what it leaves behind while it runs, when it is killed, and at its end.

experiment.json   the experiment file, where there was one        config.json    all that decided the numbers
environment.json  versions and machine                            history.csv    a row per round, as it grows
checkpoint-*.bin  the last two                                    model.bin, report.html, result.json   at the end
clients/          the clients' states, where the engine keeps them on the host
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax

from fedpact.core import checkpoint
from fedpact.core.driver import Resumed
from fedpact.core.environment import environment
from fedpact.core.errors import CheckpointError, DataError, FedpactError, InvalidArgument, OutputError
from fedpact.core.files import append_synced, make_folder, read_json, write_json, writing
from fedpact.core.history import History
from fedpact.core.stop import Outcome
from fedpact.model import Model, problem_name

#: Seconds of computing between two checkpoints.
CHECKPOINT_SECONDS = 5.0


def _is_new(folder: Path) -> bool:
    """Whether it is absent, or holds nothing but the temporary file of a run killed at its first write."""
    if not (folder.exists() or folder.is_symlink()):
        return True
    return folder.is_dir() and all(path.name.startswith(".") and path.suffix == ".tmp" for path in folder.iterdir())


class RunFolder:
    """A run's folder: configuration, environment, history as it grows, checkpoints, and at the end model and result.

    `source` is the experiment file as it was read, where there was one. It is written before the first round, so that
    a run killed at any moment is resumed as it was last started.
    """

    def __init__(self, folder: Path, experiment: Any, resuming: bool, source: Mapping[str, Any] | None = None) -> None:
        problem_name(experiment.problem)  # the end saves a model: refuse now what could not be saved then
        self.folder, self.settings = folder, experiment.digest()
        self.written, self.saved_at = 0, -math.inf
        self.last: tuple[Any, History, float] | None = None
        self._resumed: Resumed | None = None
        self._new, self._absent = _is_new(folder), not folder.exists()
        if not (resuming or self._new):
            raise OutputError(
                f"output folder must be new or empty, got {str(folder)!r}. Choose another name, or continue the run "
                f"in it with: fedpact resume {folder}"
            )
        make_folder(folder)
        try:
            self._begin(experiment, resuming, source)
        except FedpactError:
            self.abandon()
            raise

    def _begin(self, experiment: Any, resuming: bool, source: Mapping[str, Any] | None) -> None:
        folder = self.folder
        with writing(folder):
            for torn in folder.glob(".*.tmp"):  # of a life that was killed while writing
                torn.unlink(missing_ok=True)
        found = checkpoint.load(folder, self.settings) if resuming else None
        if found is None:
            with writing(folder):
                (folder / "history.csv").unlink(missing_ok=True)
        elif found.round > experiment.rounds:
            raise InvalidArgument(
                f"rounds must be at least {found.round}, which are done, got {experiment.rounds}. "
                "Ask for more rounds, or start a run of fewer in a new folder."
            )
        else:
            self._resume(found)
        if source is not None:
            write_json(folder / "experiment.json", source)
        write_json(folder / "config.json", experiment.config())
        write_json(folder / "environment.json", environment())

    def _resume(self, found: checkpoint.Checkpoint) -> None:
        csv = self.folder / "history.csv"
        if not csv.is_file() or csv.stat().st_size < found.history_bytes:
            raise CheckpointError(
                f"{csv} must be as long as the checkpoint says, got a shorter one. It was edited: put it back, or "
                "delete the checkpoints to start the run again."
            )
        with writing(csv), csv.open("rb+") as file:
            file.truncate(found.history_bytes)
        history = History.read(csv)
        self.written = len(history)
        states = (self.folder, found.versions)
        self._resumed = Resumed(lambda c: checkpoint.restore(c, found.leaves, states), history, found.elapsed)

    @property
    def begun(self) -> int:
        """Rounds done before this session."""
        return self._resumed.history.rounds if self._resumed else 0

    def resumed(self) -> Resumed | None:
        """Where to go on from, if anywhere."""
        return self._resumed

    def abandon(self) -> None:
        """After a failure: leave nothing of a run that never began. What was there before, or has rounds, stays."""
        if not self._new or (self.folder / "history.csv").exists():
            return
        with contextlib.suppress(OSError):  # the failure that brought us here is the one to tell
            for path in self.folder.iterdir():
                path.unlink()
            if self._absent:
                self.folder.rmdir()

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
        result.report(self.folder)
        write_json(self.folder / "result.json", record(result))  # last: its presence says that all is there


def record(run: Any) -> dict[str, Any]:
    """A finished run in plain words and numbers: what result.json holds and the command prints."""
    return {
        "name": run.name,
        "outcome": run.outcome,
        "outcome_kind": run.outcome_kind.name,
        "where": run.where,
        "summary": run.summary,
        "least": run.least,
        "metrics": run.metrics,
        "coefficients": run.coefficients,
        "notices": run.notices,
    }


def load(folder: Path, problem: Any = None) -> dict[str, Any]:
    """The fields of the `Run` that `finish` left in a folder."""
    result, config, history, model = (
        folder / name for name in ("result.json", "config.json", "history.csv", "model.bin")
    )
    missing = [path.name for path in (result, config, history, model) if not path.is_file()]
    if missing:
        raise DataError(
            f"folder must be of a finished run, got {str(folder)!r} without {', '.join(missing)}. "
            f"An unfinished one continues with: fedpact resume {folder}"
        )
    hint = "Resume the run to have it written again."
    written, settings = read_json(result, hint), read_json(config, hint)
    for path, values, keys in (
        (result, written, ("name", "outcome_kind", "where", "metrics", "notices")),
        (config, settings, ("algorithm", "data", "run")),
    ):
        absent = [key for key in keys if key not in values]
        if absent or values.get("outcome_kind", "ROUNDS") not in Outcome.__members__:
            raise CheckpointError(f"{path.name} must have {', '.join(keys)}, got a damaged file {path}. {hint}")
    return {
        "name": written["name"],
        "history": History.read(history),
        "model": Model.load(model, problem),
        "outcome_kind": Outcome[written["outcome_kind"]],
        "where": written["where"],
        "config": settings,
        "notices": written["notices"],
        "metrics": written["metrics"],
        "least": written.get("least"),
        "folder": folder,
    }


def read_experiment(folder: Path) -> dict[str, Any]:
    """The experiment file that a run of the command was last started with."""
    source = folder / "experiment.json"
    if not source.is_file():
        raise CheckpointError(
            f"folder must be of a run that 'fedpact run' started, got {str(folder)!r} without experiment.json. "
            "A run started in Python resumes with fedpact.run(…, folder=…, resume=True)."
        )
    hint = "Give the experiment file again, with a new folder: fedpact run FILE"
    values = read_json(source, hint)
    if not isinstance(values.get("run", {}), dict):
        raise CheckpointError(f"experiment.json must have a table 'run', got a damaged file {source}. {hint}")
    return values
