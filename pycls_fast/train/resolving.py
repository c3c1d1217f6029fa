"""Values of the configuration that depend on the weights, the data or a checkpoint, replaced by what they stand for.

The order matters: `weights` is pinned to a commit before anything is read from there, also by `data.normalization`.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from pycls_fast import build, plan
from pycls_fast.config.run import RunConfig
from pycls_fast.parallel import World
from pycls_fast.train.checkpoint import Checkpoint
from pycls_fast.train.normalization import resolve_normalization
from pycls_fast.train.pinning import pin_weights
from pycls_fast.values import AUTO


def before_data(config: RunConfig, world: World, resumed_from: Checkpoint | None = None) -> RunConfig:
    """The configuration with the commit of `weights`, its precision, and the global batch of the checkpoint.

    All ranks call this.

    Args:
        config: the user's.
        world: the ranks.
        resumed_from: the checkpoint from which a run resumes.

    Raises:
        UserError: see `pin_weights`.
    """
    config = pin_weights(with_saved_batch(config, world, resumed_from), world, resumed_from)
    return with_precision(config, world, resumed_from)


def with_precision(config: RunConfig, world: World, resumed_from: Checkpoint | None = None) -> RunConfig:
    """The configuration with a precision in place of `auto`, and with the number of threads; all ranks call this.

    A run that resumes keeps its own, so that it computes the same bits.
    """
    precision: Any = config.precision.name
    threads = config.runtime.threads
    if resumed_from is not None:
        saved = resumed_from.plain["config"]
        if precision == "auto":
            precision = saved["precision"]["name"]
        if threads is None and "OMP_NUM_THREADS" not in os.environ:
            threads = saved["runtime"]["threads"]
            threads = None if threads is None else min(threads, build.cores_per_rank())
        return config.with_values(precision={"name": precision}, runtime={"threads": threads})
    if world.device.type == "cuda":
        chosen: str = build.cuda_precision(world.device)
    else:
        race = build.shared_race(config, world)
        chosen, threads = race.format, threads or race.threads
    precision = chosen if precision == "auto" else precision
    return config.with_values(precision={"name": precision}, runtime={"threads": threads})


def after_data(
    config: RunConfig,
    images: int,
    world: World,
    resumed_from: Checkpoint | None = None,
    *,
    classes: int | None = None,
    note: Callable[[str], None],
) -> RunConfig:
    """The configuration with every `auto`, and the weights' mean and standard deviation, as numbers.

    Args:
        config: from `before_data`.
        images: number of images in the training split (for scoring: in the one that is scored).
        world: the ranks.
        resumed_from: as for `before_data`.
        classes: the number of classes in the data, if it is known.
        note: reports weights whose mean and standard deviation are not known.

    Raises:
        UserError: see `plan.resolve_auto` and `resolve_normalization`.
    """
    config = plan.resolve_auto(config, images, world, classes=classes)
    return resolve_normalization(config, world, resumed_from, note=note)


def with_saved_batch(config: RunConfig, world: World, resumed_from: Checkpoint | None) -> RunConfig:
    """The configuration with the checkpoint's global batch and microbatch in place of `auto`, which depend on the ranks
    and their devices: mixing and batch norm see the same images together.

    If the ranks are now so many that they cannot divide the checkpoint's microbatches, their number stays `auto`.
    """
    if resumed_from is None:
        return config
    saved = resumed_from.plain["config"]
    if config.data.global_batch_size == AUTO:
        config = config.with_values(data={"global_batch_size": saved["data"]["global_batch_size"]})
    if config.optim.accumulation_steps == AUTO:
        parts = resumed_from.plain["world_size"] // saved["parallel"].get("tensor_degree", 1)
        steps, rest = divmod(saved["optim"]["accumulation_steps"] * parts, world.data_size)
        if steps and not rest:
            config = config.with_values(optim={"accumulation_steps": steps})
    return config
