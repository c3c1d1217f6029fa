"""A few training steps without a run, for those who look at them: they begin and end as any training."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

from pycls_fast import build
from pycls_fast.config import RunConfig
from pycls_fast.data.batch import Batch
from pycls_fast.data.prepare import to_device
from pycls_fast.errors import UserError
from pycls_fast.parallel.world import World
from pycls_fast.train.assemble import build_parts
from pycls_fast.train.damaged import DamagedImages
from pycls_fast.train.display import Display
from pycls_fast.train.folder import output_file
from pycls_fast.train.metrics import TrainMetrics
from pycls_fast.train.run import Parts


@dataclass
class ShortTraining:
    """The parts of the training, the file for the result, and the microbatches, on the device."""

    parts: Parts
    world: World
    display: Display
    metrics: TrainMetrics
    file: Path
    batches: Iterator[Batch]
    done: int = field(default=0, init=False)

    def step(self) -> None:
        """Take the next training step."""
        self.world.at(f"computing step {self.done + 1}")
        self.parts.step(self.done, islice(self.batches, self.parts.config.optim.microbatches), self.metrics)
        self.done += 1


@contextmanager
def short_training(
    config: RunConfig, *, steps: int, output: str | Path, several_ranks: bool = False
) -> Iterator[ShortTraining]:
    """The microbatches of so many steps, and what takes them; damaged images are reported at the end.

    Raises:
        UserError: several ranks, an `output` that cannot be written, or anything that training would refuse.
    """
    with build.world(config) as world:
        if world.size > 1 and not several_ranks:
            raise UserError("WORLD_SIZE: a short training is looked at in one process; start without torchrun")
        file, display = output_file(output, world), Display(speaks=world.is_main, mode=config.runtime.progress)
        parts = build_parts(config, world, display)
        loader = build.train_loader(parts.config, parts.sources["train"], world, parts.speed, start_step=0, steps=steps)
        damaged = DamagedImages(config.data.max_damaged, world, display)
        batches = damaged.noting(to_device(loader, world.device, mode="blocking"))
        with closing(batches):
            metrics = TrainMetrics(world.device, read=parts.speed.metrics)
            yield ShortTraining(parts, world, display, metrics, file, batches)
        damaged.report()
