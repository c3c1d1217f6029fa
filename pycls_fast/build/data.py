"""From the data's configuration to sources, loaders and what happens to a batch."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from pycls_fast.build.device import DTYPES, Switches, level
from pycls_fast.config.schema import RunConfig
from pycls_fast.counter import counter_seed
from pycls_fast.data import (
    EvalSampler,
    EvalTransform,
    ImageDataset,
    ImageLoader,
    Mixer,
    Prepare,
    PrepareOnHost,
    Source,
    SyntheticSource,
    TrainSampler,
    TrainTransform,
    make_loader,
    open_folder,
    write_digits,
)
from pycls_fast.errors import UserError
from pycls_fast.parallel import World
from pycls_fast.speed import SwitchName

# Streams of randomness that must not repeat one another's draws, nor that of the initial weights (1).
_SYNTHETIC_TRAIN, _SYNTHETIC_VAL = 2, 3


def sources(config: RunConfig, world: World) -> dict[str, Source]:
    """The splits by name, "train" and "val" among them.

    Raises:
        UserError: data that is missing or in a layout that is not understood.
    """
    data = config.data
    if data.source == "synthetic":
        size, classes = data.image_size, data.synthetic_classes
        train_seed, val_seed = (counter_seed(config.seed, s) for s in (_SYNTHETIC_TRAIN, _SYNTHETIC_VAL))
        return {
            "train": SyntheticSource(data.synthetic_train_images, size, classes, train_seed),
            "val": SyntheticSource(data.synthetic_val_images, size, classes, val_seed),
        }
    if data.root is None:
        raise UserError("data.root: not set; give the folder with the images as data.root=PATH")
    root = Path(data.root).expanduser()
    if data.source == "digits":
        if world.is_main:
            write_digits(root)
        world.barrier()
    try:
        return open_folder(root, val_fraction=data.val_fraction, split_seed=data.split_seed)
    except UserError as error:
        raise UserError(*(f"data.root: {line}" for line in error.lines)) from error


def train_loader(
    config: RunConfig, source: Source, world: World, chosen: Switches, *, start_step: int, steps: int
) -> ImageLoader:
    """Microbatches of this rank from `start_step` up to `steps`."""
    augment = config.augment
    transform = TrainTransform(
        image_size=config.data.image_size,
        crop=augment.crop,
        scale=augment.scale,
        ratio=augment.ratio,
        pad=augment.pad,
        interpolation=augment.interpolation,
        hflip=augment.hflip,
        rand_augment=(augment.rand_augment.num_ops, augment.rand_augment.magnitude) if augment.rand_augment else None,
        erase_probability=augment.erase_probability,
    )
    sampler = TrainSampler(
        len(source),
        seed=config.seed,
        global_batch_size=config.data.global_batch_size,
        rank=world.rank,
        world_size=world.size,
        start_step=start_step,
        total_steps=steps,
        accumulation_steps=config.optim.accumulation_steps,
    )
    host = prepare_on_host(config, chosen)
    dataset = ImageDataset(source, transform, seed=config.seed, training=True, host=host)
    return _loader(config, dataset, sampler, world)


def eval_loader(config: RunConfig, source: Source, world: World, chosen: Switches) -> ImageLoader:
    """This rank's share of a split, every image once over all ranks."""
    augment = config.augment
    transform = EvalTransform(
        image_size=config.data.image_size,
        crop_ratio=augment.eval_crop_ratio,
        interpolation=augment.interpolation,
    )
    batch_size = config.data.eval_batch_size or microbatch_size(config, world)
    sampler = EvalSampler(len(source), batch_size=batch_size, rank=world.rank, world_size=world.size)
    host = prepare_on_host(config, chosen)
    dataset = ImageDataset(source, transform, seed=config.seed, training=False, host=host)
    return _loader(config, dataset, sampler, world)


def _loader(config: RunConfig, dataset: ImageDataset, sampler: TrainSampler | EvalSampler, world: World) -> ImageLoader:
    return make_loader(
        dataset,
        sampler,
        num_workers=num_workers(config),
        pin_memory=world.device.type == "cuda",
        prefetch_factor=config.data.prefetch_factor,
    )


def num_workers(config: RunConfig) -> int:
    """Loading processes of this rank: as configured, else its share of the cores that the run may use, 16 at most."""
    if config.data.num_workers is not None:
        return config.data.num_workers
    ranks_here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return min(max(len(os.sched_getaffinity(0)) // ranks_here, 1), 16)


def microbatch_size(config: RunConfig, world: World) -> int:
    """Images of one forward pass on one rank.

    Raises:
        UserError: the global batch cannot be divided.
    """
    parts = world.size * config.optim.accumulation_steps
    if config.data.global_batch_size % parts:
        below = max(config.data.global_batch_size // parts, 1) * parts
        raise UserError(
            f"data.global_batch_size: {config.data.global_batch_size} is not divisible by {world.size} ranks x "
            f"optim.accumulation_steps={config.optim.accumulation_steps}; use {below} or {below + parts}"
        )
    return config.data.global_batch_size // parts


def prepare(config: RunConfig, device: torch.device, chosen: Switches) -> Prepare:
    """Batches on the device, prepared or not, to the model's input."""
    return Prepare(
        config.data.mean,
        config.data.std,
        dtype=DTYPES[level(config).weights],
        erase_value=config.augment.erase_value,
        memory_format=chosen[SwitchName.MEMORY_FORMAT],  # type: ignore[arg-type]  # a Literal in the schema
        device=device,
    )


def prepare_on_host(config: RunConfig, chosen: Switches) -> PrepareOnHost | None:
    """What the loader's workers do to whole batches, or None where the device does it all."""
    if chosen[SwitchName.NORMALIZE_ON] == "device":
        return None
    prepare = Prepare(config.data.mean, config.data.std, erase_value=config.augment.erase_value)
    return PrepareOnHost(
        prepare,
        erase=chosen[SwitchName.ERASE_ON] == "cpu",
        mixer=mixer(config) if chosen[SwitchName.MIX_ON] == "cpu" else None,
    )


def mixer(config: RunConfig) -> Mixer | None:
    """Mixup and CutMix, or None when both are off. Batches that come mixed from the host are left alone."""
    augment = config.augment
    made = Mixer(
        mixup_alpha=augment.mixup_alpha,
        cutmix_alpha=augment.cutmix_alpha,
        switch_probability=augment.mix_switch_probability,
        probability=augment.mix_probability,
    )
    return made if made.enabled else None
