"""Device settings of a run: ranks, switches, precision, torch's process-wide settings."""

from __future__ import annotations

import logging
import os
import shutil
import sys
import sysconfig
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import torch

from pycls_fast import precision, speed
from pycls_fast.build.conflicts import Switches, conflicts
from pycls_fast.build.cpu_cores import cores_per_rank, cpu_limit
from pycls_fast.build.imports import import_modules
from pycls_fast.config.schema import RunConfig
from pycls_fast.data import native
from pycls_fast.errors import UserError
from pycls_fast.parallel import World, keep_freed_memory, keep_in_float32, start_world
from pycls_fast.speed import SwitchName
from pycls_fast.strategies import strategy_of

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


@contextmanager
def world(config: RunConfig) -> Iterator[World]:
    """The ranks of the run, joined inside the context; each has imported the user's own modules.

    Raises:
        UserError: see `parallel.start_world` and `import_modules`.
    """
    with start_world(
        device=config.runtime.device,
        backend=config.parallel.backend,
        timeout_seconds=config.parallel.timeout_seconds,
        strategy=config.parallel.name,
        shard_degree=config.parallel.shard_degree,
        replicate_degree=config.parallel.replicate_degree,
    ) as ranks:
        import_modules(config.imports)
        yield ranks


def strategy(config: RunConfig, world: World) -> str:
    """The name of the resolved strategy, a key of `STRATEGIES`."""
    name = config.parallel.name
    if strategy_of(name).replicates:
        return "ddp" if world.size > 1 else "single"
    return name


def switches(config: RunConfig, device: torch.device) -> Switches:
    """The value of every performance switch.

    Raises:
        UserError: this device cannot run a switch's value, or the value conflicts with another setting.
    """
    kind: speed.Device = "cuda" if device.type == "cuda" else "cpu"
    resolved = speed.resolve(
        config.speed.preset,
        config.speed.chosen(),
        kind,
        config.optim.name,
        in_16_bits=level(config).in_16_bits,
        sharded=strategy_of(config.parallel.name).has_dtensors,
    )
    _give_way(config, resolved)
    in_float8 = level(config).float8 and kind == "cuda" and not config.precision.fp8_emulate
    if config.speed.compile is None and config.speed.preset == "fast" and in_float8:
        # Scales and casts, each a kernel of its own, would take longer than the products save.
        resolved[SwitchName.COMPILE] = "blocks"
    if config.speed.compile is None and resolved[SwitchName.COMPILE] != "off":
        # Explicit settings win over the preset's.
        uncompiled = {**resolved, SwitchName.COMPILE: "off"}
        in_the_way = set(conflicts(config, resolved, kind)) - set(conflicts(config, uncompiled, kind))
        if in_the_way or not (_compiles_once(config) and has_compiler(kind)):
            resolved = uncompiled
    lines = list(conflicts(config, resolved, kind))
    if lines:
        raise UserError(*lines)
    return resolved


def _give_way(config: RunConfig, resolved: dict[SwitchName, str]) -> None:
    """Replace preset values that are not available here by the best that is, in place, so that the start table is true.

    `speed.resolve` does the same with optimizers.
    """
    if config.speed.decode is None and not has_decoder(resolved[SwitchName.DECODE]):
        resolved[SwitchName.DECODE] = "simplejpeg" if has_decoder("simplejpeg") else "pillow"
    if config.speed.qkv is None and level(config).float8:
        # A joined product would go around the float8 layers.
        resolved[SwitchName.QKV] = "separate"
    if config.speed.convolution is None and resolved[SwitchName.MEMORY_FORMAT] == "contiguous":
        resolved[SwitchName.CONVOLUTION] = "torch"
    written_out = config.speed.attention is None and resolved[SwitchName.ATTENTION] == "products"
    if written_out and config.model.kind == "timm":
        # timm's own attention, which is as much faster than the fused kernel's backward pass.
        resolved[SwitchName.ATTENTION] = "reference"


def has_decoder(name: str) -> bool:
    """Whether this machine has what a value of the switch `decode` needs."""
    if name == "region":
        return native.available()
    return name != "simplejpeg" or find_spec(name) is not None


def _compiles_once(config: RunConfig) -> bool:
    """Whether the run can be compiled: unsharded network, one image size, no watchdog hooks."""
    return (
        strategy_of(config.parallel.name).shards == "nothing"
        and not config.data.image_size_schedule
        and not config.runtime.watchdog
    )


def has_compiler(kind: speed.Device) -> bool:
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
    kind: speed.Device = "cuda" if device.type == "cuda" else "cpu"
    if has_compiler(kind):
        return
    compiler, package = ("C compiler (gcc or clang)", "gcc") if kind == "cuda" else ("C++ compiler", "g++")
    raise UserError(
        f"{what} needs a {compiler} and Python's headers on {'CUDA' if kind == 'cuda' else 'a CPU'} and did not find "
        f"both; install {package} and python3-dev, or use {instead}"
    )


def level(config: RunConfig) -> precision.Level:
    """The precision level."""
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


def _is_not_about_cuda_home(record: logging.LogRecord) -> bool:
    return not str(record.msg).startswith("No CUDA runtime is found, using CUDA_HOME")


def set_backend(config: RunConfig, device: torch.device) -> None:
    """Apply process-wide settings: threads, malloc, float32 products in float32 or TF32, determinism if configured.

    Raises:
        UserError: TF32 or determinism is not possible in this process, or as `switches`.
    """
    # Compiling for a CPU prints it where CUDA's compiler is installed.
    logging.getLogger("torch.utils.cpp_extension").addFilter(_is_not_about_cuda_home)
    chosen = switches(config, device)
    _set_threads(config.runtime.threads, updates_on_host=chosen[SwitchName.PARAM_OFFLOAD] == "cpu")
    keep_freed_memory(chosen[SwitchName.ALLOCATOR] == "keep")
    tf32 = level(config).tf32
    if tf32 and (device.type != "cuda" or torch.cuda.get_device_capability(device) < (8, 0)):
        raise UserError("precision: tf32 needs CUDA from Ampere (compute capability 8.0) on; use precision=fp32")
    torch.set_float32_matmul_precision("high" if tf32 else "highest")
    torch.backends.cudnn.allow_tf32 = tf32
    torch.backends.cudnn.benchmark = device.type == "cuda" and not config.runtime.deterministic
    if config.runtime.deterministic and device.type == "cuda" and "CUBLAS_WORKSPACE_CONFIG" not in os.environ:
        raise UserError(
            "runtime.deterministic: cuBLAS is deterministic only with a fixed workspace; "
            "start with CUBLAS_WORKSPACE_CONFIG=:4096:8 in the environment"
        )
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
