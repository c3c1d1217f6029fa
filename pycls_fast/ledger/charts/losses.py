"""Charts of the training loss: the curves, and their differences from the first rung's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from pycls_fast.ledger.charts.drawing import (
    BAND,
    PALE,
    SIGNS,
    STROKES,
    Chart,
    legend,
    plain_axes,
    short_name,
)

Record = Mapping[str, Any]

# Points of a curve of differences: the loss of single steps is too noisy to compare.
_BINS = 40


def curves(record: Record) -> Chart | None:
    """The loss curves, averaged over the seeds."""
    arms = [arm for arm in record["arms"] if arm["training"] and arm["training"]["runs"]]
    if not arms:
        return None
    figure, axes = plain_axes(3.6)
    for place, arm in enumerate(arms):
        epochs, losses = _mean_curve([run["curve"] for run in arm["training"]["runs"]])
        _line(axes, place, len(arms), arm, epochs, losses)
    _finish(figure, axes, len(arms), "training loss, nats")
    return Chart("loss", "Loss curves", "Mean over the seeds; the thick line is the first rung.", figure)


def differences(record: Record) -> Chart | None:
    """The differences of the loss curves from the first rung's, paired by seed and averaged."""
    first, *others = record["arms"]
    known = _by_seed(first)
    pairs = [
        (arm, [_difference(known[seed], curve) for seed, curve in _by_seed(arm).items() if seed in known])
        for arm in others
    ]
    pairs = [(arm, [pair for pair in found if len(pair[0])]) for arm, found in pairs]
    pairs = [(arm, found) for arm, found in pairs if found]
    if not pairs:
        return None
    figure, axes = plain_axes(3.6)
    band = _band(list(known.values()))
    if band is not None:
        epochs, spread = band
        axes.fill_between(epochs, -spread, spread, color=BAND, linewidth=0, zorder=0)
    axes.axhline(0, color=PALE, linewidth=4, zorder=1)
    for place, (arm, found) in enumerate(pairs, 1):
        at, mean = _mean_curve([{"epoch": list(epochs), "loss": list(losses)} for epochs, losses in found])
        _line(axes, place, len(pairs) + 1, arm, *_binned(at, mean))
    _finish(figure, axes, len(pairs), "training loss over the first rung's, nats")
    grey = "" if band is None else " Grey: standard deviation of the first rung's loss over its seeds."
    return Chart(
        "loss_difference",
        "Loss curves as differences from the first rung",
        f"Pairs of runs with the same seed, averaged over the seeds and over a {_BINS}th of the training.{grey}",
        figure,
    )


def _line(axes: Axes, place: int, count: int, arm: Record, epochs: np.ndarray, losses: np.ndarray) -> None:
    first, points = arm["before"] is None, len(epochs)
    axes.plot(
        epochs, losses, label=short_name(arm["name"]), color=PALE if first else str(0.05 + 0.6 * place / count),
        linestyle=STROKES[place % 4], linewidth=4 if first else 1.3, marker=SIGNS[place % len(SIGNS)], markersize=4,
        markevery=(place * points // (8 * count), max(points // 8, 1)),
    )  # fmt: skip


def _finish(figure: Figure, axes: Axes, entries: int, label: str) -> None:
    axes.set_xlabel("epoch", fontsize=9)
    axes.set_ylabel(label, fontsize=9)
    legend(figure, axes, entries)


def _by_seed(arm: Record) -> dict[int, Record]:
    runs = arm["training"]["runs"] if arm["training"] else []
    return {run["seed"]: run["curve"] for run in runs if run["seed"] is not None and run["curve"]["epoch"]}


def _difference(reference: Record, curve: Record) -> tuple[np.ndarray, np.ndarray]:
    """The loss of a curve minus the reference's, at the reference's epochs that both cover."""
    epochs = _shared([reference, curve])
    first, second = (np.interp(epochs, each["epoch"], each["loss"]) for each in (reference, curve))
    return epochs, second - first


def _band(curves: Sequence[Record]) -> tuple[np.ndarray, np.ndarray] | None:
    """Standard deviation of the loss over seeds, with its epochs; None with fewer than two seeds."""
    epochs = _shared(curves)
    if len(curves) < 2 or not len(epochs):
        return None
    losses = [_binned(epochs, np.interp(epochs, curve["epoch"], curve["loss"])) for curve in curves]
    return losses[0][0], np.std([loss for _, loss in losses], axis=0, ddof=1)


def _binned(epochs: np.ndarray, losses: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Means over equally many neighbouring points, at most `_BINS` of them."""
    parts = np.array_split(np.stack([epochs, losses]), min(_BINS, len(epochs)), axis=1)
    means = np.array([part.mean(axis=1) for part in parts])
    return means[:, 0], means[:, 1]


def _mean_curve(curves: Sequence[Record]) -> tuple[np.ndarray, np.ndarray]:
    """The mean loss over the runs at the epochs that all of them cover; empty if they share none.

    Runs of one arm may have different epochs and numbers of points, as each curve was thinned by itself.
    """
    known = [curve for curve in curves if len(curve["epoch"])]
    if not known:
        return np.empty(0), np.empty(0)
    epochs = _shared(known)
    return epochs, np.mean([np.interp(epochs, curve["epoch"], curve["loss"]) for curve in known], axis=0)


def _shared(curves: Sequence[Record]) -> np.ndarray:
    """The first curve's epochs that all of them cover."""
    start, end = max(curve["epoch"][0] for curve in curves), min(curve["epoch"][-1] for curve in curves)
    return np.array([epoch for epoch in curves[0]["epoch"] if start <= epoch <= end])
