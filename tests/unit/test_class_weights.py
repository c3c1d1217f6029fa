"""Losses that weigh images by their class."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from sklearn.utils.class_weight import compute_class_weight

from pycls_fast import build
from pycls_fast.config import load_config
from pycls_fast.losses import BinaryCrossEntropy, ClassWeighted, CrossEntropy, Targets, balanced_weights
from pycls_fast.speed import Speed

CPU = torch.device("cpu")
LABELS = torch.tensor([0, 0, 0, 0, 0, 1, 1, 2])
LOGITS = torch.randn(8, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def test_weights_are_those_of_scikit_learn() -> None:
    expected = compute_class_weight("balanced", classes=np.arange(3), y=LABELS.numpy())
    assert balanced_weights(torch.bincount(LABELS)).tolist() == pytest.approx(expected.tolist())
    with_none = balanced_weights(torch.tensor([5, 0, 2, 1]))
    assert with_none.tolist() == pytest.approx([expected[0], 1.0, expected[1], expected[2]])


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_every_image_counts_as_its_class_weighs(smoothing: float) -> None:
    weights = torch.tensor([0.5, 2.0, 3.0], dtype=torch.float64)
    loss = ClassWeighted(CrossEntropy(smoothing), weights)
    each = F.cross_entropy(LOGITS, LABELS, label_smoothing=smoothing, reduction="none")
    assert loss(LOGITS, Targets(LABELS)).item() == pytest.approx((weights[LABELS] * each).mean().item(), rel=1e-12)
    # Parts of a batch have the mean of their losses, whatever is in them.
    halves = [loss(LOGITS[part], Targets(LABELS[part])) for part in (slice(0, 4), slice(4, 8))]
    assert sum(halves).item() / 2 == pytest.approx(loss(LOGITS, Targets(LABELS)).item(), rel=1e-12)


@pytest.mark.parametrize("plain", [CrossEntropy(0.1), BinaryCrossEntropy(0.1), BinaryCrossEntropy(0.1, "sum")])
@pytest.mark.parametrize("lam", [0.3, torch.linspace(0, 1, 8, dtype=torch.float64)])
def test_equal_weights_are_the_plain_loss(plain: CrossEntropy, lam: float | torch.Tensor) -> None:
    ones = torch.ones(3, dtype=torch.float64)
    for targets in (Targets(LABELS), Targets(LABELS, LABELS.flip(0), lam)):
        expected = plain(LOGITS, targets).item()
        assert ClassWeighted(plain, ones)(LOGITS, targets).item() == pytest.approx(expected, rel=1e-12)
        assert ClassWeighted(plain, 2 * ones)(LOGITS, targets).item() == pytest.approx(2 * expected, rel=1e-12)


def test_both_classes_of_a_mixed_image_weigh_in() -> None:
    weights = torch.tensor([1.0, 10.0, 100.0], dtype=torch.float64)
    each = CrossEntropy().each
    one, other = torch.tensor([1]), torch.tensor([2])
    expected = 0.25 * 10 * each(LOGITS[:1], one) + 0.75 * 100 * each(LOGITS[:1], other)
    found = ClassWeighted(CrossEntropy(), weights)(LOGITS[:1], Targets(one, other, 0.25))
    assert found.item() == pytest.approx(expected.item(), rel=1e-12)


def test_the_configuration_weighs() -> None:
    switches = Speed()
    config = load_config("vit_digits", ["loss.class_weights=balanced", "model.num_classes=5"])
    made = build.loss(config, switches, CPU, 3, np.array([5, 2, 1]))
    assert isinstance(made, ClassWeighted)
    assert made.plain == CrossEntropy(0.1)
    assert made.weights_K.tolist() == pytest.approx([8 / 15, 8 / 6, 8 / 3, 1.0, 1.0])
    assert build.loss(load_config("vit_digits"), switches, CPU, 3, np.array([5, 2, 1])) == CrossEntropy(0.1)
