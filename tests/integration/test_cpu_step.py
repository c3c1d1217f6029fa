"""`benchmarks/cpu_step.py`: the comparison with timm's plain loop, shrunk."""

from __future__ import annotations

import importlib.util
import json
import statistics
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.integration.runs import ROOT

# Scripts are no package; another project's `benchmarks` may be installed.
_SPEC = importlib.util.spec_from_file_location("cpu_step", ROOT / "benchmarks" / "cpu_step.py")
assert _SPEC is not None
assert _SPEC.loader is not None
cpu_step: Any = importlib.util.module_from_spec(_SPEC)
sys.modules["cpu_step"] = cpu_step
_SPEC.loader.exec_module(cpu_step)


@pytest.mark.slow
def test_record_and_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [
        "--models",
        "vit_ti16",
        "--image-size",
        "32",
        "--batch",
        "2",
        "--rounds",
        "2",
        "--choosing-rounds",
        "1",
    ]
    assert cpu_step.main([*arguments, "--no-compile", "--out", str(tmp_path)]) == 0
    whole = json.loads((tmp_path / "cpu_step.json").read_text(encoding="utf-8"))
    assert whole["settings"]["batch"] == 2
    assert set(whole["environment"]) >= {"processor", "versions", "threads", "command"}
    (record,) = whole["models"]
    assert len(record["tried"]) == len(cpu_step.vit_peers(compiled=False)) == 6
    medians = [statistics.median(peer["seconds"]) for peer in record["tried"]]
    assert medians == sorted(medians)
    # The fastest with float32 weights is one of those that go on, and the fastest of all.
    with_float32 = next(peer["name"] for peer in record["tried"] if peer["precision"] != "bfloat16")
    assert set(record["peers"]) == {with_float32, record["tried"][0]["name"]}
    results = {result["name"]: result for result in record["results"]}
    assert set(results) == {*cpu_step.OURS, *record["peers"]}
    assert all(len(result["seconds"]) == 2 for result in results.values())
    text = (tmp_path / "cpu_step.md").read_text(encoding="utf-8")
    for name in (*results, *(peer["name"] for peer in record["tried"])):
        assert f"| {name} |" in text
    assert "| speed=fast precision=amp_bf16 |" in capsys.readouterr().out
    fast, slow = results["speed=fast precision=amp_bf16"], results["speed=reference precision=fp32"]
    pairs = [old / new for old, new in zip(slow["seconds"], fast["seconds"], strict=True)]
    assert cpu_step.ratio(record, fast["name"], slow["name"]).spread.p50 == pytest.approx(statistics.median(pairs))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["vit_s16", "resnet50"])
def test_both_sides_have_the_same_network(name: str) -> None:
    """As many parameters as timm's; what is measured has no drop-path, smoothing or mixing."""
    import timm

    subject = cpu_step.SUBJECTS[name]
    with torch.device("meta"):
        theirs = sum(p.numel() for p in timm.create_model(subject.timm, num_classes=cpu_step.CLASSES).parameters())
    step, config = cpu_step.our_step(subject, cpu_step.OURS["speed=fast precision=amp_bf16"], 2, 32)
    ours = sum(p.numel() for p in trainer_of(step).step.parameters)
    if name == "vit_s16":
        # Positions of 4 tokens and the class token instead of 196.
        ours += 192 * 384
    assert ours == theirs
    assert config.model.drop_path == config.loss.label_smoothing == config.augment.erase_probability == 0
    assert config.augment.mixup_alpha == config.augment.cutmix_alpha == 0


def trainer_of(step: Any) -> Any:
    """The trainer that a step of ours calls."""
    return next(cell.cell_contents for cell in step.__closure__ if isinstance(cell.cell_contents, cpu_step.Trainer))


def test_mistakes_on_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, message in [
        (["--models", "vit_s17"], "--models: vit_s17: unknown; use any of vit_s16"),
        (["--clock", "process"], "--clock process: adds up all threads; use it with --threads 1"),
    ]:
        with pytest.raises(SystemExit) as caught:
            cpu_step.parse(arguments)
        assert caught.value.code == 2
        assert message in capsys.readouterr().err
