"""Regression check of two ledgers, for continuous integration: has a variant lost speed or accuracy?

`pycls-fast ledger check` prints how two ledgers differ; the exit status says whether something is lost.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from pycls_fast.errors import DONE, UserError, print_lines, refuse
from pycls_fast.files import user_path
from pycls_fast.ledger.report.effects import Effect
from pycls_fast.ledger.report.record import Record, Timing, VariantRecord, read_record
from pycls_fast.ledger.report.statistics import CONFIDENCE, Mean, Speedup, geometric_mean, p_lower, two_sided
from pycls_fast.train.display import plain_table, wide_console

LEVEL = (1 - CONFIDENCE) / 2
"""Significance level of each one-sided test, after Holm's correction over the variants."""


@dataclass
class Change:
    """A quantity of a variant before and now, and whether that is a loss, if a test of the `means` confirms it; else
    the difference is `only` what it says."""

    variant: str
    quantity: str
    before: str
    now: str
    text: str
    lost: bool = False
    means: tuple[Mean, Mean] | None = None
    only: str = "within the intervals"

    @property
    def row(self) -> dict[str, str]:
        text = f"LOST: {self.text}" if self.lost else self.text
        return {"variant": self.variant, "quantity": self.quantity, "before": self.before, "now": self.now, "": text}


def check(baseline: str, new: str, *, tolerance: float, absolute: bool) -> int:
    """Print how two ledgers differ; returns 1 if something was lost, else 0. A `UserError` if a file is not the record
    of a finished ledger, or the two cannot be compared."""
    files = [user_path(baseline), user_path(new)]
    before, now = (read_record(file) for file in files)
    refuse(
        f"{file}: unfinished; run the ledger's command again, which resumes it"
        for file, record in zip(files, (before, now), strict=True)
        if record.unfinished
    )
    changes = compare_ledgers(before, now, tolerance=tolerance, absolute=absolute)
    print_lines("note", _other_settings(before, now))
    wide_console().print(plain_table([change.row for change in changes], no_wrap=True))
    return 1 if any(change.lost for change in changes) else DONE


def compare_ledgers(before: Record, now: Record, *, tolerance: float, absolute: bool = True) -> list[Change]:
    """Compare each variant of `before` with the same one of `now`; docs/ledger.md has the rules. A `UserError` if the
    ledgers have different plans, or `before` has nothing to compare with."""
    shared = (
        ("experiment", before.config_name, now.config_name),
        ("mode", before.settings.mode, now.settings.mode),
        ("first variant", before.reference.name, now.reference.name),
    )
    refuse(
        f"check: ledgers with a different {what} ({one} and {other}) cannot be compared"
        for what, one, other in shared
        if one != other
    )
    changes = [*_tested(_speeds(before, now, tolerance, absolute)), *_tested(_accuracies(before, now))]
    if not changes:
        raise UserError("check: nothing to compare: the baseline has no timing and no training; give a finished one")
    return changes


def _other_settings(before: Record, now: Record) -> Iterator[str]:
    """What was typed otherwise for the experiment, or is otherwise in a variant of both, and is compared as well."""
    old, new = (
        {"the experiment": record.base}
        | {each.name: list(each.overrides) for each in (record.ladder.baseline, *record.ladder.variants)}
        for record in (before, now)
    )
    for name in old:
        if new.get(name, old[name]) != old[name]:
            yield f"{name} was {' '.join(old[name]) or '(no override)'}, now {' '.join(new[name]) or '(no override)'}"


def _tested(found: Iterable[Change]) -> list[Change]:
    """The changes; those that Welch's test does not confirm, with Holm's correction over the variants, are no loss."""
    changes = list(found)
    p_values = two_sided([p_lower(*change.means) if change.means else None for change in changes])
    for change, p_value in zip(changes, p_values, strict=True):
        if change.means and p_value > LEVEL:
            change.lost, change.text = False, f"{change.text}, {change.only}"
    return changes


def _speeds(before: Record, now: Record, tolerance: float, absolute: bool) -> Iterator[Change]:
    """Whether each variant that was measured still is, and whether it is slower by more than the tolerance."""
    by_name = {variant.name: variant for variant in now.variants}
    machines = [(each.environment.processor, each.environment.cpu_count, each.device) for each in (before, now)]
    for old in (variant for variant in before.variants if variant.status == "measured"):
        new, first = by_name.get(old.name), old is before.reference
        if new is None or new.status != "measured":
            reason = "variant is missing" if new is None else (new.reason or new.status)
            yield Change(old.name, "runs", "yes", "no", reason, lost=True)
            continue
        quantity, one, other = _rates(old, new) if first else ("speed-up", _speedup(old), _speedup(new))
        if one is not None and other is None:
            yield Change(old.name, quantity, "timed", "-", "not timed", lost=True)
        elif one is None or other is None or (first and not absolute):
            continue
        elif first and (machines[0] != machines[1] or old.ranks != new.ranks):
            what = "machine" if machines[0] != machines[1] else "number of ranks"
            yield Change(old.name, "images/s", "", "", f"different {what}: not compared")
        else:
            lost, text = other.ratio < one.ratio * (1 - tolerance), f"{other.ratio / one.ratio - 1:+.1%}"
            means = (one.mean, other.mean) if one.mean and other.mean else None
            text += "" if means else ", without an interval"
            only = "too few rounds to say" if lost else Change.only
            yield Change(old.name, quantity, _interval(one), _interval(other), text, lost, means, only)


def _speedup(variant: VariantRecord) -> Speedup | None:
    return None if variant.timing is None else variant.timing.speedup


def _rates(old: VariantRecord, new: VariantRecord) -> tuple[str, Speedup | None, Speedup | None]:
    """What is compared of the first variant, from its timings in two ledgers of one machine.

    The rate of the same code differs between two sessions on a shared machine, by more than it does within one. The
    rate of a large matrix product, measured in every round, differs with it; images/s are therefore compared relative
    to it, if both ledgers have it.
    """
    relative = all(each.timing and each.timing.matmul_flops_per_second for each in (old, new))

    def rate(timing: Timing | None) -> Speedup | None:
        if timing is None:
            return None
        products = timing.matmul_flops_per_second if relative else None
        pairs = zip(timing.rounds, products or [1e12] * len(timing.rounds), strict=False)
        return geometric_mean([images / (flops / 1e12) for images, flops in pairs])

    return f"images/s{' per TFLOP/s' if relative else ''}", rate(old.timing), rate(new.timing)


def _interval(values: Speedup) -> str:
    text, *ends = (
        f"{value:,.0f}" if value >= 999.5 else f"{value:.3g}"
        for value in (values.ratio, values.low, values.high)
        if value is not None
    )
    return f"{text} ({' - '.join(ends)})" if ends else text


def _accuracies(before: Record, now: Record) -> Iterator[Change]:
    """Whether what a variant does to accuracy has become worse."""
    old, new = ({e.variant: e for e in r.accuracy.effects} if r.accuracy else {} for r in (before, now))
    broken = now.accuracy.broken if now.accuracy else {}
    for name, one in old.items():
        other, quantity = new.get(name), "top-1 gained"
        if other is None:
            text = f"breaks training: {broken[name]}" if name in broken else "not trained"
            yield Change(name, quantity, _effect(one), "-", text, lost=True)
        else:
            change, means = other.difference - one.difference, (_mean(one), _mean(other))
            yield Change(name, quantity, _effect(one), _effect(other), f"{change:+.2f}", change < 0, means)


def _mean(effect: Effect) -> Mean:
    return effect.difference, effect.error, max(effect.freedom, 1)


def _effect(effect: Effect) -> str:
    return f"{effect.difference:+.2f} ({effect.low:+.2f} - {effect.high:+.2f})"
