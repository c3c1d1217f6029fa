"""The one place where a model is moved, compiled, sharded or replicated, in the only order that works."""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch

from pycls_fast.network import Network
from pycls_fast.parallel import ddp, fairscale, fsdp
from pycls_fast.parallel.batch_norm import synchronise
from pycls_fast.parallel.compile import CompileMode, CompileName, compile_model
from pycls_fast.parallel.flat import FlatShards
from pycls_fast.parallel.fsdp import is_empty, materialise
from pycls_fast.parallel.parallel_model import ParallelModel, StrategySettings
from pycls_fast.parallel.world import World


def place_model(model: Network, world: World, *, memory_format: str) -> Network:
    """Move the model to the device and memory format, in place, before the optimizer and the average are created.

    A model on the meta device stays there until it has been sharded (`wrap_model`). Its shards are contiguous, and
    convolutions follow the format of the images.
    """
    if is_empty(model):
        return model
    formats = {"contiguous": torch.contiguous_format, "channels_last": torch.channels_last}
    model.to(world.device)
    return model.to(memory_format=formats[memory_format])


def _alone(network: Network, world: World, settings: StrategySettings) -> ParallelModel:
    return ParallelModel(forward=network, evaluated=network, device=world.device)


IMPLEMENTATIONS: dict[str, Callable[[Network, World, StrategySettings], ParallelModel]] = {
    "single": _alone,
    "ddp": ddp.replicate,
    "fsdp": fsdp.shard,
    "hsdp": fsdp.shard,
    "fairscale_fsdp": fairscale.shard_weights,
    "fairscale_sharded_ddp": fairscale.shard_state,
}


def wrap_model(
    model: Network,
    world: World,
    *,
    strategy: str | None = None,
    settings: StrategySettings | None = None,
    compiled: CompileName = "off",
    compile_mode: CompileMode = "default",
    compile_budget: float = 1.0,
    initialise: Callable[[FlatShards | None], None] | None = None,
) -> ParallelModel:
    """Compile a model, shard or replicate it, and initialise it if it was on the meta device; in place.

    Args:
        model: on the device, or on the meta device for strategies that shard; with its memory format and recomputation.
        world: the ranks.
        strategy: a name of `IMPLEMENTATIONS`; None: "ddp" with several ranks, else "single".
        settings: the strategy's settings.
        compiled, compile_mode, compile_budget: see `compile_model`.
        initialise: for a model from the meta device: called after its initial values are set, to load others, with
            the flat shards that hold them, or None if the model itself does.
    """
    settings = settings or StrategySettings()
    name = strategy or ("ddp" if world.size > 1 else "single")
    plain = copy.deepcopy(model) if is_empty(model) else None
    if settings.sync_batchnorm and world.size > 1:
        synchronise(model, world.device)
    if compiled != "off":
        compile_model(model, model.units(), what=compiled, mode=compile_mode, budget=compile_budget)
    wrapped = IMPLEMENTATIONS[name](model, world, settings)
    if plain is not None:
        if is_empty(model):
            materialise(model, plain, world.device, param_offload=settings.param_offload)
        if initialise is not None:
            initialise(wrapped.weights)
    return wrapped
