"""Networks for images that are not square, from training to export."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import pycls_fast
from pycls_fast.config import load_config
from pycls_fast.inference.export import export
from pycls_fast.train import train
from tests.factories import assert_same_bits, photographs
from tests.integration.runs import newest_checkpoint, scored

SMALL = (
    *("data=imagenet", "data.image_size=[48,32]", "data.global_batch_size=8", "data.num_workers=0", "trackers=[]"),
    *("schedule.epochs=3", "schedule.warmup_epochs=0", "runtime.device=cpu", "runtime.threads=1", "precision=fp32"),
    *("augment.cutmix_alpha=1", "augment.erase_probability=0.5"),
)
VIT = ("model.width=16", "model.depth=2", "model.heads=2", "model.mlp_width=16", "model.patch_size=8")
NETWORKS = {
    "vit": ("vit_s16", "center", (*VIT, "augment.crop=random_resized")),
    "resnet": ("resnet50", "border", ("model.depth=18", "augment.crop=border")),
    "timm": ("deit_s16", "squash", ("model=vit_tiny_patch16_224", "model.options.depth=1", "augment.crop=squash")),
}


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return photographs(tmp_path_factory.mktemp("photos"), ("cat", "dog"), 16, sides=(30, 120))


@pytest.mark.slow
@pytest.mark.parametrize("name", NETWORKS)
def test_from_training_to_export(name: str, photos: Path, tmp_path: Path) -> None:
    experiment, crop, own = NETWORKS[name]

    def trained(folder: str, *steps: int) -> Path:
        for step in steps:
            own_run = (f"run_dir={tmp_path / folder}", f"schedule.max_steps={step}")
            given = (*SMALL, f"data.root={photos}", f"augment.eval_crop={crop}", *own, *own_run)
            assert train(load_config(experiment, given)) == 0
        return tmp_path / folder

    def scores(weights: Path) -> dict[str, Any]:
        return scored(pycls_fast.load(run).config.model_copy(update={"weights": str(weights)}))

    run = trained("stopped", 3, 6)
    state = newest_checkpoint(run)
    assert_same_bits(state["model"], newest_checkpoint(trained("whole", 6))["model"])
    assert state["config"]["data"]["image_size"] == [48, 32]

    onnx, file = tmp_path / "net.onnx", tmp_path / "net.safetensors"
    for path, form in ((onnx, "onnx"), (file, "safetensors")):
        assert export(str(run), str(path), format=form) == 0
    here, there = scores(run), scores(onnx)
    assert (here["top1"], here["loss"]) == (there["top1"], pytest.approx(there["loss"], rel=1e-5))
    ways = {"center": "covering", "border": "within", "squash": "squashed to"}
    assert here["preprocessing"].startswith(f"{ways[crop]} ")
    assert "centre 48 x 32" in here["preprocessing"]

    found, again = (pycls_fast.load(weights).logits([str(photos / "val")]) for weights in (run, file))
    assert torch.equal(found, again)
    paths = sorted(str(path) for path in (photos / "val").rglob("*.png"))
    logits = pycls_fast.load(run).logits(paths)
    labels = torch.tensor([("cat", "dog").index(Path(path).parent.name) for path in paths])
    assert torch.nn.functional.cross_entropy(logits, labels).item() == pytest.approx(here["loss"], rel=1e-5)
