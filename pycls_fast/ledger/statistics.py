"""Statistics of timings: order statistics only, since timings have long tails and no known distribution."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Spread:
    """Median, tenth and ninetieth percentile (linear between samples), mean, and how many samples."""

    p10: float
    p50: float
    p90: float
    mean: float
    count: int


def spread(samples: Sequence[float]) -> Spread:
    """Summarise samples of any unit.

    Raises:
        ValueError: there are none, or one is not finite.
    """
    values = np.asarray(samples, dtype=np.float64)
    if values.size == 0 or not np.isfinite(values).all():
        raise ValueError(f"need finite samples; got {list(samples)}")
    p10, p50, p90 = (float(np.quantile(values, q)) for q in (0.1, 0.5, 0.9))
    return Spread(p10, p50, p90, float(values.mean()), values.size)


def median_interval(samples: Sequence[float], confidence: float = 0.95) -> tuple[float, float] | None:
    """A confidence interval of the median that assumes nothing but independent samples: the sign test's.

    The k-th smallest and the k-th largest sample enclose the median unless fewer than k samples fall on one
    side, which happens with probability 2 P(Binomial(n, 1/2) < k) (Conover, Practical Nonparametric
    Statistics, 1999, section 3.2). The largest k that keeps this within `1 - confidence` is taken.

    Returns:
        (low, high), or None where even the extremes are not sure enough (fewer than 6 samples at 0.95).
    """
    ordered = sorted(samples)
    count = len(ordered)
    outside, k = 0.0, 0
    while k < (count + 1) // 2:
        outside += 2 * math.comb(count, k) / 2**count
        if outside > 1 - confidence:
            break
        k += 1
    return (ordered[k - 1], ordered[count - k]) if k else None


@dataclass(frozen=True)
class Ratio:
    """How many times faster a variant is than the reference, from pairs measured next to each other.

    Attributes:
        spread: of the ratios of the pairs; above 1 is faster.
        interval: of their median at 95%, or None with fewer than 6 pairs.
        pairs: the ratios, in the order they were measured.
    """

    spread: Spread
    interval: tuple[float, float] | None
    pairs: tuple[float, ...]


def paired_ratio(reference: Sequence[float], variant: Sequence[float]) -> Ratio:
    """Ratios of two rates (images a second) that were measured in turns.

    The ratio is taken within each pair, before anything is averaged: a drift of the machine's speed, which is
    far larger than most differences of interest, is in both halves of a pair and falls out.

    Raises:
        ValueError: different numbers of samples, or none.
    """
    pairs = tuple(new / old for old, new in zip(reference, variant, strict=True))
    return Ratio(spread(pairs), median_interval(pairs), pairs)
