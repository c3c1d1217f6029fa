"""What FairScale's FullyShardedDataParallel asks of CUDA, played by the CPU: for tests on gloo, never in the product.

FairScale 0.4.13 orders its collectives with CUDA streams. On a CPU every operation ends before the next begins, so a
stream has nothing to order; these classes keep the book that FairScale's own assertions look at (which stream is the
current one).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from pycls_fast.strategies import STRATEGIES


class Stream:
    """A stream on which everything has already happened."""

    def wait_stream(self, other: Stream) -> None:
        """Nothing to wait for."""

    def synchronize(self) -> None:
        """Nothing to wait for."""


class Cuda:
    """The few names of `torch.cuda` that FairScale's FSDP uses."""

    Stream = Stream

    def __init__(self) -> None:
        self._current = Stream()

    def is_available(self) -> bool:
        return True

    def current_stream(self) -> Stream:
        return self._current

    def synchronize(self) -> None:
        """Nothing to wait for."""

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        before, self._current = self._current, stream
        try:
            yield
        finally:
            self._current = before


class _StandIn(ModuleType):
    """A module with some of its names replaced, for one importer of it; everyone else sees the real one."""

    def __init__(self, real: ModuleType, **replaced: Any) -> None:
        super().__init__(real.__name__)
        self.__dict__.update(replaced)
        self._real = real

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)


def _reduce_scatter(output: Tensor, whole: Tensor, group: dist.ProcessGroup | None = None) -> None:
    # NCCL takes any shape.
    dist.reduce_scatter_tensor(output, whole.view(-1), group=group)


def play_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let `parallel=fairscale_fsdp` run on gloo until the monkeypatch is undone."""
    import fairscale.internal.reduce_scatter_bucketer as bucketer
    import fairscale.nn.data_parallel.fully_sharded_data_parallel as fsdp

    monkeypatch.setattr(fsdp, "torch", _StandIn(torch, cuda=Cuda()))
    monkeypatch.setattr(bucketer, "dist", _StandIn(dist, _reduce_scatter_base=_reduce_scatter))
    monkeypatch.setattr(Tensor, "record_stream", lambda tensor, stream: None)
    for name, facts in STRATEGIES.items():
        monkeypatch.setitem(STRATEGIES, name, replace(facts, needs_cuda=False))
