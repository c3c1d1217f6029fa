"""Operators, seen one by one, and bytes alive: the storages that they allocated and that are not freed yet."""

from __future__ import annotations

import weakref
from abc import abstractmethod
from collections.abc import Iterable
from contextlib import nullcontext
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
            parts = (getattr(tensor, name) for name in tensor.__tensor_flatten__()[0])
            for part in (part for part in parts if isinstance(part, Tensor)):
                self._add_parts(part)
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
