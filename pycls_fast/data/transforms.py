"""Augmentation of one image in a worker: an encoded image in, a uint8 square out, all draws from one seed.

The operations are torchvision.transforms.v2's on Pillow images, in the order of its classification presets and of
timm's: crop, flip, policy, color jitter. The crop is drawn from the image's size only, before its pixels are decoded,
so a decoder may leave out what is cut away. Random erasing is only drawn here; the box travels with the sample and is
filled on the device after normalising.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from PIL import Image
from torchvision.transforms import v2

from pycls_fast.data.choices import Augment
from pycls_fast.data.decode import Box, Crop, Interpolation
from pycls_fast.data.decoders import Picture
from pycls_fast.data.policies import Step, color_jitter
from pycls_fast.seeds import seeded_torch

NO_BOX: Box = (0, 0, 0, 0)
_LONGEST_SIDE = 16


class Augmented(NamedTuple):
    """The result of transforming one image."""

    image_HWC: np.ndarray
    """uint8, `image_size` x `image_size` x 3."""
    erase: Box
    """The box to erase on the device; all zeros for none."""


class TrainTransform:
    """Random crop, flip and further steps for training."""

    def __init__(self, augment: Augment, *, image_size: int, mean: Sequence[float] = (0.0, 0.0, 0.0)) -> None:
        """
        Args:
            augment: the crop is "random_resized" (Szegedy et al. 2015, section 6), "pad" (He et al. 2016, section 4.2),
                or "none", the centre square. The last two first resize the short side to `image_size` if it differs;
                "pad" crops anywhere along the long side. Erased boxes have 2% to 33% of the area, and a ratio of 0.3 to
                3.3 (Zhong et al. 2017).
            image_size: height and width of the result, in pixels.
            mean: the color of corners that a policy exposes, on the scale 0..1.
        """
        self.image_size = image_size
        self.erases = augment.erase_probability > 0
        self._augment = augment
        self._random_resized: v2.RandomResizedCrop | None = None
        self._padded: v2.RandomCrop | None = None
        if augment.crop == "random_resized":
            self._random_resized = v2.RandomResizedCrop(image_size, scale=augment.scale, ratio=augment.ratio)
        elif augment.crop == "pad":
            self._padded = v2.RandomCrop(image_size, padding=augment.pad, padding_mode=augment.pad_mode)
        self._steps: list[Step] = []
        if augment.policy is not None:
            mode = augment.interpolation
            self._steps.append(augment.policy.build(interpolation=mode, image_size=image_size, mean=mean))
        if augment.color_jitter is not None:
            self._steps.append(color_jitter(*augment.color_jitter))
        self._erasing = v2.RandomErasing(p=1.0, value=0)
        # Only its shape is used when a box is drawn.
        self._canvas = torch.empty(3, image_size, image_size, device="meta")

    def __call__(self, picture: Picture, seed: int) -> Augmented:
        """Augment one RGB image; the result depends only on the image and the seed."""
        with seeded_torch(seed):
            image_HWC = self._turn(self._crop_and_flip(picture))
            if self._steps:
                image = Image.fromarray(image_HWC)
                for step in self._steps:
                    image = step(image)
                image_HWC = np.asarray(image)
            erase = self._draw_box() if self.erases else NO_BOX
        return Augmented(image_HWC, erase)

    def _crop_and_flip(self, picture: Picture) -> np.ndarray:
        size, filter_, hflip = self.image_size, self._augment.interpolation, self._augment.hflip
        if self._random_resized is not None:
            drawn = self._random_resized.make_params([torch.empty(3, *picture.size, device="meta")])
            box = (drawn["top"], drawn["left"], drawn["height"], drawn["width"])
            return picture.crop(Crop(box, (size, size), (0, 0, size, size), filter_, mirror=_draw_flip(hflip)))
        crop = _fit(picture.size, size, size, filter_)
        if self._padded is None:
            return picture.crop(crop._replace(mirror=_draw_flip(hflip)))
        whole = picture.crop(crop._replace(view=(0, 0, *crop.resized)))
        image_HWC = np.asarray(self._padded(Image.fromarray(whole)))
        return image_HWC[:, ::-1] if _draw_flip(hflip) else image_HWC

    def _turn(self, image_HWC: np.ndarray) -> np.ndarray:
        """Flip top to bottom and rotate, as drawn."""
        if _draw_flip(self._augment.vflip):
            image_HWC = image_HWC[::-1]
        if self._augment.quarter_turns:
            image_HWC = np.rot90(image_HWC, int(torch.randint(4, ()).item()))
        return image_HWC

    def _draw_box(self) -> Box:
        if torch.rand(()).item() >= self._augment.erase_probability:
            return NO_BOX
        params = self._erasing.make_params([self._canvas])
        # torchvision's sign that none of ten drawn boxes fitted.
        if params["v"] is None:
            return NO_BOX
        return params["i"], params["j"], params["h"], params["w"]


def _draw_flip(probability: float) -> bool:
    """Draw whether to flip, as `v2.RandomHorizontalFlip` does; nothing is drawn for a probability of 0."""
    return probability > 0 and torch.rand(1).item() < probability


class EvalTransform:
    """The centre of the image, resized: deterministic."""

    erases = False

    def __init__(self, augment: Augment, *, image_size: int, mean: Sequence[float] = (0.0, 0.0, 0.0)) -> None:
        """
        Args:
            augment: `eval_crop` (timm's `crop_mode`) says which side is resized to `round(image_size /
                eval_crop_ratio)`. 224 of 256 pixels, 0.875, is from Krizhevsky et al. 2012; 1.0 keeps that side whole.
            image_size: height and width of the result, in pixels.
            mean: the color of pixels beyond the image, on the scale 0..1.
        """
        self.image_size = image_size
        self._augment = augment
        self._resized_side = round(image_size / augment.eval_crop_ratio)
        red, green, blue = (round(255 * value) for value in mean)
        self._fill = (red, green, blue)

    def __call__(self, picture: Picture, seed: int) -> Augmented:
        """Crop one RGB image; `seed` is not used."""
        image_HWC = picture.crop(self._cut(picture.size))
        return Augmented(_with_border(image_HWC, self.image_size, self._fill), NO_BOX)

    def _cut(self, picture_size: tuple[int, int]) -> Crop:
        side, size = self._resized_side, self.image_size
        if self._augment.eval_crop == "center":
            return _fit(picture_size, side, size, self._augment.interpolation)
        resized = (side, side)
        if self._augment.eval_crop == "border":
            ratio = max(picture_size) / side
            height, width = (max(round(pixels / ratio), 1) for pixels in picture_size)
            resized = (height, width)
        view = _centre(*resized, *(min(pixels, size) for pixels in resized))
        return Crop((0, 0, *picture_size), resized, view, self._augment.interpolation)


Transform = TrainTransform | EvalTransform


def _with_border(image_HWC: np.ndarray, size: int, fill: tuple[int, int, int]) -> np.ndarray:
    """The image in the centre of a square of this size; as it is if it fills the square."""
    height, width, _ = image_HWC.shape
    if (height, width) == (size, size):
        return image_HWC
    square_HWC = np.full((size, size, 3), fill, dtype=np.uint8)
    top, left = (size - height) // 2, (size - width) // 2
    square_HWC[top : top + height, left : left + width] = image_HWC
    return square_HWC


def _fit(picture_size: tuple[int, int], short_side: int, size: int, interpolation: Interpolation) -> Crop:
    """Resize the short side, keep the proportions, cut out the centre square: torchvision's Resize and CenterCrop."""
    height, width = picture_size
    box = (0, 0, height, width)
    limit = _LONGEST_SIDE * min(height, width)
    if max(height, width) > limit:
        # Resizing a whole line of 1 x 10,000 pixels would take gigabytes, of which only the centre is used.
        box = _centre(height, width, min(height, limit), min(width, limit))
        _, _, height, width = box
    if width <= height:
        resized = (int(short_side * height / width), short_side)
    else:
        resized = (short_side, int(short_side * width / height))
    return Crop(box, resized, _centre(*resized, size, size), interpolation)


def _centre(height: int, width: int, crop_height: int, crop_width: int) -> Box:
    return round((height - crop_height) / 2.0), round((width - crop_width) / 2.0), crop_height, crop_width
