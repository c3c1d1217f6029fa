"""Batches on several ranks: images per forward pass, steps per epoch, and whether there are enough images to mix."""

from __future__ import annotations

from pycls_fast.config.run import RunConfig
from pycls_fast.errors import UserError
from pycls_fast.parallel import World


def microbatch_size(config: RunConfig, world: World, *, resumes: bool = False) -> int:
    """Number of images in one forward pass on one rank.

    Args:
        resumes: whether the run continues from a checkpoint, and so has to keep its global batch.

    Raises:
        UserError: the global batch cannot be divided.
    """
    batch, accumulation = config.data.global_batch_size, config.optim.microbatches
    parts = world.data_size * accumulation
    if batch % parts:
        below = max(batch // parts, 1) * parts
        way_out = _same_batch(batch, world.data_size, accumulation) if resumes else f"use {below} or {below + parts}"
        raise UserError(
            f"data.global_batch_size: {batch} is not divisible by {world.data_size} ranks x "
            f"optim.accumulation_steps={accumulation}; {way_out}"
        )
    return batch // parts


def _same_batch(batch: int, ranks: int, accumulation: int) -> str:
    """How to keep a global batch that is not divisible by `ranks` x `accumulation`."""
    images, rest = divmod(batch, ranks)
    if rest == 0:
        # The next smaller microbatch, or one image.
        steps = next((steps for steps in range(accumulation, images) if images % steps == 0), images)
        return f"use optim.accumulation_steps={steps}"
    # The configuration is refused if this is not a whole number.
    share = batch // accumulation
    usable = [count for count in range(1, share + 1) if share % count == 0]
    near = [max((n for n in usable if n < ranks), default=None), min((n for n in usable if n > ranks), default=None)]
    return f"this run keeps its batch: run it on {' or '.join(str(count) for count in near if count)} ranks"


def steps_per_epoch(config: RunConfig, images: int) -> int:
    """Number of whole global batches in a training set of so many images.

    Raises:
        UserError: there is not even one.
    """
    batch = config.data.global_batch_size
    if images < batch:
        raise UserError(
            f"data.global_batch_size: {batch} is larger than the training set of {images} images; use a smaller one"
        )
    return images // batch


def check_mixing(config: RunConfig, world: World) -> None:
    """Check that a microbatch has enough images to mix: mixing is among the images of one rank's forward pass.

    Raises:
        UserError: the microbatch is a single image, or an odd number of images to mix in pairs.
    """
    if not config.augment.mixes:
        return
    images, batch = microbatch_size(config, world), config.data.global_batch_size
    parts = f"{world.data_size} ranks x optim.accumulation_steps={config.optim.microbatches}"
    if images == 1:
        key = "mixup_alpha" if config.augment.mixup_alpha else "cutmix_alpha"
        raise UserError(
            f"augment.{key}: mixing needs at least 2 images in a microbatch; data.global_batch_size={batch} leaves one "
            f"to each of {parts}; use data.global_batch_size={2 * batch}, fewer parts, or augment.mix_probability=0"
        )
    if config.augment.mix_mode == "pair" and images % 2:
        raise UserError(
            f"augment.mix_mode: pair needs an even number of images in a microbatch; data.global_batch_size={batch} "
            f"leaves {images} to each of {parts}; use batch or elem"
        )


def total_steps(config: RunConfig, steps_per_epoch: int) -> int:
    """The length of the run in steps, if it does not stop early."""
    whole, most = config.schedule.epochs * steps_per_epoch, config.schedule.max_steps
    return whole if most is None else min(whole, most)
