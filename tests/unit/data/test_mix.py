"""Mixup and CutMix against torchvision's and timm's, the draws against their distributions, losses of label pairs."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from timm.data.mixup import Mixup
from torchvision.transforms import v2

from pycls_fast.data.prepare import Mixer, cutmix, cutmix_box, mixup


def random_images(batch: int = 6, height: int = 20, width: int = 14) -> torch.Tensor:
    return torch.randn(batch, 3, height, width, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def soft_targets(labels: tuple[torch.Tensor, torch.Tensor, Any], classes: int = 6) -> torch.Tensor:
    one_B, other_B, lam = labels
    lam_B1 = torch.as_tensor(lam, dtype=torch.float64).reshape(-1, 1)
    one_hot = torch.nn.functional.one_hot
    return lam_B1 * one_hot(one_B, classes) + (1 - lam_B1) * one_hot(other_B, classes)


LABELS = torch.tensor([3, 1, 4, 1, 5, 0])


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("kind", ["mixup", "cutmix"])
def test_same_formula_as_torchvision(kind: str, seed: int) -> None:
    """With lam and centre as torchvision drew them, images and targets are torchvision's."""
    images_BCHW = random_images()
    theirs = (v2.MixUp if kind == "mixup" else v2.CutMix)(num_classes=6, alpha=0.8)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        expected_images, expected_targets = theirs(images_BCHW, LABELS)
        torch.manual_seed(seed)
        params = theirs.make_params([images_BCHW])
    if kind == "mixup":
        lam = params["lam"]
        mixed_BCHW = mixup(images_BCHW, lam)
    else:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            drawn_lam = float(theirs._dist.sample(()))
            center_x, center_y = int(torch.randint(14, (1,))), int(torch.randint(20, (1,)))
        top, bottom, left, right = cutmix_box(drawn_lam, 20, 14, center_y, center_x)
        assert (left, top, right, bottom) == params["box"]
        lam = params["lam_adjusted"]
        mixed_BCHW = cutmix(images_BCHW, (top, bottom, left, right))
    torch.testing.assert_close(mixed_BCHW, expected_images, rtol=1e-12, atol=1e-12)
    targets = soft_targets((LABELS, LABELS.roll(1, 0), lam), 6)
    torch.testing.assert_close(targets, expected_targets.double(), rtol=1e-6, atol=1e-6)


EIGHT = torch.tensor([3, 1, 4, 1, 5, 0, 2, 2])
ALPHAS: dict[str, Any] = {"mixup_alpha": 0.8, "cutmix_alpha": 1.0, "probability": 0.9}
MIXER = Mixer(**ALPHAS)


@pytest.mark.parametrize("seed", range(20))
def test_targets_have_the_shares_of_the_images(seed: int) -> None:
    """Images that show nothing but their own label, mixed, show the share of each label."""
    images_BCHW = torch.nn.functional.one_hot(EIGHT, 6).double()[:, :, None, None].repeat(1, 1, 20, 14)
    mixed_BCHW, lam = MIXER(images_BCHW, seed)
    expected_BK = soft_targets((EIGHT, EIGHT.roll(1, 0), lam))
    torch.testing.assert_close(mixed_BCHW.mean((2, 3)), expected_BK, rtol=1e-5, atol=1e-6)


def test_only_the_seed_decides() -> None:
    mixer, images_BCHW = MIXER, random_images()
    before = images_BCHW.clone()
    first = [mixer(images_BCHW, seed) for seed in range(50)]
    torch.manual_seed(9)
    states = torch.get_rng_state().tolist(), random.getstate()
    for seed, (mixed_BCHW, lam) in enumerate(first):
        again_BCHW, again = mixer(images_BCHW, seed)
        assert torch.equal(again_BCHW, mixed_BCHW)
        assert again == lam
    assert (torch.get_rng_state().tolist(), random.getstate()) == states
    assert torch.equal(images_BCHW, before), "the input was changed"
    assert len({lam for _, lam in first}) > 30


def test_layout_is_kept() -> None:
    images_BCHW = random_images().float().contiguous(memory_format=torch.channels_last)
    for mixer in (Mixer(mixup_alpha=0.8), Mixer(cutmix_alpha=0.8)):
        mixed_BCHW, _ = mixer(images_BCHW, 1)
        assert mixed_BCHW.dtype == torch.float32
        assert mixed_BCHW.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("mixer", [Mixer(mixup_alpha=0.8), Mixer(cutmix_alpha=0.8)])
def test_cuda_mixes_as_the_cpu_and_keeps_the_layout(mixer: Mixer) -> None:
    images_BCHW = random_images().float().contiguous(memory_format=torch.channels_last)
    expected_BCHW, _ = mixer(images_BCHW, 1)
    mixed_BCHW, _ = mixer(images_BCHW.cuda(), 1)
    assert mixed_BCHW.is_contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(mixed_BCHW.cpu(), expected_BCHW)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_host_never_waits() -> None:
    images_BCHW = random_images().cuda()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for seed in range(10):
            Mixer(mixup_alpha=0.8, cutmix_alpha=1.0)(images_BCHW, seed)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize(("mixup", "cutmix"), [(0.8, 0.0), (0.0, 1.0), (0.8, 1.0)])
def test_distribution_is_timm_s(mixup: float, cutmix: float) -> None:
    """Shares of the labels over many batches, by their mean and spread, from independent draws."""
    ours, theirs = [], []
    mixer = replace(MIXER, mixup_alpha=mixup, cutmix_alpha=cutmix, probability=0.7, switch_probability=0.4)
    reference = Mixup(mixup, cutmix, prob=0.7, switch_prob=0.4, mode="batch", label_smoothing=0.0, num_classes=8)
    images_BCHW = torch.zeros(8, 1, 16, 16)
    own = torch.arange(8)
    state = np.random.get_state()
    np.random.seed(0)
    for seed in range(400):
        ours.append(np.full(8, mixer(images_BCHW, seed)[1]))
        _, target = reference(images_BCHW.clone(), own)
        theirs.append(target[own, own].numpy())
    np.random.set_state(state)
    mine, expected = np.stack(ours), np.stack(theirs)
    independent = len(mine)
    assert abs(mine.mean() - expected.mean()) < 5 * math.sqrt(2 * expected.var() / independent)
    assert mine.std() == pytest.approx(expected.std(), rel=0.1)
    assert (mine == 1).mean() == pytest.approx((expected == 1).mean(), abs=0.05)
