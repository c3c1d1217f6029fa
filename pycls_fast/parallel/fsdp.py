"""Weights, gradients and optimizer state sharded over the ranks, unit by unit (torch's `fully_shard`).

ZeRO-3 and ZeRO-2 of Rajbhandari et al. (SC 2020); on a two-dimensional mesh each group of ranks holds a replica of the
same shards (hybrid sharding). Parameters keep their names and become DTensors sharded along their first axis.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from pycls_fast.network import Network
from pycls_fast.optim import BATCH_NORM, NORMS, cast_buffers
from pycls_fast.parallel.world import World
from pycls_fast.parallel.wrapped import StrategySettings, Wrapped


def shard(network: Network, world: World, settings: StrategySettings) -> Wrapped:
    """Shard the network in place; it may be on the meta device.

    Gradients are reduced in float32 after every microbatch, so that no rank holds whole gradients; replicas all-reduce
    theirs once per step.
    """
    assert world.mesh is not None
    units = [unit for _, unit in network.units()]
    offload: OffloadPolicy = OffloadPolicy()
    if settings.param_offload:
        offload = CPUOffloadPolicy(pin_memory=world.device.type == "cuda")
    reduced = torch.float32 if settings.compute is not None else None
    common: dict[str, Any] = {"mesh": world.mesh, "offload_policy": offload}
    policy = MixedPrecisionPolicy(param_dtype=settings.compute, reduce_dtype=reduced)
    if settings.compute is not None:
        cast_buffers(network, settings.compute)
    for unit in units:
        # The last unit and the modules around the units are needed again as soon as the backward pass begins.
        gathers_again = settings.reshard_after_forward and unit is not units[-1]
        _shard_norms([unit], settings, reshard_after_forward=gathers_again, **common)
        fully_shard(unit, mp_policy=policy, reshard_after_forward=gathers_again, **common)
    _shard_norms([network], settings, reshard_after_forward=False, **common)
    fully_shard(network, mp_policy=policy, reshard_after_forward=False, **common)
    _prefetch(network, units, settings.prefetch_units)
    root: Any = network

    def exchange(is_last: bool) -> AbstractContextManager[None]:
        root.set_is_last_backward(is_last)
        root.set_requires_all_reduce(is_last)
        if not settings.reshard_after_forward:
            root.set_reshard_after_backward(is_last)
        return nullcontext()

    def free_gathered() -> None:
        for module in network.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    return Wrapped(
        forward=network,
        evaluated=network,
        device=world.device,
        exchange=exchange,
        reduced_every_microbatch=world.mesh.ndim == 1,
        forward_is_collective=True,
        shard_group=world.mesh.get_group("shard"),
        free_gathered=free_gathered,
    )


def _shard_norms(inside: Sequence[nn.Module], settings: StrategySettings, **common: Any) -> None:
    """Shard norms that stay float32 under a half format as separate groups; the rest is gathered in that format."""
    if settings.compute is None:
        return
    found: list[nn.Module] = [module for module in _unsharded(inside) if isinstance(module, NORMS)]
    batch: list[nn.Module] = [module for module in found if isinstance(module, BATCH_NORM)]
    others = [module for module in found if not isinstance(module, BATCH_NORM)]
    if batch:
        # Batch norm takes half-precision maps as they are, with weights and statistics in float32.
        fully_shard(batch, mp_policy=MixedPrecisionPolicy(cast_forward_inputs=False), **common)
    if others and settings.wide_norms:
        wide = MixedPrecisionPolicy(param_dtype=torch.float32, output_dtype=settings.compute)
        fully_shard(others, mp_policy=wide, **common)


def _unsharded(roots: Sequence[nn.Module]) -> Iterator[nn.Module]:
    """These modules and their descendants that are not in a group yet."""
    for root in roots:
        if isinstance(root, FSDPModule):
            continue
        yield root
        yield from _unsharded(list(root.children()))


def _prefetch(network: nn.Module, units: Sequence[nn.Module], count: int) -> None:
    """Prefetch the next `count` units while one computes, in forward and in backward order.

    Norms in a sharding group of their own are prefetched with their unit: gathers run one after another, and a group
    gathered only when its norm runs would wait for the next unit's.
    """
    if count == 0:
        return
    for index, unit in enumerate(units):
        assert isinstance(unit, FSDPModule)
        unit.set_modules_to_forward_prefetch(_groups(units[index + 1 : index + 1 + count]))
        unit.set_modules_to_backward_prefetch(_groups(list(units[max(index - count, 0) : index])[::-1]))
    assert isinstance(network, FSDPModule)
    inside = set(_groups(units))
    around = [module for module in _groups([network]) if module is not network and module not in inside]
    network.set_modules_to_forward_prefetch([*around, *_groups(units[:count])])
    network.set_modules_to_backward_prefetch(_groups(list(units)[::-1][:count]))


def _groups(units: Sequence[nn.Module]) -> list[FSDPModule]:
    """The units and their norms that are in a group of their own; modules of one group are gathered together."""
    return [module for unit in units for module in unit.modules() if isinstance(module, FSDPModule)]
