"""Small datasets on disk."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

WriteTree = Callable[[Path, Mapping[str, int]], Path]


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
