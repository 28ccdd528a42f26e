"""What happened, round by round: named columns of numbers, one row per round from 0.

    round         rounds done; row t is measured at the server's model after t rounds
    objective     (1/m) Σ f_i                          gradient      ‖(1/m) Σ ∇f_i‖²
    accuracy      share of training rows classified right, where the problem has classes
    participants  clients in the round                 bytes_up, bytes_down   cumulative, `join` included
    gradients     cumulative gradient evaluations (passes over a client's rows)
    seconds       cumulative. With timing=True the clients' and the server's steps alone; otherwise the wall time of
                  compiled blocks of rounds, telemetry included, spread evenly over each block
    local_seconds the clients' steps of this round (timing=True only)
    snr, …        what the algorithm's Notes and Info add

Cells that were not measured are NaN, and empty in the CSV file.
"""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np

from fedpact.core.errors import CheckpointError, unknown

#: What the round loop measures of every algorithm, where it is measured.
TELEMETRY = ("objective", "gradient", "accuracy", "test_loss", "test_accuracy")
WHOLE = {"round", "participants", "bytes_up", "bytes_down"}


class History:
    """Columns of numbers that grow by blocks of rows."""

    def __init__(self, columns: Iterable[str]) -> None:
        self._columns: dict[str, list[float]] = {name: [] for name in columns}

    @property
    def columns(self) -> list[str]:
        """The names of the columns."""
        return list(self._columns)

    @property
    def judged(self) -> str:
        """The column a run is judged by: the objective, or the loss on the test set where nothing else is measured."""
        return "objective" if "objective" in self._columns else "test_loss"

    @property
    def rounds(self) -> int:
        """The last round."""
        return int(self._columns["round"][-1]) if len(self) else 0

    def __repr__(self) -> str:
        return f"History({self.rounds} rounds: {', '.join(self._columns)})"

    def __len__(self) -> int:
        return len(self._columns["round"])

    def column(self, name: str) -> np.ndarray:
        """One column as an array."""
        if name not in self._columns:
            raise unknown("column", name, self._columns)
        return np.array(self._columns[name], dtype=np.float64)

    def last(self, name: str) -> float:
        """The newest measured value of a column (NaN if there is none)."""
        if name not in self._columns:
            raise unknown("column", name, self._columns)
        return next((v for v in reversed(self._columns[name]) if not math.isnan(v)), math.nan)

    def end(self, name: str) -> float:
        """The last row's value of a column, measured or not."""
        return float(self.column(name)[-1])

    def extend(self, rows: Mapping[str, np.ndarray]) -> None:
        """Append a block of rows."""
        for name, values in self._columns.items():
            values.extend(np.asarray(rows[name], dtype=np.float64).tolist())

    def fill(self, cells: Mapping[str, float]) -> None:
        """Put cells of the last row that were not measured before; as in `extend`, in the columns that there are."""
        for name, values in self._columns.items():
            values[-1] = cells.get(name, values[-1])

    def lines(self, first: int = 0) -> str:
        """Rows from `first` on as CSV text (with the header when `first` is 0)."""
        out = io.StringIO()
        writer = csv.writer(out, lineterminator="\n")
        if first == 0:
            writer.writerow(self._columns)
        for i in range(first, len(self)):
            writer.writerow([_cell(name, values[i]) for name, values in self._columns.items()])
        return out.getvalue()

    @classmethod
    def read(cls, path: Path, content: bytes | None = None) -> History:
        """Read a history.csv, or that `content` of it."""
        try:
            text = (path.read_bytes() if content is None else content).decode("utf-8")
            lines = list(csv.reader(io.StringIO(text, newline="")))
        except (UnicodeDecodeError, csv.Error) as error:
            raise _damaged(f"a table in UTF-8, got {path}: {error}") from None
        if not lines or "round" not in lines[0]:
            got = lines[0] if lines else "nothing"
            raise _damaged(f"a table with a column 'round', got {got} in {path}")
        header, *rows = lines
        history = cls(header)
        for row in rows:
            if len(row) != len(header):
                raise _damaged(f"of {len(header)} cells a line, got {len(row)} in {path}")
            for name, cell in zip(header, row, strict=True):
                try:
                    history._columns[name].append(float(cell) if cell else math.nan)
                except ValueError:
                    raise _damaged(f"of numbers, got {cell!r} in column {name!r} of {path}") from None
        return history


def _damaged(what: str) -> CheckpointError:
    return CheckpointError(f"history.csv must be {what}. Put back the file that the run wrote, or run it again.")


def _cell(name: str, value: float) -> str:
    if math.isnan(value):
        return ""
    return str(int(value)) if name in WHOLE else repr(value)
