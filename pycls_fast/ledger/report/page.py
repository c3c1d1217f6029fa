"""`index.html`: a ledger on one self-contained page; and the template that the page of `compare.py` shares."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from jinja2 import Environment, StrictUndefined

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


@dataclass(frozen=True)
class Card:
    """A variant at a glance; `kind` is "", "good", "bad", "open" or "missing"."""

    name: str
    kind: str
    big: str
    lines: Sequence[str]


@dataclass(frozen=True)
class Tile:
    """An image with its title and lines; `data` is a data URL, or None for its name only."""

    name: str
    title: str
    data: str | None
    lines: Sequence[str]


@dataclass(frozen=True)
class PagePart:
    """A heading with a table, pictures, notes and code below it; columns in `words` may be broken into lines."""

    title: str
    rows: Sequence[Mapping[str, str]] = ()
    words: Sequence[str] = ()
    pictures: Sequence[Tile] = ()
    notes: Sequence[str] = ()
    codes: Sequence[str] = ()
    folded: bool = False


@dataclass(frozen=True)
class Page:
    """What the template shows, from top to bottom; all text is plain."""

    title: str
    heading: str
    intro: Sequence[str]
    lead: str
    facts: Sequence[str]
    charts: Sequence[Chart]
    parts: Sequence[PagePart]
    cards: Sequence[Card] = ()
    partly: str | None = None

    def html(self) -> str:
        """The page, which needs no other file."""
        template = Path(__file__).with_name("page.html.j2").read_text(encoding="utf-8")
        environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=StrictUndefined)
        return environment.from_string(template).render(vars(self))


def ledger_page(record: Record) -> Page:
    """The page of a ledger."""
    named, ladder = title(record), record.ladder
    notes = [f"{variant.name}: {variant.note}" for variant in record.variants if variant.note]
    missing = [f"{variant.name}: {variant.reason}" for variant in record.variants if variant.reason]
    unmeasured = [f"{what}: {why}" for what, why in record.unmeasured.items()]
    settings = [f"{v.name}: {' '.join(v.overrides) or 'as the experiment'}" for v in record.variants]
    parts = [
        PagePart("All numbers", rows(record), words=("accuracy",), notes=remarks(record)),
        PagePart("Notes", notes=notes),
        PagePart("Not measured", notes=unmeasured),
        PagePart("Not run here", notes=missing),
        PagePart("Command", codes=[record.command]),
        PagePart("Settings of each variant", codes=settings, folded=True),
    ]
    return Page(
        title=f"{named}: {ladder.description}",
        heading=named,
        intro=[ladder.description, *([f"Ladder: {ladder.source}"] if ladder.source else [])],
        partly=unfinished(record),
        lead=headline(record),
        facts=facts(record),
        cards=[_card(variant, record) for variant in record.variants],
        charts=charts(record),
        parts=[part for part in parts if part.rows or part.notes or part.codes],
    )


def _card(variant: VariantRecord, record: Record) -> Card:
    timing = variant.timing
    if variant.status != "measured":
        return Card(variant.name, "missing", "", [state(variant)])
    ranks = f"{variant.ranks} ranks" if variant.ranks != record.reference.ranks or variant.ranks > 1 else ""
    if variant is record.reference:
        return Card(variant.name, "", "1x", [ranks, f"{timing.images_per_second:,.0f} images/s" if timing else ""])
    ratio, _, interval = speed_text(timing.speedup if timing else None).partition(" ")
    kind, said = verdicts(record).get(variant.name, ("", ""))
    return Card(variant.name, kind, ratio, [interval.strip("()"), ranks, said])


def write_page(record: Record, folder: Path) -> None:
    """Write `index.html` and `charts/NAME.png` into the folder."""
    page = ledger_page(record)
    (folder / "charts").mkdir(exist_ok=True)
    for old in (folder / "charts").glob("*.png"):
        # An earlier page may have had more charts than this one.
        old.unlink()
    for chart in page.charts:
        chart.figure.savefig(folder / "charts" / f"{chart.name}.png", dpi=160)
    (folder / "index.html").write_text(page.html(), encoding="utf-8")


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
