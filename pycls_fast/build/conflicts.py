"""Conflicts that involve the resolved value of a switch; all others are in `config/checks/`."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from pycls_fast.config.schema import RunConfig, ViTModel
from pycls_fast.optim.choices import optimizers_with
from pycls_fast.precision import LEVELS
from pycls_fast.speed import SWITCHES, Device, Speed
from pycls_fast.strategies import strategy_of


def conflicts(config: RunConfig, chosen: Speed, device: Device) -> Iterator[str]:
    """Yield one line for each conflict between a switch's resolved value and another setting."""
    mode = chosen.compile_mode
    if mode != "default" and chosen.compile == "off":
        yield f"speed.compile_mode: {mode} does nothing with speed.compile=off; use speed.compile=model"
    if chosen.recompute == "budget" and chosen.compile == "off":
        yield "speed.recompute: budget is kept by compiled code; use speed.compile=blocks, or speed.recompute=full"
    yield from _graphs_of_parts(config, chosen)
    if chosen.decode_scale == "dct" and chosen.decode != "region":
        yield (
            f"speed.decode_scale: dct is not available with speed.decode={chosen.decode}; use "
            "speed.decode=region or speed.decode_scale=full"
        )
    yield from _compiled(chosen)
    compiled, half = chosen.compile, LEVELS[config.precision.name].weights != "float32"
    if strategy_of(config.parallel.name).flattens and half and compiled != "off":
        yield (
            f"speed.compile: {compiled} cannot see inside FairScale's wrappers around norms that stay float32 under "
            f"precision={config.precision.name}; use speed.compile=off or parallel=fsdp"
        )
    yield from _order(config, chosen)
    if chosen.cuda_graphs == "on":
        yield from _recorded(config, chosen)
    yield from _without_effect(config, chosen)
    yield from _inside_the_network(config, chosen, device)


def _graphs_of_parts(config: RunConfig, chosen: Speed) -> Iterator[str]:
    """Yield one line for each conflict of compiled code that is replayed as CUDA graphs, which have memory of their
    own."""
    mode = chosen.compile_mode
    if mode not in ("reduce-overhead", "max-autotune"):
        return
    instead = "speed.compile_mode=" + ("default" if mode == "reduce-overhead" else "max-autotune-no-cudagraphs")
    if chosen.compile == "blocks":
        # Blocks share their code, and a graph the addresses of one block's weights.
        yield f"speed.compile_mode: {mode} would record a graph for each block; use speed.compile=model or {instead}"
    if config.optim.microbatches > 1:
        yield (
            f"speed.compile_mode: {mode} keeps gradients in memory of CUDA graphs, which the next microbatch overwrites"
            f"; use optim.accumulation_steps=1 or {instead}"
        )
    if strategy_of(config.parallel.name).shards_weights:
        yield (
            f"speed.compile_mode: {mode} needs weights that stay where they are, and parallel={config.parallel.name} "
            f"gathers them into new memory; use {instead}"
        )


def _inside_the_network(config: RunConfig, chosen: Speed, device: Device) -> Iterator[str]:
    """Yield one line for each conflict of a switch that has an effect on this kind of network."""
    here = {switch.name for switch in SWITCHES.values() if config.model.kind in switch.models}
    level, attention = LEVELS[config.precision.name], chosen.attention
    if "gelu" in here and config.speed.gelu == "polynomial" and chosen.compile == "off":
        yield "speed.gelu: polynomial is for compiled code and does nothing without it; use speed.compile=model"
    conv_stem = isinstance(config.model, ViTModel) and config.model.stem == "conv"
    if conv_stem and config.speed.by_hand.get("patches") == "product":
        yield (
            "speed.patches: product is for model.stem=patch, and model.stem=conv has no patches; use "
            "speed.patches=convolution"
        )
    if "qkv" in here and level.float8 and chosen.qkv == "fused":
        yield "speed.qkv: fused bypasses the float8 layers of precision=fp8; use speed.qkv=separate"
    if "linear" in here and level.float8 and chosen.linear == "products":
        yield "speed.linear: products bypasses the float8 layers of precision=fp8; use speed.linear=torch"
    in_32_bits = device == "cuda" and level.compute == "float32"
    if "attention" in here and in_32_bits and attention in ("sdpa_flash", "sdpa_cudnn"):
        yield f"speed.attention: {attention} needs 16 bits on CUDA; use speed.attention=sdpa or precision=amp_bf16"


def _without_effect(config: RunConfig, chosen: Speed) -> Iterator[str]:
    """Yield one line for each switch set by hand that has no effect with this model."""
    by_hand, kind = config.speed.by_hand, config.model.kind
    for switch in SWITCHES.values():
        value = by_hand.get(switch.name, switch.reference)
        if kind not in switch.models and value != switch.reference:
            yield (
                f"speed.{switch.name}: {value} is for model.kind={' and '.join(switch.models)} and has no effect "
                f"with model.kind={kind}; use speed.{switch.name}={switch.reference}"
            )
    products = kind == "resnet" and by_hand.get("convolution") == "products"
    if products and chosen.memory_format == "contiguous":
        yield (
            "speed.convolution: products is for channels-last maps, and with speed.memory_format=contiguous every "
            "convolution is torch's; use speed.memory_format=channels_last"
        )
    attention = by_hand.get("attention", "sdpa")
    if kind == "timm" and attention not in ("reference", "sdpa"):
        yield (
            f"speed.attention: timm's models choose between reference and sdpa; got {attention}; use "
            "speed.attention=sdpa"
        )


def _compiled(chosen: Speed) -> Iterator[str]:
    """Yield one line for each memory switch that conflicts with compiled code."""
    what = chosen.compile
    if what == "off":
        return
    if chosen.activation_compression == "8bit":
        yield f"speed.activation_compression: 8bit does not work inside speed.compile={what}; use speed.compile=off"
    if chosen.activation_offload == "cpu" and what == "model":
        yield "speed.activation_offload: cpu does not work inside speed.compile=model; use speed.compile=blocks"
    if chosen.drop_path_compute == "skip":
        yield (
            f"speed.drop_path_compute: skip has different shapes in every step, and speed.compile={what} needs "
            "constant ones; use speed.compile=off or speed.drop_path_compute=multiply"
        )


def _order(config: RunConfig, chosen: Speed) -> Iterator[str]:
    """Yield one line for each stage on the host after one on the device: images are normalised, erased, then mixed."""
    stages = [("normalize_on", "normalised")]
    if config.augment.erase_probability > 0:
        stages.append(("erase_on", "erased"))
    if config.augment.mixes:
        stages.append(("mix_on", "mixed"))
    for (before, done), (after, doing) in itertools.pairwise(stages):
        if (getattr(chosen, before), getattr(chosen, after)) == ("device", "cpu"):
            yield (
                f"speed.{after}: images are {done} before they are {doing}, and speed.{before}=device comes after what "
                f"the CPU does; use speed.{after}=device or speed.{before}=cpu"
            )


def _recorded(config: RunConfig, chosen: Speed) -> Iterator[str]:
    """Yield one line for each setting that conflicts with a step recorded as a CUDA graph."""
    implementation = chosen.optimizer
    if implementation not in config.optim.capturable:
        usable = optimizers_with(lambda optimizer: "fused" in optimizer.capturable)
        yield (
            f"speed.cuda_graphs: on needs an optimizer that reads its lr on the device, {usable} with "
            f"speed.optimizer=fused; got optim.name={config.optim.name} with {implementation}; use "
            "speed.cuda_graphs=off"
        )
    if config.optim.microbatches > 1:
        yield (
            "speed.cuda_graphs: on records one microbatch a step, and the host draws for each; use "
            "optim.accumulation_steps=1 or speed.cuda_graphs=off"
        )
    if config.data.image_size_schedule:
        yield (
            "speed.cuda_graphs: on records images of one size and data.image_size_schedule changes it; use "
            "speed.cuda_graphs=off or data.image_size_schedule=[]"
        )
    if config.runtime.watchdog:
        yield "speed.cuda_graphs: runtime.watchdog asks the host in every step; use runtime.watchdog=false"
    if chosen.compile_mode in ("reduce-overhead", "max-autotune"):
        yield (
            f"speed.cuda_graphs: speed.compile_mode={chosen.compile_mode} records graphs of its own; use "
            "speed.compile_mode=default or max-autotune-no-cudagraphs"
        )
    level = LEVELS[config.precision.name]
    if level.weights != "float32" and level.masters != "kept":
        yield (
            f"speed.cuda_graphs: precision={config.precision.name} gives the optimizer's weights new memory in every "
            "step; use precision=amp_bf16, bf16_params or fp16_master, or speed.cuda_graphs=off"
        )
    for switch, value, why, way_out in _ASKS_THE_HOST:
        if getattr(chosen, switch) == value:
            yield f"speed.cuda_graphs: speed.{switch}={value} {why}; use speed.{switch}={way_out}"


# Switch, value, why it cannot be recorded, the value to use.
_ASKS_THE_HOST = (
    ("metrics", "step", "has the host read every loss", "interval"),
    ("optimizer_compile", "on", "keeps its lr on the host", "off"),
    ("drop_path_compute", "skip", "has different shapes in every step", "multiply"),
    ("recompute", "full", "reads the state of random generators", "off"),
    ("recompute", "selective", "reads the state of random generators", "off"),
    ("activation_offload", "cpu", "keeps activations on the host", "none"),
    ("param_offload", "cpu", "updates the weights on the host", "none"),
)
