"""Batches on their way from the workers to the device, and how samples are collated into them."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch.utils._pytree import tree_leaves, tree_map_only

from pycls_fast.data.crop import NO_BOX, Box
from pycls_fast.errors import UserError
from pycls_fast.values import Size

Damage = tuple[str, str]
"""(name of the image, reason)."""

SHARED_MEMORY = "/dev/shm"
MORE_SHARED_MEMORY = (
    "enlarge it (docker run --shm-size=8g, or --ipc=host), or lower data.num_workers, data.prefetch_factor or the "
    "batch (data.global_batch_size; of evaluations data.eval_batch_size)"
)
"""What to do when it is full."""


@dataclass(frozen=True)
class Sample:
    """One image, ready for a batch."""

    image_HWC: np.ndarray | None
    """uint8; None for a damaged image that is left out."""
    label: int
    index: int
    erase: Box = NO_BOX
    damaged: tuple[Damage, ...] = ()
    """The damaged images met on the way to this one."""


@dataclass(frozen=True)
class Batch:
    """A batch on its way from the workers to the device, prepared as far as the workers go."""

    images_BHWC: torch.Tensor
    """uint8, a quarter of float32's bytes; float32 if the workers have normalised."""
    labels_B: torch.Tensor
    """int64."""
    indices_B: torch.Tensor
    """int64, positions in the source."""
    erase_B4: torch.Tensor | None
    """int64 boxes (top, left, height, width) that are still to be erased, all zeros for none; None if there is nothing
    to erase."""
    damaged: tuple[Damage, ...] = ()
    """Images that could not be used: replaced in training, left out in evaluation."""
    lam: float | None = None
    """The share of each image itself if the workers have mixed it with the one before (`Mixer`)."""

    def __len__(self) -> int:
        return len(self.labels_B)

    def pin_memory(self) -> Batch:
        """A copy in page-locked memory; DataLoader's pinning thread calls this."""
        return self._each(lambda tensor: tensor.pin_memory())

    def to(self, device: torch.device, *, non_blocking: bool = False) -> Batch:
        return self._each(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def record_stream(self, stream: torch.cuda.Stream) -> None:
        """Tell the allocator that `stream` uses the tensors, which were made on another stream."""
        for tensor in tree_leaves(vars(self)):
            if isinstance(tensor, torch.Tensor):
                tensor.record_stream(stream)

    def _each(self, change: Callable[[torch.Tensor], torch.Tensor]) -> Batch:
        return Batch(**tree_map_only(torch.Tensor, change, vars(self)))


HostStage = Callable[[Batch, int | None], Batch]
"""A stage that workers apply to a whole batch, with the seed of its microbatch (None in evaluation)."""


def collate(samples: Iterable[Sample], *, count: int, image_size: Size, erases: bool, shared: bool = False) -> Batch:
    """Collate at most `count` samples; those without an image contribute only their damage report.

    Args:
        samples: each is copied into the batch as it comes, while it is in the CPU's cache.
        shared: allocate the batch in memory that is shared with the main process, which saves a copy.

    Raises:
        UserError: shared memory is full.
    """
    images_BHWC = _empty_images((count, *image_size, 3), shared)
    rows_BHWC = images_BHWC.numpy()
    whole: list[Sample] = []
    damaged: list[Damage] = []
    for sample in samples:
        damaged += sample.damaged
        if sample.image_HWC is not None:
            rows_BHWC[len(whole)] = sample.image_HWC
            whole.append(replace(sample, image_HWC=None))
    return Batch(
        images_BHWC=images_BHWC[: len(whole)],
        labels_B=torch.tensor([sample.label for sample in whole], dtype=torch.int64),
        indices_B=torch.tensor([sample.index for sample in whole], dtype=torch.int64),
        erase_B4=torch.tensor([s.erase for s in whole], dtype=torch.int64).reshape(-1, 4) if erases else None,
        damaged=tuple(damaged),
    )


def _empty_images(shape: tuple[int, ...], shared: bool) -> torch.Tensor:
    size = math.prod(shape)
    if not shared or not size:
        return torch.empty(shape, dtype=torch.uint8)
    # Writing more than is free there kills the process with a signal.
    status = os.statvfs(SHARED_MEMORY)
    free = status.f_bavail * status.f_frsize
    if free < size:
        raise UserError(
            f"shared memory is full: {SHARED_MEMORY} has {free / 2**20:,.0f} MiB free, a batch takes "
            f"{size / 2**20:,.0f} MiB; {MORE_SHARED_MEMORY}"
        )
    storage = torch.UntypedStorage._new_shared(size)
    return torch.empty(0, dtype=torch.uint8).set_(storage).view(shape)
