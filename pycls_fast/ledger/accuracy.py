"""Paired comparison of two runs: their difference in top-1, image by image."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from scipy import stats

from pycls_fast.ledger.statistics import CONFIDENCE


@dataclass(frozen=True)
class ImagePair:
    """Two runs compared on the same images; differences are second minus first, in percentage points of top-1.

    Attributes:
        difference: in top-1.
        low, high: its 95% interval over images (bootstrap of pairs, percentiles).
        standard_error: of the difference, over images.
        only_first, only_second: images that only this run got right.
        p_value: McNemar's exact test of equal accuracy (two-sided).
        changed: images whose predictions differ, right or wrong.
        images: number of images.
    """

    difference: float
    low: float
    high: float
    standard_error: float
    only_first: int
    only_second: int
    p_value: float
    changed: int
    images: int


def pair_images(
    labels_N: np.ndarray, first_N: np.ndarray, second_N: np.ndarray, *, resamples: int = 10_000
) -> ImagePair:
    """Compare two runs image by image.

    Args:
        labels_N: the true classes.
        first_N, second_N: predicted classes, in the order of the labels.
        resamples: number of bootstrap resamples; the seed is fixed.

    Raises:
        ValueError: no images, or arrays of different lengths.
    """
    if not len(labels_N) or not len(labels_N) == len(first_N) == len(second_N):
        raise ValueError(f"need the same images: {len(labels_N)}, {len(first_N)}, {len(second_N)}")
    images = len(labels_N)
    right_first, right_second = first_N == labels_N, second_N == labels_N
    lost, won = int((right_first & ~right_second).sum()), int((~right_first & right_second).sum())
    # Resampling the images is a multinomial draw of how many of them were lost, won or neither.
    shares = np.array([lost, won, images - lost - won]) / images
    draws = np.random.default_rng(0).multinomial(images, shares, size=resamples)
    tail = 50 * (1 - CONFIDENCE)
    low, high = np.percentile(100.0 * (draws[:, 1] - draws[:, 0]) / images, [tail, 100 - tail])
    difference = (won - lost) / images
    variance = max((won + lost) / images - difference**2, 0.0) / images
    return ImagePair(
        difference=100.0 * difference,
        low=float(low),
        high=float(high),
        standard_error=100.0 * math.sqrt(variance),
        only_first=lost,
        only_second=won,
        p_value=float(stats.binomtest(lost, lost + won).pvalue) if lost + won else 1.0,
        changed=int((first_N != second_N).sum()),
        images=images,
    )
