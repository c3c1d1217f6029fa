"""The ranks of a run as data: which one this process is, on which device, and how ranks exchange objects."""

from __future__ import annotations

import datetime
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from pycls_fast.parallel.monitor import Monitor

T = TypeVar("T")


@dataclass(frozen=True)
class World:
    """This process among the ranks of the run (a single process is rank 0 of 1)."""

    rank: int
    size: int
    device: torch.device
    # For flags and names on the host, so that exchanging them never waits for the accelerator.
    host_group: dist.ProcessGroup | None = None
    # For the thread that writes checkpoints: its messages must not mix with those of training.
    saving_group: dist.ProcessGroup | None = None
    # For strategies that shard, and for pipelines: the dimensions "pipeline", "replicate", "shard" and "tensor" in this
    # order, as far as there are any.
    mesh: DeviceMesh | None = None
    monitor: Monitor | None = None
    # The process groups' timeout; None without any.
    timeout: datetime.timedelta | None = None
    # The number of neighbouring ranks that compute each block together, and the number of pipeline stages; the ranks
    # that share a model this way see the same images.
    tensor: int = 1
    pipeline: int = 1
    # If experts are divided: the mesh with "expert" after "shard", which it divides.
    experts: DeviceMesh | None = None
    # Called every few seconds while no batch comes; may raise.
    while_waiting: Callable[[], None] = lambda: None

    def at(self, doing: str) -> None:
        """Record what this rank is doing, for the report if it hangs."""
        if self.monitor is not None:
            self.monitor.at(doing)

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0, which writes files and prints."""
        return self.rank == 0

    @property
    def data_size(self) -> int:
        """The number of parts into which a batch is divided."""
        return self.size // (self.tensor * self.pipeline)

    @property
    def data_rank(self) -> int:
        """The part of every batch that this rank sees; order, seeds, sizes and metrics depend on it."""
        return self.rank % self.stage_size // self.tensor

    @property
    def counts(self) -> bool:
        """Whether this rank counts its images; of the ranks with the same images one does."""
        return self.stage == 0 and self.rank % self.tensor == 0

    @property
    def stage_size(self) -> int:
        """The number of ranks that have the same blocks, or parts of them."""
        return self.size // self.pipeline

    @property
    def stage(self) -> int:
        """This rank's place in its pipeline."""
        return self.rank // self.stage_size

    def sum(self, values: Tensor) -> Tensor:
        """Sum counts of images in place, over the ranks that see different ones."""
        if self.size > 1:
            dist.all_reduce(values if self.counts else values.zero_())
        return values

    def gather(self, value: T) -> list[T]:
        """Gather every rank's object, in rank order, on every rank."""
        if self.size == 1:
            return [value]
        values: list[T | None] = [None] * self.size
        dist.all_gather_object(values, value, group=self.host_group)
        return values  # type: ignore[return-value]  # all_gather_object fills every place

    def from_main(self, value: T) -> T:
        if self.size == 1:
            return value
        values = [value]
        dist.broadcast_object_list(values, src=0, group=self.host_group)
        return values[0]

    def barrier(self) -> None:
        if self.size > 1:
            dist.barrier(group=self.host_group)

    @torch.no_grad()
    def average_buffers(self, tensors: list[Tensor]) -> None:
        """Average floating-point buffers (BatchNorm's statistics) over the ranks that have them, in place."""
        groups: list[dist.ProcessGroup | None] = [None] if self.size > 1 else []
        if self.pipeline > 1:
            # Each stage has its own.
            assert self.mesh is not None
            names = self.mesh.mesh_dim_names or ()
            groups = [self.mesh.get_group(name) for name in names if name != "pipeline"]
        for tensor in tensors if groups else []:
            for group in groups:
                dist.all_reduce(tensor, group=group)
            tensor.div_(self.stage_size)


ALONE = World(rank=0, size=1, device=torch.device("cpu"))
"""One process on the CPU, for work that needs no process group."""


class Agreement:
    """A number that any rank may raise; all ranks see the largest one at the same step, without waiting for each other.

    Each step starts a reduction on the host and reads the result of the previous step's.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._pending: tuple[dist.Work, Tensor] | None = None

    def reached(self, raised_here: int) -> int:
        """Call once a step on every rank: the largest number of the previous step, 0 in the first."""
        if self._world.size == 1:
            return raised_here
        answer = 0
        if self._pending is not None:
            work, flag = self._pending
            work.wait()
            answer = int(flag.item())
        flag = torch.tensor(raised_here)
        work = dist.all_reduce(flag, op=dist.ReduceOp.MAX, group=self._world.host_group, async_op=True)
        self._pending = (work, flag) if work is not None else None
        return answer


def floating_buffers(model: nn.Module) -> list[Tensor]:
    """Floating-point buffers that training changes: those of modules in training mode (frozen modules are not), except
    buffers that checkpoints leave out because they follow from the configuration."""
    return [
        buffer
        for module in model.modules()
        for name, buffer in module.named_buffers(recurse=False)
        if module.training and buffer.is_floating_point() and name not in module._non_persistent_buffers_set
    ]
