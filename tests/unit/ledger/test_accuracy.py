"""Verdicts: planted effects are found, innocents are not accused."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from pycls_fast.ledger.accuracy import ImagePair, judge, pair_images, speedup

LOSSES = ("loss", "small loss")


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


def pair(difference: float, *, error: float = 0.01, changed: int = 5) -> ImagePair:
    return ImagePair(difference, difference, difference, error, 1, 1, 1.0, changed, 1000)


def test_the_same_predictions_are_identical_even_once() -> None:
    (verdict,) = judge([[pair(0.0, changed=0)]])
    assert (verdict.finding, verdict.difference, verdict.low, verdict.high) == ("identical", 0, 0, 0)


def test_an_identical_rung_lends_no_certainty_to_others() -> None:
    noisy = [pair(d) for d in (-1.0, 1.0, 0.2)]
    alone = judge([noisy])[0]
    beside = judge([noisy, [pair(0.0, changed=0)] * 3])[0]
    assert (beside.low, beside.high) == (alone.low, alone.high)


def test_one_seed_says_nothing() -> None:
    (verdict,) = judge([[pair(-3.0, error=0.2)]])
    assert verdict.finding == "not enough runs"
    assert (verdict.low, verdict.high) == (None, None)


def test_nothing_run_is_no_verdict() -> None:
    assert judge([[]])[0].text == "not run"


def test_the_interval_is_students_with_the_spread_of_all_rungs() -> None:
    first, second = [-0.3, -0.1, 0.1], [0.2, 0.4, 0.0]
    verdict = judge([[pair(d) for d in first], [pair(d) for d in second]])[0]
    deviation = math.sqrt((np.var(first, ddof=1) * 2 + np.var(second, ddof=1) * 2) / 4)
    half = stats.t.ppf(0.975, 4) * deviation / math.sqrt(3)
    assert verdict.low == pytest.approx(-0.1 - half)
    assert verdict.high == pytest.approx(-0.1 + half)


def test_seeds_that_agree_by_chance_do_not_make_certain() -> None:
    """Three equal differences have no spread; the images say how little that means."""
    (verdict,) = judge([[pair(-0.3, error=0.5)] * 3])
    assert verdict.finding == "not enough runs"
    assert verdict.low is not None
    assert verdict.low < -1


def test_a_rung_of_its_own_wildness_is_judged_by_that() -> None:
    wild = [pair(d) for d in (-8.0, 6.0, -5.0)]
    tame = [[pair(d + shift) for d in (-0.01, 0.0, 0.01)] for shift in (0.0, 0.02, 0.01, 0.03, 0.0, 0.01)]
    assert judge([wild, *tame])[0].finding == "not enough runs"


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
    (verdict,) = judge([[pair(d) for d in differences]])
    assert verdict.finding == finding


def test_the_advice_is_enough() -> None:
    """With as many seeds more of the same kind there is a verdict."""
    seen = [-0.6, 0.3, -0.2, 0.1]
    verdict = judge([[pair(d) for d in seen]])[0]
    assert verdict.finding == "not enough runs"
    assert verdict.more_seeds is not None
    count = len(seen) + verdict.more_seeds
    spread = np.std(seen, ddof=1) * math.sqrt((count - 1) / count)
    half = count // 2
    rest = [0.0] * (count % 2)
    again = [np.mean(seen) + d for d in [spread] * half + [-spread] * half + rest]
    assert judge([[pair(float(d)) for d in again]])[0].finding != "not enough runs"


def simulated(rng: np.random.Generator, rungs: int, seeds: int, loss: float) -> list[list[ImagePair]]:
    """Runs of which each image is right with its own probability; the first rung loses a share of the right ones."""
    labels = np.zeros(1000, dtype=int)
    hard = rng.beta(1, 8, size=1000)
    references = [(rng.random(1000) < hard).astype(int) for _ in range(seeds)]

    def run(rung: int) -> np.ndarray:
        wrong = hard + loss * (1 - hard) if rung == 0 else hard
        return (rng.random(1000) < wrong).astype(int)

    return [
        # The verdict does not look at the bootstrap.
        [pair_images(labels, references[seed], run(rung), resamples=1) for seed in range(seeds)]
        for rung in range(rungs)
    ]


@pytest.mark.parametrize("seeds", [2, 3, 6])
def test_innocents_are_accused_no_more_often_than_stated(seeds: int) -> None:
    rng = np.random.default_rng(seeds)
    reports = [judge(simulated(rng, 5, seeds, 0.0)) for _ in range(200)]
    accused = sum(any(verdict.finding in LOSSES for verdict in report) for report in reports)
    # 2.5% of reports; more than 12 of 200 would happen once in a thousand times.
    assert accused <= stats.binom.ppf(0.999, 200, 0.025)


def test_a_planted_loss_is_found_with_enough_seeds_and_said_to_need_more_with_too_few() -> None:
    """A change that gets 1% of the right answers wrong."""
    rng = np.random.default_rng(0)
    few = [judge(simulated(rng, 4, 3, 0.01))[0] for _ in range(20)]
    many = [judge(simulated(rng, 4, 40, 0.01))[0] for _ in range(20)]
    assert sum(verdict.finding in LOSSES for verdict in many) >= 16
    undecided = [verdict for verdict in few if verdict.finding == "not enough runs"]
    assert len(undecided) >= 10
    assert all(verdict.more_seeds is not None and verdict.more_seeds >= 1 for verdict in undecided)


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
    with pytest.raises(ValueError, match="rounds"):
        speedup([], [])
