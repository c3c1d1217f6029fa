"""`curves.png`: loss, accuracy, learning rate and speed over the epochs, drawn from the records of a run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pycls_fast.train.output_file import atomic_write

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def draw_curves(records: Iterable[Mapping[str, Any]], path: Path, title: str) -> None:
    """Draw the four panels from lines of `metrics.jsonl`; null values are left out."""
    from matplotlib.figure import Figure

    records = list(records)
    train = [record for record in records if record["kind"] == "train"]
    evaluations = [record for record in records if record["kind"] == "eval"]
    # A Figure without pyplot: no global state, no display needed.
    figure = Figure(figsize=(10, 6.4), layout="constrained")
    figure.suptitle(title, fontsize=11, parse_math=False)
    (loss, accuracy), (rate, speed) = figure.subplots(2, 2)
    _line(loss, train, "loss", "training", "-", marker=None)
    for weights in _kinds(evaluations):
        chosen = [record for record in evaluations if (record["split"], record["weights"]) == weights]
        label = f"{weights[0]} ({weights[1]})"
        _line(loss, chosen, "loss", label, "--")
        _line(accuracy, chosen, "top1", f"{label} top-1", "-")
        _line(accuracy, chosen, "top5", f"{label} top-5", ":")
        _line(accuracy, chosen, "class_top1", f"{label} class top-1", "-.")
    _line(rate, train, "lr", "learning rate", "-", marker=None)
    _line(speed, train, "images_per_second", "images/s", "-", marker=None)
    for axes, name in (
        (loss, "loss (nats)"),
        (accuracy, "accuracy (%)"),
        (rate, "learning rate"),
        (speed, "images/s"),
    ):
        axes.set_xlabel("epoch")
        axes.set_ylabel(name)
        axes.grid(alpha=0.3)
        if axes in (loss, accuracy) and axes.lines:
            axes.legend(fontsize=8)
    speed.set_ylim(bottom=0)
    # Rank 0 may be killed while it draws; a half-written picture must not replace a complete one.
    with atomic_write(path) as temporary:
        figure.savefig(temporary, dpi=110, format="png")


def _kinds(records: Iterable[Mapping[str, Any]]) -> list[tuple[str, str]]:
    return sorted({(record["split"], record["weights"]) for record in records})


def _line(
    axes: Axes,
    records: Iterable[Mapping[str, Any]],
    name: str,
    label: str,
    style: str,
    marker: str | None = ".",
) -> None:
    points = [(record["epoch"], record[name]) for record in records if record.get(name) is not None]
    if points:
        axes.plot(*zip(*points, strict=True), style, marker=marker, label=label, linewidth=1.2)
