"""The input pipeline's time per image by stage: read, decode, augment, collate, copy.

Measured in this process on one core, in wall time, with the same dataset that the workers use. Decoding includes crop
and resize, which the decoders do in one step; augmenting is what follows, including random draws and whatever the
workers do to whole batches.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch

from pycls_fast import build
from pycls_fast.config import RunConfig
from pycls_fast.data.batch import Batch
from pycls_fast.data.dataset import ImageDataset
from pycls_fast.data.loader import ImageLoader
from pycls_fast.data.sampling import Keys
from pycls_fast.data.sources.base import Images
from pycls_fast.ledger.measure.clocks import synchronize
from pycls_fast.ledger.report.statistics import spread
from pycls_fast.parallel.world import World
from pycls_fast.speed import Speed

STAGES = ("read", "decode", "augment", "collate", "copy")
_AT_MOST = 256


@dataclass
class _Clock:
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(STAGES, 0.0))

    @contextmanager
    def during(self, stage: str) -> Iterator[None]:
        """Count the time inside towards a stage."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[stage] += time.perf_counter() - start

    def timed(self, stage: str, call: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """A function whose calls count towards a stage."""

        def timed(argument: Any) -> Any:
            with self.during(stage):
                return call(argument)

        return timed


class _Timed:
    """An object with other methods."""

    def __init__(self, plain: Any, **methods: Callable[[Any], Any]) -> None:
        self._plain = plain
        vars(self).update(methods)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._plain, name)

    def __len__(self) -> int:
        return len(self._plain)


def measure_stages(
    config: RunConfig, source: Images, world: World, switches: Speed, *, start: int, repeats: int
) -> dict[str, Any]:
    """Images per second of each stage on one core and of the whole pipeline, and the stage that limits it.

    Args:
        switches: the resolved ones.
        start: the first training step to take images from; later epochs follow if this one ends.
        repeats: batches to time, after one for warming up.

    Returns:
        `stages`: for each its `seconds_per_image` (median over batches), `images_per_second` on one core and its
        `share` of the time; `images_per_second_per_core` of a worker (all but the copy), `images_per_second_expected`
        of all workers together on the cores that there are (more workers than cores only read more at once), or of the
        copy if that is slower, `limit`: the stage, and `images`: how many were timed.
    """
    samples: dict[str, list[float]] = {stage: [] for stage in STAGES}
    loader = build.train_loader(config, source, world, switches, start_step=start, steps=start + repeats + 1)
    keys = cast(Iterator[Keys], iter(loader.batch_sampler))  # type: ignore[arg-type]  # DataLoader's is optional
    images = 0
    for repeat in range(repeats + 1):
        clock = _Clock()
        microbatch = next(keys)
        chosen = Keys(microbatch[:_AT_MOST], microbatch.seed)
        _one_batch(loader, chosen, world, clock)
        if repeat:
            images += len(chosen)
            for stage, seconds in clock.seconds.items():
                samples[stage].append(seconds / len(chosen))
    workers = build.num_workers(config)
    return {**_summary(samples, workers, build.cores_per_rank(), world.data_size), "images": images}


def _one_batch(loader: ImageLoader, keys: Keys, world: World, clock: _Clock) -> None:
    own = cast(ImageDataset, loader.dataset)

    def open_picture(data: Any) -> Any:
        picture = clock.timed("decode", own.open_picture)(data)
        return _Timed(picture, crop=clock.timed("decode", picture.crop))

    source = cast(Images, _Timed(own.source, read=clock.timed("read", own.source.read)))
    dataset = replace(own, source=source, open_picture=open_picture)
    start = time.perf_counter()
    batch = dataset.__getitems__(keys)
    whole = time.perf_counter() - start
    if not isinstance(batch, Batch):
        raise batch
    with clock.during("collate"):
        # In the workers it is the copy of the samples into the batch.
        room = torch.empty_like(batch.images_BHWC)
        for row, image in zip(room.numpy(), batch.images_BHWC.numpy(), strict=True):
            row[...] = image
    clock.seconds["augment"] = max(whole - sum(clock.seconds.values()), 0.0)
    if world.device.type == "cuda":
        batch = batch.pin_memory()
    synchronize(world.device)
    with clock.during("copy"):
        batch.to(world.device)
        synchronize(world.device)


def _summary(samples: dict[str, list[float]], workers: int, cores: int, ranks: int) -> dict[str, Any]:
    seconds = {stage: spread(values).p50 for stage, values in samples.items()}
    by_worker = {stage: value for stage, value in seconds.items() if stage != "copy"}
    per_core = 1 / sum(by_worker.values())
    computing = sum(by_worker.values()) - by_worker["read"]
    # Reading may be waiting, for a network disk say.
    by_cores = cores / computing if computing > 0 else float("inf")
    by_workers = per_core * max(workers, 1)
    loading = min(by_workers, by_cores) * ranks
    copying = ranks / seconds["copy"] if seconds["copy"] > 0 else float("inf")
    limiting = [stage for stage in by_worker if stage != "read" or by_workers <= by_cores]
    slowest = max(limiting, key=lambda stage: by_worker[stage])
    return {
        "stages": {
            stage: {
                "seconds_per_image": value,
                "images_per_second": 1 / value if value > 0 else None,
                "share": value / sum(seconds.values()),
            }
            for stage, value in seconds.items()
        },
        "images_per_second_per_core": per_core,
        "images_per_second_expected": min(loading, copying),
        "limit": slowest if loading <= copying else "copy",
    }
