"""The report holds every variant and number it should, needs nothing besides itself, and is well-formed."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from matplotlib.lines import Line2D

from pycls_fast.config.ladder import LadderSettings
from pycls_fast.ledger.report.charts import charts
from pycls_fast.ledger.report.drawing import Chart
from pycls_fast.ledger.report.page import ledger_page, redraw, write_page
from pycls_fast.ledger.report.record import (
    Record,
    SeedMean,
    SeedRun,
    Timing,
    Training,
    Unfinished,
    VariantRecord,
    compare_speed,
    curve,
    read_record,
)
from pycls_fast.ledger.report.statistics import Speedup
from pycls_fast.ledger.report.text import duration, headline, print_table, remarks, rows, seed_rows, title
from pycls_fast.published import IMAGENET_TRAINING_IMAGES
from tests.unit.ledger.stand_ins import LADDER, record_of, timing, training, variant

RESULTS = Path(__file__).parents[3] / "docs" / "results"
LEDGERS = sorted(RESULTS.glob("*/ledger.json"))


def paired(finding: str, text: str = "loses 1 ± 0.1") -> dict[str, Any]:
    verdict = {
        "finding": finding, "text": text, "difference": -1.0, "low": -1.1, "high": -0.9, "p_loss": 0.0,
        "more_seeds": None, "seeds": 2,
    }  # fmt: skip
    images = {
        seed: {
            "difference": -0.95 - 0.1 * seed, "low": -1.0, "high": -0.9, "standard_error": 0.1, "only_first": 12,
            "only_second": 2, "p_value": 0.0129, "changed": 20, "images": 1000,
        }
        for seed in range(2)
    }  # fmt: skip
    return {"reference": "plain", "verdict": verdict, "images": images}


def trained(top1: float, finding: str | None, **more: Any) -> dict[str, Any]:
    against = None if finding is None else paired(finding)
    return training(top1, top1 + 1, count=1000, against_reference=against, against_before=against, **more)


def timed(rate: float, ratio: float, **more: Any) -> dict[str, Any]:
    return timing([rate] * 3, Speedup(ratio, ratio * 0.9, ratio * 1.1, 3), **more)


@pytest.fixture
def record() -> Record:
    numerics = [{"step": s, "logit_error": e, "gradient_error": 2e-6} for s, e in ((0, None), (20, 1e-6))]
    total = {"exponents": {"-30": 5, "-10": 9}, "below_subnormal": 0.3, "below_subnormal_scaled": 0.0,
             "updates_lost_float16": 0.2, "updates_lost_bfloat16": 0.4}  # fmt: skip
    return record_of(
        variant("plain", None, timing=timed(100, 1.0), numerics=numerics, training=trained(90.0, None)),
        variant(
            "quick", "plain", timing=timed(187, 1.87, memory_peak_bytes=1_500_000_000), numerics=numerics,
            training=trained(89.0, "loss"),
        ),
        variant("two", "plain", timing=timed(150, 1.5), ranks=2),
        variant("far", "plain", status="cannot run", reason="it needs CUDA", needs="CUDA"),
        config_name="vit <digits>",
        ladder=LADDER.model_copy(update={"description": "a & b", "source": "someone, 2022"}),
        model={"model": "vit", "parameters": 1000, "image_size": 224},
        gradients={"total": total, "steps": 1, "warmup_steps": 0, "loss_scale": 65536.0},
    )  # fmt: skip


class Tags(HTMLParser):
    """Every opened tag is closed in its order; identifiers are there once and what refers to them finds them."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[str] = []
        self.ids: list[str] = []
        self.references: list[str] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append(tag)
        if tag not in ("meta", "br", "wbr"):
            self.open.append(tag)
        self._attributes(attrs)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._attributes(attrs)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data

    def _attributes(self, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name == "id":
                self.ids.append(str(value))
            elif name in ("xlink:href", "href"):
                assert str(value).startswith("#"), f"another file is needed: {value}"
                self.references.append(str(value)[1:])
            self.references += re.findall(r"url\(#([^)]+)\)", str(value))
            assert name != "src"


@pytest.mark.slow
def test_the_page(record: Record, tmp_path: Path) -> None:
    write_page(record, tmp_path)
    text = (tmp_path / "index.html").read_text()
    parser = Tags()
    parser.feed(text)
    assert not parser.open
    assert len(parser.ids) == len(set(parser.ids))
    assert parser.references
    assert set(parser.references) <= set(parser.ids)
    assert parser.seen.count("svg") == 11
    for words in (
        "vit <digits>", "a & b", "someone, 2022", "1.87x", "1.68 to 2.06", "loses 1 ± 0.1", "it needs CUDA", "2 ranks",
        "2027-01-15", "McNemar p", "python tools/ledger.py", "quick=1",
    ):  # fmt: skip
        assert words in parser.text, words
    assert len(list((tmp_path / "charts").glob("*.png"))) == 11
    # The same record gives the same page.
    (tmp_path / "again").mkdir()
    write_page(record, tmp_path / "again")
    assert (tmp_path / "again" / "index.html").read_text() == text


def html(record: Record) -> str:
    return ledger_page(record).html()


@pytest.mark.slow
def test_the_page_says_what_is_missing(record: Record) -> None:
    record.unfinished = Unfinished(done=1, of=9)
    record.unmeasured = {"lean: rounding": "killed by signal 9 <(>"}
    first = record.reference.training
    assert first is not None
    first.reason, first.runs, first.top1 = "loss is <nan>", [], None
    shown = html(record)
    for words in (
        "unfinished: 1 of 9 measurements",
        "killed by signal 9 &lt;(&gt;",
        "ended early: loss is &lt;nan&gt;",
    ):
        assert words in shown
    assert title(record) == "vit <digits> (vit, 1.00 k parameters, 224 pixels) on P, 2 cores"
    record.device = "NVIDIA H200"
    # A variant that cannot run here is no evidence of more devices.
    record.variants[3].ranks = 64
    assert title(record).endswith("on up to 2 x NVIDIA H200")


def test_the_table(record: Record) -> None:
    made = {row["variant"]: row for row in rows(record)}
    assert list(made) == ["plain", "quick", "two (2 ranks)", "far"]
    assert made["quick"]["speed-up (95%)"] == "1.87x (1.68 to 2.06)"
    assert made["quick"]["top-1"] == "89.50 ± 0.30"
    assert made["quick"]["gradient error"] == "2.0e-06 / 2.0e-06"
    assert made["quick"]["memory"] == "1,500 MB (-500 MB)"
    assert made["far"]["against the first"] == "needs CUDA"
    each = seed_rows(record)
    assert list(each[1].values()) == ["plain", "1", "91.00", "99.50", "-", "-", "-", "-"]
    assert list(each[2].values()) == ["quick", "0", "89.00", "99.50", "-0.95", "12", "2", "0.013"]


def test_what_was_not_measured_has_no_column_and_no_chart(record: Record) -> None:
    for each in record.variants:
        each.training = each.numerics = None
        each.ranks = 1
    for _, one in record.timed:
        one.image_size, one.memory_peak_bytes, one.flops_per_second = 16, None, None
    record.gradients = None
    record.settings = LadderSettings(seeds=0, numerics_steps=None)
    assert {chart.name for chart in charts(record)} == {"throughput", "rates"}
    gone = {"ImageNet epoch", "memory", "FLOP/s", "gradient error", "top-1"}
    assert not gone & set(rows(record)[0])
    assert len(remarks(record)) == 1


def test_brackets_are_shown_on_the_terminal(record: Record, capsys: pytest.CaptureFixture[str]) -> None:
    """The terminal's library reads words in brackets as styles, and ends where it cannot."""
    record.variants[0].name = "plain [fp32]"
    print_table(record)
    assert "plain [fp32]" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("ratios", "finding", "changed", "said"),
    [
        ((1.5, 1.4, 1.6), "no loss", {}, "1.50x (1.40 to 1.60) over 'plain' with 'a'; top-1: the verdict."),
        ((1.5, 1.4, 1.6), None, {}, "1.50x (1.40 to 1.60) over 'plain' with 'a'; top-1: accuracy not measured."),
        ((1.5, 1.4, 1.6), "gain", {"ranks": 4}, "1.50x (1.40 to 1.60) on 4 ranks over 'plain' with 'a'; top-1: the "),
        ((1.5, 0.9, 2.6), None, {}, "No variant is shown to be faster than 'plain'."),
        ((1.5, None, None), None, {}, "No variant is shown to be faster than 'plain'."),
        ((1.5, 1.4, 1.6), "loss", {}, "No variant is shown to be faster than 'plain' without a loss of top-1."),
        ((1.5, 1.4, 1.6), "small loss", {}, "No variant is shown to be faster than 'plain' without a loss of top-1."),
        ((1.5, 1.4, 1.6), "no loss", {"status": "failed"}, "No variant is shown to be faster than 'plain'."),
    ],
)
def test_the_headline(
    ratios: tuple[float, float | None, float | None], finding: str | None, changed: dict[str, Any], said: str
) -> None:
    scores = finding and training(90.0, against_reference=paired(finding, "the verdict"))
    first = variant("plain", None, timing=timing([100.0] * 6))
    other = variant("a", "plain", timing=timing([150.0] * 6, Speedup(*ratios, 6)), training=scores, **changed)
    settings = LadderSettings(mode="one_at_a_time")
    assert headline(record_of(first, other, settings=settings)).startswith(said)


def test_a_variant_whose_training_ended_is_not_recommended(record: Record) -> None:
    quick = record.variants[1].training
    assert quick is not None
    assert quick.against_reference is not None
    quick.reason = "seed 0: the loss is not finite"
    assert "'two'" in headline(record)


def test_a_margin_below_one_image_is_noted(record: Record) -> None:
    words = "The margin of 0.2 points is smaller than one of the 359 validation images (0.28 points); use margin=0.3"
    assert not any(words in remark for remark in remarks(record))
    for _, each in record.trained:
        for run in each.runs:
            run.count = 359
    assert any(words in remark for remark in remarks(record))


@pytest.mark.parametrize(("seconds", "text"), [(3.0, "3.0 s"), (600, "10.0 min"), (9000, "2.5 h"), (1e6, "11.6 d")])
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def drawn(record: Record, name: str) -> Chart:
    return next(chart for chart in charts(record) if chart.name == name)


@pytest.mark.slow
def test_names_are_shown_as_they_are(record: Record) -> None:
    """Also those that matplotlib would read as mathematics, and the page as references."""
    names = ('_$x_$ #head id="b #123456', "\\$a$ url(#a) <c>")
    for each, name in zip(record.variants, names, strict=False):
        each.name = name
    record.variants[1].before = record.variants[2].before = names[0]
    record.gradients = None
    for chart in charts(record):
        parser = Tags()
        parser.feed(chart.svg())
        # The first variant does not differ from itself, and with one rank it is only the beginning of a line.
        shown = names[1:] if "difference" in chart.name else ("two",) if chart.name == "ranks" else names
        assert all(name in parser.text for name in shown), chart.name
        assert set(parser.references) <= set(parser.ids)
        assert all(identifier.startswith(f"{chart.name}-") for identifier in parser.ids)


def test_loss_is_averaged_at_the_same_epochs(record: Record) -> None:
    """Seeds whose runs have different lengths, and steps without a loss."""
    del record.variants[1:]
    ((_, each),) = record.trained
    runs = []
    for steps, gone in ((390, ()), (410, range(100, 150)), (1000, (999,)), (0, ())):
        lines = [{"epoch": step / 100, "loss": None if step in gone else step / 100} for step in range(steps)]
        runs.append(each.runs[0].model_copy(update={"seed": steps, "curve": curve(lines)}))
    each.runs = runs
    (line,) = drawn(record, "loss").figure.axes[0].lines
    epochs, losses = line.get_data()
    assert (epochs[0], epochs[-1], len(epochs)) == (0.0, 3.89, 390)
    assert losses == pytest.approx(epochs)


def test_losses_are_compared_with_those_of_the_same_seed(record: Record) -> None:
    for (_, each), offset in zip(record.trained, (0.0, 0.25), strict=True):
        for run in each.runs:
            run.curve.loss = [2.0 + offset, 1.0 + offset + run.seed, 0.5 + offset]
    # A seed that only one of them has.
    quick = record.trained[1][1]
    quick.runs.append(SeedRun.model_validate(training(0.0)["runs"][0] | {"seed": 7}))
    (axes,) = drawn(record, "loss_difference").figure.axes
    line = next(line for line in axes.lines if line.get_label() == "quick")
    assert list(line.get_ydata()) == pytest.approx([0.25] * 3)
    assert axes.collections, "the band of the first variant's seeds"


def test_differences_show_interval_margin_and_seeds(record: Record) -> None:
    (axes,) = drawn(record, "difference").figure.axes
    (band,) = axes.patches
    assert (band.get_x(), band.get_x() + band.get_width()) == pytest.approx((-0.2, 0.0))
    across = [sorted(map(float, line.get_xdata())) for line in axes.lines]
    assert [-1.1, -0.9] in across
    assert [-1.0] in across
    circles = [line.get_xdata()[0] for line in axes.lines if line.get_marker() == "o"]
    assert circles == pytest.approx([-0.95, -1.05])
    (label,) = axes.get_yticklabels()
    assert label.get_text() == "quick\n-1.00 (-1.10 to -0.90)"
    assert "difference_before" not in {chart.name for chart in charts(record)}
    record.variants[2].before, record.variants[2].training = "quick", Training.model_validate(trained(88.0, "loss"))
    assert drawn(record, "difference_before")


def test_the_front_of_accuracy_and_throughput(record: Record) -> None:
    for _, each in record.trained:
        each.top1 = SeedMean(mean=99.9, half=1.0, seeds=2)
    (axes,) = drawn(record, "accuracy").figure.axes
    # No interval makes a score above 100 possible.
    assert axes.get_ylim()[1] < 100.1
    bars = [each for each in axes.containers if each.has_xerr][-1]
    # From the speed-up: 187 images/s, times 0.9 and 1.1.
    ends = [path.vertices[:, 0] for line in bars.lines[2] for path in line.get_paths()]
    assert sorted(ends[0]) == pytest.approx([168.3, 205.7])


def test_every_sign_of_the_rounding_is_explained(record: Record) -> None:
    def look(line: Line2D) -> tuple[object, object]:
        return line.get_marker(), line.get_markerfacecolor()

    figure = drawn(record, "errors").figure
    (legend,) = figure.legends
    explained = {look(line): text.get_text() for line, text in zip(legend.get_lines(), legend.get_texts(), strict=True)}
    assert explained["^", "white"] == "logits, after training steps"
    assert {look(line) for line in figure.axes[0].lines} <= set(explained)


def test_what_float16_rounds_up_is_kept(record: Record) -> None:
    """From 2^-25 on, half of its smallest number."""
    assert record.gradients is not None
    record.gradients.total["exponents"] = {"-25": 10, "-26": 5}
    bars = {
        bar.get_label(): sum(patch.get_height() for patch in bar)
        for bar in drawn(record, "gradients").figure.axes[0].containers
    }
    assert bars == pytest.approx({"zero in float16": 100 * 5 / 15, "kept": 100 * 10 / 15})
    record.gradients.total["exponents"] = {}
    assert drawn(record, "gradients")


def test_a_speedup_names_its_ranks(record: Record) -> None:
    labels = [text.get_text() for text in drawn(record, "rates").figure.axes[0].texts]
    assert labels == ["100", "187", "150, 2 ranks"]
    per_rank = [text.get_text() for text in drawn(record, "throughput").figure.axes[0].texts]
    assert per_rank == ["1.00x", "1.87x", "0.75x", "needs CUDA"]
    (axes,) = drawn(record, "ranks").figure.axes
    lines = {line.get_label(): list(line.get_xdata()) for line in axes.lines}
    # It begins with one rank, which is no variant of its family.
    assert lines["two"] == [1, 2]
    assert "ideal" in lines


def test_memory_that_libraries_hide_has_no_chart(record: Record) -> None:
    record.timed[1][1].memory_peak_bytes = 1_950_000_000
    assert "memory" not in {chart.name for chart in charts(record)}
    # On a device, the allocator's numbers are exact.
    record.device = "NVIDIA H200"
    assert "memory" in {chart.name for chart in charts(record)}


@pytest.mark.slow
def test_many_variants_leave_room_for_what_is_drawn(record: Record) -> None:
    """Signs run out, and names are longer than the plot is high; what squeezes it to nothing is a warning."""
    many = [
        variant(f"a switch of the catalogue, {n}", "plain", timing=timed(90 + n, 1.0), training=trained(90, "loss"))
        for n in range(40)
    ]
    record.variants[1:] = [VariantRecord.model_validate(each) for each in many]
    for name, entries in (("accuracy", 41), ("loss", 41), ("loss_difference", 40)):
        figure = drawn(record, name).figure
        figure.draw_without_rendering()
        (axes,) = figure.axes
        assert axes.get_window_extent().height > 2.5 * figure.dpi
        (legend,) = figure.legends
        assert legend.get_window_extent().ymax <= axes.get_window_extent().ymin
        assert len(legend.get_texts()) == entries


def test_rates_agree_with_the_speedups() -> None:
    """Over the rounds of the same start; medians over all steps would contradict them."""
    found = Timing.model_validate(timing([10.0, 40.0], images_per_second=50.0, flops_per_second=500.0)).over([])
    assert found.images_per_second == pytest.approx(20.0)
    assert found.flops_per_second == pytest.approx(200.0)
    assert found.imagenet_epoch_seconds == pytest.approx(IMAGENET_TRAINING_IMAGES / 20)
    rounds = {"a": [100.0, 80.0, 120.0], "b": [130.0, 90.0, 170.0], "c": [70.0, 95.0, 101.0]}
    variants = record_of(
        *(variant(n, b, timing=timing(rounds[n])) for n, b in (("a", None), ("b", "a"), ("c", "b")))
    ).variants
    assert compare_speed(variants, [0.0]) == {}
    a, b, c = (each.timing for each in variants)
    assert a is not None
    assert b is not None
    assert c is not None
    assert b.speedup is not None
    assert c.speedup_before is not None
    assert b.speedup.ratio == pytest.approx(b.images_per_second / a.images_per_second)
    assert c.speedup_before.ratio == pytest.approx(c.images_per_second / b.images_per_second)
    apart = record_of(
        variant("a", None, timing=timing([100.0, 100.0], times=[1.0, 11.0])),
        variant("b", "a", timing=timing([1.0, 130.0], times=[12.0, 13.0])),
    ).variants
    compare_speed(apart, [0.0, 10.0])
    assert apart[1].timing is not None
    assert apart[1].timing.speedup is not None
    assert (apart[1].timing.paired_rounds, apart[1].timing.speedup.ratio) == ([1], pytest.approx(1.3))


@pytest.mark.slow
@pytest.mark.parametrize("path", LEDGERS, ids=[path.parent.name for path in LEDGERS])
def test_committed_reports_can_be_drawn(path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert redraw([str(path), f"output={tmp_path / 'a'}"]) == 0
    assert f"report: {tmp_path / 'a' / 'index.html'}" in capsys.readouterr().out
    (_, first), *others = read_record(path).timed
    for _, each in others:
        assert each.speedup is not None
        assert each.speedup.ratio == pytest.approx(each.images_per_second / first.images_per_second)


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ([], "error: report: needs one file; got none; use LEDGER.json [output=FOLDER]"),
        (["a", "b"], "error: report: needs one file; got a b; use LEDGER.json [output=FOLDER]"),
        (["nowhere.json"], "error: nowhere.json: cannot be read (No such file or directory); give the path of a "),
        (["good", "output=good"], "error: output: good cannot be written (File exists); choose another folder"),
    ],
)
def test_a_report_that_cannot_be_drawn(
    arguments: list[str], line: str, record: Record, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    Path("good").write_text(record.model_dump_json())
    assert redraw(arguments) == 2
    assert capsys.readouterr().err.startswith(line)
