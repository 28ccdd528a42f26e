"""The small datasets that come with scikit-learn, columns standardised; they need no download."""

from __future__ import annotations

from typing import Any

import numpy as np

from fedpact.data.dataset import Dataset, scaled_dataset
from fedpact.data.schema import Column


def breast_cancer() -> Dataset:
    """Breast cancer Wisconsin: 569 tumours, 30 features, malignant (0) or benign (1)."""
    return _bundled("breast_cancer", "diagnosis")


def diabetes() -> Dataset:
    """Diabetes: 442 patients, 10 features, disease progression after a year (regression)."""
    return _bundled("diabetes", "progression", scaled=False)


def digits() -> Dataset:
    """Digits: 1,797 handwritten digits, 8 × 8 pixels, 10 classes."""
    return _bundled("digits", "digit")


def wine() -> Dataset:
    """Wine: 178 wines, 13 features, 3 cultivars."""
    return _bundled("wine", "cultivar")


def iris() -> Dataset:
    """Iris: 150 flowers, 4 features, 3 species."""
    return _bundled("iris", "species")


def _bundled(name: str, target: str, **options: Any) -> Dataset:
    from sklearn import datasets  # about a second, which `import fedpact` should not cost

    bunch = getattr(datasets, f"load_{name}")(**options)
    x, y = np.asarray(bunch.data, dtype=np.float64), np.asarray(bunch.target, dtype=np.float64)
    columns = [Column(str(feature), "number") for feature in bunch.feature_names]
    classes = [str(label) for label in bunch.get("target_names", ())]
    raw = {column.name: x[:, j] for j, column in enumerate(columns)}
    raw[target] = np.array(classes, dtype=object)[y.astype(int)] if classes else y
    return scaled_dataset(name, columns, x, y, scale="standard", target=target, classes=classes, raw=raw)
