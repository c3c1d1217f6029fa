"""`index.html` of a comparison: one self-contained page, including pictures."""

from __future__ import annotations

import base64
import io
import re
import time
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from PIL import Image

from pycls_fast.inference.sheet import tile
from pycls_fast.ledger.compare.charts import charts
from pycls_fast.ledger.compare.table import (
    ENVIRONMENT,
    NUMBERS,
    SETTINGS,
    changes,
    class_row,
    environment,
    nats,
    notes,
    numbers,
    settings,
    verdict,
)
from pycls_fast.ledger.html_page import figure_html, html_page

Record = Mapping[str, Any]

_SIDE = 176
_CLASSES = 50
_STYLE = """
.pictures { display: grid; grid-template-columns: repeat(auto-fill, minmax(9.5rem, 1fr)); gap: .75rem; padding: 0;
  list-style: none; }
.pictures li { border: 1px solid #bbb; border-radius: .25rem; padding: .35rem; font-size: .85rem; line-height: 1.35;
  overflow-wrap: anywhere; }
.pictures img { width: 100%; height: auto; display: block; margin-bottom: .25rem; }
.pictures b { display: block; } .pictures .right::before { content: "✓ "; } .pictures .wrong::before { content: "✗ "; }
.pictures .wrong { text-decoration: underline dotted; }
.said { border-left: .45rem solid #17375e; padding: .25rem .75rem; font-size: 1.05rem; }
td.text { text-align: left; white-space: normal; overflow-wrap: break-word; max-width: 16rem; }
th.text { text-align: left; }
@media (max-width: 30rem) { table { font-size: .78rem; } th, td { padding: .3rem .3rem; } }
"""


def page(record: Record, pictures: Mapping[int, Image.Image]) -> str:
    """The page as text.

    Args:
        record: the result of `conduct.comparison`.
        pictures: images by index; for missing ones the name is shown.
    """
    a, b = record["a"], record["b"]
    when = time.strftime("%Y-%m-%d", time.gmtime(record["time"]))
    versions = ", ".join(f"{name} {version}" for name, version in record["versions"].items())
    return html_page(
        f"Two runs: {a['path']} and {b['path']}",
        [
            "<h1>Two runs</h1>",
            f"<p><b>A</b> <code>{escape(a['path'])}</code> ({escape(str(a['config_name']))})<br>"
            f"<b>B</b> <code>{escape(b['path'])}</code> ({escape(str(b['config_name']))})</p>",
            f"<p class='said'>{escape(verdict(record))}</p>",
            *(f"<p class='quiet'>{escape(line)}</p>" for line in notes(record)),
            _table(NUMBERS, numbers(record)),
            "<h2>Settings that differ</h2>",
            _settings(record),
            *(f"<p>{escape(line)}</p>" for line in changes(record)),
            *_environment(record),
            "<section class='charts'>",
            *(figure_html(chart) for chart in charts(record)),
            "</section>",
            *_disagreements(record["images"], pictures),
            *_classes(record["images"]),
            "<h2>Commands and versions</h2>",
            *(f"<p>{name}: <code>{escape(command)}</code></p>" for name, command in _commands(record)),
            f"<p>this page: <code>{escape(record['command'])}</code></p>",
            f"<p class='quiet'>{when} · {escape(versions)}</p>",
        ],
        _STYLE,
    )


def _settings(record: Record) -> str:
    rows = settings(record)
    if not rows:
        return "<p>None: the two runs have the same settings.</p>"
    numerics = "" if not any(numerics for *_, numerics in rows) else (
        "<p class='quiet'>numerics: how the results of a switch's values may differ. identical: the same bits; "
        "rounding: the same mathematics in a different order; training: it changes what is learned.</p>"
    )  # fmt: skip
    return _table(SETTINGS, rows, words=True) + numerics


def _environment(record: Record) -> list[str]:
    rows = environment(record)
    return ["<h2>Versions and machine</h2>", _table(ENVIRONMENT, rows, words=True)] if rows else []


def _commands(record: Record) -> list[tuple[str, str]]:
    found = [(name.upper(), record[name]["environment"].get("command")) for name in ("a", "b")]
    return [(name, command) for name, command in found if command]


def _disagreements(found: Record | None, pictures: Mapping[int, Image.Image]) -> list[str]:
    if found is None or not found["pair"]["changed"]:
        return []
    pair = found["pair"]
    made = []
    for kind, title, count in (
        ("only_a", "Right in A, wrong in B", pair["only_first"]),
        ("only_b", "Right in B, wrong in A", pair["only_second"]),
    ):
        shown = found[kind]
        of = f"{count:,}" if len(shown) == count else f"{len(shown):,} of {count:,}"
        made.append(f"<h2>{title}: {of}</h2>")
        if shown:
            made.append(f"<ul class='pictures'>{''.join(_picture(each, kind, pictures) for each in shown)}</ul>")
    made.append(
        f"<p class='quiet'>Numbers in brackets: cross-entropy in nats; the largest difference first. Both wrong: "
        f"{found['both_wrong']:,} images, of which {found['both_wrong_otherwise']:,} with different predictions.</p>"
    )
    return made


def _picture(each: Record, kind: str, pictures: Mapping[int, Image.Image]) -> str:
    name = each["name"] or f"image {each['index']}"
    image = ""
    if each["index"] in pictures:
        image = f'<img alt="{escape(name)}" title="{escape(name)}" src="{_embedded(pictures[each["index"]])}">'
    lines = "".join(
        f"<span class='{'right' if (run == 'a') == (kind == 'only_a') else 'wrong'}'>{run.upper()}: "
        f"{escape(each[run])}</span> ({nats(each[f'loss_{run}'])})<br>"
        for run in ("a", "b")
    )
    return f"<li>{image}<b>{escape(each['class'])}</b>{lines}{'' if image else escape(name)}</li>"


def _embedded(picture: Image.Image) -> str:
    square = tile(picture, _SIDE)
    # Enlarged pixels are small as PNG and ugly as JPEG, photographs the other way round.
    kind = "PNG" if max(picture.size) * 3 <= _SIDE else "JPEG"
    buffer = io.BytesIO()
    square.save(buffer, format=kind, quality=85)
    return f"data:image/{kind.lower()};base64,{base64.b64encode(buffer.getvalue()).decode('ascii')}"


def _classes(found: Record | None) -> list[str]:
    if found is None:
        return []
    rows = found["classes"][:_CLASSES]
    more = len(found["classes"]) - len(rows)
    return [
        "<h2>Accuracy by class</h2>",
        _table(("class", "images", "A, %", "B, %", "points"), [class_row(row) for row in rows]),
        f"<p class='quiet'>{more:,} more, which changed less, are in compare.json.</p>" if more else "",
    ]


def _breakable(text: str) -> str:
    """HTML of a key or name that may be broken after a dot or an underscore."""
    return re.sub(r"([._])(?=[a-z])", r"\1<wbr>", escape(text))


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]], *, words: bool = False) -> str:
    kind = " class='text'" if words else ""
    head = "".join(f"<th{kind}>{escape(column)}</th>" for column in columns)
    body = "".join(f"<tr>{''.join(f'<td{kind}>{_breakable(cell)}</td>' for cell in row)}</tr>" for row in rows)
    return f"<div class='scroll'><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
