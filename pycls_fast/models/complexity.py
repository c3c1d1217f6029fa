"""Parameters and operations of a model, counted without running it."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from pycls_fast.values import Size


@dataclass(frozen=True)
class Complexity:
    """The cost of a forward pass of one image."""

    parameters: int
    """Elements of the parameters."""
    forward_flops: int
    """Operations of convolutions and matrix products; a multiply-add counts 2, a bias nothing."""
    flops_of: Mapping[str, int] = field(default_factory=dict, compare=False)
    """Those of each module with everything inside it, by its name."""


def complexity(model: nn.Module, *, image_size: int | tuple[int, int]) -> Complexity:
    """Count on the meta device: nothing is computed, no memory is allocated, no random number is drawn.

    Args:
        model: a model before it is wrapped (sharded, compiled). It is not changed, whatever its device and mode;
            evaluation mode is counted.
    """
    meta_model = meta_copy(model)
    # Otherwise the counter would wait for the gradients of parameters that modules pass on as arguments.
    meta_model.eval().requires_grad_(False)
    dtype = next(meta_model.parameters()).dtype
    image_BCHW = torch.empty(1, 3, *Size.of(image_size), device="meta", dtype=dtype)
    flops = FlopCounterMode(display=False)
    # Fused attention hides its scores; its plain form shows the same two products as the written-out formula.
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), flops:
        meta_model(image_BCHW)
    return Complexity(
        parameters=sum(parameter.numel() for parameter in meta_model.parameters()),
        forward_flops=flops.get_total_flops(),
        # The counter's names begin with the network's class.
        flops_of={name.partition(".")[2]: sum(ops.values()) for name, ops in flops.get_flop_counts().items()},
    )


def meta_copy(model: nn.Module) -> nn.Module:
    """A copy of a module tree whose tensors are on the meta device; the originals are never copied."""
    memo: dict[int, Any] = {}
    for parameter in model.parameters():
        empty = torch.empty_like(parameter, device="meta")
        memo[id(parameter)] = nn.Parameter(empty, requires_grad=parameter.requires_grad)
    # Attributes as well as buffers: drop-path's rate is no part of the state.
    attributes = (value for module in model.modules() for value in vars(module).values())
    for tensor in (*model.buffers(), *(value for value in attributes if isinstance(value, Tensor))):
        memo[id(tensor)] = torch.empty_like(tensor, device="meta")
    return copy.deepcopy(model, memo)
