"""How good a model is on rows it has not seen: per client and pooled."""

from __future__ import annotations

from typing import Any

import numpy as np
from scipy.stats import rankdata

from fedpact.core.errors import DataError

BINS = 10


def auc(labels: np.ndarray, scores: np.ndarray) -> float | None:
    """Area under the ROC curve (ties count half), or None where only one class is present."""
    positives = int(np.sum(labels > 0.5))
    negatives = len(labels) - positives
    if positives == 0 or negatives == 0:
        return None
    ranks = rankdata(scores)
    return float((ranks[labels > 0.5].sum() - positives * (positives + 1) / 2) / (positives * negatives))


def calibration_curve(labels: np.ndarray, probabilities: np.ndarray) -> dict[str, list[float]]:
    """Mean prediction and observed frequency in ten equal bins of the prediction; empty bins are left out."""
    which = np.minimum((probabilities * BINS).astype(int), BINS - 1)
    rows = np.bincount(which, minlength=BINS)
    full = rows > 0
    predicted = np.bincount(which, probabilities, BINS)[full] / rows[full]
    observed = np.bincount(which, labels, BINS)[full] / rows[full]
    return {"predicted": predicted.tolist(), "observed": observed.tolist(), "rows": rows[full].tolist()}


def calibration_error(curve: dict[str, list[float]]) -> float:
    """Expected calibration error: |predicted − observed| averaged over the rows."""
    rows = np.array(curve["rows"])
    gap = np.abs(np.array(curve["predicted"]) - np.array(curve["observed"]))
    return float(np.sum(rows * gap) / rows.sum())


def score(problem: Any, labels: np.ndarray, predictions: np.ndarray) -> dict[str, float | None]:
    """Accuracy, AUC, log loss and calibration error for classes; mean squared error and R² for numbers.

    All None where a prediction is not finite: a model that diverged has no score.
    """
    if not np.all(np.isfinite(predictions)):
        several = ("accuracy", "log_loss", "calibration_error")
        classes = several if predictions.ndim == 2 else ("accuracy", "auc", "log_loss", "calibration_error")
        return dict.fromkeys(classes if problem.classifies else ("mean_squared_error", "r_squared"))
    if not problem.classifies:
        error = float(np.mean((predictions - labels) ** 2))
        spread = float(np.var(labels))
        return {"mean_squared_error": error, "r_squared": 1 - error / spread if spread > 0 else None}
    if predictions.ndim == 2:
        return _score_classes(labels.astype(int), predictions)
    clipped = np.clip(predictions, 1e-15, 1 - 1e-15)
    return {
        "accuracy": float(np.mean((predictions > 0.5) == (labels > 0.5))),
        "auc": auc(labels, predictions),
        "log_loss": float(-np.mean(labels * np.log(clipped) + (1 - labels) * np.log1p(-clipped))),
        "calibration_error": calibration_error(calibration_curve(labels, predictions)),
    }


def _score_classes(labels: np.ndarray, probabilities: np.ndarray) -> dict[str, float | None]:
    """Accuracy, log loss, and the calibration of the class that is guessed."""
    guess = probabilities.argmax(axis=1)
    own = np.clip(probabilities[np.arange(len(labels)), labels], 1e-15, 1)
    curve = calibration_curve((guess == labels).astype(float), probabilities.max(axis=1))
    return {
        "accuracy": float(np.mean(guess == labels)),
        "log_loss": float(-np.mean(np.log(own))),
        "calibration_error": calibration_error(curve),
    }


def has_held_out(federation: Any) -> bool:
    """Whether any rows were set aside: by the split, or by the owners of the dataset."""
    return len(federation.dataset.test) > 0 or any(len(rows) for rows in federation.held_out)


def held_out(model: Any, federation: Any) -> dict[str, Any]:
    """The scores on the rows set aside by `split(holdout=…)`: pooled, per client, and the calibration curve.

    Where the dataset has a test set of its own, which no client holds, the pooled scores are on it alone.
    """
    parts = [federation.test(i) for i in range(federation.clients)]
    rows, whole = federation.dataset.test, federation.dataset
    if len(rows) and not any(len(y) for _, y in parts):
        scores = score(model.problem, whole.y[rows], model.predict(whole.x[rows]))
        return {"pooled": {"rows": len(rows), **scores}, "clients": []}
    if not any(len(y) for _, y in parts):
        raise DataError("federation must have held-out rows, got none. Split with holdout=0.2, for example.")
    guesses = [model.predict(x) for x, _ in parts]
    labels, predictions = np.concatenate([y for _, y in parts]), np.concatenate(guesses)
    clients = [
        {"name": name, "rows": len(y), **score(model.problem, y, p)}
        for name, (_, y), p in zip(federation.names, parts, guesses, strict=True)
        if len(y)
    ]
    metrics = {"pooled": {"rows": len(labels), **score(model.problem, labels, predictions)}, "clients": clients}
    if model.problem.classifies and predictions.ndim == 1 and np.all(np.isfinite(predictions)):
        metrics["calibration_curve"] = calibration_curve(labels, predictions)
    return metrics
