"""Where and in which formats a run computes: ranks, switches, precision, torch's settings."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import torch

from pycls_fast import precision, speed
from pycls_fast.config.schema import RunConfig, TimmModel, ViTModel
from pycls_fast.errors import UserError
from pycls_fast.parallel import World, keep_in_float32, start_world
from pycls_fast.speed import SwitchName

Switches = Mapping[SwitchName, str]
"""The value in force of every performance switch."""

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


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
    if isinstance(config.model, TimmModel):
        yield from _impossible_for_timm(config)
    if not isinstance(config.model, ViTModel):
        return
    if level(config).float8 and chosen[SwitchName.QKV] == "fused":
        yield "speed.qkv: fused goes around the float8 layers of precision=fp8; use speed.qkv=separate"
    if attention in ("sdpa_flash", "sdpa_cudnn") and device == "cuda" and level(config).compute == "float32":
        yield f"speed.attention: {attention} needs 16 bits on CUDA; use speed.attention=sdpa or precision=amp_bf16"


def _impossible_for_timm(config: RunConfig) -> Iterator[str]:
    """A line for each switch set by hand that reaches into our own modules, of which timm's model has none."""
    by_hand = config.speed.chosen()
    for switch in speed.CATALOGUE:
        value = by_hand.get(switch.name, switch.reference)
        if "timm" not in switch.applies_to and value != switch.reference:
            yield (
                f"speed.{switch.name}: {value} is for {' and '.join(switch.applies_to)} of this project and not for "
                f"model.kind=timm; use speed.{switch.name}={switch.reference}"
            )
    attention = by_hand.get(SwitchName.ATTENTION, "sdpa")
    if attention not in ("reference", "sdpa"):
        yield f"speed.attention: timm's models choose between reference and sdpa; got {attention}; use sdpa"


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


def level(config: RunConfig) -> precision.Level:
    """The precision level."""
    return precision.LEVELS[config.precision.name]


def compute_dtype(config: RunConfig) -> torch.dtype:
    """What matrix products are computed in (for `fp8`: those of its parts that are not float8)."""
    return DTYPES[level(config).compute]


def autocast(config: RunConfig, device: torch.device) -> Callable[[], AbstractContextManager[None]]:
    """The context of forward passes.

    Each entry is a new context with an empty cache of cast weights, so the optimizer's changes are seen.
    """
    kind = level(config).autocast
    if kind is None:
        return nullcontext
    keep_in_float32(device)
    return partial(torch.autocast, device.type, dtype=DTYPES[kind])


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
