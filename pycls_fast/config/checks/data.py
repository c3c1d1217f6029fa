"""Checks of the data: where images come from, and how they are augmented and batched."""

from __future__ import annotations

from collections.abc import Iterator

from pycls_fast.config.checks.helpers import default_of, not_divisible
from pycls_fast.config.schema import ResNetModel, RunConfig, ViTModel


def source_problems(config: RunConfig) -> Iterator[tuple[str, str]]:
    """Where images come from, how they are divided and drawn."""
    data = config.data
    if data.val is not None and data.train is None and data.source != "hub":
        yield "data.val", "given without data.train; give both, or neither"
    for key in ("train", "val"):
        if getattr(data, key) is not None and data.source in ("folder", "packed", "cifar", "digits", "synthetic"):
            yield f"data.{key}", f"data.source={data.source} has folders of fixed names; use data.{key}=null"
    if data.folds is None and data.fold:
        yield "data.fold", "chooses one of data.folds, which is not set; give data.folds=5, say"
    if data.folds is not None and data.fold >= data.folds:
        yield "data.fold", f"must be less than data.folds={data.folds}, counted from 0; got {data.fold}"
    if data.folds is not None and data.source in ("cifar", "synthetic"):
        yield "data.folds", f"data.source={data.source} has a validation split; use data.folds=null"
    if data.shard_cache_gib is not None and data.shard_cache is None:
        yield "data.shard_cache_gib", "limits a folder that is not set; give it as data.shard_cache=PATH"
    if data.sampling != "uniform" and data.shuffle == "blocks":
        yield (
            "data.sampling",
            f"{data.sampling} visits images in any order, but data.shuffle=blocks follows the order of shards; use "
            "data.shuffle=full or loss.class_weights=balanced",
        )
    if data.sampling != "uniform" and config.loss.class_weights != "none":
        yield (
            "loss.class_weights",
            f"data.sampling={data.sampling} already shows rare classes more often; use one of the two",
        )
    if data.eval_set is not None and data.eval_root is None:
        yield "data.eval_root", f"not set; give the files of data.eval_set={data.eval_set} as data.eval_root=PATH"


def image_problems(config: RunConfig) -> Iterator[tuple[str, str]]:
    """Batches, crops, policies, mixing and image sizes."""
    data, augment = config.data, config.augment
    steps = config.optim.microbatches
    if data.global_batch_size % steps:
        yield (
            "data.global_batch_size",
            not_divisible(data.global_batch_size, steps, f"optim.accumulation_steps={steps}"),
        )
    for key in ("scale", "ratio"):
        low, high = getattr(augment, key)
        if low > high:
            yield f"augment.{key}", f"the first value must not be larger than the second; got [{low}, {high}]"
    if augment.scale[1] > 1:
        yield "augment.scale", f"an area cannot be larger than the image's (1.0); got {augment.scale[1]}"
    yield from _rand_augment(config)
    yield from _mixing(config)
    epochs = [epoch for epoch, _ in data.image_size_schedule]
    if epochs != sorted(set(epochs)):
        yield "data.image_size_schedule", f"epochs must increase; got {epochs}"
    if data.image_size_schedule and isinstance(config.model, ViTModel):
        yield (
            "data.image_size_schedule",
            "a ViT has positions for one image size; use data.image_size_schedule=[], or a network without them "
            "(model=resnet50)",
        )
    small = [size for _, size in data.image_size_schedule if size < 32]
    if small and isinstance(config.model, ResNetModel) and config.model.stem == "imagenet":
        yield "data.image_size_schedule", f"{small[0]} is too small for model.stem=imagenet (32 at least)"


def _mixing(config: RunConfig) -> Iterator[tuple[str, str]]:
    """What is wrong on any number of ranks; `build.check_mixing` knows how many there are."""
    augment, batch, steps = config.augment, config.data.global_batch_size, config.optim.microbatches
    if not augment.mixes:
        return
    if batch == steps:
        yield (
            f"augment.{'mixup_alpha' if augment.mixup_alpha else 'cutmix_alpha'}",
            f"mixing needs at least 2 images in a microbatch; data.global_batch_size={batch} with "
            f"optim.accumulation_steps={steps} leaves 1; use data.global_batch_size={2 * batch}, or "
            "augment.mix_probability=0",
        )
    elif augment.mix_mode == "pair" and batch // steps % 2:
        yield "augment.mix_mode", "pair needs an even number of images in a microbatch; use batch or elem"


def _rand_augment(config: RunConfig) -> Iterator[tuple[str, str]]:
    rand = config.augment.rand_augment
    if config.augment.policy != "rand_augment":
        return
    if rand.library == "torchvision":
        for name in ("magnitude_std", "increasing", "probability"):
            if getattr(rand, name) != default_of(rand, name):
                yield f"augment.rand_augment.{name}", "only timm's has it; use augment.rand_augment.library=timm"
    elif rand.magnitude > 10:
        yield "augment.rand_augment.magnitude", f"timm's goes up to 10; got {rand.magnitude}"
