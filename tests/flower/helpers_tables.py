"""CSV files of overlapping patients at three parties, and an experiment on what they share."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from fedpact.flower.node import Node


def written(folder: Path, labels_only: bool = False) -> dict[str, str]:
    """Three files of overlapping patients, each in an order of its own; two of them have an age."""
    rng = np.random.default_rng(5)
    sugar, iron, spent = rng.normal(size=(3, 80)).round(4)
    rows = {
        "lab": [("id", "sugar", "iron")] + [(f"pat-{i}", sugar[i], iron[i]) for i in rng.permutation(80)[:74]],
        "shop": [("id", "spent", "kind", "age")]
        + [(f"pat-{i}", spent[i], "abc"[i % 3], i % 40) for i in rng.permutation(80)],
        "ward": [("id", "age", "outcome")]
        + [(f"pat-{i}", 30 + i % 50, "sick" if sugar[i] + spent[i] > 0 else "well") for i in rng.permutation(80)[:76]],
    }
    if labels_only:
        rows["ward"] = [(row[0], row[2]) for row in rows["ward"]]
    for name, table in rows.items():
        (folder / f"{name}.csv").write_text("".join(",".join(map(str, row)) + "\n" for row in table))
    return {name: str(folder / f"{name}.csv") for name in rows}


def tables(files: dict[str, str] | None, **data: object) -> dict[str, object]:
    data = {"on": "id", "target": "outcome", "unmatched": "drop", "categorical": ["kind"], "coding": "onehot"} | data
    return {
        "data": data | ({"csv": files} if files else {}),
        "split": {"holdout": 0.2, "seed": 1},
        "problem": {"name": "logistic", "l2": 0.0, "intercept": True},
        "algorithm": {"name": "vertical_sgd", "batch": 20},
        "run": {"rounds": 5, "seed": 0} | ({} if files else {"engine": "flower"}),
    }


def nodes_of(files: dict[str, str], folder: Path) -> list[Node]:
    return [Node({"csv": path}, folder / name) for name, path in files.items()]
