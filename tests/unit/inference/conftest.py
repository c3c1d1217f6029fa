"""A run of a small random network on 8 x 8 pixels, and images of that size, which are seen as they are."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors import safe_open

from pycls_fast import build
from pycls_fast.config import RunConfig
from tests.factories import config_of, randomise, save_checkpoint

CLASSES = tuple(f"class [{i}]" for i in range(10))
SMALL = ["data.image_size=8", "augment.eval_crop_ratio=1.0"]
VIT = [*SMALL, "model.width=24", "model.depth=2", "model.heads=3", "model.mlp_width=24", "model.patch_size=2"]


def make_run(
    folder: Path,
    *overrides: str,
    config_name: str = "vit_digits",
    ema: bool = False,
    classes: Sequence[str] = CLASSES,
) -> Path:
    """A run folder that has nothing but a checkpoint."""
    config = config_of(*(VIT if config_name == "vit_digits" else SMALL), *overrides, name=config_name)
    network = make_network(config)
    state = {
        "step": 7,
        "model": network.state_dict(),
        "ema": {name: -value for name, value in network.state_dict().items()} if ema else None,
        "optimizer": {},
        "classes": list(classes),
        "config": config.model_dump(mode="json"),
    }
    save_checkpoint({k: v for k, v in state.items() if v is not None}, folder / "checkpoints", 7, keep=2)
    return folder


def make_network(config: RunConfig) -> torch.nn.Module:
    """The same in every call."""
    network = build.model(config, config.model.num_classes or 10, build.switches(config, torch.device("cpu")))
    return randomise(network).float().eval()


def metadata(file: Path) -> dict[str, str]:
    """What an exported file says of itself."""
    with safe_open(file, "pt") as opened:
        return dict(opened.metadata())


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    return make_run(tmp_path / "run")


@pytest.fixture
def pixels() -> np.ndarray:
    """uint8 (5, 8, 8, 3)."""
    return np.random.default_rng(0).integers(0, 256, (5, 8, 8, 3), dtype=np.uint8)


@pytest.fixture
def folder(tmp_path: Path, pixels: np.ndarray) -> Path:
    """The pixels as files 0.png to 4.png, the last one in a folder below."""
    place = tmp_path / "images"
    (place / "more").mkdir(parents=True)
    for number, image in enumerate(pixels):
        Image.fromarray(image).save(place / ("more" if number == 4 else ".") / f"{number}.png")
    return place
