"""Charts of speed and memory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pycls_fast.ledger.charts.drawing import INK, LINE, SIGNS, STROKES, Chart, bars, plain_axes, short_name
from pycls_fast.ledger.remarks import has_imagenet_size, of_size
from pycls_fast.ledger.statistics import is_unpaired
from pycls_fast.ledger.table import size_text, state
from pycls_fast.published import IMAGENET_TRAINING_IMAGES

Record = Mapping[str, Any]

# Smaller differences in a process's peak memory are lost among its libraries.
_LEAST_DIFFERENCE = 0.1


def _timed(record: Record) -> list[Record]:
    return [arm for arm in record["arms"] if arm["timing"]]


def _chip(record: Record) -> str:
    """What a rank computes on."""
    return "process" if record["device"] == "cpu" else "chip"


def throughput(record: Record) -> Chart | None:
    """Speed-ups per rank, with intervals."""
    if not _timed(record):
        return None
    first, chip = record["arms"][0], _chip(record)
    several = any(arm["ranks"] > 1 for arm in record["arms"])

    def scaled(arm: Record, key: str) -> float | None:
        found = arm["timing"]["speedup"]
        value = found[key] if found else None
        return None if value is None else float(value * first["ranks"] / arm["ranks"])

    def ratio(arm: Record) -> float:
        return 0.0 if not arm["timing"] else 1.0 if arm is first else scaled(arm, "ratio") or 0.0

    def text(arm: Record) -> str:
        return (f"{ratio(arm):.2f}x" if ratio(arm) else "") if arm["timing"] else state(arm)

    def interval(arm: Record) -> tuple[float, float] | None:
        if arm is first or not arm["timing"]:
            return None
        low, high = scaled(arm, "low"), scaled(arm, "high")
        return None if low is None or high is None else (low, high)

    found = {arm["name"]: arm["timing"]["speedup"] for arm in _timed(record)}
    apart = ", ".join(name for name, values in found.items() if values and is_unpaired(values))
    return Chart(
        "throughput",
        "Relative throughput" + (f" per {chip}" if several else ""),
        "Rate of each rung over the first rung's, paired by round. The thin line is the 95% interval."
        + (f" Rounds from different starts, not paired: {apart}." if apart else ""),
        bars(
            record["arms"], ratio, text, f"images/s{f' per {chip}' if several else ''}, first rung = 1", interval, 1.0
        ),
    )


def ladder(record: Record) -> Chart | None:
    """Images per second of all ranks."""
    if not _timed(record):
        return None

    def rate(arm: Record) -> float:
        return float(arm["timing"]["images_per_second"]) if arm["timing"] else 0.0

    def text(arm: Record) -> str:
        if not arm["timing"]:
            return state(arm)
        ranks = f", {arm['ranks']} ranks" if arm["ranks"] > 1 else ""
        return (f"{rate(arm):,.0f}" if rate(arm) >= 100 else f"{rate(arm):.3g}") + ranks

    return Chart(
        "ladder",
        "Images per second",
        "Training steps on a batch in memory, all ranks together; geometric mean of the rounds.",
        bars(record["arms"], rate, text, "images/s"),
    )


def epochs(record: Record) -> Chart | None:
    """Time per epoch of ImageNet at the measured rate; None for small images."""
    arms = _timed(record)
    if not arms or not has_imagenet_size(record):
        return None
    seconds = [arm["timing"]["imagenet_epoch_seconds"] for arm in arms]
    unit, size = next(
        (u, s) for u, s in (("days", 86400), ("hours", 3600), ("minutes", 60)) if max(seconds) > s or s == 60
    )

    def value(arm: Record) -> float:
        return float(arm["timing"]["imagenet_epoch_seconds"] / size)

    return Chart(
        "epoch",
        "Time per ImageNet-1k epoch",
        f"{IMAGENET_TRAINING_IMAGES:,} images{of_size(record)} at the measured rate, if loading is not the limit.",
        bars(arms, value, lambda arm: f"{value(arm):.3g}", unit),
    )


def memory(record: Record) -> Chart | None:
    """Peak memory; None on a CPU if its libraries hide the differences."""
    arms = [arm for arm in _timed(record) if arm["timing"]["memory_peak_bytes"]]
    if not arms:
        return None
    peaks = [arm["timing"]["memory_peak_bytes"] for arm in arms]
    on_cpu = record["device"] == "cpu"
    if on_cpu and max(peaks) - min(peaks) < _LEAST_DIFFERENCE * max(peaks):
        return None
    where = "of the process, including its libraries," if on_cpu else "of the device"
    return Chart(
        "memory",
        "Peak memory per rank",
        f"Highest memory {where} during training steps.",
        bars(
            arms,
            lambda arm: float(arm["timing"]["memory_peak_bytes"] / 1e9),
            lambda arm: size_text(arm["timing"]["memory_peak_bytes"]),
            "GB",
        ),
    )


def ranks(record: Record) -> Chart | None:
    """Images per second per rank against the number of ranks."""
    arms = _timed(record)
    if len({arm["ranks"] for arm in arms}) < 2:
        return None
    figure, axes = plain_axes(3.4)
    for place, (name, members) in enumerate(_families(arms).items()):
        points = [(arm["ranks"], arm["timing"]["images_per_second_per_rank"]) for arm in members]
        (line,) = axes.plot(*zip(*points, strict=True), color=INK, label=short_name(name), markerfacecolor="white")
        line.set(linestyle=STROKES[place % 4], marker=SIGNS[place % len(SIGNS)])
    ideal = min(arms, key=lambda arm: arm["ranks"])["timing"]["images_per_second_per_rank"]
    axes.axhline(ideal, color=LINE, linewidth=1, zorder=0, label="ideal")
    axes.set_xlabel("ranks", fontsize=9)
    axes.set_ylabel("images/s per rank", fontsize=9)
    axes.set_xticks(sorted({arm["ranks"] for arm in arms}))
    axes.set_ylim(0, 1.05 * axes.get_ylim()[1])
    axes.legend(fontsize=8, frameon=False)
    return Chart(
        "ranks",
        f"Throughput per {_chip(record)} against the number of ranks",
        "The same global batch for all. The grey line is the rate of the fewest ranks, which ideal scaling keeps."
        + (" Processes on a CPU share its cores." if record["device"] == "cpu" else ""),
        figure,
    )


def _families(arms: list[Record]) -> dict[str, list[Record]]:
    """Arms that differ only in ranks ("DDP x2", "DDP x4"), by increasing ranks; all begin with the one-rank arm."""
    families: dict[str, list[Record]] = {}
    for arm in arms:
        families.setdefault(str(arm["name"]).rpartition(" x")[0] or str(arm["name"]), []).append(arm)
    single = [arm for arm in arms if arm["ranks"] == 1][:1]
    several = {name: members for name, members in families.items() if max(arm["ranks"] for arm in members) > 1}
    return {
        name: sorted([*(single if members[0]["ranks"] > 1 else []), *members], key=lambda arm: arm["ranks"])
        for name, members in several.items()
    }
