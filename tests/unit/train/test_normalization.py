"""Mean and standard deviation that weights were trained with."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from safetensors.torch import save_file

from pycls_fast.config import load_config
from pycls_fast.errors import UserError
from pycls_fast.parallel import ALONE
from pycls_fast.train.resolving import resolve_normalization, statistics

IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
HALF = ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))


def test_hubs_say_it_without_a_download() -> None:
    assert statistics("timm:vit_base_patch16_224.augreg_in21k_ft_in1k") == HALF
    assert statistics("timm:deit_small_patch16_224.fb_in1k") == IMAGENET
    clip = statistics("timm:vit_base_patch16_clip_224.openai_ft_in1k")
    assert clip is not None
    assert clip[0] == tuple(timm.get_pretrained_cfg("vit_base_patch16_clip_224.openai_ft_in1k").mean)
    assert clip not in (HALF, IMAGENET)
    assert statistics("torchvision:resnet50.IMAGENET1K_V2") == IMAGENET
    assert statistics("torchvision:resnet50") == IMAGENET
    # Squashed, not cut out, which matters for scoring alone.
    assert statistics("timm:vit_base_patch16_siglip_224.webli") == HALF
    for wrong in ("timm:no_such_model", "torchvision:resnet50.NO_SUCH_WEIGHTS"):
        with pytest.raises(UserError, match="has no weights"):
            statistics(wrong)


def test_files_say_it_where_they_can(tmp_path: Path) -> None:
    np.savez(tmp_path / "google.npz", a=np.zeros(1))
    assert statistics(tmp_path / "google.npz") == HALF
    config = {"data": {"mean": [0.1, 0.2, 0.3], "std": [0.4, 0.5, 0.6]}, "model": {}, "speed": {}}
    save_file({"a": torch.ones(1)}, tmp_path / "ours.safetensors", metadata={"config": json.dumps(config)})
    assert statistics(tmp_path / "ours.safetensors") == ((0.1, 0.2, 0.3), (0.4, 0.5, 0.6))
    save_file({"a": torch.ones(1)}, tmp_path / "mute.safetensors")
    assert statistics(tmp_path / "mute.safetensors") is None
    (tmp_path / "timm").mkdir()
    save_file({"a": torch.ones(1)}, tmp_path / "timm/model.safetensors")
    kept = {"architecture": "vit_tiny_patch16_224", "pretrained_cfg": {"mean": [0.5] * 3, "std": [0.5] * 3}}
    (tmp_path / "timm/config.json").write_text(json.dumps(kept))
    assert statistics(tmp_path / "timm/model.safetensors") == HALF
    # A link in another folder, of whatever name; one beside a config.json of its own.
    (tmp_path / "links").mkdir()
    for link in ("links/my.safetensors", "links/latest.v1", "timm/latest.v1"):
        (tmp_path / link).symlink_to(tmp_path / "timm/model.safetensors")
        assert statistics(tmp_path / link) == HALF, link
    own = {**kept, "pretrained_cfg": {"mean": [0.25] * 3, "std": [0.5] * 3}}
    (tmp_path / "links/config.json").write_text(json.dumps(own))
    assert statistics(tmp_path / "links/my.safetensors") == ((0.25,) * 3, (0.5,) * 3)
    # The same as links to files without a suffix, as in the Hugging Face cache.
    (tmp_path / "snapshot").mkdir()
    for number, name in enumerate(("model.safetensors", "config.json")):
        (tmp_path / f"timm/{name}").rename(tmp_path / f"blob{number}")
        (tmp_path / f"snapshot/{name}").symlink_to(tmp_path / f"blob{number}")
    assert statistics(tmp_path / "snapshot") == HALF
    assert statistics(tmp_path / "snapshot/model.safetensors") == HALF
    torch.save({"a": torch.ones(1)}, tmp_path / "mute.pth")
    assert statistics(tmp_path / "mute.pth") is None


@pytest.mark.parametrize("ask", [True, False])
def test_the_configuration_takes_it_where_it_asks(tmp_path: Path, ask: bool) -> None:
    np.savez(tmp_path / "google.npz", a=np.zeros(1))
    own = [] if ask else ["data.normalization=configured"]
    config = load_config("finetune", ["data.root=/nowhere", f"weights={tmp_path / 'google.npz'}", *own])
    said: list[str] = []
    found = resolve_normalization(config, ALONE, note=said.append)
    assert (found.data.mean, found.data.std) == (HALF if ask else IMAGENET)
    assert found.data.normalization == "configured"
    assert resolve_normalization(found, ALONE, note=said.append) == found
    told = f"normalization: mean 0.5 0.5 0.5, std 0.5 0.5 0.5, those of {tmp_path / 'google.npz'}"
    assert said == [told] * ask


def test_weights_that_do_not_say_it_are_reported(tmp_path: Path) -> None:
    save_file({"a": torch.ones(1)}, tmp_path / "mute.safetensors")
    given = ["data.root=/nowhere", f"weights={tmp_path / 'mute.safetensors'}"]
    for own, reported in (
        ((), True),
        (("data.mean=[0.5,0.5,0.5]", "data.std=[0.5,0.5,0.5]"), False),
        (("data.normalization=configured",), False),
    ):
        said: list[str] = []
        resolve_normalization(load_config("finetune", [*given, *own]), ALONE, note=said.append)
        assert [line.partition(" does not say how its images were normalised")[0] for line in said] == [
            f"data.normalization: {tmp_path / 'mute.safetensors'}"
        ] * reported


def test_without_weights_the_configured_values_stay() -> None:
    said: list[str] = []
    config = load_config("finetune", ["data.root=/nowhere", "data.std=[1.0,1.0,1.0]"])
    found = resolve_normalization(config, ALONE, note=said.append)
    assert said == []
    assert found.data.std == (1.0, 1.0, 1.0)
    assert found.data.normalization == "configured"
