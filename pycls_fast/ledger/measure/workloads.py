"""What can be timed: the training step, the inference forward pass, the input pipeline, training fed by it.

Each part runs a few steps at a time, so that several variants of a configuration can alternate.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass
from itertools import repeat
from typing import Literal, Protocol

import torch
from torch import Tensor, nn

from pycls_fast import build
from pycls_fast.config import RunConfig
from pycls_fast.data.batch import Batch, HostStage
from pycls_fast.data.prepare import IN_FLIGHT, to_device
from pycls_fast.data.sources.base import Images
from pycls_fast.ledger.measure.clocks import synchronize, timed
from pycls_fast.parallel import World, uncompiled
from pycls_fast.speed import Speed
from pycls_fast.train.metrics import StepMemory, TrainMetrics
from pycls_fast.train.step import Step

PartName = Literal["train", "inference", "loader", "both"]


@dataclass(frozen=True)
class Turn:
    """A few consecutive steps.

    Attributes:
        seconds: time of each step.
        total: time of all steps in seconds.
        waited: time in seconds that the host waited for batches.
        first_batch: seconds from starting the input pipeline to its first batch on the device.
    """

    seconds: tuple[float, ...]
    total: float
    waited: float = 0.0
    first_batch: float | None = None


class Part(Protocol):
    """Something that can be stepped and timed."""

    images_per_step: int
    """Images of all ranks together."""

    def warm_up(self, steps: int) -> None:
        """Run steps that do not count."""

    def turn(self, steps: int) -> Turn:
        """Time steps of this rank."""


def slowest(turn: Turn, world: World) -> Turn:
    """The turn of the whole run: a step ends when the slowest rank is done."""
    turns = world.gather(turn)
    firsts = [t.first_batch for t in turns if t.first_batch is not None]
    return Turn(
        seconds=tuple(max(each) for each in zip(*(t.seconds for t in turns), strict=True)),
        total=max(t.total for t in turns),
        waited=max(t.waited for t in turns),
        first_batch=max(firsts, default=None),
    )


class Trainer:
    """The training step of `train_net.py` with a step counter, shared by the parts that train."""

    def __init__(self, step: Step, world: World, switches: Speed) -> None:
        self.step = step
        self.metrics = TrainMetrics(world.device, read=switches.metrics)
        self.compiled = switches.compile != "off"
        self._done = 0

    def __call__(self, microbatches: Iterable[Batch]) -> None:
        """Run one step, which takes its microbatches one by one."""
        self.step(self._done, microbatches, self.metrics)
        self._done += 1


class TrainPart:
    """Training steps on one microbatch that is already on the device, `accumulation_steps` times in each step.

    Training does not hold all microbatches of a step in memory either.
    """

    def __init__(self, trainer: Trainer, microbatch: Batch, accumulation_steps: int, world: World) -> None:
        self.images_per_step = len(microbatch) * accumulation_steps * world.data_size
        self._trainer = trainer
        self._microbatch = microbatch
        self._accumulation_steps = accumulation_steps
        self._device = world.device
        self.memory = StepMemory(world, compiled=trainer.compiled)

    def warm_up(self, steps: int) -> None:
        """Run steps that do not count, in which kernels are chosen and the optimizer's state is allocated."""
        for _ in range(steps):
            with self.memory.counting(self._trainer.step.held):
                self._step()

    def turn(self, steps: int) -> Turn:
        """Time steps."""
        seconds = timed(self._step, steps, self._device)
        return Turn(tuple(seconds), sum(seconds))

    def _step(self) -> None:
        self._trainer(repeat(self._microbatch, self._accumulation_steps))


class InferencePart:
    """The forward pass of evaluation, uint8 images to logits, on one batch that is already on the device."""

    def __init__(self, network: nn.Module, step: Step, batch: Batch, world: World) -> None:
        self.images_per_step = len(batch) * world.data_size
        self._network = network
        self._step = step
        self._batch = batch
        self._device = world.device

    @torch.no_grad()
    def forward(self) -> Tensor:
        """Logits (B, K), computed as in `train/evaluate.py`."""
        with uncompiled(self._network), self._step.autocast():
            logits_BK: Tensor = self._network(self._step.prepare(self._batch))
        return logits_BK

    def warm_up(self, steps: int) -> None:
        """Run passes that do not count."""
        self.turn(steps)

    def turn(self, steps: int) -> Turn:
        """Time passes in evaluation mode, then restore the network's mode."""
        was_training = self._network.training
        self._network.eval()
        try:
            seconds = timed(self.forward, steps, self._device)
        finally:
            self._network.train(was_training)
        return Turn(tuple(seconds), sum(seconds))


class StepRange:
    """Hands out disjoint ranges of training steps, so that no turn finds its images in the page cache."""

    def __init__(self) -> None:
        self._next = 0

    def take(self, count: int) -> int:
        """The first of `count` unused steps."""
        first = self._next
        self._next += count
        return first


class _Feed:
    """The microbatches of consecutive steps, each loaded when it is asked for, as in training.

    Attributes:
        first_batch: seconds until the first microbatch was on the device.
        waited: seconds that the host waited for microbatches; may be reset.
    """

    def __init__(self, microbatches: Iterator[Batch], accumulation_steps: int, device: torch.device) -> None:
        self.first_batch: float | None = None
        self.waited = 0.0
        self._microbatches = microbatches
        self._accumulation_steps = accumulation_steps
        self._device = device

    def step(self) -> Iterator[Batch]:
        """The microbatches of the next step."""
        for _ in range(self._accumulation_steps):
            asked = time.perf_counter()
            batch = next(self._microbatches)
            if self.first_batch is None:
                synchronize(self._device)
                self.first_batch = time.perf_counter() - asked
            self.waited += time.perf_counter() - asked
            yield batch


class LoaderPart:
    """The input pipeline: workers, collation, the copy to the device; with a trainer, training fed by it.

    Every turn starts its own workers, as two live loaders would compete for cores. Batches arrive in bursts of one
    per worker, so a turn is a whole number of bursts, and only its mean is used.

    Workers load ahead: a turn begins when they are as far ahead as they get, is long compared with that, and ends while
    they still load. Otherwise it would count batches that were made before it, all of them if many workers share few
    cores.
    """

    def __init__(
        self,
        config: RunConfig,
        source: Images,
        switches: Speed,
        world: World,
        order: StepRange,
        trainer: Callable[[Iterator[Batch]], object] | None = None,
    ) -> None:
        self.images_per_step = config.data.global_batch_size
        self._config = config
        self._source = source
        self._switches = switches
        self._world = world
        self._order = order
        self._use = trainer or _use_up
        self._warm_up_steps = 1
        workers, per_step = build.num_workers(config), config.optim.microbatches
        # In steps: the microbatches that workers have ready or in progress.
        self._ahead = -(-(workers * config.data.prefetch_factor) // per_step)
        self._burst = max(1, workers)

    def whole_bursts(self, steps: int) -> int:
        """`steps`, rounded up to a multiple of the number of workers."""
        return -(-max(steps, 1) // self._burst) * self._burst

    def warm_up(self, steps: int) -> None:
        """Only store the number: each turn warms up after starting its workers."""
        self._warm_up_steps = steps

    def turn(self, steps: int) -> Turn:
        """Start the workers, warm up, time, stop the workers."""
        steps = self.whole_bursts(max(steps, self._ahead))
        warm_up_steps = self.whole_bursts(max(self._warm_up_steps, self._ahead + 1))
        with closing(self._microbatches(warm_up_steps + steps + self._ahead + IN_FLIGHT)) as microbatches:
            feed = _Feed(microbatches, self._config.optim.microbatches, self._world.device)
            for _ in range(warm_up_steps):
                self._use(feed.step())
            feed.waited = 0.0
            seconds = timed(lambda: self._use(feed.step()), steps, self._world.device)
        return Turn(tuple(seconds), sum(seconds), feed.waited, feed.first_batch)

    def _microbatches(self, steps: int) -> Generator[Batch]:
        start = self._order.take(steps)
        loader = build.train_loader(
            self._config, self._source, self._world, self._switches, start_step=start, steps=start + steps
        )
        yield from to_device(loader, self._world.device, mode=self._switches.input_copy)


def _use_up(microbatches: Iterator[Batch]) -> None:
    deque(microbatches, maxlen=0)


def synthetic_batch(
    count: int,
    image_size: int,
    classes: int,
    *,
    erase_probability: float,
    seed: int,
    device: torch.device,
    host: HostStage | None = None,
) -> Batch:
    """Random images and labels on the device, with boxes to erase if training has them.

    Args:
        count: images.
        image_size: side in pixels.
        classes: labels are uniform in 0..classes-1.
        erase_probability: probability of a box of a quarter of the image; 0 for a batch without boxes.
        seed: determines everything random.
        device: where the batch is put.
        host: the loader workers' preparation of a batch (`build.prepare_on_host`), applied here once.
    """
    generator = torch.Generator().manual_seed(seed)
    shape = (count, image_size, image_size, 3)
    erase_B4 = None
    if erase_probability > 0:
        side = image_size // 2
        erase_B4 = torch.randint(0, image_size - side + 1, (count, 4), generator=generator)
        erase_B4[:, 2:] = side
        erase_B4 *= (torch.rand(count, 1, generator=generator) < erase_probability).long()
    batch = Batch(
        images_BHWC=torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8),
        labels_B=torch.randint(0, classes, (count,), generator=generator),
        indices_B=torch.arange(count),
        erase_B4=erase_B4,
    )
    return (batch if host is None else host(batch, seed)).to(device)
