"""Scores against a plain computation, whatever the batches are; of single classes; which evaluation is the best."""

from __future__ import annotations

import tracemalloc
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from scipy import sparse
from sklearn.metrics import balanced_accuracy_score, confusion_matrix, f1_score, precision_score, recall_score
from torch import Tensor, nn

from pycls_fast import build
from pycls_fast.data.batch import Batch
from pycls_fast.data.prepare import Prepare
from pycls_fast.data.sources.base import Images
from pycls_fast.data.sources.eval_sets import EvalSet
from pycls_fast.errors import UserError
from pycls_fast.files import step_of
from pycls_fast.losses import Criterion
from pycls_fast.parallel.parallel_model import ParallelModel
from pycls_fast.parallel.world import ALONE
from pycls_fast.speed import Speed
from pycls_fast.train import pictures as drawing
from pycls_fast.train.by_class import class_scores, confusion, roc_auc, set_scores, standard_errors
from pycls_fast.train.display import Display, scores_text
from pycls_fast.train.evaluate import DamagedImages, Evaluation, FlipAveraged, Predictions, Scorer, evaluate
from pycls_fast.train.folder import RunFolder
from pycls_fast.train.observers import Observers
from pycls_fast.train.pictures import _shares, draw_confusion, draw_curves, write_page
from pycls_fast.train.summary import summary_values
from pycls_fast.train.validation import Evaluations, best_evaluation
from tests.factories import config_of, save_checkpoint

CPU, SOFTMAX = torch.device("cpu"), Criterion()


class Lookup(nn.Module):
    """Logits that were chosen beforehand: an image's first value says which row."""

    def __init__(self, logits_NK: Tensor) -> None:
        super().__init__()
        self.logits_NK = logits_NK

    def forward(self, images_BCHW: Tensor) -> Tensor:
        assert not self.training
        return self.logits_NK[(images_BCHW[:, 0, 0, 0] * 255).round().long()]


def batches(labels_N: Tensor, sizes: list[int]) -> list[Batch]:
    images = torch.arange(len(labels_N), dtype=torch.uint8)[:, None, None, None].expand(-1, 2, 2, 3).contiguous()
    parts = zip(images.split(sizes), labels_N.split(sizes), torch.arange(len(labels_N)).split(sizes), strict=True)
    return [Batch(i, label, index, None) for i, label, index in parts]


def score(
    logits_NK: Tensor,
    labels_N: Tensor,
    given: list[int] | list[Batch],
    criterion: Criterion = SOFTMAX,
    *,
    keep_scores: bool = False,
    sets_LK: Tensor | None = None,
    met: DamagedImages | None = None,
    **rule: Tensor,
) -> Evaluation:
    """Score the labels, or by the `rule` of an `EvalSet`, in batches of these sizes, or in these."""
    scored = EvalSet(cast("Images", range(len(labels_N))), **{name: values.numpy() for name, values in rule.items()})
    made: Any = given if isinstance(given[0], Batch) else batches(labels_N, cast("list[int]", given))
    model = Lookup(logits_NK)
    model.train()
    config: Any = SimpleNamespace(loss=SimpleNamespace(criterion=lambda: criterion))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "prepare", lambda *_: Prepare((0.0, 0.0, 0.0), (1.0, 1.0, 1.0)))
        patch.setattr(build, "autocast", lambda *_: nullcontext)
        patch.setattr(build, "label_sets", lambda *_: sets_LK)
        patch.setattr(build, "eval_batches", lambda *_: made)
        display, switches = Display(speaks=False, mode="plain"), cast("Speed", None)
        damaged, places = met or DamagedImages(0, ALONE, display), list[str]()
        monitor: Any = SimpleNamespace(at=places.append)
        world = replace(ALONE, monitor=monitor)
        scorer = Scorer(config, ParallelModel(model, model, CPU), world, switches, display, damaged)
        result = evaluate(scorer, scored, "evaluating", keep_scores=keep_scores)
    assert model.training
    # Ranks that wait see the progress of a slow one.
    assert places == [f"evaluating: {done} batches done" for done in range(1, len(made) + 1)]
    return result


@pytest.mark.parametrize("sizes", [[100], [33, 33, 33, 1], [0, 100, 0], [7] * 14 + [2]])
def test_equals_topk_and_cross_entropy(sizes: list[int]) -> None:
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(100, 20, generator=generator, dtype=torch.float64)
    labels = torch.randint(20, (100,), generator=generator)
    result = score(logits, labels, sizes)
    hits = logits.topk(5, dim=1).indices == labels[:, None]
    assert result.count == 100
    assert result.top1 == pytest.approx(hits[:, 0].double().mean().item() * 100)
    assert result.top5 == pytest.approx(hits.any(dim=1).double().mean().item() * 100)
    assert result.loss == pytest.approx(F.cross_entropy(logits, labels).item(), rel=1e-12)
    assert 0 < result.top1 < result.top5 < 100


def test_a_run_with_sigmoids_reports_its_own_loss() -> None:
    logits = torch.randn(40, 6, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    labels = torch.randint(6, (40,), generator=torch.Generator().manual_seed(1))
    settings = ["loss=bce", "loss.label_smoothing=0.1", "loss.bce_threshold=0.2", "loss.bce_reduction=sum"]
    criterion = config_of(*settings).loss.criterion()
    assert criterion.sigmoid
    result = score(logits, labels, [25, 15], criterion)
    one_hot = F.one_hot(labels, 6).double()
    expected = F.binary_cross_entropy_with_logits(logits, one_hot, reduction="none").sum(dim=1)
    assert result.loss == pytest.approx(expected.mean().item(), rel=1e-12)
    # Each image's stays comparable between runs.
    assert result.predictions.losses_N.sum() == pytest.approx(F.cross_entropy(logits, labels, reduction="sum").item())
    # An image whose class is not among the outputs that count has no loss.
    among = torch.tensor([0, 2, 3, 4, 5])
    some = score(logits, labels, [40], criterion, among=among, answers_NM=labels[:, None])
    assert some.count == (labels != 1).sum()
    assert config_of().loss.criterion() == SOFTMAX


@pytest.mark.parametrize("sigmoid", [False, True])
def test_mirror_images_are_averaged(sigmoid: bool) -> None:
    network = nn.Sequential(nn.Flatten(), nn.Linear(3 * 4 * 4, 5)).double()
    images_BCHW = torch.randn(6, 3, 4, 4, dtype=torch.float64)

    def probabilities(logits_BK: Tensor) -> Tensor:
        return logits_BK.sigmoid() if sigmoid else logits_BK.softmax(1)

    found = FlipAveraged(network, sigmoid=sigmoid)(images_BCHW)
    both = [probabilities(network(images)) for images in (images_BCHW, images_BCHW.flip(3))]
    torch.testing.assert_close(probabilities(found), (both[0] + both[1]) / 2)
    # Probabilities that round to 1 or 0 have finite logits.
    network[1].weight.data *= 1e3
    assert FlipAveraged(network, sigmoid=sigmoid)(images_BCHW).isfinite().all()


def test_damaged_images_are_reported_and_not_counted() -> None:
    (batch,) = batches(torch.tensor([0, 1]), [2])
    damaged = Batch(batch.images_BHWC[:0], batch.labels_B[:0], batch.indices_B[:0], None, (("x.png", "cut off"),))
    met = DamagedImages(1, ALONE, Display(speaks=False, mode="plain"))
    result = score(torch.eye(2), torch.zeros(3), [batch, damaged], met=met)
    assert (result.count, result.top1, met.noted) == (2, 100, {"x.png": "cut off"})


@pytest.mark.parametrize("sizes", [[40], [13, 0, 27]])
def test_predictions_are_what_is_scored(sizes: list[int], tmp_path: Path) -> None:
    logits = torch.randn(40, 5, generator=torch.Generator().manual_seed(0)).double()
    labels = torch.randint(5, (40,), generator=torch.Generator().manual_seed(1))
    logits[3, 1:3], labels[3] = 9.0, 2
    logits[7, 2], labels[7] = float("nan"), 2
    result = score(logits, labels, sizes)
    made = result.predictions
    made.save(tmp_path / "predictions.npz")
    kept = Predictions.load(tmp_path / "predictions.npz")
    assert kept.indices_N.tolist() == list(range(40))
    assert kept.labels_N.tolist() == labels.tolist()
    assert 100 * (kept.predicted_N == kept.labels_N).mean() == pytest.approx(result.top1)
    assert kept.predicted_N[[3, 7]].tolist() == [1, -1]
    others = [i for i in range(40) if i not in (3, 7)]
    assert kept.predicted_N[others].tolist() == logits.argmax(dim=1)[others].tolist()
    expected = F.cross_entropy(logits, labels, reduction="none")
    assert kept.losses_N[others] == pytest.approx(expected[others].numpy(), rel=1e-6)
    highest = logits.softmax(dim=1).amax(dim=1)
    assert kept.probabilities_N[others] == pytest.approx(highest[others].numpy(), rel=1e-6)
    assert np.isnan(kept.probabilities_N[7])
    sigmoids = score(logits, labels, sizes, Criterion(sigmoid=True)).predictions.probabilities_N
    assert sigmoids[others] == pytest.approx(logits.sigmoid().amax(dim=1)[others].numpy(), rel=1e-6)


def test_predictions_of_several_right_classes_among_some() -> None:
    """They are in the model's own classes, and say what the score says."""
    logits = torch.randn(60, 9, generator=torch.Generator().manual_seed(0)).double()
    answers_NM = torch.randint(-1, 9, (60, 2), generator=torch.Generator().manual_seed(1))
    answers_NM[4] = -1
    among = torch.tensor([1, 2, 4, 5, 7, 8])
    result = score(logits, torch.zeros(60, dtype=torch.int64), [25, 35], among=among, answers_NM=answers_NM)
    made = result.predictions
    kept_NK = torch.full_like(logits, -torch.inf).index_copy(1, among, logits[:, among])
    assert made.probabilities_N == pytest.approx(kept_NK.softmax(dim=1).amax(dim=1).numpy(), rel=1e-6)
    assert made.predicted_N.tolist() == kept_NK.argmax(dim=1).tolist()
    for label, loss, row_K, answers in zip(made.labels_N, made.losses_N, kept_NK, answers_NM.tolist(), strict=True):
        right = [answer for answer in answers if answer in among.tolist()]
        assert label == max(right, key=lambda answer: row_K[answer].item(), default=-1)
        assert loss == pytest.approx(-row_K.log_softmax(dim=0)[label].item() if right else 0.0, rel=1e-5)
    counted_N = made.labels_N >= 0
    assert result.count == counted_N.sum() < 60
    assert result.top1 == pytest.approx(100 * (made.predicted_N == made.labels_N)[counted_N].mean())
    assert result.loss is None


def predictions(labels: list[int], predicted: list[int]) -> Predictions:
    count = len(labels)
    whole = [np.array(values, dtype=np.int64) for values in (range(count), labels, predicted)]
    zeros = np.zeros(count, dtype=np.float32)
    return Predictions(*whole, zeros, zeros)


def test_two_runs_are_paired_by_the_images_that_both_have() -> None:
    one, two = (
        predictions([3, -1, 2, 1, -1, 0], [3, -1, 1, 1, 2, -1]),
        predictions([3, -1, 2, 1, -1, 0], [3, 2, 2, 0, -1, 0]),
    )
    # The second could not read the first image, and no one knows the second's and the fifth's class.
    mine, others = one.shared(two.of(np.array([5, 1, 3, 2, 4])))
    assert mine.indices_N.tolist() == others.indices_N.tolist() == [2, 3, 5]
    assert (mine.right.tolist(), others.right.tolist()) == ([False, True, False], [True, False, True])
    # Scores that are not finite of an image without a class.
    assert one.right.tolist() == [True, False, False, True, False, False]


def test_equals_scikit_learn() -> None:
    generator = np.random.RandomState(0)
    labels, predicted = generator.randint(0, 7, 300), generator.randint(0, 7, 300)
    found = predictions(labels.tolist(), predicted.tolist())
    wrong_KK = confusion_matrix(labels, predicted)
    assert np.array_equal(confusion(found, 7).toarray(), wrong_KK)
    scores = class_scores(found, [f"c{k}" for k in range(7)])
    assert scores["class_top1"] == pytest.approx(100 * balanced_accuracy_score(labels, predicted))
    assert scores["f1"] == pytest.approx(100 * f1_score(labels, predicted, average="macro"))
    for name, function in (("precision", precision_score), ("f1", f1_score), ("top1", recall_score)):
        expected = 100 * function(labels, predicted, average=None)
        assert [row[name] for row in scores["classes"]] == pytest.approx(expected.tolist())
    np.fill_diagonal(wrong_KK, 0)
    assert [row["taken_for"] for row in scores["classes"]] == [f"c{k}" for k in wrong_KK.argmax(axis=1)]
    assert [row["times"] for row in scores["classes"]] == wrong_KK.max(axis=1).tolist()
    assert sum(row["images"] for row in scores["classes"]) == 300


@pytest.mark.parametrize("sigmoid", [False, True])
def test_the_area_under_the_roc_curve_counts_pairs(sigmoid: bool) -> None:
    torch.manual_seed(0)
    # Few different values, so that there are ties; no image of the last class.
    logits_NK, labels_N = torch.randint(-2, 3, (60, 4)).double(), torch.randint(0, 3, (60,))
    result = score(logits_NK, labels_N, [0, 50, 10], Criterion(sigmoid=sigmoid), keep_scores=True)
    assert result.scores_NK is not None
    *found, absent = roc_auc(result.predictions.labels_N, result.scores_NK)
    p_NK = logits_NK.sigmoid() if sigmoid else logits_NK.softmax(dim=1)
    for k, area in enumerate(found):
        mine, others = p_NK[labels_N == k, k, None], p_NK[labels_N != k, k]
        # Equal probabilities differ by rounding.
        apart = (mine - others).where((mine - others).abs() > 1e-9, 0.0)
        assert area == pytest.approx(float(((apart > 0) + 0.5 * (apart == 0)).mean()))
    assert absent is None
    assert len(set(found)) == 3


def test_kept_scores_are_not_rounded_to_the_format_of_the_logits() -> None:
    logits_NK = 3 * torch.randn(40, 7).bfloat16()
    scores_NK = score(logits_NK, torch.zeros(40, dtype=torch.int64), [40], keep_scores=True).scores_NK
    torch.testing.assert_close(torch.as_tensor(scores_NK), logits_NK.float().log_softmax(dim=1))


def test_images_with_several_labels() -> None:
    logits_NK = torch.tensor([[2.0, 1, -1, 0], [3, -2, -1, 9], [-1, -3, 4, 0], [5, -1, -2, 0]], dtype=torch.float64)
    # The last output stands for no class, and the third image has no label.
    sets_LK = torch.tensor([[1.0, 1, 0, 0], [0, 1, 0, 0], [0, 0, 0, 0]])
    labels_N = torch.tensor([0, 1, 2, 0])
    result = score(logits_NK, labels_N, [3, 1], sets_LK=sets_LK)
    # Top-1 is of the images with a label.
    assert (result.top1, result.count) == (pytest.approx(200 / 3), 4)
    target_NK = sets_LK[labels_N].double()
    assert result.loss == pytest.approx(F.binary_cross_entropy_with_logits(logits_NK, target_NK).item())
    assert result.predictions.losses_N == pytest.approx(
        F.binary_cross_entropy_with_logits(logits_NK, target_NK, reduction="none").mean(1).numpy()
    )
    assert result.predictions.labels_N.tolist() == [0, 1, -1, 0]
    source: Any = SimpleNamespace(
        labels=labels_N.numpy(), label_sets=sets_LK[:, :3].bool().numpy(), classes=("a", "b", "never")
    )
    found = set_scores(result, source)
    names = ("class", "images", "right", "top1", "precision", "f1", "average_precision")
    rows = [tuple(row[name] for name in names) for row in found["classes"]]
    # Of a: images 0 and 3 with the scores 2 and 5, and between them 3 of image 1. Of b: 0, 1 and 3 by 1, -2 and -1.
    assert rows[0] == ("a", 2, 2, 100.0, pytest.approx(200 / 3), 80.0, pytest.approx(100 * (1 + 2 / 3) / 2))
    assert rows[1] == ("b", 3, 1, pytest.approx(100 / 3), 100.0, 50.0, 100.0)
    assert rows[2] == ("never", 0, 0, None, None, None, None)
    assert (found["f1"], found["map"]) == (65.0, pytest.approx((100 + 250 / 3) / 2))
    broken = score(logits_NK.clone().fill_(torch.nan), labels_N, [4], sets_LK=sets_LK)
    assert set_scores(broken, source)["map"] is None


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
        shares_DD = _shares(confusion(found, 20_000), 20)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 100e6
    assert shares_DD.shape == (1000, 1000)
    assert rows[7] == {
        "class": "7", "images": 2, "right": 0, "top1": 0.0, "precision": None, "f1": 0.0, "taken_for": "19999",
        "times": 2,
    }  # fmt: skip
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
    draw_confusion(sparse.csr_array(counts), names, tmp_path / "confusion.png", "an $experiment")
    with Image.open(tmp_path / "confusion.png") as picture:
        width, height = picture.size
        dark = (np.asarray(picture.convert("L")) < 100).mean()
    assert 300 < height <= width < 3000
    assert dark > 0.001
    assert [file.name for file in tmp_path.iterdir()] == ["confusion.png"]


@pytest.mark.parametrize(("every", "steps"), [(1, [22, 44, 66, 70]), (2, [44, 70]), (4, [70])])
def test_epochs_between_evaluations(tmp_path: Path, every: int, steps: list[int]) -> None:
    """And at the end."""
    config = config_of("data.root=x", f"runtime.eval_every_epochs={every}")
    run: Any = SimpleNamespace(config=config, steps_per_epoch=22, total_steps=70)
    evaluations = Evaluations(run, Observers(run), lambda: None)
    assert [step for step in range(71) if evaluations.due(step)] == steps


def test_the_first_of_the_best() -> None:
    records = [
        {"top1": 10.0, "loss": 3.0},
        {"top1": 30.0, "loss": 2.0, "class_top1": None},
        {"top1": 30.0, "loss": 1.0},
        {"top1": 20.0, "loss": None, "class_top1": 40.0},
        {"top1": 20.0, "loss": 1.0, "class_top1": 40.0},
    ]
    assert best_evaluation(records, "top1") == 1
    assert best_evaluation(records, "loss") == 2
    assert best_evaluation(records, "class_top1") == 3
    assert best_evaluation([], "top1") is None
    assert best_evaluation([{"top1": 0.0, "loss": float("nan")}, {"top1": 0.0, "loss": 9.0}], "loss") == 1


def test_the_last_within_a_standard_error() -> None:
    """Of 64 images at 80% that is 5 points; images without a label, which are not right or wrong, do not count."""
    tops, labels = [74.0, 70.0, 80.0, 74.9, 75.1, 74.5], [0] * 64 + [-1] * 100
    found = standard_errors(Evaluation(80.0, 100.0, 1.0, 164, predictions(labels, [0] * 164)), {})
    assert found == {"top1_standard_error": pytest.approx(5.0, abs=0.1)}
    records = [{"top1": top1, "loss": step, **found} for step, top1 in enumerate(tops, start=1)]
    assert best_evaluation(records, "top1") == 2
    assert best_evaluation(records, "top1", 1.0) == 4
    assert best_evaluation(records, "top1", 1.2) == 5
    assert best_evaluation(records, "loss", 1.0) == 0
    assert best_evaluation([*records[:2], {**records[2], "top1_standard_error": 0.0}, *records[3:]], "top1", 2.0) == 2


def test_the_standard_error_of_a_mean_over_classes() -> None:
    """Not that of a share of all images: rare classes count as much as frequent ones."""
    random, images_K, share_K = np.random.default_rng(0), np.array([3, 400, 60]), np.array([0.5, 0.9, 0.7])
    means = (random.binomial(images_K, share_K, size=(20_000, 3)) / images_K).mean(1)
    rows = [{"images": n, "top1": 100 * share} for n, share in zip(images_K.tolist(), share_K.tolist(), strict=True)]
    by_class = {"class_top1": 70.0, "classes": [*rows, {"images": 0, "top1": None}]}
    error = standard_errors(Evaluation(0.0, 0.0, 1.0, 0, predictions([], [])), by_class)["class_top1_standard_error"]
    assert error == pytest.approx(100 * means.std(), rel=0.02)
    records = [{"class_top1": 70.0 - step, "class_top1_standard_error": error} for step in range(20)]
    assert best_evaluation(records, "class_top1", 1.0) == int(error)


@pytest.mark.parametrize(
    ("name", "text"),
    [("environment.json", "[]"), ("classes.json", '{"classes": [{"class": "cat", "top1": "high"}]}')],
)
def test_a_damaged_file_that_a_page_needs_is_one_line(tmp_path: Path, name: str, text: str) -> None:
    summary = dict.fromkeys(("final", "best", "stopped", "device"))
    summary |= dict.fromkeys(("parameters", "steps", "epochs", "wall_seconds"), 1)
    run: Any = SimpleNamespace(folder=RunFolder(tmp_path), config=config_of("data.root=x"))
    (tmp_path / name).write_text(text)
    with pytest.raises(UserError, match=r"environment\.json or classes\.json is damaged .*; remove it$"):
        write_page(run, summary)
    (tmp_path / name).unlink()
    write_page(run, summary)
    assert "1 steps, 1 epochs" in (tmp_path / "index.html").read_text()


@pytest.mark.parametrize(("metric", "best"), [("top1", 2), ("loss", 4)])
def test_the_best_is_one_for_the_link_and_the_summary(tmp_path: Path, metric: str, best: int) -> None:
    """By the metric of early stopping, and the first where several are as good."""
    folder = RunFolder(tmp_path)
    world = SimpleNamespace(size=1, is_main=True, device=torch.device("cpu"))
    run: Any = SimpleNamespace(
        folder=folder,
        step=SimpleNamespace(ema=None),
        complexity=SimpleNamespace(parameters=1, forward_flops=1),
        config=config_of("data.root=x", f"schedule.best_metric={metric}"),
        world=world,
        start_step=0,
        total_steps=5,
        epoch=float,
        seconds=lambda: 1.0,
    )
    evaluations = Evaluations(run, Observers(run), lambda: None)
    for step, (top1, loss) in enumerate([(10.0, 3.0), (30.0, 2.0), (30.0, 1.5), (20.0, 1.0), (30.0, 1.0)], start=1):
        save_checkpoint({"step": step}, folder.checkpoints, step, keep=2)
        folder.add_record("eval", step, step, split="val", weights="model", count=9, top1=top1, loss=loss)
        evaluations.keep_if_best()
    assert step_of((folder.checkpoints / "best").resolve()) == best
    assert summary_values(run, 1)["best"]["step"] == best


def test_scores_that_say_nothing_new_are_not_shown() -> None:
    record = {"top1": 90.0, "top5": 99.0, "class_top1": 80.0}
    assert scores_text(record) == "top-1 90.00%, top-5 99.00%, balanced accuracy 80.00%"
    assert scores_text({"top1": 90.0, "top5": 100.0, "class_top1": 90.0}) == "top-1 90.00%"
    assert scores_text({**record, "map": 70.0, "f1": 60.0}) == "mAP 70.00%, F1 60.00%"


def test_the_only_record_of_a_short_run_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    styles: list[str] = []
    monkeypatch.setattr("matplotlib.axes.Axes.plot", lambda self, x, y, style, **_: styles.append(style))
    run: Any = SimpleNamespace(folder=RunFolder(tmp_path), config=config_of("data.root=x"))
    for step, expected in ((1, ["."] * 3), (2, ["-"] * 3)):
        speeds = {"images_per_second": 9.0, "step_seconds": 1.0, "data_wait_fraction": 0.0}
        run.folder.add_record("train", step, step, loss=0.5, lr=0.1, grad_norm=1.0, memory_peak_bytes=1, **speeds)
        styles.clear()
        draw_curves(run)
        assert styles == expected
