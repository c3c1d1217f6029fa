"""The result of a ledger in words: what gains, what costs, and what cannot be said."""

from __future__ import annotations

from typing import Any

import pytest

from pycls_fast.ledger.headline import headline
from pycls_fast.ledger.reading import completed

Record = dict[str, Any]


def arm(name: str, ratio: float, low: float | None, high: float | None, finding: str | None, **more: Any) -> Record:
    speedup = {"ratio": ratio, "low": low, "high": high, "rounds": 6}
    timing = {"images_per_second": 100 * ratio, "speedup": speedup, "speedup_before": speedup}
    verdict = {"verdict": {"finding": finding}}
    training = finding and {"against_reference": verdict, "against_before": verdict}
    return {"name": name, "timing": timing, "training": training, **more}


def record(*arms: Record, mode: str = "one_at_a_time") -> Record:
    first = {"name": "plain", "timing": {"images_per_second": 100}}
    return completed({"arms": [first, *arms], "settings": {"mode": mode, "margin": 0.2}, "device": "cpu"})


def test_gains_and_costs() -> None:
    found = headline(
        record(
            arm("good", 1.5, 1.4, 1.6, "no loss"),
            arm("doubtful", 1.2, 1.1, 1.3, "not enough runs"),
            arm("bad", 2.0, 1.9, 2.1, "loss"),
            arm("slow", 0.5, 0.4, 0.6, "small loss"),
            arm("even", 1.0, 0.9, 1.1, "identical"),
            arm("unknown", 3.0, None, None, "gain"),
            {"name": "far", "status": "cannot run", "needs": "CUDA"},
        )
    )
    assert found == [
        "1.50x (1.40 to 1.60) over 'plain' with 'good'; no loss of top-1 larger than 0.2 points.",
        "Faster than 'plain', without a shown loss of top-1: 'good' (1.50x), 'doubtful' (1.20x).",
        "Faster than 'plain', with a loss of top-1: 'bad' (2.00x).",
        "Slower than 'plain': 'slow' (0.50x).",
        "Not shown to be faster or slower than 'plain': 'even' (1.00x), 'unknown' (3.00x).",
        "Loses top-1: 'bad', 'slow'.",
        "Too few runs to exclude a loss of top-1: 'doubtful'.",
        "Not run here, or failed: 'far'.",
    ]


def test_rungs_that_add_up_are_judged_against_the_one_before() -> None:
    second = arm("second", 1.5, 1.4, 1.6, "not enough runs")
    second["timing"]["speedup_before"] = {"ratio": 0.8, "low": 0.7, "high": 0.9, "rounds": 6}
    found = headline(record(second, mode="cumulative"))
    assert found[0] == (
        "1.50x (1.40 to 1.60) over 'plain' with 'second', on top of the rungs before it; no loss of top-1 shown, but "
        "too few runs to exclude one."
    )
    assert found[1] == "Slower than the rung before: 'second' (0.80x)."


@pytest.mark.parametrize(
    ("rungs", "first"),
    [
        ([arm("a", 1.5, 1.4, 1.6, None)], "1.50x (1.40 to 1.60) over 'plain' with 'a'; accuracy not measured."),
        (
            [arm("a", 1.5, 1.4, 1.6, None, ranks=4)],
            "1.50x (1.40 to 1.60) on 4 ranks over 'plain' with 'a'; accuracy not measured.",
        ),
        ([arm("a", 1.5, 0.9, 2.6, None)], "No rung is shown to be faster than 'plain'."),
        ([arm("a", 1.5, 1.4, 1.6, "loss")], "No rung is shown to be faster than 'plain' without a loss of top-1."),
        (
            [arm("a", 1.5, 1.4, 1.6, "identical")],
            "1.50x (1.40 to 1.60) over 'plain' with 'a'; every prediction is the same.",
        ),
        ([arm("a", 1.5, 1.4, 1.6, "gain")], "1.50x (1.40 to 1.60) over 'plain' with 'a'; top-1 gains."),
    ],
)
def test_the_first_sentence(rungs: list[Record], first: str) -> None:
    assert headline(record(*rungs))[0] == first


def test_a_rung_that_failed_or_whose_training_ended_is_not_recommended() -> None:
    ended = arm("ended", 2.0, 1.9, 2.1, "not enough runs")
    ended["training"]["reason"] = "seed 0: the loss is not finite"
    failed = arm("failed", 3.0, 2.9, 3.1, "no loss", status="failed")
    assert headline(record(arm("good", 1.5, 1.4, 1.6, "no loss"), ended, failed)) == [
        "1.50x (1.40 to 1.60) over 'plain' with 'good'; no loss of top-1 larger than 0.2 points.",
        "Faster than 'plain', without a shown loss of top-1: 'good' (1.50x).",
        "Faster than 'plain', but training ended early: 'ended' (2.00x).",
        "Training ended early: 'ended'.",
        "Not run here, or failed: 'failed'.",
    ]


def test_nothing_is_measured_yet() -> None:
    assert headline(record({"name": "a"})) == []


def test_without_training_nothing_is_said_of_accuracy() -> None:
    found = headline(record(arm("a", 1.5, 1.4, 1.6, None)))
    assert found[1:] == ["Faster than 'plain': 'a' (1.50x)."]
