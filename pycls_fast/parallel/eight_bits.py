"""8-bit tensors with a scale per group, and ReLU's sign in 1 bit.

Gist (Jain et al. 2018, ISCA) keeps ReLU's output as one bit if only its backward pass reads it; ActNN (Chen et al.
2021, arXiv 2104.14129) keeps activations in few bits with a range per group. Rounding is to nearest and not
stochastic as in ActNN: at 8 bits the error is small, and no random number is drawn.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.overrides import TorchFunctionMode

GROUP = 256
"""Consecutive numbers that share a range, stored in 8 bytes per group: 1.03 bytes per number in all."""


class EightBits(NamedTuple):
    """A compressed flat tensor; element i of group g is about `low_G1[g] + codes_GE[g, i] * step_G1[g]`."""

    codes_GE: Tensor
    low_G1: Tensor
    step_G1: Tensor


def compress(flat: Tensor) -> EightBits:
    """Compress a one-dimensional floating-point tensor to 8 bits.

    Each number is restored with an error of at most half a step, where a step is 1/255 of its group's range:
    |error| <= (max - min) / 510, plus the rounding of its own format. A group of equal numbers is exact. A non-finite
    number makes its whole group NaN, so that a loss scaler sees it.
    """
    wide = flat if flat.dtype == torch.float64 else flat.float()
    missing = -flat.numel() % GROUP
    if missing:
        wide = torch.cat([wide, wide[-1:].expand(missing)])
    wide_GE = wide.view(-1, GROUP)
    low_G1, high_G1 = torch.aminmax(wide_GE, dim=1, keepdim=True)
    step_G1 = (high_G1 - low_G1) / 255
    divisor_G1 = torch.where(step_G1 == 0, torch.ones_like(step_G1), step_G1)
    codes_GE = ((wide_GE - low_G1) / divisor_G1).round_().clamp_(0, 255)
    # Casting NaN to an integer is undefined; the group's range, which is NaN, restores it.
    return EightBits(codes_GE.nan_to_num_(0.0).to(torch.uint8), low_G1, step_G1)


def decompress(packed: EightBits, count: int, dtype: torch.dtype) -> Tensor:
    """Restore the flat tensor of `count` numbers."""
    wide_GE = packed.codes_GE.to(packed.low_G1.dtype).mul_(packed.step_G1).add_(packed.low_G1)
    return wide_GE.view(-1)[:count].to(dtype)


def pack_bits(mask: Tensor) -> Tensor:
    """Pack a flat boolean tensor, eight elements per byte (uint8)."""
    padded_E8 = F.pad(mask.view(torch.uint8), (0, -mask.numel() % 8)).view(-1, 8)
    weights_8 = 2 ** torch.arange(8, dtype=torch.uint8, device=mask.device)
    return (padded_E8 * weights_8).sum(dim=1, dtype=torch.uint8)


def unpack_bits(packed: Tensor, count: int) -> Tensor:
    """Restore the flat boolean tensor of `count` elements."""
    weights_8 = 2 ** torch.arange(8, dtype=torch.uint8, device=packed.device)
    return (packed[:, None] & weights_8).ne(0).view(-1)[:count]


def is_dense(tensor: Tensor) -> bool:
    """Whether the elements fill a contiguous range of memory without gaps or overlap, in any order."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size == 1:
            continue
        if stride != expected:
            return False
        expected *= size
    return True


class BitReLU(torch.autograd.Function):
    """ReLU that saves one bit per element for its backward pass, not its output; the gradient is bit-identical."""

    @staticmethod
    def forward(ctx: Any, features: Tensor, inplace: bool) -> Tensor:
        """max(features, 0)."""
        if inplace:
            ctx.mark_dirty(features)
            out = features.relu_()
        else:
            out = features.relu()
        ctx.dense = is_dense(out)
        ordered = out.as_strided((out.numel(),), (1,)) if ctx.dense else out.reshape(-1)
        # Not `> 0`: like torch's, the gradient passes where the output is NaN.
        ctx.save_for_backward(pack_bits(~(ordered <= 0)))
        ctx.shape, ctx.strides = out.shape, out.stride()
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        """The gradient where the output was positive (or NaN), else 0."""
        (bits,) = ctx.saved_tensors
        mask = unpack_bits(bits, ctx.shape.numel())
        mask = mask.as_strided(ctx.shape, ctx.strides) if ctx.dense else mask.view(ctx.shape)
        return torch.where(mask, grad, torch.zeros((), dtype=grad.dtype, device=grad.device)), None


_RELUS = {
    F.relu: False, torch.relu: False, Tensor.relu: False,
    F.relu_: True, torch.relu_: True, Tensor.relu_: True,
}  # fmt: skip


class BitReLUs(TorchFunctionMode):
    """A context in which every ReLU is a `BitReLU`."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _RELUS and torch.is_grad_enabled():
            features, inplace = _relu_arguments(*args, **(kwargs or {}))
            if features.requires_grad:
                return BitReLU.apply(features, inplace or _RELUS[func])
        return func(*args, **(kwargs or {}))


def _relu_arguments(input: Tensor, inplace: bool = False) -> tuple[Tensor, bool]:  # noqa: A002  # torch's name
    return input, inplace
