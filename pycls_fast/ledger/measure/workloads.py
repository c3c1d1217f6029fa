"""What can be timed: the training step, the inference forward pass, the input pipeline, training fed by it.

Each part runs a few steps at a time, so that several variants of a configuration can alternate.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from itertools import repeat
from typing import Literal

import torch
from torch import Tensor

from pycls_fast import build
from pycls_fast.config import RunConfig
from pycls_fast.data.batch import Batch, HostStage
from pycls_fast.data.prepare import IN_FLIGHT, to_device
from pycls_fast.data.sources.base import Images
from pycls_fast.ledger.measure.device import time_calls
from pycls_fast.parallel.world import World
from pycls_fast.parallel.wrap import uncompiled
from pycls_fast.speed import Speed
from pycls_fast.train.metrics import StepMemory, TrainMetrics
from pycls_fast.train.step import Step
from pycls_fast.values import Size

PartName = Literal["train", "inference", "loader", "both"]


@dataclass(frozen=True)
class Turn:
    """A few consecutive steps: the seconds of each and of all, and in which the host waited for batches."""

    seconds: tuple[float, ...]
    total: float
    waited: float = 0.0


class Part(ABC):
    """Something that can be stepped and timed; `images_per_step` are those of all ranks."""

    images_per_step: int

    def warm_up(self, steps: int) -> None:
        """Run steps that do not count."""
        self.turn(steps)

    @abstractmethod
    def turn(self, steps: int) -> Turn:
        """Time steps of this rank."""


def slowest(turn: Turn, world: World) -> Turn:
    """The turn of the whole run: a step ends when the slowest rank is done."""
    turns = world.gather(turn)
    return Turn(
        seconds=tuple(max(each) for each in zip(*(t.seconds for t in turns), strict=True)),
        total=max(t.total for t in turns),
        waited=max(t.waited for t in turns),
    )


class Trainer:
    """The training step with a step counter, shared by the parts that train."""

    def __init__(self, step: Step, world: World, switches: Speed) -> None:
        self.step = step
        self.metrics = TrainMetrics(world.device, read=switches.metrics)
        self._done = 0

    def __call__(self, microbatches: Iterable[Batch]) -> None:
        self.step(self._done, microbatches, self.metrics)
        self._done += 1


@dataclass
class TrainPart(Part):
    """Training steps on one microbatch that is already on the device, `accumulation_steps` times in each step.

    Training does not hold all microbatches of a step in memory either.
    """

    trainer: Trainer
    microbatch: Batch
    accumulation_steps: int
    memory: StepMemory
    world: World

    def __post_init__(self) -> None:
        self.images_per_step = len(self.microbatch) * self.accumulation_steps * self.world.data_size

    def warm_up(self, steps: int) -> None:
        # Kernels are chosen, and the optimizer's state is allocated.
        for _ in range(steps):
            with self.memory.counting(self.trainer.step.persistent_tensors):
                self._step()

    def turn(self, steps: int) -> Turn:
        seconds = time_calls(self._step, steps, self.world.device)
        return Turn(tuple(seconds), sum(seconds))

    def _step(self) -> None:
        self.trainer(repeat(self.microbatch, self.accumulation_steps))


@dataclass
class InferencePart(Part):
    """The forward pass of evaluation, uint8 images to logits, on one batch that is already on the device."""

    step: Step
    batch: Batch
    world: World

    def __post_init__(self) -> None:
        self.images_per_step = len(self.batch) * self.world.data_size
        self.network = self.step.wrapped.evaluated

    @torch.no_grad()
    def forward(self) -> Tensor:
        """Logits (B, K), computed as in `train/evaluate.py`."""
        with uncompiled(self.network), self.step.autocast():
            logits_BK: Tensor = self.network(self.step.prepare(self.batch))
        return logits_BK

    def turn(self, steps: int) -> Turn:
        was_training = self.network.training
        self.network.eval()
        try:
            seconds = time_calls(self.forward, steps, self.world.device)
        finally:
            self.step.wrapped.free_gathered()
            self.network.train(was_training)
        return Turn(tuple(seconds), sum(seconds))


@dataclass
class StepRange:
    """Hands out disjoint ranges of training steps, so that no turn finds its images in the page cache."""

    used: int = 0

    def take(self, count: int) -> int:
        """The first of `count` unused steps."""
        self.used += count
        return self.used - count


@dataclass
class _Feed:
    """The microbatches of consecutive steps, each loaded when it is asked for, as in training; the seconds in which the
    host waited."""

    microbatches: Iterator[Batch]
    accumulation_steps: int
    waited: float = 0.0

    def step(self) -> Iterator[Batch]:
        for _ in range(self.accumulation_steps):
            asked = time.perf_counter()
            batch = next(self.microbatches)
            self.waited += time.perf_counter() - asked
            yield batch


@dataclass
class LoaderPart(Part):
    """The input pipeline: workers, collation, the copy to the device; with a trainer, training fed by it.

    Every turn starts its own workers, as two live loaders would compete for cores. Batches arrive in bursts of one
    per worker, so a turn is a whole number of bursts, and only its mean is used.

    Workers load ahead: a turn begins when they are as far ahead as they get, is long compared with that, and ends while
    they still load. Otherwise it would count batches that were made before it, all of them if many workers share few
    cores.
    """

    config: RunConfig
    source: Images
    switches: Speed
    world: World
    order: StepRange
    trainer: Callable[[Iterator[Batch]], object] | None = None

    def __post_init__(self) -> None:
        self.images_per_step = self.config.data.global_batch_size
        self._warm_up_steps = 1
        workers, per_step = build.num_workers(self.config), self.config.optim.microbatches
        # In steps: the microbatches that workers have ready or in progress.
        self._ahead = -(-(workers * self.config.data.prefetch_factor) // per_step)
        self._burst = max(1, workers)

    def _whole_bursts(self, steps: int) -> int:
        return -(-max(steps, 1) // self._burst) * self._burst

    def warm_up(self, steps: int) -> None:
        # Each turn does, after starting its workers.
        self._warm_up_steps = steps

    def turn(self, steps: int) -> Turn:
        steps = self._whole_bursts(max(steps, self._ahead))
        warm_up_steps = self._whole_bursts(max(self._warm_up_steps, self._ahead + 1))
        use: Callable[[Iterator[Batch]], object] = self.trainer or partial(deque, maxlen=0)
        with closing(self._microbatches(warm_up_steps + steps + self._ahead + IN_FLIGHT)) as microbatches:
            feed = _Feed(microbatches, self.config.optim.microbatches)
            for _ in range(warm_up_steps):
                use(feed.step())
            feed.waited = 0.0
            seconds = time_calls(lambda: use(feed.step()), steps, self.world.device)
        return Turn(tuple(seconds), sum(seconds), feed.waited)

    def _microbatches(self, steps: int) -> Generator[Batch]:
        start = self.order.take(steps)
        loader = build.train_loader(
            self.config, self.source, self.world, self.switches, start_step=start, steps=start + steps
        )
        yield from to_device(loader, self.world.device, mode=self.switches.input_copy)


def synthetic_batch(
    count: int,
    image_size: int | tuple[int, int],
    classes: int,
    *,
    erase_probability: float,
    seed: int,
    device: torch.device,
    host: HostStage | None = None,
) -> Batch:
    """Random images and uniform labels on the device, which the seed determines.

    Args:
        erase_probability: of a box of a quarter of the image; 0 for a batch without boxes.
        host: the loader workers' preparation of a batch (`build.prepare_on_host`), applied here once.
    """
    generator = torch.Generator().manual_seed(seed)
    size = Size.of(image_size)
    shape = (count, *size, 3)
    erase_B4 = None
    if erase_probability > 0:
        side = min(size) // 2
        erase_B4 = torch.randint(0, min(size) - side + 1, (count, 4), generator=generator)
        erase_B4[:, 2:] = side
        erase_B4 *= (torch.rand(count, 1, generator=generator) < erase_probability).long()
    batch = Batch(
        images_BHWC=torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8),
        labels_B=torch.randint(0, classes, (count,), generator=generator),
        indices_B=torch.arange(count),
        erase_B4=erase_B4,
    )
    return (batch if host is None else host(batch, seed)).to(device)
