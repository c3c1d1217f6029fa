"""The charts of a ledger. Arms also differ in position, marker and line style, so that the charts print in grey."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pycls_fast.ledger.charts import accuracy, losses, rounding, speed
from pycls_fast.ledger.charts.drawing import Chart

__all__ = ["NAMES", "Chart", "charts"]

_DRAW = {
    "throughput": speed.throughput,
    "difference": accuracy.against_reference,
    "difference_before": accuracy.against_before,
    "accuracy": accuracy.front,
    "ladder": speed.ladder,
    "ranks": speed.ranks,
    "epoch": speed.epochs,
    "memory": speed.memory,
    "loss": losses.curves,
    "loss_difference": losses.differences,
    "errors": rounding.errors,
    "gradients": rounding.gradients,
}
NAMES = tuple(_DRAW)
"""Names of all charts that a page may have."""


def charts(record: Mapping[str, Any]) -> list[Chart]:
    """All charts for which the record has numbers."""
    made = (draw(record) for draw in _DRAW.values())
    return [chart for chart in made if chart is not None]
