"""Options without files, timm's own names; `speed=meta2022`, over several groups."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import yaml

from pycls_fast import build
from pycls_fast.config import load_config
from pycls_fast.errors import UserError
from tests.factories import load_run_config


def test_timms_models_are_models() -> None:
    config = load_config("vit_s16", ["data.root=/nowhere", "model=convnext_atto"])
    assert config.model.kind == "timm"
    assert config.model.name == "convnext_atto"
    with pytest.raises(UserError, match=r"convnext_ato"):
        load_config("vit_s16", ["data.root=/nowhere", "model=convnext_ato"])


HERE = ("data=synthetic", "speed=meta2022", "parallel=single")


def test_what_it_sets() -> None:
    config = load_config("vit_b16", HERE)
    assert (config.speed.preset, config.precision.name, config.parallel.name) == ("meta2022", "amp_fp16", "single")
    assert config.model.classifier == "pooled"  # type: ignore[union-attr]
    switches = build.switches(config, torch.device("cpu"))
    names = ("layout", "qkv", "optimizer", "attention")
    assert [getattr(switches, name) for name in names] == ["batch_second", "fused", "foreach", "reference"]


@pytest.mark.parametrize("order", [1, -1])
def test_the_command_line_wins_over_it(order: int) -> None:
    overrides = ["precision=amp_bf16", "model.classifier=token", "speed.layout=batch_first", "optim.lr=0.1"]
    config = load_config("vit_h16", [*HERE, *overrides][::order])
    assert (config.precision.name, config.model.classifier, config.speed.layout) == ("amp_bf16", "token", "batch_first")  # type: ignore[union-attr]
    assert build.switches(config, torch.device("cpu")).optimizer == "foreach"
    assert load_config("vit_h16", [*HERE, "precision.name=fp32"]).precision.name == "fp32"


def test_a_resnet_is_told_where_the_classifier_was_set() -> None:
    with pytest.raises(UserError) as caught:
        load_config("resnet50", HERE)
    (line,) = caught.value.lines
    assert line.startswith("model.classifier: unknown key for model=resnet; it belongs to model=vit; leave it")
    assert line.endswith("(configs/speed/meta2022.yaml)")
    assert load_config("resnet50", [*HERE, "~model.classifier"]).precision.name == "amp_fp16"


def test_a_saved_run_can_take_it(tmp_path: Path) -> None:
    saved = load_config("vit_b16", ["data=synthetic"]).model_dump(mode="json")
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(saved))
    config = load_run_config(tmp_path, ["speed=meta2022", "parallel=single"])
    assert (config.speed.preset, config.precision.name, config.parallel.name) == ("meta2022", "amp_fp16", "single")
    assert config.model.classifier == "pooled"  # type: ignore[union-attr]
    assert load_run_config(tmp_path, ["speed=meta2022", "parallel=single", "precision=fp32"]).precision.name == "fp32"
