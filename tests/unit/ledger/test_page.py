"""The page holds every rung and number it should, needs nothing besides itself, and is well-formed."""

from __future__ import annotations

import copy
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from matplotlib.lines import Line2D

from pycls_fast.ledger.charts import Chart, charts
from pycls_fast.ledger.html_page import figure_html
from pycls_fast.ledger.page import page, write_page
from pycls_fast.ledger.reading import completed
from pycls_fast.ledger.records import curve
from pycls_fast.ledger.table import duration, markdown, print_table, rows

Record = dict[str, Any]


def timing(rate: float, ratio: float, image_size: int = 224, memory: int = 2_000_000_000) -> Record:
    speedup = {"ratio": ratio, "low": ratio * 0.9, "high": ratio * 1.1, "rounds": 3}
    return {
        "images_per_second": rate, "images_per_second_per_rank": rate, "step_seconds_p50": 64 / rate,
        "step_seconds_p90": 70 / rate, "flops_per_second": 1e9 * rate, "memory_peak_bytes": memory,
        "imagenet_epoch_seconds": 1_281_167 / rate, "rounds": [rate] * 3, "speedup": speedup, "speedup_before": speedup,
        "image_size": image_size, "share_of_matmul": 0.25,
    }  # fmt: skip


def training(top1: float, text: str | None, finding: str = "loss") -> Record:
    curve = {"epoch": [1.0, 2.0, 3.0], "loss": [2.0, 1.0, 0.5]}
    runs = [{"seed": seed, "top1": top1 + seed, "top5": 99.5, "count": 1000, "curve": curve} for seed in range(2)]
    record: Record = {"reason": None, "runs": runs, "top1": {"mean": top1, "half": 0.3, "seeds": 3}}
    if text is not None:
        verdict = {"text": text, "finding": finding, "difference": -1.0, "low": -1.1, "high": -0.9}
        images = [
            {"seed": seed, "difference": -0.95 - 0.1 * seed, "only_first": 12, "only_second": 2, "p_value": 0.0129}
            for seed in range(2)
        ]
        for key in ("against_reference", "against_before"):
            record[key] = {"verdict": verdict, "images": images}
    return record


def arm(name: str, before: str | None, **values: Any) -> Record:
    empty = {
        "note": "",
        "overrides": ["speed.compile=off"],
        "ranks": 1,
        "status": "measured",
        "reason": None,
        "needs": None,
    }
    return {"name": name, "before": before, **empty, "timing": None, "numerics": None, "training": None, **values}


@pytest.fixture
def record() -> Record:
    numerics = [{"step": s, "logit_error": e, "gradient_error": 2e-6} for s, e in ((0, None), (20, 1e-6))]
    made = {
        "config_name": "vit <digits>", "time": 1.8e9, "command": "python tools/ledger.py", "reference": "plain",
        "ladder": {"description": "a & b", "source": "someone, 2022"}, "rule": "the rule",
        "settings": {"seeds": 3, "rounds": 3, "mode": "one_at_a_time", "numerics_steps": 20, "margin": 0.2},
        "device": "cpu",
        "environment": {"processor": "P", "cpu_count": 2, "git": {"commit": "0123456789abcdef", "changed": True}},
        "versions": {"torch": "2"}, "model": {"image_size": 224},
        "unmeasured": {},
        "gradients": {
            "total": {"exponents": {"-30": 5, "-10": 9}, "below_subnormal": 0.3, "below_subnormal_scaled": 0.0,
                      "updates_lost_float16": 0.2, "updates_lost_bfloat16": 0.4},
            "loss_scale": 65536.0,
        },
        "arms": [
            arm("plain", None, timing=timing(100, 1.0), numerics=numerics, training=training(90.0, None)),
            arm(
                "quick", "plain", timing=timing(187, 1.87, memory=1_500_000_000), numerics=numerics,
                training=training(89, "loses 1 ± 0.1"),
            ),
            arm("two", "plain", timing=timing(150, 1.5), ranks=2),
            arm("far", "plain", status="cannot run", reason="it needs CUDA", needs="CUDA"),
        ],
    }  # fmt: skip
    return completed(made)


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
    parser = Tags()
    parser.feed((tmp_path / "index.html").read_text())
    assert not parser.open
    assert len(parser.ids) == len(set(parser.ids))
    assert parser.references
    assert set(parser.references) <= set(parser.ids)
    assert parser.seen.count("svg") == 11
    for words in ("vit <digits>", "a & b", "1.87x", "loses 1 ± 0.1", "needs CUDA", "it needs CUDA", "the rule"):
        assert words in parser.text
    names = (
        "throughput", "ladder", "epoch", "ranks", "accuracy", "difference", "loss", "loss_difference", "memory",
        "errors", "gradients",
    )  # fmt: skip
    assert {file.stem for file in (tmp_path / "charts").glob("*.png")} == set(names)
    assert all(file.read_bytes().startswith(b"\x89PNG") for file in (tmp_path / "charts").iterdir())


@pytest.mark.slow
def test_the_same_record_gives_the_same_page(record: Record, tmp_path: Path) -> None:
    texts = []
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        write_page(copy.deepcopy(record), tmp_path / name)
        texts.append((tmp_path / name / "index.html").read_text())
    assert texts[0] == texts[1]


def test_names_are_shown_as_they_are(record: Record) -> None:
    """Also those that matplotlib would read as mathematics, and the page as references."""
    names = ('_$x_$ #head id="b #123456', "\\$a$ url(#a) <c>")
    for arm, name in zip(record["arms"], names, strict=False):
        arm["name"] = name
    record["gradients"] = None
    for chart in charts(record):
        parser = Tags()
        parser.feed(figure_html(chart))
        # The first rung does not differ from itself, and with one rank it is only the beginning of a line.
        shown = names[1:] if "difference" in chart.name else ("two",) if chart.name == "ranks" else names
        assert all(name in parser.text for name in shown), chart.name
        assert set(parser.references) <= set(parser.ids)
        assert all(identifier.startswith(f"{chart.name}-") for identifier in parser.ids)


def test_loss_is_averaged_at_the_same_epochs(record: Record) -> None:
    """Seeds whose runs have other lengths, and steps without a loss."""
    del record["arms"][1:]
    runs = []
    for steps, gone in ((390, ()), (410, range(100, 150)), (1000, (999,))):
        lines = [{"epoch": step / 100, "loss": None if step in gone else step / 100} for step in range(steps)]
        runs.append({"seed": steps, "curve": curve(lines)})
    runs.append({"seed": 0, "curve": {"epoch": [], "loss": []}})
    record["arms"][0]["training"]["runs"] = runs
    (chart,) = (chart for chart in charts(record) if chart.name == "loss")
    (line,) = chart.figure.axes[0].lines
    epochs, losses = line.get_data()
    assert (epochs[0], epochs[-1], len(epochs)) == (0.0, 3.89, 390)
    assert losses == pytest.approx(epochs)


def test_a_reference_whose_training_broke(record: Record) -> None:
    record["arms"][0]["training"] |= {"reason": "loss is <nan>", "top1": None, "runs": []}
    cards = page(record, []).partition("<ul class='answers'>")[2]
    assert "training ended early: loss is &lt;nan&gt;" in cards[: cards.index("</li>")]


def test_every_sign_of_the_rounding_is_explained(record: Record) -> None:
    for arm in record["arms"][:2]:
        arm["numerics"] = [{"step": step, "logit_error": 1e-6, "gradient_error": 2e-6} for step in (0, 20)]
    (chart,) = (chart for chart in charts(record) if chart.name == "errors")

    def look(line: Line2D) -> tuple[object, object]:
        return line.get_marker(), line.get_markerfacecolor()

    (legend,) = chart.figure.legends
    explained = {look(line): text.get_text() for line, text in zip(legend.get_lines(), legend.get_texts(), strict=True)}
    assert explained["o", "white"] == "logits, before training"
    assert {look(line) for line in chart.figure.axes[0].lines} <= set(explained)


@pytest.mark.slow
def test_every_image_size_is_named(record: Record) -> None:
    def caption() -> str:
        return next(chart.caption for chart in charts(record) if chart.name == "epoch")

    assert caption() == "1,281,167 images of 224 pixels at the measured rate, if loading is not the limit."
    record["arms"][1]["timing"] = timing(187, 1.87, image_size=256)
    sizes = "1,281,167 images of 224 or 256 pixels, depending on the rung, at"
    assert sizes in caption()
    assert sizes in markdown(record)


def test_unknown_operations_are_no_number(record: Record) -> None:
    for arm in record["arms"][:2]:
        arm["timing"]["flops_per_second"] = None
    shown = [row["FLOP/s"] for row in rows(record)]
    assert shown == ["-", "-", "150.00 G", "-"]


def test_what_float16_rounds_up_is_kept(record: Record) -> None:
    """From 2^-25 on, half of its smallest number."""
    record["gradients"]["total"]["exponents"] = {"-25": 10, "-26": 5}
    (chart,) = (chart for chart in charts(record) if chart.name == "gradients")
    bars = {bar.get_label(): [patch.get_height() for patch in bar] for bar in chart.figure.axes[0].containers}
    assert {label: sum(heights) for label, heights in bars.items()} == pytest.approx(
        {"zero in float16": 100 * 5 / 15, "kept": 100 * 10 / 15}
    )


def drawn(record: Record, name: str) -> Chart:
    return next(chart for chart in charts(record) if chart.name == name)


def test_differences_show_interval_margin_and_seeds(record: Record) -> None:
    chart = drawn(record, "difference")
    (axes,) = chart.figure.axes
    (band,) = axes.patches
    assert (band.get_x(), band.get_x() + band.get_width()) == pytest.approx((-0.2, 0.0))
    across = [sorted(map(float, line.get_xdata())) for line in axes.lines]
    assert [-1.1, -0.9] in across
    assert [-1.0] in across
    circles = [line.get_xdata()[0] for line in axes.lines if line.get_marker() == "o"]
    assert circles == pytest.approx([-0.95, -1.05])
    (label,) = axes.get_yticklabels()
    assert label.get_text() == "quick\n-1.00 (-1.10 to -0.90)"
    assert "accepted 0.2 points" in chart.caption


@pytest.mark.slow
def test_rungs_that_add_up_are_also_compared_with_the_one_before(record: Record) -> None:
    assert "difference_before" not in {chart.name for chart in charts(record)}
    record["arms"][2] |= {"before": "quick", "training": training(88.0, "loses")}
    assert "difference_before" in {chart.name for chart in charts(completed(record))}


def test_no_score_is_above_100(record: Record) -> None:
    for arm in record["arms"][:2]:
        arm["training"]["top1"] = {"mean": 99.9, "half": 1.0}
    verdict = record["arms"][1]["training"]["against_reference"]["verdict"]
    verdict |= {"difference": 0.0, "low": -1.0, "high": 1.0}
    (axes,) = drawn(record, "accuracy").figure.axes
    assert axes.get_ylim()[1] < 100.1
    (bars,) = [each for each in axes.containers if each.has_xerr]
    # From the speed-up: 187 images/s, times 0.9 and 1.1.
    ends = [path.vertices[:, 0] for line in bars.lines[2] for path in line.get_paths()]
    assert sorted(ends[0]) == pytest.approx([168.3, 205.7])


def test_losses_are_compared_with_the_first_rung_s_of_the_same_seed(record: Record) -> None:
    for each, offset in zip(record["arms"][:2], (0.0, 0.25), strict=True):
        for run in each["training"]["runs"]:
            run["curve"] = {"epoch": [1.0, 2.0, 3.0], "loss": [2.0 + offset, 1.0 + offset + run["seed"], 0.5 + offset]}
    # A seed that only one of them has.
    record["arms"][1]["training"]["runs"].append({"seed": 7, "curve": {"epoch": [1.0], "loss": [90.0]}})
    (axes,) = drawn(record, "loss_difference").figure.axes
    line = next(line for line in axes.lines if line.get_label() == "quick")
    assert list(line.get_ydata()) == pytest.approx([0.25] * 3)
    assert axes.collections, "the band of the first rung's seeds"


def test_memory_that_libraries_hide_has_no_chart(record: Record) -> None:
    record["arms"][1]["timing"]["memory_peak_bytes"] = 1_950_000_000
    assert "memory" not in {chart.name for chart in charts(record)}
    assert [row["memory"] for row in rows(record)] == ["2,000 MB", "1,950 MB (-50 MB)", "2,000 MB (+0 MB)", "-"]
    # On a device, the allocator's numbers are exact.
    record["device"] = "NVIDIA H200"
    assert "memory" in {chart.name for chart in charts(record)}


def test_small_images_have_no_epoch_of_imagenet(record: Record) -> None:
    assert "ImageNet epoch" in rows(record)[0]
    for arm in record["arms"][:3]:
        arm["timing"]["image_size"] = 16
    assert "epoch" not in {chart.name for chart in charts(record)}
    assert "ImageNet epoch" not in rows(record)[0]
    assert "these images of 16 pixels are smaller than the 64 pixels" in markdown(record)
    # What earlier versions did not record for each rung.
    for arm in record["arms"][:3]:
        arm["timing"]["image_size"] = None
    record["model"]["image_size"] = 16
    assert "ImageNet epoch" not in rows(record)[0]


def test_a_margin_below_one_image_is_noted(record: Record) -> None:
    assert "The margin" not in page(record, [])
    for run in record["arms"][1]["training"]["runs"]:
        run["count"] = 359
    words = "The margin of 0.2 points is smaller than one of the 359 validation images (0.28 points)"
    assert words in page(record, [])
    assert words in markdown(record)
    assert "use margin=0.3, or more images" in markdown(record)
    record["settings"]["seeds"] = 0
    assert words not in markdown(record)


def test_the_page_says_what_was_measured_where_and_when(record: Record) -> None:
    for text in (markdown(record), page(record, [])):
        assert "vit &lt;digits&gt;" in text or "vit <digits>" in text
        assert "(224 pixels) on P, 2 cores" in text
        assert "2027-01-15, commit 0123456789 with changes" in text
    record["device"] = "NVIDIA H200"
    assert "(224 pixels) on up to 2 x NVIDIA H200" in markdown(record)
    # A rung that cannot run here is no evidence of more devices.
    record["arms"].append({**record["arms"][1], "ranks": 64, "timing": None, "training": None})
    assert "(224 pixels) on up to 2 x NVIDIA H200" in markdown(record)
    record["arms"].pop()
    record |= {"time": None, "environment": {"processor": None, "cpu_count": None, "git": None}}
    assert "date unknown, commit unknown" in markdown(record)


def test_each_seed_has_a_row(record: Record) -> None:
    text = markdown(record)
    assert "| plain | 1 | 91.00 | 99.50 | - | - | - | - |" in text
    assert "| quick | 0 | 89.00 | 99.50 | -0.95 | 12 | 2 | 0.013 |" in text
    assert "McNemar" in page(record, [])
    for arm in record["arms"]:
        arm["training"] = None
    assert "Each seed" not in markdown(record) + page(record, [])


def test_a_speedup_names_its_ranks(record: Record) -> None:
    shown = page(record, [])
    assert "<span class='big'>1.50x</span> on 2 ranks" in shown
    assert "<span class='big'>1.87x</span> 1.68" in shown
    labels = [text.get_text() for text in drawn(record, "ladder").figure.axes[0].texts]
    assert labels == ["100", "187", "150, 2 ranks", "needs CUDA"]
    (axes,) = drawn(record, "ranks").figure.axes
    lines = {line.get_label(): list(line.get_xdata()) for line in axes.lines}
    # It begins with one rank, which is no rung of its family.
    assert lines["two"] == [1, 2]
    assert "ideal" in lines


def test_gradients_that_are_all_zero(record: Record) -> None:
    record["gradients"]["total"]["exponents"] = {}
    assert "gradients" in {chart.name for chart in charts(record)}


def test_a_measurement_that_failed_is_told_with_its_reason(record: Record) -> None:
    assert "Not measured" not in page(record, []) + markdown(record)
    record["unmeasured"] = {"lean: rounding": "killed by signal 9 <(>"}
    assert "<h2>Not measured</h2>" in page(record, [])
    assert "killed by signal 9 &lt;(&gt;" in page(record, [])
    assert "## Not measured\n\n- lean: rounding: killed by signal 9" in markdown(record)


def test_without_rounding_there_is_no_word_of_it(record: Record) -> None:
    assert "after 20 steps" in markdown(record)
    record["settings"]["numerics_steps"] = None
    assert "None" not in markdown(record)
    assert "Gradient error" not in markdown(record)


def test_without_training_there_is_no_rule_of_verdicts(record: Record) -> None:
    assert "the rule" in page(record, [])
    assert "the rule" in markdown(record)
    record["settings"]["seeds"] = 0
    assert "the rule" not in page(record, [])
    assert "rule" not in markdown(record)


def test_what_was_not_measured_has_no_chart(record: Record) -> None:
    for arm in record["arms"]:
        arm |= {"training": None, "numerics": None, "ranks": 1}
    record["gradients"] = None
    assert {chart.name for chart in charts(record)} == {"throughput", "ladder", "epoch", "memory"}


def test_the_table(record: Record) -> None:
    made = {row["rung"]: row for row in rows(record)}
    assert list(made) == ["plain", "quick", "two (2 ranks)", "far"]
    assert made["quick"]["speed-up (95%)"] == "1.87 (1.68 - 2.06)"
    assert made["quick"]["top-1"] == "89.00 ± 0.30"
    assert made["quick"]["gradient error"] == "2.0e-06 / 2.0e-06"
    assert made["far"]["against the first"] == "needs CUDA"
    text = markdown(record)
    cells = [line.count("|") for line in text.splitlines() if line.startswith("|")]
    # The table of rungs, and that of their seeds: each with a heading and a rule.
    assert (len(cells), len(set(cells[:6])), len(set(cells[6:]))) == (6 + 6, 1, 1)
    assert "- far: it needs CUDA" in text


def test_one_timed_rung_is_a_page(record: Record, tmp_path: Path) -> None:
    """All but the first cannot run here: every chart has one bar."""
    del record["arms"][1:3]
    write_page(record, tmp_path)
    assert (tmp_path / "charts" / "throughput.png").is_file()


@pytest.mark.slow
def test_many_rungs_leave_room_for_what_is_drawn(record: Record) -> None:
    """Signs run out, and names are longer than the plot is high; what squeezes it to nothing is a warning."""
    rungs = [
        arm(f"a switch of the catalogue, {n}", "A", timing=timing(90 + n, 1.0), training=training(90, "loses"))
        for n in range(40)
    ]
    drawn = charts(completed({**record, "arms": [record["arms"][0], *rungs]}))
    many = {each.name: each.figure for each in drawn}
    many["difference"].draw_without_rendering()
    for name, entries in (("accuracy", 41), ("loss", 41), ("loss_difference", 40)):
        figure = many[name]
        figure.draw_without_rendering()
        (axes,) = figure.axes
        assert axes.get_window_extent().height > 2.5 * figure.dpi
        (legend,) = figure.legends
        assert legend.get_window_extent().ymax <= axes.get_window_extent().ymin
        assert len(legend.get_texts()) == entries


def test_brackets_are_shown_on_the_terminal(record: Record, capsys: pytest.CaptureFixture[str]) -> None:
    """The terminal's library reads words in brackets as styles, and ends where it cannot."""
    record["arms"][0]["name"] = record["reference"] = "plain [fp32]"
    record["arms"][1]["training"]["reason"] = "none in [/data/x]"
    print_table(record)
    shown = capsys.readouterr().out
    assert "plain [fp32]" in shown
    assert "[/data/x]" in shown


@pytest.mark.parametrize(("seconds", "text"), [(3.0, "3.0 s"), (600, "10.0 min"), (9000, "2.5 h"), (1e6, "11.6 d")])
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_one_round_and_one_seed_are_named_as_such(record: Record) -> None:
    assert "3 seeds, 3 rounds of timing" in markdown(record)
    assert "3 seeds · 3 rounds of timing" in page(record, [])
    record["settings"] |= {"seeds": 1, "rounds": 1}
    speedup = {"ratio": 1.87, "low": None, "high": None, "rounds": 1}
    record["arms"][1]["timing"] |= {"speedup": speedup, "speedup_before": speedup}
    assert "1 seed, 1 round of timing. " in markdown(record)
    assert "| 1.87 (one round) |" in markdown(record)
    assert "1 seed · 1 round of timing<" in page(record, [])
    assert "<span class='big'>1.87x</span> one round, no interval<br>" in page(record, [])
    speedup["rounds"] = 0
    assert "<span class='big'>1.87x</span> no interval<br>" in page(record, [])
