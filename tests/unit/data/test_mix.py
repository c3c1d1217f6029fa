"""Mixup and CutMix against torchvision's, and the draws against their distributions."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
import torch
from torchvision.transforms import v2

from pycls_fast.data.mix import ElementMixer, Mixer, cutmix, cutmix_box, mixup


def random_images(batch: int = 6, height: int = 20, width: int = 14) -> torch.Tensor:
    return torch.randn(batch, 3, height, width, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def soft_targets(labels: tuple[torch.Tensor, torch.Tensor, float], classes: int) -> torch.Tensor:
    labels_a_B, labels_b_B, lam = labels
    one_hot = torch.nn.functional.one_hot
    return lam * one_hot(labels_a_B, classes).double() + (1 - lam) * one_hot(labels_b_B, classes).double()


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


@pytest.mark.parametrize("seed", range(30))
def test_targets_have_the_shares_of_the_images(seed: int) -> None:
    """Images that show nothing but their own label, mixed, show the share of each label."""
    mixer = Mixer(mixup_alpha=0.8, cutmix_alpha=1.0)
    images_BCHW = torch.nn.functional.one_hot(LABELS, 6).double()[:, :, None, None].repeat(1, 1, 20, 14)
    mixed_BCHW, mixed = mixer(images_BCHW, seed)
    torch.testing.assert_close(mixed_BCHW.mean((2, 3)), soft_targets(mixed.labels(LABELS), 6))


def test_only_the_seed_decides() -> None:
    mixer = Mixer(mixup_alpha=0.8, cutmix_alpha=1.0, probability=0.8)
    images_BCHW = random_images()
    before = images_BCHW.clone()
    first = [mixer(images_BCHW, seed) for seed in range(50)]
    torch.manual_seed(9)
    state = torch.get_rng_state()
    random_state = random.getstate()
    for seed, (mixed_BCHW, mixed) in enumerate(first):
        again_BCHW, again = mixer(images_BCHW, seed)
        assert torch.equal(again_BCHW, mixed_BCHW)
        assert again == mixed
    assert torch.equal(torch.get_rng_state(), state)
    assert random.getstate() == random_state
    assert torch.equal(images_BCHW, before), "the input was changed"
    assert len({mixed.lam for _, mixed in first}) > 30


def is_cutmix(images_BCHW: torch.Tensor, mixed_BCHW: torch.Tensor) -> bool:
    """CutMix only moves pixels."""
    moved = (mixed_BCHW == images_BCHW) | (mixed_BCHW == images_BCHW.roll(1, 0))
    return bool(moved.all())


def test_probabilities() -> None:
    mixer = Mixer(mixup_alpha=0.8, cutmix_alpha=1.0, switch_probability=0.3, probability=0.6)
    images_BCHW = random_images(2, 8, 8)
    count, untouched, cut = 2000, 0, 0
    for seed in range(count):
        mixed_BCHW, mixed = mixer(images_BCHW, seed)
        if mixed_BCHW is images_BCHW:
            assert mixed.lam == 1
            untouched += 1
        else:
            cut += is_cutmix(images_BCHW, mixed_BCHW)
    assert untouched / count == pytest.approx(0.4, abs=5 * math.sqrt(0.24 / count))
    assert cut / (count - untouched) == pytest.approx(0.3, abs=5 * math.sqrt(0.21 / (count - untouched)))


@pytest.mark.slow
@pytest.mark.parametrize("alpha", [0.2, 1.0, 3.0])
def test_lam_is_beta_distributed(alpha: float) -> None:
    mixer = Mixer(mixup_alpha=alpha)
    images_BCHW = random_images(2, 2, 2)
    lams = np.array([mixer(images_BCHW, seed)[1].lam for seed in range(3000)])
    variance = 1 / (4 * (2 * alpha + 1))
    assert lams.mean() == pytest.approx(0.5, abs=5 * math.sqrt(variance / len(lams)))
    assert lams.var() == pytest.approx(variance, rel=0.12)


def test_cutmix_share_is_the_area_that_was_cut() -> None:
    mixer = Mixer(cutmix_alpha=1.0)
    images_BCHW = random_images(2, 16, 16)
    lams = []
    for seed in range(300):
        mixed_BCHW, mixed = mixer(images_BCHW, seed)
        assert is_cutmix(images_BCHW, mixed_BCHW)
        kept = (mixed_BCHW == images_BCHW).double().mean().item()
        assert mixed.lam == pytest.approx(kept, abs=1e-12)
        lams.append(mixed.lam)
    assert min(lams) < 0.4
    assert max(lams) > 0.95


def test_one_way_alone_ignores_the_switch() -> None:
    images_BCHW = random_images(4, 16, 16)
    for seed in range(30):
        mixed_BCHW, mixed = Mixer(cutmix_alpha=1.0, switch_probability=0.0)(images_BCHW, seed)
        assert is_cutmix(images_BCHW, mixed_BCHW)
        mixed_BCHW, mixed = Mixer(mixup_alpha=1.0, switch_probability=1.0)(images_BCHW, seed)
        expected = mixed.lam * images_BCHW + (1 - mixed.lam) * images_BCHW.roll(1, 0)
        torch.testing.assert_close(mixed_BCHW, expected)


def test_switched_off() -> None:
    images_BCHW = random_images()
    mixed_BCHW, mixed = Mixer(mixup_alpha=0.8, probability=0.0)(images_BCHW, 3)
    assert mixed_BCHW is images_BCHW
    assert mixed.labels(LABELS)[2] == 1


def test_layout_is_kept() -> None:
    images_BCHW = random_images().float().contiguous(memory_format=torch.channels_last)
    for mixer in (Mixer(mixup_alpha=0.8), Mixer(cutmix_alpha=0.8)):
        mixed_BCHW, _ = mixer(images_BCHW, 1)
        assert mixed_BCHW.dtype == torch.float32
        assert mixed_BCHW.is_contiguous(memory_format=torch.channels_last)


def test_layout_is_kept_where_roll_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """On CUDA `roll` gives contiguous tensors."""
    roll = torch.Tensor.roll
    monkeypatch.setattr(torch.Tensor, "roll", lambda tensor, *arguments: roll(tensor.contiguous(), *arguments))
    test_layout_is_kept()


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("mixer", [
    Mixer(mixup_alpha=0.8), Mixer(cutmix_alpha=0.8),
    ElementMixer(mode="elem", mixup_alpha=0.8, cutmix_alpha=0.0),
    ElementMixer(mode="elem", mixup_alpha=0.0, cutmix_alpha=0.8),
])  # fmt: skip
def test_cuda_mixes_as_the_cpu_and_keeps_the_layout(mixer: Mixer | ElementMixer) -> None:
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
