"""Regression check of two ledgers, for continuous integration: has a variant lost speed or accuracy?

`pycls-fast ledger check` prints how two ledgers differ; the exit status says whether something is lost.
"""

from __future__ import annotations

from dataclasses import dataclass

from pycls_fast.errors import DONE, UserError, refuse
from pycls_fast.files import user_path
from pycls_fast.ledger.report.effects import Effect
from pycls_fast.ledger.report.record import Record, Timing, VariantRecord, read_record
from pycls_fast.ledger.report.statistics import CONFIDENCE, Speedup, geometric_mean, p_lower, p_slower, two_sided
from pycls_fast.train.display import plain_table, wide_console

LEVEL = (1 - CONFIDENCE) / 2
"""Significance level of each one-sided test, after Holm's correction over the variants."""


@dataclass(frozen=True)
class Change:
    """The result for one quantity of a variant: its values before and now, and whether that is a loss."""

    variant: str
    quantity: str
    before: str
    now: str
    text: str
    lost: bool = False

    @property
    def row(self) -> dict[str, str]:
        text = f"LOST: {self.text}" if self.lost else self.text
        return {"variant": self.variant, "quantity": self.quantity, "before": self.before, "now": self.now, "": text}


def check(baseline: str, new: str, *, tolerance: float, absolute: bool) -> int:
    """Print how two ledgers differ; returns 1 if something was lost, else 0.

    Raises:
        UserError: a file is not the record of a finished ledger, or the two cannot be compared.
    """
    files = [user_path(baseline), user_path(new)]
    before, now = (read_record(file) for file in files)
    refuse(
        f"{file}: unfinished; run the ledger's command again, which resumes it"
        for file, record in zip(files, (before, now), strict=True)
        if record.unfinished
    )
    changes = compare_ledgers(before, now, tolerance=tolerance, absolute=absolute)
    wide_console().print(plain_table([change.row for change in changes], no_wrap=True))
    return 1 if any(change.lost for change in changes) else DONE


def compare_ledgers(before: Record, now: Record, *, tolerance: float, absolute: bool = True) -> list[Change]:
    """Compare each variant of `before` with the same one of `now`; docs/ledger.md has the rules.

    Raises:
        UserError: the ledgers have different plans, or `before` has nothing to compare with.
    """
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
    by_name = {variant.name: variant for variant in now.variants}
    measured = [variant for variant in before.variants if variant.status == "measured"]
    speeds = [_speeds(old, by_name.get(old.name), before, now, absolute) for old in measured]
    p_speeds = two_sided([p_slower(*found[1:]) if found else None for found in speeds])
    changes: list[Change] = []
    for old, found, p_speed in zip(measured, speeds, p_speeds, strict=True):
        new, first = by_name.get(old.name), old is before.reference
        if new is None or new.status != "measured":
            reason = "variant is missing" if new is None else (new.reason or new.status)
            changes.append(Change(old.name, "runs", "yes", "no", reason, lost=True))
        elif found:
            changes.append(_speed_change(old.name, *found, p_speed, tolerance))
        elif _is_timed(old, first) and not _is_timed(new, first):
            quantity = "images/s" if first else "speed-up"
            changes.append(Change(old.name, quantity, "timed", "-", "not timed", lost=True))
        elif first and absolute and old.timing and new.timing:
            what = "machine" if _machine(before) != _machine(now) else "number of ranks"
            changes.append(Change(old.name, "images/s", "", "", f"different {what}: not compared"))
    changes += _accuracy_changes(before, now)
    if not changes:
        raise UserError("check: nothing to compare: the baseline has no timing and no training; give a finished one")
    return changes


def _speeds(
    old: VariantRecord, new: VariantRecord | None, before: Record, now: Record, absolute: bool
) -> tuple[str, Speedup, Speedup] | None:
    """What there is to compare of a variant's speed: a quantity, before and now."""
    if new is None or not old.timing or not new.timing:
        return None
    if old is before.reference:
        same = _machine(before) == _machine(now) and old.ranks == new.ranks
        return _first_speeds(old.timing, new.timing) if absolute and same else None
    a, b = old.timing.speedup, new.timing.speedup
    return ("speed-up", a, b) if a and b else None


def _first_speeds(before: Timing, now: Timing) -> tuple[str, Speedup, Speedup]:
    """Speeds of the first variant from its timings in two ledgers of one machine.

    The rate of the same code differs between two sessions on a shared machine, by more than it does within one. The
    rate of a large matrix product, measured in every round, differs with it; images/s are therefore compared relative
    to it, if both ledgers have it.
    """
    products = (before.matmul_flops_per_second, now.matmul_flops_per_second)
    if None in products:
        return "images/s", geometric_mean(before.rounds), geometric_mean(now.rounds)

    def relative(timing: Timing) -> Speedup:
        pairs = zip(timing.rounds, timing.matmul_flops_per_second or (), strict=False)
        return geometric_mean([rate / (flops / 1e12) for rate, flops in pairs])

    return "images/s per TFLOP/s", relative(before), relative(now)


def _speed_change(
    variant: str, quantity: str, before: Speedup, now: Speedup, p_value: float, tolerance: float
) -> Change:
    """A speed is lost if it fell by more than the tolerance, and the p-value, after Holm, confirms it."""
    beyond, is_shown = now.ratio < before.ratio * (1 - tolerance), p_value <= LEVEL
    lost, text = beyond and is_shown, f"{now.ratio / before.ratio - 1:+.1%}"
    if before.low is None or now.low is None:
        lost, text = beyond, f"{text}, without an interval"
    elif not is_shown:
        text += ", too few rounds to say" if beyond else ", within the intervals"
    return Change(variant, quantity, _interval(before), _interval(now), text, lost)


def _is_timed(variant: VariantRecord, first: bool) -> bool:
    """Whether its speed is known: the first variant's rate, or another one's speed-up over the first."""
    return bool(variant.timing and (first or variant.timing.speedup))


def _interval(values: Speedup) -> str:
    text, *ends = (
        f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"
        for value in (values.ratio, values.low, values.high)
        if value is not None
    )
    return f"{text} ({' - '.join(ends)})" if ends else text


def _accuracy_changes(before: Record, now: Record) -> list[Change]:
    """Whether what a variant does to accuracy has become worse: Welch's test of two effects, Holm's over variants."""
    old, new = ({e.variant: e for e in r.accuracy.effects} if r.accuracy else {} for r in (before, now))
    pairs = [(effect, new[name]) if name in new else None for name, effect in old.items()]
    moments = [pair and [(each.difference, each.error, max(each.freedom, 1)) for each in pair] for pair in pairs]
    p_values = two_sided([p_lower(*pair) if pair else None for pair in moments])
    broken = now.accuracy.broken if now.accuracy else {}
    made = []
    for (name, effect), p_value in zip(old.items(), p_values, strict=True):
        now_text, lost, is_shown = "-", True, p_value <= LEVEL
        text = f"breaks training: {broken[name]}" if name in broken else "not trained"
        if name in new:
            change, now_text = new[name].difference - effect.difference, _effect(new[name])
            lost, text = is_shown and change < 0, f"{change:+.2f}" + ("" if is_shown else ", within the intervals")
        made.append(Change(name, "top-1 gained", _effect(effect), now_text, text, lost))
    return made


def _effect(effect: Effect) -> str:
    return f"{effect.difference:+.2f} ({effect.low:+.2f} - {effect.high:+.2f})"


def _machine(record: Record) -> tuple[object, ...]:
    return record.environment.processor, record.environment.cpu_count, record.device
