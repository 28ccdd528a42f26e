"""The privacy ledger: every release is a line on the disk before it leaves the process.

`ledger.jsonl` holds one JSON line per release: its number, the hash of the line before, the release, and the SHA-256 of
those three. `ledger.head` holds how many lines were synced and the last one's hash. The order of a spending is

    lines written → file synced → head written to a temporary name, synced, renamed, folder synced → the release may go

so that after a kill at any point the ledger holds at least what was sent. What is found on opening means:

    a last line without its newline, or no JSON, beyond the head's lines   torn: never released, cut off
    whole lines beyond the head's lines                                    synced, maybe not released: kept as spent
    fewer lines than the head's lines, or no head                          shortened: refused
    a line whose number, link or hash is wrong                             edited or reordered: refused, with the line

Whoever edits ledger and head together leaves no trace in the two; `Ledger(…, seen=head)` with a head that was kept
elsewhere (a run's checkpoint, another machine) finds that too.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import hashlib
import json
import math
import os
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from fedpact.core.errors import CheckpointError, FedpactError, OutputError, is_count, is_number, require, require_one_of
from fedpact.core.files import make_folder, read_json, sync_folder, write_json, writing
from fedpact.privacy.events import ADVERSARIES, UNITS, Event
from fedpact.privacy.mechanisms import PLACES

FILE, HEAD = "ledger.jsonl", "ledger.head"
START = "0" * 64
#: `who` of a release that every client's data took part in, or may have.
EVERYONE = "*"
NOT_COVERED = "no guarantee: a release does not protect this unit from this adversary"
MENDING = "Put the ledger back as the run wrote it; what it says now cannot be trusted."


@dataclass(frozen=True)
class Release:
    """One entry: who released what, when and for what, how noisy, and against whom it protects what.

    (who, round, purpose, attempt) names it. A release that is repeated bit for bit, as a resumed simulation does, is
    spent once; one repeated with fresh noise is another release and has the next `attempt`. `output` is a digest of
    what is sent, "" where the seed decides it. `times` is how many events it is made of: a round of local steps with
    noise in each has as many.
    """

    who: str
    round: int
    event: Event
    clip: float
    purpose: str = "upload"
    unit: str = "record"
    adversary: str = "server"
    place: str = "local"
    attempt: int = 0
    output: str = ""
    times: int = 1

    def __post_init__(self) -> None:
        for name in ("who", "purpose"):
            value = getattr(self, name)
            require(isinstance(value, str) and value, name, "a word", value)
        require(is_count(self.times, 1), "times", "an integer of at least 1", self.times)
        require(isinstance(self.output, str), "output", "a digest, or empty", self.output)
        for name in ("round", "attempt"):
            value = getattr(self, name)
            require(is_count(value), name, "an integer from 0 to 2³¹−1", value)
        require(isinstance(self.event, Event), "event", "an Event", self.event)
        require(is_number(self.clip) and self.clip > 0, "clip", "a positive number", self.clip, symbol="C")
        object.__setattr__(self, "clip", float(self.clip))
        require_one_of("unit", self.unit, UNITS)
        require_one_of("adversary", self.adversary, ADVERSARIES)
        require_one_of("place", self.place, PLACES)

    @property
    def key(self) -> tuple[str, int, str, int]:
        """What names it: who, round, purpose, attempt."""
        return self.who, self.round, self.purpose, self.attempt

    @property
    def scale(self) -> float:
        """σ or b as added: noise times C."""
        return self.event.noise * self.clip

    def to_dict(self) -> dict[str, Any]:
        """As a line of the ledger has it."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Release:
        """From a line of the ledger."""
        return cls(**(values | {"event": Event(**values["event"])}))


class Head(NamedTuple):
    """How far a ledger goes: its lines and the last one's hash. A checkpoint keeps it to find a shortened ledger."""

    lines: int = 0
    hash: str = START


class Claim(NamedTuple):
    """What an ε is about: which unit it hides, and from whom."""

    unit: str = "record"
    adversary: str = "server"

    def covers(self, release: Release) -> bool:
        """Whether a release has an ε of this claim: hiding a client hides its records, and whoever hides from the
        server hides from outsiders; not the other way round.
        """
        unit = release.unit in (self.unit, "client")
        return unit and release.adversary in (self.adversary, "server")


def _text(values: Any) -> str:
    return json.dumps(values, sort_keys=True, ensure_ascii=True, separators=(",", ":"), allow_nan=False)


def _hash(number: int, before: str, release: dict[str, Any]) -> str:
    return hashlib.sha256(_text([number, before, release]).encode()).hexdigest()


def _line(number: int, before: str, release: Release) -> tuple[bytes, str]:
    values = release.to_dict()
    own = _hash(number, before, values)
    return (_text({"number": number, "before": before, "release": values, "hash": own}) + "\n").encode(), own


class Ledger:
    """A ledger in a folder, or a `ledger.jsonl` itself, verified on opening.

    Opened to write, it is this process's alone until `close`, and a torn last line is cut off. `read_only` changes
    nothing on the disk. `seen` is a head that must be part of it.
    """

    def __init__(self, path: str | os.PathLike[str], *, read_only: bool = False, seen: Head | None = None) -> None:
        given = Path(path)
        self.path = given if given.suffix == ".jsonl" else given / FILE
        self.read_only, self._handle = read_only, -1
        self._clear()
        if not read_only:
            self._open()
        try:
            self._load(seen)
        except BaseException:
            self.close()
            raise

    def _clear(self) -> None:
        self.releases: list[Release] = []
        self.torn = 0  # bytes of a last line that was never whole
        self._known: dict[tuple[str, int, str, int], Release] = {}
        self._hashes: list[str] = []
        self._counts: dict[str, dict[Claim, Counter[Event]]] = {}

    def __enter__(self) -> Ledger:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    def close(self) -> None:
        """Let go of the file."""
        if self._handle >= 0:
            os.close(self._handle)
            self._handle = -1

    @property
    def head(self) -> Head:
        """How far it goes: for a checkpoint to keep."""
        return Head(len(self._hashes), self._hashes[-1] if self._hashes else START)

    def spend(self, releases: Iterable[Release]) -> int:
        """Write these releases and sync them; only after this call may they be sent. How many were new.

        One that is there already with the same content is not spent again; with other content it is refused, and
        nothing is written.
        """
        require(not self.read_only and self._handle >= 0, "ledger", "open for writing", str(self.path))
        new, lines, head = self._new(releases), [], self.head
        hashes: list[str] = []
        for release in new:
            line, own = _line(head.lines + len(hashes) + 1, hashes[-1] if hashes else head.hash, release)
            lines.append(line)
            hashes.append(own)
        if not new:
            return 0
        try:
            with writing(self.path.parent):
                _write_all(self._handle, b"".join(lines))
                os.fsync(self._handle)
            self._write_head(Head(head.lines + len(hashes), hashes[-1]))
        except BaseException:
            self.close()  # how much of it is on the disk is not known: open it again to find out
            raise
        for release, own in zip(new, hashes, strict=True):
            self._take(release, own)
        return len(new)

    def _new(self, releases: Iterable[Release]) -> list[Release]:
        found: dict[tuple[str, int, str, int], Release] = {}
        for release in releases:
            relation = self.relation or next(iter(found.values()), release).event.relation
            hint = "The ε of a ledger is about one kind of neighbours."
            require(release.event.relation == relation, "relation", relation, release.event.relation, hint=hint)
            known = self._known.get(release.key) or found.get(release.key)
            if known is None:
                found[release.key] = release
            elif known != release:
                who, number, purpose, attempt = release.key
                raise CheckpointError(
                    f"a release must be the one in the ledger, got another for {who!r}, round {number}, {purpose!r}, "
                    f"attempt {attempt}. Resume with the settings it was made with, or spend it as the next attempt."
                )
        return list(found.values())

    def _open(self) -> None:
        make_folder(self.path.parent)
        with writing(self.path.parent):
            self._handle = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
            try:
                fcntl.flock(self._handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                self.close()
                raise OutputError(
                    f"ledger must be free, got {str(self.path)!r}, which another process has open. Wait for its end."
                ) from None
            except OSError:  # a file system without locks
                pass
            sync_folder(self.path.parent)

    def _load(self, seen: Head | None) -> None:
        content = self.path.read_bytes() if self.path.is_file() else b""
        head = _read_head(self.path.with_name(HEAD)) if self.path.with_name(HEAD).is_file() else None
        if head is None and (content or self.read_only):
            if not self.path.is_file():
                raise CheckpointError(f"{FILE} must be that of a private run, got none at {self.path}. Check the path.")
            raise CheckpointError(f"ledger must be whole, got {self.path} without its {HEAD}. {MENDING}")
        if head is None:
            head = Head()
            self._write_head(head)  # before the first line: lines without a head were shortened
        whole = self._read_lines(content, head.lines)
        for mark, name in ((head, HEAD), (seen, "the checkpoint")):
            if mark is not None:
                self._require_mark(mark, name)
        self.torn = len(content) - whole
        if self._handle >= 0 and self.torn:
            with writing(self.path.parent):
                os.ftruncate(self._handle, whole)
                os.fsync(self._handle)
        if self._handle >= 0 and self.head != head:
            self._write_head(self.head)

    def _read_lines(self, content: bytes, synced: int) -> int:
        """Take the lines in; how many bytes of the file they are. Only after `synced` lines may one be torn."""
        end = 0
        for raw in content.splitlines(keepends=True):
            number = len(self._hashes) + 1
            values = _parsed(raw)
            if values is None:
                if number > synced:
                    return end
                raise _edited(self.path, number, "no line of a ledger")
            before = self.head.hash
            if values.get("number") != number or values.get("before") != before:
                raise _edited(self.path, number, "one that does not follow the line before")
            if values.get("hash") != _hash(number, before, values["release"]):
                raise _edited(self.path, number, "one that does not match its hash")
            try:
                release = Release.from_dict(values["release"])
            except (FedpactError, TypeError, KeyError):
                raise _edited(self.path, number, "one that is no release of this version") from None
            if release.key in self._known:
                raise _edited(self.path, number, "a release that an earlier line has")
            self._take(release, values["hash"])
            end += len(raw)
        return end

    def _require_mark(self, mark: Head, name: str) -> None:
        if self.head.lines < mark.lines:
            raise CheckpointError(
                f"ledger must have the {mark.lines} lines that {name} says, got {self.head.lines} in {self.path}: "
                f"line {self.head.lines + 1} is gone. {MENDING}"
            )
        if mark.lines and self._hashes[mark.lines - 1] != mark.hash:
            raise _edited(self.path, mark.lines, f"another than {name} says")

    def _write_head(self, head: Head) -> None:
        write_json(self.path.with_name(HEAD), head._asdict())

    def _take(self, release: Release, own: str) -> None:
        self._known[release.key] = release
        self.releases.append(release)
        self._hashes.append(own)
        kinds = self._counts.setdefault(release.who, {}).setdefault(Claim(release.unit, release.adversary), Counter())
        kinds[release.event] += release.times

    # What it cost

    def holds(self, release: Release) -> bool:
        """Whether this very release is in it."""
        return self._known.get(release.key) == release

    def claims(self) -> list[Claim]:
        """The kinds of ε that its releases state."""
        return sorted({claim for kinds in self._counts.values() for claim in kinds})

    def clients(self) -> list[str]:
        """Who released; `EVERYONE` only where nobody is named."""
        return sorted(set(self._counts) - {EVERYONE}) or sorted(self._counts)

    def events(self, who: str, claim: Claim) -> Counter[Event] | None:
        """The releases about a client by kind, everyone's included; None where the claim does not cover one of them."""
        found: Counter[Event] = Counter()
        for name in dict.fromkeys((who, EVERYONE)):
            for stated, kinds in self._counts.get(name, {}).items():
                if stated.unit not in (claim.unit, "client") or stated.adversary not in (claim.adversary, "server"):
                    return None
                found += kinds
        return found

    def epsilon(self, delta: float) -> list[dict[str, Any]]:
        """ε at δ per claim and client, the worst client of each claim first; infinite where a release has no such ε."""
        from fedpact.privacy.accounting import epsilon

        rows: list[dict[str, Any]] = []
        for claim in self.claims():
            own = []
            for who in self.clients():
                counts = self.events(who, claim)
                value, method = (math.inf, NOT_COVERED) if counts is None else epsilon(counts, delta)[::2]
                releases = sum(k.total() for n in {who, EVERYONE} for k in self._counts.get(n, {}).values())
                cost = {"client": who, "releases": releases, "epsilon": value, "method": method}
                own.append(claim._asdict() | {"relation": self.relation} | cost)
            rows += sorted(own, key=lambda row: -row["epsilon"])
        return rows

    @property
    def relation(self) -> str | None:
        """The neighbouring relation, which all releases of a ledger share."""
        return self.releases[0].event.relation if self.releases else None


class Unwritten(Ledger):
    """The ledger of a run without a folder: the same account, with nothing on the disk."""

    def __init__(self) -> None:
        self.path, self.read_only, self._handle = Path(FILE), False, -1
        self._clear()

    def spend(self, releases: Iterable[Release]) -> int:
        """Take these releases in. How many were new."""
        new = self._new(releases)
        for release in new:
            before = self.head
            self._take(release, _hash(before.lines + 1, before.hash, release.to_dict()))
        return len(new)


def worst(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The worst client of each claim, from the rows of `Ledger.epsilon`."""
    found: dict[Claim, dict[str, Any]] = {}
    for row in rows:
        found.setdefault(Claim(row["unit"], row["adversary"]), row)
    return list(found.values())


def _write_all(handle: int, content: bytes) -> None:
    while content:
        content = content[os.write(handle, content) :]


def _parsed(raw: bytes) -> dict[str, Any] | None:
    if not raw.endswith(b"\n"):
        return None
    with contextlib.suppress(ValueError, RecursionError):
        values = json.loads(raw)
        if isinstance(values, dict) and isinstance(values.get("release"), dict):
            return values
    return None


def _read_head(path: Path) -> Head:
    values = read_json(path, MENDING)
    lines, own = values.get("lines"), values.get("hash")
    if not isinstance(lines, int) or not is_count(lines) or not isinstance(own, str):
        raise CheckpointError(f"{HEAD} must have lines and hash, got a damaged file {path}. {MENDING}")
    return Head(lines, own)


def _edited(path: Path, number: int, what: str) -> CheckpointError:
    return CheckpointError(f"line {number} of the ledger must be as it was written, got {what} in {path}. {MENDING}")
