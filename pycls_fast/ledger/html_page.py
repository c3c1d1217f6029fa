"""Self-contained HTML pages: the document around their content, and charts as embedded SVG."""

from __future__ import annotations

import io
import re
from collections.abc import Iterable
from html import escape

import matplotlib as mpl

from pycls_fast.ledger.charts.drawing import Chart

_STYLE = """
:root { color-scheme: light; }
body { font: 16px/1.5 system-ui, sans-serif; color: #1c1c1c; background: #fff; margin: 0 auto; max-width: 76rem;
  padding: 1rem; }
h1 { font-size: 1.6rem; line-height: 1.25; margin: .5rem 0; } h2 { font-size: 1.15rem; margin: 2rem 0 .5rem; }
p, li { max-width: 48rem; } .quiet { color: #555; font-size: .88rem; }
code { font-size: .85em; overflow-wrap: anywhere; }
.charts { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 30rem), 1fr)); gap: 1.5rem; }
figure { margin: 0; } figure svg { width: 100%; height: auto; } figcaption { font-size: .85rem; color: #555; }
.scroll { overflow-x: auto; } table { border-collapse: collapse; font-size: .85rem; }
th, td { text-align: right; padding: .3rem .6rem; border-bottom: 1px solid #ddd; white-space: nowrap; }
th:first-child, td:first-child { text-align: left; position: sticky; left: 0; background: #fff; }
@media print { .scroll { overflow: visible; } figure { break-inside: avoid; } }
"""


def html_page(title: str, parts: Iterable[str], style: str, description: str = "") -> str:
    """The page as text.

    Args:
        title: plain text, shown by the browser and not in the page.
        parts: HTML of the body, one after another.
        style: CSS rules besides those of every page.
        description: plain text that programs show beside a link to the page; "" for none.
    """
    names = (("name", "description"), ("property", "og:description"), ("property", "og:title"))
    contents = (description, description, title)
    tags = [
        f'<meta {kind}="{name}" content="{escape(content)}">'
        for (kind, name), content in zip(names, contents, strict=True)
    ]
    return "\n".join(
        [
            "<!doctype html>",
            '<html lang="en"><head><meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            *(tags if description else ()),
            f"<title>{escape(title)}</title><style>{_STYLE}{style}</style></head><body>",
            *parts,
            "</body></html>",
            "",
        ]
    )


def figure_html(chart: Chart) -> str:
    """A chart with its title and caption, embedded in the page."""
    return (
        f"<figure><h2>{escape(chart.title)}</h2>{_svg(chart)}<figcaption>{escape(chart.caption)}</figcaption></figure>"
    )


def _svg(chart: Chart) -> str:
    """The figure as SVG, with text kept as text, ready to be embedded with others in one document."""
    buffer = io.StringIO()
    # Identifiers are derived from the content, so that the same record gives the same page.
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": chart.name}):
        chart.figure.savefig(buffer, format="svg", metadata={"Date": None})
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    # The figure's own size in points would keep it from shrinking; its view box keeps the proportions.
    text = re.sub(r'(<svg[^>]*?) width="[^"]*"', r"\1", text, count=1)
    text = re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", text, count=1)
    label = f'<svg role="img" aria-label="{escape(chart.title)}"'
    # Two figures on a page must not share identifiers, which occur only inside tags.
    text = re.sub(r"<[^>]*>", lambda tag: re.sub(r'( id="|href="#|url\(#)', rf"\g<1>{chart.name}-", tag[0]), text)
    return text.replace("<svg", label, 1)
