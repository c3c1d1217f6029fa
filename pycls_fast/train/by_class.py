"""Per-class accuracy and the confusion matrix of an evaluation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from pycls_fast.train.evaluation import Predictions


class Confusion(NamedTuple):
    """The C non-zero cells of a confusion matrix, row by row; C is at most the number of images.

    The dense matrix would take 80 GB for 100,000 classes.
    """

    right_C: np.ndarray
    """int64, true classes: the rows."""
    predicted_C: np.ndarray
    """int64, predicted classes: the columns."""
    images_C: np.ndarray
    """int64, at least 1."""


def confusion(predictions: Predictions, classes: int) -> Confusion:
    """Count images by true class and predicted class.

    Images without a true class or with scores that are not finite are left out; so are predictions of outputs without a
    class.
    """
    labels_N, predicted_N = predictions.labels_N, predictions.predicted_N
    counted_N = (labels_N >= 0) & (predicted_N >= 0) & (predicted_N < classes)
    cells_C, images_C = np.unique(labels_N[counted_N] * classes + predicted_N[counted_N], return_counts=True)
    return Confusion(cells_C // classes, cells_C % classes, images_C)


def class_scores(predictions: Predictions, classes: Sequence[str]) -> dict[str, Any]:
    """The values of `classes.json`.

    `class_top1` is the mean accuracy in percent over the classes that have images (balanced accuracy); `classes` has
    for each class its images, the correct ones, its accuracy (null without images), and the class that it was most
    often confused with.
    """
    count = len(classes)
    right_C, predicted_C, images_C = confusion(predictions, count)
    images_K = np.bincount(predictions.labels_N[predictions.labels_N >= 0], minlength=count)
    hit_C = right_C == predicted_C
    right_K, times_K, taken_for_K = (np.zeros(count, dtype=np.int64) for _ in range(3))
    right_K[right_C[hit_C]] = images_C[hit_C]
    # Per true class, the confusion with the most images first; ties by the lower class index.
    order = np.lexsort((predicted_C, -images_C, right_C))
    mistaken = order[~hit_C[order]]
    rows_M, first_M = np.unique(right_C[mistaken], return_index=True)
    taken_for_K[rows_M], times_K[rows_M] = predicted_C[mistaken][first_M], images_C[mistaken][first_M]
    rows: list[dict[str, Any]] = []
    for k, name in enumerate(classes):
        row: dict[str, Any] = {"class": name, "images": int(images_K[k]), "right": int(right_K[k])}
        row["top1"] = 100.0 * row["right"] / row["images"] if row["images"] else None
        row["taken_for"] = classes[taken_for_K[k]] if times_K[k] else None
        row["times"] = int(times_K[k])
        rows.append(row)
    scores = [row["top1"] for row in rows if row["top1"] is not None]
    return {"class_top1": sum(scores) / len(scores) if scores else None, "classes": rows}
