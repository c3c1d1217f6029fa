"""Scores against a plain computation, whatever the batches are."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import cast

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pycls_fast.config import load_config
from pycls_fast.data.batch import Batch
from pycls_fast.data.prepare import Prepare
from pycls_fast.data.sources.base import Images
from pycls_fast.data.sources.eval_sets import EvalSet
from pycls_fast.errors import UserError
from pycls_fast.losses import Criterion
from pycls_fast.parallel import ALONE, ParallelModel
from pycls_fast.train.evaluate import Evaluation, Predictions, evaluate

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
    logits_NK: Tensor, labels_N: Tensor, sizes: list[int], criterion: Criterion = SOFTMAX, **rule: Tensor
) -> Evaluation:
    """Score the labels, or by the `rule` of an `EvalSet`."""
    prepare = Prepare((0.0, 0.0, 0.0), (1.0, 1.0, 1.0))
    model, source = Lookup(logits_NK), cast("Images", None)
    model.train()
    wrapped = ParallelModel(model, model, CPU)
    eval_set = EvalSet(source, "", **{name: values.numpy() for name, values in rule.items()}) if rule else None
    result = evaluate(wrapped, batches(labels_N, sizes), prepare, nullcontext, ALONE, criterion, eval_set=eval_set)
    assert model.training
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
    criterion = load_config("vit_digits", settings).loss.criterion()
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
    assert load_config("vit_digits", []).loss.criterion() == SOFTMAX


def test_ties_do_not_all_count_as_right() -> None:
    """A model that says nothing is right for one class only, as with argmax."""
    labels = torch.arange(10)
    result = score(torch.zeros(10, 10), labels, [10])
    assert result.top1 == pytest.approx(10)
    assert result.top5 == pytest.approx(50)


def test_logits_that_are_no_numbers_are_wrong() -> None:
    logits = torch.full((4, 10), float("nan"))
    logits[0] = F.one_hot(torch.tensor(3), 10)
    result = score(logits, torch.tensor([3, 0, 0, 0]), [4])
    assert result.top1 == pytest.approx(25)
    assert result.top5 == pytest.approx(25)


def test_damaged_images_are_reported_and_not_counted() -> None:
    (batch,) = batches(torch.tensor([0, 1]), [2])
    damaged = Batch(batch.images_BHWC[:0], batch.labels_B[:0], batch.indices_B[:0], None, (("x.png", "cut off"),))
    model, prepare = Lookup(torch.eye(2)), Prepare((0.0,) * 3, (1.0,) * 3)
    result = evaluate(ParallelModel(model, model, CPU), [batch, damaged], prepare, nullcontext, ALONE, SOFTMAX)
    assert result.count == 2
    assert result.top1 == 100
    assert result.damaged == (("x.png", "cut off"),)


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


@pytest.mark.parametrize("content", [None, b"", b"no archive"])
def test_predictions_that_cannot_be_read(content: bytes | None, tmp_path: Path) -> None:
    file = tmp_path / "predictions.npz"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(UserError, match="predictions"):
        Predictions.load(file)
