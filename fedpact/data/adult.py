"""UCI Adult (census income), prepared as in the FedEPM paper's experiments.

Rows with a '?' are dropped; those of adult.test come first, then those of adult.data. Categories are coded 0, 1, … in
alphabetical order and every column is divided by its 2-norm over all rows. y = 1 for an income above 50K. No intercept.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import numpy as np

from fedpact.data.dataset import Dataset, scaled_dataset
from fedpact.data.files import locate
from fedpact.data.schema import Column, code_rows

URL = "https://archive.ics.uci.edu/ml/machine-learning-databases/adult/"
MD5 = {  # in the order of the rows
    "adult.test": "35238206dfdf7f1fe215bbb874adecdc",
    "adult.data": "5d7c39d7b8804f071cdd1f2a7c460872",
}
KINDS: dict[str, Literal["number", "category"]] = {
    "age": "number",
    "workclass": "category",
    "fnlwgt": "number",
    "education": "category",
    "education-num": "number",
    "marital-status": "category",
    "occupation": "category",
    "relationship": "category",
    "race": "category",
    "sex": "category",
    "capital-gain": "number",
    "capital-loss": "number",
    "hours-per-week": "number",
    "native-country": "category",
}
TARGET = "income"
CLASSES = ("<=50K", ">50K")


def adult() -> Dataset:
    """UCI Adult: 45,222 people, 14 features, income above 50K or not (Becker and Kohavi 1996, CC BY 4.0)."""
    rows = [row for name, md5 in MD5.items() for row in _rows(locate("adult", name, md5, URL + name))]
    header = [*KINDS, TARGET]
    cells = dict(zip(header, zip(*rows, strict=True), strict=True))
    columns = [
        Column(name, kind, tuple(sorted(set(cells[name]))) if kind == "category" else ())
        for name, kind in KINDS.items()
    ]
    coded = code_rows(columns, header, rows, "adult", "")
    y = Column(TARGET, "category", CLASSES).code(cells[TARGET])
    raw = {name: np.array(cells[name], dtype=object) for name in header}
    raw |= {column.name: coded[:, j] for j, column in enumerate(columns) if column.kind == "number"}
    return scaled_dataset("adult", columns, coded, y, scale="norm", target=TARGET, classes=CLASSES, raw=raw)


def _rows(path: Path) -> list[list[str]]:
    lines = path.read_text(encoding="ascii").splitlines()
    # adult.test starts with a comment line, its labels end in '.', and both files end in a blank line.
    return [line.rstrip(".").split(", ") for line in lines if "," in line and "?" not in line]
