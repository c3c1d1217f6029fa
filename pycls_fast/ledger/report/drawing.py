"""What all charts of the ledger share: their style, names and legends."""

from __future__ import annotations

import io
import math
import re
from dataclasses import dataclass
from html import escape
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

INK, PALE, LINE, BAND = "#17375e", "#a9bfd8", "#8a8a8a", "#dcdcdc"
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


def legend(figure: Figure, axes: Axes, entries: int, **place: Any) -> None:
    """Put a short legend where `place` says, and a long one below the plot, in a taller figure."""
    if entries <= len(SIGNS):
        axes.legend(fontsize=7.5, frameon=False, **place)
        return
    figure.set_figheight(figure.get_figheight() + 0.17 * math.ceil(entries / 2))
    figure.legend(fontsize=7.5, frameon=False, loc="outside lower center", ncols=2)
