"""Settings that cannot be together, of which one is a switch's value in force."""

from __future__ import annotations

import re

import pytest
import torch

from pycls_fast import build
from pycls_fast.config import load_config
from pycls_fast.errors import UserError


@pytest.mark.parametrize(
    ("device", "overrides", "begins"),
    [
        (
            "cpu",
            ["speed.compile_mode=max-autotune-no-cudagraphs"],
            "speed.compile_mode: max-autotune-no-cudagraphs does",
        ),
        (
            "cuda",
            ["speed.compile=blocks", "speed.compile_mode=reduce-overhead", "optim.accumulation_steps=2"],
            "speed.compile_mode: reduce-overhead keeps gradients",
        ),
        ("cpu", ["precision=fp8", "speed.qkv=fused"], "speed.qkv: fused goes around the float8 layers"),
        ("cuda", ["speed.attention=sdpa_cudnn"], "speed.attention: sdpa_cudnn needs 16 bits on CUDA"),
    ],
)
def test_is_refused_with_a_way_out(device: str, overrides: list[str], begins: str) -> None:
    fixed = ["precision=fp32", *overrides]
    with pytest.raises(UserError) as caught:
        build.switches(load_config("vit_digits", fixed), torch.device(device))
    (line,) = caught.value.lines
    assert line.startswith(begins)
    way_out = re.search(r"use (\S+=\S+)", line)
    assert way_out is not None
    build.switches(load_config("vit_digits", [*fixed, way_out[1]]), torch.device(device))


def test_what_is_fine_passes() -> None:
    config = load_config("vit_digits", ["precision=amp_bf16", "speed.attention=sdpa_flash", "speed.qkv=fused"])
    for device in ("cpu", "cuda"):
        build.switches(config, torch.device(device))
