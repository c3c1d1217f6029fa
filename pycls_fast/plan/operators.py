"""Operators of torch, seen one by one: the bytes alive, and the kernels that run."""

from __future__ import annotations

import math
import weakref
from abc import abstractmethod
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._guards import detect_fake_mode
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves


class _Propagation(nullcontext[None]):
    """Whether DTensor is finding a result's layout, for which it runs the operator on whole tensors of its own."""

    depth = 0

    def __enter__(self) -> None:
        self.depth += 1

    def __exit__(self, *_: object) -> None:
        self.depth -= 1


# It enters this context then, which does nothing by default.
ShardingPropagator._fake_mode_lock = _propagation = _Propagation()


class Operators(TorchDispatchMode):
    """Sees every operator that runs inside the context, with this rank's parts of tensors."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if DTensor in types:
            # It comes again, with the local parts.
            return NotImplemented
        out = func(*args, **(kwargs or {}))
        if not _propagation.depth:
            self.ran(func, (args, kwargs or {}), out)
        return out

    @abstractmethod
    def ran(self, func: Any, given: tuple[Any, Any], out: Any) -> None:
        """An operator ran with these arguments."""


class LiveMemory(Operators):
    """Counts storages allocated inside the context, on any device and whatever keeps them alive.

    `live` is the number of bytes alive now, `peak` its maximum over the ends of operators. Storages that are emptied
    and filled again (FSDP's gathered weights) count with the size that they have.

    Args:
        known: tensors not to count, such as parameters.
    """

    def __init__(self, known: Iterable[Tensor] = ()) -> None:
        super().__init__()
        self.live = 0
        self.peak = 0
        self._sizes: dict[int, int | None] = {tensor.untyped_storage()._cdata: None for tensor in known}

    def __enter__(self) -> Any:
        # Tensors of another mode than this are those of a compiler.
        self._fake_mode = detect_fake_mode()
        self._resize = resize = torch.UntypedStorage.resize_

        def counted(storage: torch.UntypedStorage, size: int) -> Any:
            if not storage.nbytes():
                # It may have been emptied before this context.
                self._add(storage)
            result = resize(storage, size)
            self._resized(storage)
            return result

        torch.UntypedStorage.resize_ = counted  # type: ignore[method-assign, assignment]
        return super().__enter__()

    def __exit__(self, *exception: Any) -> None:
        torch.UntypedStorage.resize_ = self._resize  # type: ignore[method-assign]
        super().__exit__(*exception)

    def ran(self, func: Any, given: tuple[Any, Any], out: Any) -> None:
        """Count what the operator allocated."""
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor):
                self._add_parts(leaf)

    def _add_parts(self, tensor: Any) -> None:
        if is_traceable_wrapper_subclass(tensor):
            for name in tensor.__tensor_flatten__()[0]:
                self._add_parts(getattr(tensor, name))
        elif tensor.device.type != "meta" and getattr(tensor, "fake_mode", None) is self._fake_mode:
            self._add(tensor.untyped_storage())

    def _add(self, storage: torch.UntypedStorage) -> None:
        identity = storage._cdata
        if identity in self._sizes:
            return
        self._sizes[identity] = 0
        self._resized(storage)
        # torch keeps a storage's Python object alive as long as the storage itself.
        weakref.finalize(storage, self._drop, identity)

    def _resized(self, storage: torch.UntypedStorage) -> None:
        before = self._sizes.get(storage._cdata)
        if before is not None:
            self._sizes[storage._cdata] = size = storage.nbytes()
            self.live += size - before
            self.peak = max(self.peak, self.live)

    def _drop(self, identity: int) -> None:
        self.live -= self._sizes.pop(identity) or 0


@dataclass(frozen=True)
class Work:
    """One kernel.

    Attributes:
        kind: "product", "convolution", "grouped" (a convolution with several groups), "direct" (one with many narrow
            groups), "depthwise", "attention", or "pass": limited by memory; or one of `EXCHANGES` between ranks.
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
# Threads that a GPU starts together.
_WARP = 32


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
    if weight.shape[1] == 1 < groups:
        kind = "depthwise"
    elif groups > 1:
        # cuDNN computes them without products where a warp has a group, or a channel, for each of its threads.
        is_direct = groups >= _WARP >= columns and weight.shape[0] % _WARP == 0
        kind = "direct" if is_direct else "grouped"
    rows = out.numel() / out.shape[1]
    return Work(kind, moved, groups, rows, columns, depth, images.itemsize)
