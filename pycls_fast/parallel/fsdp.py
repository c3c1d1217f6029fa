"""Weights, gradients and optimizer state sharded over the ranks, unit by unit (torch's `fully_shard`).

ZeRO-3 and ZeRO-2 of Rajbhandari et al. (SC 2020); on a two-dimensional mesh each group of ranks holds a replica of the
same shards (hybrid sharding). Parameters keep their names and become DTensors sharded along their first axis.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import chain, pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import Shard

from pycls_fast.errors import refusing
from pycls_fast.network import Network
from pycls_fast.optim.groups import BATCH_NORM, NORMS
from pycls_fast.optim.masters import cast_around, cast_buffers
from pycls_fast.optim.owned_weights import assign
from pycls_fast.parallel.parallel_model import ParallelModel, StrategySettings
from pycls_fast.parallel.tensor import divide, divide_experts, is_divided
from pycls_fast.parallel.world import World

# Layers with these `forward` only use their weights in products, which autocast computes in 16 bits; a
# weight-standardised convolution, for example, first computes with them in float32.
_CAST_BY_AUTOCAST = (nn.Linear.forward, nn.Conv2d.forward)


def shard(network: Network, world: World, settings: StrategySettings) -> ParallelModel:
    """Shard the network in place; it may be on the meta device.

    Gradients are reduced in float32 after every microbatch, so that no rank holds whole gradients; replicas all-reduce
    theirs once per step. Stages of a pipeline reduce theirs after the last microbatch, and hold whole ones until then.
    """
    assert world.mesh is not None
    shared, pipeline = world.tensor > 1, settings.pipeline
    # The dimensions over which weights are sharded and replicated.
    names = tuple(name for name in world.mesh.mesh_dim_names or () if name not in ("tensor", "pipeline"))
    parts: list[tuple[nn.Module, list[nn.Module]]] = [(network, [unit for _, unit in network.units()])]
    if pipeline is not None:
        parts = [(stage, list(stage.units)) for stage in pipeline.stages]
    if shared:
        for _, units in parts:
            divide(network, units, world.mesh["tensor"])
    on_host = settings.speed.param_offload == "cpu"
    common: dict[str, Any] = {
        "mesh": world.mesh[names],
        "offload_policy": CPUOffloadPolicy(pin_memory=world.device.type == "cuda") if on_host else OffloadPolicy(),
        "mp_policy": _formats(network, settings),
    }
    _shard_experts(network, world, settings, names, common)
    common["shard_placement_fn"] = _placement(network, world)
    for whole, units in parts:
        # A parameter without dimensions, for example.
        with refusing("parallel.name: fsdp cannot shard this network", ValueError, use="use parallel=ddp"):
            for unit in units:
                # The last unit and the modules around the units are needed again as soon as the backward pass begins.
                gathers_again = settings.parallel.reshard_after_forward and unit is not units[-1]
                fully_shard(unit, reshard_after_forward=gathers_again, **common)
            fully_shard(whole, reshard_after_forward=False, **common)
        _prefetch(whole, units)
    root: Any = network

    def exchange(is_last: bool) -> AbstractContextManager[None]:
        root.set_is_last_backward(is_last)
        root.set_requires_all_reduce(is_last)
        if not settings.parallel.reshard_after_forward:
            root.set_reshard_after_backward(is_last)
        return nullcontext()

    def free_gathered() -> None:
        for module in chain.from_iterable(whole.modules() for whole, _ in parts):
            if isinstance(module, FSDPModule):
                module.reshard()

    return ParallelModel(
        forward=network,
        evaluated=pipeline or network,
        device=world.device,
        exchange=exchange,
        taken_every_microbatch=False,
        shard_groups=[world.mesh.get_group(name) for name in world.mesh.mesh_dim_names or () if name != "replicate"],
        counted=[world.rank % world.tensor == 0 or is_divided(p) for p in network.parameters() if p.requires_grad]
        if shared
        else None,
        free_gathered=free_gathered,
        pipeline=pipeline,
    )


def _shard_experts(
    network: Network, world: World, settings: StrategySettings, names: Sequence[str], common: dict[str, Any]
) -> None:
    """Divide the experts, and shard each over the ranks that have it: over the mesh's dimensions `names`."""
    apart = world.mesh if world.experts is None else world.experts
    assert apart is not None
    if dividing := tuple(name for name in apart.mesh_dim_names or () if name in ("expert", "tensor")):
        divide_experts(network, apart[dividing], settings.compute)
    if world.experts is None:
        return
    alike = apart[tuple(name for name in apart.mesh_dim_names or () if name in names)]
    wrong = f"parallel.expert_degree: experts cannot be shared by the {alike['shard'].size()} ranks that have the same"
    for _, first, last in network.experts():
        with refusing(wrong, NotImplementedError, use="use ranks that divide model.width and model.mlp_width"):
            # Sharded by outputs: there may be fewer experts here than ranks that have them.
            fully_shard(
                [first, last],
                **{**common, "mesh": alike},
                shard_placement_fn=lambda _: Shard(1),
                reshard_after_forward=settings.parallel.reshard_after_forward,
            )


def _placement(network: Network, world: World) -> Callable[[nn.Parameter], Shard | None]:
    """The axis along which a parameter is sharded, if not the first: experts that ranks cannot share evenly are sharded
    by their outputs. Else some ranks would have more of them, and their padding would be gathered."""
    assert world.mesh is not None
    ranks, tensor = world.mesh["shard"].size(), world.tensor
    experts = {parameter for _, *layers in network.experts() for layer in layers for parameter in layer.parameters()}

    def place(parameter: nn.Parameter) -> Shard | None:
        uneven = parameter in experts and len(parameter) % ranks > 0
        return Shard(1) if uneven and parameter.shape[1] % (ranks * tensor) == 0 else None

    return place


def _formats(network: Network, settings: StrategySettings) -> MixedPrecisionPolicy:
    """The format in which each weight is gathered: under autocast, the one in which autocast would compute with it.

    A weight is cast once, before it is sent; residual sums and norms stay float32 as in one process.
    """
    narrow = settings.compute or settings.autocast
    if narrow is None:
        return MixedPrecisionPolicy()
    if settings.compute is None:
        products = {layer for _, *layers in network.experts() for layer in layers}
        products |= {module for module in network.modules() if type(module).forward in _CAST_BY_AUTOCAST}
        wide = [module for module in network.modules() if module not in products]
    else:
        wide = [m for m in network.modules() if isinstance(m, NORMS if settings.wide_norms else BATCH_NORM)]
        cast_buffers(network, settings.compute)
        for module in wide:
            cast_around(module, settings.compute)
    kept = {parameter for module in wide for parameter in module.parameters(recurse=False)}
    return MixedPrecisionPolicy(
        param_dtype=narrow,
        reduce_dtype=torch.float32,
        cast_forward_inputs=settings.compute is not None,
        param_dtype_override_fn=lambda parameter: parameter.dtype if parameter in kept else None,
    )


def _prefetch(network: Any, units: Sequence[Any]) -> None:
    """Gather the next unit while one computes, in forward and in backward order."""
    for before, unit in pairwise((network, *units)):
        before.set_modules_to_forward_prefetch([unit])
    for before, unit in pairwise((network, *reversed(units))):
        before.set_modules_to_backward_prefetch([unit])


def is_empty(module: nn.Module) -> bool:
    """Whether any of its tensors is on the meta device."""
    return any(tensor.is_meta for tensor in _tensors(module))


@torch.no_grad()
def materialise(network: Network, plain: Network, device: torch.device, *, param_offload: bool = False) -> None:
    """Allocate each rank's shards, with the values of a direct build on the CPU under torch's current seed.

    Every rank draws the whole model's values, one module at a time, and keeps only its own part: the same values on any
    number of ranks, and never more than one whole module in memory.

    Args:
        network: sharded, on the meta device.
        plain: a copy of it from before, on the meta device.
        param_offload: the shards are on the host, and the buffers on the device.
    """
    network.to_empty(device=torch.device("cpu") if param_offload else device)
    if param_offload:
        for module in network.modules():
            for name, buffer in module.named_buffers(recurse=False):
                setattr(module, name, buffer.to(device))
    target_of = dict(zip(_tensors(plain), _tensors(network), strict=True))
    for module, fill in plain.initialisers():
        targets = [target_of[tensor] for tensor in _tensors(module)]
        module.to_empty(device="cpu")
        fill(module)
        for target, value in zip(targets, _tensors(module), strict=True):
            assign(target, value)
        module.to("meta")


def _tensors(module: nn.Module) -> list[Tensor]:
    return [*module.parameters(), *module.buffers()]
