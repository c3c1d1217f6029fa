"""The report holds every variant and number it should, needs nothing besides itself, and is well-formed."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from pycls_fast.config.ladder import LadderSettings
from pycls_fast.errors import UserError
from pycls_fast.ledger.report.effects import more_runs
from pycls_fast.ledger.report.page import Chart, charts, ledger_page, redraw, write_page
from pycls_fast.ledger.report.record import Record, compare_speed, read_record
from pycls_fast.ledger.report.statistics import Speedup
from pycls_fast.ledger.report.text import headline, print_table, remarks, rows, verdicts
from pycls_fast.values import Size
from tests.unit.ledger.stand_ins import LADDER, accuracy, effect, record_of, timing, variant

RESULTS = Path(__file__).parents[3] / "docs" / "results"
LEDGERS = sorted(RESULTS.glob("*/ledger.json"))


def timed(rate: float, ratio: float, **more: Any) -> dict[str, Any]:
    return timing([rate] * 3, Speedup(ratio, ratio * 0.9, ratio * 1.1, 3), **more)


@pytest.fixture
def record() -> Record:
    numerics = [{"step": s, "logit_error": e, "gradient_error": 2e-6} for s, e in ((0, None), (20, 1e-6))]
    total = {"exponents": {"-30": 5, "-10": 9}, "below_subnormal": 0.3, "below_subnormal_scaled": 0.0,
             "updates_lost_float16": 0.2, "updates_lost_bfloat16": 0.4}  # fmt: skip
    return record_of(
        variant("plain", None, timing=timed(100, 1.0), numerics=numerics),
        variant("quick", "plain", timing=timed(187, 1.87, memory_peak_bytes=1_500_000_000), numerics=numerics),
        variant("two", "plain", timing=timed(150, 1.5), ranks=2),
        variant("far", "plain", status="cannot run", reason="it needs CUDA", needs="CUDA"),
        config_name="vit <digits>",
        ladder=LADDER.model_copy(update={"description": "a & b", "source": "someone, 2022"}),
        model={"model": "vit", "parameters": 1000, "image_size": 224},
        accuracy=accuracy(effect("quick", "costs", -0.52), effect("two", "free")),
        gradients={"total": total, "steps": 1, "warmup_steps": 0, "loss_scale": 65536.0},
    )  # fmt: skip


class Page(HTMLParser):
    """Every opened tag is closed in its order, and pictures are in the page itself; `pictures` are their kinds."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        self.open: list[str] = []
        self.pictures: list[str] = []
        self.text = ""
        self.feed(file.read_text())
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in ("meta", "br", "wbr", "img"):
            self.open.append(tag)
        for name, value in attrs:
            if name in ("src", "href"):
                kind = re.match("data:image/([^;]+);base64,", str(value))
                assert kind, f"another file is needed: {value}"
                self.pictures.append(kind[1])

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


@pytest.mark.slow
def test_the_page(record: Record, tmp_path: Path) -> None:
    write_page(record, tmp_path)
    page = Page(tmp_path / "index.html")
    assert page.pictures == ["svg+xml"] * 5
    for words in (
        "vit <digits>", "a & b", "someone, 2022", "1.87x", "1.68 to 2.06", "costs 0.52 points (0.32 to 0.72)",
        "1 of 2 variants is free, 1 costs accuracy (quick: 0.52 points), 1 more did not run here", "it needs CUDA",
        "2 ranks", "2027-01-15", "python tools/ledger.py", "quick=1",
    ):  # fmt: skip
        assert words in page.text, words
    assert len(list((tmp_path / "charts").glob("*.svg"))) == 5
    # The same record gives the same page.
    write_page(record, tmp_path / "again")
    assert (tmp_path / "again" / "index.html").read_text() == (tmp_path / "index.html").read_text()


def test_what_was_not_measured_has_no_column_and_no_chart(record: Record) -> None:
    for each in record.variants:
        each.numerics, each.ranks = None, 1
    for _, one in record.timed:
        one.image_size, one.memory_peak_bytes, one.flops_per_second = Size(16, 16), None, None
    record.gradients = record.accuracy = None
    record.settings = LadderSettings(runs_at_most=0, numerics_steps=None)
    del record.variants[3]
    assert {chart.name for chart in charts(record)} == {"throughput"}
    assert not {"memory", "FLOP/s", "gradient error", "accuracy"} & set(rows(record)[0])
    assert len(remarks(record)) == 1


def test_numbers_that_make_no_sense(record: Record, tmp_path: Path) -> None:
    values = record.model_dump(mode="json")
    values["accuracy"]["effects"][0]["low"] = 0.5
    (tmp_path / "x").write_text(json.dumps(values))
    with pytest.raises(UserError, match=r"x: cannot be read as .*accuracy.effects.0: .* outside of its interval"):
        redraw(str(tmp_path / "x"), str(tmp_path))


def test_brackets_are_shown_on_the_terminal(record: Record, capsys: pytest.CaptureFixture[str]) -> None:
    """The terminal's library reads words in brackets as styles, and ends where it cannot."""
    record.variants[0].name = "plain [fp32]"
    print_table(record)
    assert "plain [fp32]" in capsys.readouterr().out


def test_the_words_of_verdicts() -> None:
    found = accuracy(
        effect("a", "free"), effect("b", "costs", -0.5), effect("c", "costs a little", -0.1, 0.02),
        effect("d", "gains", 0.3), effect("e", "identical", 0.0, 0.0), effect("f", "undecided", -0.1),
        effect("g", None, -0.1), broken={"h": "5 of 16 trainings failed with it, 0 of 16 without"}, count=48,
    )  # fmt: skip
    record = record_of(variant("plain", None), accuracy=found)
    found_open = "undecided: 0.30 lost to 0.10 gained; about 68 more trainings (68 min) would decide with 90% chance"
    assert verdicts(record) == {
        "a": ("good", "free: at most 0.20 points lost (95%)"),
        "b": ("bad", "costs 0.50 points (0.30 to 0.70)"),
        "c": ("good", "costs a little: 0.10 (0.06 to 0.14), less than the 0.25 that matter"),
        "d": ("good", "gains 0.30 points (0.10 to 0.50)"),
        "e": ("good", "identical: every prediction is the same"),
        "f": ("open", found_open),
        "g": ("open", "-0.10 (0.30 lost to 0.10 gained), not at a planned look"),
        "h": ("bad", "breaks training: 5 of 16 trainings failed with it, 0 of 16 without"),
    }
    assert headline(record) == (
        "4 of 8 variants are free, 1 costs accuracy (b: 0.50 points), 1 breaks training (h), 1 undecided, 1 not at a "
        "planned look: a loss of 0.25 points matters, on vit."
    )
    found.runs = [found.runs[0].model_copy(update={"failed": "diverged"}), *found.runs]
    for said, words in zip(remarks(record)[:5], (
        "for this workload, vit", "All together, without z: -0.10 points (-0.30 to +0.10)",
        "quick and two act on each other: -1.50 points together, beyond their sum (p 0.001)",
        "variance of a training is 4.0 times", "1 training failed and is left out",
    ), strict=True):  # fmt: skip
        assert words in said
    # Two trainings at a time take half of the time.
    record.settings = LadderSettings(jobs=2)
    assert verdicts(record)["f"] == ("open", found_open.replace("(68 min)", "(34 min)"))
    found.looks = [replace(found.looks[0], place=2)]
    assert "this workload resolves 0.30 points, not 0.25; in a new" in verdicts(record)["f"][1]


def test_a_variant_compared_alone_needs_trainings_of_its_own() -> None:
    """Whose number does not depend on how many the other families have taken."""
    crossed, alone = accuracy(effect("a", "free"), count=96), accuracy(effect("b", "undecided", -0.1), count=48)
    for others in ([], crossed.looks):
        alone.runs, alone.looks = crossed.runs * 2, [*others, alone.looks[-1]]
        record = record_of(variant("plain", None), accuracy=alone)
        more = more_runs(alone.effects[0], alone.looks[-1], record.settings.margin)
        assert f"about {more} more trainings" in verdicts(record)["b"][1]


def drawn(record: Record, name: str) -> Chart:
    return next(chart for chart in charts(record) if chart.name == name)


def test_names_are_no_mathematics(record: Record) -> None:
    record.variants[0].name = "_$x_$"
    (name, *_) = drawn(record, "throughput").figure.axes[0].get_yticklabels()
    assert (name.get_text(), name.get_parse_math()) == ("_$x_$", False)
    record = record.model_copy(update={"accuracy": accuracy(effect("quick", "costs", -0.52), effect("_two", "free"))})
    record.variants[2].name = "_two"
    (legend,) = drawn(record, "decision").figure.legends
    words = [(label.get_text(), label.get_parse_math()) for label in legend.get_texts()]
    assert words == [("quick: costs", False), ("_two: free", False)]


def test_the_picture_of_the_decision(record: Record) -> None:
    """A point per variant at its speed and its effect, and the margin as a line."""
    (axes,) = drawn(record, "decision").figure.axes
    points = {(each.lines[0].get_xdata()[0], each.lines[0].get_ydata()[0]) for each in axes.containers}
    assert points == {(1.87, -0.52), (1.5, 0.0)}
    assert [-0.25, -0.25] in [list(line.get_ydata()) for line in axes.lines]


def test_what_float16_rounds_up_is_kept(record: Record) -> None:
    """From 2^-25 on, half of its smallest number."""
    record.gradients.total.exponents = {-25: 10, -26: 5}
    bars = {
        bar.get_label(): sum(patch.get_height() for patch in bar)
        for bar in drawn(record, "gradients").figure.axes[0].containers
    }
    assert bars == pytest.approx({"zero in float16": 100 * 5 / 15, "kept": 100 * 10 / 15})
    record.gradients.total.exponents = {}
    assert drawn(record, "gradients")


def test_rates_agree_with_the_speedups() -> None:
    """Medians over all steps would contradict them."""
    rounds = {"a": [100.0, 80.0, 120.0], "b": [130.0, 90.0, 170.0], "c": [70.0, 95.0, 101.0]}
    variants = record_of(
        *(variant(n, b, timing=timing(rounds[n])) for n, b in (("a", None), ("b", "a"), ("c", "b")))
    ).variants
    compare_speed(variants)
    a, b, c = (each.timing for each in variants)
    assert b.speedup.ratio == pytest.approx(b.images_per_second / a.images_per_second)
    assert c.speedup_before.ratio == pytest.approx(c.images_per_second / b.images_per_second)
    # One that failed in a later round.
    c.rounds = c.rounds[:1]
    compare_speed(variants)
    assert variants[2].timing.speedup == Speedup(pytest.approx(0.7), None, None, 1)


@pytest.mark.parametrize("path", LEDGERS, ids=[path.parent.name for path in LEDGERS])
def test_a_committed_ledger_says_today_what_its_page_says(path: Path) -> None:
    """But for the charts, which follow matplotlib's version."""
    page = re.sub(r"<figure>.*</figure>\n", "", path.with_name("index.html").read_text(), flags=re.DOTALL)
    assert ledger_page(read_record(path), []) == page
