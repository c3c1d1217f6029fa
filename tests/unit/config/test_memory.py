"""What the configured values of the memory switches become in the network."""

from __future__ import annotations

from torch import nn

from pycls_fast import build
from pycls_fast.config import load_config
from pycls_fast.models import DropPath
from pycls_fast.optim.offload import HostOptimizer
from pycls_fast.parallel.memory import Recomputed, SavedTensors
from pycls_fast.speed import Speed

REFERENCE = Speed()


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
