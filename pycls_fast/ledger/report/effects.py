"""What each variant does to accuracy: the tests on crossed trainings, and their verdicts.

The unit is a mirrored pair: two trainings with one seed, in the second of which every variant is on that was off in the
first. Seeds cancel in its difference, and every pair informs about every variant. Effects are least squares on these
differences, tested by Student's t at three looks whose levels add up to the level of the whole. docs/method.md derives
the rules and has the error rates, which `benchmarks/ledger_errors.py` measures.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import combinations
from typing import Annotated, Literal

import numpy as np
from pydantic import Field
from scipy import special, stats

from pycls_fast.ledger.report.statistics import t_quantile

LOOKS = (0.5, 0.75, 1.0)
"""Shares of the trainings after which there may be verdicts."""
ALPHA_COSTS, ALPHA_FREE, ALPHA_GAINS, ALPHA_INTERPLAY = 0.05, 0.05, 0.025, 0.01
"""Levels of 'costs' (per ladder), 'free' (per variant) and 'gains' (per ladder), all looks together, and of the remark
that two variants act on each other."""
CHANCE = 0.9
"""With which the resolution is seen, and a forecast number of runs decides."""

Word = Literal["identical", "costs", "costs a little", "free", "gains", "undecided"]


@lru_cache
def levels(alpha: float) -> tuple[float, ...]:
    """Nominal one-sided levels of the looks that together spend `alpha`, alpha t^2 until t (Kim & DeMets 1987).

    The density of the walk that has not crossed a bound yet is carried from look to look on a grid.
    """
    grid = np.linspace(-6.0, 6.0, 1201)
    step = grid[1] - grid[0]
    found, density, before, spent = [], np.zeros(0), 0.0, 0.0
    for t in LOOKS:
        if before:
            steps = stats.norm.pdf(step * np.arange(-1200, 1201), scale=math.sqrt(t - before))
            density = np.convolve(steps, density, mode="valid") * step
        else:
            density = stats.norm.pdf(grid, scale=math.sqrt(t))
        above = np.cumsum(density[::-1])[::-1] * step - density * step / 2
        bound = float(np.interp(-(alpha * t**2 - spent), -above, grid))
        found.append(float(stats.norm.sf(bound / math.sqrt(t))))
        # The cell that the bound cuts counts in part.
        density = density * np.clip((bound - grid) / step + 0.5, 0.0, 1.0)
        before, spent = t, alpha * t**2
    return tuple(found)


On = tuple[Collection[str], Collection[str]]
"""The names of what is on in each of two trainings."""


@dataclass(frozen=True)
class Pair:
    """A mirrored pair of trainings that have ended: the names that were on in each, top-1 of the first minus the
    second in points, the images that only one of them got right, of how many, and for `interplay` the mean top-1."""

    on: On
    difference: float
    discordant: int
    images: int
    mean: float = math.nan


@dataclass(frozen=True)
class Fit:
    """Least squares on pairs.

    Attributes:
        names: the m variants whose effects are estimated together.
        effects: (m,) in points of top-1.
        shape: (m, m) their covariance over the variance of one run.
        residual: the standard deviation of a run within its pair, in points, as measured.
        floor: what it would be if images erred independently.
        freedom: degrees of freedom of the residual.
    """

    names: tuple[str, ...]
    effects: np.ndarray
    shape: np.ndarray
    residual: float
    floor: float
    freedom: int

    @property
    def deviation(self) -> float:
        """The standard deviation of a run within its pair that errors are made of."""
        return max(self.residual, self.floor)

    @property
    def errors(self) -> np.ndarray:
        """Standard errors (m,) of the effects."""
        return self.deviation * np.sqrt(np.diag(self.shape))


def floor_of(pairs: Sequence[Pair]) -> float:
    """The variance of a run's top-1, in points^2, if images erred independently; at least that of one image a pair.

    It is the between-seed variance of long trainings (Jordan 2023), and keeps the chance agreement of a few pairs from
    looking like precision.
    """
    return float(np.mean([100.0**2 * max(pair.discordant, 1) / (2 * pair.images**2) for pair in pairs]))


def fit(pairs: Sequence[Pair], names: Sequence[str]) -> Fit | None:
    """Least squares on the differences of pairs; None if these do not tell the variants apart."""
    each, freedom = [pair.on for pair in pairs], len(pairs) - len(names)
    if not tells_apart(each, names):
        return None
    on_PM, difference_P = design(each, names), np.array([pair.difference for pair in pairs])
    inverse = np.linalg.inv(on_PM.T @ on_PM)
    effects = inverse @ on_PM.T @ difference_P
    # A difference has twice a run's variance.
    squares = float(((difference_P - on_PM @ effects) ** 2).sum()) / (2 * freedom)
    return Fit(tuple(names), effects, 2 * inverse, math.sqrt(squares), math.sqrt(floor_of(pairs)), freedom)


def design(each: Iterable[On], names: Sequence[str]) -> np.ndarray:
    """A row per pair (P, m): 1 for a variant that is on in the first training only, -1 in the second only, else 0."""
    return np.array([[(name in first) - (name in second) for name in names] for first, second in each], float)


def tells_apart(each: Sequence[On], names: Sequence[str]) -> bool:
    """Whether such pairs tell the effects of variants from each other, and leave a degree of freedom for the spread."""
    return len(each) > len(names) and bool(np.linalg.matrix_rank(design(each, names)) == len(names))


def errors_of(each: Iterable[On], names: Sequence[str]) -> np.ndarray:
    """The standard errors (m,) of effects from such pairs, over the standard deviation of a run: 2 / sqrt(runs), more
    for alternatives and for what needs another variant, which are on less often."""
    errors_M: np.ndarray = np.sqrt(2) * np.linalg.norm(np.linalg.pinv(design(each, names)), axis=1)
    return errors_M


@dataclass(frozen=True)
class Together:
    """The sum of the effects in points, its error and 95% interval; of alternatives all but one are left out."""

    without: list[str]
    difference: float
    error: float
    low: float
    high: float


def sum_of(found: Fit, without: Sequence[str]) -> Together:
    """The sum of the effects of the variants that are not left out."""
    on_M = np.array([name not in without for name in found.names], float)
    total, error = float(on_M @ found.effects), found.deviation * math.sqrt(on_M @ found.shape @ on_M)
    half = t_quantile(found.freedom) * error
    return Together(list(without), total, error, total - half, total + half)


@dataclass(frozen=True)
class Interplay:
    """The two variants that most surely act on each other: what both do beyond the sum of their effects, in points, and
    the p-value (two-sided, after Bonferroni's correction) that no two do."""

    names: tuple[str, str]
    difference: float
    p_value: float


def interplay(pairs: Sequence[Pair], found: Fit) -> Interplay | None:
    """What two variants do to each other, by t tests of pairs in which they are on together against the rest.

    Only the means of pairs tell: of differences of mirror images it cancels, from all on against all off as well. The
    luck of seeds does not cancel in means, so smaller interactions are not seen. None if no two variants can be tested.
    """
    half_PM = np.array([[(name in pair.on[0]) + (name in pair.on[1]) for name in found.names] for pair in pairs]) / 2
    rest_P = np.array([pair.mean for pair in pairs]) - half_PM @ found.effects
    tests = list[Interplay]()
    for two in combinations(found.names, 2):
        is_both_P = np.array([any(set(two) <= set(on) for on in pair.on) for pair in pairs])
        both, others = rest_P[is_both_P], rest_P[~is_both_P]
        # Trainings that all end alike, with every image right say, have no spread to test with.
        if min(len(both), len(others)) > 1 and np.ptp(rest_P) > 0:
            # The mean of a pair has half of it.
            difference = 2 * float(both.mean() - others.mean())
            tests.append(Interplay(two, difference, float(stats.ttest_ind(both, others).pvalue)))
    if not tests:
        return None
    surest = min(tests, key=lambda test: test.p_value)
    return replace(surest, p_value=min(surest.p_value * len(tests), 1.0))


@dataclass(frozen=True)
class Effect:
    """What one look says about a variant, in points of top-1: a loss is negative.

    Attributes:
        low, high: the two-sided 95% interval, at the look's level.
        least: the one-sided bound that the test of 'free' uses.
        word: the verdict; None between the planned looks.
    """

    variant: str
    difference: float
    error: float
    freedom: int
    low: float
    high: float
    least: float
    p_costs: float
    p_free: float
    word: Word | None

    def __post_init__(self) -> None:
        if not self.low <= self.difference <= self.high:
            raise ValueError("the difference is outside of its interval")


def identical(variant: str) -> Effect:
    """The effect of a variant all of whose predictions are those of trainings without it."""
    none = dict.fromkeys(("difference", "error", "low", "high", "least"), 0.0)
    return Effect(variant, **none, freedom=0, p_costs=1.0, p_free=0.0, word="identical")


@dataclass(frozen=True)
class Look:
    """A look at the results: its place in `LOOKS`, the trainings of each family up to it, and the `levels` of 'free',
    'costs' and 'gains', at Holm's first step. It is settled if every variant has a verdict."""

    place: Annotated[int, Field(ge=0, lt=len(LOOKS))]
    runs: Annotated[int, Field(gt=0, lt=10**6)]
    levels: tuple[float, float, float]
    effects: list[Effect]

    @property
    def settled(self) -> bool:
        return all(effect.word != "undecided" for effect in self.effects)


def decide(looks: Iterable[tuple[int, int, Sequence[Fit]]], margin: float, *, strict: bool = False) -> list[Look]:
    """The looks with their verdicts, which stay once given; none is taken after one that is settled.

    Args:
        looks: for each, its place in `LOOKS`, the number of trainings of each family, and the fits of the families,
            whose variants are tested together.
        margin: the loss in points that does not matter.
        strict: 'free' at its level per ladder, not per variant.
    """
    costs, free, gains, made = set[int](), set[int](), set[int](), list[Look]()
    for place, runs, fits in looks:
        estimated = estimates(fits, margin)
        p_costs, p_free = (np.array([getattr(each, key) for each in estimated]) for key in ("p_costs", "p_free"))
        costs = _rejected(p_costs, place, ALPHA_COSTS, costs)
        gains = _rejected(1 - p_costs, place, ALPHA_GAINS, gains)
        tests = len(estimated)
        level = levels(ALPHA_FREE / tests if strict else ALPHA_FREE)[place]
        free = _rejected(p_free, place, ALPHA_FREE, free) if strict else free | set(np.flatnonzero(p_free <= level))
        first = (level, levels(ALPHA_COSTS / tests)[place], levels(ALPHA_GAINS / tests)[place])
        # The last look's interval is the usual one; an earlier one's holds for all looks together.
        tail = 0.025 if place == len(LOOKS) - 1 else levels(0.025)[place]
        effects = []
        for i, each in enumerate(estimated):
            half, down = (t_quantile(each.freedom, 1 - share) * each.error for share in (tail, level))
            low, high, least = each.difference - half, each.difference + half, each.difference - down
            word = _word(i in costs, i in free, i in gains)
            effects.append(replace(each, low=low, high=high, least=least, word=word))
        made.append(Look(place, runs, first, effects))
        if made[-1].settled:
            break
    return made


def estimates(fits: Iterable[Fit], margin: float) -> list[Effect]:
    """Effects with plain 95% intervals and without verdicts, for a ledger that is not at a planned look."""
    made = []
    for found in fits:
        effects, errors = found.effects, found.errors
        p_values = [special.stdtr(found.freedom, each / errors) for each in (effects, -(effects + margin))]
        for name, *row in zip(found.names, *(each.tolist() for each in (effects, errors, *p_values)), strict=True):
            effect, error, p_costs, p_free = row
            half = t_quantile(found.freedom) * error
            low, high = effect - half, effect + half
            made.append(Effect(name, effect, error, found.freedom, low, high, low, p_costs, p_free, None))
    return made


def _rejected(p_values: np.ndarray, place: int, alpha: float, before: set[int]) -> set[int]:
    """Holm's step-down at one look, with what earlier looks rejected (Maurer & Bretz 2013)."""
    rejected = set(before)
    while len(rejected) < len(p_values):
        level = levels(alpha / (len(p_values) - len(rejected)))[place]
        new = set(np.flatnonzero(p_values <= level).tolist()) - rejected
        if not new:
            break
        rejected |= new
    return rejected


def _word(costs: bool, free: bool, gains: bool) -> Word:
    if costs:
        return "costs a little" if free else "costs"
    return "gains" if gains else "free" if free else "undecided"


def resolution(error: float) -> float:
    """The smallest difference in points that an effect with this standard error shows with 90% chance at the last
    look."""
    return float(stats.norm.isf(levels(ALPHA_FREE)[-1]) + stats.norm.ppf(CHANCE)) * error


def runs_that_resolve(finest: float, runs: int, margin: float) -> int:
    """The number of trainings whose resolution is the margin, if that of so many runs is the `finest`; even."""
    return 2 * math.ceil(runs * (finest / margin) ** 2 / 2)


def more_runs(effect: Effect, look: Look, margin: float, *, strict: bool = False) -> int | None:
    """How many more trainings than at this look decide a variant with 90% chance at the next one's levels (after the
    last, at its own); None if not even ten times as many.

    The chance is averaged over the true effects that fit today's estimate, which is normal around them.
    """
    runs, tests, place = look.runs, len(look.effects), min(look.place + 1, len(LOOKS) - 1)
    later = np.arange(runs + 2, 10 * runs + 2, 2)
    error = effect.error * np.sqrt(runs / later)
    moves = effect.error * np.sqrt(1 - runs / later)
    alphas = (ALPHA_FREE / (tests if strict else 1), ALPHA_COSTS / tests)
    free, costs = (stats.norm.isf(levels(alpha)[place]) for alpha in alphas)
    is_free = stats.norm.sf((free * error - margin - effect.difference) / moves)
    costly = stats.norm.cdf((-costs * error - effect.difference) / moves)
    enough = np.flatnonzero(np.minimum(is_free + costly, 1.0) >= CHANCE)
    return int(later[enough[0]]) - runs if len(enough) else None


def deviation_of(pairs: Sequence[Pair]) -> float:
    """The standard deviation of a run within its pair, from pairs of the same two settings (at least two pairs)."""
    spread = float(np.var([pair.difference for pair in pairs], ddof=1)) / 2
    return math.sqrt(max(spread, floor_of(pairs)))


def suspect(
    failed: Sequence[Collection[str]], ended: Sequence[Collection[str]], names: Sequence[str], *, times: float = 1.0
) -> tuple[str, bool]:
    """The variant that explains best why trainings fail, and whether it does: Fisher's exact test at 5%, after Holm's
    first step.

    `failed` and `ended` say what was on in each training that failed, and in each that did not; `times` as many are
    imagined at the same rates.
    """

    def p_value(name: str) -> float:
        table = [[sum((name in on) == is_on for on in runs) for runs in (failed, ended)] for is_on in (True, False)]
        imagined = [[round(times * count) for count in row] for row in table]
        return float(stats.fisher_exact(imagined, alternative="greater").pvalue)

    p_values = [p_value(name) for name in names]
    return names[int(np.argmin(p_values))], min(p_values) * len(names) <= 0.05
