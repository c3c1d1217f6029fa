"""Comparison of two ledgers, rung by rung."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pycls_fast.errors import UserError
from pycls_fast.ledger.gate.accuracy import accuracy_finding, p_less_accurate
from pycls_fast.ledger.gate.finding import Finding, two_sided
from pycls_fast.ledger.gate.speed import Speeds, first_speeds, p_slower, speed_finding, untested

Record = Mapping[str, Any]


def compare_ledgers(before: Record, now: Record, *, tolerance: float, absolute: bool = True) -> list[Finding]:
    """Compare each rung of `before` with the same rung of `now`.

    Speed is the speed-up over the ledger's own first rung. For the first rung it is its images/s, if possible relative
    to the rate of the machine's matrix product, and compared only on the same machine (processor, number of cores,
    device, ranks). It is lost if it fell by more than `tolerance` and Welch's one-sided test of the rounds' logarithms
    confirms it at 2.5%, after Holm's correction over the rungs; with a single round, if it fell by more than
    `tolerance`. Rounds from different starts of a ledger never show a loss, as their ratio includes the machine's
    drift. Accuracy is lost if Welch's one-sided test of the seeds' top-1 (with a single run, a test with the standard
    error of the images) confirms it at 2.5%, after Holm's correction over the rungs, or if a training ended early that
    did not before. A significant gain is shown as its number only. Machines, versions of torch, and overrides and ranks
    of rungs that differ are listed: speed-ups depend on them, too.

    Args:
        before, now: two `ledger.json`.
        tolerance: share of the speed.
        absolute: whether the first rung's rate is compared; false for a machine whose speed changes.

    Raises:
        UserError: the ledgers have different plans, or `before` has nothing to compare with.
    """
    _check_plans(before, now)
    arms = {arm["name"]: arm for arm in now["arms"]}
    findings: list[Finding] = []
    measured = [arm for arm in before["arms"] if arm["status"] == "measured"]
    speeds = [_speeds(old, arms.get(old["name"]), before, now, absolute) for old in measured]
    p_speeds = two_sided([p_slower(found[-1]) if found else None for found in speeds])
    p_accuracies = two_sided([p_less_accurate(old, arms.get(old["name"])) for old in measured])
    for old, found, p_speed, p_accuracy in zip(measured, speeds, p_speeds, p_accuracies, strict=True):
        new = arms.get(old["name"])
        if new is None or new["status"] != "measured":
            reason = "rung is missing" if new is None else (new["reason"] or new["status"])
            findings.append(Finding(old["name"], "runs", "yes", "no", True, f"LOST: {reason}"))
            continue
        first = old["name"] == before["reference"]
        quantity = "images/s" if first else "speed-up"
        if found:
            *shown, tested = found
            findings += [untested(old["name"], each) for each in shown]
            findings.append(speed_finding(old["name"], tested, p_speed, tolerance))
        elif _is_timed(old, first) and not _is_timed(new, first):
            findings.append(Finding(old["name"], quantity, "timed", "-", True, "LOST: not timed"))
        elif first and absolute and old["timing"] and new["timing"]:
            findings.append(Finding(old["name"], quantity, "", "", False, "different machine: not compared"))
        accuracy = accuracy_finding(old, new, now["settings"], p_accuracy)
        findings += [accuracy] if accuracy is not None else []
    if not findings:
        raise UserError("check: nothing to compare: the baseline has no timing and no training; give a finished one")
    plans = [("all", before["base"], now["base"])]
    plans += [(arm["name"], _settings(arm), _settings(arms[arm["name"]])) for arm in measured if arm["name"] in arms]
    differ = [_others(*plan) for plan in plans if set(plan[1]) != set(plan[2])]
    return [*_other_machine(before, now), *differ, *findings]


def _check_plans(before: Record, now: Record) -> None:
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


def _speeds(old: Record, new: Record | None, before: Record, now: Record, absolute: bool) -> list[Speeds]:
    """What there is to compare, of which the last is to be tested; empty if there is nothing."""
    if new is None or not old["timing"] or not new["timing"]:
        return []
    if old["name"] == before["reference"]:
        same = _machine(before) == _machine(now) and old["ranks"] == new["ranks"]
        return first_speeds(old["timing"], new["timing"]) if absolute and same else []
    a, b = (arm["timing"]["speedup"] for arm in (old, new))
    return [Speeds("speed-up", a, b)] if a and b else []


def _is_timed(arm: Record, first: bool) -> bool:
    """Whether its speed is known: the first rung's rate, or another rung's speed-up over the first."""
    return bool(arm["timing"] and (first or arm["timing"]["speedup"]))


def _machine(record: Record) -> dict[str, object]:
    environment = record["environment"]
    return {"processor": environment["processor"], "cores": environment["cpu_count"], "device": record["device"]}


def _other_machine(before: Record, now: Record) -> list[Finding]:
    """What differs between the machines and versions of torch; a ledger that timed nothing has no device."""
    old, new = ({**_machine(record), "torch": record["versions"].get("torch")} for record in (before, now))
    return [
        Finding("all", what, str(old[what]), str(new[what]), False, "differs from the baseline; speed-ups may, too")
        for what in old
        if old[what] != new[what] and None not in (old[what], new[what])
    ]


def _settings(arm: Record) -> list[str]:
    return [*arm["overrides"], f"ranks={arm['ranks']}"]


def _others(rung: str, before: Sequence[str], now: Sequence[str]) -> Finding:
    gone, new = (" ".join(s for s in one if s not in other) for one, other in ((before, now), (now, before)))
    return Finding(rung, "overrides", gone, new, False, "differ from the baseline")
