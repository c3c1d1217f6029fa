"""Scoring on another machine than training's: its batch and its memory are its own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from pycls_fast import build
from pycls_fast.build import data as build_data
from pycls_fast.config import load_config
from pycls_fast.config.schema import RunConfig
from pycls_fast.data import EvalSampler
from pycls_fast.errors import UserError
from pycls_fast.models import VisionTransformer
from pycls_fast.train import knn
from pycls_fast.train.score import score

TOOLS: dict[str, Callable[[RunConfig], int]] = {
    "score": lambda config: score(config, "val", None),
    "knn": lambda config: knn.score_neighbours(config, k=1, temperature=1.0, split="val", output=None),
}


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    """A large batch for several machines."""
    base = [
        "data=synthetic", "data.image_size=8", "data.num_workers=0", "data.synthetic_train_images=200",
        "data.synthetic_val_images=150", "data.synthetic_classes=3", "data.global_batch_size=4096",
        "data.eval_batch_size=null", "model.width=16", "model.heads=2", "model.depth=1", "model.mlp_width=16",
        "runtime.threads=1", "runtime.device=cpu", "runtime.progress=plain", "precision=fp32",
    ]  # fmt: skip
    network = build.model(load_config("vit_digits", base), 3, build.switches(load_config("vit_digits", base), _CPU))
    torch.save(network.state_dict(), tmp_path / "weights.pt")
    return load_config("vit_digits", [*base, f"weights={tmp_path / 'weights.pt'}"])


_CPU = torch.device("cpu")


def full(*arguments: object, **options: object) -> None:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20 GiB")


@pytest.mark.parametrize("tool", TOOLS)
def test_batches(tool: str, config: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []

    def sampler(count: int, **options: Any) -> EvalSampler:
        sizes.append(options["batch_size"])
        return EvalSampler(count, **options)

    monkeypatch.setattr(build_data, "EvalSampler", sampler)
    assert TOOLS[tool](config) == 0
    assert set(sizes) == {128}


@pytest.mark.parametrize("tool", TOOLS)
def test_memory_that_does_not_suffice(tool: str, config: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(VisionTransformer, "forward", full)
    with pytest.raises(UserError) as caught:
        TOOLS[tool](config)
    assert caught.value.lines == (
        "data.eval_batch_size: cpu is out of memory with 128 images at a time; use a smaller one, or "
        "runtime.device=cpu",
    )


@pytest.mark.parametrize("tool", TOOLS)
@pytest.mark.parametrize(
    ("limit", "message"),
    [(5, r"^data\.max_damaged: 6 images cannot be read, more than 5:"), (6, r"^split: .* has no image that can be")],
)
def test_images_that_cannot_be_read(tool: str, limit: int, message: str, config: RunConfig, tmp_path: Path) -> None:
    for number in range(6):
        for split in ("train", "val"):
            file = tmp_path / "images" / split / f"class{number % 3}" / f"{number}.png"
            file.parent.mkdir(parents=True, exist_ok=True)
            file.touch()
    data = {"source": "folder", "root": str(tmp_path / "images"), "max_damaged": limit}
    with pytest.raises(UserError, match=message) as caught:
        TOOLS[tool](config.model_copy(update={"data": config.data.model_copy(update=data)}))
    assert len(caught.value.lines) == (7 if limit == 5 else 1)


def test_an_evaluation_set_has_no_splits(config: RunConfig) -> None:
    data = config.data.model_copy(update={"eval_set": "v2", "eval_root": "/nowhere"})
    with pytest.raises(UserError, match=r"^split: data\.eval_set=v2 has none; leave split=train out$"):
        score(config.model_copy(update={"data": data}), "train", None)


def test_votes_that_do_not_fit(config: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(knn, "knn_votes", full)
    with pytest.raises(
        UserError,
        match=r"^runtime.device: cpu is out of memory with .* 200 training images .* runtime.device=cpu$",
    ):
        TOOLS["knn"](config)
