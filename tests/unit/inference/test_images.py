"""Whatever is given becomes the same images, in a known order; what is no image is told."""

from __future__ import annotations

import re
import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from pycls_fast.errors import UserError
from pycls_fast.inference.images import find_images, given_images


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for name in ("b.jpg", "a.PNG", "c/d.webp", "c/e.txt", ".hidden.png", ".cache/f.png", "odd[1].png", "empty/x.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    return tmp_path


@pytest.mark.parametrize(
    ("words", "found"),
    [
        (["b.jpg", "a.PNG"], ["b.jpg", "a.PNG"]),
        (["."], ["a.PNG", "b.jpg", "c/d.webp", "odd[1].png"]),
        (["*"], ["a.PNG", "b.jpg", "odd[1].png"]),
        (["**/*.webp", "b.jpg"], ["c/d.webp", "b.jpg"]),
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


def test_links_to_folders_are_followed_but_not_in_circles(tree: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    (elsewhere / "g.png").touch()
    (tree / "c/linked").symlink_to(elsewhere)
    # Back to where it began, to itself, and to nothing.
    (elsewhere / "back").symlink_to(tree)
    (elsewhere / "own").symlink_to("own")
    (elsewhere / "nothing").symlink_to(elsewhere / "missing")
    found = [str(path.relative_to(tree)) for path in find_images([str(tree)])]
    assert found == ["a.PNG", "b.jpg", "c/d.webp", "c/linked/g.png", "odd[1].png"]


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

    with ThreadingHTTPServer(("localhost", 0), partial(Quiet, directory=str(folder))) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://localhost:{server.server_port}/1.png"
        source = given_images([address, f"file://{folder}/*.png"])
        assert source.name(0) == address
        assert source.read(0) == (folder / "1.png").read_bytes() == source.read(2)
        assert len(source) == 5
        with pytest.raises(OSError, match="404"):
            given_images(f"{address}x").read(0)
        server.shutdown()
