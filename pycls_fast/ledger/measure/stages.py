"""The input pipeline's time per image by stage: read, decode, augment, collate, copy.

It is measured in this process on one core, in wall time, with the same dataset that the workers use. Decoding includes
crop and resize, which the decoders do in one step; augmenting is what follows, including random draws and whatever the
workers do to whole batches.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from copy import copy
from dataclasses import replace
from itertools import islice
from typing import Any, cast

import torch

from pycls_fast import build
from pycls_fast.config import RunConfig
from pycls_fast.data.batch import Batch
from pycls_fast.data.dataset import ImageDataset
from pycls_fast.data.loader import ImageLoader
from pycls_fast.data.sampling import Keys
from pycls_fast.data.sources.base import Images
from pycls_fast.ledger.measure.device import synchronize
from pycls_fast.ledger.report.statistics import spread
from pycls_fast.parallel.world import World
from pycls_fast.speed import Speed

STAGES = ("read", "decode", "augment", "collate", "copy")
_AT_MOST = 256


def measure_stages(
    config: RunConfig, source: Images, world: World, switches: Speed, *, start: int, repeats: int
) -> dict[str, Any]:
    """Images per second of each stage on one core and of the whole pipeline, and the stage that limits it.

    Args:
        start: the first training step to take images from; later epochs follow if this one ends.
        repeats: batches to time, after one for warming up.

    Returns:
        `stages`: for each its `seconds_per_image` (median over batches), `images_per_second` on one core and its
        `share` of the time; `images_per_second_per_core` of a worker (all but the copy), `images_per_second_expected`
        of all workers together on the cores that there are (more workers than cores only read more at once), or of the
        copy if that is slower, `limit`: the stage, and `images`: how many were timed.
    """
    loader = build.train_loader(config, source, world, switches, start_step=start, steps=start + repeats + 1)
    assert loader.batch_sampler is not None
    batches = cast(Iterator[Keys], iter(loader.batch_sampler))
    keys = [Keys(batch[:_AT_MOST], batch.seed) for batch in islice(batches, repeats + 1)]
    _, *took = [(len(each), _time_batch(loader, each, world)) for each in keys]
    samples = {stage: [seconds[stage] / images for images, seconds in took] for stage in STAGES}
    summary = _summary(samples, build.num_workers(config), build.cores_per_rank(), world.data_size)
    return {**summary, "images": sum(images for images, _ in took)}


def _time_batch(loader: ImageLoader, keys: Keys, world: World) -> dict[str, float]:
    """Load one batch; returns the seconds of each stage."""
    own, took = cast(ImageDataset, loader.dataset), dict.fromkeys(STAGES, 0.0)

    def timed(stage: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """The function, which adds the seconds of each call to its stage's."""

        def call_and_add(*arguments: Any) -> Any:
            start = time.perf_counter()
            try:
                return call(*arguments)
            finally:
                took[stage] += time.perf_counter() - start

        return call_and_add

    def open_picture(data: Any) -> Any:
        picture = timed("decode", own.open_picture)(data)
        vars(picture)["crop"] = timed("decode", picture.crop)
        return picture

    def collate(batch: Batch) -> None:
        # In the workers, and so in the time of augmenting, it is the copy of the samples into the batch.
        room = torch.empty_like(batch.images_BHWC)
        for row, image in zip(room.numpy(), batch.images_BHWC.numpy(), strict=True):
            row[...] = image

    def to_device(batch: Batch) -> None:
        batch.to(world.device)
        synchronize(world.device)

    source = copy(own.source)
    vars(source)["read"] = timed("read", own.source.read)
    dataset = replace(own, source=source, open_picture=open_picture)
    batch = timed("augment", dataset.__getitems__)(keys)
    if not isinstance(batch, Batch):
        raise batch
    timed("collate", collate)(batch)
    took["augment"] = max(took["augment"] - took["read"] - took["decode"] - took["collate"], 0.0)
    if world.device.type == "cuda":
        batch = batch.pin_memory()
    synchronize(world.device)
    timed("copy", to_device)(batch)
    return took


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
