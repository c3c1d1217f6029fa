"""Statistics, against scipy, an independent implementation and simulations: what is planted is found, nothing else."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
from scipy import stats

from pycls_fast.config.ladder import Ladder, Variant
from pycls_fast.ledger.ladder.plan import Factors, PlannedPair, families
from pycls_fast.ledger.report.effects import (
    ALPHA_INTERPLAY,
    LOOKS,
    Effect,
    Fit,
    Look,
    Pair,
    decide,
    fit,
    interplay,
    levels,
    more_runs,
    resolution,
    runs_that_resolve,
    sum_of,
    suspect,
)
from pycls_fast.ledger.report.statistics import (
    geometric_mean,
    holm,
    p_lower,
    pair_images,
    paired_ratio,
)
from tests.factories import script


def test_ratio_is_taken_within_pairs() -> None:
    # The machine halves its speed midway; the variant is 1.25 times as fast all the time.
    reference = [100.0, 100.0, 100.0, 50.0, 50.0, 50.0]
    found = paired_ratio(reference, [1.25 * rate for rate in reference])
    assert (found.ratio, found.low, found.high) == pytest.approx((1.25, 1.25, 1.25))
    with pytest.raises(ValueError, match="zip"):
        paired_ratio(reference, [100.0])


def test_a_pair_counts_images() -> None:
    labels = np.array([0, 0, 0, 0, 1, 1, 1, 1, 1, 1])
    first = np.array([0, 0, 0, 1, 1, 1, 1, 1, 0, 0])
    second = np.array([0, 1, 1, 1, 1, 1, 1, 1, 1, 2])
    pair = pair_images(labels, first, second)
    assert [pair[key] for key in ("only_first", "only_second", "changed", "images")] == [2, 1, 4, 10]
    assert pair["difference"] == pytest.approx(-10.0)
    assert pair["p_value"] == pytest.approx(1.0)
    # McNemar's test is the binomial test of the discordant images.
    labels = np.zeros(100, dtype=int)
    first, second = labels.copy(), labels.copy()
    second[:12], first[20:22] = 1, 1
    pair = pair_images(labels, first, second)
    expected = 2 * sum(math.comb(14, k) for k in range(3)) / 2**14
    assert pair["p_value"] == pytest.approx(expected)
    assert pair["low"] < pair["difference"] < pair["high"] < 0


def test_speeds_are_compared_by_welchs_test_of_the_rounds() -> None:
    """What is kept of the rounds, their mean and its interval, says as much as they do."""
    before, now = [1.9, 2.0, 2.1, 2.05, 1.95], [1.7, 1.85, 1.8, 1.9, 1.75, 1.8]
    logarithms = [[math.log(ratio) for ratio in ratios] for ratios in (now, before)]
    expected = stats.ttest_ind(*logarithms, equal_var=False, alternative="less").pvalue
    assert p_lower(geometric_mean(before).mean, geometric_mean(now).mean) == pytest.approx(expected, rel=1e-9)
    assert 1e-4 < expected < 1e-2


def test_holm_steps_down() -> None:
    assert holm([0.01, None, 0.04, 0.03]) == pytest.approx([0.03, 1.0, 0.06, 0.06])


simulated = script("ledger_errors")
Truth, one = simulated.Truth, simulated.one
NAMES = tuple("abcdefgh")


def test_levels_spend_alpha_as_published() -> None:
    """The walk crosses a bound by time t with the probability alpha t^2: the published levels, and simulated walks."""
    assert levels(0.05) == pytest.approx((0.0125, 0.0227, 0.0387), abs=1e-4)
    assert levels(0.05 / 8) == pytest.approx((0.00156, 0.00258, 0.00420), abs=1e-5)
    steps = np.random.default_rng(0).normal(size=(200_000, 3)) * np.sqrt(np.diff([0.0, *LOOKS]))
    z = steps.cumsum(axis=1) / np.sqrt(LOOKS)
    crossed = (z > stats.norm.isf(levels(0.05))).any(axis=1).mean()
    assert crossed == pytest.approx(0.05, abs=4 * math.sqrt(0.05 * 0.95 / 200_000))


@cache
def planned_pairs(names: tuple[str, ...], runs: int) -> Sequence[PlannedPair]:
    """A crossed design."""
    ladder = Ladder(description="x", baseline=Variant(name="base"), variants=tuple(Variant(name=n) for n in names))
    (family,) = families(ladder, Factors(list(names)), runs, 0)[0]
    return family.pairs


def pairs(
    effects: Sequence[float], deviation: float, *, runs: int = 64, seed: int = 0, luck: float = 0.0, both: float = 0.0
) -> list[Pair]:
    """Pairs of a crossed design with these true effects, seeds' `luck`, and what the first two do to each other."""
    generator, made = np.random.default_rng(seed), []
    names = NAMES[: len(effects)]
    for planned in planned_pairs(names, runs):
        top1 = [
            sum(effect for name, effect in zip(names, effects, strict=True) if name in on)
            + both * ({"a", "b"} <= set(on))
            + deviation * generator.normal()
            for on in planned.on
        ]
        mean = 90 + sum(top1) / 2 + (luck * generator.normal() if luck else 0.0)
        made.append(Pair(planned.on, top1[0] - top1[1], 1, 10_000, mean))
    return made


def test_least_squares_are_those_of_a_regression() -> None:
    """Against numpy's own least squares and the textbook's standard errors."""
    made = pairs([-0.5, 0.3, 0, 0, 0, 0, 0, 0.1], 0.2)
    found = fit(made, NAMES)
    x = np.array([[(n in p.on[0]) * 1.0 - (n in p.on[1]) for n in NAMES] for p in made])
    y = np.array([p.difference for p in made])
    beta, rss, _, _ = np.linalg.lstsq(x, y)
    error = np.sqrt(rss[0] / (len(y) - 8) * np.diag(np.linalg.inv(x.T @ x)))
    np.testing.assert_allclose(found.effects, beta, rtol=1e-10)
    np.testing.assert_allclose(found.errors, error, rtol=1e-10)
    # In a balanced design, 2 sigma / sqrt(runs).
    assert found.errors == pytest.approx(2 * found.deviation / math.sqrt(64))
    assert fit(made[:8], NAMES) is None


def test_pairs_that_agree_by_chance_do_not_look_precise() -> None:
    made = [Pair(pair.on, 0.0, 50, 1000, 90.0) for pair in pairs([0.0] * 8, 0.0)]
    found = fit(made, NAMES)
    assert found.deviation == found.floor == pytest.approx(100 * math.sqrt(50 / 2) / 1000)
    assert found.residual == pytest.approx(0.0, abs=1e-12)


def test_two_variants_that_act_on_each_other_are_named() -> None:
    """Half of what two do together is in the effect of each, and all of it in all on against all off."""
    made = pairs([0.0] * 8, 0.05, luck=0.3, both=-1.5)
    found = fit(made, NAMES)
    assert found.effects == pytest.approx([-0.75, -0.75, 0, 0, 0, 0, 0, 0], abs=0.05)
    assert made[0].difference == pytest.approx(found.effects.sum(), abs=0.2)
    said = interplay(made, found)
    assert said.names == ("a", "b")
    assert said.difference == pytest.approx(-1.5, abs=0.4)
    assert said.p_value < 0.01
    assert interplay(pairs([-1.0], 0.1), fit(pairs([-1.0], 0.1), "a")) is None
    # All images are right in all trainings.
    perfect = [replace(pair, difference=0.0, discordant=0, mean=100.0) for pair in made]
    assert interplay(perfect, fit(perfect, NAMES)) is None


def test_innocent_variants_do_not_act_on_each_other() -> None:
    accused, ladders = 0, 50
    for seed in range(ladders):
        made = pairs([-0.5, 0.5, 0.1], 0.2, luck=0.4, seed=seed)
        accused += interplay(made, fit(made, "abc")).p_value <= ALPHA_INTERPLAY
    assert accused <= stats.binom.ppf(0.999, ladders, ALPHA_INTERPLAY)


def test_the_sum_of_the_effects_leaves_alternatives_out() -> None:
    found = Fit(
        ("a", "b", "c"), np.array([1.0, 2.0, 4.0]), np.array([[1.0, 0.5, 0], [0.5, 1, 0], [0, 0, 1]]), 0.1, 0.2, 10
    )
    total = sum_of(found, ["c"])
    assert (total.difference, total.error) == (3.0, pytest.approx(0.2 * math.sqrt(3)))
    assert total.high - 3.0 == pytest.approx(stats.t.ppf(0.975, 10) * total.error)


def words_anew(looks: Sequence[Sequence[Pair]], margin: float) -> list[str]:
    """The words of a ladder from the specification: scipy's t distribution, numpy's least squares, Holm by sorting."""
    known: dict[str, set[int]] = {"costs": set(), "free": set(), "gains": set()}

    def holm(p_values: np.ndarray, alpha: float, place: int, before: set[int]) -> set[int]:
        rejected = set(before)
        for i in np.argsort(p_values).tolist():
            if i not in rejected and p_values[i] > levels(alpha / (len(p_values) - len(rejected)))[place]:
                break
            rejected.add(i)
        return rejected

    for place, made in enumerate(looks):
        x = np.array([[(n in p.on[0]) * 1.0 - (n in p.on[1]) for n in NAMES] for p in made])
        beta, rss, _, _ = np.linalg.lstsq(x, np.array([p.difference for p in made]))
        freedom = len(made) - len(NAMES)
        floor = np.mean([1e4 * p.discordant / (2 * p.images**2) for p in made])
        error = np.sqrt(max(rss[0] / (2 * freedom), floor) * 2 * np.diag(np.linalg.inv(x.T @ x)))
        student = stats.t(freedom)
        known["costs"] = holm(student.cdf(beta / error), 0.05, place, known["costs"])
        known["gains"] = holm(student.sf(beta / error), 0.025, place, known["gains"])
        known["free"] |= set(np.flatnonzero(student.sf((beta + margin) / error) <= levels(0.05)[place]).tolist())
        words = []
        for i in range(len(NAMES)):
            costs, free, gains = (i in known[key] for key in ("costs", "free", "gains"))
            without_costs = "gains" if gains else "free" if free else "undecided"
            words.append(("costs a little" if free else "costs") if costs else without_costs)
        if "undecided" not in words:
            break
    return words


def test_an_independent_implementation_finds_the_same_words() -> None:
    seen = set[str]()
    for seed in range(50):
        truth = np.random.default_rng(seed).choice([-0.5, -0.25, -0.12, 0.0, 0.25], 8)
        made = pairs(truth, 0.25, seed=seed)
        looks = [made[:16], made[:24], made]
        fits = [(place, 2 * len(part), [fit(part, NAMES)]) for place, part in enumerate(looks)]
        decided = decide(fits, 0.25)
        words = [str(effect.word) for effect in decided[-1].effects]
        assert words == words_anew(looks, 0.25), seed
        seen.update(words)
    assert seen == {"costs", "costs a little", "free", "gains", "undecided"}


@pytest.mark.parametrize(
    ("truth", "accused", "false_free", "found", "free"),
    [
        (Truth(one(0.0), 0.28), 0.05, None, None, 0.90),
        (Truth([-0.25] * 8, 0.28), 0.05, 0.05, None, None),
        (Truth(one(0.5), 0.28), 0.05, 0.05, 0.90, 0.90),
        (Truth(one(0.5), 0.22, floor=False), 0.05, 0.05, 0.90, 0.90),
        (Truth([-0.5], 0.22), 0.05, 0.05, 0.90, None),
    ],
    ids=["free", "at the margin", "half a point", "noise of unknown size", "one variant"],
)
def test_error_rates(
    truth: Any, accused: float, false_free: float | None, found: float | None, free: float | None
) -> None:
    """No rate is worse than it may be, beyond what the number of ladders leaves to chance (99.9%)."""
    ladders = 200
    counts = simulated.simulate(truth, ladders, seed=1)

    def most(rate: float, of: int) -> float:
        return float(stats.binom.ppf(0.999, of, rate))

    assert counts.accused <= most(accused, ladders)
    # Variants of a ladder are nearly independent.
    if false_free is not None:
        assert counts.false_free <= most(false_free, counts.losing)
    if found is not None:
        assert counts.losing - counts.found <= most(1 - found, counts.losing)
    if free is not None:
        assert counts.harmless - counts.called_free <= most(1 - free, counts.harmless)
    assert max(counts.runs) <= 64


def test_resolution_and_forecast() -> None:
    finest = resolution(2 * 0.28 / 8)
    assert finest == pytest.approx(0.213, abs=1e-3)
    assert resolution(2 * 0.28 / runs_that_resolve(finest, 64, 0.25) ** 0.5) == pytest.approx(0.25, abs=4e-3)
    open_one = Effect("a", -0.1, 0.1, 24, -0.3, 0.1, -0.27, 0.16, 0.07, "undecided")
    clear_one = replace(open_one, difference=0.0)
    first, second, last = (Look(place, 64, (0.02, 0.01, 0.01), [open_one] * 8) for place in range(3))
    more = more_runs(open_one, last, 0.25)
    # Far from both bounds fewer trainings decide; an earlier level is lower, and so is a ladder's.
    assert more_runs(clear_one, last, 0.25) < more == more_runs(open_one, second, 0.25)
    assert more < more_runs(open_one, first, 0.25) < more_runs(open_one, first, 0.25, strict=True)


def test_strict_has_holms_level_for_free() -> None:
    made = pairs([0.0] * 8, 0.2, runs=64)
    found = fit(made, NAMES)
    words = {strict: [e.word for e in decide([(2, 64, [found])], 0.08, strict=strict)[0].effects]
             for strict in (False, True)}  # fmt: skip
    assert words[False].count("free") > words[True].count("free")
    (look,) = decide([(2, 64, [found])], 0.25, strict=True)
    assert {effect.word for effect in look.effects} == {"free"}
    assert look.levels == tuple(levels(alpha / 8)[2] for alpha in (0.05, 0.05, 0.025))


def test_a_variant_that_breaks_trainings_is_found_and_no_other() -> None:
    runs = [on for pair in pairs([0.0] * 8, 0.1, runs=32) for on in pair.on]
    failed = [on for on in runs if "c" in on]
    ended = [on for on in runs if "c" not in on]
    assert suspect(failed, ended, NAMES) == ("c", True)
    assert not suspect(failed[:1], [*failed[1:], *ended], NAMES)[1]
    # A quarter of the trainings that have it on: enough only if it goes on like this.
    few = (failed[-4:], [*failed[:-4], *ended], NAMES)
    assert suspect(*few) == ("c", False)
    assert suspect(*few, times=2) == ("c", True)
