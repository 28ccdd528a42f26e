"""One line of progress on a terminal: bar, round, objective, residual, time spent and time left."""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Callable
from typing import Self, TextIO

from fedpact.report.tables import display_width

REDRAW_SECONDS = 0.1  # between two pictures of the bar on a terminal
LINE_SECONDS = 10.0  # between two plain lines elsewhere, as in a log file


class Progress:
    """A progress bar that never stops a run: a stream that cannot be written to only switches it off.

    `enabled=None` means on when `stream` is a terminal. Switched on elsewhere (a pipe, a log file) it prints whole
    lines, seldom. `start` is the number of rounds done before, so that a resumed run estimates its time rightly.
    """

    def __init__(
        self,
        total_rounds: int,
        label: str,
        stream: TextIO | None = None,
        enabled: bool | None = None,
        *,
        start: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.total, self.label, self.start = int(total_rounds), " ".join(str(label).split()), start
        self.stream = sys.stderr if stream is None else stream
        self.terminal = bool(getattr(self.stream, "isatty", lambda: False)())
        self.enabled = self.terminal if enabled is None else enabled
        self._clock, self._began, self._drawn_at = clock, clock(), float("-inf")
        self._round: int | None = None
        self._facts: dict[str, str] = {}
        self._shown = 0
        self._encoding = getattr(self.stream, "encoding", None) or "utf-8"
        self._unicode = self._encoding.lower().startswith("utf")

    def update(
        self,
        round: int,
        objective: float | None = None,
        gradient: float | None = None,
        residual: float | None = None,
        kkt: float | None = None,
    ) -> None:
        """Note that `round` is done; redraws at most ten times a second (a plain line at most every ten seconds)."""
        self._round = round
        names = ("f", "‖∇f‖²", "‖w_i−w‖", "KKT") if self._unicode else ("f", "|grad f|^2", "|w_i-w|", "KKT")
        numbers = dict(zip(names, (objective, gradient, residual, kkt), strict=True))
        self._facts = {
            name: _short(value) for name, value in numbers.items() if value is not None and not math.isnan(value)
        }
        now = self._clock()
        if self.enabled and now - self._drawn_at >= (REDRAW_SECONDS if self.terminal else LINE_SECONDS):
            self._drawn_at = now
            self._draw(final=False)

    def close(self, message: str | None = None) -> None:
        """Draw the last state, end the line, and print `message` on a line of its own; later calls do nothing."""
        if self.enabled and self._round is not None:
            self._draw(final=True)
            if self.terminal:
                self._write("\n")
        if self.enabled and message:
            self._write(message + "\n")
        self.enabled = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _draw(self, final: bool) -> None:
        if not self.terminal:
            self._write(f"{self.label}: " + ", ".join(self._fields(final).values()) + "\n")
            return
        text = self._bar_line(self._columns() - 1, final)
        self._write("\r" + text + " " * (self._shown - display_width(text)))
        self._shown = display_width(text)

    def _fields(self, final: bool) -> dict[str, str]:
        """What there is to say, in the order shown; the keys name what a narrow terminal leaves out."""
        done, elapsed = self._round or 0, self._clock() - self._began
        fields = {"count": f"{done:,}/{self.total:,}"}
        fields |= {name: f"{name} {value}" for name, value in self._facts.items()}
        fields["elapsed"] = _duration(elapsed)
        if not final and self.start < done <= self.total:
            fields["left"] = f"{_duration(elapsed / (done - self.start) * (self.total - done))} left"
        return fields

    def _bar_line(self, width: int, final: bool) -> str:
        """The longest line that fits: what matters least goes first, and the bar takes the room that remains."""
        fields = {"label": _cut(self.label, max(8, min(28, width // 5))), **self._fields(final)}
        for name in ("", "elapsed", "‖∇f‖²", "|grad f|^2", "‖w_i−w‖", "|w_i-w|", "KKT", "label", "f", "left"):
            fields.pop(name, None)
            label, rest = fields.get("label", ""), "  ".join(v for k, v in fields.items() if k != "label")
            room = width - len(rest) - (display_width(label) + 2 if label else 0) - 4
            if room >= 8:
                break
        else:
            return rest[: max(width, 0)]
        cells = min(room, 30)
        filled = round(cells * min(max((self._round or 0) / max(self.total, 1), 0.0), 1.0))
        full, empty = ("█", "░") if self._unicode else ("#", ".")
        return (f"{label}  " if label else "") + f"[{full * filled}{empty * (cells - filled)}]  {rest}"

    def _columns(self) -> int:
        try:
            return os.get_terminal_size(self.stream.fileno()).columns or 80
        except (OSError, ValueError, AttributeError):
            return int(os.environ["COLUMNS"]) if os.environ.get("COLUMNS", "").isdigit() else 80

    def _write(self, text: str) -> None:
        try:
            self.stream.write(text.encode(self._encoding, "replace").decode(self._encoding))
            self.stream.flush()
        except (OSError, ValueError):  # a closed pipe or file
            self.enabled = False


def _short(value: float) -> str:
    return f"{float(value):.4e}" if value and not 1e-3 <= abs(value) < 1e5 else f"{float(value):.6f}"


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else text[: width - 3].rstrip() + "..."


def _duration(seconds: float) -> str:
    """0:07, 12:30, 1:02:03, 2 d 03:04:05."""
    minutes, second = divmod(int(seconds + 0.5), 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    if days:
        return f"{days} d {hour:02}:{minute:02}:{second:02}"
    return f"{hour}:{minute:02}:{second:02}" if hour else f"{minute}:{second:02}"
