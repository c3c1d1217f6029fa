"""The decoders give the same crops of real photographs, and the same verdicts on damaged files."""

from __future__ import annotations

import io
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from pycls_fast.data import native
from pycls_fast.data.choices import Augment
from pycls_fast.data.decode import Conversion, Crop, DamagedImage
from pycls_fast.data.decoders import (
    DECODERS,
    Picture,
    RegionPicture,
    divisor,
    open_region,
    open_scaled_region,
    open_with_pillow,
    open_with_simplejpeg,
)
from pycls_fast.data.transforms import Augmented, TrainTransform
from pycls_fast.errors import UserError
from tests.unit.data.conftest import PHOTO, LimitPixels
from tests.unit.data.conftest import encode as as_file


def encode(image: Image.Image, **options: Any) -> bytes:
    return as_file(image, **{"quality": 90, **options})


def variants(photo: Image.Image) -> dict[str, bytes]:
    """The same photograph as the JPEGs that cameras and programs write."""
    exif = Image.Exif()
    exif[0x0112] = 6  # turned by 90 degrees, which is ignored
    odd = photo.crop((3, 5, 240, 162))
    return {
        "as it comes": PHOTO.read_bytes(),
        "4:4:4": encode(photo, subsampling=0),
        "4:2:2": encode(photo, subsampling=1),
        "4:2:0": encode(photo, subsampling=2),
        "odd size, 4:2:0": encode(odd, subsampling=2),
        "odd size, 4:4:4": encode(odd, subsampling=0),
        "progressive, 4:2:0": encode(photo, progressive=True, subsampling=2),
        "progressive, 4:4:4": encode(odd, progressive=True, subsampling=0),
        "gray": encode(photo.convert("L")),
        "gray, progressive": encode(photo.convert("L"), progressive=True),
        "restart markers": encode(photo, restart_marker_blocks=7, subsampling=2),
        "restart markers in each row": encode(photo, restart_marker_rows=1, subsampling=0),
        "EXIF": encode(photo, exif=exif),
        "stored as RGB": encode(photo, keep_rgb=True, subsampling=0),
        "something behind the end": encode(photo) + b"\0" * 100 + b"\xff\xd8 another",
        "narrow": encode(photo.crop((0, 0, 5, 200))),
        "tiny": encode(photo.crop((0, 0, 1, 1))),
    }


NAMES = tuple(variants(Image.new("RGB", (320, 213))))


@pytest.fixture(scope="module")
def files(photo: Image.Image) -> dict[str, bytes]:
    return variants(photo)


def random_cuts(size: tuple[int, int], count: int, seed: int) -> Iterator[Crop]:
    """Boxes of every size and place, the corners among them, grown and shrunk, with windows and mirrors."""
    draw = random.Random(seed)
    height, width = size
    for number in range(count):
        box_height, box_width = draw.randint(1, height), draw.randint(1, width)
        top = draw.choice([0, height - box_height, draw.randint(0, height - box_height)])
        left = draw.choice([0, width - box_width, draw.randint(0, width - box_width)])
        resized = draw.randint(1, 90), draw.randint(1, 90)
        out_height, out_width = draw.randint(1, resized[0]), draw.randint(1, resized[1])
        window = (draw.randint(0, resized[0] - out_height), draw.randint(0, resized[1] - out_width))
        if number % 3 == 0:
            window, out_height, out_width = (0, 0), *resized
        yield Crop(
            (top, left, box_height, box_width),
            resized,
            (*window, out_height, out_width),
            draw.choice(["bilinear", "bicubic"]),
            mirror=draw.random() < 0.5,
        )


def rows_then_columns(image: Image.Image, crop: Crop, part: int = 1) -> np.ndarray:
    """Pillow's decoding and resizing, one axis after the other: Pillow itself chooses the order since version 13.

    With a `part` the image is decoded at 1 / part of its size by Pillow's draft mode; the box has edges between pixels.
    """
    if part > 1:
        image.draft("RGB" if image.mode == "RGB" else "L", (image.width // part, image.height // part))
    image = image.convert("RGB")
    top, left, height, width = crop.box
    # Whole pixels that the box touches: what lies beyond has no say.
    first_x, first_y = left // part, top // part
    image = image.crop((first_x, first_y, -(-(left + width) // part), -(-(top + height) // part)))
    x, y = left / part - first_x, top / part - first_y
    filter_ = {"bilinear": Image.Resampling.BILINEAR, "bicubic": Image.Resampling.BICUBIC}[crop.interpolation]
    image = image.resize((crop.resized[1], image.height), filter_, (x, 0, x + width / part, image.height))
    image = image.resize(crop.resized[::-1], filter_, (0, y, crop.resized[1], y + height / part))
    top, left, height, width = crop.view
    pixels = np.asarray(image)[top : top + height, left : left + width]
    return pixels[:, ::-1] if crop.mirror else pixels


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("scaled", [False, True])
def test_region_decodes_and_resizes_to_the_bit(name: str, scaled: bool, files: dict[str, bytes]) -> None:
    picture = (open_scaled_region if scaled else open_region)(files[name])
    assert isinstance(picture, RegionPicture)
    assert picture.size == Image.open(io.BytesIO(files[name])).size[::-1]
    cuts = list(random_cuts(picture.size, 80, seed=len(name)))
    if name == "as it comes":
        assert {divisor(crop) for crop in cuts} == {1, 2, 4, 8}
    for crop in cuts:
        wanted = rows_then_columns(Image.open(io.BytesIO(files[name])), crop, divisor(crop) if scaled else 1)
        np.testing.assert_array_equal(picture.crop(crop), wanted, err_msg=str(crop))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("decoder", [open_with_simplejpeg, open_region])
def test_training_crops_are_the_reference_s(
    decoder: Callable[..., Picture], name: str, files: dict[str, bytes]
) -> None:
    """Same box, same mirroring, and no pixel off by more than the rounding between the two passes of the resize."""
    transform = TrainTransform(Augment(), image_size=56)
    for seed in range(12):
        ours = transform(decoder(files[name]), seed).image_HWC.astype(int)
        reference = transform(open_with_pillow(files[name]), seed).image_HWC.astype(int)
        assert np.abs(ours - reference).max() <= 1, (seed, name)


def test_what_is_no_plain_jpeg_gives_the_pixels_of_an_array(photo: Image.Image) -> None:
    """Packed as raw pixels, these files train as before."""

    def saved(image: Image.Image, file_format: str) -> bytes:
        buffer = io.BytesIO()
        image.save(buffer, file_format)
        return buffer.getvalue()

    small = photo.resize((60, 40))
    unusual = [saved(small, "PNG"), saved(small, "WEBP"), saved(small.convert("P"), "GIF"), saved(small, "BMP")]
    unusual.append(saved(small.convert("CMYK"), "JPEG"))
    for data in unusual:
        pixels = np.asarray(Image.open(io.BytesIO(data)).convert("RGB"))
        for decoder in DECODERS.values():
            for crop in random_cuts((40, 60), 20, seed=2):
                expected = decoder(pixels).crop(crop)
                np.testing.assert_array_equal(decoder(data).crop(crop), expected)
                np.testing.assert_array_equal(
                    replace(decoder, convert=Conversion(upright=True))(data).crop(crop), expected
                )


def test_decoded_arrays(photo: Image.Image) -> None:
    """What raw sources hand out; Pillow's result up to the order of the two passes of the resize."""
    pixels = np.asarray(photo)
    for crop in random_cuts(pixels.shape[:2], 60, seed=1):  # type: ignore[arg-type]
        np.testing.assert_array_equal(open_region(pixels).crop(crop), rows_then_columns(photo, crop))
    transform = TrainTransform(Augment(), image_size=56)
    for seed in range(20):
        reference = transform(open_with_pillow(pixels), seed).image_HWC.astype(int)
        assert np.abs(transform(open_with_simplejpeg(pixels), seed).image_HWC.astype(int) - reference).max() <= 1
    for decoder in DECODERS.values():
        with pytest.raises(ValueError, match="expected a uint8 array"):
            decoder(pixels[:, :, 0])


def damaged_files(photo: Image.Image) -> Iterator[bytes]:
    whole = {name: encode(photo.resize((120, 80)), subsampling=2, progressive=name) for name in (False, True)}
    draw = random.Random(0)
    yield b""
    yield b"\0" * 500
    yield b"<!doctype html><html>not found</html>"
    yield b"\xff\xd8"
    yield b"\xff\xd8" + b"\0" * 300
    for data in whole.values():
        yield data[:-2]  # the end marker alone is missing
        yield data[:-1]
        yield data[:-2] + b"\0" * 50
        for _ in range(60):
            yield data[: draw.randrange(1, len(data))]
        for _ in range(120):
            broken = bytearray(data)
            for _ in range(draw.choice([1, 1, 2, 5])):
                # Also in the header, and markers in the middle of the scan.
                broken[draw.randrange(2, len(data))] = draw.choice([0, 0xFF, draw.randrange(256)])
            yield bytes(broken)


def outcome(decoder: Callable[..., Picture], data: bytes, transform: TrainTransform, seed: int) -> Augmented | str:
    try:
        return transform(decoder(data), seed)
    except DamagedImage as error:
        return str(error)


@pytest.mark.parametrize("decoder", [open_with_simplejpeg, open_region])
def test_same_verdicts_on_damaged_files(decoder: Callable[..., Picture], photo: Image.Image) -> None:
    transform = TrainTransform(Augment(), image_size=32)
    refused = 0
    for seed, data in enumerate(damaged_files(photo)):
        reference, ours = (outcome(d, data, transform, seed) for d in (open_with_pillow, decoder))
        if isinstance(reference, str) or isinstance(ours, str):
            assert ours == reference, seed
            refused += 1
        else:
            difference = np.abs(ours.image_HWC.astype(int) - reference.image_HWC.astype(int))
            assert difference.max() <= 1, seed
    assert 130 < refused < 300


def test_decompression_bombs(photo: Image.Image, limit_pixels: LimitPixels) -> None:
    data = encode(photo)
    limit_pixels(1000)
    for decoder in DECODERS.values():
        with pytest.raises(DamagedImage, match=r"320 x 213 pixels are more than the limit of 1,000"):
            decoder(data)


class TestCompiling:
    @pytest.fixture(autouse=True)
    def anew(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
        native.library.cache_clear()
        native.available.cache_clear()
        yield
        monkeypatch.undo()
        native.library.cache_clear()
        native.available.cache_clear()

    def test_once(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, photo: Image.Image) -> None:
        assert native.available()
        assert native.jpeg_size(encode(photo)) == (213, 320)
        (made,) = (tmp_path / "cache" / "pycls_fast").iterdir()
        assert made.name.startswith("jpeg_region-")
        native.library.cache_clear()
        monkeypatch.setattr(native, "_compile", None)
        assert native.jpeg_size(encode(photo)) == (213, 320)

    def test_without_a_compiler(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("CC", "no-such-compiler")
        with pytest.raises(UserError, match=r"^speed\.decode: .*no-such-compiler.*; install .*simplejpeg$"):
            native.library()
        assert not native.available()
        monkeypatch.setattr(native, "_path", None)
        assert not native.available()
