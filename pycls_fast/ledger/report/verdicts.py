"""The words of mode=crossed: one sentence per variant, and the headline."""

from __future__ import annotations

from collections import Counter

from pycls_fast.ledger.report.effects import CHANCE, Effect, more_runs, resolution
from pycls_fast.ledger.report.record import Accuracy, Record, VariantRecord
from pycls_fast.ledger.report.statistics import Speedup

_FREE = ("free", "identical", "gains", "costs a little")


def sentences(record: Record) -> dict[str, str]:
    """A sentence for each variant (by its name) on what it does to accuracy; empty without crossed trainings."""
    found = record.accuracy
    if found is None:
        return {}
    made = {effect.variant: sentence(effect, found, record.settings.margin) for effect in found.effects}
    return {**made, **{name: f"breaks training: {text}" for name, text in found.broken.items()}}


def sentence(effect: Effect, found: Accuracy, margin: float) -> str:
    """One variant's verdict with its numbers, losses as positive numbers of points of top-1."""
    loss, low, high = -effect.difference, -effect.high, -effect.low
    if effect.word is None:
        return f"{_signed(effect.difference)} ({_signed(effect.low)} to {_signed(effect.high)}), not at a planned look"
    if effect.word == "costs":
        return f"costs {loss:.2f} points ({low:.2f} to {high:.2f})"
    if effect.word == "costs a little":
        return f"costs a little: {loss:.2f} ({low:.2f} to {high:.2f}), less than the {margin:g} that matter"
    if effect.word == "gains":
        return f"gains {effect.difference:.2f} points ({effect.low:.2f} to {effect.high:.2f})"
    if effect.word == "free":
        least = min(max(-effect.least, 0.0), margin)
        return f"free: at most {least:.2f} points lost (95%)"
    return f"undecided: {_between(effect)}; {_way_out(effect, found, margin)}"


def _between(effect: Effect) -> str:
    ends = (f"{abs(end):.2f} {'lost' if end < 0 else 'gained'}" for end in (effect.low, effect.high))
    return " to ".join(ends)


def _way_out(effect: Effect, found: Accuracy, margin: float) -> str:
    runs = sum(run.failed is None for run in found.runs)
    # The error of an effect is twice a run's deviation over the root of the runs.
    finest = resolution(effect.error / 2, 1)
    more = more_runs(effect, runs, margin, len(found.effects))
    if more is None or runs >= sum(found.runs_at_most):
        way = "" if more is None else f"; in a new folder, runs_at_most={runs + more} would probably decide"
        return f"this workload resolves {finest:.2f} points, not {margin:g}{way}"
    seconds = [run.seconds for run in found.runs if run.seconds is not None]
    minutes = more * sum(seconds) / len(seconds) / 60 if seconds else 0.0
    return f"about {more} more trainings ({minutes:.0f} min) would decide with {CHANCE:.0%} chance"


def _signed(value: float) -> str:
    return f"{value:+.2f}"


def headline(record: Record) -> str | None:
    """How many variants are free, cost or are undecided; None without crossed trainings."""
    found = record.accuracy
    if found is None or not (found.effects or found.broken):
        return None
    words: Counter[str] = Counter(effect.word or "undecided" for effect in found.effects)
    of = len(found.effects) + len(found.broken)
    parts = [f"{sum(words[word] for word in _FREE)} of {of} variant{'s' * (of != 1)} {_are(words)} free"]
    costs = [f"{effect.variant}: {-effect.difference:.2f} points" for effect in found.effects if effect.word == "costs"]
    if costs:
        parts.append(f"{len(costs)} cost{'s' * (len(costs) == 1)} accuracy ({', '.join(costs)})")
    if found.broken:
        parts.append(f"{len(found.broken)} break{'s' * (len(found.broken) == 1)} training ({', '.join(found.broken)})")
    if words["undecided"]:
        parts.append(f"{words['undecided']} undecided")
    return f"{', '.join(parts)}: a loss of {record.settings.margin:g} points matters, on {record.config_name}."


def _are(words: Counter[str]) -> str:
    return "is" if sum(words[word] for word in _FREE) == 1 else "are"


def own_speedup(variant: VariantRecord) -> Speedup | None:
    """How much faster a variant by itself is."""
    return variant.timing.speedup if variant.timing else None


def all_together(record: Record) -> str | None:
    """The sum of the effects of those that were combined."""
    found = record.accuracy
    total = found.total[0] if found is not None and found.total else None
    if total is None:
        return None
    return f"All together: {total[0]:+.2f} ± {2 * total[1]:.2f} points, the sum of the effects."
