"""The overrides that build a saved model name the closest file and nothing that only training needs."""

from __future__ import annotations

import json
from typing import Any

import pytest

from pycls_fast.config import load_config
from pycls_fast.config.model_overrides import model_overrides


@pytest.mark.slow
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
def test_the_closest_file_and_what_differs(given: str, expected: str) -> None:
    saved = _model(given)
    assert model_overrides(saved) == expected
    again = _model(expected)
    assert {key for key in saved if saved[key] != again[key]} <= {"drop_path"}


def _model(overrides: str) -> dict[str, Any]:
    """The section of a configuration as checkpoints hold it."""
    config = load_config("vit_digits", ["data.image_size=224", *overrides.split()])
    model: dict[str, Any] = json.loads(config.model_dump_json())["model"]
    return model


def test_a_kind_of_another_version_has_none() -> None:
    assert model_overrides({"kind": "mixer"}) is None
    assert model_overrides({}) is None
