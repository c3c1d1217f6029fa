"""What all charts of the ledger share: their style, names and legends."""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from pycls_fast.ledger.report.record import VariantRecord

INK, PALE, LINE, BAND = "#17375e", "#a9bfd8", "#8a8a8a", "#dcdcdc"
# Of verdicts; dark, middle and light, so that they print in grey. Colour-blind readers tell the first two apart.
COLORS = {"good": "#1b7a3d", "bad": "#d1495b", "open": "#8a8a8a"}
STROKES = ("-", "--", "-.", ":")
SIGNS = "osD^vP*X<>"
# Inches; on a phone 5 inches shrink to 3.5, and the text stays readable.
_WIDTH = 5.4


@dataclass(frozen=True)
class Chart:
    """A figure with its name, title and caption."""

    name: str
    title: str
    caption: str
    figure: Figure

    def svg(self) -> str:
        """The figure as SVG, with text kept as text, ready to be embedded with others in one HTML document."""
        buffer = io.StringIO()
        # Identifiers are derived from the content, so that the same record gives the same page.
        with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": self.name}):
            self.figure.savefig(buffer, format="svg", metadata={"Date": None})
        text = buffer.getvalue()
        text = text[text.index("<svg") :]
        # The figure's own size in points would keep it from shrinking; its view box keeps the proportions.
        text = re.sub(r'(<svg[^>]*?) width="[^"]*"', r"\1", text, count=1)
        text = re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", text, count=1)
        # Two figures on a page must not share identifiers, which occur only inside tags.
        text = re.sub(r"<[^>]*>", lambda tag: re.sub(r'( id="|href="#|url\(#)', rf"\g<1>{self.name}-", tag[0]), text)
        return text.replace("<svg", f'<svg role="img" aria-label="{escape(self.title)}"', 1)


def plain_axes(rows: float) -> tuple[Figure, Axes]:
    """A figure of this height in inches with one plot, in the style of all charts."""
    figure = Figure(figsize=(_WIDTH, rows), layout="constrained")
    axes = figure.subplots()
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelsize=9)
    return figure, axes


def literal(text: str, most: int = 26) -> str:
    """A name cut to `most` characters and escaped, so that matplotlib draws it as it is.

    Matplotlib reads text between two dollar signs as mathematics, and leaves names that begin with an underscore out
    of legends.
    """
    cut = text if len(text) <= most else f"{text[: most - 1]}…"
    return f"{' ' if cut.startswith('_') else ''}{cut}".replace("$", r"\$")


@dataclass(frozen=True)
class Bar:
    """A variant's bar: its length, the text at its end, and the ends of its interval."""

    variant: VariantRecord
    length: float
    text: str
    interval: tuple[float, float] | None = None


def bars(made: Sequence[Bar], label: str, line: float | None = None) -> Figure:
    """A horizontal bar per variant, from top to bottom, with its number at the end; the reference is hatched."""
    figure, axes = plain_axes(0.9 + 0.36 * len(made))
    for place, bar in enumerate(made):
        first, ends = bar.variant.before is None, bar.interval
        axes.barh(
            place, bar.length, color=PALE if first else INK, hatch="//" if first else None, edgecolor=INK, height=0.66
        )
        if ends is not None:
            axes.plot(ends, [place, place], color="black", linewidth=3.2, solid_capstyle="butt")
            axes.plot(ends, [place, place], color="white", linewidth=1.2, solid_capstyle="butt")
        end = max(bar.length, ends[1] if ends else 0)
        axes.annotate(bar.text, (end, place), xytext=(4, 0), textcoords="offset points", va="center", fontsize=9)
    if line is not None:
        axes.axvline(line, color=LINE, linewidth=1, linestyle="--", zorder=0)
    name_rows(axes, [bar.variant for bar in made])
    # Leave room for the number after the longest bar.
    axes.set_xlim(0, max([bar.length for bar in made] + [end for bar in made for end in bar.interval or ()]) * 1.22)
    axes.set_xlabel(label, fontsize=9)
    return figure


def name_rows(axes: Axes, variants: Sequence[VariantRecord]) -> None:
    """Name the rows, from top to bottom."""
    axes.set_yticks(range(len(variants)), [literal(variant.name) for variant in variants])
    axes.invert_yaxis()
