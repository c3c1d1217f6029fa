"""Tensors that autograd saves for the backward pass, in 8 bits or on the host: one saved-tensors hook for both."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from pycls_fast.parallel.eight_bits import BitReLUs, EightBits, compress, decompress

SMALLEST = 1024
"""Tensors with fewer elements are kept unchanged."""


class PackedStorage:
    """A compressed or offloaded range of memory, kept once for all saved tensors that are views of it."""

    def __init__(self, flat: Tensor, *, in_8_bits: bool, on_host: bool) -> None:
        self.count, self.dtype, self.device = flat.numel(), flat.dtype, flat.device
        self.parts: tuple[Tensor, ...] = tuple(compress(flat)) if in_8_bits else (flat,)
        self.in_8_bits = in_8_bits
        if on_host:
            self.parts = tuple(_to_host(part) for part in self.parts)

    def restore(self) -> Tensor:
        """The flat tensor, on its device."""
        parts = [part.to(self.device, non_blocking=True) for part in self.parts]
        return decompress(EightBits(*parts), self.count, self.dtype) if self.in_8_bits else parts[0]


def _to_host(tensor: Tensor) -> Tensor:
    # Both copies, here and back, are on the current stream: the host never waits, and never reads the copy.
    pinned = tensor.device.type == "cuda"
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=pinned)
    return host.copy_(tensor, non_blocking=pinned)


class View:
    """A saved tensor as a position in a kept range of memory."""

    def __init__(self, packed: PackedStorage, tensor: Tensor, offset: int | None) -> None:
        self.packed, self.shape, self.strides, self.offset = packed, tensor.shape, tensor.stride(), offset

    def restore(self) -> Tensor:
        """The tensor with its strides."""
        flat = self.packed.restore()
        if self.offset is not None:
            return flat.as_strided(self.shape, self.strides, self.offset)
        empty = torch.empty_strided(self.shape, self.strides, dtype=flat.dtype, device=flat.device)
        return empty.copy_(flat.view(self.shape))


class SavedTensors:
    """Stands in for a model's `forward`: saved tensors are kept in 8 bits, on the host, or both.

    Unchanged: images, parameters, their casts and views (autocast's copies), and tensors of fewer than `SMALLEST`
    elements. Only floating-point tensors that gradients flow through are kept in 8 bits, so never images, the
    statistics of norms, or softmax's sums. Views of one storage share one copy of it.

    Args:
        model: the module whose `forward` is replaced.
        in_8_bits: apply `eight_bits.compress` to such tensors, and keep only ReLU's sign.
        on_host: move what is kept to the host's memory, pinned if the device is CUDA.
    """

    def __init__(self, model: nn.Module, *, in_8_bits: bool, on_host: bool) -> None:
        self.model = model
        self.inner: Callable[[Tensor], Tensor] = model.forward
        self.in_8_bits, self.on_host = in_8_bits, on_host

    def __call__(self, images: Tensor) -> Tensor:
        if not torch.is_grad_enabled():
            return self.inner(images)
        with keep(self.model, images, in_8_bits=self.in_8_bits, on_host=self.on_host):
            return self.inner(images)


@contextmanager
def keep(model: nn.Module, *held: Tensor, in_8_bits: bool, on_host: bool) -> Iterator[None]:
    """A context that keeps saved tensors as `SavedTensors` does; `held` are tensors that stay alive anyway."""
    hook = _Hook(model, held, in_8_bits=in_8_bits, on_host=on_host)
    with ExitStack() as stack:
        if in_8_bits:
            stack.enter_context(BitReLUs())
        stack.enter_context(torch.autograd.graph.saved_tensors_hooks(hook.pack, _unpack))
        yield


def _unpack(kept: Tensor | View) -> Tensor:
    return kept.restore() if isinstance(kept, View) else kept


class _Hook:
    """The packing side, for one forward pass."""

    def __init__(self, model: nn.Module, held: Sequence[Tensor], *, in_8_bits: bool, on_host: bool) -> None:
        self.in_8_bits, self.on_host = in_8_bits, on_host
        self.left_alone = {tensor.untyped_storage()._cdata for tensor in (*model.parameters(), *held)}
        # By storage, version and range. The weak reference prevents the storage's id from being reused.
        self.done: dict[tuple[Any, ...], tuple[StorageWeakRef, weakref.ref[PackedStorage]]] = {}

    def pack(self, tensor: Tensor) -> Tensor | View:
        in_8_bits = self.in_8_bits and tensor.is_floating_point() and tensor.requires_grad
        if not (in_8_bits or self.on_host) or tensor.numel() < SMALLEST or self._stays(tensor):
            # Detached, because an operation's output and its node would otherwise keep each other alive.
            return tensor.detach()
        reference = StorageWeakRef(tensor.untyped_storage())
        start, stop = _stretch(tensor)
        scattered = 2 * tensor.numel() < stop - start
        layout = (tensor.shape, tensor.stride()) if scattered else None
        key = (reference.cdata, tensor._version, tensor.dtype, in_8_bits, start, stop, layout)
        _, known = self.done.get(key, (None, None))
        packed = known() if known is not None else None
        if packed is None:
            tensor_ = tensor.detach()
            flat = tensor_.reshape(-1) if scattered else tensor_.as_strided((stop - start,), (1,), start)
            packed = PackedStorage(flat, in_8_bits=in_8_bits, on_host=self.on_host)
            self.done[key] = (reference, weakref.ref(packed))
        return View(packed, tensor, None if scattered else int(tensor.storage_offset()) - start)

    def _stays(self, tensor: Tensor) -> bool:
        return tensor.untyped_storage()._cdata in self.left_alone or _comes_from_one_leaf(tensor)


def _stretch(tensor: Tensor) -> tuple[int, int]:
    """The range [start, stop) of its storage that is kept: all of it if the tensor is at least half of it."""
    size = tensor.untyped_storage().nbytes() // tensor.element_size()
    if 2 * tensor.numel() >= size:
        return 0, size
    start = int(tensor.storage_offset())
    last = sum((int(n) - 1) * int(stride) for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return start, start + last + 1


def _comes_from_one_leaf(tensor: Tensor) -> bool:
    """Whether the tensor is a parameter, or made from one by a few one-argument operations (casts and views)."""
    if tensor.is_leaf:
        return tensor.requires_grad
    node: Any = tensor.grad_fn
    for _ in range(6):
        if node is None or hasattr(node, "variable"):
            return node is not None
        # Inputs without a gradient count too: a convolution of images depends on more than its weight.
        if len(node.next_functions) != 1:
            return False
        node = node.next_functions[0][0]
    return False
