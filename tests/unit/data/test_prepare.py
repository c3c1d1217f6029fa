"""Normalising and erasing on the device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torchvision.transforms.v2 import functional as F

from pycls_fast.data.batch import Batch
from pycls_fast.data.prepare import Prepare

MEAN, STD = (0.4, 0.5, 0.3), (0.2, 0.3, 0.25)
BOXES = [[0, 0, 0, 0], [1, 2, 3, 4], [0, 0, 6, 7], [5, 6, 1, 1], [2, 0, 4, 1]]


def random_batch(erase: bool = False) -> Batch:
    generator = torch.Generator().manual_seed(0)
    images_BHWC = torch.randint(0, 256, (5, 6, 7, 3), dtype=torch.uint8, generator=generator)
    return Batch(
        images_BHWC=images_BHWC,
        labels_B=torch.arange(5),
        indices_B=torch.arange(5),
        erase_B4=torch.tensor(BOXES) if erase else None,
    )


def plain_mask() -> torch.Tensor:
    mask_BHW = torch.zeros(5, 6, 7, dtype=torch.bool)
    for image, (top, left, height, width) in enumerate(BOXES):
        mask_BHW[image, top : top + height, left : left + width] = True
    return mask_BHW


def test_same_as_torchvision() -> None:
    """But for the rounding of 1 / 255, by which torchvision multiplies."""
    batch = random_batch()
    images_BCHW = Prepare(MEAN, STD)(batch)
    expected = F.normalize(F.to_dtype(batch.images_BHWC.permute(0, 3, 1, 2), scale=True), MEAN, STD)
    torch.testing.assert_close(images_BCHW, expected, rtol=0, atol=1e-6)


def test_layout_is_channels_last() -> None:
    images_BCHW = Prepare(MEAN, STD)(random_batch(erase=True))
    assert images_BCHW.shape == (5, 3, 6, 7)
    assert images_BCHW.is_contiguous(memory_format=torch.channels_last)
    noisy_BCHW = Prepare(MEAN, STD, erase_value="noise")(random_batch(erase=True))
    assert noisy_BCHW.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("erase_value", [None, "mean", "noise"])
def test_contiguous_has_the_same_values(erase_value: Any) -> None:
    found = []
    for memory_format in ("channels_last", "contiguous"):
        torch.manual_seed(0)
        prepare = Prepare(MEAN, STD, erase_value=erase_value or "mean", memory_format=memory_format)  # type: ignore[arg-type]
        found.append(prepare(random_batch(erase=erase_value is not None)))
    assert found[0].is_contiguous(memory_format=torch.channels_last)
    assert found[1].is_contiguous()
    assert torch.equal(*found)


def test_float64() -> None:
    batch = random_batch()
    x = batch.images_BHWC.permute(0, 3, 1, 2).double()
    mean, std = (torch.tensor(values, dtype=torch.float64)[:, None, None] for values in (MEAN, STD))
    images_BCHW = Prepare(MEAN, STD, dtype=torch.float64)(batch)
    torch.testing.assert_close(images_BCHW, (x / 255 - mean) / std, rtol=1e-15, atol=1e-15)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_is_rounded_once(dtype: torch.dtype) -> None:
    batch = random_batch()
    assert torch.equal(Prepare(MEAN, STD, dtype=dtype)(batch), Prepare(MEAN, STD)(batch).to(dtype))


def test_the_batch_is_left_alone() -> None:
    batch = random_batch(erase=True)
    before = batch.images_BHWC.clone()
    Prepare(MEAN, STD)(batch)
    assert torch.equal(batch.images_BHWC, before)


def test_erased_boxes_become_the_mean() -> None:
    images_BCHW = Prepare(MEAN, STD)(random_batch(erase=True))
    untouched_BCHW = Prepare(MEAN, STD)(random_batch())
    mask_BCHW = plain_mask()[:, None].expand(-1, 3, -1, -1)
    assert (images_BCHW[mask_BCHW] == 0).all()
    assert torch.equal(images_BCHW[~mask_BCHW], untouched_BCHW[~mask_BCHW])


def test_erased_boxes_become_noise_of_the_default_generator() -> None:
    size = 64
    batch = Batch(
        images_BHWC=torch.full((4, size, size, 3), 200, dtype=torch.uint8),
        labels_B=torch.arange(4),
        indices_B=torch.arange(4),
        erase_B4=torch.tensor([[0, 0, size, size]] * 3 + [[0, 0, 0, 0]]),
    )
    prepare = Prepare(MEAN, STD, erase_value="noise")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        first = prepare(batch)
        second = prepare(batch)
        torch.manual_seed(1)
        assert torch.equal(prepare(batch), first)
    assert not torch.equal(first, second)
    noise = first[:3].double()
    assert abs(noise.mean().item()) < 5 / noise.numel() ** 0.5
    assert abs(noise.std().item() - 1) < 5 / (2 * noise.numel()) ** 0.5
    plain = Prepare(MEAN, STD)(Batch(batch.images_BHWC, batch.labels_B, batch.indices_B, None))
    assert torch.equal(first[3], plain[3])


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_host_never_waits() -> None:
    prepare = Prepare(MEAN, STD, erase_value="noise", device="cuda")
    batch = random_batch(erase=True).to(torch.device("cuda"))
    torch.cuda.set_sync_debug_mode("error")
    try:
        images_BCHW = prepare(batch)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert images_BCHW.is_cuda
