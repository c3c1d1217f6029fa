"""What became of each class in an evaluation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from pycls_fast.train.evaluation import Predictions


def confusion(predictions: Predictions, classes: int) -> np.ndarray:
    """Images by right class (rows) and predicted class (columns), int64 (K, K).

    Images without a right class, or with a score that is no number, are left out; so are predictions of outputs that
    stand for no class.
    """
    labels_N, predicted_N = predictions.labels_N, predictions.predicted_N
    counted_N = (labels_N >= 0) & (predicted_N >= 0) & (predicted_N < classes)
    cells_N = labels_N[counted_N] * classes + predicted_N[counted_N]
    return np.bincount(cells_N, minlength=classes * classes).reshape(classes, classes)


def class_scores(predictions: Predictions, classes: Sequence[str]) -> dict[str, Any]:
    """The values of `classes.json`.

    `class_top1` is the mean over the classes of their accuracy in percent (balanced accuracy), of those that have
    images; `classes` has for each its images, the right ones, its accuracy (null without images), and the other class
    that it was taken for most often.
    """
    count = len(classes)
    counts_KK = confusion(predictions, count)
    images_K = np.bincount(predictions.labels_N[predictions.labels_N >= 0], minlength=count)
    right_K = counts_KK.diagonal()
    wrong_KK = counts_KK - np.diag(right_K)
    rows: list[dict[str, Any]] = []
    for k, name in enumerate(classes):
        row: dict[str, Any] = {"class": name, "images": int(images_K[k]), "right": int(right_K[k])}
        row["top1"] = 100.0 * row["right"] / row["images"] if row["images"] else None
        taken_for = int(wrong_KK[k].argmax())
        row["taken_for"] = classes[taken_for] if wrong_KK[k, taken_for] else None
        row["times"] = int(wrong_KK[k, taken_for])
        rows.append(row)
    scores = [row["top1"] for row in rows if row["top1"] is not None]
    return {"class_top1": sum(scores) / len(scores) if scores else None, "classes": rows}
