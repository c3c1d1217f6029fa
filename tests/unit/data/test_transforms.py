"""Augmentation: torchvision's operations, decided by the seed alone."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from timm.data import create_transform
from torchvision.transforms import InterpolationMode, v2

from pycls_fast.data.choices import Augment
from pycls_fast.data.crop import NO_BOX
from pycls_fast.data.decoders import PillowPicture
from pycls_fast.data.policies import RandAugment
from pycls_fast.data.transforms import EvalTransform, TrainTransform
from pycls_fast.seeds import seeded_torch


def photo(width: int = 50, height: int = 37, seed: int = 0) -> Image.Image:
    """Random pixels, smoothed so that resizing leaves something to see."""
    pixels = np.random.default_rng(seed).integers(0, 256, (height // 3 + 1, width // 3 + 1, 3), dtype=np.uint8)
    return Image.fromarray(pixels).resize((width, height), Image.Resampling.BICUBIC)


@pytest.mark.parametrize(
    ("interpolation", "size"), [("bilinear", (24, 24)), ("bicubic", (24, 24)), ("bicubic", (20, 32))]
)
def test_same_draws_as_torchvision(interpolation: Any, size: tuple[int, int]) -> None:
    """torchvision's preset (crop, flips, RandAugment), seeded the same way, gives the same pixels."""
    policy = RandAugment(num_ops=3, magnitude=11)
    augment = Augment(scale=(0.2, 0.9), interpolation=interpolation, policy=policy, hflip=0.3, vflip=0.7)
    ours = TrainTransform(augment, image_size=size)
    mode, proportions = InterpolationMode(interpolation), size[1] / size[0]
    theirs = v2.Compose(
        [
            v2.RandomResizedCrop(
                size, scale=(0.2, 0.9), ratio=(3 / 4 * proportions, 4 / 3 * proportions), interpolation=mode
            ),
            v2.RandomHorizontalFlip(0.3),
            v2.RandomVerticalFlip(0.7),
            v2.RandAugment(3, 11, interpolation=mode),
        ]
    )
    for seed in range(60):
        image = photo(seed=seed)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            expected = np.asarray(theirs(image))
        np.testing.assert_array_equal(ours(PillowPicture(image), seed).image_HWC, expected)


def test_quarter_turns_are_pillows_each_as_often() -> None:
    image, transform = photo(24, 24), TrainTransform(Augment(crop="none", hflip=0, quarter_turns=True), image_size=24)
    turns = [np.asarray(image.rotate(angle)) for angle in (0, 90, 180, 270)]
    found = [transform(PillowPicture(image), seed).image_HWC for seed in range(200)]
    assert min(sum(np.array_equal(each, turn) for each in found) for turn in turns) > 25
    assert sum(np.array_equal(each, turn) for each in found for turn in turns) == 200


def test_erase_boxes_are_those_of_torchvision() -> None:
    transform = TrainTransform(Augment(crop="none", hflip=0.0, erase_probability=0.25), image_size=(32, 40))
    erasing = v2.RandomErasing(p=1.0)
    expected = []
    for seed in range(200):
        with seeded_torch(seed):
            is_erased = torch.rand(()).item() < 0.25
            drawn = erasing.make_params([torch.empty(3, 32, 40)])
        expected.append((drawn["i"], drawn["j"], drawn["h"], drawn["w"]) if is_erased else NO_BOX)
    assert [transform(PillowPicture(photo(40, 32)), seed).erase for seed in range(200)] == expected
    assert 30 < sum(box != NO_BOX for box in expected) < 70
    assert transform.erases
    assert not TrainTransform(Augment(), image_size=32).erases
    assert TrainTransform(Augment(), image_size=32)(PillowPicture(photo()), 0).erase == NO_BOX


@pytest.mark.parametrize("size", [(50, 37), (37, 50), (24, 24), (8, 8), (11, 8), (300, 20), (31, 200)])
@pytest.mark.parametrize("crop", ["center", "squash", "border"])
@pytest.mark.parametrize("crop_pct", [1.0, 0.9, 0.75])
def test_evaluation_crops_are_timms(size: tuple[int, int], crop: Any, crop_pct: float) -> None:
    image, mean = photo(*size), (0.1, 0.5, 0.9)
    theirs = create_transform(
        (3, 24, 24), interpolation="bicubic", crop_mode=crop, crop_pct=crop_pct, mean=mean, normalize=False
    )
    side = math.floor(24 / crop_pct)
    transform = EvalTransform(
        Augment(eval_crop=crop, eval_crop_ratio=24 / side, interpolation="bicubic"), image_size=24, mean=mean
    )
    result = transform(PillowPicture(image), 0).image_HWC
    np.testing.assert_array_equal(result, theirs(image).permute(1, 2, 0).numpy())


def by_pillow(image: Image.Image, how: str, size: tuple[int, int], whole: tuple[int, int]) -> np.ndarray:
    """Resized to `whole` (height, width) by what `how` means, and centred on a canvas of `size`, green beyond it."""
    scales = [Fraction(side, pixels) for side, pixels in zip(whole[::-1], image.size, strict=True)]
    if how == "center":
        scales = [max(scales)] * 2
    elif how == "border":
        scales = [min(scales)] * 2
    width, height = (pixels * scale for pixels, scale in zip(image.size, scales, strict=True))
    whole_pixels = int if how == "center" else round
    resized = image.resize((whole_pixels(width), whole_pixels(height)), Image.Resampling.BICUBIC)
    left, top = (round((pixels - side) / 2) for pixels, side in zip(resized.size, size[::-1], strict=True))
    canvas = Image.new("RGB", size[::-1], (0, 255, 0))
    canvas.paste(resized, ((size[1] - resized.width) // 2 if left < 0 else -left,
                           (size[0] - resized.height) // 2 if top < 0 else -top))  # fmt: skip
    return np.asarray(canvas)


@pytest.mark.parametrize("size", [(24, 24), (48, 32), (20, 45)])
@pytest.mark.parametrize("crop", ["center", "squash", "border"])
def test_rectangles_and_whole_images_are_pillows(crop: Any, size: tuple[int, int]) -> None:
    training = TrainTransform(
        Augment(crop="none" if crop == "center" else crop, interpolation="bicubic"), image_size=size, mean=(0, 1, 0)
    )
    flipped = set()
    for width, height in [(50, 37), (37, 50), (24, 24), (8, 11), (200, 20), (31, 200)]:
        image = photo(width, height)
        for ratio in (1.0, 0.8):
            augment = Augment(eval_crop=crop, eval_crop_ratio=ratio, interpolation="bicubic")
            found = EvalTransform(augment, image_size=size, mean=(0, 1, 0))(PillowPicture(image), 0).image_HWC
            whole = round(size[0] / ratio), round(size[1] / ratio)
            np.testing.assert_array_equal(found, by_pillow(image, crop, size, whole))
        for seed in range(4):
            found, expected = training(PillowPicture(image), seed).image_HWC, by_pillow(image, crop, size, size)
            # The border is not flipped; it may differ by a pixel from left to right.
            turned = by_pillow(image.transpose(Image.Transpose.FLIP_LEFT_RIGHT), crop, size, size)
            mirrored = turned if crop == "border" else expected[:, ::-1]
            flipped.add(np.array_equal(found, mirrored))
            assert np.array_equal(found, expected) != np.array_equal(found, mirrored)
    assert flipped == {True, False}


@pytest.mark.parametrize("size", [(1, 60_000), (60_000, 1)])
def test_extreme_proportions(size: tuple[int, int]) -> None:
    """Resized whole, such a line would need 224 x 13 million pixels."""
    line = Image.new("RGB", size, (10, 20, 30))
    for transform in (
        EvalTransform(Augment(), image_size=224),
        EvalTransform(Augment(eval_crop="squash"), image_size=224),
        TrainTransform(Augment(crop="none"), image_size=224),
        TrainTransform(Augment(), image_size=224),
        TrainTransform(Augment(), image_size=(32, 256)),
        TrainTransform(Augment(), image_size=(256, 32)),
    ):
        assert (transform(PillowPicture(line), 0).image_HWC == [10, 20, 30]).all()
    bordered = EvalTransform(Augment(eval_crop="border"), image_size=224, mean=(0, 0, 0))(
        PillowPicture(line), 0
    ).image_HWC
    drawn = (bordered == [10, 20, 30]).all(2)
    # One line of pixels through the middle; around it is only the border.
    assert drawn.sum() == 224
    assert (drawn.any(0) if size[0] < size[1] else drawn.any(1)).nonzero()[0].tolist() in ([111], [112])
    assert (bordered[~drawn] == 0).all()
