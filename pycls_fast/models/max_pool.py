"""A max-pool that stays torch's own operator in compiled code.

Inductor generates its own code for it, whose backward pass takes 40 times as long as torch's on a CPU.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

_aten = torch.ops.aten


class MaxPool2d(nn.MaxPool2d):
    """torch's max-pool, to the bit; square windows, undilated."""

    def forward(self, maps_BCHW: Tensor) -> Tensor:
        # Only in torch.compile: exported programs keep torch's operator, which other tools can read.
        if torch.compiler.is_dynamo_compiling() and maps_BCHW.device.type == "cpu":
            return _pool(maps_BCHW, self.kernel_size, self.stride, self.padding)[0]
        return super().forward(maps_BCHW)


# The compiler passes tensors with the strides that the operators were traced with.
_TAGS = (torch.Tag.needs_exact_strides,)


@torch.library.custom_op("pycls_fast::max_pool2d", mutates_args=(), tags=_TAGS)
def _pool(maps_BCHW: Tensor, side: int, stride: int, padding: int) -> tuple[Tensor, Tensor]:
    """The maxima and where they are in each map, (B, C, h, w) each."""
    maxima_BChw, places_BChw = _aten.max_pool2d_with_indices(
        maps_BCHW, [side, side], [stride, stride], [padding, padding]
    )
    return maxima_BChw, places_BChw


@_pool.register_fake
def _(maps_BCHW: Tensor, side: int, stride: int, padding: int) -> tuple[Tensor, Tensor]:
    found: tuple[Tensor, Tensor] = _aten.max_pool2d_with_indices(
        maps_BCHW, [side, side], [stride, stride], [padding, padding]
    )
    return found


@torch.library.custom_op("pycls_fast::max_pool2d_backward", mutates_args=(), tags=_TAGS)
def _pool_backward(
    gradient_BChw: Tensor, maps_BCHW: Tensor, places_BChw: Tensor, side: int, stride: int, padding: int
) -> Tensor:
    """The gradient of the maps, (B, C, H, W)."""
    return _aten.max_pool2d_with_indices_backward(
        gradient_BChw, maps_BCHW, [side, side], [stride, stride], [padding, padding], [1, 1], False, places_BChw
    )


@_pool_backward.register_fake
def _(gradient_BChw: Tensor, maps_BCHW: Tensor, places_BChw: Tensor, side: int, stride: int, padding: int) -> Tensor:
    return torch.empty_like(maps_BCHW)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    maps_BCHW, *ctx.window = inputs
    ctx.save_for_backward(maps_BCHW, output[1])
    ctx.mark_non_differentiable(output[1])


def _backward(ctx: Any, gradient_BChw: Tensor, _: Any) -> tuple[Tensor, None, None, None]:
    return _pool_backward(gradient_BChw, *ctx.saved_tensors, *ctx.window), None, None, None


_pool.register_autograd(_backward, setup_context=_keep)
