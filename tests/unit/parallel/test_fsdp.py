"""Values of sharded models, and where and when their weights are, with one rank in this process."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from pycls_fast import build
from pycls_fast.errors import UserError
from pycls_fast.models.external import TimmNetwork
from pycls_fast.models.moe import ExpertLinear
from pycls_fast.models.resnet import ResNet
from pycls_fast.network import Network
from pycls_fast.optim.groups import BATCH_NORM, NORMS
from pycls_fast.optim.owned_weights import LocalShards, local
from pycls_fast.parallel.fsdp import materialise
from pycls_fast.parallel.launch import make_mesh
from pycls_fast.parallel.parallel_model import ParallelModel, StrategySettings
from pycls_fast.parallel.tensor import is_divided
from pycls_fast.parallel.world import World
from pycls_fast.parallel.wrap import wrap_model
from pycls_fast.plan.operators import LiveMemory
from pycls_fast.precision import LEVELS
from pycls_fast.speed import Speed
from pycls_fast.strategies import Parallel
from tests.factories import assert_same_bits, config_of, imagined, small_vit, step_of

CPU = torch.device("cpu")
TINY = ["model.width=32", "model.depth=2", "model.mlp_width=36", "parallel=fsdp"]


def test_filling_needs_one_module_at_a_time() -> None:
    with torch.device("meta"):
        network = small_vit(width=64, depth=6, heads=2, mlp_width=256)
    whole = sum(p.numel() for p in network.parameters()) * 4
    block = sum(p.numel() for p in network.blocks[0].parameters()) * 4
    with LiveMemory() as memory:
        materialise(network, copy.deepcopy(network), CPU)
    # The process has one rank, whose share is the model.
    assert whole + block <= memory.peak < whole + 1.5 * block


def test_filling_a_timm_model_needs_one_drawn_copy() -> None:
    torch.manual_seed(3)
    direct = make_timm()
    with torch.device("meta"):
        network = make_timm()
    whole = sum(p.numel() for p in network.parameters()) * 4
    torch.manual_seed(3)
    with LiveMemory() as memory:
        materialise(network, copy.deepcopy(network), CPU)
    assert memory.peak < 2.2 * whole
    assert_same_bits(network.state_dict(), direct.state_dict())


def mesh_of(*grid: Any, **degrees: int) -> DeviceMesh:
    return make_mesh("cpu", *grid, timedelta(seconds=60), **degrees)


def test_ranks_that_cannot_share_experts() -> None:
    network = build.model(config_of(*TINY, name="vit_moe_digits"), 10, Speed(), empty=True)
    with imagined(10):
        mesh, experts = (mesh_of(None, 10, expert=degree) for degree in (1, 2))
        with pytest.raises(UserError, match="shared by the 5 ranks"):
            wrap_model(network, World(0, 10, CPU, mesh=mesh, experts=experts), StrategySettings(Parallel(name="fsdp")))


def test_ranks_have_equal_parts_of_few_experts() -> None:
    """Not one expert, where others have none."""
    network = build.model(config_of(*TINY, "model.mlp_width=48", name="vit_moe_digits"), 10, Speed(), empty=True)
    layers = [layer for _, *both in network.experts() for layer in both]
    whole = [p.numel() for layer in layers for p in layer.parameters()]
    with imagined(8):
        wrap_model(network, World(0, 8, CPU, mesh=mesh_of(None, 8)), StrategySettings(Parallel(name="fsdp")))
        parts = [local(p).numel() for layer in layers for p in layer.parameters()]
    assert [8 * part for part in parts] == whole


def test_a_norm_over_shards_and_parts_counts_each_number_once() -> None:
    config = config_of(*TINY, "data.image_size=8", "parallel.tensor_degree=2")
    switches, counted = build.switches(config, CPU), []
    with imagined(4):
        mesh = mesh_of(None, 2, tensor=2)
        for rank in (0, 1):
            network = build.model(config, 10, switches, empty=True)
            wrapped = build.wrap(config, network, World(rank, 4, CPU, mesh=mesh, tensor=2), switches)
            counted.append(wrapped.counted)
            assert [dist.get_process_group_ranks(group) for group in wrapped.shard_groups] == [[0, 2], [0, 1]]
        times = [sum(each) for each in zip(*counted, strict=True)]
        assert times == [1 + is_divided(parameter) for parameter in network.parameters()]
        assert {1, 2} == set(times)


def test_replicas_reduce_once_a_step_and_shards_after_every_microbatch(monkeypatch: pytest.MonkeyPatch) -> None:
    """The links between nodes are slow, and no rank holds whole gradients."""
    config = config_of(*TINY, "data.image_size=8")
    network = build.model(config, 10, build.switches(config, CPU), empty=True)
    with imagined(4):
        world = World(0, 4, CPU, mesh=mesh_of(2, 2))
        wrapped = wrap_model(network, world, StrategySettings(Parallel(name="hsdp")))
        units, asked = len(network.units()) + 1, Counter[str]()
        for name in ("all_reduce", "reduce_scatter_single"):
            monkeypatch.setattr(dist, name, lambda *_, name=name, **__: asked.update([name]))
        for microbatch in (1, 2):
            with wrapped.exchange(microbatch == 2):
                wrapped.forward(torch.randn(2, 3, 8, 8)).sum().backward()
            found = asked["reduce_scatter_single"], asked["all_reduce"]
            assert found == (units * microbatch, units * (microbatch == 2))


def test_lists_in_an_optimizers_state_are_sharded_as_their_parameter() -> None:
    """Each rank's own part would be saved as all ranks' value."""
    with imagined(2):
        network = nn.Linear(3, 4)
        whole: Any = network.weight
        fully_shard(network, mesh=mesh_of(None, 2))
        weights = LocalShards(network)
        optimizer = torch.optim.SGD(weights.parameters)
        for parameter in weights.parameters:
            optimizer.state[parameter] = {"averages": [parameter.detach() * 2, 3]}
        state = weights.optimizer_state(optimizer)
        average, other = state["weight"]["averages"]
        assert isinstance(average, DTensor)
        assert (average.shape, average.placements, other) == (whole.shape, network.weight.placements, 3)
        fresh = torch.optim.SGD(weights.parameters)
        weights.load_optimizer_state(fresh, state)
        assert_same_bits(fresh.state_dict()["state"], optimizer.state_dict()["state"])


def make_timm() -> TimmNetwork:
    options = {"depth": 4, "embed_dim": 64, "num_heads": 2}
    return TimmNetwork(name="vit_tiny_patch16_224", num_classes=3, image_size=32, options=options)


def test_every_initialiser_is_of_one_module_and_all_values_have_one() -> None:
    for model in (small_vit(), ResNet(depth=18, num_classes=3), make_timm()):
        covered = [id(t) for module, _ in model.initialisers() for t in (*module.parameters(), *module.buffers())]
        assert sorted(covered) == sorted(id(t) for t in (*model.parameters(), *model.buffers()))


def test_shards_on_the_host_train_the_same(world: World) -> None:
    """On a CPU the way to the device is no way; what is checked is that each part is found where it lies."""
    images, ends = torch.randn(4, 3, 8, 8), []
    # A head of zeros would make all gradients zero.
    own = ["data.image_size=8", "model.classifier=pooled", "model.init=trunc_normal"]
    config = config_of(*TINY, *own)
    for speed in (Speed(), Speed(param_offload="cpu")):
        network = build.model(config, 10, build.switches(config, CPU), empty=True)
        torch.manual_seed(1)
        wrapped = wrap_model(network, world, StrategySettings(config.parallel, speed))
        optimizer = torch.optim.AdamW(network.parameters(), lr=0.01, eps=0.01)
        for _ in range(3):
            with wrapped.exchange(True):
                wrapped.forward(images).square().sum().backward()
            assert wrapped.clip(list(network.parameters()), 0.01, foreach=True) > 0.01
            optimizer.step()
            optimizer.zero_grad()
        ends.append({name: local(value).clone() for name, value in network.state_dict().items()})
    assert_same_bits(*ends)


def test_a_parameter_without_dimensions_cannot_be_shared(world: World) -> None:
    network = build.model(config_of(*TINY, "data.image_size=8"), 10, Speed(), empty=True)
    network.gain = nn.Parameter(torch.empty((), device="meta"))
    with pytest.raises(UserError, match=r"^parallel.name: fsdp cannot shard .* gain .*; use parallel=ddp$"):
        wrap_model(network, world, StrategySettings(Parallel(name="fsdp")))


def sharded(world: World, *overrides: str) -> tuple[Network, ParallelModel]:
    """The network, and how it is called."""
    config = config_of(*TINY, *overrides)
    switches = build.switches(config, CPU)
    network = build.model(config, 10, switches, empty=True)
    return network, build.wrap(config, network, world, switches)


@pytest.mark.parametrize("gathers_again", [True, False])
def test_gathered_weights_stay_until_the_backward_pass_or_not(world: World, gathers_again: bool) -> None:
    """ZeRO-3 and ZeRO-2 compute the same: only where the weights are tells them apart.

    The last block's are needed again at once.
    """
    own = f"parallel.reshard_after_forward={str(gathers_again).lower()}"
    network, wrapped = sharded(world, "data.image_size=8", own)
    blocks = [unit for _, unit in network.units()]

    def cut(blocks: Sequence[nn.Module] = blocks) -> set[bool]:
        return {isinstance(value, DTensor) for block in blocks for value in block.parameters()}

    assert cut() == {True}
    with wrapped.exchange(True):
        loss = wrapped.forward(torch.randn(2, 3, 8, 8)).sum()
        assert cut(blocks[:-1]) == {gathers_again}
        assert cut(blocks[-1:]) == {False}
        loss.backward()
    assert cut() == {True}


def test_units_are_gathered_whole_and_in_order(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Norms that stay float32 among 16-bit weights included: one gather for a unit."""
    from torch.distributed.fsdp._fully_shard import _fsdp_param_group as torchs

    network, wrapped = sharded(world, "model.depth=4", "precision=fp16_master", "data.image_size=8")
    names = [name for name, _ in network.units()]
    gathered: list[int] = []
    unshard = torchs.FSDPParamGroup.unshard

    def note(group: Any, async_op: bool = False) -> None:
        waits = group._all_gather_result is not None
        unshard(group, async_op)
        if not waits and group._all_gather_result is not None:
            gathered.append(names.index(group._module_fqn) if group._module_fqn else -1)

    monkeypatch.setattr(torchs.FSDPParamGroup, "unshard", note)
    ready: list[int] = []
    for _, unit in network.units():
        unit.get_submodule("norm1").register_forward_pre_hook(lambda *_: ready.append(len(gathered)))
    with wrapped.exchange(True):
        loss = wrapped.forward(torch.randn(2, 3, 8, 8)).sum()
        forward, gathered[:] = gathered[:], []
        loss.backward()
    # What is around the units is gathered first, and stays; so does the last unit.
    assert forward == [-1, *range(len(names))]
    # While a unit computes, the next one is on its way.
    assert ready == [3, 4, 5, 5]
    assert gathered == [*range(len(names) - 1)][::-1]


@pytest.mark.parametrize(
    ("experiment", "precision"),
    [
        ("vit_digits", "amp_bf16"),
        ("vit_digits", "fp16_master"),
        ("vit_moe_digits", "amp_bf16"),
        ("resnet_digits", "fp32"),
        ("resnet_digits", "fp16_master"),
    ],
)
def test_weights_travel_in_the_format_of_their_products(
    world: World, monkeypatch: pytest.MonkeyPatch, experiment: str, precision: str
) -> None:
    """And what one process keeps in float32 does so when it is gathered: norms and tokens, under autocast."""
    small = ["model.depth=18", "parallel=fsdp"] if experiment == "resnet_digits" else TINY
    own = ["data.image_size=8", f"precision={precision}", "model.drop_path=0.1", "speed=reference"]
    config = config_of(*small, *own, name=experiment)
    step = step_of(config, world)
    network = step.network
    level = LEVELS[config.precision.name]
    found, entered = {}, {}

    def look(module: nn.Module, inputs: Any) -> None:
        found[id(module)] = {p.dtype for p in module.parameters(recurse=False)}
        entered[id(module)] = inputs[0].dtype

    for module in network.modules():
        module.register_forward_pre_hook(look)
    with step.autocast():
        step.wrapped.forward(torch.randn(2, 3, 8, 8)).sum().backward()
    narrow = build.compute_dtype(config)
    products = [module for module in network.modules() if isinstance(module, (nn.Linear, nn.Conv2d, ExpertLinear))]
    assert len(products) > 10
    for name, module in network.named_modules():
        stays = isinstance(module, BATCH_NORM) or (level.wide_norms and isinstance(module, NORMS))
        if level.autocast is not None:
            stays = module not in products
        if found.get(id(module)):
            assert found[id(module)] == {torch.float32 if stays else narrow}, name
    residual = torch.float32 if level.autocast is not None else narrow
    assert {entered[id(unit)] for _, unit in network.units()} == {residual}
    # Among many ranks sums in 16 bits would lose most of a gradient.
    policies = {m._get_fsdp_state()._mp_policy for m in network.modules() if isinstance(m, FSDPModule)}
    assert {policy.reduce_dtype for policy in policies} == {None if narrow == torch.float32 else torch.float32}
    assert {local(p).dtype for p in network.parameters()} == {torch.float32}
    assert {local(p.grad).dtype for p in network.parameters() if p.grad is not None} == {torch.float32}
