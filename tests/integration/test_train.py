"""A run from the command's configuration to the files it leaves."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

from pycls_fast import build
from pycls_fast.config import load_config
from pycls_fast.errors import Finished, UserError
from pycls_fast.files import checkpoints, step_of
from pycls_fast.train import train
from pycls_fast.train.display import scores_text
from pycls_fast.train.run_state import Run
from pycls_fast.train.saved_weights import open_weights
from pycls_fast.train.tasks.score import score
from tests.factories import assert_same_bits
from tests.integration.runs import TINY, newest_checkpoint, records, run


@pytest.mark.usefixtures("drawn")
def test_leaves_everything_behind(tmp_path: Path, digits: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(tmp_path, digits, "trackers=[tensorboard]", "optim.ema_decay=0.9") == 0
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {
        "config.yaml", "environment.json", "metrics.jsonl", "summary.json", "checkpoints", "tensorboard",
        "curves.png", "predictions.npz", "classes.json", "confusion.png", "best.safetensors",
        "first_batch.jpg", "index.html", "log.txt",
    }  # fmt: skip
    average = open_weights(tmp_path / "checkpoints/best", kind="ema")
    assert_same_bits(open_weights(tmp_path / "best.safetensors", kind="auto").read(), average.read())
    assert list((tmp_path / "tensorboard").glob("events*"))
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
    train_records = records(tmp_path, "train")
    assert [record["step"] for record in train_records] == list(range(1, 45))
    needed = ["loss", "lr", "grad_norm", "images_per_second", "step_seconds", "data_wait_fraction", "memory_peak_bytes"]
    for record in train_records:
        assert all(record[name] is not None for name in needed), record
        assert 0 <= record["data_wait_fraction"] <= 1
    evaluations = records(tmp_path, "eval")
    assert [(r["step"], r["weights"]) for r in evaluations] == [(s, w) for s in (22, 44) for w in ("model", "ema")]
    assert {(record["split"], record["count"]) for record in evaluations} == {("val", 359)}
    # The average is behind the model.
    assert evaluations[3]["loss"] > evaluations[2]["loss"]
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["final"] == evaluations[-1]
    assert summary["best"] == max((evaluations[1], evaluations[3]), key=lambda r: r["top1"])
    assert summary["steps"] == 44
    assert summary["epochs"] == 2
    assert summary["world_size"] == 1
    assert summary["images_per_second"] > 0
    printed = capsys.readouterr().out
    final, best = summary["final"], summary["best"]
    assert final["class_top1"] != final["top1"]
    assert f"done: {scores_text(final)}  (best, by top1: {scores_text(best)} at epoch " in printed
    assert str(tmp_path) in printed
    # What was printed, but for blanks at the ends of lines.
    log = (tmp_path / "log.txt").read_text()
    assert [line.rstrip() for line in log.splitlines()] == [line.rstrip() for line in printed.splitlines()]
    with Image.open(tmp_path / "first_batch.jpg") as sheet:
        assert sheet.width == 8 * 136 + 8
    page = (tmp_path / "index.html").read_text()
    assert {name for name in names if f'"{name}"' in page} == names - {"index.html", "tensorboard"}
    assert f"{summary['best']['top1']:.2f}%" in page


@pytest.mark.parametrize("config_name", ["vit_digits", pytest.param("resnet_digits", marks=pytest.mark.slow)])
def test_learns(tmp_path: Path, digits: Path, config_name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The loss falls far below that of guessing (ln 10) and most of the unseen digits are recognised."""
    own = [*TINY[:5], "schedule.epochs=6", "schedule.warmup_epochs=1", "optim.lr=0.004"]
    if config_name == "resnet_digits":
        own = ["schedule.epochs=2", "schedule.warmup_epochs=0.5", "optim.lr=0.02"]
    common = ["data.image_size=8", "augment=none", "trackers=[]", "speed=fast"]
    status = train(load_config(config_name, [*common, *own, f"data.root={digits}", f"run_dir={tmp_path}"]))
    assert status == 0
    final = records(tmp_path, "eval")[-1]
    assert isinstance(status, Finished)
    assert status.objective == 100 - json.loads((tmp_path / "summary.json").read_text())["best"]["top1"]
    assert final["top1"] > 70
    assert final["loss"] < 1.2
    # Only what was set is told.
    assert re.findall(r"^switches +(.*?) *$", capsys.readouterr().out, flags=re.MULTILINE) == ["compile=off"]


@pytest.fixture(scope="module")
def float32_losses(tmp_path_factory: pytest.TempPathFactory, digits: Path) -> list[float]:
    folder = tmp_path_factory.mktemp("float32")
    run(folder, digits, *PRECISION_RUN)
    return [record["loss"] for record in records(folder, "train")]


# Microbatches, clipping and the average, at a learning rate that gets somewhere.
PRECISION_RUN = (
    "schedule.max_steps=12", "schedule.warmup_epochs=0.2", "optim.lr=0.004", "optim.clip_norm=1.0",
    "optim.accumulation_steps=2", "optim.ema_decay=0.9", "augment=none",
)  # fmt: skip
SCALED = {"amp_fp16", "fp16_master", "fp16"}
# How far the loss may be off within 12 steps, in nats: by the format's rounding, and more without masters, where the
# steps themselves are rounded.
BANDS = {
    "amp_fp16": 0.002, "fp16_master": 0.002, "fp16": 0.003, "amp_bf16": 0.01, "bf16_params": 0.01, "bf16": 0.02,
    "fp8": 0.05,
}  # fmt: skip


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name == "amp_bf16" else [pytest.mark.slow]) for name in BANDS]
)
def test_precisions_follow_float32(tmp_path: Path, digits: Path, float32_losses: list[float], name: str) -> None:
    """A narrower format rounds, so its losses stay near float32's, and are not the same; checkpoints are float32."""
    own = []
    if name == "fp8":
        pytest.importorskip("torchao")
        own = ["precision.fp8_emulate=true"]
    run(tmp_path, digits, *PRECISION_RUN, f"precision={name}", *own)
    train_records = records(tmp_path, "train")
    losses = [record["loss"] for record in train_records]
    assert float32_losses[-1] < float32_losses[0] - 0.1
    assert losses == pytest.approx(float32_losses, abs=BANDS[name])
    assert losses != float32_losses
    for record in train_records:
        assert record.get("loss_scale") == (65536 if name in SCALED else None)
    state = newest_checkpoint(tmp_path)
    for weights in (state["model"], state["ema"]):
        assert {value.dtype for value in weights.values()} == {torch.float32}
    state_dtypes = {v.dtype for values in state["optimizer"].values() for v in values.values() if v.ndim}
    assert state_dtypes == {torch.float32}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fp16_master", "fp16", "bf16_params"])
def test_half_precision_goes_on_with_the_same_bits(tmp_path: Path, digits: Path, name: str) -> None:
    common = ("optim.ema_decay=0.9", f"precision={name}", "runtime.checkpoint_every_steps=5")
    run(tmp_path / "whole", digits, *common, "schedule.max_steps=9")
    run(tmp_path / "parts", digits, *common, "schedule.max_steps=5")
    run(tmp_path / "parts", digits, *common, "schedule.max_steps=9")
    whole, parts = (newest_checkpoint(tmp_path / part) for part in ("whole", "parts"))
    for key in ("model", "ema", "optimizer", "loss_scaler"):
        assert_same_bits(parts[key], whole[key])
    # And in another precision, with float32's weights as they are.
    run(tmp_path / "parts", digits, "optim.ema_decay=0.9", "schedule.max_steps=10")
    after = newest_checkpoint(tmp_path / "parts")["model"]
    step = max((after[key] - value).abs().max().item() for key, value in whole["model"].items())
    assert 0 < step < 0.01


def test_watchdog_names_the_module(tmp_path: Path, digits: Path) -> None:
    with pytest.raises(UserError, match=r"^runtime\.watchdog: the first value .* pass of step \d+ is in the "):
        run(tmp_path, digits, "optim.lr=1e30", "schedule.warmup_epochs=0", "runtime.watchdog=true")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["amp_fp16", "fp16_master", "fp16"])
def test_overflow_skips_the_step_and_lowers_the_scale(tmp_path: Path, digits: Path, name: str) -> None:
    run(tmp_path, digits, f"precision={name}", "precision.loss_scale_start=1e30", "schedule.max_steps=4")
    train_records = records(tmp_path, "train")
    assert [record["skipped_steps"] for record in train_records] == [1, 1, 1, 1]
    scales = [record["loss_scale"] for record in train_records]
    assert scales == pytest.approx([1e30 * 0.5**n for n in (1, 2, 3, 4)], rel=1e-6)
    weights = newest_checkpoint(tmp_path)
    run(tmp_path.with_name("fresh"), digits, "schedule.max_steps=1", "optim.lr=1e-30", "optim.weight_decay=0")
    untouched = newest_checkpoint(tmp_path.with_name("fresh"))
    for key, value in weights["model"].items():
        # Without masters the weights have been rounded, once.
        expected = untouched["model"][key].half().float() if name == "fp16" else untouched["model"][key]
        assert torch.equal(value, expected), key


@pytest.mark.slow
@pytest.mark.parametrize("name", ["amp_fp16", "fp16"])
def test_a_scaled_run_that_diverged_keeps_its_good_checkpoints(
    tmp_path: Path, digits: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    common = [f"precision={name}", "schedule.epochs=4", "runtime.checkpoint_every_steps=5"]
    run(tmp_path, digits, *common, "schedule.max_steps=15")
    with pytest.raises(UserError, match=r"not finite .*; earlier checkpoints are kept"):
        run(tmp_path, digits, *common, "optim.lr=1e6", "optim.clip_norm=null")
    assert "warning: step 25 is not saved: the loss is not finite" in capsys.readouterr().out
    kept = [step_of(path) for path in checkpoints(tmp_path / "checkpoints")]
    assert kept == [15, 10]
    # The advice.
    assert run(tmp_path, digits, *common, "schedule.max_steps=18") == 0
    assert [record["step"] for record in records(tmp_path, "train")] == list(range(1, 19))


def test_loss_that_is_no_number_stops_with_advice(tmp_path: Path, digits: Path) -> None:
    with pytest.raises(UserError, match=r"optim.lr: the loss or a gradient is not finite at step") as caught:
        run(tmp_path, digits, "optim.lr=1e30", "schedule.warmup_epochs=0")
    assert caught.value.lines[1].startswith("runtime.watchdog: ")


def test_accumulation_does_not_change_the_losses(tmp_path: Path, digits: Path) -> None:
    """Two microbatches of 32 are one batch of 64 (the ViT has nothing that depends on the batch)."""
    common = ["schedule.max_steps=10", "optim=sgd", "optim.lr=0.05", "optim.clip_norm=1.0"]
    run(tmp_path / "one", digits, *common)
    run(tmp_path / "two", digits, *common, "optim.accumulation_steps=2")
    one, two = (records(tmp_path / name, "train") for name in ("one", "two"))
    for name in ("loss", "grad_norm"):
        assert [r[name] for r in two] == pytest.approx([r[name] for r in one], rel=1e-5)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
def test_a_compiled_loss_trains_on_a_cpu(tmp_path: Path, digits: Path) -> None:
    """Whose first steps' tensors are counted, but not in compiled code."""
    common = ["schedule.max_steps=3", "augment.mixup_alpha=0.2", "optim.accumulation_steps=1"]
    for name, more in (("plain", []), ("compiled", ["speed.cross_entropy=fused"])):
        run(tmp_path / name, digits, *common, *more)
    plain, compiled = ([r["loss"] for r in records(tmp_path / name, "train")] for name in ("plain", "compiled"))
    assert compiled == pytest.approx(plain, rel=1e-5)


def test_same_seed_same_run_and_another_seed_another(tmp_path: Path, digits: Path) -> None:
    losses = {}
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        run(tmp_path / name, digits, "schedule.max_steps=5", f"seed={seed}")
        losses[name] = [r["loss"] for r in records(tmp_path / name, "train")]
    assert losses["a"] == losses["b"]
    assert losses["a"] != losses["c"]


@pytest.mark.slow
def test_starts_from_weights(tmp_path: Path, digits: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(tmp_path / "first", digits)
    run(tmp_path / "second", digits, f"weights={tmp_path / 'first'}", "schedule.max_steps=1")
    assert "px here" not in capsys.readouterr().out
    run(tmp_path / "larger", digits, f"weights={tmp_path / 'first'}", "schedule.max_steps=1", "data.image_size=16")
    note = "data.image_size: 16 px here, but the weights are for 8 px; data.image_size=8 keeps that size"
    assert note in capsys.readouterr().out
    first, second = (records(tmp_path / name, "train") for name in ("first", "second"))
    assert second[0]["loss"] < first[0]["loss"] - 0.2
    with pytest.raises(UserError, match=r"weights: .* does not fit the model: other shapes: ") as caught:
        run(tmp_path / "third", digits, f"weights={tmp_path / 'first'}", "model.width=64")
    builds = "model=of_weights without model.KEY=VALUE builds it"
    assert caught.value.lines[0].endswith(f"belongs to another model; {builds}")


@pytest.mark.slow
def test_a_tensor_that_weights_allow_names_may_be_missing_in_the_model(tmp_path: Path, digits: Path) -> None:
    run(tmp_path / "first", digits, "schedule.max_steps=1")
    state = newest_checkpoint(tmp_path / "first")["model"]
    weights = tmp_path / "more.safetensors"
    save_file({**state, "another.scale": torch.ones(3)}, weights)
    small = [*TINY, f"data.root={digits}", f"weights={weights}", "schedule.max_steps=1"]
    for number, use in enumerate((train, lambda config: score(config, "val", None))):
        own = [*small, f"run_dir={tmp_path / str(number)}"]
        with pytest.raises(UserError, match=r"another\.scale"):
            use(load_config("vit_digits", own))
        assert use(load_config("vit_digits", [*own, "weights_allow=[another.scale]"])) == 0


def test_rates_times_and_checkpoints(tmp_path: Path, digits: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = ("optim.accumulation_steps=2", "runtime.checkpoint_every_steps=1", "runtime.keep_checkpoints=4",
           "runtime.checkpoint_async=false")  # fmt: skip
    with monkeypatch.context() as patched:
        # Longer than the process that goes on.
        patched.setattr(Run, "seconds", lambda run: 1000.0)
        assert run(tmp_path, digits, *own, "schedule.max_steps=6") == 0
    # The last one is the best as well, which is when those before it are looked through again.
    kept = [step_of(path) for path in checkpoints(tmp_path / "checkpoints")]
    assert sorted(kept) == [3, 4, 5, 6]
    assert (tmp_path / "checkpoints" / "best").resolve().name == "step_000000006"

    schedule = build.schedule(load_config("vit_digits", TINY), 1438 // 64)
    trained = records(tmp_path, "train")
    assert [record["step"] for record in trained] == [1, 2, 3, 4, 5, 6]
    for record in trained:
        assert record["lr"] == schedule(record["step"] - 1)
        assert record["images_per_second"] * record["step_seconds"] == pytest.approx(64)

    assert run(tmp_path, digits, *own, "schedule.max_steps=7") == 0
    assert 1000 < json.loads((tmp_path / "summary.json").read_text())["wall_seconds"] < 2000
