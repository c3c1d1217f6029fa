"""The charts of a ledger. Arms also differ in position, marker and line style, so that the charts print in grey."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from pycls_fast.ledger.gradients import SMALLEST_SUBNORMAL
from pycls_fast.ledger.statistics import is_unpaired
from pycls_fast.ledger.table import of_size, state
from pycls_fast.published import IMAGENET_TRAINING_IMAGES
from pycls_fast.train.display import human

Record = Mapping[str, Any]

INK, PALE, LINE = "#17375e", "#a9bfd8", "#8a8a8a"
STROKES = ("-", "--", "-.", ":")
_SIGNS = "osD^vP*X<>"
# Inches; on a phone 5 inches shrink to 3.5, and the text stays readable.
_WIDTH = 5.4


@dataclass(frozen=True)
class Chart:
    """A figure with its file name, title and caption."""

    name: str
    title: str
    caption: str
    figure: Figure


def charts(record: Record) -> list[Chart]:
    """All charts for which the record has numbers."""
    made = (
        draw(record) for draw in (_throughput, _accuracy, _ladder, _ranks, _epochs, _memory, _loss, _errors, _gradients)
    )
    return [chart for chart in made if chart is not None]


def _timed(record: Record) -> list[Record]:
    return [arm for arm in record["arms"] if arm["timing"]]


def plain_axes(rows: float) -> tuple[Figure, Axes]:
    """A figure of this height in inches with one plot, in the style of all charts."""
    figure = Figure(figsize=(_WIDTH, rows), layout="constrained")
    axes = figure.subplots()
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelsize=9)
    return figure, axes


def _bars(
    arms: Sequence[Record],
    value: Callable[[Record], float],
    text: Callable[[Record], str],
    label: str,
    interval: Callable[[Record], tuple[float, float] | None] = lambda arm: None,
    line: float | None = None,
) -> Figure:
    """A horizontal bar per arm, from top to bottom, with its number at the end; the reference is hatched."""
    figure, axes = plain_axes(0.9 + 0.36 * len(arms))
    values = [value(arm) for arm in arms]
    for place, (arm, length) in enumerate(zip(arms, values, strict=True)):
        first = arm["before"] is None
        axes.barh(
            place, length, color=PALE if first else INK, hatch="//" if first else None, edgecolor=INK, height=0.66
        )
        ends = interval(arm)
        if ends is not None:
            axes.plot(ends, [place, place], color="black", linewidth=3.2, solid_capstyle="butt")
            axes.plot(ends, [place, place], color="white", linewidth=1.2, solid_capstyle="butt")
        end = max(length, ends[1] if ends else 0)
        axes.annotate(text(arm), (end, place), xytext=(4, 0), textcoords="offset points", va="center", fontsize=9)
    if line is not None:
        axes.axvline(line, color=LINE, linewidth=1, linestyle="--", zorder=0)
    axes.set_yticks(range(len(arms)), [_name(arm["name"]) for arm in arms])
    axes.invert_yaxis()
    # Leave room for the number after the longest bar.
    axes.set_xlim(0, max([*values, *(end for arm in arms for end in interval(arm) or ())]) * 1.22)
    axes.set_xlabel(label, fontsize=9)
    return figure


def literal(text: str, most: int) -> str:
    """A name cut to `most` characters and escaped, so that matplotlib draws it as it is.

    Matplotlib reads text between two dollar signs as mathematics, and leaves names that begin with an underscore out
    of legends.
    """
    cut = text if len(text) <= most else f"{text[: most - 1]}…"
    return f"{' ' if cut.startswith('_') else ''}{cut}".replace("$", r"\$")


def _name(text: str) -> str:
    return literal(text, 26)


def _legend(figure: Figure, axes: Axes, entries: int, **place: Any) -> None:
    """Put a short legend where `place` says, and a long one below the plot, in a taller figure."""
    if entries <= len(_SIGNS):
        axes.legend(fontsize=7.5, frameon=False, **place)
        return
    figure.set_figheight(figure.get_figheight() + 0.17 * math.ceil(entries / 2))
    figure.legend(fontsize=7.5, frameon=False, loc="outside lower center", ncols=2)


def _throughput(record: Record) -> Chart | None:
    if not _timed(record):
        return None
    first = record["arms"][0]

    def scaled(arm: Record, key: str) -> float | None:
        found = arm["timing"]["speedup"]
        value = found[key] if found else None
        return None if value is None else float(value * first["ranks"] / arm["ranks"])

    def ratio(arm: Record) -> float:
        return 0.0 if not arm["timing"] else 1.0 if arm is first else scaled(arm, "ratio") or 0.0

    def text(arm: Record) -> str:
        return f"{ratio(arm):.2f}x" if arm["timing"] else state(arm)

    def interval(arm: Record) -> tuple[float, float] | None:
        if arm is first or not arm["timing"]:
            return None
        low, high = scaled(arm, "low"), scaled(arm, "high")
        return None if low is None or high is None else (low, high)

    found = {arm["name"]: arm["timing"]["speedup"] for arm in _timed(record)}
    apart = ", ".join(name for name, values in found.items() if values and is_unpaired(values))
    return Chart(
        "throughput",
        "Relative throughput per chip",
        "Rate of each rung over the first rung's, paired by round. The thin line is the 95% interval."
        + (f" Rounds from different starts, not paired: {apart}." if apart else ""),
        _bars(record["arms"], ratio, text, "images/s per chip, first rung = 1", interval, 1.0),
    )


def _ladder(record: Record) -> Chart | None:
    if not _timed(record):
        return None

    def rate(arm: Record) -> float:
        return float(arm["timing"]["images_per_second"]) if arm["timing"] else 0.0

    def text(arm: Record) -> str:
        if not arm["timing"]:
            return state(arm)
        return f"{rate(arm):,.0f}" if rate(arm) >= 100 else f"{rate(arm):.3g}"

    return Chart(
        "ladder",
        "Images per second",
        "Training steps on a batch in memory, all ranks together; median over all steps.",
        _bars(record["arms"], rate, text, "images/s"),
    )


def _epochs(record: Record) -> Chart | None:
    arms = _timed(record)
    if not arms:
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
        _bars(arms, value, lambda arm: f"{value(arm):.3g}", unit),
    )


def _memory(record: Record) -> Chart | None:
    arms = [arm for arm in _timed(record) if arm["timing"]["memory_peak_bytes"]]
    if not arms:
        return None

    def value(arm: Record) -> float:
        return float(arm["timing"]["memory_peak_bytes"] / 1e9)

    where = "of the device" if record["device"] != "cpu" else "of the process, including its libraries"
    return Chart(
        "memory",
        "Peak memory per rank",
        f"Highest memory {where} during training steps.",
        _bars(arms, value, lambda arm: human(arm["timing"]["memory_peak_bytes"], "B"), "GB"),
    )


def _ranks(record: Record) -> Chart | None:
    arms = _timed(record)
    if len({arm["ranks"] for arm in arms}) < 2:
        return None
    figure, axes = plain_axes(3.4)
    families: dict[str, list[Record]] = {}
    for arm in arms:
        # "DDP x2" and "DDP x4" are one family.
        families.setdefault(str(arm["name"]).rpartition(" x")[0] or str(arm["name"]), []).append(arm)
    for place, (name, members) in enumerate(families.items()):
        members = sorted(members, key=lambda arm: arm["ranks"])
        points = [(arm["ranks"], arm["timing"]["images_per_second_per_rank"]) for arm in members]
        (line,) = axes.plot(*zip(*points, strict=True), color=INK, label=_name(name), markerfacecolor="white")
        line.set(linestyle=STROKES[place % 4], marker=_SIGNS[place % len(_SIGNS)])
    axes.set_xlabel("ranks", fontsize=9)
    axes.set_ylabel("images/s per rank", fontsize=9)
    axes.set_xticks(sorted({arm["ranks"] for arm in arms}))
    axes.set_ylim(bottom=0)
    axes.legend(fontsize=8, frameon=False)
    return Chart("ranks", "Throughput per chip against the number of ranks", "The same global batch for all.", figure)


def _accuracy(record: Record) -> Chart | None:
    arms = [arm for arm in _timed(record) if arm["training"] and arm["training"]["top1"]]
    if len(arms) < 2:
        return None
    figure, axes = plain_axes(3.9)
    rates = [arm["timing"]["images_per_second"] for arm in arms]
    scores = [arm["training"]["top1"]["mean"] for arm in arms]
    front = sorted(
        (rate, score)
        for rate, score in zip(rates, scores, strict=True)
        if not any((r > rate and s >= score) or (r >= rate and s > score) for r, s in zip(rates, scores, strict=True))
    )
    axes.step(*zip(*front, strict=True), where="pre", color=LINE, linewidth=1, linestyle="--", zorder=0)
    # With more arms than markers, arms are numbered.
    many = len(arms) > len(_SIGNS)
    for place, (arm, rate, score) in enumerate(zip(arms, rates, scores, strict=True)):
        half = arm["training"]["top1"]["half"]
        fill = INK if (rate, score) in front else "white"
        if arm["before"] is None:
            fill = PALE
        axes.errorbar(
            rate, score, yerr=half, color=INK, ecolor=PALE if many else INK, capsize=3, elinewidth=1, linestyle="none",
            marker=f"${place}$" if many else _SIGNS[place], markersize=9 if many else 7,
            markeredgewidth=0.3 if many else 1, markerfacecolor=INK if many else fill, label=_name(arm["name"]),
        )  # fmt: skip
    axes.set_xlabel("images/s", fontsize=9)
    axes.set_ylabel("top-1, %", fontsize=9)
    _legend(figure, axes, len(arms), loc="upper left", bbox_to_anchor=(1.0, 1.0))
    return Chart(
        "accuracy",
        "Accuracy against throughput",
        f"Mean over the seeds with its 95% interval. {'On' if many else 'Filled, on'} the dashed front: nothing is "
        "both faster and better. The table says which differences are significant.",
        figure,
    )


def _loss(record: Record) -> Chart | None:
    arms = [arm for arm in record["arms"] if arm["training"] and arm["training"]["runs"]]
    if not arms:
        return None
    figure, axes = plain_axes(3.6)
    for place, arm in enumerate(arms):
        epochs, losses = _mean_curve([run["curve"] for run in arm["training"]["runs"]])
        points = len(epochs)
        shade = PALE if arm["before"] is None else str(0.05 + 0.6 * place / max(len(arms), 1))
        axes.plot(
            epochs, losses, label=_name(arm["name"]), color=shade, linestyle=STROKES[place % 4],
            linewidth=4 if arm["before"] is None else 1.3, marker=_SIGNS[place % len(_SIGNS)], markersize=4,
            markevery=(place * points // (8 * len(arms)), max(points // 8, 1)),
        )  # fmt: skip
    axes.set_xlabel("epoch", fontsize=9)
    axes.set_ylabel("training loss, nats", fontsize=9)
    _legend(figure, axes, len(arms))
    return Chart("loss", "Loss curves", "Mean over the seeds; the thick line is the first rung.", figure)


def _mean_curve(curves: Sequence[Record]) -> tuple[np.ndarray, np.ndarray]:
    """The mean loss over the runs at the epochs that all of them cover; empty if they share none.

    Runs of one arm may have different epochs and numbers of points, as each curve was thinned by itself.
    """
    known = [curve for curve in curves if curve["epoch"]]
    if not known:
        return np.empty(0), np.empty(0)
    start, end = max(curve["epoch"][0] for curve in known), min(curve["epoch"][-1] for curve in known)
    epochs = np.array([epoch for epoch in known[0]["epoch"] if start <= epoch <= end])
    return epochs, np.mean([np.interp(epochs, curve["epoch"], curve["loss"]) for curve in known], axis=0)


def _errors(record: Record) -> Chart | None:
    arms = [arm for arm in record["arms"] if arm["numerics"]]
    if not arms:
        return None
    figure, axes = plain_axes(0.9 + 0.36 * len(arms))
    for place, arm in enumerate(arms):
        for errors, sign in zip(arm["numerics"], "o^", strict=False):
            for key, fill in (("gradient_error", INK), ("logit_error", "white")):
                value = errors[key]
                if isinstance(value, float) and value > 0:
                    axes.plot(
                        value, place, marker=sign, color=INK, markerfacecolor=fill, markersize=7, linestyle="none"
                    )
    for sign, fill, label in (
        ("o", INK, "gradients, before training"),
        ("o", "white", "logits, before training"),
        ("^", INK, "gradients, after training steps"),
        ("^", "white", "logits, after training steps"),
    ):
        axes.plot([], [], marker=sign, color=INK, markerfacecolor=fill, linestyle="none", label=label)
    axes.set_xscale("log")
    axes.set_yticks(range(len(arms)), [_name(arm["name"]) for arm in arms])
    axes.invert_yaxis()
    axes.grid(axis="x", alpha=0.3)
    axes.set_xlabel("relative error against float64", fontsize=9)
    figure.legend(fontsize=7.5, frameon=False, loc="outside upper center", ncols=2)
    return Chart(
        "errors", "Rounding", "Norm of the difference from float64 with the same weights, over float64's norm.", figure
    )


def _gradients(record: Record) -> Chart | None:
    gradients = record["gradients"]
    if not gradients:
        return None
    total = gradients["total"]
    exponents = {int(key): count for key, count in total["exponents"].items()}
    some = max(sum(exponents.values()), 1)
    figure, axes = plain_axes(3.2)
    used = (*exponents, SMALLEST_SUBNORMAL)
    places = range(min(used) - 1, max(used) + 2)
    # Values above half the smallest number round up to it.
    lost = [place < SMALLEST_SUBNORMAL - 1 for place in places]
    heights = [100 * exponents.get(place, 0) / some for place in places]
    for flag, color, hatch, label in ((True, "white", "////", "zero in float16"), (False, INK, None, "kept")):
        chosen = [(p + 0.5, h) for p, h, is_lost in zip(places, heights, lost, strict=True) if is_lost == flag]
        if chosen:
            at, high = zip(*chosen, strict=True)
            axes.bar(at, high, width=0.9, color=color, hatch=hatch, edgecolor=INK, label=label)
    axes.set_xlabel("log₂ |gradient|", fontsize=9)
    axes.set_ylabel("% of gradients", fontsize=9)
    axes.legend(fontsize=8, frameon=False)
    return Chart(
        "gradients",
        "Gradients of the first rung",
        f"Zero in float16: {100 * total['below_subnormal']:.2g}%, with the loss times {gradients['loss_scale']:g}: "
        f"{100 * total['below_subnormal_scaled']:.2g}%. Updates that float16 weights lose without float32 masters: "
        f"{100 * total['updates_lost_float16']:.1f}%, bfloat16 weights: {100 * total['updates_lost_bfloat16']:.1f}%.",
        figure,
    )
