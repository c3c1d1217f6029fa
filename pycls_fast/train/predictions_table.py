"""A table of an evaluation's images by their names: which are wrong, and by how much."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator

import numpy as np

from pycls_fast.data import Source
from pycls_fast.train.evaluation import Predictions

COLUMNS = ("image", "label", "class", "predicted", "predicted_class", "probability", "loss")


def predictions_csv(predictions: Predictions, source: Source) -> str:
    """The images as CSV, those with the highest loss first; images without a true class are at the end.

    `label` and `class` are the true class, empty if there is none; `probability` is the predicted class's. Scores that
    are not finite predict no class.

    Args:
        predictions: an evaluation's.
        source: the images that were evaluated.
    """
    text = io.StringIO()
    table = csv.writer(text, lineterminator="\n")
    table.writerow(COLUMNS)
    table.writerows(_rows(predictions, source))
    return text.getvalue()


def _rows(predictions: Predictions, source: Source) -> Iterator[list[object]]:
    # NaN is the worst loss. Images without a true class have the loss 0.
    losses_N = np.nan_to_num(predictions.losses_N, nan=np.inf)
    without_N = predictions.labels_N < 0
    for place in np.lexsort((-losses_N, without_N)).tolist():
        label, predicted = (int(each[place]) for each in (predictions.labels_N, predictions.predicted_N))
        yield [
            source.name(int(predictions.indices_N[place])),
            *_class(label, source),
            *_class(predicted, source),
            "" if predicted < 0 else f"{predictions.probabilities_N[place]:.6g}",
            "" if label < 0 else f"{predictions.losses_N[place]:.6g}",
        ]


def _class(label: int, source: Source) -> tuple[object, str]:
    """A class's index and name; models may have more outputs than their data has classes."""
    if label < 0:
        return "", ""
    return label, source.classes[label] if label < len(source.classes) else f"output {label}"
