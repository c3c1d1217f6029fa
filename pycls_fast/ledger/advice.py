"""How many more seeds a comparison of runs needs, and the part of the allowed errors that each report may make."""

from __future__ import annotations

import numpy as np
from scipy import stats

from pycls_fast.ledger.statistics import CONFIDENCE

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
    """How many more seeds per arm settle a comparison with 85% chance; `MOST_SEEDS` + 1 if more than `MOST_SEEDS`.

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
