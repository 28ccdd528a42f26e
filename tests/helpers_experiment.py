"""A small experiment for the end-to-end tests: patients at five sites, from a CSV file; and how to read run folders."""

from __future__ import annotations

import csv
import hashlib
import json
import math
import shutil
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

SITES = ("north", "south", "east", "west", "centre")
SECONDS = ("seconds", "local_seconds")  # the columns that no two runs share


def patients(rows: int = 60) -> list[dict[str, Any]]:
    rng = np.random.default_rng(7)
    out = []
    for i in range(rows):
        age, dose, sex = rng.uniform(20, 80), rng.uniform(0, 5), rng.choice(["f", "m"])
        risk = (age - 50) / 15 - dose / 2 + 1.2 + (sex == "m") * 0.5 + rng.normal()
        row = {"id": i, "age": round(age, 1), "dose": round(dose, 2), "sex": str(sex)}
        out.append(row | {"site": SITES[i % 5], "outcome": "sick" if risk > 0 else "well"})
    return out


def write_csv(path: Path, rows: list[dict[str, Any]] | None = None) -> Path:
    rows = patients() if rows is None else rows
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)
    return path


def experiment(**changes: dict[str, Any]) -> dict[str, Any]:
    """The tables of an experiment file; `run={"rounds": 3}` changes single keys."""
    tables: dict[str, Any] = {
        "name": "patients",
        "data": {"csv": "people.csv", "target": "outcome", "drop": ["id", "site"], "categorical": ["sex"]},
        "split": {"how": "column", "column": "site", "holdout": 0.25},
        "problem": {"name": "logistic", "l2": 0.01, "intercept": True},
        "algorithm": {"name": "fedavg", "steps": 3, "step": 0.1, "batch": 4},
        "run": {"rounds": 6, "participation": 0.5},
    }
    for name, keys in changes.items():
        tables[name] = {**tables.get(name, {}), **keys}
    return tables


def private_tables(**privacy: Any) -> dict[str, Any]:
    """The tables of a private experiment; `epsilon=3.0` is a key of [privacy]."""
    tables = experiment(run={"rounds": 5, "participation": 1.0}, privacy={"clip": 1.0, **privacy})
    tables["algorithm"] = {"name": "fedepm", "k0": 3, "c": 0.0, "eta": 0.5, "mu0": 1.0}
    return tables


def toml(values: dict[str, Any]) -> str:
    def cell(value: Any) -> str:
        if isinstance(value, dict):
            return "{ " + ", ".join(f"{key} = {cell(v)}" for key, v in value.items()) + " }"
        if isinstance(value, list):
            return "[" + ", ".join(map(cell, value)) + "]"
        if isinstance(value, float) and not math.isfinite(value):
            return str(value)
        return json.dumps(value, ensure_ascii=False)

    lines = [f"{key} = {cell(value)}" for key, value in values.items() if not isinstance(value, dict)]
    for key, table in values.items():
        if isinstance(table, dict):
            lines += [f"[{key}]", *(f"{name} = {cell(value)}" for name, value in table.items())]
    return "\n".join(lines) + "\n"


def write_toml(path: Path, values: dict[str, Any]) -> Path:
    path.write_text(toml(values), encoding="utf-8")
    return path


def history_cells(folder: Path) -> list[dict[str, str]]:
    """Every row of history.csv as text, without the columns of the clock: equal text is equal bits."""
    with (folder / "history.csv").open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert all(None not in row and None not in row.values() for row in rows), "history.csv has a ragged line"
    return [{name: cell for name, cell in row.items() if name not in SECONDS} for row in rows]


def same_bits(one: Path, other: Path) -> None:
    """Two run folders hold the same history (but for the clock) and the same model, bit by bit."""
    first, second = history_cells(one), history_cells(other)
    assert len(first) == len(second)
    for a, b in zip(first, second, strict=True):
        differ = {name: (a[name], b.get(name)) for name in a if a[name] != b.get(name)}
        assert not differ, f"round {a['round']}: {differ}"
    assert (one / "model.bin").read_bytes() == (other / "model.bin").read_bytes()


def whole(folder: Path) -> None:
    """Every file of a run folder under its final name is whole. Temporary names (.….tmp) do not count."""
    from fedpact.core import checkpoint
    from fedpact.model import Model

    history = folder / "history.csv"
    for path in sorted(folder.rglob("*")):
        if path.is_dir() or path.suffix == ".tmp" or path.name == ".lock":
            continue
        if path.suffix == ".json":
            assert isinstance(json.loads(path.read_text(encoding="utf-8")), dict), path
        elif path.name.startswith("checkpoint-"):
            header = header_of(path)
            with tempfile.TemporaryDirectory() as alone:  # `load` reads the newest file: give it each by itself
                shutil.copy(path, alone)
                found = checkpoint.load(Path(alone), header["settings"])
            assert found is not None
            assert found.leaves
            text = history.read_bytes()[: found.history_bytes]
            assert len(text) == found.history_bytes, "the checkpoint speaks of rows that are not in history.csv"
            assert hashlib.sha256(text).hexdigest() == found.history_digest
            assert text.endswith(b"\n")
            assert text.count(b"\n") == found.round + 2  # the header, row 0 and a row per round
        elif path.name == "model.bin":
            Model.load(path)
        elif path.suffix == ".html":
            assert path.read_text(encoding="utf-8").rstrip().endswith("</html>"), path
        elif path.suffix == ".svg":
            assert path.read_text(encoding="utf-8").rstrip().endswith("</svg>"), path
        elif path.suffix == ".png":
            assert path.read_bytes().endswith(b"IEND\xaeB`\x82"), path
        else:
            assert path == history, f"a file of unknown kind: {path}"


def header_of(path: Path) -> dict[str, Any]:
    """The header line of a checkpoint or of a model file."""
    return json.loads(path.read_bytes().split(b"\n", 2)[1])


def tree(folder: Path) -> dict[str, bytes]:
    """Every file below a folder with its content, but for the lock."""
    files = [path for path in sorted(folder.rglob("*")) if path.is_file() and path.name != ".lock"]
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}
