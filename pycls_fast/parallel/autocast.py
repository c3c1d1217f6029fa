"""CPU autocast aligned with CUDA's: the operations that CUDA keeps in float32 are kept in float32."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

# Overloads of `precision.KEPT_IN_FLOAT32` that torch's CPU list leaves in the half format (torch 2.11 and 2.15).
_ADDED = (
    "layer_norm",
    "group_norm",
    "softmax.int",
    "log_softmax.int",
    "exp",
    "log",
    "pow.Tensor_Scalar",
    "pow.Tensor_Tensor",
    "pow.Scalar",
)


def keep_in_float32(device: torch.device) -> None:
    """Make the device's autocast compute the operations of `precision.KEPT_IN_FLOAT32` in float32.

    CUDA's does already. For the CPU, kernels are registered with torch's dispatcher, for the whole process; a mode or
    a cast in the model would not apply to a forward pass that is recomputed in the backward pass.
    """
    if device.type == "cpu":
        _register()


@cache
def _register() -> torch.library.Library:
    library = torch.library.Library("aten", "IMPL")
    for name in _ADDED:
        packet, _, overload = name.partition(".")
        operator = getattr(getattr(torch.ops.aten, packet), overload or "default")
        library.impl(name, _in_float32(operator), "AutocastCPU")
    # Kernels are unregistered when the library is freed; the cache keeps it alive.
    return library


def _in_float32(operator: Callable[..., Tensor]) -> Callable[..., Tensor]:
    autocast_keys = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)

    def kernel(*arguments: Any, **named: Any) -> Tensor:
        with torch._C._ExcludeDispatchKeyGuard(autocast_keys):
            return operator(*map(_wide, arguments), **named)

    return kernel


def _wide(value: Any) -> Any:
    is_half = isinstance(value, Tensor) and value.dtype in (torch.float16, torch.bfloat16)
    return value.float() if is_half else value
