"""The memory of a training step on a CPU: the tensors that are alive, not the process with its libraries."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from pycls_fast.parallel import World
from pycls_fast.plan import LiveMemory
from pycls_fast.train.metrics import memory_peak_bytes
from pycls_fast.train.step import Step

_COUNTED = 2


class StepMemory:
    """The peak of the steps that were counted: a process's first two, the second of which has the optimizer's state.

    Counting takes time in every operation. On CUDA the allocator counts, and where operations cannot be seen (compiled
    code) or must not be (the exchange of several ranks) it is the peak of the process, as far as the system knows it.
    """

    def __init__(self, world: World, *, compiled: bool) -> None:
        self._device = world.device
        self._left = _COUNTED if world.device.type == "cpu" and world.size == 1 and not compiled else 0
        self._peak = 0

    @contextmanager
    def counting(self, step: Step) -> Iterator[None]:
        """A context for one step, which is counted if it is among the first."""
        if not self._left:
            yield
            return
        self._left -= 1
        held = _held(step)
        with LiveMemory(held) as memory:
            yield
        # A tensor and its views are one storage.
        storages = {s._cdata: s.nbytes() for s in (tensor.untyped_storage() for tensor in held)}
        self._peak = max(self._peak, sum(storages.values()) + memory.peak)

    def bytes(self) -> int:
        """The peak so far."""
        return self._peak or memory_peak_bytes(self._device)

    @property
    def counted(self) -> int | None:
        """The peak of live tensors; None if nothing was counted."""
        return self._peak or None


def _held(step: Step) -> list[Tensor]:
    """What exists from step to step: weights, masters, buffers, average, optimizer state."""
    average = {} if step.ema is None else step.ema.values
    network = step.wrapped.evaluated
    state = tree_leaves([dict(step.optimizer.state), dict(average), list(step.parameters)])
    return [
        tensor
        for tensor in (*network.parameters(), *network.buffers(), *state)
        if isinstance(tensor, torch.Tensor) and type(tensor) in (torch.Tensor, torch.nn.Parameter)
    ]
