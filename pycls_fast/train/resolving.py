"""Values of the configuration that depend on the weights, the data or a checkpoint, replaced by what they stand for.

The order matters: `weights` is pinned to a commit before anything is read from there, also by `data.normalization`.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from pycls_fast import build
from pycls_fast.config.schema import RunConfig
from pycls_fast.config.schema.values import AUTO
from pycls_fast.parallel import World
from pycls_fast.train.checkpoint import Checkpoint
from pycls_fast.train.normalization import resolve_normalization
from pycls_fast.train.pinning import pin_weights


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
    config = pin_weights(with_saved_batch(config, resumed_from), world, resumed_from)
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
    note: Callable[[str], None],
) -> RunConfig:
    """The configuration with every `auto`, and the weights' mean and standard deviation, as numbers.

    Args:
        config: from `before_data`.
        images: number of images in the training split (for scoring: in the one that is scored).
        world: the ranks.
        resumed_from: as for `before_data`.
        note: reports weights whose mean and standard deviation are not known.

    Raises:
        UserError: see `build.resolve_auto` and `resolve_normalization`.
    """
    config = build.resolve_auto(config, images, world)
    return resolve_normalization(config, world, resumed_from, note=note)


def with_saved_batch(config: RunConfig, resumed_from: Checkpoint | None) -> RunConfig:
    """The configuration with the checkpoint's global batch in place of `auto`, which depends on the number of ranks."""
    if resumed_from is None or config.data.global_batch_size != AUTO:
        return config
    batch = resumed_from.plain["config"]["data"]["global_batch_size"]
    return config.with_values(data={"global_batch_size": batch})
