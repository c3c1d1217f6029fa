"""Charts of rounding errors and of float16's limits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pycls_fast.ledger.charts.drawing import INK, Chart, plain_axes, short_name
from pycls_fast.ledger.gradient_counts import SMALLEST_SUBNORMAL

Record = Mapping[str, Any]


def errors(record: Record) -> Chart | None:
    """Errors against float64 before and after some training steps."""
    arms = [arm for arm in record["arms"] if arm["numerics"]]
    if not arms:
        return None
    figure, axes = plain_axes(0.9 + 0.36 * len(arms))
    shown: dict[tuple[str, str], str] = {}
    for place, arm in enumerate(arms):
        for found, sign, when in zip(arm["numerics"], "o^", ("before training", "after training steps"), strict=False):
            for key, fill, what in (("gradient_error", INK, "gradients"), ("logit_error", "white", "logits")):
                value = found[key]
                if isinstance(value, float) and value > 0:
                    shown[sign, fill] = f"{what}, {when}"
                    axes.plot(
                        value, place, marker=sign, color=INK, markerfacecolor=fill, markersize=7, linestyle="none"
                    )
    for (sign, fill), label in sorted(shown.items(), key=lambda each: each[1].endswith("steps")):
        axes.plot([], [], marker=sign, color=INK, markerfacecolor=fill, linestyle="none", label=label)
    axes.set_xscale("log")
    axes.set_yticks(range(len(arms)), [short_name(arm["name"]) for arm in arms])
    axes.invert_yaxis()
    axes.grid(axis="x", alpha=0.3)
    axes.set_xlabel("relative error against float64", fontsize=9)
    if shown:
        figure.legend(fontsize=7.5, frameon=False, loc="outside upper center", ncols=2)
    return Chart(
        "errors", "Rounding", "Norm of the difference from float64 with the same weights, over float64's norm.", figure
    )


def gradients(record: Record) -> Chart | None:
    """Histogram of the first rung's gradients."""
    counted = record["gradients"]
    if not counted:
        return None
    total = counted["total"]
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
        f"Zero in float16: {100 * total['below_subnormal']:.2g}%, with the loss times {counted['loss_scale']:g}: "
        f"{100 * total['below_subnormal_scaled']:.2g}%. Updates that float16 weights lose without float32 masters: "
        f"{100 * total['updates_lost_float16']:.1f}%, bfloat16 weights: {100 * total['updates_lost_bfloat16']:.1f}%.",
        figure,
    )
