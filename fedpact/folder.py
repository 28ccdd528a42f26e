"""A run's folder: what it leaves behind while it runs, when it is killed, and at its end.

experiment.json   the experiment file, where there was one        config.json    all that decided the numbers
environment.json  versions and machine                            history.csv    a row per round, as it grows
checkpoint-*.bin  the last two                                    model.bin, report.html, result.json   at the end
clients/          the clients' states, where the engine keeps them on the host
place             of a federation: where the folder was when the run began; nodes know the run by it, if it is moved too
events.jsonl      of a federation: who was left out, refused or late, and why, by the rows of history.csv
ledger.*          what a private run has released (`privacy.ledger`), before it is released
.lock             held by the process that runs here; the system lets go of it however the process ends
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import math
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax

from fedpact.core import checkpoint
from fedpact.core.driver import Resumed
from fedpact.core.environment import environment
from fedpact.core.errors import CheckpointError, DataError, FolderHeld, OutputError, is_number, require
from fedpact.core.files import (
    append_synced,
    json_text,
    make_folder,
    read_json,
    remove_torn,
    write_atomic,
    write_json,
    writing,
)
from fedpact.core.history import TELEMETRY, History
from fedpact.core.stop import Outcome
from fedpact.model import Model, problem_name, trained
from fedpact.privacy.ledger import FILE, Head, Ledger

#: Seconds of computing between two checkpoints.
CHECKPOINT_SECONDS = 5.0
#: What a checkpoint may take for that. Where it takes longer (many large client states), two are further apart.
CHECKPOINT_COST = 0.25
#: What says that a run is finished; result.json first, so that nothing reads as finished that is not whole.
END = ("result.json", "report.html", "model.bin")
LOCK = ".lock"
EVENTS = "events.jsonl"
PLACE = "place"
#: How many settings are named where a run's are not those of the folder.
DIFFERENCES = 4
#: What the two files of a finished run must hold.
RESULT: dict[str, Any] = {
    "name": str,
    "outcome_kind": str,
    "where": str,
    "summary": dict,
    "metrics": (dict, type(None)),
    "notices": list,
    "tables": dict,
}
CONFIG: dict[str, Any] = {"algorithm": dict, "data": dict, "run": dict}


def _is_new(folder: Path) -> bool:
    """Whether it is absent, or holds nothing but the lock and the temporary file of a run killed at its first write."""
    if not (folder.exists() or folder.is_symlink()):
        return True
    return folder.is_dir() and not _names(folder)


def _names(folder: Path) -> set[str]:
    """What is in a folder but the lock and what was killed while it was written."""
    torn = lambda name: name.startswith(".") and name.endswith(".tmp")
    return {path.name for path in folder.iterdir() if path.name != LOCK and not torn(path.name)}


def _locked(folder: Path) -> Any:
    """The folder's lock, open and held; the same folder is refused to everyone else until it is closed."""
    with writing(folder):
        file = (folder / LOCK).open("ab")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        raise FolderHeld(
            f"output folder must be free, got {str(folder)!r}, in which another process is running. "
            "Wait for its end, or choose another folder."
        ) from None
    except OSError:  # a file system without locks
        pass
    return file


def is_run(folder: Path) -> bool:
    """Whether a run began here: its configuration says on which data, or it was killed just before it was written."""
    begun = _names(folder) == {"experiment.json"} or any(folder.glob("checkpoint-*.bin"))
    return begun or _digest_in(folder) is not None


def _config_in(folder: Path) -> dict[str, Any]:
    """The configuration of the run in a folder, or an empty one where there is none that can be read."""
    try:
        return read_json(folder / "config.json", "")
    except (CheckpointError, OSError):
        return {}


def _differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> str:
    """In which settings two configurations differ, with both values."""
    new = json.loads(json_text(new))  # as the other was written
    before, after = (dict(_flat(config)) for config in (old, new))
    names = [name for name in {**before, **after} if name != "run.rounds" and before.get(name) != after.get(name)]
    each = [f"{name} was {_shown(before.get(name))} and is {_shown(after.get(name))}" for name in names[:DIFFERENCES]]
    more = len(names) - len(each)
    return "; ".join(each) + (f"; and {more} more" if more > 0 else "") if old else ""


def _flat(values: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(values, Mapping):
        for key, value in values.items():
            yield from _flat(value, f"{name}.{key}" if name else str(key))
    else:
        yield name, values


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else text[:37] + "..."


def _digest_in(folder: Path) -> str | None:
    """The digest of the data of the run in a folder, if its configuration says it."""
    data = _config_in(folder).get("data")
    found = data.get("digest") if isinstance(data, dict) else None
    return found if isinstance(found, str) else None


def place_of(folder: Path) -> str:
    """Where a run's folder was when the run began; of one that has not, or did not write it down, where it is."""
    path = folder / PLACE
    return path.read_text(encoding="utf-8") if path.is_file() else str(folder.resolve())


def clients_in(folder: Path) -> int | None:
    """How many clients the run in a folder has, if its configuration says it."""
    data = _config_in(folder).get("data")
    return data.get("clients") if isinstance(data, dict) else None


class RunFolder:
    """A run's folder: configuration, environment, history as it grows, checkpoints, and at the end model and result.

    `source` is the experiment file as it was read, where there was one. It is written before the first round, so that
    a run killed at any moment is resumed as it was last started. Nothing of a run that is resumed is changed before its
    checkpoint is back in the loop, and its end is there until the first new block. `with` holds the folder's lock to
    its end, and leaves nothing of a run that failed before it began.
    """

    def __init__(self, folder: Path, experiment: Any, resuming: bool, source: Mapping[str, Any] | None = None) -> None:
        problem_name(trained(experiment.problem))  # the end saves a model: refuse now what could not be saved then
        self.folder, self.settings = folder, experiment.digest()
        self.written, self.saved_at, self.cost = 0, -math.inf, 0.0
        self._events = getattr(experiment.engine, "events", list)  # what the engine has decided since it was asked
        self._often = getattr(experiment.engine, "every_round", False)
        self.last: tuple[Any, History, float] | None = None
        self._resumed: Resumed | None = None
        self._text = hashlib.sha256()  # of history.csv as written
        self._absent = not folder.exists()
        self._lock: Any = None
        self._ended = resuming  # whether the end of a shorter run may be here
        self._ledger: Ledger | None = None  # of a private run
        self._seen: Head | None = None
        if resuming and folder.is_dir() and not (_is_new(folder) or is_run(folder)):
            raise _not_a_run(folder)
        if resuming or _is_new(folder) or (folder / LOCK).exists():
            make_folder(folder)
            self._lock = _locked(folder)
        self._new = _is_new(folder)  # with the lock: nobody else can have begun since
        try:
            if not (resuming or self._new):
                raise _not_new(folder)
            self._begin(experiment, resuming, source)
        except Exception:
            self.abandon()
            self.close()
            raise

    def __enter__(self) -> RunFolder:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: Any) -> None:
        if kind is not None and issubclass(kind, Exception):  # an interrupted run can be resumed
            self.abandon()
        self.close()

    def ledger(self) -> Ledger:
        """The run's privacy ledger, verified, with what the checkpoint has seen of it."""
        if self._ledger is None:
            self._ledger = Ledger(self.folder, seen=self._seen)
        return self._ledger

    def close(self) -> None:
        """Let go of the folder."""
        if self._ledger is not None:
            self._ledger.close()
        if self._lock is not None:
            self._lock.close()

    def _begin(self, experiment: Any, resuming: bool, source: Mapping[str, Any] | None) -> None:
        folder = self.folder
        differs = _differences(_config_in(folder), experiment.config()) if resuming else ""
        found = checkpoint.load(folder, self.settings, differs) if resuming else None
        if found is not None:
            hint = "Ask for more rounds, or start a run of fewer in a new folder."
            wanted = f"at least {found.round}, which are done"
            require(found.round <= experiment.rounds, "rounds", wanted, experiment.rounds, hint=hint)
            self._resume(found, experiment, source)
            return
        if resuming and _digest_in(folder) not in (None, experiment.federation.digest):
            raise CheckpointError(
                f"folder must be of a run on the same data, got {str(folder)!r} of other data. Choose a new folder."
            )
        released = (folder / FILE).is_file() and (folder / FILE).stat().st_size > 0
        if released and (differs or not _config_in(folder)):  # other numbers under the same names: paid for once only
            raise CheckpointError(
                f"a run that has released must be resumed as it was made, got {str(folder)!r} of others: "
                f"{differs or 'its config.json is gone'}. Give the settings it was made with, or choose a new folder."
            )
        self._settle(experiment, source)

    def _settle(self, experiment: Any, source: Mapping[str, Any] | None) -> None:
        """Everything was checked: the folder is this run's."""
        remove_torn(self.folder)
        if source is not None:
            write_json(self.folder / "experiment.json", source)
        write_json(self.folder / "config.json", experiment.config())
        write_json(self.folder / "environment.json", environment())
        if getattr(experiment.engine, "remote", False):
            write_atomic(self.folder / PLACE, place_of(self.folder).encode())

    def _resume(self, found: checkpoint.Checkpoint, experiment: Any, source: Mapping[str, Any] | None) -> None:
        csv = self.folder / "history.csv"
        if not csv.is_file() or csv.stat().st_size < found.history_bytes:
            raise CheckpointError(
                f"{csv} must be as long as the checkpoint says, got a shorter one. It was edited: put it back, or "
                "delete the checkpoints to start the run again."
            )
        with csv.open("rb") as rows:
            text = rows.read(found.history_bytes)
        self._text.update(text)
        self._seen = None if found.ledger is None else Head(*found.ledger)
        if found.history_digest not in ("", self._text.hexdigest()):
            raise CheckpointError(
                f"{csv} must be as the run wrote it, got one that was edited. Put it back, or delete the checkpoints "
                "to start the run again."
            )
        history = History.read(csv, text)
        self.written = len(history)

        def restore(carry: Any) -> Any:
            whole = checkpoint.restore(carry, found.leaves, (self.folder, found.versions, found.digests))
            with writing(csv), csv.open("rb+") as file:
                file.truncate(found.history_bytes)
            self._events()  # of row 0, which was measured again to learn its columns
            self._cut_events(found.round)
            self._settle(experiment, source)
            return whole

        self._resumed = Resumed(restore, history, found.elapsed)

    def _reopen(self) -> None:
        """Remove the end of a shorter run: until it is written again this one is not finished."""
        if self._ended:
            with writing(self.folder):
                for name in END if self._resumed else (*END, "history.csv", EVENTS):
                    (self.folder / name).unlink(missing_ok=True)
        self._ended = False

    def _cut_events(self, rounds: int) -> None:
        """Leave the events of these rounds: those after them are decided anew."""
        path = self.folder / EVENTS
        if path.is_file():
            lines = path.read_bytes().splitlines(keepends=True)
            write_atomic(path, b"".join(line for line in lines if _round_of(line) <= rounds))

    def _tell_events(self, events: list[dict[str, Any]], anew: bool = True) -> None:
        """Write them down; `anew` is false where a run that had ended before may have told them already."""
        lines = [f"{json.dumps(event, ensure_ascii=False)}\n" for event in events]
        path = self.folder / EVENTS
        before = set() if anew or not path.is_file() else set(path.read_text("utf-8").splitlines(keepends=True))
        text = "".join(line for line in lines if line not in before)
        if text:
            append_synced(self.folder / EVENTS, text.encode())

    @property
    def begun(self) -> int:
        """Rounds done before this session."""
        return self._resumed.history.rounds if self._resumed else 0

    def resumed(self) -> Resumed | None:
        """Where to go on from, if anywhere."""
        return self._resumed

    def abandon(self) -> None:
        """After a failure: leave nothing of a run that never began. What was there before, or has rounds, stays."""
        spent = self._ledger is not None and self._ledger.head.lines > 0
        if not self._new or spent or (self.folder / "history.csv").exists():
            return
        with contextlib.suppress(OSError):  # the failure that brought us here is the one to tell
            for path in self.folder.iterdir():
                path.unlink()
            if self._absent:
                self.folder.rmdir()

    def after_block(self, carry: Any, history: History, elapsed: float) -> None:
        """Append the new rows; save a checkpoint when the last one is old enough."""
        self._reopen()
        self._tell_events([event for event in self._events() if event["round"] <= history.rounds])
        rows = history.lines(self.written).encode()
        append_synced(self.folder / "history.csv", rows)
        self._text.update(rows)
        self.written, self.last = len(history), (carry, history, elapsed)
        pause = CHECKPOINT_SECONDS * max(1.0, self.cost / CHECKPOINT_COST)
        if self._often or elapsed - self.saved_at >= pause or self.saved_at == -math.inf:
            self.save()

    def save(self) -> None:
        """Checkpoint the last block's end."""
        if self.last is None:
            return
        begun = time.perf_counter()
        carry, history, elapsed = self.last
        size = (self.folder / "history.csv").stat().st_size
        text = self._text.hexdigest()
        head = None if self._ledger is None else self._ledger.head
        checkpoint.save(self.folder, jax.device_get(carry), self.settings, history.rounds, size, elapsed, text, head)
        self.saved_at, self.last, self.cost = elapsed, None, time.perf_counter() - begun

    def finish(self, result: Any, report: bool) -> None:
        """Save the end, the model, its report where one is asked for, and the result."""
        self._reopen()
        self._tell_events(self._events(), anew=False)  # of the last row's telemetry, and after the end
        self.save()
        if self.written == 0:
            append_synced(self.folder / "history.csv", result.history.lines().encode())
        result.model.save(self.folder / "model.bin")
        if report:
            result.report(self.folder)
        write_json(self.folder / "result.json", record(result))  # last: its presence says that all is there


def _round_of(event: bytes) -> float:
    """The round of a line of events; of one that was cut while it was written, one that never was."""
    try:
        return float(json.loads(event)["round"]) if event.endswith(b"\n") else math.inf
    except (ValueError, TypeError, LookupError):
        return math.inf


def _not_new(folder: Path) -> OutputError:
    how = "."
    if (folder / "experiment.json").is_file():
        how = f", or continue the run in it with: fedpact resume {folder}"
    elif (folder / "config.json").is_file():
        how = ", or continue the run in it with resume=True."
    got = repr(str(folder)) + ("" if folder.is_dir() else ", which is a file")
    return OutputError(f"output folder must be new or empty, got {got}. Choose another name{how}")


def _not_a_run(folder: Path) -> OutputError:
    return OutputError(
        f"output folder must be new, empty or of a run to resume, got {str(folder)!r} with other files. "
        "Choose the run's folder, or another name for a new run."
    )


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
        "tables": run.tables,
        **({} if run.privacy is None else {"privacy": run.privacy}),
    }


def _has(values: Mapping[str, Any], kinds: Mapping[str, Any]) -> bool:
    return all(isinstance(values.get(key), kind) for key, kind in kinds.items())


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
    for path, kinds, ok in (
        (result, RESULT, _has(written, RESULT) and written["outcome_kind"] in Outcome.__members__),
        (config, CONFIG, _has(settings, CONFIG) and isinstance(settings["data"].get("digest"), str)),
    ):
        if not ok:
            raise CheckpointError(f"{path.name} must have {', '.join(kinds)}, got a damaged file {path}. {hint}")
    rows = History.read(history)
    judged = {"objective", "gradient"} <= set(rows.columns) or "test_loss" in rows.columns
    if len(rows) == 0 or not (judged and {"bytes_up", "seconds"} <= set(rows.columns)):
        raise CheckpointError(f"history.csv must have its columns and a row, got a damaged file {history}. {hint}")
    last = {name: written["summary"].get(name) for name in TELEMETRY}  # see `driver`
    rows.fill({name: value for name, value in last.items() if name in rows.columns and is_number(value)})
    return {
        "name": written["name"],
        "history": rows,
        "model": Model.load(model, problem),
        "outcome_kind": Outcome[written["outcome_kind"]],
        "where": written["where"],
        "config": settings,
        "notices": written["notices"],
        "tables": written["tables"],
        "metrics": written["metrics"],
        "least": written.get("least"),
        "privacy": written.get("privacy"),
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
