"""A ledger in words and tables: its title, one line per verdict, the table of its variants and that of its seeds."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence

from pycls_fast.ledger.report import verdicts
from pycls_fast.ledger.report.record import Record, SeedMean, Timing, VariantRecord
from pycls_fast.ledger.report.statistics import Speedup, level_of_tests
from pycls_fast.train.display import human, plain_table, wide_console

# Images below this size say nothing about an epoch of ImageNet at the measured rate.
SMALLEST_IMAGENET_SIZE = 64

Row = dict[str, str]


def title(record: Record) -> str:
    """The experiment, its model and the hardware."""
    found, device = record.model, record.device
    what = f" ({found['model']}, {human(found['parameters'])} parameters, {pixels(record)})" if found else ""
    # Variants that cannot run here say nothing of the hardware.
    most = max((v.ranks for v in record.variants if v.timing or v.training), default=1)
    chips = f"{f'up to {most} x ' if most > 1 else ''}{device}"
    return f"{record.config_name}{what} on {_cpu(record) if device in (None, 'cpu') else chips}"


def pixels(record: Record) -> str:
    """The sizes of the images that were timed."""
    sizes = sorted({timing.image_size for _, timing in record.timed})
    return f"{' or '.join(map(str, sizes)) or (record.model or {}).get('image_size')} pixels"


def _cpu(record: Record) -> str:
    cores = record.environment.get("cpu_count")
    return (record.environment.get("processor") or "unknown processor") + (f", {cores} cores" if cores else "")


def facts(record: Record) -> list[str]:
    """Date, code, machine, and how much was measured."""
    s, git, memory = record.settings, record.environment.get("git"), record.environment.get("memory_bytes")
    commit = f"commit {git['commit'][:10]}{' with changes' if git['changed'] else ''}" if git else "commit unknown"
    size = f", {memory / 1e9:.0f} GB of memory" if memory else ""
    looks = record.looks
    found = [
        f"{time.strftime('%Y-%m-%d', time.gmtime(record.time))}, {commit}",
        f"{_cpu(record)}{size}, device {record.device or 'unknown'}",
        f"{s.mode.replace('_', ' ')}, {_trainings(record)}, {s.rounds} round{'s' * (s.rounds != 1)}",
        *([f"{record.wall_seconds / 60:.0f} min with jobs={s.jobs}"] if record.wall_seconds is not None else []),
        ", ".join(f"{name} {version}" for name, version in record.versions.items()),
    ]
    if len(record.code) > 1:
        found.append(f"measured with {len(record.code)} states of the code")
    if len(looks) > 1:
        found.append(
            f"report {len(looks)} (seeds: {', '.join(map(str, looks))}), level {level_of_tests(len(looks)):.2%}"
        )
    return found


def _trainings(record: Record) -> str:
    seeds, found = record.settings.seeds, record.accuracy
    return f"{len(found.runs)} trainings" if found else f"{seeds} seed{'s' * (seeds != 1)}"


def unfinished(record: Record) -> str | None:
    """How much of the plan is done, if not all of it."""
    found = record.unfinished
    return f"unfinished: {found.done} of {found.of} measurements" if found else None


def headline(record: Record) -> str:
    """The result: how many variants are free, or the fastest one without a shown loss of top-1."""
    crossed = verdicts.headline(record)
    if crossed is not None:
        return crossed
    first = record.reference.name
    faster = [
        (variant, timing.speedup)
        for variant, timing in record.timed[1:]
        if timing.speedup and speed_finding(timing.speedup) == "faster" and variant.status == "measured"
    ]
    good = [(variant, speedup) for variant, speedup in faster if not _loses(variant) and not variant.ended]
    if not good:
        loss = " without a loss of top-1" if faster else ""
        return f"No variant is shown to be faster than '{first}'{loss}."
    variant, speedup = max(good, key=lambda each: each[1].ratio)
    ranks = f" on {variant.ranks} ranks" if variant.ranks != record.reference.ranks else ""
    below = ", on top of those before it" if record.settings.mode == "cumulative" else ""
    cost = verdict(variant, "against_reference") or "accuracy not measured"
    return f"{speed_text(speedup)}{ranks} over '{first}' with '{variant.name}'{below}; top-1: {cost}."


def speed_finding(speedup: Speedup) -> str:
    """Which side of 1 the interval of a speed-up is on: "faster", "slower" or "open"."""
    if speedup.low is None or speedup.high is None or speedup.low <= 1 <= speedup.high:
        return "open"
    return "faster" if speedup.low > 1 else "slower"


def _loses(variant: VariantRecord) -> bool:
    paired = variant.training and variant.training.against_reference
    return bool(paired and paired.verdict.finding in ("loss", "small loss"))


def speed_text(speedup: Speedup | None) -> str:
    """A speed-up with its interval."""
    if speedup is None:
        return ""
    if speedup.low is None or speedup.high is None:
        return f"{speedup.ratio:.2f}x ({'one round' if speedup.rounds == 1 else 'no interval'})"
    return f"{speedup.ratio:.2f}x ({speedup.low:.2f} to {speedup.high:.2f})"


def verdict(variant: VariantRecord, against: str) -> str:
    """The verdict's text, or "" without one."""
    paired = variant.training and getattr(variant.training, against)
    return paired.verdict.text if paired else ""


def state(variant: VariantRecord) -> str:
    """Why a variant has no numbers, in a few words; the full reason is in the notes."""
    if variant.needs:
        return f"needs {variant.needs}"
    return {"cannot run": "cannot run here", "measured": ""}.get(variant.status, variant.status)


def rows(record: Record) -> list[Row]:
    """One row per variant (column -> text), without the columns that are empty for all of them."""
    made = [_row(variant, record) for variant in record.variants]
    filled = [column for column in made[0] if any(row[column] for row in made)]
    return [{column: row[column] or "-" for column in filled} for row in made]


def _row(variant: VariantRecord, record: Record) -> Row:
    timing, training, first = variant.timing, variant.training, variant is record.reference
    compared = "the reference" if first and training else verdict(variant, "against_reference")
    if variant.status != "measured":
        compared = state(variant)
    elif variant.ended:
        compared = f"training ended early: {variant.ended}"
    return {
        "variant": variant.name + (f" ({variant.ranks} ranks)" if variant.ranks > 1 else ""),
        "accuracy": verdicts.sentences(record).get(variant.name, ""),
        **_timing_cells(timing, record, first),
        "gradient error": " / ".join(_error(each.gradient_error) for each in variant.numerics or []),
        "top-1": _mean(training.top1) if training else "",
        "against the first": compared,
        "against the one before": "" if first else verdict(variant, "against_before"),
    }


def _timing_cells(timing: Timing | None, record: Record, first: bool) -> Row:
    columns = (
        "images/s", "speed-up (95%)", "over the one before", "ms a step (p90)", "FLOP/s", "of matmul", "memory",
        "ImageNet epoch",
    )  # fmt: skip
    if timing is None:
        return dict.fromkeys(columns, "")
    flops, share = timing.flops_per_second, timing.share_of_matmul
    cells = (
        f"{timing.images_per_second:,.1f}",
        "1" if first else speed_text(timing.speedup),
        speed_text(timing.speedup_before),
        f"{timing.step_seconds_p50 * 1e3:.1f} ({timing.step_seconds_p90 * 1e3:.1f})",
        "" if flops is None else human(flops),
        "" if share is None else f"{share:.0%}",
        _memory(timing.memory_peak_bytes, None if first else record.reference.timing),
        duration(timing.imagenet_epoch_seconds) if has_imagenet_size(record) else "",
    )
    return dict(zip(columns, cells, strict=True))


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


def has_imagenet_size(record: Record) -> bool:
    """Whether some variant's images are large enough for a time per epoch of ImageNet to mean something."""
    return any(timing.image_size >= SMALLEST_IMAGENET_SIZE for _, timing in record.timed)


def _mean(values: SeedMean | None) -> str:
    if not values:
        return ""
    return f"{values.mean:.2f}" + (f" ± {values.half:.2f}" if values.half is not None else "")


def _error(value: float | str | None) -> str:
    return "-" if value is None else value if isinstance(value, str) else f"{value:.1e}"


def duration(seconds: float) -> str:
    """A readable time in seconds, minutes, hours or days."""
    for unit, size in (("d", 86400.0), ("h", 3600.0), ("min", 60.0)):
        if seconds >= 2 * size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.1f} s"


def remarks(record: Record) -> list[str]:
    """What the columns are, and what they cannot say."""
    first, steps, margin = record.reference.name, record.settings.numerics_steps, record.settings.margin
    live = "tensors alive in a step (of compiled variants and several ranks: of the process)"
    where = live if record.device == "cpu" else "device"
    together = verdicts.all_together(record)
    found = [
        *([together] if together else []),
        f"images/s and speed-up: geometric means of the rounds that are paired with those of '{first}', all ranks "
        f"together. of matmul: share of what one large matrix product reaches here. memory: peak of the {where}, per "
        "rank; in brackets the difference from the first.",
    ]
    if steps is not None:
        found.append(f"gradient error: relative, against float64, before training and after {steps} steps.")
    counts = [run.count for _, training in record.trained for run in training.runs]
    counts += [run.count for run in (record.accuracy.runs if record.accuracy else []) if run.count]
    if counts and margin < (image := 100 / min(counts)):
        found.append(
            f"The margin of {margin:g} points is smaller than one of the {min(counts):,} validation images "
            f"({image:.2g} points); use margin={math.ceil(10 * image) / 10:g}, or more images."
        )
    return found


def seed_rows(record: Record) -> list[Row]:
    """One row per variant and seed; images are lost and won against the first variant's run of that seed."""
    made = []
    for variant, training in record.trained:
        pairs = training.against_reference.images if training.against_reference else {}
        for run in training.runs:
            pair = pairs.get(run.seed)
            row = {
                "variant": variant.name,
                "seed": f"{run.seed}",
                "top-1": f"{run.top1:.2f}",
                "top-5": f"{run.top5:.2f}",
            }
            row["difference"] = "-" if pair is None else f"{pair.difference:+.2f}"
            row["images lost"] = "-" if pair is None else f"{pair.only_first}"
            row["images won"] = "-" if pair is None else f"{pair.only_second}"
            row["McNemar p"] = "-" if pair is None else f"{pair.p_value:.2g}"
            made.append(row)
    return made


def print_table(record: Record) -> None:
    """Print the table on the terminal."""
    made = rows(record)
    numbers: Sequence[str] = [column for column in made[0] if not column.startswith(("variant", "against"))]
    wide_console().print(plain_table(list(made[0]), [list(row.values()) for row in made], right=numbers))
