"""The charts of a comparison; the two runs also differ in line width and marker, not only in colour."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pycls_fast.ledger.charts.drawing import INK, LINE, PALE, Chart, literal, plain_axes

Record = Mapping[str, Any]

_BARS = 20
# A thick pale line and a thin dark one stay distinguishable where they overlap.
_LOOKS: Mapping[str, Mapping[str, Any]] = {
    "a": {"color": PALE, "linewidth": 4.5},
    "b": {"color": INK, "linewidth": 1.3},
}
_SIGNS = {"a": "s", "b": "o"}


def charts(record: Record) -> list[Chart]:
    """All charts for which the record has numbers."""
    made = (draw(record) for draw in (_losses, _accuracy, _classes))
    return [chart for chart in made if chart is not None]


def _losses(record: Record) -> Chart | None:
    figure, axes = plain_axes(3.6)
    for name in ("a", "b"):
        run = record[name]
        curve = run["curve"]
        if curve["epoch"]:
            axes.plot(curve["epoch"], curve["loss"], label=f"{name.upper()}, training", **_LOOKS[name])
        scored = [(each["epoch"], each["loss"]) for each in run["evaluations"] if each["loss"] is not None]
        if scored:
            axes.plot(
                *zip(*scored, strict=True), label=f"{name.upper()}, evaluation", linestyle="--", marker=_SIGNS[name],
                markersize=5, markerfacecolor="white" if name == "a" else INK, color=INK, linewidth=0.9,
            )  # fmt: skip
    if not axes.lines:
        return None
    axes.set_xlabel("epoch", fontsize=9)
    axes.set_ylabel("loss, nats", fontsize=9)
    axes.legend(fontsize=8, frameon=False)
    return Chart("loss", "Loss", "Training loss includes augmentation and label smoothing, if any.", figure)


def _accuracy(record: Record) -> Chart | None:
    figure, axes = plain_axes(3.6)
    for name in ("a", "b"):
        scored = [(each["epoch"], each["top1"]) for each in record[name]["evaluations"]]
        if scored:
            axes.plot(*zip(*scored, strict=True), label=name.upper(), marker=_SIGNS[name], markersize=5, **_LOOKS[name])
    if not axes.lines:
        return None
    axes.set_xlabel("epoch", fontsize=9)
    axes.set_ylabel("top-1, %", fontsize=9)
    axes.legend(fontsize=8, frameon=False)
    return Chart("top1", "Accuracy", "Top-1 of the evaluated weights.", figure)


def _classes(record: Record) -> Chart | None:
    found = record["images"]
    rows = [row for row in found["classes"] if row["difference"]][:_BARS] if found is not None else []
    if not rows:
        return None
    rows.sort(key=lambda row: row["difference"])
    figure, axes = plain_axes(0.9 + 0.27 * len(rows))
    for place, row in enumerate(rows):
        gain = row["difference"] > 0
        axes.barh(
            place, row["difference"], height=0.66, edgecolor=INK, color=INK if gain else "white",
            hatch=None if gain else "////",
        )  # fmt: skip
    axes.axvline(0, color=LINE, linewidth=1)
    axes.set_yticks(range(len(rows)), [literal(row["class"], 22) for row in rows])
    axes.set_xlabel("points of accuracy, B minus A", fontsize=9)
    few = min(row["images"] for row in rows)
    return Chart(
        "classes",
        "Classes",
        f"The classes that changed most. Hatched: worse in B. One image of the smallest is {100 / few:.2g} points.",
        figure,
    )
