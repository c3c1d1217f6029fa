"""The switches: what a preset and the choices by hand come to on a device, and what they become in the network."""

from __future__ import annotations

import re
import typing

import pytest
import torch
from torch import nn

from pycls_fast import build
from pycls_fast.config.keys import CONFIGS
from pycls_fast.errors import UserError
from pycls_fast.models.complexity import complexity
from pycls_fast.models.drop_path import DropPath
from pycls_fast.optim.choices import Optimizer
from pycls_fast.optim.optimizers import HostOptimizer
from pycls_fast.parallel.saved_activations import Recomputed, SavedTensors, save_activation_memory
from pycls_fast.parallel.world import World
from pycls_fast.plan.race import compile_if_it_pays
from pycls_fast.speed import SWITCHES, Device, Speed, Switch, resolve
from tests.factories import config_of

DEVICES: tuple[Device, ...] = typing.get_args(Device)
by_switch = pytest.mark.parametrize("switch", SWITCHES.values(), ids=[*SWITCHES])
by_preset = pytest.mark.parametrize("preset", ["reference", "fast", "meta2022"])


@by_switch
def test_what_is_said_of_a_switch_fits_its_field(switch: Switch) -> None:
    field = Speed.model_fields[switch.name]
    assert field.default == switch.reference

    assert len(switch.values) == len(set(switch.values)) >= 2
    for device in DEVICES:
        for half in (False, True):
            best = switch.best(device, in_16_bits=half)
            assert best in switch.values
            assert switch.device.get(best, device) == device
    assert {*switch.device, *switch.needs, *switch.note} <= set(switch.values) - {switch.reference}
    for needs in switch.needs.values():
        config_of(*needs.split())


def test_the_document_has_a_row_for_every_switch() -> None:
    def best(switch: Switch, device: Device) -> str:
        wide, half = switch.best(device), switch.best(device, in_16_bits=True)
        return wide if wide == half else f"{wide}, 16 bits: {half}"

    text = (CONFIGS.parent / "docs" / "speed.md").read_text(encoding="utf-8")
    for name, switch in SWITCHES.items():
        models = f" ({', '.join(switch.models)})" if switch.models else ""
        row = f"| `{name}`{models} | {' '.join(switch.values)} | {best(switch, 'cpu')} | {best(switch, 'cuda')} |"
        assert f"{row} {switch.numerics} |\n" in text
        assert re.search(rf"(?m)^- .*`{name}`.*:", text), name


def test_null_is_not_set_and_a_number_is_a_name() -> None:
    asked = Speed.model_validate({"clip": None, "sequence_padding": 8, "compile": False})
    assert asked.by_hand == {"compile": "off", "sequence_padding": "8"}
    assert asked.model_dump()["clip"] is None
    assert Speed.model_validate_json(asked.model_dump_json()).by_hand == asked.by_hand


@pytest.mark.parametrize("device", DEVICES)
def test_presets(device: Device) -> None:
    reference = resolve(Speed(), device)
    assert reference.values() == reference.by_hand == {name: switch.values[0] for name, switch in SWITCHES.items()}
    changed = {"layout": "batch_second", "qkv": "fused", "optimizer": "foreach", "mix_on": "device"}
    assert resolve(Speed(preset="meta2022"), device).values() == reference.values() | changed
    wide, narrow = (resolve(Speed(preset="fast"), device, in_16_bits=half).values() for half in (False, True))
    assert (wide["attention"], wide["optimizer"], wide["clip"], wide["metrics"]) == (
        "sdpa", "fused", "foreach", "interval"
    )  # fmt: skip
    # A CPU has other best kernels for 16 bits, and casts cost on a GPU.
    expected = {
        "cpu": {
            "attention": "products", "qkv": "fused", "linear": "products", "gelu": "polynomial",
            "convolution": "products", "compile": "model",
        },
        "cuda": {"qkv": "fused"},
    }  # fmt: skip
    assert {name: value for name, value in narrow.items() if value != wide[name]} == expected[device]
    for preset in (Speed(), Speed(preset="meta2022")):
        assert resolve(preset, device, in_16_bits=True) == resolve(preset, device)


@by_switch
@by_preset
def test_one_choice_by_hand_changes_one_switch(switch: Switch, preset: typing.Any) -> None:
    plain = resolve(Speed(preset=preset), "cuda").values()
    for value in switch.values:
        if switch.device.get(value, "cuda") == "cuda":
            found = resolve(Speed.model_validate({"preset": preset, switch.name: value}), "cuda")
            assert found.values() == {**plain, switch.name: value}


def test_every_value_that_the_device_cannot_run_is_refused_with_the_way_out() -> None:
    for name, switch in SWITCHES.items():
        for value, needed in switch.device.items():
            device: Device = "cpu" if needed == "cuda" else "cuda"
            with pytest.raises(UserError, match=rf"^speed\.{name}: {value} needs {needed.upper()} .*; use ") as caught:
                resolve(Speed.model_validate({name: value}), device)
            way_out = re.search(rf"use speed\.{name}=(\S+)", str(caught.value))
            resolve(Speed.model_validate({name: way_out[1]}), device)
    with pytest.raises(UserError) as caught:
        resolve(Speed(input_copy="prefetch", cuda_graphs="on"), "cpu")
    assert len(caught.value.lines) == 2


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", sorted(Optimizer.choices()))
def test_an_optimizer_takes_an_implementation_that_it_has(name: str, device: Device) -> None:
    optimizer = Optimizer.choices()[name](lr=1.0)
    there = optimizer.implementations
    assert resolve(Speed(), device, optimizer).optimizer == "loop"
    # foreach is slower than the loop on a CPU.
    wanted = "fused" if "fused" in there else there[-1] if device == "cuda" else "loop"
    assert resolve(Speed(preset="fast"), device, optimizer).optimizer == wanted
    compiled = Speed(preset="fast", optimizer_compile="on")
    assert resolve(compiled, device, optimizer).optimizer in (optimizer.compilable or there)
    for value in SWITCHES["optimizer"].values:
        for usable, asked in ((there, Speed()), (optimizer.compilable, compiled)):
            if value in usable:
                assert resolve(asked.replace(optimizer=value), device, optimizer).optimizer == value
            elif usable:
                with pytest.raises(UserError, match=rf"^speed\.optimizer: .*; use speed\.optimizer={usable[0]}"):
                    resolve(asked.replace(optimizer=value), device, optimizer)


@pytest.mark.parametrize(
    ("device", "overrides", "compiled"),
    [
        ("cpu", [], "model"),
        ("cpu", ["speed.compile=blocks"], "blocks"),
        # What does not go with compiled code, asked for by hand.
        ("cpu", ["speed.activation_compression=8bit"], "off"),
        ("cpu", ["speed.activation_offload=cpu"], "off"),
        ("cpu", ["speed.drop_path_compute=skip"], "off"),
        ("cpu", ["runtime.watchdog=true"], "off"),
        ("cpu", ["model=resnet18", "data.image_size_schedule=[[0,160]]"], "off"),
        ("cpu", ["parallel=fsdp"], "off"),
        ("cpu", ["parallel=ddp"], "model"),
        ("cpu", ["speed.activation_offload=cpu", "speed.compile=blocks"], "blocks"),
        # Its products are not float8's, and slow in any case.
        ("cuda", ["precision=fp8", "precision.fp8_emulate=true"], "off"),
        ("cuda", ["precision=fp8", "parallel=fsdp"], "blocks"),
        ("cuda", ["parallel=fairscale_fsdp"], "off"),
        ("cuda", ["model=resnet18", "parallel=fsdp"], "model"),
        ("cuda", ["model=timm", "model.name=resnet18"], "model"),
    ],
)
def test_the_fast_preset_compiles_unless_something_is_in_the_way(
    monkeypatch: pytest.MonkeyPatch, device: str, overrides: list[str], compiled: str
) -> None:
    """On a CPU only 16 bits."""
    found = True
    monkeypatch.setattr(build.device, "has_compiler", lambda kind: found)
    config = config_of("data=synthetic", "speed=fast", "precision=amp_bf16", *overrides, name="vit_s16")
    assert build.switches(config, torch.device(device)).compile == compiled
    found = "speed.compile=blocks" in overrides
    assert build.switches(config, torch.device(device)).compile == ("blocks" if found else "off")


@pytest.mark.parametrize(
    ("overrides", "images", "expected"),
    [
        ([], 10**8, ("blocks", "default")),
        # Compiling takes longer than it would save.
        ([], 10**5, ("off", "default")),
        (["speed.compile=blocks"], 10**5, ("blocks", "default")),
        # A GPU would wait for launches.
        (["model=vit_ti16"], 10**9, ("model", "reduce-overhead")),
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
    monkeypatch.setattr(build.device, "has_compiler", lambda kind: True)
    base = ["data=synthetic", "speed=fast", "precision=amp_bf16", "data.global_batch_size=128"]
    config = config_of(*base, "optim.accumulation_steps=1", *overrides, name="vit_s16")
    world = World(rank=0, size=1, device=torch.device("cuda"))
    flops = complexity(build.counted_model(config, 1000), image_size=224).forward_flops
    chosen = compile_if_it_pays(config, build.switches(config, world.device), world, images=images, flops=flops)
    assert (chosen.compile, chosen.compile_mode) == expected


@pytest.mark.parametrize(
    ("experiment", "overrides", "found"),
    [
        ("vit_digits", ["precision=fp8"], {"qkv": "separate", "linear": "torch"}),
        ("vit_digits", ["precision=bf16"], {"linear": "products"}),
        ("vit_digits", ["parallel=fsdp", "optim=sgd"], {"optimizer": "fused"}),
        ("vit_digits", ["parallel=fsdp", "optim=lamb"], {"optimizer": "loop"}),
        ("vit_digits", ["precision=amp_bf16", "speed.compile=off"], {"gelu": "torch"}),
        ("vit_digits", ["precision=amp_bf16", "speed.compile=model"], {"gelu": "polynomial"}),
        ("resnet_digits", ["precision=amp_bf16", "speed.memory_format=contiguous"], {"convolution": "torch"}),
        ("resnet_digits", ["precision=amp_bf16"], {"convolution": "products", "memory_format": "channels_last"}),
    ],
)
def test_the_fast_preset_gives_way_to_what_is_set(experiment: str, overrides: list[str], found: dict[str, str]) -> None:
    config = config_of("speed=fast", *overrides, name=experiment)
    assert found.items() <= build.switches(config, torch.device("cpu")).values().items()


def test_the_implementations_of_every_optimizer_fit_together() -> None:
    for name, facts in Optimizer.choices().items():
        there = set(facts.implementations)
        assert facts.implementations[0] == "loop"
        assert set(facts.compilable) <= there - {"fused"}
        assert set(facts.capturable) <= there
        assert set(facts.state_keys) <= set(config_of(f"optim={name}").optim.own())


REFERENCE = Speed()


def wrapped(*overrides: str, **chosen: str) -> nn.Module:
    config = config_of(*overrides)
    switches = REFERENCE.replace(**chosen)
    network = build.model(config, 10, switches)
    save_activation_memory(network, network.units(), switches)
    return network


def test_the_switches_arrive_in_the_model() -> None:
    plain = wrapped()
    assert not any("forward" in vars(module) for module in plain.modules())
    network = wrapped(
        "model.depth=3", "speed.recompute=full", recompute="full", activation_offload="cpu",
    )  # fmt: skip
    units = dict(network.units())  # type: ignore[operator]
    assert [isinstance(unit.forward, Recomputed) for unit in units.values()] == [True, True, True]
    assert isinstance(network.forward, SavedTensors)
    assert (network.forward.on_host, network.forward.in_8_bits) == (True, False)
    compressed = wrapped(activation_compression="8bit").forward
    assert isinstance(compressed, SavedTensors)
    assert (compressed.on_host, compressed.in_8_bits) == (False, True)
    selective = next(iter(wrapped(recompute="selective").units()))[1].forward  # type: ignore[operator]
    assert isinstance(selective, Recomputed)
    assert selective.selective


def test_skipping_arrives_in_every_drop_path() -> None:
    for value in ("multiply", "skip"):
        paths = [m for m in wrapped(drop_path_compute=value).modules() if isinstance(m, DropPath)]
        assert paths
        assert {path.compute for path in paths} == {value}


def test_the_optimizer_goes_to_the_host() -> None:
    config = config_of()
    switches = REFERENCE.replace(param_offload="cpu")
    network = build.model(config, 10, switches)
    host = build.optimizer(config, network, switches)
    plain = build.optimizer(config, network, REFERENCE)
    assert isinstance(host, HostOptimizer)
    assert type(host.inner) is type(plain)
    assert [len(g["params"]) for g in host.param_groups] == [len(g["params"]) for g in plain.param_groups]
    settings = [{k: v for k, v in g.items() if k != "params"} for g in host.param_groups]
    assert settings == [{k: v for k, v in g.items() if k != "params"} for g in plain.param_groups]
