"""Public datasets of the papers on ADMM and penalties, as their owners publish them."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import scipy.sparse

from fedpact.core.errors import DataError, DatasetMissing
from fedpact.data.dataset import Dataset
from fedpact.data.files import contents
from fedpact.data.tables import from_arrays

UCI = "https://archive.ics.uci.edu/ml/machine-learning-databases/"
LIBSVM = "https://www.csie.ntu.edu.tw/~cjlin/libsvmtools/datasets/binary/"
# Of the files' contents, unpacked.
QSAR_SHA256 = "c8ec16179f505370c13491a2c98e0918aae3680270aad0a6f95de3aeb300c874"
COVTYPE_MD5 = "71df19898bd3e11db15ae0faf4159f2c"
W8A_SHA256 = "6a9fa8fd5f524303240a5db07d4b3d4a51e8b7b4b20a914105d8e3e8c81640f2"


def qsar() -> Dataset:
    """QSAR oral toxicity: 8,992 molecules, 1,024 binary fingerprints, very toxic or not (UCI 508, CC BY 4.0)."""
    names = ["qsar_oral_toxicity.zip", "qsar_oral_toxicity.csv"]
    text = contents("qsar_oral_toxicity", names, QSAR_SHA256, UCI + "00508/qsar_oral_toxicity.zip").decode("ascii")
    rows = [line.split(";") for line in text.split()]
    x = scipy.sparse.csr_array(np.array([row[:-1] for row in rows], dtype=np.float64))
    y = np.array([row[-1] == "positive" for row in rows], dtype=np.float64)
    return from_arrays(x, y, classes=("negative", "positive"), name="qsar")


def covtype(scale: str = "standard") -> Dataset:
    """Covertype: 581,012 patches of forest, 54 features, lodgepole pine (class 2) or not (UCI 31, CC BY 4.0)."""
    names = ["covtype.data.xz", "covtype.data.gz", "covtype.data"]
    text = contents("covtype", names, COVTYPE_MD5, UCI + "covtype/covtype.data.gz")
    table = np.fromstring(text.replace(b"\n", b","), sep=",").reshape(-1, 55)  # type: ignore[call-overload]
    y = (table[:, -1] == 2).astype(np.float64)
    return from_arrays(table[:, :-1], y, classes=("other", "lodgepole pine"), name="covtype", scale=scale)


def w8a() -> Dataset:
    """w8a: 49,749 web pages, 300 sparse binary features, of a category or not (Platt 1998, LIBSVM's page)."""
    text = contents("w8a", ["w8a.bz2", "w8a"], W8A_SHA256, LIBSVM + "w8a").decode("ascii")
    labels, places, ends = [], [], [0]
    for line in text.splitlines():
        label, *entries = line.split()
        labels.append(float(label) > 0)
        places += [int(entry.partition(":")[0]) - 1 for entry in entries]
        ends.append(len(places))
    shape = (len(labels), 300)
    x = scipy.sparse.csr_array((np.ones(len(places)), np.array(places), np.array(ends)), shape=shape)
    return from_arrays(x, np.array(labels, dtype=np.float64), classes=("no", "yes"), name="w8a")


def santander() -> Dataset:
    """Santander customer transactions: 200,000 × 200, from the train.csv of Kaggle's competition, which you supply."""
    folders = {"$FEDPACT_DATA": os.environ.get("FEDPACT_DATA"), "$FEDPACT_CACHE": os.environ.get("FEDPACT_CACHE")}
    places = [Path(folder).expanduser() / "santander" / "train.csv" for folder in folders.values() if folder]
    found = next((path for path in places if path.is_file()), None)
    if found is None:
        looked = ", ".join(map(str, places)) or "nowhere: neither is set"
        raise DatasetMissing(
            f"train.csv of dataset 'santander' must be in santander/ under $FEDPACT_DATA or $FEDPACT_CACHE, got none "
            f"({looked}). It needs a Kaggle account: kaggle.com/c/santander-customer-transaction-prediction."
        )
    try:
        with found.open(encoding="utf-8-sig") as file:
            names, table = _numbers(found, file)
    except UnicodeDecodeError as error:
        text = f"{found} must be UTF-8 text, got byte 0x{error.object[error.start]:02x}."
        raise DataError(f"{text} Give Kaggle's train.csv.") from None
    except OSError as error:
        raise DataError(f"{found} must be a file that can be read, got: {error.strerror}.") from None
    return from_arrays(table[:, 1:], table[:, 0], names[1:], ("0", "1"), name="santander", scale="standard")


def _numbers(path: Path, lines: Iterable[str]) -> tuple[list[str], np.ndarray]:
    """The names and numbers after the first column. (Lists of 40 million cells would not fit where the table does.)"""
    lines = iter(lines)
    header = next(lines, "").rstrip().split(",")
    if header[:2] != ["ID_code", "target"] or not header[2:] or not all(h.startswith("var_") for h in header[2:]):
        raise DataError(f"{path} must start with ID_code,target,var_0,…, got {header[:3]}. Give Kaggle's train.csv.")
    rows = []
    for number, line in enumerate(lines, start=2):
        cells = line.rstrip().split(",")
        if len(cells) != len(header):
            text = f"{path}, line {number}, must be {len(header)} cells like the header, got {len(cells)}."
            raise DataError(f"{text} Correct the line.")
        try:
            rows.append(np.array(cells[1:], dtype=np.float64))
        except ValueError as error:
            text = f"{path}, line {number}, must be numbers after its first cell, got: {error}."
            raise DataError(f"{text} Correct the line.") from None
    if not rows:
        raise DataError(f"{path} must be a header line and rows, got no rows. Give Kaggle's train.csv.")
    return header[1:], np.array(rows)
