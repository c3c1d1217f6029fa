"""`index.html`: a ledger on one self-contained page, and its charts as PNG files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from pycls_fast.ledger.charts import NAMES, Chart, charts
from pycls_fast.ledger.details import seed_rows
from pycls_fast.ledger.headline import headline, machine, on_ranks, origin, title, unfinished
from pycls_fast.ledger.html_page import figure_html, html_page
from pycls_fast.ledger.remarks import remarks
from pycls_fast.ledger.table import repeats, rows, several_codes, state, time_taken, verdict

_STYLE = """
.headline { font-size: 1.15rem; line-height: 1.4; border-left: .45rem solid #17375e; padding: .1rem .75rem; }
.partly { border: 2px dashed #555; padding: .25rem .75rem; }
summary { cursor: pointer; font-weight: 600; margin: 1.5rem 0 .5rem; }
.answers { display: grid; grid-template-columns: repeat(auto-fill, minmax(15.5rem, 1fr)); gap: .75rem; padding: 0;
  list-style: none; }
.answers li { border: 1px solid #bbb; border-left: .45rem solid #17375e; border-radius: .25rem; padding: .5rem .75rem; }
.answers li.open { border-left-color: #a9bfd8; } .answers li.loss { border-left: .45rem double #17375e; }
.answers li.missing { border-style: dashed; color: #555; }
.answers b { display: block; } .answers .big { font-size: 1.35rem; font-weight: 600; }
td.words { text-align: left; white-space: normal; min-width: 11rem; }
"""


def write_page(record: Mapping[str, Any], folder: Path) -> None:
    """Write `index.html` and `charts/NAME.png` into the folder."""
    drawn = charts(record)
    (folder / "charts").mkdir(exist_ok=True)
    for name in NAMES:
        # An earlier page may have had more charts than this one.
        (folder / "charts" / f"{name}.png").unlink(missing_ok=True)
    for chart in drawn:
        chart.figure.savefig(folder / "charts" / f"{chart.name}.png", dpi=160)
    (folder / "index.html").write_text(page(record, drawn), encoding="utf-8")


def page(record: Mapping[str, Any], drawn: list[Chart]) -> str:
    """The page as text."""
    ladder, settings = record["ladder"], record["settings"]
    named, taken, codes, partly = title(record), time_taken(record), several_codes(record), unfinished(record)
    versions = ", ".join(f"{name} {version}" for name, version in record["versions"].items())
    source = f"<p class='quiet'>Ladder: {escape(ladder['source'])}</p>" if ladder["source"] else ""
    found = headline(record)
    facts = [origin(record), machine(record), settings["mode"].replace("_", " "), *repeats(settings)]
    facts += [taken] if taken else []
    return html_page(
        f"{named}: {ladder['description']}",
        [
            f"<h1>{escape(named)}</h1>",
            f"<p>{escape(ladder['description'])}</p>",
            f"<p class='partly'>{escape(partly.capitalize())}.</p>" if partly else "",
            *(f"<p class='headline'>{escape(sentence)}</p>" for sentence in found[:1]),
            f"<ul>{''.join(f'<li>{escape(sentence)}</li>' for sentence in found[1:])}</ul>" if found[1:] else "",
            f"<p class='quiet'>{escape(' · '.join(facts))}</p>",
            f"<p class='quiet'>{codes.capitalize()}.</p>" if codes else "",
            source,
            f"<ul class='answers'>{''.join(_answer(arm, record) for arm in record['arms'])}</ul>",
            "<section class='charts'>",
            *(figure_html(chart) for chart in drawn),
            "</section>",
            "<h2>All numbers</h2>",
            f"<div class='scroll'>{_table(rows(record))}</div>",
            *(f"<p class='quiet'>{escape(remark)}</p>" for remark in remarks(record)),
            f"<p class='quiet'>{escape(record['rule'])}</p>" if settings["seeds"] else "",
            _seeds(record),
            _list("Notes", [(arm["name"], arm["note"]) for arm in record["arms"] if arm["note"]]),
            _list("Not measured", list(record["unmeasured"].items())),
            _list("Not run here", [(arm["name"], arm["reason"]) for arm in record["arms"] if arm["reason"]]),
            "<h2>Command and versions</h2>",
            f"<p><code>{escape(record['command'])}</code></p><p class='quiet'>{escape(versions)}</p>",
            _overrides(record),
        ],
        _STYLE,
        " ".join(found),
    )


def _answer(arm: Mapping[str, Any], record: Mapping[str, Any]) -> str:
    name = f"<b>{escape(arm['name'])}</b>"
    if arm["status"] != "measured":
        return f"<li class='missing'>{name}{escape(state(arm))}</li>"
    timing, training = arm["timing"], arm["training"]
    ended = f"<br>training ended early: {escape(training['reason'])}" if training and training["reason"] else ""
    if arm["name"] == record["reference"]:
        rate = f"{timing['images_per_second']:,.0f} images/s" if timing else ""
        top1 = f"top-1 {training['top1']['mean']:.2f}%" if training and training["top1"] else ""
        ranks = f" on {arm['ranks']} ranks" if arm["ranks"] > 1 else ""
        return f"<li class='open'>{name}<span class='big'>1x</span>{ranks} {rate}<br>{top1}{ended}</li>"
    found = timing["speedup"] if timing else None
    speed = f"<span class='big'>{found['ratio']:.2f}x</span>{on_ranks(arm, record)} " if found else ""
    between = _interval(found) if found else ""
    words = verdict(arm, "against_reference")
    finding = training["against_reference"]["verdict"]["finding"] if words else ""
    kind = "loss" if "loss" in finding and finding != "no loss" else "open" if finding == "not enough runs" else ""
    return f"<li class='{kind}'>{name}{speed}{between}<br>{escape(words)}{ended}</li>"


def _interval(speedup: Mapping[str, Any]) -> str:
    if speedup["low"] is not None:
        return f"{speedup['low']:.2f} to {speedup['high']:.2f}"
    return "one round, no interval" if speedup["rounds"] == 1 else "no interval"


def _table(made: Sequence[Mapping[str, str]]) -> str:
    head = "".join(f"<th>{escape(column)}</th>" for column in made[0])
    body = "".join(
        "<tr>"
        + "".join(
            f"<td class='{'words' if column.startswith('against') else ''}'>{escape(text)}</td>"
            for column, text in row.items()
        )
        + "</tr>"
        for row in made
    )
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _seeds(record: Mapping[str, Any]) -> str:
    made = seed_rows(record)
    if not made:
        return ""
    what = (
        f"Images lost and won are those against '{record['reference']}' with the same seed; p is McNemar's exact test."
    )
    return (
        f"<details><summary>Each seed</summary><p class='quiet'>{escape(what)}</p>"
        f"<div class='scroll'>{_table(made)}</div></details>"
    )


def _list(heading: str, items: list[tuple[str, str]]) -> str:
    if not items:
        return ""
    lines = "".join(f"<li><b>{escape(name)}</b>: {escape(text)}</li>" for name, text in items)
    return f"<h2>{heading}</h2><ul>{lines}</ul>"


def _overrides(record: Mapping[str, Any]) -> str:
    lines = "".join(
        f"<li>{escape(arm['name'])}: <code>{escape(' '.join(arm['overrides']) or 'as the experiment')}</code></li>"
        for arm in record["arms"]
    )
    return f"<details><summary>Settings of each rung</summary><ul>{lines}</ul></details>"
