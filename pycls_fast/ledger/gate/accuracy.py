"""Comparison of a rung's accuracy in two ledgers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from scipy import stats

from pycls_fast.ledger.gate.finding import LEVEL, Finding

Arm = Mapping[str, Any]


def p_less_accurate(old: Arm, new: Arm | None) -> float | None:
    """p-value of the one-sided test for a loss of accuracy; None if there is nothing to test.

    Welch's test over the seeds; if one side has a single run, a test with the standard error of the images.
    """
    before, now = _top1(old), _top1(new)
    if new is None or not before or not now or sorted(before) == sorted(now):
        return None
    counts = [arm["training"]["runs"][0]["count"] for arm in (new, old)]
    if min(len(before), len(now)) < 2:
        return _p_of_proportions((float(np.mean(now)), float(np.mean(before))), counts)
    # Seeds may agree by chance; their deviation is taken as at least one image.
    moments = [
        (float(np.mean(top1)), max(float(np.std(top1, ddof=1)), 100.0 / count), len(top1))
        for count, top1 in zip(counts, (now, before), strict=True)
    ]
    return float(stats.ttest_ind_from_stats(*moments[0], *moments[1], equal_var=False, alternative="less").pvalue)


def _p_of_proportions(top1: tuple[float, float], counts: list[int]) -> float:
    """p-value of the one-sided test of two proportions that the first of two accuracies in percent is lower.

    The images are the same on both sides, but of a ledger only their number is known. Taken as independent, they give
    a larger error, which leaves room for the unknown spread between seeds.
    """
    first, second = (value / 100 for value in top1)
    both = (first * counts[0] + second * counts[1]) / sum(counts)
    error = math.sqrt(both * (1 - both) * sum(1 / count for count in counts))
    return float(stats.norm.cdf((first - second) / error)) if error else 0.5


def accuracy_finding(old: Arm, new: Arm, settings: Mapping[str, Any], p_value: float) -> Finding | None:
    """Whether the accuracy is lost; None if the rung was not trained before.

    Args:
        old, new: the rung before and now.
        settings: those of the ledger now.
        p_value: after Holm's correction.
    """
    before, now = _top1(old), _top1(new)
    if not before:
        return None
    first, second = (f"{np.mean(v):.2f} ({len(v)} seed{'s' * (len(v) > 1)})" if v else "-" for v in (before, now))

    def made(lost: bool, text: str) -> Finding:
        return Finding(old["name"], "top-1", first, second, lost, f"LOST: {text}" if lost else text)

    if not now:
        return made(True, _ended(new) or "no run finished")
    if _ended(new) and not _ended(old):
        return made(True, _ended(new))
    if len(now) < min(settings["seeds"], len(before)):
        return made(True, f"{len(now)} of {settings['seeds']} runs finished")
    if sorted(before) == sorted(now):
        return made(False, "the same")
    difference = float(np.mean(now) - np.mean(before))
    if p_value <= LEVEL:
        return made(difference < 0, f"{difference:+.2f}")
    doubt = "too few seeds to say" if difference < -(settings["margin"] or 0.0) else "within the intervals"
    return made(False, f"{difference:+.2f}, {doubt}")


def _top1(arm: Arm | None) -> list[float]:
    training = arm["training"] if arm else None
    return [run["top1"] for run in training["runs"]] if training else []


def _ended(arm: Arm) -> str:
    """Says that a training ended early, and why; empty if none did."""
    reason = arm["training"]["reason"] if arm["training"] else None
    return f"training ended early: {reason}" if reason else ""
