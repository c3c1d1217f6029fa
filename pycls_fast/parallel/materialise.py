"""Memory and initial values for a model that was built on the meta device and sharded."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from pycls_fast.network import Network
from pycls_fast.optim import assign


def is_empty(module: nn.Module) -> bool:
    """Whether any of its tensors is on the meta device."""
    return any(tensor.is_meta for tensor in (*module.parameters(), *module.buffers()))


def materialise(network: Network, device: torch.device, *, param_offload: bool = False) -> None:
    """Allocate each rank's shards, with the values of a direct build on the CPU under torch's current seed.

    Every rank draws the whole model's values, one module at a time, and keeps only its own part: the same values on any
    number of ranks, and never more than one whole module in memory.
    """
    network.to_empty(device=torch.device("cpu") if param_offload else device)
    if param_offload:
        for module in network.modules():
            for name, buffer in module.named_buffers(recurse=False):
                setattr(module, name, buffer.to(device))
    for module, fill in network.initialisers():
        with _whole(module):
            fill(module)


@contextmanager
def _whole(module: nn.Module) -> Iterator[None]:
    """Replace the module's tensors by whole float32 CPU tensors inside; on exit each shard copies its part of them."""
    held: list[tuple[Any, str, Tensor]] = []
    for inner in module.modules():
        tables: tuple[Any, Any] = (inner._parameters, inner._buffers)
        for own in tables:
            for name, value in own.items():
                if value is not None:
                    held.append((own, name, value))
                    own[name] = _like(value)
    try:
        yield
    finally:
        filled = [own[name] for own, name, _ in held]
        for own, name, value in held:
            own[name] = value
    for (_, _, value), whole in zip(held, filled, strict=True):
        assign(value, whole)


def _like(value: Tensor) -> Tensor:
    dtype = torch.float32 if value.is_floating_point() else value.dtype
    empty = torch.empty(value.shape, dtype=dtype)
    return nn.Parameter(empty) if isinstance(value, nn.Parameter) else empty
