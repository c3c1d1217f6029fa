"""Whatever is given becomes the same images, in a known order; what is no image is told."""

from __future__ import annotations

import os
import re
import sys
import threading
from fractions import Fraction
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import av
import numpy as np
import pytest
import torch
from PIL import Image

from pycls_fast.errors import UserError
from pycls_fast.inference import images as images_room
from pycls_fast.inference.images import GivenImages, find_images, frames_of, given_images


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    names = ("b.jpg", "a.PNG", "c/deep/d.webp", "c/e.txt", ".hidden.png", ".cache/f.png", "odd[1].png", "empty/x.txt")
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    return tmp_path


@pytest.mark.parametrize(
    ("words", "found"),
    [
        (["b.jpg", "a.PNG"], ["b.jpg", "a.PNG"]),
        (["."], ["a.PNG", "b.jpg", "c/deep/d.webp", "odd[1].png"]),
        (["*"], ["a.PNG", "b.jpg", "odd[1].png"]),
        (["**/*.webp", "b.jpg"], ["c/deep/d.webp", "b.jpg"]),
        # A file is a file, whatever its name means as a pattern, and whatever it ends in.
        (["odd[1].png", "c/e.txt"], ["odd[1].png", "c/e.txt"]),
    ],
)
def test_words_become_files(tree: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], found: list[str]) -> None:
    monkeypatch.chdir(tree)
    assert [str(path) for path in find_images(words)] == found
    absolute = find_images(str(tree / word) for word in words)
    assert [str(path.relative_to(tree)) for path in absolute] == found


def test_words_that_mean_nothing_are_told_at_once(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tree)
    with pytest.raises(UserError) as caught:
        find_images(["b.jpg", "nowhere.png", "*.gif", "empty"])
    assert [line.partition(" (")[0] for line in caught.value.lines] == [
        "images: nowhere.png is not a file, a folder or a pattern that matches images",
        "images: *.gif is not a file, a folder or a pattern that matches images",
        "images: empty holds no images",
    ]


def test_images_of_formats_that_are_not_read_are_named(tree: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole = find_images([str(tree)])
    assert not capsys.readouterr().err
    for name in ("one.HEIC", "two.heic", "raw.nef"):
        (tree / name).write_bytes(b"x")
    assert find_images([str(tree)]) == whole
    assert capsys.readouterr().err == (
        f"note: {tree}: images of formats that are not read are left out: 2 .heic, 1 .nef\n"
    )


def test_every_kind_is_the_same_picture(pixels: np.ndarray, folder: Path) -> None:
    tensor = torch.from_numpy(pixels)
    gray = Image.fromarray(pixels[0, :, :, 0])
    for images in (
        pixels,
        tensor,
        list(pixels),
        [tensor[0], *pixels[1:]],
        [Image.fromarray(image) for image in pixels],
        (image for image in pixels),
    ):
        source = given_images(images)
        assert source.in_memory
        assert [source.name(index) for index in range(len(source))] == [f"image {index}" for index in range(5)]
        assert all(np.array_equal(source.read(index), pixels[index]) for index in range(5))
    for images in (gray, pixels[0, :, :, 0], pixels[0, :, :, :1], pixels[:1, :, :, :1]):
        source = given_images(images)
        assert len(source) == 1
        assert np.array_equal(source.read(0), np.repeat(pixels[0, :, :, :1], 3, axis=2))
    for images in (folder, str(folder), [folder / "0.png", f"{folder}/[1-3].png", folder / "more"]):
        source = given_images(images)
        assert not source.in_memory
        assert [source.name(index)[-5:] for index in range(len(source))] == [f"{index}.png" for index in range(5)]
        assert source.read(3) == (folder / "3.png").read_bytes()


@pytest.mark.parametrize(
    ("images", "line"),
    [
        ([], "images: none were given"),
        (3, "images: must be a path, an address, a Pillow image, or a uint8 array or tensor .*; got int"),
        ([np.zeros((4, 4, 3))], "images: must be a path, .*; got float64 (4, 4, 3)"),
        (torch.zeros(3, 8, 8, dtype=torch.uint8), "images: must be .*; got uint8 (3, 8, 8)"),
        (torch.zeros(8, 8, dtype=torch.bfloat16), "images: must be .*; got bfloat16 (8, 8)"),
        ([[None]], "images: must be .*; got NoneType"),
    ],
)
def test_what_is_no_image(images: Any, line: str) -> None:
    with pytest.raises(UserError, match=re.escape(line).replace(re.escape(".*"), ".*")):
        given_images(images)


def test_addresses_are_read(folder: Path) -> None:
    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, *words: object) -> None:
            pass

        def do_GET(self) -> None:
            if self.path == "/cut.png":
                self.wfile.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n10\r\nabc")
            else:
                super().do_GET()

    with ThreadingHTTPServer(("localhost", 0), partial(Quiet, directory=str(folder))) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://localhost:{server.server_port}/1.png"
        source = given_images([address, f"file://{folder}/*.png"])
        assert source.name(0) == address
        assert source.read(0) == (folder / "1.png").read_bytes() == source.read(2)
        assert len(source) == 5
        (folder / "my é.png").write_bytes((folder / "1.png").read_bytes())
        for name in ("my é.png", "my%20%C3%A9.png"):
            assert given_images(address.replace("1.png", name)).read(0) == source.read(2)
        for name, says in (("x.png", "404"), ("cut.png", "IncompleteRead")):
            with pytest.raises(OSError, match=says):
                given_images(address.replace("1.png", name)).read(0)
        write_clip(folder / "clip.mp4", 2)
        address = f"http://localhost:{server.server_port}/clip.mp4"
        source = given_images([address, f"{address}4.mp4"])
        names = [f"{address}@0.0s", f"{address}@1.0s", f"{address}4.mp4@0.0s"]
        assert [source.name(index) for index in range(3)] == names
        assert brightness(source.read(1)) == pytest.approx(60, abs=1.5)
        with pytest.raises(OSError, match="404"):
            source.read(2)
        server.shutdown()


def test_addresses_that_cannot_be_read() -> None:
    source = given_images(["memory://nothing/1.png", "nosuchkind://bucket/1.png"])
    for index, says in enumerate(("nothing/1", "nosuchkind")):
        with pytest.raises(OSError, match=says):
            source.read(index)


def write_clip(path: Path, seconds: int, *, turned: int = 0, group: int = 12, paused: int = 0, **options: str) -> None:
    """Ten frames a second, of which each is brighter by one and dark below; the last ten come seconds later."""
    with av.open(path, "w", options=options) as container:
        stream = container.add_stream("mpeg4", rate=10)
        stream.width, stream.height, stream.pix_fmt, stream.codec_context.gop_size = 64, 32, "yuv420p", group
        stream.bit_rate, stream.options = 4_000_000, {"sc_threshold": "1000000000"}
        stream.set_display_rotation(turned)
        for number in range(10 * seconds):
            pixels = np.zeros((32, 64, 3), np.uint8)
            pixels[:16] = 50 + number
            frame = av.VideoFrame.from_ndarray(pixels, "rgb24")
            frame.pts = number + 10 * paused * (number >= 10 * (seconds - 1))
            container.mux(stream.encode(frame))
        container.mux(stream.encode())


def brightness(pixels: Any) -> float:
    """That of the brighter half."""
    return float(np.asarray(pixels, np.float64)[:10].mean())


def test_frames_of_a_video(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_clip(Path("clip.MP4"), 8)
    source = given_images("clip.MP4")
    assert [source.name(index) for index in range(len(source))] == [f"clip.MP4@{n}.0s" for n in range(8)]
    assert not source.in_memory
    # Each is the frame of its time, in whatever order they are read.
    for index in (0, 1, 2, 5, 3, 7, 7):
        pixels = source.read(index)
        assert isinstance(pixels, np.ndarray)
        assert pixels.shape == (32, 64, 3)
        assert brightness(pixels) == pytest.approx(50 + 10 * index, abs=1.5)
    assert [found.seconds for found in images_room.find_frames(Path("clip.MP4"), 2.5)] == [0.0, 2.5, 5.0, 7.5]
    write_clip(Path("paused.mp4"), 2, paused=5)
    assert [found.seconds for found in images_room.find_frames(Path("paused.mp4"), 1)] == [0.0, 6.0]
    # As often as there are frames.
    assert len(images_room.find_frames(Path("clip.MP4"), 0.01)) == 80
    assert [frame for frame in find_images(["*.MP4"], 4) if not isinstance(frame, images_room.Frame)] == []


def test_nothing_is_asked_of_a_video_that_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyAV would answer with what now lies in the freed memory."""
    stream, opened = SimpleNamespace(time_base=Fraction(1, 10), duration=20), MagicMock()
    opened.__enter__.return_value = SimpleNamespace(
        streams=SimpleNamespace(video=[stream]),
        demux=lambda _: [SimpleNamespace(pts=n, is_keyframe=n == 0) for n in range(20)],
    )
    opened.__exit__.side_effect = lambda *_: vars(stream).clear()
    monkeypatch.setattr(images_room, "_opened", lambda _: opened)
    assert len(images_room.find_frames("clip.mp4", 0.5)) == 4


def test_a_video_is_decoded_on_from_where_it_was(tmp_path: Path) -> None:
    write_clip(tmp_path / "clip.mp4", 6, group=20)
    frames = images_room.find_frames(tmp_path / "clip.mp4", 0.5)
    assert [frame.start for frame in frames[::4]] == [frame.time for frame in frames[::4]]
    decoding = []
    for index in (0, 1, 3, 8, 9, 8):
        frames[index].read()
        decoding.append(images_room._reader(tmp_path / "clip.mp4", os.getpid())._frames)
    assert [one is other for one, other in pairwise(decoding)] == [True, True, False, True, False]


def test_videos_of_phones_are_turned(tmp_path: Path) -> None:
    write_clip(tmp_path / "clip.mov", 1, turned=90)
    pixels = given_images(tmp_path / "clip.mov").read(0)
    # Turned counterclockwise, what was above is at the left.
    assert np.asarray(pixels).shape == (64, 32, 3)
    assert np.asarray(pixels)[:, :10].mean() > 40 > np.asarray(pixels)[:, -10:].mean()


@pytest.mark.parametrize("kind", ["junk", "cut", "no index", "gone"])
def test_a_damaged_video_is_one_line(tmp_path: Path, kind: str) -> None:
    clip = tmp_path / "clip.mp4"
    write_clip(clip, 12, **({"movflags": "+faststart"} if kind == "cut" else {}))
    whole = clip.read_bytes()
    clip.write_bytes(b"junk" if kind == "junk" else whole[: len(whole) * 6 // 10])
    if kind == "gone":
        clip.unlink()
    source, mistakes = GivenImages(list(frames_of([clip], 1.0))), []
    for index in range(len(source)):
        try:
            source.read(index)
        except OSError as error:
            mistakes.append(f"{source.name(index)}: {error}")
    assert len(mistakes) == 1
    assert mistakes[0].startswith(f"{clip}@{12.0 if kind == 'cut' else 0.0}s: ")
    assert (len(source) > 3) == (kind == "cut")


def test_without_pyav_the_command_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "clip.mp4").touch()
    monkeypatch.setitem(sys.modules, "av", None)
    with pytest.raises(UserError, match=r"clip.mp4: videos need PyAV .*; pip install 'pycls_fast\[video\]'$"):
        find_images([str(tmp_path / "clip.mp4")])
