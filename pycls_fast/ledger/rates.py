"""Rates of timings and the speed-ups between them: geometric means over rounds that one start timed."""

from __future__ import annotations

from bisect import bisect
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from pycls_fast.ledger.plan import Arm
from pycls_fast.ledger.statistics import Speedup, geometric_mean, speedup
from pycls_fast.published import IMAGENET_TRAINING_IMAGES

Record = dict[str, Any]


def with_rates(timing: Mapping[str, Any], ranks: int) -> Record:
    """The timing with all its rates over `paired_rounds`, or over all `rounds` if none is paired.

    The quotient of two rates over the same rounds is the geometric mean of the quotients of the rounds, which is the
    speed-up. Medians over all steps would contradict it.

    Args:
        timing: a timing of `ledger.json`; `flops_per_second` is in proportion to `images_per_second`.
        ranks: processes.
    """
    rounds = timing["rounds"]
    rate = geometric_mean([rounds[i] for i in timing["paired_rounds"] or range(len(rounds))]).ratio
    flops = timing["flops_per_second"]
    return {
        **timing,
        "images_per_second": rate,
        "images_per_second_per_rank": rate / ranks,
        "flops_per_second": None if flops is None else flops * rate / timing["images_per_second"],
        "imagenet_epoch_seconds": IMAGENET_TRAINING_IMAGES / rate,
    }


def compare_speed(plan: Sequence[Arm], records: Mapping[str, Record], starts: Sequence[float]) -> dict[str, str]:
    """Add `speedup` and `speedup_before` to the timings; returns what is not counted, and why."""
    without = {}
    for arm in plan:
        timing = records[arm.name]["timing"]
        for key, other in (("speedup", plan[0].name), ("speedup_before", arm.before)):
            reference = records[other]["timing"] if other is not None and other in records else None
            if timing is None:
                continue
            timing[key] = None
            if reference is not None:
                together = _paired_rounds(reference, timing, starts)
                found = _in_pairs(reference, timing, together)
                timing[key] = asdict(found)
                if other == plan[0].name:
                    timing |= with_rates({**timing, "paired_rounds": together}, arm.ranks)
                rounds = min(len(reference["rounds"]), len(timing["rounds"]))
                if found.rounds < rounds:
                    what = "interval" if found.low is None else f"{rounds - found.rounds} of {rounds} rounds"
                    without[f"{arm.name}: {what} of the speed-up over '{other}'"] = (
                        "their rounds are from different starts, between which the machine's speed drifts; with more "
                        "rounds= both are timed again"
                    )
    return without


def _paired_rounds(reference: Record, timing: Record, starts: Sequence[float]) -> list[int]:
    """The rounds in which one start timed both.

    A rung that was repaired, or that failed in an earlier start, may be timed on a different day than the reference.
    """
    # After a kill one of them may be a round ahead.
    rounds = range(min(len(reference["rounds"]), len(timing["rounds"])))
    return [i for i in rounds if bisect(starts, reference["times"][i]) == bisect(starts, timing["times"][i])]


def _in_pairs(reference: Record, timing: Record, together: Sequence[int]) -> Speedup:
    """The speed-up over paired rounds; if there are none, over all rounds without an interval."""
    rounds = together or range(min(len(reference["rounds"]), len(timing["rounds"])))
    found = speedup(*([one["rounds"][i] for i in rounds] for one in (reference, timing)))
    return found if together else replace(found, low=None, high=None, rounds=0)
