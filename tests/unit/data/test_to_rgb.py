"""Every kind of image file becomes the right 8-bit RGB; every kind of damage is named."""

from __future__ import annotations

import contextlib
import io
import struct
import zlib

import numpy as np
import pytest
from PIL import Image

from pycls_fast.data.to_rgb import Conversion, DamagedImage, decode
from tests.unit.data.conftest import encode


def pixels(data: bytes) -> np.ndarray:
    image = decode(data)
    assert image.mode == "RGB"
    return np.asarray(image)


def random_image(*channels: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (9, 13, *channels), dtype=np.uint8)


def gray(values_HW: np.ndarray) -> np.ndarray:
    return np.repeat(values_HW[:, :, None], 3, axis=2)


def png(width: int, height: int, bit_depth: int, color_type: int, rows: bytes, *chunks: tuple[bytes, bytes]) -> bytes:
    """A PNG from raw rows (each with its filter byte), for what Pillow cannot write."""
    header = struct.pack(">IIBBBBB", width, height, bit_depth, color_type, 0, 0, 0)
    parts = [(b"IHDR", header), *chunks, (b"IDAT", zlib.compress(rows)), (b"IEND", b"")]
    data = b"\x89PNG\r\n\x1a\n"
    for name, body in parts:
        data += struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))
    return data


PLAIN, RGBA, COLOURS, INDICES = (
    random_image(3),
    random_image(4),
    random_image(3).reshape(-1, 3)[:50],
    random_image() % 50,
)


def with_palette(transparency: int | bytes | None = None) -> Image.Image:
    image = Image.fromarray(INDICES)
    image.putpalette(COLOURS.tobytes())
    image.info |= {} if transparency is None else {"transparency": transparency}
    return image


KINDS = {
    "rgb": (Image.fromarray(PLAIN), PLAIN, ("PNG", "BMP", "TIFF", "PPM", "WEBP")),
    "gray": (Image.fromarray(INDICES), gray(INDICES), ("PNG", "BMP", "TIFF", "PPM")),
    "bits": (Image.fromarray(INDICES > 20), gray((INDICES > 20) * np.uint8(255)), ("PNG",)),
    "palette": (with_palette(), COLOURS[INDICES], ("PNG", "GIF", "TIFF", "BMP")),
    "one transparent entry": (with_palette(3), COLOURS[INDICES], ("PNG",)),
    "all entries transparent": (with_palette(bytes(range(50))), COLOURS[INDICES], ("PNG",)),
    "alpha is dropped": (Image.fromarray(RGBA), RGBA[:, :, :3], ("PNG", "TIFF")),
}


@pytest.mark.parametrize("kind", KINDS)
def test_what_the_formats_can_hold(kind: str) -> None:
    image, expected, formats = KINDS[kind]
    for name in formats:
        options = {"lossless": True} if name == "WEBP" else {}
        np.testing.assert_array_equal(pixels(encode(image, name, **options)), expected, err_msg=name)


def test_white_shows_through_where_it_is_asked_for() -> None:
    shares_HW1 = RGBA[:, :, 3:] / 255
    wanted_HWC = RGBA[:, :, :3] * shares_HW1 + 255 * (1 - shares_HW1)
    for kind in ("PNG", "TIFF", "WEBP"):
        data = encode(Image.fromarray(RGBA), kind, **({"lossless": True, "exact": True} if kind == "WEBP" else {}))
        found = np.asarray(decode(data, Conversion(on_white=True)))
        assert np.abs(found - wanted_HWC).max() <= 1
    palette = decode(encode(with_palette(3), "PNG"), Conversion(on_white=True))
    assert np.array_equal(palette, np.where((INDICES == 3)[:, :, None], 255, COLOURS[INDICES]))
    opaque = encode(Image.fromarray(PLAIN), "PNG")
    assert np.array_equal(decode(opaque, Conversion(on_white=True)), PLAIN)


def test_cmyk_jpeg() -> None:
    # A gradient in each channel, which JPEG keeps within a few levels.
    y, x = np.mgrid[0:32, 0:48]
    image = np.stack([40 + 3 * x, 30 + 5 * y, 200 - 2 * x - y], axis=-1).astype(np.uint8)
    data = encode(Image.fromarray(image).convert("CMYK"), "JPEG", quality=95, subsampling=0)
    assert Image.open(io.BytesIO(data)).mode == "CMYK"
    assert np.abs(pixels(data).astype(int) - image).max() <= 6


def test_16_bit_gray_is_scaled() -> None:
    values = np.random.default_rng(0).integers(0, 65536, (9, 13)).astype(np.uint16)
    values[0, :3] = 0, 300, 65535
    expected = gray(np.rint(values / 257).astype(np.uint8))
    assert expected[0, :3, 0].tolist() == [0, 1, 255]
    big_endian_rows = b"".join(b"\0" + row.astype(">u2").tobytes() for row in values)
    files = {
        "PNG": png(13, 9, 16, 0, big_endian_rows),
        "PGM": b"P5 13 9 65535\n" + values.astype(">u2").tobytes(),
        "TIFF": encode(Image.fromarray(values), "TIFF"),
        "big-endian TIFF": encode(Image.frombytes("I;16B", (13, 9), values.astype(">u2").tobytes()), "TIFF"),
    }
    for name, data in files.items():
        np.testing.assert_array_equal(pixels(data), expected, err_msg=name)


@pytest.mark.parametrize("channels", [3, 4])
def test_16_bit_colour_is_scaled(channels: int) -> None:
    values = np.random.default_rng(0).integers(0, 65536, (9, 13, channels)).astype(np.uint16)
    rows = b"".join(b"\0" + row.astype(">u2").tobytes() for row in values)
    result = pixels(png(13, 9, 16, {3: 2, 4: 6}[channels], rows))
    assert np.abs(result - values[:, :, :3] / 257).max() <= 1


@pytest.mark.parametrize("full_scale", [1.0, 255.0, 65535.0])
def test_floating_point_tiff(full_scale: float) -> None:
    values = np.random.default_rng(0).random((9, 13), dtype=np.float32)
    values[0, 0] = 1
    data = encode(Image.fromarray(values * np.float32(full_scale)), "TIFF")
    assert np.abs(pixels(data) - gray(values * 255)).max() <= 0.51


@pytest.mark.parametrize("bad", [np.nan, -1.0, 1e9, np.inf])
def test_floating_point_without_scale(bad: float) -> None:
    values = np.random.default_rng(0).random((9, 13), dtype=np.float32)
    values[3, 3] = bad
    with pytest.raises(DamagedImage, match="no agreed scale"):
        decode(encode(Image.fromarray(values), "TIFF"))


@pytest.mark.parametrize("file_format", ["GIF", "PNG", "WEBP", "TIFF"])
def test_first_frame_of_several(file_format: str) -> None:
    first, second = (Image.fromarray(np.full((9, 13, 3), value, dtype=np.uint8)) for value in (90, 200))
    options = {"lossless": True} if file_format == "WEBP" else {}
    data = encode(first, file_format, save_all=True, append_images=[second], **options)
    assert pixels(data).min() == pixels(data).max() == 90


JPEG = encode(Image.fromarray(random_image(3)), "JPEG", quality=100)
PNG = encode(Image.fromarray(random_image(3)), "PNG")


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "empty"),
        (bytes(2000), "2,000 zero bytes"),
        (b"\n <!DOCTYPE html><html><body>404</body></html>", "HTML"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:caa375f9\nsize 210568\n", "git lfs pull"),
        (b"hello there, no image", "not an image of a known format"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "not an image of a known format"),
        (JPEG[:3], "not an image"),
        (JPEG[: len(JPEG) // 4], "(?i)truncated"),
        (PNG[: len(PNG) // 2], "truncated"),
        (encode(Image.fromarray(random_image(3)), "BMP")[:-100], "truncated"),
        (png(0, 5, 8, 0, b""), "not an image"),
        (png(30_000, 30_000, 8, 0, b"\0" * 100), "decompression bomb"),
    ],
)
def test_damage_is_named(data: bytes, reason: str) -> None:
    with pytest.raises(DamagedImage, match=reason) as caught:
        decode(data)
    assert "\n" not in str(caught.value)
    # An address would make the same damage look different each time.
    assert "0x" not in str(caught.value)


def test_random_damage_never_escapes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever Pillow raises on flipped bytes and cut files becomes a DamagedImage (or the image still decodes)."""
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 500_000)
    generator = np.random.default_rng(0)
    for file_format in ("JPEG", "PNG", "GIF", "BMP", "WEBP", "PPM", "TIFF"):
        options = {"compression": "tiff_lzw"} if file_format == "TIFF" else {}
        intact = np.frombuffer(encode(Image.fromarray(random_image(3)), file_format, **options), np.uint8)
        for _ in range(40):
            broken = intact.copy()
            broken[generator.integers(0, len(broken), 6)] = generator.integers(0, 256, 6)
            for data in (broken, intact[: generator.integers(len(intact))]):
                with contextlib.suppress(DamagedImage):
                    assert decode(data.tobytes()).mode == "RGB"
