"""Statistics of repeated measurements.

Single timings have long tails and no known distribution, so only order statistics are used for them; for rounds and
seeds, which are few, the mean with Student's interval.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy import special

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
    """Summarise samples of any unit.

    Raises:
        ValueError: no samples, or one that is not finite.
    """
    values = np.asarray(samples, dtype=np.float64)
    if values.size == 0 or not np.isfinite(values).all():
        raise ValueError(f"need finite samples; got {list(samples)}")
    p10, p50, p90 = (float(np.quantile(values, q)) for q in (0.1, 0.5, 0.9))
    return Spread(p10, p50, p90, float(values.mean()), values.size)


def median_interval(samples: Sequence[float], confidence: float = CONFIDENCE) -> tuple[float, float] | None:
    """The sign test's confidence interval of the median, which only assumes independent samples.

    The k-th smallest and the k-th largest sample enclose the median unless fewer than k samples fall on one
    side, which happens with probability 2 P(Binomial(n, 1/2) < k) (Conover, Practical Nonparametric
    Statistics, 1999, section 3.2). The largest k that keeps this within `1 - confidence` is taken.

    Returns:
        (low, high), or None if even the extremes do not reach the confidence (fewer than 6 samples at 0.95).
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
    """How many times faster a variant is than the reference, from pairs measured one right after the other.

    Attributes:
        spread: of the ratios of the pairs; above 1 is faster.
        interval: 95% interval of their median, or None with fewer than 6 pairs.
        pairs: the ratios, in the order of measurement.
    """

    spread: Spread
    interval: tuple[float, float] | None
    pairs: tuple[float, ...]


def paired_ratio(reference: Sequence[float], variant: Sequence[float]) -> Ratio:
    """Ratios of two rates (images per second) that were measured in turns.

    The ratio is taken within each pair, before any averaging: a drift of the machine's speed, which is far larger than
    most differences of interest, affects both halves of a pair and cancels.

    Raises:
        ValueError: different numbers of samples, or none.
    """
    pairs = tuple(new / old for old, new in zip(reference, variant, strict=True))
    return Ratio(spread(pairs), median_interval(pairs), pairs)


def t_quantile(freedom: float) -> float:
    """Half the width of Student's interval at `CONFIDENCE`, in standard errors."""
    return float(special.stdtrit(freedom, (1 + CONFIDENCE) / 2))


def mean_interval(values: Sequence[float]) -> tuple[float, float | None]:
    """The mean and half the width of its interval (Student's t); a single value has no interval (None).

    Raises:
        ValueError: no values.
    """
    if not len(values):
        raise ValueError("no values")
    mean, count = float(np.mean(values)), len(values)
    if count == 1:
        return mean, None
    return mean, t_quantile(count - 1) * float(np.std(values, ddof=1)) / math.sqrt(count)


@dataclass(frozen=True)
class Speedup:
    """A rate over the reference's, from rounds in which both were measured.

    Attributes:
        ratio: the geometric mean.
        low, high: its 95% interval (Student's t of the logarithms over the rounds), or None below two rounds.
        rounds: number of rounds; 0 if no start of a ledger measured both, so that the rounds are from different starts.
    """

    ratio: float
    low: float | None
    high: float | None
    rounds: int


def is_unpaired(values: Mapping[str, Any]) -> bool:
    """Whether a ledger's `speedup` is over rounds from different starts, and so includes the machine's drift."""
    return bool(values["rounds"] == 0)


def speedup(reference: Sequence[float], variant: Sequence[float]) -> Speedup:
    """The speed-up from rates measured in the same rounds, in the same order.

    Raises:
        ValueError: different numbers of rounds, or none.
    """
    return geometric_mean([new / old for old, new in zip(reference, variant, strict=True)])


def geometric_mean(ratios: Sequence[float]) -> Speedup:
    """Geometric mean of positive ratios, one per round, with its interval.

    Raises:
        ValueError: no ratios.
    """
    mean, half = mean_interval([math.log(ratio) for ratio in ratios])
    low, high = (None, None) if half is None else (math.exp(mean - half), math.exp(mean + half))
    return Speedup(math.exp(mean), low, high, len(ratios))
