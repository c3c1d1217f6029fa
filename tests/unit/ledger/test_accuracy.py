"""Two runs against each other, image by image."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from pycls_fast.ledger.accuracy import pair_images


def test_a_pair_counts_images() -> None:
    labels = np.array([0, 0, 0, 0, 1, 1, 1, 1, 1, 1])
    first = np.array([0, 0, 0, 1, 1, 1, 1, 1, 0, 0])
    second = np.array([0, 1, 1, 1, 1, 1, 1, 1, 1, 2])
    pair = pair_images(labels, first, second)
    assert (pair.only_first, pair.only_second, pair.changed, pair.images) == (2, 1, 4, 10)
    assert pair.difference == pytest.approx(-10.0)
    assert pair.p_value == pytest.approx(1.0)
    each = (second == labels).astype(float) - (first == labels)
    assert pair.standard_error == pytest.approx(100 * each.std() / math.sqrt(10))


def test_mcnemar_is_the_binomial_test_of_discordant_images() -> None:
    labels = np.zeros(100, dtype=int)
    first, second = labels.copy(), labels.copy()
    second[:12], first[20:22] = 1, 1
    pair = pair_images(labels, first, second)
    expected = 2 * sum(math.comb(14, k) for k in range(3)) / 2**14
    assert pair.p_value == pytest.approx(expected)
    assert pair.low < pair.difference < pair.high < 0


def test_the_bootstrap_covers_like_the_normal_interval() -> None:
    rng = np.random.default_rng(3)
    labels = np.zeros(5000, dtype=int)
    first, second = (rng.random((2, 5000)) < 0.2).astype(int)
    pair = pair_images(labels, first, second)
    half = stats.norm.ppf(0.975) * pair.standard_error
    assert pair.low == pytest.approx(pair.difference - half, abs=0.1 * half)
    assert pair.high == pytest.approx(pair.difference + half, abs=0.1 * half)


@pytest.mark.parametrize("sizes", [(0, 0, 0), (3, 3, 2), (3, 2, 3)])
def test_other_images_cannot_be_paired(sizes: tuple[int, int, int]) -> None:
    with pytest.raises(ValueError, match="same images"):
        pair_images(*(np.zeros(size, dtype=int) for size in sizes))
