"""Statistics of timings, on numbers that are known."""

from __future__ import annotations

import pytest
import scipy.stats

from pycls_fast.ledger.statistics import median_interval, paired_ratio, spread


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
