"""Which image is seen when, by which process: pure functions of (seed, step, rank)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import KW_ONLY, dataclass
from functools import partial

import numpy as np

from pycls_fast.data.source import Source
from pycls_fast.data.sources.base import Images, checksum
from pycls_fast.errors import UserError
from pycls_fast.seeds import counter_seed, frozen_generator, microbatch_seed

Key = tuple[int, int]
"""(epoch, index): all that a worker needs to know to make a sample."""

Order = Callable[[int, int], np.ndarray]
"""(seed, epoch) -> the order of an epoch, a permutation of all indices."""

_LANES = 64


class Keys(list[Key]):
    """The keys of one microbatch, with the seed of its batch-wide random draws (None if there are none)."""

    def __init__(self, keys: Iterable[Key] = (), seed: int | None = None) -> None:
        super().__init__(keys)
        self.seed = seed


def epoch_order(seed: int, epoch: int, count: int) -> np.ndarray:
    """The order in which an epoch visits the images: a permutation of 0..count-1, int64.

    Depends only on its arguments: the same on every rank, machine and NumPy version.
    """
    return frozen_generator(counter_seed(seed, epoch)).permutation(count).astype(np.int64, copy=False)


def block_order(seed: int, epoch: int, block_ends: np.ndarray, *, buffer: int, global_batch_size: int) -> np.ndarray:
    """An order in which each rank reads few blocks (shards) at a time: blocks shuffled, then images within a buffer.

    The shuffled blocks, end to end, are cut into equal lanes, 64 or the largest power of two that divides the batch.
    Each global batch takes the same number of images from every lane, lane after lane, so each rank reads only its own
    lanes if the number of ranks divides theirs. Within a lane no image moves further than its share of the buffer.

    Like `epoch_order`, it depends only on its arguments, not on the number of ranks.

    Args:
        block_ends: int64, where each block of neighbouring images ends; the last is the number of images.
        buffer: images that are mixed at a time, over all lanes.
    """
    generator = frozen_generator(counter_seed(seed, epoch))
    count = int(block_ends[-1])
    starts = np.concatenate([[0], block_ends[:-1]])
    shuffled = generator.permutation(len(block_ends))
    sizes = (block_ends - starts)[shuffled]
    # From a block's start in the shuffled sequence to its start in the source.
    shift = starts[shuffled] - (np.cumsum(sizes) - sizes)
    sequence = np.arange(count, dtype=np.int64) + np.repeat(shift, sizes)
    lanes = math.gcd(global_batch_size, _LANES)
    per_lane = count // lanes
    reach = max(buffer // lanes, 1)
    jitter = np.arange(per_lane, dtype=np.float64) + generator.random_sample((lanes, per_lane)) * reach
    rows = np.argsort(jitter, axis=1, kind="stable")
    mixed = np.take_along_axis(sequence[: lanes * per_lane].reshape(lanes, per_lane), rows, axis=1)
    steps, share = count // global_batch_size, global_batch_size // lanes
    # (lane, step, place in the lane's share) -> (step, lane, place)
    whole = mixed[:, : steps * share].reshape(lanes, steps, share).transpose(1, 0, 2).reshape(-1)
    left_out = (mixed[:, steps * share :].reshape(-1), sequence[lanes * per_lane :])
    return np.concatenate([whole, *left_out])


@dataclass(eq=False)
class TrainSampler:
    """One rank's batches of keys for a training run, starting at any step, across epochs.

    Whatever the number of ranks, step k's global batch is the k-th slice of `global_batch_size` images of its epoch's
    order, in `accumulation_steps` contiguous microbatches; each rank takes a contiguous part of every microbatch. An
    incomplete batch at an epoch's end is dropped. Iteration crosses epochs, so workers live as long as the run.
    """

    count: int
    """Images in the training set."""
    _: KW_ONLY
    seed: int
    global_batch_size: int
    """Images per step, over all ranks and microbatches."""
    rank: int = 0
    world_size: int = 1
    start_step: int = 0
    total_steps: int
    """One past the last step, counted from the run's beginning."""
    accumulation_steps: int = 1
    """Batches that this rank gets per step."""
    order: Order | None = None
    """The order of each epoch; None: `epoch_order`."""
    repeats: int = 1
    """Repeated augmentation (Hoffer et al. 2020; DeiT): each image of an epoch is seen this many times, as the
    positions index, index + count, index + 2 count ...; an epoch keeps its number of steps. A global batch has all
    first copies, then all second ones ..., because `Mixer` mixes neighbours: adjacent copies would be mixed with each
    other. DeiT puts the copies on different ranks."""

    @property
    def steps_per_epoch(self) -> int:
        """Steps whose global batch is whole."""
        return self.count // self.global_batch_size

    def __len__(self) -> int:
        """The number of remaining microbatches, `accumulation_steps` per step."""
        return (self.total_steps - self.start_step) * self.accumulation_steps

    def __iter__(self) -> Iterator[Keys]:
        per_batch = self.global_batch_size // self.world_size // self.accumulation_steps
        epoch, order = -1, np.empty(0, dtype=np.int64)
        for step in range(self.start_step, self.total_steps):
            step_epoch, step_in_epoch = divmod(step, self.steps_per_epoch)
            if step_epoch != epoch:
                epoch, order = step_epoch, self._order_of(step_epoch)
            first = step_in_epoch * self.global_batch_size + self.rank * per_batch
            for position in range(self.accumulation_steps):
                start = first + position * per_batch * self.world_size
                seed = microbatch_seed(self.seed, step=step, position=position, rank=self.rank)
                yield Keys(((epoch, index) for index in order[start : start + per_batch].tolist()), seed)

    def _order_of(self, epoch: int) -> np.ndarray:
        order = self.order(self.seed, epoch) if self.order else epoch_order(self.seed, epoch, self.count)
        if self.repeats == 1:
            return order
        used = self.steps_per_epoch * self.global_batch_size
        copy = np.arange(used) % self.repeats
        repeated = np.repeat(order[: -(-used // self.repeats)], self.repeats)[:used] + copy * self.count
        rows = np.argsort(copy.reshape(-1, self.global_batch_size), axis=1, kind="stable")
        return np.take_along_axis(repeated.reshape(-1, self.global_batch_size), rows, axis=1).reshape(-1)


@dataclass(eq=False)
class EvalSampler:
    """Batches of keys (0, index) that visit every image exactly once over all ranks, without padding.

    Every rank gets the same number of batches, so that collective operations in the model match; the last batch is
    divided as evenly as possible and may be empty on some ranks.
    """

    count: int
    """Images in the set."""
    _: KW_ONLY
    batch_size: int
    """The largest number of images in a rank's batch."""
    rank: int = 0
    world_size: int = 1

    def __len__(self) -> int:
        return -(-self.count // (self.batch_size * self.world_size))

    def __iter__(self) -> Iterator[list[Key]]:
        whole = self.batch_size * self.world_size
        for first in range(0, self.count, whole):
            size = min(whole, self.count - first)
            start = first + size * self.rank // self.world_size
            end = first + size * (self.rank + 1) // self.world_size
            yield [(0, index) for index in range(start, end)]


def class_order(seed: int, epoch: int, labels: np.ndarray, *, power: float, repeats: int = 1) -> np.ndarray:
    """An epoch order of the usual length in which a class of n images has a share proportional to `n ** power`.

    0 is class-balanced sampling, 1/2 square-root sampling, 1 would be each image once (Kang et al., Decoupling
    Representation and Classifier for Long-Tailed Recognition, 2020, section 3.1). Images are not drawn independently:
    every class gets its share to within one image, and within a class the images' counts differ by at most one.

    Returns:
        Positions, int64, as many as labels. The position of a repeated image is higher by a multiple of `repeats` (the
        sampler's) times the number of images, so that its copies are augmented differently (`ImageDataset`).
    """
    generator = frozen_generator(counter_seed(seed, epoch))
    count = len(labels)
    counts = np.bincount(labels)
    shares = np.where(counts > 0, np.power(counts.astype(np.float64), power), 0.0)
    ends = np.cumsum(shares) * (count / shares.sum())
    ends[-1] = count
    # Rounded with one random offset for all classes: averaged over epochs each class gets its share (systematic
    # sampling).
    borders = np.floor(np.concatenate([[0.0], ends]) + generator.random_sample()).astype(np.int64)
    quotas = np.diff(borders)
    by_class = np.split(np.argsort(labels, kind="stable"), np.cumsum(counts)[:-1])
    drawn = [_drawn(images, quota, generator) for images, quota in zip(by_class, quotas.tolist(), strict=True)]
    order = generator.permutation(np.concatenate(drawn).astype(np.int64))
    return order + _times_before(order) * (count * repeats)


def _times_before(order: np.ndarray) -> np.ndarray:
    """How often the image at each place has occurred before."""
    by_image = np.argsort(order, kind="stable")
    _, first, times = np.unique(order[by_image], return_index=True, return_counts=True)
    before = np.empty_like(order)
    before[by_image] = np.arange(len(order)) - np.repeat(first, times)
    return before


def _drawn(images: np.ndarray, quota: int, generator: np.random.RandomState) -> np.ndarray:
    """Draw `quota` images: all of them equally often, then a random subset once more."""
    if not quota:
        return images[:0]
    rounds, rest = divmod(quota, len(images))
    return np.concatenate([np.tile(images, rounds), generator.permutation(images)[:rest]])


POWERS = {"uniform": 1.0, "square_root": 0.5, "balanced": 0.0}
"""By `data.sampling`: to which power of its number of images a class counts."""


def order_of(source: Images, data: Source, repeats: int = 1) -> tuple[str, Order | None]:
    """The name and the order of an epoch's images, by `data.shuffle` and `data.sampling`; None: `epoch_order`.

    A run has to keep its order when it resumes, and the order may depend on where images are stored: the name is
    "full", "classes", or "blocks-" and a checksum of the blocks.

    Raises:
        UserError: blocks are requested of a source without blocks.
    """
    if data.sampling != "uniform":
        return "classes", partial(class_order, labels=source.labels, power=POWERS[data.sampling], repeats=repeats)
    ends = source.block_ends
    if data.shuffle == "full" or (data.shuffle == "auto" and not source.prefers_blocks):
        return "full", None
    if ends is None:
        raise UserError("data.shuffle: blocks is for tar shards, which this source does not have; use full")
    # The sampler repeats images of this order, a whole batch of them at a time: with lanes that divide this number, a
    # rank reads at most `augment.repeats` times its share.
    buffer, batch = data.shuffle_buffer, data.global_batch_size
    batch = batch // repeats if batch % repeats == 0 else batch
    return f"blocks-{checksum(ends)}", partial(block_order, block_ends=ends, buffer=buffer, global_batch_size=batch)
