"""The one place where a model is moved, compiled, sharded or replicated, in the only order that works; what comes
before and after is in `make_step` of `train/assemble.py`.

It is compiled in place (`module.compile()`), so that names, types and parameters are unchanged; a wrapping
`torch.compile(module)` would rename every key of a checkpoint.
"""

from __future__ import annotations

import copy
import os
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn

from pycls_fast.data.prepare import MEMORY_FORMATS
from pycls_fast.network import Network, Units
from pycls_fast.optim.owned_weights import OwnedWeights
from pycls_fast.parallel import ddp, fairscale, fsdp
from pycls_fast.parallel.ddp import synchronise
from pycls_fast.parallel.fsdp import is_empty, materialise
from pycls_fast.parallel.parallel_model import ParallelModel, StrategySettings
from pycls_fast.parallel.world import World

# Multiply-adds in Triton's kernels are rounded once, as in nvcc's. Triton 3.9 warns in each compilation if that is not
# said, since 3.10 will round twice by default.
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")


def place_model(model: Network, world: World, *, memory_format: str) -> Network:
    """Move the model to the device and memory format, in place, before the optimizer and the average are created.

    A model on the meta device stays there until it has been sharded (`wrap_model`). Its shards are contiguous, and
    convolutions follow the format of the images.
    """
    if is_empty(model):
        return model
    return model.to(world.device).to(memory_format=MEMORY_FORMATS[memory_format])


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
        if world.device.type == "cpu":
            keep_max_pool()
        budget = parallel.recompute_budget if speed.recompute == "budget" else 1.0
        compile_model(model, model.units(), what=speed.compile, mode=speed.compile_mode, budget=budget)
    wrapped = IMPLEMENTATIONS[parallel.strategy(world.size)](model, world, settings)
    if plain is not None:
        if is_empty(model):
            materialise(model, plain, world.device, param_offload=speed.param_offload == "cpu")
        if initialise is not None:
            initialise(wrapped.weights)
    return wrapped


def compile_model(model: nn.Module, units: Units, *, what: str, mode: str = "default", budget: float = 1.0) -> None:
    """Compile each of the repeated units, or the whole model; compilation happens in the first forward pass.

    Identical blocks share the code compiled for the first of them, so that compile time does not grow with depth;
    blocks of different shapes, as in a ResNet, each get their own. Shapes are constants: the training batch has one
    size, and evaluation runs `uncompiled`.

    Args:
        model: on its device, with recomputation applied, before it is sharded or replicated.
        units: its repeated blocks.
        what: "blocks" or "model".
        mode: torch.compile's.
        budget: share of the activations that compiled code may keep for the backward pass; it recomputes the others,
            those first that cost the fewest operations a byte (`torch._functorch.config.activation_memory_budget`).
    """
    import torch._dynamo
    import torch._inductor

    options: dict[str, Any] = {
        **torch._inductor.list_mode_options(mode),
        # Inductor's own random numbers differ from eager's: drop-path would drop different samples.
        "fallback_random": True,
        # Fused multiply-add on a CPU, rounded once; nvcc does it by default.
        "cpp.enable_floating_point_contract_flag": "fast",
    }
    if options.get("triton.cudagraphs"):
        # Identical blocks share one graph, so in the first steps torch runs it again before its backward pass. It
        # handles that itself; the warning's advice is for calls that are not parts of one step.
        warnings.filterwarnings("ignore", message="Unable to hit fast path of CUDAGraphs")
    # Every kind of block is one more variant of the same code, and one more in evaluation mode, in which the ledger
    # measures rounding; above the limit torch silently falls back to eager. All networks of the process share the
    # limit, because what is compiled is one function, torch's `Module._call_impl`.
    variants = 2 * len(units) + 8
    torch._dynamo.config.recompile_limit += variants
    torch._dynamo.config.accumulated_recompile_limit += variants
    cuts_at_buckets = what == "model" and not options.get("triton.cudagraphs")
    if not cuts_at_buckets:
        # torch would cut each block where DDP fills a bucket, and a model into as many CUDA graphs. Between blocks DDP
        # exchanges beside the computation without it. For the whole process: a block is compiled in its first forward
        # pass, when another network may have been built.
        torch._dynamo.config.optimize_ddp = False
    modules = [model] if what == "model" else [unit for _, unit in units]
    # If only numbers such as the drop-path rates of timm's blocks can differ, they may become dynamic; if shapes
    # differ, torch would make these dynamic too, with slower kernels.
    alike = len({tuple(p.shape for p in module.parameters()) for module in modules}) == 1 < len(modules)
    # One object for all blocks, so that they share their code.
    how: dict[str, Any] = {"options": options}
    if budget < 1.0:
        how = {"backend": partial(_compile_within_budget, options, budget)}
    for module in modules:
        module.compile(dynamic=None if alike else False, **how)


def keep_max_pool() -> None:
    """Have compiled code call torch's max-pool, in the whole process: on a CPU the backward pass that the compiler
    makes of it takes 40 times as long."""
    from torch._inductor import decomposition, lowering

    aten: Any = torch.ops.aten
    for operator in (aten.max_pool2d_with_indices.default, aten.max_pool2d_with_indices_backward.default):
        decomposition.decompositions.pop(operator, None)
        lowering.make_fallback(operator, lowering.constrain_to_fx_strides, warn=False)


def _compile_within_budget(options: dict[str, Any], budget: float, graph: torch.fx.GraphModule, inputs: Any) -> Any:
    """torch's default backend with an activation budget."""
    import torch._functorch.config
    from torch._inductor.compile_fx import compile_fx

    # What is kept is decided here, for both passes.
    with torch._functorch.config.patch(activation_memory_budget=budget):
        return compile_fx(graph, inputs, config_patches=options)


def uncompiled(model: nn.Module) -> AbstractContextManager[Any]:
    """A context in which forward passes run eagerly.

    Meant for evaluation, which would need one more compilation without gradients and one for its smaller last batch,
    for a gain on a small part of the work.
    """
    if all(module._compiled_call_impl is None for module in model.modules()):
        return nullcontext()
    return torch.compiler.set_stance("force_eager")
