"""The edge: configuration values become plain keyword arguments, names become functions. Configuration stops here."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path

import torch
from torch import nn
from torch.optim import Optimizer

from pycls_fast import optim, speed
from pycls_fast.config.schema import AdamW, ResNetModel, RunConfig, ViTModel
from pycls_fast.counter import counter_seed
from pycls_fast.data import (
    EvalSampler,
    EvalTransform,
    ImageDataset,
    ImageLoader,
    Mixer,
    Prepare,
    Source,
    SyntheticSource,
    TrainSampler,
    TrainTransform,
    make_loader,
    open_folder,
    write_digits,
)
from pycls_fast.errors import UserError
from pycls_fast.losses import BinaryCrossEntropy, CrossEntropy, Loss
from pycls_fast.models import ClassToken, LearnedPositions, ResNet, VisionTransformer
from pycls_fast.parallel import World
from pycls_fast.speed import SwitchName

Switches = Mapping[SwitchName, str]

# Streams of randomness that must not repeat one another's draws.
_INITIALISATION, _SYNTHETIC_TRAIN, _SYNTHETIC_VAL = 1, 2, 3


def switches(config: RunConfig, device: torch.device) -> Switches:
    """The value of every performance switch.

    Raises:
        UserError: a switch that this device cannot run.
    """
    kind: speed.Device = "cuda" if device.type == "cuda" else "cpu"
    return speed.resolve(config.speed.preset, config.speed.chosen(), kind)


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


def num_classes(config: RunConfig, source: Source) -> int:
    """Outputs of the model: as configured, else as many as the data has classes.

    Raises:
        UserError: fewer outputs than classes.
    """
    found = len(source.classes)
    chosen = config.model.num_classes
    if chosen is not None and chosen < found:
        raise UserError(
            f"model.num_classes: {chosen} outputs for data with {found} classes; leave it out to take {found}"
        )
    return chosen or found


def model(config: RunConfig, classes: int, chosen: Switches) -> nn.Module:
    """The network with its initial weights, the same on every rank, on the CPU in float32."""
    torch.manual_seed(counter_seed(config.seed, _INITIALISATION))
    settings = config.model
    if isinstance(settings, ViTModel):
        return VisionTransformer(
            image_size=config.data.image_size,
            patch_size=settings.patch_size,
            width=settings.width,
            depth=settings.depth,
            heads=settings.heads,
            mlp_width=settings.mlp_width,
            num_classes=classes,
            classifier=settings.classifier,
            positions=settings.positions,
            drop_path=settings.drop_path,
            attention=chosen[SwitchName.ATTENTION],  # type: ignore[arg-type]  # a Literal in the schema
        )
    assert isinstance(settings, ResNetModel)
    return ResNet(
        depth=settings.depth,
        num_classes=classes,
        stem=settings.stem,
        zero_init_last_gamma=settings.zero_init_last_gamma,
        drop_path=settings.drop_path,
    )


def train_loader(config: RunConfig, source: Source, world: World, *, start_step: int, steps: int) -> ImageLoader:
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
    dataset = ImageDataset(source, transform, seed=config.seed, training=True)
    return _loader(config, dataset, sampler, world)


def eval_loader(config: RunConfig, source: Source, world: World) -> ImageLoader:
    """This rank's share of a split, every image once over all ranks."""
    augment = config.augment
    transform = EvalTransform(
        image_size=config.data.image_size,
        crop_ratio=augment.eval_crop_ratio,
        interpolation=augment.interpolation,
    )
    batch_size = config.data.eval_batch_size or microbatch_size(config, world)
    sampler = EvalSampler(len(source), batch_size=batch_size, rank=world.rank, world_size=world.size)
    return _loader(config, ImageDataset(source, transform, seed=config.seed, training=False), sampler, world)


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


def prepare(config: RunConfig, device: torch.device) -> Prepare:
    """uint8 images on the device to the model's input."""
    return Prepare(config.data.mean, config.data.std, erase_value=config.augment.erase_value, device=device)


def mixer(config: RunConfig) -> Mixer | None:
    """Mixup and CutMix, or None when both are off."""
    augment = config.augment
    made = Mixer(
        mixup_alpha=augment.mixup_alpha,
        cutmix_alpha=augment.cutmix_alpha,
        switch_probability=augment.mix_switch_probability,
        probability=augment.mix_probability,
    )
    return made if made.enabled else None


def loss(config: RunConfig) -> Loss:
    """The training loss."""
    if config.loss.name == "bce":
        return BinaryCrossEntropy(config.loss.label_smoothing, config.loss.bce_reduction)
    return CrossEntropy(config.loss.label_smoothing)


def peak_lr(config: RunConfig) -> float:
    """`optim.lr`, scaled linearly with the global batch where `optim.lr_batch_size` is set (Goyal et al. 2017)."""
    reference = config.optim.lr_batch_size
    return config.optim.lr if reference is None else config.optim.lr * config.data.global_batch_size / reference


def schedule(config: RunConfig, steps_per_epoch: int) -> optim.Schedule:
    """The learning-rate curve over `schedule.epochs`, whatever `schedule.max_steps` says."""
    settings = config.schedule
    return optim.Schedule(
        lr=peak_lr(config),
        total_steps=settings.epochs * steps_per_epoch,
        warmup_steps=round(settings.warmup_epochs * steps_per_epoch),
        warmup_start_factor=settings.warmup_start_factor,
        final_factor=settings.final_factor,
        shape=settings.name,
    )


def optimizer(config: RunConfig, network: nn.Module, chosen: Switches) -> Optimizer:
    """The optimizer over the network's parameter groups."""
    settings = config.optim
    groups = optim.parameter_groups(
        network,
        weight_decay=settings.weight_decay,
        decay_norms=settings.decay_norms,
        decay_biases=settings.decay_biases,
        decay_embeddings=settings.decay_embeddings,
        embeddings=(ClassToken, LearnedPositions),
    )
    implementation = chosen[SwitchName.OPTIMIZER]
    lr = peak_lr(config)
    if isinstance(settings, AdamW):
        return optim.adamw(groups, lr=lr, betas=settings.betas, eps=settings.eps, implementation=implementation)
    return optim.sgd(
        groups, lr=lr, momentum=settings.momentum, nesterov=settings.nesterov, implementation=implementation
    )


def ema(config: RunConfig, network: nn.Module, chosen: Switches) -> optim.Ema | None:
    """The average of the weights, or None without `optim.ema_decay`."""
    settings = config.optim
    if settings.ema_decay is None:
        return None
    return optim.Ema(
        network, decay=settings.ema_decay, warmup=settings.ema_warmup, implementation=chosen[SwitchName.EMA]
    )


def autocast(config: RunConfig, device: torch.device) -> Callable[[], AbstractContextManager[None]]:
    """The context of forward passes.

    Each entry is a new context with an empty cache of cast weights, so the optimizer's changes are seen.
    """
    dtype = {"fp32": None, "amp_bf16": torch.bfloat16, "amp_fp16": torch.float16}[config.precision.name]
    if dtype is None:
        return nullcontext
    return partial(torch.autocast, device.type, dtype=dtype)


def loss_scaler(config: RunConfig, device: torch.device) -> torch.amp.GradScaler:
    """Dynamic loss scaling for float16 (Micikevicius et al. 2018, section 3.2); does nothing for other formats."""
    settings = config.precision
    return torch.amp.GradScaler(
        device.type,
        init_scale=settings.loss_scale_start,
        growth_factor=settings.loss_scale_growth,
        backoff_factor=settings.loss_scale_backoff,
        growth_interval=settings.loss_scale_interval,
        enabled=settings.name == "amp_fp16",
    )


def set_backend(config: RunConfig, device: torch.device) -> None:
    """Process-wide settings of torch: threads, float32 products in full float32, determinism where asked for."""
    if config.runtime.threads is not None:
        torch.set_num_threads(config.runtime.threads)
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = False
    torch.backends.cudnn.benchmark = device.type == "cuda" and not config.runtime.deterministic
    if config.runtime.deterministic:
        if device.type == "cuda" and "CUBLAS_WORKSPACE_CONFIG" not in os.environ:
            raise UserError(
                "runtime.deterministic: cuBLAS is deterministic only with a fixed workspace; "
                "start with CUBLAS_WORKSPACE_CONFIG=:4096:8 in the environment"
            )
        torch.use_deterministic_algorithms(True)
