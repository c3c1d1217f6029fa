"""Settings that are `auto`: batch size, epochs and evaluation interval, chosen from the number of training images."""

from __future__ import annotations

from pycls_fast.config.schema import RunConfig
from pycls_fast.config.schema.values import AUTO, AUTO_EPOCHS
from pycls_fast.errors import UserError
from pycls_fast.parallel import World

# Enough images to train a new head on a pretrained backbone; more epochs of a small dataset gain little.
_IMAGES = 100_000
_EPOCHS = (10, 50)
_LARGEST_BATCH = 64
_STEPS_PER_EPOCH = 4
_EVALUATIONS = 20
_WARMUP_SHARE, _LONGEST_WARMUP = 0.1, 2.0


def resolve_auto(config: RunConfig, images: int, world: World) -> RunConfig:
    """The configuration with every `auto` replaced by a number; unchanged if there is none.

    - `schedule.epochs`: enough to show 100,000 images, at least 10 and at most 50.
    - `schedule.warmup_epochs`: a tenth of the epochs, at most 2.
    - `data.global_batch_size`: the largest power of two up to 64 that gives an epoch at least 4 steps, but at least 2
      images per rank and microbatch if there are so many. (With 3 ranks 3 times a power of two, and so on.)
    - `runtime.eval_every_epochs`: at most 20 evaluations in all.

    Args:
        config: the run's configuration.
        images: number of images in the training split.
        world: the ranks.

    Raises:
        UserError: the warm-up is longer than the training.
    """
    epochs, warmup = config.schedule.epochs, config.schedule.warmup_epochs
    batch, every = config.data.global_batch_size, config.runtime.eval_every_epochs
    if epochs == AUTO:
        epochs = _epochs(images)
        if warmup > epochs:
            raise UserError(
                f"schedule.warmup_epochs: {warmup:g} is longer than the training of {epochs} epochs that "
                f"schedule.epochs=auto chose for {images:,} images; set one of the two"
            )
    if warmup == AUTO_EPOCHS:
        warmup = min(epochs * _WARMUP_SHARE, _LONGEST_WARMUP)
    if batch == AUTO:
        batch = _batch(images, world.size * config.optim.accumulation_steps)
    if every == AUTO:
        every = -(-epochs // _EVALUATIONS)
    return config.with_values(
        schedule={"epochs": epochs, "warmup_epochs": warmup},
        data={"global_batch_size": batch},
        runtime={"eval_every_epochs": every},
    )


def _epochs(images: int) -> int:
    low, high = _EPOCHS
    return min(max(-(-_IMAGES // max(images, 1)), low), high)


def _batch(images: int, parts: int) -> int:
    most = max(min(_LARGEST_BATCH, images // _STEPS_PER_EPOCH), 1)
    batch = parts
    while batch * 2 <= most or (batch == parts and batch * 2 <= images):
        batch *= 2
    return batch
