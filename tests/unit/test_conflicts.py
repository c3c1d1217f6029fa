"""Settings that cannot be together, of which one is a switch's value in force."""

from __future__ import annotations

import re
from typing import get_args

import pytest
import torch

from pycls_fast import build
from pycls_fast.config import RunConfig, load_config
from pycls_fast.errors import UserError
from pycls_fast.speed import MODEL_KINDS, SWITCHES
from tests.unit import test_switch_pairs


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
            ["speed.compile=model", "speed.compile_mode=reduce-overhead", "optim.accumulation_steps=2"],
            "speed.compile_mode: reduce-overhead keeps gradients",
        ),
        (
            "cuda",
            ["speed.compile=blocks", "speed.compile_mode=reduce-overhead"],
            "speed.compile_mode: reduce-overhead would record a graph for each block",
        ),
        (
            "cuda",
            ["speed.compile=model", "speed.compile_mode=max-autotune", "parallel=fsdp"],
            "speed.compile_mode: max-autotune needs weights that stay",
        ),
        ("cpu", ["speed.recompute=budget"], "speed.recompute: budget is kept by compiled code"),
        ("cpu", ["speed.gelu=polynomial"], "speed.gelu: polynomial is for compiled code"),
        ("cpu", ["speed=reference", "speed.decode_scale=dct"], "speed.decode_scale: dct is not available with"),
        ("cpu", ["precision=fp8", "speed.qkv=fused"], "speed.qkv: fused bypasses the float8 layers"),
        ("cpu", ["precision=fp8", "speed.linear=products"], "speed.linear: products bypasses the float8 layers"),
        ("cuda", ["speed.attention=sdpa_cudnn"], "speed.attention: sdpa_cudnn needs 16 bits on CUDA"),
        *(
            ("cuda", ["speed.cuda_graphs=on", *overrides], f"speed.cuda_graphs: {begins}")
            for overrides, begins in [
                (["optim=lamb"], "on needs an optimizer that reads its lr on the device"),
                (["speed.optimizer=foreach"], "on needs an optimizer that reads its lr on the device"),
                (["optim.accumulation_steps=2"], "on records one microbatch"),
                (["runtime.watchdog=true"], "runtime.watchdog asks the host"),
                (["precision=bf16"], "precision=bf16 gives the optimizer's weights new memory"),
                (["speed.compile=model", "speed.compile_mode=reduce-overhead"], "speed.compile_mode=reduce-overhead"),
                (["speed.metrics=step"], "speed.metrics=step has the host read"),
                (["speed.drop_path_compute=skip"], "speed.drop_path_compute=skip has different shapes"),
                (["speed.recompute=full"], "speed.recompute=full reads the state of random"),
                (["speed.recompute=selective"], "speed.recompute=selective reads the state of random"),
                (["speed.activation_offload=cpu"], "speed.activation_offload=cpu keeps"),
                (["speed.param_offload=cpu"], "speed.param_offload=cpu updates"),
            ]
        ),
    ],
)
def test_is_refused_with_a_way_out(device: str, overrides: list[str], begins: str) -> None:
    fixed = ["precision=fp32", *overrides]
    with pytest.raises(UserError) as caught:
        build.switches(load_config("vit_digits", fixed), torch.device(device))
    (line,) = caught.value.lines
    assert line.startswith(begins)
    way_out = re.search(r"use (\S+=[^\s,]+)", line)
    assert way_out is not None
    build.switches(load_config("vit_digits", [*fixed, way_out[1]]), torch.device(device))


EXPERIMENTS = {
    "vit": ["vit_digits"],
    "resnet": ["resnet_digits"],
    "timm": ["vit_digits", "model=timm", "model.name=vit_tiny_patch16_224"],
}


def test_every_kind_of_model_has_switches_and_is_tried() -> None:
    sections = get_args(RunConfig.model_fields["model"].annotation)
    kinds = {get_args(section.model_fields["kind"].annotation)[0] for section in sections}
    assert len(kinds) >= 3
    assert set(MODEL_KINDS) == kinds
    assert set(EXPERIMENTS) == set(test_switch_pairs.BASE) == kinds


@pytest.mark.parametrize("kind", EXPERIMENTS)
def test_a_switch_by_hand_that_the_model_has_nothing_of(kind: str) -> None:
    name, *model = EXPERIMENTS[kind]
    config = load_config(name, [*model, "precision=fp32"])
    for switch in SWITCHES.values():
        for value in switch.values if kind not in switch.models else ():
            by_hand = config.with_values(speed={switch.name: value})
            device = torch.device(switch.device.get(value, "cpu"))
            if value == switch.reference:
                build.switches(by_hand, device)
                continue
            with pytest.raises(UserError, match=rf"^speed\.{switch.name}: {value} .*; use speed\.{switch.name}=\w+$"):
                build.switches(by_hand, device)
    # A preset is for every model.
    for preset in ("fast", "reference"):
        build.switches(load_config(name, [*model, f"speed={preset}", "precision=amp_bf16"]), torch.device("cpu"))


def test_convolutions_as_products_are_for_channels_last_maps() -> None:
    by_hand = load_config("resnet_digits", ["speed=reference", "speed.convolution=products"])
    with pytest.raises(UserError, match=r"^speed\.convolution: .*; use speed\.memory_format=channels_last$"):
        build.switches(by_hand, torch.device("cpu"))
    overrides = ["speed=reference", "speed.convolution=products", "speed.memory_format=channels_last"]
    assert build.switches(load_config("resnet_digits", overrides), torch.device("cpu")).convolution == "products"
    # The preset gives way.
    for memory_format, convolution in (("contiguous", "torch"), ("channels_last", "products")):
        config = load_config("resnet_digits", ["precision=amp_bf16", f"speed.memory_format={memory_format}"])
        assert build.switches(config, torch.device("cpu")).convolution == convolution


def test_a_recorded_step_has_images_of_one_size() -> None:
    fixed = ["speed.cuda_graphs=on", "data.image_size_schedule=[[2,32]]"]
    with pytest.raises(UserError, match=r"^speed\.cuda_graphs: on records images of one size .*speed\.cuda_graphs=off"):
        build.switches(load_config("resnet_digits", fixed), torch.device("cuda"))
    build.switches(load_config("resnet_digits", [*fixed[1:], "speed.cuda_graphs=off"]), torch.device("cuda"))


def test_what_is_fine_passes() -> None:
    config = load_config("vit_digits", ["precision=amp_bf16", "speed.attention=sdpa_flash", "speed.qkv=fused"])
    for device in ("cpu", "cuda"):
        build.switches(config, torch.device(device))


@pytest.mark.parametrize(("compiled", "gelu"), [("off", "torch"), ("model", "polynomial")])
def test_the_preset_takes_the_polynomials_only_for_compiled_code(compiled: str, gelu: str) -> None:
    config = load_config("vit_digits", ["precision=amp_bf16", "speed=fast", f"speed.compile={compiled}"])
    assert build.switches(config, torch.device("cpu")).gelu == gelu
