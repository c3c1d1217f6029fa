"""Charts of accuracy: paired differences with their intervals, and the front of accuracy and speed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from matplotlib.axes import Axes

from pycls_fast.ledger.charts.drawing import (
    BAND,
    INK,
    LINE,
    PALE,
    SIGNS,
    Chart,
    legend,
    plain_axes,
    short_name,
)

Record = Mapping[str, Any]


def against_reference(record: Record) -> Chart | None:
    """Differences in top-1 from the first rung, paired by seed."""
    return _differences(record, "difference", "against_reference", "the first rung")


def against_before(record: Record) -> Chart | None:
    """Differences in top-1 from the rung before, if that is not the first one for all rungs."""
    if all(arm["before"] in (None, record["reference"]) for arm in record["arms"]):
        return None
    return _differences(record, "difference_before", "against_before", "the rung before it")


def _differences(record: Record, name: str, key: str, other: str) -> Chart | None:
    found = [
        (arm, compared)
        for arm in record["arms"]
        if (compared := (arm["training"] or {}).get(key)) and compared["verdict"]["difference"] is not None
    ]
    if not found:
        return None
    figure, axes = plain_axes(0.9 + 0.52 * len(found))
    margin = record["settings"]["margin"]
    if margin is not None:
        axes.axvspan(-margin, 0, color=BAND, zorder=0, linewidth=0)
    axes.axvline(0, color=LINE, linewidth=1, zorder=1)
    for place, (_, compared) in enumerate(found):
        _paired(axes, place, compared)
    axes.set_yticks(range(len(found)), [_label(arm, compared["verdict"]) for arm, compared in found])
    axes.set_ylim(len(found) - 0.4, -0.6)
    axes.set_xlabel(f"top-1 over {other}, points", fontsize=9)
    # Differences of thousandths have long labels.
    axes.locator_params(axis="x", nbins=6)
    band = "" if margin is None else f" Grey: a loss within the accepted {margin:g} points."
    return Chart(
        name,
        f"Difference in top-1 from {other}",
        f"Paired by seed: mean and 95% interval; each circle below is a seed.{band}",
        figure,
    )


def _paired(axes: Axes, place: int, compared: Record) -> None:
    """Draw the mean with its interval, and below it a circle for each seed."""
    verdict = compared["verdict"]
    if verdict["low"] is not None and verdict["high"] is not None:
        ends = [verdict["low"], verdict["high"]]
        axes.plot(ends, [place, place], color=INK, linewidth=1.6, marker="|", markersize=8)
    axes.plot(verdict["difference"], place, color=INK, marker="D", markersize=5.5, linestyle="none")
    seen: Counter[float] = Counter()
    for pair in compared["images"]:
        # Equal differences are drawn below each other.
        value = round(pair["difference"], 6)
        axes.plot(value, place + 0.2 + 0.11 * seen[value], color=INK, marker="o", markersize=4, markerfacecolor="white")
        seen[value] = (seen[value] + 1) % 3


def _label(arm: Record, verdict: Record) -> str:
    if verdict["finding"] == "identical":
        return f"{short_name(arm['name'])}\nidentical"
    low, high = verdict["low"], verdict["high"]
    between = f" ({low:+.2f} to {high:+.2f})" if low is not None and high is not None else ""
    return f"{short_name(arm['name'])}\n{verdict['difference']:+.2f}{between}"


def front(record: Record) -> Chart | None:
    """Accuracy against throughput, with the arms that no other one beats in both."""
    arms = [arm for arm in record["arms"] if arm["timing"] and arm["training"] and arm["training"]["top1"]]
    if len(arms) < 2:
        return None
    figure, axes = plain_axes(3.9)
    rates = [arm["timing"]["images_per_second"] for arm in arms]
    scores = [arm["training"]["top1"]["mean"] for arm in arms]
    best = sorted(
        (rate, score)
        for rate, score in zip(rates, scores, strict=True)
        if not any((r > rate and s >= score) or (r >= rate and s > score) for r, s in zip(rates, scores, strict=True))
    )
    axes.step(*zip(*best, strict=True), where="pre", color=LINE, linewidth=1, linestyle="--", zorder=0)
    # With more arms than markers, arms are numbered.
    many = len(arms) > len(SIGNS)
    for place, (arm, rate, score) in enumerate(zip(arms, rates, scores, strict=True)):
        fill = INK if (rate, score) in best else "white"
        if arm["before"] is None:
            fill = PALE
        axes.errorbar(
            rate, score, xerr=_rate_errors(arm), yerr=_score_errors(arm), color=INK, ecolor=PALE if many else INK,
            capsize=2, elinewidth=0.8, linestyle="none", marker=f"${place}$" if many else SIGNS[place],
            markersize=9 if many else 7, markeredgewidth=0.3 if many else 1, markerfacecolor=INK if many else fill,
            label=short_name(arm["name"]),
        )  # fmt: skip
    # No interval makes a score above 100 possible.
    axes.set_ylim(top=min(axes.get_ylim()[1], 100 + 0.02 * (100 - axes.get_ylim()[0])))
    axes.set_xlabel("images/s", fontsize=9)
    axes.set_ylabel("top-1, %", fontsize=9)
    legend(figure, axes, len(arms), loc="upper left", bbox_to_anchor=(1.0, 1.0))
    return Chart(
        "accuracy",
        "Accuracy against throughput",
        f"Mean over the seeds; {'on' if many else 'filled: on'} the dashed front, where nothing is both faster and "
        "better. Bars: 95% intervals of the speed-up and of the paired difference in top-1 from the first rung.",
        figure,
    )


def _rate_errors(arm: Record) -> list[list[float]] | None:
    """Distances of the rate from the ends of its speed-up's interval."""
    found, rate = arm["timing"]["speedup"], arm["timing"]["images_per_second"]
    if arm["before"] is None or not found or found["low"] is None or found["high"] is None:
        return None
    return [[rate * (1 - found["low"] / found["ratio"])], [rate * (found["high"] / found["ratio"] - 1)]]


def _score_errors(arm: Record) -> list[list[float]] | None:
    """Distances of the score from the ends of the paired difference's interval."""
    compared = arm["training"].get("against_reference")
    verdict = compared["verdict"] if compared else {}
    low, difference, high = (verdict.get(key) for key in ("low", "difference", "high"))
    if low is None or difference is None or high is None:
        return None
    return [[difference - low], [high - difference]]
