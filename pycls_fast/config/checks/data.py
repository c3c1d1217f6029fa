"""Checks of the data: where images come from, and how they are augmented and batched."""

from __future__ import annotations

from collections.abc import Iterator

from pycls_fast.config.checks.helpers import not_divisible
from pycls_fast.config.schema import ResNetModel, RunConfig, ViTModel


def source_problems(config: RunConfig) -> Iterator[tuple[str, str]]:
    """How images are drawn."""
    sampling = config.data.sampling
    if sampling != "uniform" and config.loss.class_weights != "none":
        yield (
            "loss.class_weights",
            f"data.sampling={sampling} shows rare classes more often, too; use one of the two",
        )


def image_problems(config: RunConfig) -> Iterator[tuple[str, str]]:
    """Batches, crops, policies, mixing and image sizes."""
    data = config.data
    steps = config.optim.microbatches
    if data.global_batch_size % steps:
        yield (
            "data.global_batch_size",
            not_divisible(data.global_batch_size, steps, f"optim.accumulation_steps={steps}"),
        )
    yield from _mixing(config)
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
