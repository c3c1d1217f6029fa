"""`benchmarks/gpu.py` and others, small on a CPU: what they run, what is made of failures, what is on their pages."""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from PIL import Image
from safetensors.torch import save_file

from pycls_fast import build
from pycls_fast.config import load_config
from pycls_fast.errors import UserError
from tests.factories import photographs, script

gpu, memory_plan = script("gpu"), script("memory_plan")

SMALL = ["--small", "--device", "cpu", "--steps", "1", "--warmup-steps", "1", "--repeats", "2", "--limit", "2000"]


@pytest.mark.parametrize("name", ["finetune", "gains", "label_errors", "ledger_quick", "plan_here", "timm_predictions"])
def test_help_and_a_mistyped_key_start_nothing(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for words, status, said in (
        (["--help"], 0, f"benchmarks/{name}.py"),
        (["a", "b", "c", "sed=1"], 2, "sed=1: write key=value; the keys are"),
        (["a", "b", "c", "seeds"], 2, "seeds: write key=value; the keys are"),
    ):
        monkeypatch.setattr(sys, "argv", [f"{name}.py", *words])
        with pytest.raises(SystemExit) as ended:
            script(name).main()
        assert ended.value.code == status
        assert said in "".join(capsys.readouterr())
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_the_rows_are_settings_that_a_gpu_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is accepted by what checks the configuration for a GPU, and none is measured twice."""
    monkeypatch.setattr(build.device, "has_compiler", lambda kind: True)
    options, refused = gpu.parse(["--page-only"]), []
    everything = list(gpu.rows())
    for row in everything:
        if row.kind == "ours":
            line = gpu.command(row, row.subject.batch, Path("out.json"), options)
            tools = {"mode", "steps", "warmup_steps", "repeats", "output"}
            overrides = [part for part in line[4:] if part.partition("=")[0] not in tools]
            try:
                build.switches(load_config(row.subject.config, overrides), torch.device("cuda"))
            except UserError as error:
                refused.append(f"{row.label}: {error.lines}")
    assert refused == []
    files = [row.file(Path("x")) for row in everything]
    assert len(set(files)) == len(files)
    assert not any("=" in str(file) for file in files)


def _row(name: str = "speed=fast precision=bf16_params") -> Any:
    return next(row for row in gpu.rows() if row.name == name)


def test_out_of_memory_is_tried_with_less_and_failures_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options, batches, fits = gpu.parse(["--page-only"]), [], 64

    def run(line: list[str], **named: Any) -> Any:
        (batch,) = (int(part.partition("=")[2]) for part in line if part.startswith("data.global_batch_size="))
        batches.append(batch)
        if batch > fits:
            return subprocess.CompletedProcess(line, 1, "", "Traceback\ntorch.OutOfMemoryError: CUDA out of memory.")
        if fits == 64:
            record = {
                "global_batch_size": batch, "device": "one H200", "versions": {"torch": "2"},
                "forward_flops_per_image": int(250e9),
                "matmul": {"dtype": "bfloat16", "flops_per_second": 790e12},
                "train": {"images_per_second": 800.0, "step_seconds_p50": 0.08, "step_seconds_p10": 0.079,
                          "step_seconds_p90": 0.083, "memory_peak_bytes": 2**36},
            }  # fmt: skip
            (file,) = (Path(part.partition("=")[2]) for part in line if part.startswith("output="))
            file.write_text(json.dumps(record))
            return subprocess.CompletedProcess(line, 0, "", "")
        return subprocess.CompletedProcess(line, 2, "", "error: speed.attention: no such kernel here; use another\n")

    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setattr(gpu, "planned", lambda record, device: 2**35)
    gpu.measure(_row(), tmp_path, options)
    assert batches == [256, 128, 64]
    # 3 x 250 GFLOP x 800 a second are 600 TFLOP/s.
    expected = (
        "| `speed=fast precision=bf16_params` | 64 | 800.0 | 80.0 (79.0 to 83.0) | 600.0 | 60.6% | 75.9% of 790 | "
        "0.889 | 64.0 | 32.0 |"
    )
    timm = {"global_batch_size": 64, "train": {"images_per_second": 900.0}}
    theirs = _row("timm, compiled (default), default attention")
    theirs.file(tmp_path).write_text(json.dumps({"status": "ok", "record": _whole(timm)}))
    assert expected in gpu.page(tmp_path, "python")
    fits = 0
    batches.clear()
    assert gpu.measure(_row(), tmp_path, options) == {"status": "out of memory"}
    assert batches == [256, 128, 64, 32]
    fits = 1000
    told = "refused: speed.attention: no such kernel here; use another"
    assert gpu.measure(_row(), tmp_path, options) == {"status": told}
    assert f"| {told} |" in gpu.page(tmp_path, "python")


def test_what_killed_a_row_is_told_not_its_last_note(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "run", lambda line, **_: subprocess.CompletedProcess(line, -9, "", "note: slow\n"))
    assert gpu.measure(_row(), tmp_path, gpu.parse(["--page-only"])) == {"status": "killed by SIGKILL"}


def test_a_row_that_the_end_cuts_off_has_no_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is run again, those that are too slow are not."""

    def run(line: list[str], *, timeout: float, **named: Any) -> Any:
        raise subprocess.TimeoutExpired(line, timeout)

    monkeypatch.setattr(subprocess, "run", run)
    for ends, kept in ((time.monotonic(), False), (math.inf, True)):
        gpu.measure(_row(), tmp_path, gpu.parse(["--page-only"]), ends)
        assert _row().file(tmp_path).exists() == kept


def _whole(record: dict[str, Any]) -> dict[str, Any]:
    spread = {"step_seconds_p50": 0.1, "step_seconds_p10": 0.1, "step_seconds_p90": 0.1}
    return {**record, "train": {**spread, **record["train"]}}


@pytest.mark.slow
@pytest.mark.parametrize(
    "select",
    [
        "vit_h16: tests: *",
        "vit_h16: products: *",
        "vit_h16: fastest: timm, compiled (default), cudnn attention",
        "resnet50: ladder: speed=reference*",
    ],
)
def test_small(tmp_path: Path, select: str) -> None:
    """One row of each kind; the whole list takes about ten minutes: python benchmarks/gpu.py --small --device cpu."""
    assert gpu.main([*SMALL, "--out", str(tmp_path / "page.md"), "--select", select]) == 0
    (file,) = (tmp_path / "page").rglob("*.json")
    found = json.loads(file.read_text())
    text = (tmp_path / "page.md").read_text()
    if "tests" in select:
        assert found["failed"] == []
        assert found["status"].startswith("1 passed")
        return
    assert found["status"] == "ok"
    if "products" in select:
        assert text.count("first of the MLP: ") == 3
        return
    part = found["record"]["train"]
    assert part["images_per_second"] * part["step_seconds_p50"] == pytest.approx(4)
    assert found["record"]["matmul"]["size"] == 64
    assert f"| {part['images_per_second']:,.1f} |" in text
    if "timm" not in select:
        assert found["planned_bytes"] == pytest.approx(part["memory_peak_bytes"], rel=0.05)


@pytest.mark.slow
def test_the_page_has_what_the_memory_plan_takes() -> None:
    lines, page = list(memory_plan.paper()), memory_plan.PAGE.read_text().splitlines()
    assert len(lines) == 8
    assert set(lines) <= set(page)


@pytest.mark.slow
# timm leaves the files of its images open.
@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.parametrize(("training", "batches"), [(True, 1), (False, 2)])
def test_all_pipelines_load_as_many_images(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, training: bool, batches: int
) -> None:
    """Of 60 in batches of 50, of which their rates are."""
    pipeline = script("input_pipeline")
    for number in range(60):
        file = tmp_path / "images" / "ab"[number % 2] / f"{number}.jpg"
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (8, 8)).save(file)
    files = pipeline.scan_classes(tmp_path / "images")
    options = argparse.Namespace(path=tmp_path / "images", workers=0, interpolation="bilinear")
    monkeypatch.setattr(pipeline, "deque", lambda found, maxlen: sum(1 for _ in found))
    arms = pipeline.pipelines(options, files, pipeline.pack_copies(files, tmp_path), training=training)
    assert {arm.name: arm.step() for arm in arms} == dict.fromkeys((arm.name for arm in arms), batches)


@pytest.mark.slow
def test_predictions_of_a_few_images_are_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Fewer than there are classes."""
    save_file(timm.create_model("test_vit").state_dict(), tmp_path / "mine.safetensors")
    photographs(tmp_path / "images", ("a", "b"), 2, sides=(170, 200))
    monkeypatch.setattr("sys.argv", ["", str(tmp_path / "mine.safetensors"), "test_vit", str(tmp_path / "images")])
    script("timm_predictions").main()
    assert capsys.readouterr().out.startswith("4 of 4 classes are timm's; their probabilities differ by at most ")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:DTensor random operators")
def test_the_table_of_sharded_optimizers_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = ["--sharded", "--rounds", "1", "--optimizers", "sgd", "--out", str(tmp_path / "page.md")]
    monkeypatch.setattr("sys.argv", ["", *given])
    script("optimizers").main()
    assert (tmp_path / "page.md").read_text().startswith("### sgd, 1 rounds\n\n| on |")
