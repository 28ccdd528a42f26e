"""One round over a network: whom to ask, what to take of their answers, whom to leave out (`engines.flower`)."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from fedpact.core.errors import ClientError, InvalidArgument
from fedpact.core.wire import ANEW, Message, Refused, checked, usable

if TYPE_CHECKING:
    from fedpact.engines.flower import Away, FlowerEngine, Sum

log = logging.getLogger("fedpact")


class Answer:
    """An upload that was checked, with the version and digest of the state it left behind."""

    def __init__(self, upload: Any, notes: Any, version: int, digest: str, finite: bool) -> None:
        self.upload, self.notes, self.version, self.digest, self.finite = upload, notes, version, digest, finite


class Round:
    """One round's questions and what came of them."""

    def __init__(
        self,
        engine: FlowerEngine,
        clients: Away,
        upload: Any,
        notes: Any,
        t: int,
        sum_: Sum | None = None,
        carries: Callable[[], bool] = lambda: True,
    ) -> None:
        self.carries = carries  # whether states have anything of the rounds before
        self.engine, self.clients, self.t, self.sum = engine, clients, t, sum_
        self.shapes, self.tree = jax.tree.flatten(upload)
        self.note_shapes, self.note_tree = jax.tree.flatten(notes)
        self.came: dict[int, Answer] = {}
        self.refused: dict[int, str] = {}
        self.used: dict[int, str] = {}  # who is in `came` with the upload of an earlier round
        self.dropped: list[tuple[int, str]] = []  # late uploads that are not
        self.back: dict[int, str] = {}  # who went back to the version that counts, and from which
        self.fresh: dict[int, str] = {}  # who was asked to start again from the state of one that joins, and why

    def late(self, asked: set[int]) -> None:
        """Answers of rounds that went on without them: used where the rule says so and nobody asks them again now."""
        engine = self.engine
        for i, answer in engine.link.late():
            if engine.late == "use" and i not in asked and i not in self.came:
                if self._take(i, answer, late=True):
                    self.used[i] = after_time(answer)
                continue
            log.warning("round %d, %s: a late upload was dropped", self.t, engine.name(i))
            why = 'late = "drop"' if engine.late == "drop" else "its node has another upload in this round"
            self.dropped.append((i, after_time(answer, why)))

    def decisions(self, ids: Sequence[int]) -> dict[str, list[tuple[int, str]]]:
        """Under the column of the history that counts it, what became of the cohort `ids`: who, and why."""
        on_time, out = set(self.came) - set(self.used), self.engine._running["out"]
        known = dict.fromkeys(out, "its state was lost in an earlier round")
        known |= {} if self.sum is None else self.sum.left
        silent = lambda i: known.get(i, "no answer by the deadline")
        return {
            "missing": [(i, silent(i)) for i in ids if i not in on_time and i not in self.refused],
            "refused_uploads": list(self.refused.items()),
            "late": list(self.used.items()),
            "late_dropped": self.dropped,
            "restarted": [(i, why) for i, why in self.fresh.items() if i in on_time],
            "rolled_back": [(i, why) for i, why in self.back.items() if i in on_time],
        }

    def ask(self, ids: Sequence[int], sent: Sequence[np.ndarray], drawn: int) -> None:
        """Ask, take what is sound, and ask those again who have lost their state where the rule gives them one."""
        engine = self.engine
        enough, link = self._enough(drawn), self.sum or engine.link
        again: list[int] = []
        questions = {i: self._question(i, sent) for i in ids}
        if questions:
            least = min(enough, len(questions))
            suffice = lambda answers: sum(self._counts(i, one) for i, one in answers.items()) >= least
            answers = link.ask(questions, engine.deadline, suffice, engine.patience)
            answers = self._reminded(questions, answers)
            for i in questions:
                if i not in answers:
                    log.warning("round %d, %s: no answer by the deadline; left out", self.t, engine.name(i))
                elif self._lost(i, answers[i]):
                    again.append(i)
                else:
                    self._take(i, answers[i])
        if again:
            questions = {i: self._question(i, sent, fresh=True) for i in again}
            answers = link.ask(questions, engine.deadline, len(questions), engine.deadline)
            for i in questions:
                if i in answers:
                    self._take(i, answers[i])
                else:
                    log.warning("round %d, %s: no answer by the deadline; left out", self.t, engine.name(i))
        answered = {i: one.finite for i, one in self.came.items() if i in ids}  # late ones are no part of the quorum
        fine = sum(answered.values())
        if fine < enough and (fine or len(answered) < enough):  # where nobody's is finite, the run has diverged
            self.refused |= {i: "its upload is not finite" for i, finite in answered.items() if not finite}
            told = "; ".join(f"{engine.name(i)}: {why}" for i, why in self.refused.items())
            raise ClientError(
                f"round {self.t}: at least {enough} of {drawn} clients must answer, got {fine}. "
                f"{told.rstrip('.') + '. ' if told else ''}{self._advice(ids, drawn)}"
            )

    def _reminded(self, questions: dict[int, Message], answers: dict[int, Any]) -> dict[int, Any]:
        """The answers; those of nodes that have forgotten the run as they are once they were told of it again."""
        engine, link = self.engine, self.sum or self.engine.link
        lost = {i: questions[i] for i, answer in answers.items() if _why(answer) == ANEW}
        if not lost:
            return answers
        for i in lost:
            sentence = answers[i].values.get("sentence", "")
            log.warning("round %d, %s: %s It is told of the run again.", self.t, engine.name(i), sentence)
        engine.remind(list(lost))
        rest = {i: answer for i, answer in answers.items() if i not in lost}
        return rest | link.ask(lost, engine.deadline, len(lost), engine.deadline)

    def _advice(self, ids: Sequence[int], drawn: int) -> str:
        """What brings a round about that too few of those asked have answered."""
        engine, out = self.engine, self.engine._running["out"]
        name = lambda clients: ", ".join(map(engine.name, sorted(clients)))
        silent = set(ids) - set(self.came) - set(self.refused)
        who = f" ({name(silent)})" if silent else ""
        start = f"Start the missing nodes{who} and resume, or lower the quorum."
        if not out:
            return start
        here = drawn - len(set(ids) - out)  # of those drawn, who has lost its state
        most = math.floor(100 * (1 - here / drawn)) / 100
        quorum = f"with a quorum of at most {most:g}, or " if most > 0 else ""
        lost = (
            f"The state of {name(out)} is lost, and asking again does not bring it back: resume {quorum}with "
            'stale = "restart" where the algorithm allows it.'
        )
        return f"{lost} {start}" if silent else lost

    def _enough(self, drawn: int) -> int:
        """How many must answer, and stay in a masked sum."""
        least = 1 if self.sum is None else self.sum.least
        return max(least, math.ceil(self.engine.quorum * drawn)) if drawn else 0

    def masked(self, sound: set[int], drawn: int) -> Any:
        """In a secure run the uploads' sum, over those who stayed; the others are taken out of the round."""
        if self.sum is None:
            return None
        if not sound:  # nobody came, or nobody's is finite
            return jax.tree.unflatten(self.tree, nothing(self.shapes))
        total, stayed = self.sum.total(min(self._enough(drawn), len(sound)))
        self.refused |= {i: why for i, why in self.sum.refused.items() if i not in stayed}
        self.came = {i: self.came[i] for i in stayed}
        sound &= set(stayed)
        return jax.tree.unflatten(self.tree, total)

    def _question(self, i: int, sent: Sequence[np.ndarray], fresh: bool = False) -> Message:
        values = self.engine._told_of(self.clients, i, self.t)
        values |= {"notes": self.engine.notes}
        values |= {"version": 0, "digest": "", "fresh": True} if fresh else {}
        return Message("step", values, sent)

    def _lost(self, i: int, answer: Any) -> bool:
        """Whether the node has not the state the server knows it by; what becomes of it is the rule's."""
        if _why(answer) != "state":
            return False
        engine, name = self.engine, self.engine.name(i)
        sentence = answer.values.get("sentence", "")
        if engine.stale == "restart" or not self.carries():
            log.warning("round %d, %s: %s It starts again from the state of one that joins.", self.t, name, sentence)
            self.fresh[i] = sentence
            return True
        log.warning("round %d, %s: %s It is left out from now on.", self.t, name, sentence)
        engine._running["out"].add(i)
        return False

    def _take(self, i: int, answer: Any, late: bool = False) -> bool:
        """Check one answer and keep it; or refuse it, and say so."""
        engine = self.engine
        try:
            message = usable(answer)
            self.came[i] = self._checked(i, message, late)
        except InvalidArgument as refused:
            which = "late upload" if late else "upload"
            log.warning("round %d, %s: %s refused: %s", self.t, engine.name(i), which, refused)
            if late:
                self.dropped.append((i, str(refused)))
            else:
                self.refused[i] = str(refused)
            return False
        if late:
            log.warning("round %d, %s: a late upload was used", self.t, engine.name(i))
        else:
            self._note_back(i, message.values)
        return True

    def _note_back(self, i: int, told: Mapping[str, Any]) -> None:
        """Who had gone on from the version that the server counts says from where it went back."""
        based, had = told["based"], told.get("back")
        if isinstance(had, int) and had > based:
            self.back[i] = f"its state went back to version {based}, which the server counts, from {had}"
            log.warning("round %d, %s: %s", self.t, self.engine.name(i), self.back[i])

    def _counts(self, i: int, answer: Any) -> bool:
        """Whether an answer is one that the round can go on with: a wrong one does not make the quorum."""
        try:
            return self._arrays(i, usable(answer), late=False)[2]
        except InvalidArgument:
            return False

    def _checked(self, i: int, message: Message, late: bool) -> Answer:
        own, rest, finite = self._arrays(i, message, late)
        nothing = [np.full(s.shape, np.nan) for s in self.note_shapes]
        notes = jax.tree.unflatten(self.note_tree, rest if message.values.get("notes") else nothing)
        version, digest = message.values["version"], message.values["digest"]
        if self.sum is not None:
            return Answer(None, notes, version, digest, self.sum.add(i, message))
        return Answer(jax.tree.unflatten(self.tree, own), notes, version, digest, finite)

    def _arrays(self, i: int, message: Message, late: bool) -> tuple[list[np.ndarray], list[np.ndarray], bool]:
        """The arrays of a sound answer, upload and notes, and whether they are finite."""
        engine, who = self.engine, self.engine.name(i)
        values = message.values
        if message.kind != "step":
            raise Refused(f"answer of {who} must be a step, got {message.kind!r}.")
        if values.get("client") != i:
            raise Refused(f"answer of {who} must be its own, got one of client {values.get('client')!r}.")
        t = values.get("round")
        if not isinstance(t, int) or (t >= self.t if late else t != self.t):
            raise Refused(f"answer of {who} must be of round {self.t}, got one of round {t!r}.")
        based = 0 if i in self.fresh else self.clients.versions.get(i, 0)
        if values.get("based") != based:
            raise Refused(f"answer of {who} must go on from version {based}, got {values.get('based')!r}.")
        version, digest = values.get("version"), values.get("digest")
        if not (isinstance(version, int) and version == t + 1 and isinstance(digest, str) and digest):
            raise Refused(f"answer of {who} must tell its state's version and digest, got {version!r}, {digest!r}.")
        shapes = self.shapes if self.sum is None else []
        arrays = checked(message, [*shapes, *(self.note_shapes if values.get("notes") else ())], who)
        own, rest = arrays[: len(shapes)], arrays[len(shapes) :]
        finite = all(bool(np.isfinite(a).all()) for a in own if a.dtype.kind == "f")
        finite = finite and values.get("finite") is not False  # what a node says of an upload that it masks
        size = math.sqrt(sum(float(np.sum(np.square(a, dtype=np.float64))) for a in own if a.dtype.kind == "f"))
        if finite and size > engine.largest:
            raise Refused(f"upload of {who} must be of norm at most {engine.largest:g}, got {size:g}.")
        return own, rest, finite

    def sound(self) -> set[int]:
        """Whose uploads are finite. One that is not is refused where others are; alone, it ends the run."""
        fine = {i for i, one in self.came.items() if one.finite}
        if fine:
            for i in sorted(set(self.came) - fine):
                sentence, which = "it is not finite.", "late upload" if i in self.used else "upload"
                log.warning("round %d, %s: %s refused: %s", self.t, self.engine.name(i), which, sentence)
                if self.used.pop(i, None) is None:
                    self.refused[i] = sentence
                else:
                    self.dropped.append((i, sentence))
                del self.came[i]
        return fine


def _why(answer: Any) -> Any:
    """What an error answer calls its reason; None of any other."""
    return answer.values.get("why") if isinstance(answer, Message) and answer.kind == "error" else None


def after_time(answer: Any, why: str = "") -> str:
    """Which upload came late, by the history's number of its round, and why it does not count."""
    values = {} if isinstance(answer, Refused) else answer.values
    t = values.get("round")
    which = f"upload of round {t + 1}" if isinstance(t, int) else f"no upload: {values.get('sentence', answer)}"
    return f"{which}; {why}" if why else which


def nothing(shapes: Sequence[Any]) -> list[np.ndarray]:
    """What stands for a sum with a number that is not finite."""
    return [np.full(s.shape, np.nan if jnp.issubdtype(s.dtype, np.floating) else 0, s.dtype) for s in shapes]
