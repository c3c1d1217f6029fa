"""What depends on the machine: ranks, precision, torch's process-wide settings, cores, and every switch's value."""

from __future__ import annotations

import math
import os
import shutil
import sysconfig
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import torch

from pycls_fast import precision, speed
from pycls_fast.config import scheduler
from pycls_fast.config.compose import import_modules
from pycls_fast.config.conflicts import switch_problems
from pycls_fast.config.run import RunConfig
from pycls_fast.data import native
from pycls_fast.errors import UserError, refuse
from pycls_fast.models.choices import ViTModel
from pycls_fast.parallel.launch import choose_device, keep_freed_memory, need_cuda, start_world
from pycls_fast.parallel.precision import keep_in_float32
from pycls_fast.parallel.world import World
from pycls_fast.speed import Device, Speed

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


@contextmanager
def world(config: RunConfig) -> Iterator[World]:
    """The ranks of the run, joined inside the context; each has imported the user's own modules."""
    if config.runtime.deterministic:
        # Sums of NVSwitch (NVLS) may differ from run to run. torch's old NCCL back end avoids them too, but only if its
        # deterministic mode is on before ranks connect.
        os.environ.setdefault("NCCL_ALGO", "^NVLS")
    with start_world(config.runtime.device, config.parallel) as ranks:
        import_modules(config.imports)
        yield ranks


def alone(config: RunConfig) -> World:
    """This process by itself, though it may be one of several ranks, on the device that it has as such; it has
    imported the user's own modules."""
    device = choose_device(config.runtime.device, int(os.environ.get("LOCAL_RANK", "0")))
    if device.type == "cuda":
        torch.cuda.set_device(device)
    import_modules(config.imports)
    return World(0, 1, device)


def device_kind(device: torch.device) -> Device:
    """The kind of device by which presets choose: everything except CUDA counts as a CPU."""
    return "cuda" if device.type == "cuda" else "cpu"


def level(config: RunConfig) -> precision.Level:
    return precision.LEVELS[config.precision.name]


def compute_dtype(config: RunConfig) -> torch.dtype:
    """The format of matrix products (for `fp8`: of those that are not in float8)."""
    return DTYPES[level(config).compute]


def autocast(config: RunConfig, device: torch.device) -> Callable[[], AbstractContextManager[None]]:
    """The context manager of forward passes.

    Each call returns a new context with an empty cache of cast weights, so the optimizer's changes take effect.
    """
    kind = level(config).autocast
    if kind is None:
        return nullcontext
    keep_in_float32(device)
    return partial(torch.autocast, device.type, dtype=DTYPES[kind])


def set_backend(config: RunConfig, device: torch.device, switches: Speed) -> None:
    """Apply process-wide settings: threads, malloc, float32 products in float32 or TF32, determinism if configured. A
    `UserError` for TF32 that the device does not have."""
    _set_threads(config.runtime.threads, updates_on_host=switches.param_offload == "cpu")
    keep_freed_memory(switches.allocator == "keep")
    tf32 = level(config).tf32
    if tf32:
        need_cuda(device, "precision: tf32", "precision=fp32", (8, 0))
    torch.set_float32_matmul_precision("high" if tf32 else "highest")
    torch.backends.cudnn.allow_tf32 = tf32
    torch.backends.cudnn.benchmark = device.type == "cuda" and not config.runtime.deterministic
    # Also reset: a sweep runs several configurations in one process. (The call imports Inductor.)
    if torch.are_deterministic_algorithms_enabled() != config.runtime.deterministic:
        torch.use_deterministic_algorithms(config.runtime.deterministic)


# The number of threads before a run of this process set it.
_threads_before: list[int] = []


def _set_threads(count: int | None, *, updates_on_host: bool) -> None:
    by_torchrun = "TORCHELASTIC_RUN_ID" in os.environ and os.environ.get("OMP_NUM_THREADS") == "1"
    if count is None and updates_on_host and by_torchrun:
        # Its default of one thread would leave the other cores idle while the optimizer updates the weights.
        count = cores_per_rank()
    if count is None and cpu_limit() is not None and "OMP_NUM_THREADS" not in os.environ:
        # torch counts cores, but a container's limit is on CPU time: beyond it the kernel throttles all threads.
        count = min(_threads_before[0] if _threads_before else torch.get_num_threads(), cores_per_rank())
    if count is None:
        if _threads_before:
            torch.set_num_threads(_threads_before.pop())
        return
    if not _threads_before:
        _threads_before.append(torch.get_num_threads())
    torch.set_num_threads(count)


def cores() -> int:
    """Number of CPU cores that the run may use: its CPU affinity, or a lower CPU limit."""
    allowed = len(os.sched_getaffinity(0))
    limit = cpu_limit()
    return allowed if limit is None else min(allowed, limit)


def cores_per_rank() -> int:
    """This rank's share of `cores()`, at least 1."""
    # Ranks of a node share its cores, but a scheduler may have assigned each task its own.
    own = os.environ.get("SLURM_CPUS_PER_TASK") if scheduler.is_task() else None
    return max(min(cores(), int(own)) if own else cores() // int(os.environ.get("LOCAL_WORLD_SIZE", "1")), 1)


def cpu_limit(file: Path = Path("/sys/fs/cgroup/cpu.max")) -> int | None:
    """The container's CPU quota in cores (`docker run --cpus`, a pod's `limits.cpu`; the kernel's
    admin-guide/cgroup-v2), rounded up; None without one."""
    try:
        quota, period = file.read_text(encoding="utf-8").split()
        return math.ceil(int(quota) / int(period))
    except (OSError, ValueError):
        # No limit: the file is missing or says "max".
        return None


# What compiled code saves on a GPU (timm's and torchtitan's published tables: 1.07 to 1.9x), a GPU's operations a
# second, seconds of compiling, and the operations of a step below which a GPU waits for the host: a thousand kernels
# take about 5 ms to launch.
_GPU_SAVES = 0.2
_GPU_FLOPS = 4e14
_GPU_COMPILING_SECONDS = 60.0
_GPU_SMALL_STEP = 2e12


def switches(config: RunConfig, device: torch.device) -> Speed:
    """The value of every performance switch; a `UserError` for one that this device cannot run, or that conflicts with
    another setting."""
    kind = device_kind(device)
    resolved = speed.resolve(config.speed, kind, config.optim, in_16_bits=level(config).in_16_bits)
    resolved = _replace_unavailable(config, resolved)
    if "compile" not in config.speed.by_hand and resolved.compile != "off":
        # Explicit settings win over the preset's.
        uncompiled = resolved.replace(compile="off")
        in_the_way = set(switch_problems(config, resolved, kind)) - set(switch_problems(config, uncompiled, kind))
        if in_the_way or not (_compiles_once(config, kind) and has_compiler(kind)):
            resolved = uncompiled
    if "gelu" not in config.speed.by_hand and resolved.compile == "off":
        # The polynomial is for compiled code: the start table would name a switch that does nothing.
        resolved = resolved.replace(gelu="torch")
    refuse(f"{key}: {message}" for key, message in switch_problems(config, resolved, kind))
    return resolved


def _replace_unavailable(config: RunConfig, resolved: Speed) -> Speed:
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
    if name == "region":
        return native.available()
    return name != "simplejpeg" or find_spec(name) is not None


def _compiles_once(config: RunConfig, kind: Device) -> bool:
    """Whether the run can be compiled: one image size, no emulated float8, no wrappers of FairScale, and on a CPU,
    where it was not timed, no shards."""
    strategy = config.parallel.facts
    return (
        (strategy.shards == "nothing" or (strategy.has_dtensors and kind == "cuda"))
        and not config.data.image_size_schedule
        and not (level(config).float8 and config.precision.fp8_emulate)
    )


def compile_for_gpu(config: RunConfig, switches: Speed, world: World, *, images: float, flops: float) -> Speed:
    """The preset's switches, which compile, for a GPU and this much work: a few steps are not compiled, small ones are
    replayed as CUDA graphs. The run trains on so many `images` in all, each with a forward pass of `flops`."""
    if 3 * flops * images / world.size / _GPU_FLOPS * _GPU_SAVES < _GPU_COMPILING_SECONDS:
        off = switches.replace(compile="off")
        return switches if any(switch_problems(config, off, "cuda")) else off
    step = 3 * flops * config.data.global_batch_size / (world.data_size * config.optim.microbatches)
    if "compile_mode" in config.speed.by_hand or step > _GPU_SMALL_STEP:
        return switches
    replayed = switches.replace(compile="model", compile_mode="reduce-overhead")
    return switches if any(switch_problems(config, replayed, "cuda")) else replayed


def compiles(config: RunConfig, switches: Speed) -> bool:
    """Whether parts of a training step are compiled, so that their operations cannot be counted."""
    in_parts = switches.cross_entropy == "fused" or switches.optimizer_compile == "on" or config.optim.compiles_itself
    return in_parts or switches.compile != "off"


def has_compiler(kind: Device) -> bool:
    """Whether torch.compile finds what it needs: Python.h, and a compiler for Inductor (C++, for a CPU) or Triton (C,
    for its kernel launchers on CUDA)."""
    if kind == "cuda":
        commands = [os.environ["CC"]] if "CC" in os.environ else ["gcc", "clang"]
    else:
        # It may be set to nothing, which finds no compiler.
        commands = os.environ.get("CXX", "g++").split()[:1]
    header = Path(sysconfig.get_path("include", scheme="posix_prefix")) / "Python.h"
    return any(shutil.which(command) for command in commands) and header.is_file()


def need_compiler(device: torch.device, what: str, instead: str) -> None:
    """Refuse `what` where there is no compiler for it, and propose what to take `instead`."""
    kind = device_kind(device)
    if has_compiler(kind):
        return
    compiler, package = ("C compiler (gcc or clang)", "gcc") if kind == "cuda" else ("C++ compiler", "g++")
    raise UserError(
        f"{what} needs a {compiler} and Python's headers on {'CUDA' if kind == 'cuda' else 'a CPU'} and did not find "
        f"both; install {package} and python3-dev, or use {instead}"
    )
