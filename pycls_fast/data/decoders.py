"""Lazily decoded images: the size is known at once, pixels are decoded when it is known which are needed.

A transform asks for a `Crop`; how it is decoded is the choice of `speed.decode`:

| decoder       | JPEG                                                             | crop and resize       |
|---------------|------------------------------------------------------------------|-----------------------|
| `pillow`      | the whole image: the reference                                   | Pillow's              |
| `simplejpeg`  | the whole image, by libjpeg-turbo                                | torch's, of uint8     |
| `region`      | the part that the crop needs                                     | row by row (`native`) |
| `region`, dct | the same of an image decoded at 1/2, 1/4 or 1/8 (`decode_scale`) | row by row (`native`) |

Whatever the decoder, Pillow decodes all other files, damaged and unusual JPEGs and, with `data.exif_orientation`,
images that have to be turned: all decoders refuse the same files for the same reasons. Each decoder resizes these as it
resizes arrays: an image has the same pixels whether it comes from a file or an array.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import numpy as np
import torch
from PIL import Image

from pycls_fast.data import native
from pycls_fast.data.crop import Crop
from pycls_fast.data.to_rgb import AS_STORED, JPEG, MAX_PIXELS, Conversion, checked_array, decode, orientation_of

PILLOW_FILTERS = {"bilinear": Image.Resampling.BILINEAR, "bicubic": Image.Resampling.BICUBIC}


class Picture(Protocol):
    """An image that is decoded on demand."""

    @property
    def size(self) -> tuple[int, int]:
        """(height, width) in pixels."""

    def crop(self, crop: Crop) -> np.ndarray:
        """uint8 (height, width, 3) of the view.

        Raises:
            DamagedImage: the pixels cannot be decoded.
        """


class PillowPicture:
    """A decoded image in mode "RGB", or its pixels."""

    def __init__(self, image: Image.Image | np.ndarray) -> None:
        self._image = image = Image.fromarray(image) if isinstance(image, np.ndarray) else image
        self.size = (image.height, image.width)

    def crop(self, crop: Crop) -> np.ndarray:
        top, left, height, width = crop.box
        image = self._image
        if crop.box != (0, 0, *self.size):
            image = image.crop((left, top, left + width, top + height))
        if crop.resized != (height, width):
            image = image.resize(crop.resized[::-1], PILLOW_FILTERS[crop.interpolation])
        top, left, height, width = crop.view
        if crop.view != (0, 0, *crop.resized):
            image = image.crop((left, top, left + width, top + height))
        if crop.mirror:
            image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        return np.asarray(image)


class TensorPicture:
    """A decoded image that torch resizes."""

    def __init__(self, image: Image.Image | np.ndarray) -> None:
        pixels = np.asarray(image)
        # torch does not take memory that may not be written.
        self._image_CHW = torch.from_numpy(pixels if pixels.flags.writeable else pixels.copy()).permute(2, 0, 1)
        self.size = (pixels.shape[0], pixels.shape[1])

    def crop(self, crop: Crop) -> np.ndarray:
        top, left, height, width = crop.box
        image_CHW = self._image_CHW[:, top : top + height, left : left + width]
        if crop.resized != (height, width):
            image_CHW = torch.nn.functional.interpolate(
                image_CHW[None], crop.resized, mode=crop.interpolation, antialias=True
            )[0]
        top, left, height, width = crop.view
        image_HWC = image_CHW[:, top : top + height, left : left + width].permute(1, 2, 0).numpy()
        return image_HWC[:, ::-1] if crop.mirror else image_HWC


class RegionPicture:
    """A JPEG of which only the header has been decoded.

    Args:
        data: the file.
        size: (height, width).
        scaled: decode large images at a fraction of their size, but no smaller than the crop resizes its box to.
    """

    def __init__(self, data: bytes, size: tuple[int, int], *, scaled: bool = False) -> None:
        self._data = data
        self._scaled = scaled
        self.size = size

    def crop(self, crop: Crop) -> np.ndarray:
        image_HWC = native.jpeg_region(self._data, crop, divisor(crop) if self._scaled else 1)
        return ArrayPicture(np.asarray(decode(self._data))).crop(crop) if image_HWC is None else image_HWC


def divisor(crop: Crop) -> int:
    """The largest of libjpeg's 1, 2, 4 and 8 that leaves at least as many pixels as the box is resized to."""
    least = min(crop.box[2] / crop.resized[0], crop.box[3] / crop.resized[1])
    return next(part for part in (8, 4, 2, 1) if least >= part or part == 1)


class ArrayPicture:
    """Decoded pixels, resized as by `RegionPicture`."""

    def __init__(self, image: Image.Image | np.ndarray) -> None:
        self._image_HWC = np.ascontiguousarray(image)
        self.size = (self._image_HWC.shape[0], self._image_HWC.shape[1])

    def crop(self, crop: Crop) -> np.ndarray:
        return native.array_region(self._image_HWC, crop)


@dataclass(frozen=True)
class Decoder:
    """How one value of `speed.decode` opens images.

    Attributes:
        open_jpeg: opens a JPEG; returns None if it is damaged or unusual. Pillow decodes or refuses what it does not.
        wrap: makes a picture of a decoded image, which is Pillow's or an array from a source.
        convert: for images in files; Pillow decodes those that are turned.
    """

    open_jpeg: Callable[[bytes], Picture | None] | None
    wrap: Callable[[Image.Image | np.ndarray], Picture]
    convert: Conversion = AS_STORED

    def __call__(self, data: bytes | np.ndarray) -> Picture:
        """Open an encoded file or a decoded `uint8` array (height, width, 3).

        Raises:
            DamagedImage: it is not a usable image, as far as is known without its pixels.
        """
        if isinstance(data, np.ndarray):
            return self.wrap(checked_array(data))
        as_stored = data.startswith(JPEG) and not (self.convert.upright and orientation_of(data) != 1)
        picture = self.open_jpeg(data) if as_stored and self.open_jpeg is not None else None
        return self.wrap(decode(data, self.convert)) if picture is None else picture


def _simplejpeg(data: bytes) -> Picture | None:
    import simplejpeg

    try:
        height, width, color, _ = simplejpeg.decode_jpeg_header(data)
        if color in ("YCbCr", "RGB", "Gray") and height * width <= MAX_PIXELS:
            return TensorPicture(simplejpeg.decode_jpeg(data))
    except ValueError:
        # libjpeg found damage; Pillow decides whether it matters and how it is reported.
        pass
    return None


def _region(data: bytes, *, scaled: bool = False) -> Picture | None:
    size = native.jpeg_size(data)
    if size is None or size[0] * size[1] > MAX_PIXELS:
        return None
    return RegionPicture(data, size, scaled=scaled)


DECODERS = {
    "pillow": Decoder(None, PillowPicture),
    "simplejpeg": Decoder(_simplejpeg, TensorPicture),
    "region": Decoder(_region, ArrayPicture),
}
"""By the value of `speed.decode`."""
SCALED_REGION = Decoder(partial(_region, scaled=True), ArrayPicture)
"""`region` with `speed.decode_scale=dct`."""
