"""Verdicts: planted effects are found, innocents are not accused."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
from scipy import stats

from pycls_fast.ledger.accuracy import ImagePair, pair_images
from pycls_fast.ledger.verdicts import RULE, Comparison, Verdict, judge, rule

LOSSES = ("loss", "small loss")


def pair(difference: float, *, error: float = 0.01, changed: int = 5) -> ImagePair:
    return ImagePair(difference, difference, difference, error, 1, 1, 1.0, changed, 1000)


def compared(first: str, second: str, pairs: Sequence[ImagePair]) -> Comparison:
    return Comparison(first, second, dict(enumerate(pairs)))


def judged(*rungs: Sequence[ImagePair], margin: float = 0.2) -> list[Verdict]:
    """Verdicts of rungs that are each compared with the same reference."""
    column = [compared("first", f"rung {place}", pairs) for place, pairs in enumerate(rungs)]
    return judge([column], margin=margin)[0]


def test_the_same_predictions_are_identical_even_once() -> None:
    (verdict,) = judged([pair(0.0, changed=0)])
    assert (verdict.finding, verdict.difference, verdict.low, verdict.high) == ("identical", 0, 0, 0)


def test_an_identical_rung_lends_no_certainty_to_others() -> None:
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


def test_the_interval_is_students_with_the_spread_of_all_rungs() -> None:
    first, second = [-0.3, -0.1, 0.1], [0.2, 0.4, 0.0]
    verdict = judged([pair(d) for d in first], [pair(d) for d in second])[0]
    deviation = math.sqrt((np.var(first, ddof=1) * 2 + np.var(second, ddof=1) * 2) / 4)
    # Not the 4 of independent pairs: both rungs are compared with the same runs.
    half = stats.t.ppf(0.975, 4 * 2 * 2 / 5) * deviation / math.sqrt(3)
    assert verdict.low == pytest.approx(-0.1 - half)
    assert verdict.high == pytest.approx(-0.1 + half)


def test_seeds_that_agree_by_chance_do_not_make_certain() -> None:
    """Three equal differences have no spread; the images say how little that means."""
    (verdict,) = judged([pair(-0.3, error=0.5)] * 3)
    assert verdict.finding == "not enough runs"
    assert verdict.low is not None
    assert verdict.low < -1


def test_a_rung_of_its_own_wildness_is_judged_by_that() -> None:
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
@pytest.mark.parametrize(("rungs", "loss"), [(1, 0.0), (4, 0.0), (4, 0.4)])
def test_the_advised_seeds_settle_most_comparisons(rungs: int, loss: float) -> None:
    """Each first rung is judged again with as many seeds as its verdict asked for."""
    rng = np.random.default_rng(rungs)
    settled = []
    for _ in range(100):
        scores_AS = rng.normal(scale=0.2, size=(rungs + 1, 3 + 200))
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


def test_the_rule_names_a_later_look() -> None:
    assert rule([3]) == rule([]) == RULE
    assert rule([3, 7, 20]) == f"{RULE} This is report 3 (with 3, then 7, then 20 seeds): level 0.31%."


def test_runs_that_are_there_twice_are_one_test() -> None:
    """The second rung is the first, to the last prediction: what is behind them is compared with the same runs."""
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


def chain(arms: int) -> list[tuple[int, int]]:
    return [(arm - 1, arm) for arm in range(1, arms)]


def star(arms: int) -> list[tuple[int, int]]:
    return [(0, arm) for arm in range(1, arms)]


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
    """Both columns of a cumulative ladder whose arms have these scores with each seed."""
    return [
        [compared(str(a), str(b), [pair(float(d)) for d in scores_AS[b] - scores_AS[a]]) for a, b in places]
        for places in (star(len(scores_AS)), chain(len(scores_AS)))
    ]


def null_report(rng: np.random.Generator, rungs: int, seeds: int) -> list[list[Comparison]]:
    """A ladder that changes nothing but the noise."""
    return report(rng.normal(scale=0.2, size=(rungs + 1, seeds)))


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
@pytest.mark.parametrize(("rungs", "seeds"), [(4, 3), (2, 5)])
def test_a_report_accuses_innocents_no_more_often_than_stated(rungs: int, seeds: int) -> None:
    rng = np.random.default_rng(rungs)
    accused = praised = covered = 0
    for _ in range(1000):
        # So large a margin leaves the accusations, and saves the search for how many more seeds would do.
        columns = judge(null_report(rng, rungs, seeds), margin=100.0)
        verdicts = [verdict for column in columns for verdict in column]
        accused += any(verdict.finding in LOSSES for verdict in verdicts)
        praised += any(verdict.finding == "gain" for verdict in verdicts)
        covered += sum(v.low <= 0 <= v.high for v in columns[0] if v.low is not None and v.high is not None)
    # The first report has half of the 2.5%; more than that would happen once in a thousand times.
    most = stats.binom.ppf(0.999, 1000, 0.0125)
    assert accused <= most
    assert praised <= most
    # Intervals of one report are not independent: a margin as if each report had but one.
    assert covered / rungs >= stats.binom.ppf(0.001, 1000, 0.95)


def simulated(rng: np.random.Generator, rungs: int, seeds: int, loss: float) -> list[list[Comparison]]:
    """Runs of which each image is right with its own probability; the first rung loses a share of the right ones.

    The columns are those of rungs that are tried one at a time, and of each against the one before.
    """
    labels = np.zeros(1000, dtype=int)
    hard = rng.beta(1, 8, size=1000)
    losses = [0.0, loss, *[0.0] * (rungs - 1)]
    runs = [[(rng.random(1000) < hard + share * (1 - hard)).astype(int) for _ in range(seeds)] for share in losses]
    return [
        # The verdict does not look at the bootstrap.
        [
            compared(
                str(a), str(b), [pair_images(labels, x, y, resamples=1) for x, y in zip(runs[a], runs[b], strict=True)]
            )
            for a, b in places
        ]
        for places in (star(rungs + 1), chain(rungs + 1))
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
