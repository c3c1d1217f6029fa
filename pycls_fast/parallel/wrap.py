"""The one place where a model is moved, compiled, sharded or replicated, in the only order that works."""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch

from pycls_fast.network import Network
from pycls_fast.optim.weights import OwnedWeights
from pycls_fast.parallel import ddp, fairscale, fsdp
from pycls_fast.parallel.compile import compile_model
from pycls_fast.parallel.ddp import synchronise
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


IMPLEMENTATIONS: dict[str, Callable[[Network, World, StrategySettings], ParallelModel]] = {
    "single": lambda network, world, settings: ParallelModel(network, network, world.device),
    "ddp": ddp.replicate,
    "fsdp": fsdp.shard,
    "hsdp": fsdp.shard,
    "fairscale_fsdp": fairscale.shard_weights,
    "fairscale_sharded_ddp": fairscale.shard_state,
}


def wrap_model(
    model: Network,
    world: World,
    settings: StrategySettings,
    initialise: Callable[[OwnedWeights | None], None] | None = None,
) -> ParallelModel:
    """Compile a model, shard or replicate it, and initialise it if it was on the meta device; in place.

    Args:
        model: on the device, or on the meta device for strategies that shard; with its memory format and recomputation.
        initialise: for a model from the meta device: called after its initial values are set, to load others, with
            the flat shards that hold them, or None if the model itself does.
    """
    parallel, speed = settings.parallel, settings.speed
    plain = copy.deepcopy(model) if is_empty(model) else None
    if parallel.sync_batchnorm and world.size > 1:
        synchronise(model, world.device)
    if speed.compile != "off":
        budget = parallel.recompute_budget if speed.recompute == "budget" else 1.0
        compile_model(model, model.units(), what=speed.compile, mode=speed.compile_mode, budget=budget)
    wrapped = IMPLEMENTATIONS[parallel.strategy(world.size)](model, world, settings)
    if plain is not None:
        if is_empty(model):
            materialise(model, plain, world.device, param_offload=speed.param_offload == "cpu")
        if initialise is not None:
            initialise(wrapped.weights)
    return wrapped
