"""Combinations of the memory switches that cannot run, and what the configured values become."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn

from pycls_fast import build
from pycls_fast.config import load_config
from pycls_fast.errors import UserError
from pycls_fast.models import DropPath
from pycls_fast.optim.offload import HostOptimizer
from pycls_fast.parallel.memory import Recomputed, SavedTensors
from pycls_fast.speed import Speed

REFERENCE = Speed()

IMPOSSIBLE = [
    (
        ["speed.activation_compression=8bit", "speed.recompute=full"],
        "speed.activation_compression: 8bit conflicts with speed.recompute=full: blocks would run again from rounded "
        "inputs; use speed.activation_compression=none or speed.recompute=off",
    ),
    (
        ["speed.activation_offload=cpu", "speed.recompute=selective"],
        "speed.activation_offload: cpu cannot offload what speed.recompute=selective keeps; use speed.recompute=full "
        "or speed.activation_offload=none",
    ),
    (
        ["parallel.recompute_every=2"],
        "parallel.recompute_every: 2 has no effect without recomputation; add speed.recompute=full or selective, or "
        "use parallel.recompute_every=1",
    ),
]


@pytest.mark.slow
@pytest.mark.parametrize(("overrides", "line"), IMPOSSIBLE, ids=[" ".join(case[0]) for case in IMPOSSIBLE])
def test_an_impossible_combination_gets_its_line_and_its_way_out_works(overrides: list[str], line: str) -> None:
    with pytest.raises(UserError) as caught:
        load_config("vit_digits", overrides)
    (found,) = caught.value.lines
    assert found.startswith(line)
    for way_out in re.findall(r"(?:speed|parallel)\.\w+=\w+", line.rpartition("; ")[2]):
        load_config("vit_digits", [*overrides, way_out])


def test_a_resnet_cannot_skip() -> None:
    with pytest.raises(UserError, match=r"^speed\.drop_path_compute: skip would take BatchNorm's"):
        load_config("resnet_digits", ["speed.drop_path_compute=skip"])


def test_parameters_on_the_host_need_another_device() -> None:
    config = load_config("vit_digits", ["speed.param_offload=cpu"])
    with pytest.raises(UserError, match=r"^speed\.param_offload: cpu needs CUDA and .* use speed\.param_offload=none$"):
        build.switches(config, torch.device("cpu"))


@pytest.mark.parametrize(
    ("chosen", "key"),
    [
        ("activation_compression=8bit", "activation_compression"),
        ("activation_offload=cpu", "activation_offload"),
        ("drop_path_compute=skip", "drop_path_compute"),
    ],
)
def test_what_does_not_go_with_compilation(chosen: str, key: str) -> None:
    """Also where it is the preset that compiles; the way out that the line names works."""
    config = load_config("vit_digits", ["speed.compile=model", f"speed.{chosen}"])
    with pytest.raises(UserError) as caught:
        build.switches(config, torch.device("cpu"))
    (line,) = caught.value.lines
    assert line.startswith(f"speed.{key}: ")
    assert "does not work inside" in line or "constant ones" in line
    for way_out in re.findall(r"speed\.\w+=\w+", line.rpartition("; use")[2]):
        config = load_config("vit_digits", ["speed.compile=model", f"speed.{chosen}", way_out])
        build.switches(config, torch.device("cpu"))


def wrapped(*overrides: str, **chosen: str) -> nn.Module:
    config = load_config("vit_digits", overrides)
    switches = REFERENCE.replace(**chosen)
    network = build.model(config, 10, switches)
    build.save_activation_memory(config, network, switches)
    return network


def test_the_switches_arrive_in_the_model() -> None:
    plain = wrapped()
    assert not any("forward" in vars(module) for module in plain.modules())
    network = wrapped(
        "model.depth=3",
        "speed.recompute=full",
        "parallel.recompute_every=2",
        recompute="full",
        activation_offload="cpu",
    )
    units = dict(network.units())  # type: ignore[operator]
    assert [isinstance(unit.forward, Recomputed) for unit in units.values()] == [True, False, True]
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
    config = load_config("vit_digits")
    switches = REFERENCE.replace(param_offload="cpu")
    network = build.model(config, 10, switches)
    host = build.optimizer(config, network, switches)
    plain = build.optimizer(config, network, REFERENCE)
    assert isinstance(host, HostOptimizer)
    assert type(host.inner) is type(plain)
    assert [len(g["params"]) for g in host.param_groups] == [len(g["params"]) for g in plain.param_groups]
    settings = [{k: v for k, v in g.items() if k != "params"} for g in host.param_groups]
    assert settings == [{k: v for k, v in g.items() if k != "params"} for g in plain.param_groups]
