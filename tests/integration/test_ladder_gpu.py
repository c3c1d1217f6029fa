"""`benchmarks/ladder_gpu.py`: what it runs, what it makes of failures, and the page; shrunk on a CPU."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from pycls_fast import build
from pycls_fast.config import RunConfig, load_config
from pycls_fast.errors import UserError
from pycls_fast.speed import CATALOGUE
from pycls_fast.speed.cards.images import IMAGES
from tests.integration.runs import ROOT

# Scripts are no package; another project's `benchmarks` may be installed.
_SPEC = importlib.util.spec_from_file_location("ladder_gpu", ROOT / "benchmarks" / "ladder_gpu.py")
assert _SPEC is not None
assert _SPEC.loader is not None
ladder_gpu: Any = importlib.util.module_from_spec(_SPEC)
sys.modules["ladder_gpu"] = ladder_gpu
_SPEC.loader.exec_module(ladder_gpu)

PAGE, SUBJECTS = ladder_gpu.PAGE, ladder_gpu.SUBJECTS
command, load, main, measure = ladder_gpu.command, ladder_gpu.load, ladder_gpu.main, ladder_gpu.measure
page, parse, row, rungs = ladder_gpu.page, ladder_gpu.parse, ladder_gpu.row, ladder_gpu.rungs
CUDA = torch.device("cuda")
SHRUNK = ["--shrink", "--device", "cpu", "--steps", "1", "--warmup-steps", "1", "--repeats", "2", "--models", "vit_b16"]


def ours(rung: Any) -> list[str]:
    """The overrides of a rung that is ours, without the keys of the tool."""
    line = command(rung, 8, Path("out.json"), parse(["--page-only"]))
    own = {"mode", "steps", "warmup_steps", "repeats", "output"}
    return [part for part in line[4:] if part.partition("=")[0] not in own]


# The other ViTs have the same rungs.
@pytest.mark.slow
@pytest.mark.parametrize("name", ["vit_h16", "resnet50"])
def test_the_rungs_are_settings_that_a_gpu_runs(name: str) -> None:
    """Each is accepted by what checks the configuration for a GPU."""
    refused = []
    for rung in rungs(SUBJECTS[name]):
        if not rung.peer:
            try:
                build.switches(load_config(name, ours(rung)), CUDA)
            except UserError as error:
                refused.append(f"{rung.table}: {rung.name}: {error.lines}")
    assert refused == []


@pytest.mark.parametrize("name", ["vit_h16", "resnet50"])
def test_every_switch_that_is_tried_alone_has_something_to_do(name: str) -> None:
    @cache
    def loaded(overrides: tuple[str, ...]) -> RunConfig:
        return load_config(name, list(overrides))

    for rung in rungs(SUBJECTS[name]):
        if rung.table != "alone":
            continue
        # The configuration is composed once for all values of a switch.
        by_hand = dict(part.removeprefix("speed.").split("=") for part in ours(rung) if part.startswith("speed."))
        config = loaded(tuple(part for part in ours(rung) if not part.startswith("speed.")))
        config = config.with_values(speed=by_hand)
        switches = build.switches(config, CUDA)
        assert {key: switches[key] for key in by_hand} == by_hand
        # What prepares images is no part of a step on a batch that is on the device.
        switch = next(switch for switch in CATALOGUE if switch.name == rung.name.partition("=")[0])
        assert switch not in IMAGES


def test_every_switch_of_the_step_is_tried_alone_and_no_file_is_used_twice(tmp_path: Path) -> None:
    for subject in SUBJECTS.values():
        everything = list(rungs(subject))
        files = [rung.file(tmp_path) for rung in everything]
        assert len(set(files)) == len(files)
        assert not any("=" in str(file.relative_to(tmp_path)) for file in files)
        alone = {rung.name for rung in everything if rung.table == "alone"}
        kind = "vit" if subject.is_vit else "resnet"
        expected = {
            f"{switch.name}={value}"
            for switch in CATALOGUE
            if kind in switch.applies_to and switch not in IMAGES
            for value in switch.values
            if switch.requires.get(value) != "cpu"
        }
        # A switch that has nothing but its reference on a GPU is left out.
        assert alone <= expected
        assert all(sum(other.startswith(one.partition("=")[0] + "=") for other in expected) == 1
                   for one in expected - alone)  # fmt: skip


def test_the_page_in_the_repository_is_what_the_records_say() -> None:
    text = PAGE.read_text(encoding="utf-8")
    line = text.partition("Made by `")[2].partition("`")[0]
    assert text == page(list(SUBJECTS.values()), PAGE.with_suffix(""), line), (
        "run: python benchmarks/ladder_gpu.py --page-only"
    )


def rung() -> Any:
    return next(rung for rung in rungs(SUBJECTS["vit_h16"]) if rung.name == "speed.attention=sdpa")


def test_out_of_memory_is_tried_with_less_and_failures_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = parse(["--page-only"])
    batches: list[int] = []

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
    fits = 64
    found = measure(rung(), tmp_path, options)
    assert batches == [256, 128, 64]
    assert load(rung(), tmp_path) == {"rung": rung().name, **found}
    # 3 x 250 GFLOP x 800 a second are 600 TFLOP/s.
    assert row(rung(), found, None) == (
        "| `+ speed.attention=sdpa` | 64 | 800.0 | 80.0 (79.0 to 83.0) | 600.0 | 60.6% | 75.9% of 790 | 64.0 |"
    )
    fits = 0
    batches.clear()
    assert measure(rung(), tmp_path, options) == {"status": "out of memory"}
    assert batches == [256, 128, 64, 32]
    fits = 1000
    assert measure(rung(), tmp_path, options) == {
        "status": "refused: speed.attention: no such kernel here; use another"
    }
    assert "| refused: speed.attention: no such kernel here" in row(rung(), load(rung(), tmp_path), None)


# What timm's benchmark.py does with these options: CSV unless asked otherwise, and status 0 for a model that failed.
STAND_IN = """
import json, sys
value = dict(zip(sys.argv[1:], sys.argv[2:]))
batch, mode = int(value["-b"]), value.get("--torchcompile-mode")
if batch > 2:
    found = {"model": value["--model"], "error": "CUDA out of memory. Tried to allocate 2 GiB"}
elif mode is None:
    found = {"model": value["--model"], "train_samples_per_sec": 50.0, "train_batch_size": batch}
else:
    found = {"model": value["--model"], "error": f"{mode}: no kernel\\nmore"}
with open(value["--results-file"], "w") as file:
    file.write(json.dumps(found) if value.get("--results-format") == "json" else ",".join(found))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        (
            "default",
            {
                "status": "ok",
                "record": {
                    "global_batch_size": 2,
                    "train": {"images_per_second": 50.0, "step_seconds_p50": 0.04},
                },
            },
        ),
        ("max-autotune-no-cudagraphs", {"status": "failed: max-autotune-no-cudagraphs: no kernel"}),
    ],
)
def test_what_timms_own_benchmark_writes_is_read(tmp_path: Path, mode: str, expected: dict[str, Any]) -> None:
    (tmp_path / "benchmark.py").write_text(STAND_IN, encoding="utf-8")
    (own,) = (r for r in rungs(SUBJECTS["resnet50"]) if r.peer == "benchmark" and r.settings[0] == mode)
    assert measure(own, tmp_path / "records", parse([*SHRUNK, "--timm-source", str(tmp_path)])) == expected
    assert load(own, tmp_path / "records") == {"rung": own.name, **expected}


def test_what_has_a_result_is_not_run_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[str] = []

    def attempt(line: Any, rung: Any, file: Path, limit: float) -> dict[str, Any]:
        ran.append(rung.name)
        return {"status": "stopped after 900 s"}

    monkeypatch.setattr(ladder_gpu, "attempt", attempt)
    arguments = [*SHRUNK, "--out", str(tmp_path / "page.md"), "--select", "ladder: *"]
    assert main(arguments) == 0
    first = len(ran)
    assert first == len(ladder_gpu.VIT_LADDER)
    assert main(arguments) == 0
    assert len(ran) == first
    assert main([*arguments, "--again", "--budget", "-1"]) == 0
    assert len(ran) == first
    assert main([*arguments, "--again"]) == 0
    assert len(ran) == 2 * first
    text = (tmp_path / "page.md").read_text()
    assert text.count("stopped after 900 s") == first
    assert text.count("not run") > 30


@pytest.mark.slow
@pytest.mark.parametrize("select", ["alone: layout=batch_second", "preset: speed=meta2022", "timm: *eager, default*"])
def test_shrunk(tmp_path: Path, select: str) -> None:
    assert main([*SHRUNK, "--out", str(tmp_path / "page.md"), "--select", select]) == 0
    (file,) = (tmp_path / "page").rglob("*.json")
    found = json.loads(file.read_text())
    assert found["status"] == "ok"
    part = found["record"]["train"]
    assert part["images_per_second"] * part["step_seconds_p50"] == pytest.approx(4)
    assert found["record"]["matmul"]["size"] == 64
    (line,) = (line for line in (tmp_path / "page.md").read_text().splitlines() if "| 4 |" in line)
    assert f"| {part['images_per_second']:,.1f} |" in line
