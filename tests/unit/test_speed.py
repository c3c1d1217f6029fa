"""The catalogue of switches, and what a preset and the choices by hand come to on a device."""

from __future__ import annotations

import re
import typing

import pytest
import torch

from pycls_fast import build, speed
from pycls_fast.config import load_config
from pycls_fast.config.schema import Speed
from pycls_fast.errors import UserError
from pycls_fast.models import complexity
from pycls_fast.parallel import World
from pycls_fast.speed import CATALOGUE, Switch, SwitchName

DEVICES: tuple[speed.Device, ...] = typing.get_args(speed.Device)
by_switch = pytest.mark.parametrize("switch", CATALOGUE, ids=[str(switch.name) for switch in CATALOGUE])


def test_the_catalogue_and_the_configuration_have_the_same_switches() -> None:
    names = [str(switch.name) for switch in CATALOGUE]
    assert sorted(names) == sorted(set(Speed.model_fields) - {"preset"}) == sorted(SwitchName)
    assert len(names) == len(set(names))


@by_switch
def test_a_field_has_the_values_of_its_switch_and_the_reference_first(switch: Switch) -> None:
    literal, nothing = typing.get_args(Speed.model_fields[switch.name].annotation)
    assert nothing is type(None)
    assert typing.get_args(literal) == switch.values
    assert switch.reference == switch.values[0]
    assert Speed.model_fields[switch.name].default is None


@by_switch
def test_a_switch_is_described_and_its_best_value_runs_on_each_device(switch: Switch) -> None:
    assert len(switch.values) == len(set(switch.values)) >= 2
    assert set(switch.fast) == set(DEVICES)
    for device, value in (*switch.fast.items(), *switch.fast_16_bits.items()):
        assert value in switch.values
        assert switch.requires.get(value, device) == device
    assert set(switch.requires) <= set(switch.values) - {switch.reference}
    assert switch.numerics in typing.get_args(speed.Numerics)
    assert set(switch.applies_to) <= set(speed.MODEL_KINDS)
    assert switch.applies_to
    for text in (switch.note, switch.mathematics, switch.helps, switch.hurts, switch.source, switch.ran):
        assert text.endswith("."), text


@pytest.mark.parametrize("device", DEVICES)
def test_presets(device: speed.Device) -> None:
    assert speed.resolve("reference", {}, device) == {switch.name: switch.values[0] for switch in CATALOGUE}
    assert speed.resolve("fast", {}, device) == {switch.name: switch.fast[device] for switch in CATALOGUE}
    recipe = speed.resolve("meta2022", {}, device)
    changed = {name for name, value in recipe.items() if value != speed.resolve("reference", {}, device)[name]}
    assert changed == {"layout", "qkv", "optimizer", "mix_on"} == set(speed.META2022)
    chosen = [recipe[name] for name in (SwitchName.LAYOUT, SwitchName.QKV, SwitchName.OPTIMIZER)]
    assert chosen == ["batch_second", "fused", "foreach"]


@pytest.mark.parametrize("device", DEVICES)
def test_the_fast_preset_of_16_bits(device: speed.Device) -> None:
    """A CPU has other best kernels for them, and casts cost on a GPU; the other presets are the same in any format."""
    wide, narrow = (speed.resolve("fast", {}, device, in_16_bits=half) for half in (False, True))
    changed = {name: value for name, value in narrow.items() if value != wide[name]}
    expected = {
        "attention": "products",
        "qkv": "fused",
        "linear": "products",
        "gelu": "polynomial",
        "convolution": "products",
        "compile": "model",
    }
    assert changed == (expected if device == "cpu" else {"qkv": "fused"})
    for preset in ("reference", "meta2022"):
        assert speed.resolve(preset, {}, device, in_16_bits=True) == speed.resolve(preset, {}, device)
    by_hand = {SwitchName.ATTENTION: "sdpa"}
    assert speed.resolve("fast", by_hand, device, in_16_bits=True)[SwitchName.ATTENTION] == "sdpa"


@pytest.mark.parametrize(
    ("precision", "linear"),
    [("fp32", "torch"), ("amp_bf16", "products"), ("bf16_params", "products"), ("bf16", "products"), ("fp8", "torch")],
)
def test_the_precision_decides_what_is_fast_on_a_cpu(precision: str, linear: str) -> None:
    config = load_config("vit_digits", ["speed=fast", f"precision={precision}"])
    assert build.switches(config, torch.device("cpu"))[SwitchName.LINEAR] == linear


@pytest.mark.slow
@pytest.mark.parametrize(
    ("overrides", "compiled"),
    [
        ([], "model"),
        (["speed.compile=blocks"], "blocks"),
        # What does not go with compiled code, asked for by hand.
        (["speed.activation_compression=8bit"], "off"),
        (["speed.activation_offload=cpu"], "off"),
        (["speed.drop_path_compute=skip"], "off"),
        (["runtime.watchdog=true"], "off"),
        (["model=resnet18", "data.image_size_schedule=[[0,160]]"], "off"),
        (["parallel=fsdp"], "off"),
        (["parallel=ddp"], "model"),
        (["speed.activation_offload=cpu", "speed.compile=blocks"], "blocks"),
    ],
)
def test_the_fast_preset_compiles_16_bits_on_a_cpu_unless_it_is_in_the_way(
    monkeypatch: pytest.MonkeyPatch, overrides: list[str], compiled: str
) -> None:
    monkeypatch.setattr(build.switch_values, "has_compiler", lambda kind: True)
    config = load_config("vit_s16", ["data=synthetic", "speed=fast", "precision=amp_bf16", *overrides])
    assert build.switches(config, torch.device("cpu"))[SwitchName.COMPILE] == compiled


@pytest.mark.parametrize(
    ("overrides", "images", "expected"),
    [
        ([], 10**8, ("blocks", "default")),
        # Compiling takes longer than it would save.
        ([], 10**5, ("off", "default")),
        (["speed.compile=blocks"], 10**5, ("blocks", "default")),
        # A GPU would wait for launches.
        (["model=vit_ti16"], 10**9, ("model", "reduce-overhead")),
        (["model=resnet50", "data.global_batch_size=32"], 10**9, ("model", "reduce-overhead")),
        (["model=resnet50", "data.global_batch_size=32", "parallel=ddp"], 10**9, ("model", "reduce-overhead")),
        (["model=resnet50", "data.global_batch_size=256"], 10**9, ("model", "default")),
        # Where graphs cannot be: weights that move, gradients that are added up.
        (["model=resnet50", "data.global_batch_size=32", "parallel=fsdp"], 10**9, ("model", "default")),
        (["model=vit_ti16", "optim.accumulation_steps=2"], 10**9, ("blocks", "default")),
        (["model=vit_ti16", "speed.compile_mode=default"], 10**9, ("blocks", "default")),
    ],
)
def test_what_a_gpu_compiles_depends_on_its_work(
    monkeypatch: pytest.MonkeyPatch, overrides: list[str], images: int, expected: tuple[str, str]
) -> None:
    monkeypatch.setattr(build.switch_values, "has_compiler", lambda kind: True)
    base = ["data=synthetic", "speed=fast", "precision=amp_bf16", "data.global_batch_size=128"]
    config = load_config("vit_s16", [*base, "optim.accumulation_steps=1", *overrides])
    world = World(rank=0, size=1, device=torch.device("cuda"))
    flops = complexity(build.counted_model(config, 1000, {}), image_size=224).forward_flops
    chosen = build.compile_for_gpu(config, build.switches(config, world.device), world, images=images, flops=flops)
    assert (chosen[SwitchName.COMPILE], chosen[SwitchName.COMPILE_MODE]) == expected


@pytest.mark.parametrize(
    ("overrides", "qkv"),
    [
        (["speed=fast", "precision=amp_bf16"], "fused"),
        (["speed=fast", "precision=fp32"], "separate"),
        # A joined product would go around the float8 layers.
        (["speed=fast", "precision=fp8"], "separate"),
        (["speed=meta2022", "parallel=single"], "fused"),
        (["speed=meta2022", "parallel=single", "precision=fp8"], "separate"),
    ],
)
def test_one_product_for_queries_keys_and_values_on_cuda(overrides: list[str], qkv: str) -> None:
    config = load_config("vit_s16", ["data=synthetic", *overrides])
    assert build.switches(config, torch.device("cuda"))[SwitchName.QKV] == qkv


@pytest.mark.parametrize(
    ("overrides", "compiled"),
    [
        (["precision=fp8"], "blocks"),
        (["precision=amp_bf16"], "blocks"),
        (["precision=fp32"], "blocks"),
        (["speed=reference"], "off"),
        (["precision=fp8", "speed.compile=off"], "off"),
        (["precision=fp8", "speed=reference"], "off"),
        # Its products are not float8's, and slow in any case.
        (["precision=fp8", "precision.fp8_emulate=true"], "off"),
        # What does not go with compiled code, asked for by hand.
        (["precision=fp8", "speed.drop_path_compute=skip"], "off"),
        (["precision=fp8", "runtime.watchdog=true"], "off"),
        (["precision=fp8", "parallel=fsdp"], "blocks"),
        (["parallel=hsdp"], "blocks"),
        (["parallel=ddp"], "blocks"),
        (["parallel=fairscale_fsdp"], "off"),
        (["model=resnet18", "parallel=ddp"], "model"),
        (["model=resnet18", "parallel=fsdp"], "model"),
        (["model=timm", "model.name=resnet18"], "model"),
        (["model=resnet18", "data.image_size_schedule=[[0,160]]"], "off"),
    ],
)
def test_the_fast_preset_compiles_on_cuda(monkeypatch: pytest.MonkeyPatch, overrides: list[str], compiled: str) -> None:
    found = True
    monkeypatch.setattr(build.switch_values, "has_compiler", lambda kind: found)
    config = load_config("vit_s16", ["data=synthetic", "speed=fast", *overrides])
    assert build.switches(config, torch.device("cuda"))[SwitchName.COMPILE] == compiled
    found = False
    assert build.switches(config, torch.device("cuda"))[SwitchName.COMPILE] == "off"


def test_the_fast_preset_compiles_nothing_without_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    config = load_config("vit_s16", ["data=synthetic", "speed=fast", "precision=amp_bf16"])
    monkeypatch.setenv("CXX", "no-such-compiler -O3")
    assert build.switches(config, torch.device("cpu"))[SwitchName.COMPILE] == "off"
    by_hand = load_config("vit_s16", ["data=synthetic", "speed=fast", "precision=amp_bf16", "speed.compile=model"])
    assert build.switches(by_hand, torch.device("cpu"))[SwitchName.COMPILE] == "model"


def test_malloc_is_told_nothing_without_glibc(monkeypatch: pytest.MonkeyPatch) -> None:
    assert speed.resolve("fast", {}, "cpu")[SwitchName.ALLOCATOR] == ("keep" if speed.HAS_GLIBC else "default")
    monkeypatch.setattr(speed.presets, "HAS_GLIBC", False)
    assert speed.resolve("fast", {}, "cpu")[SwitchName.ALLOCATOR] == "default"
    with pytest.raises(UserError, match=r"speed\.allocator: keep needs glibc.*use speed\.allocator=default"):
        speed.resolve("fast", {SwitchName.ALLOCATOR: "keep"}, "cpu")


@by_switch
@pytest.mark.parametrize("preset", ["reference", "fast", "meta2022"])
def test_one_choice_by_hand_changes_one_switch(switch: Switch, preset: str) -> None:
    plain = speed.resolve(preset, {}, "cuda")
    for value in switch.values:
        if switch.requires.get(value, "cuda") == "cuda":
            assert speed.resolve(preset, {switch.name: value}, "cuda") == {**plain, switch.name: value}


@pytest.mark.parametrize("preset", ["reference", "fast", "meta2022"])
def test_every_value_that_the_device_cannot_run_is_refused_with_the_way_out(preset: str) -> None:
    refused = 0
    for switch in CATALOGUE:
        for value, needed in switch.requires.items():
            for device in DEVICES:
                if device == needed:
                    continue
                refused += 1
                with pytest.raises(UserError) as caught:
                    speed.resolve(preset, {switch.name: value}, device)
                (line,) = caught.value.lines
                assert line.startswith(
                    f"speed.{switch.name}: {value} needs {needed.upper()} and this run is on {device.upper()}; use "
                )
                way_out = re.search(rf"use speed\.{switch.name}=(\w+)", line)
                assert way_out is not None
                assert speed.resolve(preset, {switch.name: way_out[1]}, device)[switch.name] == way_out[1]
    assert refused


def test_all_refused_values_are_told_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    fast: dict[speed.Device, str] = {"cpu": "plain", "cuda": "quick"}
    needy = [
        Switch(name, ("plain", "quick", "slow"), fast, "rounding", {"quick": "cuda"}, *["A text."] * 6)
        for name in (SwitchName.CLIP, SwitchName.EMA)
    ]
    monkeypatch.setattr(speed.presets, "CATALOGUE", tuple(needy))
    with pytest.raises(UserError) as caught:
        speed.resolve("fast", {SwitchName.CLIP: "quick", SwitchName.EMA: "quick"}, "cpu")
    assert caught.value.lines == tuple(
        f"speed.{name}: quick needs CUDA and this run is on CPU; use speed.{name}=plain or slow"
        for name in ("clip", "ema")
    )


def test_build_asks_for_the_device_at_hand() -> None:
    config = load_config("vit_digits", ["speed.input_copy=prefetch", "speed.optimizer=loop"])
    with pytest.raises(UserError, match=r"^speed\.input_copy: prefetch needs CUDA and this run is on CPU; use"):
        build.switches(config, torch.device("cpu"))
    chosen = build.switches(config, torch.device("cuda", 3))
    assert (chosen[SwitchName.INPUT_COPY], chosen[SwitchName.OPTIMIZER]) == ("prefetch", "loop")
    assert chosen[SwitchName.EMA] == "foreach"
