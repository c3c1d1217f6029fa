"""FairScale's strategies in one process: what is flattened together, what comes out of it."""

from __future__ import annotations

import copy
import datetime
from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from pycls_fast import build
from pycls_fast.optim.groups import by_name, parameter_groups
from pycls_fast.optim.optimizers import named_state
from pycls_fast.optim.owned_weights import OwnedWeights
from pycls_fast.parallel import fairscale
from pycls_fast.parallel.fairscale import Flat, FlatShards
from pycls_fast.parallel.launch import make_mesh, start_world
from pycls_fast.parallel.monitor import report_seconds
from pycls_fast.parallel.parallel_model import StrategySettings
from pycls_fast.parallel.world import World, floating_buffers
from pycls_fast.strategies import Parallel
from pycls_fast.train.run_state import Run
from tests.factories import assert_same_bits, config_of, imagined, make_optimizer
from tests.integration.fairscale_cpu import play_cuda
from tests.integration.strategy_worker import whole

TINY = ("model.width=32", "model.depth=3", "model.mlp_width=36", "model.patch_size=4", "data.image_size=8")


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    """One rank that FairScale takes for one on CUDA."""
    play_cuda(monkeypatch)
    with start_world("cpu", Parallel(name="fairscale_fsdp", timeout_seconds=60)) as world:
        yield world


def wrapped(world: World, *overrides: str, config_name: str = "vit_digits") -> tuple[Any, nn.Module, Any]:
    """The configuration, the network as it was before, and the wrapped one."""
    tiny = ("model.depth=18", "data.image_size=8") if config_name == "resnet_digits" else TINY
    config = config_of("parallel=fairscale_fsdp", *tiny, "data.root=x", *overrides, name=config_name)
    switches = build.switches(config, world.device)
    plain = build.model(config, 10, switches)
    network = build.model(config, 10, switches, empty=True)
    return config, plain, build.wrap(config, network, world, switches)


def test_every_group_has_the_timeout_of_the_run(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    timeouts, new_group = [], dist.new_group

    def recorded(*ranks: Any, **options: Any) -> Any:
        timeouts.append(options.get("timeout"))
        return new_group(*ranks, **options)

    monkeypatch.setattr(dist, "new_group", recorded)
    wrapped(world)
    # The monitor's 60 s, and the time of its report.
    assert set(timeouts) == {world.timeout} == {datetime.timedelta(seconds=60 + report_seconds(60))}


@pytest.mark.parametrize(
    ("config_name", "precision", "extra"),
    [
        ("vit_digits", "fp32", ("optim.layer_decay=0.5",)),
        ("vit_digits", "fp16_master", ()),
        ("resnet_digits", "fp32", ("optim.decay_norms=true",)),
    ],
)
def test_groups_are_those_of_one_process(
    world: World, config_name: str, extra: tuple[str, ...], precision: str
) -> None:
    config, plain, ours = wrapped(world, f"precision={precision}", *extra, config_name=config_name)
    theirs = by_name(plain, parameter_groups(plain, config.optim))
    flats: FlatShards = ours.weights
    names_of = {flat.shard: flat.names for flat in flats.flats}
    assert len(flats.groups) == len(theirs)
    for mine, other in zip(flats.groups, theirs, strict=True):
        names = [name for shard in mine["params"] for name in names_of[shard]]
        assert sorted(names) == sorted(other["params"])
        assert {key: mine[key] for key in mine if key != "params"} == {k: other[k] for k in other if k != "params"}
    # Few tensors: as many as each wrapper meets groups, and a pair of one's own for a norm that stays float32.
    norms = sum(isinstance(module, nn.LayerNorm) for module in plain.modules())
    wrappers = len(plain.units()) + 1 + (precision == "fp16_master") * norms
    assert len(flats.flats) <= 3 * wrappers


def test_batch_norm_statistics_of_the_average_are_averaged_over_ranks(world: World) -> None:
    """As many of them as the model has: inside of wrappers, too, whose buffers have other names than the average's."""
    config, plain, ours = wrapped(world, "optim.ema_decay=0.9", config_name="resnet_digits")
    network = ours.forward
    ema = build.ema(config, ours.weights, build.switches(config, world.device))
    averaged: list[torch.Tensor] = []
    world = SimpleNamespace(average_buffers=averaged.extend)
    told: Any = SimpleNamespace(network=network, step=SimpleNamespace(ema=ema), world=world)
    Run.sync_buffers(told)
    statistics = len(floating_buffers(plain))
    assert statistics > 0
    assert len(averaged) == 2 * statistics
    assert len({id(buffer) for buffer in averaged}) == 2 * statistics


def test_experts_in_wrappers_add_their_losses(world: World) -> None:
    _, plain, ours = wrapped(world, config_name="vit_moe_digits")
    images_BCHW = torch.randn(4, 3, 8, 8)
    for network in (plain, ours.forward):
        network(images_BCHW)
    torch.testing.assert_close(ours.forward.auxiliary_loss(), plain.auxiliary_loss())
    torch.testing.assert_close(ours.forward.facts(), plain.facts())


def state_of(ours: Any, network: nn.Module, optimizer: Any) -> dict[str, dict[str, Any]]:
    """The optimizer's state by the parameters' names."""
    return dict((ours.weights or OwnedWeights(network)).optimizer_state(optimizer))


def test_the_state_of_an_optimizer_on_the_host(world: World) -> None:
    """Of shards, and of what OSS shares out: by name and in the network's shapes, and back."""
    for strategy in ("fairscale_fsdp", "fairscale_sharded_ddp"):
        # A head of zeros would make all gradients zero.
        own = [f"parallel={strategy}", "data.root=x", "model.init=trunc_normal"]
        config = config_of(*TINY, *own)
        switches = build.switches(config, world.device).replace(param_offload="cpu")
        network = build.model(config, 10, switches)
        ours = build.wrap(config, network, world, switches)
        groups = None if ours.weights is None else ours.weights.groups
        first = ours.optimizer or build.optimizer(config, network, switches, groups=groups)
        assert ours.shard_groups
        ours.forward(torch.randn(2, 3, 8, 8)).square().sum().backward()
        first.step()
        found = state_of(ours, network, first)
        state = {name: {key: value.clone() for key, value in values.items()} for name, values in found.items()}
        innermost = getattr(getattr(first, "optim", first), "inner", first)
        for values in innermost.state.values():
            for value in values.values():
                value.zero_()
        assert not whole(state_of(ours, network, first)["head.weight"]["exp_avg"]).any()
        (ours.weights or OwnedWeights(network)).load_optimizer_state(first, state)
        again = state_of(ours, network, first)
        assert state["head.weight"]["exp_avg"].shape == (10, 32)
        assert all(whole(values["exp_avg"]).any() for values in state.values())
        assert_same_bits(whole(again), whole(state))


@pytest.mark.parametrize("gathers_again", [True, False])
def test_when_gradients_are_exchanged(world: World, gathers_again: bool) -> None:
    """After every microbatch, so that no rank holds whole ones, or after the last; in float32."""
    more = f"parallel.reshard_after_forward={str(gathers_again).lower()}", "precision=fp16_master"
    ours = wrapped(world, *more)[2]
    for is_last in (False, True):
        with ours.exchange(is_last):
            assert ours.forward._require_backward_grad_sync == (is_last or gathers_again)
    assert ours.taken_every_microbatch == gathers_again
    narrow = [m for m in ours.forward.modules() if getattr(m, "mixed_precision", False)]
    assert narrow
    assert all(module.fp32_reduce_scatter for module in narrow)


@pytest.fixture
def two() -> Iterator[World]:
    """The first of two ranks, of which the other does not exist."""
    with imagined(2):
        yield World(0, 2, torch.device("cpu"), mesh=make_mesh("cpu", None, 2, datetime.timedelta(seconds=60)))


def test_the_shards_of_two_ranks_are_the_whole(two: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two parameters in one flat one, whose last shard is padded."""
    assert two.mesh is not None
    values = {"a": torch.randn(3, 4), "b": torch.randn(5)}
    shapes = tuple(value.shape for value in values.values())
    shards = FlatShards([Flat(nn.Parameter(torch.zeros(9)), tuple(values), shapes)], {}, [], two.mesh, lambda: None)
    own: list[torch.Tensor] = []
    parts: list[dict[str, Any]] = []
    for rank in range(2):
        monkeypatch.setattr(DeviceMesh, "get_local_rank", lambda *_, rank=rank: rank)
        own.append(shards.join(values)["a+"])
    flattened = torch.cat([*(value.flatten() for value in values.values()), torch.zeros(1)])
    assert torch.equal(torch.cat(own), flattened)
    monkeypatch.setattr(dist, "all_gather_into_tensor", lambda out, _, group: out.copy_(flattened))
    for rank in range(2):
        monkeypatch.setattr(DeviceMesh, "get_local_rank", lambda *_, rank=rank: rank)
        parts.append(shards.split({"a+": own[rank]}))
    for name, value in values.items():
        assert torch.equal(torch.cat([part[name].to_local() for part in parts]), value)


def test_owners_get_the_gradients_of_each_step(two: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once a step. The weights stay where the optimizer and the average have found them."""
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    plain = copy.deepcopy(network)
    make = partial(make_optimizer, "sgd", lr=0.1, momentum=0.0, nesterov=False, implementation="loop")
    names = [name for name, _ in network.named_parameters()]
    settings = StrategySettings(groups=[{"params": names, "weight_decay": 0.0}], make_optimizer=make)
    ours = fairscale.shard_state(network, two, settings)
    where = [parameter.data_ptr() for parameter in network.parameters()]
    reduced: list[torch.Tensor] = []
    done: Any = SimpleNamespace(wait=lambda: True, is_completed=lambda: True)

    def reduce(tensor: torch.Tensor, **_: Any) -> Any:
        reduced.append(tensor.clone())
        return done

    monkeypatch.setattr(dist, "reduce", reduce)
    for _ in range(2):
        for is_last in (False, True):
            images = torch.randn(5, 3)
            with ours.exchange(is_last):
                ours.forward(images).square().sum().backward()
            plain(images).square().sum().backward()
            assert len(reduced) == len(names) * is_last
        expected = [p.grad / 2 for p in plain.parameters() if p.grad is not None]
        for one, other in zip(sorted(reduced, key=torch.numel), sorted(expected, key=torch.numel), strict=True):
            torch.testing.assert_close(one, other)
        reduced.clear()
        for each in (ours.optimizer, plain):
            assert each is not None
            each.zero_grad(set_to_none=True)
    assert [parameter.data_ptr() for parameter in network.parameters()] == where


def test_fused_momentum_lies_in_memory_as_the_weights_do(world: World) -> None:
    """FairScale makes weights contiguous after the optimizer has made its state."""
    torch.manual_seed(0)
    plain = nn.Conv2d(16, 16, 3).to(memory_format=torch.channels_last)
    network = copy.deepcopy(plain)
    make = partial(make_optimizer, "sgd", lr=0.1, momentum=0.9, nesterov=False, implementation="fused")
    settings = StrategySettings(groups=[{"params": ["weight", "bias"], "weight_decay": 0.0}], make_optimizer=make)
    ours = fairscale.shard_state(network, world, settings)
    stepped: Any = ours.optimizer
    alone = make([{"params": list(plain.parameters()), "weight_decay": 0.0}])
    images = torch.randn(2, 16, 5, 5).to(memory_format=torch.channels_last)
    for _ in range(2):
        for forward, optimizer in ((ours.forward, stepped), (plain, alone)):
            forward(images).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
    assert all(s["momentum_buffer"].stride() == p.stride() for p, s in stepped.optim.state.items())
    found, expected = named_state(stepped, network.named_parameters()), named_state(alone, plain.named_parameters())
    torch.testing.assert_close(whole(found), expected)
    torch.testing.assert_close(network.weight, plain.weight)


def test_lists_in_the_state_of_shards_have_the_networks_shapes(world: World) -> None:
    """Each rank's own part would be saved as all ranks' value."""
    flats = wrapped(world)[2].weights
    optimizer = torch.optim.SGD(flats.parameters)
    for flat in flats.flats:
        optimizer.state[flat.shard] = {"averages": [flat.shard.detach() * 2, 3], "n": 4}
    state = flats.optimizer_state(optimizer)
    for name, values in state.items():
        (average, other), n = values.values()
        torch.testing.assert_close(whole(average), whole(flats.state_dict()[name]) * 2)
        assert (other, n) == (3, 4)
    fresh = torch.optim.SGD(flats.parameters)
    flats.load_optimizer_state(fresh, state)
    assert_same_bits(fresh.state_dict()["state"], optimizer.state_dict()["state"])
