"""Decodes any image file with Pillow, to 8-bit RGB; names what is wrong with a damaged one.

How images that are not 8-bit RGB are converted:

| in the file                       | becomes                                                          |
|-----------------------------------|------------------------------------------------------------------|
| grayscale, 1 bit                  | three equal channels                                             |
| palette, with or without alpha    | the palette's colours                                            |
| alpha channel                     | dropped, the stored colours stay, as in torchvision and timm;    |
|                                   | with `on_white` (`data.transparent=white`) white shows through   |
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
from typing import NamedTuple

import numpy as np
from PIL import ExifTags, Image, UnidentifiedImageError

# Only raster formats that Pillow decodes itself: it would pass a disguised EPS file to Ghostscript.
_FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "PPM")

MAX_PIXELS = 2 * 89_478_485
"""Pillow refuses a file with more as a decompression bomb. ImageNet's largest image has 61 million."""


class Conversion(NamedTuple):
    """How an image in a file becomes RGB pixels: `data.exif_orientation` and `data.transparent`."""

    upright: bool = False
    """Turn the image as its EXIF orientation says."""
    on_white: bool = False
    """Let white show through transparent pixels."""


AS_STORED = Conversion()


class DamagedImage(Exception):
    """An image that cannot be used, and why in one line that does not name the file."""


def why(error: OSError | DamagedImage) -> str:
    return f"cannot be read: {error.strerror or error}" if isinstance(error, OSError) else str(error)


def decode(data: bytes | np.ndarray | Image.Image, convert: Conversion = AS_STORED) -> Image.Image:
    """Decode one image to mode "RGB".

    Args:
        data: the encoded file, what Pillow has opened, or a decoded `uint8` array of shape (height, width, 3), which is
            never turned.

    Raises:
        DamagedImage: not a complete, valid image; gives the reason.
    """
    if isinstance(data, np.ndarray):
        return Image.fromarray(checked_array(data))
    # Pillow warns about palettes, tags and sizes; what matters is decided here.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            image = _open(data) if isinstance(data, bytes) else data
            image.load()
            converted = _to_rgb(image, on_white=convert.on_white)
            turn = _TURNS.get(orientation_of(image)) if convert.upright else None
            return converted if turn is None else converted.transpose(turn)
        except (DamagedImage, MemoryError):
            raise
        except Exception as error:
            # On damaged bytes Pillow's readers raise nearly every built-in exception: OSError, SyntaxError,
            # struct.error, zlib.error, IndexError ... Whatever it was is reported, with its type.
            text = " ".join(str(error).split()) or "unreadable"
            raise DamagedImage(f"{text} ({type(error).__name__})") from error


def checked_array(image_HWC: np.ndarray) -> np.ndarray:
    """An image that a source has already decoded; a ValueError if it is not uint8 (height, width, 3)."""
    if image_HWC.dtype != np.uint8 or image_HWC.ndim != 3 or image_HWC.shape[2] != 3:
        raise ValueError(f"expected a uint8 array of shape (H, W, 3), got {image_HWC.dtype} {image_HWC.shape}")
    return image_HWC


def _open(data: bytes) -> Image.Image:
    if not data:
        raise DamagedImage("the file is empty (0 bytes)")
    try:
        return Image.open(io.BytesIO(data), formats=_FORMATS)
    except UnidentifiedImageError:
        raise DamagedImage(_why_unknown(data)) from None


def _to_rgb(image: Image.Image, *, on_white: bool) -> Image.Image:
    mode = image.mode
    if on_white and image.has_transparency_data and not mode.startswith("I"):
        white = Image.new("RGBA", image.size, "white")
        white.alpha_composite(image.convert("RGBA"))
        return white.convert("RGB")
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
    if start.startswith(b"version https://git-lfs."):
        return "the file is a pointer of Git LFS, not the image; git lfs pull, where it was cloned, fetches it"
    if not data.strip(b"\0"):
        return f"the file is {len(data):,} zero bytes"
    return f"not an image of a known format, or a damaged header (starts with {data[:8]!r})"


# As in `PIL.ImageOps.exif_transpose`; the others are 1, which needs no turn, and invalid values.
_TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}

JPEG, _SCAN, _APP1, _FILL = b"\xff\xd8", b"\xff\xda", b"\xff\xe1", b"\xff\xff"


def orientation_of(image: bytes | Image.Image) -> int:
    """The orientation of a file or of what Pillow has opened, 1 to 8: 1 (no turn) if there is none or it is invalid.

    A JPEG's is read from its header; of other files Pillow may have to decode the pixels, which metadata may follow.
    """
    if isinstance(image, bytes) and image.startswith(JPEG) and not _may_have_exif(image):
        return 1
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            if isinstance(image, bytes):
                # Pillow turns TIFFs itself.
                image = Image.open(io.BytesIO(image), formats=("JPEG", "PNG", "WEBP"))
            found = image.getexif().get(ExifTags.Base.Orientation)
        except Exception:  # noqa: BLE001  # damaged metadata raise nearly every kind; the pixels may be fine
            return 1
    return found if isinstance(found, int) and found in _TURNS else 1


def _may_have_exif(data: bytes) -> bool:
    """Whether a JPEG's header has an APP1 segment, or is so unusual that Pillow has to look.

    Most files of downloaded datasets have none. Finding that takes 3 microseconds; Pillow reads EXIF in 0.1 ms.
    """
    position = 2
    while (marker := data[position : position + 2]) != _SCAN:
        if marker in (_APP1, _FILL) or marker[:1] != b"\xff":
            return True
        position += 2 + int.from_bytes(data[position + 2 : position + 4], "big")
    return False
