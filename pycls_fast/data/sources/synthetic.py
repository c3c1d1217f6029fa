"""Synthetic images, which need no disk."""

from __future__ import annotations

import numpy as np

from pycls_fast.counter import counter_seed


class SyntheticSource:
    """Noise generated on demand: for measuring everything but disk and decoder, and for tests.

    The pixels depend only on (seed, index), uniform in 0..255 and unrelated to the label; labels cycle through the
    classes.
    """

    def __init__(self, count: int, image_size: int, num_classes: int, seed: int) -> None:
        if count < 1 or image_size < 1 or num_classes < 1:
            raise ValueError(f"need at least one image, pixel and class: {count}, {image_size}, {num_classes}")
        self._count = count
        self._image_size = image_size
        self._seed = seed
        self.classes = tuple(f"class{label}" for label in range(num_classes))

    def __len__(self) -> int:
        return self._count

    def read(self, index: int) -> tuple[np.ndarray, int]:
        size = self._image_size
        words = -(-size * size * 3 // 8)
        # A bit generator's raw words are stable between NumPy versions; the byte order is fixed for the same
        # reason.
        raw = np.random.PCG64(counter_seed(self._seed, index)).random_raw(words).astype("<u8")
        image_HWC = raw.view(np.uint8)[: size * size * 3].reshape(size, size, 3)
        return image_HWC, index % len(self.classes)

    def name(self, index: int) -> str:
        return f"synthetic image {index}"

    def describe(self) -> str:
        size = self._image_size
        return f"{self._count:,} synthetic images of {size} x {size} in {len(self.classes):,} classes"
