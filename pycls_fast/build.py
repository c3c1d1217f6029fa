"""The edge: configuration values become plain keyword arguments, names become functions. Configuration stops here."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path

import torch
from torch import nn
from torch.optim import Optimizer

from pycls_fast import optim, parallel, precision, speed
from pycls_fast.config import schema
from pycls_fast.config.schema import ResNetModel, RunConfig, ViTModel
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
from pycls_fast.parallel import World, keep_in_float32, start_world, use_float8
from pycls_fast.speed import SwitchName

Switches = Mapping[SwitchName, str]

# Streams of randomness that must not repeat one another's draws.
_INITIALISATION, _SYNTHETIC_TRAIN, _SYNTHETIC_VAL = 1, 2, 3


def world(config: RunConfig) -> AbstractContextManager[World]:
    """The ranks of the run, joined inside the context.

    Raises:
        UserError: see `parallel.start_world`.
    """
    return start_world(
        device=config.runtime.device,
        backend=config.parallel.backend,
        timeout_seconds=config.parallel.timeout_seconds,
        strategy=config.parallel.name,
    )


def switches(config: RunConfig, device: torch.device) -> Switches:
    """The value of every performance switch.

    Raises:
        UserError: a switch that this device cannot run, or that does not go together with the rest.
    """
    kind: speed.Device = "cuda" if device.type == "cuda" else "cpu"
    resolved = speed.resolve(config.speed.preset, config.speed.chosen(), kind, config.optim.name)
    lines = list(_impossible(config, resolved, kind))
    if lines:
        raise UserError(*lines)
    return resolved


def _impossible(config: RunConfig, chosen: Switches, device: speed.Device) -> Iterator[str]:
    """A line for each pair of settings that cannot be together, of which one is a switch's value in force."""
    mode, attention = chosen[SwitchName.COMPILE_MODE], chosen[SwitchName.ATTENTION]
    if mode != "default" and chosen[SwitchName.COMPILE] == "off":
        yield f"speed.compile_mode: {mode} does nothing with speed.compile=off; use speed.compile=blocks"
    if mode in ("reduce-overhead", "max-autotune") and config.optim.accumulation_steps > 1:
        yield (
            f"speed.compile_mode: {mode} keeps gradients in memory of CUDA graphs, which the next microbatch overwrites"
            "; use optim.accumulation_steps=1 or speed.compile_mode=max-autotune-no-cudagraphs"
        )
    yield from _impossible_compiled(chosen)
    if not isinstance(config.model, ViTModel):
        return
    if level(config).float8 and chosen[SwitchName.QKV] == "fused":
        yield "speed.qkv: fused goes around the float8 layers of precision=fp8; use speed.qkv=separate"
    if attention in ("sdpa_flash", "sdpa_cudnn") and device == "cuda" and level(config).compute == "float32":
        yield f"speed.attention: {attention} needs 16 bits on CUDA; use speed.attention=sdpa or precision=amp_bf16"


def _impossible_compiled(chosen: Switches) -> Iterator[str]:
    """A line for each memory switch that compiled code does not go with."""
    what = chosen[SwitchName.COMPILE]
    if what == "off":
        return
    if chosen[SwitchName.ACTIVATION_COMPRESSION] == "8bit":
        yield f"speed.activation_compression: 8bit does not see into speed.compile={what}; use speed.compile=off"
    if chosen[SwitchName.ACTIVATION_OFFLOAD] == "cpu" and what == "model":
        yield "speed.activation_offload: cpu does not see into speed.compile=model; use speed.compile=blocks"
    if chosen[SwitchName.DROP_PATH_COMPUTE] == "skip":
        yield (
            f"speed.drop_path_compute: skip has other shapes in every step and speed.compile={what} constant ones; use "
            "speed.compile=off or speed.drop_path_compute=multiply"
        )


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
            layout=chosen[SwitchName.LAYOUT],  # type: ignore[arg-type]
            qkv=chosen[SwitchName.QKV],  # type: ignore[arg-type]
            drop_path_compute=chosen[SwitchName.DROP_PATH_COMPUTE],  # type: ignore[arg-type]
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


def prepare(config: RunConfig, device: torch.device, chosen: Switches) -> Prepare:
    """uint8 images on the device to the model's input."""
    return Prepare(
        config.data.mean,
        config.data.std,
        dtype=_DTYPES[level(config).weights],
        erase_value=config.augment.erase_value,
        memory_format=chosen[SwitchName.MEMORY_FORMAT],  # type: ignore[arg-type]  # a Literal in the schema
        device=device,
    )


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


def optimizer(
    config: RunConfig, network: nn.Module, chosen: Switches, masters: optim.MasterWeights | None = None
) -> Optimizer:
    """The optimizer over the network's parameter groups, or over the masters of what is in them."""
    settings = config.optim
    units: list[tuple[str, nn.Module]] = network.units()  # type: ignore[operator]  # every model names its units
    groups = optim.parameter_groups(
        network,
        weight_decay=settings.weight_decay,
        decay_norms=settings.decay_norms,
        decay_biases=settings.decay_biases,
        decay_embeddings=settings.decay_embeddings,
        embeddings=(ClassToken, LearnedPositions),
        units=units,
        layer_decay=settings.layer_decay,
        split_hidden=isinstance(settings, schema.Muon),
    )
    if masters is not None:
        groups = masters.groups(groups)

    def make(groups: list[optim.Group]) -> Optimizer:
        made = _optimizer(settings, groups, peak_lr(config), chosen[SwitchName.OPTIMIZER])
        if chosen[SwitchName.OPTIMIZER_COMPILE] == "on":
            _need_compiler(groups, "speed.optimizer_compile: on", "speed.optimizer_compile=off")
            optim.compile_step(made)
        return made

    if chosen[SwitchName.PARAM_OFFLOAD] == "none":
        return make(groups)
    if masters is not None:
        raise UserError(
            f"speed.param_offload: cpu keeps float32 weights of its own and precision={config.precision.name} others; "
            "use speed.param_offload=none or a precision with float32 weights, like amp_bf16"
        )
    return optim.HostOptimizer(groups, make)


def _optimizer(settings: schema.Optim, groups: list[optim.Group], lr: float, implementation: str) -> Optimizer:
    if isinstance(settings, schema.SGD):
        return optim.sgd(
            groups, lr=lr, momentum=settings.momentum, nesterov=settings.nesterov, implementation=implementation
        )
    if isinstance(settings, schema.AdamW):
        return optim.adamw(groups, lr=lr, betas=settings.betas, eps=settings.eps, implementation=implementation)
    if isinstance(settings, schema.LAMB):
        return optim.lamb(groups, lr=lr, betas=settings.betas, eps=settings.eps, implementation=implementation)
    if isinstance(settings, schema.Lion):
        return optim.lion(groups, lr=lr, betas=settings.betas, implementation=implementation)
    if isinstance(settings, schema.Adafactor):
        return optim.adafactor(
            groups,
            lr=lr,
            momentum=settings.momentum,
            momentum_dtype=settings.momentum_dtype,
            beta2_decay=settings.beta2_decay,
            beta2_cap=settings.beta2_cap,
            min_factored=settings.min_factored,
            clip_threshold=settings.clip_threshold,
        )
    if isinstance(settings, schema.Muon):
        return optim.muon(
            groups,
            lr=lr,
            momentum=settings.momentum,
            nesterov=settings.nesterov,
            newton_schulz_steps=settings.newton_schulz_steps,
            betas=settings.betas,
            eps=settings.eps,
        )
    _need_compiler(groups, "optim.name: adamw8bit", "optim=adamw")
    return optim.adamw8bit(groups, lr=lr, betas=settings.betas, eps=settings.eps)


def _need_compiler(groups: list[optim.Group], what: str, instead: str) -> None:
    # On CUDA torch brings its own (Triton).
    on_cpu = groups[0]["params"][0].device.type == "cpu"
    if on_cpu and not any(map(shutil.which, (os.environ.get("CXX", "g++"), "g++", "clang++"))):
        raise UserError(f"{what} needs a C++ compiler on a CPU and found none; install g++ or use {instead}")


def ema(
    config: RunConfig, network: nn.Module, chosen: Switches, masters: optim.MasterWeights | None = None
) -> optim.Ema | None:
    """The average of the weights, or None without `optim.ema_decay`."""
    settings = config.optim
    if settings.ema_decay is None:
        return None
    return optim.Ema(
        network,
        decay=settings.ema_decay,
        warmup=settings.ema_warmup,
        implementation=chosen[SwitchName.EMA],
        masters=masters,
        every=settings.ema_every_steps,
    )


_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


def level(config: RunConfig) -> precision.Level:
    """The precision level."""
    return precision.LEVELS[config.precision.name]


def compute_dtype(config: RunConfig) -> torch.dtype:
    """What matrix products are computed in (for `fp8`: those of its parts that are not float8)."""
    return _DTYPES[level(config).compute]


def lower(config: RunConfig, network: nn.Module, device: torch.device) -> optim.MasterWeights | None:
    """Put a network that is on its device into the precision's format, in place; its masters where it has any.

    Raises:
        UserError: a format that this device does not have.
    """
    chosen = level(config)
    if chosen.float8:
        settings = config.precision
        use_float8(network, device, recipe=settings.fp8_recipe, skip=settings.fp8_skip, emulate=settings.fp8_emulate)
    if chosen.weights == "float32":
        return None
    return optim.MasterWeights(
        network, dtype=_DTYPES[chosen.weights], wide_norms=chosen.wide_norms, kept=chosen.masters == "kept"
    )


def save_activation_memory(config: RunConfig, network: nn.Module, chosen: Switches) -> None:
    """Let a network that is in its format and layout keep less for the backward pass, in place."""
    parallel.save_activation_memory(
        network,
        network.units(),  # type: ignore[operator]  # every model names its units
        recompute=chosen[SwitchName.RECOMPUTE],  # type: ignore[arg-type]  # a Literal in the schema
        recompute_every=config.parallel.recompute_every,
        activation_offload=chosen[SwitchName.ACTIVATION_OFFLOAD],  # type: ignore[arg-type]
        activation_compression=chosen[SwitchName.ACTIVATION_COMPRESSION],  # type: ignore[arg-type]
    )


def autocast(config: RunConfig, device: torch.device) -> Callable[[], AbstractContextManager[None]]:
    """The context of forward passes.

    Each entry is a new context with an empty cache of cast weights, so the optimizer's changes are seen.
    """
    kind = level(config).autocast
    if kind is None:
        return nullcontext
    keep_in_float32(device)
    return partial(torch.autocast, device.type, dtype=_DTYPES[kind])


def loss_scaler(config: RunConfig, device: torch.device) -> torch.amp.GradScaler:
    """Loss scaling for the float16 levels; does nothing for the others."""
    settings = config.precision
    return optim.loss_scaler(
        device.type,
        enabled=level(config).scaled,
        constant=None if settings.loss_scale == "dynamic" else settings.loss_scale,
        start=settings.loss_scale_start,
        growth=settings.loss_scale_growth,
        backoff=settings.loss_scale_backoff,
        interval=settings.loss_scale_interval,
    )


def set_backend(config: RunConfig, device: torch.device) -> None:
    """Process-wide settings of torch: threads, float32 products in full float32 or TF32, determinism where asked for.

    Raises:
        UserError: TF32 or determinism that this process cannot have.
    """
    if config.runtime.threads is not None:
        torch.set_num_threads(config.runtime.threads)
    tf32 = level(config).tf32
    if tf32 and (device.type != "cuda" or torch.cuda.get_device_capability(device) < (8, 0)):
        raise UserError("precision: tf32 needs CUDA from Ampere (compute capability 8.0) on; use precision=fp32")
    torch.set_float32_matmul_precision("high" if tf32 else "highest")
    torch.backends.cudnn.allow_tf32 = tf32
    torch.backends.cudnn.benchmark = device.type == "cuda" and not config.runtime.deterministic
    if config.runtime.deterministic:
        if device.type == "cuda" and "CUBLAS_WORKSPACE_CONFIG" not in os.environ:
            raise UserError(
                "runtime.deterministic: cuBLAS is deterministic only with a fixed workspace; "
                "start with CUBLAS_WORKSPACE_CONFIG=:4096:8 in the environment"
            )
        torch.use_deterministic_algorithms(True)
