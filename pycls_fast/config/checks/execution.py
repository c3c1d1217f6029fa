"""Checks of how the training runs: precision, switches, and the strategy for several ranks."""

from __future__ import annotations

from collections.abc import Iterator

from pycls_fast.config.checks.helpers import default_of
from pycls_fast.config.schema import Parallel, ResNetModel, RunConfig, TimmModel
from pycls_fast.optim.choices import optimizers_with
from pycls_fast.precision import LEVELS
from pycls_fast.strategies import strategy_of


def precision_problems(config: RunConfig) -> Iterator[tuple[str, str]]:
    """What a precision cannot compute, and a loss scale that begins below its floor."""
    precision = config.precision
    scales = LEVELS[precision.name].scaled and precision.loss_scale == "dynamic"
    if scales and precision.loss_scale_floor > precision.loss_scale_start:
        yield (
            "precision.loss_scale_floor",
            f"must not be larger than precision.loss_scale_start={precision.loss_scale_start:g}; got "
            f"{precision.loss_scale_floor:g}",
        )
    if config.precision.name == "fp8" and isinstance(config.model, ResNetModel):
        yield "precision", "fp8 is for linear layers and model.kind=resnet has only its head; use precision=amp_bf16"


def switch_problems(config: RunConfig) -> Iterator[tuple[str, str]]:
    """Speed that conflict with each other or with the model."""
    speed = config.speed
    recomputes = speed.recompute != "off"
    if speed.activation_compression == "8bit" and recomputes:
        yield (
            "speed.activation_compression",
            f"8bit conflicts with speed.recompute={speed.recompute}: blocks would run again from rounded inputs; use "
            "speed.activation_compression=none or speed.recompute=off",
        )
    if speed.activation_offload == "cpu" and speed.recompute in ("selective", "budget"):
        yield (
            "speed.activation_offload",
            f"cpu cannot offload what speed.recompute={speed.recompute} keeps; use speed.recompute=full or "
            "speed.activation_offload=none",
        )
    if config.parallel.recompute_every > 1 and speed.recompute not in ("full", "selective"):
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
    if config.runtime.watchdog and config.speed.compile != "off":
        yield (
            "runtime.watchdog",
            f"cannot see inside compiled code (speed.compile={config.speed.compile}); use speed.compile=off with it",
        )


def strategy_problems(config: RunConfig) -> Iterator[tuple[str, str]]:
    """Settings of `parallel` that have no effect or conflict."""
    yield from _exchange(config)
    yield from _without_effect(config.parallel)
    yield from _sync_batchnorm(config)
    yield from _half_weights(config)


def _exchange(config: RunConfig) -> Iterator[tuple[str, str]]:
    """How gradients are exchanged: compression, a static graph."""
    chosen, name, precision = config.parallel, config.parallel.name, config.precision.name
    replicates, level = strategy_of(name).replicates, LEVELS[precision]
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
    if chosen.static_graph and chosen.compression == "powersgd" and config.optim.microbatches > 1:
        yield (
            "parallel.static_graph",
            "takes one more exchange than powersgd counts with optim.accumulation_steps above 1; use "
            "parallel.static_graph=false",
        )


def _without_effect(chosen: Parallel) -> Iterator[tuple[str, str]]:
    """Settings of another strategy or compression than the chosen one."""
    name, facts = chosen.name, strategy_of(chosen.name)
    for key in ("shard_degree", "replicate_degree"):
        if getattr(chosen, key) is not None and not facts.has_groups:
            yield (
                f"parallel.{key}",
                (f"is for parallel=hsdp; use parallel.{key}=null or parallel=hsdp (got parallel={name})"),
            )
    for key in ("powersgd_rank", "powersgd_start_step"):
        default = default_of(chosen, key)
        if chosen.compression != "powersgd" and getattr(chosen, key) != default:
            yield (
                f"parallel.{key}",
                f"is for parallel.compression=powersgd; use parallel.{key}={default} with "
                f"parallel.compression={chosen.compression}",
            )
    prefetched = default_of(chosen, "prefetch_units")
    if chosen.prefetch_units != prefetched and not facts.has_dtensors:
        yield (
            "parallel.prefetch_units",
            f"is for parallel=fsdp and hsdp; use parallel.prefetch_units={prefetched} with parallel={name}",
        )
    if not chosen.reshard_after_forward and not facts.shards_weights:
        yield (
            "parallel.reshard_after_forward",
            f"false is for strategies that shard; use parallel.reshard_after_forward=true or parallel=fsdp (got "
            f"parallel={name})",
        )


def _sync_batchnorm(config: RunConfig) -> Iterator[tuple[str, str]]:
    model = config.model
    if not config.parallel.sync_batchnorm or isinstance(model, ResNetModel):
        return
    if isinstance(model, TimmModel):
        yield (
            "parallel.sync_batchnorm",
            "is for model.kind=resnet, and vit with model.stem=conv; timm's batch norms may include an activation, "
            "which would be lost; use parallel.sync_batchnorm=false",
        )
    elif model.stem == "patch":
        yield (
            "parallel.sync_batchnorm",
            "model.kind=vit has no batch norm with model.stem=patch; use parallel.sync_batchnorm=false",
        )


def _half_weights(config: RunConfig) -> Iterator[tuple[str, str]]:
    name, precision = config.parallel.name, config.precision.name
    level = LEVELS[precision]
    if strategy_of(name).shards_weights and level.weights != "float32" and level.masters == "none":
        masters = "fp16_master" if level.weights == "float16" else "bf16_params"
        yield (
            "precision",
            f"{precision} keeps no float32 weights, and the shards of parallel={name} are float32; use "
            f"precision={masters}, which computes in the same format, or parallel=ddp",
        )


def fairscale_problems(config: RunConfig) -> Iterator[tuple[str, str]]:
    """What FairScale's strategies cannot run with."""
    strategy, precision, name = config.parallel.name, config.precision.name, config.optim.name
    facts = strategy_of(strategy)
    if facts.flattens:
        if not config.optim.elementwise:
            usable = optimizers_with(lambda optimizer: optimizer.elementwise)
            yield (
                "optim.name",
                f"{name} needs the shapes of weights, which parallel={strategy} flattens; use optim={usable}, or "
                "parallel=ddp",
            )
        if precision == "fp8":
            yield "precision", f"fp8 conflicts with parallel={strategy}; use precision=amp_bf16 or parallel=fsdp"
    if facts.shards == "state":
        if LEVELS[precision].weights != "float32":
            yield (
                "precision",
                f"{precision} keeps weights separate from the network's, but {strategy} shards the network's "
                "own; use precision=amp_bf16 or amp_fp16, or parallel=ddp",
            )
        if not config.optim.sends_state:
            yield (
                "optim.name",
                f"{name}'s state cannot be sent from rank to rank, which {strategy} does to save it; use "
                "optim=adamw, or parallel=ddp",
            )
