"""Combinations with the strategies that cannot run: one line each, whose way out works."""

from __future__ import annotations

import re

import pytest
import torch

from pycls_fast import build
from pycls_fast.config import load_config
from pycls_fast.errors import UserError
from pycls_fast.precision import LEVELS

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("overrides", "begins"),
    [
        (["parallel=fsdp", "parallel.compression=fp16"], "parallel.compression: fp16 is for parallel=ddp"),
        (["parallel=fsdp", "parallel.static_graph=true"], "parallel.static_graph: is for parallel=ddp"),
        (
            [
                *("parallel=ddp", "parallel.static_graph=true", "optim.accumulation_steps=2"),
                "parallel.compression=powersgd",
            ],
            "parallel.static_graph: takes one more exchange",
        ),
        (["parallel=ddp", "parallel.shard_degree=2"], "parallel.shard_degree: is for parallel=hsdp"),
        (["parallel=fsdp", "parallel.replicate_degree=2"], "parallel.replicate_degree: is for parallel=hsdp"),
        (["parallel=ddp", "parallel.reshard_after_forward=false"], "parallel.reshard_after_forward: false is for"),
        (["parallel=fsdp", "precision=bf16"], "precision: bf16 keeps no float32 weights"),
        (["parallel=hsdp", "precision=fp16"], "precision: fp16 keeps no float32 weights"),
        (["parallel=fsdp", "optim=muon"], "optim.name: muon needs whole weights"),
        (["parallel=hsdp", "optim=adafactor"], "optim.name: adafactor needs whole weights"),
        (["parallel=fsdp", "optim=adamw8bit"], "optim.name: adamw8bit needs whole weights"),
        *(
            (["parallel=ddp", "parallel.compression=powersgd", f"precision={name}"], "parallel.compression: powersgd")
            for name in ("amp_fp16", "fp16_master", "bf16_params", "bf16")
        ),
        *(
            (
                ["parallel=ddp", "parallel.compression=fp16", f"precision={name}"],
                "parallel.compression: fp16 needs a scaled",
            )
            for name in LEVELS
            if not LEVELS[name].scaled
        ),
    ],
)
def test_is_refused_with_a_way_out(overrides: list[str], begins: str) -> None:
    with pytest.raises(UserError) as caught:
        build.switches(load_config("vit_digits", overrides), CPU)
    (line,) = caught.value.lines
    assert line.startswith(begins)
    way_out = re.search(r"use ([^\s,;]+=[^\s,;]+)", line)
    assert way_out is not None
    build.switches(load_config("vit_digits", [*overrides, way_out[1]]), CPU)


@pytest.mark.parametrize("precision", [name for name, level in LEVELS.items() if level.scaled])
def test_gradients_are_exchanged_in_float16_with_a_scaled_loss(precision: str) -> None:
    overrides = ["parallel=ddp", "parallel.compression=fp16", f"precision={precision}"]
    assert load_config("vit_digits", overrides).parallel.compression == "fp16"


def test_batch_norm_over_ranks_needs_batch_norm() -> None:
    for name in ("resnet_digits", "vit_c_1gf"):
        load_config(name, ["parallel.sync_batchnorm=true", "data.root=x"])
    for name, why in [
        ("vit_digits", "model.kind=vit has no batch norm with model.stem=patch"),
        ("regnety_4gf", "is for model.kind=resnet, and vit with model.stem=conv; timm's batch norms may include an"),
    ]:
        with pytest.raises(UserError) as caught:
            load_config(name, ["parallel.sync_batchnorm=true", "data.root=x"])
        (line,) = caught.value.lines
        assert line.startswith(f"parallel.sync_batchnorm: {why}")
        assert "use parallel.sync_batchnorm=false" in line


def test_the_preset_takes_what_there_is_for_shards() -> None:
    for name in ("sgd", "adamw"):
        chosen = build.switches(load_config("vit_digits", ["parallel=fsdp", f"optim={name}", "speed=fast"]), CPU)
        assert chosen.optimizer == "fused"
    chosen = build.switches(load_config("vit_digits", ["parallel=fsdp", "optim=lamb", "speed=fast"]), CPU)
    assert chosen.optimizer == "loop"
