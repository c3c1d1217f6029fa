"""One image as a packed split stores it: as it is, scaled and encoded, or raw pixels."""

from __future__ import annotations

import io
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
from PIL import ExifTags, Image

from pycls_fast.data.decode import DamagedImage, decode, decode_as_stored
from pycls_fast.data.sources.base import Source
from pycls_fast.data.sources.packed import RAW

_LARGEST_SIDE = 65_535


@dataclass(frozen=True)
class PackSettings:
    """How images are stored.

    Args:
        short_side: larger images are scaled down to this many pixels on the short side, keeping proportions; None
            stores them as they are.
        quality: JPEG quality of the scaled images, 1 to 100.
        store: "encoded", or "raw" for decoded pixels.
        filter: the resampling filter.
        upright: turn raw pixels, which have no EXIF, as the file's orientation says. Encoded images keep the tag.
    """

    short_side: int | None = None
    quality: int = 95
    store: Literal["encoded", "raw"] = "encoded"
    filter: Literal["bilinear", "bicubic", "lanczos"] = "bicubic"
    upright: bool = False

    def describe(self) -> str:
        """A short description."""
        size = f"short side at most {self.short_side}" if self.short_side else "as they are"
        if self.store == RAW:
            return f"raw pixels{', turned by EXIF' if self.upright else ''}, {size}"
        return f"{size}, JPEG quality {self.quality}" if self.short_side else f"encoded, {size}"


class StoredImage(NamedTuple):
    """One image as it is stored; `reason` says why it cannot be."""

    data: bytes
    label: int
    height: int
    width: int
    reason: str = ""


def store(source: Source, index: int, *, settings: PackSettings) -> StoredImage:
    """One image as it will be stored."""
    try:
        data, label = source.read(index)
        if settings.store == "encoded" and settings.short_side is None and isinstance(data, bytes):
            if not data:
                raise DamagedImage("the file is empty (0 bytes)")
            return StoredImage(data, label, 0, 0)
        if settings.store == RAW:
            small = _shrink(decode(data, upright=settings.upright), settings)
            if max(small.size) > _LARGEST_SIDE:
                raise DamagedImage(f"{small.width} x {small.height} pixels do not fit the format; use short_side")
            return StoredImage(small.tobytes(), label, small.height, small.width)
        if isinstance(data, np.ndarray):
            return StoredImage(_encode_losslessly(_shrink(decode(data), settings)), label, 0, 0)
        image, orientation = decode_as_stored(data)
        small = _shrink(image, settings)
        # If it is small enough, encoding it again would only lose quality.
        return StoredImage(data if small is image else _encode(small, orientation, settings), label, 0, 0)
    except OSError as error:
        return StoredImage(b"", -1, 0, 0, f"cannot be read: {error.strerror or error}")
    except DamagedImage as error:
        return StoredImage(b"", -1, 0, 0, error.reason)


def _shrink(image: Image.Image, settings: PackSettings) -> Image.Image:
    if settings.short_side is None or min(image.size) <= settings.short_side:
        return image
    width, height = image.size
    scale = settings.short_side / min(width, height)
    size = (max(round(width * scale), 1), max(round(height * scale), 1))
    return image.resize(size, Image.Resampling[settings.filter.upper()])


def _encode(image: Image.Image, orientation: int, settings: PackSettings) -> bytes:
    buffer = io.BytesIO()
    options: dict[str, Any] = {}
    if orientation != 1:
        # Whether it is followed is the choice of the run that reads the image.
        options["exif"] = Image.Exif()
        options["exif"][ExifTags.Base.Orientation] = orientation
    image.save(buffer, "JPEG", quality=settings.quality, optimize=False, **options)
    return buffer.getvalue()


def _encode_losslessly(image: Image.Image) -> bytes:
    """Arrays had no loss before, and are small."""
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return buffer.getvalue()
