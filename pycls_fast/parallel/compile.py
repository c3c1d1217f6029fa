"""torch.compile of a model in place, and a context that bypasses it.

In place (`module.compile()`), names, types and parameters are unchanged; a wrapping `torch.compile(module)` would
rename every key of a checkpoint.
"""

from __future__ import annotations

import warnings
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn

from pycls_fast.network import Units


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
    how: dict[str, Any] = {"options": options} if budget == 1.0 else {"backend": partial(_within, options, budget)}
    for module in modules:
        module.compile(dynamic=None if alike else False, **how)


def _within(options: dict[str, Any], budget: float, graph: torch.fx.GraphModule, inputs: Any) -> Any:
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
