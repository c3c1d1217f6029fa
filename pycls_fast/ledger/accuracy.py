"""What a change costs in accuracy: differences of top-1 between paired runs, with intervals and a verdict in words.

Runs are paired by their seed: the same initial weights, order of images and augmentation. The unit of inference is the
seed, since a change of a recipe is a claim about the next run and not only about the next image.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from scipy import stats

CONFIDENCE = 0.95
# Beyond this a sample size is no advice any more.
_MOST_SEEDS = 200


@dataclass(frozen=True)
class ImagePair:
    """One run against another on the same images; differences are second minus first, in points of top-1.

    Attributes:
        difference: of top-1.
        low, high: of its 95% interval over images (bootstrap of pairs, percentiles).
        standard_error: of the difference over images.
        only_first, only_second: images that one of the two alone got right.
        p_value: McNemar's exact test of equal accuracy (two-sided).
        changed: images with another prediction, right or wrong.
        images: how many there are.
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
        labels_N: the right classes.
        first_N, second_N: predicted classes, in the order of the labels.
        resamples: of the bootstrap, which is seeded.

    Raises:
        ValueError: no images, or different numbers of them.
    """
    if not len(labels_N) or not len(labels_N) == len(first_N) == len(second_N):
        raise ValueError(f"need the same images: {len(labels_N)}, {len(first_N)}, {len(second_N)}")
    images = len(labels_N)
    right_first, right_second = first_N == labels_N, second_N == labels_N
    lost, won = int((right_first & ~right_second).sum()), int((~right_first & right_second).sum())
    # A resample of images is a draw of how many of them were lost, won and neither.
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


Finding = Literal["identical", "no loss", "small loss", "loss", "gain", "not enough runs"]


@dataclass(frozen=True)
class Verdict:
    """What the seeds say about a change.

    Attributes:
        finding: the case.
        text: the case in words, with its numbers.
        difference: mean over the seeds of top-1 with the change minus without, in points; None without a pair.
        low, high: of its 95% interval (Student's t), or None with fewer than 2 pairs.
        p_loss: of the one-sided test against "no loss", before the correction for several rungs.
        more_seeds: how many more runs of each would settle it by today's estimate; None where nothing is open.
        seeds: pairs that were compared.
    """

    finding: Finding
    text: str
    difference: float | None
    low: float | None
    high: float | None
    p_loss: float | None
    more_seeds: int | None
    seeds: int


RULE = (
    "Pairs of runs share a seed. The interval is Student's t over the pairs; the spread between seeds is that of all "
    "rungs together, and is not smaller than what the images alone give. 'no loss larger than M points' where the 95% "
    "interval lies above -M; 'loses' where a one-sided test says so at 2.5% after Holm's correction over the rungs, so "
    "that a report without any loss accuses a rung in at most 2.5% of cases; 'gains' likewise; 'identical' where "
    "every prediction of every pair is the same; else 'not enough runs to say'."
)

# A rung whose seeds differ this much more than those of the others is judged by its own spread alone.
_OUTLYING = 2.0


def judge(pairs: Sequence[Sequence[ImagePair]], *, margin: float = 0.2) -> list[Verdict]:
    """A verdict for each rung of a report (the rule is `RULE`).

    Args:
        pairs: of each rung, one `ImagePair` per seed against the same reference.
        margin: the loss in points that does not matter.
    """
    pooled, freedom = _pooled([rung for rung in pairs if any(pair.changed for pair in rung)])
    measured = [_measure(rung, pooled, freedom) for rung in pairs]
    losses = holm([m.p_loss for m in measured])
    gains = holm([m.p_gain for m in measured])
    level = (1 - CONFIDENCE) / 2
    return [
        _verdict(m, loses=p <= level, gains=q <= level, margin=margin)
        for m, p, q in zip(measured, losses, gains, strict=True)
    ]


def _pooled(rungs: Sequence[Sequence[ImagePair]]) -> tuple[float, int]:
    """Standard deviation of a pair's difference, and its degrees of freedom, over the rungs that change anything."""
    freedom = sum(len(rung) - 1 for rung in rungs)
    squares = sum(float(np.var([p.difference for p in rung])) * len(rung) for rung in rungs)
    return (math.sqrt(squares / freedom), freedom) if freedom else (0.0, 0)


@dataclass(frozen=True)
class _Measured:
    difference: float | None
    half: float | None
    deviation: float
    freedom: int
    p_loss: float | None
    p_gain: float | None
    identical: bool
    seeds: int


def _measure(pairs: Sequence[ImagePair], pooled: float, freedom: int) -> _Measured:
    count = len(pairs)
    if not count:
        return _Measured(None, None, 0.0, 0, None, None, False, 0)
    differences = np.array([pair.difference for pair in pairs])
    mean = float(differences.mean())
    if not any(pair.changed for pair in pairs):
        return _Measured(mean, 0.0, 0.0, 0, None, None, True, count)
    own = float(differences.std(ddof=1)) if count > 1 else 0.0
    if own > _OUTLYING * pooled:
        pooled, freedom = own, count - 1
    # A few seeds may agree by chance more closely than the number of images allows.
    deviation = max(pooled, math.sqrt(float(np.mean([pair.standard_error**2 for pair in pairs]))))
    if count == 1 or not deviation:
        return _Measured(mean, None, deviation, freedom, None, None, False, count)
    error = deviation / math.sqrt(count)
    half = float(stats.t.ppf((1 + CONFIDENCE) / 2, freedom)) * error
    p_loss = float(stats.t.cdf(mean / error, freedom))
    return _Measured(mean, half, deviation, freedom, p_loss, 1 - p_loss, False, count)


def holm(values: Sequence[float | None]) -> list[float]:
    """Holm's adjusted p-values (Holm 1979); 1 where there was no test."""
    tested = sorted((p, i) for i, p in enumerate(values) if p is not None)
    adjusted = [1.0] * len(values)
    largest = 0.0
    for rank, (p, position) in enumerate(tested):
        largest = max(largest, min(1.0, p * (len(tested) - rank)))
        adjusted[position] = largest
    return adjusted


def _verdict(m: _Measured, *, loses: bool, gains: bool, margin: float) -> Verdict:
    def made(finding: Finding, text: str, more: int | None = None) -> Verdict:
        low = high = None
        if m.difference is not None and m.half is not None:
            low, high = m.difference - m.half, m.difference + m.half
        return Verdict(finding, text, m.difference, low, high, m.p_loss, more, m.seeds)

    if m.difference is None:
        return made("not enough runs", "not run")
    if m.identical:
        return made("identical", "identical: every prediction is the same")
    if m.half is None:
        more = _more_seeds(m, margin)
        return made("not enough runs", f"not enough runs to say: {_seeds(more)}", more)
    amount = f"{abs(m.difference):.2f} ± {m.half:.2f}"
    above = m.difference - m.half > -margin
    if loses:
        small = f", less than the {margin:g} that matter" if above else ""
        return made("small loss" if above else "loss", f"loses {amount}{small}")
    if gains:
        return made("gain", f"gains {amount}")
    if above:
        return made("no loss", f"no loss larger than {margin:g} points at 95%")
    more = _more_seeds(m, margin)
    return made("not enough runs", f"not enough runs to say: {_seeds(more)}", more)


def _seeds(more: int) -> str:
    if more > _MOST_SEEDS:
        return f"more than {_MOST_SEEDS} more seeds; more test images would help"
    return f"{more} more seed{'s' if more != 1 else ''} would do"


def _more_seeds(m: _Measured, margin: float) -> int:
    """How many more until the interval is narrow enough for one of the verdicts, were the estimates the truth."""
    assert m.difference is not None
    loss = max(-m.difference, 0.0)
    # Narrower than the distance to 0 finds the loss, narrower than that to the margin excludes one that matters.
    target = max(loss, margin - loss)
    for count in range(max(m.seeds + 1, 2), m.seeds + _MOST_SEEDS + 1):
        # Other rungs gain as many degrees of freedom as this one does.
        freedom = max(m.freedom * (count - 1) // max(m.seeds - 1, 1), count - 1)
        if float(stats.t.ppf((1 + CONFIDENCE) / 2, freedom)) * m.deviation / math.sqrt(count) <= target:
            return count - m.seeds
    return _MOST_SEEDS + 1


@dataclass(frozen=True)
class Speedup:
    """How many times the reference's rate, from rounds in which both were measured.

    Attributes:
        ratio: the geometric mean.
        low, high: of its 95% interval (Student's t of the logarithms over the rounds), or None with one round.
        rounds: how many.
    """

    ratio: float
    low: float | None
    high: float | None
    rounds: int


def speedup(reference: Sequence[float], variant: Sequence[float]) -> Speedup:
    """The ratio of rates measured in the same rounds, in their order.

    Raises:
        ValueError: different numbers of rounds, or none.
    """
    if not reference:
        raise ValueError("no rounds")
    logs = np.array([math.log(new / old) for old, new in zip(reference, variant, strict=True)])
    mean, count = float(logs.mean()), len(logs)
    if count == 1:
        return Speedup(math.exp(mean), None, None, 1)
    half = float(stats.t.ppf((1 + CONFIDENCE) / 2, count - 1)) * float(logs.std(ddof=1)) / math.sqrt(count)
    return Speedup(math.exp(mean), math.exp(mean - half), math.exp(mean + half), count)
