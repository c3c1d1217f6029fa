"""Augmentation of one image in a worker: an encoded image in, uint8 pixels out, all draws from one seed.

The operations are torchvision.transforms.v2's on Pillow images, in the order of its classification presets and of
timm's: crop, flip, policy, color jitter. The crop is drawn from the image's size only, before its pixels are decoded,
so a decoder may leave out what is cut away. Random erasing is only drawn here; the box travels with the sample and is
filled on the device after normalising.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from PIL import Image

from pycls_fast.data.choices import Augment, EvalCrop
from pycls_fast.data.crop import NO_BOX, Box, Crop, Interpolation
from pycls_fast.data.decoders import Picture
from pycls_fast.data.policies import Step
from pycls_fast.seeds import seeded_torch
from pycls_fast.values import Size

if TYPE_CHECKING:
    from torchvision.transforms import v2

_LONGEST_SIDE = 16


class Augmented(NamedTuple):
    """The result of transforming one image."""

    image_HWC: np.ndarray
    """uint8, the transform's `image_size` x 3."""
    erase: Box
    """The box to erase on the device; all zeros for none."""


class TrainTransform:
    """Random crop, flip and further steps for training."""

    def __init__(
        self, augment: Augment, *, image_size: int | tuple[int, int], mean: Sequence[float] = (0.0, 0.0, 0.0)
    ) -> None:
        """
        Args:
            augment: the crop is "random_resized" (Szegedy et al. 2015, section 6), "pad" (He et al. 2016, section 4.2),
                or "none", the centre. The last two first resize the image to cover `image_size`; "pad" crops anywhere
                along the side that is too long. "squash" and "border" keep all of it, as in `EvalTransform`. Erased
                boxes have 2% to 33% of the area, and a ratio of 0.3 to 3.3 (Zhong et al. 2017).
            image_size: the side of the result, or height and width, in pixels.
            mean: the color of corners that a policy exposes and of pixels beyond the image, on the scale 0..1.
        """
        # Imports torch's compiler, which takes a second; what only evaluates does without.
        from torchvision.transforms import v2

        self.image_size = size = Size.of(image_size)
        self.erases = augment.erase_probability > 0
        self._augment = augment
        self._random_resized: v2.RandomResizedCrop | None = None
        self._padded: v2.RandomCrop | None = None
        self._whole: EvalCrop = "center"
        if augment.crop == "random_resized":
            low, high = (ratio * (size.width / size.height) for ratio in augment.ratio)
            self._random_resized = v2.RandomResizedCrop(size, scale=augment.scale, ratio=(low, high))
        elif augment.crop == "pad":
            self._padded = v2.RandomCrop(size, padding=augment.pad, padding_mode=augment.pad_mode)
        elif augment.crop != "none":
            self._whole = augment.crop
        self._steps: list[Step] = []
        if augment.policy is not None:
            mode = augment.interpolation
            self._steps.append(augment.policy.build(interpolation=mode, image_size=size, mean=mean))
        if augment.color_jitter is not None:
            self._steps.append(v2.ColorJitter(*augment.color_jitter))
        self._fill = _in_bytes(mean)
        self._erasing = v2.RandomErasing(p=1.0, value=0)
        # Only its shape is used when a box is drawn.
        self._canvas = torch.empty(3, *size, device="meta")

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
            # In a line of pixels torchvision's last resort may be rounded to nothing.
            box = (drawn["top"], drawn["left"], max(drawn["height"], 1), max(drawn["width"], 1))
            return picture.crop(Crop(box, size, (0, 0, *size), filter_, mirror=_draw_flip(hflip)))
        crop = _centre_crop(picture.size, self._whole, size, size, filter_)
        if self._padded is None:
            return _with_border(picture.crop(crop._replace(mirror=_draw_flip(hflip))), size, self._fill)
        whole = picture.crop(crop._replace(view=(0, 0, *crop.resized)))
        image_HWC = np.asarray(self._padded(Image.fromarray(whole)))
        return image_HWC[:, ::-1] if _draw_flip(hflip) else image_HWC

    def _turn(self, image_HWC: np.ndarray) -> np.ndarray:
        if _draw_flip(self._augment.vflip):
            image_HWC = image_HWC[::-1]
        if self._augment.quarter_turns:
            image_HWC = np.rot90(image_HWC, int(torch.randint(4, ()).item()))
        return image_HWC

    def _draw_box(self) -> Box:
        if torch.rand(()).item() >= self._augment.erase_probability:
            return NO_BOX
        params = self._erasing.make_params([self._canvas])
        # torchvision's sign that none of ten boxes that it drew fitted.
        if params["v"] is None:
            return NO_BOX
        return params["i"], params["j"], params["h"], params["w"]


def _draw_flip(probability: float) -> bool:
    """Draw whether to flip, as `v2.RandomHorizontalFlip` does; nothing is drawn for a probability of 0."""
    return probability > 0 and torch.rand(1).item() < probability


class EvalTransform:
    """The image or its centre, resized: deterministic."""

    erases = False

    def __init__(
        self, augment: Augment, *, image_size: int | tuple[int, int], mean: Sequence[float] = (0.0, 0.0, 0.0)
    ) -> None:
        """
        Args:
            augment: `eval_crop` (timm's `crop_mode`) says how the image is resized to `image_size / eval_crop_ratio`,
                of which the centre is cut out: "center" covers it, "squash" fills it out of proportion, "border"
                (letterbox) stays within it. 224 of 256 pixels, 0.875, is from Krizhevsky et al. 2012.
            image_size: the side of the result, or height and width, in pixels.
            mean: the color of pixels beyond the image, on the scale 0..1.
        """
        self.image_size = size = Size.of(image_size)
        self._augment = augment
        self._resized = Size(*(round(side / augment.eval_crop_ratio) for side in size))
        self._fill = _in_bytes(mean)

    def __call__(self, picture: Picture, seed: int) -> Augmented:
        """Crop one RGB image; `seed` is not used."""
        augment, size = self._augment, self.image_size
        crop = _centre_crop(picture.size, augment.eval_crop, self._resized, size, augment.interpolation)
        return Augmented(_with_border(picture.crop(crop), size, self._fill), NO_BOX)


Transform = TrainTransform | EvalTransform


def _in_bytes(mean: Sequence[float]) -> tuple[int, int, int]:
    red, green, blue = (round(255 * value) for value in mean)
    return red, green, blue


def _with_border(image_HWC: np.ndarray, size: Size, fill: tuple[int, int, int]) -> np.ndarray:
    """The image, padded on all sides to this size; unchanged if it has that size."""
    height, width, _ = image_HWC.shape
    if (height, width) == size:
        return image_HWC
    whole_HWC = np.full((*size, 3), fill, dtype=np.uint8)
    top, left = (size.height - height) // 2, (size.width - width) // 2
    whole_HWC[top : top + height, left : left + width] = image_HWC
    return whole_HWC


def _centre_crop(
    picture_size: tuple[int, int], how: EvalCrop, to: Size, size: Size, interpolation: Interpolation
) -> Crop:
    """Resize a picture to cover `to` ("center": torchvision's Resize and CenterCrop), to match it ("squash"), or to fit
    into it ("border"); then crop the centre, at most `size`."""
    box, resized = (0, 0, *picture_size), (to.height, to.width)
    if how == "center":
        box, resized = _covering(*picture_size, to)
    elif how == "border":
        ratio = max(pixels / side for pixels, side in zip(picture_size, to, strict=True))
        height, width = (max(round(pixels / ratio), 1) for pixels in picture_size)
        resized = height, width
    view = _centre(*resized, *(min(pixels, side) for pixels, side in zip(resized, size, strict=True)))
    return Crop(box, resized, view, interpolation)


def _covering(height: int, width: int, to: Size) -> tuple[Box, tuple[int, int]]:
    """The part of a picture that is resized, and to what: in proportion, and at least `to` both ways."""
    box = (0, 0, height, width)
    # Resizing a whole line of 1 x 10,000 pixels would take gigabytes, of which only the centre is used.
    tallest = max(_LONGEST_SIDE * width * to.height // to.width, 1)
    widest = max(_LONGEST_SIDE * height * to.width // to.height, 1)
    if height > tallest or width > widest:
        box = _centre(height, width, min(height, tallest), min(width, widest))
        _, _, height, width = box
    if width * to.height <= height * to.width:
        return box, (to.width * height // width, to.width)
    return box, (to.height, to.height * width // height)


def _centre(height: int, width: int, crop_height: int, crop_width: int) -> Box:
    return round((height - crop_height) / 2.0), round((width - crop_width) / 2.0), crop_height, crop_width
