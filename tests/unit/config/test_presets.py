"""Options without files: one name for weights and model, timm's own names, and the overrides of a saved model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pycls_fast.config import load_config
from pycls_fast.config.presets import model_overrides
from pycls_fast.errors import UserError


@pytest.mark.parametrize(
    ("weights", "kind", "what"),
    [
        ("timm:convnext_tiny.fb_in22k", "timm", {"name": "convnext_tiny.fb_in22k"}),
        ("torchvision:resnet50.IMAGENET1K_V2", "resnet", {"depth": 50}),
        ("torchvision:vit_l_16", "vit", {"width": 1024}),
        ("their.pth", "vit", {"width": 768}),
    ],
)
def test_weights_choose_the_model(weights: str, kind: str, what: dict[str, object]) -> None:
    config = load_config("finetune", ["data.root=/nowhere", f"weights={weights}", "model.drop_path=0.1"])
    assert config.model.kind == kind
    assert config.model.drop_path == 0.1
    assert {key: getattr(config.model, key) for key in what} == what
    # A model that is named stays.
    named = load_config("finetune", ["data.root=/nowhere", f"weights={weights}", "model=resnet18"])
    assert named.model.kind == "resnet"


def test_a_run_has_its_model(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(
        "model: {kind: timm, name: convnext_atto, num_classes: 7, drop_path: 0.0, options: {}}"
    )
    config = load_config("finetune", ["data.root=/nowhere", f"weights={tmp_path}"])
    assert config.model.kind == "timm"
    assert config.model.num_classes is None


def test_timms_models_are_models() -> None:
    config = load_config("vit_s16", ["data.root=/nowhere", "model=convnext_atto"])
    assert config.model.kind == "timm"
    assert config.model.name == "convnext_atto"
    with pytest.raises(UserError, match=r"convnext_ato"):
        load_config("vit_s16", ["data.root=/nowhere", "model=convnext_ato"])


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("model=resnet50 model.groups=2 model.drop_path=0.1", "model=resnet50 model.groups=2"),
        ("model=vit_s16 model.init=trunc_normal model.heads=12", "model=deit_s16 model.heads=12"),
        ("model=vit_s16 model.heads=12 model.qk_norm=true", "model=vit_s16 model.heads=12 model.qk_norm=true"),
        ("model=timm model.name=convnext_tiny", "model=timm model.name=convnext_tiny"),
        ("model=vit_c_1gf", "model=vit_c_1gf"),
    ],
)
def test_the_closest_preset_and_what_differs(given: str, expected: str) -> None:
    saved = _model(given)
    assert model_overrides(saved) == expected
    again = _model(expected)
    assert {key for key in saved if saved[key] != again[key]} <= {"drop_path"}


def _model(overrides: str) -> dict[str, Any]:
    """The section of a configuration as checkpoints hold it."""
    config = load_config("vit_digits", ["data.image_size=224", *overrides.split()])
    model: dict[str, Any] = json.loads(config.model_dump_json())["model"]
    return model
