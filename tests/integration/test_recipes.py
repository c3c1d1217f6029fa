"""Every recipe trains: two steps of a shrunken network on synthetic images, everything else as the recipe has it."""

from __future__ import annotations

from pathlib import Path

import pytest

from pycls_fast import published
from pycls_fast.config import load_config
from pycls_fast.config.run import RunConfig
from pycls_fast.models.choices import ResNetModel, TimmModel, ViTModel
from pycls_fast.train import train
from tests.integration.runs import records

# A ViT, a ResNet and a fine-tuning, 1 to 2 s each; the other recipes are slow tests.
FAMILIES = ("vit_s16", "mae_finetune_b16", "resnet50")
# Compiled as the preset does on a CPU with bfloat16, which takes minutes.
COMPILED = ("vit_b16", "resnet50")

SMALL = (
    "data.source=synthetic", "data.synthetic_train_images=48", "data.synthetic_val_images=8",
    "data.synthetic_classes=7", "data.global_batch_size=8", "data.eval_batch_size=8", "data.num_workers=0",
    "schedule.max_steps=2", "optim.ema_every_steps=1", "runtime.device=cpu", "runtime.log_every_steps=1",
    "trackers=[]", "runtime.progress=plain",
)  # fmt: skip


def shrunk(name: str, run_dir: Path) -> list[str]:
    """Overrides that leave little of the network and of the images."""
    config = load_config(name, ["data.source=synthetic"])
    model, size = config.model, 64
    own: list[str] = []
    if isinstance(model, ViTModel):
        size = 2 * model.patch_size
        own = ["model.width=16", "model.depth=2", "model.heads=2", "model.mlp_width=16"]
        own += ["model.pre_logits=8"] if model.pre_logits else []
        own += [f"model.stem_widths={[4] * len(model.stem_widths)}"] if model.stem_widths else []
    elif isinstance(model, TimmModel):
        own = [f"model.name={model.name.removesuffix('040')}002"]
    else:
        assert isinstance(model, ResNetModel)
        own = ["model.depth=26"]
    # Two images a microbatch are the least that can be mixed.
    own.append(f"optim.accumulation_steps={min(config.optim.microbatches, 4)}")
    if config.data.image_size_schedule:
        own.append("data.image_size_schedule=[[0,32]]")
    return [*SMALL, *own, f"data.image_size={size}", f"run_dir={run_dir}"]


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in FAMILIES else pytest.mark.slow) for name in published.EXPERIMENTS]
)
def test_two_steps(tmp_path: Path, name: str) -> None:
    trains(load_config(name, [*shrunk(name, tmp_path / "run"), "speed.compile=off"]))


@pytest.mark.slow
@pytest.mark.parametrize("name", COMPILED)
def test_two_compiled_steps(tmp_path: Path, name: str) -> None:
    trains(load_config(name, shrunk(name, tmp_path / "run")))


def trains(config: RunConfig) -> None:
    """Train, and check what was recorded."""
    assert config.run_dir is not None
    run_dir = Path(config.run_dir)
    assert train(config) == 0
    steps = records(run_dir, "train")
    assert [record["step"] for record in steps] == [1, 2]
    assert all(0 < record["loss"] < 20 for record in steps)
    evaluated = {record["weights"] for record in records(run_dir, "eval")}
    assert evaluated == ({"model", "ema"} if config.optim.ema_decay is not None else {"model"})
