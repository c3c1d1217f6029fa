"""Statistics, against scipy and on numbers that are known: planted effects are found, innocents are not accused."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
from scipy import stats

from pycls_fast.ledger.report.statistics import (
    Comparison,
    ImagePair,
    Verdict,
    geometric_mean,
    judge,
    mean_interval,
    median_interval,
    p_less_accurate,
    p_slower,
    pair_images,
    paired_ratio,
    speedup,
    spread,
)


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
        return 1 - 2 * float(stats.binom.cdf(k - 1, count, 0.5))

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
    low, high = stats.t.interval(0.95, 3, loc=np.mean(values), scale=stats.sem(values))
    assert half is not None
    assert (mean - half, mean + half) == pytest.approx((low, high))
    assert mean_interval([3.0]) == (3.0, None)


def test_a_pair_counts_images() -> None:
    labels = np.array([0, 0, 0, 0, 1, 1, 1, 1, 1, 1])
    first = np.array([0, 0, 0, 1, 1, 1, 1, 1, 0, 0])
    second = np.array([0, 1, 1, 1, 1, 1, 1, 1, 1, 2])
    pair = pair_images(labels, first, second)
    assert (pair.only_first, pair.only_second, pair.changed, pair.images) == (2, 1, 4, 10)
    assert pair.difference == pytest.approx(-10.0)
    assert pair.p_value == pytest.approx(1.0)
    each = (second == labels).astype(float) - (first == labels)
    assert pair.standard_error == pytest.approx(100 * each.std() / math.sqrt(10))


def test_mcnemar_is_the_binomial_test_of_discordant_images() -> None:
    labels = np.zeros(100, dtype=int)
    first, second = labels.copy(), labels.copy()
    second[:12], first[20:22] = 1, 1
    pair = pair_images(labels, first, second)
    expected = 2 * sum(math.comb(14, k) for k in range(3)) / 2**14
    assert pair.p_value == pytest.approx(expected)
    assert pair.low < pair.difference < pair.high < 0


def test_the_bootstrap_covers_like_the_normal_interval() -> None:
    rng = np.random.default_rng(3)
    labels = np.zeros(5000, dtype=int)
    first, second = (rng.random((2, 5000)) < 0.2).astype(int)
    pair = pair_images(labels, first, second)
    half = stats.norm.ppf(0.975) * pair.standard_error
    assert pair.low == pytest.approx(pair.difference - half, abs=0.1 * half)
    assert pair.high == pytest.approx(pair.difference + half, abs=0.1 * half)


@pytest.mark.parametrize("sizes", [(0, 0, 0), (3, 3, 2), (3, 2, 3)])
def test_other_images_cannot_be_paired(sizes: tuple[int, int, int]) -> None:
    with pytest.raises(ValueError, match="same images"):
        pair_images(*(np.zeros(size, dtype=int) for size in sizes))


LOSSES = ("loss", "small loss")


def pair(difference: float, *, error: float = 0.01, changed: int = 5) -> ImagePair:
    return ImagePair(difference, difference, difference, error, 1, 1, 1.0, changed, 1000)


def compared(first: str, second: str, pairs: Sequence[ImagePair]) -> Comparison:
    return Comparison(first, second, dict(enumerate(pairs)))


def judged(*variants: Sequence[ImagePair], margin: float = 0.2) -> list[Verdict]:
    """Verdicts of variants that are each compared with the same reference."""
    column = [compared("first", f"variant {place}", pairs) for place, pairs in enumerate(variants)]
    return judge([column], margin=margin)[0]


def test_the_same_predictions_are_identical_even_once() -> None:
    (verdict,) = judged([pair(0.0, changed=0)])
    assert (verdict.finding, verdict.difference, verdict.low, verdict.high) == ("identical", 0, 0, 0)


def test_an_identical_variant_lends_no_certainty_to_others() -> None:
    noisy = [pair(d) for d in (-1.0, 1.0, 0.2)]
    alone = judged(noisy)[0]
    beside = judged(noisy, [pair(0.0, changed=0)] * 3)[0]
    assert (beside.low, beside.high) == (alone.low, alone.high)


def test_one_seed_says_nothing() -> None:
    (verdict,) = judged([pair(-3.0, error=0.2)])
    assert verdict.finding == "not enough runs"
    assert (verdict.low, verdict.high) == (None, None)


def test_nothing_run_is_no_verdict() -> None:
    assert judged([])[0].text == "nothing to compare with"


def test_the_interval_is_students_with_the_spread_of_all_variants() -> None:
    first, second = [-0.3, -0.1, 0.1], [0.2, 0.4, 0.0]
    verdict = judged([pair(d) for d in first], [pair(d) for d in second])[0]
    deviation = math.sqrt((np.var(first, ddof=1) * 2 + np.var(second, ddof=1) * 2) / 4)
    # Not the 4 of independent pairs: both variants are compared with the same runs.
    half = stats.t.ppf(0.975, 4 * 2 * 2 / 5) * deviation / math.sqrt(3)
    assert verdict.low == pytest.approx(-0.1 - half)
    assert verdict.high == pytest.approx(-0.1 + half)


def test_seeds_that_agree_by_chance_do_not_make_certain() -> None:
    """Three equal differences have no spread; the images say how little that means."""
    (verdict,) = judged([pair(-0.3, error=0.5)] * 3)
    assert verdict.finding == "not enough runs"
    assert verdict.low is not None
    assert verdict.low < -1


def test_a_variant_of_its_own_wildness_is_judged_by_that() -> None:
    wild = [pair(d) for d in (-8.0, 6.0, -5.0)]
    (alone,) = judged(wild)
    tame = [[pair(d + shift) for d in (-0.01, 0.0, 0.01)] for shift in (0.0, 0.02, 0.01, 0.03, 0.0, 0.01)]
    for others in (tame, tame[:1]):
        assert (judged(wild, *others)[0].low, judged(wild, *others)[0].high) == (alone.low, alone.high)


@pytest.mark.parametrize(
    ("differences", "finding"),
    [
        ((-0.05, 0.02, 0.01), "no loss"),
        ((-1.0, -1.1, -0.9), "loss"),
        ((-0.1, -0.11, -0.09), "small loss"),
        ((1.0, 1.1, 0.9), "gain"),
        ((-1.0, 1.2, -0.8), "not enough runs"),
    ],
)
def test_verdicts(differences: tuple[float, ...], finding: str) -> None:
    (verdict,) = judged([pair(d) for d in differences])
    assert verdict.finding == finding


@pytest.mark.parametrize(
    ("differences", "text"),
    [
        ((-0.05, 0.02, 0.01), "-0.01 (-0.10 to +0.09), no loss larger than 0.2 points at 95%"),
        ((-1.0, -1.1, -0.9), "loses 1.00 ± 0.25"),
        ((-0.1, -0.11, -0.09), "loses 0.10 ± 0.02, less than the 0.2 that matter"),
        ((1.0, 1.1, 0.9), "gains 1.00 ± 0.25"),
        ((0.5,), "+0.50 (one seed), not enough runs to say: about {} more seed would probably do"),
        ((0.3, 0.5, -0.4), "+0.13 (-1.04 to +1.31), not enough runs to say: about {} more seeds would probably do"),
        ((-90.0, 90.0), "+0.00 (-1143.56 to +1143.56), not enough runs to say: more than 200 more seeds; more test "
         "images would help"),
    ],
)  # fmt: skip
def test_every_verdict_has_its_difference_and_interval(differences: tuple[float, ...], text: str) -> None:
    (verdict,) = judged([pair(d) for d in differences])
    assert verdict.text == text.format(verdict.more_seeds)


@pytest.mark.slow
@pytest.mark.parametrize(("variants", "loss"), [(1, 0.0), (4, 0.0), (4, 0.4)])
def test_the_advised_seeds_settle_most_comparisons(variants: int, loss: float) -> None:
    """Each first variant is judged again with as many seeds as its verdict asked for."""
    rng = np.random.default_rng(variants)
    settled = []
    for _ in range(100):
        scores_AS = rng.normal(scale=0.2, size=(variants + 1, 3 + 200))
        scores_AS[1] -= loss
        verdict = judge(report(scores_AS[:, :3]))[0][0]
        if verdict.more_seeds is not None and verdict.more_seeds <= 200:
            after = judge(report(scores_AS[:, : 3 + verdict.more_seeds]), look=2)[0][0]
            settled.append(after.finding != "not enough runs")
    assert len(settled) >= 70
    assert sum(settled) >= 0.75 * len(settled)


def test_a_later_look_needs_more_evidence() -> None:
    for differences, finding in (((-1.0, -1.3, -0.75), "loss"), ((-0.1, 0.0, -0.04), "no loss")):
        column = [compared("a", "b", [pair(d) for d in differences])]
        found = [judge([column], look=look)[0][0] for look in (1, 4)]
        assert [verdict.finding for verdict in found] == [finding, "not enough runs"]
        assert found[0].low == found[1].low


def test_runs_that_are_there_twice_are_one_test() -> None:
    """The second variant is the first, to the last prediction: what is behind them is compared with the same runs."""
    change, same = [pair(d) for d in (-1.0, -1.45, -0.65)], [pair(0.0, changed=0)] * 3
    (alone,) = judge([[compared("a", "c", change)]])[0]
    columns = [
        [compared("a", "b", same), compared("a", "c", change)],
        [compared("a", "b", same), compared("b", "c", change)],
    ]
    ((_, once), (_, twice)) = judge(columns)
    assert once == twice == alone


def test_both_columns_are_one_family_of_tests() -> None:
    """Alone the loss is one; beside a comparison of the other column its p-value of 0.01 is not small enough."""
    change = compared("a", "b", [pair(d) for d in (-1.0, -1.3, -0.75)])
    other = compared("b", "c", [pair(d) for d in (0.4, -0.3, 0.1)])
    ((alone,),) = judge([[change]])
    assert alone.finding == "loss"
    assert alone.p_loss is not None
    assert 0.0125 / 2 < alone.p_loss < 0.0125
    ((beside,), _) = judge([[change], [other]])
    assert beside.p_loss == alone.p_loss
    assert beside.finding == "not enough runs"


def test_a_comparison_of_both_columns_has_one_verdict() -> None:
    near, far = [pair(d) for d in (-0.5, 0.1, -0.2)], [pair(d) for d in (-2.0, 0.9, 0.2)]
    against_first = [compared("a", "b", near), compared("a", "c", far)]
    before = [compared("a", "b", near), compared("b", "c", [pair(d) for d in (-1.5, 0.8, 0.4)])]
    (first, _), (second, _) = judge([against_first, before])
    assert first == second


def chain(variants: int) -> list[tuple[int, int]]:
    return [(variant - 1, variant) for variant in range(1, variants)]


def star(variants: int) -> list[tuple[int, int]]:
    return [(0, variant) for variant in range(1, variants)]


@pytest.mark.parametrize("places", [star(2), star(4), star(8), chain(8)], ids=["two", "star 4", "star 8", "chain 8"])
def test_the_degrees_of_freedom_are_those_of_the_pooled_variance(places: list[tuple[int, int]]) -> None:
    """A chi-squared variable with f degrees of freedom has the variance 2 f: twice its squared mean over f."""
    rng = np.random.default_rng(0)
    scores_RAS = rng.normal(size=(40_000, 8, 3))
    first, second = np.array(places).T
    variances_R = (scores_RAS[:, second] - scores_RAS[:, first]).var(axis=2, ddof=1).mean(axis=1)
    column = [compared(str(a), str(b), [pair(d) for d in (-0.2, 0.0, 0.2)]) for a, b in places]
    (verdict, *_) = judge([column])[0]
    assert verdict.high is not None
    # The interval tells how many were counted.
    quantile = verdict.high / (0.2 / math.sqrt(3))
    freedom = 2 * variances_R.mean() ** 2 / variances_R.var()
    assert quantile == pytest.approx(stats.t.ppf(0.975, freedom), rel=0.02)


def report(scores_AS: np.ndarray) -> list[list[Comparison]]:
    """Both columns of a cumulative ladder whose variants have these scores with each seed."""
    return [
        [compared(str(a), str(b), [pair(float(d)) for d in scores_AS[b] - scores_AS[a]]) for a, b in places]
        for places in (star(len(scores_AS)), chain(len(scores_AS)))
    ]


def null_report(rng: np.random.Generator, variants: int, seeds: int) -> list[list[Comparison]]:
    """A ladder that changes nothing but the noise."""
    return report(rng.normal(scale=0.2, size=(variants + 1, seeds)))


@pytest.mark.slow
def test_adding_seeds_until_all_is_settled_accuses_innocents_no_more_often_than_stated() -> None:
    """Each report is followed by one with the smallest number of seeds that it asked for."""
    rng = np.random.default_rng(0)
    accused = looks = 0
    for _ in range(200):
        scores_AS, seeds = rng.normal(scale=0.2, size=(5, 40)), 3
        for look in range(1, 10):
            looks += 1
            verdicts = [verdict for column in judge(report(scores_AS[:, :seeds]), look=look) for verdict in column]
            if any(verdict.finding in LOSSES for verdict in verdicts):
                accused += 1
                break
            seeds += min((verdict.more_seeds for verdict in verdicts if verdict.more_seeds), default=40)
            if seeds > 40:
                break
    assert looks >= 1.5 * 200
    assert accused <= stats.binom.ppf(0.99, 200, 0.025)


@pytest.mark.slow
@pytest.mark.parametrize(("variants", "seeds"), [(4, 3), (2, 5)])
def test_a_report_accuses_innocents_no_more_often_than_stated(variants: int, seeds: int) -> None:
    rng = np.random.default_rng(variants)
    accused = praised = covered = 0
    for _ in range(1000):
        # So large a margin leaves the accusations, and saves the search for how many more seeds would do.
        columns = judge(null_report(rng, variants, seeds), margin=100.0)
        verdicts = [verdict for column in columns for verdict in column]
        accused += any(verdict.finding in LOSSES for verdict in verdicts)
        praised += any(verdict.finding == "gain" for verdict in verdicts)
        covered += sum(v.low <= 0 <= v.high for v in columns[0] if v.low is not None and v.high is not None)
    # The first report has half of the 2.5%; more than that would happen once in a thousand times.
    most = stats.binom.ppf(0.999, 1000, 0.0125)
    assert accused <= most
    assert praised <= most
    # Intervals of one report are not independent: a margin as if each report had but one.
    assert covered / variants >= stats.binom.ppf(0.001, 1000, 0.95)


def simulated(rng: np.random.Generator, variants: int, seeds: int, loss: float) -> list[list[Comparison]]:
    """Runs of which each image is right with its own probability; the first variant loses a share of the right ones.

    The columns are those of variants that are tried one at a time, and of each against the one before.
    """
    labels = np.zeros(1000, dtype=int)
    hard = rng.beta(1, 8, size=1000)
    losses = [0.0, loss, *[0.0] * (variants - 1)]
    runs = [[(rng.random(1000) < hard + share * (1 - hard)).astype(int) for _ in range(seeds)] for share in losses]
    return [
        # The verdict does not look at the bootstrap.
        [
            compared(
                str(a), str(b), [pair_images(labels, x, y, resamples=1) for x, y in zip(runs[a], runs[b], strict=True)]
            )
            for a, b in places
        ]
        for places in (star(variants + 1), chain(variants + 1))
    ]


@pytest.mark.slow
@pytest.mark.parametrize("seeds", [2, 3, 4])
def test_innocents_on_images_are_accused_no_more_often_than_stated(seeds: int) -> None:
    rng = np.random.default_rng(seeds)
    reports = [judge(simulated(rng, 3, seeds, 0.0)) for _ in range(200)]
    accused = sum(any(v.finding in LOSSES for column in report for v in column) for report in reports)
    assert accused <= stats.binom.ppf(0.999, 200, 0.025)


@pytest.mark.slow
def test_a_planted_loss_is_found_with_enough_seeds_and_said_to_need_more_with_too_few() -> None:
    """A change that gets 1% of the right answers wrong."""
    rng = np.random.default_rng(0)
    few = [judge(simulated(rng, 3, 3, 0.01))[0][0] for _ in range(20)]
    many = [judge(simulated(rng, 3, 40, 0.01))[0][0] for _ in range(20)]
    assert sum(verdict.finding in LOSSES for verdict in many) >= 16
    undecided = [verdict for verdict in few if verdict.finding == "not enough runs"]
    assert len(undecided) >= 10
    assert all(verdict.more_seeds is not None and verdict.more_seeds >= 1 for verdict in undecided)


def test_speeds_are_compared_by_welchs_test_of_the_rounds() -> None:
    """What is kept of the rounds, their mean and its interval, says as much as they do."""
    before, now = [1.9, 2.0, 2.1, 2.05, 1.95], [1.7, 1.85, 1.8, 1.9, 1.75, 1.8]
    logarithms = [[math.log(ratio) for ratio in ratios] for ratios in (now, before)]
    expected = stats.ttest_ind(*logarithms, equal_var=False, alternative="less").pvalue
    assert p_slower(geometric_mean(before), geometric_mean(now)) == pytest.approx(expected, rel=1e-9)
    assert 1e-4 < expected < 1e-2


def test_single_runs_are_compared_by_the_test_of_two_proportions() -> None:
    expected = stats.chi2_contingency([[364, 36], [380, 20]], correction=False).pvalue / 2
    assert p_less_accurate([380 / 4], [364 / 4], (400, 400)) == pytest.approx(expected)


def test_seeds_are_compared_by_welchs_test() -> None:
    before, now = [90.0, 90.6, 91.0], [88.0, 88.9, 89.1, 88.4]
    expected = stats.ttest_ind(now, before, equal_var=False, alternative="less").pvalue
    assert p_less_accurate(before, now, (50_000, 50_000)) == pytest.approx(expected)
    assert p_less_accurate(before, before[::-1], (9, 9)) is None
