"""What a step computes, counted on fake tensors: matrix products by their shapes, everything else by its bytes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves

from pycls_fast.plan.live_memory import Operators


@dataclass(frozen=True)
class Work:
    """One kernel.

    Attributes:
        kind: "product", "convolution", "grouped" (a convolution with few channels in each group), "depthwise",
            "attention", or "pass": limited by memory; or one of `EXCHANGES` between ranks.
        bytes: read and written, or what is exchanged: the whole of which ranks have parts.
        count: products of one shape that the kernel computes: heads, groups, samples.
        m, n, k: rows, columns and the summed dimension; a convolution's as the product of its patches. 0 for a pass.
        itemsize: bytes of an element of its first input.
    """

    kind: str
    bytes: float
    count: float = 1.0
    m: float = 0.0
    n: float = 0.0
    k: float = 0.0
    itemsize: int = 4

    @property
    def flops(self) -> float:
        """Floating-point operations, 2 for a multiply-add."""
        return 2.0 * self.count * self.m * self.n * self.k


class CountWork(Operators):
    """Records a `Work` for every kernel that would run inside the context, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[Work] = []

    def taken(self) -> tuple[Work, ...]:
        """What was recorded since the last call."""
        found, self.found = self.found, []
        return tuple(found)

    def ran(self, func: Any, given: tuple[Any, Any], out: Any) -> None:
        """Count the operator's kernels."""
        name = func._overloadpacket.__name__
        if func.namespace == "aten" or name in _EXCHANGES:
            inputs = [leaf for leaf in tree_leaves(given) if isinstance(leaf, Tensor)]
            outputs = [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]
            if name in _EXCHANGES:
                whole = max(map(_nbytes, (*inputs, *outputs)))
                self.found.append(Work(_EXCHANGES[name], float(whole), itemsize=inputs[0].itemsize))
            else:
                self.found += _work(func, given[0], inputs, outputs)


# Collectives of torch.distributed and of DTensor.
_EXCHANGES = {
    "all_gather_into_tensor": "all_gather",
    "_allgather_base_": "all_gather",
    "reduce_scatter_tensor": "reduce_scatter",
    "_reduce_scatter_base_": "reduce_scatter",
    "all_reduce": "all_reduce",
    "allreduce_": "all_reduce",
    "shard_dim_alltoall": "all_to_all",
    "send": "send",
}
EXCHANGES = frozenset(_EXCHANGES.values())


def _nbytes(tensor: Tensor) -> int:
    """Bytes that a kernel moves: an expanded tensor is read once."""
    return min(tensor.nbytes, tensor.untyped_storage().nbytes())


def _work(func: Any, args: Sequence[Any], inputs: list[Tensor], outputs: list[Tensor]) -> list[Work]:
    name = func._overloadpacket.__name__
    if name.startswith(("empty", "new_empty")) or _is_view(func, inputs, outputs):
        return []
    written = outputs or _written(func, args)
    moved = float(sum(map(_nbytes, inputs)) + sum(map(_nbytes, written)))
    size = inputs[0].itemsize if inputs else 4
    if name in ("mm", "addmm", "bmm", "baddbmm"):
        left, right = inputs[-2:]
        count = left.shape[0] if left.dim() == 3 else 1
        return [Work("product", moved, count, left.shape[-2], right.shape[-1], left.shape[-1], left.itemsize)]
    if name == "convolution":
        return [_convolution(args[0], args[1], outputs[0], args[8], moved)]
    if name == "convolution_backward":
        gradient, images, weight, groups, wanted = args[0], args[1], args[2], args[9], args[10]
        found = []
        if wanted[0]:
            found.append(_convolution(images, weight, gradient, groups, moved - _nbytes(weight) - _nbytes(images)))
        if wanted[1]:
            made = _convolution(images, weight, gradient, groups, float(_nbytes(gradient) + _nbytes(images)))
            found.append(Work(made.kind, made.bytes, made.count, made.n, made.k, made.m, made.itemsize))
        return found
    if "scaled_dot_product" in name:
        query, key = inputs[:2] if "backward" not in name else inputs[1:3]
        heads, width = math.prod(query.shape[:-2]), query.shape[-1]
        # Forward: scores and values; backward: the scores again and four gradients.
        products = 5 if "backward" in name else 2
        return [Work("attention", moved, products * heads, query.shape[-2], key.shape[-2], width, query.itemsize)]
    if "batch_norm" in name and args[5] is not False:
        # In training, statistics first, then the values.
        moved += float(sum(_nbytes(each) for each in inputs if each.dim() > 1))
    return [Work("pass", moved, itemsize=size)]


def _written(func: Any, args: Sequence[Any]) -> list[Tensor]:
    """What an operator that returns nothing changes in place."""
    changed = [
        arg
        for arg, about in zip(args, func._schema.arguments, strict=False)
        if about.alias_info is not None and about.alias_info.is_write
    ]
    return [leaf for leaf in tree_leaves(changed) if isinstance(leaf, Tensor)]


def _is_view(func: Any, inputs: Iterable[Tensor], outputs: Iterable[Tensor]) -> bool:
    if func._schema.is_mutable:
        return False
    storages = {each.untyped_storage()._cdata for each in inputs}
    return bool(outputs) and all(each.untyped_storage()._cdata in storages for each in outputs)


def _convolution(images: Tensor, weight: Tensor, out: Tensor, groups: int, moved: float) -> Work:
    columns, depth = weight.shape[0] / groups, math.prod(weight.shape[1:])
    kind = "convolution"
    if groups > 1:
        kind = "depthwise" if weight.shape[1] == 1 else "grouped"
    rows = out.numel() / out.shape[1]
    return Work(kind, moved, groups, rows, columns, depth, images.itemsize)
