"""Statistics of speed, of paired images, and the tests of the gate; those of accuracy are in `effects.py`.

Single timings have long tails and no known distribution, so only order statistics are used for them; for rounds and
pairs of turns, which are few, the mean with Student's interval.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from scipy import special, stats

from pycls_fast.values import PositiveFloat, PositiveInt

CONFIDENCE = 0.95
"""Confidence level of every interval of the ledger."""


@dataclass(frozen=True)
class Spread:
    """Tenth, fiftieth and ninetieth percentile (linear between samples), mean, and number of samples."""

    p10: float
    p50: float
    p90: float
    mean: float
    count: int


def spread(samples: Sequence[float]) -> Spread:
    p10, p50, p90 = np.quantile(samples, (0.1, 0.5, 0.9)).tolist()
    return Spread(p10, p50, p90, float(np.mean(samples)), len(samples))


@lru_cache
def t_quantile(freedom: float, share: float = (1 + CONFIDENCE) / 2) -> float:
    """Student's quantile: by default, half the width of the interval at `CONFIDENCE`, in standard errors."""
    return float(special.stdtrit(freedom, share))


def mean_interval(values: Sequence[float]) -> tuple[float, float | None]:
    """The mean of one value or more, and half the width of its interval (Student's t), which one value has not."""
    mean, count = float(np.mean(values)), len(values)
    if count == 1:
        return mean, None
    return mean, t_quantile(count - 1) * float(np.std(values, ddof=1)) / math.sqrt(count)


Mean = tuple[float, float, int]
"""A mean, its standard error, and the degrees of freedom of that."""


@dataclass(frozen=True)
class Speedup:
    """A rate over the reference's, from rounds (or pairs of turns) in which both were measured: the geometric mean and
    its 95% interval (Student's t of the logarithms over the rounds; None below two rounds)."""

    ratio: PositiveFloat
    low: PositiveFloat | None
    high: PositiveFloat | None
    rounds: PositiveInt

    def __str__(self) -> str:
        if self.low is None or self.high is None:
            return f"{self.ratio:.2f}x (one round)"
        return f"{self.ratio:.2f}x ({self.low:.2f} to {self.high:.2f})"

    @property
    def mean(self) -> Mean | None:
        """That of the rounds' logarithms, whose error is recovered from the interval; None without one."""
        if self.low is None or self.high is None:
            return None
        freedom = self.rounds - 1
        return math.log(self.ratio), math.log(self.high / self.low) / 2 / t_quantile(freedom), freedom


def geometric_mean(ratios: Sequence[float]) -> Speedup:
    """Geometric mean of positive ratios, one per round and at least one, with its interval."""
    mean, half = mean_interval([math.log(ratio) for ratio in ratios])
    low, high = (None, None) if half is None else (math.exp(mean - half), math.exp(mean + half))
    return Speedup(math.exp(mean), low, high, len(ratios))


def paired_ratio(reference: Sequence[float], variant: Sequence[float]) -> Speedup:
    """How many times faster a variant is, from two rates (images per second) that were measured in turns.

    The ratio is taken within each pair, before any averaging: a drift of the machine's speed, which is far larger than
    most differences of interest, affects both halves of a pair and cancels.
    """
    return geometric_mean([new / old for old, new in zip(reference, variant, strict=True)])


def pair_images(labels_N: np.ndarray, first_N: np.ndarray, second_N: np.ndarray) -> dict[str, float]:
    """Two runs compared on the same images, by the true classes and those that each predicted.

    The difference in top-1, second minus first, in points, with its 95% interval over images (bootstrap of pairs,
    percentiles); how many only one of them got right, and how many have other predictions, right or wrong; McNemar's
    exact test of equal accuracy (two-sided).
    """
    images = len(labels_N)
    right_first, right_second = first_N == labels_N, second_N == labels_N
    lost, won = int((right_first & ~right_second).sum()), int((~right_first & right_second).sum())
    # Resampling the images is a multinomial draw of how many of them were lost, won or neither.
    shares = np.array([lost, won, images - lost - won]) / images
    draws = np.random.default_rng(0).multinomial(images, shares, size=10_000)
    tail = 50 * (1 - CONFIDENCE)
    low, high = np.percentile(100.0 * (draws[:, 1] - draws[:, 0]) / images, [tail, 100 - tail])
    return {
        "difference": 100.0 * ((won - lost) / images),
        "low": float(low),
        "high": float(high),
        "only_first": lost,
        "only_second": won,
        "p_value": float(stats.binomtest(lost, lost + won).pvalue) if lost + won else 1.0,
        "changed": int((first_N != second_N).sum()),
        "images": images,
    }


def holm(values: Sequence[float | None]) -> list[float]:
    """Holm's adjusted p-values (Holm 1979); 1 for entries without a test."""
    tested = sorted((p, i) for i, p in enumerate(values) if p is not None)
    adjusted = [1.0] * len(values)
    largest = 0.0
    for rank, (p, position) in enumerate(tested):
        largest = max(largest, min(1.0, p * (len(tested) - rank)))
        adjusted[position] = largest
    return adjusted


def two_sided(p_values: Sequence[float | None]) -> list[float]:
    """For each test, the smaller of the p-values for a loss and for a gain, each after Holm's correction."""
    gains = [None if p is None else 1 - p for p in p_values]
    return [min(pair) for pair in zip(holm(p_values), holm(gains), strict=True)]


def p_lower(before: Mean, now: Mean) -> float:
    """p-value of Welch's one-sided test that a mean is lower now; two without errors are compared as they are."""
    if not before[1] and not now[1]:
        return 0.5 if before[0] == now[0] else float(now[0] > before[0])
    now_s, before_s = ((mean, error * math.sqrt(free + 1), free + 1) for mean, error, free in (now, before))
    return float(stats.ttest_ind_from_stats(*now_s, *before_s, equal_var=False, alternative="less").pvalue)
