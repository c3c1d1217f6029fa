"""The value of every performance switch on this machine, and what the machine has for them: decoders, a compiler."""

from __future__ import annotations

import os
import shutil
import sys
import sysconfig
from importlib.util import find_spec
from pathlib import Path

import torch

from pycls_fast import speed
from pycls_fast.build.batches import microbatch_size
from pycls_fast.build.device import device_kind, level
from pycls_fast.config.conflicts import switch_problems
from pycls_fast.config.run import RunConfig, ViTModel
from pycls_fast.data import native
from pycls_fast.errors import UserError
from pycls_fast.parallel import World
from pycls_fast.speed import Device, Speed
from pycls_fast.strategies import strategy_of

# What compiled code saves on a GPU (timm's and torchtitan's published tables: 1.07 to 1.9x), a GPU's operations a
# second, seconds of compiling, and the operations of a step below which a GPU waits for the host: a thousand kernels
# take about 5 ms to launch.
_GPU_SAVES = 0.2
_GPU_FLOPS = 4e14
_GPU_COMPILING_SECONDS = 60.0
_GPU_SMALL_STEP = 2e12


def switches(config: RunConfig, device: torch.device) -> Speed:
    """The value of every performance switch.

    Raises:
        UserError: this device cannot run a switch's value, or the value conflicts with another setting.
    """
    kind = device_kind(device)
    resolved = speed.resolve(
        config.speed,
        kind,
        config.optim,
        in_16_bits=level(config).in_16_bits,
        sharded=strategy_of(config.parallel.name).has_dtensors,
    )
    resolved = _give_way(config, resolved)
    if "compile" not in config.speed.by_hand and resolved.compile != "off":
        # Explicit settings win over the preset's.
        uncompiled = resolved.replace(compile="off")
        in_the_way = set(switch_problems(config, resolved, kind)) - set(switch_problems(config, uncompiled, kind))
        if in_the_way or not (_compiles_once(config, kind) and has_compiler(kind)):
            resolved = uncompiled
    if "gelu" not in config.speed.by_hand and resolved.compile == "off":
        # The polynomial is for compiled code: the start table would name a switch that does nothing.
        resolved = resolved.replace(gelu="torch")
    lines = [f"{key}: {message}" for key, message in switch_problems(config, resolved, kind)]
    if lines:
        raise UserError(*lines)
    return resolved


def _give_way(config: RunConfig, resolved: Speed) -> Speed:
    """Replace preset values that are not available here by the best that is, so that the start table is true.

    `speed.resolve` does the same with optimizers.
    """
    kind, instead = config.model.kind, {}
    if not has_decoder(resolved.decode):
        instead["decode"] = "simplejpeg" if has_decoder("simplejpeg") else "pillow"
    if level(config).float8:
        # A joined product would go around the float8 layers.
        instead["qkv"] = "separate"
    if config.parallel.tensor_degree > 1:
        instead |= {"qkv": "separate", "layout": "batch_first", "linear": "torch"}
    if resolved.compile == "blocks" and kind != "vit":
        # Their blocks have many shapes, each with code of its own, and timm's have a drop-path rate each. Sharded, the
        # whole is compiled in parts, from gather to gather.
        instead["compile"] = "model"
    if isinstance(config.model, ViTModel) and config.model.stem == "conv":
        instead["patches"] = "convolution"
    if resolved.memory_format == "contiguous":
        instead["convolution"] = "torch"
    if resolved.attention == "products" and kind == "timm":
        # timm's own attention, which is as much faster than the fused kernel's backward pass.
        instead["attention"] = "reference"
    by_hand = config.speed.by_hand
    return resolved.replace(**{name: value for name, value in instead.items() if name not in by_hand})


def has_decoder(name: str) -> bool:
    """Whether this machine has what a value of the switch `decode` needs."""
    if name == "region":
        return native.available()
    return name != "simplejpeg" or find_spec(name) is not None


def _compiles_once(config: RunConfig, kind: Device) -> bool:
    """Whether the run can be compiled: one image size, no emulated float8, no wrappers of
    FairScale, and on a CPU, where it was not timed, no shards."""
    strategy = strategy_of(config.parallel.name)
    return (
        (strategy.shards == "nothing" or (strategy.has_dtensors and kind == "cuda"))
        and not config.data.image_size_schedule
        and not (level(config).float8 and config.precision.fp8_emulate)
    )


def compile_for_gpu(config: RunConfig, chosen: Speed, world: World, *, images: int, flops: float) -> Speed:
    """The switches as the preset has them for a GPU and this much work: none compiled for a few steps, small steps
    replayed as CUDA graphs.

    Args:
        images: that the run trains on, in all.
        flops: operations of a forward pass of one image.
    """
    if world.device.type != "cuda" or "compile" in config.speed.by_hand or chosen.compile == "off":
        return chosen
    if 3 * flops * images / world.size / _GPU_FLOPS * _GPU_SAVES < _GPU_COMPILING_SECONDS:
        off = chosen.replace(compile="off", compile_mode="default")
        return chosen if any(switch_problems(config, off, "cuda")) else off
    step = 3 * flops * microbatch_size(config, world)
    if "compile_mode" in config.speed.by_hand or step > _GPU_SMALL_STEP:
        return chosen
    replayed = chosen.replace(compile="model", compile_mode="reduce-overhead")
    return chosen if any(switch_problems(config, replayed, "cuda")) else replayed


def has_compiler(kind: Device) -> bool:
    """Whether torch.compile finds what it needs: Python.h, and a compiler for Inductor (C++, for a CPU) or Triton (C,
    for its kernel launchers on CUDA)."""
    if kind == "cuda":
        commands = [os.environ["CC"]] if "CC" in os.environ else ["gcc", "clang"]
    else:
        commands = [os.environ.get("CXX", "clang++" if sys.platform == "darwin" else "g++").split()[0]]
    header = Path(sysconfig.get_path("include", scheme="posix_prefix")) / "Python.h"
    return any(shutil.which(command) for command in commands) and header.is_file()


def need_compiler(device: torch.device, what: str, instead: str) -> None:
    """Check that code can be compiled on this machine.

    Raises:
        UserError: `what` needs a compiler; the message proposes `instead`.
    """
    kind = device_kind(device)
    if has_compiler(kind):
        return
    compiler, package = ("C compiler (gcc or clang)", "gcc") if kind == "cuda" else ("C++ compiler", "g++")
    raise UserError(
        f"{what} needs a {compiler} and Python's headers on {'CUDA' if kind == 'cuda' else 'a CPU'} and did not find "
        f"both; install {package} and python3-dev, or use {instead}"
    )
