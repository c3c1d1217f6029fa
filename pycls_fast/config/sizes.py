"""Numbers of a configuration that do not fit each other: sizes, degrees, lengths."""

from __future__ import annotations

import math
from collections.abc import Iterator

from pycls_fast.config.keys import as_typed
from pycls_fast.config.run import RunConfig
from pycls_fast.models.choices import ResNetModel, ViTModel
from pycls_fast.strategies import TURNS, Parallel
from pycls_fast.values import AUTO, Size


def _divided(key: str, value: int, divisor: int, of: str) -> Iterator[tuple[str, str]]:
    """The problem if `of` does not divide a value, with the nearest values that it divides."""
    if value % divisor:
        below = max(value // divisor, 1) * divisor
        yield key, f"{value} is not divisible by {of}; use {below} or {below + divisor}"


def _vit_sizes(model: ViTModel, image_size: Size, parallel: Parallel) -> Iterator[tuple[str, str]]:
    for side in dict.fromkeys(image_size):
        yield from _divided("data.image_size", side, model.patch_size, f"model.patch_size={model.patch_size}")
    yield from _divided("model.width", model.width, model.heads, f"model.heads={model.heads}")
    for key, degree, sizes in (
        ("parallel.tensor_degree", parallel.tensor_degree, ("heads", "mlp_width")),
        ("parallel.expert_degree", parallel.expert_degree, ("experts",)),
    ):
        fits = math.gcd(degree, *(getattr(model, size) for size in sizes))
        if fits < degree:
            of = " and ".join(f"model.{size}={getattr(model, size)}" for size in sizes)
            yield key, f"{degree} does not divide {of}; use {key}={fits}"
    stages, turns = parallel.pipeline_degree, TURNS[parallel.pipeline_schedule]
    if stages > 1 and stages * turns > model.depth:
        fits = max(model.depth // turns, 1)
        too_many = f"{stages} ranks with {turns} of a pipeline's stages each are more than model.depth={model.depth}"
        yield "parallel.pipeline_degree", f"{too_many}; use parallel.pipeline_degree={fits}"
    if model.positions == "sincos2d":
        yield from _divided("model.width", model.width, 4, "4, which model.positions=sincos2d needs")
    strides = model.stem_strides
    if model.stem == "conv" and (not strides or len(model.stem_widths) != len(strides)):
        yield "model.stem_strides", "needs one stride for each of model.stem_widths, one at least"
    elif model.stem == "conv" and (product := math.prod(strides)) != model.patch_size:
        yield "model.stem_strides", f"must multiply to model.patch_size={model.patch_size}; got {product}"


def misfits(config: RunConfig) -> Iterator[tuple[str, str]]:
    """Yield (key, what is wrong and what to do) for every number that does not fit another."""
    model, data, augment = config.model, config.data, config.augment
    schedule, parallel = config.schedule, config.parallel
    batch, parts, stages = data.global_batch_size, config.optim.microbatches, parallel.pipeline_degree
    smallest = min(min(size) for size in (data.image_size, *data.training_image_sizes.values()))
    if data.fold >= (data.folds or 1):
        found = f"{data.fold} is none of data.folds={as_typed(data.folds)}, counted from 0"
        yield "data.fold", f"{found}; use data.fold=0 or more data.folds"
    if augment.quarter_turns and any(size.height != size.width for size in data.training_image_sizes.values()):
        yield "augment.quarter_turns", "it turns images, which are not square; use augment.quarter_turns=false"
    if isinstance(model, ViTModel):
        yield from _vit_sizes(model, data.image_size, parallel)
    if isinstance(model, ResNetModel) and model.stem != "small" and smallest < 32:
        yield "data.image_size", f"{smallest} is too small for model.stem={model.stem}; use model.stem=small"
    if model.num_classes == 1:
        yield "model.num_classes", "classification needs at least 2 classes; got 1"
    if config.optim.accumulation_steps != AUTO:
        yield from _divided("optim.accumulation_steps", parts, stages, f"parallel.pipeline_degree={stages}")
    yield from _divided("data.global_batch_size", batch, parts, f"optim.accumulation_steps={parts}")
    # On any number of ranks; `build.check_mixing` knows how many there are.
    if augment.mixes and batch == parts:
        alone = f"{batch} leaves one image in a microbatch, and mixing needs two"
        yield "data.global_batch_size", f"{alone}; use data.global_batch_size={2 * batch} or augment.mix_probability=0"
    if schedule.epochs != AUTO and schedule.warmup_epochs > schedule.epochs:
        longer = f"{schedule.warmup_epochs:g} is longer than the training of schedule.epochs={schedule.epochs}"
        yield "schedule.warmup_epochs", f"{longer}; use schedule.warmup_epochs={schedule.epochs} or less"
