"""A folder of few, unlike images, and everything that is done to it on the way to a classifier."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import huggingface_hub
import numpy as np
import pytest
import torch
import yaml
from PIL import Image
from safetensors.torch import save_file

from pycls_fast import build
from pycls_fast.config import load_config
from pycls_fast.speed import Speed
from pycls_fast.train import train
from pycls_fast.train.evaluate import Predictions
from pycls_fast.train.load_weights import load_weights
from pycls_fast.train.tasks.score import score_neighbours
from tests.factories import load_run_config
from tests.integration.runs import command, newest_checkpoint, records, run_process, scored, under_torchrun

NAMES = ("..brown 🐻 bear's $x^2$"[2:], "Übergröße & 猫 ", "jpg.old (2) [x]={a,b}")
TINY = (
    "model.width=16", "model.depth=2", "model.heads=2", "model.mlp_width=32", "model.patch_size=8",
    "data.image_size=32", "data.num_workers=0", "precision=fp32", "trackers=[]", "runtime.progress=plain",
)  # fmt: skip
STATISTICS = {"mean": [0.3, 0.4, 0.5], "std": [0.2, 0.3, 0.4]}


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """60 images in three classes, bright in the channel of their class, of any size and shape."""
    root = tmp_path_factory.mktemp("my images")
    generator = np.random.RandomState(0)
    for label, name in enumerate(NAMES):
        (root / name).mkdir()
        for number in range(20):
            height, width = generator.randint(5, 120, 2)
            values = generator.randint(0, 60, (height, width, 3))
            values[..., label] += generator.randint(120, 190)
            kind = ("JPG", "png")[number % 2]
            Image.fromarray(values.astype(np.uint8)).save(root / name / f"image {number}.{kind}")
    return root


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random weights of a network with seven other classes, and what its images were normalised with."""
    config = load_config("finetune", TINY, needs_data=False)
    torch.manual_seed(3)
    network = build.model(config, 7, Speed())
    values = config.model_dump(mode="json")
    values["data"] |= STATISTICS
    about = {"classes": json.dumps([f"c{k}" for k in range(7)]), "config": json.dumps(values)}
    file = tmp_path_factory.mktemp("weights") / "seven.safetensors"
    state = {name: torch.randn_like(value) * 0.1 + value for name, value in network.state_dict().items()}
    save_file(state, file, metadata=about)
    return file


def finetune(images: Path, run_dir: Path, *overrides: str, name: str = "finetune") -> int:
    return train(load_config(name, [f"data.root='{images}'", f"run_dir={run_dir}", *TINY, *overrides]))


def averaged(run_dir: Path) -> list[dict[str, Any]]:
    """The evaluations that count: those of the moving average."""
    return [record for record in records(run_dir, "eval") if record["weights"] == "ema"]


@pytest.mark.slow
def test_weights_of_the_hub_are_recorded_with_their_commit(
    images: Path, weights: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The branch moves while the run trains; a resumed run keeps the commit with which it began."""
    newest = "a" * 40

    def snapshot(name: str, *, revision: str | None, allow_patterns: list[str]) -> str:
        folder = tmp_path / "hub" / (revision or newest)
        folder.mkdir(parents=True, exist_ok=True)
        shutil.copy(weights, folder / "model.safetensors")
        return str(folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    settings = ("weights=hf:me/seven", "schedule.epochs=2", "speed.compile=off")
    for steps in (1, 2):
        assert finetune(images, tmp_path / "run", *settings, f"schedule.max_steps={steps}") == 0
        recorded = yaml.safe_load((tmp_path / "run/config.yaml").read_text())
        assert recorded["weights"] == f"hf:me/seven@{'a' * 40}"
        newest = "b" * 40
    shown = capsys.readouterr()
    assert "resumed from" in shown.out + shown.err
    assert "changed since the checkpoint: weights" not in shown.out + shown.err
    config = load_config("finetune", [f"data.root='{images}'", *TINY, "weights=hf:me/seven", "speed.compile=off"])
    assert score_neighbours(config, k=3, temperature=1.0, split="val", output=str(tmp_path / "knn.json")) == 0
    assert json.loads((tmp_path / "knn.json").read_text())["checkpoint"].split("/")[-2:] == [
        newest,
        "model.safetensors",
    ]


def test_sixty_images_are_enough(images: Path, weights: Path, tmp_path: Path) -> None:
    """As a process, as a user starts it; then the run is scored, by its own configuration."""
    run = tmp_path / "run"
    given = [f"data.root={images}", f"weights={weights}", "model=vit_b16", *TINY, f"run_dir={run}"]
    given += ["schedule.epochs=6", "optim.lr=5e-3"]
    done = run_process(command(*given, config_name="finetune"), cwd=tmp_path)
    assert "head.weight, head.bias: 3 classes, 7 different ones in the file" in done.stdout
    assert "3 classes, " in done.stdout
    assert "(6 epochs of 6)" in done.stdout
    summary = json.loads((run / "summary.json").read_text())
    assert summary["steps"] == 36
    assert summary["final"]["count"] == 12
    assert summary["best"]["top1"] > 60
    saved = yaml.safe_load((run / "config.yaml").read_text())
    assert saved["data"]["global_batch_size"] == 8
    assert saved["data"]["mean"] == STATISTICS["mean"]
    assert saved["data"]["std"] == STATISTICS["std"]
    assert [record["step"] for record in averaged(run)] == [0, 6, 12, 18, 24, 30, 36]
    (fitted,) = [record for record in records(run, "event") if record["event"] == "head fitted"]
    assert fitted["images"] == 48
    state = newest_checkpoint(run)
    assert sorted(state["classes"]) == sorted(NAMES)
    assert state["model"]["head.weight"].shape == (3, 16)
    by_class = json.loads((run / "classes.json").read_text())
    assert [row["class"] for row in by_class["classes"]] == state["classes"]
    assert [row["images"] for row in by_class["classes"]] == [4, 4, 4]
    assert by_class["class_top1"] == pytest.approx(summary["final"]["class_top1"])
    right = Predictions.load(run / "predictions.npz")
    assert by_class["class_top1"] == pytest.approx(100 * (right.labels_N == right.predicted_N).mean())
    with Image.open(run / "confusion.png") as drawn:
        assert min(drawn.size) > 300
    scores = scored(load_run_config(run, [f"weights={run}"]))
    assert scores["top1"] == pytest.approx(summary["best"]["top1"])
    assert len(scores["classes"]) == 3


@pytest.mark.slow
def test_goes_on_when_the_weights_are_gone(images: Path, weights: Path, tmp_path: Path) -> None:
    """What they said of mean and deviation is in the checkpoint, for a new folder as well."""
    run, given = tmp_path / "run", tmp_path / "given.safetensors"
    shutil.copy(weights, given)
    for steps in (1, 2):
        assert finetune(images, run, f"weights={given}", f"schedule.max_steps={steps}") == 0
        given.unlink(missing_ok=True)
    assert [record["step"] for record in records(run, "checkpoint")] == [0, 1, 2]
    other = tmp_path / "other"
    assert finetune(images, other, f"resume={run}/checkpoints/step_000000002", "schedule.max_steps=3") == 0
    for folder in (run, other):
        saved = yaml.safe_load((folder / "config.yaml").read_text())["data"]
        assert {key: saved[key] for key in STATISTICS} == STATISTICS


@pytest.mark.slow
def test_a_frozen_trunk_stays_as_it_was(images: Path, weights: Path, tmp_path: Path) -> None:
    """Through a stop and a start, with an average of the weights and balanced classes."""
    settings = [f"weights={weights}", "schedule.epochs=2", "schedule.warmup_epochs=0", "optim.ema_decay=0.9",
                "schedule.max_steps=12",
                "data.sampling=balanced", "model.drop_path=0.5"]  # fmt: skip
    assert finetune(images, tmp_path / "whole", *settings, name="linear_probe") == 0
    assert finetune(images, tmp_path / "parts", *settings, "schedule.max_steps=6", name="linear_probe") == 0
    assert finetune(images, tmp_path / "parts", *settings, name="linear_probe") == 0
    state, parts = newest_checkpoint(tmp_path / "whole"), newest_checkpoint(tmp_path / "parts")
    config = load_config("finetune", TINY, needs_data=False)
    network = build.model(config, 3, Speed())
    load_weights(network, weights, classes=tuple(state["classes"]))
    for name, value in network.state_dict().items():
        for kind in ("model", "ema"):
            assert torch.equal(parts[kind][name], state[kind][name])
            assert torch.equal(state[kind][name], value) == (not name.startswith("head.")), (kind, name)
    assert set(state["optimizer"]) == {"head.weight", "head.bias"}


IMPATIENT = ("optim.lr=1e-12", "schedule.early_stopping_evals=2", "schedule.best_tolerance=0",
             "runtime.eval_every_epochs=1", "optim.ema_decay=null")  # fmt: skip


def assert_stopped_early(run: Path, first: int) -> None:
    """With a learning rate of next to nothing the first evaluation stays the best one; with weights it is of step 0."""
    summary = json.loads((run / "summary.json").read_text())
    assert summary["steps"] == summary["final"]["step"] == first + 12
    assert [record["step"] for record in records(run, "eval")] == [first, first + 6, first + 12]
    assert {r["best_epoch"] for r in records(run, "event") if r["event"] == "stopped early"} == {first / 6}
    assert (run / "confusion.png").is_file()


@pytest.mark.slow
@pytest.mark.usefixtures("drawn")
def test_stops_when_nothing_gets_better(images: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    assert finetune(images, run, *IMPATIENT) == 0
    assert "stopped early: top1 was best at epoch 1, 2 evaluations ago" in capsys.readouterr().out
    assert_stopped_early(run, 6)
    # Started again it is still over, and its records stay as they are; with more patience it continues.
    before = (run / "metrics.jsonl").read_text()
    assert finetune(images, run, *IMPATIENT) == 0
    assert_stopped_early(run, 6)
    assert (run / "metrics.jsonl").read_text() == before
    assert "nothing to train: 3 epochs (18 steps) are done, and early stopping" in capsys.readouterr().out
    assert finetune(images, run, *IMPATIENT, "schedule.early_stopping_evals=3") == 0
    assert [record["step"] for record in records(run, "eval")] == [6, 12, 18, 24]
    assert json.loads((run / "summary.json").read_text())["steps"] == 24


@pytest.mark.slow
def test_two_ranks_stop_together(images: Path, weights: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    given = [f"data.root={images}", f"weights={weights}", *TINY, f"run_dir={run}"]
    start = command(*given, *IMPATIENT, config_name="finetune")
    run_process(under_torchrun(start, 2), cwd=tmp_path)
    assert_stopped_early(run, 0)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "hsdp", "fairscale_sharded_ddp"])
def test_two_ranks_fit_the_head_of_one(images: Path, weights: Path, tmp_path: Path, strategy: str) -> None:
    """Whichever strategy holds the weights: the same accuracies at step 0, and of the neighbours."""
    given = [f"data.root={images}", f"weights={weights}", *TINY, "schedule.max_steps=0"]
    for ranks, parallel in ((1, "single"), (2, strategy)):
        start = command(*given, f"run_dir={parallel}", f"parallel={parallel}", config_name="finetune")
        run_process(under_torchrun(start, ranks), cwd=tmp_path)
    (one,), (two,) = (averaged(tmp_path / name) for name in ("single", strategy))
    assert one["top1"] == two["top1"] > 60
    assert two["loss"] == pytest.approx(one["loss"], rel=1e-4)
