"""Conflicts that involve the resolved value of a switch; all others are in `config/checks/`."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping

from pycls_fast.config.schema import RunConfig, ViTModel
from pycls_fast.optim.choices import optimizers_with
from pycls_fast.precision import LEVELS
from pycls_fast.speed import CATALOGUE, Device, SwitchName
from pycls_fast.strategies import strategy_of

Switches = Mapping[SwitchName, str]
"""The resolved value of every performance switch."""


def conflicts(config: RunConfig, chosen: Switches, device: Device) -> Iterator[str]:
    """Yield one line for each conflict between a switch's resolved value and another setting."""
    mode = chosen[SwitchName.COMPILE_MODE]
    if mode != "default" and chosen[SwitchName.COMPILE] == "off":
        yield f"speed.compile_mode: {mode} does nothing with speed.compile=off; use speed.compile=model"
    if chosen[SwitchName.RECOMPUTE] == "budget" and chosen[SwitchName.COMPILE] == "off":
        yield "speed.recompute: budget is kept by compiled code; use speed.compile=blocks, or speed.recompute=full"
    yield from _graphs_of_parts(config, chosen)
    if chosen[SwitchName.DECODE_SCALE] == "dct" and chosen[SwitchName.DECODE] != "region":
        yield (
            f"speed.decode_scale: dct is not available with speed.decode={chosen[SwitchName.DECODE]}; use "
            "speed.decode=region or speed.decode_scale=full"
        )
    yield from _compiled(chosen)
    compiled, half = chosen[SwitchName.COMPILE], LEVELS[config.precision.name].weights != "float32"
    if strategy_of(config.parallel.name).flattens and half and compiled != "off":
        yield (
            f"speed.compile: {compiled} cannot see inside FairScale's wrappers around norms that stay float32 under "
            f"precision={config.precision.name}; use speed.compile=off or parallel=fsdp"
        )
    yield from _order(config, chosen)
    if chosen[SwitchName.CUDA_GRAPHS] == "on":
        yield from _recorded(config, chosen)
    yield from _without_effect(config, chosen)
    yield from _inside_the_network(config, chosen, device)


def _graphs_of_parts(config: RunConfig, chosen: Switches) -> Iterator[str]:
    """Yield one line for each conflict of compiled code that is replayed as CUDA graphs, which have memory of their
    own."""
    mode = chosen[SwitchName.COMPILE_MODE]
    if mode not in ("reduce-overhead", "max-autotune"):
        return
    instead = "speed.compile_mode=" + ("default" if mode == "reduce-overhead" else "max-autotune-no-cudagraphs")
    if chosen[SwitchName.COMPILE] == "blocks":
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


def _inside_the_network(config: RunConfig, chosen: Switches, device: Device) -> Iterator[str]:
    """Yield one line for each conflict of a switch that has an effect on this kind of network."""
    here = {switch.name for switch in CATALOGUE if config.model.kind in switch.applies_to}
    level, attention = LEVELS[config.precision.name], chosen[SwitchName.ATTENTION]
    if SwitchName.GELU in here and config.speed.gelu == "polynomial" and chosen[SwitchName.COMPILE] == "off":
        yield "speed.gelu: polynomial is for compiled code and does nothing without it; use speed.compile=model"
    conv_stem = isinstance(config.model, ViTModel) and config.model.stem == "conv"
    if conv_stem and config.speed.chosen().get(SwitchName.PATCHES) == "product":
        yield (
            "speed.patches: product is for model.stem=patch, and model.stem=conv has no patches; use "
            "speed.patches=convolution"
        )
    if SwitchName.QKV in here and level.float8 and chosen[SwitchName.QKV] == "fused":
        yield "speed.qkv: fused bypasses the float8 layers of precision=fp8; use speed.qkv=separate"
    if SwitchName.LINEAR in here and level.float8 and chosen[SwitchName.LINEAR] == "products":
        yield "speed.linear: products bypasses the float8 layers of precision=fp8; use speed.linear=torch"
    in_32_bits = device == "cuda" and level.compute == "float32"
    if SwitchName.ATTENTION in here and in_32_bits and attention in ("sdpa_flash", "sdpa_cudnn"):
        yield f"speed.attention: {attention} needs 16 bits on CUDA; use speed.attention=sdpa or precision=amp_bf16"


def _without_effect(config: RunConfig, chosen: Switches) -> Iterator[str]:
    """Yield one line for each switch set by hand that has no effect with this model."""
    by_hand, kind = config.speed.chosen(), config.model.kind
    for switch in CATALOGUE:
        value = by_hand.get(switch.name, switch.reference)
        if kind not in switch.applies_to and value != switch.reference:
            yield (
                f"speed.{switch.name}: {value} is for model.kind={' and '.join(switch.applies_to)} and has no effect "
                f"with model.kind={kind}; use speed.{switch.name}={switch.reference}"
            )
    products = kind == "resnet" and by_hand.get(SwitchName.CONVOLUTION) == "products"
    if products and chosen[SwitchName.MEMORY_FORMAT] == "contiguous":
        yield (
            "speed.convolution: products is for channels-last maps, and with speed.memory_format=contiguous every "
            "convolution is torch's; use speed.memory_format=channels_last"
        )
    attention = by_hand.get(SwitchName.ATTENTION, "sdpa")
    if kind == "timm" and attention not in ("reference", "sdpa"):
        yield (
            f"speed.attention: timm's models choose between reference and sdpa; got {attention}; use "
            "speed.attention=sdpa"
        )


def _compiled(chosen: Switches) -> Iterator[str]:
    """Yield one line for each memory switch that conflicts with compiled code."""
    what = chosen[SwitchName.COMPILE]
    if what == "off":
        return
    if chosen[SwitchName.ACTIVATION_COMPRESSION] == "8bit":
        yield f"speed.activation_compression: 8bit does not work inside speed.compile={what}; use speed.compile=off"
    if chosen[SwitchName.ACTIVATION_OFFLOAD] == "cpu" and what == "model":
        yield "speed.activation_offload: cpu does not work inside speed.compile=model; use speed.compile=blocks"
    if chosen[SwitchName.DROP_PATH_COMPUTE] == "skip":
        yield (
            f"speed.drop_path_compute: skip has different shapes in every step, and speed.compile={what} needs "
            "constant ones; use speed.compile=off or speed.drop_path_compute=multiply"
        )


def _order(config: RunConfig, chosen: Switches) -> Iterator[str]:
    """Yield one line for each stage on the host after one on the device: images are normalised, erased, then mixed."""
    stages = [(SwitchName.NORMALIZE_ON, "normalised")]
    if config.augment.erase_probability > 0:
        stages.append((SwitchName.ERASE_ON, "erased"))
    if config.augment.mixes:
        stages.append((SwitchName.MIX_ON, "mixed"))
    for (before, done), (after, doing) in itertools.pairwise(stages):
        if (chosen[before], chosen[after]) == ("device", "cpu"):
            yield (
                f"speed.{after}: images are {done} before they are {doing}, and speed.{before}=device comes after what "
                f"the CPU does; use speed.{after}=device or speed.{before}=cpu"
            )


def _recorded(config: RunConfig, chosen: Switches) -> Iterator[str]:
    """Yield one line for each setting that conflicts with a step recorded as a CUDA graph."""
    implementation = chosen[SwitchName.OPTIMIZER]
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
    if chosen[SwitchName.COMPILE_MODE] in ("reduce-overhead", "max-autotune"):
        yield (
            f"speed.cuda_graphs: speed.compile_mode={chosen[SwitchName.COMPILE_MODE]} records graphs of its own; use "
            "speed.compile_mode=default or max-autotune-no-cudagraphs"
        )
    level = LEVELS[config.precision.name]
    if level.weights != "float32" and level.masters != "kept":
        yield (
            f"speed.cuda_graphs: precision={config.precision.name} gives the optimizer's weights new memory in every "
            "step; use precision=amp_bf16, bf16_params or fp16_master, or speed.cuda_graphs=off"
        )
    for switch, value, why, way_out in _ASKS_THE_HOST:
        if chosen[switch] == value:
            yield f"speed.cuda_graphs: speed.{switch}={value} {why}; use speed.{switch}={way_out}"


# Switch, value, why it cannot be recorded, the value to use.
_ASKS_THE_HOST = (
    (SwitchName.METRICS, "step", "has the host read every loss", "interval"),
    (SwitchName.OPTIMIZER_COMPILE, "on", "keeps its lr on the host", "off"),
    (SwitchName.DROP_PATH_COMPUTE, "skip", "has different shapes in every step", "multiply"),
    (SwitchName.RECOMPUTE, "full", "reads the state of random generators", "off"),
    (SwitchName.RECOMPUTE, "selective", "reads the state of random generators", "off"),
    (SwitchName.ACTIVATION_OFFLOAD, "cpu", "keeps activations on the host", "none"),
    (SwitchName.PARAM_OFFLOAD, "cpu", "updates the weights on the host", "none"),
)
