"""Comparison of a rung's speed in two ledgers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from scipy import stats

from pycls_fast.ledger.gate.finding import LEVEL, Finding
from pycls_fast.ledger.statistics import geometric_mean, is_unpaired, t_quantile

Values = Mapping[str, Any]
"""`ratio, low, high, rounds` of `statistics.Speedup`."""


@dataclass(frozen=True)
class Speeds:
    """A rung's speed before and now."""

    quantity: str
    before: Values
    now: Values


def first_speeds(before: Values, now: Values) -> list[Speeds]:
    """Speeds of the first rung from its timings in two ledgers of one machine; the last one is to be tested.

    The rate of the same code differs between two sessions on a shared machine, by more than it does within one. The
    rate of a large matrix product, measured in every round, differs with it; images/s are therefore compared relative
    to it, if both ledgers have it.
    """
    rates = [before["rounds"], now["rounds"]]
    made = [_speeds("images/s", rates)]
    products = [each for timing in (before, now) if (each := _products(timing)) is not None]
    if len(products) == 2:
        made.append(_speeds("matrix product, TFLOP/s", products))
        relative = [[r / p for r, p in zip(*both, strict=True)] for both in zip(rates, products, strict=True)]
        made.append(_speeds("images/s per TFLOP/s", relative))
    return made


def _speeds(quantity: str, rounds: Sequence[Sequence[float]]) -> Speeds:
    before, now = (asdict(geometric_mean(each)) for each in rounds)
    return Speeds(quantity, before, now)


def _products(timing: Values) -> list[float] | None:
    """TFLOP/s of the machine's matrix product in each round; None if they are not known."""
    each = timing.get("matmul_flops_per_second")
    if each is None and timing.get("share_of_matmul") and timing["flops_per_second"]:
        # Ledgers of earlier versions have only the median of the rounds' shares.
        each = [timing["flops_per_second"] / timing["share_of_matmul"]] * len(timing["rounds"])
    return None if each is None else [flops / 1e12 for flops in each]


def p_slower(speeds: Speeds) -> float | None:
    """p-value of Welch's one-sided test that the rung is slower now; None if one side has no interval."""
    a, b = speeds.before, speeds.now
    if a["low"] is None or b["low"] is None:
        return None
    moments = [_moments(values) for values in (a, b)]
    if moments[0][1] == moments[1][1] == 0:
        return 0.0 if moments[1][0] < moments[0][0] else 1.0
    return float(stats.ttest_ind_from_stats(*moments[1], *moments[0], equal_var=False, alternative="less").pvalue)


def _moments(values: Values) -> tuple[float, float, int]:
    """Mean and standard deviation of the rounds' logarithms, recovered from their interval, and number of rounds."""
    rounds = values["rounds"]
    half = math.log(values["high"] / values["low"]) / 2
    deviation = half * math.sqrt(rounds) / t_quantile(rounds - 1)
    return math.log(values["ratio"]), deviation, rounds


def speed_finding(rung: str, speeds: Speeds, p_value: float, tolerance: float) -> Finding:
    """Whether the speed is lost: it fell by more than the tolerance, and the test confirms it.

    Args:
        rung: its name.
        speeds: before and now.
        p_value: after Holm's correction.
        tolerance: share of the speed.
    """
    a, b = speeds.before, speeds.now
    beyond = b["ratio"] < a["ratio"] * (1 - tolerance)
    unpaired = is_unpaired(a) or is_unpaired(b)
    tested = None not in (a["low"], b["low"])
    shown = p_value <= LEVEL
    text = _change(speeds)
    if unpaired:
        text += ", timed in different starts: not tested"
    elif not tested:
        text += ", without an interval"
    elif not shown:
        text += ", too few rounds to say" if beyond else ", within the intervals"
    lost = beyond and (shown or not (tested or unpaired))
    return Finding(rung, speeds.quantity, _interval(a), _interval(b), lost, f"LOST: {text}" if lost else text)


def untested(rung: str, speeds: Speeds) -> Finding:
    """A speed that is shown only."""
    return Finding(rung, speeds.quantity, _interval(speeds.before), _interval(speeds.now), False, _change(speeds))


def _change(speeds: Speeds) -> str:
    return f"{speeds.now['ratio'] / speeds.before['ratio'] - 1:+.1%}"


def _interval(values: Values) -> str:
    text = _number(values["ratio"])
    return text if values["low"] is None else f"{text} ({_number(values['low'])} - {_number(values['high'])})"


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"
