"""The charts of a ledger, whose style those of a comparison share, and `index.html`, one self-contained page.

Variants also differ in position, marker and line style, so that charts print in grey.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from pycls_fast.errors import DONE, refusing
from pycls_fast.files import user_path
from pycls_fast.ledger.measure.numerics import SMALLEST_SUBNORMAL
from pycls_fast.ledger.report import text
from pycls_fast.ledger.report.record import Record, VariantRecord, read_record
from pycls_fast.train.display import one_line
from pycls_fast.train.folder import write_text
from pycls_fast.train.pictures import data_url, render

INK, PALE, LINE, BAND = "#17375e", "#a9bfd8", "#8a8a8a", "#dcdcdc"
# Of verdicts; dark, middle and light, so that they print in grey. Colour-blind readers tell the first two apart.
COLORS = {"good": "#1b7a3d", "bad": "#d1495b", "open": "#8a8a8a"}
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

    @cached_property
    def svg(self) -> bytes:
        """The figure as an SVG file, in which text is text."""
        buffer = io.BytesIO()
        # So that the same record gives the same page: else identifiers are drawn by chance.
        with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": self.name}):
            self.figure.savefig(buffer, format="svg", metadata={"Date": None})
        return buffer.getvalue()

    @property
    def address(self) -> str:
        """The picture itself as an address, for a page that needs no other file."""
        return data_url(self.svg, "svg+xml")


def plain_axes(rows: float) -> tuple[Figure, Axes]:
    """A figure of this height in inches with one plot, in the style of all charts."""
    figure = Figure(figsize=(_WIDTH, rows), layout="constrained")
    axes = figure.subplots()
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelsize=9)
    axes.xaxis.label.set_fontsize(9)
    axes.yaxis.label.set_fontsize(9)
    return figure, axes


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
    axes.set_xlabel(label)
    return figure


def name_rows(axes: Axes, variants: Sequence[VariantRecord]) -> None:
    names = [one_line(variant.name, 26) for variant in variants]
    axes.set_yticks(range(len(variants)), names, parse_math=False)
    # From above, with room for the marks of the first and the last row.
    axes.set_ylim(len(names) - 0.5, -0.5)


def charts(record: Record) -> list[Chart]:
    made = (draw(record) for draw in (_decision, _throughput, _memory, _rounding, _gradients))
    return [chart for chart in made if chart is not None]


def _decision(record: Record) -> Chart | None:
    """What each variant gains in speed against what it does to accuracy."""
    speeds = {variant.name: timing.speedup_before for variant, timing in record.timed if timing.speedup_before}
    effects = record.accuracy.effects if record.accuracy else []
    found = [(effect, speeds[effect.variant]) for effect in effects if effect.variant in speeds]
    if not found:
        return None
    figure, axes = plain_axes(3.6 + 0.085 * len(found))
    margin = record.settings.margin
    axes.axhspan(-margin, 0, color=BAND, zorder=0, linewidth=0)
    axes.axhline(0, color=LINE, linewidth=1, zorder=1)
    axes.axhline(-margin, color=INK, linewidth=1.2, linestyle="--", zorder=1)
    axes.axvline(1, color=LINE, linewidth=1, zorder=1)
    for place, (effect, speedup) in enumerate(found):
        errors = [[effect.difference - effect.low], [effect.high - effect.difference]]
        axes.errorbar(
            speedup.ratio, effect.difference, yerr=errors, color=COLORS[text.kind(effect)], capsize=3, linestyle="none",
            linewidth=1.4, marker=SIGNS[place % len(SIGNS)], markersize=7,
            # Its words come below: a legend leaves out names that begin with an underscore.
            label=str(place),
        )  # fmt: skip
    axes.margins(x=0.08)
    axes.annotate(
        "a loss that does not matter", (0.01, -margin), (0, 3), fontsize=7.5, color=INK,
        xycoords=("axes fraction", "data"), textcoords="offset points", zorder=1,
    )  # fmt: skip
    axes.set(xlabel="speed-up over what it is added to", ylabel="top-1 gained, points")
    axes.xaxis.set_major_formatter("{x:.2f}x")
    axes.locator_params(axis="x", nbins=6)
    legend = figure.legend(fontsize=7.5, frameon=False, loc="outside lower center", ncols=2)
    for label, (effect, _) in zip(legend.get_texts(), found, strict=True):
        label.set(text=f"{one_line(effect.variant, 26)}: {effect.word or 'not at a look'}", parse_math=False)
    return Chart(
        "decision",
        "Speed gained and accuracy lost",
        "Each point is a variant, with the 95% interval of its effect on top-1. Right of 1 it is faster; losses "
        f"above the dashed line, {margin:g} points, do not matter.",
        figure,
    )


def _throughput(record: Record) -> Chart | None:
    if not record.timed:
        return None

    def bar(variant: VariantRecord) -> Bar:
        found = variant.timing and variant.timing.speedup
        if not found:
            return Bar(variant, 0.0, "" if variant.timing else text.state(variant))
        is_first = variant is record.reference
        interval = None if found.low is None or found.high is None or is_first else (found.low, found.high)
        ranks = f" ({variant.ranks} ranks)" if variant.ranks > 1 else ""
        return Bar(variant, found.ratio, f"{found.ratio:.2f}x{ranks}", interval)

    return Chart(
        "throughput",
        "Relative throughput",
        "Rate over the first variant's, paired by round. The thin line is the 95% interval.",
        bars([bar(variant) for variant in record.variants], "images/s, first variant = 1", line=1.0),
    )


def _memory(record: Record) -> Chart | None:
    found = [(variant, timing.memory_peak_bytes) for variant, timing in record.timed if timing.memory_peak_bytes]
    if not found:
        return None
    where = "of the tensors alive" if record.device == "cpu" else "of the device"
    figure = bars([Bar(variant, peak / 1e6, text.size_text(peak)) for variant, peak in found], "MB")
    return Chart("memory", "Peak memory per rank", f"Highest memory {where} during training steps.", figure)


def _rounding(record: Record) -> Chart | None:
    """Errors against float64 before and after some training steps."""
    found = [(variant, variant.numerics) for variant in record.variants if variant.numerics]
    if not found:
        return None
    figure, axes = plain_axes(0.9 + 0.36 * len(found))
    shown: dict[tuple[str, str], str] = {}
    for place, (_, errors) in enumerate(found):
        for error in errors:
            sign, when = ("^", "after training steps") if error.step else ("o", "before training")
            for what, value, fill in (("gradients", error.gradient_error, INK), ("logits", error.logit_error, "white")):
                if isinstance(value, float) and value > 0:
                    shown[sign, fill] = f"{what}, {when}"
                    axes.plot(value, place, sign, color=INK, markerfacecolor=fill, markersize=7)
    for (sign, fill), label in sorted(shown.items(), key=lambda each: each[1].endswith("steps")):
        axes.plot([], [], sign, color=INK, markerfacecolor=fill, label=label)
    name_rows(axes, [variant for variant, _ in found])
    axes.grid(axis="x", alpha=0.3)
    axes.set(xscale="log", xlabel="relative error against float64")
    if shown:
        figure.legend(fontsize=7.5, frameon=False, loc="outside upper center", ncols=2)
    what = "Norm of the difference from float64 with the same weights, over float64's norm."
    return Chart("errors", "Rounding", what, figure)


def _gradients(record: Record) -> Chart | None:
    if record.gradients is None:
        return None
    total = record.gradients.total
    exponents = total.exponents
    some = max(sum(exponents.values()), 1)
    figure, axes = plain_axes(3.2)
    used = (*exponents, SMALLEST_SUBNORMAL)
    places = range(min(used) - 1, max(used) + 2)
    for is_lost, color, hatch, label in ((True, "white", "////", "zero in float16"), (False, INK, None, "kept")):
        # Values above half the smallest number round up to it.
        chosen = [place for place in places if (place < SMALLEST_SUBNORMAL - 1) == is_lost]
        if chosen:
            heights = [100 * exponents.get(place, 0) / some for place in chosen]
            at = [place + 0.5 for place in chosen]
            axes.bar(at, heights, width=0.9, color=color, hatch=hatch, edgecolor=INK, label=label)
    axes.set(xlabel="log₂ |gradient|", ylabel="% of gradients")
    axes.legend(fontsize=8, frameon=False)
    return Chart(
        "gradients",
        "Gradients of the first variant",
        f"Zero in float16: {100 * total.below_subnormal:.2g}%, with the loss times {record.gradients.loss_scale:g}: "
        f"{100 * total.below_subnormal_scaled:.2g}%. Updates that float16 weights lose without float32 masters: "
        f"{100 * total.updates_lost_float16:.1f}%, bfloat16 weights: {100 * total.updates_lost_bfloat16:.1f}%.",
        figure,
    )


def ledger_page(record: Record, drawn: Sequence[Chart]) -> str:
    return render(
        "ledger/report/ledger.html.j2",
        record=record,
        title=text.title(record),
        lead=text.headline(record),
        facts=text.facts(record),
        cards=[_card(variant, record) for variant in record.variants],
        charts=drawn,
        rows=text.rows(record),
        remarks=text.remarks(record),
    )


def _card(variant: VariantRecord, record: Record) -> dict[str, Any]:
    timing, ranks = variant.timing, ""
    if variant.ranks != record.reference.ranks or variant.ranks > 1:
        ranks = f"{variant.ranks} ranks"
    if variant.status != "measured":
        kind, big, lines = "missing", "", [text.state(variant)]
    elif variant is record.reference:
        kind, big, lines = "", "1x", [ranks, f"{timing.images_per_second:,.0f} images/s" if timing else ""]
    else:
        big, _, interval = str((timing and timing.speedup) or "").partition(" ")
        kind, verdict = text.verdicts(record).get(variant.name, ("", ""))
        lines = [interval.strip("()"), ranks, verdict]
    return {"name": variant.name, "kind": kind, "big": big, "lines": lines}


def write_page(record: Record, folder: Path) -> None:
    """Write `index.html` and `charts/NAME.svg` into the folder, which is made if it is not there. A `UserError` if it
    cannot be written to."""
    drawn = charts(record)
    with refusing(f"output: {folder} cannot be written", use="choose another folder"):
        (folder / "charts").mkdir(parents=True, exist_ok=True)
        for chart in drawn:
            (folder / "charts" / f"{chart.name}.svg").write_bytes(chart.svg)
    write_text(folder / "index.html", ledger_page(record, drawn))


def redraw(ledger: str, output: str | None) -> int:
    """Draw the page of a `ledger.json` into a folder, or beside it; returns the exit status. A `UserError` if the file
    is not the record of a ledger, or the folder cannot be written to."""
    file = user_path(ledger)
    record, folder = read_record(file), file.parent if output is None else user_path(output)
    write_page(record, folder)
    text.print_table(record)
    print(f"report: {folder / 'index.html'}")
    return DONE
