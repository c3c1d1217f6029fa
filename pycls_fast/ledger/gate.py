"""Regression check of two ledgers, for continuous integration: has a rung lost speed or accuracy?"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from scipy import stats

from pycls_fast.config.reporting import reporting
from pycls_fast.errors import UserError
from pycls_fast.exit_status import DONE
from pycls_fast.ledger.statistics import CONFIDENCE, geometric_mean, is_unpaired, t_quantile
from pycls_fast.ledger.verdicts import holm
from pycls_fast.paths import user_path
from pycls_fast.train.display import plain_table, wide_console

LOST = 1
# Significance level of each one-sided test.
_LEVEL = (1 - CONFIDENCE) / 2
_SETTINGS = ("tolerance", "absolute")
_USAGE = "check BASELINE.json NEW.json [tolerance=0.05] [absolute=true]"


@dataclass(frozen=True)
class Finding:
    """The result for one quantity of a rung: its values before and now, and whether that is a loss."""

    rung: str
    quantity: str
    before: str
    now: str
    lost: bool
    text: str


def check(arguments: Sequence[str]) -> int:
    """Run the command: prints a table; returns 1 if something was lost, 0 if not, 2 for a user error."""
    return reporting(lambda: _check(arguments))


def _check(arguments: Sequence[str]) -> int:
    settings = dict(a.split("=", 1) for a in arguments if _is_setting(a))
    files = [user_path(a) for a in arguments if not _is_setting(a)]
    if len(files) != 2:
        raise UserError(f"check: needs two files; got {' '.join(map(str, files)) or 'none'}; use {_USAGE}")
    tolerance, absolute = _tolerance(settings.get("tolerance", "0.05")), settings.get("absolute", "true")
    if absolute not in ("true", "false"):
        raise UserError(f"absolute: must be true or false; got {absolute}")
    findings = compare(*(_read(file) for file in files), tolerance=tolerance, absolute=absolute == "true")
    rows = [(finding.rung, finding.quantity, finding.before, finding.now, finding.text) for finding in findings]
    wide_console().print(plain_table(("rung", "quantity", "before", "now", ""), rows, no_wrap=True))
    return LOST if any(finding.lost for finding in findings) else DONE


def _is_setting(argument: str) -> bool:
    """Whether this is a setting and not a file: a sweep's folders contain "=" too (`seed=1/ledger.json`)."""
    return argument.startswith(tuple(f"{name}=" for name in _SETTINGS))


def _tolerance(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < 1:
        raise UserError(f"tolerance: must be a share from 0 up to 1; got {text}")
    return value


def _read(file: Path) -> dict[str, Any]:
    try:
        record = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"{file}: cannot be read ({error.strerror})") from error
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{file}: not JSON ({error})") from error
    if not isinstance(record, dict) or record.get("kind") != "ledger":
        raise UserError(f"{file}: not a ledger.json")
    return record


def compare(
    before: Mapping[str, Any], now: Mapping[str, Any], *, tolerance: float, absolute: bool = True
) -> list[Finding]:
    """Compare each rung of `before` with the same rung of `now`.

    Speed is the speed-up over the ledger's own first rung, so that a different machine is not a loss; for the first
    rung it is the rate itself, compared only on the same device. It is lost if it fell by more than `tolerance` and
    Welch's one-sided test of the rounds' logarithms confirms it at 2.5%, after Holm's correction over the rungs; with a
    single round, if it fell by more than `tolerance`. Rounds from different starts of a ledger never show a loss, as
    their ratio includes the machine's drift. Accuracy is lost if Welch's one-sided test of the seeds' top-1 confirms it
    at 2.5%, after Holm's correction over the rungs, or if a training ended early that did not before. A significant
    gain is shown as its number only. Rungs whose overrides or ranks differ are listed.

    Args:
        before, now: two `ledger.json`.
        tolerance: share of the speed.
        absolute: whether the first rung's rate is compared; false for a shared machine.

    Raises:
        UserError: the ledgers have different plans, or `before` has nothing to compare with.
    """
    _check_plans(before, now)
    arms = {arm["name"]: arm for arm in now["arms"]}
    findings: list[Finding] = []
    measured = [arm for arm in before["arms"] if arm["status"] == "measured"]
    speeds = [_speeds(old, arms.get(old["name"]), before, now, absolute) for old in measured]
    p_speeds = _of_both_sides([_p_slower(*pair) if pair else None for pair in speeds])
    p_accuracies = _of_both_sides([_p_less_accurate(old, arms.get(old["name"])) for old in measured])
    for old, speed, p_speed, p_accuracy in zip(measured, speeds, p_speeds, p_accuracies, strict=True):
        new = arms.get(old["name"])
        if new is None or new["status"] != "measured":
            reason = "rung is missing" if new is None else (new["reason"] or new["status"])
            findings.append(Finding(old["name"], "runs", "yes", "no", True, f"LOST: {reason}"))
            continue
        first = old["name"] == before["reference"]
        quantity = "images/s" if first else "speed-up"
        if speed is not None:
            findings.append(_speed(old["name"], quantity, *speed, p_speed, tolerance))
        elif _is_timed(old, first) and not _is_timed(new, first):
            findings.append(Finding(old["name"], quantity, "timed", "-", True, "LOST: not timed"))
        elif first and absolute and old["timing"] and new["timing"]:
            findings.append(Finding(old["name"], quantity, "", "", False, "different machine: not compared"))
        accuracy = _accuracy(old, new, now["settings"]["seeds"], p_accuracy)
        findings += [accuracy] if accuracy is not None else []
    if not findings:
        raise UserError("check: nothing to compare: the baseline has no timing and no training; give a finished one")
    plans = [("all", before["base"], now["base"])]
    plans += [(arm["name"], _settings(arm), _settings(arms[arm["name"]])) for arm in measured if arm["name"] in arms]
    return [*(_others(*plan) for plan in plans if set(plan[1]) != set(plan[2])), *findings]


def _settings(arm: Mapping[str, Any]) -> list[str]:
    return [*arm["overrides"], f"ranks={arm['ranks']}"]


def _others(rung: str, before: Sequence[str], now: Sequence[str]) -> Finding:
    gone, new = (" ".join(s for s in one if s not in other) for one, other in ((before, now), (now, before)))
    return Finding(rung, "overrides", gone, new, False, "differ from the baseline")


def _check_plans(before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Refuse ledgers whose speed-ups and differences are not relative to the same setting.

    Raises:
        UserError: a different experiment, mode or first rung.
    """
    for what, old, new in (
        ("experiment", before["config_name"], now["config_name"]),
        ("mode", before["settings"]["mode"], now["settings"]["mode"]),
        ("first rung", before["reference"], now["reference"]),
    ):
        if old != new:
            raise UserError(f"check: ledgers with a different {what} ({old} and {new}) cannot be compared")


def _is_timed(arm: Mapping[str, Any], first: bool) -> bool:
    """Whether its speed is known: the first rung's rate, or another rung's speed-up over the first."""
    return bool(arm["timing"] and (first or arm["timing"]["speedup"]))


def _speeds(
    old: Mapping[str, Any],
    new: Mapping[str, Any] | None,
    before: Mapping[str, Any],
    now: Mapping[str, Any],
    absolute: bool,
) -> tuple[Mapping[str, Any], Mapping[str, Any]] | None:
    """`ratio, low, high, rounds` of both, or None if there is nothing to compare."""
    if new is None or not old["timing"] or not new["timing"]:
        return None
    if old["name"] == before["reference"]:
        rates = [asdict(geometric_mean(arm["timing"]["rounds"])) for arm in (old, new)]
        machines = [record["environment"]["processor"] + str(record["device"]) for record in (before, now)]
        return (rates[0], rates[1]) if absolute and machines[0] == machines[1] else None
    a, b = (arm["timing"]["speedup"] for arm in (old, new))
    return (a, b) if a and b else None


def _p_slower(a: Mapping[str, Any], b: Mapping[str, Any]) -> float | None:
    """p-value of Welch's one-sided test that the second is slower; None if one has no interval."""
    if a["low"] is None or b["low"] is None:
        return None
    moments = [_moments(values) for values in (a, b)]
    if moments[0][1] == moments[1][1] == 0:
        return 0.0 if moments[1][0] < moments[0][0] else 1.0
    return float(stats.ttest_ind_from_stats(*moments[1], *moments[0], equal_var=False, alternative="less").pvalue)


def _of_both_sides(p_values: Sequence[float | None]) -> list[float]:
    """For each test, the smaller of the p-values for a loss and for a gain, each after Holm's correction."""
    gains = [None if p is None else 1 - p for p in p_values]
    return [min(pair) for pair in zip(holm(p_values), holm(gains), strict=True)]


def _moments(values: Mapping[str, Any]) -> tuple[float, float, int]:
    """Mean and standard deviation of the rounds' logarithms, recovered from their interval, and number of rounds."""
    rounds = values["rounds"]
    half = math.log(values["high"] / values["low"]) / 2
    deviation = half * math.sqrt(rounds) / t_quantile(rounds - 1)
    return math.log(values["ratio"]), deviation, rounds


def _speed(
    rung: str, quantity: str, a: Mapping[str, Any], b: Mapping[str, Any], p_value: float, tolerance: float
) -> Finding:
    beyond = b["ratio"] < a["ratio"] * (1 - tolerance)
    unpaired = is_unpaired(a) or is_unpaired(b)
    tested = None not in (a["low"], b["low"])
    shown = p_value <= _LEVEL
    text = f"{b['ratio'] / a['ratio'] - 1:+.1%}"
    if unpaired:
        text += ", timed in different starts: not tested"
    elif not tested:
        text += ", without an interval"
    elif not shown:
        text += ", too few rounds to say" if beyond else ", within the intervals"
    lost = beyond and (shown or not (tested or unpaired))
    return Finding(rung, quantity, _interval(a), _interval(b), lost, f"LOST: {text}" if lost else text)


def _interval(values: Mapping[str, Any]) -> str:
    text = f"{values['ratio']:.3g}"
    return text if values["low"] is None else f"{text} ({values['low']:.3g} - {values['high']:.3g})"


def _top1(arm: Mapping[str, Any] | None) -> list[float]:
    training = arm["training"] if arm else None
    return [run["top1"] for run in training["runs"]] if training else []


def _p_less_accurate(old: Mapping[str, Any], new: Mapping[str, Any] | None) -> float | None:
    """p-value of Welch's one-sided test for a loss of accuracy; None if there are too few runs."""
    before, now = _top1(old), _top1(new)
    if new is None or min(len(before), len(now)) < 2 or sorted(before) == sorted(now):
        return None
    # Seeds may agree by chance; their deviation is taken as at least one image.
    moments = [
        (float(np.mean(top1)), max(float(np.std(top1, ddof=1)), 100.0 / arm["training"]["runs"][0]["count"]), len(top1))
        for arm, top1 in ((new, now), (old, before))
    ]
    return float(stats.ttest_ind_from_stats(*moments[0], *moments[1], equal_var=False, alternative="less").pvalue)


def _accuracy(old: Mapping[str, Any], new: Mapping[str, Any], seeds: int, p_value: float) -> Finding | None:
    before, now = _top1(old), _top1(new)
    if not before:
        return None
    first, second = (f"{np.mean(v):.2f} ({len(v)} seeds)" if v else "-" for v in (before, now))

    def made(lost: bool, text: str) -> Finding:
        return Finding(old["name"], "top-1", first, second, lost, f"LOST: {text}" if lost else text)

    if not now:
        return made(True, _ended(new) or "no run finished")
    if _ended(new) and not _ended(old):
        return made(True, _ended(new))
    if len(now) < min(seeds, len(before)):
        return made(True, f"{len(now)} of {seeds} runs finished")
    if sorted(before) == sorted(now):
        return made(False, "the same")
    difference = float(np.mean(now) - np.mean(before))
    change = f"{difference:+.2f}"
    if min(len(before), len(now)) < 2:
        return made(False, f"{change}, not enough runs to say")
    shown = p_value <= _LEVEL
    return made(shown and difference < 0, change if shown else f"{change}, within the intervals")


def _ended(arm: Mapping[str, Any]) -> str:
    """Says that a training ended early, and why; empty if none did."""
    reason = arm["training"]["reason"] if arm["training"] else None
    return f"training ended early: {reason}" if reason else ""
