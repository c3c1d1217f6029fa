"""The decoders give the same crops of real photographs, however they are turned, and the same verdicts on damage."""

from __future__ import annotations

import io
import itertools
import random
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import ExifTags, Image, ImageOps

from pycls_fast import build
from pycls_fast.data import decoders, native
from pycls_fast.data.choices import Augment
from pycls_fast.data.crop import Crop
from pycls_fast.data.decoders import (
    DECODERS,
    SCALED_REGION,
    Picture,
    RegionPicture,
    divisor,
)
from pycls_fast.data.to_rgb import Conversion, DamagedImage, decode, orientation_of
from pycls_fast.data.transforms import Augmented, EvalTransform, TrainTransform
from pycls_fast.errors import UserError
from tests.factories import config_of
from tests.unit.data.conftest import PHOTO
from tests.unit.data.conftest import encode as as_file


def encode(image: Image.Image, orientation: int | None = None, kind: str = "JPEG", **options: Any) -> bytes:
    if orientation is not None:
        options["exif"] = Image.Exif()
        options["exif"][ExifTags.Base.Orientation] = orientation
    return as_file(image, kind, **({"quality": 90} if kind == "JPEG" else {}), **options)


def variants(photo: Image.Image) -> dict[str, bytes]:
    """The same photograph as the JPEGs that cameras and programs write."""
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
        "turned by 90 degrees, which is ignored": encode(photo, 6),
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
    picture = (SCALED_REGION if scaled else DECODERS["region"])(files[name])
    assert isinstance(picture, RegionPicture)
    assert picture.size == Image.open(io.BytesIO(files[name])).size[::-1]
    cuts = list(random_cuts(picture.size, 40, seed=len(name)))
    if name == "as it comes":
        assert {divisor(crop) for crop in cuts} == {1, 2, 4, 8}
    for crop in cuts:
        wanted = rows_then_columns(Image.open(io.BytesIO(files[name])), crop, divisor(crop) if scaled else 1)
        np.testing.assert_array_equal(picture.crop(crop), wanted, err_msg=str(crop))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("decoder", [DECODERS["simplejpeg"], DECODERS["region"]])
def test_training_crops_are_the_reference_s(
    decoder: Callable[..., Picture], name: str, files: dict[str, bytes]
) -> None:
    """Same box, same mirroring, and no pixel off by more than the rounding between the two passes of the resize."""
    transform = TrainTransform(Augment(), image_size=56)
    for seed in range(12):
        ours = transform(decoder(files[name]), seed).image_HWC.astype(int)
        reference = transform(DECODERS["pillow"](files[name]), seed).image_HWC.astype(int)
        assert np.abs(ours - reference).max() <= 1, (seed, name)


def test_what_is_no_plain_jpeg_gives_the_pixels_of_an_array(photo: Image.Image) -> None:
    """Packed as raw pixels, these files train as before."""
    small = photo.resize((60, 40))
    images = {"PNG": small, "WEBP": small, "GIF": small.convert("P"), "BMP": small, "JPEG": small.convert("CMYK")}
    for data in (encode(image, kind=kind) for kind, image in images.items()):
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
        np.testing.assert_array_equal(DECODERS["region"](pixels).crop(crop), rows_then_columns(photo, crop))
    transform = TrainTransform(Augment(), image_size=56)
    for seed in range(20):
        reference = transform(DECODERS["pillow"](pixels), seed).image_HWC.astype(int)
        assert np.abs(transform(DECODERS["simplejpeg"](pixels), seed).image_HWC.astype(int) - reference).max() <= 1
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


@pytest.mark.parametrize("decoder", [DECODERS["simplejpeg"], DECODERS["region"]])
def test_same_verdicts_on_damaged_files(decoder: Callable[..., Picture], photo: Image.Image) -> None:
    transform = TrainTransform(Augment(), image_size=32)
    refused = 0
    for seed, data in enumerate(damaged_files(photo)):
        reference, ours = (outcome(d, data, transform, seed) for d in (DECODERS["pillow"], decoder))
        if isinstance(reference, str) or isinstance(ours, str):
            assert ours == reference, seed
            refused += 1
        else:
            difference = np.abs(ours.image_HWC.astype(int) - reference.image_HWC.astype(int))
            assert difference.max() <= 1, seed
    assert 130 < refused < 300


def test_decompression_bombs(photo: Image.Image, monkeypatch: pytest.MonkeyPatch) -> None:
    def limit(pixels: int) -> None:
        monkeypatch.setattr(decoders, "MAX_PIXELS", pixels)
        monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", pixels // 2)

    for decoder, kind in itertools.product(DECODERS.values(), ("JPEG", "PNG")):
        data = encode(photo, kind=kind)
        limit(320 * 213)
        decoder(data)
        limit(320 * 213 - 2)
        with pytest.raises(DamagedImage, match="decompression bomb"):
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


ALL_DECODERS = {**DECODERS, "region, dct": SCALED_REGION}
EIGHT = range(1, 9)


def as_seen(data: bytes) -> Image.Image:
    """By Pillow alone."""
    return ImageOps.exif_transpose(Image.open(io.BytesIO(data))).convert("RGB")


def test_images_are_turned_if_asked_and_tiffs_always(photo: Image.Image) -> None:
    for orientation in EIGHT:
        stored = decode(encode(photo, orientation, "PNG"))
        np.testing.assert_array_equal(stored, photo)
        # Pillow turns TIFF files when it reads the pixels; nothing is turned twice.
        tiff = encode(photo, orientation, "TIFF")
        for upright in (False, True):
            np.testing.assert_array_equal(decode(tiff, Conversion(upright)), as_seen(tiff))


@pytest.mark.parametrize("name", ALL_DECODERS)
@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP"])
def test_random_crops_are_those_of_a_file_that_was_turned_before(photo: Image.Image, kind: str, name: str) -> None:
    decoder = ALL_DECODERS[name]
    turning = replace(decoder, convert=Conversion(upright=True))
    training = TrainTransform(Augment(erase_probability=0.5), image_size=32)
    scoring = EvalTransform(Augment(), image_size=48)
    for orientation in EIGHT:
        data = encode(photo, orientation, kind)
        is_fast = kind == "JPEG" and orientation == 1
        before = data if is_fast else encode(as_seen(data), kind="PNG")
        picture = turning(data)
        assert type(picture) is type(decoder(before))
        assert picture.size == as_seen(data).size[::-1]
        for seed in range(2):
            ours, wanted = training(turning(data), seed), training(decoder(before), seed)
            np.testing.assert_array_equal(ours.image_HWC, wanted.image_HWC)
            assert ours.erase == wanted.erase
        np.testing.assert_array_equal(scoring(picture, 0).image_HWC, scoring(decoder(before), 0).image_HWC)


def orientation_and_warnings(data: bytes) -> tuple[int, list[Any]]:
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        return orientation_of(data), heard


@pytest.mark.parametrize("name", ALL_DECODERS)
def test_bad_exif_needs_no_turn(photo: Image.Image, name: str) -> None:
    decoder = ALL_DECODERS[name]
    transform = EvalTransform(Augment(), image_size=48)
    garbage = (
        b"", b"garbage", b"II*\0\xff\xff\xff\xff", b"MM\0*\0\0\0\x08\xff\xff\x01\x12",
        np.random.default_rng(0).bytes(300),
    )  # fmt: skip
    tags = [encode(photo, number) for number in (0, 9, 65535)]
    for data in (*tags, *(encode(photo, exif=b"Exif\0\0" + part) for part in garbage)):
        assert orientation_and_warnings(data) == (1, [])
        picture = replace(decoder, convert=Conversion(upright=True))(data)
        assert type(picture) is type(decoder(data))
        np.testing.assert_array_equal(transform(picture, 0).image_HWC, transform(decoder(data), 0).image_HWC)
        np.testing.assert_array_equal(decode(data, Conversion(upright=True)), decode(data))
    for kind, part in itertools.product(("PNG", "WEBP"), (b"garbage", b"II*\0\x08\0\0\0\x05\0")):
        data = encode(photo, exif=b"Exif\0\0" + part, kind=kind)
        assert orientation_and_warnings(data) == (1, [])
        np.testing.assert_array_equal(decode(data, Conversion(upright=True)), decode(data))


def segment(marker: int, content: bytes) -> bytes:
    return b"\xff" + bytes([marker]) + (len(content) + 2).to_bytes(2, "big") + content


def test_the_tag_is_found_wherever_it_is(photo: Image.Image) -> None:
    plain, tagged = encode(photo), encode(photo, 6)
    assert orientation_of(plain) == 1
    assert orientation_of(tagged) == 6
    # A profile that looks like the start of the pixels and like EXIF; fill bytes; an end in the middle of the header.
    profile = segment(0xE2, b"ICC_PROFILE\0\x01\x01" + b"\xff\xda\xff\xe1" * 10_000)
    assert orientation_of(plain[:2] + profile + plain[2:]) == 1
    for before in (profile, segment(0xFE, b"a comment"), b"\xff\xff"):
        assert orientation_of(tagged[:2] + before + tagged[2:]) == 6
    for end in range(2, 300):
        assert orientation_of(plain[:end]) == 1
    # Editors write XMP next to EXIF.
    xmp = segment(0xE1, b"http://ns.adobe.com/xap/1.0/\0<x/>")
    assert orientation_of(tagged[:2] + xmp + tagged[2:]) == 6
    assert orientation_of(plain[:2] + xmp + plain[2:]) == 1


@pytest.mark.parametrize(
    ("name", "key", "convert"),
    [
        ("pillow", "data.exif_orientation=true", Conversion(upright=True)),
        ("simplejpeg", "data.transparent=white", Conversion(on_white=True)),
        ("region", "data.exif_orientation=false", Conversion()),
    ],
)
def test_the_key_chooses(name: str, key: str, convert: Conversion) -> None:
    config = config_of(f"speed.decode={name}", key)
    found = build.data._decoder(config, build.switches(config, torch.device("cpu")), training=True)
    assert found == replace(DECODERS[name], convert=convert)
