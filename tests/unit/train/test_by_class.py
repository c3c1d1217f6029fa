"""Scores of single classes, and the picture of what was taken for what."""

from __future__ import annotations

import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from sklearn.datasets import load_digits
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import balanced_accuracy_score, confusion_matrix, f1_score, precision_score, recall_score

from pycls_fast.inference.contact_sheet import Cell, draw_sheet
from pycls_fast.train import pictures as drawing
from pycls_fast.train.evaluate import Confusion, Predictions, calibration_error, class_scores, confusion, mistakes
from pycls_fast.train.pictures import _shares, draw_confusion


def predictions(labels: list[int], predicted: list[int]) -> Predictions:
    count = len(labels)
    whole = [np.array(values, dtype=np.int64) for values in (range(count), labels, predicted)]
    zeros = np.zeros(count, dtype=np.float32)
    return Predictions(*whole, zeros, zeros)


def dense(counts: Confusion, classes: int) -> np.ndarray:
    counts_KK = np.zeros((classes, classes), dtype=np.int64)
    counts_KK[counts.right_C, counts.predicted_C] = counts.images_C
    return counts_KK


def sparse(counts_KK: np.ndarray) -> Confusion:
    right_C, predicted_C = np.nonzero(counts_KK)
    return Confusion(right_C, predicted_C, counts_KK[right_C, predicted_C])


def test_equals_scikit_learn() -> None:
    generator = np.random.RandomState(0)
    labels, predicted = generator.randint(0, 7, 300), generator.randint(0, 7, 300)
    found = predictions(labels.tolist(), predicted.tolist())
    counts = confusion(found, 7)
    assert (counts.images_C > 0).all()
    assert (dense(counts, 7) == confusion_matrix(labels, predicted)).all()
    scores = class_scores(found, [f"c{k}" for k in range(7)])
    assert scores["class_top1"] == pytest.approx(100 * balanced_accuracy_score(labels, predicted))
    assert scores["f1"] == pytest.approx(100 * f1_score(labels, predicted, average="macro"))
    for name, function in (("precision", precision_score), ("f1", f1_score), ("top1", recall_score)):
        expected = 100 * function(labels, predicted, average=None)
        assert [row[name] for row in scores["classes"]] == pytest.approx(expected.tolist())
    wrong_KK = confusion_matrix(labels, predicted)
    np.fill_diagonal(wrong_KK, 0)
    assert [row["taken_for"] for row in scores["classes"]] == [f"c{k}" for k in wrong_KK.argmax(axis=1)]
    assert [row["times"] for row in scores["classes"]] == wrong_KK.max(axis=1).tolist()
    assert sum(row["images"] for row in scores["classes"]) == 300


def test_rows_say_what_a_class_was_taken_for() -> None:
    # A class without images, an output that stands for no class, a score that is no number, an image without a label.
    found = predictions([0, 0, 0, 0, 2, 2, -1], [0, 2, 2, 1, 5, -1, 0])
    scores = class_scores(found, ["a", "b", "c"])
    names = ("class", "images", "right", "top1", "precision", "f1", "taken_for", "times")
    assert [tuple(row[name] for name in names) for row in scores["classes"]] == [
        ("a", 4, 1, 25.0, 100.0, 40.0, "c", 2),
        ("b", 0, 0, None, None, None, None, 0),
        ("c", 2, 0, 0.0, 0.0, 0.0, None, 0),
    ]
    assert scores["class_top1"] == pytest.approx(12.5)
    assert class_scores(predictions([], []), ["a", "b"])["class_top1"] is None
    tied = class_scores(predictions([1, 1, 1, 1], [2, 0, 2, 0]), ["a", "b", "c"])["classes"][1]
    assert (tied["taken_for"], tied["times"]) == ("a", 2)


def test_many_classes_need_no_matrix() -> None:
    """A table with ids as labels: 20,000 x 20,000 numbers are 3.2 GB."""
    classes = [str(k) for k in range(20_000)]
    found = predictions([*range(0, 20_000, 1000), 7, 7], [*range(5, 20_005, 1000), 19_999, 19_999])
    tracemalloc.start()
    try:
        rows = class_scores(found, classes)["classes"]
        shares_DD = _shares(confusion(found, 20_000), 20_000, 20)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 100e6
    assert shares_DD.shape == (1000, 1000)
    assert rows[7] == {
        "class": "7",
        "images": 2,
        "right": 0,
        "top1": 0.0,
        "precision": None,
        "f1": 0.0,
        "taken_for": "19999",
        "times": 2,
    }
    assert rows[3000]["taken_for"] == "3005"
    assert rows[19_999]["taken_for"] is None


@pytest.mark.slow
@pytest.mark.parametrize(("count", "most_cells"), [(2, 1500), (30, 1500), (300, 1500), (300, 70)])
def test_any_number_of_classes_of_any_name_is_drawn(
    count: int, most_cells: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Formulas, colours of emoji, line ends, bytes that are no text: warnings are errors here."""
    monkeypatch.setattr(drawing, "_MOST_CELLS", most_cells)
    names = [f"class {k}" for k in range(count)]
    names[0], names[1] = "$x^{2 \\frac $ _ 🐻 猫\n\x00", "\udcff" + 50 * "long "
    counts = np.random.RandomState(0).poisson(0.5, (count, count)) + np.diag(np.full(count, 9))
    draw_confusion(sparse(counts), names, tmp_path / "confusion.png", "an $experiment")
    with Image.open(tmp_path / "confusion.png") as picture:
        width, height = picture.size
        dark = (np.asarray(picture.convert("L")) < 100).mean()
    assert 300 < height <= width < 3000
    assert dark > 0.001
    assert [file.name for file in tmp_path.iterdir()] == ["confusion.png"]


def test_a_letter_that_matplotlibs_own_font_lacks_is_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    letter, names = "\N{SCRIPT SMALL G}", ["\N{SCRIPT SMALL G}", "cat"]
    # It comes with matplotlib, and has the letter.
    monkeypatch.setattr(drawing, "_OTHER_SCRIPTS", ("STIXGeneral", "Not Installed"))
    cells = np.array([0, 1])
    monkeypatch.setattr("warnings.filterwarnings", lambda *args, **kwargs: None)
    draw_confusion(Confusion(cells, 1 - cells, np.array([3, 4])), names, tmp_path / "confusion.png", "x")
    # No font has this one, which is drawn as a box.
    sheet, boxes = (np.asarray(draw_sheet([Cell(Image.new("RGB", (40, 40)), t, [])])) for t in (letter, "猫"))
    assert (sheet != boxes).any()


def test_calibration_error() -> None:
    """Half of the images at 0.6 are right, all at 0.9: (0.1 + 0.1) / 2."""
    labels, predicted = np.array([0, 0, 1, 1]), np.array([0, 1, 1, 1])
    found = Predictions(np.arange(4), labels, predicted, np.zeros(4), np.array([0.6, 0.6, 0.9, 0.9]))
    assert calibration_error(found) == pytest.approx(0.1)
    assert calibration_error(predictions([], [])) is None


@pytest.mark.parametrize("seed", range(3))
def test_planted_label_errors_come_first(seed: int) -> None:
    """Logistic regression on half of scikit-learn's digits; a tenth of the other half's labels are wrong."""
    images_ND, labels_N = load_digits(return_X_y=True)
    order = np.random.RandomState(seed).permutation(len(labels_N))
    train, rest = order[:900], order[900:]
    model = LogisticRegression(C=1e-3, max_iter=500).fit(images_ND[train], labels_N[train])
    own_NK = model.predict_proba(images_ND[rest])
    given = labels_N[rest].copy()
    planted = np.arange(0, len(rest), 10)
    given[planted] = (given[planted] + 1 + planted // 10 % 9) % 10
    found = Predictions(
        np.arange(len(rest)),
        given,
        own_NK.argmax(axis=1),
        -np.log(own_NK[np.arange(len(rest)), given]).astype(np.float32),
        own_NK.max(axis=1).astype(np.float32),
    )
    first, doubted = mistakes(found, 10)
    assert doubted.sum() >= 30
    assert np.isin(first[doubted], planted).mean() >= 0.8
    assert np.isin(first[: len(planted)], planted).mean() >= 0.8
