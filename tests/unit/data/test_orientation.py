"""EXIF orientation: in every decoder an image looks as Pillow's `exif_transpose` shows it, if that is asked for."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import ExifTags, Image, ImageOps

from pycls_fast import build
from pycls_fast.data.choices import Augment
from pycls_fast.data.decode import Conversion, decode, jpeg_orientation
from pycls_fast.data.decoders import DECODERS, open_scaled_region
from pycls_fast.data.pack import PackSettings, pack
from pycls_fast.data.sources.folders import scan_classes
from pycls_fast.data.sources.packed import PackedImages
from pycls_fast.data.transforms import EvalTransform, TrainTransform
from tests.factories import config_of
from tests.unit.data.conftest import encode as as_file

ALL_DECODERS = {**DECODERS, "region, dct": open_scaled_region}
FORMATS = ("JPEG", "PNG", "WEBP")
EIGHT = range(1, 9)


def encode(image: Image.Image, orientation: int | None = None, kind: str = "JPEG", **options: Any) -> bytes:
    if orientation is not None:
        options["exif"] = Image.Exif()
        options["exif"][ExifTags.Base.Orientation] = orientation
    return as_file(image, kind, **options)


def as_seen(data: bytes) -> Image.Image:
    """By Pillow alone."""
    return ImageOps.exif_transpose(Image.open(io.BytesIO(data))).convert("RGB")


@pytest.mark.parametrize("kind", FORMATS)
def test_the_eight_orientations(photo: Image.Image, kind: str) -> None:
    for orientation in EIGHT:
        data = encode(photo, orientation, kind)
        seen, found = as_seen(data), decode(data, Conversion(upright=True))
        assert found.size == seen.size == (photo.size if orientation <= 4 else photo.size[::-1])
        np.testing.assert_array_equal(found, seen)
        stored = decode(data)
        assert stored.size == photo.size
        assert (orientation == 1) == np.array_equal(stored, seen)
        # Pillow turns TIFF files when it reads the pixels; nothing is turned twice.
        tiff = encode(photo, orientation, "TIFF")
        for upright in (False, True):
            np.testing.assert_array_equal(decode(tiff, Conversion(upright)), as_seen(tiff))


@pytest.mark.parametrize("name", ALL_DECODERS)
@pytest.mark.parametrize("kind", FORMATS)
def test_random_crops_are_those_of_a_file_that_was_turned_before(photo: Image.Image, kind: str, name: str) -> None:
    decoder = ALL_DECODERS[name]
    training, scoring = (
        TrainTransform(Augment(erase_probability=0.5), image_size=32),
        EvalTransform(Augment(), image_size=48),
    )
    for orientation in EIGHT if kind == "JPEG" else (1, 6):
        data = encode(photo, orientation, kind)
        is_fast = kind == "JPEG" and orientation == 1
        before = data if is_fast else encode(as_seen(data), kind="PNG")
        picture = replace(decoder, convert=Conversion(upright=True))(data)
        assert type(picture) is type(decoder(before))
        assert picture.size == as_seen(data).size[::-1]
        for seed in range(2):
            ours, wanted = (
                training(replace(decoder, convert=Conversion(upright=True))(data), seed),
                training(decoder(before), seed),
            )
            np.testing.assert_array_equal(ours.image_HWC, wanted.image_HWC)
            assert ours.erase == wanted.erase
        np.testing.assert_array_equal(scoring(picture, 0).image_HWC, scoring(decoder(before), 0).image_HWC)


@pytest.mark.parametrize("name", ALL_DECODERS)
def test_bad_exif_needs_no_turn(photo: Image.Image, name: str) -> None:
    """Warnings are errors here."""
    decoder = ALL_DECODERS[name]
    transform = EvalTransform(Augment(), image_size=48)
    garbage = (
        b"",
        b"garbage",
        b"II*\0\xff\xff\xff\xff",
        b"MM\0*\0\0\0\x08\xff\xff\x01\x12",
        np.random.default_rng(0).bytes(300),
    )
    tags = [encode(photo, number) for number in (0, 9, 65535)]
    for data in (*tags, *(encode(photo, exif=b"Exif\0\0" + part) for part in garbage)):
        assert jpeg_orientation(data) == 1
        picture = replace(decoder, convert=Conversion(upright=True))(data)
        assert type(picture) is type(decoder(data))
        np.testing.assert_array_equal(transform(picture, 0).image_HWC, transform(decoder(data), 0).image_HWC)
        np.testing.assert_array_equal(decode(data, Conversion(upright=True)), decode(data))
    for kind in ("PNG", "WEBP"):
        data = encode(photo, exif=b"Exif\0\0garbage", kind=kind)
        np.testing.assert_array_equal(decode(data, Conversion(upright=True)), decode(data))


def segment(marker: int, content: bytes) -> bytes:
    return b"\xff" + bytes([marker]) + (len(content) + 2).to_bytes(2, "big") + content


def test_the_tag_is_found_wherever_it_is(photo: Image.Image) -> None:
    plain, tagged = encode(photo), encode(photo, 6)
    assert jpeg_orientation(plain) == 1
    assert jpeg_orientation(tagged) == 6
    # A profile that looks like the start of the pixels and like EXIF; fill bytes; an end in the middle of the header.
    profile = segment(0xE2, b"ICC_PROFILE\0\x01\x01" + b"\xff\xda\xff\xe1" * 10_000)
    assert jpeg_orientation(plain[:2] + profile + plain[2:]) == 1
    for before in (profile, segment(0xFE, b"a comment"), b"\xff\xff"):
        assert jpeg_orientation(tagged[:2] + before + tagged[2:]) == 6
    for end in range(2, 300):
        assert jpeg_orientation(plain[:end]) == 1
    # Editors write XMP next to EXIF.
    xmp = segment(0xE1, b"http://ns.adobe.com/xap/1.0/\0<x/>")
    assert jpeg_orientation(tagged[:2] + xmp + tagged[2:]) == 6
    assert jpeg_orientation(plain[:2] + xmp + plain[2:]) == 1


def packed(photo: Image.Image, tmp_path: Path, settings: PackSettings, kind: str) -> list[bytes | np.ndarray]:
    """The eight orientations as a class folder, packed."""
    folder = tmp_path / "folders" / "class"
    folder.mkdir(parents=True)
    for orientation in EIGHT:
        (folder / f"{orientation}.{kind.lower()}").write_bytes(encode(photo, orientation, kind))
    pack(scan_classes(tmp_path / "folders"), tmp_path / "packed", settings, workers=0, title="")
    source = PackedImages(tmp_path / "packed")
    return [source.read(index) for index in range(8)]


@pytest.mark.parametrize("kind", ["JPEG", "TIFF"])
def test_packing_keeps_the_orientation_of_what_is_encoded_again(photo: Image.Image, tmp_path: Path, kind: str) -> None:
    for orientation, data in zip(EIGHT, packed(photo, tmp_path, PackSettings(64), kind), strict=True):
        assert isinstance(data, bytes)
        assert jpeg_orientation(data) == (1 if kind == "TIFF" else orientation)
        seen = decode(data, Conversion(upright=True))
        wanted = as_seen(encode(photo, orientation, kind)).resize(seen.size, Image.Resampling.BICUBIC)
        assert min(seen.size) == 64
        assert np.abs(np.asarray(seen, np.int16) - np.asarray(wanted, np.int16)).mean() < 4


@pytest.mark.parametrize("name", DECODERS)
def test_the_key_chooses(name: str) -> None:
    for key, convert in (
        ("data.exif_orientation=false", Conversion()),
        ("data.exif_orientation=true", Conversion(upright=True)),
        ("data.transparent=white", Conversion(on_white=True)),
    ):
        config = config_of(f"speed.decode={name}", key)
        found = build.data._decoder(config, build.switches(config, torch.device("cpu")), training=True)
        assert found == replace(DECODERS[name], convert=convert)
