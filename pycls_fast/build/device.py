"""Device settings of a run: ranks, precision, torch's process-wide settings."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path

import torch

from pycls_fast import precision, speed
from pycls_fast.config import tasks
from pycls_fast.config.compose import import_modules
from pycls_fast.config.run import RunConfig
from pycls_fast.errors import UserError
from pycls_fast.parallel import World, keep_freed_memory, keep_in_float32, start_world
from pycls_fast.speed import Speed
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
        tensor_degree=config.parallel.tensor_degree,
    ) as ranks:
        import_modules(config.imports)
        yield ranks


def strategy(config: RunConfig, world: World) -> str:
    """The name of the resolved strategy, a key of `STRATEGIES`."""
    return strategy_name(config, world.size)


def strategy_name(config: RunConfig, ranks: int) -> str:
    """`strategy` for a number of ranks."""
    name = config.parallel.name
    if strategy_of(name).replicates:
        return "ddp" if ranks > 1 else "single"
    return name


def device_kind(device: torch.device) -> speed.Device:
    """The kind of device by which presets choose: everything except CUDA counts as a CPU."""
    return "cuda" if device.type == "cuda" else "cpu"


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


def set_backend(config: RunConfig, device: torch.device, chosen: Speed) -> None:
    """Apply process-wide settings: threads, malloc, float32 products in float32 or TF32, determinism if configured.

    Raises:
        UserError: TF32 or determinism is not possible in this process.
    """
    # Compiling for a CPU prints it where CUDA's compiler is installed.
    logging.getLogger("torch.utils.cpp_extension").addFilter(_is_not_about_cuda_home)
    _set_threads(config.runtime.threads, updates_on_host=chosen.param_offload == "cpu")
    keep_freed_memory(chosen.allocator == "keep")
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


def cores() -> int:
    """Number of CPU cores that the run may use: its CPU affinity, or a lower CPU limit."""
    allowed = len(os.sched_getaffinity(0))
    limit = cpu_limit()
    return allowed if limit is None else min(allowed, limit)


def cores_per_rank() -> int:
    """This rank's share of `cores()`, at least 1."""
    # Ranks of a node share its cores, but a scheduler may have assigned each task its own.
    own = os.environ.get("SLURM_CPUS_PER_TASK") if tasks.is_task() else None
    return max(min(cores(), int(own)) if own else cores() // int(os.environ.get("LOCAL_WORLD_SIZE", "1")), 1)


def cpu_limit(file: Path = Path("/sys/fs/cgroup/cpu.max")) -> int | None:
    """The container's CPU quota in cores (`docker run --cpus`, a pod's `limits.cpu`), rounded up; None without one.

    Args:
        file: the limit of the container's control group (the kernel's admin-guide/cgroup-v2).
    """
    try:
        quota, period = file.read_text(encoding="utf-8").split()
        return math.ceil(int(quota) / int(period))
    except (OSError, ValueError):
        # No limit: the file is missing or says "max".
        return None
