"""`index.html`: a ledger on one self-contained page, from the template that the page of `compare.py` shares."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pycls_fast.errors import DONE, refusing
from pycls_fast.files import user_path
from pycls_fast.ledger.report.charts import Chart, charts
from pycls_fast.ledger.report.record import Record, VariantRecord, read_record
from pycls_fast.ledger.report.text import (
    facts,
    headline,
    print_table,
    remarks,
    rows,
    speed_text,
    state,
    title,
    unfinished,
    verdicts,
)
from pycls_fast.train.page import render


def ledger_page(record: Record, drawn: Sequence[Chart]) -> str:
    """The page of a ledger, with these charts."""
    named, ladder = title(record), record.ladder
    return render(
        Path(__file__).with_name("ledger.html.j2"),
        record=record,
        title=f"{named}: {ladder.description}",
        heading=named,
        intro=[ladder.description, *([f"Ladder: {ladder.source}"] if ladder.source else [])],
        partly=unfinished(record),
        lead=headline(record),
        facts=facts(record),
        cards=[_card(variant, record) for variant in record.variants],
        charts=drawn,
        rows=rows(record),
        remarks=remarks(record),
    )


def _card(variant: VariantRecord, record: Record) -> dict[str, Any]:
    """A variant at a glance."""
    timing, ranks = variant.timing, ""
    if variant.ranks != record.reference.ranks or variant.ranks > 1:
        ranks = f"{variant.ranks} ranks"
    if variant.status != "measured":
        kind, big, lines = "missing", "", [state(variant)]
    elif variant is record.reference:
        kind, big, lines = "", "1x", [ranks, f"{timing.images_per_second:,.0f} images/s" if timing else ""]
    else:
        big, _, interval = speed_text(timing.speedup if timing else None).partition(" ")
        kind, said = verdicts(record).get(variant.name, ("", ""))
        lines = [interval.strip("()"), ranks, said]
    return {"name": variant.name, "kind": kind, "big": big, "lines": lines}


def write_page(record: Record, folder: Path) -> None:
    """Write `index.html` and `charts/NAME.png` into the folder."""
    drawn = charts(record)
    (folder / "charts").mkdir(exist_ok=True)
    for old in (folder / "charts").glob("*.png"):
        # An earlier page may have had more charts than this one.
        old.unlink()
    for chart in drawn:
        chart.figure.savefig(folder / "charts" / f"{chart.name}.png", dpi=160)
    (folder / "index.html").write_text(ledger_page(record, drawn), encoding="utf-8")


def redraw(ledger: str, output: str | None) -> int:
    """Draw the page of a `ledger.json` into a folder, or beside it; returns the exit status.

    Raises:
        UserError: the file is not the record of a ledger, or the folder cannot be written to.
    """
    file = user_path(ledger)
    record, folder = read_record(file), file.parent if output is None else user_path(output)
    with refusing(f"output: {folder} cannot be written", use="choose another folder"):
        folder.mkdir(parents=True, exist_ok=True)
        write_page(record, folder)
    print_table(record)
    print(f"report: {folder / 'index.html'}")
    return DONE
