"""Synthetic images: a function of (seed, index)."""

from __future__ import annotations

import numpy as np

from pycls_fast.data.sources.synthetic import SyntheticImages


def test_counter_decides_the_pixels() -> None:
    source, same, other = (SyntheticImages(50, 9, 4, seed) for seed in (3, 3, 4))
    images = []
    for index in range(50):
        image_HWC, label = source.read(index)
        assert image_HWC.shape == (9, 9, 3)
        assert image_HWC.dtype == np.uint8
        assert label == index % 4
        np.testing.assert_array_equal(image_HWC, same.read(index)[0])
        assert (image_HWC != other.read(index)[0]).any()
        images.append(image_HWC)
    assert len({image.tobytes() for image in images}) == 50
    values = np.stack(images)
    assert values.min() == 0
    assert values.max() == 255
    # The mean of n uniform values has a standard error of 73.9 / sqrt(n).
    assert abs(values.mean() - 127.5) < 5 * 73.9 / values.size**0.5


def test_interface() -> None:
    source = SyntheticImages(1200, 32, 3, seed=0)
    assert len(source) == 1200
    assert source.classes == ("class0", "class1", "class2")
    assert source.name(7) == "synthetic image 7"
    assert source.describe() == "1,200 images of 3 classes, synthetic, 32 x 32"
