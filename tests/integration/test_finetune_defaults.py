"""Fine-tuning as the README's first command does it: only data, model and weights are given."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import torchvision
import yaml
from PIL import Image

from tests.integration.runs import command, records, run_process

CLASSES = ("blue", "green", "red")


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """Eight images of each of three classes, brightest in the channel of the class."""
    random = np.random.default_rng(0)
    for label, name in enumerate(CLASSES):
        folder = tmp_path / "photos" / name
        folder.mkdir(parents=True)
        for number in range(8):
            height, width = random.integers(150, 400, 2)
            values = random.integers(0, 90, (height, width, 3), dtype=np.uint8)
            values[..., 2 - label] += np.uint8(120)
            Image.fromarray(values).save(folder / f"{number}.jpg")
    return tmp_path / "photos"


@pytest.mark.slow
def test_the_defaults_train_on_a_cpu(tmp_path: Path, photos: Path) -> None:
    """224 px, the preset's switches and number format, automatic epochs and batches."""
    torch.manual_seed(0)
    torch.save(torchvision.models.resnet18().state_dict(), tmp_path / "resnet18.pth")
    given = [f"data.root={photos}", "model=resnet18", "weights=resnet18.pth"]
    done = run_process(command(*given, "run_dir=run", "runtime.device=cpu", config_name="finetune"), cwd=tmp_path)
    assert "3 classes, 1000 classes in the file" in done.stdout
    saved = yaml.safe_load((tmp_path / "run/config.yaml").read_text())
    assert (saved["data"]["image_size"], saved["data"]["global_batch_size"]) == (224, 4)
    assert saved["schedule"]["epochs"] == 40
    assert saved["precision"]["name"] in ("fp32", "amp_bf16")
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    assert summary["epochs"] == 40
    assert len(records(tmp_path / "run", "eval")) <= 21
    assert summary["final"]["count"] == 6
    assert summary["best"]["top1"] > 60
