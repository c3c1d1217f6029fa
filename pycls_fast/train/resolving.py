"""Values of the configuration that depend on the weights, the data or a checkpoint, replaced by what they stand for.

The order matters: `weights` is pinned to a commit before anything is read from there, also by `data.normalization`.
"""

from __future__ import annotations

from collections.abc import Callable

from pycls_fast import build
from pycls_fast.config.schema import RunConfig
from pycls_fast.config.schema.values import AUTO
from pycls_fast.parallel import World
from pycls_fast.train.checkpoint import Checkpoint
from pycls_fast.train.normalization import resolve_normalization
from pycls_fast.train.pinning import pin_weights


def before_data(config: RunConfig, world: World, resumed_from: Checkpoint | None = None) -> RunConfig:
    """The configuration with the commit of `weights`, and with the global batch of the checkpoint; all ranks call this.

    Args:
        config: the user's.
        world: the ranks.
        resumed_from: the checkpoint from which a run resumes.

    Raises:
        UserError: see `pin_weights`.
    """
    return pin_weights(with_saved_batch(config, resumed_from), world, resumed_from)


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
