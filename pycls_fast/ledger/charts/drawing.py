"""What the charts of a ledger share: their style, bars, names and legends."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

Record = Mapping[str, Any]

INK, PALE, LINE, BAND = "#17375e", "#a9bfd8", "#8a8a8a", "#dcdcdc"
STROKES = ("-", "--", "-.", ":")
SIGNS = "osD^vP*X<>"
# Inches; on a phone 5 inches shrink to 3.5, and the text stays readable.
_WIDTH = 5.4


@dataclass(frozen=True)
class Chart:
    """A figure with its file name, title and caption."""

    name: str
    title: str
    caption: str
    figure: Figure


def plain_axes(rows: float) -> tuple[Figure, Axes]:
    """A figure of this height in inches with one plot, in the style of all charts."""
    figure = Figure(figsize=(_WIDTH, rows), layout="constrained")
    axes = figure.subplots()
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelsize=9)
    return figure, axes


def bars(
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
    axes.set_yticks(range(len(arms)), [short_name(arm["name"]) for arm in arms])
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


def short_name(text: str) -> str:
    """A rung's name, short enough for an axis."""
    return literal(text, 26)


def legend(figure: Figure, axes: Axes, entries: int, **place: Any) -> None:
    """Put a short legend where `place` says, and a long one below the plot, in a taller figure."""
    if entries <= len(SIGNS):
        axes.legend(fontsize=7.5, frameon=False, **place)
        return
    figure.set_figheight(figure.get_figheight() + 0.17 * math.ceil(entries / 2))
    figure.legend(fontsize=7.5, frameon=False, loc="outside lower center", ncols=2)
