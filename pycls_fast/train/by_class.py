"""Scores of each class, for images with one label and with several; which labels may be wrong."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import starmap
from typing import TYPE_CHECKING, Any

import numpy as np

from pycls_fast.data.sources.base import Images
from pycls_fast.train.evaluate import Evaluation, Predictions

if TYPE_CHECKING:
    from scipy import sparse


def confusion(predictions: Predictions, classes: int) -> sparse.csr_array:
    """Count images by true (row) and predicted class, except those without a true class or with scores that are not
    finite, and predictions of outputs that have no class. Sparse: of 100,000 classes all cells take 80 GB."""
    # It takes a sixth of a second to import.
    from scipy import sparse

    labels_N, predicted_N = predictions.labels_N, predictions.predicted_N
    counted_N = (labels_N >= 0) & (predicted_N >= 0) & (predicted_N < classes)
    places = labels_N[counted_N], predicted_N[counted_N]
    return sparse.csr_array((np.ones(len(places[0]), np.int64), places), shape=(classes, classes))


def class_scores(predictions: Predictions, classes: Sequence[str]) -> dict[str, Any]:
    """The values of `classes.json`.

    `class_top1` is the mean accuracy in percent over the classes that have images (balanced accuracy); `classes` has
    for each class its images, the correct ones, its accuracy (null without images), and the class that it was most
    often confused with; `precision` and `f1` in percent, null for a class without images (`precision` also for one that
    is never predicted). `f1` is their mean over the classes, `calibration_error` as the function.
    """
    counts_KK = confusion(predictions, len(classes))
    images_K = np.bincount(predictions.labels_N[predictions.labels_N >= 0], minlength=len(classes))
    rows = _rows(classes, images_K, counts_KK.diagonal(), counts_KK.sum(axis=0))
    cells = counts_KK.tocoo()
    # Per true class, the confusion with the most images comes last; of equal ones the lower class index.
    for place in np.lexsort((-cells.col, cells.data)).tolist():
        true, predicted = cells.row[place], cells.col[place]
        if true != predicted:
            rows[true] |= {"taken_for": classes[predicted], "times": int(cells.data[place])}
    means = {"class_top1": _mean(rows, "top1"), "f1": _mean(rows, "f1")}
    return {**means, "calibration_error": calibration_error(predictions), "classes": rows}


def set_scores(result: Evaluation, source: Images) -> dict[str, Any]:
    """The values of `classes.json` where images have several labels, all in percent.

    `map` is the mean of the classes' average precisions (the area under the curve of precision and recall), `f1` and
    `recall` those of their F1 and recall (`top1` of a class) with the classes of a probability over 0.5, without
    classes that have no images. `calibration_error` is that of the probabilities of all classes.
    None if scores are not finite.
    """
    from sklearn.metrics import average_precision_score

    true_NK, scores_NK = of_sets(result, source)
    guessed_NK, finite = scores_NK > 0, np.isfinite(scores_NK).all()
    rows = _rows(source.classes, true_NK.sum(0), (true_NK & guessed_NK).sum(0), guessed_NK.sum(0))
    for k, row in enumerate(rows):
        row["average_precision"] = None
        if not finite:
            row |= {"top1": None, "precision": None, "f1": None}
        elif row["images"]:
            row["average_precision"] = 100 * float(average_precision_score(true_NK[:, k], scores_NK[:, k]))
    names = {"recall": "top1", "map": "average_precision", "f1": "f1"}
    error = probability_error(sigmoid(scores_NK), true_NK) if finite else None
    return {name: _mean(rows, key) for name, key in names.items()} | {"calibration_error": error, "classes": rows}


def of_sets(result: Evaluation, source: Images) -> tuple[np.ndarray, np.ndarray]:
    """The classes of each image, which may have several, bool (N, K), and the scores whose sigmoids are their
    probabilities."""
    assert source.label_sets is not None
    assert result.scores_NK is not None
    true_NK = source.label_sets[source.labels[result.predictions.indices_N]].astype(bool)
    return true_NK, result.scores_NK[:, : true_NK.shape[1]]


def standard_errors(result: Evaluation, by_class: Mapping[str, Any]) -> dict[str, float]:
    """Those of `top1`, and of `class_top1` and `map` as far as the values of `classes.json` have them, in percent.

    That of an average precision is taken for that of a share of the class's images (Boyd, Eng and Page, Area under the
    Precision-Recall Curve: Point Estimates and Confidence Intervals, 2013).
    """
    # Without images that have no label.
    labelled = int((result.predictions.labels_N >= 0).sum())
    errors = {"top1_standard_error": _share_error(result.top1, labelled)} if labelled else {}
    for mean, name in (("class_top1", "top1"), ("map", "average_precision")):
        if by_class.get(mean) is not None:
            shares = [(row[name], row["images"]) for row in by_class["classes"] if row[name] is not None]
            errors[f"{mean}_standard_error"] = math.hypot(*starmap(_share_error, shares)) / len(shares)
    return errors


def _share_error(percent: float, images: int) -> float:
    """The standard error, in percent, of an accuracy in percent on so many images."""
    # One right and one wrong image more (Laplace): of few images that are all right, the error is not 0.
    share = (percent / 100 * images + 1) / (images + 2)
    return 100 * math.sqrt(share * (1 - share) / images)


def sigmoid(scores_NK: np.ndarray) -> np.ndarray:
    """Each class's own probability, float64."""
    return np.exp(-np.logaddexp(0, -scores_NK.astype(np.float64)))


def _rows(
    classes: Sequence[str], images_K: np.ndarray, right_K: np.ndarray, guessed_K: np.ndarray
) -> list[dict[str, Any]]:
    rows = []
    for name, *counts in zip(classes, images_K.tolist(), right_K.tolist(), guessed_K.tolist(), strict=True):
        images, right, guessed = map(int, counts)
        row = {"class": name, "images": images, "right": right, "top1": None, "precision": None, "f1": None}
        if images:
            row |= {"top1": 100 * right / images, "f1": 200 * right / (images + guessed)}
            row["precision"] = 100 * right / guessed if guessed else None
        rows.append(row | {"taken_for": None, "times": 0})
    return rows


def _mean(rows: Sequence[Mapping[str, Any]], name: str) -> float | None:
    values = [row[name] for row in rows if row[name] is not None]
    return sum(values) / len(values) if values else None


def roc_auc(labels_N: np.ndarray, scores_NK: np.ndarray) -> list[float | None]:
    """For each class the area under the ROC curve of its scores: the probability that an image of it has a higher one
    than an image of another class (ties count half); None if there are no images of one of both kinds, or scores that
    are not finite.
    """
    from sklearn.metrics import roc_auc_score

    scores_NK, labels_N = scores_NK[labels_N >= 0], labels_N[labels_N >= 0]
    areas: list[float | None] = []
    for k in range(scores_NK.shape[1]):
        mine_N = labels_N == k
        usable = mine_N.any() and not mine_N.all() and np.isfinite(scores_NK[:, k]).all()
        areas.append(float(roc_auc_score(mine_N, scores_NK[:, k])) if usable else None)
    return areas


def calibration_error(predictions: Predictions) -> float | None:
    """Expected calibration error of the predicted class's probability, from 0 to 1, over bins of equal width (Guo et
    al., On Calibration of Modern Neural Networks, 2017); None without images.
    """
    _, probabilities_M, right_M = judged(predictions)
    return probability_error(probabilities_M, right_M)


def judged(predictions: Predictions) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The places of the images that count for `calibration_error`; their class's probability; whether it is right."""
    rows_M = np.flatnonzero((predictions.labels_N >= 0) & (predictions.predicted_N >= 0))
    return rows_M, predictions.probabilities_N[rows_M], predictions.right[rows_M]


def probability_error(probabilities: np.ndarray, right: np.ndarray) -> float | None:
    """The `calibration_error` of probabilities that are right or not, arrays of the same shape; None without any."""
    bins_M, gaps_M = probability_gaps(probabilities, right)
    return float(np.abs(np.bincount(bins_M, gaps_M)).sum() / len(gaps_M)) if len(gaps_M) else None


# Of equal width, as in Guo et al.
_BINS = 15


def probability_gaps(probabilities: np.ndarray, right: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The bin of each probability, and its difference from 1 if the prediction is right, else from 0."""
    probabilities_M = probabilities.ravel().astype(np.float64)
    return np.minimum((probabilities_M * _BINS).astype(np.int64), _BINS - 1), probabilities_M - right.ravel()


def mistakes(predictions: Predictions, classes: int) -> np.ndarray:
    """Positions of the wrong predictions in `predictions`, int64; those whose label is most likely wrong come first.

    They are ordered by the probability of the label, relative to its mean over the images with that label: the
    self-confidence of Confident Learning (Northcutt, Jiang and Chuang, 2021), compared with each class's own threshold.
    The images must not have been trained on. Other orders: LOG.md.
    """
    labels_N, predicted_N, losses_N = predictions.labels_N, predictions.predicted_N, predictions.losses_N
    counted_N = (labels_N >= 0) & (predicted_N >= 0) & (predicted_N < classes)
    # With one label the loss is the negative logarithm of its probability.
    labels_C, own_C = labels_N[counted_N], np.exp(-losses_N[counted_N].astype(np.float64))
    images_K, own_K = (np.bincount(labels_C, each, minlength=classes) for each in (None, own_C))
    usual_K = np.maximum(own_K, np.finfo(np.float64).tiny) / np.maximum(images_K, 1)
    wrong_M = np.flatnonzero(counted_N & (labels_N != predicted_N))
    return wrong_M[np.argsort(-losses_N[wrong_M] - np.log(usual_K[labels_N[wrong_M]]), kind="stable")]


def set_mistakes(true_NK: np.ndarray, scores_NK: np.ndarray) -> np.ndarray:
    """Positions of the images with a class on the wrong side of 0.5, int64; those with the least probable label come
    first.
    """
    wrong_M = np.flatnonzero(((scores_NK > 0) != true_NK).any(axis=1))
    return wrong_M[np.argsort(np.where(true_NK, scores_NK, -scores_NK)[wrong_M].min(axis=1), kind="stable")]
