"""Augmentation of one image in a worker: RGB in, a uint8 square out, all draws from one seed.

The operations are torchvision.transforms.v2's on Pillow images, in the order of its classification presets:
crop, flip, color jitter, RandAugment. Random erasing is only drawn here; the box travels with the sample and
is filled on the device after normalising.
"""

from __future__ import annotations

from typing import Literal, NamedTuple, Protocol

import numpy as np
import torch
from PIL import Image
from torchvision.transforms import InterpolationMode, v2
from torchvision.transforms.v2 import functional as F

from pycls_fast.data.draws import seeded_torch

Interpolation = Literal["bilinear", "bicubic"]
Crop = Literal["random_resized", "pad", "none"]
Box = tuple[int, int, int, int]
"""(top, left, height, width) in pixels."""

NO_BOX: Box = (0, 0, 0, 0)
_LONGEST_SIDE = 16


class Augmented(NamedTuple):
    """What a transform makes of one image."""

    image_HWC: np.ndarray
    """uint8, `image_size` x `image_size` x 3."""
    erase: Box
    """The box to erase on the device; all zeros for none."""


class Transform(Protocol):
    """What a dataset needs of a transform."""

    @property
    def image_size(self) -> int:
        """Height and width of the result, in pixels."""

    @property
    def erases(self) -> bool:
        """Whether there can be boxes to erase."""

    def __call__(self, image: Image.Image, seed: int) -> Augmented: ...


class TrainTransform:
    """Random crop, flip and colors for training."""

    def __init__(
        self,
        *,
        image_size: int,
        crop: Crop = "random_resized",
        scale: tuple[float, float] = (0.08, 1.0),
        ratio: tuple[float, float] = (3 / 4, 4 / 3),
        pad: int = 4,
        interpolation: Interpolation = "bilinear",
        hflip: float = 0.5,
        rand_augment: tuple[int, int] | None = None,
        color_jitter: tuple[float, float, float, float] | None = None,
        erase_probability: float = 0.0,
    ) -> None:
        """
        Args:
            image_size: height and width of the result, in pixels.
            crop: "random_resized": a random part of the image, resized (Szegedy et al. 2015, section 6; the
                defaults are theirs). "pad": the whole image, `pad` black pixels on each side, a random crop
                of it (He et al. 2016, section 4.2). "none": the whole image. Where the whole image is not
                `image_size` square, its short side is resized to that and the centre cut out.
            scale: the cut's share of the area, smallest and largest.
            ratio: the cut's width / height, smallest and largest.
            hflip: probability of a left-right flip.
            rand_augment: (operations, magnitude 0..30), RandAugment of Cubuk et al. 2019 as in torchvision.
            color_jitter: (brightness, contrast, saturation, hue): factors from 1 +- value, hue from +- value
                turns.
            erase_probability: of drawing a box to erase (Zhong et al. 2017: 2% to 33% of the area, ratio 0.3
                to 3.3).
        """
        mode = InterpolationMode(interpolation)
        steps: list[torch.nn.Module] = []
        if crop == "random_resized":
            steps.append(v2.RandomResizedCrop(image_size, scale=scale, ratio=ratio, interpolation=mode))
        elif crop == "pad":
            steps.append(v2.RandomCrop(image_size, padding=pad))
        elif crop != "none":
            raise ValueError(f"unknown crop {crop!r}")
        if hflip > 0:
            steps.append(v2.RandomHorizontalFlip(hflip))
        if color_jitter is not None:
            steps.append(v2.ColorJitter(*color_jitter))
        if rand_augment is not None:
            num_ops, magnitude = rand_augment
            steps.append(v2.RandAugment(num_ops, magnitude, interpolation=mode))
        self.image_size = image_size
        self.erases = erase_probability > 0
        self._whole_image = crop != "random_resized"
        self._interpolation = mode
        self._steps = steps
        self._erase_probability = erase_probability
        self._erasing = v2.RandomErasing(p=1.0, value=0)
        # Only its shape is looked at when a box is drawn.
        self._canvas = torch.empty(3, image_size, image_size, device="meta")

    def __call__(self, image: Image.Image, seed: int) -> Augmented:
        """Augment one RGB image; the result is a function of the image and the seed alone."""
        if self._whole_image:
            image = _fit(image, self.image_size, self.image_size, self._interpolation)
        with seeded_torch(seed):
            for step in self._steps:
                image = step(image)
            erase = self._draw_box() if self.erases else NO_BOX
        return Augmented(np.asarray(image), erase)

    def _draw_box(self) -> Box:
        if torch.rand(()).item() >= self._erase_probability:
            return NO_BOX
        params = self._erasing.make_params([self._canvas])
        # torchvision's sign for "ten draws and no box fitted".
        if params["v"] is None:
            return NO_BOX
        return params["i"], params["j"], params["h"], params["w"]


class EvalTransform:
    """The centre of the image: short side to `round(image_size / crop_ratio)`, then a centre crop.

    There is no randomness. 224 of 256 pixels (crop_ratio 0.875) is Krizhevsky et al. 2012's; 1.0 takes the
    whole short side.
    """

    erases = False

    def __init__(
        self, *, image_size: int, crop_ratio: float = 0.875, interpolation: Interpolation = "bilinear"
    ) -> None:
        if not 0 < crop_ratio <= 1:
            raise ValueError(f"crop_ratio must lie in (0, 1], got {crop_ratio}")
        self.image_size = image_size
        self._short_side = round(image_size / crop_ratio)
        self._interpolation = InterpolationMode(interpolation)

    def __call__(self, image: Image.Image, seed: int) -> Augmented:
        """Cut one RGB image; `seed` is not used."""
        return Augmented(np.asarray(_fit(image, self._short_side, self.image_size, self._interpolation)), NO_BOX)


def _fit(image: Image.Image, short_side: int, size: int, interpolation: InterpolationMode) -> Image.Image:
    """Resize the short side, keep the proportions, cut out the centre square."""
    if image.size == (size, size) and short_side == size:
        return image
    width, height = image.size
    limit = _LONGEST_SIDE * min(width, height)
    if max(width, height) > limit:
        # Resized whole, a line of 1 x 10,000 pixels would fill gigabytes, of which only the centre is used.
        image = F.center_crop(image, [min(height, limit), min(width, limit)])
    image = F.resize(image, [short_side], interpolation=interpolation)
    return F.center_crop(image, [size, size])
