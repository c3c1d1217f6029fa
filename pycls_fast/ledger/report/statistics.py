"""All statistics of the ledger: intervals, speed-ups, paired images, verdicts, and the tests of the gate.

Single timings have long tails and no known distribution, so only order statistics are used for them; for rounds and
seeds, which are few, the mean with Student's interval. Runs are paired by their seed: the same initial weights, order
of images and augmentation. The unit of inference is the seed, since the claim is about the next run and not only about
the next image. docs/method.md says in words how they are reached.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from scipy import special, stats

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

    @property
    def unpaired(self) -> bool:
        """Whether it is over rounds from different starts, and so includes the machine's drift."""
        return self.rounds == 0


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


# Family-wise level of all one-sided tests for losses in all reports of a ledger, and of all those for gains.
_LEVEL = (1 - CONFIDENCE) / 2
# More seeds than this are not recommended as a way out.
MOST_SEEDS = 200
# The chance that the recommended number of seeds settles a comparison.
_CHANCE = 0.85
# Values of the unknown standard deviation over which the chance is averaged.
_POINTS = 40


def level_of_tests(look: int) -> float:
    """Level of a report's one-sided tests together: half of 2.5% at the first look, a quarter at the second, ...

    Whoever trains more seeds because a report asks for them looks at the results several times, and each look may
    accuse an innocent. Spent like this, the levels of all looks add up to no more than the whole.
    """
    return _LEVEL * 0.5**look


def level_of_bound(look: int) -> float:
    """Level of the one-sided bound of a loss; that of the first look is the lower end of the 95% interval."""
    return (1 - CONFIDENCE) * 0.5**look


def more_seeds(
    *,
    difference: float,
    deviation: float,
    freedom: float,
    pairs: int,
    seeds: int,
    margin: float,
    tests: int,
    look: int,
) -> int:
    """How many more seeds per variant settle a comparison with 85% chance; `MOST_SEEDS` + 1 if more than `MOST_SEEDS`.

    The mean of n pairs, given that of the first m, is normal around today's mean with the variance s^2 (1/m - 1/n):
    the true difference is not known better than that. The chance is averaged over what the true deviation s may be,
    given the measured one. A comparison is settled if a loss larger than the margin is excluded, or if a loss is found.
    (A gain that is found excludes a loss, too.)

    Args:
        difference: mean over the pairs so far, in points.
        deviation: of a pair's difference, in points.
        freedom: degrees of freedom of the deviation; 0 if it does not come from the seeds.
        pairs: number of pairs so far.
        seeds: number of seeds behind the deviation, with which `freedom` grows.
        margin: the loss in points that does not matter.
        tests: number of comparisons in the report: what passes Holm's first and strictest step passes all of them.
        look: number of the next look.
    """
    more = np.arange(1 if pairs > 1 else 2 - pairs, MOST_SEEDS + 1)
    # Degrees of freedom grow in proportion to the number of seeds minus one.
    later_M = freedom * (seeds + more - 1) / (seeds - 1) if freedom else pairs + more - 1
    true_QM = deviation * _true_over_measured(freedom)[:, None] * np.ones(len(more))
    measured_QM = np.sqrt((freedom * deviation**2 + (later_M - freedom) * true_QM**2) / later_M)
    error_QM = measured_QM / np.sqrt(pairs + more)
    moves_QM = true_QM * np.sqrt(1 / pairs - 1 / (pairs + more))
    excluded_above_QM = stats.t.isf(level_of_bound(look), later_M) * error_QM - margin
    found_below_QM = -stats.t.isf(level_of_tests(look) / tests, later_M) * error_QM
    not_excluded, found = (stats.norm.cdf((end - difference) / moves_QM) for end in (excluded_above_QM, found_below_QM))
    unsettled_M = np.maximum(not_excluded - found, 0.0).mean(axis=0)
    enough = more[unsettled_M <= 1 - _CHANCE]
    return int(enough[0]) if len(enough) else MOST_SEEDS + 1


def _true_over_measured(freedom: float) -> np.ndarray:
    """Equally likely values (Q,) of the true standard deviation over the measured one."""
    if not freedom:
        return np.ones(1)
    return np.sqrt(freedom / stats.chi2.ppf((np.arange(_POINTS) + 0.5) / _POINTS, freedom))


# A variant whose deviation over seeds is this many times that of the others is judged by its own spread only.
_OUTLYING = 2.0

Finding = Literal["identical", "no loss", "small loss", "loss", "gain", "not enough runs"]


@dataclass(frozen=True)
class Comparison:
    """One variant of a report compared with another.

    Attributes:
        first, second: their names; differences are second minus first.
        pairs: paired images by the seed that the two runs share.
    """

    first: str
    second: str
    pairs: Mapping[int, ImagePair]

    @property
    def changes(self) -> bool:
        """Whether any prediction differs."""
        return any(pair.changed for pair in self.pairs.values())

    @property
    def differences(self) -> list[float]:
        """Differences of top-1 in points, one per pair."""
        return [pair.difference for pair in self.pairs.values()]


@dataclass(frozen=True)
class Verdict:
    """What the seeds say about a change.

    Attributes:
        finding: the kind of verdict.
        text: the verdict in words, with its numbers.
        difference: top-1 with the change minus without, in points, averaged over the seeds; None without a pair.
        low, high: its 95% interval (Student's t), or None with fewer than 2 pairs.
        p_loss: p-value of the one-sided test for a loss, before correction for multiple comparisons.
        more_seeds: how many more runs of each variant would settle it with 85% chance; None if it is settled.
        seeds: number of pairs compared.
    """

    finding: Finding
    text: str
    difference: float | None
    low: float | None
    high: float | None
    p_loss: float | None
    more_seeds: int | None
    seeds: int


def judge(columns: Sequence[Sequence[Comparison]], *, margin: float = 0.2, look: int = 1) -> list[list[Verdict]]:
    """A verdict for each comparison of a report (docs/method.md has the rule).

    Args:
        columns: lists of comparisons, such as those with the first variant and those with the one before. A comparison
            in two columns is judged once, in the first of them.
        margin: the loss in points that does not matter.
        look: number of this look at the results, from 1; each one spends a part of the levels. 0 if no comparison has
            two pairs.

    Returns:
        The verdicts, in the positions of their comparisons.
    """
    same = _same_runs([comparison for column in columns for comparison in column])

    def key(c: Comparison) -> tuple[object, ...]:
        return same[c.first], same[c.second], tuple(sorted(c.pairs.items()))

    measured: dict[tuple[object, ...], _Measured] = {}
    for column in columns:
        # A variant that changes nothing adds no information about the spread.
        changing = [comparison for comparison in column if comparison.changes]
        together = _spread(changing, same)
        for comparison in column:
            if key(comparison) not in measured:
                own = _spread([comparison], same) if _is_wild(comparison, changing, same) else together
                measured[key(comparison)] = _measure(comparison, own, look)
    tests = sum(m.difference is not None and not m.identical for m in measured.values())
    losses = holm([m.p_loss for m in measured.values()])
    gains = holm([m.p_gain for m in measured.values()])
    level = level_of_tests(look)
    verdicts = {
        place: _verdict(m, loses=p <= level, gains=q <= level, margin=margin, tests=tests, look=look)
        for (place, m), p, q in zip(measured.items(), losses, gains, strict=True)
    }
    return [[verdicts[key(comparison)] for comparison in column] for column in columns]


def _same_runs(comparisons: Iterable[Comparison]) -> dict[str, str]:
    """Map each variant to one representative of those with exactly its predictions: the same runs repeated."""
    same: dict[str, str] = {}
    for c in comparisons:
        first, second = (same.setdefault(name, name) for name in (c.first, c.second))
        if c.pairs and not c.changes:
            same = {name: first if other == second else other for name, other in same.items()}
    return same


@dataclass(frozen=True)
class _Spread:
    """Spread between seeds: standard deviation of a pair's difference, its degrees of freedom, the most seeds used."""

    deviation: float
    freedom: float
    seeds: int


def _spread(comparisons: Sequence[Comparison], same: Mapping[str, str]) -> _Spread:
    """Pooled spread of all comparisons; degrees of freedom as in Satterthwaite 1946.

    Pairs of one seed that share a run are correlated: with n seeds, m variants against one reference have
    4 m (n - 1) / (m + 3) degrees of freedom; independent pairs would have m (n - 1).
    """
    mean, variance = 0.0, 0.0
    for c in comparisons:
        mean += 2 * (len(c.pairs) - 1)
        for d in comparisons:
            (a, b), (e, f) = ((same[x.first], same[x.second]) for x in (c, d))
            covariance = 2 if c is d else (a == e) + (b == f) - (a == f) - (b == e)
            n, k, common = len(c.pairs), len(d.pairs), len(c.pairs.keys() & d.pairs.keys())
            # The trace of the product of the two centring matrices; n - 1 if the seeds are the same.
            variance += covariance**2 * (common - common / n - common / k + common**2 / (n * k))
    seeds = max((len(c.pairs) for c in comparisons), default=0)
    return _Spread(_deviation(comparisons), mean**2 / variance if variance else 0.0, seeds)


def _deviation(comparisons: Sequence[Comparison]) -> float:
    """Pooled standard deviation of a pair's difference; 0 if no comparison has two pairs."""
    freedom = sum(len(c.pairs) - 1 for c in comparisons)
    squares = sum(float(np.var(c.differences)) * len(c.pairs) for c in comparisons)
    return math.sqrt(squares / freedom) if freedom else 0.0


def _is_wild(c: Comparison, column: Sequence[Comparison], same: Mapping[str, str]) -> bool:
    """Whether its deviation over seeds is much larger than that of the other comparisons."""

    def has_its_change(d: Comparison) -> bool:
        # If each variant is compared with the one before, one is in two comparisons.
        return same[c.second] in (same[d.first], same[d.second]) or same[c.first] == same[d.second]

    others = [d for d in column if not has_its_change(d)]
    return c.changes and bool(others) and _deviation([c]) > _OUTLYING * _deviation(others)


@dataclass(frozen=True)
class _Measured:
    """A comparison's numbers in points; `least`: the one-sided bound of the difference at this look."""

    difference: float | None
    half: float | None
    least: float | None
    deviation: float
    spread: _Spread
    p_loss: float | None
    p_gain: float | None
    identical: bool
    seeds: int


def _measure(comparison: Comparison, spread: _Spread, look: int) -> _Measured:
    pairs, count = list(comparison.pairs.values()), len(comparison.pairs)
    if not count:
        return _Measured(None, None, None, 0.0, spread, None, None, False, 0)
    mean = float(np.mean(comparison.differences))
    if not comparison.changes:
        return _Measured(mean, 0.0, mean, 0.0, spread, None, None, True, count)
    # A few seeds may agree by chance more closely than the number of images justifies.
    deviation = max(spread.deviation, math.sqrt(float(np.mean([pair.standard_error**2 for pair in pairs]))))
    # If no variant won or lost an image: one image, the smallest possible difference.
    deviation = deviation or 100.0 / pairs[0].images
    if count == 1:
        return _Measured(mean, None, None, deviation, spread, None, None, False, count)
    error = deviation / math.sqrt(count)
    half = t_quantile(spread.freedom) * error
    least = mean - float(stats.t.isf(level_of_bound(look), spread.freedom)) * error
    p_loss = float(stats.t.cdf(mean / error, spread.freedom))
    return _Measured(mean, half, least, deviation, spread, p_loss, 1 - p_loss, False, count)


def holm(values: Sequence[float | None]) -> list[float]:
    """Holm's adjusted p-values (Holm 1979); 1 for entries without a test."""
    tested = sorted((p, i) for i, p in enumerate(values) if p is not None)
    adjusted = [1.0] * len(values)
    largest = 0.0
    for rank, (p, position) in enumerate(tested):
        largest = max(largest, min(1.0, p * (len(tested) - rank)))
        adjusted[position] = largest
    return adjusted


def _verdict(m: _Measured, *, loses: bool, gains: bool, margin: float, tests: int, look: int) -> Verdict:
    low = high = None
    if m.difference is not None and m.half is not None:
        low, high = m.difference - m.half, m.difference + m.half

    def made(finding: Finding, text: str, more: int | None = None) -> Verdict:
        return Verdict(finding, text, m.difference, low, high, m.p_loss, more, m.seeds)

    if m.difference is None:
        return made("not enough runs", "nothing to compare with")
    if m.identical:
        return made("identical", "identical: every prediction is the same")
    change = f"{m.difference:+.2f} ({_interval(low, high)})"
    if m.half is not None and m.least is not None:
        amount = f"{abs(m.difference):.2f} ± {m.half:.2f}"
        above = m.least > -margin
        if loses:
            small = f", less than the {margin:g} that matter" if above else ""
            return made("small loss" if above else "loss", f"loses {amount}{small}")
        if gains:
            return made("gain", f"gains {amount}")
        if above:
            return made("no loss", f"{change}, no loss larger than {margin:g} points at 95%")
    more = more_seeds(
        difference=m.difference,
        deviation=m.deviation,
        freedom=m.spread.freedom,
        pairs=m.seeds,
        seeds=m.spread.seeds,
        margin=margin,
        tests=tests,
        look=look + 1,
    )
    return made("not enough runs", f"{change}, not enough runs to say: {_advice(more)}", more)


def _interval(low: float | None, high: float | None) -> str:
    return "one seed" if low is None or high is None else f"{low:+.2f} to {high:+.2f}"


def _advice(more: int) -> str:
    if more > MOST_SEEDS:
        return f"more than {MOST_SEEDS} more seeds; more test images would help"
    return f"about {more} more seed{'s' if more != 1 else ''} would probably do"


def two_sided(p_values: Sequence[float | None]) -> list[float]:
    """For each test, the smaller of the p-values for a loss and for a gain, each after Holm's correction."""
    gains = [None if p is None else 1 - p for p in p_values]
    return [min(pair) for pair in zip(holm(p_values), holm(gains), strict=True)]


def p_slower(before: Speedup, now: Speedup) -> float | None:
    """p-value of Welch's one-sided test that a rate is lower now; None if one side has no interval."""
    if before.low is None or now.low is None:
        return None
    moments = [_moments(values) for values in (before, now)]
    if moments[0][1] == moments[1][1] == 0:
        return 0.0 if moments[1][0] < moments[0][0] else 1.0
    return float(stats.ttest_ind_from_stats(*moments[1], *moments[0], equal_var=False, alternative="less").pvalue)


def _moments(values: Speedup) -> tuple[float, float, int]:
    """Mean and standard deviation of the rounds' logarithms, recovered from their interval, and number of rounds."""
    assert values.low is not None
    assert values.high is not None
    half = math.log(values.high / values.low) / 2
    deviation = half * math.sqrt(values.rounds) / t_quantile(values.rounds - 1)
    return math.log(values.ratio), deviation, values.rounds


def p_less_accurate(before: Sequence[float], now: Sequence[float], counts: tuple[int, int]) -> float | None:
    """p-value of the one-sided test for a loss of accuracy; None if there is nothing to test.

    Welch's test over the seeds; if one side has a single run, a test with the standard error of the images.

    Args:
        before, now: top-1 of each seed, in percent.
        counts: images of an evaluation, before and now.
    """
    if not before or not now or sorted(before) == sorted(now):
        return None
    if min(len(before), len(now)) < 2:
        return _p_of_proportions((float(np.mean(now)), float(np.mean(before))), counts[::-1])
    # Seeds may agree by chance; their deviation is taken as at least one image.
    moments = [
        (float(np.mean(top1)), max(float(np.std(top1, ddof=1)), 100.0 / count), len(top1))
        for count, top1 in zip(counts[::-1], (now, before), strict=True)
    ]
    return float(stats.ttest_ind_from_stats(*moments[0], *moments[1], equal_var=False, alternative="less").pvalue)


def _p_of_proportions(top1: tuple[float, float], counts: Sequence[int]) -> float:
    """p-value of the one-sided test of two proportions that the first of two accuracies in percent is lower.

    The images are the same on both sides, but of a ledger only their number is known. Taken as independent, they give
    a larger error, which leaves room for the unknown spread between seeds.
    """
    first, second = (value / 100 for value in top1)
    both = (first * counts[0] + second * counts[1]) / sum(counts)
    error = math.sqrt(both * (1 - both) * sum(1 / count for count in counts))
    return float(stats.norm.cdf((first - second) / error)) if error else 0.5
