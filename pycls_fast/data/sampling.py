"""Which image is seen when, by which process: pure functions of (seed, step, rank)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np

from pycls_fast.counter import counter_seed, microbatch_seed
from pycls_fast.data.draws import frozen_generator
from pycls_fast.errors import UserError

Key = tuple[int, int]
"""(epoch, index): all that a worker needs to know to make a sample."""


class Keys(list[Key]):
    """The samples of one microbatch, and the seed of what is drawn for it as a whole (None where nothing is)."""

    def __init__(self, keys: Iterable[Key] = (), seed: int | None = None) -> None:
        super().__init__(keys)
        self.seed = seed


def epoch_order(seed: int, epoch: int, count: int) -> np.ndarray:
    """The order in which an epoch visits the images: a permutation of 0..count-1, int64.

    A function of its arguments alone: the same on every rank, machine and NumPy version.
    """
    return frozen_generator(counter_seed(seed, epoch)).permutation(count).astype(np.int64, copy=False)


class TrainSampler:
    """Batches of keys for one rank's training run, from any step on, across epochs.

    Step k's global batch is the k-th slice of `global_batch_size` images of its epoch's order, in `accumulation_steps`
    contiguous microbatches, whatever the number of ranks; each rank takes a contiguous part of every microbatch.
    What remains at an epoch's end (fewer images than a batch) is left out; the next epoch has another order.

    Iteration goes on over the epochs' borders, so that workers live as long as the run, and nothing needs
    decoding to start at a later step.
    """

    def __init__(
        self,
        count: int,
        *,
        seed: int,
        global_batch_size: int,
        rank: int = 0,
        world_size: int = 1,
        start_step: int = 0,
        total_steps: int,
        accumulation_steps: int = 1,
    ) -> None:
        """
        Args:
            count: images in the training set.
            global_batch_size: images per step, over all ranks and microbatches.
            start_step: the first step to yield, counted from the run's beginning.
            total_steps: one past the last step to yield.
            accumulation_steps: batches that this rank gets per step.

        Raises:
            UserError: when the batch cannot be filled or divided.
        """
        if count < global_batch_size:
            raise UserError(
                f"the training set has {count:,} images, fewer than one global batch of "
                f"{global_batch_size:,}; lower data.global_batch_size"
            )
        parts = world_size * accumulation_steps
        if global_batch_size < 1 or global_batch_size % parts:
            raise UserError(
                f"data.global_batch_size {global_batch_size:,} cannot be divided among {world_size:,} ranks "
                f"x {accumulation_steps:,} accumulation steps; choose a multiple of {parts:,}"
            )
        if not 0 <= rank < world_size:
            raise ValueError(f"rank {rank} of {world_size}")
        if not 0 <= start_step <= total_steps:
            raise ValueError(f"start_step {start_step} of total_steps {total_steps}")
        self.steps_per_epoch = count // global_batch_size
        self._count = count
        self._seed = seed
        self._global_batch_size = global_batch_size
        self._rank = rank
        self._world_size = world_size
        self._start_step = start_step
        self._total_steps = total_steps
        self._accumulation_steps = accumulation_steps

    def __len__(self) -> int:
        """Batches that are left: microbatches, `accumulation_steps` per step."""
        return (self._total_steps - self._start_step) * self._accumulation_steps

    def __iter__(self) -> Iterator[Keys]:
        per_batch = self._global_batch_size // self._world_size // self._accumulation_steps
        epoch, order = -1, np.empty(0, dtype=np.int64)
        for step in range(self._start_step, self._total_steps):
            step_epoch, step_in_epoch = divmod(step, self.steps_per_epoch)
            if step_epoch != epoch:
                epoch, order = step_epoch, epoch_order(self._seed, step_epoch, self._count)
            first = step_in_epoch * self._global_batch_size + self._rank * per_batch
            for position in range(self._accumulation_steps):
                start = first + position * per_batch * self._world_size
                seed = microbatch_seed(self._seed, step=step, position=position, rank=self._rank)
                yield Keys(((epoch, index) for index in order[start : start + per_batch].tolist()), seed)


class EvalSampler:
    """Batches of keys (0, index) that visit every image exactly once over all ranks, without padding.

    Every rank gets the same number of batches, so that collective operations in the model stay in step; the
    last one is shared out as evenly as possible and may be empty on some ranks.
    """

    def __init__(self, count: int, *, batch_size: int, rank: int = 0, world_size: int = 1) -> None:
        """
        Args:
            count: images in the set.
            batch_size: the most images in a rank's batch.
        """
        if count < 0 or batch_size < 1 or not 0 <= rank < world_size:
            raise ValueError(f"count {count}, batch_size {batch_size}, rank {rank} of {world_size}")
        self._count = count
        self._global_batch_size = batch_size * world_size
        self._rank = rank
        self._world_size = world_size

    def __len__(self) -> int:
        return -(-self._count // self._global_batch_size)

    def __iter__(self) -> Iterator[list[Key]]:
        for first in range(0, self._count, self._global_batch_size):
            size = min(self._global_batch_size, self._count - first)
            start = first + size * self._rank // self._world_size
            end = first + size * (self._rank + 1) // self._world_size
            yield [(0, index) for index in range(start, end)]
