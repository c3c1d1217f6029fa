"""Decodes the bytes of an image file to an 8-bit RGB image.

How images that are not 8-bit RGB are converted:

| in the file                       | becomes                                                          |
|-----------------------------------|------------------------------------------------------------------|
| grayscale, 1 bit                  | three equal channels                                             |
| palette, with or without alpha    | the palette's colours                                            |
| alpha channel                     | dropped, the stored colours stay, as in torchvision and timm     |
| CMYK, YCCK                        | RGB; Adobe's inverted JPEGs are recognised by Pillow             |
| 16 bits                           | scaled to 8 bits (Pillow's own `convert` clips gray ones at 255) |
| 32-bit integers                   | as 16 bits if they fit, else damaged: there is no agreed scale   |
| floating point                    | full scale is the smallest of 1, 255, 65535 that holds all       |
| several frames or pages           | the first                                                        |
| colour profiles                   | ignored, as in torchvision and timm                              |
| EXIF orientation                  | ignored, too, unless `upright` (`data.exif_orientation`) is set  |
| EXIF orientation of a TIFF        | always followed: Pillow turns TIFFs itself                       |
"""

from __future__ import annotations

import io
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
from PIL import Image, UnidentifiedImageError

from pycls_fast.data.orientation import orientation, turned

# Only raster formats that Pillow decodes itself: it would pass a disguised EPS file to Ghostscript.
_FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "PPM")

MAX_PIXELS = 2 * 89_478_485
"""A file with more is refused as a decompression bomb, by Pillow too. ImageNet's largest image has 61 million."""


class DamagedImage(Exception):
    """An image that cannot be used. `reason` is one readable line that does not name the file."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


def decode(data: bytes | np.ndarray, *, upright: bool = False) -> Image.Image:
    """Decode one image to mode "RGB".

    Args:
        data: the encoded file, or an already decoded `uint8` array of shape (height, width, 3), which is never turned.
        upright: turn the image as its EXIF orientation says.

    Raises:
        DamagedImage: the bytes are not a complete, valid image; gives the reason.
    """
    if isinstance(data, np.ndarray):
        return Image.fromarray(checked_array(data))
    with _named_damage(data):
        return _loaded(_open(data), upright=upright)


def as_rgb(image: Image.Image, *, upright: bool = False) -> Image.Image:
    """Convert an image that Pillow has opened or made to mode "RGB", as `decode` does.

    Raises:
        DamagedImage: its pixels cannot be read.
    """
    with _named_damage(b"?"):
        return _loaded(image, upright=upright)


def decode_as_stored(data: bytes) -> tuple[Image.Image, int]:
    """Decode one file to mode "RGB" without turning it; with its EXIF orientation, 1 to 8.

    Raises:
        DamagedImage: see `decode`.
    """
    with _named_damage(data):
        image = _open(data)
        image.load()
        return _to_rgb(image), orientation(image)


def checked_array(image_HWC: np.ndarray) -> np.ndarray:
    """Check an image that a source has already decoded; return it.

    Raises:
        ValueError: it is not uint8 (height, width, 3).
    """
    if image_HWC.dtype != np.uint8 or image_HWC.ndim != 3 or image_HWC.shape[2] != 3:
        raise ValueError(f"expected a uint8 array of shape (H, W, 3), got {image_HWC.dtype} {image_HWC.shape}")
    return image_HWC


def _open(data: bytes) -> Image.Image:
    if not data:
        raise DamagedImage("the file is empty (0 bytes)")
    image = Image.open(io.BytesIO(data), formats=_FORMATS)
    _check_size(image)
    return image


def _loaded(image: Image.Image, *, upright: bool) -> Image.Image:
    image.load()
    converted = _to_rgb(image)
    return turned(converted, orientation(image)) if upright else converted


@contextmanager
def _named_damage(data: bytes) -> Iterator[None]:
    """Turn whatever Pillow raises into a `DamagedImage`."""
    # Pillow warns about palettes, tags and sizes; what matters is decided here.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            yield
        except (DamagedImage, MemoryError):
            raise
        except UnidentifiedImageError:
            raise DamagedImage(_why_unknown(data)) from None
        except Image.DecompressionBombError as error:
            raise DamagedImage(f"too large to be a photograph (decompression bomb): {error}") from error
        except Exception as error:
            # On damaged bytes Pillow's readers raise nearly every built-in exception: OSError, SyntaxError,
            # struct.error, zlib.error, IndexError ... Whatever it was is reported, with its type.
            raise DamagedImage(f"{_one_line(error)} ({type(error).__name__})") from error


def _check_size(image: Image.Image) -> None:
    width, height = image.size
    if width < 1 or height < 1:
        raise DamagedImage(f"the image has no pixels ({width} x {height})")
    if width * height > MAX_PIXELS:
        raise DamagedImage(f"{width} x {height} pixels are more than the limit of {MAX_PIXELS:,} (decompression bomb)")


def _to_rgb(image: Image.Image) -> Image.Image:
    mode = image.mode
    if mode == "RGB":
        return image
    if mode == "I" or mode.startswith("I;"):
        return _integers_to_rgb(np.asarray(image))
    if mode == "F":
        return _floats_to_rgb(np.asarray(image))
    if mode in ("P", "PA", "La", "RGBa"):
        # Via RGBA: a palette's transparent entries keep their colours, premultiplied colours are divided back.
        return image.convert("RGBA").convert("RGB")
    return image.convert("RGB")


def _integers_to_rgb(values_HW: np.ndarray) -> Image.Image:
    low, high = int(values_HW.min()), int(values_HW.max())
    if low < 0 or high > 65535:
        raise DamagedImage(f"32-bit integers from {low} to {high} have no agreed scale; store 8 or 16 bits")
    # 65535 = 257 * 255, so this is the nearest 8-bit value.
    gray_HW = ((values_HW.astype(np.int32) + 128) // 257).astype(np.uint8)
    return Image.fromarray(gray_HW).convert("RGB")


def _floats_to_rgb(values_HW: np.ndarray) -> Image.Image:
    low, high = float(values_HW.min()), float(values_HW.max())
    full_scale = next((scale for scale in (1.0, 255.0, 65535.0) if high <= scale), None)
    if full_scale is None or not low >= 0:
        raise DamagedImage(f"floating-point values from {low:g} to {high:g} have no agreed scale")
    gray_HW = np.rint(values_HW.astype(np.float64) * (255.0 / full_scale)).astype(np.uint8)
    return Image.fromarray(gray_HW).convert("RGB")


def _why_unknown(data: bytes) -> str:
    start = data[:256].lstrip().lower()
    if start.startswith((b"<!doctype html", b"<html", b"<head", b"<?xml")):
        return "the file is an HTML or XML page, not an image (a failed download?)"
    if not data.strip(b"\0"):
        return f"the file is {len(data):,} zero bytes"
    return f"not an image of a known format, or a damaged header (starts with {data[:8]!r})"


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split()) or "unreadable"
