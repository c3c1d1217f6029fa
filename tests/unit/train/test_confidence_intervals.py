"""Intervals of scores against resamples that are made of repeated images."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from pycls_fast.train import confidence_intervals as module
from pycls_fast.train.by_class import calibration_error, class_scores, roc_auc, set_scores
from pycls_fast.train.confidence_intervals import Resampler, draws, intervals
from pycls_fast.train.evaluate import Evaluation, Predictions

CLASSES = ("a", "b", "c", "d", "never")


def source_of(labels_N: np.ndarray, sets: np.ndarray | None = None) -> Any:
    return SimpleNamespace(classes=CLASSES, labels=labels_N, label_sets=sets)


def scored(labels_N: np.ndarray, scores_NK: np.ndarray) -> Evaluation:
    """Logarithms of probabilities, not normalised; one output more than there are classes."""
    predicted_N = scores_NK.argmax(1)
    places_N = np.arange(len(labels_N))
    found = Predictions(
        places_N,
        labels_N,
        predicted_N,
        -scores_NK[places_N, labels_N],
        np.exp(scores_NK.max(1) - scores_NK.max() - 0.1),
    )
    return Evaluation(100 * float((predicted_N == labels_N).mean()), 90.0, 1.0, len(labels_N), found, scores_NK)


def taken(result: Evaluation, places: np.ndarray) -> Evaluation:
    """The images at these places, again as often as they are named."""
    found = Predictions(*(each[places] for each in vars(result.predictions).values()))
    return Evaluation(result.top1, result.top5, 1.0, len(places), found, result.scores_NK[places])


def by_class(result: Evaluation) -> dict[str, Any]:
    areas = [area for area in roc_auc(result.predictions.labels_N, result.scores_NK[:, :5]) if area is not None]
    found = class_scores(result.predictions, CLASSES)
    return found | {"auc": sum(areas) / len(areas), "calibration_error": calibration_error(result.predictions)}


def some_images(count: int = 60) -> tuple[Evaluation, Any]:
    """A rare class, one without images, few different scores, and predictions of no class."""
    draw = np.random.RandomState(0)
    labels_N = draw.choice(4, count, p=(0.5, 0.25, 0.2, 0.05))
    scores_NK = draw.randint(-6, 0, (count, 6)).astype(np.float32)
    scores_NK[np.arange(count), labels_N] += 2
    return scored(labels_N, scores_NK), source_of(labels_N)


def test_weights_do_what_repeated_images_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_CHUNK", 60 * 11)
    result, source = some_images()
    resampler = Resampler(result, source)
    count = 0
    for drawn_NR in draws(60, 25):
        assert (drawn_NR.sum(0) == 60).all()
        found = resampler.scores(drawn_NR)
        for number, drawn_N in enumerate(drawn_NR.T):
            expected = by_class(taken(result, np.repeat(np.arange(60), drawn_N.astype(int))))
            for name in ("class_top1", "f1", "auc", "calibration_error"):
                assert found[name][number] == pytest.approx(expected[name], rel=1e-5)
            count += 1
    assert count == 25


def test_weights_do_the_same_where_images_have_several_labels() -> None:
    draw = np.random.RandomState(1)
    sets = draw.rand(50, 5) < (0.5, 0.3, 0.2, 0.03, 0.0)
    scores_NK = draw.randint(-3, 4, (50, 6)).astype(np.float32)
    scores_NK[:, :5] += 2 * sets
    result = scored(np.arange(50) % 5, scores_NK)
    source = source_of(np.arange(50), sets)
    (drawn_NR,) = draws(50, 25)
    found = Resampler(result, source).scores(drawn_NR)
    assert set(found) == {"recall", "f1", "map", "calibration_error"}
    for number, drawn_N in enumerate(drawn_NR.T):
        expected = set_scores(taken(result, np.repeat(np.arange(50), drawn_N.astype(int))), source)
        for name, values_R in found.items():
            assert values_R[number] == pytest.approx(expected[name], rel=1e-5)
    broken = scored(np.arange(50) % 5, np.full((50, 6), np.nan))
    assert set(intervals(broken, source, set_scores(broken, source))) == {"top1", "top5"}


def test_intervals(monkeypatch: pytest.MonkeyPatch) -> None:
    result, source = some_images(400)
    scores = by_class(result)
    found = intervals(result, source, scores)
    assert set(found) == {"top1", "top5", "class_top1", "f1", "auc", "calibration_error"}
    assert found == intervals(result, source, scores)
    for name, (low, high) in found.items():
        assert low < (scores | {"top1": result.top1, "top5": 90.0})[name] < high
    monkeypatch.setattr(module, "_MOST_RANKED", 400 * 6 - 1)
    assert set(intervals(result, source, scores)) == set(found) - {"auc"}
    assert set(intervals(result, source, {})) == {"top1", "top5"}


def test_an_interval_has_the_spread_of_other_images() -> None:
    """The share of right images of two equally frequent classes."""
    draw, means = np.random.RandomState(0), []
    for _ in range(300):
        labels_N = np.arange(500) % 2
        right_N = draw.rand(500) < 0.8
        scores_NK = np.where((np.arange(6) == labels_N[:, None]) == right_N[:, None], 0.0, -1.0)
        scores_NK[:, 2:] = -2.0
        result = scored(labels_N, scores_NK.astype(np.float32))
        scores = class_scores(result.predictions, CLASSES)
        means.append(scores["class_top1"])
    low, high = intervals(result, source_of(labels_N), scores)["class_top1"]
    assert high - low == pytest.approx(2 * 1.96 * np.std(means), rel=0.15)


def test_proportions_have_the_published_interval() -> None:
    """Newcombe, Two-sided confidence intervals for the single proportion, 1998, table I, method 3."""
    for right, images, low, high in ((81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605), (0, 20, 0.0, 0.1611)):
        result, source = some_images(images)
        found = intervals(Evaluation(100 * right / images, 0.0, None, images, result.predictions), source, {})
        assert found["top1"] == pytest.approx([100 * low, 100 * high], abs=0.006)


def test_what_is_always_right_has_an_interval_by_its_images_alone() -> None:
    labels_N = np.arange(40) % 5
    result = scored(labels_N, np.log(np.eye(6)[labels_N] + 1e-3).astype(np.float32))
    found = intervals(result, source_of(labels_N), by_class(result))
    assert set(found) == {"top1", "top5"}
    assert 90 < found["top1"][0] < found["top1"][1] == 100


def test_a_calibrated_classifier_may_have_no_error() -> None:
    """Six probabilities in as many bins, each right as often as it says but for chance."""
    draw = np.random.RandomState(0)
    probabilities_N = np.repeat([0.55, 0.62, 0.68, 0.75, 0.82, 0.9], 100).astype(np.float32)
    predicted_N = np.zeros(600, dtype=np.int64)
    labels_N = (draw.rand(600) > probabilities_N).astype(np.int64)
    found = Predictions(np.arange(600), labels_N, predicted_N, np.ones(600, np.float32), probabilities_N)
    scores = class_scores(found, CLASSES)
    assert scores["calibration_error"] > 0.01
    low, high = intervals(Evaluation(70.0, 99.0, 1.0, 600, found), source_of(labels_N), scores)["calibration_error"]
    assert low < 0.005
    assert scores["calibration_error"] < high < 0.05


def test_the_calibration_error_of_few_images_is_in_its_interval() -> None:
    draw = np.random.RandomState(9)
    probabilities_N = draw.uniform(0.5, 1, 100).astype(np.float32)
    labels_N = (draw.rand(100) > probabilities_N).astype(np.int64)
    found = Predictions(np.arange(100), labels_N, np.zeros(100, np.int64), np.ones(100, np.float32), probabilities_N)
    scores = class_scores(found, CLASSES)
    low, high = intervals(Evaluation(70.0, 99.0, 1.0, 100, found), source_of(labels_N), scores)["calibration_error"]
    assert low < scores["calibration_error"] <= high
