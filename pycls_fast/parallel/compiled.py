"""torch.compile of a model in place, and the way around it.

In place (`module.compile()`) names, types and parameters stay what they are; a wrapping `torch.compile(module)` renames
every key of a checkpoint.
"""

from __future__ import annotations

import warnings
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal

import torch
from torch import nn

from pycls_fast.network import Units

CompileName = Literal["off", "blocks", "model"]
CompileMode = Literal["default", "reduce-overhead", "max-autotune-no-cudagraphs", "max-autotune"]


def compile_model(model: nn.Module, units: Units, *, what: CompileName, mode: CompileMode = "default") -> None:
    """Compile each of the repeated units, or the whole model; nothing is compiled before the first forward pass.

    Blocks that are alike share what was compiled for the first of them, so that the time does not grow with depth;
    where they differ in shapes, as in a ResNet, each has its own. Shapes are constants: the training batch has one
    size, and evaluation runs `uncompiled`.

    Args:
        model: on its device, with its recomputation, before it is sharded or replicated.
        units: its repeated blocks.
        what: "off", "blocks" or "model".
        mode: torch.compile's.
    """
    if what == "off":
        return
    import torch._dynamo
    import torch._inductor

    options: dict[str, Any] = {
        **torch._inductor.list_mode_options(mode),
        # Inductor's own random numbers are not eager's: drop-path would drop other samples.
        "fallback_random": True,
        # Products and sums as one instruction on a CPU, rounded once; nvcc does it by itself.
        "cpp.enable_floating_point_contract_flag": "fast",
    }
    if options.get("triton.cudagraphs"):
        # Blocks that are alike share one graph, so in the first steps torch meets it again before its backward pass. It
        # finds its way by itself; what it would have the user do is for calls that are not parts of one step.
        warnings.filterwarnings("ignore", message="Unable to hit fast path of CUDAGraphs")
    # Every kind of block is one more variant of the same code, and another one in evaluation mode, in which the ledger
    # measures rounding; above the limit torch goes back to eager, in silence. All networks of the process count
    # together, for what is compiled is one function, torch's `Module._call_impl`.
    variants = 2 * len(units) + 8
    torch._dynamo.config.recompile_limit += variants
    torch._dynamo.config.accumulated_recompile_limit += variants
    modules = [model] if what == "model" else [unit for _, unit in units]
    # Where nothing but numbers such as drop-path's rate can differ they may become variables; with shapes that differ,
    # torch would make variables of these too, and slower kernels.
    alike = len({tuple(p.shape for p in module.parameters()) for module in modules}) == 1 < len(modules)
    for module in modules:
        module.compile(dynamic=None if alike else False, options=options)


def uncompiled(model: nn.Module) -> AbstractContextManager[Any]:
    """Forward passes in this context run as if nothing had been compiled.

    For evaluation: it would have to be compiled once more without gradients, and again for its smaller last batch, for
    a gain on a small part of the work.
    """
    if all(module._compiled_call_impl is None for module in model.modules()):
        return nullcontext()
    return torch.compiler.set_stance("force_eager")
