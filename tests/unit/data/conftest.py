"""Small datasets on disk."""

from __future__ import annotations

import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sklearn.datasets
import torch
from PIL import Image

from pycls_fast.data.batch import Batch

PHOTO = Path(sklearn.datasets.__file__).parent / "images" / "china.jpg"
"""A photograph of 640 x 427 that comes with scikit-learn."""


@pytest.fixture(scope="session")
def photo() -> Image.Image:
    """A part of it, 320 x 213."""
    return Image.open(PHOTO).convert("RGB").crop((100, 60, 420, 273))


def encode(image: Image.Image, kind: str = "JPEG", **options: Any) -> bytes:
    """The image as a file."""
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def assert_same(batches: list[Batch], others: list[Batch]) -> None:
    """The same batches, on whatever device the first ones are."""
    for batch, other in zip(batches, others, strict=True):
        assert torch.equal(batch.images_BHWC.cpu(), other.images_BHWC)
        assert torch.equal(batch.labels_B.cpu(), other.labels_B)
        assert torch.equal(batch.indices_B.cpu(), other.indices_B)
        assert (batch.erase_B4 is None) == (other.erase_B4 is None)
        if batch.erase_B4 is not None and other.erase_B4 is not None:
            assert torch.equal(batch.erase_B4.cpu(), other.erase_B4)
        assert batch.damaged == other.damaged


def write_tree(root: Path, counts: Mapping[str, int]) -> Path:
    """Random 12 x 10 PNGs: `write_tree(root, {"train/cat": 3})` makes train/cat/0.png .. 2.png."""
    generator = np.random.default_rng(0)
    for folder, count in counts.items():
        (root / folder).mkdir(parents=True, exist_ok=True)
        for number in range(count):
            pixels = generator.integers(0, 256, (10, 12, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(root / folder / f"{number}.png")
    return root
