"""A ledger in words and tables: its title and headline, a sentence per variant, the table."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping
from typing import Literal

from pycls_fast.config.ladder import LadderSettings
from pycls_fast.ledger.report.effects import ALPHA_INTERPLAY, CHANCE, LOOKS, Effect, more_runs, resolution
from pycls_fast.ledger.report.record import Accuracy, Record, Timing, VariantRecord
from pycls_fast.train.display import human, plain_table, wide_console

# From so many times the variance of independent images on, most of it is how good a training is.
_QUALITY = 2.0

Row = dict[str, str]
Kind = Literal["good", "bad", "open"]


def title(record: Record) -> str:
    found, device = record.model, record.device
    pixels = " or ".join(map(str, sorted({timing.image_size for _, timing in record.timed})))
    what = f" ({found.model}, {human(found.parameters)} parameters, {pixels} pixels)" if found else ""
    # Variants that cannot run here say nothing of the hardware.
    most = max((variant.ranks for variant, _ in record.timed), default=1)
    chips = f"{f'up to {most} x ' if most > 1 else ''}{device}"
    return f"{record.config_name}{what} on {_cpu(record) if device in (None, 'cpu') else chips}"


def _cpu(record: Record) -> str:
    cores = record.environment.cpu_count
    return (record.environment.processor or "unknown processor") + (f", {cores} cores" if cores else "")


def facts(record: Record) -> list[str]:
    """Date, code, machine, and how much was measured."""
    s, git, memory = record.settings, record.environment.git, record.environment.memory_bytes
    commit = f"commit {git.commit[:10]}{' with changes' if git.changed else ''}" if git else "commit unknown"
    size = f", {memory / 1e9:.0f} GB of memory" if memory else ""
    trainings = len(record.accuracy.runs) if record.accuracy else 0
    took, states = record.wall_seconds, len(record.code)
    found = [
        f"{time.strftime('%Y-%m-%d', time.gmtime(record.time))}, {commit}",
        f"{_cpu(record)}{size}, device {record.device or 'unknown'}",
        f"{s.mode}, {trainings} trainings, {s.rounds} round{'s' * (s.rounds != 1)}",
        "" if took is None else f"{took / 60:.0f} min with jobs={s.jobs}",
        ", ".join(f"{name} {version}" for name, version in record.versions.items()),
        f"measured with {states} states of the code" if states > 1 else "",
    ]
    return list(filter(None, found))


def headline(record: Record) -> str:
    """How many variants are free, cost accuracy or are undecided; without trainings, the fastest one."""
    found = record.accuracy
    if found is None or not (found.effects or found.broken):
        return _fastest(record)
    words: Counter[str | None] = Counter(effect.word for effect in found.effects)
    of, free = len(found.effects) + len(found.broken), sum(kind(effect) == "good" for effect in found.effects)
    parts = [f"{free} of {of} variant{'s' * (of != 1)} {'is' if 1 in (free, of) else 'are'} free"]
    costs = [f"{effect.variant}: {-effect.difference:.2f} points" for effect in found.effects if effect.word == "costs"]
    if costs:
        parts.append(f"{len(costs)} cost{'s' * (len(costs) == 1)} accuracy ({', '.join(costs)})")
    if found.broken:
        parts.append(f"{len(found.broken)} break{'s' * (len(found.broken) == 1)} training ({', '.join(found.broken)})")
    missing = sum(variant.status != "measured" for variant in record.variants)
    rest = {"undecided": words["undecided"], "not at a planned look": words[None], "more did not run here": missing}
    parts += [f"{count} {what}" for what, count in rest.items() if count]
    return f"{', '.join(parts)}: a loss of {record.settings.margin:g} points matters, on {record.config_name}."


def _fastest(record: Record) -> str:
    first = record.reference.name
    faster = [
        (variant, timing.speedup)
        for variant, timing in record.timed[1:]
        if variant.status == "measured" and timing.speedup and (timing.speedup.low or 0.0) > 1
    ]
    if not faster:
        return f"No variant is clearly faster than '{first}'; accuracy not measured."
    variant, speedup = max(faster, key=lambda each: each[1].ratio)
    ranks = f" on {variant.ranks} ranks" if variant.ranks != record.reference.ranks else ""
    below = ", on top of those before it" if record.settings.mode == "cumulative" else ""
    return f"{speedup}{ranks} over '{first}' with '{variant.name}'{below}; accuracy not measured."


def verdicts(record: Record) -> dict[str, tuple[Kind, str]]:
    """For each trained variant, by its name, whether it costs accuracy, and the sentence."""
    found = record.accuracy
    if found is None:
        return {}
    made = {effect.variant: (kind(effect), sentence(effect, found, record.settings)) for effect in found.effects}
    return {**made, **{name: ("bad", f"breaks training: {text}") for name, text in found.broken.items()}}


def kind(effect: Effect) -> Kind:
    """Whether it costs accuracy; "open" without a verdict."""
    if effect.word in (None, "undecided"):
        return "open"
    return "bad" if effect.word == "costs" else "good"


_SENTENCES: Mapping[str | None, str] = {
    "identical": "identical: every prediction is the same",
    "costs": "costs {loss:.2f} points ({least:.2f} to {most:.2f})",
    "costs a little": "costs a little: {loss:.2f} ({least:.2f} to {most:.2f}), less than the {margin:g} that matter",
    "gains": "gains {effect.difference:.2f} points ({effect.low:.2f} to {effect.high:.2f})",
    "free": "free: at most {bound:.2f} points lost (95%)",
    None: "{effect.difference:+.2f} ({ends}), not at a planned look",
}


def sentence(effect: Effect, found: Accuracy, settings: LadderSettings) -> str:
    """One variant's verdict with its numbers, losses as positive numbers of points of top-1."""
    ends = " to ".join(f"{abs(end):.2f} {'lost' if end < 0 else 'gained'}" for end in (effect.low, effect.high))
    if effect.word == "undecided":
        return f"undecided: {ends}; {_way_out(effect, found, settings)}"
    loss, least, most, margin = -effect.difference, -effect.high, -effect.low, settings.margin
    bound = min(max(-effect.least, 0.0), margin)
    values = {"effect": effect, "loss": loss, "least": least, "most": most, "margin": margin, "bound": bound}
    return _SENTENCES[effect.word].format(**values, ends=ends)


def _way_out(effect: Effect, found: Accuracy, settings: LadderSettings) -> str:
    margin = settings.margin
    look = [look for look in found.looks if effect in look.effects][-1]
    finest = resolution(effect.error)
    more = more_runs(effect, look, margin, strict=settings.strict)
    if more is None or look.place == len(LOOKS) - 1:
        way = "" if more is None else f"; in a new folder, runs_at_most={look.runs + more} would probably decide"
        return f"this workload resolves {finest:.2f} points, not {margin:g}{way}"
    seconds = [run.seconds for run in found.runs if run.seconds is not None]
    minutes = more * sum(seconds) / len(seconds) / 60 / settings.jobs if seconds else 0.0
    return f"about {more} more trainings ({minutes:.0f} min) would decide with {CHANCE:.0%} chance"


def state(variant: VariantRecord) -> str:
    """Why a variant has no numbers, in a few words; the full reason is in the notes."""
    if variant.needs:
        return f"needs {variant.needs}"
    return {"cannot run": "cannot run here", "measured": ""}.get(variant.status, variant.status)


def rows(record: Record) -> list[Row]:
    """One row per variant (column -> text), without the columns that are empty for all of them."""
    accuracy = {name: text for name, (_, text) in verdicts(record).items()}
    made = [
        {
            "variant": variant.name + (f" ({variant.ranks} ranks)" if variant.ranks > 1 else ""),
            "accuracy": state(variant) or accuracy.get(variant.name, ""),
            **_timing_cells(variant, record),
            "gradient error": " / ".join(_error(each.gradient_error) for each in variant.numerics or []),
        }
        for variant in record.variants
    ]
    columns = dict.fromkeys(column for row in made for column in row)
    filled = [column for column in columns if any(row.get(column) for row in made)]
    return [{column: row.get(column) or "-" for column in filled} for row in made]


def _timing_cells(variant: VariantRecord, record: Record) -> Row:
    timing, first = variant.timing, variant is record.reference
    if timing is None:
        return {}
    flops, share = timing.flops_per_second, timing.share_of_matmul
    return {
        "images/s": f"{timing.images_per_second:,.1f}",
        "speed-up (95%)": "1" if first else str(timing.speedup or ""),
        "over the one before": "" if variant.before == record.reference.name else str(timing.speedup_before or ""),
        "ms a step (p90)": f"{timing.step_seconds_p50 * 1e3:.1f} ({timing.step_seconds_p90 * 1e3:.1f})",
        "FLOP/s": "" if flops is None else human(flops),
        "of matmul": "" if share is None else f"{share:.0%}",
        "memory": _memory(timing.memory_peak_bytes, None if first else record.reference.timing),
    }


def _memory(peak: int | None, reference: Timing | None) -> str:
    """Peak memory, and in brackets the difference from the first variant's."""
    if peak is None:
        return ""
    least = reference and reference.memory_peak_bytes
    sign = "-" if least and peak < least else "+"
    return size_text(peak) + (f" ({sign}{size_text(abs(peak - least))})" if least else "")


def size_text(count: float) -> str:
    """A number of bytes in MB, from 10 GB on in GB; peaks of memory are not known more precisely."""
    return f"{count / 1e9:,.1f} GB" if abs(count) >= 1e10 else f"{count / 1e6:,.0f} MB"


def _error(value: float | str | None) -> str:
    return "-" if value is None else value if isinstance(value, str) else f"{value:.1e}"


def accuracy_remarks(record: Record) -> list[str]:
    """What holds for all verdicts, and how far; nothing without trainings."""
    found = record.accuracy
    if found is None or not found.effects:
        return []
    made = [f"The verdicts hold for this workload, {record.config_name}; each on average over the others on and off."]
    overall = found.fit
    if overall is not None and overall.together is not None:
        total, without = overall.together, "".join(f", without {name}" for name in overall.together.without)
        made.append(
            f"All together{without}: {total.difference:+.2f} points ({total.low:+.2f} to {total.high:+.2f}), the sum "
            "of the effects."
        )
    if overall is not None and overall.interplay is not None and overall.interplay.p_value <= ALPHA_INTERPLAY:
        two = overall.interplay
        made.append(
            f"{' and '.join(two.names)} act on each other: {two.difference:+.2f} points together, beyond their sum (p "
            f"{two.p_value:.1g}); the effect of each is not what it does alone."
        )
    if overall is not None and overall.variance_ratio is not None:
        helps = "would" if overall.variance_ratio < _QUALITY else "would hardly"
        made.append(
            f"The variance of a training is {overall.variance_ratio:.1f} times that of images that err independently: "
            f"more test images {helps} help."
        )
    failed = sum(run.failed is not None for run in found.runs)
    if failed:
        made.append(f"{failed} training{'s' * (failed > 1)} failed and {'are' if failed > 1 else 'is'} left out.")
    return made


def remarks(record: Record) -> list[str]:
    """What the columns are, and what they cannot say."""
    first, steps = record.reference.name, record.settings.numerics_steps
    live = "tensors alive in a step (not known of compiled variants and several ranks)"
    where = live if record.device == "cpu" else "device"
    made = [
        *accuracy_remarks(record),
        f"images/s and speed-up: geometric means of the rounds that are paired with those of '{first}', all ranks "
        f"together. of matmul: share of what one large matrix product reaches here. memory: peak of the {where}, per "
        "rank; in brackets the difference from the first.",
    ]
    if steps is not None:
        made.append(f"gradient error: relative, against float64, before training and after {steps} steps.")
    return made


def print_table(record: Record) -> None:
    """Print the table on the terminal, then the headline, a sentence per variant, and remarks on them."""
    made, console = rows(record), wide_console()
    for row in made:
        row.pop("accuracy", None)
    numbers = [column for column in made[0] if column != "variant"]
    console.print(plain_table(made, right=numbers))
    colors: dict[Kind, str] = {"good": "green", "bad": "red", "open": "bright_black"}
    console.tell(f"\n{headline(record)}")
    found = verdicts(record)
    for variant in record.variants:
        which, verdict = found.get(variant.name, ("open", state(variant)))
        speed = str((variant.timing and variant.timing.speedup_before) or "")
        if verdict:
            console.tell(f"{variant.name}: {'; '.join(filter(None, (speed, verdict)))}", colors[which])
    for line in accuracy_remarks(record):
        console.tell(line)
