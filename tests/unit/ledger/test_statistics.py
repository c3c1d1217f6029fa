"""Statistics of timings, on numbers that are known."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.stats

from pycls_fast.ledger.statistics import mean_interval, median_interval, paired_ratio, speedup, spread


def test_spread_of_known_samples() -> None:
    found = spread([5.0, 1.0, 2.0, 4.0, 13.0, 3.0, 6.0, 8.0, 7.0, 10.0, 9.0])
    assert (found.p10, found.p50, found.p90) == (2.0, 6.0, 10.0)
    assert found.mean == pytest.approx(68 / 11)
    assert found.count == 11


def test_spread_between_samples_is_linear() -> None:
    assert spread([1.0, 2.0]).p50 == 1.5
    assert spread([1.0, 2.0]).p90 == pytest.approx(1.9)


@pytest.mark.parametrize("samples", [[], [1.0, float("nan")], [float("inf")]])
def test_spread_refuses_what_has_no_median(samples: list[float]) -> None:
    with pytest.raises(ValueError, match="finite samples"):
        spread(samples)


@pytest.mark.parametrize("count", [0, 1, 5])
def test_no_interval_from_too_few_samples(count: int) -> None:
    assert median_interval([float(i) for i in range(count)]) is None


def test_six_samples_are_enclosed_by_their_extremes() -> None:
    assert median_interval([3.0, 1.0, 2.0, 6.0, 5.0, 4.0]) == (1.0, 6.0)


@pytest.mark.parametrize("count", [6, 7, 9, 10, 20, 31, 100])
@pytest.mark.parametrize("confidence", [0.8, 0.95, 0.99])
def test_interval_is_the_narrowest_that_is_sure_enough(count: int, confidence: float) -> None:
    found = median_interval([float(i) for i in reversed(range(1, count + 1))], confidence)

    def coverage(k: int) -> float:
        return 1 - 2 * float(scipy.stats.binom.cdf(k - 1, count, 0.5))

    if found is None:
        assert coverage(1) < confidence
        return
    k = round(found[0])
    assert found == (k, count + 1 - k)
    assert coverage(k) >= confidence > coverage(k + 1)


def test_ratio_is_taken_within_pairs() -> None:
    # The machine halves its speed midway; the variant is 1.25 times as fast all the time.
    reference = [100.0, 100.0, 100.0, 50.0, 50.0, 50.0]
    found = paired_ratio(reference, [1.25 * rate for rate in reference])
    assert found.pairs == (1.25,) * 6
    assert found.interval == (1.25, 1.25)
    assert found.spread.p10 == found.spread.p90 == 1.25


def test_ratio_above_one_is_faster() -> None:
    assert paired_ratio([100.0], [200.0]).spread.p50 == 2.0


def test_ratio_of_unequal_numbers_of_turns_is_refused() -> None:
    with pytest.raises(ValueError):
        paired_ratio([1.0, 2.0], [1.0])


def test_speed_is_compared_within_rounds() -> None:
    slow_then_fast = [100.0, 200.0, 50.0]
    result = speedup(
        slow_then_fast, [value * factor for value, factor in zip(slow_then_fast, (1.9, 2.0, 2.1), strict=True)]
    )
    assert result.ratio == pytest.approx((1.9 * 2.0 * 2.1) ** (1 / 3))
    assert result.low is not None
    assert result.high is not None
    assert 1.7 < result.low < result.ratio < result.high < 2.3
    assert speedup([100.0], [150.0]).low is None
    with pytest.raises(ValueError, match="no values"):
        speedup([], [])


def test_the_interval_of_a_mean_is_students() -> None:
    values = [1.0, 2.0, 4.0, 4.5]
    mean, half = mean_interval(values)
    low, high = scipy.stats.t.interval(0.95, 3, loc=np.mean(values), scale=scipy.stats.sem(values))
    assert half is not None
    assert (mean - half, mean + half) == pytest.approx((low, high))
    assert mean_interval([3.0]) == (3.0, None)
