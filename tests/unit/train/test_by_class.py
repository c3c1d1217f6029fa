"""Scores of single classes, and the picture of what was taken for what."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from sklearn.metrics import balanced_accuracy_score, confusion_matrix

from pycls_fast.train.by_class import class_scores, confusion
from pycls_fast.train.confusion import draw_confusion
from pycls_fast.train.evaluation import Predictions


def predictions(labels: list[int], predicted: list[int]) -> Predictions:
    count = len(labels)
    whole = [np.array(values, dtype=np.int64) for values in (range(count), labels, predicted)]
    return Predictions(*whole, np.zeros(count, dtype=np.float32))


def test_equals_scikit_learn() -> None:
    generator = np.random.RandomState(0)
    labels, predicted = generator.randint(0, 7, 300), generator.randint(0, 7, 300)
    found = predictions(labels.tolist(), predicted.tolist())
    assert (confusion(found, 7) == confusion_matrix(labels, predicted)).all()
    scores = class_scores(found, [f"c{k}" for k in range(7)])
    assert scores["class_top1"] == pytest.approx(100 * balanced_accuracy_score(labels, predicted))
    assert sum(row["images"] for row in scores["classes"]) == 300


def test_rows_say_what_a_class_was_taken_for() -> None:
    # A class without images, an output that stands for no class, a score that is no number, an image without a label.
    found = predictions([0, 0, 0, 0, 2, 2, -1], [0, 2, 2, 1, 5, -1, 0])
    scores = class_scores(found, ["a", "b", "c"])
    assert scores["classes"] == [
        {"class": "a", "images": 4, "right": 1, "top1": 25.0, "taken_for": "c", "times": 2},
        {"class": "b", "images": 0, "right": 0, "top1": None, "taken_for": None, "times": 0},
        {"class": "c", "images": 2, "right": 0, "top1": 0.0, "taken_for": None, "times": 0},
    ]
    assert scores["class_top1"] == pytest.approx(12.5)
    assert class_scores(predictions([], []), ["a", "b"])["class_top1"] is None


@pytest.mark.parametrize("count", [2, 30, 300])
def test_any_number_of_classes_of_any_name_is_drawn(count: int, tmp_path: Path) -> None:
    """Formulas, colours of emoji, line ends, bytes that are no text: warnings are errors here."""
    names = [f"class {k}" for k in range(count)]
    names[0], names[1] = "$x^{2 \\frac $ _ 🐻 猫\n\x00", "\udcff" + 50 * "long "
    counts = np.random.RandomState(0).poisson(0.5, (count, count)) + np.diag(np.full(count, 9))
    draw_confusion(counts, names, tmp_path / "confusion.png", "an $experiment")
    with Image.open(tmp_path / "confusion.png") as picture:
        width, height = picture.size
        dark = (np.asarray(picture.convert("L")) < 100).mean()
    assert 300 < height <= width < 3000
    assert dark > 0.001
    assert [file.name for file in tmp_path.iterdir()] == ["confusion.png"]
