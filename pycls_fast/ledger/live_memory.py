"""Bytes alive while a function runs: every storage that an operator allocated and that is not freed yet."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveMemory(TorchDispatchMode):
    """Counts storages allocated inside the context, on any device and whatever keeps them alive.

    `live` is the number of bytes alive now, `peak` its maximum over the ends of operators.

    Args:
        known: tensors not to count, such as parameters.
    """

    def __init__(self, known: Iterable[Tensor] = ()) -> None:
        super().__init__()
        self.live = 0
        self.peak = 0
        self._seen = {tensor.untyped_storage()._cdata for tensor in known}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor):
                self._add(leaf.untyped_storage())
        return out

    def _add(self, storage: torch.UntypedStorage) -> None:
        identity = storage._cdata
        if identity in self._seen:
            return
        size = storage.nbytes()
        self._seen.add(identity)
        self.live += size
        self.peak = max(self.peak, self.live)
        # torch keeps a storage's Python object alive as long as the storage itself.
        weakref.finalize(storage, self._drop, identity, size)

    def _drop(self, identity: int, size: int) -> None:
        self._seen.discard(identity)
        self.live -= size
