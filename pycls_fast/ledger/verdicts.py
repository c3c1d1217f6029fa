"""The accuracy cost of a change: differences in top-1 over paired runs, with intervals and a verdict in words.

Runs are paired by their seed: the same initial weights, order of images and augmentation. The unit of inference is the
seed, since the claim is about the next run and not only about the next image.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from scipy import stats

from pycls_fast.ledger.accuracy import ImagePair
from pycls_fast.ledger.advice import MOST_SEEDS, level_of_bound, level_of_tests, more_seeds
from pycls_fast.ledger.statistics import t_quantile

# A rung whose deviation over seeds is this many times that of the others is judged by its own spread only.
_OUTLYING = 2.0

Finding = Literal["identical", "no loss", "small loss", "loss", "gain", "not enough runs"]

RULE = (
    "Differences are top-1 with the change minus without, in points, with their 95% interval: a loss is negative. "
    "Pairs of runs share a seed. The interval is Student's t over the pairs of one comparison; the spread between "
    "seeds is pooled over all rungs of a column, or a rung's own if it is more than twice that of the others, and "
    "never smaller than the spread that follows from the images alone; pairs that share runs count for fewer degrees "
    "of freedom. 'no loss larger than M points': the 95% interval lies above -M; 'loses': a one-sided test finds a "
    "loss after Holm's correction over all comparisons of both columns; 'gains': the same for a gain; 'identical': "
    "every prediction of every pair is the same; 'not enough runs to say': everything else. The level of the test is "
    "1.25%, and halves each time the ladder is started with a new number of seeds, so that a ladder of equally noisy "
    "rungs without any real loss accuses a rung in at most 2.5% of cases, all its reports together. In later reports "
    "'no loss' needs a wider interval (97.5%, 98.75%, ...)."
)


@dataclass(frozen=True)
class Comparison:
    """One arm of a report compared with another.

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
        more_seeds: how many more runs of each arm would settle it with 85% chance; None if it is settled.
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


def rule(looks: Sequence[int]) -> str:
    """`RULE`, and which look at the results this report is.

    Args:
        looks: the number of seeds of each report so far, this one's last.
    """
    if len(looks) < 2:
        return RULE
    seeds = ", then ".join(map(str, looks))
    return f"{RULE} This is report {len(looks)} (with {seeds} seeds): level {level_of_tests(len(looks)):.2%}."


def judge(columns: Sequence[Sequence[Comparison]], *, margin: float = 0.2, look: int = 1) -> list[list[Verdict]]:
    """A verdict for each comparison of a report (the rule is `RULE`).

    Args:
        columns: lists of comparisons, such as those with the first arm and those with the arm before. A comparison in
            two columns is judged once, in the first of them.
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
        # A rung that changes nothing adds no information about the spread.
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
    """Map each arm to one representative of the arms with exactly its predictions, which are the same runs repeated."""
    same: dict[str, str] = {}
    for c in comparisons:
        first, second = (same.setdefault(arm, arm) for arm in (c.first, c.second))
        if c.pairs and not c.changes:
            same = {arm: first if other == second else other for arm, other in same.items()}
    return same


@dataclass(frozen=True)
class _Spread:
    """Spread between seeds: standard deviation of a pair's difference, its degrees of freedom, the most seeds used."""

    deviation: float
    freedom: float
    seeds: int


def _spread(comparisons: Sequence[Comparison], same: Mapping[str, str]) -> _Spread:
    """Pooled spread of all comparisons; degrees of freedom as in Satterthwaite 1946.

    Pairs of one seed that share a run are correlated: with n seeds, m arms against one reference have
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
        # If each arm is compared with the one before, an arm is in two comparisons.
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
    # If no rung won or lost an image: one image, the smallest possible difference.
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
