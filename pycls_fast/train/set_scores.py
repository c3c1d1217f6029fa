"""Scores where images have several labels."""

from __future__ import annotations

from typing import Any

import numpy as np

from pycls_fast.data.sources.base import Images
from pycls_fast.train.evaluate import Evaluation


def set_scores(result: Evaluation, source: Images) -> dict[str, Any]:
    """The values of `classes.json` where images have several labels, all in percent.

    `map` is the mean of the classes' average precisions (the area under the curve of precision and recall), `f1` that
    of their F1 with the classes of a probability over 0.5, without classes that have no images. `top1` of a class
    is its recall there, and `class_top1` the mean. None if scores are not finite.
    """
    from sklearn.metrics import average_precision_score, precision_recall_fscore_support

    assert source.label_sets is not None
    assert result.scores_NK is not None
    true_NK = source.label_sets[source.labels[result.predictions.indices_N]]
    scores_NK = result.scores_NK[:, : true_NK.shape[1]]
    finite = np.isfinite(scores_NK).all()
    columns = precision_recall_fscore_support(true_NK, scores_NK > 0, average=None, zero_division=0)
    rows: list[dict[str, Any]] = []
    for k, (name, precision, recall, f1, images) in enumerate(zip(source.classes, *columns, strict=True)):
        row: dict[str, Any] = {"class": name, "images": int(images), "right": round(recall * images)}
        known = {"top1": recall, "precision": precision, "f1": f1} if images and finite else {}
        if known:
            known["average_precision"] = average_precision_score(true_NK[:, k], scores_NK[:, k])
        for key in ("top1", "precision", "f1", "average_precision"):
            row[key] = 100.0 * float(known[key]) if known else None
        rows.append(row | {"taken_for": None, "times": 0})
    seen = [row for row in rows if row["f1"] is not None]
    places = (("class_top1", "top1"), ("map", "average_precision"), ("f1", "f1"))
    return {name: sum(row[key] for row in seen) / len(seen) if seen else None for name, key in places} | {
        "classes": rows
    }
