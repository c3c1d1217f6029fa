"""Settings that are `auto`: batch size, epochs and evaluation interval, chosen from the number of training images."""

from __future__ import annotations

from pycls_fast.build.network import counted_model
from pycls_fast.config.run import RunConfig
from pycls_fast.errors import UserError
from pycls_fast.optim.groups import BATCH_NORM
from pycls_fast.parallel.world import World
from pycls_fast.plan.memory_plan import with_accumulation
from pycls_fast.values import AUTO, AUTO_EPOCHS

# After the head was fitted, all layers of EfficientNet-Lite0 gained 5 to 16 points of top-1 in 160 steps of 32 images,
# on 200 to 1,100 CIFAR-10 images.
_STEPS = 160
_EPOCHS = (10, 50)
# Batches of fewer images than this in all say little about statistics that the weights took from a million.
_TRAINS_BATCH_NORM = 20_000
_LAYER_DECAY = 0.75
_LARGEST_BATCH = 64
_STEPS_PER_EPOCH = 4
_EVALUATIONS = 20
_WARMUP_SHARE, _LONGEST_WARMUP = 0.1, 2.0


def resolve_auto(config: RunConfig, images: int, world: World, *, classes: int | None = None) -> RunConfig:
    """The configuration with every `auto` replaced by a number; unchanged if there is none.

    - `schedule.epochs`: enough for 160 steps, at least 10 and at most 50.
    - `optim.layer_decay`, `optim.batch_norm`: see the schema.
    - `schedule.warmup_epochs`: a tenth of the epochs, at most 2.
    - `data.global_batch_size`: the largest power of two up to 64 that gives an epoch at least 4 steps, but at least 2
      images per rank and microbatch if there are enough. (With 3 ranks 3 times a power of two, and so on.)
    - `runtime.eval_every_epochs`: at most 20 evaluations in all.
    - `optim.accumulation_steps`: see `with_accumulation`.

    `images` are those of the training split, `classes` those in the data, if they are known.

    Raises:
        UserError: the warm-up is longer than the training, or no microbatch fits into memory.
    """
    epochs, warmup = config.schedule.epochs, config.schedule.warmup_epochs
    batch, every = config.data.global_batch_size, config.runtime.eval_every_epochs
    if batch == AUTO:
        batch = _batch(images, world.data_size * config.optim.microbatches)
    if epochs == AUTO:
        epochs = epochs_of(images, batch)
        if warmup > epochs:
            raise UserError(
                f"schedule.warmup_epochs: {warmup:g} is longer than the training of {epochs} epochs that "
                f"schedule.epochs=auto chose for {images:,} images; set one of the two"
            )
    if warmup == AUTO_EPOCHS:
        warmup = min(epochs * _WARMUP_SHARE, _LONGEST_WARMUP)
    if every == AUTO:
        every = -(-epochs // _EVALUATIONS)
    batch_norm = config.optim.batch_norm
    if batch_norm == "auto":
        batch_norm = "frozen" if images < _TRAINS_BATCH_NORM else "train"
    config = config.with_values(
        schedule={"epochs": epochs, "warmup_epochs": warmup},
        data={"global_batch_size": batch},
        runtime={"eval_every_epochs": every},
        optim={"layer_decay": _layer_decay(config, classes), "batch_norm": batch_norm},
    )
    return with_accumulation(config, world, classes)


def epochs_of(images: int, batch: int) -> int:
    """What `schedule.epochs=auto` means for this number of training images."""
    low, high = _EPOCHS
    steps_per_epoch = max(images // batch, 1)
    return min(max(-(-_STEPS // steps_per_epoch), low), high)


def _layer_decay(config: RunConfig, classes: int | None) -> float | None:
    if config.optim.layer_decay != "auto":
        return config.optim.layer_decay
    network = counted_model(config, config.model.num_classes or classes or 2)
    decays = network.layers() and not any(isinstance(module, BATCH_NORM) for module in network.modules())
    return _LAYER_DECAY if decays else None


def _batch(images: int, parts: int) -> int:
    most = max(min(_LARGEST_BATCH, images // _STEPS_PER_EPOCH), 1)
    batch = parts
    while batch * 2 <= most or (batch == parts and batch * 2 <= images):
        batch *= 2
    return batch
