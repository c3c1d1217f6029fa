"""Small datasets on disk."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

WriteTree = Callable[[Path, Mapping[str, int]], Path]
LimitPixels = Callable[[int], None]


@pytest.fixture
def write_tree() -> WriteTree:
    """Writes random 12 x 10 PNGs: `write_tree(root, {"train/cat": 3})` makes train/cat/0.png .. 2.png."""

    def write(root: Path, counts: Mapping[str, int]) -> Path:
        generator = np.random.default_rng(0)
        for folder, count in counts.items():
            (root / folder).mkdir(parents=True, exist_ok=True)
            for number in range(count):
                pixels = generator.integers(0, 256, (10, 12, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(root / folder / f"{number}.png")
        return root

    return write


@pytest.fixture
def limit_pixels(monkeypatch: pytest.MonkeyPatch) -> LimitPixels:
    """Sets the size above which a file counts as damaged."""

    def limit(pixels: int) -> None:
        for name in ("decode", "decoders"):
            monkeypatch.setattr(importlib.import_module(f"pycls_fast.data.{name}"), "MAX_PIXELS", pixels)

    return limit
