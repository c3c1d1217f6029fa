"""A run from the command's configuration to the files it leaves."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from pycls_fast.config import load_config
from pycls_fast.errors import UserError
from pycls_fast.train import train
from tests.integration.runs import TINY, command, newest_checkpoint, records, run_process


def run(run_dir: Path, digits: Path, *overrides: str, config_name: str = "vit_digits") -> int:
    config = load_config(config_name, [*TINY, f"data.root={digits}", f"run_dir={run_dir}", *overrides])
    return train(config)


def test_leaves_everything_behind(tmp_path: Path, digits: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(tmp_path, digits, "runtime.tensorboard=true", "optim.ema_decay=0.9") == 0
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {
        "config.yaml",
        "environment.json",
        "metrics.jsonl",
        "summary.json",
        "checkpoints",
        "tensorboard",
        "curves.png",
    }
    assert list((tmp_path / "tensorboard").glob("events*"))
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
    train_records = records(tmp_path, "train")
    assert [record["step"] for record in train_records] == list(range(1, 45))
    needed = ["loss", "lr", "grad_norm", "images_per_second", "step_seconds", "data_wait_fraction", "memory_peak_bytes"]
    for record in train_records:
        assert all(record[name] is not None for name in needed), record
        assert 0 <= record["data_wait_fraction"] <= 1
    evaluations = records(tmp_path, "eval")
    assert [(r["step"], r["split"], r["weights"]) for r in evaluations] == [
        (22, "val", "model"),
        (22, "val", "ema"),
        (44, "val", "model"),
        (44, "val", "ema"),
    ]
    assert {record["count"] for record in evaluations} == {359}
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["final"] == evaluations[-1]
    assert summary["best"] == max((evaluations[1], evaluations[3]), key=lambda r: r["top1"])
    assert summary["steps"] == 44
    assert summary["epochs"] == 2
    assert summary["world_size"] == 1
    assert summary["images_per_second"] > 0
    printed = capsys.readouterr().out
    assert f"top-1 {summary['final']['top1']:.2f}%" in printed
    assert str(tmp_path) in printed


@pytest.mark.parametrize("config_name", ["vit_digits", "resnet_digits"])
def test_learns(tmp_path: Path, digits: Path, config_name: str) -> None:
    """The loss falls far below that of guessing (ln 10) and most of the unseen digits are recognised."""
    lean = [] if config_name == "resnet_digits" else list(TINY[:5])
    extra = [
        "data.image_size=8",
        "schedule.epochs=6",
        "schedule.warmup_epochs=1",
        "augment=none",
        "optim.lr=0.004",
    ]
    if config_name == "resnet_digits":
        extra = [
            "data.image_size=8",
            "schedule.epochs=2",
            "schedule.warmup_epochs=0.5",
            "augment=none",
            "optim.lr=0.02",
        ]
    config = load_config(
        config_name,
        [
            *lean,
            *extra,
            f"data.root={digits}",
            f"run_dir={tmp_path}",
            "runtime.tensorboard=false",
            "speed=fast",
        ],
    )
    assert train(config) == 0
    final = records(tmp_path, "eval")[-1]
    assert final["top1"] > 70
    assert final["loss"] < 1.2


@pytest.mark.parametrize("name", ["fp32", "amp_bf16", "amp_fp16"])
def test_precisions_follow_float32(tmp_path: Path, digits: Path, name: str) -> None:
    """Half precision rounds, so its losses stay near float32's over the first steps, and are not the same."""
    common = ["schedule.max_steps=8", "optim.clip_norm=1.0"]
    run(tmp_path / "fp32", digits, *common)
    run(tmp_path / "other", digits, *common, f"precision={name}")
    reference = [record["loss"] for record in records(tmp_path / "fp32", "train")]
    other = [record["loss"] for record in records(tmp_path / "other", "train")]
    assert other == pytest.approx(reference, abs=0.02)
    assert (other == reference) == (name == "fp32")
    assert ("loss_scale" in records(tmp_path / "other", "train")[0]) == (name == "amp_fp16")


def test_overflow_skips_the_step_and_lowers_the_scale(tmp_path: Path, digits: Path) -> None:
    run(tmp_path, digits, "precision=amp_fp16", "precision.loss_scale_start=1e30", "schedule.max_steps=4")
    train_records = records(tmp_path, "train")
    assert [record["skipped_steps"] for record in train_records] == [1, 1, 1, 1]
    assert [record["loss_scale"] for record in train_records] == [1e30 * 0.5**n for n in (1, 2, 3, 4)] or [
        record["loss_scale"] for record in train_records
    ] == pytest.approx([1e30 * 0.5**n for n in (1, 2, 3, 4)], rel=1e-6)
    weights = newest_checkpoint(tmp_path)
    run(tmp_path.with_name("fresh"), digits, "schedule.max_steps=1", "optim.lr=1e-30", "optim.weight_decay=0")
    untouched = newest_checkpoint(tmp_path.with_name("fresh"))
    assert all(torch.equal(value, untouched["model"][name]) for name, value in weights["model"].items())


def test_scale_under_the_floor_stops_with_advice(tmp_path: Path, digits: Path) -> None:
    with pytest.raises(UserError, match=r"precision.loss_scale_floor: the loss scale fell to .*; lower optim.lr"):
        run(
            tmp_path,
            digits,
            "precision=amp_fp16",
            "precision.loss_scale_start=1e30",
            "precision.loss_scale_floor=3e29",
        )


def test_loss_that_is_no_number_stops_with_advice(tmp_path: Path, digits: Path) -> None:
    with pytest.raises(UserError, match=r"optim.lr: the loss or a gradient is not finite at step"):
        run(tmp_path, digits, "optim.lr=1e30", "schedule.warmup_epochs=0")


def test_accumulation_does_not_change_the_losses(tmp_path: Path, digits: Path) -> None:
    """Two microbatches of 32 are one batch of 64 (the ViT has nothing that depends on the batch)."""
    common = ["schedule.max_steps=10", "optim=sgd", "optim.lr=0.05", "optim.clip_norm=1.0"]
    run(tmp_path / "one", digits, *common)
    run(tmp_path / "two", digits, *common, "optim.accumulation_steps=2")
    one, two = (records(tmp_path / name, "train") for name in ("one", "two"))
    for name in ("loss", "grad_norm"):
        assert [r[name] for r in two] == pytest.approx([r[name] for r in one], rel=1e-5)


def test_max_steps_leaves_the_curve(tmp_path: Path, digits: Path) -> None:
    run(tmp_path / "whole", digits, "schedule.epochs=1", "schedule.warmup_epochs=0.5")
    run(tmp_path / "part", digits, "schedule.epochs=1", "schedule.warmup_epochs=0.5", "schedule.max_steps=7")
    whole = [r["lr"] for r in records(tmp_path / "whole", "train")]
    part = [r["lr"] for r in records(tmp_path / "part", "train")]
    assert part == whole[:7]
    assert records(tmp_path / "part", "eval")[-1]["step"] == 7


def test_same_seed_same_run_and_another_seed_another(tmp_path: Path, digits: Path) -> None:
    losses = {}
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        run(tmp_path / name, digits, "schedule.max_steps=5", f"seed={seed}")
        losses[name] = [r["loss"] for r in records(tmp_path / name, "train")]
    assert losses["a"] == losses["b"]
    assert losses["a"] != losses["c"]


def test_scores_what_training_scored(tmp_path: Path, digits: Path) -> None:
    """tools/test_net.py finds the run's configuration and best checkpoint by itself."""
    run(tmp_path / "run", digits)
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    arguments = command(
        f"weights={tmp_path / 'run'}", f"output={tmp_path / 'scores.json'}", tool="test_net", config_name=None
    )
    done = run_process(arguments, cwd=tmp_path)
    scores = json.loads((tmp_path / "scores.json").read_text())
    for name in ("top1", "top5", "loss", "count"):
        assert scores[name] == pytest.approx(summary["best"][name], rel=1e-6)
    assert f"{scores['top1']:.2f}%" in done.stdout
    arguments = command(
        f"weights={tmp_path / 'run' / 'checkpoints' / 'best.pt'}",
        "split=train",
        tool="test_net",
        config_name=None,
    )
    assert "1,438" in run_process(arguments, cwd=tmp_path).stdout
    done = run_process([*arguments[:-1], "split=tset"], cwd=tmp_path, expect=2)
    assert done.stderr == "error: split: the data has train, val; got tset\n"


def test_starts_from_weights(tmp_path: Path, digits: Path) -> None:
    run(tmp_path / "first", digits)
    run(tmp_path / "second", digits, f"weights={tmp_path / 'first'}", "schedule.max_steps=1")
    first, second = (records(tmp_path / name, "train") for name in ("first", "second"))
    assert second[0]["loss"] < first[0]["loss"] - 0.2
    with pytest.raises(UserError, match=r"weights: .* does not fit the model: .* tensors differ"):
        run(tmp_path / "third", digits, f"weights={tmp_path / 'first'}", "model.width=64")
