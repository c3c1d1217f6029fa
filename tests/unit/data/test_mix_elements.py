"""Mixing by element and by pair: against timm's formulas, its distribution, and the losses of label pairs."""

from __future__ import annotations

import math
from typing import Any, Literal

import numpy as np
import pytest
import torch
from timm.data.mixup import Mixup

from pycls_fast.data.mix import ElementMixer
from pycls_fast.losses import BinaryCrossEntropy, CrossEntropy, Targets

MODES: tuple[Literal["pair", "elem"], ...] = ("pair", "elem")
LABELS = torch.tensor([3, 1, 4, 1, 5, 0, 2, 2])


def soft(labels: tuple[torch.Tensor, torch.Tensor, torch.Tensor], classes: int = 6) -> torch.Tensor:
    one, other, lam_B = labels
    one_hot = torch.nn.functional.one_hot
    return lam_B[:, None] * one_hot(one, classes) + (1 - lam_B[:, None]) * one_hot(other, classes)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("seed", range(20))
def test_images_have_the_shares_of_the_targets(mode: Any, seed: int) -> None:
    """Images that show nothing but their own label, mixed, show the share of each label."""
    mixer = ElementMixer(mode=mode, mixup_alpha=0.8, cutmix_alpha=1.0, probability=0.9)
    images_BCHW = torch.nn.functional.one_hot(LABELS, 6).double()[:, :, None, None].repeat(1, 1, 20, 14)
    before = images_BCHW.clone()
    mixed_BCHW, mixed = mixer(images_BCHW, seed)
    assert torch.equal(images_BCHW, before)
    torch.testing.assert_close(mixed_BCHW.mean((2, 3)), soft(mixed.labels(LABELS)).double(), rtol=1e-5, atol=1e-6)
    again_BCHW, again = mixer(images_BCHW, seed)
    assert torch.equal(again_BCHW, mixed_BCHW)
    assert torch.equal(again.lam_B, mixed.lam_B)
    if mode == "pair":
        torch.testing.assert_close(mixed.lam_B, mixed.lam_B.flip(0))
    else:
        assert len(mixed.lam_B.unique()) > 4


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("mixup", "cutmix"), [(0.8, 0.0), (0.0, 1.0), (0.8, 1.0)])
def test_distribution_is_timm_s(mode: Any, mixup: float, cutmix: float) -> None:
    """Shares of the labels over many batches, by their mean and spread, from independent draws."""
    ours, theirs = [], []
    mixer = ElementMixer(mode=mode, mixup_alpha=mixup, cutmix_alpha=cutmix, probability=0.7, switch_probability=0.4)
    reference = Mixup(mixup, cutmix, prob=0.7, switch_prob=0.4, mode=mode, label_smoothing=0.0, num_classes=8)
    images_BCHW = torch.zeros(8, 1, 16, 16)
    own = torch.arange(8)
    state = np.random.get_state()
    np.random.seed(0)
    for seed in range(400):
        ours.append(mixer(images_BCHW, seed)[1].lam_B.numpy())
        _, target = reference(images_BCHW.clone(), own)
        theirs.append(target[own, own].numpy())
    np.random.set_state(state)
    mine, expected = np.stack(ours), np.stack(theirs)
    independent = mine.size // (2 if mode == "pair" else 1)
    assert abs(mine.mean() - expected.mean()) < 5 * math.sqrt(2 * expected.var() / independent)
    assert mine.std() == pytest.approx(expected.std(), rel=0.1)
    assert (mine == 1).mean() == pytest.approx((expected == 1).mean(), abs=0.05)


@pytest.mark.parametrize("loss", [CrossEntropy(0.1), BinaryCrossEntropy(0.1), BinaryCrossEntropy(0.1, "sum")])
def test_losses_take_a_share_of_each_image(loss: Any) -> None:
    logits_BK = torch.randn(8, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    other_B, lam_B = LABELS.flip(0), torch.rand(8, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    whole = loss(logits_BK, Targets(LABELS, other_B, lam_B))
    parts = [
        loss(logits_BK[i : i + 1], Targets(LABELS[i : i + 1], other_B[i : i + 1], float(lam_B[i]))) for i in range(8)
    ]
    torch.testing.assert_close(whole, torch.stack(parts).mean())
