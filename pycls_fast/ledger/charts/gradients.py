"""The picture of a training's gradients beside the limits of float16."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from pycls_fast.ledger.gradient_counts import SMALLEST_NORMAL, SMALLEST_SUBNORMAL


def draw(record: Mapping[str, Any], file: Path) -> None:
    """Draw the histogram over all layers, one row per layer, and the lost updates per layer, as a PNG."""
    layers: Mapping[str, Mapping[str, Any]] = record["layers"]
    total = record["total"]
    used = [int(exponent) for exponent in total["exponents"]] or [0]
    low, high = min(*used, SMALLEST_SUBNORMAL) - 1, max(*used, SMALLEST_NORMAL) + 1
    columns = range(low, high + 1)
    figure = Figure(figsize=(13, 4.5 + 0.2 * len(layers)), layout="constrained")
    FigureCanvasAgg(figure)
    top, bottom = figure.subplots(2, 1, height_ratios=[4, 0.5 + 0.2 * len(layers)])
    some = max(sum(total["exponents"].values()), 1)
    heights = [100 * total["exponents"].get(str(exponent), 0) / some for exponent in columns]
    top.bar([exponent + 0.5 for exponent in columns], heights, width=0.9, color="tab:blue")
    scale_exponent = math.log2(record["loss_scale"])
    for exponent, text, color in (
        (SMALLEST_SUBNORMAL - 1, "0 in float16", "tab:red"),
        (SMALLEST_NORMAL, "subnormal in float16", "tab:orange"),
        (SMALLEST_SUBNORMAL - 1 - scale_exponent, f"0 in float16, loss × {record['loss_scale']:g}", "tab:purple"),
    ):
        for axes in (top, bottom):
            axes.axvline(exponent, color=color, linestyle="--", linewidth=1)
        top.plot([], [], color=color, linestyle="--", label=f"left of here: {text}")
    top.set(xlim=(low, high + 1), ylabel="% of gradients", xlabel="log₂ |gradient|")
    top.set_title(
        f"{record['config_name']}: {record['steps']} steps after {record['warmup_steps']}; zero in float16: "
        f"{100 * total['below_subnormal']:.2g}%, with scaling {100 * total['below_subnormal_scaled']:.2g}%; updates "
        f"lost without master: {100 * total['updates_lost_float16']:.1f}%",
        fontsize=10,
    )
    top.legend(fontsize=8)
    rows = []
    for layer in layers.values():
        count = max(sum(layer["exponents"].values()), 1)
        rows.append([100 * layer["exponents"].get(str(exponent), 0) / count for exponent in columns])
    image = bottom.imshow(
        rows, aspect="auto", cmap="viridis", extent=(low, high + 1, len(layers) - 0.5, -0.5), interpolation="nearest"
    )
    labels = [f"{name}  (lost: {100 * layer['updates_lost_float16']:.0f}%)" for name, layer in layers.items()]
    bottom.set_yticks(range(len(layers)), labels, fontsize=7)
    bottom.set(xlabel="log₂ |gradient|", title="by layer, with updates lost in float16 without a master")
    figure.colorbar(image, ax=bottom, label="% of the layer's gradients")
    figure.savefig(file, dpi=110)
