"""The tests on crossed trainings: levels, least squares, verdicts that stay, and error rates on simulated ladders."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from scipy import stats

from pycls_fast.config.ladder import Ladder, Variant
from pycls_fast.ledger.ladder.crossed import Crossing, families
from pycls_fast.ledger.report.effects import (
    LOOKS,
    Effect,
    Pair,
    breaks,
    decide,
    fit,
    levels,
    more_runs,
    resolution,
    runs_that_resolve,
)
from tests.factories import script

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


def pairs(effects: Sequence[float], deviation: float, *, runs: int = 64, seed: int = 0) -> list[Pair]:
    """Pairs of a crossed design with these true effects."""
    generator, made = np.random.default_rng(seed), []
    names = NAMES[: len(effects)]
    ladder = Ladder(description="x", baseline=Variant(name="base"), variants=tuple(Variant(name=n) for n in names))
    (family,) = families(ladder, Crossing(list(names)), runs, 0)[0]
    for planned in family.pairs:
        top1 = [
            sum(effect for name, effect in zip(names, effects, strict=True) if name in on)
            + deviation * generator.normal()
            for on in planned.on
        ]
        made.append(Pair(planned.on, top1[0] - top1[1], 1, 10_000))
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
    made = [Pair(pair.on, 0.0, 50, 1000) for pair in pairs([0.0] * 8, 0.0)]
    found = fit(made, NAMES)
    assert found.deviation == pytest.approx(100 * math.sqrt(50 / 2) / 1000)


def test_a_verdict_stays_and_a_small_loss_is_called_small() -> None:
    early, late = pairs([-0.12] + [0.0] * 7, 0.05, runs=32), pairs([0.0] * 8, 0.05, runs=64)
    fits = [fit(early, NAMES), fit(late, NAMES)]
    assert fits[0] is not None
    assert fits[1] is not None
    looks = decide([(0, 32, [(NAMES, fits[0])]), (1, 48, [(NAMES, fits[1])])], 0.25)
    assert [look.effects[0].word for look in looks] == ["costs a little"] * 2
    assert {effect.word for effect in looks[1].effects[1:]} == {"free"}


@pytest.mark.parametrize(
    ("truth", "accused", "false_free", "found", "free"),
    [
        (Truth("free", one(0.0), 0.28), 0.05, None, None, 0.90),
        (Truth("at the margin", [-0.25] * 8, 0.28), 0.05, 0.05, None, None),
        (Truth("half a point", one(0.5), 0.28), 0.05, 0.05, 0.90, 0.90),
        (Truth("noise of unknown size", one(0.5), 0.22, floor=False), 0.05, 0.05, 0.90, 0.90),
        (Truth("one variant", [-0.5], 0.22), 0.05, 0.05, 0.90, None),
    ],
    ids=lambda each: each.name if isinstance(each, Truth) else "",
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
    assert resolution(0.28, 64) == pytest.approx(0.213, abs=1e-3)
    assert resolution(0.45, runs_that_resolve(0.45, 0.25)) == pytest.approx(0.25, abs=2e-3)
    open_one = Effect("a", -0.1, 0.1, 24, -0.3, 0.1, -0.27, 0.16, 0.07, "undecided")
    more = more_runs(open_one, 64, 0.25, 8)
    assert more is not None
    # Far from both bounds fewer trainings decide.
    clear = more_runs(Effect("a", 0.0, 0.1, 24, 0, 0, 0, 0.5, 0.5, "undecided"), 64, 0.25, 8)
    assert clear is not None
    assert clear < more


def test_a_variant_that_breaks_trainings_is_found_and_no_other() -> None:
    runs = [on for pair in pairs([0.0] * 8, 0.1, runs=32) for on in pair.on]
    failed = [on for on in runs if "c" in on]
    ended = [on for on in runs if "c" not in on]
    assert breaks(failed, ended, NAMES) == "c"
    assert breaks(failed[:1], [*failed[1:], *ended], NAMES) is None
