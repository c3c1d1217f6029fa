"""The result of comparing one quantity of a rung, and the level of the tests that decide it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pycls_fast.ledger.statistics import CONFIDENCE
from pycls_fast.ledger.verdicts import holm

LEVEL = (1 - CONFIDENCE) / 2
"""Significance level of each one-sided test, after Holm's correction over the rungs."""


@dataclass(frozen=True)
class Finding:
    """The result for one quantity of a rung: its values before and now, and whether that is a loss."""

    rung: str
    quantity: str
    before: str
    now: str
    lost: bool
    text: str


def two_sided(p_values: Sequence[float | None]) -> list[float]:
    """For each test, the smaller of the p-values for a loss and for a gain, each after Holm's correction."""
    gains = [None if p is None else 1 - p for p in p_values]
    return [min(pair) for pair in zip(holm(p_values), holm(gains), strict=True)]
