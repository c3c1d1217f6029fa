"""`tools/ledger.py report` draws the page of any ledger.json, and says in one line why it cannot."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pycls_fast.errors import UserError
from pycls_fast.ledger.charts import charts
from pycls_fast.ledger.page import page
from pycls_fast.ledger.reading import read_ledger
from pycls_fast.ledger.report import redraw
from pycls_fast.ledger.table import markdown

Record = dict[str, Any]

RESULTS = Path(__file__).parents[3] / "docs" / "results"
LEDGERS = sorted(RESULTS.glob("*/ledger.json"))


def small() -> Record:
    """The committed report with the most kinds of numbers, cut to two rungs and short curves."""
    record: Record = json.loads((RESULTS / "ledger_meta2022" / "ledger.json").read_text())
    record["arms"] = [arm for arm in record["arms"] if arm["status"] == "measured"][:3:2]
    for arm in record["arms"]:
        arm["timing"]["switches"] = {}
        arm["training"]["runs"] = arm["training"]["runs"][:2]
        for run in arm["training"]["runs"]:
            run |= {"evaluations": [], "curve": {key: values[:3] for key, values in run["curve"].items()}}
    return {**record, "ladder": {}, "base": [], "environment": {"processor": "P", "git": {"commit": "0", "changed": 0}}}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "ledger.json"
    path.write_text(json.dumps(small()))
    return path


@pytest.mark.slow
def test_the_report_is_beside_its_record_or_elsewhere(
    file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "charts").mkdir()
    for name in ("epoch.png", "mine.png"):
        (tmp_path / "charts" / name).touch()
    before = file.read_bytes()
    assert redraw([str(file)]) == 0
    assert f"report: {tmp_path / 'index.html'}" in capsys.readouterr().out
    # Charts of earlier pages that this one does not have.
    charts = {path.name for path in (tmp_path / "charts").iterdir()}
    assert {"mine.png", "throughput.png"} <= charts
    assert "epoch.png" not in charts
    assert file.read_bytes() == before
    assert redraw([str(file), f"output={tmp_path / 'a' / 'b'}"]) == 0
    for name in ("ledger.md", "index.html", "charts/difference.png"):
        assert (tmp_path / "a" / "b" / name).read_bytes() == (tmp_path / name).read_bytes()


@pytest.mark.parametrize("path", LEDGERS, ids=[path.parent.name for path in LEDGERS])
def test_committed_reports_can_be_drawn(path: Path) -> None:
    record = read_ledger(path)
    assert {"throughput", "ladder"} <= {chart.name for chart in charts(record)}
    timings = [arm["timing"] for arm in record["arms"] if arm["timing"]]
    for timing in timings[1:]:
        quotient = timing["images_per_second"] / timings[0]["images_per_second"]
        assert timing["speedup"]["ratio"] == pytest.approx(quotient)


def places(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every key of every object inside."""
    if isinstance(value, dict):
        for key, inside in value.items():
            yield (*at, key)
            yield from places(inside, (*at, key))
    elif isinstance(value, list):
        for number, inside in enumerate(value):
            yield from places(inside, (*at, number))


@pytest.mark.slow
def test_whatever_is_missing_is_left_out_or_refused(tmp_path: Path) -> None:
    """Each key by itself, once for all rungs and seeds."""
    whole, file = small(), tmp_path / "ledger.json"
    whole["gradients"]["total"]["exponents"] = {"-3": 1}
    refused = set()
    different = {tuple(part for part in place if isinstance(part, str)): place for place in places(whole)}
    for *above, key in different.values():
        record = copy.deepcopy(whole)
        inside: Any = record
        for step in above:
            inside = inside[step]
        del inside[key]
        file.write_text(json.dumps(record))
        try:
            found = read_ledger(file)
        except UserError:
            refused.add(key)
            continue
        assert page(found, [])
        assert markdown(found)
        if {"timing", "training", "settings"} & set(above):
            charts({**found, "gradients": None})
    assert refused == {
        "kind", "arms", "name", "images_per_second", "ratio", "commit", "mean", "difference", "total", "loss_scale",
        "exponents", "below_subnormal", "below_subnormal_scaled", "updates_lost_float16", "updates_lost_bfloat16",
        "epoch", "loss",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("{", "not JSON"),
        ("[" * 100_000, "not JSON"),
        ("[]", "not a ledger.json"),
        ('{"kind": "comparison"}', "not a ledger.json"),
        ('{"kind": "ledger"}', "arms: Field required; the file is damaged"),
        ('{"kind": "ledger", "arms": []}', "arms: List should have at least 1 item"),
        ('{"kind": "ledger", "arms": [{"name": "a", "timing": {"images_per_second": 0}}]}', "images_per_second: Input"),
        (
            '{"kind": "ledger", "arms": [{"name": "a", "training": {"runs": [{"curve": {"epoch": [1]}}]}}]}',
            "arms.0.training.runs.0.curve: Value error, 1 epochs and 0 losses",
        ),
    ],
)
def test_bad_files_are_one_line(text: str, line: str, file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file.write_text(text)
    assert redraw([str(file)]) == 2
    (said,) = capsys.readouterr().err.splitlines()
    assert said.startswith(f"error: {file}: ")
    assert line in said
    assert [path.name for path in file.parent.iterdir()] == ["ledger.json"]


@pytest.mark.parametrize(
    ("more", "line"),
    [
        ([], "error: report: needs one file; got none; use report LEDGER.json [output=FOLDER]"),
        (["a", "b"], "error: report: needs one file; got a b; use report LEDGER.json [output=FOLDER]"),
        (["nowhere.json"], "error: nowhere.json: cannot be read (No such file or directory); give the path of a "),
        (["."], "error: .: cannot be read (Is a directory); give the path of a ledger.json"),
    ],
)
def test_bad_arguments_are_one_line(
    more: list[str], line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert redraw(more) == 2
    (said,) = capsys.readouterr().err.splitlines()
    assert said.startswith(line)


def test_a_folder_that_cannot_be_written_is_one_line(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert redraw([str(file), f"output={file}"]) == 2
    (said,) = capsys.readouterr().err.splitlines()
    assert said == f"error: output: {file} cannot be written (File exists); choose another folder"
