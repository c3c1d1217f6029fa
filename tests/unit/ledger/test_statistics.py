"""Statistics, against scipy and on numbers that are known: planted effects are found, innocents are not accused."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from pycls_fast.ledger.report.statistics import (
    geometric_mean,
    holm,
    mean_interval,
    p_slower,
    pair_images,
    paired_ratio,
    spread,
)


def test_spread_of_known_samples() -> None:
    found = spread([5.0, 1.0, 2.0, 4.0, 13.0, 3.0, 6.0, 8.0, 7.0, 10.0, 9.0])
    assert (found.p10, found.p50, found.p90) == (2.0, 6.0, 10.0)
    assert found.mean == pytest.approx(68 / 11)
    assert found.count == 11
    assert spread([1.0, 2.0]).p90 == pytest.approx(1.9)


def test_ratio_is_taken_within_pairs() -> None:
    # The machine halves its speed midway; the variant is 1.25 times as fast all the time.
    reference = [100.0, 100.0, 100.0, 50.0, 50.0, 50.0]
    found = paired_ratio(reference, [1.25 * rate for rate in reference])
    assert (found.ratio, found.low, found.high) == pytest.approx((1.25, 1.25, 1.25))
    with pytest.raises(ValueError, match="zip"):
        paired_ratio(reference, [100.0])


def test_the_mean_of_ratios_is_geometric() -> None:
    result = geometric_mean([1.9, 2.0, 2.1])
    assert result.ratio == pytest.approx((1.9 * 2.0 * 2.1) ** (1 / 3))
    assert result.low is not None
    assert result.high is not None
    assert 1.7 < result.low < result.ratio < result.high < 2.3
    assert geometric_mean([1.5]).low is None


def test_the_interval_of_a_mean_is_students() -> None:
    values = [1.0, 2.0, 4.0, 4.5]
    mean, half = mean_interval(values)
    low, high = stats.t.interval(0.95, 3, loc=np.mean(values), scale=stats.sem(values))
    assert half is not None
    assert (mean - half, mean + half) == pytest.approx((low, high))
    assert mean_interval([3.0]) == (3.0, None)


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


def test_speeds_are_compared_by_welchs_test_of_the_rounds() -> None:
    """What is kept of the rounds, their mean and its interval, says as much as they do."""
    before, now = [1.9, 2.0, 2.1, 2.05, 1.95], [1.7, 1.85, 1.8, 1.9, 1.75, 1.8]
    logarithms = [[math.log(ratio) for ratio in ratios] for ratios in (now, before)]
    expected = stats.ttest_ind(*logarithms, equal_var=False, alternative="less").pvalue
    assert p_slower(geometric_mean(before), geometric_mean(now)) == pytest.approx(expected, rel=1e-9)
    assert 1e-4 < expected < 1e-2


def test_holm_steps_down() -> None:
    assert holm([0.01, None, 0.04, 0.03]) == pytest.approx([0.03, 1.0, 0.06, 0.06])
