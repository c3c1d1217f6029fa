"""Checks that involve several keys: combinations that cannot run, found before anything is built."""

from __future__ import annotations

import math
from collections.abc import Iterator

from pycls_fast.config.schema import AUTO, ResNetModel, RunConfig, Section, TimmModel, ViTModel
from pycls_fast.precision import LEVELS

ONLY_SCORED = "only tools/test_net.py scores it; use data.eval_set=null"


def problems(config: RunConfig, *, needs_data: bool = True, trains: bool = False) -> Iterator[tuple[str, str]]:
    """Yield (key, what is wrong and what to do) for every impossible combination.

    Args:
        config: the configuration.
        needs_data: False if no image is read.
        trains: whether it is used for training, so that its initial weights matter.
    """
    # A resumed run has its weights in its checkpoint.
    if trains and config.weights is None and config.resume in ("auto", "never") and _fine_tunes(config):
        yield "weights", "not set; give what to fine-tune as weights=SOURCE"
    if trains and config.data.eval_set is not None:
        yield "data.eval_set", ONLY_SCORED
    # Every evaluation set except ReaL has its own images.
    needs_data &= trains or config.data.eval_set in (None, "real")
    if needs_data and config.data.source not in ("digits", "synthetic") and config.data.root is None:
        yield (
            "data.root",
            "not set; give the folder that holds train/ and val/ (or one folder per class) as data.root=PATH",
        )
    if trains:
        yield from _trust_ratio(config)
    yield from _source(config)
    yield from _model(config)
    yield from _data(config)
    yield from _schedule(config)
    yield from _loss(config)
    yield from _optim(config)
    yield from _precision(config)
    yield from _switches(config)
    yield from _parallel(config)
    yield from _fairscale(config)


def _fine_tunes(config: RunConfig) -> bool:
    """Whether the settings only make sense with pretrained weights."""
    return config.needs_weights or config.data.normalization == "weights" or config.optim.trainable != ("all",)


def _model(config: RunConfig) -> Iterator[tuple[str, str]]:
    model, size = config.model, config.data.image_size
    if isinstance(model, ViTModel):
        if size % model.patch_size:
            yield "data.image_size", _not_divisible(size, model.patch_size, f"model.patch_size={model.patch_size}")
        if model.width % model.heads:
            yield "model.width", _not_divisible(model.width, model.heads, f"model.heads={model.heads}")
        if model.positions == "sincos2d" and model.width % 4:
            yield "model.width", _not_divisible(model.width, 4, "4, which model.positions=sincos2d needs")
        yield from _vit_parts(model)
    if isinstance(model, ResNetModel):
        if model.stem != "small" and size < 32:
            yield (
                "data.image_size",
                f"{size} is too small for model.stem={model.stem} (32 at least); use model.stem=small",
            )
        if model.depth in (18, 34) and (model.groups, model.width_per_group) != (1, 64):
            yield "model.groups", f"depth {model.depth} has no bottleneck blocks to group or widen; use model.depth=50"
    if isinstance(model, TimmModel):
        yield from _timm_options(model)
    if model.num_classes == 1:
        yield "model.num_classes", "classification needs at least 2 classes; got 1"


# Our settings that replace options of timm's models.
_INSTEAD_OF_TIMM_OPTIONS = {
    "num_classes": "the classes of the data, or model.num_classes, decide it",
    "in_chans": "images are read as RGB, so it is 3",
    "drop_path_rate": "model.drop_path sets it",
    "features_only": "models here end in a classification head",
    "pretrained": "weights=timm:NAME brings weights",
    "pretrained_cfg": "weights=timm:NAME brings weights",
    "pretrained_cfg_overlay": "weights=timm:NAME brings weights",
    "checkpoint_path": "weights=FILE brings weights",
}


def _timm_options(model: TimmModel) -> Iterator[tuple[str, str]]:
    for name in model.options:
        if name in _INSTEAD_OF_TIMM_OPTIONS:
            yield f"model.options.{name}", f"{_INSTEAD_OF_TIMM_OPTIONS[name]}; leave it out (~model.options.{name})"


def _source(config: RunConfig) -> Iterator[tuple[str, str]]:
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


def _vit_parts(model: ViTModel) -> Iterator[tuple[str, str]]:
    if model.stem == "conv":
        if not model.stem_widths or len(model.stem_widths) != len(model.stem_strides):
            yield (
                "model.stem_strides",
                f"needs one stride for each of model.stem_widths, one at least; got {len(model.stem_strides)} for "
                f"{len(model.stem_widths)}",
            )
        elif math.prod(model.stem_strides) != model.patch_size:
            yield (
                "model.stem_strides",
                f"must multiply to model.patch_size={model.patch_size}; got {math.prod(model.stem_strides)}",
            )
    elif model.stem_widths or model.stem_strides:
        yield (
            "model.stem_widths",
            "has no effect with model.stem=patch; use model.stem=conv, or model.stem_widths=[] model.stem_strides=[]",
        )
    if model.classifier == "token" and model.class_token is False:
        yield "model.class_token", "model.classifier=token reads it; use model.class_token=true or classifier=pooled"


def _data(config: RunConfig) -> Iterator[tuple[str, str]]:
    data, augment = config.data, config.augment
    steps = config.optim.accumulation_steps
    if data.global_batch_size % steps:
        yield (
            "data.global_batch_size",
            _not_divisible(data.global_batch_size, steps, f"optim.accumulation_steps={steps}"),
        )
    for key in ("scale", "ratio"):
        low, high = getattr(augment, key)
        if low > high:
            yield f"augment.{key}", f"the first value must not be larger than the second; got [{low}, {high}]"
    if augment.scale[1] > 1:
        yield "augment.scale", f"an area cannot be larger than the image's (1.0); got {augment.scale[1]}"
    yield from _policies(config)
    microbatch = data.global_batch_size // steps
    if (augment.mixup_alpha or augment.cutmix_alpha) and microbatch == 1:
        yield "augment.mixup_alpha", "mixing needs at least 2 images in a microbatch; got data.global_batch_size of 1"
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


def _policies(config: RunConfig) -> Iterator[tuple[str, str]]:
    data, augment = config.data, config.augment
    # Each with the value that turns it off.
    policies = {"rand_augment": "null", "auto_augment": "null", "trivial_augment": "false", "three_augment": "false"}
    chosen = [name for name in policies if getattr(augment, name)]
    for name in chosen[1:]:
        first = chosen[0]
        yield (
            f"augment.{name}",
            f"one policy at a time, and augment.{first} is set, too; use augment.{first}={policies[first]} or "
            f"augment.{name}={policies[name]}",
        )
    policy = augment.rand_augment
    if policy is not None and policy.library == "torchvision":
        for name in ("magnitude_std", "increasing", "probability"):
            if getattr(policy, name) != _default(policy, name):
                yield f"augment.rand_augment.{name}", "only timm's has it; use augment.rand_augment.library=timm"
    if policy is not None and policy.library == "timm" and policy.magnitude > 10:
        yield "augment.rand_augment.magnitude", f"timm's goes up to 10; got {policy.magnitude}"
    if augment.mix_mode == "pair" and data.global_batch_size // config.optim.accumulation_steps % 2:
        yield "augment.mix_mode", "pair needs an even number of images in a microbatch; use batch or elem"


def _schedule(config: RunConfig) -> Iterator[tuple[str, str]]:
    schedule = config.schedule
    if schedule.epochs != AUTO and schedule.warmup_epochs > schedule.epochs:
        yield (
            "schedule.warmup_epochs",
            f"{schedule.warmup_epochs:g} is longer than the training of schedule.epochs={schedule.epochs}; "
            f"use schedule.warmup_epochs={schedule.epochs} or less",
        )
    if (schedule.name == "step") != (schedule.step_epochs is not None):
        needed = schedule.name == "step"
        yield (
            "schedule.step_epochs",
            "not set; give the epochs between two steps (30, say)"
            if needed
            else f"is for schedule=step; use schedule.step_epochs=null with schedule={schedule.name}",
        )
    step_factor = _default(schedule, "step_factor")
    if schedule.name != "step" and schedule.step_factor != step_factor:
        yield (
            "schedule.step_factor",
            f"is for schedule=step; use schedule.step_factor={step_factor} with schedule={schedule.name}",
        )
    if schedule.name in ("step", "constant") and schedule.final_factor:
        yield (
            "schedule.final_factor",
            f"is for schedule=cosine and linear; use schedule.final_factor=0 with schedule={schedule.name}",
        )


def _loss(config: RunConfig) -> Iterator[tuple[str, str]]:
    if config.loss.bce_threshold is not None and config.loss.name != "bce":
        yield "loss.bce_threshold", f"is for loss=bce; use loss.bce_threshold=null with loss={config.loss.name}"
    elif config.loss.bce_threshold is not None and config.loss.class_weights != "none":
        yield (
            "loss.class_weights",
            "weights the shares of a mixed image, which loss.bce_threshold rounds; use one of the two",
        )


def _optim(config: RunConfig) -> Iterator[tuple[str, str]]:
    if config.optim.name == "sgd" and config.optim.nesterov and config.optim.momentum == 0:
        yield "optim.nesterov", "needs optim.momentum larger than 0; use optim.nesterov=false"
    trainable = config.optim.trainable
    if "all" in trainable and len(trainable) > 1:
        yield "optim.trainable", f"all includes everything; remove {trainable[trainable.index('all') - 1]} or all"
    if trainable == ("all",):
        return
    if config.parallel.name in ("fairscale_fsdp", "fairscale_sharded_ddp"):
        yield (
            "optim.trainable",
            f"frozen parts do not work with parallel={config.parallel.name}, which flattens or exchanges all weights "
            "alike; use parallel=ddp or fsdp",
        )
    if config.parallel.sync_batchnorm:
        yield (
            "parallel.sync_batchnorm",
            "would replace the batch norms whose statistics optim.trainable freezes; use parallel.sync_batchnorm=false",
        )


def _trust_ratio(config: RunConfig) -> Iterator[tuple[str, str]]:
    """LAMB's step has the norm of the weights times lr, or Adam's without weight decay (`optim.lamb`)."""
    model, settings = config.model, config.optim
    # Weights from elsewhere are rarely zero; `train/building.py` looks at the head.
    if settings.name != "lamb" or not settings.weight_decay or config.weights is not None:
        return
    for key in ("decay_norms", "decay_biases"):
        if getattr(settings, key):
            yield (
                f"optim.{key}",
                "puts parameters that begin with zeros under the trust ratio of optim=lamb, which hardly changes them; "
                f"use optim.{key}=false",
            )
    if isinstance(model, ViTModel) and model.init == "jax":
        yield (
            "model.init",
            "jax begins the head with zeros, which optim=lamb hardly changes: its steps are in proportion to the "
            "weights; use model.init=trunc_normal",
        )


def _precision(config: RunConfig) -> Iterator[tuple[str, str]]:
    if config.precision.name == "fp8" and isinstance(config.model, ResNetModel):
        yield "precision", "fp8 is for linear layers and model.kind=resnet has only its head; use precision=amp_bf16"


def _switches(config: RunConfig) -> Iterator[tuple[str, str]]:
    speed = config.speed
    recomputes = speed.recompute not in (None, "off")
    if speed.activation_compression == "8bit" and recomputes:
        yield (
            "speed.activation_compression",
            f"8bit conflicts with speed.recompute={speed.recompute}: blocks would run again from rounded inputs; use "
            "speed.activation_compression=none or speed.recompute=off",
        )
    if speed.activation_offload == "cpu" and speed.recompute == "selective":
        yield (
            "speed.activation_offload",
            "cpu cannot offload what speed.recompute=selective keeps; use speed.recompute=full or "
            "speed.activation_offload=none",
        )
    if config.parallel.recompute_every > 1 and not recomputes:
        yield (
            "parallel.recompute_every",
            f"{config.parallel.recompute_every} has no effect without recomputation; add speed.recompute=full or "
            "selective, or use parallel.recompute_every=1",
        )
    if isinstance(config.model, ResNetModel) and speed.drop_path_compute == "skip":
        yield (
            "speed.drop_path_compute",
            "skip would take BatchNorm's statistics from the kept samples only; use speed.drop_path_compute=multiply",
        )
    if config.runtime.watchdog and config.speed.compile not in (None, "off"):
        yield (
            "runtime.watchdog",
            f"cannot see inside compiled code (speed.compile={config.speed.compile}); use speed.compile=off with it",
        )


def _parallel(config: RunConfig) -> Iterator[tuple[str, str]]:
    chosen, precision = config.parallel, config.precision.name
    name, level = chosen.name, LEVELS[precision]
    replicates, gathers = name in ("auto", "ddp"), name in ("fsdp", "hsdp")
    if chosen.compression != "none" and not replicates:
        yield (
            "parallel.compression",
            f"{chosen.compression} is for parallel=ddp; use parallel.compression=none with parallel={name}",
        )
    if chosen.compression == "powersgd" and (level.scaled or level.weights != "float32"):
        yield (
            "parallel.compression",
            f"powersgd carries its compression error from step to step, which a float16 overflow or a half format "
            f"would corrupt (precision={precision}); use precision=amp_bf16 or parallel.compression=bf16",
        )
    if chosen.compression == "fp16" and replicates and not level.scaled:
        yield (
            "parallel.compression",
            f"fp16 needs a scaled loss, and precision={precision} scales none: small gradients would become 0, large "
            "ones infinite; use parallel.compression=bf16, or precision=amp_fp16",
        )
    if chosen.static_graph and not replicates:
        yield "parallel.static_graph", f"is for parallel=ddp; use parallel.static_graph=false with parallel={name}"
    if chosen.static_graph and chosen.compression == "powersgd" and config.optim.accumulation_steps > 1:
        yield (
            "parallel.static_graph",
            "takes one more exchange than powersgd counts with optim.accumulation_steps above 1; use "
            "parallel.static_graph=false",
        )
    for key in ("shard_degree", "replicate_degree"):
        if getattr(chosen, key) is not None and name != "hsdp":
            yield (
                f"parallel.{key}",
                (f"is for parallel=hsdp; use parallel.{key}=null or parallel=hsdp (got parallel={name})"),
            )
    for key in ("powersgd_rank", "powersgd_start_step"):
        default = _default(chosen, key)
        if chosen.compression != "powersgd" and getattr(chosen, key) != default:
            yield (
                f"parallel.{key}",
                f"is for parallel.compression=powersgd; use parallel.{key}={default} with "
                f"parallel.compression={chosen.compression}",
            )
    prefetched = _default(chosen, "prefetch_units")
    if chosen.prefetch_units != prefetched and not gathers:
        yield (
            "parallel.prefetch_units",
            f"is for parallel=fsdp and hsdp; use parallel.prefetch_units={prefetched} with parallel={name}",
        )
    if not chosen.reshard_after_forward and not gathers and name != "fairscale_fsdp":
        yield (
            "parallel.reshard_after_forward",
            f"false is for strategies that shard; use parallel.reshard_after_forward=true or parallel=fsdp (got "
            f"parallel={name})",
        )
    if chosen.sync_batchnorm and isinstance(config.model, TimmModel):
        yield (
            "parallel.sync_batchnorm",
            "is for model.kind=resnet, and vit with model.stem=conv; timm's batch norms may include an activation, "
            "which would be lost; use parallel.sync_batchnorm=false",
        )
    if chosen.sync_batchnorm and isinstance(config.model, ViTModel) and config.model.stem == "patch":
        yield (
            "parallel.sync_batchnorm",
            "model.kind=vit has no batch norm with model.stem=patch; use parallel.sync_batchnorm=false",
        )
    if (gathers or name == "fairscale_fsdp") and level.weights != "float32" and level.masters == "none":
        masters = "fp16_master" if level.weights == "float16" else "bf16_params"
        yield (
            "precision",
            f"{precision} keeps no float32 weights, and the shards of parallel={name} are float32; use "
            f"precision={masters}, which computes in the same format, or parallel=ddp",
        )


# Optimizers that work on flattened weights.
_FLAT_OPTIMIZERS = ("sgd", "adamw", "lion")


def _fairscale(config: RunConfig) -> Iterator[tuple[str, str]]:
    strategy, precision, name = config.parallel.name, config.precision.name, config.optim.name
    if strategy == "fairscale_fsdp":
        if name not in _FLAT_OPTIMIZERS:
            yield (
                "optim.name",
                f"{name} needs the shapes of weights, which parallel=fairscale_fsdp flattens; use optim=adamw, sgd "
                "or lion, or parallel=ddp",
            )
        if precision == "fp8":
            yield "precision", "fp8 conflicts with parallel=fairscale_fsdp; use precision=amp_bf16 or parallel=fsdp"
    if strategy == "fairscale_sharded_ddp":
        if LEVELS[precision].weights != "float32":
            yield (
                "precision",
                f"{precision} keeps weights separate from the network's, but fairscale_sharded_ddp shards the "
                "network's own; use precision=amp_bf16 or amp_fp16, or parallel=ddp",
            )
        if name == "adamw8bit":
            yield (
                "optim.name",
                "adamw8bit's state cannot be sent from rank to rank, which fairscale_sharded_ddp does to save it; use "
                "optim=adamw, or parallel=ddp",
            )


def _default(section: Section, key: str) -> object:
    return type(section).model_fields[key].default


def _not_divisible(value: int, divisor: int, of: str) -> str:
    below = max(value // divisor, 1) * divisor
    return f"{value} is not divisible by {of}; use {below} or {below + divisor}"
