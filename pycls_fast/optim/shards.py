"""Sharded tensors (torch's DTensor), and the part that this rank holds."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor, sharing its memory: the tensor itself if it is not sharded.

    Element-wise arithmetic gives the same result on the parts and is cheaper: a DTensor determines the layout of the
    result again for every operation.
    """
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


@torch.no_grad()
def assign(target: Tensor, whole: Tensor) -> None:
    """Copy a whole tensor of the logical shape into a tensor that may be sharded; only the rank's part is read.

    Args:
        target: a plain tensor or a DTensor, changed in place.
        whole: the same values on every rank, in any format and on any device; it may be mapped from a file.
    """
    local(target).copy_(whole[local_slices(target)])


def local_slices(tensor: Tensor) -> tuple[slice, ...]:
    """The slices of the logical shape that this rank holds."""
    if not isinstance(tensor, DTensor):
        return (slice(None),) * tensor.ndim
    sharded: Any = tensor  # the placements' type changed between versions of torch
    shape, offset = compute_local_shape_and_global_offset(tensor.shape, sharded.device_mesh, sharded.placements)
    return tuple(slice(start, start + size) for start, size in zip(offset, shape, strict=True))
