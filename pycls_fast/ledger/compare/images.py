"""Comparing two runs image by image: were they scored on the same images, and where do they disagree?"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from pycls_fast.data import Source
from pycls_fast.ledger.accuracy import pair_images
from pycls_fast.ledger.compare.runs import RunFiles
from pycls_fast.train.evaluation import Predictions

Record = dict[str, Any]


def why_not_paired(a: RunFiles, b: RunFiles) -> str | None:
    """Why the two runs cannot be compared image by image; None if they can."""
    for name, run in (("A", a), ("B", b)):
        if run.predictions is None:
            return f"{name} has no predictions yet: it has not been evaluated"
    if a.classes is not None and b.classes is not None and a.classes != b.classes:
        return f"their classes differ: A has {_sample(a.classes, b.classes)}, B has {_sample(b.classes, a.classes)}"
    if a.changed != b.changed:
        return f"the images of {'A' if a.changed else 'B'} have changed since its evaluation"
    if a.source is not None and b.source is not None:
        names, others = _names(a.source), _names(b.source)
        if len(names) != len(others):
            return f"they were evaluated on different images: {len(names):,} and {len(others):,}"
        place = next((i for i, (one, two) in enumerate(zip(names, others, strict=True)) if one != two), None)
        if place is not None:
            return f"they were evaluated on different images: A has {names[place]} where B has {others[place]}"
    assert a.predictions is not None
    assert b.predictions is not None
    one, two = a.predictions, b.predictions
    at_one, at_two = _shared(one, two)
    if not len(at_one):
        return "they have no image in common"
    wrong = one.labels_N[at_one] != two.labels_N[at_two]
    if wrong.any():
        return (
            f"they were evaluated on different images: the true class differs for {int(wrong.sum()):,} of "
            f"{len(wrong):,}"
        )
    return None


def compare_images(a: RunFiles, b: RunFiles, most: int) -> Record:
    """`pair`, `classes`, `only_a`, `only_b` (at most `most` images each, the clearest first), `both_wrong` and more.

    Images that one of the two could not read are left out of both.
    """
    assert a.predictions is not None
    assert b.predictions is not None
    one, two = a.predictions, b.predictions
    at_one, at_two = _shared(one, two)
    labels_N, first_N, second_N = one.labels_N[at_one], one.predicted_N[at_one], two.predicted_N[at_two]
    losses_N2 = np.stack([one.losses_N[at_one], two.losses_N[at_two]], axis=1)
    right_N2 = np.stack([first_N == labels_N, second_N == labels_N], axis=1)
    classes = a.classes or b.classes or ()
    source = a.source or b.source

    def images(winner: int) -> list[Record]:
        chosen = np.flatnonzero(right_N2[:, winner] & ~right_N2[:, 1 - winner])
        # Largest if the winner was sure and the other was far off.
        gap = losses_N2[chosen, 1 - winner] - losses_N2[chosen, winner]
        return [
            {
                "index": (index := int(one.indices_N[at_one[i]])),
                "name": source.name(index) if source is not None else None,
                "class": class_name(classes, labels_N[i]),
                "a": class_name(classes, first_N[i]),
                "b": class_name(classes, second_N[i]),
                "loss_a": _finite(losses_N2[i, 0]),
                "loss_b": _finite(losses_N2[i, 1]),
            }
            for i in chosen[np.argsort(-gap, kind="stable")][:most].tolist()
        ]

    return {
        "pair": asdict(pair_images(labels_N, first_N, second_N)),
        "left_out": len(one.indices_N) + len(two.indices_N) - 2 * len(at_one),
        "both_wrong": int((~right_N2.any(axis=1)).sum()),
        "both_wrong_otherwise": int((~right_N2.any(axis=1) & (first_N != second_N)).sum()),
        "classes": _by_class(classes, labels_N, right_N2),
        "only_a": images(0),
        "only_b": images(1),
    }


def _finite(value: float) -> float | None:
    """A loss, or None if it is not finite, which JSON cannot express."""
    return float(value) if math.isfinite(value) else None


def class_name(classes: Sequence[str], label: int) -> str:
    """The name of a class, in text that can be drawn; "none" if the scores were not finite."""
    name = "none" if label < 0 else classes[label] if label < len(classes) else f"class {label}"
    # Bytes of a folder's name that are not valid UTF-8 are shown as escapes.
    return name.encode(errors="backslashreplace").decode()


def _by_class(classes: Sequence[str], labels_N: np.ndarray, right_N2: np.ndarray) -> list[Record]:
    """Accuracy of each class in percent, those that changed most first."""
    found: list[Record] = []
    for label in np.unique(labels_N).tolist():
        rows_M2 = right_N2[labels_N == label]
        a, b = (100.0 * rows_M2.mean(axis=0)).tolist()
        lost = int((rows_M2[:, 0] & ~rows_M2[:, 1]).sum())
        won = int((~rows_M2[:, 0] & rows_M2[:, 1]).sum())
        found.append(
            {"label": label, "class": class_name(classes, label), "images": len(rows_M2), "a": a, "b": b}
            | {"difference": b - a, "only_a": lost, "only_b": won}
        )
    return sorted(found, key=lambda row: -abs(row["difference"]))


def _shared(one: Predictions, two: Predictions) -> tuple[np.ndarray, np.ndarray]:
    """Positions in each run of the images that both have, without those that have no true class in either."""
    _, at_one, at_two = np.intersect1d(one.indices_N, two.indices_N, assume_unique=True, return_indices=True)
    counted = (one.labels_N[at_one] >= 0) | (two.labels_N[at_two] >= 0)
    return at_one[counted], at_two[counted]


def _names(source: Source) -> list[str]:
    """The images' names without their common folder, as the data may have been moved."""
    names = [source.name(index) for index in range(len(source))]
    # A table may mix relative and absolute paths, which have no common folder.
    if len({name.startswith(os.sep) for name in names}) > 1:
        return names
    folders = {name.rpartition(os.sep)[0] for name in names}
    common = os.path.commonpath(folders) + os.sep
    return [name.removeprefix(common) for name in names]


def _sample(mine: Sequence[str], other: Sequence[str]) -> str:
    """Their number, and one that the other does not have."""
    others = set(other)
    own = next((name for name in mine if name not in others), None)
    return f"{len(mine)}" + (f" ({own} among them)" if own is not None else "")
